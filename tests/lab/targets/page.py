"""The page docs/quantised.md."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import torch

from ssd_generation.support.machine import cpu_name

from ..tables import Notes, as_markdown, counted, versions
from .folders import FOLDERS
from .trial import COLUMNS, NEW_TOKENS, Row

__all__ = ["page"]

_INTRODUCTION = """\
# Quantised models and adapters

One model in every form in which its weights may be held: is its text with `self_speculative=` the text of the same form
without? This page is written by a command; another machine or other versions may give another one:

```bash
python -m tests.lab.targets --model FOLDER --gguf FILE --folders -o docs/quantised.md
```

The columns, {tokens} new tokens each. Low-bit copies are made of what a form's layers compute with, whatever they are
held in. Batches and sampled texts draft from int4 copies and lookup; `"auto"` in the fastest way on this machine; under
`always` the call does not request drafts, and the model drafts by its stored default.

`yes`: nothing was refused, and the text is the same to the token. `no`, with the number of a note below: the library
refuses, by an error or by leaving the text to transformers with a warning. `WRONG`: the text is another one. `crashed`:
any other error. Of adapters, the states follow one another on one model, in the order of the rows.

A pass that verifies several tokens must give each token the logits of a pass over that token alone. The last columns
are the greatest difference between passes over 8 tokens and over one, in standard deviations of the logits, by the
model's own code and as this library runs it; and the parts that run for each token separately for that purpose. For
attention that costs little. Linear layers then take nearly as long as 8 steps, so that drafting hardly pays
([limits.md](limits.md)).
"""

_OF_FOLDERS = """\
Each form saved by `save_pretrained`, and what programs make of the folder: `ssd export` and transformers'
`from_pretrained(…, trust_remote_code=True)`, and `ssd serve`. They draft from int4 copies and lookup. Models spread
over devices or offloaded to the disk are not tried: that is chosen on loading, and servers have no option for it."""


def page(rows: Sequence[Row], model: str, needed: Sequence[str] = ()) -> str:
    """Return all outcomes as a page of Markdown.

    Args:
        rows: rows of the forms and states.
        model: name of the model.
        needed: packages whose versions are listed.
    """
    tried = [row for row in rows if row.untried is None]
    notes = Notes()
    heads = [*COLUMNS.values(), "apart: as it is", "as run", "token by token"]
    table = []
    for row in tried:
        shown = [notes.shown(cell, cell.rstrip("."), row.name) for cell in (row.cells.get(c, "") for c in COLUMNS)]
        apart = ["", ""] if row.apart is None else [f"{distance:.1g}" for distance in row.apart]
        table.append([row.name, *shown, *apart, row.alone or "nothing"])
    installed = []
    for package in needed:
        try:
            installed.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    lines = [
        _INTRODUCTION.format(tokens=NEW_TOKENS),
        "## Counts",
        "",
        f"{', '.join([versions(), *installed])}. {model}, {cpu_name()}, {torch.get_num_threads()} threads.",
        "",
        *counted(COLUMNS, [row.cells for row in tried]),
        "",
        "## Forms",
        "",
        *as_markdown(["form", *heads], table),
    ]
    in_folders = [row for row in tried if row.folders]
    if in_folders:
        table = [
            [row.name, *(notes.shown(row.folders[name], row.folders[name].rstrip("."), row.name) for name in FOLDERS)]
            for row in in_folders
        ]
        lines += ["", "## As a folder", "", _OF_FOLDERS, "", *as_markdown(["form", *FOLDERS.values()], table)]
    if lines_of_notes := notes.lines("Forms"):
        lines += ["", "## Notes", "", *lines_of_notes]
    if untried := [row for row in rows if row.untried is not None]:
        lines += ["", "## Not tried", "", *(f"- {row.name}: {row.untried}." for row in untried)]
    return "\n".join(lines) + "\n"
