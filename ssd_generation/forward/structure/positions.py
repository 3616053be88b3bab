"""Tables of positions: a text ends where the model has no row for the next token.

Rotary embeddings are computed for any position. A learned embedding, or a precomputed table of sines, has a fixed
number of rows: a pass that reaches beyond them fails, and on a GPU takes the process' context along. So drafts, and the
texts on which this library tests a model, end at the last row.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torch import nn

from ...support.once import looked_at_once

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["cut_to_table", "most_positions"]

_TABLE = re.compile(r"pos|wpe", re.IGNORECASE)
"""Pattern in the name of a module or buffer that holds a table."""

_LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_target_positions", "max_seq_len")
"""Names of the number of its rows in configs."""


@looked_at_once
def most_positions(model: PreTrainedModel) -> int | None:
    """Return the most tokens that a text may have by the model's table of positions; `None` where it has none.

    A table is recognised by its name and by its rows: as many as the config says, and a few more in families that
    leave out the first ones.

    Args:
        model: the target model.
    """
    config = model.config.get_text_config(decoder=True)
    lengths = {value for name in _LENGTHS if type(value := getattr(config, name, None)) is int}
    if not lengths:
        return None
    tokens = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    found: list[int] = []
    top: nn.Module = model.get_decoder() or model
    for name, module in top.named_modules():
        if isinstance(module, nn.Embedding):
            if id(module) not in tokens and _TABLE.search(name.rpartition(".")[2]):
                found += _rows_of(module, lengths)
            continue
        # As in mpt: biases by distance, computed for a fixed number of tokens.
        if (longest := module.__dict__.get("max_seq_length")) in lengths:
            found.append(longest)
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.ndim == 2 and buffer.shape[0] in lengths and _TABLE.search(key):
                found.append(buffer.shape[0])
    return min(found, default=None)


def _rows_of(table: nn.Embedding, lengths: set[int]) -> list[int]:
    """Return the positions that a table has rows for; none where its size is no known length, as of image patches."""
    offset: Any = getattr(table, "offset", None)
    if type(offset) is not int:  # roberta's starts after the row of padding
        offset = 0 if table.padding_idx is None else table.padding_idx + 1
    rows = table.num_embeddings
    return [rows - offset] if rows in lengths or rows - offset in lengths else []


def cut_to_table(model: PreTrainedModel, wanted: int, following: int = 0) -> int:
    """Return the length of a text of this library's own: as wanted, or what the model has positions for.

    Args:
        model: the target model.
        wanted: tokens where the model has no table of positions.
        following: tokens that must fit after them.

    Returns:
        The number, at least 1.
    """
    most = most_positions(model)
    return wanted if most is None else max(min(wanted, most - following), 1)
