"""Skip mode: it removes a sub-layer's contribution and nothing else, and leaves no trace."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ssd_generation import SkipConfig, draft_mode
from ssd_generation.forward.structure.layouts import SubLayer
from ssd_generation.forward.structure.skip_mode import SkipMode
from ssd_generation.forward.structure.sublayers import locate_sublayers
from ssd_generation.support.versions import CACHE
from tiny_models import FAMILIES, LAYERS, left_padded, prompt, tiny_model

# Layers that normalise the residual stream itself cannot be skipped as a whole.
POST_NORM = {"opt-post-norm", "bloom-post-residual"}


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits  # type: ignore[no-any-return]


def forwards(model: nn.Module) -> dict[str, Any]:
    """Return every `forward` in an instance dictionary."""
    return {name: module.__dict__["forward"] for name, module in model.named_modules() if "forward" in module.__dict__}


def hook_out(sub: SubLayer) -> list[Any]:
    """Remove a sub-layer's contribution by forward hooks alone: the plain definition that the stubs have to match."""

    def zero(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        tensor = output[0] if isinstance(output, tuple) else output
        nothing = torch.zeros_like(tensor)
        if sub.residual_index is not None:
            nothing = kwargs["residual"] if "residual" in kwargs else args[sub.residual_index]
        return (nothing, *output[1:]) if isinstance(output, tuple) else nothing

    handles = [sub.modules[-1].register_forward_hook(zero, with_kwargs=True)]
    # A norm after the sub-layer belongs to its contribution.
    for norm in sub.private_norms:
        handles.append(norm.register_forward_hook(_zero_if_fed_zero))
    return handles


def _zero_if_fed_zero(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(output) if not args[0].any() else output


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stub_removes_the_contribution_and_nothing_else(family: str) -> None:
    model = tiny_model(family)
    layout = locate_sublayers(model)
    ids = prompt(9, 2)
    whole = logits(model, ids)
    cases: list[tuple[SkipConfig, list[SubLayer]]] = []
    for index in range(LAYERS):
        cases.append((SkipConfig(attention=[index]), [layout.sublayer("attention", index)]))
        cases.append((SkipConfig(mlp=[index]), [layout.sublayer("mlp", index)]))
    both = SkipConfig(attention=[1, 2], mlp=[2, 3])
    cases.append(
        (both, [layout.sublayer("attention", i) for i in (1, 2)] + [layout.sublayer("mlp", i) for i in (2, 3)])
    )
    for skip, subs in cases:
        handles = [handle for sub in subs for handle in hook_out(sub)]
        expected = logits(model, ids)
        for handle in handles:
            handle.remove()
        with SkipMode(model, skip):
            got = logits(model, ids)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(got, whole, atol=1e-3), f"{skip} changed nothing"
    assert torch.equal(logits(model, ids), whole)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in POST_NORM])
def test_a_layer_skipped_whole_does_not_run(family: str) -> None:
    model = tiny_model(family)
    layout = locate_sublayers(model)
    ran: list[str] = []
    inside = {name: module for name, module in layout.layers[2].module.named_modules() if name}
    for name, module in inside.items():
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
    with SkipMode(model, SkipConfig(attention=[2], mlp=[2])):
        logits(model, prompt())
    assert ran == []
    logits(model, prompt())
    assert ran != []


@pytest.mark.parametrize("family", sorted(POST_NORM))
def test_a_norm_on_the_residual_stream_stays(family: str) -> None:
    layout = locate_sublayers(tiny_model(family))
    assert not any(layer.can_be_bypassed for layer in layout.layers)


def test_a_shared_norm_stays_while_one_of_its_sublayers_does() -> None:
    layout = locate_sublayers(tiny_model("cohere"))
    assert layout.layers[0].attention is not None and layout.layers[0].attention.private_norms == ()
    assert layout.layers[0].can_be_bypassed


@pytest.mark.parametrize("family", ["llama", "falcon", "opt", "bloom"])
def test_an_exception_inside_leaves_the_model_as_it_was(family: str) -> None:
    model = tiny_model(family)
    whole, before = logits(model, prompt()), forwards(model)
    for skip in (SkipConfig(attention=[0], mlp=[1]), SkipConfig(attention=[1], mlp=[1])):
        with pytest.raises(KeyError, match="stop"), SkipMode(model, skip):
            assert forwards(model) != before
            raise KeyError("stop")
        assert forwards(model) == before
        with pytest.raises(KeyError, match="stop"), draft_mode(model, skip):
            raise KeyError("stop")
        assert forwards(model) == before
    assert torch.equal(logits(model, prompt()), whole)


