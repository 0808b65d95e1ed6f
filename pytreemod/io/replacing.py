"""Putting a new file in an old one's place in one step.

Owns: [`replacement`][pytreemod.io.replacing.replacement]. Whoever opens the path meanwhile sees the
old file or the new one, whole, and never a part; so does whoever comes after a kill.
"""

from __future__ import annotations

import errno
import io
import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager, suppress

from pytreemod.errors import FilePermissionError
from pytreemod.io.access import regular_status, shown, system_errors
from pytreemod.io.leftovers import show_alive

_LONGEST_NAME = 200
"""In bytes; systems allow 255, of which the ending takes some."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def replacement(path: str, size: int, *, durable: bool) -> Generator[io.FileIO]:
    """Write a file that takes the place of the one at `path` when the block ends well.

    It is written beside that one. When the block fails it is removed, and the old file is left as
    it was. A killed process leaves it behind, with a name that says what it is.

    Args:
        path: where the file will be; a symbolic link stays, and what it leads to is replaced.
        size: of the file, in bytes.
        durable: whether to wait until the disk has it, so that a power cut leaves one of the two.

    Yields:
        The file, open for writing without a buffer.

    Raises:
        FileAccessError: the system refuses, or the path leads to a folder or a device.
    """
    with system_errors(path, "a file that can be written", is_new=True):
        old = regular_status(path)
        if old is not None and not os.access(path, os.W_OK):
            # To rename asks for permission on the folder only.
            raise FilePermissionError(
                shown(path), "a file that can be written", "one that is read-only"
            )
        target = os.path.realpath(path)
        beside = _name_beside(target)
        file = _create(beside, old)
        try:
            with file:
                _reserve(file, size)
                yield file
                if durable:
                    os.fsync(file.fileno())
            os.replace(beside, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(beside)
            raise
        if durable:
            _synchronize_folder(os.path.dirname(target))


def _name_beside(target: str) -> str:
    """A name that nobody guesses, in the same folder: only there a rename is one step."""
    folder, name = os.path.split(target)
    short = os.fsdecode(os.fsencode(name)[:_LONGEST_NAME])
    return os.path.join(folder, f"{short}.saving-{secrets.token_hex(8)}")


def _create(path: str, old: os.stat_result | None) -> io.FileIO:
    """A new file with the permissions of the old one, or those that a new file gets."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    # Nobody else may open it before the permissions are those of the old one.
    file = io.FileIO(os.open(path, flags, 0o666 if old is None else 0o600), "r+")
    show_alive(file.fileno())
    if old is not None:
        # Who may not give files away keeps what is written; and not every system has owners.
        with suppress(OSError, AttributeError):
            os.fchown(file.fileno(), old.st_uid, old.st_gid)
        with suppress(OSError, AttributeError):
            os.fchmod(file.fileno(), old.st_mode & 0o777)
    return file


def _reserve(file: io.FileIO, size: int) -> None:
    """Take the room on the disk at once.

    A disk that is too full says so before anything was written, and writing takes a third less
    than with room that is found page by page.
    """
    try:
        os.posix_fallocate(file.fileno(), 0, size)
    except AttributeError:
        return  # not every system has it
    except OSError as error:
        # Nor every kind of disk; those are found to be full when they are.
        if error.errno in _NO_ROOM:
            raise


def _synchronize_folder(folder: str) -> None:
    """Let the disk have the new name, too, on systems on which folders can be opened."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
