"""Weights that change between calls, in the middle of one, and during one by another thread.

Each change is made in a process of its own. None crashes, and the text is that of plain decoding, or the call reports
that weights were changed. A failure names the seed that reproduces it (`weights_worker.change`).

This library cannot prevent one case: torch frees the memory of a weight that another thread replaces, even in the
middle of an operator that reads it, so plain `generate` crashes with such threads, too. A process may crash in an
operator of torch, but not in the kernels of this library.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forked import Died, forked
from ssd_generation import native
from weights_worker import REFUSED, change, drawn

SEEDS = 20
NO_COPIES = "Low-bit copies cannot be made"
NIGHTLY = 200


def assert_right(found: dict[str, Any]) -> None:
    if "texts" in found:
        assert found["texts"] == "alive", found
        return
    for plain, ours in zip(found["plain"], found["ours"], strict=True):
        if isinstance(plain, str):  # the model can no longer run
            assert isinstance(ours, str), found
        elif isinstance(ours, str):
            is_refused = REFUSED in ours and found["when"] != "between"
            assert is_refused or (NO_COPIES in ours and found["change"] == "to float64"), found
        else:
            assert ours == plain, found


KERNELS = str(Path(native.__file__).parent)


def tried(seed: int) -> None:
    with forked(change, seed) as process:
        try:
            found = process.ends_well()
        except Died as died:
            if drawn(seed)["when"] != "thread" or not died.calls or died.calls[0].startswith(KERNELS):
                raise
        else:
            assert_right(found)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_change_of_weights(seed: int) -> None:
    tried(seed)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(SEEDS, NIGHTLY))
def test_more_changes_of_weights(seed: int) -> None:
    tried(seed)
