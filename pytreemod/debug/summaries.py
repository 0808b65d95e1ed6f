"""`summary`: a model as a table; nothing is run.

The rows follow from the tree alone: one for each Module. If there is an example, the model is
traced with it. A rule around the call of each Module (`transform.call_rules`)
records the shapes of the results. The output is made in `summary_tables`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pytreemod.debug.summary_tables import Summary, SummaryRow
from pytreemod.errors import ArgumentError, PytreemodError, describe, short_dtype
from pytreemod.module.classes import Module
from pytreemod.module.fields import field
from pytreemod.module.reading import is_computed, ties_of
from pytreemod.state.tokens import is_token
from pytreemod.training.optimizers import Optimizer
from pytreemod.transform.abstract_calls import filter_eval_shape
from pytreemod.transform.call_rules import CallRule, is_rules, rules_of, unwrapped, wrap_calls
from pytreemod.tree.members import count_member_axes
from pytreemod.tree.nodes import (
    DEFAULT_ROLE,
    Location,
    children_of,
    locations,
    own_class,
    record_of,
)
from pytreemod.tree.paths import path_text, pattern_text
from pytreemod.tree.predicates import is_array
from pytreemod.tree.selecting import as_selector
from pytreemod.tree.snapshots import is_state
from pytreemod.typing import FilterSpec, KeyPath, PyTree, class_of, jtu


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
    if selector is None:
        chosen = [_is_trained(loc) for loc in locs]
    else:
        chosen = as_selector(selector).mask(model)
    pairs = zip(locs, chosen, strict=True)
    arrays = [loc.leaf for loc, is_chosen in pairs if is_chosen and _has_shape(loc.leaf)]
    return sum(math.prod(array.shape) for array in arrays)


def summary(
    model: PyTree,
    *example: Any,
    depth: int | None = None,
    opt: Optimizer | None = None,
    **options: Any,
) -> Summary:
    """A table of a model: each Module with its class, output shape, parameters, bytes and dtype.

    Nothing is run and nothing is allocated: the model is traced with the shapes of the example.
    Without an example there are no output shapes.

    Layers that repeat are printed as one row: `4 x blocks[0]`. A `Stack` traces its layers once, so
    that they have one row. Further columns appear if they are not empty: the precision of
    [`with_precision`][pytreemod.with_precision], roles, ties, computed leaves, the optimizer rule
    of an array (with `opt`), shardings and the bytes on one device. Values of a State in the
    example follow below.

    Args:
        model: a Module, or any tree that has some; arrays may be `jax.ShapeDtypeStruct`s.
        *example: the arguments of the model; arrays may be `jax.ShapeDtypeStruct`s.
        depth: the number of levels of Modules to show, the model itself being level 0; None for
            all.
        opt: an optimizer that was initialized for the model.
        **options: keyword arguments of the model. Pass one with a name from above
            by `pm.Partial(model, depth=...)`.

    Returns:
        A value that prints as the table; `.rows` has its records, `.params` and `.bytes` its
        totals.

    Raises:
        ArgumentError: if an option is invalid, or there is an example and the model is not
            callable.
        Exception: any error that a layer raises for the example; its path, and the table so far,
            are appended to the message.

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
    if depth is not None and (type(depth) is not int or depth < 0):
        raise ArgumentError("summary(depth)", "a number of levels, or None", describe(depth))
    inner = unwrapped(model)
    if children_of(inner) is None and not _has_shape(inner):
        hint = ["pass the model, or a pm.filter_* transform of it; transforms of JAX hide it:"]
        code = ["pm.summary(model, x)", "pm.summary(pm.filter_vmap(model), x)"]
        raise ArgumentError("summary(model)", "a model", describe(inner), hint=hint + code)
    found = _Rows(inner, opt)
    calls = _Calls()
    if example or options:
        if not callable(model):
            expected = "a model that can be called with the example"
            hint = ["without an example, it lists the parameters:", "pm.summary(model)"]
            raise ArgumentError("summary(model)", expected, describe(model), hint=hint)
        _trace(model, example, options, calls, found)
    rows = [row for row in found.rows(calls) if depth is None or row.depth <= depth]
    top = found.total
    states = filter(is_state, jtu.tree_leaves((example, options), is_leaf=is_state))
    lines = [line for state in states for line in _state_lines(state)]
    return Summary(tuple(rows), top.params, top.bytes, tuple(lines))


# ---- rows of the tree


class _Sums(NamedTuple):
    """Sums over all arrays below a node."""

    params: int = 0
    bytes: int = 0
    device_bytes: int = 0

    def plus(self, other: _Sums) -> _Sums:
        return _Sums(*(a + b for a, b in zip(self, other, strict=True)))


class _Outer(NamedTuple):
    """Properties of the Module around a Module."""

    depth: int = -1
    axes: int = 0
    precision: str = ""
    nodes: tuple[Any, ...] = ()


