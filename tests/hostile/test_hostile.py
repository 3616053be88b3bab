"""Malformed inputs of every kind that the library reads.

Each one succeeds, or raises a ValueError, TypeError or FileNotFoundError (on the command line: status 2 and one line on
stderr), within two seconds and one gigabyte, and no file of the user is changed. A thousand in the ordinary run; ten
times as many with `pytest -m nightly`. A failure names the seed that reproduces it.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import sys
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import EMPTY, outcome, said, snapshot
from mutations import as_bytes, mutated, odd_value, put

from ssd_generation import (
    Costs,
    DraftingConfig,
    LookupConfig,
    PrecisionConfig,
    Provenance,
    SelfSpeculativeConfig,
    SkipConfig,
    enable_self_speculative,
)
from ssd_generation.cli import main
from ssd_generation.evaluation.articles import read_articles
from ssd_generation.evaluation.problems import read_problems
from ssd_generation.harness.results import RunFolder, read_rows
from ssd_generation.harness.texts import read_prompts
from ssd_generation.support import files
from ssd_generation.support import measurements as keeping
from test_cli import tiny_tokenizer
from tiny_models import prompt, tiny_model

CONFIG: dict[str, Any] = {
    "format_version": 1,
    "skip": {"attention": [1, 2], "mlp": [3]},
    "drafting": DraftingConfig(acceptance=(0.9, 0.8)).to_dict(),
    "precision": {"default": "int4", "attention": {"0": "int8"}, "mlp": {}, "head": "int8", "group_size": 32},
    "lookup": {"max_ngram": 4, "min_ngram": 1, "max_tokens": 12},
    "costs": {"plain_step": 0.03, "draft_step": 0.01, "verify": [[2, 0.04], [8, 0.05]], "measured_on": "cpu"},
    "provenance": {"model_id": "a/b", "model_type": "llama", "num_layers": 4, "date": "2026-01-31"},
    "adapt": False,
}
COUNTS = {
    "configs": 300,
    "dicts": 200,
    "arguments": 100,
    "data": 150,
    "results": 80,
    "storages": 40,
    "measurements": 70,
    "commands": 60,
}
assert sum(COUNTS.values()) == 1_000
TIMES_NIGHTLY = 10

OURS = "all but the last row of a folder of ours is left as it is"
Attempt = Callable[[random.Random, Path], tuple[Callable[[], Any], str, bool | str]]
"""Function `(rng, empty folder)` → the work, a description of its input, and whether it only reads, or `OURS`."""


def run(kind: str, count: int, attempt: Attempt, folder: Path) -> Counter[str]:
    """Try so many inputs of a kind, each in a folder of its own; return the number of each outcome."""
    counts: Counter[str] = Counter()
    for number in range(count):
        here = folder / uuid.uuid4().hex[:8]
        here.mkdir()
        work, told, only_reads = attempt(random.Random(f"{kind} {number}"), here)
        told = f"{kind} {number}: {told[:500]!r}"
        before = snapshot(here)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a usable config may warn of odd values
            counts[outcome(work, told, works_on=kind == "commands")] += 1
        after = snapshot(here)
        if only_reads is OURS:
            after["run/rows.jsonl"] = before.get("run/rows.jsonl")
        if only_reads is True:
            assert after == before, f"files have changed: {told}"
        else:
            kept = {name: what for name, what in before.items() if what != EMPTY}  # an empty file may become a journal
            assert {name: after.get(name) for name in kept} == kept, f"somebody's files have changed: {told}"
        shutil.rmtree(here)
    print(f"\n{kind}: {count} inputs: {said(counts)}")
    return counts


# --- the kinds


def config_file(rng: random.Random, folder: Path) -> tuple[Callable[[], Any], str, bool | str]:
    several = {"llama": CONFIG, "b": CONFIG["skip"]}
    document = rng.choice([CONFIG, CONFIG, CONFIG, several, CONFIG["skip"]])
    content = as_bytes(rng, mutated(rng, document))
    path = put(rng, folder / "self_speculative_config.json", content)
    target = rng.choice([path, str(path), folder])
    name = rng.choice([None, None, "llama", "\x1b", "n" * 1_000])
    return lambda: SelfSpeculativeConfig.from_pretrained(target, name=name), f"{path} {content[:300]!r}", True


PARTS: dict[str, type[Any]] = {
    "skip": SkipConfig,
    "drafting": DraftingConfig,
    "precision": PrecisionConfig,
    "lookup": LookupConfig,
    "costs": Costs,
    "provenance": Provenance,
}


def config_dict(rng: random.Random, folder: Path) -> tuple[Callable[[], Any], str, bool | str]:
    if rng.random() < 0.4:
        document = mutated(rng, CONFIG)
        return lambda: SelfSpeculativeConfig.from_dict(document), repr(document)[:300], True
    part = rng.choice(list(PARTS))
    document = mutated(rng, CONFIG[part])
    # Unknown keywords are refused by Python itself.
    if rng.random() < 0.5 or not isinstance(document, dict) or not document.keys() <= CONFIG[part].keys():
        return lambda: PARTS[part].from_dict(document), f"{part}: {document!r:.300}", True
    return lambda: PARTS[part](**document), f"{part}(**{document!r:.300})", True


@pytest.fixture(scope="module")
def model() -> Any:
    model = enable_self_speculative(tiny_model("llama"))
    for precision in (None, "int8", "int4"):  # kernels are compiled here, outside the time of any input
        config = SelfSpeculativeConfig(SkipConfig(attention=[1]), precision=precision)
        model.generate(prompt(8), max_new_tokens=8, do_sample=False, self_speculative=config)
    return model


def arguments_of(model: Any) -> Attempt:
    ids = prompt(8)

    def attempt(rng: random.Random, folder: Path) -> tuple[Callable[[], Any], str, bool | str]:
        sound: dict[str, Any] = {"self_speculative": "auto", "draft_memory": 0.3}
        kind = rng.random()
        if kind < 0.5:
            sound = {"self_speculative": mutated(rng, CONFIG)}
        elif kind < 0.7:
            path = put(rng, folder / "config.json", as_bytes(rng, mutated(rng, CONFIG)))
            sound = {"self_speculative": rng.choice([path, str(path)])}
        elif kind < 0.85:
            sound = {"self_speculative": odd_value(rng)}
        else:
            sound["draft_memory"] = odd_value(rng)
        stored = rng.random() < 0.1

        def work() -> None:
            settings = model.generation_config
            try:
                if stored:
                    settings.self_speculative = sound["self_speculative"]
                request = sound | {"self_speculative": True} if stored else sound
                model.generate(ids, max_new_tokens=3, do_sample=False, **request)
            finally:
                if stored:
                    del settings.self_speculative

        return work, repr(sound)[:300], True

    return attempt


LINES: dict[str, list[Any]] = {
    "prompts.jsonl": [
        {"prompt": "Why?", "category": "writing"},
        {"turns": ["One", "Two"], "category": "chat"},
        {"document": "An article."},
        {"question": "1 + 1?"},
    ],
    "articles.jsonl": [{"document": "A long article.", "summary": "Short.", "id": "1"}],
    "problems.jsonl": [
        {
            "task_id": "t/0",
            "prompt": "def f():\n",
            "entry_point": "f",
            "test": "def check(f):\n    pass\n",
            "canonical_solution": "    pass\n",
        }
    ],
}
READERS: dict[str, Callable[[Any], Any]] = {
    "prompts.jsonl": read_prompts,
    "prompts.txt": read_prompts,
    "articles.jsonl": read_articles,
    "problems.jsonl": read_problems,
    "problems.jsonl.gz": read_problems,
}


def data_file(rng: random.Random, folder: Path) -> tuple[Callable[[], Any], str, bool | str]:
    import gzip

    name = rng.choice(list(READERS))
    lines = LINES.get(name.removesuffix(".gz").replace(".txt", ".jsonl"), [])
    content = b"\n".join(as_bytes(rng, mutated(rng, rng.choice(lines))) for _ in range(rng.choice([1, 2, 5])))
    if name.endswith(".gz"):
        content = gzip.compress(content)
        if rng.random() < 0.4:
            content = content[: rng.randrange(len(content))] + bytes([rng.randrange(256)]) * rng.choice([0, 1, 9])
    path = put(rng, folder / name, content)
    return lambda: READERS[name](path), f"{path} {content[:300]!r}", True


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of sound outputs of the commands: two kinds of results, a search, a journal, and a tiny model."""
    folder = tmp_path_factory.mktemp("sound")
    tokenizer = tiny_tokenizer()
    tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=4096).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    skip = "--new-tokens 4 --methods plain,skip --skip-attention 1 --json"
    search = "--num-prompts 1 --new-tokens 4 --confirm 0 --json"
    made = [
        f"evaluate summarisation --model model --limit 1 {skip} -o evaluation",
        f"benchmark --model model --limit-per-category 1 --category writing {skip} -o benchmark",
        f"search model --trials 2 --held-out 1 {search} -o search",
        f"search model --trials 1 --held-out 0 {search} -o second --storage journal:study.journal",
    ]
    before = os.getcwd()
    os.chdir(folder)
    try:
        for arguments in made:
            with pytest.raises(SystemExit) as left:
                main(arguments.split())
            assert left.value.code == 0, arguments
    finally:
        os.chdir(before)
    return folder


