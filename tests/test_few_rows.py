"""A model's own passes over few rows: linear layers by JIT-compiled kernels, which leave no trace on the model."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from ssd_generation import DraftingConfig, LookupConfig, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from ssd_generation.forward.eager import few_rows as module
from ssd_generation.forward.eager.few_rows import MOST_ROWS, FewRowsPart, few_rows
from ssd_generation.forward.pass_plan import PassPlan
from ssd_generation.forward.runners import EagerRunner
from ssd_generation.native.codegen.compiler import why_not
from ssd_generation.support.model_state import state_of
from tiny_models import left_padded, prompt, tiny_model

pytestmark = pytest.mark.skipif(why_not() is not None, reason="no kernels can be compiled here")

NOTHING = SelfSpeculativeConfig(drafting=DraftingConfig(policy="none"))
THREE = DraftingConfig(policy="fixed", max_draft_length=3)
LOOKUP = SelfSpeculativeConfig(lookup=LookupConfig(min_ngram=1), drafting=THREE)
SKIP = SelfSpeculativeConfig(SkipConfig(attention=[1]), drafting=THREE)


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SMALL", 1)


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record the rows and columns of every input to torch's own linear function."""
    seen: list[tuple[int, int]] = []
    linear = nn.functional.linear

    def watched(x: torch.Tensor, *weights: Any) -> torch.Tensor:
        seen.append((x.numel() // x.shape[-1], x.shape[-1]))
        return linear(x, *weights)

    monkeypatch.setattr(nn.functional, "linear", watched)
    return seen


def decoded(model: Any, batch: Any, request: Any = None, new: int = 24, **options: Any) -> Any:
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": new, **options}
    return model.generate(**batch, **options, **({} if request is None else {"self_speculative": request}))


@pytest.mark.parametrize("request_", [NOTHING, LOOKUP, SKIP])
def test_a_batch(request_: Any, by_torch: list[tuple[int, int]]) -> None:
    model: Any = enable_self_speculative(tiny_model())
    batch = left_padded([21, 9, 16])
    plain = decoded(model, batch)
    assert torch.equal(decoded(model, batch, request_), plain)  # also runs the model check
    by_torch.clear()
    assert torch.equal(decoded(model, batch, request_), plain)
    head = 3  # rows of the LM head in the prompt's pass: the last tokens
    assert {rows for rows, _ in by_torch if rows <= MOST_ROWS and rows != 3 * 21} == {head}  # long drafts are wider
    assert len([rows for rows, _ in by_torch if rows == head]) == 1
    assert not any("forward" in vars(each) for each in model.modules())


def test_wide_passes_are_left_to_torch(by_torch: list[tuple[int, int]]) -> None:
    model: Any = enable_self_speculative(tiny_model())
    batch = {"input_ids": prompt(9).expand(MOST_ROWS + 1, -1)}
    plain = decoded(model, batch, new=4)
    assert torch.equal(decoded(model, batch, NOTHING, new=4), plain)
    of_a_step = [rows for rows, _ in by_torch if rows == MOST_ROWS + 1]
    by_torch.clear()
    assert torch.equal(decoded(model, batch, NOTHING, new=4), plain)
    assert len(of_a_step) > 0 and len([rows for rows, _ in by_torch if rows == MOST_ROWS + 1]) > 20


def passed(model: Any, batch: int, width: int) -> torch.Tensor:
    mode = few_rows(model)
    assert mode is not None
    ids = (torch.arange(batch * width) % 50 + 3).view(batch, width)
    with torch.no_grad(), mode:
        logits: torch.Tensor = model(ids).logits
    return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_logits(dtype: torch.dtype) -> None:
    model = tiny_model().to(dtype)
    exact = tiny_model().double()
    ids = (torch.arange(8) % 50 + 3).view(2, 4)
    with torch.no_grad():
        own, right = model(ids).logits.double(), exact(ids).logits
    found = passed(model, 2, 4).double()
    error, errors_of_torch = (found - right).abs().max(), (own - right).abs().max()
    assert 0 < error <= 2 * errors_of_torch


def test_weights_that_change() -> None:
    model: Any = tiny_model()
    mode = few_rows(model)
    assert mode is not None
    ids = prompt(5)
    with torch.no_grad():
        for change in ("in place", "moved", "other"):
            layer = model.model.layers[0].mlp.down_proj
            if change == "in place":
                layer.weight.mul_(1.5)
            elif change == "moved":
                layer.weight.data = layer.weight.data.clone().mul_(1.5)
            else:
                layer.weight = nn.Parameter(layer.weight.detach() * 1.5)
            with mode:
                found = model(ids).logits
            torch.testing.assert_close(found, model(ids).logits, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(passed(model, 1, 5), model((torch.arange(5) + 3)[None]).logits)


def test_weights_of_old_are_let_go() -> None:
    model: Any = tiny_model()
    layer = model.model.layers[0].mlp.down_proj
    numbers = layer.weight.detach().numpy().copy()
    layer.weight.data = torch.from_numpy(numbers)
    held = weakref.ref(numbers)
    del numbers
    few_rows(model)
    assert held() is not None and layer in state_of(model).get(FewRowsPart).few_rows
    model.to(torch.bfloat16)
    assert held() is None


def test_kernels_are_made_once_for_weights() -> None:
    model: Any = tiny_model()
    few_rows(model)
    first = {layer: forward for layer, (_, forward) in state_of(model).get(FewRowsPart).few_rows.items()}
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    assert list(first) == layers
    layers[0].weight.data = layers[0].weight.data.clone()
    few_rows(model)
    changed = [
        layer
        for layer, (_, forward) in state_of(model).get(FewRowsPart).few_rows.items()
        if first[layer] is not forward
    ]
    assert changed == layers[:1]


def test_what_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny_model()

    class Other(nn.Linear):
        __module__ = "transformers.models.some"

    mlp = model.model.layers[0].mlp
    mlp.down_proj.__class__ = Other
    mlp.gate_proj.weight.data = mlp.gate_proj.weight.data.double()
    mlp.up_proj.weight.data = mlp.up_proj.weight.data.t().contiguous().t()
    mlp.up_proj.forward = mlp.up_proj.forward
    few_rows(model)
    assert not {mlp.down_proj, mlp.gate_proj, mlp.up_proj} & set(state_of(model).get(FewRowsPart).few_rows)
    mlp.down_proj.__class__ = type("Quantised", (Other,), {"__module__": "some.quantiser"})
    assert few_rows(model) is None
    compiled: Any = tiny_model()
    compiled.model.layers[0]._compiled_call_impl = lambda *args, **kwargs: None  # as set by `layer.compile()`
    assert few_rows(compiled) is None
    compiled = tiny_model()
    compiled.forward = lambda *args, **kwargs: None
    compiled.forward._torchdynamo_orig_callable = None  # as set by `torch.compile(forward)`
    assert few_rows(compiled) is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert few_rows(tiny_model()) is None
    monkeypatch.setattr(module, "_SMALL", 2**16)
    assert few_rows(tiny_model()) is None
    monkeypatch.setattr(module, "_SMALL", 1)
    monkeypatch.setattr(module, "why_not", lambda: "no compiler")
    assert few_rows(tiny_model()) is None


def test_hooks_see_what_they_saw() -> None:
    model: Any = tiny_model()
    seen: list[Any] = []
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda _, given, out: seen.append((given[0], out)))
    passed(model, 1, 3)
    x, out = seen[0]
    torch.testing.assert_close(out, nn.functional.linear(x, model.model.layers[1].mlp.up_proj.weight))


def test_plains_very_text_in_half_precision(by_torch: list[tuple[int, int]]) -> None:
    model: Any = enable_self_speculative(tiny_model().to(torch.bfloat16))
    batch = left_padded([21, 9, 16])
    options = {"return_dict_in_generate": True, "output_logits": True}
    plain = decoded(model, batch, **options)
    request = SelfSpeculativeConfig(drafting=DraftingConfig(policy="none"), exactness="numeric")
    same = decoded(model, batch, request, **options)
    assert all(torch.equal(*pair) for pair in zip(plain.logits, same.logits, strict=True))
    assert by_torch.count((3, 32)) > 20
    by_torch.clear()
    decoded(model, batch, NOTHING, **options)  # with kernels that round differently
    assert by_torch.count((3, 32)) == 1
    assert EagerRunner(model, PassPlan(own_kernels=True)).few_rows() is None


def test_a_draft_that_is_paused_is_the_model_as_it_is() -> None:
    model: Any = enable_self_speculative(tiny_model())
    ids, at = prompt(9), []

    def looks(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            at.append(torch.equal(model(input_ids).logits, whole(input_ids).logits))
        return scores

    whole: Any = tiny_model()
    whole.load_state_dict(model.state_dict())
    skip = SelfSpeculativeConfig(SkipConfig(mlp=[0]), drafting=THREE)
    batch = {"input_ids": torch.cat((ids, ids.flip(1)))}
    plain = decoded(model, batch, logits_processor=[looks])
    assert torch.equal(decoded(model, batch, skip, logits_processor=[looks]), plain)
    assert model.last_speculation.draft_passes > 0 and all(at)
