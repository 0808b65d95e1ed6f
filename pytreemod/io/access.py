"""The file system: opening a file, replacing one in a single step, removing what a kill left.

Owns: the only way to open a file for reading, and the translation of the system's errors. A path is
only ever that of a regular file: opening a pipe would wait for ever, and replacing a device would
remove it. [`replacement`][pytreemod.io.access.replacement] writes another file and renames it: a
reader of the path sees the old file or the new one, whole, also after a kill.
[`remove_leftovers`][pytreemod.io.access.remove_leftovers] removes files that a killed process was
writing; a living process shows that it is alive by a lock on its file.
"""

from __future__ import annotations

import errno
import io
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

from pytreemod.errors import (
    ArgumentError,
    FileAccessError,
    FileError,
    FileMissingError,
    FilePermissionError,
    describe,
    explain,
    explain_depth,
    meant,
)

try:
    import fcntl
except ImportError:  # Windows, which lets nobody remove a file that is open
    fcntl = None

StrPath = str | os.PathLike[str]
"""The name of a file."""

_CLASSES = ((FileNotFoundError, FileMissingError), (PermissionError, FilePermissionError))


def checked_path(path: Any, *, or_folder: bool = False) -> str:
    """The path of a file as a string.

    Args:
        path: a string, or what `os.PathLike` describes.
        or_folder: whether it may be the path of a folder.

    Returns:
        The string.

    Raises:
        ArgumentError: it is no path.
        FileAccessError: it can only be one of a folder.
    """
    text = os.fspath(cast(str, path)) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or "\0" in text:
        hint = ["the path comes first, as a text:", 'pm.save("model.safetensors", tree)']
        raise ArgumentError("path", "the path of a file", describe(path), hint=hint)
    if not os.path.basename(text) and not (or_folder and text):
        raise FileAccessError(shown(text) or "''", "the path of a file", "a folder")
    return text


def shown(text: str) -> str:
    """A path, or the name of an array, as an error shows it: as it is, if that is readable.

    Args:
        text: which may come from anywhere, and hold anything.

    Returns:
        A single line.
    """
    return text if text.isprintable() and len(text) <= 200 else describe(text)


def shown_path(path: Any) -> str:
    """The path of a file or folder as errors show it: `'model.safetensors'`.

    Raises:
        ArgumentError: it is no path.
    """
    return repr(shown(checked_path(path, or_folder=True)))


@contextmanager
def system_errors(path: str, expected: str, *, is_new: bool = False) -> Generator[None]:
    """Raise what the system refuses inside the block as an error of this library.

    Args:
        path: the file that the reader asked for, whatever file the system refused.
        expected: what would have been right.
        is_new: whether the file need not be there, but its folder.

    Yields:
        Nothing.

    Raises:
        FileAccessError: or the subclass that fits.
    """
    try:
        yield
    except FileAccessError:
        raise
    except OSError as error:
        kind = next((own for builtin, own in _CLASSES if isinstance(error, builtin)), None)
        reason = error.strerror or str(error) or type(error).__name__
        hint = _hint_missing(path, is_new) if kind is FileMissingError else ()
        text = explain(shown(path), expected, reason[:1].lower() + reason[1:], hint=hint)
        raised = (kind or FileAccessError)(text)
        raised.errno, raised.filename = error.errno, path
        raise raised from error


@contextmanager
def depth_errors(where: str) -> Generator[None]:
    """Tell of what is nested deeper than Python's stack as an error of `where`.

    Every walk of a tree, and of JSON, that is done for a file goes as deep as the tree does.

    Args:
        where: the call.

    Raises:
        FileError: what is inside the `with` is too deep.
    """
    try:
        yield
    except RecursionError as error:
        raise FileError(explain_depth(where)) from error


def _hint_missing(path: str, is_new: bool) -> Sequence[str]:
    """What to do about a path that leads nowhere, as far as it shows."""
    if is_of_shell(path):
        return HINT_SHELL
    folder = os.path.dirname(path)
    if is_new and folder and not os.path.lexists(folder):
        return ("make its folder first:", f"os.makedirs({shown(folder)!r}, exist_ok=True)")
    if is_new or not os.path.isdir(folder or os.curdir):
        return ()
    # What is near, among the files of the folder.
    there = [os.path.join(folder, name) for name in os.listdir(folder or os.curdir)]
    return meant([path], there, '"{}"')


HINT_SHELL = ("only shells know what ~ is:", "os.path.expanduser(path)")


def is_of_shell(path: str) -> bool:
    """Whether a path begins with what a shell would take for somebody's home."""
    return path.startswith("~")


def regular_status(path: str) -> os.stat_result | None:
    """What the system knows of a file; None if there is none.

    Args:
        path: of the file.

    Returns:
        The status of the file that the path leads to.

    Raises:
        FileAccessError: it leads to a folder, a pipe or a device.
    """
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe or a device"
        raise FileAccessError(shown(path), "the path of a file", kind)
    return status


