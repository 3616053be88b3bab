"""What all sub-commands share: the two consoles, errors in one line, progress, JSON, and quiet libraries."""

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

# Faults of what was asked for, or of the machine; anything else is a fault of this library and keeps its traceback.
_USER_ERRORS = (ValueError, TypeError, OSError, ImportError, MemoryError)
_LONGEST_LINE = 1_500  # characters of an error
_PATIENCE = 2.0  # seconds without a word
_BETWEEN_LINES = 10.0  # seconds between two lines in a log file
_LINES = "\n\t"  # of a text of several lines


class Screen(Console):
    """A console to which strings are data: nothing in them is markup, and nothing in them acts on the terminal.

    What has a style is a `styled` text, or is printed with `style=`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """A string as rich shows it, before it is laid out: in a table, a cell is as wide as what is seen of it."""
        return super().render_str(visible(text, _LINES), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """All that is written passes here; only rich's own control codes may act."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text, _LINES), segment.style)


def out() -> Console:
    """The console for results."""
    return Screen()


def err() -> Console:
    """The console for everything else."""
    return Screen(stderr=True)


def styled(*parts: str | tuple[str, str]) -> Text:
    """A text of several styles, to which strings are data.

    Args:
        parts: strings, each by itself or with its style.
    """
    # rich would leave some control characters out, so that nobody saw them.
    pairs = [(part, "") if isinstance(part, str) else part for part in parts]
    return Text.assemble(*((visible(text, _LINES), style) for text, style in pairs))


def description(style: str = "none") -> TextColumn:
    """The column of a progress bar that says what is being done, to which that is data."""
    from rich.progress import TextColumn

    return TextColumn("{task.description}", style=style, markup=False)


def debugging() -> bool:
    """Whether the user asked for tracebacks and the libraries' own messages."""
    return os.environ.get("SSD_DEBUG", "0") not in ("", "0")


def print_error(error: Exception) -> bool:
    """Say what was wrong, in one line on stderr.

    Returns:
        Whether it was a mistake that can be said in a line; else nothing was printed.
    """
    is_usage = hasattr(error, "format_message") and hasattr(
        error, "exit_code"
    )  # of typer, which does not export the class
    is_memory = type(error).__name__ == "OutOfMemoryError"  # of torch, which may not be loaded
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
        # One line; what is indented was meant to stand by itself, such as the last words of a program that failed.
        message = re.sub(r"\s*\n(?!\s)", " ", str(error).strip()) or type(error).__name__
    if len(message) > _LONGEST_LINE and "\n" not in message:  # an argument without end is in it; what to do stands last
        message = f"{message[: _LONGEST_LINE - 300]} … {message[-300:]}"
    # Not wrapped to the terminal: a message is a line to copy.
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
    """Without transformers' progress bars and advice, and without Python warnings, unless `SSD_DEBUG=1`."""
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
    """Around a command's work: quiet libraries, and with `--json` nothing on stdout but the document printed later."""
    with quiet_libraries(), contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def resumable(folder: Path, kept: Callable[[], str]) -> Iterator[None]:
    """Around a run into a folder: Ctrl-C ends it with status 130, and a line that says how to go on with it.

    Args:
        folder: of the run.
        kept: says what has been kept, when it comes to that.
    """
    try:
        yield
    except KeyboardInterrupt:
        line = f"Interrupted. {kept()}; the same command with --output {folder} goes on from there."
        err().print(line, soft_wrap=True)
        raise typer.Exit(130) from None


@contextlib.contextmanager
def measuring() -> Iterator[None]:
    """With the library's own bars (transformers' tqdm, on stderr) while costs are measured; in a log file a line."""
    from transformers.utils import logging as transformers_logging

    if debugging():
        yield
        return
    if not err().is_terminal:
        line = "Measuring what drafting costs here, once per model and machine."
        timer = threading.Timer(_PATIENCE, lambda: print(line, file=sys.stderr, flush=True))
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
        return
    transformers_logging.enable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.disable_progress_bar()


@contextlib.contextmanager
def progress(title: str, total: int | None = None) -> Iterator[Callable[[str], None]]:
    """A progress bar on stderr; where that is no terminal, a line now and then once it takes longer than two seconds.

    Args:
        title: what is being done.
        total: number of steps; `None` for a spinner.

    Yields:
        A function to call with the name of each step as it begins.
    """
    console = err()
    if not console.is_terminal:
        lines, done = LogLines(_PATIENCE), itertools.count()

        def line(name: str) -> None:
            of = f" {next(done)}/{total}" if total is not None else ""
            lines.say(f"{title}{of}: {name}")

        yield line
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TimeElapsedColumn

    columns = [SpinnerColumn(), description()]
    if total is not None:
        columns += [BarColumn(bar_width=20), MofNCompleteColumn()]
    # transient: what is done is not worth a line.
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task(title, total=total, completed=-1 if total is not None else 0)

        def step(name: str) -> None:
            bar.update(task, description=f"{title}: {name}" if name else title, advance=1 if total is not None else 0)

        yield step


class Announcement:
    """A line on stderr, printed once, when a run begins. A run that fails before that prints none.

    Args:
        line: to print; `None`: nothing.
    """

    def __init__(self, line: str | None) -> None:
        self.line = line

    def say(self) -> None:
        """Print it, the first time."""
        line, self.line = self.line, None
        if line is not None:
            err().print(line, style="dim", soft_wrap=True)


class LogLines:
    """Progress where stderr is no terminal: a line now and then.

    Args:
        patience: seconds without a word; `None`: ten.
    """

    def __init__(self, patience: float | None = None) -> None:
        self.patience = _BETWEEN_LINES if patience is None else patience
        self.last_line = time.monotonic()

    def say(self, line: str, at_once: bool = False) -> None:
        """Print the line, unless one was printed a moment ago."""
        if at_once or time.monotonic() - self.last_line >= self.patience:
            self.last_line = time.monotonic()
            print(visible(line), file=sys.stderr, flush=True)
