"""The system's errors, and values that are not paths."""

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
from tests.goldens import refusals
from tests.io.files import write_plain


def test_a_path_that_gives_bytes_is_refused():
    """`os.PathLike` allows both."""

    class Bytes:
        def __fspath__(self):
            return b"name"

    with pytest.raises(ArgumentError, match="expected the path of a file"):
        pm.save(Bytes(), {})


@pytest.mark.parametrize(
    ("name", "readable"),
    [("layers[2].weight", True), ("größe", True), ("a\nb\x1b[31m", False), ("a" * 300, False)],
)
def test_errors_show_names_in_a_single_line(tmp_path, name, readable):
    """Whatever is in a file, it does not write to the terminal of who reads it."""
    entry = {"dtype": "F5", "shape": [], "data_offsets": [0, 0]}
    with pytest.raises(FileError, match="expected the code of a dtype") as caught:
        pm.load(write_plain(tmp_path / "f", {name: entry}))

    shown = str(caught.value).partition("\n  at ")[2]
    assert (shown == name) is readable
    assert shown.isprintable()
    assert len(shown) <= 200


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
        with pytest.raises(own, match=r"my\.file: expected a file to read, got ") as caught:
            call(path)

        assert type(caught.value) is own
        assert isinstance(caught.value, (FileError, PytreemodError, ValueError))
        assert isinstance(caught.value, builtin)
        assert (caught.value.errno, caught.value.filename) == (number, str(path))


def test_only_files_are_opened(tmp_path):
    """A pipe would keep its reader waiting for ever."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileAccessError, match="got a pipe or a device"):
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
        lambda path: pm.Checkpoints(path.with_name("folder")).save(0, deep(TOO_DEEP)),
        lambda path: pm.load(path),
        lambda path: pm.load(path, deep(TOO_DEEP)),
        lambda path: pm.load(path, deep(1), strict=False),
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


def test_a_tree_deeper_than_the_stack_is_refused_with_the_way_to_it(tmp_path):
    """Its beginning, for whole it would be as long as the tree is deep."""
    tree = jnp.ones(2)
    for _ in range(TOO_DEEP):
        tree = [tree]
    with pytest.raises(FileError, match=r"\n  at a(\[0\]){5}\.\.\., \d{3} steps and more\n"):
        pm.save(tmp_path / "f", {"a": tree, "b": 1})


def test_a_description_deeper_than_any_stack_is_refused(tmp_path):
    """A file can have any content, and a correct checksum does not make it valid."""
    path = write_plain(tmp_path / "odd", {"__metadata__": {"pytreemod.tree": "[" * 100_000}})
    for arguments in ((), ({"a": np.ones(1)},)):
        with pytest.raises(FileError, match="expected a tree that is less deep than Python's"):
            pm.load(path, *arguments)


def test_a_higher_limit_is_what_helps(tmp_path):
    """As the error says."""
    write_deep(tmp_path / "file", 600)
    with pytest.raises(FileError, match="raise the limit"):
        pm.load(tmp_path / "file")
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    try:
        tree = pm.load(Path(tmp_path / "file"))
    finally:
        sys.setrecursionlimit(limit)

    assert jax.tree.leaves(tree)[0].shape == (2,)


test_refusals = refusals(globals())
