"""Calls of so few new tokens that preparing drafts takes longer than drafting can save."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..forward.structure.expert_layers import experts_of, native_experts
from ..support.model_state import Part, state_of
from ..support.structure import modules_of
from .plan_passes import runs_own_code
from .speedup import seconds_saved

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..config import SelfSpeculativeConfig

__all__ = ["FEW", "ShortCallsPart", "is_known_short", "is_short_for"]

_SECONDS_PER_MODULE = 6e-5
"""Time of a call's preparation: 28 ms for the 460 modules of SmolLM2-135M, on an AMD EPYC (Milan). A constant:
with stored costs no decision depends on the clock."""

FEW = 8
"""New tokens up to which a call may be short. In longer ones prompt lookup may save more than stored costs predict."""


class ShortCallsPart(Part):
    """Length of a model's longest call, in new tokens, that was found to be too short for drafts."""

    def __init__(self) -> None:
        self.longest = 0


def is_known_short(model: PreTrainedModel, new_tokens: int) -> bool:
    """Tell whether an earlier call found that so few tokens do not pay, so that the next one prepares nothing.

    Args:
        model: the target model.
        new_tokens: number of tokens that the call requests.
    """
    return new_tokens <= state_of(model).get(ShortCallsPart).longest


def is_short_for(model: PreTrainedModel, config: SelfSpeculativeConfig, new_tokens: int) -> bool:
    """Tell whether drafting saves less time than its preparation takes, for so few tokens.

    Captured passes, CUDA graphs and kernels for experts are faster than the model's own code without any draft: with
    them no call is short.

    Args:
        model: the target model.
        config: config of `self_speculative="auto"`, with the costs measured on this machine.
        new_tokens: number of tokens that the call requests.
    """
    part = state_of(model).get(ShortCallsPart)
    part.longest = 0
    if config.costs is None or not runs_own_code(model) or any(map(native_experts, experts_of(model)[:1])):
        return False
    saved_per_token = seconds_saved(config)
    preparation = _SECONDS_PER_MODULE * len(modules_of(model))
    # The first token comes from the prompt.
    part.longest = max((n for n in range(1, FEW + 1) if (n - 1) * saved_per_token < preparation), default=0)
    return new_tokens <= part.longest
