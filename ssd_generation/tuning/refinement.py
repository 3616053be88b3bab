"""Online refinement: a draft that gets better while it is used, from the tokens that were just verified.

Now and then, when 2 % of the time have paid for it, another draft is judged on the last tokens in one pass over the
cache as it stands (`acceptance.py`): how often it would have predicted the target's token. Two drafts race: the one in
use and a challenger that leaves out some sub-layers more, some fewer, or others. The text they are judged on is the
target's, so nothing about the output can change; only how soon it is there.

The challengers come from a (1 + 1) evolution strategy: of each kind of change the number of sub-layers doubles after a
success and halves after a failure. Which ones: those whose layers turn the hidden states least (SWIFT, arXiv
2410.06916, and CLaSp, ACL 2025, go by the same), with some noise.
"""

from __future__ import annotations

import dataclasses
import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..config import Costs, PrecisionConfig, SelfSpeculativeConfig, SkipConfig
from ..decoding.verified_text import VerifiedText
from ..forward.structure.sublayers import layout_of
from .acceptance import judge_rounds, round_inputs, why_not_judged
from .costs import costs_of
from .measuring import describe_machine
from .speedup import speedup_within_chance

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["SHARE", "Refinement"]

SHARE = 0.02
"""Share of the generation time, by the measured costs, that is spent on judging drafts."""

WINDOW = 32
"""Tokens that a draft is judged on at once."""

_LEAST_WINDOW = 16

_DISCOUNT = 0.97
"""Discount: earlier counts are multiplied by this with each further window, because texts change."""

_TO_WIN, _TO_LOSE = 2.0, 1.5
"""Standard errors by which one draft must be ahead to replace the other, or behind to be dropped. A wrong winner costs
some speed until the next comparison; a wrong loser may be tried again."""

_MOST_WINDOWS = 10

_SAME_AGAIN = 4
_SAME_AFTER = 400
"""A dropped draft may be tried again after so many changes of the draft in use, or so many passes: texts change."""

# Plain steps: of trying out whether drafts can be judged, and of measuring a winner's costs.
_TRYING_OUT = 8.0
_MEASURING = 24.0

_MOST_SAVED = 4
"""The most judging passes that can be saved up for: texts that cannot be judged (batches) earn as well."""

_ABOVE_VERIFYING = 1.5
"""Cost of a judging pass / a verify pass of that length: it runs the model's own forward with its own mask, while a
verify pass is captured."""


@dataclass
class _Runner:
    """A draft that is compared with another."""

    config: SelfSpeculativeConfig
    costs: Costs
    seen: float = 0.0
    right: float = 0.0
    windows: int = 0
    change: str = ""

    def add(self, seen: float, right: float) -> None:
        self.seen = _DISCOUNT * self.seen + seen
        self.right = _DISCOUNT * self.right + right
        self.windows += 1

    def speedup(self, errors: float = 0.0) -> float:
        """Predicted speed-up over plain decoding; below 1 it would not be used, but still guides the search."""
        return speedup_within_chance([self.seen], [self.right], self.costs, errors)[0]

    @property
    def acceptance(self) -> float:
        return (self.right + 1.0) / (self.seen + 2.0)


@dataclass
class _Change:
    """A kind of change: how many sub-layers it changes, and how often it failed since it last succeeded."""

    first: int
    count: int = field(init=False)
    failed: int = 0

    def __post_init__(self) -> None:
        self.count = self.first

    def succeeded(self) -> None:
        self.count, self.failed = 2 * self.count, 0

    def lost(self) -> None:
        self.failed += 1
        self.count = self.count // 2 or self.first


