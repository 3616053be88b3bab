"""Cost model of draft steps on this machine: seconds of each kind of sub-layer, and of verifying n tokens.

A draft step is modelled as a sum: overhead, the LM head, and each sub-layer that is not skipped, in its precision. The
terms are derived from differences between whole steps (all MLPs skipped, all attention but one, both, all in low bits),
so that a sub-layer is measured inside a step, not in isolation. Only the LM head is also timed in isolation, to
separate it from the overhead.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..config import PRECISIONS, Costs, PrecisionConfig, SelfSpeculativeConfig, SkipConfig
from ..forward.captured.linear_kernels import linear_of_few_rows
from ..forward.copies.copied_layers import check_precision
from ..forward.copies.low_bit import LowBitCopies, copies_of, copy_bytes, drop_copies
from ..forward.structure.sublayers import locate_sublayers
from ..generation import require_drafts
from ..support.devices import wait_for
from ..support.display import visible
from ..support.files import write_whole
from ..support.messages import shown
from ..support.reading import PROFILE, read_json
from ..tuning.costs import LONGEST_VERIFIED, Passes
from ..tuning.measuring import describe_machine, time_interleaved
from ..tuning.plan_passes import plan_passes
from .space import KEEP

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["CONTEXTS", "CostProfile", "measure_profile"]

CONTEXTS = (64, 512, 2048)
"""Tokens in the cache at which attention is measured."""

_VERSION = 2
_SECONDS = 4.0
"""Minimum time for which passes are repeated, after the minimum number of repeats."""


def _shape(model_type: str, num_layers: int, hidden_size: int) -> str:
    return f"a {model_type} of {num_layers} layers and width {hidden_size}"


@dataclass(frozen=True)
class CostProfile:
    """Seconds of the parts of a draft step, by kind and precision, and of verification passes.

    Attributes:
        contexts: tokens in the cache at which attention was measured, ascending.
        plain_step: seconds of a step of the target model at each context.
        attention: seconds of one attention sub-layer at each context, by precision ("keep": as loaded). In low bits it
            is measured at the first context, and assumed to grow with the context as it does as loaded.
        mlp: seconds of one MLP sub-layer, by precision.
        head: seconds of the LM head, by precision.
        overhead: seconds of everything else, by the precision of most of the draft: embedding, norms outside the
            sub-layers, casts, code that runs once per step.
        verify: pairs (tokens in the pass, seconds), at the first context.
        spread: median / minimum of the times of a pass, the median over all passes: 1 on a quiet machine.
        checked: predicted over measured time of a draft step that mixes skipping and low bits, by precision ("skipped"
            for skipping alone).
        measured_on: device, threads, dtype, attention implementation, versions.
        model_type: type of the model.
        num_layers: number of its decoder layers.
        hidden_size: its width.
        shares: `{"attention": […], "mlp": […]}`: parameters of each layer's sub-layer relative to the mean of its kind.
    """

    contexts: tuple[int, ...]
    plain_step: tuple[float, ...]
    attention: Mapping[str, tuple[float, ...]]
    mlp: Mapping[str, float]
    head: Mapping[str, float]
    overhead: Mapping[str, float]
    verify: tuple[tuple[int, float], ...]
    spread: float
    checked: Mapping[str, float]
    measured_on: str
    model_type: str
    num_layers: int
    hidden_size: int
    shares: Mapping[str, tuple[float, ...]] = field(repr=False, default_factory=dict)

    @property
    def shape(self) -> str:
        """Model type, number of layers and width, as text."""
        return _shape(self.model_type, self.num_layers, self.hidden_size)

    def draft_step(self, config: SelfSpeculativeConfig, context: int | None = None) -> float:
        """Return the seconds of a draft step of a config.

        Args:
            config: the skipped sub-layers, and the precision of the rest.
            context: tokens in the KV cache; `None`: the smallest measured context.

        Raises:
            ValueError: a precision that was not measured.
        """
        precision = config.precision or PrecisionConfig()
        head = precision.head or KEEP
        seconds: float = self._of(self.head, head)
        precisions: Counter[str] = Counter({head: 1})
        for kind, skipped in (("attention", config.skip.attention), ("mlp", config.skip.mlp)):
            for layer, share in enumerate(self.shares[kind]):
                if layer in skipped or share <= 0:
                    continue
                name = precision.of(kind, layer) or KEEP
                precisions[name] += 1
                if kind == "mlp":
                    seconds += self._of(self.mlp, name) * share
                else:
                    seconds += self._at(self._of(self.attention, name), context) * share
        seconds += self._of(self.overhead, precisions.most_common(1)[0][0])
        return seconds

    def costs(self, config: SelfSpeculativeConfig, context: int | None = None) -> Costs:
        """Return the costs of a config, for `SelfSpeculativeConfig.costs`."""
        plain = self._at(self.plain_step, context)
        later = plain - self.plain_step[0]
        return Costs(
            plain_step=plain,
            draft_step=self.draft_step(config, context),
            verify=[(n, seconds + later) for n, seconds in self.verify],
            measured_on=self.measured_on,
        )

    @staticmethod
    def _of(values: Mapping[str, Any], precision: str) -> Any:
        if precision not in values:
            raise ValueError(
                f"This profile was measured without {precision} copies. Measure it again with that precision, or leave "
                "it out."
            )
        return values[precision]

    def _at(self, values: Sequence[float], context: int | None) -> float:
        """Interpolate linearly between the contexts, extrapolate beyond the last; never return less than the first."""
        if context is None or context <= self.contexts[0] or len(values) == 1:
            return values[0]
        above = next((i for i, c in enumerate(self.contexts) if c >= context), len(values) - 1)
        start, end = self.contexts[above - 1], self.contexts[above]
        slope = (values[above] - values[above - 1]) / (end - start)
        return max(values[0], values[above - 1] + slope * (context - start))

    def compared_with(self, model: PreTrainedModel) -> list[str]:
        """List the differences between the machine and model of this profile and those in use; empty if equal."""
        here = describe_machine(model)
        differences = []
        if here != self.measured_on:
            differences.append(f"it was measured on {visible(self.measured_on)}, and this is {here}")
        config = model.config.get_text_config(decoder=True)
        shape = _shape(config.model_type, config.num_hidden_layers, config.hidden_size)
        if shape != self.shape:
            differences.append(f"it is of {visible(self.shape)}, and this is {shape}")
        return differences

    # -- files ---------------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as JSON types."""
        return {"version": _VERSION, **json.loads(json.dumps(dataclasses.asdict(self)))}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CostProfile:
        """Create a profile from the output of `to_dict`.

        Raises:
            ValueError: the data is not a profile, or one of another version.
        """
        advice = "Measure one with `ssd profile MODEL --output FILE`."
        if not isinstance(data, Mapping) or data.get("version") != _VERSION:
            raise ValueError(f"This is not a cost profile of version {_VERSION}. {advice}")
        names = {f.name for f in dataclasses.fields(cls)}
        if missing := names - set(data):
            raise ValueError(f"The cost profile lacks {', '.join(sorted(missing))}. {advice}")
        try:
            profile = cls(
                **{
                    **{name: data[name] for name in names},
                    **{name: {p: float(v) for p, v in data[name].items()} for name in ("mlp", "head", "overhead")},
                    "attention": {p: tuple(map(float, v)) for p, v in data["attention"].items()},
                    "plain_step": tuple(map(float, data["plain_step"])),
                    "spread": float(data["spread"]),
                    "checked": {p: float(v) for p, v in data["checked"].items()},
                    "contexts": tuple(map(int, data["contexts"])),
                    "verify": tuple((int(n), float(s)) for n, s in data["verify"]),
                    "shares": {kind: tuple(map(float, values)) for kind, values in data["shares"].items()},
                }
            )
            profile._check()
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
            raise ValueError(f"The cost profile cannot be understood ({shown(str(error), 100)}). {advice}") from error
        return profile

    def _check(self) -> None:
        """Check that the parts are consistent, so that every draft step has a cost.

        Raises:
            ValueError: they are not.
        """
        lists = {"plain_step": self.plain_step, **{f"attention ({p})": v for p, v in self.attention.items()}}
        for name, values in lists.items():
            if len(values) != len(self.contexts):
                raise ValueError(f"{len(values)} values of {name} at {len(self.contexts)} contexts")
        if list(self.contexts) != sorted({c for c in self.contexts if c > 0}):
            raise ValueError("the contexts are not ascending")
        for kind in ("attention", "mlp"):
            if len(self.shares[kind]) != self.num_layers:
                raise ValueError(f"{len(self.shares[kind])} shares of {kind} in {self.num_layers} layers")
        parts = [*self.mlp.values(), *self.head.values(), *self.overhead.values()]
        for numbers in (*lists.values(), *self.shares.values(), parts, self.checked.values(), [self.spread]):
            if not all(math.isfinite(number) and number >= 0 for number in numbers):
                raise ValueError("a number that is negative or not finite")
        if not (isinstance(self.measured_on, str) and isinstance(self.model_type, str)):
            raise ValueError("measured_on and model_type are not strings")
        self.costs(SelfSpeculativeConfig())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile to a JSON file, whole or not at all."""
        write_whole(Path(os.path.expanduser(path)), json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CostProfile:
        """Read a file that `save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is not a profile.
        """
        try:
            data = read_json(os.path.expanduser(path), PROFILE)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"There is no cost profile {str(path)!r}. Measure one with `ssd profile`."
            ) from error
        try:
            return cls.from_dict(data)
        except ValueError as error:
            raise ValueError(f"{str(path)!r}: {error}") from error


# ----------------------------------------------------------------------------------------------------------------------
# measuring


def measure_profile(
    model: PreTrainedModel,
    precisions: Sequence[str] | None = None,
    contexts: Sequence[int] = CONTEXTS,
    longest_verify: int = LONGEST_VERIFIED,
    repeats: int = 5,
    progress: Callable[[str, int, int], None] | None = None,
) -> CostProfile:
    """Measure a cost profile of a model on its device.

    The passes of a part are timed interleaved with a plain step, and their minima are taken relative to that of the
    plain step: if the machine slows down while one part is measured, that part does not become more expensive.

    Args:
        model: the target model.
        precisions: "int8" and "int4", one of them or neither; `None`: those supported here. Their copies are built one
            after the other, and dropped again.
        contexts: tokens in the KV cache at which attention is measured; those beyond the model's context are left out.
        longest_verify: most tokens of the measured verification passes, which start at 1 token; 2 … 32.
        repeats: minimum number of timings of each pass, ≥ 1.
        progress: callback with the name of a part, the number of parts done, and of all parts.

    Raises:
        ValueError: a model that cannot draft, or has fewer than two attention sub-layers, a precision that is not
            supported here, or a number out of range.
    """
    if not 2 <= longest_verify <= LONGEST_VERIFIED:
        raise ValueError(f"longest_verify must be 2 to {LONGEST_VERIFIED}, but got {longest_verify}.")
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, but got {repeats}.")
    require_drafts(model)
    return _Profiler(model, precisions, contexts, longest_verify, repeats, progress).measure()


class _Profiler:
    def __init__(
        self,
        model: PreTrainedModel,
        precisions: Sequence[str] | None,
        contexts: Sequence[int],
        longest_verify: int,
        repeats: int,
        progress: Callable[[str, int, int], None] | None,
    ) -> None:
        self.model = model
        self.layout = locate_sublayers(model)
        self.text_config = model.config.get_text_config(decoder=True)
        self.precisions = _available(model, precisions)
        longest = getattr(self.text_config, "max_position_embeddings", None)
        longest_context = math.inf if not isinstance(longest, int) else longest - LONGEST_VERIFIED
        self.contexts = tuple(sorted({c for c in contexts if 1 <= c <= longest_context})) or (
            max(1, int(min(longest_context, 64))),
        )
        self.lengths = range(1, longest_verify + 1)
        self.repeats = repeats
        self.progress = progress or (lambda part, done, total: None)
        self.parts = 1 + len(self.contexts) + len(self.precisions)
        self.done = 0
        self.spreads: list[float] = []
        self.plain: list[float] = []  # seconds, in each part

    def _time(self, what: str, passes: Mapping[str, tuple[Passes, int]]) -> dict[str, float]:
        """Return the time of each pass in units of a plain step interleaved with it; length 0 is a draft step."""
        self.progress(what, self.done, self.parts)
        self.done += 1
        for which, length in ((self.whole, 1), *passes.values()):
            which.once(length)  # captures the pass, touches the memory
        timings = time_interleaved(
            partial(self.whole.once, 1),
            {name: partial(which.once, length) for name, (which, length) in passes.items()},
            # Passes of small models vary more, and take less time.
            is_over=lambda repeats, spent: repeats >= self.repeats and spent > _SECONDS,
            most_repeats=5 * self.repeats,
        )
        self.spreads += [statistics.median(values) / min(values) for values in timings.seconds]
        self.plain.append(timings.plain)
        return {name: timings.ratio(name) for name in passes}

    def _parts(
        self, what: str, context: int, precision: PrecisionConfig | None, cache: Any = None
    ) -> tuple[dict[str, float], float, float, float]:
        """Time draft steps, and derive the costs of an attention sub-layer, of an MLP, and of the rest.

        The costs are a weighted least-squares fit to steps with and without either kind.
        """
        import numpy as np

        without_attention, without_mlp = self._skips()
        neither = SkipConfig(attention=without_attention.attention, mlp=without_mlp.mlp)
        skips = {"whole": SkipConfig(), "attention": without_attention, "mlp": without_mlp, "neither": neither}
        variants: dict[str, tuple[Passes, int]] = {}
        for name, skip in {**skips, "mixed": self._mixed()}.items():
            passes = Passes(self.model, SelfSpeculativeConfig(skip, precision=precision), context, cache)
            cache = passes.cache
            variants[name] = (passes, 0)
        times = self._time(what, variants)
        rows = [
            [1.0, *(self._parameter_share(kind, getattr(skip, kind)) for kind in ("attention", "mlp"))]
            for skip in skips.values()
        ]
        taken = np.array([times[name] for name in skips])
        solved = np.linalg.lstsq(np.array(rows) / taken[:, None], np.ones(len(skips)), rcond=None)[0]
        rest, attention, mlp = (max(float(value), 0.0) for value in solved)
        return times, attention, mlp, rest

    def _parameter_share(self, kind: str, skipped: Sequence[int]) -> float:
        return sum(share for layer, share in enumerate(self._shares(kind)) if layer not in skipped)

    def _mixed(self) -> SkipConfig:
        without_attention, without_mlp = self._skips()
        return SkipConfig(attention=without_attention.attention[::2], mlp=without_mlp.mlp[::3])

    def measure(self) -> CostProfile:
        with torch.no_grad():
            # The passes of a call with default settings.
            self.whole = Passes(self.model, None, self.contexts[0], plan=plan_passes(self.model))
            profile = self._measure()
        return _in_seconds(profile, statistics.median(self.plain))

    def _measure(self) -> CostProfile:
        """Return the profile in units of a plain step."""
        steps, attention = [], []
        for context in self.contexts:
            what = f"a draft step after {context} tokens"
            cache = self.whole.cache if context == self.contexts[0] else None
            times, attention_here, mlp_here, rest_here = self._parts(what, context, None, cache)
            steps.append(times["whole"])
            attention.append(attention_here)
            if context == self.contexts[0]:
                mixed, mlp, rest = times["mixed"], mlp_here, rest_here
        verify = self._time("verify passes", {str(n): (self.whole, n) for n in self.lengths if n > 1})
        head = min(self._head(), rest)
        profile = CostProfile(
            contexts=self.contexts,
            plain_step=tuple(1.0 + max(step - steps[0], 0.0) for step in steps),
            attention={KEEP: tuple(max(cost, attention[0]) for cost in attention)},
            mlp={KEEP: mlp},
            head={KEEP: head},
            overhead={KEEP: rest - head},
            verify=tuple((n, max(verify.get(str(n), 1.0), 1.0)) for n in self.lengths),
            spread=1.0,
            checked={},
            measured_on=describe_machine(self.model),
            model_type=str(self.text_config.model_type),
            num_layers=len(self.layout),
            hidden_size=self.model.config.get_text_config(decoder=True).hidden_size,
            shares={kind: self._shares(kind) for kind in ("attention", "mlp")},
        )
        checked = {"skipped": profile.draft_step(SelfSpeculativeConfig(self._mixed())) / mixed}
        for name in self.precisions:
            profile, checked[name] = self._with_low_bits(name, profile)
        return dataclasses.replace(profile, checked=checked, spread=statistics.median(self.spreads))

    def _with_low_bits(self, name: str, profile: CostProfile) -> tuple[CostProfile, float]:
        """Return the profile with one precision added, and predicted / measured time of a draft that also skips.

        The cost of a sub-layer in low bits is measured within a draft that is all in low bits, where its inputs and
        outputs are bfloat16.
        """
        everything = PrecisionConfig(default=name, head=name)
        before = copy_bytes(self.model)
        copies = copies_of(self.model, SkipConfig(), everything)  # of all first, so that the drafts share them
        times, attention, mlp, rest = self._parts(f"{name} copies", self.contexts[0], everything, self.whole.cache)
        head = min(self._head(copies), rest)
        if before == 0:
            drop_copies(self.model)
        grown = [cost - profile.attention[KEEP][0] for cost in profile.attention[KEEP]]
        added = dataclasses.replace(
            profile,
            attention={**profile.attention, name: tuple(attention + more for more in grown)},
            mlp={**profile.mlp, name: mlp},
            head={**profile.head, name: head},
            overhead={**profile.overhead, name: rest - head},
        )
        mixed = SelfSpeculativeConfig(self._mixed(), precision=everything)
        return added, added.draft_step(mixed) / times["mixed"]

    def _skips(self) -> tuple[SkipConfig, SkipConfig]:
        """Return two skip sets: all attention sub-layers but one, and all MLPs."""
        attention = [
            layer.index for layer in self.layout.layers if layer.attention and layer.index not in self.layout.shares_kv
        ]
        mlp = [layer.index for layer in self.layout.layers if layer.mlp]
        unskippable = sum(layer.attention is not None for layer in self.layout.layers) - len(attention)
        if unskippable == 0:
            attention = attention[1:]
        if not attention or not mlp:
            raise ValueError(
                "A cost profile measures sub-layers by leaving them out, which needs a model with at least two "
                f"attention sub-layers and an MLP; {type(self.model).__name__} has fewer that can be skipped."
            )
        return SkipConfig(attention=attention), SkipConfig(mlp=mlp)

    def _shares(self, kind: str) -> tuple[float, ...]:
        subs = [getattr(layer, kind) for layer in self.layout.layers]
        sizes = [0 if sub is None else sub.num_parameters() for sub in subs]
        there = [size for size in sizes if size]
        mean = sum(there) / len(there) if there else 1.0
        return tuple(size / mean for size in sizes)

    def _head(self, copies: LowBitCopies | None = None) -> float:
        """Return the time of the LM head for one token, in plain steps, its weights read from memory as in a step.

        It is timed in isolation: a difference of two steps would be lost in their noise.
        """
        head = self.model.get_output_embeddings()
        if head is None:
            return 0.0
        weight = head.weight
        run: Callable[[torch.Tensor], Any] = linear_of_few_rows(weight, getattr(head, "bias", None), 1) or head
        if copies is not None and id(weight) in copies.by_weight:
            run = copies.by_weight[id(weight)][0].whole
        hidden = torch.zeros((1, 1, weight.shape[1]), dtype=weight.dtype, device=weight.device)
        mlp = next(layer.mlp for layer in self.layout.layers if layer.mlp is not None)
        others = [p for module in mlp.modules for p in module.parameters()]

        def once() -> float:
            for p in others:
                p.sum()  # evicts the head's weights from the processor's cache
            wait_for(weight.device)
            started = time.perf_counter()
            run(hidden)
            wait_for(weight.device)
            return time.perf_counter() - started

        once()
        pairs = [(once(), self.whole.once(1)) for _ in range(self.repeats)]
        return min(seconds for seconds, _ in pairs) / min(plain for _, plain in pairs)


def _in_seconds(profile: CostProfile, seconds: float) -> CostProfile:
    """Convert a profile in units of a plain step to seconds."""
    return dataclasses.replace(
        profile,
        plain_step=tuple(cost * seconds for cost in profile.plain_step),
        attention={name: tuple(cost * seconds for cost in costs) for name, costs in profile.attention.items()},
        mlp={name: cost * seconds for name, cost in profile.mlp.items()},
        head={name: cost * seconds for name, cost in profile.head.items()},
        overhead={name: cost * seconds for name, cost in profile.overhead.items()},
        verify=tuple((n, cost * seconds) for n, cost in profile.verify),
    )


def _available(model: PreTrainedModel, precisions: Sequence[str] | None) -> tuple[str, ...]:
    if precisions is None:
        try:
            check_precision(model)
        except ValueError:
            return ()
        return tuple(PRECISIONS)
    for name in precisions:
        PrecisionConfig.named(name)
    if precisions:
        check_precision(model)
    return tuple(dict.fromkeys(precisions))
