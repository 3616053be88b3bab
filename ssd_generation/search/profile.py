"""What each kind of sub-layer adds to a draft step on this machine, and what verifying n tokens takes.

A draft step is taken to be a sum: what is there in any case, the LM head, and each kept sub-layer in its precision. The
parts come from differences between whole steps (all MLPs left out, all attention but one, one kind in low bits), so that
what the machine makes of a sub-layer inside a step is measured, not a sub-layer on its own.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..config import PRECISIONS, Costs, PrecisionConfig, SelfSpeculativeConfig, SkipConfig, write_whole
from ..costs import LONGEST_VERIFIED, Passes, describe_machine
from ..precision import check_precision, copies_of, copy_bytes, drop_copies
from ..sublayers import locate_sublayers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["CONTEXTS", "CostProfile", "measure_profile"]

CONTEXTS = (64, 512, 2048)
"""Tokens in the cache at which attention is measured."""

KEEP = "keep"

_VERSION = 1
_VERIFY_REPEATS = 3


@dataclass(frozen=True)
class CostProfile:
    """Seconds of the parts of a draft step, by kind and precision, and of verify passes.

    Attributes:
        contexts: tokens in the cache at which attention was measured, ascending.
        plain_step: a step of the whole model at each context.
        attention: by precision ("keep": as loaded), one attention sub-layer at each context. In low bits it is measured
            at the first, and taken to grow with the context as it does as loaded.
        mlp: by precision, one MLP sub-layer.
        head: by precision, the LM head.
        overhead: by the precision of most of the draft, everything else: embedding, norms outside the sub-layers, casts,
            what runs once a step.
        verify: pairs (tokens in the pass, seconds), at the first context.
        spread: median over least time of a pass, the median over all passes: 1 on a quiet machine.
        checked: predicted over measured time of a draft step that mixes skipping and low bits, by precision ("skipped"
            for skipping alone).
        measured_on: device, threads, dtype, attention implementation, versions.
        model_type: of the model.
        num_layers: its decoder layers.
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
    shares: Mapping[str, tuple[float, ...]] = field(repr=False, default_factory=dict)

    def draft_step(self, config: SelfSpeculativeConfig, context: int | None = None) -> float:
        """Seconds of a draft step of a config.

        Args:
            config: what is left out, and the precision of the rest.
            context: tokens in the cache; `None`: the least that was measured.

        Raises:
            ValueError: a precision that was not measured.
        """
        precision = config.precision or PrecisionConfig()
        head = precision.head or KEEP
        seconds = self._of(self.head, head)
        most: Counter[str] = Counter({head: 1})
        for kind, skipped in (("attention", config.skip.attention), ("mlp", config.skip.mlp)):
            for layer, share in enumerate(self.shares[kind]):
                if layer in skipped or share <= 0:
                    continue
                name = precision.of(kind, layer) or KEEP
                most[name] += 1
                if kind == "mlp":
                    seconds += self._of(self.mlp, name) * share
                else:
                    seconds += self._at(self._of(self.attention, name), context) * share
        return seconds + self._of(self.overhead, most.most_common(1)[0][0])

    def costs(self, config: SelfSpeculativeConfig, context: int | None = None) -> Costs:
        """The costs of a config, as `SelfSpeculativeConfig.costs` takes them."""
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
        """Linear between the contexts, and beyond the last as between the last two; never less than the first."""
        if context is None or context <= self.contexts[0] or len(values) == 1:
            return values[0]
        above = next((i for i, c in enumerate(self.contexts) if c >= context), len(values) - 1)
        start, end = self.contexts[above - 1], self.contexts[above]
        slope = (values[above] - values[above - 1]) / (end - start)
        return max(values[0], values[above - 1] + slope * (context - start))

    def compared_with(self, model: PreTrainedModel) -> list[str]:
        """In what the machine and model that this was measured on differ from a model here; empty where they do not."""
        here = describe_machine(model)
        differences = []
        if here != self.measured_on:
            differences.append(f"it was measured on {self.measured_on}, and this is {here}")
        config = model.config.get_text_config(decoder=True)
        if (config.model_type, config.num_hidden_layers) != (self.model_type, self.num_layers):
            differences.append(
                f"it is of a {self.model_type} with {self.num_layers} layers, and this is a {config.model_type} with "
                f"{config.num_hidden_layers}"
            )
        return differences

    # -- files ---------------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """All figures, as plain JSON types."""
        return {"version": _VERSION, **json.loads(json.dumps(dataclasses.asdict(self)))}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CostProfile:
        """The inverse of `to_dict`.

        Raises:
            ValueError: this is not a profile, or one of another version.
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
                    "contexts": tuple(map(int, data["contexts"])),
                    "verify": tuple((int(n), float(s)) for n, s in data["verify"]),
                    "shares": {kind: tuple(map(float, values)) for kind, values in data["shares"].items()},
                }
            )
            profile.costs(SelfSpeculativeConfig())
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise ValueError(f"The cost profile cannot be understood ({error}). {advice}") from error
        return profile

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a JSON file, whole or not at all."""
        write_whole(Path(path), json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CostProfile:
        """Read what `save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is not a profile.
        """
        file = Path(path).expanduser()
        if not file.is_file():
            raise FileNotFoundError(f"There is no cost profile {str(path)!r}. Measure one with `ssd profile`.")
        try:
            return cls.from_dict(json.loads(file.read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{str(path)!r}: {error}") from error


# ----------------------------------------------------------------------------------------------------------------------
# measuring


def measure_profile(
    model: PreTrainedModel,
    precisions: Sequence[str] | None = None,
    contexts: Sequence[int] = CONTEXTS,
    longest_verify: int = LONGEST_VERIFIED,
    repeats: int = 7,
    progress: Callable[[str, int, int], None] | None = None,
) -> CostProfile:
    """Measure a cost profile of a model where it is. The passes of a part take turns; the least times count.

    Args:
        model: the target model.
        precisions: "int8" and "int4", one of them or neither; `None`: those that can be had here. Their copies are made
            one after the other, and dropped again.
        contexts: tokens in the cache at which attention is measured; those beyond the model's context are left out.
        longest_verify: verify passes of 1 … so many tokens are measured, 2 … 32.
        repeats: how often each pass is timed, ≥ 1.
        progress: told what is measured, and how many of how many parts are done.

    Raises:
        ValueError: a precision that cannot be had here, a model with fewer than two attention sub-layers, or a number
            out of range.
    """
    if not 2 <= longest_verify <= LONGEST_VERIFIED:
        raise ValueError(f"longest_verify must be 2 to {LONGEST_VERIFIED}, but got {longest_verify}.")
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, but got {repeats}.")
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
        room = math.inf if not isinstance(longest, int) else longest - LONGEST_VERIFIED
        self.contexts = tuple(sorted({c for c in contexts if 1 <= c <= room})) or (max(1, int(min(room, 64))),)
        self.lengths = range(1, longest_verify + 1)
        self.repeats = repeats
        self.told = progress or (lambda part, done, total: None)
        self.parts = 1 + len(self.contexts) + len(self.precisions)
        self.done = 0
        self.spreads: list[float] = []

    def _time(self, what: str, passes: Mapping[str, tuple[Passes, int]], most: int | None = None) -> dict[str, float]:
        """Least seconds of each pass, a pass over so many tokens (0: a draft step)."""
        self.told(what, self.done, self.parts)
        self.done += 1
        for which, length in passes.values():
            which.once(length)  # recording, first touch
        times: dict[str, list[float]] = {name: [] for name in passes}
        for _ in range(self.repeats if most is None else min(most, self.repeats)):
            for name, (which, length) in passes.items():
                times[name].append(which.once(length))
        self.spreads += [statistics.median(values) / min(values) for values in times.values()]
        return {name: min(values) for name, values in times.items()}

    def measure(self) -> CostProfile:
        with torch.inference_mode():
            return self._measure()

    def _measure(self) -> CostProfile:
        fewer_attention, fewer_mlp = self._skips()
        whole = SelfSpeculativeConfig()
        steps, attention = [], []
        mlp = math.nan
        mixed = SkipConfig(attention=fewer_attention.attention[::2], mlp=fewer_mlp.mlp[::3])
        for context in self.contexts:
            first = Passes(self.model, whole, context)
            variants = {"whole": (first, 0), "attention": (self._share(first, fewer_attention), 0)}
            if context == self.contexts[0]:
                variants["mlp"] = (self._share(first, fewer_mlp), 0)
                variants["mixed"] = (self._share(first, mixed), 0)
                cache = first.cache
            times = self._time(f"a draft step behind {context} tokens", variants)
            steps.append(times["whole"])
            attention.append(self._each(times["whole"] - times["attention"], "attention", fewer_attention))
            if context == self.contexts[0]:
                mlp = self._each(times["whole"] - times["mlp"], "mlp", fewer_mlp)
                mixed_time = times["mixed"]
        verify_passes = Passes(self.model, None, self.contexts[0], cache)
        verify = self._time("verify passes", {str(n): (verify_passes, n) for n in self.lengths}, _VERIFY_REPEATS)
        plain = verify["1"]
        head = min(self._head(), steps[0])
        profile = CostProfile(
            contexts=self.contexts,
            plain_step=tuple(plain + step - steps[0] for step in steps),
            attention={KEEP: tuple(attention)},
            mlp={KEEP: mlp},
            head={KEEP: head},
            overhead={KEEP: max(steps[0] - self._sum(attention[0], mlp) - head, 0.0)},
            verify=tuple((n, max(verify[str(n)], plain)) for n in self.lengths),
            spread=1.0,
            checked={},
            measured_on=describe_machine(self.model),
            model_type=str(self.text_config.model_type),
            num_layers=len(self.layout),
            shares={kind: self._shares(kind) for kind in ("attention", "mlp")},
        )
        checked = {"skipped": profile.draft_step(SelfSpeculativeConfig(mixed)) / mixed_time}
        for name in self.precisions:
            profile, checked[name] = self._with_low_bits(name, profile, mixed, cache)
        return dataclasses.replace(profile, checked=checked, spread=statistics.median(self.spreads))

    def _sum(self, attention: float, mlp: float) -> float:
        return attention * sum(self._shares("attention")) + mlp * sum(self._shares("mlp"))

    def _share(self, other: Passes, skip: SkipConfig) -> Passes:
        return Passes(self.model, SelfSpeculativeConfig(skip), other.context, other.cache)

    def _with_low_bits(
        self, name: str, profile: CostProfile, mixed: SkipConfig, cache: Any
    ) -> tuple[CostProfile, float]:
        """The profile with one precision added, and predicted over measured time of a draft that also skips.

        What a sub-layer takes in low bits is measured within a draft that is all in low bits: there are the activations
        that it gets and gives in bfloat16.
        """
        fewer_attention, fewer_mlp = self._skips()
        everything = PrecisionConfig(default=name, head=name)
        configs = {
            "whole": SelfSpeculativeConfig(precision=everything),
            "attention": SelfSpeculativeConfig(fewer_attention, precision=everything),
            "mlp": SelfSpeculativeConfig(fewer_mlp, precision=everything),
            "head": SelfSpeculativeConfig(precision=PrecisionConfig(default=name)),
            "mixed": SelfSpeculativeConfig(mixed, precision=everything),
        }
        before = copy_bytes(self.model)
        copies_of(self.model, SkipConfig(), everything)  # of everything first, so that all share them
        passes = {key: (Passes(self.model, config, self.contexts[0], cache), 0) for key, config in configs.items()}
        times = self._time(f"{name} copies", passes)
        del passes
        if before == 0:
            drop_copies(self.model)
        attention = self._each(times["whole"] - times["attention"], "attention", fewer_attention)
        mlp = self._each(times["whole"] - times["mlp"], "mlp", fewer_mlp)
        head = max(profile.head[KEEP] - (times["head"] - times["whole"]), 0.0)
        grown = [seconds - profile.attention[KEEP][0] for seconds in profile.attention[KEEP]]
        added = dataclasses.replace(
            profile,
            attention={**profile.attention, name: tuple(max(attention + more, 0.0) for more in grown)},
            mlp={**profile.mlp, name: mlp},
            head={**profile.head, name: head},
            overhead={**profile.overhead, name: max(times["whole"] - self._sum(attention, mlp) - head, 0.0)},
        )
        return added, added.draft_step(configs["mixed"]) / times["mixed"]

    def _skips(self) -> tuple[SkipConfig, SkipConfig]:
        """All attention but one left out, and all MLPs."""
        attention = [
            layer.index for layer in self.layout.layers if layer.attention and layer.index not in self.layout.shares_kv
        ]
        mlp = [layer.index for layer in self.layout.layers if layer.mlp]
        kept = sum(layer.attention is not None for layer in self.layout.layers) - len(attention)
        if kept == 0:
            attention = attention[1:]
        if not attention or not mlp:
            raise ValueError(
                "A cost profile tells sub-layers apart by leaving them out, which takes a model with at least two "
                f"attention sub-layers and an MLP; {type(self.model).__name__} has fewer that can be skipped."
            )
        return SkipConfig(attention=attention), SkipConfig(mlp=mlp)

    def _each(self, seconds: float, kind: str, skip: SkipConfig) -> float:
        shares = self._shares(kind)
        return max(seconds, 0.0) / sum(shares[layer] for layer in getattr(skip, kind))

    def _shares(self, kind: str) -> tuple[float, ...]:
        subs = [getattr(layer, kind) for layer in self.layout.layers]
        sizes = [0 if sub is None else sub.num_parameters() for sub in subs]
        there = [size for size in sizes if size]
        mean = sum(there) / len(there) if there else 1.0
        return tuple(size / mean for size in sizes)

    def _head(self) -> float:
        """Seconds of the LM head on one token, its weights coming from memory as in a step."""
        head = self.model.get_output_embeddings()
        if head is None:
            return 0.0
        weight = head.weight
        hidden = torch.zeros((1, 1, weight.shape[1]), dtype=weight.dtype, device=weight.device)
        mlp = next(layer.mlp for layer in self.layout.layers if layer.mlp is not None)
        others = [p for module in mlp.modules for p in module.parameters()]

        def once() -> float:
            for p in others:
                p.sum()  # what was in the processor's cache gives way
            _wait(weight.device)
            started = time.perf_counter()
            head(hidden)
            _wait(weight.device)
            return time.perf_counter() - started

        once()
        return min(once() for _ in range(self.repeats))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
