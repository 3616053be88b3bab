"""Planning of passes: one plan for each call (tuning/plan_passes.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ssd_generation import SelfSpeculativeConfig, SkipConfig, enable_self_speculative
from ssd_generation.forward.captured.batch_invariance import WIDTHS, BatchInvariance
from ssd_generation.forward.pass_plan import EAGER, PassPlan
from ssd_generation.tuning import plan_passes as plan
from ssd_generation.tuning.plan_passes import plan_passes
from tiny_models import prompt, tiny_model

INVARIANT = BatchInvariance("linear", WIDTHS)


@pytest.fixture(autouse=True)
def certified(monkeypatch: pytest.MonkeyPatch) -> None:
    def batch_invariance_of(model: Any, exactness: str | None) -> tuple[BatchInvariance | None, str | None]:
        return (None, 'exactness="numeric" was requested') if exactness == "numeric" else (INVARIANT, None)

    monkeypatch.setattr(plan, "batch_invariance_of", batch_invariance_of)


def test_a_single_text_is_captured_and_batch_invariant() -> None:
    assert plan_passes(tiny_model()) == PassPlan(batch_invariance=INVARIANT)
    assert plan_passes(tiny_model()).reason is None


@pytest.mark.parametrize(
    ("options", "reason"), [({"rows": 2}, "the rows of a batch"), ({"returns_states": True}, "attentions and hidden")]
)
def test_what_a_captured_pass_does_not_give(options: dict[str, Any], reason: str) -> None:
    found = plan_passes(tiny_model(), **options)
    assert found == EAGER and found.reason is not None and found.reason.startswith(reason)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numeric_in_half_precision_runs_the_models_own_kernels(dtype: torch.dtype) -> None:
    model = tiny_model().to(dtype)
    for rows in (1, 2):
        assert plan_passes(model, rows, "numeric").own_kernels == (dtype != torch.float32)
        assert not plan_passes(model, rows).own_kernels
    assert plan_passes(model, exactness="numeric").batch_invariance is None


def test_a_check_records_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "batch_invariance_to_check", lambda model, exactness: INVARIANT)
    assert plan_passes(tiny_model(), is_check=True) == PassPlan(graph=False, batch_invariance=INVARIANT)
    assert plan_passes(tiny_model(), rows=2, is_check=True) == EAGER


def test_bits_that_cannot_be_had_are_said_once_where_they_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "batch_invariance_of", lambda model, exactness: (None, "this test says so"))
    model = enable_self_speculative(tiny_model())
    config = SelfSpeculativeConfig(SkipConfig(attention=[1]), exactness="bitwise")
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "self_speculative": config}
    with pytest.warns(UserWarning, match="cannot decode bitwise here: this test says so") as found:
        model.generate(prompt(5), **options)
    assert [warning.filename for warning in found] == [__file__], "it points at the line that called generate"
    model.generate(prompt(5), **options)
    assert model.last_speculation.exactness_reason == "this test says so"
