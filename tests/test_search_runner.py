"""A search from end to end on a tiny model: costs, calibration, trials, timed generation, files, the command line."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from search_worker import calibration, cost_profile
from ssd_generation import DraftingConfig, SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from ssd_generation.cli.profile import profile_view
from ssd_generation.forward.captured.passes import CapturedPasses
from ssd_generation.harness.texts import Prompt
from ssd_generation.search import calibration as calibration_module
from ssd_generation.search import cost_profile as profile_module
from ssd_generation.search import plots as plots_module
from ssd_generation.search import run_search
from ssd_generation.search import trials as trials_module
from ssd_generation.search.calibration import calibrate, calibration_prompts, describe_weights
from ssd_generation.search.confirm import NOTHING_DRAFTED, confirm, generated_acceptance
from ssd_generation.search.cost_profile import CostProfile, measure_profile
from ssd_generation.search.plots import plot_all, plot_frontier, plot_map, plot_progress, sensitivities
from ssd_generation.search.run_search import search
from ssd_generation.search.settings import CalibrationSettings, ResultSettings, SearchSettings
from ssd_generation.search.trials import PRIOR, Found
from ssd_generation.tuning.acceptance import judge_all, verify_text
from test_cli import Run, tiny_tokenizer
from test_cli import folder as folder  # the fixture
from test_cli import ssd as ssd  # the fixture
from tiny_models import LAYERS, prompt, tiny_model

TOKENIZER = tiny_tokenizer()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SSD_GENERATION_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def model_of(**changes: Any) -> Any:
    return tiny_model(**{"hidden_size": 64, "intermediate_size": 64, "vocab_size": 304, **changes})


# ----------------------------------------------------------------------------------------------------------------------
# costs


@pytest.fixture(scope="module")
def profile() -> CostProfile:
    return measure_profile(model_of(), contexts=(16, 64), longest_verify=4, repeats=1)


def test_a_profile_has_every_part(profile: CostProfile, tmp_path: Path) -> None:
    assert profile.contexts == (16, 64)
    assert set(profile.mlp) == {"keep", "int8", "int4"}
    assert [n for n, _ in profile.verify] == [1, 2, 3, 4]
    assert all(seconds > 0 for _, seconds in profile.verify)
    assert profile.shares == {"attention": (1.0,) * LAYERS, "mlp": (1.0,) * LAYERS}
    profile.save(tmp_path / "p.json")
    assert CostProfile.load(tmp_path / "p.json") == profile


def test_a_machine_that_slows_down_between_parts_makes_none_dearer(monkeypatch: pytest.MonkeyPatch) -> None:
    slower = [1.0]

    class Pretend:
        """Mock passes with given times, multiplied by the machine's slowdown."""

        def __init__(
            self, model: Any, config: SelfSpeculativeConfig | None, context: int, cache: Any = None, **_: Any
        ) -> None:
            self.config, self.context, self.cache = config, context, "cache"

        def once(self, length: int) -> float:
            if length:
                return slower[0] * (0.9 + 0.1 * length)
            assert self.config is not None
            kept = {kind: LAYERS - len(getattr(self.config.skip, kind)) for kind in ("attention", "mlp")}
            low = 0.5 if self.config.precision else 1.0
            attention = 0.06 * kept["attention"] * (2.0 if self.context > 16 else 1.0)
            return slower[0] * (0.1 + low * (attention + 0.09 * kept["mlp"]))

    def slow_down(what: str, done: int, parts: int) -> None:
        slower[0] = 1.0 + done

    monkeypatch.setattr(profile_module, "Passes", Pretend)
    monkeypatch.setattr(profile_module._Profiler, "_head", lambda self, copies=None: 0.02 if copies else 0.05)
    profile = measure_profile(model_of(), ["int8"], contexts=(16, 64), longest_verify=4, repeats=1, progress=slow_down)
    plain = profile.plain_step[0]
    assert plain == 2.5  # 1, 2, 3 and 4 seconds
    assert profile.plain_step[1] / plain == pytest.approx(1.0 + 0.06 * LAYERS)
    assert [seconds / plain for _, seconds in profile.verify] == pytest.approx([1.0, 1.1, 1.2, 1.3])
    assert [seconds / plain for seconds in profile.attention["keep"]] == pytest.approx([0.06, 0.12])
    for precision, cost in (("keep", 0.09), ("int8", 0.045)):
        assert profile.mlp[precision] / plain == pytest.approx(cost)
        assert profile.head[precision] / plain == pytest.approx(0.05 if precision == "keep" else 0.02)
        assert (profile.head[precision] + profile.overhead[precision]) / plain == pytest.approx(0.1)
    assert profile.attention["int8"][0] / plain == pytest.approx(0.03)
    assert list(profile.checked.values()) == pytest.approx([1.0, 1.0])


