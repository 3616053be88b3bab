"""Helpers that all sub-commands share: the two consoles, errors in one line, progress, JSON, and quiet libraries."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from ..support.display import for_json, visible

if TYPE_CHECKING:
    from rich.progress import TextColumn

# Errors of the user or the machine; anything else is a bug in this library and keeps its traceback.
_USER_ERRORS = (ValueError, TypeError, OSError, ImportError, MemoryError)
_LONGEST_LINE = 1_500  # characters of an error message
_PATIENCE = 2.0  # seconds without output
_BETWEEN_LINES = 10.0  # seconds between two lines in a log file
_LINES = "\n\t"  # control characters that a text of several lines may contain


class Screen(Console):
    """Console that treats strings as data: no markup in them, and no control characters that act on the terminal.

    Styles come from a `styled` text, or from `style=` when printing.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Make control characters visible before layout, so that a table cell is as wide as the text shown in it."""
        return super().render_str(visible(text, _LINES), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Make control characters visible in all output; only rich's own control codes may act."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text, _LINES), segment.style)


def out() -> Console:
    """Return the console for results, on stdout."""
    return Screen()


def err() -> Console:
    """Return the console for everything else, on stderr."""
    return Screen(stderr=True)


def styled(*parts: str | tuple[str, str]) -> Text:
    """Build a text of several styles from strings that are data, not markup.

    Args:
        parts: strings, each alone or with its style.
    """
    # Made visible first: rich drops some control characters.
    pairs = [(part, "") if isinstance(part, str) else part for part in parts]
    return Text.assemble(*((visible(text, _LINES), style) for text, style in pairs))


def description(style: str = "none") -> TextColumn:
    """Return the column of a progress bar that describes the current step, without markup."""
    from rich.progress import TextColumn

    return TextColumn("{task.description}", style=style, markup=False)


def debugging() -> bool:
    """Tell whether the user wants tracebacks and the libraries' own messages (`SSD_DEBUG`)."""
    return os.environ.get("SSD_DEBUG", "0") not in ("", "0")


def print_error(error: Exception) -> bool:
    """Print an error of the user or the machine in one line on stderr.

    Returns:
        True for such an error; for any other, False, and nothing is printed.
    """
    is_usage = hasattr(error, "format_message") and hasattr(
        error, "exit_code"
    )  # typer's, which does not export the class
    is_memory = type(error).__name__ == "OutOfMemoryError"  # torch's, which may not be imported
    if not (is_usage or is_memory or isinstance(error, _USER_ERRORS)):
        return False
    if debugging():
        import traceback

        print(visible("".join(traceback.format_exception(error)), _LINES), end="", file=sys.stderr)
    if is_usage:
        message = str(error.format_message())  # type: ignore[attr-defined]
        context = getattr(error, "ctx", None)
        if context is not None:
            end = "" if message.endswith((".", "?")) else "."
            message = f"{message}{end} See `{context.command_path} --help`."
    else:
        # One line, but indented lines stay separate, such as the last output of a program that failed.
        message = re.sub(r"\s*\n(?!\s)", " ", str(error).strip()) or type(error).__name__
    if len(message) > _LONGEST_LINE and "\n" not in message:  # it quotes a very long argument; its end says what to do
        message = f"{message[: _LONGEST_LINE - 300]} … {message[-300:]}"
    # Not wrapped to the terminal's width, so that the message can be copied as one line.
    err().print(styled(("error:", "bold red"), " ", (message, "red")), soft_wrap=True)
    return True


def print_json(document: Any) -> None:
    """Write the one JSON document of a `--json` run to stdout."""
    is_utf8 = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "") == "utf8"
    text = json.dumps(document, indent=2, ensure_ascii=not is_utf8, allow_nan=False)
    sys.stdout.write(for_json(text) + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence transformers' progress bars and advice, and Python warnings, unless `SSD_DEBUG=1`."""
    if debugging():
        yield
        return
    from transformers.utils import logging as transformers_logging

    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    others = [logging.getLogger(name) for name in ("huggingface_hub", "torch", "accelerate")]
    levels = [logger.level for logger in others]
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for logger in others:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(others, levels, strict=True):
            logger.setLevel(level)
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def at_work(as_json: bool) -> Iterator[None]:
    """Silence libraries during a command's work; with `--json`, keep stdout free for the document printed later."""
    with quiet_libraries(), contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def resumable(folder: Path, kept: Callable[[], str]) -> Iterator[None]:
    """Let Ctrl-C end a run into a folder with status 130 and a line that says how to resume it.

    Args:
        folder: folder of the run.
        kept: function that describes what has been stored, called on Ctrl-C.
    """
    try:
        yield
    except KeyboardInterrupt:
        line = f"Interrupted. {kept()}; the same command with --output {folder} continues from there."
        err().print(line, soft_wrap=True)
        raise typer.Exit(130) from None


@contextlib.contextmanager
def said_after_a_while(line: str) -> Iterator[None]:
    """Print a line on stderr if the block takes longer than two seconds."""
    timer = threading.Timer(_PATIENCE, lambda: print(line, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def measuring() -> Iterator[None]:
    """Show the library's own bars (transformers' tqdm, on stderr) while it measures costs; in a log file, a line."""
    from transformers.utils import logging as transformers_logging

    from ..support.progress import with_bars

    if debugging():
        with with_bars():
            yield
        return
    if not err().is_terminal:
        with said_after_a_while("Measuring what drafting costs here, once per model and machine."):
            yield
        return
    transformers_logging.enable_progress_bar()
    try:
        with with_bars():
            yield
    finally:
        transformers_logging.disable_progress_bar()


@contextlib.contextmanager
def progress(title: str, total: int | None = None) -> Iterator[Callable[[str], None]]:
    """Show a progress bar on stderr; where that is no terminal, print lines once it takes longer than two seconds.

    Args:
        title: description of the work.
        total: number of steps; `None` for a spinner.

    Yields:
        A function to call with the name of each step as it begins.
    """
    console, done = err(), itertools.count()
    if not console.is_terminal:
        lines = LogLines(_PATIENCE)

        def line(name: str) -> None:
            of = f" {next(done)}/{total}" if total is not None else ""
            lines.say(f"{title}{of}: {name}")

        yield line
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TimeElapsedColumn

    columns = [SpinnerColumn(), description()]
    if total is not None:
        columns += [BarColumn(bar_width=20), MofNCompleteColumn()]
    # transient: finished work is not worth a line.
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task(title, total=total)

        def step(name: str) -> None:
            completed = next(done) if total is not None else None
            bar.update(task, description=f"{title}: {name}" if name else title, completed=completed)

        yield step


class Announcement:
    """Line on stderr, printed once, when a run begins. A run that fails before that prints none.

    Args:
        line: line to print; `None`: nothing.
    """

    def __init__(self, line: str | None) -> None:
        self.line = line

    def say(self) -> None:
        """Print the line on the first call."""
        line, self.line = self.line, None
        if line is not None:
            err().print(line, style="dim", soft_wrap=True)


class LogLines:
    """Progress where stderr is no terminal: lines at intervals.

    Args:
        patience: least number of seconds between two lines; `None`: ten.
    """

    def __init__(self, patience: float | None = None) -> None:
        self.patience = _BETWEEN_LINES if patience is None else patience
        self.last_line = time.monotonic()

    def say(self, line: str, at_once: bool = False) -> None:
        """Print the line if `at_once`, or if none was printed during the last `patience` seconds."""
        if at_once or time.monotonic() - self.last_line >= self.patience:
            self.last_line = time.monotonic()
            print(visible(line), file=sys.stderr, flush=True)
