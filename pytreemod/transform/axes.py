"""Axes by spec: which axis of each array a map or a scan takes apart, or stacks on."""

from __future__ import annotations

import functools as ft
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pytreemod.errors import ArgumentError, ShapeError, describe
from pytreemod.transform.arguments import Named, Specs
from pytreemod.transform.sowing import WithSown
from pytreemod.tree.nodes import is_node
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import NUMBERS, is_array
from pytreemod.tree.prefixes import By
from pytreemod.typing import AxesSpec, PyTree, jtu


@dataclass(frozen=True)
class if_array:
    """An axis for arrays, None for everything else: `in_axes=if_array(1)`.

    Args:
        axis: the axis.

    Examples:
        >>> if_array(1)(jnp.ones((2, 3))), if_array(1)("text")
        (1, None)
    """

    axis: int

    def __call__(self, x: Any) -> int | None:
        """Return the axis of a leaf: `axis` for an array, None for anything else."""
        return self.axis if is_array(x) else None


ON_AXIS_0 = if_array(0)


def is_axes_spec(spec: Any) -> bool:
    """Whether a value is an axis spec by itself, not a tree of such specs."""
    return spec is None or isinstance(spec, (int, By)) or (callable(spec) and not is_node(spec))


def axes_of(spec: AxesSpec, tree: PyTree, where: str, root: str) -> list[int | None]:
    """Return the axis of each leaf of `tree`; None for leaves that are not mapped.

    Args:
        spec: ints, None, functions from leaf to axis, `by(...)`, or a prefix tree of these.
        tree: the tree.
        where: the name of the spec in errors.
        root: the name of the tree in errors.

    Raises:
        SpecError: if the spec is not a prefix, or contains a value that is not an axis.
    """
    if spec is ON_AXIS_0:
        return [0 if is_array(leaf) else None for leaf in jtu.tree_leaves(tree)]
    return _AXES.of_leaves(spec, tree, where, root)


def _asked(value: Any, leaf: Any) -> Any:
    return value(leaf) if callable(value) else value


def _is_axis(value: Any) -> bool:
    return value is None or type(value) is int


_AXES = Specs(is_axes_spec, _asked, _is_axis, is_array, "axis: an int or None")


def axes_by_argument(
    spec: AxesSpec,
    named: Named,
    positional: int,
    known: Sequence[str],
    where: str,
    default: AxesSpec = ON_AXIS_0,
) -> list[int | None]:
    """Return the axis of each leaf of the arguments; see `Specs.by_argument`.

    Raises:
        ArgumentError, SpecError: if the spec does not fit the arguments.
    """
    if spec is ON_AXIS_0:
        return axes_of(spec, [tree for _, tree in named], where, "")
    found = _AXES.by_argument(spec, named, positional, known, where, default)
    return [axis for own in found for axis in own]


def common_size(
    where: str, named: Named, axes: Sequence[int | None], size: Any, option: str = ""
) -> Any:
    """Return the size of arrays along their axes, which must agree.

    Args:
        where: the name of the transform in errors.
        named: the arguments.
        axes: the axis of each of their leaves.
        size: the size given as an option, or None.
        option: the name of that option; empty if there is none.

    Raises:
        ShapeError: if an array lacks its axis, or sizes disagree; the error names all paths.
        ArgumentError: if no array and no option gives the size.
    """
    leaves = [x for _, tree in named for x in jtu.tree_leaves(tree)]
    pairs = [(x, axis) for x, axis in zip(leaves, axes, strict=True) if axis is not None]
    has_axes = all(-x.ndim <= axis < x.ndim for x, axis in pairs)
    if has_axes:
        sizes = {x.shape[axis] for x, axis in pairs} | ({size} - {None})
        if len(sizes) == 1:
            return sizes.pop()
        if not sizes:
            raise ArgumentError(f"{where}: no array has an axis to map over", hint=option)
    paths = [path_text(p, n) for n, tree in named for p, _ in jtu.tree_leaves_with_path(tree)]
    rows = zip(paths, leaves, axes, strict=True)
    places = [f"{p}: {describe(x)}, axis {axis}" for p, x, axis in rows if axis is not None]
    what = "arrays differ in size along their axes" if has_axes else "an array lacks its axis"
    if size is not None:
        places.append(f"{option.partition('=')[0] or 'length'}: {size}")
    raise ShapeError(f"{where}: {what}", at=places)


def stacking_axes(
    spec: AxesSpec, result: PyTree, where: str, kind: str = "map"
) -> tuple[PyTree, list[int | None]]:
    """Return the result of one member, and the axis on which each array is to be stacked.

    Numbers that an int or a function gives an axis become arrays. Sown values have axis 0.

    Args:
        spec: the axes on which to stack.
        result: the result of one member.
        where: the name of the spec in errors.
        kind: how its members run, for the labels of sown values.

    Raises:
        ShapeError: if stacked results will not have an axis.
    """
    if type(result) is WithSown:
        own, axes = stacking_axes(spec, result.result, where)
        sown = [0 for x in jtu.tree_leaves(result.values) if is_array(x)]
        labels = tuple(label.stack(kind) for label in result.labels)
        return WithSown(own, labels, result.values), [*axes, *sown]
    if spec is ON_AXIS_0:
        return result, [0 for x in jtu.tree_leaves(result) if is_array(x)]
    if type(spec) is int or (callable(spec) and not isinstance(spec, By)):
        result = jtu.tree_map(ft.partial(_repeated, spec), result)
    axes = axes_of(spec, result, where, "result")
    rows = list(zip(jtu.tree_leaves_with_path(result), axes, strict=True))
    wrong = [
        f"{path_text(path, 'result')}: {describe(x)} for each member, axis {axis}"
        for (path, x), axis in rows
        if axis is not None and not -x.ndim - 1 <= axis <= x.ndim
    ]
    if wrong:
        raise ShapeError(f"{where}: the stacked results do not have the axis", at=wrong)
    return result, [axis for (_, x), axis in rows if is_array(x)]


def _repeated(spec: Any, leaf: Any) -> Any:
    is_stacked = type(leaf) in NUMBERS and (type(spec) is int or spec(leaf) is not None)
    return jnp.asarray(leaf) if is_stacked else leaf


def to_front(array: Any, axis: int) -> Any:
    """Return an array whose `axis` is moved to axis 0."""
    return array if axis == 0 else jnp.moveaxis(array, axis, 0)