def test_a_draft_step_is_the_sum_of_its_parts() -> None:
    profile = CostProfile(
        contexts=(64, 128),
        plain_step=(100.0, 110.0),
        attention={"keep": (4.0, 6.0), "int8": (2.0, 4.0)},
        mlp={"keep": 10.0, "int8": 5.0},
        head={"keep": 20.0, "int8": 8.0},
        overhead={"keep": 24.0, "int8": 12.0},
        verify=((1, 100.0), (3, 130.0)),
        spread=1.0,
        checked={},
        measured_on="x",
        model_type="llama",
        hidden_size=32,
        num_layers=4,
        shares={"attention": (1.0, 1.0, 1.0, 1.0), "mlp": (0.5, 1.5, 1.0, 1.0)},
    )
    assert profile.draft_step(SelfSpeculativeConfig()) == 100.0
    assert profile.draft_step(SelfSpeculativeConfig(SkipConfig([1], [1]))) == 100.0 - 4.0 - 15.0
    assert profile.draft_step(SelfSpeculativeConfig(SkipConfig([1], []))) == 96.0
    assert profile.draft_step(SelfSpeculativeConfig(), context=96) == 104.0
    assert profile.draft_step(SelfSpeculativeConfig(), context=192) == 100.0 + 4 * 4.0
    assert profile.draft_step(SelfSpeculativeConfig(precision="int8")) == 12.0 + 8.0 + 4 * 2.0 + 4 * 5.0
    mixed = SelfSpeculativeConfig.from_dict({"precision": {"mlp": {"0": "int8"}}})
    assert profile.draft_step(mixed) == 100.0 - 0.5 * 5.0
    costs = profile.costs(SelfSpeculativeConfig(), context=128)
    assert (costs.plain_step, costs.verify_seconds(3)) == (110.0, 140.0)
    with pytest.raises(ValueError, match="measured without int4"):
        profile.draft_step(SelfSpeculativeConfig(precision="int4"))


def test_a_profile_knows_where_it_is_from(profile: CostProfile) -> None:
    assert profile.compared_with(model_of()) == []
    (difference,) = profile.compared_with(model_of().to(torch.bfloat16))
    assert "float32" in difference and "bfloat16" in difference
    assert any(
        "of 4 layers and width 64, and this is a llama of 6" in d
        for d in profile.compared_with(model_of(num_hidden_layers=6))
    )


PROFILE = json.dumps(cost_profile().to_dict())


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        '{"version": 1}',
        "[]",
        '{"version": 1, "contexts": "x"}',
        PROFILE.replace('"plain_step": [1.0]', '"plain_step": []'),
        PROFILE.replace('"plain_step": [1.0]', '"plain_step": [0]'),
        PROFILE.replace('"contexts": [64]', '"contexts": [64, 128]'),
        PROFILE.replace('"contexts": [64]', '"contexts": [-1]'),
        PROFILE.replace('"contexts": [64]', '"contexts": [[]]'),
        PROFILE.replace('"contexts": [64]', f'"contexts": ["{"x" * 9999}"]'),
        PROFILE.replace('"keep": 0.16', '"keep": -0.16'),
        PROFILE.replace('"keep": 0.16', '"keep": "inf"'),
        PROFILE.replace('"num_layers": 4', '"num_layers": 5'),
        PROFILE.replace('"checked": {}', '"checked": {"skipped": []}'),
        PROFILE.replace('"measured_on": "a machine of the tests"', '"measured_on": null'),
    ],
)
def test_files_that_are_no_profile(content: str, tmp_path: Path) -> None:
    assert content != PROFILE
    file = tmp_path / "p.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"p\.json.*ssd profile") as raised:
        CostProfile.load(file)
    assert len(str(raised.value)) < 400
    file.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"p\.json.*deeper than 64"):
        CostProfile.load(file)
    with pytest.raises(FileNotFoundError, match="no cost profile"):
        CostProfile.load(tmp_path / "other.json")


