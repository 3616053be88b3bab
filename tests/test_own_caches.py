"""Caches of foreign classes: their side effects are unknown, so plain decoding passes them every token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ssd_generation import LookupConfig, PrecisionConfig, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from ssd_generation.support.versions import CACHE
from tiny_models import prompt, tiny_model

DRAFTS = {
    "skip": SelfSpeculativeConfig(SkipConfig(attention=[1], mlp=[2])),
    "int8": SelfSpeculativeConfig(precision=PrecisionConfig(default="int8")),
    "lookup": SelfSpeculativeConfig(lookup=LookupConfig(min_ngram=1)),
    "auto": "auto",
}


class Fading(DynamicCache):  # type: ignore[misc]
    """A cache that scales each value by 0.9 and counts its updates."""

    calls = 0

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().update(key_states, 0.9 * value_states, *args, **kwargs)


class EvictingLayer(DynamicLayer):  # type: ignore[misc]
    """A layer that retains the first two slots and the last six."""

    keys: Any
    values: Any

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = super().update(key_states, value_states, *args, **kwargs)
        if self.keys.shape[2] > 8:
            self.keys = torch.cat((self.keys[:, :, :2], self.keys[:, :, -6:]), dim=2)
            self.values = torch.cat((self.values[:, :, :2], self.values[:, :, -6:]), dim=2)
        return found


def evicting() -> DynamicCache:
    cache = DynamicCache()
    cache.layers = [EvictingLayer() for _ in range(4)]
    return cache


def decoded(model: PreTrainedModel, cache: DynamicCache | None, request: Any, **options: Any) -> Any:
    if cache is not None:
        options[CACHE] = cache
    return model.generate(prompt(9), max_new_tokens=20, do_sample=False, **options, self_speculative=request)


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("make", [Fading, evicting])
def test_a_cache_of_ones_own_class(make: Any, draft: str) -> None:
    model = enable_self_speculative(tiny_model())
    theirs, ours = make(), make()
    plain = decoded(model, theirs, None)
    with pytest.warns(
        UserWarning, match=r"decoded without drafts.*its cache has a class of its own \((Fading|Evicting)"
    ):
        assert torch.equal(plain, decoded(model, ours, DRAFTS[draft]))
    assert "class of its own" in str(model.last_speculation.refusal)
    assert getattr(theirs, "calls", None) == getattr(ours, "calls", None)
    for one, other in zip(theirs.layers, ours.layers, strict=True):
        assert type(one) is type(other) and torch.equal(one.keys, other.keys)
    assert not torch.equal(plain, decoded(model, None, None)), "the cache changes nothing"


@pytest.mark.filterwarnings("ignore:.*cache_implementation")
@pytest.mark.parametrize("draft", DRAFTS)
def test_another_name_of_a_static_cache(draft: str) -> None:
    model = enable_self_speculative(tiny_model("gemma2"))
    plain = decoded(model, None, None, cache_implementation="sliding_window")
    assert torch.equal(plain, decoded(model, None, DRAFTS[draft], cache_implementation="sliding_window"))
    assert model.last_speculation.refusal is None
