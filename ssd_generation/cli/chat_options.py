"""Option groups of `ssd chat`; the others are those of `ssd generate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from .generate_options import AnswerOptions
from .options import JsonOption

__all__ = ["ChatAnswerOptions", "ChatShowOptions"]


@dataclass(frozen=True)
class ChatAnswerOptions(AnswerOptions):
    """Decoding of the answers, which may be longer than those of `ssd generate` by default."""

    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "--new-tokens", min=1, metavar="N", help="The longest answer, in tokens.")
    ] = 1024
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="A system message before the conversation.")] = None
    chat_template: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A Jinja file, in place of the tokenizer's chat template.",
            dir_okay=False,
        ),
    ] = None


@dataclass(frozen=True)
class ChatShowOptions:
    """Display of an answer."""

    panel: ClassVar[str] = "What to show"

    show_draft: Annotated[
        bool,
        typer.Option(
            "--show-draft/--no-show-draft",
            help="Colour the tokens in a terminal: drafted by the model, looked up, or decided by the target itself.",
        ),
    ] = True
    as_json: JsonOption = False
