"""The run itself: the order of the calls, the stored results, and resumption after an interruption."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd_generation import DraftingConfig, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from ssd_generation.benchmark.run_benchmark import BenchmarkSettings, benchmark_arguments, run_benchmark
from ssd_generation.forward.copies.low_bit import copy_bytes
from ssd_generation.harness.results import RunFolder, acceptance_lengths, commit_of
from ssd_generation.harness.run import Caller, Progress, TimedCall, side_by_side
from ssd_generation.harness.texts import Prompt
from ssd_generation.support.model_state import state_of
from ssd_generation.tuning.learnt import LearntPart
from test_cli import tiny_tokenizer
from tiny_models import prompt as random_ids
from tiny_models import tiny_model

TOKENIZER = tiny_tokenizer()
PROMPTS = [Prompt("x-1", "x", "the rain"), Prompt("y-1", "y", "a river runs"), Prompt("x-2", "x", "the fields")]
CONFIG = SelfSpeculativeConfig(SkipConfig([1], [2]), DraftingConfig(policy="fixed", max_draft_length=3))
INPUTS = {"input_ids": random_ids(10), "attention_mask": torch.ones(1, 10, dtype=torch.long)}
OPTIONS = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture
def model() -> Any:
    return enable_self_speculative(tiny_model(vocab_size=len(TOKENIZER)))


METHODS = ("plain", "config", "plain-loop")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_GENERATION_CACHE", str(tmp_path_factory.mktemp("cache")))


def run(
    model: Any,
    path: Path,
    methods: tuple[str, ...] = METHODS,
    observe: Any = None,
    **more: Any,
) -> dict[str, Any]:
    assistant, prompts = more.pop("assistant", None), more.pop("prompts", PROMPTS)
    settings = BenchmarkSettings(methods=methods, **{"new_tokens": 8, "warm_up": 1, "memory": False, **more})
    with RunFolder(path, benchmark_arguments(settings, prompts, CONFIG)) as folder:
        return run_benchmark(
            model, TOKENIZER, prompts, folder, settings, config=CONFIG, assistant=assistant, observe=observe
        )


def rows_of(path: Path, kind: str = "call") -> list[dict[str, Any]]:
    rows = map(json.loads, (path / "rows.jsonl").read_text().splitlines())
    return [row for row in rows if row["kind"] == kind]


# --- one call -------------------------------------------------------------------------------------


def test_a_call_is_what_generate_says(model: Any) -> None:
    plain = model.generate(**INPUTS, **OPTIONS)[0, 10:].tolist()
    caller = Caller(model)
    call = caller.call("plain", {}, INPUTS, OPTIONS)
    assert call.token_ids == plain and call.speculation is None
    assert 0 < call.prompt_seconds < call.seconds
    own = caller.call("own", {"self_speculative": CONFIG}, INPUTS, OPTIONS)
    assert own.token_ids == plain and own.speculation is not None
    assert own.speculation["rounds"] > 0 and len(own.speculation["judged_by_depth"]) == 3
    assert not model._forward_hooks


def test_end_of_sequence_is_off_for_everybody(model: Any) -> None:
    assistant = tiny_model(vocab_size=len(TOKENIZER), seed=1)
    plain = model.generate(**INPUTS, **OPTIONS)[0, 10:].tolist()
    model.generation_config.eos_token_id = assistant.generation_config.eos_token_id = plain[2]
    caller = Caller(model, assistant)
    for request in (
        {},
        {"self_speculative": CONFIG},
        {"prompt_lookup_num_tokens": 3},
        {"assistant_model": True},
        {"assistant_early_exit": 2},
    ):
        assert caller.call("any", request, INPUTS, OPTIONS).token_ids == plain


def test_each_method_has_policies_of_its_own(model: Any) -> None:
    config = SelfSpeculativeConfig(SkipConfig([1], [2]), DraftingConfig(policy="confidence"))
    other = SelfSpeculativeConfig(SkipConfig([0], [3]), DraftingConfig(policy="confidence"))
    model.generate(**INPUTS, **OPTIONS, self_speculative=config)
    users = state_of(model).get(LearntPart).policies
    (policy,) = users.values()
    state = policy.state()

    def thresholds(caller: Caller, *calls: tuple[str, SelfSpeculativeConfig]) -> list[float]:
        return [
            call.speculation["policy_state"]["threshold"]
            for call in (caller.call(name, {"self_speculative": c}, INPUTS, OPTIONS) for name, c in calls)
            if call.speculation is not None
        ]

    alone = thresholds(Caller(model), ("a", config), ("a", config))
    mixed = thresholds(Caller(model), ("a", config), ("b", other), ("a", config))
    assert [mixed[0], mixed[2]] == alone and alone[0] != alone[1]
    assert state_of(model).get(LearntPart).policies is users and policy.state() == state


def test_measuring_teaches_nothing(model: Any) -> None:
    config = SelfSpeculativeConfig(SkipConfig([1], [2]), DraftingConfig(policy="confidence"))

    def second(disturb: bool) -> Any:
        caller = Caller(model)
        caller.call("a", {"self_speculative": config}, INPUTS, OPTIONS)
        if disturb:
            with caller.alone("a", learn=False):
                model.generate(**INPUTS, **OPTIONS, self_speculative=config)
        speculation = caller.call("a", {"self_speculative": config}, INPUTS, OPTIONS).speculation
        assert speculation is not None
        return speculation["policy_state"]

    assert second(disturb=False) == second(disturb=True)


def test_a_failed_early_exit_leaves_the_model_whole(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.generation import candidate_generator

    def broken(*args: Any, **kwargs: Any) -> None:
        assert model.config.num_hidden_layers == 2
        raise RuntimeError("in the middle")

    monkeypatch.setattr(candidate_generator.AssistedCandidateGenerator, "get_candidates", broken)
    with pytest.raises(RuntimeError, match="in the middle"):
        Caller(model).call("early-exit-2", {"assistant_early_exit": 2}, INPUTS, OPTIONS)
    assert model.config.num_hidden_layers == 4 and not model._forward_hooks


def test_sampling_starts_from_the_seed(model: Any) -> None:
    caller = Caller(model)
    options = {**OPTIONS, "do_sample": True}
    first, again, other = (caller.call("plain", {}, INPUTS, options, seed).token_ids for seed in (1, 1, 2))
    assert first == again != other


# --- the run --------------------------------------------------------------------------------------


def test_all_methods_run_all_prompts_in_turns(model: Any, tmp_path: Path) -> None:
    summary = run(model, tmp_path, repeats=2)
    rows = rows_of(tmp_path)
    assert Counter(row["method"] for row in rows) == {"plain": 6, "config": 6, "plain-loop": 6}
    order = [(row["prompt"], row["method"]) for row in rows]
    assert order[:9] == [
        *(("x-1", name) for name in ("plain", "config", "plain-loop")),
        *(("y-1", name) for name in ("config", "plain-loop", "plain")),
        *(("x-2", name) for name in ("plain-loop", "plain", "config")),
    ]
    assert order[9:12] == [("x-1", name) for name in ("config", "plain-loop", "plain")]
    assert all(len(row["token_ids"]) == 8 for row in rows)
    assert summary["complete"] and summary["prompts_per_category"] == {"x": 2, "y": 1}
    own = summary["methods"]["config"]
    assert own["calls"] == 6 and own["text"]["identical"] == 6 and own["ratio"]["categories"].keys() == {"x", "y"}
    assert own["engine_efficiency"]["median"] > 0
    assert summary["methods"]["plain-loop"]["drafting"]["drafted_tokens"] == 0


def test_drafting_is_measured_before_calls_for_few_tokens_are_timed(model: Any, tmp_path: Path) -> None:
    run(model, tmp_path, ("plain", "auto"), new_tokens=4)
    timed = [row["costs"] for row in rows_of(tmp_path) if row["method"] == "auto"]
    assert len(timed) == len(PROMPTS) and None not in timed


def test_the_folder_has_everything(model: Any, tmp_path: Path) -> None:
    summary = run(model, tmp_path)
    files = {path.name for path in tmp_path.iterdir()} - {"plot.png", ".lock"}
    assert files == {"config.json", "environment.json", "rows.jsonl", "summary.json", "summary.md"}
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    (session,) = json.loads((tmp_path / "environment.json").read_text())["sessions"]
    assert session["cpu_count"] >= session["threads"] == 1 and session["dtype"] == "float32"
    assert session["attention_implementation"] == "sdpa" and "load_average" in session and "commit" in session
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["methods"] == ["plain", "config", "plain-loop"] and config["prompts"]["count"] == 3


def test_without_matplotlib_the_run_finishes(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    summary = run(model, tmp_path)
    assert summary["complete"] and "ssd_generation[plots]" in summary["plot"]
    assert not (tmp_path / "plot.png").exists()


def test_peers(model: Any, tmp_path: Path) -> None:
    assistant = tiny_model(vocab_size=len(TOKENIZER), seed=1)
    names = ("plain", "prompt-lookup-3", "assistant", "early-exit-2", "paper")
    summary = run(model, tmp_path, names, assistant=assistant, memory=True)
    for name in names[1:]:
        entry = summary["methods"][name]
        assert entry["errors"] == [] and entry["text"]["identical"] == 3
    weights = sum(parameter.nbytes for parameter in assistant.parameters())
    assert summary["methods"]["assistant"]["memory"]["persistent_bytes"] == weights
    assert summary["methods"]["paper"]["memory"]["share_of_weights"] < 0.2
    assert summary["methods"]["assistant"]["drafting"] is None
    for row in rows_of(tmp_path):
        counts = row["assisted"]
        if row["method"] in ("plain", "paper"):
            assert counts is None
            continue
        # Each pass of the model adds one token of its own to the accepted ones.
        assert len(row["token_ids"]) == 8 <= counts["target_passes"] + counts["accepted_tokens"]
        assert 0 <= counts["accepted_tokens"] <= counts["drafted_tokens"]
    counts = summary["methods"]["assistant"]["assisted"]
    assert counts["drafted_tokens"] > 0 and counts["acceptance_rate"] == pytest.approx(
        sum(row["assisted"]["accepted_tokens"] for row in rows_of(tmp_path) if row["method"] == "assistant")
        / counts["drafted_tokens"]
    )
    assert summary["methods"]["paper"]["assisted"] is None


def test_acceptance_of_an_assistant_that_is_always_right(model: Any) -> None:
    same = tiny_model(vocab_size=len(TOKENIZER))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))
    call = Caller(model, same).call("assistant", {"assistant_model": True}, INPUTS, {**OPTIONS, "max_new_tokens": 12})
    assert call.assisted is not None
    passes, drafted = call.assisted["target_passes"], call.assisted["drafted_tokens"]
    assert call.assisted["accepted_tokens"] == 12 - passes and passes < 12
    assert drafted >= 12 - passes


@pytest.mark.parametrize("name", ["auto", "auto-free", "lookup", "skip", "int8", "random-half"])
def test_modes(model: Any, tmp_path: Path, name: str) -> None:
    summary = run(model, tmp_path, ("plain", name), memory=True)
    entry = summary["methods"][name]
    assert entry["errors"] == [] and entry["text"]["identical"] == 3
    assert entry["engine_efficiency_at_stored_costs"]["median"] > 0
    config = SelfSpeculativeConfig.from_dict(entry["config"])
    assert (config.lookup is not None) == (name in ("auto", "auto-free", "lookup"))
    if name != "auto":
        assert bool(config.precision) == (name == "int8")
        assert (entry["memory"]["persistent_bytes"] > 0) == (name == "int8")


def test_making_copies_is_no_part_of_the_peak(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = []

    def peak(model: Any, *args: Any, **options: Any) -> int:
        held.append(copy_bytes(model))
        return 1000

    monkeypatch.setattr(side_by_side, "peak_bytes", peak)
    summary = run(model, tmp_path, ("plain", "lookup", "int8"), memory=True)
    memory = summary["methods"]["int8"]["memory"]
    assert memory["extra_bytes"] == memory["persistent_bytes"] == held[-1] > 0


def test_a_method_that_fails_is_reported_and_the_run_goes_on(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Caller.call

    def call(self: Caller, method: str, *args: Any) -> TimedCall:
        if method == "config":
            raise RuntimeError("no kernel\nfor this device")
        return real(self, method, *args)

    monkeypatch.setattr(Caller, "call", call)
    summary = run(model, tmp_path, memory=True)
    assert summary["methods"]["config"]["errors"] == ["RuntimeError: no kernel"]
    assert summary["methods"]["plain-loop"]["calls"] == 3 and summary["complete"]
    # A later session retries it once, and calls nothing else again.
    tried = []

    def again(self: Caller, method: str, *args: Any) -> TimedCall:
        tried.append(method)
        raise RuntimeError("no kernel\nfor this device")

    monkeypatch.setattr(Caller, "call", again)
    assert run(model, tmp_path, memory=True)["methods"] == summary["methods"]
    assert tried == ["config"]
    monkeypatch.setattr(Caller, "call", real)
    mended = run(model, tmp_path, memory=True)["methods"]["config"]
    assert mended["calls"] == mended["text"]["identical"] == 3


def test_a_prompt_that_fails_costs_that_row_alone(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = Caller.call, Counter[str]()

    def call(self: Caller, method: str, *args: Any) -> TimedCall:
        calls[method] += 1
        if method == "config" and calls[method] == 3:
            raise RuntimeError("odd")
        return real(self, method, *args)

    monkeypatch.setattr(Caller, "call", call)
    summary = run(model, tmp_path)
    assert summary["methods"]["config"]["calls"] == 2
    assert summary["methods"]["config"]["errors"] == ["RuntimeError: odd"]
    calls.clear()
    again = run(model, tmp_path)
    assert again["methods"]["config"]["calls"] == 3
    assert calls["config"] == 2 and calls["plain-loop"] == 0  # warm-up and the row that was missing


def test_plain_decoding_that_fails_ends_the_run(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(*args: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(Caller, "call", call)
    with pytest.raises(RuntimeError, match="no memory"):
        run(model, tmp_path)


def test_an_item_that_plain_decoding_cannot_do_costs_its_rows_alone(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Caller.call
    refused: list[Any] = []

    def call(self: Caller, method: str, request: Any, inputs: Any, *args: Any) -> TimedCall:
        text = inputs["input_ids"].tolist()
        refused[:] = refused or [text]  # the first text called
        if text in refused:
            raise RuntimeError("no memory")
        return real(self, method, request, inputs, *args)

    monkeypatch.setattr(Caller, "call", call)
    summary = run(model, tmp_path, memory=True)
    assert summary["complete"] and summary["methods"]["config"]["calls"] == 2
    assert [entry["errors"] for entry in summary["methods"].values()] == [["RuntimeError: no memory"]] * 2
    assert {row["method"] for row in rows_of(tmp_path, "memory") if "error" not in row} == set(METHODS)
    page = (tmp_path / "summary.md").read_text()
    assert "plain, config, plain-loop: failed at times: RuntimeError: no memory" in page


def test_other_texts_are_found_with_their_margin(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Caller.call

    def call(self: Caller, method: str, *args: Any) -> TimedCall:
        done = real(self, method, *args)
        if method == "config":
            done.token_ids[3] = (done.token_ids[3] + 1) % 200
        return done

    monkeypatch.setattr(Caller, "call", call)
    summary = run(model, tmp_path)
    text = summary["methods"]["config"]["text"]
    assert text["identical"] == 0 and {entry["token"] for entry in text["differences"]} == {4}
    assert text["largest_margin"] > 0 and len(rows_of(tmp_path, "difference")) == 3
    run(model, tmp_path)
    assert len(rows_of(tmp_path, "difference")) == 3


def test_sampled_texts_are_compared_by_seed(model: Any, tmp_path: Path) -> None:
    summary = run(model, tmp_path, do_sample=True, temperature=1.5)
    assert summary["methods"]["config"]["text"]["identical"] == summary["methods"]["config"]["calls"] == 3
    rows = {(row["prompt"], row["method"]): row["token_ids"] for row in rows_of(tmp_path)}
    for name in ("config", "plain-loop"):
        assert all(rows[p.id, "plain"] == rows[p.id, name] for p in PROMPTS)
    assert len({tuple(rows[p.id, "plain"]) for p in PROMPTS}) == 3


def test_progress(model: Any, tmp_path: Path) -> None:
    seen: list[Progress] = []
    run(model, tmp_path, observe=seen.append, memory=True)
    assert [progress.done for progress in seen] == list(range(3 + 9 + 3))
    assert {progress.total for progress in seen} == {15}
    assert seen[0].step == "warm-up, plain" and seen[3].step == "x-1, plain" and seen[-1].step == "memory, plain-loop"
    assert seen[3].ratios == {} and seen[-1].ratios.keys() == {"config", "plain-loop"}


# --- interruptions --------------------------------------------------------------------------------


class Interruption:
    """Ctrl-C after the given number of steps."""

    def __init__(self, step: int) -> None:
        self.left = step

    def __call__(self, progress: Progress) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("step", [0, 3, 4, 5, 7, 11, 13])
def test_an_interrupted_run_goes_on(model: Any, tmp_path: Path, step: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path, observe=Interruption(step), memory=True)
    kept = rows_of(tmp_path) if (tmp_path / "rows.jsonl").exists() else []
    assert len(kept) == min(max(step - 3, 0), 9)
    partial = json.loads((tmp_path / "summary.json").read_text())
    assert not partial["complete"] and partial["rows_done"] <= len(kept) and partial["rows"] == 9
    assert "**Unfinished**" in (tmp_path / "summary.md").read_text()

    summary = run(model, tmp_path, memory=True)
    rows = rows_of(tmp_path)
    assert rows[: len(kept)] == kept, "what was measured was not kept"
    assert summary["complete"] and summary["rows_done"] == 9
    # If a prompt was interrupted halfway, plain decoding or the methods before it run once more.
    again = [key for key, n in Counter((r["prompt"], r["method"]) for r in rows).items() if n > 1]
    assert len(again) <= 2 and len({prompt for prompt, _ in again}) <= 1
    assert all(entry["calls"] == 3 for entry in summary["methods"].values())
    assert len(json.loads((tmp_path / "environment.json").read_text())["sessions"]) == 2


def test_a_torn_row_is_measured_again(model: Any, tmp_path: Path) -> None:
    run(model, tmp_path)
    file = tmp_path / "rows.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    assert run(model, tmp_path)["methods"]["config"]["calls"] == 3
    assert len(rows_of(tmp_path)) == 9 + 1  # and plain decoding alongside it


def test_a_finished_run_measures_nothing(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(model, tmp_path, memory=True)
    monkeypatch.setattr(Caller, "call", lambda *args: pytest.fail("called again"))
    monkeypatch.setattr(side_by_side, "peak_bytes", lambda *args, **kwargs: pytest.fail("measured again"))
    assert run(model, tmp_path, memory=True)["methods"] == first["methods"]


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"new_tokens": 1}, "new_tokens must be at least 2, but got 1"),
        ({"repeats": 0}, "repeats must be at least 1, but got 0"),
        ({"warm_up": -1}, "warm_up must be at least 0, but got -1"),
        ({"temperature": 0.7}, "only when sampling"),
        ({"temperature": 0.0, "do_sample": True}, "above 0, but got 0"),
        ({"methods": ("auto", "plain")}, "Plain decoding comes first, but got the methods auto, plain"),
        ({"methods": ()}, "but got the methods none"),
    ],
)
def test_bad_settings(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BenchmarkSettings(**{"methods": ("plain", "auto"), **changes})


def test_no_prompts(model: Any, tmp_path: Path) -> None:
    settings = BenchmarkSettings(methods=("plain", "plain-loop"))
    with (
        RunFolder(tmp_path, benchmark_arguments(settings, [], None)) as folder,
        pytest.raises(ValueError, match="no prompts"),
    ):
        run_benchmark(model, TOKENIZER, [], folder, settings)


def test_commit_of_something_that_is_no_checkout(tmp_path: Path) -> None:
    assert commit_of(tmp_path) is None
    (tmp_path / ".git").mkdir()
    assert commit_of(tmp_path) is None


# --- several turns ----------------------------------------------------------------------------------


TALKS = [Prompt("t-1", "t", "the rain", ("and then?", "why?")), Prompt("u-1", "u", "a river runs")]


def test_later_turns_follow_plain_answers(model: Any, tmp_path: Path) -> None:
    summary = run(model, tmp_path / "r", prompts=TALKS)
    rows = {(row["prompt"], row["method"]): row for row in rows_of(tmp_path / "r")}
    assert len(rows) == 4 * len(METHODS) and not any("error" in row for row in rows.values())
    messages: list[dict[str, str]] = []
    for name, text in (("t-1", "the rain"), ("t-1, turn 2", "and then?"), ("t-1, turn 3", "why?")):
        messages.append({"role": "user", "content": text})
        ids = TOKENIZER.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )["input_ids"]
        for method in METHODS:
            assert rows[name, method]["prompt_tokens"] == ids.shape[1]
            assert rows[name, method].get("conversation", name) == "t-1"
            expected = model.generate(ids, **OPTIONS)[0, ids.shape[1] :].tolist()
            assert rows[name, method]["token_ids"] == expected
        messages.append({"role": "assistant", "content": TOKENIZER.decode(expected, skip_special_tokens=True)})
    # Resuming repeats no call, and needs none of the answers again.
    before = (tmp_path / "r" / "rows.jsonl").read_text()
    run(model, tmp_path / "r", prompts=TALKS)
    assert (tmp_path / "r" / "rows.jsonl").read_text() == before
    assert summary["methods"]["plain-loop"]["acceptance_length"] is None
    figures = summary["methods"]["config"]["acceptance_length"]
    assert {name: entry["prompts"] for name, entry in figures["categories"].items()} == {"t": 1, "u": 1}


def test_an_answer_ends_where_the_model_ends_it(model: Any, tmp_path: Path) -> None:
    run(model, tmp_path / "a", prompts=TALKS[:1], methods=("plain",))
    (first,) = [row for row in rows_of(tmp_path / "a") if row["prompt"] == "t-1"]
    model.generation_config.eos_token_id = first["token_ids"][2]
    run(model, tmp_path / "b", prompts=TALKS[:1], methods=("plain",))
    lengths = [[row["prompt_tokens"] for row in rows_of(tmp_path / name)] for name in "ab"]
    assert lengths[0][0] == lengths[1][0] and lengths[0][1] > lengths[1][1]


def test_a_turn_without_an_answer_before_it_fails_alone(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = Caller.call, 0

    def call(self: Caller, *args: Any) -> TimedCall:
        nonlocal calls
        calls += 1
        if calls == 2:  # after the warm-up
            raise ValueError("no memory")
        return real(self, *args)

    monkeypatch.setattr(Caller, "call", call)
    run(model, tmp_path / "r", prompts=TALKS, methods=("plain",))
    errors = {row["prompt"]: row.get("error") for row in rows_of(tmp_path / "r")}
    assert errors["t-1"] == "ValueError: no memory" and errors["u-1"] is None
    assert "follows an answer to t-1" in str(errors["t-1, turn 2"])


def test_acceptance_lengths() -> None:
    def row(category: str, prompt: str, histogram: dict[str, int] | None, **more: Any) -> dict[str, Any]:
        own = None if histogram is None else {"tokens_per_round_histogram": histogram}
        return {"category": category, "prompt": prompt, "speculation": own, **more}

    figures = acceptance_lengths(
        [
            row("a", "1", {"1": 1, "3": 1}),
            row("a", "1, turn 2", {"4": 2}, conversation="1"),
            row("a", "2", {"1": 2}),
            row("b", "3", None, assisted={"target_passes": 4, "drafted_tokens": 9, "accepted_tokens": 6}),
            row("b", "4", {}),
        ]
    )
    assert figures is not None
    a, b = figures["categories"]["a"], figures["categories"]["b"]
    assert a == {"prompts": 2, "passes": 6, "per_pass": 14 / 6, "per_prompt": (12 / 4 + 2 / 2) / 2}
    assert b == {"prompts": 1, "passes": 4, "per_pass": 2.5, "per_prompt": 2.5}
    assert figures["overall"]["per_pass"] == 24 / 10 and figures["overall"]["prompts"] == 3
    assert acceptance_lengths([row("a", "1", {}), row("a", "2", None)]) is None
