"""The output of `summary` as text.

A column appears only if it is not empty, and equal neighbors are one row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from pytreemod.errors import describe
from pytreemod.tree.nodes import children_of
from pytreemod.tree.paths import pattern_text
from pytreemod.tree.reports import aligned
from pytreemod.typing import class_of


class SummaryRow(NamedTuple):
    """One Module of a model.

    Attributes:
        path: as a selector takes it; `<root>` for the model itself.
        cls: the name of its class.
        shape: the first result, `jax.ShapeDtypeStruct`s for arrays, without State; None
            if it was not called.
        params: the number of trained numbers in it, and in the Modules in it.
        bytes: of all arrays in it, trained or not.
        dtype: of its own arrays: `f32`, or several.
        depth: the number of Modules around it.
        layers: the number of layers, or members, if it is the stacked part of a `Stack` or an
            `Ensemble`; otherwise 1.
        calls: the number of its calls.
        precision: its precision by `with_precision`, if that differs from the Module around it.
        roles: of its own arrays, if these are not all parameters: `buffer`.
        trained_by: the selectors of the optimizer's rules for its own arrays.
        ties: those of its arrays that are tied to another path.
        computed: those of its arrays that are computed, with the class of the computed leaf.
        sharding: the partition specs of its own arrays that are on several devices.
        device_bytes: of all arrays in it, on one device.
    """

    path: str
    cls: str
    shape: Any = None
    params: int = 0
    bytes: int = 0
    dtype: str = ""
    depth: int = 0
    layers: int = 1
    calls: int = 0
    precision: str = ""
    roles: str = ""
    trained_by: str = ""
    ties: tuple[str, ...] = ()
    computed: tuple[str, ...] = ()
    sharding: str = ""
    device_bytes: int = 0


@dataclasses.dataclass(frozen=True, repr=False)
class Summary:
    """The result of [`summary`][pytreemod.summary]: printed, it is a table.

    Fields:
        rows: one for each Module, outer Modules first.
        params: the number of trained numbers.
        bytes: of all arrays.
        state: a line for each value of the State in the example, including streams.
    """

    rows: tuple[SummaryRow, ...]
    params: int
    bytes: int
    state: tuple[str, ...] = ()

    def __repr__(self) -> str:
        columns = _columns(self.rows)
        lines = [[name for name, _ in columns]]
        for row, count in _collapsed(self.rows):
            cells = [cell(row) for _, cell in columns]
            cells[0] = "  " * row.depth + _repeated(count) + cells[0]
            lines.append(cells)
        return "\n".join([*aligned(lines, [name in _NUMBERS for name, _ in columns]), *self._end()])

    __str__ = __repr__

    def _end(self) -> list[str]:
        text = f"{self.params:,} parameters, {_bytes(self.bytes)}"
        return [text, *(["State"] if self.state else []), *(f"  {line}" for line in self.state)]


# ---- rows and columns

_NUMBERS = ("params", "bytes", "bytes/device")


def _columns(rows: Sequence[SummaryRow]) -> list[tuple[str, Callable[[SummaryRow], str]]]:
    """Return the columns that are not empty."""
    is_split = any(row.sharding for row in rows)
    every: list[tuple[str, Callable[[SummaryRow], str], bool]] = [
        ("path", lambda row: row.path, True),
        ("class", _class_text, True),
        ("output", _output, any(row.calls for row in rows)),
        ("params", lambda row: f"{row.params:,}", True),
        ("bytes", lambda row: f"{row.bytes:,}", True),
        ("dtype", lambda row: row.dtype, True),
        ("precision", lambda row: row.precision, any(row.precision for row in rows)),
        ("role", lambda row: row.roles, any(row.roles for row in rows)),
        ("trained by", lambda row: row.trained_by, any(row.trained_by for row in rows)),
        ("notes", _notes, any(row.ties or row.computed for row in rows)),
        ("sharding", lambda row: row.sharding, is_split),
        ("bytes/device", lambda row: f"{row.device_bytes:,}", is_split),
    ]
    return [(name, cell) for name, cell, is_shown in every if is_shown]


def _class_text(row: SummaryRow) -> str:
    return _repeated(row.layers) + row.cls


def _repeated(count: int) -> str:
    return f"{count} \N{MULTIPLICATION SIGN} " if count > 1 else ""


def _notes(row: SummaryRow) -> str:
    return ", ".join([*(f"tied: {tie}" for tie in row.ties), *row.computed])


def _output(row: SummaryRow) -> str:
    if not row.calls:
        return ""
    text = _shape_text(row.shape)
    return text if row.calls == 1 else f"{text} (1 of {row.calls} calls)"


def _shape_text(shape: Any) -> str:
    if isinstance(shape, jax.ShapeDtypeStruct):
        return describe(shape)
    children = children_of(shape)
    if shape is None or children is None:
        return describe(shape)
    if class_of(shape) in (tuple, list):
        inside = ", ".join(_shape_text(child) for _, child in children)
        return f"({inside})" if class_of(shape) is tuple else f"[{inside}]"
    inside = ", ".join(f"{pattern_text((key,))}={_shape_text(child)}" for key, child in children)
    return f"{class_of(shape).__name__}({inside})"


def _collapsed(rows: Sequence[SummaryRow]) -> Iterator[tuple[SummaryRow, int]]:
    """Yield the rows, with equal neighbors as one, and their number."""
    at = 0
    blocks = _blocks(rows)
    while at < len(rows):
        length = blocks[at]
        count, form = 1, _forms(rows[at : at + length])
        end = at + length
        while (
            length
            and end < len(rows)
            and blocks[end] == length
            and _is_next(rows[at].path, rows[end].path)
            and _forms(rows[end : end + length]) == form
        ):
            count, end = count + 1, end + length
        yield rows[at], count
        if count > 1:
            inner = rows[at + 1 : at + length]
            yield from _collapsed(inner)
            at = end
        else:
            at += 1


def _blocks(rows: Sequence[SummaryRow]) -> list[int]:
    """Return the number of rows of each block: a row, and the rows inside it."""
    sizes, opened = [0] * len(rows), list[int]()
    for i, row in enumerate(rows):
        while opened and rows[opened[-1]].depth >= row.depth:
            first = opened.pop()
            sizes[first] = i - first
        opened.append(i)
    for first in opened:
        sizes[first] = len(rows) - first
    return sizes


def _is_next(one: str, other: str) -> bool:
    """Whether two paths differ only in the index at their ends."""
    head, _, last = one.rpartition("[")
    return bool(_) and last.endswith("]") and other.rpartition("[")[0] == head


def _forms(rows: Sequence[SummaryRow]) -> list[Any]:
    """Return the contents of rows, with paths relative to the first of them."""
    start = len(rows[0].path) if rows else 0
    return [(row.path[start:], repr(row.shape), row._replace(path="", shape=None)) for row in rows]


def _bytes(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= 10 * size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:,} bytes"
