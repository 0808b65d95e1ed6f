"""Whether two trees agree, as branches and steps must, and where they do not.

A step of a loop must return its carry as it came, and branches must return the same: structure,
shape and dtype of arrays, and everything that is no array. What does not agree is listed by path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pytreemod.errors import describe
from pytreemod.tree.kinds import are_one
from pytreemod.tree.nodes import children_of, own_class, record_of, stop_below
from pytreemod.tree.predicates import NUMBERS, is_array
from pytreemod.tree.snapshots import are_one_treedef
from pytreemod.tree.stored_fields import stored
from pytreemod.typing import PyTree, class_of, jtu


def is_number(leaf: Any) -> bool:
    """Whether `leaf` is a plain Python number, of which JAX makes an array."""
    return type(leaf) in NUMBERS


def is_value(leaf: Any) -> bool:
    """Whether `leaf` is an array, or becomes one where JAX computes with it."""
    return is_array(leaf) or is_number(leaf)


class Slot:
    """Stands for an array in a tree of which only the types are known."""

    __slots__ = ("aval",)

    def __init__(self, aval: Any):
        self.aval = aval


class Missing:
    """Stands for an entry that one of two trees does not have."""


MISSING = Missing()


def aval_of(value: Any) -> Any:
    """Shape, dtype and weak type of an array, a number or a `Slot`."""
    return value.aval if isinstance(value, Slot) else jax.typeof(value)


def varying_axes(aval: Any) -> frozenset[Any]:
    """The mesh axes over which an array differs from device to device, inside a `shard_map`."""
    # One name in newer JAX, another before.
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset(getattr(aval, "vma", None) or getattr(manual, "varying", ()))


@dataclass(frozen=True, slots=True)
class Difference:
    """A place where two trees do not agree: leaves, or nodes of different kinds."""

    path: tuple[Any, ...]
    first: Any
    second: Any
    in_data: bool = True
    """Whether it is in what is data, and not in the configuration of nodes."""

    @property
    def of_arrays(self) -> bool:
        """Whether there is an array, or a number, on both sides."""
        return self.in_data and _is_typed(self.first) and _is_typed(self.second)

    @property
    def of_dtypes(self) -> bool:
        """Whether nothing but the dtypes of two arrays differ."""
        if not self.of_arrays:
            return False
        first, second = aval_of(self.first), aval_of(self.second)
        return first.shape == second.shape and first.dtype != second.dtype

    @property
    def of_structure(self) -> bool:
        """Whether a node, or nothing at all, stands on one side."""
        sides = (self.first, self.second)
        return self.in_data and any(x is MISSING or children_of(x) is not None for x in sides)

    def texts(self) -> tuple[str, str]:
        """Both sides in short form."""
        first, second = _text(self.first), _text(self.second)
        if first == second:
            second = f"{second}, another" if self.in_data else f"{second}, configured otherwise"
        return first, second


def _is_typed(value: Any) -> bool:
    return isinstance(value, Slot) or is_value(value)


def _text(value: Any) -> str:
    if value is MISSING:
        return "nothing"
    if _is_typed(value) and not is_number(value):
        aval = aval_of(value)
        varying = sorted(map(str, varying_axes(aval)))
        return (
            describe(aval)
            + (" (weak)" if getattr(aval, "weak_type", False) else "")
            + (f" varying over {', '.join(varying)}" if varying else "")
        )
    children = children_of(value)
    if value is None or children is None:
        return describe(value)
    record = record_of(value)
    if record is not None and record.is_hole:
        return f"a tie to {stored(value, 'to')}"
    name = type(value).__qualname__
    return f"{name} of {len(children)}" if isinstance(value, (tuple, list, dict)) else name


def differences(first: PyTree, second: PyTree, fits: Any) -> list[Difference]:
    """Where two trees do not agree.

    Args:
        first: a tree.
        second: another.
        fits: says of two arrays or numbers whether they agree.

    Returns:
        One entry for each place, in order; empty for trees that agree.
    """
    (leaves, treedef), (others, treedef_of_other) = map(jtu.tree_flatten, (first, second))
    # Flat, for that is quick and most trees agree; the walk is for finding out where they do not.
    if not are_one_treedef(treedef, treedef_of_other):
        found = list(_differences(first, second, (), fits))
        # They differ in what the walk does not show: the data that a node of the user's kind keeps.
        return found or [Difference((), first, second, in_data=False)]
    if all(not _differ(a, b, fits) for a, b in zip(leaves, others, strict=True)):
        return []
    return list(_differences(first, second, (), fits))


def _differ(a: Any, b: Any, fits: Any) -> bool:
    if _is_typed(a) and _is_typed(b):
        return not fits(a, b)
    return not are_one(a, b)


def _differences(a: Any, b: Any, path: tuple[Any, ...], fits: Any) -> Iterator[Difference]:
    inner, others = children_of(a), children_of(b)
    if inner is None and others is None:
        if _differ(a, b, fits):
            yield Difference(path, a, b)
        return
    if inner is None or others is None or own_class(a) is not own_class(b):
        yield Difference(path, a, b)
        return
    if record_of(a) is not None:
        found = list(_of_records(a, b, path, fits))
    # In a dict a key that is missing can be named; other nodes are of another make as a whole.
    elif not issubclass(class_of(a), dict) and [k for k, _ in inner] != [k for k, _ in others]:
        yield Difference(path, a, b)
        return
    else:
        found = list(_below(dict(inner), dict(others), path, fits))
    # What is below says more than that the nodes differ, which follows from it.
    yield from found
    if not found and not are_one_treedef(_bare(a), _bare(b)):
        yield Difference(path, a, b, in_data=False)


def _below(
    inner: dict[Any, Any], others: dict[Any, Any], path: tuple[Any, ...], fits: Any
) -> Iterator[Difference]:
    for key in [*inner, *(key for key in others if key not in inner)]:
        here = (*path, key)
        if key in inner and key in others:
            yield from _differences(inner[key], others[key], here, fits)
        else:
            yield Difference(here, inner.get(key, MISSING), others.get(key, MISSING))


def _of_records(a: Any, b: Any, path: tuple[Any, ...], fits: Any) -> Iterator[Difference]:
    """Where two records differ, in data or in configuration: a field may be either in each."""
    (mine, data), (others, data_of_other) = map(_names, (a, b))
    for name in [*mine, *(name for name in others if name not in mine)]:
        here = (*path, jtu.GetAttrKey(name))
        # A field may be set in one of them only, if it is not declared for both.
        first, second = stored(a, name, MISSING), stored(b, name, MISSING)
        if name in data and name in data_of_other:
            yield from _differences(first, second, here, fits)
        elif not are_one(first, second):
            yield Difference(here, first, second, in_data=False)


def _names(node: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    record = record_of(node)
    return ((), ()) if record is None else (record.names(node), record.data_names(node))


def _bare(node: Any) -> Any:
    """The structure of a node without what is below it."""
    return jtu.tree_structure(node, is_leaf=stop_below(node))


def may_be_promoted(weak: Any, other: Any) -> Any:
    """The dtype that JAX would give a weakly typed value beside another; None if it would not.

    Args:
        weak: the type (shape, dtype, weak type) of the value.
        other: the type of what it meets.
    """
    if not getattr(weak, "weak_type", False):
        return None
    try:
        return jnp.result_type(_stand_in(weak), _stand_in(other))
    except (TypeError, ValueError):
        # Strict promotion does not join these.
        return None


def _stand_in(aval: Any) -> Any:
    # Weakly typed is what promotes as the Python numbers of its kind do.
    if not getattr(aval, "weak_type", False):
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    return next(number(0) for number, kind in _KINDS if jnp.issubdtype(aval.dtype, kind))


_KINDS = ((int, jnp.integer), (float, jnp.floating), (complex, jnp.complexfloating), (bool, object))


def agreeing_dtype(avals: Sequence[Any]) -> Any:
    """The dtype on which values agree that must be of one; None if they do not.

    Strongly typed ones must have it already, weakly typed ones (Python numbers) must promote to it.
    """
    strong = [aval for aval in avals if not getattr(aval, "weak_type", False)]
    target = strong[0] if strong else _highest(avals)
    # A strong value is promoted to nothing: it has the target's dtype, or they do not agree.
    for aval in avals:
        if aval.dtype != target.dtype and may_be_promoted(aval, target) != target.dtype:
            return None
    return target.dtype


def _highest(avals: Sequence[Any]) -> Any:
    best = avals[0]
    for aval in avals[1:]:
        if may_be_promoted(best, aval) == aval.dtype:
            best = aval
    return best
