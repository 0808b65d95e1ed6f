"""Constrained values in a file, for fields that are constrained in `like`.

Owns: what becomes of a leaf `length` in the file where `like` has `length.unconstrained`. The file
is older than the constraint, of a model that was resolved, or of other tools: what it has is what
the constructor would be given, and is brought in as there. So is what the file has under another
constraint: the same numbers without bounds would be other values. A matrix where `like` has an
update of low rank is the base of that.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import ArgumentError, FileError, PytreemodError
from pytreemod.io.configuration import ConfigurationReader, are_same
from pytreemod.io.leaf_names import joined, words_of
from pytreemod.io.tables import Clear, Leaf, Table
from pytreemod.module.constrained_leaves import Constrained, Constraint, mapped
from pytreemod.module.constraining import take_in
from pytreemod.module.reading import count_made_as_one
from pytreemod.training.low_rank import LowRank
from pytreemod.tree.nodes import children_of
from pytreemod.tree.paths import plain_name
from pytreemod.typing import KeyPath, PyTree

_INNER = "unconstrained"


def constrained(
    theirs: Table, ours: Table, like: PyTree, renamed: Mapping[str, str], where: str
) -> Table:
    """A file's table with the arrays that store constrained values, instead of these.

    Arrays that stand for values under another constraint become those that stand for the values in
    `like`. Where the file's constraint cannot be rebuilt, they are left out, as if it had none.

    Args:
        theirs: the file's table, with the names of `like`.
        ours: that of `like`.
        like: the tree.
        renamed: the old names of the leaves that got another from the user.
        where: the call, for errors.

    Raises:
        ArgumentError: the user says that a constrained value is none.
    """
    names = [n for n in ours.classes if joined(n, _INNER) in ours.leaves]
    if theirs.classes:
        for name in names:
            _check_is_not_clear(name, renamed.get(joined(name, _INNER)), where)
    clear = {n for n in names if n in theirs.leaves and joined(n, _INNER) not in theirs.leaves}
    others = {joined(n, _INNER): n for n in names if _has_other_constraint(theirs, ours, n)}
    if not clear and not others:
        return theirs
    nodes = dict(_constraints(like, ()))
    leaves: dict[str, Leaf] = {}
    for name, leaf in theirs.leaves.items():
        if name in others:
            plain = others[name]
            # What is not registered cannot be asked for its values.
            with suppress(FileError):
                old = _read_constraint(theirs, plain, where)
                new = _Changed(old, nodes[plain])
                leaves[name] = _brought_in(new, leaf, ours.leaves[name], plain, where)
        elif name in clear and name in nodes:
            inner = joined(name, _INNER)
            leaves[inner] = _brought_in(nodes[name], leaf, ours.leaves[inner], name, where)
        else:
            leaves[name] = leaf
    return replace(theirs, leaves=leaves)


class _Changed(NamedTuple):
    """Takes in what stands for a value under one constraint, for another."""

    old: Constraint
    new: Constrained


def _has_other_constraint(theirs: Table, ours: Table, name: str) -> bool:
    key = joined(name, "constraint")
    is_told = key in theirs.config and key in ours.config
    return is_told and not are_same(theirs.config[key], ours.config[key])


def _read_constraint(theirs: Table, name: str, where: str) -> Constraint:
    reader, written = ConfigurationReader(where), theirs.config[joined(name, "constraint")]
    found = reader.read(written, name)
    if not isinstance(found, Constraint):
        raise reader.malformed(name, written)
    return found


def _take_in(ours: Constrained | _Changed, value: Any, name: str) -> Any:
    """The array that stands for a value; of shapes alone, its shape."""
    if isinstance(ours, _Changed):
        is_abstract = isinstance(value, jax.ShapeDtypeStruct)
        axes = count_made_as_one(ours.new)
        forward = mapped(ours.old.forward, axes if np.ndim(value) >= axes else 0)
        value = jax.eval_shape(forward, value) if is_abstract else forward(value)
        ours = ours.new
    return take_in(ours.constraint, value, name, ours).unconstrained


def based(theirs: Table, like: PyTree, renamed: dict[str, str]) -> Table:
    """A file's table with matrices in the place of the bases of updates of low rank in `like`.

    Args:
        theirs: the file's table, with the names of `like`.
        like: the tree.
        renamed: the old names of leaves that have got others; it gets these.
    """
    bases = {
        name: joined(name, "base")
        for name in _low_ranks(like, ())
        if name in theirs.leaves and joined(name, "base") not in theirs.leaves
    }
    if not bases:
        return theirs
    for name, inner in bases.items():
        renamed[inner] = renamed.get(name) or name
    return replace(
        theirs, leaves={bases.get(name, name): leaf for name, leaf in theirs.leaves.items()}
    )


def _low_ranks(node: Any, path: KeyPath) -> Any:
    if isinstance(node, LowRank):
        yield plain_name(path, ".")
    for key, child in children_of(node) or ():
        yield from _low_ranks(child, (*path, key))


def _constraints(node: Any, path: KeyPath) -> Any:
    if isinstance(node, Constrained):
        yield plain_name(path, "."), node
        return
    for key, child in children_of(node) or ():
        yield from _constraints(child, (*path, key))


def _brought_in(
    node: Constrained | _Changed, leaf: Leaf, ours: Leaf, name: str, where: str
) -> Leaf:
    """The entry of the array that a constrained value becomes."""
    number = leaf.form.get("value")
    if not leaf.is_array:
        if type(number) not in (int, float):
            return leaf
        leaf = Leaf({"is": "jax"}, (), ours.dtype)
    shape = leaf.shape
    # What it does not take keeps its shape, and is told to be no fit, or refused when it is read.
    with suppress(PytreemodError):
        given = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        shape = _take_in(node, given, name).shape
    make = ft.partial(_made, node, number=number, name=name, where=where)
    return replace(leaf, shape=tuple(shape), source=Clear(leaf.source, make))


def _made(
    node: Constrained | _Changed,
    array: Any,
    *,
    number: float | None,
    name: str,
    where: str,
) -> Any:
    """The array that stands for a value, in float32 or wider: it may be cast to that at once."""
    value = number if array is None else array
    dtype = jnp.dtype(getattr(value, "dtype", jnp.float32))
    wide = jax.dtypes.canonicalize_dtype(dtype) if dtype.itemsize > 4 else jnp.float32
    given = jnp.asarray(value, wide)
    try:
        return np.asarray(_take_in(node, given, name))
    except PytreemodError as error:
        got = f"{name}, which is refused"
        expected = "constrained values that like takes"
        raise FileError(where, expected, got, places=[str(error)]) from error


def _check_is_not_clear(name: str, old: str | None, where: str) -> None:
    """Refuse a constrained value under the name of its unconstrained array."""
    if old is None or words_of(old)[-1:] != words_of(name)[-1:]:
        return
    hint = ["the value is brought in, as by the constructor, under the name of the field:"]
    # Where the field has the same name here, there is nothing to rename.
    hint += ["pm.load(path, like)" if old == name else f'rename={{"{old}": "{name}"}}']
    expected = f"the array that stands for {name}"
    raise ArgumentError(f"{where}, rename", expected, f"{old!r}, a constrained value", hint=hint)
