"""Skip sets chosen by hidden states."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ssd_generation.forward.structure.sublayers import locate_sublayers
from ssd_generation.search.layerwise import _LayerRun, layerwise_skips
from ssd_generation.tuning.acceptance import verify_text
from test_acceptance import NOT_JUDGED
from tiny_models import FAMILIES, LAYERS, prompt, tiny_model


def text_of(model: Any) -> Any:
    ids = prompt(12)
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
    return verify_text(model, whole, 12)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - NOT_JUDGED))
def test_a_layer_on_its_own_is_the_layer_in_the_model(family: str) -> None:
    model = tiny_model(family)
    text = text_of(model)
    with torch.inference_mode():
        states = model(input_ids=text.ids[:, :-1], output_hidden_states=True).hidden_states
    run = _LayerRun(model, text)
    hidden = run.embedded()
    for layer in locate_sublayers(model).layers:
        torch.testing.assert_close(hidden, states[layer.index][0, 11:], rtol=1e-4, atol=1e-4)
        hidden = run.way(layer, ())(hidden[None])[0]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "falcon"])
def test_what_adds_nothing_is_left_out_first(family: str) -> None:
    model = tiny_model(family)
    layers = locate_sublayers(model).layers
    silent: list[Any] = [layers[2].attention, layers[1].mlp]
    with torch.no_grad():
        for sub in silent:
            for name, parameter in sub.modules[-1].named_parameters():
                if name.startswith(("o_proj", "down_proj", "c_proj", "dense.", "dense_4h_to_h")):
                    parameter.zero_()
    sets = layerwise_skips(model, text_of(model))
    assert [len(skip) for skip in sets] == list(range(1, LAYERS + 1))
    assert (sets[1].attention, sets[1].mlp) == ((2,), (1,))
    assert all(len(skip.attention) < LAYERS for skip in sets)


def test_no_more_than_asked_for() -> None:
    model = tiny_model()
    assert [len(skip) for skip in layerwise_skips(model, text_of(model), most=2)] == [1, 2]
    assert len(layerwise_skips(model, text_of(model), most=99)[-1]) == 2 * LAYERS - 1