def _spoil(rng: random.Random, folder: Path) -> str:
    """Mutate one or two of a folder's files; return a description of the changes."""
    told = []
    for _ in range(rng.choice([1, 1, 2])):
        files = sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix in (".json", ".jsonl", ".md"))
        if not files:
            break
        file = rng.choice(files)
        text = file.read_text(encoding="utf-8", errors="replace")
        file.unlink()
        if file.suffix == ".jsonl":
            lines = text.splitlines() or ["{}"]
            at = rng.randrange(len(lines))
            content = as_bytes(rng, mutated(rng, _loaded(lines[at])))
            whole = [line.encode() for line in lines]
            whole[at] = content
            content = b"\n".join(whole) + rng.choice([b"\n", b""])
        else:
            content = as_bytes(rng, mutated(rng, _loaded(text)))
        if rng.random() < 0.9:
            put(rng, file, content)
        told.append(f"{file.name}: {content[:200]!r}")
    return "; ".join(told)


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # the file was spoilt before
        return {"text": text[:100]}


def results_of(sound: Path) -> Attempt:
    from ssd_generation.evaluation.report import read_summaries, runs_markdown, runs_table

    def attempt(rng: random.Random, folder: Path) -> tuple[Callable[[], Any], str, bool | str]:
        run = folder / "run"
        shutil.copytree(sound / rng.choice(["evaluation", "benchmark"]), run)
        told = _spoil(rng, run)
        if rng.random() < 0.6:

            def report() -> None:
                summaries = read_summaries([run])
                runs_table(summaries)
                runs_markdown(summaries)

            return report, told, True
        if rng.random() < 0.5:
            return lambda: read_rows(run), told, True

        def enter() -> None:
            with RunFolder(run, _loaded((sound / "evaluation" / "config.json").read_text())):
                pass

        # A last row that a kill may have cut short is dropped, and the run continues.
        return enter, told, OURS

    return attempt


