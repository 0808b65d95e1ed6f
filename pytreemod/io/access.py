"""The file system: open a file, replace one in a single step, remove what a killed process left.

Owns: the only way to open a file for reading, and the translation of the system's errors. A path
always leads to a regular file: opening a pipe would wait forever, and replacing a device would
remove it. [`replacement`][pytreemod.io.access.replacement] writes another file and renames it: a
reader of the path sees all of the old file or all of the new one, even after a kill.
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
)

try:
    import fcntl
except ImportError:  # Windows, which does not allow an open file to be removed
    fcntl = None

StrPath = str | os.PathLike[str]
"""The name of a file."""

_CLASSES = ((FileNotFoundError, FileMissingError), (PermissionError, FilePermissionError))


def checked_path(path: Any, *, or_folder: bool = False) -> str:
    """Return the path of a file as a string.

    Args:
        path: a string or an `os.PathLike`.
        or_folder: whether the path of a folder is accepted.

    Returns:
        The string.

    Raises:
        ArgumentError: if it is no path.
        FileAccessError: if it can only be the path of a folder.
    """
    text = os.fspath(cast(str, path)) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or "\0" in text:
        fact = f"the path of a file is a string, not {describe(path)}"
        raise ArgumentError(fact, hint='pm.save("model.safetensors", tree)')
    if not os.path.basename(text) and not (or_folder and text):
        raise FileAccessError(shown(text) or "''", "the path of a file", "a folder")
    return text


def shown(text: str) -> str:
    """Return a path, or the name of an array, for an error: unchanged if it is readable.

    Args:
        text: any string, from any source.

    Returns:
        A single line.
    """
    return text if text.isprintable() and len(text) <= 200 else describe(text)


def shown_path(path: Any) -> str:
    """Return the path of a file or folder as errors show it: `'model.safetensors'`.

    Raises:
        ArgumentError: if it is no path.
    """
    return repr(shown(checked_path(path, or_folder=True)))


@contextmanager
def system_errors(path: str, *, is_new: bool = False) -> Generator[None]:
    """Raise the system's errors inside the block as errors of this library.

    Args:
        path: the file that the user asked for, whichever file the system refused.
        is_new: whether only the folder of the file must exist.

    Yields:
        Nothing.

    Raises:
        FileAccessError: if the system refuses; often a subclass of it.
    """
    try:
        yield
    except FileAccessError:
        raise
    except OSError as error:
        kind = next((own for builtin, own in _CLASSES if isinstance(error, builtin)), None)
        reason = error.strerror or str(error) or type(error).__name__
        hint = _hint_missing(path, is_new) if kind is FileMissingError else ()
        text = explain(f"{shown(path)}: {reason[:1].lower() + reason[1:]}", hint=hint)
        raised = (kind or FileAccessError)(text)
        raised.errno, raised.filename = error.errno, path
        raise raised from error


@contextmanager
def depth_errors(where: str) -> Generator[None]:
    """Raise an error of `where` if the block exceeds Python's recursion limit.

    Every walk of a tree or of JSON for a file recurses as deep as the tree.

    Args:
        where: the call.

    Raises:
        FileError: if the tree or the JSON inside the `with` is too deep.
    """
    try:
        yield
    except RecursionError as error:
        raise FileError(explain_depth(where)) from error


def _hint_missing(path: str, is_new: bool) -> Sequence[str]:
    """Return a hint for a path that does not exist."""
    if is_of_shell(path):
        return HINT_SHELL
    folder = os.path.dirname(path)
    if is_new and folder and not os.path.lexists(folder):
        return (f"os.makedirs({shown(folder)!r}, exist_ok=True)",)
    return ()


HINT_SHELL = ("only shells expand ~:", "os.path.expanduser(path)")


def is_of_shell(path: str) -> bool:
    """Whether a shell would read the path as one of a home folder."""
    return path.startswith("~")


def regular_status(path: str) -> os.stat_result | None:
    """Return the status of a file; None if the file does not exist.

    Args:
        path: the path of the file.

    Returns:
        The status of the file that the path leads to.

    Raises:
        FileAccessError: if it leads to a folder, a pipe or a device.
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
        path: the path of the file.

    Returns:
        The file.

    Raises:
        FileAccessError: if the system refuses; FileMissingError: if the file does not exist.
    """
    with system_errors(path):
        regular_status(path)
        return io.FileIO(path)


_LONGEST_NAME = 200
"""In bytes; systems allow 255, and the ending needs some of them."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def replacement(path: str, size: int, *, durable: bool) -> Generator[io.FileIO]:
    """Write a file that replaces the one at `path` when the block succeeds.

    The new file is written next to the old one. If the block fails, the new file is removed, and
    the old file is unchanged. A killed process leaves it behind, under a recognizable name.

    Args:
        path: the path to write; for a symbolic link, its target is replaced.
        size: the size of the file, in bytes.
        durable: whether to wait for the disk, so that a power cut leaves one of the two files.

    Yields:
        The file, open for writing without a buffer.

    Raises:
        FileAccessError: if the system refuses, or the path leads to a folder or a device.
    """
    with system_errors(path, is_new=True):
        old = status_to_replace(path)
        target = os.path.realpath(path)
        beside = name_beside(target)
        with new_file(beside, size, old=old, durable=durable) as file:
            yield file
        replace_file(beside, target)
        if durable:
            synchronize_folder(os.path.dirname(target))


