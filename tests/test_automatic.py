"""`self_speculative="auto"`: a memory budget, costs that are measured once and stored, and the fastest draft chosen."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, pipeline

from ssd_generation import (
    Costs,
    DraftingConfig,
    LookupConfig,
    PrecisionConfig,
    SelfSpeculativeConfig,
    SkipConfig,
    enable_self_speculative,
)
from ssd_generation.forward.copies.copied_layers import estimated_bytes
from ssd_generation.forward.copies.layer_copy import LowBitCopy
from ssd_generation.forward.copies.low_bit import copy_bytes, drop_copies
from ssd_generation.support import measurements, trusted
from ssd_generation.support.measurements import cached_measurement
from ssd_generation.support.model_state import state_of
from ssd_generation.tuning import automatic, call_drafter, costs
from ssd_generation.tuning.automatic import automatic_choice, automatic_config, check_budget, usual_budget, weight_bytes
from ssd_generation.tuning.costs import VERIFIED, measure_costs
from ssd_generation.tuning.learnt import LearntPart
from ssd_generation.tuning.measuring import describe_machine
from tiny_models import forget_measurements, left_padded, prompt, tiny_model

NEW = 12


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Start every test without measurements."""
    monkeypatch.setenv("SSD_GENERATION_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def made() -> PreTrainedModel:
    return enable_self_speculative(tiny_model("llama", num_hidden_layers=2, hidden_size=64, intermediate_size=96))


@pytest.fixture
def model() -> PreTrainedModel:
    return made()


def texts(model: Any, inputs: dict[str, Any] | None = None, **kwargs: Any) -> tuple[Any, Any]:
    options: dict[str, Any] = {
        **(inputs or {"input_ids": prompt(9)}),
        "max_new_tokens": NEW,
        "do_sample": False,
    }
    return model.generate(**options), model.generate(**options, self_speculative="auto", **kwargs)


def price(monkeypatch: pytest.MonkeyPatch, seconds: Any) -> None:
    """Set the cost of a draft step to `seconds(config)`, in plain steps."""

    def costs_of(model: Any, config: SelfSpeculativeConfig, *args: Any, **kwargs: Any) -> Costs:
        return Costs(plain_step=1.0, draft_step=seconds(config), verify=[(1, 1.0), (16, 1.1)])

    monkeypatch.setattr(automatic, "costs_of", costs_of)
    monkeypatch.setattr(call_drafter, "costs_of", costs_of)


def by_precision(**prices: float) -> Any:
    def seconds(config: SelfSpeculativeConfig) -> float:
        if config.precision is None:
            return 1.0
        name = config.precision.default if config.precision.head == "int8" else "both"
        return prices.get(str(name), 2.0)

    return seconds


# --- choice
# --------------------------------------------------------------------------------------------------


def test_the_cheapest_draft_is_chosen(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, expected in (("int8", "int8"), ("int4", "int4"), ("both", "int4, head int4")):
        price(monkeypatch, by_precision(**{name: 0.1}))
        drop_copies(model)
        forget_measurements()
        monkeypatch.setenv("SSD_GENERATION_CACHE", os.environ["SSD_GENERATION_CACHE"] + "_")
        choice = automatic_choice(model, prompt(30), draft_memory=1.0)
        assert choice.precision == expected and choice.config.lookup == LookupConfig()
        assert choice.config.costs is not None and choice.config.costs.draft_step == 0.1
        assert max(choice.expected, key=choice.expected.__getitem__) == expected
        plain, ours = texts(model, draft_memory=1.0)
        assert torch.equal(plain, ours) and model.last_speculation.self_drafted_tokens > 0
        assert copy_bytes(model) == estimated_bytes(model, SkipConfig(), choice.config.precision)


def test_nothing_is_copied_where_nothing_pays(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    price(monkeypatch, by_precision())
    choice = automatic_choice(model, prompt(30), draft_memory=1.0)
    assert choice.precision is None and choice.acceptance is None and choice.config.precision is None
    assert copy_bytes(model) == 0
    plain, ours = texts(model, draft_memory=1.0)
    assert torch.equal(plain, ours)
    statistics = model.last_speculation
    assert statistics.draft_passes == statistics.self_drafted_tokens == 0
    assert "precision" in choice.to_dict() and json.dumps(choice.to_dict())


def test_where_verification_is_dear_every_step_is_a_plain_one(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dear = Costs(plain_step=1.0, draft_step=3.0, verify=[(1, 1.0), (2, 40.0), (16, 80.0)])
    monkeypatch.setattr(automatic, "costs_of", lambda *args: dear)
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8] * 5])}  # lookup finds matches
    plain, ours = texts(model, inputs)
    assert torch.equal(plain, ours)
    assert model.last_speculation.drafted_tokens == 0 and model.last_speculation.target_passes == NEW