def test_what_cannot_be_profiled() -> None:
    with pytest.raises(ValueError, match="at least two attention"):
        measure_profile(model_of(num_hidden_layers=1))
    with pytest.raises(ValueError, match="longest_verify must be 2 to 32"):
        measure_profile(model_of(), longest_verify=99)
    with pytest.raises(ValueError, match="no precision 'int3'"):
        measure_profile(model_of(), precisions=["int3"])


# ----------------------------------------------------------------------------------------------------------------------
# calibration


def test_the_built_in_prompts_take_turns() -> None:
    prompts = calibration_prompts()
    assert len(prompts) >= 20
    assert len({p.category for p in prompts[:6]}) == 6
    assert {"prose", "chat", "code", "summarisation", "translation", "arithmetic"} == {p.category for p in prompts}
    first, later = calibration_prompts(count=8), calibration_prompts(count=6, skip=8)
    assert not {p.id for p in first} & {p.id for p in later}
    with pytest.raises(ValueError, match="none is left after the first 99"):
        calibration_prompts(skip=99)
    with pytest.raises(ValueError, match="At least one"):
        calibration_prompts(count=0)


def test_continuations_are_generated_once(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    model = model_of()
    prompts = [Prompt("a", "x", "the rain"), Prompt("b", "x", "a river runs")]
    first = calibrate(model, TOKENIZER, prompts, new_tokens=6)
    assert (len(first), first.tokens(), first.passes) == (2, 12, 14)
    again = calibrate(model, TOKENIZER, prompts, new_tokens=6)
    assert (again.passes, again.digest) == (2, first.digest)
    ids = first.texts[0].ids
    plain = model.generate(
        ids[:, : first.texts[0].prompt_length], attention_mask=None, max_new_tokens=6, do_sample=False
    )
    assert torch.equal(plain, ids)
    # Another model gives other texts for the same prompts.
    other = calibrate(model_of(seed=1), TOKENIZER, prompts, new_tokens=6)
    assert other.passes == 14 and other.digest == first.digest
    assert calibrate(model, TOKENIZER, prompts, new_tokens=5).digest != first.digest
    assert calibrate(model, TOKENIZER, prompts[:1], new_tokens=6).digest != first.digest
    assert describe_weights(model_of(seed=1)) != describe_weights(model)
    for file in (own_cache / "calibration").iterdir():
        file.write_text("damaged")
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr(calibration_module.logger, "warning", lambda text, *args: said.append(text % args))
        assert calibrate(model, TOKENIZER, prompts, new_tokens=6).digest == first.digest
    assert "cannot be read" in said[0]


def test_prompts_that_do_not_fit_are_named() -> None:
    long = Prompt("long-one", "x", "rain " * 600)
    with pytest.raises(ValueError, match=r"'long-one' has .* context of 512"):
        calibrate(model_of(), TOKENIZER, [long])
    with pytest.raises(ValueError, match=r"at least two tokens.*but got new_tokens=1"):
        calibrate(model_of(), TOKENIZER, [long], new_tokens=1)


def test_data_sets_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, subset: Any, split: str, streaming: bool) -> Any:
        asked.append((name, subset, split, streaming))
        return [{"id": i, "article": f"text {i}"} for i in range(50)]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    prompts = calibration_prompts("cnn_dailymail:3.0.0@test", count=3)
    assert asked == [("cnn_dailymail", "3.0.0", "test", True)]
    assert [p.text for p in prompts] == ["text 0", "text 1", "text 2"]
    with pytest.raises(ValueError, match="has the columns id, article; name the one"):
        calibration_prompts("cnn_dailymail#summary", count=3)

    def unreachable(*args: Any, **kwargs: Any) -> Any:
        raise ConnectionError("offline")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=unreachable))
    with pytest.raises(ValueError, match="could not be read as a data set of the Hub either"):
        calibration_prompts("someone/something")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="pip install datasets"):
        calibration_prompts("someone/something")


# ----------------------------------------------------------------------------------------------------------------------
# generation


