"""Supply values to a function at the points where `note` records values.

This is the inverse of `sowing`. Every transform returns the recorded values of its function, on
axis 0 if there are several members or steps. Supplied values go in through the same transforms,
taken apart along axis 0 where `note` would stack. The code that records under a label takes the
value with that label (`take`). So for each value that is returned, one can be supplied.

A plan shows beforehand which transforms a value must go into: the function runs once with shapes
alone (`planned`). A label that a transform returns gets the number of that transform at the start
of its route. The number counts the transforms that one function calls. A run with values
(`call_supplied`) counts again. A transform that gets values calls a `Supplied` instead of the
function: a pytree of the function and its values. So values are data of the program, and other
values of the same shapes need no new program.

Two kinds of values have no label of a `note`. Values supplied whole, the arrays of a rule, go into
every transform unchanged, and may be read anywhere (`whole`). The same is true of the number of a
step of `filter_scan`, which each step gets (`numbered_steps`).

For a transform this is one line, `fn = supplied(self.fn)`, before JAX's transform is called. A
transform with several members or steps passes each its part (`as_values`, `of_values`). While no
values are supplied, in any thread, `handing` is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pytreemod.errors import CaptureError, ShapeError, describe, explain
from pytreemod.transform.boundary.sowing import (
    Collected,
    Collector,
    Label,
    add_collected,
    explain_no_way_in,
    innermost,
    opened,
    shown_names,
)
from pytreemod.tree.effects import Effects
from pytreemod.tree.predicates import is_abstract, is_array
from pytreemod.tree.snapshots import divide
from pytreemod.tree.traces import current_trace, traced_apart
from pytreemod.typing import PyTree, jtu

handing: set[Collector] = set()
"""The calls, in all threads, that plan or supply values; transforms check whether there are any."""


STEP = Label(-1, "at.step")
"""The label of the number of a step."""


# ---- planning


class SupplyPlan(NamedTuple):
    """The values recorded while a function runs, in order.

    Attributes:
        labels: the label of each value, with its route.
        shapes: the shape of each value; a tree with `jax.ShapeDtypeStruct`s for arrays.
    """

    labels: tuple[Label, ...]
    shapes: tuple[PyTree, ...]

    def at(self, *levels: int) -> SupplyPlan:
        """Return the part of the plan for captures of these levels."""
        found = [
            pair for pair in zip(self.labels, self.shapes, strict=True) if pair[0].level in levels
        ]
        return SupplyPlan(tuple(label for label, _ in found), tuple(shapes for _, shapes in found))

    def names(self) -> list[str]:
        """Return the names with which a capture would show them."""
        return shown_names([label.name for label in self.labels])


def planned(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> SupplyPlan:
    """Find the values that a function records, and in which transforms, without computing anything.

    Code that records may ask `is_planned()`. Outer captures get none of the recorded values.

    Args:
        fn: the function.
        args: its arguments; they are not used up.
        kwargs: its arguments by keyword.

    Raises:
        CaptureError: if the surrounding transform could not return a value.
    """
    arrays, structure = divide((fn, args, kwargs), is_abstract)
    labels: list[Label] = []
    shapes: list[PyTree] = []

    def run(values: list[Any]) -> tuple[()]:
        fn, args, kwargs = structure.assemble(values)
        # Effects on copies of States are not passed on, either.
        with _handing(is_planned=True) as collector, Effects():
            fn(*args, **kwargs)
        labels.extend(collector.labels)
        shapes.extend(jtu.tree_map(_shape_of, collector.values))
        return ()

    with traced_apart("planned"):
        jax.eval_shape(run, arrays)
    return SupplyPlan(tuple(labels), tuple(shapes))


def is_planned() -> bool:
    """Whether the function runs only for a plan, in `planned`."""
    collector = innermost()
    return collector is not None and collector.is_planned


def next_level() -> int:
    """Return the level of values that are recorded and supplied in the next call alone.

    It is that of the next `planned` or `call_supplied` in this function.
    """
    collector = innermost()
    return 1 + (collector.level if collector else 0)


def _shape_of(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array(leaf) else leaf


@contextmanager
def _handing(*, is_planned: bool = False) -> Generator[Collector]:
    with opened(is_planned=is_planned) as collector:
        handing.add(collector)
        try:
            yield collector
        finally:
            handing.discard(collector)


# ---- supplying


class Supplied:
    """A function with values to supply in it; a pytree of both.

    Transforms call it through `collect`, instead of the function.

    Args:
        fn: the function.
        labels: the labels of the values, with routes from here on.
        values: trees of arrays; along axis 0, the value for each member or step.
        whole: trees of arrays for all of them.
    """

    __slots__ = ("__dict__", "fn", "labels", "values", "whole")

    def __init__(
        self,
        fn: Callable[..., Any],
        labels: Sequence[Label],
        values: Sequence[PyTree],
        whole: Mapping[Label, PyTree],
    ):
        self.fn = fn
        self.labels = tuple(labels)
        self.values = tuple(values)
        self.whole = dict(whole)
        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            if hasattr(fn, name):
                self.__dict__[name] = getattr(fn, name)
        self.__dict__.setdefault("__name__", type(fn).__name__)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.fn

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function; code that records in it takes the values."""
        collector = innermost()
        assert collector is not None, "to be called by collect, or call_supplied"
        collector.whole.update(self.whole)
        for label, value in zip(self.labels, self.values, strict=True):
            if label == STEP:
                collector.whole[STEP] = value
            elif label.route:
                step, *rest = label.route
                inner = label._replace(route=tuple(rest))
                collector.within.setdefault(step, []).append((inner, value))
            else:
                collector.waiting.setdefault(label, []).append(value)
        is_new = collector not in handing
        handing.add(collector)
        try:
            out = self.fn(*args, **kwargs)
        finally:
            if is_new:
                handing.discard(collector)
        left = [label for label, values in collector.waiting.items() if values]
        left += [label for values in collector.within.values() for label, _ in values]
        if left:
            raise CaptureError(_explain_left(left))
        return out


