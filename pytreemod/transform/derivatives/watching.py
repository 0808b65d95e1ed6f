"""Capture the cotangents of values that a differentiated function records.

A run with shapes alone finds the recorded values (`planned`). Zeros of these shapes become
additional differentiated inputs. They are supplied where the values are recorded, so their
gradients are the cotangents (see `boundary.cotangents`). Values and cotangents are returned as
pairs, so that surrounding transforms stack both alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from pytreemod.transform.boundary.cotangents import Cotangent, WithCotangent, beside_value
from pytreemod.transform.boundary.sowing import (
    EVERY_CAPTURE,
    Collected,
    Label,
    add_collected,
    innermost,
    note,
    watched_levels,
)
from pytreemod.transform.boundary.supplying import Handed, planned, with_values
from pytreemod.tree.predicates import is_inexact_array
from pytreemod.typing import PyTree, jtu


class Watch:
    """The recorded values of one differentiated call, for captures that ask for cotangents.

    Args:
        labels: the labels of the values, in order.
        shapes: the shape of each.

    Attributes:
        zeros: additional inputs to differentiate.
    """

    def __init__(self, labels: Sequence[Label], shapes: Sequence[PyTree]):
        self._labels = labels
        # The zeros of each value, as a range.
        self._ranges: list[range] = []
        self._noted: tuple[Label, ...] = ()
        self.zeros: list[Any] = []
        for shape in shapes:
            start = len(self.zeros)
            self.zeros += [jnp.zeros(x.shape, x.dtype) for x in _inexact(shape)]
            self._ranges.append(range(start, len(self.zeros)))

    def divided(self, values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return the part for the arguments, and the part for the zeros, which come last."""
        count = len(values) - len(self.zeros)
        return list(values[:count]), list(values[count:])

    def supply(self, fn: Callable[..., Any], zeros: Sequence[Any]) -> Callable[..., Any]:
        """Return the function with zeros for its recorded values, to be called by `collect`."""
        pairs = zip(self._labels, self._ranges, strict=True)
        given = [(label, [zeros[i] for i in ids]) for label, ids in pairs if ids]
        return with_values(fn, Handed(given))

    def hold(self, result: Any, collected: Collected | None) -> tuple[Any, Any]:
        """Inside: the value to return instead of `WithCollected`, for `show` or `show_later`."""
        self._noted = () if collected is None else collected.labels
        return result, () if collected is None else collected.values

    def show(self, held: Any, cotangents: Sequence[Any]) -> Any:
        """Outside: record the inner values with their cotangents; return the result."""
        result, values = held
        shown = list(values)
        for i, ids in self._matched():
            shown[i] = WithCotangent(
                values[i], beside_value(values[i], [cotangents[j] for j in ids])
            )
        add_collected(Collected(self._noted, shown))
        return result

    def show_later(self, held: Any, pullback: Any) -> tuple[Any, Any]:
        """Outside: record the inner values; their cotangents follow when the pullback is called.

        Returns:
            The result, and the pullback that records the cotangents.
        """
        result, values = held
        collector = innermost()
        mark = len(collector.labels) if collector else 0
        shown, found = list(values), list[tuple[Label, Any, range]]()
        for i, ids in self._matched():
            shown[i] = WithCotangent(values[i], None, mark)
            leaves, treedef = jtu.tree_flatten(values[i])
            form = treedef, tuple(is_inexact_array(x) for x in leaves)
            found.append((self._noted[i], form, ids))
        add_collected(Collected(self._noted, shown))
        return result, Pullback(pullback, (len(self.zeros), mark, tuple(found)))

    def _matched(self) -> list[tuple[int, range]]:
        """Return the recorded values that have zeros, with the ranges of these."""
        left: dict[tuple[int, str], list[range]] = {}
        for label, ids in zip(self._labels, self._ranges, strict=True):
            left.setdefault(label[:2], []).append(ids)
        found: list[tuple[int, range]] = []
        for i, label in enumerate(self._noted):
            waiting = left.get(label[:2])
            ids = waiting.pop(0) if waiting else ()
            if ids:
                found.append((i, ids))
        return found


class Pullback:
    """JAX's pullback of a function with zeros, which records their cotangents; a pytree."""

    __slots__ = ("apply", "notes")

    def __init__(self, apply: Any, notes: tuple[int, int, tuple[Any, ...]]):
        self.apply = apply
        self.notes = notes

    def __call__(self, cotangents: Any) -> tuple[list[Any]]:
        """Return the gradients of the arguments alone."""
        (gradients,) = self.apply(cotangents)
        more, mark, notes = self.notes
        count = len(gradients) - more
        for label, (treedef, mask), ids in notes:
            each = iter(ids)
            leaves = [gradients[count + next(each)] if m else None for m in mask]
            note(label, Cotangent(treedef.unflatten(leaves), mark))
        return (gradients[:count],)


def _flatten(node: Pullback) -> Any:
    return ((jtu.GetAttrKey("apply"), node.apply),), node.notes


def _unflatten(notes: Any, children: Any) -> Pullback:
    return Pullback(children[0], notes)


jtu.register_pytree_with_keys(Pullback, _flatten, _unflatten)


def watch(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Watch | None:
    """Return the values to watch in a differentiated call; None without such a capture.

    Call it only if `sowing.watching` is not empty.
    """
    levels = watched_levels()
    if not levels:
        return None
    plan = planned(fn, args, kwargs).at(EVERY_CAPTURE, *levels)
    return Watch(plan.labels, plan.shapes)


def _inexact(shape: PyTree) -> list[Any]:
    # The cotangents that an inner derivative captures are its own.
    if isinstance(shape, (WithCotangent, Cotangent)):
        return []
    return [leaf for leaf in jtu.tree_leaves(shape) if _is_inexact(leaf)]


def _is_inexact(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.inexact))
