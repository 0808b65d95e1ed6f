"""`save`: a tree as a table, written into a file."""

from __future__ import annotations

import functools as ft
import json
import operator
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import ArgumentError, FileError, describe
from pytreemod.io.configuration import configuration_of, text_of
from pytreemod.io.container import KNOWN, Entry, StrPath, opened, write_table
from pytreemod.io.names import Place, generator_of, is_key, parts_of, places_of, ties_of
from pytreemod.io.renaming import NameTable, Renaming
from pytreemod.tree.paths import check_distinct
from pytreemod.tree.predicates import NUMBERS, is_abstract, is_array
from pytreemod.typing import PyTree, Tracer

# In the metadata of a file: what it says of the tree, and what the user said.
DESCRIPTION, USERS = "pytreemod", "pytreemod.metadata"


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
    places = [*places_of(tree)]
    table = table_of(places, "save")
    renaming = Renaming(rename)
    renamed, _ = renaming.table(table)
    renaming.refuse_unused(table)
    try:
        # For transformers: whose layout of tensors the file has.
        texts = {"format": "pt", USERS: json.dumps(metadata, default=_as_list)}
    except (TypeError, ValueError, RecursionError) as error:
        fact = f"save(metadata) takes what JSON has, not {describe(metadata)}: {error}"
        raise ArgumentError(fact) from error
    if rename is None:
        ties = {tie.place: tie.source for tie in ties_of(places) if tie.through is None}
        texts[DESCRIPTION] = json.dumps({"config": configuration_of(places), "ties": ties})
    write_table(path, renamed, texts)


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
        return parsed(texts[USERS], path) if USERS in texts else texts or None


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
    if not is_array(value):
        raise TypeError(describe(value))
    return np.asarray(value).tolist()


def table_of(places: Iterable[Place], where: str) -> dict[str, Entry]:
    """Return the arrays of a tree by name.

    Raises:
        FileError: if a leaf is neither an array nor a number, or has no values on this host.
        StructureError: if two leaves have one name.
    """
    places = [*places]
    leaves = [place.node for place in places if place.children is None]
    forms = [entry_of(leaf) for leaf in leaves]
    faults = [_fault_of(leaf, form) for leaf, form in zip(leaves, forms, strict=True)]
    parts = parts_of(places)
    wrong = [f"{part.name}: {faults[part.leaf]}" for part in parts if faults[part.leaf]]
    if wrong:
        raise FileError(f"{where}: a file holds arrays and numbers", at=wrong)
    found = [(part, form) for part in parts if (form := forms[part.leaf]) is not None]
    check_distinct([part.name for part, _ in found], where)
    # The layers of a Stack are read one after another.
    read = ft.lru_cache(maxsize=1)(operator.call)
    return {part.name: _part_of(form, part.at, read) for part, form in found}


def entry_of(leaf: Any) -> Entry | None:
    """Return a leaf, which may be abstract, as an entry; None if it is configuration."""
    if isinstance(leaf, NUMBERS):
        leaf = np.asarray(leaf)
    if not is_abstract(leaf):
        return None
    key = generator_of(leaf)
    data = leaf if key is None else jax.eval_shape(jax.random.key_data, leaf)
    # In a file, numbers have the byte order of this machine.
    dtype = data.dtype if key or isinstance(leaf, jax.Array) else data.dtype.newbyteorder("=")
    return Entry(tuple(data.shape), dtype, ft.partial(_numbers_of, leaf), key)


def _numbers_of(leaf: Any) -> np.ndarray:
    if is_key(leaf):
        return np.asarray(jax.random.key_data(leaf))
    # JAX keeps the numbers of an array on the host as long as the array lives.
    is_far = isinstance(leaf, jax.Array) and any(x.platform != "cpu" for x in leaf.devices())
    return np.asarray(jnp.copy(leaf) if is_far else leaf)


_FAULTS: dict[Any, str] = {Tracer: "is traced", np.ma.MaskedArray: "has a mask"}
_FAULTS[jax.ShapeDtypeStruct] = "is abstract"


def _fault_of(leaf: Any, form: Entry | None) -> str | None:
    if form is None:
        return None if text_of(leaf) is not None else describe(leaf)
    for kind, fault in _FAULTS.items():
        if isinstance(leaf, kind):
            return f"{describe(leaf)}, which {fault}"
    if form.dtype.name not in KNOWN:
        return f"{describe(leaf)} of the dtype {form.dtype}"
    is_far = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    is_divided = is_far and not leaf.is_fully_replicated
    return f"{describe(leaf)}, divided between hosts: use orbax" if is_divided else None


def _part_of(form: Entry, at: tuple[int, ...], read: Callable[..., Any]) -> Entry:
    """Return one layer of a leaf; the leaf is read by `read`, which keeps the last one."""
    shape = form.shape[len(at) :]
    return form._replace(shape=shape, read=lambda: read(form.read)[at]) if at else form