def test_somebody_elses_forward_is_put_back() -> None:
    # accelerate replaces `forward` in the instance dictionary too.
    model = tiny_model()
    module: Any = locate_sublayers(model).layers[1].module.mlp
    original = module.forward
    calls = []

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    module.forward = wrapped
    with SkipMode(model, SkipConfig(mlp=[1])):
        logits(model, prompt())
    assert calls == []
    assert module.__dict__["forward"] is wrapped
    logits(model, prompt())
    assert calls == [1]


def test_pausing_gives_the_whole_model_back() -> None:
    model = tiny_model()
    whole = logits(model, prompt())
    with SkipMode(model, SkipConfig(attention=[1], mlp=[2])) as mode:
        skipped = logits(model, prompt())
        mode.pause()
        assert torch.equal(logits(model, prompt()), whole)
        mode.resume()
        assert torch.equal(logits(model, prompt()), skipped)


def test_skip_mode_cannot_be_entered_twice_but_two_can_be_nested() -> None:
    model = tiny_model()
    whole = logits(model, prompt())
    mode = SkipMode(model, SkipConfig(mlp=[1]))
    with mode:
        with pytest.raises(RuntimeError, match="already active"):
            mode.__enter__()
        with SkipMode(model, SkipConfig(mlp=[1, 2])):
            inner = logits(model, prompt())
        outer = logits(model, prompt())
    with SkipMode(model, SkipConfig(mlp=[1, 2])):
        assert torch.equal(inner, logits(model, prompt()))
    assert not torch.equal(inner, outer)
    assert torch.equal(logits(model, prompt()), whole)


