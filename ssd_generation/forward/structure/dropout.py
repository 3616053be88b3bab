"""Sources of randomness of a pass in training mode: dropout, and the little else that depends on that mode.

Training mode alone changes nothing: models are often loaded with dropout rates of 0, and generate while they are
trained. So what counts is not the flag, but what the modules that have it set do with it.
"""

from __future__ import annotations

import dis
import functools
import inspect
import re
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from ...support.once import looked_at_once
from ...support.structure import modules_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["active_dropout"]

_RATES = re.compile("drop|jitter|noise", re.IGNORECASE)
"""Names of numbers by which a module is random in training mode: dropout, layerdrop, the noise of a router."""

_CONFIG = "config."

_KNOWN = ("transformers.", "peft.")
"""Packages whose classes draw random numbers by such rates alone."""

_NOT_IN_A_PASS = frozenset({"__init__", "_init_weights", "reset_parameters", "train", "eval", "extra_repr"})


@looked_at_once
def active_dropout(model: PreTrainedModel) -> str | None:
    """Return why training mode makes the passes of a model random, with the module's name; `None` where it does not.

    The model is not changed.

    Args:
        model: the target model; all of it, a part or nothing may be in training mode.
    """
    if not any(module.training for module in modules_of(model)):
        return None
    for name, module in model.named_modules():
        if module.training and (reason := _why_random(module, model)) is not None:
            return f"{name or 'it'} ({type(module).__name__}) is in training mode, {reason}"
    return None


def _why_random(module: nn.Module, model: PreTrainedModel) -> str | None:
    """Return why a module in training mode is random, by its own code alone; `None` where it is not."""
    if isinstance(module, _DropoutNd):
        return f"with a dropout rate of {module.p:g}" if module.p > 0 else None
    if isinstance(module, _NormBase):
        return "where it normalises by the tokens of a pass"
    if isinstance(module, nn.RReLU):
        return "where its slope is random"
    if type(module).__module__.startswith("torch.nn."):
        rate = getattr(module, "dropout", 0.0)  # of attention and recurrent layers
        return f"with a dropout rate of {rate:g}" if isinstance(rate, float) and rate > 0 else None
    kind: Any = type(module)  # mypy takes modules for unhashable
    names = _mentioned(kind)
    if "training" in names and "gradient_checkpointing" in names and getattr(module, "gradient_checkpointing", False):
        return "where gradient checkpointing switches the KV cache off"
    rates = {name: value for name in sorted(filter(_RATES.search, names)) for value in _values(name, module, model)}
    is_known = type(module).__module__.startswith(_KNOWN)
    if is_known and "training" not in names:
        return None  # such as one that calls a `Dropout` inside, which is examined separately
    for name, value in rates.items():
        if value > 0:
            return f"with {name}={value:g}"
    if rates or _is_harmless(module, names, is_known):
        return None
    return "and its code depends on that"


def _values(name: str, module: nn.Module, model: PreTrainedModel) -> Iterator[float]:
    """Yield the number that a name in a module's code refers to: its own, or the config's. Modules inside are 0."""
    is_of_config, name = name.startswith(_CONFIG), name.removeprefix(_CONFIG)
    if not is_of_config and name in module._modules:
        yield 0.0
        return
    configs = getattr(module, "config", None), model.config.get_text_config(decoder=True), model.config
    for owner in configs if is_of_config else (module,):
        value = getattr(owner, name, None)
        if isinstance(value, (int, float)):
            yield float(value)
            return


def _is_harmless(module: nn.Module, names: frozenset[str], is_known: bool) -> bool:
    """Tell whether code that mentions no rate computes the same in training mode."""
    if "training" not in names:
        return is_known or not any(map(_RATES.search, names))
    # The flag may be read for gradient checkpointing alone, which is off here.
    return is_known and "gradient_checkpointing" in names


@functools.cache
def _mentioned(kind: type) -> frozenset[str]:
    """Return the names in the code of a class of modules, without those of torch's and transformers' base classes.

    Names of a config's attributes start with `_CONFIG`.
    """
    found: set[str] = set()
    for base in kind.__mro__:
        if base is nn.Module or base.__name__ == "PreTrainedModel" or base.__module__.startswith("ssd_generation."):
            continue
        for name, member in vars(base).items():
            if name not in _NOT_IN_A_PASS and isinstance(function := _function(member), FunctionType):
                found.update(_names(function.__code__))
    return frozenset(found)


def _function(member: Any) -> Any:
    return inspect.unwrap(member) if isinstance(member, FunctionType) else getattr(member, "__func__", None)


def _names(code: CodeType) -> Iterator[str]:
    before = None
    for instruction in dis.get_instructions(code):
        name = instruction.argval if instruction.opcode in dis.hasname else None
        if isinstance(name, str):
            yield _CONFIG + name if before == "config" else name
        before = name
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
