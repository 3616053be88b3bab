"""Configs: what they accept, what they refuse and in which words, and that they come back from JSON as they were."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import json
import os
import pickle
import platform
import re
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from ssd_generation.config import (
    CONFIG_NAME,
    FORMAT_VERSION,
    POLICIES,
    PRESETS,
    Costs,
    DraftingConfig,
    Provenance,
    SelfSpeculativeConfig,
    SkipConfig,
)
from ssd_generation.drafting import make_policy
from tiny_models import CONFIGS, LAYERS

COSTS = Costs(plain_step=0.031, draft_step=0.017, verify=[(1, 0.031), (4, 0.055)])
PROVENANCE = Provenance(
    model_id="user/model",
    model_type="llama",
    num_layers=30,
    revision="abc123",
    dtype="bfloat16",
    attention_implementation="sdpa",
    device="cpu",
    versions={"torch": "2.13.0", "python": "3.11.7"},
    date="2025-01-31",
    source="a search of our own, σ = 0.1",
)
FULL = SelfSpeculativeConfig(
    SkipConfig([3, 5], [6]), DraftingConfig(policy="fixed"), costs=COSTS, provenance=PROVENANCE
)


def write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


# --- Construction ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layers",
    [
        [5, 3],
        (3, 5),
        {3, 5},
        iter([5, 3]),
        np.array([3, 5]),
        [np.int64(3), np.uint8(5)],
        torch.tensor([5, 3]),
        range(3, 6, 2),
    ],
)
def test_layers_of_any_kind_become_a_sorted_tuple_of_ints(layers: Any) -> None:
    skip = SkipConfig(attention=layers)
    assert skip.attention == (3, 5)
    assert all(type(layer) is int for layer in skip.attention)


def test_the_length_of_a_skip_set_counts_its_sublayers() -> None:
    assert len(SkipConfig([1, 2], [2])) == 3
    assert not SkipConfig()


@pytest.mark.parametrize("kind", ["attention", "mlp"])
@pytest.mark.parametrize(
    ("layers", "error", "words"),
    [
        ([-1], ValueError, "negative layer -1"),
        ([3, 5, 3], ValueError, "layer 3 more than once"),
        ([1.0], TypeError, "1.0, which is not an integer"),
        (["3"], TypeError, "'3', which is not an integer"),
        ([None], TypeError, "None, which is not an integer"),
        ([True, False], TypeError, "True, which is not an integer"),
        (np.array([True, False]), TypeError, "not an integer"),
        (torch.tensor([True, False]), TypeError, "not an integer"),
        (np.array([1.0]), TypeError, "not an integer"),
        (3, TypeError, "must be a sequence of layer numbers, such as [3, 5]"),
        (np.array(3), TypeError, "must be a sequence"),
        ("3 5", TypeError, "must be a sequence"),
        (None, TypeError, "[] to skip none"),
        ({3: 5}, TypeError, "must be a sequence"),
    ],
)
def test_bad_layers_are_refused(kind: str, layers: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)) as caught:
        SkipConfig(**{kind: layers})
    assert str(caught.value).startswith(kind)


def test_a_long_value_is_shortened_in_the_message() -> None:
    with pytest.raises(TypeError) as caught:
        SkipConfig(attention="3 " * 1000)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        ({"policy": "confidense"}, ValueError, "use 'fixed' or 'confidence'. Did you mean 'confidence'?"),
        ({"policy": None}, TypeError, "'fixed' or 'confidence', but got None"),
        ({"max_draft_length": 0}, ValueError, "max_draft_length must be at least 1, but got 0"),
        ({"max_draft_length": -3}, ValueError, "but got -3"),
        ({"max_draft_length": 2.0}, TypeError, "must be an integer, at least 1, but got 2.0"),
        ({"max_draft_length": True}, TypeError, "but got True"),
        ({"threshold": 1.01}, ValueError, "threshold must lie between 0 and 1, but got 1.01"),
        ({"threshold": float("nan")}, ValueError, "but got nan"),
        ({"target_acceptance": -0.1}, ValueError, "target_acceptance must lie between 0 and 1, but got -0.1"),
        ({"acceptance_smoothing": 2}, ValueError, "acceptance_smoothing must lie between 0 and 1"),
        ({"threshold_smoothing": float("inf")}, ValueError, "threshold_smoothing must lie between 0 and 1"),
        ({"threshold_step": -1}, ValueError, "threshold_step must lie between 0 and 1"),
        ({"threshold": "0.5"}, TypeError, "threshold must be a number, but got '0.5'"),
        ({"threshold": True}, TypeError, "threshold must be a number, but got True"),
        ({"threshold": None}, TypeError, "threshold must be a number, but got None"),
        ({"threshold": 10**400}, ValueError, "too large"),
    ],
)
def test_bad_drafting_parameters_are_refused(values: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        DraftingConfig(**values)


def test_the_bounds_of_probabilities_are_allowed() -> None:
    drafting = DraftingConfig(max_draft_length=np.int64(1), threshold=0, target_acceptance=np.float32(1))
    assert (drafting.max_draft_length, drafting.threshold, drafting.target_acceptance) == (1, 0.0, 1.0)
    assert [type(v) for v in (drafting.max_draft_length, drafting.threshold, drafting.target_acceptance)] == [
        int,
        float,
        float,
    ]


def test_the_defaults_are_the_published_constants() -> None:
    assert DraftingConfig().to_dict() == {
        "policy": "confidence",
        "max_draft_length": 12,
        "threshold": 0.6,
        "target_acceptance": 0.9,
        "acceptance_smoothing": 0.5,
        "threshold_smoothing": 0.9,
        "threshold_step": 0.01,
    }


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_can_be_made(policy: str) -> None:
    assert make_policy(DraftingConfig(policy=policy, max_draft_length=3)).draft_length(10) == 3


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"plain_step": 0.0}, ValueError, "plain_step must be a positive, finite number of seconds, but got 0.0"),
        ({"plain_step": float("inf")}, ValueError, "but got inf"),
        ({"draft_step": -1}, ValueError, "draft_step must be a positive"),
        ({"draft_step": float("nan")}, ValueError, "but got nan"),
        ({"draft_step": "0.1"}, TypeError, "draft_step must be a number, but got '0.1'"),
        ({"verify": []}, ValueError, "empty"),
        ({"verify": 0.1}, TypeError, "(tokens, seconds) pairs"),
        ({"verify": {1: 0.1}}, TypeError, "(tokens, seconds) pairs"),
        ({"verify": [0.1]}, TypeError, "it has 0.1"),
        ({"verify": [(1, 0.1, 2)]}, ValueError, "it has (1, 0.1, 2)"),
        ({"verify": [(0, 0.1)]}, ValueError, "token count in verify must be at least 1, but got 0"),
        ({"verify": [(1.0, 0.1)]}, TypeError, "token count in verify must be an integer"),
        ({"verify": [(2, 0.1), (2, 0.2)]}, ValueError, "2 comes after 2"),
        ({"verify": [(2, 0.1), (1, 0.2)]}, ValueError, "1 comes after 2"),
        ({"verify": [(4, 0.0)]}, ValueError, "time of verifying 4 tokens must be a positive"),
    ],
)
def test_bad_costs_are_refused(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        Costs(**{"plain_step": 0.1, "draft_step": 0.1, "verify": [(1, 0.1)], **changes})


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        ({"model_id": 3}, TypeError, "model_id must be a string or None, but got 3"),
        ({"num_layers": 0}, ValueError, "num_layers must be at least 1"),
        ({"num_layers": "30"}, TypeError, "num_layers must be an integer"),
        ({"versions": {"torch": 2}}, TypeError, "versions must map names to version strings"),
        ({"versions": ["torch"]}, TypeError, "versions must map"),
        ({"date": "31.1.2025"}, ValueError, "YYYY-MM-DD"),
        ({"date": "20250131"}, ValueError, "YYYY-MM-DD"),
        ({"date": "2025-02-30"}, ValueError, "'2025-02-30'"),
    ],
)
def test_bad_provenance_is_refused(values: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        Provenance(**values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"skip": [3]}, "skip must be a SkipConfig, but got [3]."),
        ({"skip": None}, "skip must be a SkipConfig"),
        ({"skip": {"attention": [3]}}, "SelfSpeculativeConfig.from_dict"),
        ({"drafting": "fixed"}, "drafting must be a DraftingConfig"),
        ({"costs": 1.0}, "costs must be a Costs"),
        ({"provenance": "me"}, "provenance must be a Provenance"),
    ],
)
def test_parts_of_the_wrong_type_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=re.escape(words)):
        SelfSpeculativeConfig(**values)


def test_a_config_cannot_be_changed_and_can_be_a_key() -> None:
    for part in (FULL, FULL.skip, FULL.drafting, COSTS, PROVENANCE):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, dataclasses.fields(part)[0].name, None)
        assert {part: 1}[copy.deepcopy(part)] == 1
        assert pickle.loads(pickle.dumps(part)) == part
    with pytest.raises(TypeError):
        PROVENANCE.versions["torch"] = "3"  # type: ignore[index]
    assert PROVENANCE.versions == {"python": "3.11.7", "torch": "2.13.0"}
    assert dataclasses.replace(FULL, drafting=DraftingConfig()) != FULL


# --- Against a model ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("skip", "words"),
    [
        (SkipConfig([3, 4, 9]), "attention 4, 9, but the model has 4 layers (0 to 3)"),
        (SkipConfig([], [4]), "mlp 4, but the model has 4 layers (0 to 3)"),
        (SkipConfig(range(4)), "all 4 attention sub-layers"),
    ],
)
def test_a_skip_set_that_does_not_fit_is_refused(skip: SkipConfig, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        skip.validate_for(4)
    with pytest.raises(ValueError, match=re.escape(words)):
        SelfSpeculativeConfig(skip).validate_for(num_layers=4, model_type="llama")
    with pytest.raises(ValueError, match=re.escape(words)):
        SelfSpeculativeConfig(skip, provenance=Provenance(num_layers=4))


def test_skip_sets_up_to_the_limits_fit() -> None:
    SkipConfig(range(3), range(4)).validate_for(4)
    SelfSpeculativeConfig(SkipConfig([0, 1, 3], range(4))).validate_for(4, "gpt2")


@pytest.mark.parametrize(
    ("provenance", "words"),
    [
        (Provenance(model_type="qwen2"), "made for a model of type 'qwen2', but the model is of type 'llama'"),
        (Provenance(model_type="qwen2", model_id="user/a"), "'qwen2' (user/a), but"),
        (Provenance(num_layers=30), "made for a model with 30 layers, but the model has 32"),
    ],
)
def test_a_config_for_another_model_is_refused(provenance: Provenance, words: str) -> None:
    config = SelfSpeculativeConfig(SkipConfig([3]), provenance=provenance)
    with pytest.raises(ValueError, match=re.escape(words)):
        config.validate_for(num_layers=32, model_type="llama")


@pytest.mark.parametrize("provenance", [None, Provenance(), Provenance(model_type="llama", num_layers=32)])
def test_a_config_for_this_model_or_for_any_is_accepted(provenance: Provenance | None) -> None:
    config = SelfSpeculativeConfig(SkipConfig([3]), provenance=provenance)
    config.validate_for(num_layers=32, model_type="llama")
    config.validate_for(32)


@pytest.mark.parametrize("num_layers", [0, True, 4.0])
def test_a_number_of_layers_that_is_none_is_refused(num_layers: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="num_layers must be"):
        SelfSpeculativeConfig().validate_for(num_layers)


# --- Dicts and JSON -------------------------------------------------------------------------------

layers = st.sets(st.integers(0, 200)).map(sorted)
skips = st.builds(SkipConfig, layers, layers)
shares = st.floats(0, 1)
draftings = st.builds(
    DraftingConfig, st.sampled_from(POLICIES), st.integers(1, 10**30), shares, shares, shares, shares, shares
)
seconds = st.floats(0, exclude_min=True, allow_infinity=False)
costs = st.builds(
    Costs, seconds, seconds, st.dictionaries(st.integers(1), seconds, min_size=1).map(lambda d: sorted(d.items()))
)
# JSON text cannot hold lone surrogates once it is UTF-8.
text = st.text(st.characters(exclude_categories=["Cs"]))
provenances = st.builds(
    Provenance,
    *[st.none() | text] * 2,
    st.none() | st.integers(201, 1000),
    *[st.none() | text] * 4,
    st.none() | st.dictionaries(text, text),
    st.none() | st.dates().map(datetime.date.isoformat),
    st.none() | text,
)
configs = st.builds(
    SelfSpeculativeConfig, skips, draftings, costs=st.none() | costs, provenance=st.none() | provenances
)


@given(configs)
def test_a_config_comes_back_from_a_dict_and_from_json_as_it_was(config: SelfSpeculativeConfig) -> None:
    for data in (config.to_dict(), json.loads(config.to_json_string())):
        again = SelfSpeculativeConfig.from_dict(data)
        assert again == config
        assert hash(again) == hash(config)
        assert again.to_json_string() == config.to_json_string()


@given(configs)
def test_a_config_comes_back_from_a_folder_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, config: SelfSpeculativeConfig
) -> None:
    folder = tmp_path_factory.getbasetemp() / "round-trip"
    config.save_pretrained(folder)
    assert SelfSpeculativeConfig.from_pretrained(folder) == config


@given(skips)
def test_a_skip_set_comes_back_in_every_format(skip: SkipConfig) -> None:
    assert SkipConfig.from_dict(skip.to_dict()) == skip
    assert SkipConfig.from_dict({"attn": skip.attention, "mlp": skip.mlp}) == skip
    assert SkipConfig.from_dict({"a": skip.to_dict(), "b": {"mlp": [1]}}, name="a") == skip
    assert SelfSpeculativeConfig.from_dict(skip.to_dict()) == SelfSpeculativeConfig(skip)


@given(skips, st.integers(1, 250))
def test_a_skip_set_fits_exactly_the_models_that_have_its_layers(skip: SkipConfig, num_layers: int) -> None:
    has_all = all(layer < num_layers for layer in skip.attention + skip.mlp)
    if has_all and set(skip.attention) != set(range(num_layers)):
        skip.validate_for(num_layers)
    else:
        with pytest.raises(ValueError, match="The skip set"):
            skip.validate_for(num_layers)


def test_the_json_format() -> None:
    assert FULL.to_json_string() == (
        "{\n"
        '  "format_version": 1,\n'
        '  "skip": {\n'
        '    "attention": [3, 5],\n'
        '    "mlp": [6]\n'
        "  },\n"
        '  "drafting": {\n'
        '    "policy": "fixed",\n'
        '    "max_draft_length": 12,\n'
        '    "threshold": 0.6,\n'
        '    "target_acceptance": 0.9,\n'
        '    "acceptance_smoothing": 0.5,\n'
        '    "threshold_smoothing": 0.9,\n'
        '    "threshold_step": 0.01\n'
        "  },\n"
        '  "costs": {\n'
        '    "plain_step": 0.031,\n'
        '    "draft_step": 0.017,\n'
        '    "verify": [[1, 0.031], [4, 0.055]]\n'
        "  },\n"
        '  "provenance": {\n'
        '    "model_id": "user/model",\n'
        '    "model_type": "llama",\n'
        '    "num_layers": 30,\n'
        '    "revision": "abc123",\n'
        '    "dtype": "bfloat16",\n'
        '    "attention_implementation": "sdpa",\n'
        '    "device": "cpu",\n'
        '    "versions": {\n'
        '      "torch": "2.13.0",\n'
        '      "python": "3.11.7"\n'
        "    },\n"
        '    "date": "2025-01-31",\n'
        '    "source": "a search of our own, σ = 0.1"\n'
        "  }\n"
        "}\n"
    )


def test_configs_print_well() -> None:
    assert repr(FULL) == str(FULL) == f"SelfSpeculativeConfig {FULL.to_json_string()}".rstrip("\n")
    assert repr(SkipConfig([3, 5], [6])) == "SkipConfig(attention=(3, 5), mlp=(6,))"
    assert repr(Provenance(model_type="llama", versions={"torch": "2"})) == (
        "Provenance(model_type='llama', versions={'torch': '2'})"
    )
    assert eval(repr(PROVENANCE)) == PROVENANCE


SEVERAL = {"llama-a": {"attention": [3], "mlp": [4]}, "llama-b": {"attention": [1], "mlp": []}}


def test_the_formats_people_have() -> None:
    expected = SelfSpeculativeConfig(SkipConfig([3], [4]))
    for data in (
        {"attention": [3], "mlp": [4]},
        {"attn": [3], "mlp": [4]},
        {"format_version": 1, "attention": [3], "mlp": [4]},
        {"skip": {"attention": [3], "mlp": [4]}},
        {"skip": {"attn": [3], "mlp": [4]}, "costs": None, "provenance": None},
        {"llama-a": {"attention": [3], "mlp": [4]}},
        {"llama-a": {"skip": {"attention": [3], "mlp": [4]}}},
    ):
        assert SelfSpeculativeConfig.from_dict(data) == expected
    assert SelfSpeculativeConfig.from_dict(SEVERAL, name="llama-b").skip == SkipConfig([1])
    assert SkipConfig.from_dict(SEVERAL, name="llama-b") == SkipConfig([1])
    assert SelfSpeculativeConfig.from_dict({"drafting": {"policy": "fixed"}}).drafting == DraftingConfig("fixed")
    assert SelfSpeculativeConfig.from_dict({}) == SelfSpeculativeConfig()


@pytest.mark.parametrize("cls", [SkipConfig, SelfSpeculativeConfig])
@pytest.mark.parametrize(
    ("data", "name", "words"),
    [
        (SEVERAL, None, "several models: 'llama-a', 'llama-b'. Choose one with name="),
        (SEVERAL, "llama-c", "no config named 'llama-c'; there are 'llama-a', 'llama-b'. Did you mean"),
        ({"attention": [3]}, "llama-a", "a single config, not several keyed by model name. Leave out name='llama-a'"),
        ({"attention": [3], "attn": [3]}, None, "both 'attention' and 'attn'"),
        ({"attention": [3], "mpl": [3]}, None, "Unknown key 'mpl' in a skip set; allowed are 'attention', 'mlp'."),
        ({"attention": [3], "mpl": [3]}, None, "Did you mean 'mlp'?"),
        ({"attention": [3], 7: []}, None, "Unknown key 7"),
        ({"attention": [-3]}, None, "negative layer -3"),
        ({"attention": [3], "format_version": 2}, None, "format_version 2, but this ssd_generation reads up to 1"),
        ({"a": {"attention": [3]}, "b": {"atention": [3]}}, "b", "'atention'"),
    ],
)
def test_bad_dicts_are_refused(cls: Any, data: dict[Any, Any], name: str | None, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        cls.from_dict(data, name=name)


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        ({"drafing": {"policy": "fixed"}}, ValueError, "Unknown key 'drafing' in a config (which can"),
        ({"drafing": {"policy": "fixed"}}, ValueError, "Did you mean 'drafting'?"),
        ({"skip": {}, "drafting": {"treshold": 0.5}}, ValueError, "'treshold' in 'drafting'"),
        ({"skip": {}, "drafting": {"treshold": 0.5}}, ValueError, "Did you mean 'threshold'?"),
        ({"skip": {"atention": []}}, ValueError, "Unknown key 'atention' in a skip set"),
        ({"costs": {"plain_step": 0.1}}, ValueError, "'costs' lacks 'draft_step', 'verify'"),
        ({"costs": {"plain": 0.1}}, ValueError, "Unknown key 'plain' in 'costs'"),
        ({"provenance": {"author": "me"}}, ValueError, "Unknown key 'author' in 'provenance'"),
        ({"drafting": None}, TypeError, "'drafting' must be a JSON object"),
        ({"drafting": []}, TypeError, "'drafting' must be a JSON object"),
        ({"skip": [3]}, TypeError, "but got [3]"),
        ({"skip": {}, "attention": [3]}, ValueError, "Put 'attention' under 'skip'"),
        ({"format_version": 2, "novelty": 1}, ValueError, "format_version 2, but this ssd_generation reads up to 1"),
        ({"format_version": 0}, ValueError, "format_version must be at least 1"),
        ({"format_version": "1"}, TypeError, "format_version must be an integer"),
        ({"llama-2-13b": [3]}, ValueError, "Unknown key 'llama-2-13b'"),
        ([3], TypeError, "A config is a JSON object (a dict), such as {'attention': [3, 5], 'mlp': [6]}, but got [3]"),
        (None, TypeError, "but got None"),
    ],
)
def test_bad_whole_configs_are_refused(data: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        SelfSpeculativeConfig.from_dict(data)


def test_a_skip_set_is_not_read_out_of_a_whole_config() -> None:
    with pytest.raises(ValueError, match=r"SelfSpeculativeConfig\.from_dict"):
        SkipConfig.from_dict(FULL.to_dict())


def test_the_current_format_version_is_written_and_read() -> None:
    assert FULL.to_dict()["format_version"] == FORMAT_VERSION == 1


# --- Files and folders ----------------------------------------------------------------------------


def test_files_in_every_format_are_read(tmp_path: Path) -> None:
    several = write(tmp_path / "skip_layers.json", SEVERAL)
    assert SelfSpeculativeConfig.from_json_file(several, name="llama-b").skip == SkipConfig([1])
    assert SelfSpeculativeConfig.from_pretrained(several, name="llama-a").skip == SkipConfig([3], [4])
    assert SelfSpeculativeConfig.from_pretrained(str(several), "llama-a").skip == SkipConfig([3], [4])
    with_bom = write(tmp_path / "bom", "\ufeff" + json.dumps({"attn": [1]}))
    assert SelfSpeculativeConfig.from_pretrained(with_bom).skip == SkipConfig([1])


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        ('{"attention": [3],\n "mlp": [4,]}', ValueError, ", line 2, column "),
        ("", ValueError, "line 1, column 1: malformed JSON"),
        ('{"attention": [3], "attention": [4]}', ValueError, "'attention' stands twice"),
        ("[3, 5]", TypeError, "but got [3, 5]"),
        ('{"atention": [3]}', ValueError, "Did you mean 'attention'?"),
        ('{"attention": [3.0]}', TypeError, "3.0, which is not an integer"),
        ('{"attention": [true]}', TypeError, "True, which is not an integer"),
        ('{"attention": null}', TypeError, "[] to skip none"),
        ('{"drafting": {"threshold": NaN}}', ValueError, "but got nan"),
        ("[" * 100_000, ValueError, "recursion"),
    ],
)
def test_errors_in_a_file_name_the_file(tmp_path: Path, content: str, error: type[Exception], words: str) -> None:
    path = write(tmp_path / "mine.json", content)
    with pytest.raises(error, match=re.escape(words)) as caught:
        SelfSpeculativeConfig.from_pretrained(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(b'{"attention": "\xff"}')
    with pytest.raises(ValueError, match=r"mine\.json.*not a JSON file in UTF-8"):
        SelfSpeculativeConfig.from_json_file(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file.*gone\.json"):
        SelfSpeculativeConfig.from_json_file(tmp_path / "gone.json")
    with pytest.raises(ValueError, match=r"is a folder.*Use from_pretrained"):
        SelfSpeculativeConfig.from_json_file(tmp_path)


def test_a_folder_without_a_config_lists_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"holds no {CONFIG_NAME}. Give the path"):
        SelfSpeculativeConfig.from_pretrained(tmp_path)
    write(tmp_path / "skip_layers.json", SEVERAL)
    with pytest.raises(FileNotFoundError, match=r"its JSON files are 'skip_layers\.json'"):
        SelfSpeculativeConfig.from_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="Check `subfolder`"):
        SelfSpeculativeConfig.from_pretrained(tmp_path, subfolder="draft")
    FULL.save_pretrained(tmp_path / "draft")
    assert SelfSpeculativeConfig.from_pretrained(tmp_path, subfolder="draft") == FULL


def test_save_pretrained_makes_the_folder_and_leaves_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    path = FULL.save_pretrained(folder)
    assert path == folder / CONFIG_NAME
    SelfSpeculativeConfig().save_pretrained(str(folder))
    assert os.listdir(folder) == [CONFIG_NAME]
    assert SelfSpeculativeConfig.from_pretrained(str(folder)) == SelfSpeculativeConfig()
    write(tmp_path / "plain", "")
    # As open to others as any file of this user.
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


@pytest.mark.parametrize("step", ["replace", "fsync"])
def test_an_interrupted_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    FULL.save_pretrained(tmp_path)
    monkeypatch.setattr(os, step, mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        SelfSpeculativeConfig().save_pretrained(tmp_path)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == [CONFIG_NAME]
    assert SelfSpeculativeConfig.from_pretrained(tmp_path) == FULL


def test_save_pretrained_into_a_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.json", "{}")
    with pytest.raises(ValueError, match=r"needs a folder, but .*mine\.json.* is a file"):
        FULL.save_pretrained(path)
    assert path.read_text() == "{}"


def test_home_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert FULL.save_pretrained("~/mine") == tmp_path / "mine" / CONFIG_NAME
    assert SelfSpeculativeConfig.from_pretrained("~/mine") == FULL


# --- The Hub --------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Stands in for the download; fails the test that should not have asked."""
    download = mock.Mock(side_effect=AssertionError("the Hub was asked"))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return download


