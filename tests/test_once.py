"""Memoised queries about a model, made once per call (support/once.py)."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from typing import Any

import pytest
import torch

from ssd_generation import SelfSpeculativeConfig, enable_self_speculative
from ssd_generation.cache.recurrent import has_states
from ssd_generation.forward.captured import conditions as capturable
from ssd_generation.support.once import looked_at_once, looking_once
from ssd_generation.support.structure import follows_from_structure, modules_of
from tiny_models import prompt, tiny_model

INT8 = SelfSpeculativeConfig(precision="int8", lookup=True)


def test_a_look_is_taken_once_inside_and_each_time_outside() -> None:
    looks: Counter[Any] = Counter()

    @looked_at_once
    def look(model: object, what: str = "") -> int:
        """Return what it says."""
        looks[id(model), what] += 1
        return looks.total()

    one, other = object(), object()
    assert look(one) == 1 and look(one) == 2 and look.__doc__ == "Return what it says."
    with looking_once():
        assert look(one) == 3 == look(one) and look(other) == 4 and look(one, "more") == 5 and look(other) == 4
        with looking_once():
            assert look(one) == 3, "those before hold on"
        assert look(one) == 3
        thread = threading.Thread(target=look, args=(one,))
        thread.start()
        thread.join()
        assert looks[id(one), ""] == 4, "another thread looks for itself"
    assert look(one) == 7
    with pytest.raises(KeyError), looking_once():
        raise KeyError
    assert look(one) == 8 and look(one) == 9


def test_a_look_that_fails_is_taken_again() -> None:
    @looked_at_once
    def look(model: object) -> None:
        raise ValueError(len(failed))

    failed: list[int] = []
    with looking_once():
        for _ in range(2):
            with pytest.raises(ValueError, match=str(len(failed))):
                look(failed)
            failed.append(1)


@pytest.mark.measures
@pytest.mark.parametrize(
    "request_", ["auto", SelfSpeculativeConfig(precision="int8", lookup=True)], ids=["auto", "int8"]
)
def test_a_call_looks_at_its_model_few_times(request_: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = enable_self_speculative(tiny_model())
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for _ in range(2):
        model.generate(prompt(9), self_speculative=request_, **options)
    looks: list[str] = []

    def counted(model: Any) -> bool:
        looks.append("")
        return has_states(model)

    # `has_states` is called whenever the model is examined.
    monkeypatch.setattr("ssd_generation.forward.captured.conditions.has_states", counted)
    model.generate(prompt(9), self_speculative=request_, **options)
    assert 1 <= len(looks) <= 4
    # A change between calls is seen at once.
    model.lm_head.register_forward_hook(lambda *_: None)
    looks.clear()
    plain = model.generate(prompt(9), **options)
    assert torch.equal(plain, model.generate(prompt(9), self_speculative=request_, **options)) and looks
    assert capturable.why_not_captured(model) == "a hook is installed on Linear"


def test_what_follows_from_the_structure_is_found_once_until_that_changes() -> None:
    found: list[int] = []

    @follows_from_structure
    def biases(model: torch.nn.Module) -> int:
        found.append(1)
        return sum(name.endswith("bias") for name, _ in model.named_parameters())

    model: Any = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    assert biases(model) == biases(model) == 2 and len(found) == 2, "outside it is found each time"

    def times(now: int) -> int:
        found.clear()
        with looking_once():
            assert biases(model) == biases(model) == now
        with looking_once():
            assert biases(model) == now
            assert modules_of(model) == list(model.modules())
        return len(found)

    assert times(2) == 1
    model[0].weight.data += 1.0
    assert times(2) == 0, "what is in the weights is no part of the structure"
    model[0] = torch.nn.Linear(2, 2, bias=False)
    assert times(1) == 1
    model[1].bias = None
    assert times(0) == 1
    model.double()
    assert times(0) == 1
    model[0].weight.data = torch.zeros(2, 3)
    assert times(0) == 1
    model.append(model[0])
    assert times(0) == 0, "the same module twice is one module"
    gone = weakref.ref(model[1])
    del model[1]
    assert gone() is None, "no module is held"
    assert times(0) == 1


def test_the_walk_is_that_of_torch() -> None:
    for family in ("llama", "qwen3_moe"):
        model = tiny_model(family)
        with looking_once():
            assert modules_of(model) == list(model.modules())
