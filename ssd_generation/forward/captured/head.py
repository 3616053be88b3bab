"""Captured passes without the model's head, and the head by itself.

A pass that reads a prompt computes no logits. Those of its last token come from the input of the head.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from .capture import CannotCapture
from .fx_graph import CapturedPass
from .rewrites import linear_weight

__all__ = ["leave_out_head", "only_head"]


def leave_out_head(captured: CapturedPass, head: nn.Module | None) -> None:
    """Make a pass return the input of the head, `(1, n, H)`, which is not computed.

    Args:
        captured: the pass.
        head: the model's output embeddings.

    Raises:
        CannotCapture: the logits are not computed from the head's output alone.
    """
    captured.nodes[-1].args = (_input_of_head(captured, head),)
    captured.eliminate_dead_code()


def only_head(captured: CapturedPass, head: nn.Module | None) -> None:
    """Make a pass take the input of the head, `(1, n, H)`, as its only argument, and compute the logits from it.

    Args:
        captured: the pass.
        head: the model's output embeddings.

    Raises:
        CannotCapture: the logits are not computed from the head's output alone.
    """
    its_input, first = _input_of_head(captured, head), captured.nodes[0]
    with captured.graph.inserting_before(first):
        given = captured.graph.placeholder("hidden")
    given.meta = {**its_input.meta, "is_view": False}
    its_input.replace_all_uses_with(given)
    read = {captured.nodes[-1], given}
    for node in reversed(captured.nodes):
        if node in read:
            read.update(node.all_input_nodes)
        else:
            captured.graph.erase_node(node)


def _input_of_head(captured: CapturedPass, head: nn.Module | None) -> Any:
    """Return the node of the head's input."""
    output = captured.nodes[-1]
    node = output.args[0]
    while (layer := linear_weight(captured, node)) is None:
        if len(node.all_input_nodes) == 0 or node.meta.get("shape") != output.args[0].meta.get("shape"):
            raise CannotCapture("the pass does not end with the head")
        node = node.all_input_nodes[0]
    if head is None or layer[0] is not getattr(head, "weight", None):
        raise CannotCapture("the logits come from something other than the head")
    return node.args[0]
