"""Hashes by which changed weights are noticed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ssd_generation.generation import prefixes
from ssd_generation.generation.prefixes import digest_of
from ssd_generation.native.codegen.compiler import why_not
from ssd_generation.native.ops.block_hashes import BLOCK, block_hashes
from tiny_models import tiny_model

pytestmark = pytest.mark.skipif(why_not() is not None, reason="no code can be compiled here")


def bytes_of(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8)


def expected(numbers: torch.Tensor) -> np.ndarray[tuple[int, int], np.dtype[np.uint32]]:
    """Return the hashes by NumPy: eight polynomials for each lane, then one in these."""
    words = numbers[: len(numbers) // BLOCK * BLOCK].numpy().view(np.uint32).reshape(-1, BLOCK // 512, 8, 16)
    chains = np.zeros((len(words), 8, 16), dtype=np.uint32)
    for step in range(words.shape[1]):
        chains = chains * np.uint32(0x01000193) + words[:, step]
    total = np.zeros((len(words), 16), dtype=np.uint32)
    for chain in range(8):
        total = total * np.uint32(0x5BD1E995) + chains[:, chain]
    return total


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("count", [0, 5, BLOCK - 1, BLOCK, 3 * BLOCK + 7, 40 * BLOCK])
def test_they_are_what_they_are_said_to_be(count: int, threads: int) -> None:
    torch.set_num_threads(threads)
    numbers = bytes_of(count)
    found = block_hashes(numbers)
    assert found.shape == (count // BLOCK, 16)
    assert np.array_equal(found.numpy().view(np.uint32), expected(numbers))


def test_every_word_that_changes_is_noticed() -> None:
    numbers = bytes_of(BLOCK)
    before = block_hashes(numbers)
    for at in range(0, BLOCK, 97):
        numbers[at] ^= 1 << at % 8
        assert not torch.equal(block_hashes(numbers), before)
        numbers[at] ^= 1 << at % 8
    assert torch.equal(block_hashes(numbers), before)
    swapped = numbers.view(torch.int32).clone()
    swapped[[0, 128]] = swapped[[128, 0]]  # in the same lane of the same chain
    assert not torch.equal(block_hashes(swapped.view(torch.uint8)), before)


@pytest.mark.parametrize("compiled", [True, False], ids=["kernel", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_digest_of_a_model_tells_its_numbers_apart(
    dtype: torch.dtype, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(prefixes, "why_not", lambda: "a test says so")
    made = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
    model, other = (tiny_model("llama", **made).to(dtype) for _ in range(2))
    digest = digest_of(model)
    assert digest == digest_of(other)
    for weight in model.parameters():
        for at in (0, weight.numel() - 1):
            numbers = weight.data.view(-1).view(torch.int16)
            numbers[at] ^= 1
            assert digest_of(model) != digest
            numbers[at] ^= 1
    assert digest_of(model) == digest
    first, second = (model.model.layers[at].mlp.up_proj.weight.data for at in range(2))
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)
    assert digest_of(model) != digest
