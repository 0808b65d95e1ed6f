"""The system's errors, and what is no path of a file."""

import errno
import io
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import (
    ArgumentError,
    FileAccessError,
    FileError,
    FileMissingError,
    FilePermissionError,
    PytreemodError,
)
from pytreemod.io.access import checked_path, open_to_read, regular_status, shown, system_errors
from pytreemod.io.containers import write_container
from pytreemod.io.showing import diff_files, show_file
from tests.goldens import refusals


def test_a_path_that_gives_bytes_is_refused():
    """`os.PathLike` allows both."""

    class Bytes:
        def __fspath__(self):
            return b"name"

    with pytest.raises(ArgumentError, match="expected the path of a file"):
        checked_path(Bytes())


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
    ("path", "is_new", "hint"),
    [
        ("~/my.file", False, "only shells know what ~ is:\n      os.path.expanduser(path)"),
        ("~/my.file", True, "only shells know what ~ is:\n      os.path.expanduser(path)"),
        ("none/my.file", True, "make its folder first:\n      os.makedirs('none', exist_ok=True)"),
        ("none/my.file", False, ""),
        ("my.file", True, ""),
    ],
)
def test_what_leads_nowhere_is_told_with_what_to_do(path, is_new, hint):
    with (
        pytest.raises(FileMissingError, match="a file") as caught,
        system_errors(path, "a file", is_new=is_new),
    ):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    told = f"{path}: expected a file, got no such file or directory."
    assert str(caught.value) == (f"{told}\n  {hint}" if hint else told)


def test_other_errors_pass():
    """Only what the system refuses is translated."""
    with pytest.raises(KeyError, match="x"), system_errors("my.file", "a file to read"):
        raise KeyError("x")


def test_only_files_are_opened(tmp_path):
    """A pipe would keep its reader waiting for ever."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileAccessError, match="got a pipe or a device"):
        open_to_read(str(tmp_path / "pipe"))
    assert regular_status(str(tmp_path / "none")) is None


class Box(pm.Module):
    """A node that Equinox's files are walked below of, too."""

    content: object


def deep(depth):
    """Lists and Modules in one another."""
    tree = jnp.ones(2)
    for i in range(depth):
        tree = Box(tree) if i % 2 else [tree]
    return tree


# JAX, too, takes a tree apart as far as Python's limit; from 3.12 on that is not the limit of C.
TOO_DEEP = 900 if sys.version_info < (3, 12) else 1500


def write_deep(path, depth):
    """A file of lists, which may be deeper than one that can be written here."""
    name = ".".join("0" * depth)
    leaf = f'{{"leaf": "{name}", "is": "jax"}}'
    tree = depth * '{"list": [' + leaf + depth * "]}"
    metadata = {"pytreemod.tree": f'{{"version": 1, "tree": {tree}}}'}
    write_container(path, {name: np.ones(2, np.float32)}, metadata)


@pytest.fixture(scope="module")
def deep_file(tmp_path_factory):
    """A file of a deep tree."""
    path = tmp_path_factory.mktemp("deep") / "file"
    write_deep(path, 20_000)
    return path


@pytest.mark.parametrize(
    "act",
    [
        lambda path: pm.save(path.with_name("other"), deep(TOO_DEEP)),
        lambda path: pm.Checkpoints(path.with_name("folder")).save(0, deep(TOO_DEEP)),
        lambda path: pm.load(path),
        lambda path: pm.load(path, deep(TOO_DEEP)),
        lambda path: pm.load(path, deep(1), strict=False),
        lambda path: show_file(path),
        lambda path: diff_files(path, path),
        lambda path: pm.tree_serialise_leaves(io.BytesIO(), deep(TOO_DEEP)),
        lambda path: pm.tree_deserialise_leaves(io.BytesIO(), deep(TOO_DEEP)),
    ],
)
def test_what_is_deeper_than_the_stack_says_so(act, deep_file):
    """Walks of trees, and of JSON, go as deep as the tree: whichever ends first."""
    with pytest.raises(
        FileError,
        match=r"(?s)expected a tree that is less deep than Python's limit of \d+ calls, got a "
        r"deeper one\..*  raise the limit:\n      sys\.setrecursionlimit\(10_000\)",
    ):
        act(deep_file)
    assert not deep_file.with_name("other").exists()


def test_a_description_deeper_than_any_stack_is_refused(tmp_path):
    """A file can say anything, and a checksum that fits is no promise."""
    write_container(tmp_path / "odd", {"a": np.ones(1)}, {"pytreemod.tree": "[" * 100_000})
    for arguments in ((), ({"a": np.ones(1)},)):
        with pytest.raises(FileError, match="expected a tree that is less deep than Python's"):
            pm.load(tmp_path / "odd", *arguments)


def test_a_higher_limit_is_what_helps(tmp_path):
    """As the error says."""
    write_deep(tmp_path / "file", 600)
    with pytest.raises(FileError, match="raise the limit"):
        pm.load(tmp_path / "file")
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    try:
        tree = pm.load(tmp_path / "file")
    finally:
        sys.setrecursionlimit(limit)

    assert jax.tree.leaves(tree)[0].shape == (2,)


test_refusals = refusals(globals())
