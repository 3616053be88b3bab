"""Settings of a run, and the part of it that a process runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..methods import PLAIN
from ..peer_methods import is_peer

__all__ = ["WHOLE_RUN", "RunSettings", "Share"]


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run.

    Args:
        methods: names of the methods, see `methods.METHODS`; plain decoding first.
        repeats: number of runs of every item, ≥ 1.
        warm_up: calls of each method on the first item that can be run, ≥ 0. They do not count: the first makes the
            measurements, captures and copies that a method needs, the second runs with these in place.
        do_sample: whether to sample instead of greedy decoding, all methods from the same seeds.
        temperature: temperature of the sampling, > 0; `None` for the model's.
        seed: seed of the sampling and of `random-half`.
        memory: whether the peak memory is measured, in one more call of each method.

    Raises:
        ValueError: a value out of range.
    """

    methods: tuple[str, ...]
    repeats: int = 1
    warm_up: int = 2
    do_sample: bool = False
    temperature: float | None = None
    seed: int = 0
    memory: bool = True

    def __post_init__(self) -> None:
        self.check_least(repeats=1, warm_up=0, seed=0)
        if self.temperature is not None:
            if not self.do_sample:
                raise ValueError(
                    f"A temperature ({self.temperature:g}) has an effect only when sampling. Ask for do_sample, or "
                    "leave it out."
                )
            if not self.temperature > 0:
                raise ValueError(f"The temperature must be above 0, but got {self.temperature:g}.")
        if not self.methods or self.methods[0] != PLAIN:
            raise ValueError(f"Plain decoding comes first, but got the methods {', '.join(self.methods) or 'none'}.")
        peer = next(filter(is_peer, self.methods), None)
        if self.do_sample and peer is not None:
            # It samples differently: neither texts nor speeds would be comparable.
            raise ValueError(f"The method {peer!r} decodes greedily only. Leave do_sample out, or this method.")

    def check_least(self, **least: int) -> None:
        """Raise if a value is too small."""
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ValueError(f"{name} must be at least {value}, but got {getattr(self, name)}.")

    def options(self, pad_token_id: int | None) -> dict[str, Any]:
        """Return the arguments of `generate` that are the same for all methods."""
        options: dict[str, Any] = {
            "do_sample": self.do_sample,
            "pad_token_id": 0 if pad_token_id is None else pad_token_id,
        }
        if self.temperature is not None:
            options["temperature"] = self.temperature
        return options

    def seed_of(self, item: int, repeat: int) -> int | None:
        """Return the seed of a call, the same for all methods; `None` under greedy decoding."""
        return self.seed + 1000 * repeat + item if self.do_sample else None


@dataclass(frozen=True)
class Share:
    """Part of one process in a run that several share.

    Attributes:
        part: `(i, n)`: only every n-th item from the i-th on; other processes run the rest.
        earlier: rows of the run in another folder, already checked.
    """

    part: tuple[int, int] = (0, 1)
    earlier: Sequence[Mapping[str, Any]] = ()


WHOLE_RUN = Share()