class Refinement:
    """Keeps improving what a model drafts with, from text that it has verified.

    No clock and no randomness beyond a fixed seed: the same texts and costs lead to the same drafts. (Where the costs
    were measured on this machine, a winner's are measured too.)

    Args:
        model: the target model.
        config: what is drafted with at first.
        costs: of `config`.

    Attributes:
        reason: why this model's drafts cannot be judged; `None` where they can, or none has been yet.
        passes: passes made to judge drafts.
        seconds: that it took, by the clock; nothing hangs on it.
        changes: how often the draft in use has changed.
    """

    def __init__(self, model: PreTrainedModel, config: SelfSpeculativeConfig, costs: Costs) -> None:
        self.base = config
        self.reason: str | None = None
        self.passes = self.changes = 0
        self.seconds = 0.0
        self._measures = costs.measured_on == describe_machine(model)
        self._steps: _Steps | None = None
        self._in_use = _Runner(config, costs)
        if config.drafting.acceptance:
            # Measured before, as by a search.
            self._in_use.add(_LEAST_WINDOW, config.drafting.acceptance[0] * _LEAST_WINDOW)
        self._challenger: _Runner | None = None
        self._distances: list[float] | None = None
        self._lost: dict[tuple[SkipConfig, PrecisionConfig | None], tuple[int, int]] = {}
        self._proposals = 0
        self._judging = False  # by another thread
        self._balance = -_TRYING_OUT * costs.plain_step
        layout = layout_of(model)
        if layout.refusal is not None:
            self.reason = "nothing can be skipped in this model"
        self._subs = [
            (kind, layer.index)
            for layer in layout.layers
            for kind, sub in (("attention", layer.attention), ("mlp", layer.mlp))
            if sub is not None and not (kind == "attention" and layer.index in layout.shares_kv)
        ]
        skipped = len(config.skip)
        self._kinds = {
            "more": _Change(max(1, (len(self._subs) - skipped) // 8)),
            "fewer": _Change(max(1, skipped // 2)),
            "others": _Change(max(1, skipped // 4)),
        }

    @property
    def config(self) -> SelfSpeculativeConfig:
        """What to draft with now, with this draft's costs and its measured acceptance rate."""
        return self._in_use.config

    def to_dict(self) -> dict[str, Any]:
        """Counts, times and the current config, as plain JSON types."""
        return {
            "passes": self.passes,
            "seconds": self.seconds,
            "changes": self.changes,
            "reason": self.reason,
            "config": self.config.to_dict(),
        }

    def earn(self, draft_steps: int, verified: int) -> None:
        """Add a round to the time that judging may take a share of.

        Args:
            draft_steps: draft steps that it took.
            verified: tokens in its verify pass.
        """
        costs = self._in_use.costs
        self._balance += SHARE * (draft_steps * costs.draft_step + costs.verify_seconds(verified))
        self._balance = min(self._balance, _MOST_SAVED * self._price(WINDOW))

    def is_due(self, tokens: int) -> bool:
        """Whether a draft can be judged now.

        Args:
            tokens: verified since the last time.
        """
        if self.reason is not None or tokens < _LEAST_WINDOW:
            return False
        return self._balance >= self._price(min(tokens, WINDOW))

    def learn(self, model: PreTrainedModel, text: VerifiedText) -> bool:
        """Judge a draft on a text.

        Args:
            model: the target model.
            text: the last tokens, with the cache behind them.

        Returns:
            Whether another draft is to be used from now on.
        """
        if self._judging:
            return False
        started = time.perf_counter()
        self._judging = True
        try:
            return self._judge(model, text)
        finally:
            self._judging = False
            self.seconds += time.perf_counter() - started

    def _judge(self, model: PreTrainedModel, text: VerifiedText) -> bool:
        self._balance -= self._price(len(text))
        if self._distances is None:
            # Not before: it takes a few passes, and most calls end before a draft is judged.
            self.reason = why_not_judged(model)
            if self.reason is not None:
                return False
            self.passes += 1
            self._distances = _distances(model, text)
            self._steps = _Steps(model, self.config, self._in_use.costs, self._measures)
            if self._measures:
                self._balance -= _MEASURING * self._in_use.costs.plain_step
            return False
        if self._challenger is None:
            self._challenger = self._propose()
            if self._challenger is None:
                return False
        used, challenger = self._in_use, self._challenger
        runner = used if used.seen <= challenger.seen else challenger
        self.passes += 1
        judged = judge_rounds(model, runner.config, text, range(len(text)), 1)
        runner.add(sum(judged.tried), sum(judged.accepted))
        if not challenger.windows:
            return False
        is_better = challenger.speedup(-_TO_WIN) > used.speedup()
        if challenger.speedup(_TO_LOSE) <= used.speedup() or (challenger.windows >= _MOST_WINDOWS and not is_better):
            self._settle(won=False)
            return False
        if is_better and used.windows > 1:
            if self._measures:
                challenger.costs = costs_of(model, challenger.config, shows=False)
                self._balance -= _MEASURING * challenger.costs.plain_step
                if challenger.speedup() <= used.speedup():
                    self._settle(won=False)
                    return False
            self._settle(won=True)
            return True
        return False

    # ------------------------------------------------------------------------------------------------------------------

    def _price(self, tokens: int) -> float:
        return _ABOVE_VERIFYING * self._in_use.costs.verify_seconds(tokens)

    def _settle(self, won: bool) -> None:
        runner = self._challenger
        assert runner is not None
        self._challenger = None
        if not won:
            self._lost[runner.config.skip, runner.config.precision] = self.changes, self.passes
            self._kinds[runner.change].lost()
            return
        self._kinds[runner.change].succeeded()
        drafting = dataclasses.replace(runner.config.drafting, acceptance=(round(runner.acceptance, 4),))
        runner.config = dataclasses.replace(runner.config, drafting=drafting, costs=runner.costs)
        self._in_use = runner
        self.changes += 1

    def _propose(self) -> _Runner | None:
        """A draft that was not dropped recently, of the kind of change that could gain most."""
        for kind in sorted(self._kinds, key=self._hope, reverse=True):
            for _ in range(8):
                self._proposals += 1
                config = self._changed(kind, random.Random(self._proposals))
                if config is None:
                    break
                changes, passes = self._lost.get((config.skip, config.precision), (-_SAME_AGAIN, 0))
                if self.changes >= changes + _SAME_AGAIN or self.passes >= passes + _SAME_AFTER:
                    return _Runner(config, self._costs(config), change=kind)
            self._kinds[kind].lost()
        return None

    def _hope(self, kind: str) -> float:
        """The most that a kind of change can gain, discounted by how often it failed."""
        config = self._changed(kind, random.Random(0))
        if config is None:
            return -math.inf
        used, change = self._in_use, self._kinds[kind]
        # Of what goes wrong, each skipped sub-layer has its share.
        mended = {"more": 0.0, "fewer": 1.0, "others": 0.5}[kind] * change.count / max(len(used.config.skip), 1)
        wrong = (1.0 - used.acceptance) * (1.0 - min(mended, 1.0))
        best = speedup_within_chance([1e9], [1e9 * (1.0 - wrong)], self._costs(config), 0.0)[0]
        return (best - used.speedup()) / (1 + change.failed)

    def _changed(self, kind: str, generator: random.Random) -> SelfSpeculativeConfig | None:
        """The draft in use with some sub-layers more or fewer skipped; `None` where there are none."""
        skip = self.config.skip
        skipped = {("attention", i) for i in skip.attention} | {("mlp", i) for i in skip.mlp}
        # Turning the hidden states little for what it takes: first to go, last to come back.
        assert self._steps is not None
        rank = {
            sub: self._distance(sub) / max(self._steps.share(*sub), 1e-9) * math.exp(generator.gauss(0.0, 0.5))
            for sub in self._subs
        }
        kept = sorted((sub for sub in self._subs if sub not in skipped), key=rank.__getitem__)
        out = sorted((sub for sub in self._subs if sub in skipped), key=rank.__getitem__, reverse=True)
        count = self._kinds[kind].count
        if kind != "fewer":
            skipped |= set(kept[:count])
        if kind != "more":
            if not out:
                return None
            skipped -= set(out[:count])
        attention = [layer for sub, layer in skipped if sub == "attention"]
        seen = [layer for sub, layer in self._subs if sub == "attention"]
        if seen and len(attention) == len(seen):
            attention.remove(min(attention, key=lambda layer: -self._distance(("attention", layer))))
        changed = SkipConfig(attention=attention, mlp=[layer for sub, layer in skipped if sub == "mlp"])
        if changed == skip:
            return None
        return dataclasses.replace(
            self.config, skip=changed, precision=_precision_under(changed, self.base), costs=None
        )

    def _costs(self, config: SelfSpeculativeConfig) -> Costs:
        assert self._steps is not None
        return self._steps.costs(config, self._in_use.config, self._in_use.costs)

    def _distance(self, sub: tuple[str, int]) -> float:
        return 1.0 if self._distances is None else self._distances[sub[1]]


def _precision_under(skip: SkipConfig, base: SelfSpeculativeConfig) -> PrecisionConfig | None:
    """The precision of the first config with another skip set: of what it skipped there are no low-bit copies."""
    precision = base.precision
    if precision is None:
        return None
    exceptions: dict[str, dict[int, str | None]] = {}
    for kind in ("attention", "mlp"):
        skipped = getattr(skip, kind)
        known: Mapping[int, str | None] = getattr(precision, kind)
        uncopied = dict.fromkeys(getattr(base.skip, kind), None)
        exceptions[kind] = {layer: p for layer, p in {**known, **uncopied}.items() if layer not in skipped}
    return dataclasses.replace(precision, attention=exceptions["attention"], mlp=exceptions["mlp"])


def _distances(model: PreTrainedModel, text: VerifiedText) -> list[float]:
    """By layer, one minus the cosine between the hidden states before and behind it, the mean over the text."""
    distances = []

    def behind(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        before = args[0] if args else kwargs["hidden_states"]
        after = output[0] if isinstance(output, tuple) else output
        near = torch.cosine_similarity(before.float(), after.float(), dim=-1).mean()
        distances.append(max(1.0 - float(near), 1e-6))

    # Not `output_hidden_states`: for that transformers leaves hooks on the model.
    layers = [layer.module for layer in layout_of(model).layers]
    handles = [layer.register_forward_hook(behind, with_kwargs=True) for layer in layers]
    index = torch.arange(len(text), device="cpu")
    nothing = torch.zeros_like(index)
    try:
        with torch.no_grad():
            model(**round_inputs(model, text, nothing, nothing, index), use_cache=True)
    finally:
        for handle in handles:
            handle.remove()
    return distances


class _Steps:
    """Predicts a draft step's cost when sub-layers are left out or put back, from the measured costs of one draft.

    A plain step is taken to be spent where the weights are, but for attention, whose part is measured once per model
    and machine. What is in low bits costs the share of it that makes the known draft step come out right.

    Args:
        model: the target model.
        config: a draft whose costs are known.
        costs: these.
        measure: whether attention's part may be measured.
    """

    def __init__(self, model: PreTrainedModel, config: SelfSpeculativeConfig, costs: Costs, measure: bool) -> None:
        layout = layout_of(model)
        weights: dict[tuple[str, int], float] = {}
        for layer in layout.layers:
            for kind, made_of in (("attention", layer.attention), ("mlp", layer.mlp)):
                if made_of is not None:
                    parameters = {id(p): p for module in made_of.modules for p in module.parameters()}
                    weights[kind, layer.index] = float(sum(p.numel() for p in parameters.values()))
        head = model.get_output_embeddings()
        rest = float(sum(p.numel() for p in head.parameters())) if head is not None else 0.0
        total = (sum(weights.values()) + rest) or 1.0
        self._shares = {sub: count / total for sub, count in weights.items()}
        self._rest = rest / total
        attention = [index for kind, index in weights if kind == "attention"]
        if measure and len(attention) > 1:
            without = costs_of(model, SelfSpeculativeConfig(SkipConfig(attention=attention[1:])), shows=False)
            part = 1.0 - without.draft_step / without.plain_step
            part = min(max(part * len(attention) / (len(attention) - 1), 0.01), 0.9)
            before = sum(self._shares["attention", index] for index in attention)
            if 0.0 < before < 1.0:  # weights that are no parameters, as some quantisers', cannot be counted
                for sub in self._shares:
                    self._shares[sub] *= part / before if sub[0] == "attention" else (1.0 - part) / (1.0 - before)
                self._rest *= (1.0 - part) / (1.0 - before)
        self._ratio = 1.0
        full, low = self._parts(config)
        if low:
            self._ratio = min(max((costs.draft_step / costs.plain_step - full) / low, 0.05), 1.0)

    def share(self, kind: str, layer: int) -> float:
        """Share of a plain step that a sub-layer takes."""
        return self._shares[kind, layer]

    def costs(self, config: SelfSpeculativeConfig, beside: SelfSpeculativeConfig, known: Costs) -> Costs:
        """Predicted costs of a draft, from the known costs of another one."""
        saved = self._predicted(beside) - self._predicted(config)
        ratio = known.draft_step / known.plain_step - saved
        return dataclasses.replace(known, draft_step=max(ratio, 0.02) * known.plain_step)

    def _predicted(self, config: SelfSpeculativeConfig) -> float:
        full, low = self._parts(config)
        return full + self._ratio * low

    def _parts(self, config: SelfSpeculativeConfig) -> tuple[float, float]:
        """Plain steps that the kept sub-layers take as loaded, and those of the ones in low bits."""
        precision = config.precision or PrecisionConfig()
        full = low = 0.0
        for (kind, layer), share in self._shares.items():
            if layer in getattr(config.skip, kind):
                continue
            if precision.of(kind, layer) is None:
                full += share
            else:
                low += share
        if precision.head is None:
            full += self._rest
        else:
            low += self._rest
        return full, low