def _flatten(node: Supplied) -> tuple[tuple[Any, ...], Any]:
    # The function, too, if it is not a tree: cache entries for it must not keep it alive.
    return (node.fn, (*node.whole.values(),), node.values), (node.labels, (*node.whole,))


def _flatten_with_keys(node: Supplied) -> tuple[tuple[Any, ...], Any]:
    children, aux = _flatten(node)
    keys = map(jtu.GetAttrKey, ("__wrapped__", "whole", "supplied"))
    return tuple(zip(keys, children, strict=True)), aux


def _unflatten(aux: Any, children: Any) -> Supplied:
    (labels, names), (fn, whole, values) = aux, children
    return Supplied(fn, labels, values, dict(zip(names, whole, strict=True)))


jtu.register_pytree_with_keys(Supplied, _flatten_with_keys, _unflatten, _flatten)


def call_supplied(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    labels: Sequence[Label] = (),
    values: Sequence[PyTree] = (),
    whole: Mapping[Label, PyTree] | None = None,
) -> Any:
    """Call a function with values for the points where it records.

    For surrounding code this is a transform. Values that are not taken are an error. Steps of
    `filter_scan` are numbered in it.

    Args:
        fn: the function.
        args: its arguments.
        kwargs: its arguments by keyword.
        labels: labels of a plan, with their routes, in the order of the plan.
        values: for each of these, None or a tree of arrays.
        whole: trees of arrays that go everywhere.

    Raises:
        CaptureError: if a value cannot go into the transform that must take it, or the function
            does not follow the plan.
    """
    fn = supplied(fn)
    with traced_apart("supplied"), _handing() as collector:
        out = Supplied(fn, labels, values, whole or {})(*args, **kwargs)
    if collector.labels:
        add_collected(Collected(collector.labels, collector.values))
    return out


def take(label: Label) -> PyTree:
    """Return the value supplied for a label; each is taken once.

    Call it once for each `note` of the plan, during that `note` and in the same order; only for
    names with supplied values.

    Returns:
        The value; None while the function is planned.

    Raises:
        CaptureError: if the value cannot go into the surrounding transform.
    """
    collector = innermost()
    if collector is not None and collector.is_planned:
        return None
    waiting = collector.waiting.get(label) if collector is not None else None
    if not waiting or collector is None or collector.trace != current_trace():
        raise CaptureError(explain_no_way_in(_value(label)))
    return waiting.pop(0)


def whole(label: Label) -> PyTree:
    """Return the value supplied whole for a label; None if there is none.

    Raises:
        CaptureError: if the value cannot go into the surrounding transform.
    """
    collector = innermost()
    found = None if collector is None else collector.whole.get(label)
    if found is None or collector is None:
        return None
    # It would remain in JAX's caches.
    if collector.trace != current_trace():
        raise CaptureError(explain_no_way_in(label.name))
    return found