def open_to_read(path: str) -> io.FileIO:
    """Open a file for reading, without a buffer.

    Args:
        path: of the file.

    Returns:
        The file.

    Raises:
        FileAccessError: the system refuses; FileMissingError: there is none.
    """
    with system_errors(path, "a file to read"):
        regular_status(path)
        return io.FileIO(path)


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
        old = status_to_replace(path)
        target = os.path.realpath(path)
        beside = name_beside(target)
        with new_file(beside, size, old=old, durable=durable) as file:
            yield file
        replace_file(beside, target)
        if durable:
            synchronize_folder(os.path.dirname(target))


def status_to_replace(path: str) -> os.stat_result | None:
    """What the system knows of a file that is to be replaced; None if there is none.

    Args:
        path: of the file.

    Returns:
        The status of the file that the path leads to.

    Raises:
        FileAccessError: it leads to a folder, a pipe or a device; FilePermissionError: it may not
            be written.
    """
    old = regular_status(path)
    if old is not None and not os.access(path, os.W_OK):
        # To rename asks for permission on the folder only.
        expected, got = "a file that can be written", "one that is read-only"
        raise FilePermissionError(shown(path), expected, got)
    return old


@contextmanager
def new_file(
    path: str, size: int, *, old: os.stat_result | None, durable: bool
) -> Generator[io.FileIO]:
    """Write a file that is not there yet; when the block fails it is removed.

    Args:
        path: where it will be.
        size: in bytes, if it is known.
        old: the status of a file that has the permissions that this one gets.
        durable: whether to wait until the disk has it.

    Yields:
        The file, open for writing without a buffer.

    Raises:
        OSError: the system refuses.
    """
    file = _create(path, old)
    try:
        with file:
            _reserve(file, size)
            yield file
            if durable:
                os.fsync(file.fileno())
    except BaseException:
        remove_file(path)
        raise


def replace_file(path: str, target: str) -> None:
    """Give a file another name, where there may be one; if it cannot be, the file is removed."""
    try:
        os.replace(path, target)
    except BaseException:
        remove_file(path)
        raise


def remove_file(path: str) -> None:
    """Remove a file if it is there, and may be removed."""
    with suppress(OSError):
        os.unlink(path)


def name_beside(target: str, token: str | None = None) -> str:
    """A name that cannot be guessed, in the same folder: only there a rename is one step.

    Args:
        target: the path that the file will get.
        token: what is not guessed, as `secrets.token_hex(8)` makes it, if several share it.

    Returns:
        The path.
    """
    folder, name = os.path.split(target)
    short = os.fsdecode(os.fsencode(name)[:_LONGEST_NAME])
    return os.path.join(folder, f"{short}.saving-{token or secrets.token_hex(8)}")


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
    """Take the room on the disk at once, if the size is known.

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


def synchronize_folder(folder: str) -> None:
    """Let the disk have the new names, too, on systems on which folders can be opened."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


BESIDE = re.compile(r"(.+)\.saving-([0-9a-f]{16})")
"""A file that is being written: the name that it will get, and what makes this one unique."""
_YOUNG = 60.0
"""Seconds; who has just made a file may not have shown yet that it is alive."""
_OLD = 24 * 3600.0
"""Seconds; where nobody can show it, a file that was left alone for so long is nobody's."""


def show_alive(descriptor: int) -> None:
    """Show that somebody is writing a file, for as long as it is open.

    Args:
        descriptor: of the open file. The system lets go of it when the process ends, however that
            comes about.
    """
    if fcntl is not None:
        # Not every kind of disk has locks.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def locked_folder(folder: str) -> Generator[None]:
    """Be the only one in a folder, among those who ask; where the system has no locks, one of them.

    Args:
        folder: its path.

    Yields:
        Nothing.
    """
    descriptor = None
    # Not every kind of disk has locks, and not every folder may be opened.
    with suppress(OSError):
        if fcntl is not None:
            descriptor = os.open(folder, os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def remove_leftovers(folder: StrPath, is_ours: Callable[[str], bool]) -> None:
    """Remove what was being written when a process was killed.

    Args:
        folder: where to look; not below it.
        is_ours: whether a file may be removed, by the name that it would have got.

    Raises:
        FileAccessError: the folder cannot be read.
    """
    with system_errors(os.fspath(folder), "a folder to read"), os.scandir(folder) as entries:
        for entry in entries:
            found = BESIDE.fullmatch(entry.name)
            if found is not None and is_ours(found[1]):
                # Another process may remove it first; and who may not remove it need not.
                with suppress(OSError):
                    if is_abandoned(entry.path):
                        os.unlink(entry.path)


def is_abandoned(path: str) -> bool:
    """Whether who was writing a file is dead, as far as it can be known.

    Args:
        path: of the file.

    Raises:
        OSError: the file is gone, or may not be opened.
    """
    age = time.time() - os.stat(path).st_mtime
    if age < _YOUNG:
        return False
    if fcntl is None:
        return age > _OLD
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return age > _OLD
    finally:
        os.close(descriptor)
    return True
