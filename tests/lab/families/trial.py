"""Trial of one family: comparison of its self-speculative texts with its plain ones."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

from ssd_generation.cache.recurrent import has_states_alone
from ssd_generation.config import Costs, DraftingConfig, LookupConfig, SelfSpeculativeConfig, SkipConfig
from ssd_generation.forward.captured import passes as captured_passes
from ssd_generation.forward.captured.batch_invariance import NATIVE, WIDTHS, BatchInvariance
from ssd_generation.forward.captured.conditions import why_no_batch_captured, why_not_captured
from ssd_generation.forward.captured.passes import captured_target
from ssd_generation.forward.structure.sublayers import layout_of
from ssd_generation.generation import enable_self_speculative

from ..tables import YES, is_refusal, judged, kind_of, short
from .models import Kind, build, class_name, on_meta, prompts, tiny_config
from .pictures import find_picture
from .sizes import LAYERS

__all__ = ["COLUMNS", "NEW_TOKENS", "ONE_TEXT", "PICTURES", "Row", "how_captured", "try_family"]

NEW_TOKENS = 28
"""New tokens of a text: enough to exceed sliding windows and chunks of attention (8 tokens) after the prompt, too."""

PICTURES = (YES, "in both")
ONE_TEXT = "one text"

COLUMNS = {
    "nothing": "nothing drafted",
    "lookup": "lookup",
    "low bits": "low bits",
    "skipping": "skipping",
    "batch": "batch",
    "sampling": "sampling",
}
"""Ways to draft that each family is tried with, and the headings of their columns."""


@dataclass
class Row:
    """Outcome of one family.

    Attributes:
        family: model type.
        name: class of the model.
        cells: outcomes by column of `COLUMNS`: "yes", "WRONG", "crashed: …", or the reason of a refusal.
        untried: reason why nothing could be tried, if so: no tiny model can be made, or its plain `generate` fails.
        drafted: numbers of drafted tokens by column.
        kind: "causal" or "image-text".
        captured: whether its passes are captured on a CPU: "yes", "one text" (not those of a batch), or the reason why
            they are not; `None` where that was not tried.
        picture: prompts of an image-text model that have a picture: "yes" (in the batch one of two), "in both" (in the
            batch both of them), or the reason why none has.
    """

    family: str
    name: str
    cells: dict[str, str] = field(default_factory=dict)
    untried: str | None = None
    drafted: dict[str, int] = field(default_factory=dict)
    kind: Kind = "causal"
    picture: str | None = None
    captured: str | None = None

    def count(self, kind: str) -> int:
        """Count the cells of a kind: "yes", "refused", "WRONG" or "crashed"."""
        return sum(kind_of(cell) == kind for cell in self.cells.values())


def _skipped(model: Any) -> SkipConfig:
    """Return a skip set of one attention (or what replaces it) and one MLP, or of one of them; else a refused one."""
    attentions, mlps = ([at % LAYERS for at in range(first, first + LAYERS)] for first in (1, 2))
    both = [SkipConfig(attention=[one], mlp=[other]) for one, other in itertools.product(attentions, mlps)]
    alone = [SkipConfig(**{kind: [one]}) for kind, ones in (("attention", attentions), ("mlp", mlps)) for one in ones]
    for skip in (*both, *alone):
        with contextlib.suppress(ValueError):
            layout_of(model).stubs(skip)
            return skip
    return both[0]


def _requests(low_bits: bool, skip: SkipConfig) -> dict[str, tuple[SelfSpeculativeConfig, dict[str, Any]]]:
    """Return, by column, the request and other options of the call. Costs are given, so that none are measured."""
    costs = Costs(plain_step=1.0, draft_step=0.1, verify=[(1, 1.0), (16, 1.1)])
    fixed = DraftingConfig(policy="fixed", max_draft_length=4)
    lookup = LookupConfig()

    def config(**fields: Any) -> SelfSpeculativeConfig:
        # Bitwise exactness takes long to check and is not requested: a text depends on it at a tie only.
        return SelfSpeculativeConfig(**{"drafting": fixed, "costs": costs, "exactness": "numeric", **fields})

    greedy = {"do_sample": False}
    sampled = {"do_sample": True, "temperature": 0.9, "top_k": 0}
    return {
        "nothing": (config(drafting=DraftingConfig(policy="none")), greedy),
        "lookup": (config(lookup=lookup), greedy),
        "low bits": (config(precision="int8"), greedy),
        "skipping": (config(skip=skip), greedy),
        "batch": (config(lookup=lookup), greedy),
        # Low-bit drafts are often accepted, so that some rounds end in acceptance and others in rejection.
        "sampling": (config(precision="int8", lookup=lookup) if low_bits else config(lookup=lookup), sampled),
    }


def try_family(family: str, columns: Sequence[str] = tuple(COLUMNS), kind: Kind = "causal") -> Row:
    """Build a family's tiny model and compare its self-speculative texts with its plain ones, in this process.

    Args:
        family: a model type, such as "llama".
        columns: columns of `COLUMNS` to try.
        kind: kind of model: which of the family's classes.

    Returns:
        The row, whose cells report what goes wrong; nothing is raised.
    """
    row = Row(family, class_name(family, kind), kind=kind)
    options = {"max_new_tokens": NEW_TOKENS, "eos_token_id": None, "pad_token_id": 0}
    plain: dict[str, torch.Tensor] = {}

    def text(column: str, **extra: Any) -> torch.Tensor:
        inputs = both if column == "batch" else single
        torch.manual_seed(2)
        return model.generate(**inputs, **options, **extra)  # type: ignore[no-any-return]

    problem = "no tiny model can be built"
    try:
        if (refusal := _refusal_of_class(family, kind)) is not None:
            row.cells = dict.fromkeys(columns, refusal)
            return row
        model: Any = build(family, kind)
        single, both = _inputs(model, row)
        problem = "plain `generate` fails"
        first = model.generate(**single, **options, do_sample=False, output_logits=True, return_dict_in_generate=True)
        problem = "nothing can be compared"
        if any(logits.isnan().any() for logits in first.logits):
            raise ValueError("the logits of its random weights are not numbers")
        if not torch.equal(first.sequences, text("nothing", do_sample=False)):
            raise ValueError("plain `generate` does not give the same text twice")
    except Exception as error:
        # The message of a validator is of interest, not its name.
        message = re.sub(r"^.*ValueError: ", "", f"{type(error).__name__}: {error}", flags=re.DOTALL)
        row.untried = f"{problem}: {short(message)}"
        return row
    skip = _skipped(model) if "skipping" in columns else SkipConfig()
    for column in columns:
        request, extra = _requests(row.cells.get("low bits", YES) == YES, skip)[column]
        try:
            plain[column] = text(column, **extra)
        except Exception as error:  # some models cannot take padding
            row.cells[column] = "plain `generate` fails: " + short(f"{type(error).__name__}: {error}")
            continue

        def decode(extra: dict[str, Any] = extra, column: str = column, request: Any = request) -> torch.Tensor:
            enable_self_speculative(model)
            return text(column, **extra, self_speculative=request)

        row.cells[column], row.drafted[column] = judged(model, plain[column], decode)
    if tuple(columns) == tuple(COLUMNS) and YES in row.cells.values():
        row.captured = how_captured(model)
    return row


def how_captured(model: Any) -> str:
    """Return whether passes of an enabled model are captured, as in `Row.captured`."""
    if (reason := why_not_captured(model)) is not None:
        return short(reason)
    passes = captured_target(model, BatchInvariance(NATIVE, WIDTHS))
    assert passes is not None
    # Heads of a few numbers are uneven on some processors; those of models that are used are not.
    with patch.object(captured_passes, "uneven", return_value=None):
        programs = [passes.program(tokens) for tokens in (1, 4)]
    if programs[0] is None or programs[1] is None:
        return short((passes.refusal or "its passes over several tokens are not").removeprefix("CannotCapture: "))
    # Rows at their own speed have positions of their own, unless the model has states alone.
    is_placed = has_states_alone(model) or "position_ids" in inspect.signature(model.forward).parameters
    is_batch = programs[1].attends_by_kernels and is_placed and why_no_batch_captured(model) is None
    return YES if is_batch else ONE_TEXT


def _refusal_of_class(family: str, kind: Kind) -> str | None:
    """Return the reason for which an encoder-decoder is refused, whatever its sizes; `None` for all others."""
    if not tiny_config(family).is_encoder_decoder:
        return None
    try:
        with torch.device("meta"):
            enable_self_speculative(on_meta(family, kind))
    except ValueError as error:
        return short(error) if is_refusal(error) else None
    return None


def _inputs(model: Any, row: Row) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the inputs of a single call and of a batch; set in the row whether there is a picture in them."""
    picture = None
    if row.kind == "image-text":
        try:
            picture = find_picture(model)
        except ValueError as error:
            row.picture = short(error)
    both = prompts(picture)
    if picture is None:
        return {key: value[:1] for key, value in both.items()}, both
    along = ("input_ids", "attention_mask", *picture.along)
    single = {key: value[:1] if key in along else value for key, value in both.items()}
    row.picture = YES
    try:
        model.generate(**both, max_new_tokens=1, do_sample=False)
    except Exception:  # each row has to have one
        both, row.picture = prompts(picture, in_both=True), "in both"
    return single, both