def test_nothing_is_recorded_while_generation_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    texts = calibration(model, texts=2)
    events: list[str] = []
    make = CapturedPasses._make

    def making(passes: CapturedPasses, model: Any, captured: Any, is_head: bool = False) -> Any:
        made = make(passes, model, captured, is_head)
        if not passes.is_draft and made is not None:
            events.append("recorded")
        return made

    monkeypatch.setattr(CapturedPasses, "_make", making)
    drafting = DraftingConfig(policy="fixed", max_draft_length=3)
    configs = {"a": SelfSpeculativeConfig(SkipConfig([1]), drafting=drafting), "b": SelfSpeculativeConfig()}
    confirm(model, configs, texts, events.append)
    assert events.count("recorded") == 13  # lengths 1 to 12 + 1
    assert events[13:] == [event for event in events if event != "recorded"] and len(events) == 13 + 3 * 3


def test_timed_generation_is_that_of_the_texts() -> None:
    model = model_of()
    texts = calibrate(model, TOKENIZER, [Prompt("a", "x", "the rain"), Prompt("b", "x", "a river")], new_tokens=8)
    configs = {"skip": SelfSpeculativeConfig(SkipConfig([1], [2])), "nothing": SelfSpeculativeConfig()}
    told: list[str] = []
    confirmed = confirm(model, configs, texts, told.append)
    assert {name: len(r) for name, r in confirmed.ratios.items()} == {"skip": 2, "nothing": 2}
    assert confirmed.identical == {"skip": 2, "nothing": 2}
    assert confirmed.acceptance["nothing"] == 1.0
    assert len(told) == 3 * 3
    assert confirmed.to_dict()["skip"]["texts"] == 2
    drafting = DraftingConfig(policy="fixed", max_draft_length=3)
    counted = generated_acceptance(model, SelfSpeculativeConfig(drafting=drafting), texts)
    assert counted.by_depth() == [1.0, 1.0, 1.0]


# ----------------------------------------------------------------------------------------------------------------------
# end to end


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, profile: CostProfile) -> tuple[Path, Any]:
    output = tmp_path_factory.mktemp("search") / "out"
    result = search(
        enable_self_speculative(model_of()),
        TOKENIZER,
        14,
        settings=SearchSettings(draft_memory=1.0),
        texts=CalibrationSettings(num_prompts=2, held_out_prompts=1, new_tokens=8),
        results=ResultSettings(output),
        profile=profile,
    )
    return output, result


def test_everything_is_written(done: tuple[Path, Any]) -> None:
    output, result = done
    assert {p.name for p in output.iterdir()} == {
        "profile.json",
        "search.json",
        "self_speculative_config.json",
        "study.db",
    }
    assert SelfSpeculativeConfig.from_pretrained(output) == result.config
    written = json.loads((output / "search.json").read_text())
    assert written["trials"] == 14
    assert written["best"]["speedup"] == result.best.speedup
    assert written["held_out"]["texts"] == 1
    assert written["passes"]["trials"] == sum(result.found.passes)
    assert result.confirmed.identical[f"trial {result.best.number}"] == 1
    name = f"trial {result.best.number}"
    (drafted,), (loop,) = result.confirmed.ratios[name], result.confirmed.ratios[NOTHING_DRAFTED]
    assert result.confirmed.by_the_draft(name) == drafted / loop
    assert written["confirmed"][NOTHING_DRAFTED]["acceptance"] is None
    origins = [t.origin for t in result.found.tried]
    assert origins[:3] == ["uniform"] * 3
    assert set(origins[3:11]) == {"single"}


def test_the_config_expects_what_was_accepted_on_texts_that_it_was_not_chosen_on(done: tuple[Path, Any]) -> None:
    model, settings = model_of(), SearchSettings()
    held_back = calibrate(model, TOKENIZER, calibration_prompts(None, 1, skip=2), 8)
    again = judge_all(model, done[1].config, held_back.texts, settings.depth, settings.depth)
    assert list(done[1].config.drafting.acceptance) == pytest.approx(again.by_depth(PRIOR), abs=1e-4)
    assert list(done[1].config.drafting.acceptance) != pytest.approx(done[1].best.acceptance.by_depth(PRIOR), abs=1e-4)
    assert done[1].held_out["acceptance"] == sum(again.accepted) / sum(again.tried)