@pytest.mark.parametrize(
    "path",
    [
        "gone.json",
        "user/gone.json",
        "./gone",
        "../gone",
        ".",
        "/gone/for/good",
        "a/b/c",
        "gone/",
        "~/gone",
        r"a\b",
        "C:gone",
        "",
    ],
)
def test_what_looks_like_a_path_is_never_asked_of_the_hub(
    hub: mock.Mock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"no file or folder|holds no {CONFIG_NAME}"):
        SelfSpeculativeConfig.from_pretrained(path)
    hub.assert_not_called()


def test_a_missing_path_object_is_never_asked_of_the_hub(hub: mock.Mock) -> None:
    for name in ("user/repo", "llama-2-13b"):
        with pytest.raises(FileNotFoundError, match="no file or folder"):
            SelfSpeculativeConfig.from_pretrained(Path(name))


def test_a_folder_comes_before_the_hub_and_the_presets(
    hub: mock.Mock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    FULL.save_pretrained("user/repo")
    FULL.save_pretrained("llama-2-13b")
    assert SelfSpeculativeConfig.from_pretrained("user/repo", revision="v1", token="x") == FULL
    assert SelfSpeculativeConfig.from_pretrained("llama-2-13b") == FULL


@pytest.mark.parametrize("repo_id", ["user/repo", "repo"])
def test_a_hub_id_is_downloaded(hub: mock.Mock, tmp_path: Path, repo_id: str) -> None:
    hub.side_effect, hub.return_value = None, str(write(tmp_path / "blob", SEVERAL))
    config = SelfSpeculativeConfig.from_pretrained(
        repo_id, name="llama-b", revision="v1", token="secret", cache_dir="c", local_files_only=True
    )
    assert config.skip == SkipConfig([1])
    hub.assert_called_once_with(
        repo_id, CONFIG_NAME, revision="v1", token="secret", cache_dir="c", local_files_only=True
    )


def test_the_keywords_for_the_hub_are_those_it_takes() -> None:
    # autospec refuses a call that the real function would refuse
    from ssd_generation.config import _HUB_KEYWORDS

    with mock.patch.object(huggingface_hub, "hf_hub_download", autospec=True) as download:
        download("a/b", CONFIG_NAME, revision=None, **dict.fromkeys(_HUB_KEYWORDS))


def test_an_unknown_keyword_is_refused_for_local_paths_too(tmp_path: Path) -> None:
    FULL.save_pretrained(tmp_path)
    with pytest.raises(TypeError, match=r"unknown keyword 'revison'.*Did you mean 'revision'\?"):
        SelfSpeculativeConfig.from_pretrained(tmp_path, revison="main")


def test_the_hub_cannot_be_reached(tmp_path: Path) -> None:
    # conftest.py keeps huggingface_hub offline
    with pytest.raises(FileNotFoundError) as caught:
        SelfSpeculativeConfig.from_pretrained("user/repo", revision="v1", cache_dir=tmp_path)
    message = str(caught.value)
    for word in ("'user/repo'", "folder", "JSON file", "preset", "llama-2-70b", "Hub id", "'v1'", "token"):
        assert word in message


def _http_error(kind: type[huggingface_hub.errors.HfHubHTTPError], text: str) -> Exception:
    error = kind.__new__(kind)  # the constructor wants a response of the HTTP library that happens to be in use
    Exception.__init__(error, text)
    return error


@pytest.mark.parametrize(
    "error",
    [
        huggingface_hub.errors.EntryNotFoundError("no such entry\nmore"),
        huggingface_hub.errors.LocalEntryNotFoundError("not in the cache"),
        huggingface_hub.errors.OfflineModeIsEnabled("offline"),
        huggingface_hub.errors.HFValidationError("Repo id must …"),
        huggingface_hub.errors.EntryNotFoundError(""),
        _http_error(huggingface_hub.errors.GatedRepoError, "ask for access"),
        _http_error(huggingface_hub.errors.HfHubHTTPError, "500"),
    ],
    ids=repr,
)
def test_what_the_hub_says_is_passed_on(hub: mock.Mock, error: Exception) -> None:
    hub.side_effect = error
    with pytest.raises(FileNotFoundError, match="Found no config 'user/repo'") as caught:
        SelfSpeculativeConfig.from_pretrained("user/repo")
    assert caught.value.__cause__ is error
    assert (str(error).splitlines() or ["EntryNotFoundError"])[0] in str(caught.value)


@pytest.mark.parametrize("text", ["my config", '{"attention": [3], "mlp": [' + "6, " * 2000 + "6]}", "a\0b"])
def test_strings_that_are_nothing_at_all_are_refused(text: str) -> None:
    with pytest.raises(FileNotFoundError, match="Found no config"):
        SelfSpeculativeConfig.from_pretrained(text)


@pytest.mark.parametrize("value", [{"attention": [3]}, None, 3, b"mine"])
def test_from_pretrained_takes_strings_and_paths_only(value: Any) -> None:
    with pytest.raises(TypeError, match=r"takes a folder, a JSON file or a Hub id.*from_dict"):
        SelfSpeculativeConfig.from_pretrained(value)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    api: mock.Mock = mock.create_autospec(huggingface_hub.HfApi, instance=True)
    api.create_repo.side_effect = lambda repo_id, **_: SimpleNamespace(repo_id=f"me/{repo_id.split('/')[-1]}")
    monkeypatch.setattr(huggingface_hub, "HfApi", mock.Mock(return_value=api))
    return api


def test_push_to_hub_makes_the_repository_and_uploads_one_file(api: mock.Mock) -> None:
    result = FULL.push_to_hub("draft", private=True, token="secret", commit_message="hello", create_pr=True)
    assert result is api.upload_file.return_value
    huggingface_hub.HfApi.assert_called_once_with(token="secret")  # type: ignore[attr-defined]
    api.create_repo.assert_called_once_with("draft", private=True, exist_ok=True)
    uploaded = api.upload_file.call_args.kwargs
    assert SelfSpeculativeConfig.from_dict(json.loads(uploaded.pop("path_or_fileobj"))) == FULL
    assert uploaded == {
        "path_in_repo": CONFIG_NAME,
        "repo_id": "me/draft",
        "commit_message": "hello",
        "revision": None,
        "create_pr": True,
    }


@pytest.mark.parametrize(("repo_id", "expected"), [(None, "me/mine"), ("you/other", "me/other")])
def test_save_pretrained_can_push(api: mock.Mock, tmp_path: Path, repo_id: str | None, expected: str) -> None:
    path = FULL.save_pretrained(tmp_path / "mine", push_to_hub=True, repo_id=repo_id, private=False)
    assert SelfSpeculativeConfig.from_pretrained(path) == FULL
    assert api.upload_file.call_args.kwargs["repo_id"] == expected
    assert api.create_repo.call_args.kwargs["private"] is False


@pytest.mark.parametrize("keywords", [{"repo_id": "user/repo"}, {"private": True}])
def test_keywords_for_pushing_without_a_push_are_refused(
    api: mock.Mock, tmp_path: Path, keywords: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=f"'{next(iter(keywords))}' has an effect only when pushing"):
        FULL.save_pretrained(tmp_path / "mine", **keywords)
    assert not (tmp_path / "mine").exists()
    api.create_repo.assert_not_called()


# --- Presets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "num_layers", "attention", "mlp", "first", "last"),
    # counted in skip_layers.json of github.com/dilab-zju/self-speculative-decoding
    [
        ("llama-2-13b", 40, 24, 10, (3, 6), (37, 35)),
        ("llama-2-13b-chat", 40, 24, 10, (7, 7), (38, 38)),
        ("codellama-13b", 40, 22, 12, (5, 10), (37, 34)),
        ("llama-2-70b", 80, 47, 37, (10, 2), (79, 76)),
    ],
)
def test_published_skip_sets(
    name: str, num_layers: int, attention: int, mlp: int, first: tuple[int, int], last: tuple[int, int]
) -> None:
    config = SelfSpeculativeConfig.preset(name)
    assert (len(config.skip.attention), len(config.skip.mlp)) == (attention, mlp)
    assert (config.skip.attention[0], config.skip.mlp[0]) == first
    assert (config.skip.attention[-1], config.skip.mlp[-1]) == last
    assert config.provenance is not None
    assert config.provenance.source is not None
    assert "ACL 2024, arXiv 2309.08168" in config.provenance.source
    config.validate_for(num_layers=num_layers, model_type="llama")
    with pytest.raises(ValueError, match=f"a model with {num_layers} layers"):
        config.validate_for(num_layers=num_layers + 1, model_type="llama")
    with pytest.raises(ValueError, match="type 'llama'"):
        config.validate_for(num_layers=num_layers, model_type="qwen2")
    assert SkipConfig.preset(name) == config.skip
    assert SelfSpeculativeConfig.from_dict(config.to_dict()) == config


