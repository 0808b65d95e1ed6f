"""What the system says of a path, in the grammar of this library's errors.

Owns: one way to open a file for reading, and the translation of the system's errors. A path is only
ever a regular file: to open a pipe would wait for ever, and to replace a device would remove it.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager

from pytreemod.errors import (
    FileAccessError,
    FileMissingError,
    FilePermissionError,
    explain,
)

StrPath = str | os.PathLike[str]
"""The name of a file."""

_CLASSES = ((FileNotFoundError, FileMissingError), (PermissionError, FilePermissionError))


@contextmanager
def system_errors(path: StrPath, expected: str) -> Generator[None]:
    """Raise what the system refuses inside the block as an error of this library.

    Args:
        path: the file that the reader asked for, whatever file the system refused.
        expected: what would have been right.

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
        text = explain(file_name(path), expected, reason[:1].lower() + reason[1:])
        raised = (kind or FileAccessError)(text)
        raised.errno, raised.filename = error.errno, os.fspath(path)
        raise raised from error


def file_name(path: StrPath) -> str:
    """How an error names a file."""
    # A name of bytes that are no text has surrogates in it, which no terminal prints.
    return os.fsencode(path).decode(errors="replace")


def regular_status(path: StrPath) -> os.stat_result | None:
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
        raise FileAccessError(explain(file_name(path), "the path of a file", kind))
    return status


def opened(path: StrPath) -> io.FileIO:
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
