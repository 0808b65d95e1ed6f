"""Equinox's files: `tree_serialise_leaves` and `tree_deserialise_leaves`.

Such a file has the leaves of a tree one after another, in the format of NumPy's `save`, and no
names: you read it into a tree of the same structure. The function of the filter spec is the format.
The flags of a layer are leaves in Equinox and configuration here: they are written in their place,
and skipped when a file is read.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import EquinoxFileError, describe
from pytreemod.io.container import StrPath, replacement
from pytreemod.nn.batch_normalization import BatchNorm
from pytreemod.nn.dropout import Dropout
from pytreemod.nn.pooling import Pool
from pytreemod.nn.spectral_normalization import SpectralNorm
from pytreemod.tree.nodes import children_of, record_of
from pytreemod.tree.paths import pattern_text
from pytreemod.tree.predicates import NUMBERS
from pytreemod.tree.stored_fields import stored
from pytreemod.tree.surgery import with_children
from pytreemod.typing import IsLeaf, PyTree, class_of, jtu

_T = TypeVar("_T")
_FLAGS: dict[type, tuple[str, ...]] = {
    BatchNorm: ("axis_name", "inference"),
    Dropout: ("p", "inference"),
    Pool: ("init",),
    SpectralNorm: ("inference",),
}
"""The configuration of each layer that is a leaf in Equinox."""


def default_serialise_filter_spec(f: Any, x: Any) -> None:
    """Write a leaf as Equinox does: arrays and numbers as NumPy's `save`, other leaves not at all.

    Args:
        f: a binary file.
        x: the leaf.

    Raises:
        EquinoxFileError: if the format has no such arrays, as random keys.
    """
    if not isinstance(x, (jax.Array, np.ndarray, np.generic, *NUMBERS)):
        return
    if not isinstance(getattr(x, "dtype", None), np.dtype | None) or np.asarray(x).dtype.hasobject:
        raise EquinoxFileError(f"Equinox's files have no {describe(x)}", hint="pm.save(path, tree)")
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
        EquinoxFileError: if the file has no array there, or a number of another kind.
    """
    if not isinstance(x, (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic, *NUMBERS)):
        return x
    try:
        array = np.lib.format.read_array(f, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise EquinoxFileError(f"the file has no array for {describe(x)}: {error}") from error
    dtype = getattr(x, "dtype", None)
    if array.dtype.kind == "V" and array.dtype.itemsize == getattr(dtype, "itemsize", 0):
        # NumPy writes bfloat16 as two opaque bytes.
        array = array.view(dtype)
    if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)):
        return jnp.asarray(array)
    if isinstance(x, np.ndarray):
        return array
    made = array[()] if isinstance(x, np.generic) else type(x)(array.item())
    if array.shape or (array.dtype.kind == "b") != isinstance(x, (bool, np.bool_)) or made != array:
        raise EquinoxFileError(f"the file has {describe(array)} for the number {x!r}")
    return made


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
        EquinoxFileError: if the format has no such leaf.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> pm.tree_serialise_leaves("model.eqx", {"w": jnp.ones(3)})
        >>> pm.tree_deserialise_leaves("model.eqx", {"w": jnp.zeros(3)})
        {'w': Array([1., 1., 1.], dtype=float32)}
    """
    with _opened(path_or_file, is_new=True) as file:

        def write(spec: Any, subtree: PyTree) -> PyTree:
            def write_one(leaf: Any) -> Any:
                spec(file, leaf)
                return leaf

            return _mapped(write_one, subtree, is_leaf)

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
        EquinoxFileError: if a leaf has another type, shape or dtype than in `like`.
    """
    with _opened(path_or_file) as file:

        def read(spec: Any, subtree: PyTree) -> PyTree:
            return _mapped(lambda leaf: spec(file, leaf), subtree, is_leaf)

        made = jtu.tree_map(read, filter_spec, like)
        is_whole = filter_spec is default_deserialise_filter_spec and is_leaf is None
        if is_whole and file is not path_or_file and file.read(1):
            raise EquinoxFileError("tree_deserialise_leaves: the file has more leaves than like")
    pairs = zip(
        jtu.tree_leaves_with_path(like, is_leaf=is_leaf),
        jtu.tree_leaves(made, is_leaf=is_leaf),
        strict=True,
    )
    wrong = [
        f"{pattern_text(path)}: like has {describe(old)}, the file {describe(new)}"
        for (path, old), new in pairs
        if _form_of(old) != _form_of(new)
    ]
    if wrong:
        raise EquinoxFileError("tree_deserialise_leaves: the file is of another tree", at=wrong)
    return made


def _form_of(leaf: Any) -> tuple[Any, ...]:
    is_number = not hasattr(leaf, "dtype")
    return (type(leaf),) if is_number else (leaf.shape, leaf.dtype)


def _mapped(
    fn: Callable[[Any], Any], node: Any, is_leaf: IsLeaf = None, has_flags: bool = True
) -> Any:
    """Map a function over leaves, and flags, in Equinox's order; flags keep their values."""
    children = None if is_leaf is not None and is_leaf(node) else children_of(node)
    if children is None:
        return fn(node)
    kind = class_of(node)
    # Equinox's users pass only arrays to optax, so its states have no flags.
    has_flags = has_flags and kind.__module__.partition(".")[0] != "optax"
    flags = [name for cls in kind.__mro__ if has_flags for name in _FLAGS.get(cls, ())]
    record, parts = record_of(node), list[Any]()
    if record is None or not flags:
        parts = [_mapped(fn, child, is_leaf, has_flags) for _, child in children]
    else:
        data = {*record.data_names(node)}
        for name in record.names(node):
            value = stored(node, name)
            if name in data:
                parts.append(_mapped(fn, value, is_leaf, has_flags))
            elif name in flags:
                jtu.tree_map(fn, value)
    return with_children(node, children, parts)


@contextmanager
def _opened(path_or_file: Any, is_new: bool = False) -> Generator[Any]:
    if not isinstance(path_or_file, (str, os.PathLike)):
        yield path_or_file
        return
    path = pathlib.Path(path_or_file)
    path = path if path.suffix else path.with_suffix(".eqx")
    with replacement(path) if is_new else open(path, "rb") as file:
        yield file
