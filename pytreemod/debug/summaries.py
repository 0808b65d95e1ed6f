"""`summary`: a model as a table; nothing is run.

The rows follow from the tree alone: one for each Module. If there is an example, the model is
traced with it, and a rule around the call of each Module records the shapes of the result.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pytreemod.errors import describe, short_dtype
from pytreemod.module.fields import field
from pytreemod.module.reading import is_computed
from pytreemod.state.tokens import is_token
from pytreemod.transform.abstract_calls import filter_eval_shape
from pytreemod.transform.call_rules import CallRule, offered, unwrapped, wrap_calls
from pytreemod.transform.capturing import without_state
from pytreemod.tree.instances import notes_of
from pytreemod.tree.members import layer_axes_of
from pytreemod.tree.nodes import Location, is_module, locations, own_class
from pytreemod.tree.paths import path_text, pattern_text
from pytreemod.tree.predicates import is_abstract, is_array
from pytreemod.tree.printing import aligned, tree_pformat
from pytreemod.tree.selecting import as_selector
from pytreemod.tree.snapshots import is_state
from pytreemod.typing import FilterSpec, KeyPath, PyTree, jtu


def param_count(model: PyTree, selector: FilterSpec | None = None) -> int:
    """Count the numbers in the chosen arrays of a model; a tied array counts once.

    Args:
        model: any tree; its arrays may be `jax.ShapeDtypeStruct`s.
        selector: picks arrays: a class, a path, a selector. None for the trained ones: the
            floating arrays that are not buffers.

    Returns:
        The count.

    Raises:
        SpecError: if the selector does not fit the model.

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> mlp = pm.nn.MLP(3, 2, 8, 1, key=jax.random.key(0))
        >>> pm.param_count(mlp), pm.param_count(mlp, "layers.0"), pm.param_count(mlp, "**.bias")
        (50, 32, 10)
    """
    locs = list(locations(model))
    chosen = map(_is_trained, locs) if selector is None else as_selector(selector).mask(model)
    pairs = zip(locs, chosen, strict=True)
    return sum(loc.leaf.size for loc, is_chosen in pairs if is_chosen and is_abstract(loc.leaf))


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


@dataclass(frozen=True, repr=False)
class Summary:
    """The result of [`summary`][pytreemod.summary]: printed, it is a table.

    Fields:
        rows: one for each Module, outer Modules first.
        params: the number of trained numbers.
        bytes: of all arrays.
        state: a line for each value of the State in the example, including streams.
        ties: a line for each tied path.
    """

    rows: tuple[SummaryRow, ...]
    params: int
    bytes: int
    state: tuple[str, ...] = ()
    ties: tuple[str, ...] = ()

    def __repr__(self) -> str:
        lines = [["path", "class", "output", "params", "bytes", "dtype"]]
        for row, count in _folded(self.rows):
            path, *cells = _cells(row)
            lines.append(["  " * row.depth + _times(count) + path, *cells])
        if not any(row.calls for row in self.rows):
            lines = [[*line[:2], *line[3:]] for line in lines]
        table = aligned(lines, "".join("<>"[x in ("params", "bytes")] for x in lines[0]))
        below = [*(f"tied: {x}" for x in self.ties), *(f"state: {x}" for x in self.state)]
        return "\n".join([*table, f"{self.params:,} parameters, {self.bytes:,} bytes", *below])


def _cells(row: SummaryRow) -> list[str]:
    output = tree_pformat(row.shape, struct_as_array=True, width=10_000) if row.calls else ""
    output += f" (1 of {row.calls} calls)" if row.calls > 1 else ""
    numbers = f"{row.params:,}", f"{row.bytes:,}"
    return [row.path, _times(row.layers) + row.cls, output, *numbers, row.dtype]


def _times(count: int) -> str:
    return f"{count} \N{MULTIPLICATION SIGN} " if count > 1 else ""


def _folded(rows: Sequence[SummaryRow]) -> Iterator[tuple[SummaryRow, int]]:
    """Yield the rows, with equal neighbors in a list as one, and their number."""
    starts = [i for i, row in enumerate(rows) if row.depth == rows[0].depth]
    blocks = [rows[i:end] for i, end in itertools.pairwise([*starts, len(rows)])]
    for _, equal in itertools.groupby(blocks, _form):
        block, *others = equal
        yield block[0], 1 + len(others)
        yield from _folded(block[1:])


def _form(block: Sequence[SummaryRow]) -> Any:
    """Return what two blocks in a list have in common if they are equal."""
    path = block[0].path
    container = path.rpartition("[")[0] if path.endswith("]") else path
    return container, [(row.path[len(path) :], *_cells(row)[1:]) for row in block]


def summary(model: PyTree, *example: Any, depth: int | None = None, **options: Any) -> Summary:
    """A table of a model: each Module with its class, output shape, parameters, bytes and dtype.

    Nothing is run and nothing is allocated: the model is traced with the shapes of the example.
    Without an example there are no output shapes.

    Layers that repeat are printed as one row: `4 x blocks[0]`. A `Stack` traces its layers once, so
    that they have one row. Ties, and values of a State in the example, follow below.

    Args:
        model: a Module, or any tree that has some; arrays may be `jax.ShapeDtypeStruct`s.
        *example: the arguments of the model; arrays may be `jax.ShapeDtypeStruct`s.
        depth: the number of levels of Modules to show, the model itself being level 0; None for
            all.
        **options: keyword arguments of the model. Pass one named `depth` by
            `pm.Partial(model, depth=...)`.

    Returns:
        A value that prints as the table; `.rows` has its records, `.params` and `.bytes` its
        totals.

    Raises:
        SpecError: if there is an example, and no Module can be seen in the model, because a
            transform of JAX hides it.
        Exception: any error that a layer raises for the example; a note has its path.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import pytreemod as pm
        >>> from pytreemod import nn
        >>> mlp = nn.MLP(3, 2, 8, 1, key=jax.random.key(0))
        >>> pm.summary(mlp, jax.ShapeDtypeStruct((16, 3), jnp.float32))
        path         class   output     params  bytes  dtype
        <root>       MLP     f32[16,2]      50    200
          layers[0]  Linear  f32[16,8]      32    128  f32
          layers[1]  Linear  f32[16,2]      18     72  f32
        50 parameters, 200 bytes
    """
    inner = unwrapped(model)
    modules = {place.path: place.leaf for place in offered(inner, _is_row)}
    rows = _rows(inner, modules)
    if example or options:
        _call(model, example, options, rows)
    states = filter(is_state, jtu.tree_leaves((example, options), is_leaf=is_state))
    values = [pair for state in states for pair in jtu.tree_leaves_with_path(state)]
    ties = [(path, tie) for path, module in modules.items() for tie in notes_of(module).ties]
    return Summary(
        tuple(row for row in rows.values() if depth is None or row.depth <= depth),
        param_count(inner),
        sum(_bytes(loc) for loc in locations(inner) if is_abstract(loc.leaf)),
        tuple(f"{pattern_text(path)}  {describe(leaf)}" for path, leaf in values),
        tuple(f"{pattern_text(p + t.place)} = {pattern_text(p + t.source)}" for p, t in ties),
    )


def _rows(model: PyTree, modules: dict[KeyPath, Any]) -> dict[str, SummaryRow]:
    """Return a row for each Module, by its path as call rules name it."""
    inside = {path: list[Location]() for path in modules}
    own = {path: list[Location]() for path in modules}
    for loc in locations(model):
        around = [p for n in range(len(loc.path) + 1) if (p := loc.path[:n]) in modules]
        if around and is_abstract(loc.leaf):
            own[around[-1]].append(loc)
            for path in around:
                inside[path].append(loc)
    rows: dict[str, SummaryRow] = {}
    for path, module in modules.items():
        outer = [p for n in range(len(path)) if (p := path[:n]) in modules]
        start, first = len(outer[-1]) if outer else 0, inside[path][:1]
        axes = [(x.leaf.shape[i], axis) for x in first for i, axis in enumerate(layer_axes_of(x))]
        rows[path_text(path)] = SummaryRow(
            pattern_text(path),
            own_class(module).__name__,
            params=sum(loc.leaf.size for loc in inside[path] if _is_trained(loc)),
            bytes=sum(map(_bytes, inside[path])),
            dtype=", ".join(dict.fromkeys(short_dtype(loc.leaf.dtype) for loc in own[path])),
            depth=len(outer),
            layers=math.prod(n for n, axis in axes if start < len(axis.whole) <= len(path)),
        )
    return rows


def _is_row(node: Any) -> bool:
    """Whether a Module has a row, and is not part of the form in which an array is stored."""
    return is_module(node) and not is_computed(node) and not is_token(node)


def _is_trained(loc: Location) -> bool:
    is_inexact = is_abstract(loc.leaf) and jnp.issubdtype(loc.leaf.dtype, jnp.inexact)
    return is_inexact and loc.role != "buffer"


def _bytes(loc: Location) -> int:
    return loc.leaf.size * loc.leaf.dtype.itemsize


# ---- calls


class _Noting(CallRule):
    """Notes the result of a Module."""

    # A new function for each summary, so that a jitted function in the model is traced for it.
    noted: Callable[[Any], Any] = field(static=True)

    def around(self, call: Any, module: Any, args: Any, kwargs: Any) -> Any:
        """Make the call, and note its result."""
        return self.noted(lambda: call(module, *args, **kwargs))


def _call(model: Any, example: Any, options: Any, rows: dict[str, SummaryRow]) -> None:
    """Trace a call of the model, and add the results of its Modules to their rows."""

    def rule_for(path: str) -> _Noting:
        def noted(make: Callable[[], Any]) -> Any:
            try:
                out = make()
            except Exception as error:
                # The innermost Module that fails adds its path.
                if not any("in summary, at" in note for note in getattr(error, "__notes__", [])):
                    error.add_note(f"in summary, at {path}")
                raise
            if row := rows.get(path):
                shape = row.shape if row.calls else jtu.tree_map(_shape, without_state(out))
                rows[path] = row._replace(shape=shape, calls=row.calls + 1)
            return out

        return _Noting(noted)

    (model,) = wrap_calls("summary", [model], as_selector(...), rule_for)
    filter_eval_shape(model, *example, **options)


def _shape(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array(leaf) else leaf
