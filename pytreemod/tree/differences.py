"""One walk over two trees: where they differ, and how.

Containers are compared key by key and Modules field by field. The walk compares data; `are_one`
compares configuration. Every comparison of two trees that names paths is built on this: carries,
branches, gradients, traces, the values of a State.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

import jax

from pytreemod.errors import describe
from pytreemod.tree.instances import stored
from pytreemod.tree.kinds import are_one
from pytreemod.tree.nodes import children_of, own_class, record_of, stop_below
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import NUMBERS, is_array
from pytreemod.tree.split_arrays import split_text
from pytreemod.typing import KeyPath, PyTree, class_of, jtu

Kind: TypeAlias = Literal["same", "value", "class", "missing", "surplus", "static", "node"]
"""How two trees differ at a path:

- `"same"`: not at all;
- `"value"`: two leaves;
- `"class"`: nodes of two classes, or a node and a leaf;
- `"missing"`, `"surplus"`: only the old, or only the new tree has it;
- `"static"`: configuration, or other auxiliary data of a node;
- `"node"`: nodes that differ in something without a name.
"""


def is_number(leaf: Any) -> bool:
    """Whether `leaf` is a plain Python number, which JAX converts to an array."""
    return type(leaf) in NUMBERS


def is_value(leaf: Any) -> bool:
    """Whether `leaf` is an array, or converted to one when JAX computes with it."""
    return is_array(leaf) or is_number(leaf)


class Slot:
    """A leaf that describes an array: shape, dtype, weak type, sharding."""

    __slots__ = ("aval",)

    def __init__(self, aval: Any):
        self.aval = aval

    def __getattr__(self, name: str) -> Any:
        # Nodes of other libraries may read the shape when they are built.
        return getattr(object.__getattribute__(self, "aval"), name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slot) and self.aval == other.aval

    def __hash__(self) -> int:
        return hash(self.aval)


class Missing:
    """An entry that one of two trees does not have."""


MISSING = Missing()


def aval_of(value: Any) -> Any:
    """Shape, dtype and weak type of an array, a number or a `Slot`."""
    return value.aval if isinstance(value, Slot) else jax.typeof(value)


def varying_axes(aval: Any) -> frozenset[Any]:
    """The mesh axes over which an array differs from device to device, inside a `shard_map`."""
    # Newer JAX has renamed the attribute.
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset(getattr(aval, "vma", None) or getattr(manual, "varying", ()))


class Difference(NamedTuple):
    """One difference between two trees.

    Attributes:
        path: its location.
        old: the value in the first tree; `MISSING` if there is none.
        new: the value in the second tree.
        kind: how they differ.
        note: a remark to append to the path.
    """

    path: KeyPath
    old: Any
    new: Any
    kind: Kind
    note: str = ""

    @property
    def of_arrays(self) -> bool:
        """Whether both sides are arrays or numbers."""
        return self.kind == "value" and _is_typed(self.old) and _is_typed(self.new)

    @property
    def of_dtypes(self) -> bool:
        """Whether two arrays differ in their dtypes alone."""
        if not self.of_arrays:
            return False
        old, new = aval_of(self.old), aval_of(self.new)
        return old.shape == new.shape and old.dtype != new.dtype

    @property
    def of_structure(self) -> bool:
        """Whether one side is a node, or missing."""
        return self.kind in ("class", "missing", "surplus")

    def where(self, root: str = "") -> str:
        """Return the path as a string."""
        return path_text(self.path, root) + self.note

    @property
    def texts(self) -> tuple[str, str]:
        """Both sides in short form."""
        text = _static_text if self.kind == "static" else side_text
        return text(self.old), text(self.new)

    def line(self, root: str = "", form: str = "{} -> {}") -> str:
        """Return the path, and both sides in short form.

        Args:
            root: the name of the trees.
            form: a format string for the two sides.
        """
        old, new = self.texts
        if old == new:
            new += ", with other configuration" if self.kind == "node" else ", not equal"
        return f"{self.where(root)}: {form.format(old, new)}"


def compare(
    old: PyTree, new: PyTree, fits: Callable[[Any, Any], bool] = are_one
) -> list[Difference]:
    """Return the differences of two trees.

    Args:
        old: a tree.
        new: another.
        fits: whether two arrays, or numbers, count as the same.

    Returns:
        The differences in order; empty if the trees agree.
    """
    (leaves, treedef), (others, other) = map(jtu.tree_flatten, (old, new))
    # Compare flat first: most trees agree, and the walk takes a hundred times as long.
    is_same = _are_one(treedef, other)
    if is_same and all(_agree(a, b, fits) for a, b in zip(leaves, others, strict=True)):
        return []
    found = [each for each in walk(old, new, fits) if each.kind != "same"]
    return found or ([Difference((), old, new, "node")] if is_same is False else [])


def walk(
    old: PyTree,
    new: PyTree,
    fits: Callable[[Any, Any], bool] = are_one,
    stops: Callable[[Any], bool] = lambda new: False,
    path: KeyPath = (),
) -> Iterator[Difference]:
    """Walk two trees side by side: each pair of leaves, and each difference in structure.

    Args:
        old: a tree.
        new: another.
        fits: whether two arrays, or numbers, count as the same.
        stops: the nodes and leaves of the new tree at which a pair counts as the same.
        path: of both trees.
    """
    if stops(new):
        yield Difference(path, old, new, "same")
        return
    mine, others = children_of(old), children_of(new)
    if mine is None and others is None:
        yield Difference(path, old, new, "same" if _agree(old, new, fits) else "value")
        return
    if mine is None or others is None or own_class(old) is not own_class(new):
        yield Difference(path, old, new, "class")
        return
    before, after = _entries(old, mine), _entries(new, others)
    found = list(_beside(old, new, path))
    for key in before | after:
        (a, in_old), (b, in_new) = before.get(key, _ABSENT), after.get(key, _ABSENT)
        below = (*path, key)
        if in_old and in_new:
            found += walk(a, b, fits, stops, below)
        # On one side the field may be configuration, or absent.
        elif not are_one(a, b):
            kind = "missing" if b is MISSING else "surplus" if a is MISSING else "class"
            found.append(Difference(below, a, b, kind if in_old or in_new else "static"))
    yield from found
    # A difference below already explains why the nodes differ.
    if all(each.kind == "same" for each in found) and _are_one(_bare(old), _bare(new)) is False:
        yield Difference(path, old, new, "node")


_ABSENT = (MISSING, False)


def _entries(node: Any, children: list[tuple[Any, Any]]) -> dict[Any, tuple[Any, bool]]:
    """The contents of a node by key, each with whether it is data; for a record, all fields."""
    record = record_of(node)
    if record is None:
        return {key: (child, True) for key, child in children}
    data = record.data_names(node)
    return {jtu.GetAttrKey(n): (stored(node, n), n in data) for n in record.names(node)}


def _beside(old: Any, new: Any, path: KeyPath) -> Iterator[Difference]:
    """Yield the auxiliary data of nodes of JAX's or the user's classes, item by item."""
    # Keys of containers are compared together with their children; records have fields.
    if record_of(old) is not None or isinstance(old, (tuple, list, dict)):
        return
    was, now = _bare(old).node_data(), _bare(new).node_data()
    if was is None or now is None:
        return
    pairs = [(was[1], now[1])]
    if isinstance(was[1], tuple) and isinstance(now[1], tuple) and len(was[1]) == len(now[1]):
        pairs = list(zip(was[1], now[1], strict=True))
    for a, b in pairs:
        if not are_one(a, b):
            yield Difference(path, a, b, "static", " (auxiliary data)")


def _bare(node: Any) -> Any:
    """Return the structure of a node alone, without that of its children."""
    return jtu.tree_structure(node, is_leaf=stop_below(node))


def _are_one(treedef: Any, other: Any) -> bool | None:
    try:
        return operator.eq(treedef, other)
    except Exception:  # Of a class of the user's, which keeps what cannot be compared.
        return None


def _agree(a: Any, b: Any, fits: Any) -> bool:
    return fits(a, b) if _is_typed(a) and _is_typed(b) else are_one(a, b)


def _is_typed(value: Any) -> bool:
    return isinstance(value, Slot) or is_value(value)


# ---- texts


def side_text(value: Any) -> str:
    """Return one side of a difference in short form: `f32[2]`, `list of 3`, `Linear`."""
    if value is MISSING:
        return "nothing"
    if _is_typed(value) and not is_number(value):
        aval = aval_of(value)
        varying = sorted(map(str, varying_axes(aval)))
        return (
            split_text(aval)
            + (" (weak)" if getattr(aval, "weak_type", False) else "")
            + (f" varying over {', '.join(varying)}" if varying else "")
        )
    children = children_of(value)
    if value is None or children is None:
        return leaf_text(value)
    name = class_of(value).__qualname__
    return f"{name} of {len(children)}" if isinstance(value, (tuple, list, dict)) else name


def _static_text(value: Any) -> str:
    is_short = value is MISSING or (_is_typed(value) and not is_number(value))
    return side_text(value) if is_short else leaf_text(value)


def leaf_text(value: Any) -> str:
    """Return a leaf in short form: functions by name and line, and without addresses."""
    code = getattr(value, "__code__", None)
    if isinstance(code, types.CodeType):
        return f"{value.__qualname__} ({code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno})"
    if hasattr(value, "__qualname__") or hasattr(value, "dtype"):
        return describe(value)
    # An address differs from run to run, and would look like the reason.
    return describe(_WithoutAddress(value))


class _WithoutAddress:
    def __init__(self, value: Any):
        self.value = value

    def __repr__(self) -> str:
        return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(self.value))
