"""Output of `ssd chat`: its first lines, answers as they arrive, and the figures of each."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from rich.text import Text

from .compare_view import drafts_from
from .console import err, out, styled
from .generate_view import figures, short_name
from .word_wrap import WordWrap

if TYPE_CHECKING:
    from ..chat.conversation import Turn
    from .generate_run import Draft

__all__ = ["ChatView"]

_PROMPT = "> "
_COMMANDS = (
    ("/reset", "start over; the system message stays"),
    ("/save FILE", "write the conversation as JSON"),
    ("/help", "these lines"),
    ("/exit", "exit, as Ctrl-D does"),
)
_HINTS = (
    "Ctrl-C stops an answer; the part generated so far stays in the conversation. A line that ends in \\ continues on "
    "the next. A space before / makes it part of your message."
)


class ChatView:
    """Display of a conversation in a terminal or a pipe.

    Args:
        is_interactive: whether a user types: then prompts and hints are shown.
        shows_origins: whether to colour each token by its origin, where the terminal has colours.
        is_silent: whether to show no answers.
    """

    def __init__(self, is_interactive: bool, shows_origins: bool, is_silent: bool) -> None:
        self._out, self._err = out(), err()
        self._is_interactive, self._is_silent = is_interactive, is_silent
        self._is_terminal = self._out.is_terminal
        self._shows_origins = shows_origins and self._is_terminal and self._out.color_system is not None
        self._words = WordWrap(self._print)

    def begin(self, model: str, draft: Draft) -> None:
        """Print the model, its draft, and the legend of the colours."""
        if not self._is_interactive:
            return
        self._err.print(styled((short_name(model), "bold"), (f": {_lowered(drafts_from(draft))}", "dim")))
        if self._shows_origins and draft.config.drafting.policy != "none":
            from ..harness.results import DECIDED, DRAFTED, LOOKED_UP, legend

            looked_up = [LOOKED_UP] if draft.config.lookup is not None else []
            self._err.print(legend([DRAFTED, *looked_up, DECIDED], {}, notes=True))
        self.say("/help lists the commands, Ctrl-D exits.")

    def read(self) -> str | None:
        """Return the user's next message; `None` at the end of the input."""
        if not self._is_interactive:
            line = sys.stdin.readline()
            return line.rstrip("\r\n") if line else None
        self._err.print()
        said = self._typed(_PROMPT)
        while said is not None and said.endswith("\\"):
            more = self._typed(". ")
            said = said[:-1] + ("" if more is None else f"\n{more}")
        return said

    def _typed(self, prompt: str) -> str | None:
        with contextlib.suppress(ImportError):  # on Windows, whose terminal provides it
            import readline  # noqa: F401 - gives `input` a history and line editing
        if not self._is_terminal:
            self._err.print(prompt, end="")
            prompt = ""
        try:
            return input(prompt)
        except EOFError:
            self._err.print()
            return None

    def write(self, text: str, origin: str) -> None:
        """Print a piece of an answer; to a pipe, unchanged. `origin` is empty for what no token gave."""
        if self._is_silent:
            return
        if not self._is_terminal:
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        style = ""
        if self._shows_origins and origin:
            from ..harness.results import STYLES

            style = STYLES[origin]
        # `styled` makes control characters visible.
        self._words.add(styled(text).plain, style)

    def _print(self, text: str, style: str) -> None:
        if style:
            self._out.print(Text(text, style=style), end="", soft_wrap=True)
        else:
            self._out.file.write(text)
            self._out.file.flush()

    def end(self, turn: Turn | None) -> None:
        """Print the figures of an answer; `None`: it was stopped before it began."""
        if turn is None:
            self.say("Stopped before the first token: this turn is not part of the conversation.")
            return
        if not self._is_silent:
            self.write("\n", "")
        parts = figures(len(turn.token_ids), turn.seconds, turn.statistics)
        if turn.cached_tokens:
            parts.append(f"{turn.cached_tokens} of {turn.prompt_tokens} prompt tokens from the cache")
        if turn.ended_by != "end":
            parts.append(
                {"stop": "stopped", "length": "cut off by --max-new-tokens or the model's length"}[turn.ended_by]
            )
        line = ("\n" if self._is_interactive else "") + ", ".join(parts) + "."
        self._err.print(line, style="dim", soft_wrap=not self._err.is_terminal)

    def say(self, line: str) -> None:
        """Print a line about the conversation that is not part of it."""
        self._err.print(line, style="dim")

    def help(self) -> None:
        """Print the commands."""
        for name, meaning in _COMMANDS:
            self._err.print(styled((f"{name:<12}", "bold"), meaning))
        self.say(_HINTS)


def _lowered(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]
