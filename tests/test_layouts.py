"""Weights that are not laid out row by row: by columns, with gaps, parts of a larger tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from ssd_generation import DraftingConfig, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from ssd_generation.forward.copies import layer_copy
from ssd_generation.native.ops.quantise import quantise_int8
from tiny_models import even_model, left_padded, prompt
from unpacking import unpack_int8

FIXED = DraftingConfig(policy="fixed", max_draft_length=4)
REQUESTS: dict[str, Any] = {
    "int8": SelfSpeculativeConfig(precision="int8", drafting=FIXED),
    "int4": SelfSpeculativeConfig(precision="int4", drafting=FIXED),
    "auto": "auto",
    "skip": SelfSpeculativeConfig(SkipConfig(attention=[1], mlp=[2]), FIXED),
}


def by_columns(weight: torch.Tensor) -> torch.Tensor:
    return weight.t().contiguous().t()


def with_gaps(weight: torch.Tensor) -> torch.Tensor:
    return torch.stack((weight, torch.full_like(weight, torch.nan)), dim=-1)[..., 0]


def part_of_a_wider_one(weight: torch.Tensor) -> torch.Tensor:
    return torch.cat((weight, torch.full_like(weight, torch.nan)), dim=1)[:, : weight.shape[1]]


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "by columns": by_columns,
    "with gaps": with_gaps,
    "part of a wider one": part_of_a_wider_one,
}


def laid_out(model: PreTrainedModel, layout: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data = layout(parameter.data)
    return enable_self_speculative(model)


@pytest.mark.parametrize(
    ("name", "layout"),
    [*((name, "by columns") for name in REQUESTS), ("int4", "with gaps"), ("auto", "part of a wider one")],
)
def test_text_is_plains(name: str, layout: str) -> None:
    model = laid_out(even_model("llama"), LAYOUTS[layout])
    for inputs in ({"input_ids": prompt(7).repeat(1, 2)}, left_padded([12, 7])):
        for sampled in (False, True):
            texts = []
            for options in ({}, {"self_speculative": REQUESTS[name]}):
                torch.manual_seed(1)
                texts.append(model.generate(**inputs, max_new_tokens=20, do_sample=sampled, **options))
            assert torch.equal(*texts)
            assert model.last_speculation.refusal is None
    assert model.last_speculation.drafted_tokens > 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_are_those_of_the_same_weights_row_by_row(
    precision: str, layout: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = torch.randn(64, 96).to(dtype)
    weight = LAYOUTS[layout](usual)
    assert not weight.is_contiguous()
    for chosen in ({}, {"why_not": lambda: "not here"}):  # by JIT-compiled kernels, and by ATen's
        with monkeypatch.context() as patch:
            for attribute, value in chosen.items():
                patch.setattr(layer_copy, attribute, value)
            one, other = (layer_copy.LowBitCopy([(w, None)], precision) for w in (usual, weight))
            for key, tensor in one.tensors().items():
                assert torch.equal(tensor, other.tensors()[key])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_for_integer_products(layout: str) -> None:
    """Check the packing for processors with AVX-512 VNNI, whatever this one has."""
    weight = torch.randn(32, 64)
    packed, scales = quantise_int8([LAYOUTS[layout](weight)], is_packed=True)
    usual, same = quantise_int8([weight], is_packed=False)
    assert torch.equal(unpack_int8(packed), usual) and torch.equal(scales, same)