class _Rows:
    """The rows of a model, by the paths that call rules use."""

    def __init__(self, model: PyTree, opt: Optimizer | None):
        self.found: list[tuple[str, SummaryRow]] = []
        self.rules = _rules_by_path(model, opt)
        self.leaves = {loc.path: loc for loc in locations(model)}
        # Ties that no row has yet; the innermost Module around one takes it.
        self.ties: list[tuple[KeyPath, KeyPath]] = []
        self.total = self._visit(model, (), _Outer())

    def rows(self, calls: _Calls) -> Iterator[SummaryRow]:
        """Yield the rows, with the results of the model's calls."""
        for path, row in self.found:
            shape, count = calls.outputs.get(path, (None, 0))
            yield row._replace(shape=shape, calls=count)

    def _visit(self, node: Any, path: KeyPath, outer: _Outer) -> _Sums:
        children = children_of(node)
        if children is None:
            return self._sums_of_leaf(path, node)
        for tie in ties_of(node):
            self.ties.append(((*path, *tie.place), (*path, *tie.source)))
        nodes = (*outer.nodes, node)
        if not _is_row(node):
            return self._sums_of(children, path, outer._replace(nodes=nodes))
        at, text = len(self.found), path_text(path)
        self.found.append((text, SummaryRow("", "")))
        axes = count_member_axes(outer.nodes, path)
        precision = _precision(node) or outer.precision
        here = _Outer(outer.depth + 1, axes, precision, nodes)
        sums = self._sums_of(children, path, here)
        row = self._row(node, path, sums)
        if axes > outer.axes:
            sizes = next((x.shape for x in jtu.tree_leaves(node) if _has_shape(x)), ())
            row = row._replace(layers=math.prod(sizes[outer.axes : axes]))
        is_new = precision != outer.precision
        row = row._replace(depth=here.depth, precision=precision if is_new else "")
        self.found[at] = (text, row)
        return sums

    def _sums_of(self, children: Any, path: KeyPath, outer: _Outer) -> _Sums:
        sums = _Sums()
        for key, child in children:
            sums = sums.plus(self._visit(child, (*path, key), outer))
        return sums

    def _sums_of_leaf(self, path: KeyPath, leaf: Any) -> _Sums:
        if not _has_shape(leaf):
            return _Sums()
        size = math.prod(leaf.shape)
        number = size if _is_trained(self.leaves[path]) else 0
        return _Sums(number, size * leaf.dtype.itemsize, _bytes_on_device(leaf))

    def _row(self, node: Any, path: KeyPath, sums: _Sums) -> SummaryRow:
        own, computed = list[Location](), list[str]()
        for place, child in _own_children(node, path):
            inside = [place]
            if is_computed(child):
                computed.append(f"{pattern_text(place[len(path) :])}: {class_of(child).__name__}")
                inside = [(*place, *below) for below, _ in jtu.tree_leaves_with_path(child)]
            own += [self.leaves[each] for each in inside if each in self.leaves]
        ties = [tie for tie in self.ties if tie[0][: len(path)] == path]
        self.ties = [tie for tie in self.ties if tie not in ties]
        arrays = [loc for loc in own if _has_shape(loc.leaf)]
        roles = _joined(loc.role for loc in arrays)
        return SummaryRow(
            pattern_text(path),
            own_class(node).__name__,
            params=sums.params,
            bytes=sums.bytes,
            dtype=_joined(short_dtype(loc.leaf.dtype) for loc in arrays),
            roles="" if roles == DEFAULT_ROLE else roles,
            trained_by=_joined(self.rules.get(loc.path, "") for loc in arrays),
            ties=tuple(
                f"{pattern_text(place[len(path) :])} = {pattern_text(source)}"
                for place, source in ties
            ),
            computed=tuple(computed),
            sharding=_joined(_spec(loc.leaf) for loc in arrays),
            device_bytes=sums.device_bytes,
        )


def _is_row(node: Any) -> bool:
    """Whether it is a Module with a row, and not part of the form in which an array is stored."""
    record = record_of(node)
    if record is None or not isinstance(node, Module) or record.is_hole:
        return False
    return not is_computed(node) and not is_token(node) and not is_rules(node)


def _joined(texts: Iterable[str]) -> str:
    return ", ".join(filter(None, dict.fromkeys(texts)))


def _precision(node: Any) -> str:
    texts = (rule.shown() for rule in rules_of(node, CallRule).values())
    return _joined(text.strip().removeprefix("in ") for text in texts)


