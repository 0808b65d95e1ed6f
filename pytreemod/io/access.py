"""What the system says of a path, in the grammar of this library's errors.

Owns: one way to open a file for reading, and the translation of the system's errors. A path is only
ever one of a regular file: to open a pipe would wait for ever, and to replace a device would remove
it.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Generator, Sequence
from contextlib import contextmanager
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

StrPath = str | os.PathLike[str]
"""The name of a file."""

_CLASSES = ((FileNotFoundError, FileMissingError), (PermissionError, FilePermissionError))


def checked_path(path: Any) -> str:
    """The path of a file as a string.

    Args:
        path: a string, or what `os.PathLike` describes.

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
    if not os.path.basename(text):
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
    """A path as errors show it: `'model.safetensors'`.

    Raises:
        ArgumentError: it is no path.
    """
    return repr(shown(checked_path(path)))


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
    return ()


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
