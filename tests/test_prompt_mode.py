"""The pass over a prompt on processors that are not Intel's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ssd_generation import DraftingConfig, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from ssd_generation.forward.captured import linear_kernels as kernels
from ssd_generation.forward.captured.linear_kernels import linear_of_few_rows
from ssd_generation.forward.eager import prompt_mode as prompts
from ssd_generation.support.versions import CACHE
from ssd_generation.tuning.acceptance import judge, verify_text
from tiny_models import prompt, tiny_model


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Mock a processor of another maker, on which all matrices are large; return the rows of each kernel call."""
    seen: list[int] = []
    original = linear_of_few_rows

    def kernel_of(weight: Any, bias: Any, rows: int) -> Any:
        kernel = original(weight, bias, rows)
        assert kernel is not None

        def counted(x: torch.Tensor) -> torch.Tensor:
            seen.append(x.shape[:-1].numel())
            return kernel(x)  # type: ignore[no-any-return]

        return counted

    for room in (prompts, kernels):
        monkeypatch.setattr(room, "is_intel", lambda: False)
    monkeypatch.setattr(prompts, "_LARGE", 1)
    monkeypatch.setattr(prompts, "linear_of_few_rows", kernel_of)
    return seen


def test_the_prompt_goes_through_the_faster_kernel_and_the_model_is_left_as_it_was(elsewhere: list[int]) -> None:
    model: Any = tiny_model()
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    ids = prompt(20)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        with prompts.prompt_mode(model, 20):
            found = model(input_ids=ids).logits
        assert elsewhere == [20] * len(linears)
        torch.testing.assert_close(found, expected)
        assert not torch.equal(found, expected) or torch.equal(model(input_ids=ids).logits, expected)
        model(input_ids=ids)
    assert len(elsewhere) == len(linears), "only inside"
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_generation_uses_it_for_the_tokens_that_are_new(elsewhere: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = enable_self_speculative(tiny_model())
    asked: list[int] = []
    original = prompts.prompt_mode

    def mode(model: Any, rows: int, own_kernels: bool = False) -> Any:
        asked.append(rows)
        return original(model, rows)

    config = SelfSpeculativeConfig(SkipConfig(mlp=[1]), DraftingConfig(policy="fixed", max_draft_length=3))
    for is_batch in (False, True):  # the model's check reads its own prompts
        model._check(is_batch)
    monkeypatch.setattr("ssd_generation.decoding.prompt.prompt_mode", mode)
    batch = torch.cat((prompt(9), prompt(9, seed=2)))
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(batch, attention_mask=torch.ones_like(batch), **options)
    elsewhere.clear()
    found = model.generate(batch, attention_mask=torch.ones_like(batch), self_speculative=config, **options)
    assert torch.equal(found, expected)
    assert asked == [18] and 18 in elsewhere
    first = model.generate(
        prompt(9), self_speculative=config, return_dict_in_generate=True, **{**options, "max_new_tokens": 4}
    )
    longer = torch.cat((first.sequences, prompt(5, seed=3)), dim=1)
    model.generate(longer, **{CACHE: first[CACHE]}, self_speculative=config, **options)
    assert asked[1:] == [9, 6], "the last token was not in the cache yet"


@pytest.mark.parametrize("precision", [None, "int8"])
def test_drafts_are_judged_by_it(elsewhere: list[int], monkeypatch: pytest.MonkeyPatch, precision: str | None) -> None:
    model: Any = tiny_model(hidden_size=64, intermediate_size=96)
    config = SelfSpeculativeConfig(SkipConfig(mlp=[1]), precision=precision)
    text = verify_text(model, prompt(40), 10)
    assert elsewhere.count(39) == len([m for m in model.modules() if type(m) is nn.Linear]) - 1, "all but the head"
    elsewhere.clear()
    judged = judge(model, config, text, 4)
    # Drafts from low-bit copies use the copies' own kernel.
    assert bool(elsewhere) == (precision is None)
    assert not any("forward" in module.__dict__ for module in model.modules())
    monkeypatch.setattr(prompts, "is_intel", lambda: True)
    assert judge(model, config, text, 4) == judged


def test_where_it_stays_out_of_the_way(elsewhere: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny_model()
    ids = prompt(6)

    def runs(rows: int = 6) -> int:
        elsewhere.clear()
        with torch.no_grad(), prompts.prompt_mode(model, rows):
            model(input_ids=ids)
        return len(elsewhere)

    assert runs() > 0
    assert runs(prompts._MANY_ROWS + 1) == 0, "the arithmetic takes all the time"
    handle = model.model.layers[0].register_forward_hook(lambda *_: None)
    assert runs() == 0, "a hook"
    handle.remove()
    for dtype in (torch.bfloat16, torch.float16):
        model.to(dtype)
        assert runs() == 0, "in half precision the prompt's pass has the bits of the model's own"
    model.float()
    monkeypatch.setattr(prompts, "_LARGE", 10**9)
    assert runs() == 0, "small matrices"
    monkeypatch.setattr(prompts, "_LARGE", 1)
    monkeypatch.setattr(prompts, "is_intel", lambda: True)
    assert runs() == 0
