"""Helpers for the tests of other runtimes: modules that replace a runtime, child processes, and benchmark runs."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd_generation.benchmark.run_benchmark import BenchmarkSettings, benchmark_arguments, run_benchmark
from ssd_generation.harness.peer_methods import PeerModel
from ssd_generation.harness.peers import peer as module
from ssd_generation.harness.results import RunFolder
from ssd_generation.harness.run import Child
from ssd_generation.harness.texts import Prompt
from test_cli import tiny_tokenizer
from tiny_models import tiny_model

TOKENIZER = tiny_tokenizer()
PROMPTS = [Prompt("x-1", "x", "the rain"), Prompt("y-1", "y", "a river runs"), Prompt("x-2", "x", "the fields")]
IDS = torch.tensor([[4, 5, 6]])
TOKENS = [3, 4, 5, 6]
"""Continuation of `IDS` by a module that replaces a runtime."""


def put_in_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch, modules: Mapping[str, str], package: str, version: str
) -> None:
    """Make modules importable here and in child processes, as parts of a package of the given version."""
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(source))
    about = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_GENERATION_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True)
def children(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Child]]:
    """Yield the child processes of a test; check that none of them outlives it."""
    started: list[Child] = []

    class Noted(Child):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            started.append(self)

    monkeypatch.setattr(module, "Child", Noted)
    yield started
    assert all(child._process.poll() is not None for child in started)


def gguf_file(folder: Path, name: str = "tiny.gguf", **told: Any) -> str:
    file = folder / name
    file.write_bytes(b"GGUF" + json.dumps(told).encode())
    return str(file)


def run(path: Path, peers: Mapping[str, PeerModel], **more: Any) -> dict[str, Any]:
    settings = BenchmarkSettings(
        **{"methods": ("plain", "plain-loop", *peers), "new_tokens": 4, "warm_up": 1, "memory": False, **more}
    )
    model = tiny_model(vocab_size=len(TOKENIZER))
    with RunFolder(path, benchmark_arguments(settings, PROMPTS, None)) as folder:
        return run_benchmark(model, TOKENIZER, PROMPTS, folder, settings, peers=peers)


def rows_of(path: Path, method: str) -> list[dict[str, Any]]:
    rows = map(json.loads, (path / "rows.jsonl").read_text().splitlines())
    return [row for row in rows if row["kind"] == "call" and row["method"] == method]
