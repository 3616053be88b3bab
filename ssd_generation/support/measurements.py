"""What was measured on this machine, kept on the disk for the next process."""

from __future__ import annotations

import hashlib
import json
import logging
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from .files import default_cache_dir, write_whole
from .messages import clipped
from .model_state import state_of
from .parallel import broadcast
from .reading import MEASUREMENT, read_json

__all__ = ["NoisyMeasurement", "cached_measurement", "flag_if_noisy", "value_of", "was_noisy"]

logger = logging.getLogger(__name__)

_STEADY = 1.25
"""Median / least time of what was repeated, above which the machine is too busy for the measurement to be kept."""


@dataclass(frozen=True)
class NoisyMeasurement:
    """What was measured while the machine was busy: good enough for now, not to be kept."""

    result: Any


def flag_if_noisy(result: Any, times: Iterable[Sequence[float]]) -> Any:
    """What was measured; `NoisyMeasurement` where the machine was busy.

    Args:
        result: what follows from the times.
        times: seconds of each thing that was repeated.
    """
    spread = statistics.median(statistics.median(values) / min(values) for values in times)
    return result if spread <= _STEADY else NoisyMeasurement(result)


def value_of(measured: Any) -> Any:
    """What was measured, on a busy machine or not."""
    return measured.result if isinstance(measured, NoisyMeasurement) else measured


def was_noisy(model: nn.Module) -> bool:
    """Whether something was measured for this model while the machine was busy."""
    return state_of(model).has_noisy_measurements


def cached_measurement(
    model: nn.Module,
    described: dict[str, Any],
    measure: Callable[[], Any],
    again: bool = False,
    use: Callable[[Any], Any] | None = None,
) -> Any:
    """What `measure` gives (of plain JSON types), from memory or the disk if it was measured before.

    Args:
        model: in whose company the answer is remembered.
        described: all that the answer depends on.
        measure: called where it is not known; a `NoisyMeasurement` answer is remembered, and not written to the disk.
        again: call it in any case.
        use: does with an answer what the caller will; where that fails, what was on the disk is measured again.
    """
    memory = state_of(model).measurements
    key = hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()[:24]
    if not again and key in memory:
        return memory[key]
    result = broadcast(model, None if again else _read(key, use))
    if result is None:
        measured = measure()
        result, is_noisy = broadcast(model, (value_of(measured), isinstance(measured, NoisyMeasurement)))
        if is_noisy:
            state_of(model).has_noisy_measurements = True
            logger.info("The machine is busy: what was measured holds for this process only.")
        else:
            _write(key, {"described": described, "result": result})
    memory[key] = result
    return result


def _file(key: str) -> Path:
    return default_cache_dir() / "costs" / f"{key}.json"


def _read(key: str, use: Callable[[Any], Any] | None) -> Any:
    """What the disk has; None where that is nothing, or nothing that can be used."""
    file: object = f"{key}.json"
    try:
        file = _file(key)
        result = read_json(file, MEASUREMENT)["result"]
        if use is not None:
            use(result)
        return result
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever stands there: `use` may fail on it in any way
        logger.warning("What was measured, in %s, cannot be read (%s); measuring again.", file, clipped(error))
        return None


def _write(key: str, content: Any) -> None:
    """Whole or not at all; a directory that cannot be written to costs a measurement next time, nothing more."""
    file: object = f"{key}.json"
    try:
        file = path = _file(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(content, indent=1, default=str))
    except (OSError, ValueError) as error:
        logger.warning("What was measured could not be kept in %s: %s", file, clipped(error))