def storages_of(sound: Path) -> Attempt:
    from ssd_generation.search.run_search import read_study

    def attempt(rng: random.Random, folder: Path) -> tuple[Callable[[], Any], str, bool | str]:
        kind = rng.choice(["journal", "journal", "sqlite", "json", "folder", "odd"])
        if kind == "journal":
            lines = (sound / "study.journal").read_bytes().splitlines()
            at = rng.randrange(len(lines))
            spoilt = as_bytes(rng, mutated(rng, _loaded(lines[at].decode())))
            lines[at] = rng.choice([b"[]", b'{"op_code": 99}', b"{}", b"1", spoilt])
            path = put(rng, folder / "study.journal", b"\n".join(lines) + rng.choice([b"", b"\n", b'{"op_']))
            storage = f"journal:{path}"
        elif kind == "sqlite":
            database = bytearray((sound / "search" / "study.db").read_bytes())
            for _ in range(rng.choice([0, 1, 40])):
                database[rng.randrange(len(database))] = rng.randrange(256)
            size = rng.choice([len(database), rng.randrange(len(database))])
            path = put(rng, folder / "study.db", bytes(database[:size]))
            storage = rng.choice([str(path), f"sqlite:///{path}", f"journal:{path}"])
        elif kind == "json":
            path = put(rng, folder / "notes.json", as_bytes(rng, mutated(rng, CONFIG)))
            storage = rng.choice([str(path), f"journal:{path}", f"sqlite:///{path}"])
        elif kind == "folder":
            shutil.copytree(sound / "search", folder / "run")
            _spoil(rng, folder / "run")
            storage = str(folder / "run")
        else:
            odd = str(odd_value(rng))[:5_000]
            storage = rng.choice(["", "journal:", "sqlite://", "sqlite:///", "mysql://", ":memory:", "http://x", odd])
        return lambda: read_study(storage), storage, True

    return attempt


