"""`diff`: the differences between two trees, or files.

Both are turned into tables from names to leaves and configuration (`tables`), and the tables are
compared; values are read one leaf at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Set
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import jax

from pytreemod.errors import ArgumentError, describe
from pytreemod.io.access import StrPath, depth_errors, shown_path
from pytreemod.io.configuration import are_same, describe_json
from pytreemod.io.containers import Container
from pytreemod.io.descriptions import describe_tree
from pytreemod.io.folders import open_arrays
from pytreemod.io.loading import description_of, table_of
from pytreemod.io.tables import (
    ROOT_NAME,
    Leaf,
    Name,
    Source,
    first_name,
    form_text,
    read_table,
    shown_name,
)
from pytreemod.module.schema import ROLES
from pytreemod.training.precision_rules import PRECISION
from pytreemod.tree.comparison import largest_difference
from pytreemod.tree.differences import compare
from pytreemod.tree.paths import plain_name
from pytreemod.tree.reports import report_text
from pytreemod.typing import PyTree, Tracer


class ChangedValues(NamedTuple):
    """An array whose numbers differ.

    Attributes:
        name: the name of the leaf.
        largest: the largest difference; NaN if one of two numbers is NaN.
        relative: `largest` divided by the largest number of the first array; infinity if that is
            zero.
        differing: how many numbers differ.
        size: how many numbers the array has.
    """

    name: str
    largest: float
    relative: float
    differing: int
    size: int


@dataclass(frozen=True, repr=False)
class Diff:
    """The result of [`diff`][pytreemod.diff]: false if there is no difference.

    Fields:
        added: leaves that only the second tree has, each with its form.
        removed: leaves that only the first tree has, each with its form.
        classes: nodes of different classes, with both classes.
        configuration: different configuration, including leaves that are not arrays, with both
            values.
        shapes: leaves of different shapes, with both forms.
        dtypes: leaves of different dtypes or kinds, with both forms.
        values: leaves with different numbers: how far apart, and how many.
        equal: how many leaves are equal.

    Examples:
        >>> import pytreemod as pm
        >>> pm.diff({"a": 1, "b": 2}, {"a": 1, "b": 3}).configuration
        ('b: 2 -> 3',)
    """

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    configuration: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    values: tuple[ChangedValues, ...] = ()
    equal: int = 0

    def __bool__(self) -> bool:
        return any(rows for title, rows in vars(self).items() if title != "equal")

    def __repr__(self) -> str:
        if not self:
            return f"Diff: none in {self.equal} leaves"
        if not self.equal and self.added and self.removed and not (self.values or self.shapes):
            # For two trees that have nothing in common, a list of both would add nothing.
            counts = len(self.removed), len(self.added)
            both = " and ".join(f"{n} lea{'f' if n == 1 else 'ves'}" for n in counts)
            return f"Diff: no name in common: {both}"
        rows = {title: rows for title, rows in vars(self).items() if title != "equal"}
        rows["values"] = [_line_of(each) for each in self.values]
        return report_text("Diff", rows, [f"{self.equal} equal"])

    __str__ = __repr__


def diff(a: PyTree | StrPath, b: PyTree | StrPath) -> Diff:
    """Compare two trees, or files, by name: list the added, removed and changed leaves.

    Leaves have the names of [`named_leaves`][pytreemod.named_leaves]. Numbers are compared one
    array at a time, on the host. No number is read if both arrays are one object, or if two files
    have one checksum. In trees, kinds of containers are compared, and functions as objects. In
    files, functions are compared by name, and a list equals a tuple. For an abstract array
    (`jax.ShapeDtypeStruct`), shape and dtype are compared. NaN equals NaN.

    Args:
        a: a tree; or the path of a file or a folder of files, of this library or another.
        b: another tree or path.

    Returns:
        A value that is false if nothing differs, and prints as a report.

    Raises:
        ArgumentError: if an array is traced, or was donated.
        FileError: if a file is damaged or missing.

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> before = pm.nn.MLP(3, 2, 8, 1, key=jax.random.key(0))
        >>> after = pm.tree_at(lambda m: m.layers[1].bias, before, replace_fn=lambda b: b + 0.5)
        >>> pm.diff(before, pm.with_mode(after, use_bias=True))
        Diff: 1 values, 3 equal
          values
            layers.1.bias: largest 0.5, relative 1.73, 2 of 2
        >>> bool(pm.diff(before, before))
        False
    """
    with ExitStack() as stack:
        one, two = (_side(tree, name, stack) for tree, name in ((a, "a"), (b, "b")))
        found = _compared(one, two)
        if isinstance(one, _FileSide) or isinstance(two, _FileSide):
            return found
        return replace(found, configuration=(*found.configuration, *_beside(a, b, found)))


def _beside(a: PyTree, b: PyTree, found: Diff) -> list[str]:
    """Return the differences between trees that no table has: containers, functions of one name.

    Args:
        a: a tree.
        b: another tree.
        found: the differences between their tables.
    """
    texts = (*found.added, *found.removed, *found.classes, *found.configuration)
    names = [text.partition(": ")[0].removeprefix(ROOT_NAME) for text in texts]
    lines: list[str] = []
    # The tables have covered the arrays, and a leaf that is not an array is configuration.
    for each in compare(a, b, lambda x, y: True):
        name = plain_name(each.path)
        inside = f"{name}." if name else ""
        if each.kind != "value" and not any(n == name or n.startswith(inside) for n in names):
            sides = each.line().removeprefix(f"{each.where()}: ")
            lines.append(f"{name or ROOT_NAME}: {sides}")
    return lines


class _Side:
    """A tree, as a table."""

    def __init__(self, tree: Any, where: str):
        described = describe_tree(tree, where)
        traced = [name for name, leaf in described.leaves.items() if isinstance(leaf, Tracer)]
        if traced:
            expected, got = "arrays with values, or only shapes", "traced arrays"
            hint = "compare outside filter_jit and other transforms"
            raise ArgumentError(where, expected, got, at=traced, hint=hint)
        arrays = [(name, x) for name, x in described.leaves.items() if isinstance(x, jax.Array)]
        deleted = [f"{name}: {describe(x)}" for name, x in arrays if x.is_deleted()]
        if deleted:
            expected, got = "arrays with values", "donated arrays"
            hint = "compare what the step returned, not what it was given"
            raise ArgumentError(where, expected, got, at=deleted, hint=hint)
        self.table = read_table(described.tree, described.leaves)
        self._leaves = described.leaves

    def read(self, name: Name) -> Any:
        """Return the array of a leaf."""
        return self._leaves[".".join(name)]

    def checksum(self, name: Name) -> int | None:
        """Return the checksum of a leaf, if it is known without reading the leaf."""
        return None


class _FileSide(_Side):
    """A file or a folder, as a table."""

    def __init__(self, file: Container, where: str):
        self.table = table_of(file, description_of(file, where), where)
        self._file = file

    def _array(self, name: Name) -> str:
        return first_name(cast("Source", self.table.leaves[name].source))

    def read(self, name: Name) -> Any:
        """Return the array of a leaf, from the file."""
        return self._file.read(self._array(name))

    def checksum(self, name: Name) -> int | None:
        """Return the checksum of a leaf; files of other tools have none."""
        return self._file.entries[self._array(name)].checksum


def _side(tree: Any, name: str, stack: ExitStack) -> _Side:
    if not isinstance(tree, (str, os.PathLike)):
        return _Side(tree, f"diff({name})")
    path = cast("StrPath", tree)
    where = f"diff({shown_path(path)})"
    stack.enter_context(depth_errors(where))
    return _FileSide(stack.enter_context(open_arrays(path)), where)


def _compared(one: _Side, two: _Side) -> Diff:
    ours, theirs = one.table.leaves, two.table.leaves
    shapes, dtypes, values = list[str](), list[str](), list[ChangedValues]()
    both = one.table.classes.keys() & two.table.classes.keys()
    configuration = _others(one.table.config, two.table.config, describe_json, both)
    configuration += _others(one.table.precisions, two.table.precisions, _precision_text, both)
    equal = 0
    for name, leaf in ours.items():
        if name not in theirs:
            continue
        other = theirs[name]
        if leaf.shape != other.shape:
            shapes.append(_both(name, form_text(leaf), form_text(other)))
        elif leaf.dtype != other.dtype or leaf.form.get("impl") != other.form.get("impl"):
            # An array of NumPy equals one of JAX.
            dtypes.append(_both(name, form_text(leaf), form_text(other)))
        elif not leaf.is_array:
            texts = form_text(leaf), form_text(other)
            is_same = are_same(leaf.form["value"], other.form["value"])
            configuration += [] if is_same else [_both(name, *texts)]
            equal += is_same
        elif changed := _changed(name, one, two):
            values.append(changed)
        else:
            equal += 1
    return Diff(
        added=tuple(_with_form(name, leaf) for name, leaf in theirs.items() if name not in ours),
        removed=tuple(_with_form(name, leaf) for name, leaf in ours.items() if name not in theirs),
        classes=tuple(_others(one.table.classes, two.table.classes, _class_text)),
        configuration=tuple(configuration),
        shapes=tuple(shapes),
        dtypes=tuple(dtypes),
        values=tuple(values),
        equal=equal,
    )


def _others(
    ours: Mapping[Name, Any],
    theirs: Mapping[Name, Any],
    text: Callable[[Any], str],
    nodes: Set[Name] = frozenset(),
) -> list[str]:
    """Compare the entries that both sides have, and the entries of one side for common nodes.

    Args:
        ours: configuration, or classes.
        theirs: those of the other side.
        text: returns the string to show for one value.
        nodes: the nodes that both sides have, so that a role or a precision that only one side has
            is a difference.
    """
    lines: list[str] = []
    for name in {**ours, **theirs}:
        is_both = name in ours and name in theirs
        if is_both and not are_same(ours[name], theirs[name]):
            lines.append(_both(name, text(ours[name]), text(theirs[name])))
        elif not is_both and name and name[:-1] in nodes and name[-1] in (ROLES, PRECISION):
            sides = [text(side[name]) if name in side else "nothing" for side in (ours, theirs)]
            lines.append(_both(name, *sides))
    return lines


def _precision_text(value: Any) -> str:
    texts: list[str] = []
    for method, dtypes in (pair["list"] for pair in value["list"]):
        roles = zip(("params", "compute", "output"), (dtypes or {"list": ()})["list"], strict=False)
        text = ",".join(f"{role}={dtype}" for role, dtype in roles) or "none"
        texts.append(text if method == "__call__" else f"{method}: {text}")
    return "; ".join(texts)


def _class_text(cls: str) -> str:
    # The mark of a name that is not the library's matters only for a load without `like`.
    return cls.removeprefix("?")


def _both(name: Name, one: str, other: str) -> str:
    return f"{shown_name(name)}: {one} -> {other}"


def _with_form(name: Name, leaf: Leaf) -> str:
    return f"{shown_name(name)}: {form_text(leaf)}"


def _changed(name: Name, one: _Side, two: _Side) -> ChangedValues | None:
    sums = one.checksum(name), two.checksum(name)
    if None not in sums and sums[0] == sums[1]:
        return None
    a, b = one.read(name), two.read(name)
    if a is b or isinstance(a, jax.ShapeDtypeStruct) or isinstance(b, jax.ShapeDtypeStruct):
        return None
    found = largest_difference(a, b)
    return None if found is None else ChangedValues(shown_name(name), *found)


def _line_of(changed: ChangedValues) -> str:
    numbers = f"largest {changed.largest:.3g}, relative {changed.relative:.3g}"
    return f"{changed.name}: {numbers}, {changed.differing} of {changed.size}"
