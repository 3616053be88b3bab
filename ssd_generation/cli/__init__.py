"""Command line `ssd`. Each sub-command imports its dependencies only when it runs."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run `ssd` and exit the process.

    Exit status: 0 for success, 1 for a bug in this library (with its traceback) or a closed stdout, 2 for an error of
    the user or the machine (one line on stderr; with `SSD_DEBUG=1` its traceback too), 130 after Ctrl-C.

    Args:
        arguments: command-line arguments; `None`: those of the process.
    """
    sys.exit(_run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # Print a question mark for a character that the terminal's encoding lacks, instead of failing.
            stream.reconfigure(errors="replace")
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        print(
            f"error: the command line needs the package {error.name!r}, which is not installed: "
            'pip install "ssd_generation[cli]"',
            file=sys.stderr,
        )
        return 2

    from .app import app
    from .console import print_error

    try:
        status = app(arguments, prog_name="ssd", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has closed the pipe (`ssd generate | head`). Python's flush at exit must not fail once more.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if not print_error(error):
            raise
        return 2
