"""Equinox's files: `tree_serialise_leaves` and `tree_deserialise_leaves`.

Such a file has the leaves of a tree one after another, in the format of NumPy's `save`, and no
names: you read it into a tree of the same structure. The function of the filter spec is the format.
The flags of a layer are leaves in Equinox and configuration here: they are written in their place,
and skipped when a file is read.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod import nn
from pytreemod.errors import FileError, describe
from pytreemod.io.container import StrPath, replacement
from pytreemod.tree.instances import is_module, split_of, stored
from pytreemod.tree.nodes import children_of
from pytreemod.tree.paths import pattern_text
from pytreemod.tree.predicates import NUMBERS, is_abstract
from pytreemod.typing import IsLeaf, KeyPath, PyTree, class_of, is_instance, jtu

_T = TypeVar("_T")
# The configuration of each layer that is a leaf in Equinox.
_FLAGS: dict[type, tuple[str, ...]] = {
    nn.BatchNorm: ("axis_name", "inference"),
    nn.Dropout: ("p", "inference"),
    nn.Pool: ("init",),
    nn.SpectralNorm: ("inference",),
}


def default_serialise_filter_spec(f: Any, x: Any) -> None:
    """Write a leaf as Equinox does: arrays and numbers as NumPy's `save`, other leaves not at all.

    Args:
        f: a binary file.
        x: the leaf.

    Raises:
        FileError: if the format has no such arrays, as random keys.
    """
    if not is_abstract(x) and not is_instance(x, NUMBERS):
        return
    if not is_instance(getattr(x, "dtype", None), np.dtype | None) or np.asarray(x).dtype.hasobject:
        raise FileError(f"Equinox's files have no {describe(x)}", hint="pm.save(path, tree)")
    # A pickle runs code: no leaf is written or read as one.
    np.save(f, np.asarray(x), allow_pickle=False)


def default_deserialise_filter_spec(f: Any, x: Any) -> Any:
    """Read the value of a leaf from the file, as Equinox does; a leaf that has none is unchanged.

    Args:
        f: a binary file.
        x: the leaf of `like`.

    Returns:
        A value of the kind of `x`; its shape and dtype are those of the file.

    Raises:
        FileError: if the file has no array there, or a number of another kind.
    """
    if not is_abstract(x) and not is_instance(x, NUMBERS):
        return x
    try:
        array: Any = np.lib.format.read_array(f, allow_pickle=False)
        if array.dtype.kind == "V" and array.dtype.itemsize == x.dtype.itemsize:
            # NumPy writes bfloat16 as two opaque bytes.
            array = array.view(x.dtype)
        if is_instance(x, (jax.Array, jax.ShapeDtypeStruct)):
            return jnp.asarray(array)
        if is_instance(x, np.ndarray):
            return array
        made: Any = array[()] if is_instance(x, np.generic) else type(x)(array.item())
        is_flag = is_instance(x, (bool, np.bool_))
        if array.shape or made != array or is_flag != (array.dtype.kind == "b"):
            raise ValueError(f"it has {describe(array)}")
        return made
    # Whatever NumPy and Python say of bytes that are no such array.
    except Exception as error:
        raise FileError(f"the file has no {describe(x)} there: {error}") from error


def tree_serialise_leaves(
    path_or_file: StrPath | Any,
    pytree: PyTree,
    filter_spec: Any = default_serialise_filter_spec,
    is_leaf: IsLeaf = None,
) -> None:
    """Write the leaves of a tree into a file, in order, as Equinox does.

    Args:
        path_or_file: the name of a file, which gets the ending `.eqx` if it has none; or a binary
            file.
        pytree: any tree.
        filter_spec: how to write a leaf: a function of the file and the leaf, or a prefix tree of
            such functions.
        is_leaf: which nodes are leaves.

    Raises:
        FileError: if the format has no such leaf.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> pm.tree_serialise_leaves("model.eqx", {"w": jnp.ones(3)})
        >>> pm.tree_deserialise_leaves("model.eqx", {"w": jnp.zeros(3)})
        {'w': Array([1., 1., 1.], dtype=float32)}
    """
    with _opened(path_or_file, is_new=True) as file:

        def write(spec: Any, subtree: PyTree) -> None:
            for _, leaf, _ in _in_order(subtree, is_leaf):
                spec(file, leaf)

        jtu.tree_map(write, filter_spec, pytree)


def tree_deserialise_leaves(
    path_or_file: StrPath | Any,
    like: _T,
    filter_spec: Any = default_deserialise_filter_spec,
    is_leaf: IsLeaf = None,
) -> _T:
    """Read the leaves of a tree; the inverse of `tree_serialise_leaves`.

    Args:
        path_or_file: the name of a file, or a binary file.
        like: a tree of the structure of the file; it may be abstract.
        filter_spec: how to read a leaf: a function of the file and the leaf of `like`, which
            returns the new leaf; or a prefix tree of such functions.
        is_leaf: which nodes are leaves.

    Returns:
        A tree of the structure of `like`, with its configuration.

    Raises:
        FileError: if a leaf has another type, shape or dtype than in `like`.
    """
    with _opened(path_or_file) as file:

        def read(above: KeyPath, spec: Any, subtree: PyTree) -> PyTree:
            values: list[Any] = []
            for path, leaf, is_flag in _in_order(subtree, is_leaf):
                try:
                    value = spec(file, leaf)
                except FileError as error:
                    at = pattern_text((*above, *path))
                    raise FileError(str(error), at=[at]) from error
                values += [] if is_flag else [value]
            return jtu.tree_structure(subtree, is_leaf=is_leaf).unflatten(values)

        made = jtu.tree_map_with_path(read, filter_spec, like)
        is_whole = filter_spec is default_deserialise_filter_spec and file is not path_or_file
        if is_whole and file.read(1):
            raise FileError("tree_deserialise_leaves: the file has more leaves than like")
    olds = jtu.tree_leaves_with_path(like, is_leaf=is_leaf)
    news = jtu.tree_leaves(made, is_leaf=is_leaf)
    wrong = [
        f"{pattern_text(path)}: like has {describe(old)}, the file {describe(new)}"
        for (path, old), new in zip(olds, news, strict=True)
        if _form_of(old) != _form_of(new)
    ]
    if wrong:
        raise FileError("tree_deserialise_leaves: the file is of another tree", at=wrong)
    return made


def _form_of(leaf: Any) -> tuple[Any, ...]:
    return (leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else (class_of(leaf),)


def _in_order(
    node: Any, is_leaf: IsLeaf = None, has_flags: bool = True, path: KeyPath = ()
) -> Iterator[tuple[KeyPath, Any, bool]]:
    """Yield what Equinox has as leaves, in its order, and whether it is a flag here."""
    children = None if is_leaf is not None and is_leaf(node) else children_of(node)
    kind = class_of(node)
    # Equinox's users pass only arrays to optax, so its states have no flags.
    has_flags = has_flags and kind.__module__.partition(".")[0] != "optax"
    flags = [name for cls in kind.__mro__ if has_flags for name in _FLAGS.get(cls, ())]
    if children is None:
        yield path, node, False
    elif not is_module(node) or not flags:
        for key, child in children:
            yield from _in_order(child, is_leaf, has_flags, (*path, key))
    else:
        data = split_of(node).data
        for name in split_of(node).names:
            value, below = stored(node, name), (*path, jtu.GetAttrKey(name))
            if name in data:
                yield from _in_order(value, is_leaf, has_flags, below)
            elif name in flags:
                yield from ((below, leaf, True) for leaf in jtu.tree_leaves(value))


@contextmanager
def _opened(path_or_file: Any, is_new: bool = False) -> Generator[Any]:
    if not is_instance(path_or_file, (str, os.PathLike)):
        yield path_or_file
        return
    path = pathlib.Path(path_or_file)
    path = path if path.suffix else path.with_suffix(".eqx")
    with replacement(path) if is_new else open(path, "rb") as file:
        yield file
