"""Summary of a run's rows: medians, shares, efficiencies, tables and the plot."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from ssd_generation import Costs
from ssd_generation.harness.results import (
    engine_efficiency,
    markdown,
    overview,
    plot_summary,
    ratios_so_far,
    spread,
    summarise,
    summarise_pairs,
    where_measured,
)

ARGUMENTS = {
    "methods": ["plain", "own", "broken"],
    "do_sample": False,
    "repeats": 1,
    "new_tokens": 5,
}
ENVIRONMENT = {
    "model": "tiny",
    "dtype": "float32",
    "attention_implementation": "sdpa",
    "device": "cpu",
    "cpu": "A processor",
    "threads": 1,
    "cpu_count": 2,
    "commit": "0123456789abcdef",
    "versions": {"torch": "2", "transformers": "5", "ssd_generation": "0"},
}

# Two rounds after the prompt's token: 2 drafted, both accepted; 1 drafted, rejected. Together 3 + 1 tokens.
SPECULATION = {
    "rounds": 2,
    "draft_passes": 3,
    "drafted_tokens": 3,
    "accepted_tokens": 2,
    "looked_up_tokens": 0,
    "tokens_per_round_histogram": {"1": 1, "3": 1},
    "drafted_by_depth": [2, 1],
    "judged_by_depth": [2, 1],
    "accepted_by_depth": [1, 1],
    "draft_seconds": 0.3,
    "verify_seconds": 1.0,
}


def call(
    method: str, prompt: str, category: str, seconds: float, tokens: tuple[int, ...] = (1, 2, 3, 4, 5), **more: Any
) -> dict[str, Any]:
    return {
        "kind": "call",
        "session": 1,
        "prompt": prompt,
        "category": category,
        "method": method,
        "repeat": 0,
        "token_ids": list(tokens),
        "seconds": seconds,
        "prompt_seconds": 1.0,
        "speculation": SPECULATION if method == "own" else None,
        **more,
    }


def rows() -> list[dict[str, Any]]:
    return [
        {"kind": "failed", "method": "broken", "error": "ValueError: no"},
        call("plain", "a-1", "a", 3.0),
        call("own", "a-1", "a", 2.4),
        call("own", "a-2", "a", 2.5, (1, 2, 9, 4, 5)),
        call("plain", "a-2", "a", 5.0),
        call("plain", "b-1", "b", 3.0),
        call("own", "b-1", "b", 6.0),
        {"kind": "difference", "prompt": "a-2", "method": "own", "repeat": 0, "token": 3, "logit_margin": 0.01},
        {"kind": "memory", "method": "plain", "peak_bytes": 1000, "persistent_bytes": 0},
        {"kind": "memory", "method": "own", "peak_bytes": 1100, "persistent_bytes": 400},
    ]


def test_spread() -> None:
    assert spread([]) is None
    assert spread([2.0]) == {"n": 1, "median": 2.0, "q1": 2.0, "q3": 2.0, "min": 2.0, "max": 2.0}
    assert spread([5.0, 1.0, 2.0, 3.0, 4.0]) == {"n": 5, "median": 3.0, "q1": 2.0, "q3": 4.0, "min": 1.0, "max": 5.0}


def test_ratios_by_category() -> None:
    own = summarise(rows(), ARGUMENTS, [ENVIRONMENT], 10_000)["methods"]["own"]
    ratio = own["ratio"]
    assert ratio["categories"]["a"]["median"] == pytest.approx((3 / 2.4 + 2) / 2)
    assert (ratio["categories"]["a"]["min"], ratio["categories"]["a"]["max"]) == pytest.approx((1.25, 2))
    assert ratio["categories"]["b"]["median"] == 0.5
    assert ratio["geometric_mean"] == pytest.approx(math.sqrt(1.625 * 0.5))
    assert (ratio["worst_category"], ratio["worst_median"]) == ("b", 0.5)
    # Without the prompt's one second: 2 / 1.4 and 4 / 1.5.
    assert own["decode_ratio"]["categories"]["a"]["max"] == pytest.approx(4 / 1.5)
    assert own["calls"] == 3


def test_only_a_loop_of_ours_is_timed_without_the_prompt() -> None:
    # Assisted decoding drafts and verifies within the model's first pass.
    found = [*rows(), call("prompt-lookup-3", "a-1", "a", 2.0), call("prompt-lookup-3", "b-1", "b", 2.0)]
    summary = summarise(found, {**ARGUMENTS, "methods": ["plain", "own", "prompt-lookup-3"]}, [ENVIRONMENT])
    assert summary["methods"]["prompt-lookup-3"]["ratio"]["categories"]["a"]["median"] == 1.5
    assert summary["methods"]["prompt-lookup-3"]["decode_ratio"]["geometric_mean"] is None
    header, lines = overview(summary)
    assert {line[0]: line[header.index("decoding only")] for line in lines}["prompt-lookup-3"] == "–"


def test_a_plain_call_that_was_made_again_counts_once() -> None:
    again = [*rows(), {**call("plain", "a-1", "a", 4.0), "session": 2}]
    assert summarise(again, ARGUMENTS)["plain"]["calls"] == summarise(rows(), ARGUMENTS)["plain"]["calls"] == 3


def test_figures_name_the_machines_that_they_come_from() -> None:
    here = {**ENVIRONMENT, "cpu": "Here", "threads": 2, "cpu_count": 2}
    there = {**here, "cpu": "There"}
    sessions = [
        {"session": 1, "started": "1", "load_average": 0.1, **there},
        {"session": 2, "started": "2", "load_average": 0.2, **here},
        {"session": 3, "started": "3", "load_average": 0.2, **here},
        {"session": 4, "started": "4", "load_average": 0.3, **ENVIRONMENT},  # made only the summary
    ]
    measured = [{"session": 1}, {"session": 2}, {"session": 3}, {"kind": "memory"}]
    assert where_measured(sessions, measured) == [here, there]
    assert where_measured(sessions, measured[:1]) == [there]
    assert where_measured([there, here], [{}]) == [here, there]  # the form that earlier versions wrote
    page = markdown(summarise(rows(), ARGUMENTS, [here, there]), "Benchmark")
    assert page.index(" on Here, 2 of 2 CPUs") < page.index("in earlier sessions elsewhere") < page.index(" on There, ")
    assert "sessions elsewhere" not in markdown(summarise(rows(), ARGUMENTS, [here]), "Benchmark")


def test_texts_margins_memory_and_errors() -> None:
    summary = summarise(rows(), ARGUMENTS, [ENVIRONMENT], 10_000)
    own, broken = summary["methods"]["own"], summary["methods"]["broken"]
    assert own["text"] == {
        "calls": 3,
        "identical": 2,
        "largest_margin": 0.01,
        "differences": [{"prompt": "a-2", "repeat": 0, "token": 3, "logit_margin": 0.01}],
    }
    assert own["memory"] == {
        "peak_beyond_plain_bytes": 100,
        "persistent_bytes": 400,
        "extra_bytes": 500,
        "share_of_weights": 0.05,
    }
    assert broken["errors"] == ["ValueError: no"] and broken["calls"] == 0 and "ratio" not in broken
    sampled = summarise(rows(), {**ARGUMENTS, "do_sample": True})["methods"]
    assert sampled["own"]["text"] == own["text"]  # by seed


def test_acceptance_and_time() -> None:
    drafting = summarise(rows(), ARGUMENTS)["methods"]["own"]["drafting"]
    assert drafting["acceptance_by_depth"] == [0.5, 1.0] and drafting["judged_by_depth"] == [6, 3]
    assert drafting["acceptance_rate"] == pytest.approx(2 / 3)
    assert drafting["tokens_per_round"] == 2 and drafting["drafted_per_round"] == 1.5
    seconds = drafting["seconds"]
    assert (seconds["prompt"], seconds["draft"], seconds["verify"]) == pytest.approx((3.0, 0.9, 3.0))
    assert seconds["elsewhere"] == pytest.approx(10.9 - 3.0 - 0.9 - 3.0)
    assert sum(drafting["share_of_time"].values()) == pytest.approx(1)


def test_efficiency_is_the_share_of_time_in_the_passes_at_the_runs_own_costs() -> None:
    plain, own = call("plain", "p", "c", 3.0), call("own", "p", "c", 2.4)
    # A plain step takes 0.5 s. c = 0.1/0.5, v = 0.5/0.5: S = 2 / (1.5 · 0.2 + 1) = 1.538; measured 2 / 1.4 = 1.429.
    assert engine_efficiency(own, plain) == pytest.approx((2 / 1.4) / (2 / 1.3))
    perfect = call("own", "p", "c", 2.3)
    assert engine_efficiency(perfect, plain) == pytest.approx(1)
    # The pass over the prompt does not count.
    slow_start = {**own, "seconds": 12.4, "prompt_seconds": 11.0}
    assert engine_efficiency(slow_start, plain) == pytest.approx(engine_efficiency(own, plain))


def test_efficiency_at_stored_costs() -> None:
    plain, own = call("plain", "p", "c", 3.0), call("own", "p", "c", 2.4)
    costs = Costs(plain_step=2.0, draft_step=0.4, verify=[(1, 2.0), (2, 2.0), (3, 2.4)])
    # c = 0.2; one round checked 3 tokens, the other 2: v = (1.2 + 1.0) / 2.
    assert engine_efficiency(own, plain, costs) == pytest.approx((2 / 1.4) / (2 / (1.5 * 0.2 + 1.1)))
    # Looked-up tokens cost nothing.
    looked_up = {**own, "speculation": {**SPECULATION, "looked_up_tokens": 3, "draft_seconds": 0.0}}
    assert engine_efficiency(looked_up, plain, costs) == pytest.approx((2 / 1.4) / (2 / 1.1))
    assert engine_efficiency(looked_up, plain) == pytest.approx((2 / 1.4) / (2 / 1.0))


def test_efficiency_of_a_loop_that_drafts_nothing() -> None:
    idle = {
        **SPECULATION,
        "rounds": 4,
        "draft_passes": 0,
        "drafted_tokens": 0,
        "accepted_tokens": 0,
        "tokens_per_round_histogram": {"1": 4},
        "drafted_by_depth": [],
        "judged_by_depth": [],
        "accepted_by_depth": [],
        "draft_seconds": 0.0,
        "verify_seconds": 2.0,
    }
    row = call("own", "p", "c", 3.2) | {"speculation": idle}
    plain = call("plain", "p", "c", 3.0)
    assert engine_efficiency(row, plain) == pytest.approx(2 / 2.2)
    costs = Costs(plain_step=2.0, draft_step=0.4, verify=[(1, 2.0)])
    assert engine_efficiency(row, plain, costs) == pytest.approx(2 / 2.2)


def test_no_efficiency_without_a_round() -> None:
    plain = call("plain", "p", "c", 3.0)
    assert engine_efficiency(plain, plain) is None
    single = call("own", "p", "c", 3.0, (1,)) | {"speculation": {**SPECULATION, "rounds": 0}}
    assert engine_efficiency(single, plain) is None


def test_ratios_are_taken_within_a_session() -> None:
    """After an interruption plain decoding runs again, for the remaining methods."""
    found = [
        call("plain", "p", "c", 3.0),
        call("own", "p", "c", 1.5),
        call("plain", "p", "c", 30.0, session=2),
        call("late", "p", "c", 30.0, session=2),
    ]
    assert ratios_so_far(found) == {"own": 2.0, "late": 1.0}
    assert ratios_so_far([]) == {}


def test_calls_that_failed_are_left_out() -> None:
    found = [*rows(), {**call("own", "b-2", "b", 1.0), "error": "RuntimeError: odd"}, call("plain", "b-2", "b", 9.0)]
    summary = summarise(found, ARGUMENTS)
    assert summary["methods"]["own"]["calls"] == 3
    assert summary["methods"]["own"]["errors"] == ["RuntimeError: odd"]
    assert "own: failed at times: RuntimeError: odd" in markdown(summary, "Benchmark")


def test_markdown_has_the_figures_and_the_failures() -> None:
    page = markdown(summarise(rows(), ARGUMENTS, [ENVIRONMENT], 10_000), "Benchmark")
    assert "| own | 0.90 | 0.50 (b) |" in page and "| 2 of 3 | 67% | 2.00 |" in page
    assert "| own | 1.62 (1.25–2.00) | 0.50 |" in page
    assert "broken: cannot run here: ValueError: no" in page
    assert "differs from plain decoding in 1 of 3 texts, first at token 3 of a-2" in page
    assert "the largest logit margin is 0.01" in page
    assert "500 B (5.0%)" in page and "A processor, 1 of 2 CPUs" in page and "(0123456789)" in page


def test_a_summary_is_json_and_can_be_empty() -> None:
    for found in (rows(), []):
        summary = summarise(found, ARGUMENTS, [ENVIRONMENT], 10_000)
        assert json.loads(json.dumps(summary, allow_nan=False)) == summary
        assert (
            markdown({**summary, "complete": False, "rows_done": 0, "rows": 9}, "Benchmark").count("0 of 9 rows") == 1
        )


def test_pairs() -> None:
    def pair(prompt: str, here: float, there: float, tokens: tuple[int, ...] = (1, 2, 3, 4, 5)) -> dict[str, Any]:
        sides = {"here": call("own", prompt, "a", here), "there": call("own", prompt, "a", there, tokens)}
        return {"kind": "pair", "prompt": prompt, "category": "a", "method": "own", "repeat": 0, **sides}

    found = [pair("a-1", 2.0, 3.0), pair("a-2", 2.0, 2.0, (1, 2, 3, 4, 6))]
    found.append({"kind": "pair", "prompt": "a-3", "category": "a", "method": "own", "repeat": 0, "error": "here: no"})
    summary = summarise_pairs(found, ARGUMENTS, [ENVIRONMENT])
    own = summary["methods"]["own"]
    assert own["ratio"]["categories"]["a"]["median"] == 1.25  # this checkout is the faster one
    assert (own["calls"], own["identical"], own["errors"]) == (2, 1, ["here: no"])
    assert own["drafting"]["there"]["acceptance_rate"] == pytest.approx(2 / 3)
    assert ratios_so_far(found) == {"own": 1.25}
    assert "faster than the other" in markdown(summary, "Benchmark") and "1 of 2" in markdown(summary, "Benchmark")


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for found in (rows(), []):
        plot_summary(summarise(found, ARGUMENTS, [ENVIRONMENT], 10_000), tmp_path / "plot.png")
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_plots_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ImportError, match=r"ssd_generation\[plots\]"):
        plot_summary(summarise(rows(), ARGUMENTS), tmp_path / "plot.png")
