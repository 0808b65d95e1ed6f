"""`save`: a tree as a table, written into a file."""

from __future__ import annotations

import functools as ft
import json
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import ArgumentError, FileError, describe
from pytreemod.io.configuration import configuration_of, text_of
from pytreemod.io.container import Entry, StrPath, can_be_written, opened, write_table
from pytreemod.io.names import (
    Part,
    Place,
    check_distinct,
    generator_of,
    is_key,
    parts_of,
    places_of,
    ties_of,
)
from pytreemod.io.renaming import NameTable, renamed
from pytreemod.module.unfinished import refuse_unfinished
from pytreemod.tree.predicates import NUMBERS, is_array
from pytreemod.typing import PyTree, Tracer

DESCRIPTION, USERS = "pytreemod", "metadata"
"""In the metadata of a file: what it says of the tree, and what the user said."""


def save(
    path: StrPath, tree: PyTree, metadata: Any = None, *, rename: NameTable | None = None
) -> None:
    """Save a tree to a file: its arrays by name, and its configuration as text.

    The file is one of safetensors, which other tools can read. The name of an array is its path
    with dots, `layers.2.weight`; the layers of a Stack, and the members of an Ensemble, have a name
    each, as in a list. A file replaces an older one in one step, and completely or not at all.

    **Law.** `load(path, like) == tree` for every `like` of the structure of `tree`.

    Args:
        path: the path of the file, by convention with the ending `.safetensors`.
        tree: any tree of arrays, random keys and Python's numbers.
        metadata: anything that JSON has, and arrays, which become lists; for
            [`read_metadata`][pytreemod.read_metadata].
        rename: from names in the tree to names in the file, as for [`load`][pytreemod.load], for
            other tools. Such a file has no configuration.

    Raises:
        FileError: if a leaf is neither an array nor a number, or has no values on this host.
        ArgumentError: if JSON does not have the metadata, or `rename` does not fit.
        StructureError: if two leaves have one name.
        OSError: if the file cannot be written.

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> model = pm.nn.Linear(3, 4, key=jax.random.key(0))
        >>> pm.save("model.safetensors", model, {"step": 100})
        >>> pm.load("model.safetensors", pm.nn.Linear(3, 4, key=jax.random.key(1))) == model
        True
        >>> pm.read_metadata("model.safetensors")
        {'step': 100}
    """
    refuse_unfinished("save", tree)
    places = [*places_of(tree)]
    table = table_of(places, "save")
    # For transformers: whose layout of tensors the file has.
    texts = {"format": "pt"}
    if metadata is not None:
        try:
            texts[USERS] = json.dumps(metadata, default=_as_list)
        except (TypeError, ValueError) as error:
            fact = f"save(metadata) takes what JSON has, not {describe(metadata)}: {error}"
            raise ArgumentError(fact) from error
    if rename is None:
        ties = {tie.place: tie.source for tie in ties_of(places) if tie.through is None}
        about = {"config": configuration_of(places), "ties": ties}
        texts[DESCRIPTION] = json.dumps(about)
    write_table(path, table if rename is None else renamed(table, rename, "save")[0], texts)


def read_metadata(path: StrPath) -> Any:
    """Return the `metadata` that [`save`][pytreemod.save] got; no array is read.

    Args:
        path: the path of the file or folder.

    Returns:
        The value, None if there is none; for a file of another tool, the strings in its header.

    Raises:
        FileError: if the file is damaged.
    """
    with opened(path) as (_, texts):
        if USERS not in texts:
            return None if DESCRIPTION in texts else texts or None
        return parsed(texts[USERS], path)


def parsed(text: str, path: StrPath) -> Any:
    """Return the value of a text in a file.

    Raises:
        FileError: if it is no JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} is damaged: {error}") from error


def _as_list(value: Any) -> Any:
    if not isinstance(value, (jax.Array, np.ndarray, np.generic)):
        raise TypeError(describe(value))
    return np.asarray(value).tolist()


def table_of(places: Iterable[Place], where: str) -> dict[str, Entry]:
    """Return the arrays of a tree by name; numbers are arrays without axes.

    Raises:
        FileError: if a leaf is neither an array nor a number, or has no values on this host.
        StructureError: if two leaves have one name.
    """
    leaves = [place.node for place in places if place.is_leaf]
    arrays = [_array_of(leaf) for leaf in leaves]
    host, parts, wrong = _Host(), list[Part](), list[str]()
    for part in parts_of(places):
        fault = _fault_of(leaves[part.leaf], arrays[part.leaf])
        if fault is not None:
            wrong += [f"{part.name}: {fault}"]
        elif arrays[part.leaf] is not None:
            parts.append(part)
    if wrong:
        raise FileError(f"{where}: a file holds arrays and numbers", at=wrong)
    check_distinct([part.name for part in parts], where)
    return {part.name: _entry(leaves[part.leaf], arrays[part.leaf], part, host) for part in parts}


def _array_of(leaf: Any) -> Any:
    """Return a leaf as an array; None if it is configuration."""
    if is_key(leaf) and isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf)
    return np.asarray(leaf) if isinstance(leaf, NUMBERS) else leaf if is_array(leaf) else None


def _fault_of(leaf: Any, array: Any) -> str | None:
    if isinstance(array, Tracer):
        return f"{describe(leaf)}, which is traced"
    if array is None:
        return None if text_of(leaf) is not None else describe(leaf)
    if not can_be_written(array.dtype):
        return f"{describe(leaf)} of the dtype {array.dtype}"
    is_here = not isinstance(array, jax.Array) or (
        array.is_fully_addressable or array.is_fully_replicated
    )
    return None if is_here else f"{describe(leaf)} is divided between hosts: use orbax"


def _entry(leaf: Any, array: Any, part: Part, host: _Host) -> Entry:
    shape = array.shape[len(part.at) :]
    read = ft.partial(_read, host, array, part.at)
    return Entry(shape, np.dtype(array.dtype), read, generator_of(leaf))


def _read(host: _Host, array: Any, at: tuple[int, ...]) -> np.ndarray:
    return host(array)[at] if at else host(array)


class _Host:
    """The last array in the host's memory: the layers of a Stack are written one by one."""

    def __init__(self) -> None:
        self.given: Any = None
        self.array: Any = None

    def __call__(self, given: Any) -> np.ndarray:
        if given is not self.given:
            is_far = isinstance(given, jax.Array) and any(
                device.platform != "cpu" for device in given.devices()
            )
            # JAX keeps the numbers of an array on the host as long as it lives.
            self.given, self.array = given, np.asarray(jnp.copy(given) if is_far else given)
        return self.array
