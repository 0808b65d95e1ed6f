"""Where two trees differ, and how.

Containers are compared key by key, Modules field by field, leaves and configuration by `are_one`.
Every comparison of two trees that names paths is built on this: carries, branches, traces, the
values of a State.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from pytreemod.errors import describe
from pytreemod.tree.instances import stored
from pytreemod.tree.kinds import are_one
from pytreemod.tree.nodes import children_of, own_class, record_of, stop_below
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import NUMBERS, is_array
from pytreemod.tree.split_arrays import split_text
from pytreemod.typing import KeyPath, PyTree, class_of, jtu

_TYPES = (class_of(jax.typeof(0)), jax.ShapeDtypeStruct)
"""What describes an array: its shape, dtype and, if JAX made it, weak type and sharding."""


def is_number(leaf: Any) -> bool:
    """Whether `leaf` is a plain Python number, which JAX converts to an array."""
    return type(leaf) in NUMBERS


def is_value(leaf: Any) -> bool:
    """Whether `leaf` is an array, or converted to one when JAX computes with it."""
    return is_array(leaf) or is_number(leaf)


def is_type(leaf: Any) -> bool:
    """Whether `leaf` is the type of an array, which may stand in a tree in the array's place."""
    return isinstance(leaf, _TYPES)


def have_one_type(a: Any, b: Any) -> bool:
    """Whether two arrays have one shape and dtype; other leaves have to be equal."""
    if is_array(a) and is_array(b):
        return a.shape == b.shape and a.dtype == b.dtype
    return not is_array(a) and not is_array(b) and are_one(a, b)


def aval_of(value: Any) -> Any:
    """Shape, dtype and weak type of an array, a number or the type of an array."""
    return value if is_type(value) else jax.typeof(value)


def varying_axes(aval: Any) -> frozenset[Any]:
    """The mesh axes over which an array differs from device to device, inside a `shard_map`."""
    # Newer JAX has renamed the attribute.
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset(getattr(aval, "vma", None) or getattr(manual, "varying", ()))


_MISSING: Any = object()
"""What a tree has where the other has an entry, and it has none."""


class Difference(NamedTuple):
    """One difference between two trees.

    Attributes:
        path: its location.
        old: what the first tree has there.
        new: what the second tree has there.
        is_static: whether it is in the configuration.
    """

    path: KeyPath
    old: Any
    new: Any
    is_static: bool = False

    @property
    def texts(self) -> tuple[str, str]:
        """Both sides in short form."""
        return side_text(self.old, self.is_static), side_text(self.new, self.is_static)

    def line(self, root: str = "", form: str = "{} -> {}") -> str:
        """Return the path, and both sides in short form.

        Args:
            root: the name of the trees.
            form: a format string for the two sides.
        """
        old, new = self.texts
        if old == new:
            new += ", not equal" if children_of(self.new) is None else ", with other configuration"
        return f"{path_text(self.path, root)}: {form.format(old, new)}"


def compare(
    old: PyTree, new: PyTree, fits: Callable[[Any, Any], bool] = are_one
) -> list[Difference]:
    """Return the differences of two trees.

    Args:
        old: a tree.
        new: another.
        fits: whether two arrays, or numbers, or types of arrays, count as the same.

    Returns:
        The differences in order; empty if the trees agree.
    """
    (leaves, treedef), (others, other) = map(jtu.tree_flatten, (old, new))
    # Compare flat first: most trees agree, and the walk takes a hundred times as long.
    is_one = _are_one(treedef, other)
    if is_one and all(_agree(a, b, fits) for a, b in zip(leaves, others, strict=True)):
        return []
    found = [*_walk(old, new, fits, ())]
    return found or ([] if is_one else [Difference((), old, new)])


def _walk(
    old: Any, new: Any, fits: Callable[[Any, Any], bool], path: KeyPath
) -> Iterator[Difference]:
    mine, others = children_of(old), children_of(new)
    if mine is None and others is None:
        yield from [] if _agree(old, new, fits) else [Difference(path, old, new)]
        return
    if mine is None or others is None or own_class(old) is not own_class(new):
        yield Difference(path, old, new)
        return
    before, after = _entries(old, mine), _entries(new, others)
    found: list[Difference] = []
    for key in before | after:
        (a, a_static), (b, b_static) = before.get(key, _ABSENT), after.get(key, _ABSENT)
        if not a_static and not b_static:
            found += _walk(a, b, fits, (*path, key))
        elif not are_one(a, b):
            found.append(Difference((*path, key), a, b, a_static and b_static))
    yield from found
    # A difference below already explains why the nodes differ.
    if not found and not _are_one(_bare(old), _bare(new)):
        yield Difference(path, old, new)


_ABSENT = (_MISSING, True)


def _entries(node: Any, children: list[tuple[Any, Any]]) -> dict[Any, tuple[Any, bool]]:
    """The contents of a node by key, each with whether it is configuration."""
    record = record_of(node)
    if record is None:
        return {key: (child, False) for key, child in children}
    data = record.data_names(node)
    return {jtu.GetAttrKey(n): (stored(node, n), n not in data) for n in record.names(node)}


def _bare(node: Any) -> Any:
    """Return the structure of a node alone, without that of its children."""
    return jtu.tree_structure(node, is_leaf=stop_below(node))


def _are_one(treedef: Any, other: Any) -> bool:
    try:
        return treedef == other
    except Exception:  # Of a class of the user's, which keeps what cannot be compared.
        return False


def _agree(a: Any, b: Any, fits: Any) -> bool:
    return fits(a, b) if _is_typed(a) and _is_typed(b) else are_one(a, b)


def _is_typed(value: Any) -> bool:
    return is_type(value) or is_value(value)


def side_text(value: Any, is_static: bool = False) -> str:
    """Return a node or leaf in short form: `f32[2]`, `list of 3`, `Linear`.

    Args:
        value: the node or leaf.
        is_static: whether it is configuration, of which the contents are shown.
    """
    if value is _MISSING:
        return "nothing"
    if _is_typed(value) and not is_number(value):
        aval = aval_of(value)
        varying = sorted(map(str, varying_axes(aval)))
        weak = " (weak)" if getattr(aval, "weak_type", False) else ""
        return split_text(aval) + weak + (f" varying over {', '.join(varying)}" if varying else "")
    children = children_of(value)
    if is_static or not children:
        return leaf_text(value)
    name = class_of(value).__qualname__
    return f"{name} of {len(children)}" if isinstance(value, (tuple, list, dict)) else name


def leaf_text(value: Any) -> str:
    """Return a leaf in short form: functions by name and line, and without addresses."""
    code = getattr(value, "__code__", None)
    if isinstance(code, types.CodeType):
        return f"{value.__qualname__} ({code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno})"
    # An address differs from run to run, and would look like the reason.
    return re.sub(r" at 0x[0-9a-fA-F]+", "", describe(value))
