"""A tree's arrays under the names, and in the form, that other tools use for them.

Names and shapes determine the contents of the file. Each array is made when it is written: a Stack
yields one layer after another, and the parts of a packed matrix are joined then.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast

import jax
import numpy as np

from pytreemod.errors import ArgumentError, FileError, PytreemodError, describe
from pytreemod.io.configuration import ConfigurationReader, Json, describe_json
from pytreemod.io.containers import ArraySource, host_bytes
from pytreemod.io.descriptions import Description
from pytreemod.io.forms import numbered
from pytreemod.io.headers import can_be_written
from pytreemod.io.renaming import NameTable, parse_rules, renamed_table
from pytreemod.io.sources import PartSource, SourceReader, part_of
from pytreemod.io.tables import Leaf, Name, Unstacked, read_table, shown_name
from pytreemod.tree.kinds import PYTHON_SCALARS
from pytreemod.typing import untyped_jax


def renamed_sources(
    described: Description, arrays: Mapping[str, Any], rename: NameTable, where: str
) -> list[ArraySource]:
    """Return the contents of a file for other tools.

    Args:
        described: the tree.
        arrays: its arrays by name, with keys as their numbers.
        rename: see `save`.
        where: the call, for errors.

    Returns:
        A source for each leaf to write; Python's numbers become arrays, too.

    Raises:
        ArgumentError: if the table of names does not fit the tree.
        FileError: if other tools could not read a leaf.
    """
    rules = parse_rules(rename, where, is_saving=True)
    table = read_table(described.tree, {**described.leaves, **arrays})
    renamed, old_names = renamed_table(numbered(table, rules.are_about_layers), rules)
    on_host = _OnHost(arrays)
    read = SourceReader(on_host.whole, on_host.part)
    made: list[ArraySource] = []
    opaque: list[str] = []
    for name, leaf in renamed.leaves.items():
        text = ".".join(name)
        if isinstance(leaf.source, str):
            made.append(ArraySource.of(text, arrays[leaf.source]))
        elif leaf.source is not None:
            dtype = cast("np.dtype[Any]", leaf.dtype)
            made.append(ArraySource(text, dtype, leaf.shape, ft.partial(read, leaf.source)))
        else:
            number = _number_of(leaf, name, where)
            opaque += [] if number is not None else [_line(old_names.get(name, name), leaf)]
            made += [] if number is None else [ArraySource.of(text, number)]
    if opaque:
        hint = [
            "leave out the others:",
            f'rename={{"{opaque[0].partition(": ")[0]}": None, ...}}',
        ]
        expected = "arrays and numbers, which other tools read"
        raise FileError(where, expected, f"{len(opaque)} of another kind", at=opaque, hint=hint)
    return made


def texts_for_tools(metadata: Json, where: str) -> dict[str, str]:
    """Return the strings that such a file has in addition to its arrays.

    Args:
        metadata: see `save`.
        where: the call, for errors.

    Raises:
        ArgumentError: if a value is not a string.
    """
    texts: dict[Any, Any] = {}
    is_dict = isinstance(metadata, dict)
    if is_dict:
        texts = cast("dict[Any, Any]", metadata)
    if (metadata is None or is_dict) and all(isinstance(x, str) for x in (*texts, *texts.values())):
        # Transformers requires it: whose layout of tensors the file has.
        return {"format": "pt", **texts}
    expected = "with `rename`, a dict of strings, which other tools read"
    raise ArgumentError(f"{where}, metadata", expected, describe(metadata))


def _number_of(leaf: Leaf, name: Name, where: str) -> Any:
    """Return a Python number as an array; None for everything that a file cannot store."""
    # Reading may fail for a leaf that is not a number, such as a function without a name.
    with suppress(PytreemodError):
        number = ConfigurationReader(where).read(leaf.form["value"], ".".join(name))
        if type(number) in PYTHON_SCALARS:
            array = np.asarray(number)
            return array if can_be_written(array.dtype) else None
    return None


def _line(name: Name, leaf: Leaf) -> str:
    return f"{shown_name(name)}: {describe_json(leaf.form['value'])}"


class _OnHost:
    """The arrays of a tree, each moved to the host when it is accessed."""

    def __init__(self, arrays: Mapping[str, Any]):
        self._arrays = arrays

    def whole(self, name: str) -> Any:
        return _on_host(name, self._arrays[name])

    def part(self, name: str, source: PartSource) -> Any:
        array = self._arrays[name]
        if not isinstance(array, jax.Array):
            return part_of(array, source)
        devices = array.devices()
        if len(devices) > 1:
            return part_of(_on_host(name, array), source)
        if next(iter(devices)).platform == "cpu":
            # NumPy shares the memory.
            return part_of(np.asarray(array), source)
        # One program for all layers, which takes the index: only a part is copied to the host.
        with jax.transfer_guard_host_to_device("allow"):
            if isinstance(source, Unstacked):
                at, axis = source.at, source.axis
                found = untyped_jax.lax.dynamic_index_in_dim(array, at, axis, keepdims=False)
            else:
                size = source.stop - source.start
                found = untyped_jax.lax.dynamic_slice_in_dim(array, source.start, size, source.axis)
        return _on_host(name, found)


def _on_host(name: str, array: Any) -> Any:
    if not isinstance(array, jax.Array):
        return array
    # As for writing a file: JAX caches no copy of it.
    source = ArraySource.of(name, array)
    (data,) = host_bytes(name, [source])
    return np.frombuffer(data, source.dtype).reshape(source.shape)
