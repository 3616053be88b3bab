"""Weights that change between calls, in the middle of one, and under it by another thread.

Each change is made in a process of its own: none dies, and the text is plain decoding's, or the call says that it was
changed. A failure names the seed that makes it again (`weights_worker.change`).

What this library cannot prevent: torch frees the memory of a weight that another thread replaces, even in the middle of
an operator that reads it, so plain `generate` dies of such threads, too. A process may die in an operator of torch; in
the kernels of this library it may not.
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
        if isinstance(plain, str):  # of a model that nobody can run any more
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
