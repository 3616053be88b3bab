"""The command line `ssd`. Thin: each sub-command imports what it needs when it runs."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run `ssd` and leave the process.

    Exit status: 0 for success, 1 for a fault of this library (with its traceback), 2 for a mistake in what was asked
    for (one line on stderr; its traceback too with `SSD_DEBUG=1`), 130 after Ctrl-C.

    Args:
        arguments: instead of the process's own.
    """
    sys.exit(_run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A terminal of another encoding shows a question mark, rather than ending the program.
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
        # Nobody reads on (`ssd generate | head`). Python would complain once more when it flushes at the end.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if not print_error(error):
            raise
        return 2
