"""Configs: accepted and refused values, the messages, and lossless round trips through JSON."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import itertools
import json
import os
import pickle
import platform
import re
import socket
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

from effort import little_work
from ssd_generation.config import (
    CONFIG_NAME,
    FORMAT_VERSION,
    POLICIES,
    PRECISIONS,
    PRESETS,
    Costs,
    DraftingConfig,
    LookupConfig,
    PrecisionConfig,
    Provenance,
    SelfSpeculativeConfig,
    SkipConfig,
)
from ssd_generation.drafting.policy import make_policy
from tiny_models import CONFIGS, LAYERS

COSTS = Costs(
    plain_step=0.031, draft_step=0.017, verify=[(1, 0.031), (4, 0.055)], measured_on="cpu Intel Xeon 2 threads float32"
)
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
PRECISION = PrecisionConfig("int4", {7: None, 4: "int8"}, {5: None}, head="int8")
FULL = SelfSpeculativeConfig(
    SkipConfig([3, 5], [6]),
    DraftingConfig(policy="fixed", acceptance=(0.9, 0.75)),
    PRECISION,
    LookupConfig(max_ngram=3),
    COSTS,
    PROVENANCE,
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


NAN, INF = float("nan"), float("inf")
SHARE = "a number between 0 and 1"
LOW_BIT = "'int8' or 'int4', or None for the weights as loaded"
SECONDS = "a number of seconds between 1e-9 and 1e6"
# Part, field, the bound in words, values out of bounds, and values of another type.
BOUNDS: list[tuple[type[Any], str, str, list[Any], list[Any]]] = [
    (DraftingConfig, "max_draft_length", "an integer from 1 to 128", [0, -3, 129], [2.0, True]),
    (DraftingConfig, "threshold", SHARE, [1.01, NAN, 10**400], ["0.5", True, None]),
    (DraftingConfig, "target_acceptance", SHARE, [-0.1], []),
    (DraftingConfig, "acceptance_smoothing", SHARE, [2], []),
    (DraftingConfig, "threshold_smoothing", SHARE, [INF], []),
    (DraftingConfig, "threshold_step", SHARE, [-1], []),
    (DraftingConfig, "exploration", "a number between 0 and 0.5", [0.51, -0.01], [False]),
    (DraftingConfig, "carry_state", "True, False or None", [], [1]),
    (DraftingConfig, "policy", "'cost', 'confidence', 'fixed' or 'none'", [], [None]),
    (DraftingConfig, "acceptance", "a sequence of probabilities, such as [0.9, 0.85] (() for the default)", [],
     [0.9, {0.9}, {1: 0.9}, "0.9", None]),
    (Costs, "plain_step", SECONDS, [0.0, 5e-324, INF], []),
    (Costs, "draft_step", SECONDS, [-1, NAN], ["0.1"]),
    (Costs, "measured_on", "a string of at most 300 characters", [], [2]),
    (PrecisionConfig, "default", LOW_BIT, ["int2"], [8, torch.int8]),
    (PrecisionConfig, "head", LOW_BIT, ["Int8"], [False]),
    (PrecisionConfig, "group_size", "32, 64, 128 or 256", [48, 0], [64.0, None]),
    (LookupConfig, "max_ngram", "an integer from 1 to 16", [0], [True]),
    (LookupConfig, "min_ngram", "an integer from 1 to 16", [0], [None]),
    (LookupConfig, "max_tokens", "an integer from 1 to 128", [0], [1.0]),
    (Provenance, "model_id", "a string of at most 300 characters", [], [3]),
    (Provenance, "num_layers", "an integer from 1 to 10,000", [0], ["30"]),
]  # fmt: skip
GIVEN: dict[type[Any], dict[str, Any]] = {Costs: {"plain_step": 0.1, "draft_step": 0.1, "verify": [(1, 0.1)]}}


@pytest.mark.parametrize(
    ("part", "field", "bound", "value", "error"),
    [
        (part, field, bound, value, error)
        for part, field, bound, beyond, other in BOUNDS
        for values, error in ((beyond, ValueError), (other, TypeError))
        for value in values
    ],
    ids=lambda part: part.__name__ if isinstance(part, type) else repr(part)[:20],
)
def test_a_value_out_of_its_bound_is_refused(
    part: type[Any], field: str, bound: str, value: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=re.escape(f"{field} must be {bound}, but got {repr(value)[:20]}")):
        part(**{**GIVEN.get(part, {}), field: value})


@pytest.mark.parametrize(
    ("part", "values", "error", "words"),
    [
        (DraftingConfig, {"policy": "confidense"}, ValueError,
         "use 'cost', 'confidence', 'fixed' or 'none'. Did you mean 'confidence'?"),
        (DraftingConfig, {"acceptance": [0.9, "0.8"]}, TypeError, f"drafted token 2 must be {SHARE}, but got '0.8'"),
        (DraftingConfig, {"acceptance": [0.9, 1.5]}, ValueError, f"drafted token 2 must be {SHARE}, but got 1.5"),
        (DraftingConfig, {"acceptance": [NAN]}, ValueError, f"drafted token 1 must be {SHARE}, but got nan"),
        (Costs, {"plain_step": 5e-324}, ValueError, "but got 5e-324. Measure it again."),
        (Costs, {"verify": []}, ValueError, "empty"),
        (Costs, {"verify": 0.1}, TypeError, "(tokens, seconds) pairs"),
        (Costs, {"verify": {1: 0.1}}, TypeError, "(tokens, seconds) pairs"),
        (Costs, {"verify": [0.1]}, TypeError, "it has 0.1"),
        (Costs, {"verify": [(1, 0.1, 2)]}, ValueError, "it has (1, 0.1, 2)"),
        (Costs, {"verify": [(0, 0.1)]}, ValueError,
         "token count in verify must be an integer from 1 to 1,000,000, but got 0"),
        (Costs, {"verify": [(1.0, 0.1)]}, TypeError, "token count in verify must be an integer"),
        (Costs, {"verify": [(2, 0.1), (2, 0.2)]}, ValueError, "2 comes after 2"),
        (Costs, {"verify": [(2, 0.1), (1, 0.2)]}, ValueError, "1 comes after 2"),
        (Costs, {"verify": [(4, 0.0)]}, ValueError, "time of verifying 4 tokens must be a number of seconds between"),
        (LookupConfig, {"min_ngram": 5}, ValueError,
         "min_ngram must be at most max_ngram (4), but got 5. Lower it, or raise"),
        (Provenance, {"versions": {"torch": 2}}, TypeError, "versions must map names to version strings"),
        (Provenance, {"versions": ["torch"]}, TypeError, "versions must map"),
        (Provenance, {"date": "31.1.2025"}, ValueError, "YYYY-MM-DD"),
        (Provenance, {"date": "20250131"}, ValueError, "YYYY-MM-DD"),
        (Provenance, {"date": "2025-02-30"}, ValueError, "'2025-02-30'"),
        (SelfSpeculativeConfig, {"skip": [3]}, TypeError, "skip must be a SkipConfig, but got [3]."),
        (SelfSpeculativeConfig, {"skip": None}, TypeError, "skip must be a SkipConfig"),
        (SelfSpeculativeConfig, {"skip": {"attention": [3]}}, TypeError, "SelfSpeculativeConfig.from_dict"),
        (SelfSpeculativeConfig, {"drafting": "fixed"}, TypeError, "drafting must be a DraftingConfig"),
        (SelfSpeculativeConfig, {"precision": 8}, TypeError,
         "precision must be a PrecisionConfig, 'int8' or 'int4', a dict of its fields, or None"),
        (SelfSpeculativeConfig, {"precision": True}, TypeError, "as loaded, but got True."),
        (SelfSpeculativeConfig, {"lookup": 10}, TypeError,
         "lookup must be a LookupConfig, True, a dict of its fields, or None for no prompt lookup, but"),
        (SelfSpeculativeConfig, {"lookup": "yes"}, TypeError, "but got 'yes'."),
        (SelfSpeculativeConfig, {"costs": 1.0}, TypeError, "costs must be a Costs"),
        (SelfSpeculativeConfig, {"provenance": "me"}, TypeError, "provenance must be a Provenance"),
        (PrecisionConfig.named, {"name": "int3"}, ValueError,
         "no precision 'int3'; use 'int8' or 'int4'. Did you mean 'int"),
        (PrecisionConfig.named, {"name": "bfloat16"}, ValueError, "no precision 'bfloat16'; use 'int8' or 'int4'."),
        (PrecisionConfig.named, {"name": 8}, TypeError, "'int8' or 'int4', but got 8"),
        (PrecisionConfig.named, {"name": None}, TypeError, "'int8' or 'int4', but got None"),
    ],
)  # fmt: skip
def test_bad_values_are_refused(part: Any, values: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        part(**{**GIVEN.get(part, {}), **values})


def test_the_bounds_of_probabilities_are_allowed() -> None:
    drafting = DraftingConfig(max_draft_length=np.int64(1), threshold=0, target_acceptance=np.float32(1))
    assert (drafting.max_draft_length, drafting.threshold, drafting.target_acceptance) == (1, 0.0, 1.0)
    assert [type(v) for v in (drafting.max_draft_length, drafting.threshold, drafting.target_acceptance)] == [
        int,
        float,
        float,
    ]
    assert DraftingConfig(exploration=0.5, acceptance=[]).exploration == 0.5
    acceptance = DraftingConfig(acceptance=np.array([1, 0], dtype=np.float32)).acceptance
    assert acceptance == (1.0, 0.0) and all(type(share) is float for share in acceptance)


def test_the_defaults_are_the_cost_policy_and_the_published_constants() -> None:
    assert DraftingConfig().to_dict() == {
        "policy": "cost",
        "max_draft_length": 12,
        "threshold": 0.6,
        "target_acceptance": 0.9,
        "acceptance_smoothing": 0.5,
        "threshold_smoothing": 0.9,
        "threshold_step": 0.01,
        "acceptance": [],
        "exploration": 0.01,
        "carry_state": None,
    }


@pytest.mark.parametrize("policy", ["confidence", "fixed"])
def test_the_policies_of_a_set_length_can_be_made(policy: str) -> None:
    assert make_policy(DraftingConfig(policy=policy, max_draft_length=3)).draft_length(10) == 3


@pytest.mark.parametrize(
    ("verify", "expected"),
    [
        # between the measured counts, at them, and beyond them
        ([(1, 10), (2, 12), (4, 20)], {1: 10, 2: 12, 3: 16, 4: 20, 5: 24, 8: 36}),
        # one token is not measured: a plain step (8) replaces it
        ([(3, 10)], {1: 8, 2: 9, 3: 10, 5: 12}),
        ([(2, 9), (4, 9)], {1: 8, 2: 9, 3: 9, 9: 9}),
        # noise between the last two makes long drafts neither free nor ever cheaper
        ([(1, 10), (4, 14), (8, 12)], {4: 14, 6: 13, 8: 12, 100: 12}),
        # a single point gives no slope
        ([(1, 10)], {1: 10, 7: 10}),
    ],
)
def test_the_time_of_a_verify_pass_that_was_not_measured(
    verify: list[tuple[int, float]], expected: dict[int, float]
) -> None:
    costs = Costs(plain_step=8, draft_step=1, verify=verify)
    assert {tokens: costs.verify_seconds(tokens) for tokens in expected} == pytest.approx(expected)


@pytest.mark.parametrize("tokens", [0, -1, 1.5, True, "2"])
def test_a_verify_pass_over_no_tokens_has_no_time(tokens: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=f"an integer from 1 to 1,000,000, but got {tokens!r}"):
        COSTS.verify_seconds(tokens)


@pytest.mark.parametrize("kind", ["attention", "mlp"])
@pytest.mark.parametrize(
    ("exceptions", "error", "words"),
    [
        ({-1: "int8"}, ValueError, "negative layer -1"),
        ({"-1": "int8"}, ValueError, "negative layer -1"),
        ({3: "int8", "3": None}, ValueError, "layer 3 more than once"),
        ({1.0: "int8"}, TypeError, "1.0, which is not an integer"),
        ({"three": "int8"}, TypeError, "'three', which is not an integer"),
        ({"": "int8"}, TypeError, "'', which is not an integer"),
        ({"³": "int8"}, TypeError, "'³', which is not an integer"),
        ({None: "int8"}, TypeError, "None, which is not an integer"),
        ({True: "int8"}, TypeError, "True, which is not an integer"),
        ([3], TypeError, "must map layers to precisions, such as {3: 'int8', 5: None} ({} for no exceptions), but got"),
        ("int8", TypeError, "must map layers to precisions"),
        (None, TypeError, "must map layers to precisions"),
        ({3: "int5"}, ValueError, "3 must be 'int8' or 'int4', or None for the weights as loaded, but got 'int5'"),
        ({3: "int08"}, ValueError, "Did you mean 'int8'?"),
        ({3: 8}, TypeError, "3 must be 'int8' or 'int4', or None for the weights as loaded, but got 8"),
        ({3: ["int8"]}, TypeError, "but got ['int8']"),
    ],
)
def test_bad_precision_exceptions_are_refused(kind: str, exceptions: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)) as caught:
        PrecisionConfig(**{kind: exceptions})
    assert kind in str(caught.value)


def test_the_precision_of_a_sublayer() -> None:
    precision = PrecisionConfig("int4", {"7": None, np.int64(4): "int8"}, {5: None}, "int8", np.int64(32))
    assert precision.attention == {4: "int8", 7: None} and list(precision.attention) == [4, 7]
    assert all(type(layer) is int for layer in precision.attention)
    assert type(precision.group_size) is int
    assert [precision.of("attention", layer) for layer in (4, 5, 7)] == ["int8", "int4", None]
    assert [precision.of("mlp", layer) for layer in (4, 5, 7)] == ["int4", None, "int4"]
    with pytest.raises(ValueError, match="'attention' and 'mlp', but got 'head'"):
        precision.of("head", 0)


def test_a_precision_is_true_where_anything_is_low_bit() -> None:
    for nothing in (PrecisionConfig(), PrecisionConfig(attention={3: None}, mlp={}, group_size=32)):
        assert not nothing
    for something in (
        PrecisionConfig("int8"),
        PrecisionConfig(head="int4"),
        PrecisionConfig(attention={3: "int8"}),
        PrecisionConfig(mlp={3: None, 4: "int4"}),
    ):
        assert something


@pytest.mark.parametrize("name", PRECISIONS)
def test_precisions_by_name(name: str) -> None:
    assert PrecisionConfig.named(name) == PrecisionConfig(default=name, head="int8")
    assert SelfSpeculativeConfig(precision=name).precision == PrecisionConfig.named(name)


def test_lookups_up_to_the_limits_are_allowed() -> None:
    lookup = LookupConfig(max_ngram=np.int64(2), min_ngram=2, max_tokens=1)
    assert lookup.to_dict() == {"max_ngram": 2, "min_ngram": 2, "max_tokens": 1}
    assert type(lookup.max_ngram) is int
    assert LookupConfig() == LookupConfig(4, 1, 12)


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        (None, None),
        (PRECISION, PRECISION),
        ("int4", PrecisionConfig.named("int4")),
        ({"default": "int8", "mlp": {"3": None, 4: "int4"}}, PrecisionConfig("int8", mlp={3: None, 4: "int4"})),
        ({}, PrecisionConfig()),
    ],
)
def test_a_precision_in_every_form(precision: Any, expected: PrecisionConfig | None) -> None:
    assert SelfSpeculativeConfig(precision=precision).precision == expected
    assert SelfSpeculativeConfig.from_dict({"precision": precision}).precision == expected


@pytest.mark.parametrize(
    ("lookup", "expected"),
    [
        (None, None),
        (False, None),
        (True, LookupConfig()),
        (LookupConfig(2), LookupConfig(2)),
        ({"max_tokens": 3}, LookupConfig(max_tokens=3)),
        ({}, LookupConfig()),
    ],
)
def test_a_lookup_in_every_form(lookup: Any, expected: LookupConfig | None) -> None:
    assert SelfSpeculativeConfig(lookup=lookup).lookup == expected
    assert SelfSpeculativeConfig.from_dict({"lookup": lookup}).lookup == expected


@pytest.mark.parametrize("precision", [{"attention": {3: "int8"}}, {"attention": {"3": None, 4: "int8"}}])
def test_a_precision_for_a_skipped_sublayer_is_refused(precision: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"skips attention 3, and the draft precision names the same\. Leave"):
        SelfSpeculativeConfig(SkipConfig([2, 3], [4]), precision=precision)
    with pytest.raises(ValueError, match=r"skips mlp 3, and"):
        SelfSpeculativeConfig(SkipConfig([2], [3]), precision={"mlp": precision["attention"]})
    # sub-layers of the other kind, or a default precision
    SelfSpeculativeConfig(SkipConfig([2], [3]), precision=precision)
    SelfSpeculativeConfig(SkipConfig([2, 3], [4]), precision="int8")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (SelfSpeculativeConfig(), True),
        (SelfSpeculativeConfig(SkipConfig([1])), True),
        (SelfSpeculativeConfig(lookup=True), False),
        (SelfSpeculativeConfig(SkipConfig(mlp=[1]), lookup=True), True),
        (SelfSpeculativeConfig(precision="int8", lookup=True), True),
        (SelfSpeculativeConfig(precision=PrecisionConfig(attention={1: None}), lookup=True), False),
        (SelfSpeculativeConfig(SkipConfig([1]), DraftingConfig("none"), "int8"), False),
    ],
)
def test_whether_the_model_drafts_for_itself(config: SelfSpeculativeConfig, expected: bool) -> None:
    assert config.drafts_itself is expected


def test_a_config_cannot_be_changed_and_can_be_a_key() -> None:
    for part in (FULL, FULL.skip, FULL.drafting, PRECISION, FULL.lookup, COSTS, PROVENANCE):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, dataclasses.fields(part)[0].name, None)
        assert {part: 1}[copy.deepcopy(part)] == 1
        assert pickle.loads(pickle.dumps(part)) == part
    with pytest.raises(TypeError):
        PROVENANCE.versions["torch"] = "3"  # type: ignore[index]
    assert PROVENANCE.versions == {"python": "3.11.7", "torch": "2.13.0"}
    with pytest.raises(TypeError):
        PRECISION.attention[3] = "int8"  # type: ignore[index]
    layers: dict[int, str | None] = {3: "int8"}
    precision = PrecisionConfig(mlp=layers)
    layers[3] = "int4"
    assert precision.of("mlp", 3) == "int8"
    assert dataclasses.replace(FULL, drafting=DraftingConfig()) != FULL


# --- Bounds ---------------------------------------------------------------------------------------

PARTS = (SkipConfig, DraftingConfig, PrecisionConfig, LookupConfig, Costs, Provenance)


@pytest.mark.parametrize("part", PARTS)
def test_every_field_states_its_bound_and_the_docstring_tells_it(part: type[Any]) -> None:
    stated = {f.name: f.metadata["bound"] for f in dataclasses.fields(part) if "bound" in f.metadata}
    # Fields that take one of a few values.
    assert {f.name for f in dataclasses.fields(part)} - set(stated) <= {
        *("policy", "carry_state", "default", "head", "group_size"),
    }
    for bound in stated.values():
        for end in (getattr(bound, "most", None), getattr(bound, "least", None)):
            if end not in (None, 0, 1):  # written as [0, 1]
                written = {f"{end:,}", f"{end:g}".replace("e+0", "e").replace("e-0", "e-"), f"{end - 1:,}"}
                assert any(re.search(rf"(?<!\d){re.escape(w)}(?!\d)", part.__doc__ or "") for w in written), bound


LONG = "\N{GRINNING FACE}" * 300
LARGEST = SelfSpeculativeConfig(
    SkipConfig(range(0, 9_998, 2), range(9_990, 10_000)),
    DraftingConfig(max_draft_length=128, acceptance=[0.1234567890123456] * 128),
    PrecisionConfig("int8", dict.fromkeys(range(1, 9_999, 2), "int8"), dict.fromkeys(range(9_990), "int4")),
    LookupConfig(16, 16, 128),
    Costs(1e-9, 1e6, [(10**6 - n, 1.234567890123456e-9) for n in reversed(range(1_000))], LONG),
    Provenance(
        LONG, LONG, 10_000, LONG, LONG, LONG, LONG, {f"{n:02}{LONG[2:]}": LONG for n in range(50)}, "2025-01-31",
        "\N{GRINNING FACE}" * 10_000,
    ),
)  # fmt: skip


def test_the_largest_config_is_made_saved_and_read_in_no_time(tmp_path: Path) -> None:
    with little_work():
        assert LARGEST.save_pretrained(tmp_path).stat().st_size < 2**20
        assert SelfSpeculativeConfig.from_pretrained(tmp_path) == LARGEST
        LARGEST.validate_for(10_000)
        assert hash(LARGEST) == hash(dataclasses.replace(LARGEST)) and LARGEST.longest_draft == 256
    with pytest.raises(ValueError, match="names attention 4, 6, 8, 10, 12, 14 and 4,991 more, but the model") as caught:
        LARGEST.skip.validate_for(4)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SkipConfig([10_000]), "attention has layer 10000, but layers are counted from 0 to 9,999"),
        (lambda: SkipConfig(mlp=itertools.count()), "mlp must have at most 10,000 entries, but it has more"),
        (lambda: SkipConfig([10**400]), "layers are counted from 0 to 9,999"),
        (lambda: SkipConfig([-(10**5000)]), "negative layer"),
        (lambda: PrecisionConfig(mlp={"10000": None}), "mlp has layer 10000, but"),
        (lambda: PrecisionConfig(mlp=dict.fromkeys(range(10_001))), "at most 10,000 entries"),
        (lambda: DraftingConfig(max_draft_length=5_000), "must be an integer from 1 to 128, but got 5000"),
        (lambda: DraftingConfig(acceptance=itertools.repeat(0.5)), "acceptance must have at most 128 entries"),
        (lambda: LookupConfig(max_tokens=10**7), "max_tokens must be an integer from 1 to 128"),
        (lambda: LookupConfig(max_ngram=10**9), "max_ngram must be an integer from 1 to 16"),
        (lambda: Costs(5e-324, 1, [(1, 1)]), "between 1e-9 and 1e6, but got 5e-324"),
        (lambda: Costs(1, 1, ((n, 1) for n in itertools.count(1))), "verify must have at most 1,000 entries"),
        (lambda: Costs(1, 1, [(10**6 + 1, 1)]), "an integer from 1 to 1,000,000, but got 1000001"),
        (lambda: Costs(1, 1, [range(10**9)]), "(tokens, seconds) pairs"),  # type: ignore[list-item]
        (lambda: Costs(1, 1, [(1, 1)], "x" * 301), "measured_on must be a string of at most 300 characters"),
        (lambda: Provenance(num_layers=10_001), "num_layers must be an integer from 1 to 10,000"),
        (lambda: Provenance(model_id="x" * 301), "model_id must be a string of at most 300 characters"),
        (lambda: Provenance(source="x" * 10_001), "source must be a string of at most 10,000 characters"),
        (lambda: Provenance(source="\ud800"), "source has a lone surrogate"),
        (lambda: Provenance(versions={str(n): "1" for n in range(51)}), "versions must have at most 50 entries"),
        (lambda: Provenance(versions={"x" * 301: "1"}), "A name in versions must be a string of at most 300"),
        (lambda: Provenance(versions={"torch": "1" * 301}), "The version of 'torch' must be a string of at most 300"),
        (lambda: SkipConfig().validate_for(10**400), "num_layers must be an integer from 1 to 10,000"),
        (lambda: COSTS.verify_seconds(10**400), "tokens must be an integer from 1 to 1,000,000"),
        (lambda: SelfSpeculativeConfig.from_dict({"format_version": 10**400}), "format_version must be an integer"),
        (lambda: SelfSpeculativeConfig.from_dict({str(n): {} for n in range(1_001)}), "at most 1,000 entries"),
    ],
)  # fmt: skip
def test_beyond_the_bounds(make: Any, words: str) -> None:
    with little_work(), pytest.raises(ValueError, match=re.escape(words)) as caught:
        make()
    assert len(str(caught.value)) < 500


class Huge:
    def __repr__(self) -> str:
        return "x" * 10**6


class Failing:
    def __repr__(self) -> str:
        raise RuntimeError("no")


HOSTILE = [Huge(), Failing(), "y" * 10**6, [Failing()] * 10**5, 10**5000, {"z" * 10**6: Huge()}, b"x" * 10**6, -1.5]


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: type(value).__name__)
def test_no_value_whatever_makes_a_long_message(value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    key = "k" * 10**6 if isinstance(value, (list, dict)) else value
    known = {"plain_step": 1, "draft_step": 1, "verify": [(1, 1)]}
    parts: dict[Any, Any] = {part: known if part is Costs else {} for part in PARTS}
    calls: list[Any] = [
        *(lambda p=p, f=f: p(**{**parts[p], f.name: value}) for p in PARTS for f in dataclasses.fields(p)),
        *(lambda p=p, f=f: p.from_dict({**parts[p], f.name: [value]}) for p in PARTS for f in dataclasses.fields(p)),
        *(lambda p=p: p.from_dict({**parts[p], key: 1}) for p in PARTS),
        lambda: SelfSpeculativeConfig.from_dict({key: 1}),
        *(lambda f=f: SelfSpeculativeConfig(**{f.name: value}) for f in dataclasses.fields(SelfSpeculativeConfig)),
        lambda: PrecisionConfig(attention={key: "int8"}),
        lambda: PrecisionConfig(attention={1: value}),
        lambda: PrecisionConfig().of(value, 1),
        lambda: PrecisionConfig.named(value),
        lambda: Costs(1, 1, [(1, value)]),
        lambda: Costs(1, 1, [(value, 1)]),
        lambda: Provenance(versions={"a": value}),
        lambda: SelfSpeculativeConfig.from_dict(value),
        lambda: SelfSpeculativeConfig.from_dict({"attention": [1]}, name=value),
        lambda: SelfSpeculativeConfig.from_dict(SEVERAL, name=value),
        lambda: SelfSpeculativeConfig.from_dict({"a" * 10**6: {"mlp": [1]}, "b" * 10**6: {}}),
        lambda: SelfSpeculativeConfig.preset(value),
        lambda: SelfSpeculativeConfig.from_pretrained(value),
        lambda: SelfSpeculativeConfig.from_pretrained("llama-2-13b", name=value),
        lambda: SelfSpeculativeConfig.from_pretrained("llama-2-13b", **{"k" * 10**6: value}),
        lambda: SelfSpeculativeConfig(provenance=Provenance(model_type=LONG, model_id=LONG)).validate_for(4, key),
    ]
    refused = 0
    for call in calls:
        message = ""
        with little_work():
            try:
                call()
            except (TypeError, ValueError, FileNotFoundError) as error:
                message = str(error)
                refused += 1
        assert len(message) < 600, message[:1000]
    assert refused > len(calls) - 30  # some are valid, such as -1.5 as a name


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


@pytest.mark.parametrize(
    ("precision", "words"),
    [
        (PrecisionConfig(attention={3: "int8", 4: None, 9: "int4"}), "attention 4, 9, but the model has 4 layers"),
        (PrecisionConfig("int8", mlp={4: None}), "draft precision names mlp 4, but the model has 4 layers (0 to 3)"),
    ],
)
def test_a_precision_that_does_not_fit_is_refused(precision: PrecisionConfig, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        precision.validate_for(4)
    with pytest.raises(ValueError, match=re.escape(words)):
        SelfSpeculativeConfig(precision=precision).validate_for(num_layers=4, model_type="llama")
    with pytest.raises(ValueError, match=re.escape(words)):
        SelfSpeculativeConfig(precision=precision, provenance=Provenance(num_layers=4))
    precision.validate_for(10)


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
    with pytest.raises((TypeError, ValueError), match="num_layers must be"):
        PrecisionConfig().validate_for(num_layers)


# --- Dicts and JSON -------------------------------------------------------------------------------

layers = st.sets(st.integers(0, 200)).map(sorted)
skips = st.builds(SkipConfig, layers, layers)
shares = st.floats(0, 1)
draftings = st.builds(
    DraftingConfig,
    st.sampled_from(POLICIES),
    st.integers(1, 128),
    *[shares] * 5,
    acceptance=st.lists(shares, max_size=4),
    exploration=st.floats(0, 0.5),
    carry_state=st.none() | st.booleans(),
)
low_bits = st.none() | st.sampled_from(PRECISIONS)
exceptions = st.dictionaries(st.integers(0, 200), low_bits)
precisions = st.builds(PrecisionConfig, low_bits, exceptions, exceptions, low_bits, st.sampled_from([32, 64, 128, 256]))
lookups = st.tuples(st.integers(1, 16), st.integers(1, 16), st.integers(1, 128)).map(
    lambda n: LookupConfig(max(n[:2]), min(n[:2]), n[2])
)
seconds = st.floats(1e-9, 1e6)
# JSON text in UTF-8 cannot hold lone surrogates.
text = st.text(st.characters(exclude_categories=["Cs"]))
costs = st.builds(
    Costs,
    seconds,
    seconds,
    st.dictionaries(st.integers(1, 10**6), seconds, min_size=1).map(lambda d: sorted(d.items())),
    st.none() | text,
)
provenances = st.builds(
    Provenance,
    *[st.none() | text] * 2,
    st.none() | st.integers(201, 1000),
    *[st.none() | text] * 4,
    st.none() | st.dictionaries(text, text),
    st.none() | st.dates().map(datetime.date.isoformat),
    st.none() | text,
)


@st.composite
def configs(draw: st.DrawFn) -> SelfSpeculativeConfig:
    skip, precision = draw(skips), draw(st.none() | precisions)
    if precision is not None:  # a skipped sub-layer has no precision of its own
        kept = {
            kind: {k: v for k, v in getattr(precision, kind).items() if k not in getattr(skip, kind)}
            for kind in ("attention", "mlp")
        }
        precision = dataclasses.replace(precision, **kept)
    return SelfSpeculativeConfig(
        skip,
        draw(draftings),
        precision,
        draw(st.none() | lookups),
        draw(st.none() | costs),
        draw(st.none() | provenances),
    )


@given(configs())
def test_a_config_comes_back_from_a_dict_and_from_json_as_it_was(config: SelfSpeculativeConfig) -> None:
    for data in (config.to_dict(), json.loads(config.to_json_string())):
        again = SelfSpeculativeConfig.from_dict(data)
        assert again == config
        assert hash(again) == hash(config)
        assert again.to_json_string() == config.to_json_string()


@given(configs())
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


@given(precisions, lookups)
def test_precisions_and_lookups_come_back_from_json_as_they_were(
    precision: PrecisionConfig, lookup: LookupConfig
) -> None:
    again = PrecisionConfig.from_dict(json.loads(json.dumps(precision.to_dict())))
    assert again == precision and hash(again) == hash(precision) and repr(again) == repr(precision)
    assert eval(repr(precision)) == precision
    assert LookupConfig.from_dict(json.loads(json.dumps(lookup.to_dict()))) == lookup


@given(costs, st.integers(1, 300), st.integers(1, 300))
def test_a_verify_pass_takes_a_time_between_those_measured_around_it(costs: Costs, tokens: int, more: int) -> None:
    measured = {1: costs.plain_step} | dict(costs.verify)
    taken = costs.verify_seconds(tokens)
    last = max(measured)
    if tokens in measured:
        assert taken == measured[tokens]
    elif tokens < last:
        around = measured[max(n for n in measured if n < tokens)], measured[min(n for n in measured if n > tokens)]
        assert min(around) * (1 - 1e-12) <= taken <= max(around) * (1 + 1e-12)
    else:
        assert measured[last] <= taken <= costs.verify_seconds(tokens + more)


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
        '    "threshold_step": 0.01,\n'
        '    "acceptance": [0.9, 0.75],\n'
        '    "exploration": 0.01,\n'
        '    "carry_state": null\n'
        "  },\n"
        '  "precision": {\n'
        '    "default": "int4",\n'
        '    "attention": {\n'
        '      "4": "int8",\n'
        '      "7": null\n'
        "    },\n"
        '    "mlp": {\n'
        '      "5": null\n'
        "    },\n"
        '    "head": "int8",\n'
        '    "group_size": 32\n'
        "  },\n"
        '  "lookup": {\n'
        '    "max_ngram": 3,\n'
        '    "min_ngram": 1,\n'
        '    "max_tokens": 12\n'
        "  },\n"
        '  "costs": {\n'
        '    "plain_step": 0.031,\n'
        '    "draft_step": 0.017,\n'
        '    "verify": [[1, 0.031], [4, 0.055]],\n'
        '    "measured_on": "cpu Intel Xeon 2 threads float32"\n'
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


def test_what_is_not_set_is_not_written() -> None:
    assert set(SelfSpeculativeConfig().to_dict()) == {"format_version", "skip", "drafting"}
    assert "measured_on" not in Costs(0.1, 0.1, [(1, 0.1)]).to_dict()


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
        {"skip": {"attn": [3], "mlp": [4]}, "precision": None, "lookup": False},
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
        ({"precison": {"default": "int8"}}, ValueError, "Did you mean 'precision'?"),
        ({"precison": {"attention": {"3": "int8"}}}, ValueError, "Did you mean 'precision'?"),
        ({"precision": {"defualt": "int8"}}, ValueError, "Unknown key 'defualt' in 'precision'; allowed are 'default'"),
        ({"precision": {"defualt": "int8"}}, ValueError, "Did you mean 'default'?"),
        ({"precision": {"attn": {}}}, ValueError, "Unknown key 'attn' in 'precision'"),
        ({"precision": "int3"}, ValueError, "no precision 'int3'"),
        ({"precision": ["int8"]}, TypeError, "precision must be a PrecisionConfig, 'int8' or 'int4', a dict"),
        ({"skip": {"mlp": [3]}, "precision": {"mlp": {"3": "int4"}}}, ValueError, "skips mlp 3, and the draft"),
        ({"lokup": {}, "skip": {}}, ValueError, "Did you mean 'lookup'?"),
        ({"lookup": {"max_ngrams": 3}}, ValueError, "Unknown key 'max_ngrams' in 'lookup'; allowed are 'max_ngram',"),
        ({"lookup": {"max_ngrams": 3}}, ValueError, "Did you mean 'max_ngram'?"),
        ({"lookup": 3}, TypeError, "lookup must be a LookupConfig, True, a dict"),
        ({"precision": "int8", "attention": [3]}, ValueError, "Put 'attention' under 'skip'"),
        ({"drafting": None}, TypeError, "'drafting' must be a JSON object"),
        ({"drafting": []}, TypeError, "'drafting' must be a JSON object"),
        ({"skip": [3]}, TypeError, "but got [3]"),
        ({"skip": {}, "attention": [3]}, ValueError, "Put 'attention' under 'skip'"),
        ({"format_version": 2, "novelty": 1}, ValueError, "format_version 2, but this ssd_generation reads up to 1"),
        ({"format_version": 0}, ValueError, "format_version must be an integer from 1 to"),
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
        ('{"attention": [3],\n "mlp": [4,]}', ValueError, "line 2, column "),
        ("", ValueError, "line 1, column 1: malformed JSON"),
        ('{"attention": [3], "attention": [4]}', ValueError, "'attention' occurs twice"),
        ("[3, 5]", TypeError, "but got [3, 5]"),
        ('{"atention": [3]}', ValueError, "Did you mean 'attention'?"),
        ('{"attention": [3.0]}', TypeError, "3.0, which is not an integer"),
        ('{"attention": [true]}', TypeError, "True, which is not an integer"),
        ('{"attention": null}', TypeError, "[] to skip none"),
        ('{"drafting": {"threshold": NaN}}', ValueError, "NaN is not a number in JSON"),
        ('{"precision": {"mlp": {"3": "int4", "3": null}}}', ValueError, "'3' occurs twice"),
        ("[" * 100_000, ValueError, "deeper than 64 levels"),
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
    with pytest.raises(ValueError, match=r"mine\.json.*is not UTF-8 text"):
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
    # With the same permissions as any file of this user.
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


REPEATED = "{" + ", ".join(f'"k{n}": 0' for n in range(60_000)) + ', "k59999": 1}'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (REPEATED, "'k59999' occurs twice"),
        ("{" + '"a": 0, ' * 100_000 + '"b": 0}', "'a' occurs twice"),
        ('{"' + "a" * 10**6 + '": 0}', "Unknown key 'aaa"),
        ('{"attention": ["' + "a" * 10**6 + '"]}', "which is not an integer"),
        ('{"attention": [' + "9" * 4500 + "]}", "4500 digits"),
        ('{"attention": [' + "9" * 39 + "]}", "from 0 to 9,999"),
        ('{"skip": ' + '{"attention": ' * 5000 + "1" + "}" * 5001, "deeper than"),
        ('{"costs": {"plain_step": 1e999}}', "too large"),
        ('{"provenance": {"source": "\\ud800"}}', "lone surrogate"),
        (" " * (2**20 + 1), "at most 1 MiB"),
    ],
    ids=range(10),
)
def test_hostile_files_are_refused_at_once(tmp_path: Path, content: str, words: str) -> None:
    path = write(tmp_path / CONFIG_NAME, content)
    with little_work(), pytest.raises((TypeError, ValueError), match=words) as caught:
        SelfSpeculativeConfig.from_pretrained(tmp_path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "round", "folder"])
def test_what_is_no_file_is_refused_without_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, inside: bool
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    path = Path(CONFIG_NAME)
    with socket.socket(socket.AF_UNIX) as server:
        {
            "pipe": lambda: os.mkfifo(path),
            "socket": lambda: server.bind(str(path)),
            "device": lambda: path.symlink_to("/dev/zero"),
            "round": lambda: path.symlink_to(path),
            "folder": path.mkdir,
        }[kind]()
        given = tmp_path if inside else tmp_path / path
        if kind != "folder" or inside:
            with pytest.raises((ValueError, FileNotFoundError), match=CONFIG_NAME):
                SelfSpeculativeConfig.from_pretrained(given)
        with pytest.raises((ValueError, FileNotFoundError), match=CONFIG_NAME):
            SelfSpeculativeConfig.from_json_file(path)
        if kind == "folder":
            with pytest.raises(ValueError, match="cannot be written into"):
                FULL.save_pretrained(tmp_path)
        else:
            FULL.save_pretrained(tmp_path)  # replaces it, and never writes into it
            assert SelfSpeculativeConfig.from_pretrained(tmp_path) == FULL
    assert os.listdir(tmp_path) == [CONFIG_NAME]


@pytest.mark.parametrize(
    "name",
    ["n" * 300, "/" + "n" * 300, "n/" * 3000, "round/x", "~nosuchuser/x", "~nosuchuser", "a\0b", "file/x", "file"],
)
def test_names_that_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "file", "text")
    (tmp_path / "round").symlink_to("round")
    before = sorted(os.listdir(tmp_path))
    for call in (
        lambda: SelfSpeculativeConfig.from_pretrained(name),
        lambda: SelfSpeculativeConfig.from_pretrained(Path(name)),
        lambda: SelfSpeculativeConfig.from_pretrained(tmp_path, subfolder=name),
        lambda: SelfSpeculativeConfig.from_json_file(name),
        lambda: FULL.save_pretrained(name),
        lambda: FULL.save_pretrained(Path(name)),
    ):
        with pytest.raises((ValueError, FileNotFoundError)) as caught:
            call()
        assert type(caught.value) in (ValueError, FileNotFoundError) and len(str(caught.value)) < 600
    assert sorted(os.listdir(tmp_path)) == before


def test_without_a_home_folder_none_is_made_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as without $HOME and without a password entry
    with pytest.raises(ValueError, match=r"'~/mine' begins with the home folder of an unknown user"):
        FULL.save_pretrained("~/mine")
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        SelfSpeculativeConfig.from_pretrained("~/mine")
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "listdir", mock.Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(ValueError, match="cannot be read: Permission denied"):
        SelfSpeculativeConfig.from_pretrained(tmp_path)


def test_home_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert FULL.save_pretrained("~/mine") == tmp_path / "mine" / CONFIG_NAME
    assert SelfSpeculativeConfig.from_pretrained("~/mine") == FULL


# --- The Hub --------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Mock the download; it fails a test that should not have called it."""
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
    from ssd_generation.support.hub import HUB_KEYWORDS

    with mock.patch.object(huggingface_hub, "hf_hub_download", autospec=True) as download:
        download("a/b", CONFIG_NAME, revision=None, **dict.fromkeys(HUB_KEYWORDS))


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
    error = kind.__new__(kind)  # the constructor requires a response of the HTTP library in use
    Exception.__init__(error, text)
    return error


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(13, "Permission denied", "cache"),
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


def test_presets_draft_as_much_as_pays() -> None:
    for config in PRESETS.values():
        assert config.drafting == DraftingConfig()
        assert config.precision is None and config.lookup is None


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
