"""TRL's trainers, with their default way of generating: same texts, and drafted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from other_programs import Recorded, plain_and_drafting
from ssd_generation.forward.copies.layer_copy import LowBitCopy
from ssd_generation.forward.copies.low_bit import LowBitCopies

pytestmark = pytest.mark.integrations

PROMPTS = ["Why is the sky blue?", "Name a colour.", "Tell me a story.", "What is two and two?"]
SETTINGS: dict[str, Any] = {
    "max_steps": 3,
    "use_cpu": True,
    "bf16": False,
    "learning_rate": 1e-4,
    "lr_scheduler_type": "constant",
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "logging_strategy": "no",
    "seed": 3,
}


def reward(completions: Any, **_: Any) -> list[float]:
    return [float(len(set(text))) for text in completions]


def by_grpo(model: Any, tokenizer: Any, folder: Path, **more: Any) -> Any:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    settings = {**SETTINGS, "num_generations": 4, "max_completion_length": 16, **more}
    return trl.GRPOTrainer(
        model,
        reward,
        args=trl.GRPOConfig(str(folder), per_device_train_batch_size=4, **settings),
        train_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tokenizer,
    )


def by_online_dpo(model: Any, tokenizer: Any, folder: Path, **more: Any) -> Any:
    online_dpo, datasets = pytest.importorskip("trl.experimental.online_dpo"), pytest.importorskip("datasets")
    settings = {**SETTINGS, "max_new_tokens": 16, **more}
    return online_dpo.OnlineDPOTrainer(
        model,
        reward_funcs=reward,
        args=online_dpo.OnlineDPOConfig(str(folder), per_device_train_batch_size=2, **settings),
        train_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tokenizer,
    )


def trained(build: Any, folder: Path, **more: Any) -> tuple[Recorded, Recorded]:
    """Return the calls of a plain and of a drafting model, after checking that both end with the same weights."""
    plain, drafting, tokenizer = plain_and_drafting()
    before = plain.model.layers[0].mlp.down_proj.weight.detach().clone()
    found = []
    for model in (plain, drafting):
        torch.manual_seed(0)
        calls = Recorded(model)
        build(model, tokenizer, folder, **more).train()
        found.append(calls)
    ours, theirs = dict(drafting.named_parameters()), dict(plain.named_parameters())
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert not torch.equal(before, plain.model.layers[0].mlp.down_proj.weight)
    return found[0], found[1]


@pytest.mark.parametrize(("build", "more"), [(by_grpo, {}), (by_online_dpo, {"gradient_checkpointing": False})])
def test_the_same_completions_and_the_same_weights(build: Any, more: dict[str, Any], tmp_path: Path) -> None:
    plain, drafted = trained(build, tmp_path, **more)
    assert len(plain.texts) == 3
    assert plain.texts == drafted.texts
    assert drafted.all_drafted and sum(drafted.accepted) > 0.5 * sum(drafted.drafted)


def test_online_dpo_generates_without_a_cache_with_gradient_checkpointing(tmp_path: Path) -> None:
    """Check TRL's own default, whether or not memory is short."""
    plain, drafted = trained(by_online_dpo, tmp_path, max_steps=1)
    assert plain.texts == drafted.texts
    assert all("use_cache=False" in str(refusal) for refusal in drafted.refusals)


def test_copies_are_made_once_and_follow_an_update_at_most_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, rewritten = [], []
    init, rewrite = LowBitCopies.__init__, LowBitCopy.rewrite

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        made.append(1)
        init(self, *args, **kwargs)

    def counted_too(self: Any, *args: Any) -> None:
        rewritten.append(self)
        rewrite(self, *args)

    monkeypatch.setattr(LowBitCopies, "__init__", counted)
    monkeypatch.setattr(LowBitCopy, "rewrite", counted_too)
    # Updates too small to change int8 copies.
    trained(by_grpo, tmp_path, learning_rate=1e-6)
    assert (len(made), len(rewritten)) == (1, 0)
    # Updates that change them: four, three of which are followed by a generation.
    made.clear()
    plain, drafted = trained(by_grpo, tmp_path, learning_rate=1e-3, max_steps=4)
    assert plain.texts == drafted.texts
    assert len(made) == 1
    assert max(map(rewritten.count, rewritten)) <= 3


def test_autocast_is_decoded_plainly(tmp_path: Path) -> None:
    """Check GRPO's own default on a GPU: under autocast, passes over several tokens round differently."""
    plain, drafted = trained(by_grpo, tmp_path, bf16=True)
    assert plain.texts == drafted.texts
