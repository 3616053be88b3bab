"""Opening and writing of all files that a later process relies on.

These are compiled code, which a process executes, and stored measurements, copies of weights and the demo model. A file
is trusted by its owner: this user or root made it, no other user may write to it, and the same is true of its folder.
No key or signature is needed on top, since anyone who may write as this user could read the key, too. Digests in such
files detect damage, not forgery.

A file is opened once: the open file is checked, and the same descriptor is read. Opening follows no link, except to the
outermost folder (a cache may be on another disk), and never waits: a FIFO is refused like any other file that is not
regular. Folders are opened one below the other, so that none can be exchanged in between. The folders above the
outermost one are not checked (they may include /tmp): a user who exchanges that folder cannot make files of this user.

New folders are for this user alone (0700), new files are writable by this user alone (0644), whatever the umask allows.
Windows has neither these modes nor these owners: there a file has to be a regular one, and its folder is what protects
it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from .display import path_shown
from .files import temporary_name
from .messages import clipped

__all__ = [
    "UntrustedError",
    "UntrustedFolderError",
    "check_folder",
    "make_folder",
    "name_of_open",
    "opened",
    "say_not_stored",
    "say_once",
    "store",
    "storing",
]

_HAS_OWNERS = hasattr(os, "geteuid") and os.open in os.supports_dir_fd

_CLOSED = getattr(os, "O_CLOEXEC", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_BINARY = getattr(os, "O_BINARY", 0)
_READ_FILE = os.O_RDONLY | _NO_LINK | getattr(os, "O_NONBLOCK", 0) | _CLOSED | _BINARY
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK | _CLOSED | _BINARY
# A folder that may be entered and not listed can be opened with O_PATH, which Linux has.
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | getattr(os, "O_DIRECTORY", 0) | _CLOSED

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_ADVICE = "name another folder (for the cache: with the environment variable SSD_GENERATION_CACHE)"
_LONGEST_REASON = 1000  # characters; a path in it has at most 400

_said: set[str] = set()
"""Reasons that this process has logged."""


class UntrustedError(ValueError):
    """Error where a stored file cannot be relied on, or none can be stored; the message names path and reason."""


class UntrustedFolderError(UntrustedError):
    """Error where no file of a folder can be relied on, or none can be stored there; the message names a remedy."""


def say_once(logger: logging.Logger, consequence: str, reason: object) -> None:
    """Log a warning, unless this process has logged one for the same reason.

    Args:
        logger: logger of the module that stores files.
        consequence: fallback, such as "Compiling again".
        reason: the cause, such as an `UntrustedError`.
    """
    text = clipped(reason, _LONGEST_REASON)
    if text not in _said:
        _said.add(text)
        logger.warning("%s: %s", consequence, text)


def say_not_stored(logger: logging.Logger, reason: object) -> None:
    """Log, once per process, that a folder of the cache cannot be used.

    Args:
        logger: logger of the module that stores files.
        reason: the cause, such as an `UntrustedFolderError`.
    """
    say_once(logger, "Nothing can be stored here, so each process compiles and measures again", reason)


@contextmanager
def opened(path: Path, within: Path | None = None) -> Iterator[BinaryIO]:
    """Open a stored file for reading.

    Args:
        path: the file.
        within: the outermost folder that has to be trusted, such as the cache folder; by default the file's own.

    Raises:
        FileNotFoundError: there is no such file, or no such folder.
        UntrustedError: it is no regular file, or another user may have written it.
        UntrustedFolderError: another user may write to a folder from `within` down to the file, or it cannot be
            opened.
        OSError: the file cannot be opened.
    """
    with _opened_folder(path.parent, within) as folder:
        try:
            if folder is None:
                _check_regular(os.lstat(path), path)
                descriptor = os.open(path, _READ_FILE)
            else:
                descriptor = os.open(path.name, _READ_FILE, dir_fd=folder)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EMLINK):
                raise UntrustedError(f"{path_shown(path)} is a link, which a stored file must not be.") from error
            if error.errno == errno.ENXIO:
                raise UntrustedError(f"{path_shown(path)} is not a regular file.") from error
            raise
    try:
        status = os.fstat(descriptor)
        _check_regular(status, path)
        reason = _reason(status)
        if reason is not None:
            raise UntrustedError(f"The file {path_shown(path)} {reason}.")
        file = os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise
    with file:
        yield file


def name_of_open(file: BinaryIO, path: Path) -> str:
    """Return a path by which a library opens this very open file, whatever is at its own path by now.

    Args:
        file: the open file, as `opened` yields it.
        path: its path, which is returned where a system has no names for open files.
    """
    name = f"/dev/fd/{file.fileno()}"
    with contextlib.suppress(OSError):
        if os.path.samestat(os.stat(name), os.fstat(file.fileno())):
            return name
    return str(path)


def check_folder(path: Path, within: Path | None = None) -> None:
    """Check that the files of a folder can be relied on.

    Args:
        path: the folder.
        within: as for `opened`.

    Raises:
        FileNotFoundError: there is no such folder.
        UntrustedFolderError: another user may write to it, or it cannot be opened.
    """
    with _opened_folder(path, within):
        pass


def make_folder(path: Path, within: Path | None = None) -> None:
    """Create a folder that others cannot enter, with missing ones above it, and check it.

    Args:
        path: the folder; one that exists keeps its mode.
        within: as for `opened`.

    Raises:
        UntrustedFolderError: another user may write to it.
        OSError: it cannot be created.
    """
    with contextlib.suppress(FileNotFoundError):
        check_folder(path, within)
        return
    missing, above = [], path
    while not above.exists():
        missing.append(above)
        above = above.parent
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
    check_folder(path, within)


@contextmanager
def storing(path: Path, within: Path | None = None) -> Iterator[Path]:
    """Create a temporary file to write to, and move it to a path on success.

    Args:
        path: the file; one that exists is replaced.
        within: as for `opened`. Folders that are missing are created.

    Yields:
        The path of the temporary file, which is empty.

    Raises:
        UntrustedFolderError: the folder is not trusted, or cannot be written to.
    """
    try:
        make_folder(path.parent, within)
        temporary = path.with_name(temporary_name(path.suffix))
        # Never writable by others, not even before it is complete: a user who had it open could still change it later.
        os.close(os.open(temporary, _NEW_FILE, 0o644))
        try:
            yield temporary
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    except OSError as error:
        folder = path_shown(path.parent if within is None else within)
        raise UntrustedFolderError(
            f"Files cannot be stored in the folder {folder} ({error.strerror or error}). Make room and allow writing, "
            f"or {_ADVICE}."
        ) from error


def store(path: Path, content: bytes, within: Path | None = None) -> None:
    """Write a file, whole or not at all.

    Args:
        path: the file; one that exists is replaced.
        content: its content.
        within: as for `opened`.

    Raises:
        UntrustedFolderError: as `storing`.
    """
    with storing(path, within) as temporary, open(temporary, "wb") as file:
        file.write(content)


# ----------------------------------------------------------------------------------------------------------------------


@contextmanager
def _opened_folder(path: Path, within: Path | None) -> Iterator[int | None]:
    """Yield a descriptor of a folder that is trusted, from `within` down to it; `None` on Windows."""
    root = path if within is None else within
    names = path.relative_to(root).parts
    if not _HAS_OWNERS:
        os.stat(path)
        yield None
        return
    descriptor = _open_folder(root, _FOLDER, None)
    try:
        reached = root
        for name in names:
            reached = reached / name
            inner = _open_folder(reached, _FOLDER | _NO_LINK, descriptor)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def _open_folder(path: Path, flags: int, above: int | None) -> int:
    try:
        descriptor = os.open(path if above is None else path.name, flags, dir_fd=above)
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise
        if error.errno in (errno.ENOTDIR, errno.ELOOP, errno.EMLINK):
            problem = "is not a folder, or is a link to one where links are not allowed. Remove it"
        else:
            problem = f"cannot be opened ({error.strerror}). Allow it"
        raise UntrustedFolderError(f"{path_shown(path)} {problem}, or {_ADVICE}.") from error
    try:
        status = os.fstat(descriptor)
        reason = _reason(status)
        if reason is not None:
            # A folder such as /tmp is meant to be writable by all users.
            is_to_mend = status.st_uid == os.geteuid() and not status.st_mode & stat.S_ISVTX
            advice = f"Run `chmod -R go-w {path_shown(path)}`, or {_ADVICE}" if is_to_mend else f"N{_ADVICE[1:]}"
            raise UntrustedFolderError(f"The folder {path_shown(path)} {reason}. {advice}.")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_regular(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UntrustedError(f"{path_shown(path)} is not a regular file.")


def _reason(status: os.stat_result) -> str | None:
    """Return why a file or folder is not trusted; `None` where it is."""
    if not _HAS_OWNERS:
        return None
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to another user (number {status.st_uid})"
    if status.st_mode & _WRITABLE_BY_OTHERS:
        return f"can be written to by others (mode {stat.S_IMODE(status.st_mode):04o})"
    return None
