"""Have prompts read by kernels, or by torch, whatever is faster on the machine of the test."""

from __future__ import annotations

import pytest

from ssd_generation.tuning import prompt_kernels


def read_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have captured passes read prompts of any length, where they can."""
    monkeypatch.setattr(prompt_kernels, "_PAYS", float("inf"))
    monkeypatch.setattr(prompt_kernels, "_MAY_PAY", float("inf"))
    monkeypatch.setattr(prompt_kernels, "_measure_longest", lambda model, invariance: prompt_kernels._ANY)


def read_by_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the model's own code read prompts, as where torch's kernels are far ahead."""
    for most in ("_PAYS", "_MAY_PAY", "_PAYS_REUSED"):
        monkeypatch.setattr(prompt_kernels, most, 0.0)