def in_thread(work: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join(60)
    assert results, "the other thread failed or hangs"
    return results[0]


def test_another_thread_sees_the_whole_model() -> None:
    model = tiny_model()
    whole = logits(model, prompt())
    with SkipMode(model, SkipConfig(attention=[0], mlp=[0, 1])):
        assert not torch.equal(logits(model, prompt()), whole)
        assert torch.equal(in_thread(lambda: logits(model, prompt())), whole)


def test_two_threads_take_turns() -> None:
    model = tiny_model()
    before = forwards(model)
    skips = [SkipConfig(mlp=[1]), SkipConfig(mlp=[1, 2], attention=[1])]
    expected = []
    for skip in skips:
        with SkipMode(model, skip):
            expected.append(logits(model, prompt()))
    wrong: list[int] = []

    def work(which: int) -> None:
        mode = SkipMode(model, skips[which])
        for _ in range(30):
            with mode:
                if not torch.equal(logits(model, prompt()), expected[which]):
                    wrong.append(which)

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == [] and forwards(model) == before


# --- draft mode alone
# -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2", "bloom", "falcon", "opt", "gpt_oss", "mpt"])
def test_draft_mode_generates_what_the_draft_would_say(family: str) -> None:
    # Layer 0 is skipped, where transformers reads the length of the cache.
    model = tiny_model(family)
    skip = SkipConfig(attention=[0, 1], mlp=[1])
    inputs = left_padded([20, 13])
    with draft_mode(model, skip):
        cached = model.generate(**inputs, max_new_tokens=12, do_sample=False)
        recomputed = model.generate(**inputs, max_new_tokens=12, do_sample=False, use_cache=False)
    assert torch.equal(cached, recomputed)
    assert not torch.equal(cached, model.generate(**inputs, max_new_tokens=12, do_sample=False))


def test_a_cache_filled_in_draft_mode_is_not_mistaken_for_the_targets() -> None:
    model = tiny_model()
    with draft_mode(model, SkipConfig(attention=[0])):
        out = model.generate(prompt(), max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    with pytest.raises(RuntimeError, match="filled in draft mode"):
        model.generate(out.sequences, **{CACHE: out[CACHE]}, max_new_tokens=4)


# --- models in which nothing can be skipped
# -------------------------------------------------------------------------------------


def test_a_part_that_is_not_known_stays_in_the_draft() -> None:
    model = tiny_model()
    layer = model.model.layers[2]
    layer.gate = nn.Linear(32, 32)
    inherited = type(layer).forward

    def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return inherited(layer, layer.gate(hidden), *args, **kwargs)  # type: ignore[no-any-return]

    layer.forward = forward
    layers = locate_sublayers(model).layers
    assert [layer.can_be_bypassed for layer in layers] == [True, True, False, True]
    with torch.no_grad(), draft_mode(model, SkipConfig(attention=[2], mlp=[2])):
        skipped = model(input_ids=prompt()).logits
        layer.gate.weight.zero_()
        assert not torch.allclose(skipped, model(input_ids=prompt()).logits)


def test_a_model_without_attention_layers_is_refused() -> None:
    model = tiny_model()
    for layer in model.model.layers:
        layer.mixer = layer.self_attn
        del layer.self_attn
        type(layer.mixer)
    layer.mixer.__class__ = type("Mixer", (type(layer.mixer),), {})
    for other in model.model.layers:
        other.mixer.__class__ = layer.mixer.__class__
        other.mixer.layer_idx = None
    with pytest.raises(ValueError, match="list of 4 decoder layers with an attention sub-layer"):
        locate_sublayers(model)


@pytest.mark.parametrize(
    ("skip", "message"),
    [
        (SkipConfig(attention=[4]), "attention 4, but this model has layers 0 to 3"),
        (SkipConfig(mlp=[17]), "mlp 17, but this model has layers 0 to 3"),
        (SkipConfig(attention=[0, 1, 2, 3]), "all 4 attention sub-layers"),
    ],
)
def test_skip_sets_that_do_not_fit_are_refused(skip: SkipConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SkipMode(tiny_model(), skip)


def test_the_layout_follows_exchanged_modules() -> None:
    model = tiny_model()
    before = locate_sublayers(model)
    assert locate_sublayers(model) is before
    model.model.layers[1].mlp = tiny_model(seed=5).model.layers[1].mlp
    after = locate_sublayers(model)
    assert after is not before
    assert after.sublayer("mlp", 1).modules[0] is model.model.layers[1].mlp


def test_parameters_are_counted_once() -> None:
    model = tiny_model()
    layout = locate_sublayers(model)
    layer = model.model.layers[0]
    mlp = sum(p.numel() for p in layer.mlp.parameters()) + layer.post_attention_layernorm.weight.numel()
    assert layout.skipped_parameters(SkipConfig(mlp=[0])) == mlp
    assert layout.skipped_parameters(SkipConfig(mlp=[0, 1])) == 2 * mlp
    assert layout.num_parameters == sum(p.numel() for p in model.parameters())


def test_another_thread_may_run_the_model_while_it_is_looked_at() -> None:
    model = tiny_model()
    here, forward = threading.get_ident(), model.forward

    def beside(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == here:
            thread = threading.Thread(target=lambda: forward(input_ids=prompt(), use_cache=False))
            thread.start()
            thread.join()
        return forward(*args, **kwargs)

    model.forward = beside
    try:
        layout = locate_sublayers(model)
    finally:
        del model.forward
    attention = layout.sublayer("attention", 0)
    assert attention.private_norms == (model.model.layers[0].input_layernorm,)


@pytest.mark.parametrize("family", ["bert", "megatron-bert", "roberta-prelayernorm"])
def test_sub_layers_that_end_in_adding_the_residual_hand_it_on(family: str) -> None:
    """A skipped sub-layer of a BERT-like model returns its input, wherever the norms are."""
    from lab.families.models import build

    model: Any = build(family)
    ids = torch.tensor([[5, 17, 29, 31, 8, 44]])
    layers: list[Any] = [layer.module for layer in locate_sublayers(model).layers]
    handles = [
        layers[1].attention.register_forward_hook(lambda module, args, output: (args[0], *output[1:])),
        layers[2].output.register_forward_hook(lambda module, args, output: args[1]),
    ]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        for handle in handles:
            handle.remove()
        whole = model(input_ids=ids).logits
        with draft_mode(model, SkipConfig(attention=[1], mlp=[2])):
            drafted = model(input_ids=ids).logits
        with draft_mode(model, SkipConfig(attention=[0], mlp=[0])):
            bypassed = model(input_ids=ids).logits
    torch.testing.assert_close(drafted, expected)
    assert not torch.allclose(drafted, whole) and not torch.allclose(bypassed, whole)