# ---- what transforms do


class Handed(NamedTuple):
    """The values for a transform, or a function's part of them: with labels, and the whole ones."""

    pairs: Sequence[tuple[Label, PyTree]] = ()
    whole: Mapping[Label, PyTree] = MappingProxyType({})


def next_call() -> Handed:
    """Return the values for the transform that is about to be called; count that call.

    Call it only if `handing` is not empty. Every transform that returns recorded values calls it
    once in each call.
    """
    collector = innermost()
    # In another trace, such as that of a loop of JAX, nothing goes in or out. JAX may trace its
    # contents once more, or not at all, so it is not counted.
    if collector is None or collector.trace != current_trace():
        return Handed()
    collector.calls += 1
    return Handed(collector.within.pop(collector.calls - 1, ()), collector.whole)


def with_values(fn: Any, handed: Handed) -> Any:
    """Return a function with values to supply in it; the same function, if there are none."""
    if not handed.pairs and not handed.whole:
        return fn
    labels, values = [label for label, _ in handed.pairs], [value for _, value in handed.pairs]
    return Supplied(fn, labels, values, handed.whole)


def supplied(fn: Any) -> Any:
    """Return the callable for a transform: the function with the values that go in there."""
    return with_values(fn, next_call()) if handing else fn


def numbered_steps(fn: Any, length: int) -> Any:
    """Return a step of a loop with its number among the values that are taken apart."""
    collector = innermost() if handing else None
    if collector is None or collector.trace != current_trace():
        return fn
    given = fn if type(fn) is Supplied else Supplied(fn, (), (), {})
    # The number of an outer loop is not used any more.
    rest = {label: value for label, value in given.whole.items() if label != STEP}
    steps = jnp.arange(length)
    return Supplied(given.fn, (*given.labels, STEP), (*given.values, steps), rest)


@contextmanager
def not_counted() -> Generator[None]:
    """Do not count the transforms that are called meanwhile: no values go into them."""
    collector = innermost() or Collector()
    calls, within = collector.calls, collector.within
    collector.within = {}
    try:
        yield
    finally:
        collector.calls, collector.within = calls, within


def as_values(fn: Any) -> list[Any]:
    """Return the arrays supplied with a function, to be taken apart; none for most functions."""
    return jtu.tree_leaves(fn.values) if type(fn) is Supplied else []


def of_values(fn: Any, arrays: Sequence[Any]) -> Any:
    """A function with other arrays than those of `as_values`: the part of one member or step."""
    if type(fn) is not Supplied:
        return fn
    values = jtu.tree_structure(fn.values).unflatten(arrays)
    return Supplied(fn.fn, fn.labels, values, fn.whole)


def check_slices(where: str, fn: Any, size: int | None) -> None:
    """Refuse supplied arrays without one entry for each member or step.

    Raises:
        ShapeError: if there are some; the error lists their names.
    """
    if type(fn) is not Supplied:
        return
    wrong = [
        f"{label.name}: {describe(leaf)}"
        for label, value in zip(fn.labels, fn.values, strict=True)
        for leaf in jtu.tree_leaves(value)
        if leaf.ndim < 1 or (size is not None and leaf.shape[0] != size)
    ]
    if wrong:
        count = "each member or step" if size is None else f"each of the {size} members or steps"
        expected = f"values with an entry for {count}, on the axis for it"
        hint = (
            "pass the values that capture returns:",
            "out, seen = pm.capture(fn, selector)(*args)",
        )
        raise ShapeError(where, expected, "other values", at=wrong, hint=hint)


def refuse_values(where: str, fn: Any) -> Any:
    """Return a function unchanged; refuse values for a transform that takes none.

    Raises:
        CaptureError: if there are some.
    """
    fn = supplied(fn)
    if type(fn) is Supplied and fn.labels:
        raise CaptureError(explain_no_way_in(_value(fn.labels[0]), where))
    return fn


# ---- refusals


def _value(label: Label) -> str:
    return f"value for {label.name!r}"


def _explain_left(labels: Sequence[Label]) -> str:
    return explain(
        f"values for {', '.join(sorted({repr(label.name) for label in labels}))}",
        "a function that calls the same Modules in the same transforms in each call",
        "other calls",
        hint="calls may depend only on arguments and shapes",
    )