def test_agreement_with_the_prompt_counts(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    price(monkeypatch, by_precision(int8=0.3))
    chosen = automatic_choice(model, prompt(90), draft_memory=1.0)
    # Without evidence it is 0.98; the prompt moves it.
    assert chosen.acceptance is not None and chosen.acceptance != automatic._USUAL_AGREEMENT["int8"]
    forget_measurements()
    monkeypatch.setenv("SSD_GENERATION_CACHE", os.environ["SSD_GENERATION_CACHE"] + "_")
    without = automatic_choice(model, None, draft_memory=1.0)
    assert without.acceptance == pytest.approx(automatic._USUAL_AGREEMENT["int8"])
    original = LowBitCopy.whole
    monkeypatch.setattr(LowBitCopy, "whole", lambda self, x: torch.randn_like(original(self, x)))
    forget_measurements()
    monkeypatch.setenv("SSD_GENERATION_CACHE", os.environ["SSD_GENERATION_CACHE"] + "_")
    assert automatic_choice(model, prompt(90), draft_memory=1.0).expected["int8"] < chosen.expected["int8"]


def test_what_the_drafts_come_to_counts_from_call_to_call(
    model: Any, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    price(monkeypatch, by_precision(int8=0.3, int4=0.28))
    first = automatic_choice(model, None, draft_memory=1.0)
    assert first.precision == "int8" and automatic_choice(model, None, draft_memory=1.0) == first
    texts(model, draft_memory=1.0)
    policy: Any = state_of(model).get(LearntPart).policies[first.config]
    # Little evidence is ignored; evidence that confirms the choice keeps the config, with all that was learnt under it.
    policy.judged, policy.right = automatic._LEAST_RECORD - 1, 0
    assert automatic_choice(model, None, draft_memory=1.0) == first
    policy.judged, policy.right = 100, 98
    again = automatic_choice(model, None, draft_memory=1.0)
    assert again.config == first.config and policy.judged == 0
    # As much new evidence as was known before has to accumulate before it counts again.
    policy.judged, policy.right = 99, 0
    assert automatic_choice(model, None, draft_memory=1.0) == again
    policy.judged, policy.right = 100, 60
    second = automatic_choice(model, None, draft_memory=1.0)
    assert second.precision == "int4" and second.expected["int8"] < second.expected["int4"]
    plain, ours = texts(model, draft_memory=1.0)
    assert torch.equal(plain, ours)
    # The next process knows it as well.
    forget_measurements()
    assert automatic_choice(made(), None, draft_memory=1.0).precision == "int4"
    learnt: Any = state_of(model).get(LearntPart).policies
    learnt[second.config].judged = 1000
    third = automatic_choice(model, None, draft_memory=1.0)
    assert third.precision == "int8"  # the better one again, by the evidence so far
    texts(model, draft_memory=1.0)
    learnt[third.config].judged = 10000
    assert automatic_choice(model, None, draft_memory=1.0).precision is None


# --- memory budget
# --------------------------------------------------------------------------------------------------


def test_no_memory_no_copies(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a copy was made")

    monkeypatch.setattr(LowBitCopy, "__init__", fail)
    plain, ours = texts(model, draft_memory=0)
    assert torch.equal(plain, ours) and copy_bytes(model) == 0
    choice = automatic_choice(model, prompt(20), 0)
    assert choice.precision is None and set(choice.ruled_out) == set(automatic._USUAL_AGREEMENT)
    assert all("more than draft_memory=0" in reason for reason in choice.ruled_out.values())


def test_the_usual_budget() -> None:
    assert usual_budget(tiny_model("llama")) == 0.3
    assert usual_budget(tiny_model("llama").to(torch.bfloat16)) == usual_budget(tiny_model("llama").half()) == 0.35
    choice = automatic_choice(enable_self_speculative(tiny_model("llama").to(torch.bfloat16)))
    assert choice.draft_memory == 0.35


@pytest.mark.parametrize("share", [0.0, 0.05, 0.12, 0.14, 0.16, 0.2, 0.3, 1.0])
def test_copies_keep_to_the_budget(model: Any, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    most = []
    original = LowBitCopy.__init__

    def watched(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        most.append(copy_bytes(model) + self.num_bytes())

    monkeypatch.setattr(LowBitCopy, "__init__", watched)
    choice = automatic_choice(model, prompt(20), share)
    plain, ours = texts(model, draft_memory=share)
    assert torch.equal(plain, ours)
    allowed = [name for name in automatic._USUAL_AGREEMENT if name not in choice.ruled_out]
    for name in automatic._USUAL_AGREEMENT:
        size = estimated_bytes(model, SkipConfig(), automatic._precision(name))
        assert (size <= share * weight_bytes(model)) == (name in allowed)
    assert choice.precision in (None, *allowed)
    assert copy_bytes(model) <= share * weight_bytes(model)
    # During the trials only one set of copies exists at a time; the two in int4 share all but the head.
    sizes = [estimated_bytes(model, SkipConfig(), automatic._precision(name)) for name in allowed]
    head = estimated_bytes(model, SkipConfig(), PrecisionConfig(head="int4"))
    assert max(most, default=0) <= max(sizes, default=0) + (head if len(allowed) > 1 else 0)


def test_a_model_that_cannot_be_copied_drafts_by_lookup() -> None:
    model: Any = made().to(torch.float64)
    choice = automatic_choice(model, prompt(9))
    assert choice.precision is None and "float64" in choice.ruled_out["int8"]
    plain, ours = texts(model)
    assert torch.equal(plain, ours)


@pytest.mark.parametrize("request_", ["auto", SelfSpeculativeConfig(precision="int8"), SkipConfig(mlp=[1])])
@pytest.mark.parametrize(
    ("share", "error"),
    [
        (-0.1, ValueError),
        (float("nan"), ValueError),
        (float("inf"), ValueError),
        (10**400, ValueError),
        (101, ValueError),
        (True, TypeError),
        ("0.3", TypeError),
        ([0.3], TypeError),
        ("0" * 10**6, TypeError),
    ],
    ids=lambda value: str(value)[:20],
)
def test_bad_budgets(model: Any, request_: Any, share: Any, error: Any) -> None:
    words = "draft_memory must be a share of the weights' bytes between 0 and 100, but got"
    with pytest.raises(error, match=words) as caught:
        model.generate(prompt(9), max_new_tokens=3, self_speculative=request_, draft_memory=share)
    assert len(str(caught.value)) < 300
    with pytest.raises(error, match=words):
        automatic_choice(model, None, share)
    assert model.generate(prompt(9), max_new_tokens=3).shape == (1, 12)


def test_a_budget_without_drafting(model: Any) -> None:
    for request in (None, False):
        with pytest.raises(ValueError, match=r"`draft_memory=0.3` was given without `self_speculative`"):
            model.generate(prompt(9), max_new_tokens=3, self_speculative=request, draft_memory=0.3)


def test_a_config_above_the_budget(model: Any) -> None:
    config = SelfSpeculativeConfig(drafting=DraftingConfig(policy="fixed"), precision="int8")
    share = estimated_bytes(model, config.skip, PrecisionConfig.named("int8")) / weight_bytes(model)
    check_budget(model, config, share)
    with pytest.raises(ValueError, match=rf"take {share:.3f} of the weights' bytes, but `draft_memory=0.1`"):
        model.generate(prompt(9), max_new_tokens=3, self_speculative=config, draft_memory=0.1)
    assert copy_bytes(model) == 0
    model.generate(prompt(9), max_new_tokens=3, self_speculative=config, draft_memory=share)
    assert copy_bytes(model) == pytest.approx(share * weight_bytes(model))
    # Skipped sub-layers need no copies, and no copies need no budget.
    less = dataclasses.replace(config, skip=SkipConfig(attention=[0], mlp=[0, 1]))
    check_budget(model, less, share / 2)
    check_budget(model, SelfSpeculativeConfig(SkipConfig(mlp=[1])), 0)


# --- storage on the disk
# --------------------------------------------------------------------------------------------------


def files(cache: Path) -> list[Path]:
    return sorted((cache / "costs").glob("*")) if (cache / "costs").exists() else []


def described(file: Path) -> str:
    return str(json.loads(file.read_text())["described"]["what"])


def file_of_choice(cache: Path) -> Path:
    """Return the file of a choice, and remove the one that says that it was made."""
    (file,) = (file for file in files(cache) if described(file) == "auto")
    for other in files(cache):
        if other != file:
            other.unlink()
    return file


def test_a_choice_is_kept(model: Any, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    chosen = []
    original = automatic._choose

    def watched(*args: Any) -> Any:
        chosen.append(original(*args))
        return chosen[-1]

    monkeypatch.setattr(automatic, "_choose", watched)
    first = automatic_config(model, prompt(20))
    assert automatic_config(model, prompt(20)) == first and len(chosen) == 1
    assert sorted(map(described, files(cache))) == ["auto", "auto, chosen"]
    forget_measurements()  # a new process
    assert automatic_config(made(), prompt(30)) == first and len(chosen) == 1
    # The result depends on budget, dtype and threads.
    automatic_config(model, prompt(20), 0.2)
    assert len(chosen) == 2
    automatic_config(made().to(torch.bfloat16), prompt(20), 0.5)
    assert len(chosen) == 3
    torch.set_num_threads(2)
    automatic_config(model, prompt(20))
    assert len(chosen) == 4


RUINED: list[Any] = [
    b"",
    b"{",
    b"\xff\xfe\x00",
    b"[]",
    b"null",
    b"{}",
    b'{"result": null}',
    b'{"result": 3}',
    b'{"result": []}',
    b'{"result": {"precision": "int3", "acceptance": 0.5, "tried": {}}}',
    b'{"result": {"precision": "int8", "acceptance": "high", "tried": {}}}',
    b'{"result": {"precision": "int8", "acceptance": NaN, "tried": {}}}',
    b'{"result": {"precision": "int8", "acceptance": 0.5, "tried": {"int8": 1}}}',
    b'{"result": {"acceptance": 0.5}}',
    b"[" * 100_000,
    b'{"result": ' + b"9" * 400 + b"}",
    b'{"result": {"precision": ["int8"], "acceptance": 0.5, "tried": {}}}',
    b'{"result": {"precision": "int8", "acceptance": true, "tried": {}}}',
    b'{"result": {"precision": "int8", "acceptance": 1e300, "tried": {}}}',
    b'{"result": {"precision": "int8", "acceptance": 0.5, "tried": {"int8": {"speedup": "fast"}}}}',
    b'{"result": {"precision": "int8", "acceptance": 0.5, "tried": {"int8": {"speedup": true}}}}',
    b'{"result": {"precision": "int8", "acceptance": 0.5, "tried": {"int8": {"speedup": -1e300}}}}',
    b" " * (2**20 + 1),
]


@pytest.mark.parametrize("content", RUINED, ids=lambda content: content[:80])
def test_a_ruined_choice_is_made_again(
    model: Any, cache: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    first = automatic_config(model, prompt(20))
    file = file_of_choice(cache)
    sound = file.read_text()
    file.write_bytes(content)
    forget_measurements()
    with caplog.at_level(logging.WARNING):
        assert automatic_config(model, prompt(20)) == first
    assert file.read_text() == sound
    if content != b'{"result": null}':
        assert [
            record for record in caplog.records if "measuring again" in record.message and str(file) in record.message
        ]


@pytest.mark.parametrize("what", ["pipe", "device", "round", "folder", "pipe instead of the folder"])
def test_a_cache_of_other_things_than_files(
    model: Any, cache: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    first = automatic_config(model, prompt(20))
    file = file_of_choice(cache)
    file.unlink()
    if what == "pipe":
        os.mkfifo(file)
    elif what == "device":
        file.symlink_to("/dev/zero")
    elif what == "round":
        file.symlink_to(file)
    elif what == "folder":
        file.mkdir()
    else:
        file.parent.rmdir()
        os.mkfifo(file.parent)
    forget_measurements()
    with caplog.at_level(logging.WARNING):
        assert automatic_config(made(), prompt(20)) == first
    named = file.parent if what == "pipe instead of the folder" else file
    assert any(str(named) in record.message for record in caplog.records)
    if "folder" not in what:
        assert "result" in json.loads(file.read_text())


@pytest.mark.skipif(os.name == "nt", reason="the homes of other systems")
@pytest.mark.parametrize("own", ["", "~/cache", "~nosuchuser/cache"])
def test_without_a_home_folder(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, own: str
) -> None:
    expected = automatic_config(model, prompt(20))
    monkeypatch.setenv("SSD_GENERATION_CACHE", own)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as without $HOME and without a password entry
    monkeypatch.setattr(trusted, "_said", set())
    forget_measurements()
    with caplog.at_level(logging.WARNING):
        assert automatic_config(made(), prompt(20)) == expected
    (said,) = [record.message for record in caplog.records if "no home folder" in record.message]
    assert "can be stored" in said and "SSD_GENERATION_CACHE" in said


def test_whatever_the_use_of_an_answer_stumbles_over_it_is_measured_again(
    model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    answers = iter(range(9))
    assert cached_measurement(model, {"a": 1}, lambda: next(answers)) == 0
    for error in (RecursionError(), OverflowError("x" * 10**6), AssertionError("\x1b[2J"), RuntimeError()):

        def stumble(answer: Any, error: Exception = error) -> None:
            raise error

        forget_measurements()
        with caplog.at_level(logging.WARNING):
            assert cached_measurement(model, {"a": 1}, lambda: next(answers), use=stumble) > 0
    assert len(caplog.records) == 4
    assert all(len(record.message) < 500 and record.message.isprintable() for record in caplog.records)


@pytest.mark.measures
@pytest.mark.parametrize(
    "content", ["0.25", '{"1": "soon"}', '{"1": -1, "2": 1}', '{"one": 1}', "{}", '{"1": NaN, "2": 1}']
)
def test_ruined_costs_are_measured_again(
    model: Any, cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    measured = []

    def measure(
        model: Any, config: Any, lengths: Sequence[int], what: str, asked: Any, shows: bool, rows: int
    ) -> dict[int, float]:
        measured.append(what)
        return {n: 0.25 if n == 0 else 1.0 + (n - 1) / 100 for n in (1, *lengths)}

    monkeypatch.setattr(costs, "_measure", measure)
    config = SelfSpeculativeConfig(SkipConfig(mlp=[1]))
    first = costs.costs_of(model, config)
    assert measured == ["verification", "drafting"] and first.draft_step == pytest.approx(0.25)
    for file in files(cache):
        file.write_text(f'{{"result": {content}}}')
    forget_measurements()
    with caplog.at_level(logging.WARNING):
        assert costs.costs_of(model, config) == first
    # A single number may be a ratio, but not a set of times.
    assert measured[2:] == (["verification"] if content == "0.25" else ["verification", "drafting"])
    assert any("measuring again" in record.message for record in caplog.records)


@pytest.mark.measures
def test_batches_have_costs_of_their_own(model: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[str, int]] = []

    def measure(
        model: Any, config: Any, lengths: Sequence[int], what: str, asked: Any, shows: bool, rows: int
    ) -> dict[int, float]:
        measured.append((what, rows))
        return {n: 0.25 if n == 0 else 1.0 + (n - 1) * rows / 100 for n in (1, *lengths)}

    monkeypatch.setattr(costs, "_measure", measure)
    prompts: dict[str, Any] = {"input_ids": torch.randint(3, 60, (5, 12)), "max_new_tokens": 4, "eos_token_id": None}
    config = SelfSpeculativeConfig(SkipConfig(mlp=[1]), lookup=True)
    for rows in (1, 5, 6, 1):
        ids = prompts["input_ids"][:1].expand(rows, -1)
        model.generate(**{**prompts, "input_ids": ids}, do_sample=False, pad_token_id=0, self_speculative=config)
    assert measured == [("verification", 1), ("drafting", 1), ("verification", 8), ("drafting", 8)]
    told = dataclasses.replace(config, costs=Costs(plain_step=1.0, draft_step=0.5, verify=[(1, 1.0), (4, 1.2)]))
    of_single = dataclasses.replace(config, costs=costs.costs_of(model, config))
    for given in (told, of_single):
        model.generate(**prompts, do_sample=False, pad_token_id=0, self_speculative=given)
    assert len(measured) == 4
    learnt: dict[Any, Any] = state_of(model).get(LearntPart).policies
    policies = [policy for key, policy in learnt.items() if key == (of_single, 8)]
    assert policies[0].prices.verify[2] == pytest.approx(1.08)  # not the time of a single text's pass
    assert costs.rows_measured(1) == 1 and costs.rows_measured(2) == 2 and costs.rows_measured(9) == 16


@pytest.mark.measures
@pytest.mark.parametrize("rows", [1, 4])
def test_passes_of_a_batch_are_timed(model: Any, cache: Path, rows: int) -> None:
    widths: list[tuple[int, int]] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    try:
        found = costs.costs_of(model, SelfSpeculativeConfig(SkipConfig(mlp=[1])), again=True, rows=rows)
    finally:
        hook.remove()
    assert found.plain_step > 0 and {batch for batch, _ in widths} == {rows}
    assert len(found.verify) == 1 + len(costs.VERIFIED if rows == 1 else costs._VERIFIED_BATCH)


def fail_to_replace(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    def refuse(*args: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", refuse)


def be_a_file(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    cache.write_text("not a folder")


@pytest.mark.parametrize("obstacle", [fail_to_replace, be_a_file])
def test_a_folder_that_cannot_be_written_to(
    model: Any, monkeypatch: pytest.MonkeyPatch, cache: Path, caplog: pytest.LogCaptureFixture, obstacle: Any
) -> None:
    obstacle(monkeypatch, cache)
    with caplog.at_level(logging.WARNING):
        plain, ours = texts(model)
    assert torch.equal(plain, ours)
    assert any("can be stored" in record.message for record in caplog.records)
    assert files(cache) == [], "an unfinished file was left"
    # Remembered in this process all the same.
    caplog.clear()
    texts(model)
    assert not caplog.records


def test_kept_is_by_model_and_description(model: Any) -> None:
    answers = iter(range(10))
    assert [cached_measurement(model, {"a": n}, lambda: next(answers)) for n in (1, 2, 1)] == [0, 1, 0]
    assert cached_measurement(model, {"a": 1}, lambda: next(answers), again=True) == 2
    assert cached_measurement(made(), {"a": 1}, lambda: next(answers)) == 2, "from the disk"


# --- measurements on this machine
# --------------------------------------------------------------------------------------------------


@pytest.mark.measures
def test_measured_costs_are_sensible(model: Any) -> None:
    skip = SelfSpeculativeConfig(SkipConfig(attention=[1], mlp=[0, 1]))
    found = measure_costs(model, skip)
    assert found.measured_on == describe_machine(model)
    assert [n for n, _ in found.verify] == [1, *VERIFIED]
    assert found.draft_step > 0
    # Whatever the clock showed, no pass counts as faster than a plain step.
    assert all(0 < found.plain_step <= seconds for _, seconds in found.verify)
    assert costs.costs_of(model, SelfSpeculativeConfig(lookup=True)).draft_step > 0


@pytest.mark.measures
def test_a_slow_model_is_timed_at_fewer_lengths(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "_SLOW", 0.0)
    found = measure_costs(model, SelfSpeculativeConfig(SkipConfig(mlp=[0, 1])))
    assert [n for n, _ in found.verify] == [1, 3, 5, 8, 13] and found.draft_step > 0


@pytest.mark.measures
@pytest.mark.parametrize("family", ["llama", "gemma2"])  # captured, and run eagerly
def test_auto_with_costs_measured_here(family: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "_STEADY", float("inf"))  # other work may share the machine with a test
    model: Any = enable_self_speculative(tiny_model(family, num_hidden_layers=2, hidden_size=64))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain, ours = texts(model)
    assert torch.equal(plain, ours)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert len(files(cache)) >= 3


def test_costs_of_another_machine(model: Any) -> None:
    elsewhere = Costs(plain_step=1.0, draft_step=0.1, verify=[(1, 1.0)], measured_on="cpu (a Cray, 4 threads)")
    config = SelfSpeculativeConfig(SkipConfig(mlp=[1]), costs=elsewhere)
    with pytest.warns(UserWarning, match=r"another machine.*a Cray, 4 threads") as caught:
        model.generate(prompt(9), max_new_tokens=3, self_speculative=config)
    assert describe_machine(model) in str(caught[0].message) and "measure_costs(model, config)" in str(
        caught[0].message
    )
    # Warned once; and not for costs of this machine or without a machine's name, nor where costs decide nothing.
    model.generate(prompt(9), max_new_tokens=3, do_sample=False, self_speculative=config)
    for known in (describe_machine(model), None):
        here = dataclasses.replace(elsewhere, measured_on=known)
        model.generate(prompt(9), max_new_tokens=3, self_speculative=dataclasses.replace(config, costs=here))
    fixed = dataclasses.replace(config, drafting=DraftingConfig(policy="fixed"))
    model.generate(prompt(9), max_new_tokens=3, self_speculative=fixed)


# --- in `generate`
# --------------------------------------------------------------------------------------------------


def test_every_kind_of_call(model: Any) -> None:
    for inputs in ({"input_ids": prompt(9, 3)}, left_padded([5, 11]), {"inputs": prompt(7)}):
        plain, ours = texts(model, inputs)
        assert torch.equal(plain, ours) and model.last_speculation.drafted_tokens > 0
    ids = prompt(9)
    expected = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(expected, model.generate(ids, max_new_tokens=NEW, do_sample=False, self_speculative="auto"))
    embeddings = model.get_input_embeddings()(ids).detach()
    plain, ours = texts(model, {"inputs_embeds": embeddings})
    assert torch.equal(plain, ours)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(
            model.generate(ids, max_new_tokens=30, do_sample=True, num_return_sequences=2, self_speculative="auto")
        )
    assert drawn[0].shape == (2, 39)
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


def test_auto_as_the_models_default(tmp_path: Path) -> None:
    model = enable_self_speculative(tiny_model("llama", num_hidden_layers=2), default="auto")
    plain = model.generate(prompt(9), max_new_tokens=NEW, do_sample=False)
    assert model.last_speculation is None
    model.save_pretrained(tmp_path / "model")
    again: Any = enable_self_speculative(AutoModelForCausalLM.from_pretrained(tmp_path / "model"))
    assert again.generation_config.self_speculative == "auto"
    assert torch.equal(plain, again.generate(prompt(9), max_new_tokens=NEW, do_sample=False, self_speculative=True))
    assert again.last_speculation.rounds > 0
    with pytest.raises(ValueError, match="draft_memory"):
        again.generate(prompt(9), max_new_tokens=2, self_speculative=True, draft_memory=-1)


def test_a_pipeline(model: Any) -> None:
    words = {
        character: i for i, character in enumerate("#abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ 0123456789")
    }
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(words, [])), pad_token="#", padding_side="left"
    )
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    for text, batch in (("one prompt", 1), (["two", "prompts here"], 2)):
        expected = pipe(text, batch_size=batch, **options)
        assert pipe(text, batch_size=batch, self_speculative="auto", **options) == expected
        assert model.last_speculation.rounds > 0
        assert pipe(text, batch_size=batch, self_speculative="auto", draft_memory=0, **options) == expected


def test_a_machine_that_slows_down_makes_no_pass_dearer(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    class Pretend:
        """Mock passes that take 0.9 + n / 10, on a machine that gets slower with each and pauses now and then."""

        def __init__(self, model: Any, config: Any, **how: Any) -> None:
            pass

        def settle(self) -> None:
            pass

        def end(self) -> None:
            pass

        def once(self, length: int) -> float:
            calls.append(length)
            stopped = 30.0 if len(calls) % 17 == 0 else 0.0
            return (1 + len(calls) / 50) * (0.9 + length / 10 if length else 0.25) + stopped

    monkeypatch.setattr(costs, "Passes", Pretend)
    config = SelfSpeculativeConfig(SkipConfig(mlp=[1]))
    found = measure_costs(model, config)
    assert found.draft_step / found.plain_step == pytest.approx(0.25, rel=0.02)
    for n, seconds in found.verify:
        assert seconds / found.plain_step == pytest.approx(0.9 + n / 10, rel=0.02)
    # Each pass has a plain step nearby on either side.
    assert all(1 in calls[i - 2 : i] and 1 in calls[i + 1 : i + 3] for i in range(20, len(calls) - 3) if calls[i] != 1)


@pytest.mark.measures
def test_what_a_busy_machine_measured_is_not_kept(model: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "_STEADY", 0.0)  # as if no pass ever took the same time twice
    config = SelfSpeculativeConfig(SkipConfig(mlp=[1]), exactness="numeric")
    found = costs.costs_of(model, config)
    assert all(described(file) == "captured pass" for file in files(cache)), "that takes no time"
    assert measurements.was_noisy(model)
    assert costs.costs_of(model, config) == found, "remembered as long as the model lives"