def test_presets_by_from_pretrained(hub: mock.Mock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in PRESETS:
        assert SelfSpeculativeConfig.from_pretrained(name) == PRESETS[name]
    with pytest.raises(ValueError, match=r"'llama-2-13b' is a preset.*Leave out name='x'"):
        SelfSpeculativeConfig.from_pretrained("llama-2-13b", name="x")


@pytest.mark.parametrize("cls", [SkipConfig, SelfSpeculativeConfig])
@pytest.mark.parametrize("name", ["llama-2-13B-chat", None, ["llama-2-13b"]])
def test_unknown_presets_are_refused(cls: Any, name: Any) -> None:
    with pytest.raises(ValueError, match=r"no preset .*; there are 'llama-2-13b', 'llama-2-13b-chat', 'codellama-13b'"):
        cls.preset(name)


def test_presets_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        PRESETS["mine"] = FULL  # type: ignore[index]


# --- Provenance of a model ------------------------------------------------------------------------


def test_provenance_of_a_model() -> None:
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"]()).to(torch.bfloat16)
    before = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    provenance = Provenance.from_model(model)
    after = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    assert provenance.model_id is None
    assert provenance.revision is None
    assert (provenance.model_type, provenance.num_layers) == ("llama", LAYERS)
    assert (provenance.dtype, provenance.device) == ("bfloat16", "cpu")
    assert provenance.attention_implementation == model.config._attn_implementation
    assert provenance.versions is not None
    assert provenance.versions["torch"] == torch.__version__
    assert provenance.versions["transformers"] == transformers.__version__
    assert provenance.versions["python"] == platform.python_version()
    assert set(provenance.versions) == {"torch", "transformers", "python", "ssd_generation"}
    assert provenance.date in (before, after)
    config = SelfSpeculativeConfig(SkipConfig([1]), provenance=provenance)
    assert SelfSpeculativeConfig.from_dict(json.loads(config.to_json_string())) == config
    config.validate_for(LAYERS, "llama")


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("loaded_from", "model_id", "revision"),
    [
        ("user/model", "user/model", None),
        ("gpt2", "gpt2", None),
        ("/home/someone/models/mine", "mine", None),
        ("/home/someone/models/mine/", "mine", None),
        ("../models/mine", "mine", None),
        ("runs/7/mine", "mine", None),
        ("~/mine", "mine", None),
        (r"C:\Users\someone\mine", "mine", None),
        (f"/home/someone/hub/models--user--my--model/snapshots/{COMMIT}", "user/my--model", COMMIT),
        ("/home/someone/hub/models--gpt2/snapshots", "gpt2", None),
        ("/", None, None),
    ],
)
def test_provenance_never_tells_where_the_model_lay(
    loaded_from: str, model_id: str | None, revision: str | None
) -> None:
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"]())
    model.config._name_or_path = loaded_from
    provenance = Provenance.from_model(model)
    assert (provenance.model_id, provenance.revision) == (model_id, revision)


def test_provenance_of_a_relative_folder_and_of_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    transformers.AutoModelForCausalLM.from_config(CONFIGS["gpt2"]()).save_pretrained("models/mine")
    model = transformers.AutoModelForCausalLM.from_pretrained("models/mine")
    assert Provenance.from_model(model).model_id == "mine"
    model.config._commit_hash = COMMIT
    provenance = Provenance.from_model(model)
    assert (provenance.model_type, provenance.num_layers, provenance.revision) == ("gpt2", LAYERS, COMMIT)


def test_provenance_names_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = SimpleNamespace(config=CONFIGS["llama"](), device=torch.device("cuda:1"), dtype=torch.float16)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"Some GPU {device.index}")
    assert Provenance.from_model(model).device == "cuda (Some GPU 1)"
