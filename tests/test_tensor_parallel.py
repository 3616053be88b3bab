"""A model that two processes compute together: they must draft alike, or both would wait forever."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tensor_parallel_worker import WAYS
from tiny_models import tiny_model

TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    place = tmp_path_factory.mktemp("spread")
    tiny_model().save_pretrained(place / "model")
    program = [str(TESTS / "tensor_parallel_worker.py"), str(place / "model"), str(place)]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *program],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": str(TESTS), "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((place / f"said-{rank}").read_text()) for rank in ("0", "1")]


def test_processes_draft_alike(said: list[dict[str, Any]]) -> None:
    assert said[0]["tp_size"] == 2
    # Equal to the last digit: one process measures, the other receives the result.
    assert said[0] == said[1]


@pytest.mark.parametrize("name", [name for name in WAYS if name not in ("plain", "int8")])
def test_the_text_is_that_of_plain_decoding(name: str, said: list[dict[str, Any]]) -> None:
    tokens, drafted = said[0][name]
    assert tokens == said[0]["plain"][0]
    assert drafted > 0 or name in ("cost", "auto")  # these draft only where it pays


def test_weights_that_are_spread_have_no_low_bit_copies(said: list[dict[str, Any]]) -> None:
    assert "sharded over processes" in said[0]["int8"]
