"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) in captured passes.

The cache holds a latent of each token, and one rotated key for all heads. The model's own code computes keys and values
of all heads from the latents of the whole text, in each pass. Here the two matrices that do this are applied to the
query and to the result instead (the paper's section 2.1.2), so that attention reads the cache as it is:

    score = (W_k qᵀ) · latent + q_rotated · key,    result = W_v (Σ weight · latent)
"""

from __future__ import annotations

from typing import Any

import torch

from ...native.codegen.compiler import why_not
from ...native.ops.linear import NativeLinear, takes
from .fx_graph import CapturedPass, CopiedWeight

__all__ = ["EXPANSION", "HeadLayers", "from_latent", "into_latent", "use_native_heads"]

EXPANSION = "expand_kv"
"""Method of transformers' layers that computes keys and values from latents."""


def into_latent(query: torch.Tensor, weight: torch.Tensor, values: int) -> torch.Tensor:
    """Apply the matrices of the keys to a query, head by head.

    Args:
        query: `(1, H, n, D)`.
        weight: `(H (D + values), R)`: for each head the matrix of its keys, then that of its values.
        values: size of a head's values.

    Returns:
        `(1, H, n, R)`.
    """
    return torch.matmul(query, _of_keys(weight, query.shape[1], values))


def from_latent(latent: torch.Tensor, weight: torch.Tensor, values: int) -> torch.Tensor:
    """Apply the matrices of the values to sums of latents, head by head: `(1, H, n, R)` ↦ `(1, H, n, values)`."""
    return torch.matmul(latent, _of_values(weight, latent.shape[1], values).transpose(1, 2))


def _of_keys(weight: torch.Tensor, heads: int, values: int) -> torch.Tensor:
    by_head = weight.view(heads, -1, weight.shape[1])
    return by_head[:, : by_head.shape[1] - values]


def _of_values(weight: torch.Tensor, heads: int, values: int) -> torch.Tensor:
    by_head = weight.view(heads, -1, weight.shape[1])
    return by_head[:, by_head.shape[1] - values :]


# ----------------------------------------------------------------------------------------------------------------------
# kernels


class HeadLayers:
    """A linear layer of each head, by JIT-compiled kernels: x `(1, H, n, K)` ↦ `(1, H, n, N)`.

    Args:
        weights: `(H, N, K)`, each head's without gaps.
        activation: type of x and of the result.
    """

    __slots__ = ("columns", "layers", "rows")

    __name__ = "heads"  # in the generated code of a pass

    def __init__(self, weights: torch.Tensor, activation: torch.dtype) -> None:
        self.rows, self.columns = weights.shape[1:]
        self.layers = [NativeLinear(weight, None, activation) for weight in weights.detach()]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layers' outputs."""
        return torch.stack([layer(part) for layer, part in zip(self.layers, x[0], strict=True)])[None]


def use_native_heads(
    captured: CapturedPass, activation: torch.dtype, known: dict[tuple[int, Any], tuple[CopiedWeight, HeadLayers]]
) -> None:
    """Give the matrices of keys and values kernels.

    Args:
        captured: the pass.
        activation: type of its activations.
        known: layers made for passes of other lengths, by weight and function; new ones are added.
    """
    for node in captured.nodes:
        if node.target not in (into_latent, from_latent):
            continue
        x, of_weight, values = node.args
        weight, heads = captured.constant(of_weight), node.meta["shape"][1]
        if weight is None or why_not() is not None or not takes(weight, None):
            continue
        key = id(weight), node.target
        if key not in known:
            known[key] = _made(weight, heads, values, node.target is into_latent, activation)
        copied, layers = known[key]
        if copied.copy is not copied.weight:
            captured.copied_weights.append(copied)
        with captured.graph.inserting_before(node):
            made = captured.graph.call_function(layers, (x,))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        captured.graph.erase_node(node)
    captured.eliminate_dead_code()


def _made(
    weight: torch.Tensor, heads: int, values: int, is_of_keys: bool, activation: torch.dtype
) -> tuple[CopiedWeight, HeadLayers]:
    if not is_of_keys:  # read in place
        return CopiedWeight(weight, weight, lambda of: of), HeadLayers(_of_values(weight, heads, values), activation)

    def of(weight: torch.Tensor) -> torch.Tensor:
        return _of_keys(weight, heads, values).transpose(1, 2).contiguous()

    with torch.no_grad():
        copy = of(weight.detach())
    return CopiedWeight(weight, copy, of), HeadLayers(copy, activation)