def _own_children(node: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Yield a Module's own children, through containers, without the Modules in it."""
    for key, child in children_of(node) or ():
        place = (*path, key)
        if isinstance(child, Module):
            if is_computed(child):
                yield place, child
        elif children_of(child) is None:
            yield place, child
        else:
            yield from _own_children(child, place)


def _rules_by_path(model: PyTree, opt: Optimizer | None) -> dict[KeyPath, str]:
    """Return the rule of an optimizer for each leaf."""
    if opt is None:
        return {}
    given: Any = opt  # callers may be unchecked
    if not isinstance(given, Optimizer) or opt.plan is None:
        hint = ["initialize one for the model:", "opt = pm.Optimizer(rules).init(model)"]
        got = "an optimizer without state" if isinstance(given, Optimizer) else describe(given)
        raise ArgumentError("summary(opt)", "an optimizer of the model", got, hint=hint)
    plan = opt.plan
    if plan.structure.num_leaves != len(jtu.tree_leaves(model)):
        got = f"the optimizer of a model with {plan.structure.num_leaves} leaves"
        raise ArgumentError("summary(opt)", "an optimizer of the model", got)
    names = ["..." if repr(each) == "True" else repr(each) for each in plan.selectors]
    pairs = zip(jtu.tree_leaves_with_path(model), plan.labels, plan.is_trained, strict=True)
    return {path: names[i] if trained else "nothing" for (path, _), i, trained in pairs}


def _has_shape(leaf: Any) -> bool:
    return is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def _is_trained(loc: Location) -> bool:
    leaf = loc.leaf
    is_inexact = _has_shape(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)
    return is_inexact and loc.role != "buffer"


def _bytes_on_device(leaf: Any) -> int:
    sharding = getattr(leaf, "sharding", None)
    shape = leaf.shape if sharding is None else sharding.shard_shape(tuple(leaf.shape))
    return math.prod(shape) * leaf.dtype.itemsize


def _spec(leaf: Any) -> str:
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or sharding.num_devices == 1:
        return ""
    spec = getattr(sharding, "spec", None)
    return type(sharding).__name__ if spec is None else f"P{tuple(spec)!r}"


def _state_lines(state: Any) -> list[str]:
    pairs = jtu.tree_leaves_with_path(state)
    return [f"{pattern_text(path)}  {describe(leaf)}" for path, leaf in pairs]


# ---- calls


class _Calls:
    """The calls, by path: the first result, and their number."""

    def __init__(self) -> None:
        self.outputs: dict[str, tuple[Any, int]] = {}
        self.open: list[str] = []
        self.failed: str | None = None


_SERIAL = itertools.count()
_RUNNING: dict[int, _Calls] = {}


class _Noting(CallRule):
    """Records the result of each Module.

    Fields:
        path: of the Module.
        serial: of the summary; a new one each time, so that a jitted function in the model
            is traced again, and its Modules are called.
    """

    path: str = field(static=True)
    serial: int = field(static=True)

    def around(self, call: Any, module: Any, args: Any, kwargs: Any) -> Any:
        """Make the call, and record the shapes of its result."""
        calls = _RUNNING.get(self.serial)
        if calls is None:
            return call(module, *args, **kwargs)
        calls.open.append(self.path)
        try:
            out = call(module, *args, **kwargs)
        except BaseException:
            calls.failed = calls.failed or self.path
            raise
        finally:
            calls.open.pop()
        first, count = calls.outputs.get(self.path, (None, 0))
        calls.outputs[self.path] = (first if count else _shapes(out), count + 1)
        return out


def _shapes(out: Any) -> Any:
    """Return a result without State, with shapes for arrays."""
    if class_of(out) is tuple and any(map(is_state, out)):
        rest = tuple(x for x in out if not is_state(x))
        return _shapes(rest[0] if len(rest) == 1 else rest)

    def shape_of(leaf: Any) -> Any:
        if is_state(leaf):
            return None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array(leaf) else leaf

    return jtu.tree_map(shape_of, out, is_leaf=is_state)


def _trace(
    model: Any, example: tuple[Any, ...], options: dict[str, Any], calls: _Calls, found: _Rows
) -> None:
    """Trace a call of the model, and record the shapes of its Modules' results."""
    serial = next(_SERIAL)
    _RUNNING[serial] = calls
    try:
        trees = [model]
        if found.found:
            every = as_selector(...)
            trees = wrap_calls("summary", trees, every, lambda path: _Noting(path, serial))
        # The model is an argument: its arrays may be shapes alone.
        filter_eval_shape(_call, trees[0], example, options)
    except Exception as error:
        _explain(error, calls, found)
        raise
    finally:
        del _RUNNING[serial]


def _call(model: Any, example: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return model(*example, **options)


def _explain(error: Exception, calls: _Calls, found: _Rows) -> None:
    """Append the path of the layer that raised, and the table so far, to the message."""
    done = [row for row in found.rows(calls) if row.calls]
    path = calls.failed
    text = f"In summary(model, ...), at {path or '<root>'}"
    if done:
        table = repr(Summary(tuple(row._replace(depth=0) for row in done), 0, 0)).split("\n")[:-1]
        text = "\n  ".join([f"{text}, after:", *table[-_SHOWN:]])
    if isinstance(error, PytreemodError) and error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n  {text}", *error.args[1:])
    else:
        error.add_note(text)


_SHOWN = 20
"""Lines of a table in an error."""
