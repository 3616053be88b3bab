"""Griffin's recurrent blocks (recurrent_gemma) in captured passes: a step of a convolution, and one of the RG-LRU.

transformers computes both within a block's own code, and over several tokens by other operations than over one. Here
the block runs by the operations for one token, and its two steps are functions, which become nodes like those of other
states (state_steps.py). (Griffin, De et al., arXiv 2402.19427, section 2.4.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ...support.structure import is_of_transformers

__all__ = ["STATE_OF_BLOCKS", "is_griffin_block", "is_rg_lru", "run_griffin_block"]

STATE_OF_BLOCKS = {"griffin_convolution_step": "conv_state", "rg_lru_step": "state"}
"""Functions that compute one token's step, and the name of the argument that is the state."""

_SCALE = -8.0
"""−c in equation 3 of the paper."""


def is_griffin_block(module: nn.Module) -> bool:
    """Tell whether a module is one of transformers' recurrent blocks of Griffin."""
    return is_of_transformers(module, "RecurrentGemmaRecurrentBlock")


def is_rg_lru(module: nn.Module) -> bool:
    """Tell whether a module is transformers' RG-LRU, a part of such a block."""
    return is_of_transformers(module, "RecurrentGemmaRglru")


def griffin_convolution_step(
    hidden_states: torch.Tensor, conv_state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Multiply the last K tokens by the weights of each channel; the state then holds the last K − 1.

    Args:
        hidden_states: the token, `(B, C, 1)`.
        conv_state: the tokens before it, `(B, C, K − 1)`.
        weight: `(C, K)`.
        bias: `(C,)`.

    Returns:
        `(B, C, 1)`.
    """
    window = torch.cat((conv_state, hidden_states), dim=-1)
    conv_state.copy_(window[..., 1:])
    return (torch.sum(window * weight, dim=-1) + bias).unsqueeze(-1)


def rg_lru_step(hidden_states: torch.Tensor, gate: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Compute a step of a linear recurrence, h ← a h + x, in float32.

    Args:
        hidden_states: x, `(B, 1, C)`.
        gate: a, `(B, 1, C)`.
        state: h, `(B, C)`.

    Returns:
        `(B, 1, C)`, in the type of x.
    """
    state.copy_(gate[:, 0].float() * state + hidden_states[:, 0].float())
    return state[:, None].to(hidden_states.dtype, copy=True)


def run_griffin_block(
    block: Any,
    hidden: torch.Tensor,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    step: Callable[..., torch.Tensor],
) -> tuple[torch.Tensor, None]:
    """Run a recurrent block on a pass's tokens as rows of a batch, of one token each.

    The tokens follow a cached one, so that none is the first of its text, where the recurrence would begin.

    Args:
        block: the block (`is_griffin_block`).
        hidden: hidden states `(1, n, H)`.
        conv_state, state: tensors that represent the block's states.
        step: makes the node of a step from its name, its function and its arguments.

    Returns:
        `(1, n, H)` and `None`, as the block's own forward does.
    """
    tokens, convolution = hidden.transpose(0, 1), block.conv_1d
    branch = block.act_fn(block.linear_y(tokens))
    x = block.linear_x(tokens).transpose(1, 2)
    weight, bias = convolution.weight[:, 0, :], convolution.bias
    x = step("griffin_convolution_step", griffin_convolution_step, x, conv_state, weight, bias)
    x, gate = _gated(block.rg_lru, x.transpose(1, 2))
    x = step("rg_lru_step", rg_lru_step, x, gate, state)
    return block.linear_out(x * branch).transpose(0, 1), None


def _gated(unit: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input of the recurrence and its gate a, both `(n, 1, C)`."""
    starts = range(0, x.shape[-1], unit.block_width)
    heads = [x[..., start : start + unit.block_width].contiguous() for start in starts]

    def gate(weights: torch.Tensor, biases: torch.Tensor) -> torch.Tensor:
        # As linear layers, which have kernels; transformers multiplies all heads at once.
        turned = weights.transpose(1, 2).contiguous()
        parts = [functional.linear(x, turned[at], biases[at]) for at, x in enumerate(heads)]
        return torch.sigmoid(torch.cat(parts, dim=-1))

    input_gate = gate(unit.input_gate_weight, unit.input_gate_bias)
    recurrent_gate = gate(unit.recurrent_gate_weight, unit.recurrent_gate_bias)
    exponent = _SCALE * recurrent_gate * functional.softplus(unit.recurrent_param)
    return x * input_gate * torch.sqrt(-torch.exp(2 * exponent) + 1), torch.exp(exponent)
