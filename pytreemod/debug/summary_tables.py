"""The output of `summary` in all forms: text, Markdown, a diagram, boxes in a notebook.

All are made of the same rows and columns. A column appears only if it is not empty, and
equal neighbors are one row.
"""

from __future__ import annotations

import dataclasses
import html
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
        flops: floating-point operations of a call; None if not requested.
        flops_per_step: those of one step of each loop of unknown length: `flops`
            counts one step.
    """

    rows: tuple[SummaryRow, ...]
    params: int
    bytes: int
    state: tuple[str, ...] = ()
    flops: int | None = None
    flops_per_step: tuple[int, ...] = ()

    def __repr__(self) -> str:
        columns = _columns(self.rows)
        lines = [[name for name, _ in columns]]
        for row, count in _collapsed(self.rows):
            cells = [cell(row) for _, cell in columns]
            cells[0] = "  " * row.depth + _repeated(count) + cells[0]
            lines.append(cells)
        return "\n".join([*aligned(lines, [name in _NUMBERS for name, _ in columns]), *self._end()])

    __str__ = __repr__

    def to_markdown(self) -> str:
        """Return the table as Markdown.

        Examples:
            >>> import jax
            >>> import pytreemod as pm
            >>> linear = pm.nn.Linear(3, 4, key=jax.random.key(0))
            >>> print(pm.summary(linear).to_markdown())
            | path | class | params | bytes | dtype |
            |:---|:---|---:|---:|:---|
            | `<root>` | Linear | 16 | 64 | f32 |
            <BLANKLINE>
            16 parameters, 64 bytes
        """
        columns = _columns(self.rows)
        lines = ["| " + " | ".join(name for name, _ in columns) + " |"]
        lines.append("|" + "".join("---:|" if n in _NUMBERS else ":---|" for n, _ in columns))
        for row, count in _collapsed(self.rows):
            path, *cells = (cell(row).replace("|", "\\|") for _, cell in columns)
            quote = "``" if "`" in path else "`"
            lines.append(f"| {' | '.join([f'{_repeated(count)}{quote}{path}{quote}', *cells])} |")
        return "\n".join([*lines, "", *self._end()])

    def mermaid(self) -> str:
        """Return the Modules as a diagram, in the language of Mermaid, which many sites render.

        Examples:
            >>> import jax
            >>> import pytreemod as pm
            >>> linear = pm.nn.Linear(3, 4, key=jax.random.key(0))
            >>> print(pm.summary([linear]).mermaid())
            flowchart TD
              m0["[0]: Linear<br>16 parameters"]
        """
        lines, above = ["flowchart TD"], list[tuple[int, int]]()
        for number, (row, count) in enumerate(_collapsed(self.rows)):
            above = [(depth, other) for depth, other in above if depth < row.depth]
            parts = [f"{_repeated(count)}{row.path}: {row.cls}", f"{row.params:,} parameters"]
            parts += [_output(row)] if row.calls else []
            text = "<br>".join(part.translate(_IN_MERMAID) for part in parts)
            lines.append(f'  m{number}["{text}"]')
            if above:
                lines.append(f"  m{above[-1][1]} --> m{number}")
            above.append((row.depth, number))
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Boxes in boxes, which notebooks show; without any script."""
        columns = _columns(self.rows)
        parts, opened = [_STYLE, '<div class="pm-summary">'], list[int]()
        for row, count in _collapsed(self.rows):
            while opened and opened[-1] >= row.depth:
                opened.pop()
                parts.append("</details>")
            head, *cells = ((name, cell(row)) for name, cell in columns)
            title = html.escape(_repeated(count) + head[1])
            texts = [f"<b>{title}</b> {html.escape(cells[0][1])}"]
            texts += [
                f"<span><i>{n}</i> {html.escape(text)}</span>" for n, text in cells[1:] if text
            ]
            parts.append(f"<details open><summary>{' '.join(texts)}</summary>")
            opened.append(row.depth)
        parts += ["</details>"] * len(opened)
        parts += [f"<p>{html.escape(line)}</p>" for line in self._end()]
        return "\n".join([*parts, "</div>"])

    def _end(self) -> list[str]:
        text = f"{self.params:,} parameters, {_bytes(self.bytes)}"
        if self.flops is not None:
            text += f", {self.flops:,} FLOPs"
        if self.flops_per_step:
            steps = ", ".join(f"{step:,}" for step in self.flops_per_step)
            text += f" (loops of unknown length count one step: {steps})"
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


# Labels are HTML, in which a path in angle brackets would be an unknown element.
_IN_MERMAID = str.maketrans({"#": "#35;", '"': "#quot;", "<": "#lt;", ">": "#gt;", "&": "#amp;"})

# Colors are inherited, with a half-transparent gray: light or dark alike. On a
# narrow screen long paths are broken, and the boxes are less indented.
_STYLE = """<style>
.pm-summary { font: 13px/1.5 ui-monospace, monospace; max-width: 100%; overflow-x: auto; }
.pm-summary details { margin: 3px 0 3px 12px; padding: 2px 8px; border: 1px solid #8886;
  border-radius: 5px; }
.pm-summary summary { cursor: pointer; overflow-wrap: anywhere; }
.pm-summary span { display: inline-block; margin-left: 1em; opacity: 0.8; }
.pm-summary i { opacity: 0.7; }
@media (max-width: 480px) {
  .pm-summary details { margin-left: 2px; padding: 2px 4px; }
}
</style>"""