def status_to_replace(path: str) -> os.stat_result | None:
    """Return the status of a file to be replaced; None if the file does not exist.

    Args:
        path: the path of the file.

    Returns:
        The status of the file that the path leads to.

    Raises:
        FileAccessError: if it leads to a folder, a pipe or a device; FilePermissionError: if it is
            read-only.
    """
    old = regular_status(path)
    if old is not None and not os.access(path, os.W_OK):
        # Renaming needs only the permission to write to the folder.
        raise FilePermissionError(f"{shown(path)} is read-only")
    return old


@contextmanager
def new_file(
    path: str, size: int, *, old: os.stat_result | None, durable: bool
) -> Generator[io.FileIO]:
    """Write a file that does not exist yet; it is removed if the block fails.

    Args:
        path: the path of the file.
        size: its size in bytes, if known.
        old: the status of a file whose permissions this one gets.
        durable: whether to wait until the disk has it.

    Yields:
        The file, open for writing without a buffer.

    Raises:
        OSError: if the system refuses.
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
    """Rename a file, over an existing one; if that fails, remove it."""
    try:
        os.replace(path, target)
    except BaseException:
        remove_file(path)
        raise


def remove_file(path: str) -> None:
    """Remove a file if it exists and may be removed."""
    with suppress(OSError):
        os.unlink(path)


def name_beside(target: str, token: str | None = None) -> str:
    """Return an unguessable name in the same folder: only there a rename is one step.

    Args:
        target: the path that the file will get.
        token: the unguessable part, from `secrets.token_hex(8)`, if several files share it.

    Returns:
        The path.
    """
    folder, name = os.path.split(target)
    short = os.fsdecode(os.fsencode(name)[:_LONGEST_NAME])
    return os.path.join(folder, f"{short}.saving-{token or secrets.token_hex(8)}")


def _create(path: str, old: os.stat_result | None) -> io.FileIO:
    """Create a file with the permissions of the old one, or those of a new file."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    # No other user may open it before it has the permissions of the old one.
    file = io.FileIO(os.open(path, flags, 0o666 if old is None else 0o600), "r+")
    show_alive(file.fileno())
    if old is not None:
        # A user who may not give files away keeps the new one; some systems have no owners.
        with suppress(OSError, AttributeError):
            os.fchown(file.fileno(), old.st_uid, old.st_gid)
        with suppress(OSError, AttributeError):
            os.fchmod(file.fileno(), old.st_mode & 0o777)
    return file


def _reserve(file: io.FileIO, size: int) -> None:
    """Reserve the space on the disk at once, if the size is known.

    A full disk then fails before anything is written, and writing takes a third less time than
    with space that is allocated page by page.
    """
    try:
        os.posix_fallocate(file.fileno(), 0, size)
    except AttributeError:
        return  # not every system supports it
    except OSError as error:
        # Not every kind of disk supports it; those fail when they are full.
        if error.errno in _NO_ROOM:
            raise


def synchronize_folder(folder: str) -> None:
    """Make the disk store the new names, too, on systems where folders can be opened."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


BESIDE = re.compile(r"(.+)\.saving-([0-9a-f]{16})")
"""A file that is being written: the name that it will get, and a unique token."""
_YOUNG = 60.0
"""Seconds; a process that just made a file may not have shown yet that it is alive."""
_OLD = 24 * 3600.0
"""Seconds; without locks, a file that is unchanged for this long is abandoned."""


def show_alive(descriptor: int) -> None:
    """Show that a process is writing a file, for as long as the file is open.

    Args:
        descriptor: the descriptor of the open file. The system releases the lock when the process
            ends, for whatever reason.
    """
    if fcntl is not None:
        # Not every kind of disk has locks.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def locked_folder(folder: str) -> Generator[None]:
    """Exclude other callers of this function from a folder; without locks, do nothing.

    Args:
        folder: the path of the folder.

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
    """Remove files that were being written when a process was killed.

    Args:
        folder: the folder to search, without its subfolders.
        is_ours: whether a file may be removed, given the name that it would have got.

    Raises:
        FileAccessError: if the folder cannot be read.
    """
    with system_errors(os.fspath(folder)), os.scandir(folder) as entries:
        for entry in entries:
            found = BESIDE.fullmatch(entry.name)
            if found is not None and is_ours(found[1]):
                # Another process may remove it first, and this user may lack the permission.
                with suppress(OSError):
                    if is_abandoned(entry.path):
                        os.unlink(entry.path)


def is_abandoned(path: str) -> bool:
    """Whether the process that was writing a file is dead, as far as can be known.

    Args:
        path: the path of the file.

    Raises:
        OSError: if the file is gone, or may not be opened.
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
