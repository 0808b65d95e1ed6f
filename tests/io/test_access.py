"""The system's errors, and what is no path of a file."""

import errno
import os
from pathlib import Path

import pytest

from pytreemod.errors import (
    ArgumentError,
    FileAccessError,
    FileError,
    FileMissingError,
    FilePermissionError,
    PytreemodError,
)
from pytreemod.io.access import checked_path, open_to_read, regular_status, shown, system_errors


@pytest.mark.parametrize("path", [None, 3, b"name", ["name"], "na\0me", 1.5, object])
def test_what_is_no_path_is_refused(path):
    """A number least of all, which would be a file that somebody else has open."""
    with pytest.raises(ArgumentError, match="path: expected the path of a file, got"):
        checked_path(path)


def test_a_path_that_gives_bytes_is_refused():
    """`os.PathLike` allows both."""

    class Bytes:
        def __fspath__(self):
            return b"name"

    with pytest.raises(ArgumentError, match="expected the path of a file"):
        checked_path(Bytes())


@pytest.mark.parametrize("path", ["", "folder/", "/"])
def test_the_path_of_a_folder_is_refused(path):
    """As `open` refuses it, also where there is no such folder."""
    with pytest.raises(FileAccessError, match="expected the path of a file, got a folder"):
        checked_path(path)


def test_paths_are_strings_and_what_stands_for_them():
    """Both mean the same."""
    assert checked_path("a/b") == checked_path(Path("a/b")) == str(Path("a/b"))


@pytest.mark.parametrize(
    ("text", "readable"),
    [("layers[2].weight", True), ("größe", True), ("a\nb\x1b[31m", False), ("a" * 300, False)],
)
def test_errors_show_names_in_a_single_line(text, readable):
    """Whatever is in a file, it does not write to the terminal of who reads it."""
    assert (shown(text) == text) is readable
    assert shown(text).isprintable()
    assert len(shown(text)) <= 200


@pytest.mark.parametrize(
    ("number", "own", "builtin"),
    [
        (errno.ENOENT, FileMissingError, FileNotFoundError),
        (errno.EACCES, FilePermissionError, PermissionError),
        (errno.EPERM, FilePermissionError, PermissionError),
        (errno.ENOSPC, FileAccessError, OSError),
        (errno.EIO, FileAccessError, OSError),
    ],
)
def test_the_systems_errors_are_of_two_kinds(number, own, builtin):
    """One of this library's, and the one that a Python user would catch; the number is kept."""
    text = "my.file: expected a file to read, got "
    with pytest.raises(own, match=text) as caught, system_errors("my.file", "a file to read"):
        raise OSError(number, os.strerror(number), "another.file")

    assert type(caught.value) is own
    assert isinstance(caught.value, (builtin, FileError, PytreemodError, ValueError))
    assert isinstance(caught.value, builtin)
    assert (caught.value.errno, caught.value.filename) == (number, "my.file")
    assert "\\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "is_new", "cure"),
    [
        ("~/my.file", False, "only shells know what ~ is:\n      os.path.expanduser(path)"),
        ("~/my.file", True, "only shells know what ~ is:\n      os.path.expanduser(path)"),
        ("none/my.file", True, "make its folder first:\n      os.makedirs('none', exist_ok=True)"),
        ("none/my.file", False, ""),
        ("my.file", True, ""),
    ],
)
def test_what_leads_nowhere_is_told_with_what_to_do(path, is_new, cure):
    with (
        pytest.raises(FileMissingError, match="a file") as caught,
        system_errors(path, "a file", is_new=is_new),
    ):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    told = f"{path}: expected a file, got no such file or directory."
    assert str(caught.value) == (f"{told}\n  {cure}" if cure else told)


def test_other_errors_pass():
    """Only what the system refuses is translated."""
    with pytest.raises(KeyError, match="x"), system_errors("my.file", "a file to read"):
        raise KeyError("x")


def test_only_files_are_opened(tmp_path):
    """A pipe would keep its reader waiting for ever."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileAccessError, match="got a pipe or a device"):
        open_to_read(str(tmp_path / "pipe"))
    with pytest.raises(FileAccessError, match="got a pipe or a device"):
        regular_status(os.devnull)
    with pytest.raises(FileAccessError, match="got a folder"):
        open_to_read(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="none: expected a file to read, got no such file"):
        open_to_read(str(tmp_path / "none"))
    assert regular_status(str(tmp_path / "none")) is None