def measurement(rng: random.Random, folder: Path) -> tuple[Callable[[], Any], str, bool | str]:
    costs = folder / "costs"
    costs.mkdir()
    document = {"described": {"what": "test"}, "result": {"1": 0.5}}
    content = as_bytes(rng, mutated(rng, document))

    def use(result: Any) -> Any:
        return {int(key): float(value) for key, value in result.items()}

    def work() -> None:
        module, described = torch.nn.Linear(1, 1), {"what": rng.random()}
        before = os.environ["SSD_GENERATION_CACHE"]
        os.environ["SSD_GENERATION_CACHE"] = str(folder)
        try:
            written: list[Path] = []
            write, keeping._write = keeping._write, lambda key, content: written.append(keeping._file(key))
            try:
                keeping.cached_measurement(torch.nn.Linear(1, 1), described, lambda: {"1": 1.0})
            finally:
                keeping._write = write
            assert written[0].parent == costs
            put(rng, written[0], content)
            result = keeping.cached_measurement(module, described, lambda: {"1": 1.0}, use=use)
            use(result)  # the stored result, or one that was measured anew
        finally:
            os.environ["SSD_GENERATION_CACHE"] = before

    return work, repr(content[:300]), False


def commands_of(sound: Path, capfd: pytest.CaptureFixture[str]) -> Attempt:
    tiny = str(sound / "model")

    def attempt(rng: random.Random, folder: Path) -> tuple[Callable[[], Any], str, bool | str]:
        config = put(rng, folder / "config.json", as_bytes(rng, mutated(rng, CONFIG)))
        shutil.copytree(sound / rng.choice(["evaluation", "benchmark"]), folder / "run")
        _spoil(rng, folder / "run")
        lines = put(rng, folder / "prompts.jsonl", as_bytes(rng, mutated(rng, LINES["prompts.jsonl"][0])))
        (folder / "notes").mkdir()
        (folder / "notes" / "summary.md").write_text("mine")
        (folder / "notes" / "plot.png").write_text("mine")
        odd = "".join(str(odd_value(rng))[:2_000].split("\0"))
        number = str(rng.choice([-1, 0, 10**400, "nan", "inf", "1e400", "x", "0.5", "", "٣"]))
        few = ["--category", "writing", "--methods", "plain", "--new-tokens", "2", "--no-memory"]
        arguments = rng.choice(
            [
                ["inspect", tiny, "--config", str(config)],
                ["inspect", odd],
                ["presets", "--config", odd],
                ["report", str(folder / "run")],
                ["report", odd, str(folder / "run")],
                ["report", str(folder / "run"), "-o", str(folder / "notes")],
                ["generate", "x", "-m", tiny, "--config", str(config), "--max-new-tokens", "2"],
                ["generate", "x", "-m", tiny, "--draft-memory", number, "--max-new-tokens", "2"],
                ["generate", "x", "-m", tiny, "--max-new-tokens", number],
                ["generate", "x", "-m", tiny, "--skip-attention", odd, "--max-new-tokens", "2"],
                ["generate", "x", "-m", tiny, "--temperature", number, "--max-new-tokens", "2"],
                [
                    "generate",
                    odd or "x",
                    "-m",
                    tiny,
                    "--policy",
                    "none",
                    "--precision",
                    "int8",
                    "--max-new-tokens",
                    "2",
                ],
                ["benchmark", "-m", tiny, "--prompts", str(lines), "--category", odd, "-o", str(folder / "new")],
                ["benchmark", "-m", tiny, "--methods", odd, "-o", str(folder / "new")],
                ["benchmark", "-m", tiny, *few, "--limit-per-category", number, "-o", str(folder / "new")],
                ["evaluate", "summarisation", "-m", tiny, "--limit", "1", "-o", str(folder / "notes")],
                [
                    "evaluate",
                    "summarisation",
                    "-m",
                    tiny,
                    "--data",
                    str(lines),
                    "--limit",
                    number,
                    "-o",
                    str(folder / "n2"),
                ],
                ["evaluate", odd, "-m", tiny],
                ["search", tiny, "--from", rng.choice([str(config), str(lines), odd, str(folder / "notes")])],
                ["search", tiny, "--storage", f"journal:{config}", "--trials", "1", "-o", str(folder / "new")],
                ["search", tiny, "--trials", number, "-o", str(folder / "new")],
                ["profile", tiny, "--contexts", odd],
                ["profile", "--from", str(config)],
                [odd],
            ]
        )
        # Only characters that a shell can pass.
        arguments = [re.sub("[\0\ud800-\udfff]", "", argument) for argument in arguments]

        def work() -> None:
            capfd.readouterr()
            with pytest.raises(SystemExit) as left:
                main(arguments)
            captured = capfd.readouterr()
            assert left.value.code in (0, 2), (left.value.code, captured.err[-500:])
            # The text that `generate` prints is not escaped, for files and pipes.
            for stream in captured if arguments[0] != "generate" else [captured.err]:
                acting = re.findall("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", stream)
                assert not acting, (acting, stream[:300])
            if left.value.code == 2:
                assert len(captured.err.splitlines()) == 1, captured.err[-500:]
                assert captured.err.startswith("error: ")
                raise ValueError(captured.err)

        return work, repr(arguments), False

    return attempt


