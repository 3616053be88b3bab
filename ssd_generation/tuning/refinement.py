"""Online refinement: a draft that improves while it is used, from the tokens that were just verified.

Now and then, when 2 % of the time have paid for it, another draft is judged on the last tokens in one pass over the
present cache (`acceptance.py`): how often would it have predicted the target's token? Two drafts race: the one in use
and a challenger that skips more sub-layers, fewer, or others. They are judged on the target's own text, so
nothing about the output can change, only the speed.

The challengers come from a (1 + 1) evolution strategy: for each kind of change the number of sub-layers doubles after a
success and halves after a failure. The layers chosen are those that turn the hidden states least (the criterion of
SWIFT, arXiv 2410.06916, and CLaSp, ACL 2025), with some noise.
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
"""Share of the generation time, by the measured costs, spent on judging drafts."""

WINDOW = 32
"""Number of tokens that a draft is judged on at once."""

_LEAST_WINDOW = 16

_DISCOUNT = 0.97
"""Discount: earlier counts are multiplied by this with each further window, because texts change."""

_TO_WIN, _TO_LOSE = 2.0, 1.5
"""Standard errors by which a challenger must lead to replace the draft in use, or trail it to be dropped. A wrong
winner costs some speed until the next comparison; a wrong loser may be tried again."""

_MOST_WINDOWS = 10

_SAME_AGAIN = 4
_SAME_AFTER = 400
"""Changes of the draft in use, or passes, after which a dropped draft may be tried again: texts change."""

# Plain steps: cost of trying out whether drafts can be judged, and of measuring a winner's costs.
_TRYING_OUT = 8.0
_MEASURING = 24.0

_MOST_SAVED = 4
"""Maximum number of judging passes that can be saved up for: texts that cannot be judged (batches) earn as well."""

_ABOVE_VERIFYING = 1.5
"""Cost of a judging pass / a verification pass of that length: it runs the model's own forward with its own mask, while
a verification pass is captured."""


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
        """Predict the speed-up over plain decoding; a draft below 1 would not be used, but still guides the search."""
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
    """Online refinement of a model's draft, from text that the model has verified.

    It uses no clock and no randomness beyond a fixed seed: the same texts and costs lead to the same drafts. (Where the
    costs were measured on this machine, a winner's are measured too.)

    Args:
        model: the target model.
        config: the first config to draft with.
        costs: costs of `config`.

    Attributes:
        reason: why this model's drafts cannot be judged; `None` where they can, or none has been yet.
        passes: number of passes made to judge drafts.
        seconds: time that these took, by the clock; no decision depends on it.
        changes: number of times that the draft in use has changed.
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
            # Measured before, for example by a search.
            self._in_use.add(_LEAST_WINDOW, config.drafting.acceptance[0] * _LEAST_WINDOW)
        self._challenger: _Runner | None = None
        self._distances: list[float] | None = None
        self._lost: dict[tuple[SkipConfig, PrecisionConfig | None], tuple[int, int]] = {}
        self._proposals = 0
        self._judging = False  # set while another thread judges
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
        """The config to draft with now, with this draft's costs and its measured acceptance rate."""
        return self._in_use.config

    def to_dict(self) -> dict[str, Any]:
        """Return counts, times and the current config as plain JSON types."""
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
            draft_steps: number of draft steps in the round.
            verified: number of tokens in its verification pass.
        """
        costs = self._in_use.costs
        self._balance += SHARE * (draft_steps * costs.draft_step + costs.verify_seconds(verified))
        self._balance = min(self._balance, _MOST_SAVED * self._price(WINDOW))

    def is_due(self, tokens: int) -> bool:
        """Tell whether a draft can be judged now.

        Args:
            tokens: number of tokens verified since the last time.
        """
        if self.reason is not None or tokens < _LEAST_WINDOW:
            return False
        return self._balance >= self._price(min(tokens, WINDOW))

    def learn(self, model: PreTrainedModel, text: VerifiedText) -> bool:
        """Judge a draft on a text.

        Args:
            model: the target model.
            text: the last tokens, with the cache after them.

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
        """Propose a draft that was not dropped recently, of the kind of change that could gain most."""
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
        """Return the most that a kind of change can gain, discounted by how often it failed."""
        config = self._changed(kind, random.Random(0))
        if config is None:
            return -math.inf
        used, change = self._in_use, self._kinds[kind]
        # Each skipped sub-layer is assumed to cause an equal share of the rejections.
        mended = {"more": 0.0, "fewer": 1.0, "others": 0.5}[kind] * change.count / max(len(used.config.skip), 1)
        wrong = (1.0 - used.acceptance) * (1.0 - min(mended, 1.0))
        best = speedup_within_chance([1e9], [1e9 * (1.0 - wrong)], self._costs(config), 0.0)[0]
        return (best - used.speedup()) / (1 + change.failed)

    def _changed(self, kind: str, generator: random.Random) -> SelfSpeculativeConfig | None:
        """Return the draft in use with a few sub-layers more or fewer skipped; `None` where there are none."""
        skip = self.config.skip
        skipped = {("attention", i) for i in skip.attention} | {("mlp", i) for i in skip.mlp}
        # Sub-layers that turn the hidden states little for their cost: first to be skipped, last to be restored.
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
    """Return the first config's precision for another skip set: what that config skipped has no low-bit copies."""
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
    """Return, by layer, one minus the cosine between the hidden states before and after it, averaged over the text."""
    distances = []

    def after_layer(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        before = args[0] if args else kwargs["hidden_states"]
        after = output[0] if isinstance(output, tuple) else output
        near = torch.cosine_similarity(before.float(), after.float(), dim=-1).mean()
        distances.append(max(1.0 - float(near), 1e-6))

    # Not `output_hidden_states`: for that transformers leaves hooks on the model.
    layers = [layer.module for layer in layout_of(model).layers]
    handles = [layer.register_forward_hook(after_layer, with_kwargs=True) for layer in layers]
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
    """Predictor of a draft step's cost when sub-layers are skipped or restored, from the measured costs of one draft.

    The time of a plain step is assumed to be proportional to weights, except for attention, whose share is measured
    once per model and machine. Low-bit sub-layers cost the fraction of it that explains the known draft step.

    Args:
        model: the target model.
        config: a draft whose costs are known.
        costs: its costs.
        measure: whether attention's share may be measured.
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
            if 0.0 < before < 1.0:  # weights that are no parameters, as in some quantisers' layers, cannot be counted
                for sub in self._shares:
                    self._shares[sub] *= part / before if sub[0] == "attention" else (1.0 - part) / (1.0 - before)
                self._rest *= (1.0 - part) / (1.0 - before)
        self._ratio = 1.0
        full, low = self._parts(config)
        if low:
            self._ratio = min(max((costs.draft_step / costs.plain_step - full) / low, 0.05), 1.0)

    def share(self, kind: str, layer: int) -> float:
        """Return the share of a plain step that a sub-layer takes."""
        return self._shares[kind, layer]

    def costs(self, config: SelfSpeculativeConfig, other: SelfSpeculativeConfig, known: Costs) -> Costs:
        """Predict the costs of a draft from those known of another one."""
        saved = self._predicted(other) - self._predicted(config)
        ratio = known.draft_step / known.plain_step - saved
        return dataclasses.replace(known, draft_step=max(ratio, 0.02) * known.plain_step)

    def _predicted(self, config: SelfSpeculativeConfig) -> float:
        full, low = self._parts(config)
        return full + self._ratio * low

    def _parts(self, config: SelfSpeculativeConfig) -> tuple[float, float]:
        """Return the shares of a plain step in sub-layers that run as loaded and in low-bit ones, before scaling."""
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