def test_the_config_generates(done: tuple[Path, Any]) -> None:
    model = enable_self_speculative(model_of())
    ids = prompt(10, vocab=304)
    mask = torch.ones_like(ids)
    plain = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    drafted = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, self_speculative=done[0])
    assert torch.equal(plain, drafted)


def test_going_on_uses_the_costs_of_the_study(done: tuple[Path, Any], profile: CostProfile, tmp_path: Path) -> None:
    import dataclasses
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(done[0], copy)
    arguments: dict[str, Any] = {
        "settings": SearchSettings(draft_memory=1.0),
        "texts": CalibrationSettings(num_prompts=2, held_out_prompts=0, new_tokens=8),
        "results": ResultSettings(copy, confirmed=0),
    }
    result = search(model_of(), TOKENIZER, 16, **arguments)
    assert result.profile == profile
    assert len(result.found.tried) == 16
    assert [t.choices for t in result.found.tried[:14]] == [t.choices for t in done[1].found.tried]
    with pytest.raises(ValueError, match="searched with other costs"):
        search(model_of(), TOKENIZER, 16, profile=dataclasses.replace(profile, spread=2.0), **arguments)
    with pytest.raises(ValueError, match="made for something else"):
        search(model_of(seed=3), TOKENIZER, 16, **arguments)
    with pytest.raises(ValueError, match="trials must be an integer"):
        search(model_of(), TOKENIZER, 0)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="is a file"):
        search(model_of(), TOKENIZER, 1, results=ResultSettings(tmp_path / "file"))


