"""The measurement store: measurements of this machine, cached on disk for the next process."""

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

from .files import default_cache_dir
from .messages import clipped
from .model_state import Part, state_of
from .parallel import broadcast
from .reading import MEASUREMENT, read_json
from .trusted import UntrustedFolderError, say_not_stored, store

__all__ = [
    "MeasurementsPart",
    "NoisyMeasurement",
    "cached_measurement",
    "flag_if_noisy",
    "is_measured",
    "value_of",
    "was_noisy",
]

logger = logging.getLogger(__name__)

_STEADY = 1.25
"""Median / minimum of repeated times above which the machine is too busy for the measurement to be stored."""


class MeasurementsPart(Part):
    """Measurements of a model, by fingerprint, and whether any of them was made while the machine was busy."""

    def __init__(self) -> None:
        self.measurements: dict[str, Any] = {}
        self.has_noisy_measurements = False


@dataclass(frozen=True)
class NoisyMeasurement:
    """A measurement made while the machine was busy: used by this process, not stored on disk."""

    result: Any


def flag_if_noisy(result: Any, times: Iterable[Sequence[float]]) -> Any:
    """Return the result of a measurement, as a `NoisyMeasurement` where the machine was busy.

    Args:
        result: result derived from the times.
        times: repeated times, in seconds, of each thing measured.
    """
    spread = statistics.median(statistics.median(values) / min(values) for values in times)
    return result if spread <= _STEADY else NoisyMeasurement(result)


def value_of(measured: Any) -> Any:
    """Return the result of a measurement, noisy or not."""
    return measured.result if isinstance(measured, NoisyMeasurement) else measured


def was_noisy(model: nn.Module) -> bool:
    """Tell whether a measurement for this model was noisy."""
    return state_of(model).get(MeasurementsPart).has_noisy_measurements


def cached_measurement(
    model: nn.Module,
    described: dict[str, Any],
    measure: Callable[[], Any],
    again: bool = False,
    use: Callable[[Any], Any] | None = None,
) -> Any:
    """Return the result of `measure`, from memory or disk if it was measured before.

    Args:
        model: model that the result belongs to; results are held in memory as long as it lives.
        described: everything that the result depends on, as plain JSON types; the key in the store.
        measure: returns the result, of plain JSON types; a `NoisyMeasurement` is held in memory only.
        again: measure again in any case.
        use: checks a result from disk by using it; where it raises, the result is measured again.
    """
    memory = state_of(model).get(MeasurementsPart).measurements
    key = _key(described)
    if not again and key in memory:
        return memory[key]
    result = broadcast(model, None if again else _read(key, use))
    if result is None:
        measured = measure()
        result, is_noisy = broadcast(model, (value_of(measured), isinstance(measured, NoisyMeasurement)))
        if is_noisy:
            state_of(model).get(MeasurementsPart).has_noisy_measurements = True
            logger.info("The machine is busy: what was measured holds for this process only.")
        else:
            _write(key, {"described": described, "result": result})
    memory[key] = result
    return result


def is_measured(model: nn.Module, described: dict[str, Any]) -> bool:
    """Tell whether `cached_measurement` finds a result in memory or on disk, which may turn out to be unusable."""
    key = _key(described)
    if key in state_of(model).get(MeasurementsPart).measurements:
        return True
    try:
        return _file(key).is_file()
    except ValueError:  # there is no folder for it
        return False


def _key(described: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()[:24]


def _file(key: str) -> Path:
    return default_cache_dir() / "costs" / f"{key}.json"


def _read(key: str, use: Callable[[Any], Any] | None) -> Any:
    """Return the stored result; `None` where there is none, or none that can be used."""
    try:
        cache, file = default_cache_dir(), _file(key)
    except ValueError as error:
        say_not_stored(logger, error)
        return None
    try:
        result = read_json(file, MEASUREMENT, within=cache)["result"]
        if use is not None:
            use(result)
        return result
    except FileNotFoundError:
        return None
    except UntrustedFolderError as error:
        say_not_stored(logger, error)
        return None
    except Exception as error:  # the file may hold anything, so `use` may fail in any way
        logger.warning("What was measured, in %s, cannot be read (%s); measuring again.", file, clipped(error))
        return None


def _write(key: str, content: Any) -> None:
    """Write a result, whole or not at all; where that fails, the next process measures again."""
    try:
        store(_file(key), json.dumps(content, indent=1, default=str).encode(), default_cache_dir())
    except (OSError, ValueError) as error:
        say_not_stored(logger, error)
