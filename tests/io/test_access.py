"""The system's errors, and values that are not paths."""

import errno
import io
import os
import sys

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
from tests.io.files import write_plain


def test_a_path_that_gives_bytes_is_refused():
    """`os.PathLike` allows both."""

    class Bytes:
        def __fspath__(self):
            return b"name"

    with pytest.raises(ArgumentError, match="path"):
        pm.save(Bytes(), {})


@pytest.mark.parametrize("name", ["~/my.file", "~/run", ""])
def test_a_name_that_only_a_shell_expands_makes_no_folder(name, tmp_path, monkeypatch):
    """A file in a folder named `~` would be lost for whoever looks in the home folder."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileError, match=r"path|~"):
        pm.save(name, {})
    with pytest.raises((FileError, ArgumentError), match=r"path|~|folder"):
        pm.Checkpoints(name)

    assert os.listdir(tmp_path) == []


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
def test_the_systems_errors_are_of_two_kinds(tmp_path, monkeypatch, number, own, builtin):
    """One of this library's, and the one that a Python user would catch; the number is the same."""
    path = tmp_path / "my.file"
    pm.save(path, {})

    def refuse(path):
        raise OSError(number, os.strerror(number), "another.file")

    monkeypatch.setattr(io, "FileIO", refuse)
    for call in (pm.load, pm.read_metadata):
        with pytest.raises(own, match=r"my\.file") as caught:
            call(path)

        assert type(caught.value) is own
        assert isinstance(caught.value, (FileError, PytreemodError, ValueError))
        assert isinstance(caught.value, builtin)
        assert (caught.value.errno, caught.value.filename) == (number, str(path))


def test_only_files_are_opened(tmp_path):
    """A pipe would keep its reader waiting for ever."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileAccessError, match="pipe"):
        pm.load(tmp_path / "pipe")


class Box(pm.Module):
    """A node that Equinox's files are walked below of, too."""

    content: object


def deep(depth):
    """Lists and Modules in one another."""
    tree = jnp.ones(2)
    for i in range(depth):
        tree = Box(tree) if i % 2 else [tree]
    return tree


# JAX also recurses, up to Python's limit; from 3.12 on that is not the limit of C.
TOO_DEEP = 900 if sys.version_info < (3, 12) else 1500


def write_deep(path, depth):
    """A file of lists, which may be deeper than one that can be written here."""
    name = ".".join("0" * depth)
    leaf = f'{{"leaf": "{name}", "is": "jax"}}'
    tree = depth * '{"list": [' + leaf + depth * "]}"
    metadata = {"pytreemod.tree": f'{{"version": 1, "tree": {tree}}}'}
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    write_plain(path, {"__metadata__": metadata, name: entry}, np.ones(2, np.float32).tobytes())


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
        lambda path: pm.load(path),
        lambda path: pm.load(path, deep(TOO_DEEP)),
        lambda path: pm.tree_deserialise_leaves(io.BytesIO(), deep(TOO_DEEP)),
    ],
)
def test_what_is_deeper_than_the_stack_says_so(act, deep_file):
    """Walks of trees, and of JSON, go as deep as the tree: whichever ends first."""
    with pytest.raises(FileError, match="setrecursionlimit"):
        act(deep_file)
    assert not deep_file.with_name("other").exists()


def test_a_description_deeper_than_any_stack_is_refused(tmp_path):
    """A file can have any content, and a correct checksum does not make it valid."""
    path = write_plain(tmp_path / "odd", {"__metadata__": {"pytreemod.tree": "[" * 100_000}})
    for arguments in ((), ({"a": np.ones(1)},)):
        with pytest.raises(FileError, match="setrecursionlimit"):
            pm.load(path, *arguments)