class Told:
    """An observer that records the stages and warnings of a search."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.warnings: list[str] = []

    def stage(self, name: str) -> None:
        self.stages.append(name)

    def step(self, text: str, done: int, total: int) -> None:
        pass

    def trial(self, found: Found, trials: int) -> None:
        pass

    def warn(self, text: str) -> None:
        self.warnings.append(text)


SKIPPING = SearchSettings(draft_memory=0.0)
TEXTS = CalibrationSettings(num_prompts=2, held_out_prompts=1, new_tokens=6)
SMALL: dict[str, Any] = {"settings": SKIPPING, "texts": TEXTS}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"texts": replace(TEXTS, new_tokens=1)}, "at least two tokens"),
        ({"texts": replace(TEXTS, new_tokens=508)}, "context of 512"),
        ({"settings": replace(SKIPPING, start_from=(SelfSpeculativeConfig(precision="int8"),))}, "is not available"),
        ({"settings": replace(SKIPPING, depth=4), "results": "a study"}, "made for something else"),
    ],
)
def test_what_cannot_be_is_said_before_anything_slow(
    changes: dict[str, Any],
    message: str,
    profile: CostProfile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "results" in changes:
        changes = {**changes, "results": ResultSettings(storage=str(tmp_path / "s.db"), confirmed=0)}
        search(model_of(), TOKENIZER, 1, profile=profile, **{**SMALL, "results": changes["results"]})
    monkeypatch.setattr(run_search, "measure_profile", lambda *args, **kwargs: pytest.fail("was measured"))
    monkeypatch.setattr(run_search, "calibrate", lambda *args, **kwargs: pytest.fail("was generated"))
    with pytest.raises(ValueError, match=message):
        search(model_of(), TOKENIZER, 4, **{**SMALL, **changes})


def test_the_config_is_there_before_the_timing(
    profile: CostProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_search, "confirm", interrupted)
    with pytest.raises(KeyboardInterrupt):
        search(model_of(), TOKENIZER, 3, results=ResultSettings(tmp_path), profile=profile, **SMALL)
    written = json.loads((tmp_path / "search.json").read_text())
    assert written["trials"] == 3 and written["confirmed"] is None and written["held_out"] is not None
    config = SelfSpeculativeConfig.from_pretrained(tmp_path)
    assert config.costs is not None and config.provenance is not None


def test_what_is_not_as_was_asked_is_said(profile: CostProfile, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "the rain"}\n{"prompt": "a river"}\n')
    told = Told()
    elsewhere = replace(profile, measured_on="a machine far away")
    texts = replace(TEXTS, num_prompts=3, prompts=str(file))
    small = {"settings": SKIPPING, "texts": texts, "results": ResultSettings(confirmed=0), "observer": told}
    result = search(model_of(num_hidden_layers=2), TOKENIZER, 30, profile=cut(elsewhere, 2), **small)
    assert len(result.found.tried) == 12 and result.held_out is None
    said = "\n".join(told.warnings)
    assert "There are 12 drafts of this model to try, so these are tried, instead of 30." in said
    assert "There are 2 prompts to judge drafts on, instead of 3." in said
    assert "There are 0 prompts to hold back, instead of 1. What is found is reported" in said
    assert "The costs are not of this machine and model: it was measured on a machine far away" in said


def cut(profile: CostProfile, layers: int) -> CostProfile:
    """Return the profile cut to fewer layers."""
    return replace(profile, num_layers=layers, shares={k: v[:layers] for k, v in profile.shares.items()})


def test_a_prompt_file_of_blank_rows_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = SimpleNamespace(rows=[{"text": " "}], column="text", name="blank")
    monkeypatch.setattr(calibration_module, "hub_rows", lambda *args: rows)
    with pytest.raises(ValueError, match="'some/data' holds no prompt"):
        calibration_prompts("some/data")


def test_plots(done: tuple[Path, Any], tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    paths = plot_all(done[1].found, done[1].profile, done[1].space, tmp_path)
    assert [p.name for p in paths] == ["frontier.png", "progress.png", "map.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in paths)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    losses = sensitivities(done[1].found, done[1].space)
    assert set(losses) == {f"{kind}.{i}" for kind in ("attention", "mlp") for i in range(LAYERS)}
    assert all(0 <= loss <= 1 for loss in losses.values())
    axes = plot_progress({"a": done[1].found, "nothing yet": Found()})
    assert axes.get_xlabel() == "forward passes of the model"
    # A notebook shows the figures that pyplot knows; figures saved to files must not be among them.
    pyplot, backend = pytest.importorskip("matplotlib.pyplot"), matplotlib.get_backend()
    assert axes.figure.number in pyplot.get_fignums() and plot_map(done[1].found, done[1].space).figure.number
    known = pyplot.get_fignums()
    plot_all(done[1].found, done[1].profile, done[1].space, tmp_path)
    assert pyplot.get_fignums() == known and matplotlib.get_backend() == backend
    pyplot.close("all")
    # Drafts that do not pay are plotted at their value, not at 1.
    whole = [t for t in done[1].found.tried if not t.pruned]
    poor = Found(tuple(replace(t, speedup=0.5 + 0.1 * i) for i, t in enumerate(whole[:3])), (8, 8, 8))
    axes = plot_progress({"poor": poor, "nothing yet": Found()})
    pyplot.close("all")
    drawn = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
    assert drawn["poor (0.70×)"] == [0.5, 0.6, 0.7] and drawn["nothing yet (nothing yet)"] == []


def test_plots_say_what_they_do_not_show(done: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    found, profile, space = done[1].found, done[1].profile, done[1].space
    assert plot_map(found, space).get_xlabel() == "layer"
    some = [t for t in found.tried if t.origin != "single"]
    partial = Found(some, [1] * len(some))
    assert plot_map(partial, space).get_xlabel() == "layer (grey: not tried alone)"
    whole = [t for t in found.tried if not t.pruned]
    good, cheap, poor, given_up = (replace(whole[0], number=n, draft_cost=0.5 + 0.1 * n) for n in range(4))
    rates = {0: 0.95, 1: 0.96, 2: 0.1, 3: 0.1}
    monkeypatch.setattr(plots_module, "mean_acceptance", lambda t: rates[t.number])
    monkeypatch.setattr(trials_module, "mean_acceptance", lambda t: rates[t.number])
    assert "not shown" not in plot_frontier(Found([good, cheap], [1, 1]), profile).get_title()
    title = plot_frontier(Found([good, cheap, poor, replace(given_up, pruned=True)], [1] * 4), profile).get_title()
    assert "(not shown: 1 accepted less often than shown, 1 given up early)" in title
    pyplot.close("all")


# ----------------------------------------------------------------------------------------------------------------------
# the command line

SHORT = ["--num-prompts", "2", "--held-out", "1", "--new-tokens", "6", "--dtype", "float32"]


def test_profile_and_search_and_retarget(ssd: Any, folder: str, tmp_path: Path) -> None:
    costs, out = tmp_path / "costs.json", tmp_path / "out"
    run: Run = ssd("profile", folder, "--contexts", "16", "--repeats", "1", "-o", str(costs))
    assert run.status == 0, run.err
    assert "A plain step takes" in run.out and "v(n)" in run.out
    run = ssd("search", folder, "--trials", "12", "--skip-only", "--costs", str(costs), "-o", str(out), *SHORT)
    assert run.status == 0, run.err
    assert "12 drafts judged" in run.out
    for row in (
        "predicted, over",
        "… on 1 held-out texts",
        "measured, over",
        "… the loop alone",
        "… what the draft adds",
    ):
        assert row in run.out
    assert "texts identical to plain decoding: 1 of 1" in run.out
    assert (out / "self_speculative_config.json").is_file()
    run = ssd("search", "--from", str(out), "--costs", str(costs), "-o", str(tmp_path / "there"), "--json")
    assert run.status == 0, run.err
    assert json.loads(run.out)["config"]["skip"] is not None
    assert (tmp_path / "there" / "self_speculative_config.json").is_file()
    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_text(costs.read_text().replace('"measured_on": "', '"measured_on": "a phone, '))
    run = ssd("search", folder, "--trials", "2", "--costs", str(elsewhere), "-o", str(tmp_path / "o"), *SHORT)
    assert run.status == 0 and "The costs are not of this machine and model: it was measured on a phone" in run.err
    assert f"ssd generate --model {folder} --dtype float32 --config" in run.out
    run = ssd("search", folder, "--trials", "12", "--skip-only", "-o", str(out), "--json", *SHORT)
    assert json.loads(run.out)["trials"] == 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["search", "demo", "--trials", "0"], "--trials"),
        (["search", "--from", "x"], "--costs"),
        (["search", "demo", "--sampler", "magic"], "no sampler 'magic'"),
        (["search", "demo", "--costs", "nowhere.json"], "no cost profile 'nowhere.json'"),
        (["profile", "demo", "--contexts", "many"], "--contexts takes numbers"),
        (["profile", "demo", "-o", "no/folder/costs.json"], "no folder 'no/folder'"),
        (["search", "demo", "--sampler", "nsga2", "--objective", "acceptance"], "cannot optimise the objective"),
        (["search", "demo", "--new-tokens", "1"], "--new-tokens"),
    ],
)
def test_mistakes_are_told_in_a_line(ssd: Any, arguments: list[str], message: str) -> None:
    run: Run = ssd(*arguments)
    assert run.status == 2
    assert message in run.err
    assert "Traceback" not in run.err


def test_texts_of_tests_are_the_models_own() -> None:
    model = model_of()
    text = verify_text(model, prompt(12, vocab=304), 6)
    assert len(text) == 6


def test_estimators_are_compared_with_generation() -> None:
    from lab.estimators import ESTIMATORS, compare_estimators, random_skips

    model = model_of()
    texts = calibrate(model, TOKENIZER, [Prompt("a", "x", "the rain"), Prompt("b", "x", "a river")], new_tokens=24)
    skips = random_skips(model, 6)
    assert [len(skip) for skip in skips] == [1, 2, 3, 4, 5, 6]
    told: list[int] = []
    result = compare_estimators(model, texts, skips, 3, told.append)
    assert told == [1, 2, 3, 4, 5, 6]
    assert set(result["estimators"]) == set(ESTIMATORS)
    assert result["estimators"]["a round at each token"]["correlation"] > 0.8
    per_draft = result["per_draft"]
    assert per_draft["rounds in a row"]["passes"] == 2
    assert per_draft["measured"]["passes"] > 20
    assert per_draft["a round at each token"]["inputs"] > 2 * per_draft["rounds in a row"]["inputs"]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_tables_of_a_profile_lose_no_digit(width: int) -> None:
    lengths = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
    profile = cost_profile(
        contexts=(64, 512, 2048),
        plain_step=(0.071, 0.08, 0.1),
        attention={"keep": (0.0005, 0.0006, 0.0014)},
        verify=tuple((n, 0.071 * (1 + n / 40)) for n in lengths),
    )
    console = Console(width=width, file=io.StringIO())
    for part in profile_view(profile, console):
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    figures = ["0.500", "0.600", "1.400", "71.0", "80.0", "100.0", *(f"{1 + n / 40:.2f}" for n in lengths)]
    assert "…" not in shown and all(figure in shown for figure in figures)
    assert max(map(len, shown.splitlines())) <= width
