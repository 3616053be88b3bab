"""User code that draws random numbers in the middle of a call.

The noise of a sampled call is drawn ahead. So with a logits processor, a stopping criterion or a streamer that draws
from torch's own generator, the text would differ from that of plain `generate` for the same seed: it is refused. So is,
in any call, a processor that declares that it may be called for drafted tokens, and draws. One with a generator of its
own goes unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .refusals import CannotDraft

__all__ = ["is_foreign", "no_draws", "state_of_generators"]


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that notes draws from torch's own generators, in this thread alone."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            self.found = str(func)
        return func(*args, **kwargs)


@contextmanager
def no_draws(users: Iterable[object]) -> Iterator[None]:
    """Run code that must not draw random numbers from torch's own generators.

    Args:
        users: objects whose code runs, for the message.

    Raises:
        CannotDraft: the code draws random numbers.
    """
    with _Watch() as watch:
        yield
    if watch.found is not None:
        names = ", ".join(dict.fromkeys(type(user).__name__ for user in users))
        raise CannotDraft(
            f"{names} draws random numbers from torch's own generator ({watch.found}), and drafting changes how often "
            "and in which order it is called. Give it a `torch.Generator` of its own, or "
            "leave `self_speculative` out."
        )


def is_foreign(user: object) -> bool:
    """Tell whether a processor, criterion or streamer belongs to neither transformers nor this library."""
    module = str(getattr(user, "__module__", type(user).__module__))  # of a function, of an object's class
    return module.partition(".")[0] not in ("transformers", __package__.partition(".")[0])


def state_of_generators(device: torch.device) -> bytes:
    """Return the state of torch's own generators for the CPU and a device, which changes when any thread draws."""
    state = torch.default_generator.get_state().numpy().tobytes()
    if device.type != "cpu":
        state += torch.get_device_module(device).get_rng_state(device).cpu().numpy().tobytes()
    return state
