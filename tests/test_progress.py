"""The progress bar of one-time work."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
import transformers.utils.logging as hf_logging
from tqdm import std  # type: ignore[import-untyped]

from ssd_generation.support.progress import progress_bar, with_bars, without_bars


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, stream: Any, verbosity: int = hf_logging.INFO, **options: Any) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(hf_logging, "get_verbosity", lambda: verbosity)
    monkeypatch.setattr(hf_logging, "_tqdm_active", True)
    monkeypatch.setattr(hf_logging.tqdm_lib, "tqdm", std.tqdm)
    with progress_bar(2, "Measuring", **options) as bar:
        bar.reset()
        bar.update()
    return str(stream.getvalue())


def test_a_bar_shows_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert "Measuring: " in shown(monkeypatch, Terminal())
    assert shown(monkeypatch, Terminal(), shows=False) == ""


def test_no_bar_gets_into_a_log_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert shown(monkeypatch, io.StringIO()) == ""


def test_a_bar_shows_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", object())  # type: ignore[arg-type]
    assert "Measuring: " in shown(monkeypatch, io.StringIO())


def test_a_bar_shows_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert shown(monkeypatch, Terminal(), hf_logging.WARNING) == ""
    with with_bars():
        assert "Measuring: " in shown(monkeypatch, Terminal(), hf_logging.ERROR)
        with without_bars():
            assert shown(monkeypatch, Terminal()) == ""
        assert "Measuring: " in shown(monkeypatch, Terminal(), hf_logging.ERROR)
    with without_bars():
        assert shown(monkeypatch, Terminal()) == ""
