"""The page docs/models.md."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ssd_generation.support.display import for_markdown
from ssd_generation.support.messages import clipped

from ..tables import WRONG, YES, Notes, as_markdown, counted, versions
from .models import KINDS_OF_MODELS, known_families
from .sizes import LAYERS
from .trial import COLUMNS, NEW_TOKENS, ONE_TEXT, PICTURES, Row

__all__ = ["page"]

_INTRODUCTION = """\
# Models

Every family of causal language models and of image-text models that transformers knows, as a tiny random model: is its
text with `self_speculative=` that of plain `generate`? This page is written by a command, and a later transformers or
another version of this library may give another one:

```bash
python -m tests.lab.families -o docs/models.md
```

A family is built from its config class with {layers} layers and sizes of a few dozen, in float32 on a CPU. That tries
its layers, its cache and its masks, with windows and chunks of attention that are shorter than the text. It says
nothing of speed, which trained weights decide. Models are recognised by the shape of their layers, not by name, and
[checked](how-it-works.md#the-check-of-the-model) before they first draft; [limits.md](limits.md) has what does not work
with any model.

Image-text models (`AutoModelForImageTextToText`) are given a prompt with a random picture in it, where pixels in one of
the shapes that are known here make a difference to what the model says. A family that transformers has in both lists is
in both tables; among the causal ones it is given text alone.

The columns, {tokens} new tokens each:

- **nothing drafted**: every token is a plain step of this library's loop.
- **lookup**: drafts from what the text holds already.
- **low bits**: drafts from int8 copies of the weights.
- **skipping**: the draft leaves out one attention, or what is in its place, and one MLP, if any.
- **batch**: lookup, with two prompts of unlike lengths, padded at the left.
- **sampling**: drafts from int8 copies and lookup, the same seed in both calls. Where there are no int8 copies, lookup.
- **captured**: whether passes after the prompt are [captured](how-it-works.md#captured-passes) on a CPU with
  JIT-compiled kernels, which makes them fast: of single texts and batches, of `one text` only, or `no`: they run by the
  model's own code, with kernels in its linear layers.

`yes`: nothing was refused, and the text is the same to the token. `no`, with the number of a note below: the library
refuses, by an error or by leaving the text to transformers with a warning. `WRONG`: the text is another one. `crashed`:
any other error.
"""


def _reason(row: Row, cell: str) -> str:
    """Return the reason in a cell, without the names that differ from family to family."""
    text = cell.replace(row.name, "The model")
    text = re.split(r"\.? No sub-layers of this model can be skipped|: skipping it would not be safe", text)[0]
    text = re.sub(r" \([A-Z]\w+\)| \(they lie .* apart\)", "", text)
    text = re.sub(r"one list of \d+ decoder layers", "one list of its decoder layers", text)
    text = text.replace("Layer 0 has parts", "A layer has parts").rstrip(".")
    return text[:1].upper() + text[1:]


def _first_sentence(text: str) -> str:
    sentence = re.split(r"(?<=\w\w)\. ", text)[0]
    return clipped(sentence).rstrip(".")


def page(rows: Sequence[Row]) -> str:
    """Return all outcomes as a page of Markdown.

    Args:
        rows: a row for each family, in any order.

    Returns:
        The page: introduction, versions, counts, a table for each kind of models, their notes, which prompts held no
        picture, and the families that could not be tried.
    """
    rows = sorted(rows, key=lambda row: (row.kind, row.family))
    tried = [row for row in rows if row.untried is None]
    notes = Notes()

    def number_of(*columns: str, of: Sequence[Row] = tried) -> int:
        return sum(all(row.cells.get(column) == YES for column in columns) for row in of)

    def captured(how: str) -> int:
        return sum(row.captured == how for row in tried)

    known = {kind: len(known_families(kind)) for kind in KINDS_OF_MODELS}
    asked = "" if len(rows) == sum(known.values()) else f" Only {len(rows)} were asked for."
    refused = sum(row.count("refused") == len(COLUMNS) for row in tried)
    shown = [row for row in tried if row.picture in PICTURES]
    lossless = {(row.family, row.name) for row in tried if row.cells.get("lookup") == row.cells.get("batch") == YES}
    lines = [
        _INTRODUCTION.format(layers=LAYERS, tokens=NEW_TOKENS),
        "## Counts",
        "",
        f"{versions()}. This transformers knows {known['causal']} families of causal and {known['image-text']} of "
        f"image-text models.{asked}",
        "",
        f"- Tried: {len(tried)}. Not tried, since there is no tiny model of it or plain `generate` fails: "
        f"{len(rows) - len(tried)}.",
        f"- The same text, one prompt: {number_of('nothing', 'lookup')} with lookup; "
        f"{number_of(*COLUMNS)} in every column.",
        f"- The same text, a batch: {number_of('batch')}.",
        f"- The same text, one prompt and a batch, a class that is in both lists counted once: {len(lossless)}.",
        f"- With a picture in the prompt: {len(shown)} tried; the same text with lookup: "
        f"{number_of('lookup', of=shown)}, in a batch: {number_of('batch', of=shown)}.",
        f"- Refused in every column: {refused}.",
        f"- Captured passes: {captured(YES) + captured(ONE_TEXT)} families, of batches too: {captured(YES)}.",
        f"- Families with another text (`WRONG`): {sum(row.count(WRONG) > 0 for row in tried)}; with a crash: "
        f"{sum(row.count('crashed') > 0 for row in tried)}.",
        "",
        *counted(COLUMNS, [row.cells for row in tried]),
        "",
        "## Families",
        "",
        *_table([row for row in tried if row.kind == "causal"], notes),
        "",
        "## Image-text families",
        "",
        "**picture**: whether there was one in the prompt. In the batch it is in one row of two; `in both`: the model "
        "wants one in each row.",
        "",
        *_table([row for row in tried if row.kind == "image-text"], notes),
    ]
    if lines_of_notes := notes.lines("Families"):
        lines += ["", "## Notes", "", *lines_of_notes]
    without = [row for row in tried if row.kind == "image-text" and row.picture not in (*PICTURES, None)]
    if without:
        lines += ["", "## Without a picture", ""]
        lines.append(
            f"Given text alone, since no shape of pixels is known here: {', '.join(row.family for row in without)}."
        )
    untried = [row for row in rows if row.untried is not None]
    if untried:
        lines += ["", "## Not tried", ""]
        lines += [
            f"- {row.family} ({row.name}): {for_markdown(_first_sentence(row.untried or ''))}." for row in untried
        ]
    return "\n".join(lines) + "\n"


def _why_not_captured(reason: str) -> str:
    """Return a note on passes that are not captured; errors are those of a model's own code while it is recorded."""
    reason = reason.rstrip(".")
    if re.match(r"\w+Error: ", reason) is None:
        return f"Not captured: {reason}"
    reason = re.sub("a PretendLayer|'PretendLayer' object", "a layer of the stand-in cache", reason)
    return f"Not captured: its code fails while a pass is recorded ({reason})"


def _table(rows: Sequence[Row], notes: Notes) -> list[str]:
    """Return the lines of a table; add reasons to the notes, with the families that they apply to."""
    with_picture = any(row.kind == "image-text" for row in rows)
    headings = ["family", "class", *(["picture"] if with_picture else []), *COLUMNS.values(), "captured"]
    lines = []
    for row in rows:
        shown = [row.family, row.name]
        if with_picture:
            shown.append(row.picture or "" if row.picture in (*PICTURES, None) else "no")
        cells = [row.cells.get(column, "") for column in COLUMNS]
        shown += [notes.shown(cell, _reason(row, cell), row.family) for cell in cells]
        how = row.captured or ""
        shown.append(how if how in ("", ONE_TEXT) else notes.shown(how, _why_not_captured(how), row.family))
        lines.append(shown)
    return as_markdown(headings, lines)