# --- the runs


def the_attempt(kind: str, request: pytest.FixtureRequest) -> Attempt:
    if kind == "arguments":
        return arguments_of(request.getfixturevalue("model"))
    if kind == "results":
        return results_of(request.getfixturevalue("sound"))
    if kind == "storages":
        return storages_of(request.getfixturevalue("sound"))
    if kind == "commands":
        return commands_of(request.getfixturevalue("sound"), request.getfixturevalue("capfd"))
    return {"configs": config_file, "dicts": config_dict, "data": data_file, "measurements": measurement}[kind]


@pytest.fixture(autouse=True)
def quiet_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("SSD_DEBUG", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    limit = sys.get_int_max_str_digits()
    yield
    sys.set_int_max_str_digits(limit)


@pytest.mark.parametrize("kind", COUNTS)
def test_malformed(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    counts = run(kind, COUNTS[kind], the_attempt(kind, request), tmp_path)
    assert counts.total() == COUNTS[kind]
    if kind != "measurements":  # those are never an error
        assert len(counts) > 1, "inputs should be of more than one kind"
    else:
        assert set(counts) == {"success"}


@pytest.mark.nightly
@pytest.mark.parametrize("kind", COUNTS)
def test_many_malformed(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    count = COUNTS[kind] * TIMES_NIGHTLY
    assert run(kind, count, the_attempt(kind, request), tmp_path).total() == count


def test_measurements_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SSD_GENERATION_CACHE", "HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def homeless(*_: Any) -> Any:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr(Path, "expanduser", homeless)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(ValueError, match="SSD_GENERATION_CACHE"):
        files.default_cache_dir()
    # The measurement is then available in this process only.
    assert keeping.cached_measurement(torch.nn.Linear(1, 1), {"what": "homeless"}, lambda: 3) == 3
