"""Files that appear whole or not at all, and files that a single process holds at a time."""

from __future__ import annotations

import errno
import os
import re
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .messages import shown

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

__all__ = ["Lock", "default_cache_dir", "is_temporary", "replacing", "temporary_name", "write_whole"]

_LONGEST_SUFFIX = 16  # some writers depend on the suffix; no more of a name is needed, and its length is limited
_TEMPORARY = re.compile(r"\.ssd-[0-9a-f]{32}(\..*)?")


def default_cache_dir() -> Path:
    """Return the directory where this library stores its files.

    `$SSD_GENERATION_CACHE`, else `ssd_generation` under `%LOCALAPPDATA%` (Windows) or under `$XDG_CACHE_HOME`, else
    `~/.cache/ssd_generation`.

    Raises:
        ValueError: that is in a home folder, and there is none; or it is relative, so that files of whatever folder a
            process is started in would be taken for its own.
    """
    own = os.environ.get("SSD_GENERATION_CACHE")
    base = os.environ.get("LOCALAPPDATA" if os.name == "nt" else "XDG_CACHE_HOME", "")
    try:
        if own:
            return _whole(Path(own).expanduser(), "SSD_GENERATION_CACHE", own)
        # The XDG specification says to ignore a relative path.
        root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    except RuntimeError as error:
        raise ValueError(
            "There is no home folder to store files in. Name another folder with the environment variable "
            "SSD_GENERATION_CACHE, by its absolute path."
        ) from error
    return _whole(root / "ssd_generation", "The home folder", str(root))


def _whole(path: Path, name: str, value: str) -> Path:
    if not path.is_absolute():
        raise ValueError(
            f"{name} must be an absolute path, but got {shown(value)}, which depends on the working directory. Name a "
            "folder with the environment variable SSD_GENERATION_CACHE, by its absolute path."
        )
    return path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path next to a file, to write to; on success it replaces the file.

    Args:
        path: the file; one that exists is replaced.
    """
    # Not `tempfile`, whose files are readable by their owner only.
    suffix = path.suffix if len(path.suffix) <= _LONGEST_SUFFIX else ""
    temporary = path.with_name(temporary_name(suffix))
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def temporary_name(suffix: str) -> str:
    """Return a unique name for a file that is being written."""
    return f".ssd-{uuid.uuid4().hex}{suffix}"


def is_temporary(name: str) -> bool:
    """Tell whether a name is a temporary one: such a file was being written when its process was killed."""
    return _TEMPORARY.fullmatch(name) is not None


def write_whole(path: Path, text: str) -> None:
    """Write a file of text so that no reader ever sees a part of it."""
    with replacing(path) as temporary, open(temporary, "x", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


class Lock:
    """A lock file, held by at most one thread of one process, and released when its holder dies.

    Never delete such a file, unless you hold it and its folder is deleted with it. That is safe, since the holder's
    file is the one at the path: a process that had opened a file deleted later detects that, and tries again.

    Args:
        path: the file; created where there is none, and left in place.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> bool:
        """Acquire the lock; return `False` where another holds it.

        Raises:
            FileNotFoundError: there is no folder for it.
            OSError: it cannot be opened, or this file system has no locks.
        """
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        while True:
            descriptor = os.open(self._path, flags, 0o666)
            try:
                if not _try_to_lock(descriptor):
                    os.close(descriptor)
                    return False
                if self._stands_there(descriptor):
                    self._descriptor = descriptor
                    return True
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _stands_there(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.lstat(self._path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Release the lock."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        try:
            _unlock(descriptor)  # a process that was forked meanwhile has the file open, too
        finally:
            os.close(descriptor)


if sys.platform == "win32":

    def _try_to_lock(descriptor: int) -> bool:
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EDEADLK):
                return False
            raise
        return True

    def _unlock(descriptor: int) -> None:
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)

else:

    def _try_to_lock(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN, errno.EWOULDBLOCK):
                return False
            raise
        return True

    def _unlock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
