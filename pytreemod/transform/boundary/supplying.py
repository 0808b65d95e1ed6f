"""Values that go into a function, at the places where `note` takes values out of it.

It is `sowing` the other way around. What is noted while a function runs comes out of every
transform in it, on axis 0 where there are several members or steps. What is supplied goes in
through the same transforms, taken apart along axis 0 where `note` would stack, and is taken
(`take`) by what notes under the same label. So for each value that comes out there is one that can
go in.

Which transform a value has to go into is known beforehand: the function runs once with shapes alone
(`planned`), and a label that comes out of a transform gets the number of that transform, among
those that the same function calls, in front of its route. A run with values (`call_supplied`)
counts again. A transform that values go into calls `Supplied`, a pytree of the function and its
values, instead of the function. So they are data of the program, and other values of the same
shapes are no new program.

Two kinds of values have no label of a `note`. What is supplied whole goes into every transform as
it is, and may be asked for anywhere (`whole`): arrays that belong to a rule. So does the number of
a step of `filter_scan`, which each step is given (`numbered_steps`).

For a transform this is one line, `fn = supplied(self.fn)`, before JAX's own is called. One that has
several members or steps gives each its part (`as_values`, `of_values`). While nothing is supplied,
in any thread, `handing` is empty.
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
"""The calls, in all threads, that plan or supply values: transforms ask whether there is one."""


STEP = Label(-1, "at.step")
"""What the number of a step is supplied under."""


# ---- planning


class SupplyPlan(NamedTuple):
    """What is noted while a function runs, in order.

    Attributes:
        labels: what each value is noted under, with its route.
        shapes: of each value; a tree with `jax.ShapeDtypeStruct`s for arrays.
    """

    labels: tuple[Label, ...]
    shapes: tuple[PyTree, ...]

    def at(self, *levels: int) -> SupplyPlan:
        """The part of the plan that is for captures of these levels."""
        found = [
            pair for pair in zip(self.labels, self.shapes, strict=True) if pair[0].level in levels
        ]
        return SupplyPlan(tuple(label for label, _ in found), tuple(shapes for _, shapes in found))

    def names(self) -> list[str]:
        """The names under which a capture would show them."""
        return shown_names([label.name for label in self.labels])


def planned(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> SupplyPlan:
    """See what a function notes, and in which transforms, without computing anything.

    A rule that notes may ask `is_planned()`. Captures around see nothing of what is noted.

    Args:
        fn: the function.
        args: its arguments; they are not used up.
        kwargs: its arguments by keyword.

    Raises:
        CaptureError: a value could not come out of the transform that it is in.
    """
    arrays, structure = divide((fn, args, kwargs), is_abstract)
    labels: list[Label] = []
    shapes: list[PyTree] = []

    def run(values: list[Any]) -> tuple[()]:
        fn, args, kwargs = structure.assemble(values)
        # Of States, too, nothing that happens to copies is passed on.
        with _handing(is_planned=True) as collector, Effects():
            fn(*args, **kwargs)
        labels.extend(collector.labels)
        shapes.extend(jtu.tree_map(_shape_of, collector.values))
        return ()

    with traced_apart("planned"):
        jax.eval_shape(run, arrays)
    return SupplyPlan(tuple(labels), tuple(shapes))


def is_planned() -> bool:
    """Whether the function that runs is only looked at, by `planned`."""
    collector = innermost()
    return collector is not None and collector.is_planned


def next_level() -> int:
    """The level of what is noted, and supplied, in the next call alone.

    That of a `planned` or `call_supplied` that follows, in this function.
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
    """A function with values for what is noted in it; a pytree of both.

    Transforms call it through `collect`, instead of the function.

    Args:
        fn: the function.
        labels: what the values are for, with routes from here on.
        values: trees of arrays; along axis 0, what is for each member or step.
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
        """Call the function; what notes in it takes the values."""
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
    # The function, too, if it is no tree: what is cached for it must not keep it alive.
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
    """Call a function with values for what is noted in it.

    To those around it this is a transform. Values that nothing takes are an error. Steps of
    `filter_scan` are numbered in it.

    Args:
        fn: the function.
        args: its arguments.
        kwargs: its arguments by keyword.
        labels: from a plan, with their routes, in the order of the plan.
        values: for each of these, None or a tree of arrays.
        whole: trees of arrays that go everywhere.

    Raises:
        CaptureError: a value cannot go into the transform that is to take it; or the function does
            not do what was planned.
    """
    fn = supplied(fn)
    with traced_apart("supplied"), _handing() as collector:
        out = Supplied(fn, labels, values, whole or {})(*args, **kwargs)
    if collector.labels:
        add_collected(Collected(collector.labels, collector.values))
    return out


def take(label: Label) -> PyTree:
    """The value that was supplied for what is noted under a label; each is taken once.

    To be called once for each `note` of the plan, while it runs, and in the same order; only for
    names for which values were supplied.

    Returns:
        The value; None while the function is planned.

    Raises:
        CaptureError: it cannot come into the transform that this is in.
    """
    collector = innermost()
    if collector is not None and collector.is_planned:
        return None
    waiting = collector.waiting.get(label) if collector is not None else None
    if not waiting or collector is None or collector.trace != current_trace():
        raise CaptureError(explain_no_way_in(_value(label)))
    return waiting.pop(0)


def whole(label: Label) -> PyTree:
    """What was supplied whole under a label; None if nothing was.

    Raises:
        CaptureError: it cannot come into the transform that this is in.
    """
    collector = innermost()
    found = None if collector is None else collector.whole.get(label)
    if found is None or collector is None:
        return None
    # It would stay in JAX's caches.
    if collector.trace != current_trace():
        raise CaptureError(explain_no_way_in(label.name))
    return found


# ---- what transforms do


class Handed(NamedTuple):
    """What goes into a transform, or its part for a function: values with labels, and the whole."""

    pairs: Sequence[tuple[Label, PyTree]] = ()
    whole: Mapping[Label, PyTree] = MappingProxyType({})


def next_call() -> Handed:
    """The values that go into the transform that is about to be called: count that call.

    To be asked only if something is in `handing`; by every transform that hands out what is noted
    in it, once in each call.
    """
    collector = innermost()
    # In another trace, that of a loop of JAX's, say, nothing goes in or comes out. Its inside may
    # be traced once more, or not at all: it is not counted.
    if collector is None or collector.trace != current_trace():
        return Handed()
    collector.calls += 1
    return Handed(collector.within.pop(collector.calls - 1, ()), collector.whole)


def with_values(fn: Any, handed: Handed) -> Any:
    """A function with values for what is noted in it; itself, if there are none."""
    if not handed.pairs and not handed.whole:
        return fn
    labels, values = [label for label, _ in handed.pairs], [value for _, value in handed.pairs]
    return Supplied(fn, labels, values, handed.whole)


def supplied(fn: Any) -> Any:
    """What a transform is to call instead of a function, with the values that go in there."""
    return with_values(fn, next_call()) if handing else fn


def numbered_steps(fn: Any, length: int) -> Any:
    """A step of a loop with its number, among the values that are taken apart."""
    collector = innermost() if handing else None
    if collector is None or collector.trace != current_trace():
        return fn
    given = fn if type(fn) is Supplied else Supplied(fn, (), (), {})
    # That of a loop around it is not asked for any more.
    rest = {label: value for label, value in given.whole.items() if label != STEP}
    steps = jnp.arange(length)
    return Supplied(given.fn, (*given.labels, STEP), (*given.values, steps), rest)


@contextmanager
def not_counted() -> Generator[None]:
    """Transforms that are called meanwhile are none of those that values go into."""
    collector = innermost() or Collector()
    calls, within = collector.calls, collector.within
    collector.within = {}
    try:
        yield
    finally:
        collector.calls, collector.within = calls, within


def as_values(fn: Any) -> list[Any]:
    """The arrays that are supplied with a function, to be taken apart; none for most functions."""
    return jtu.tree_leaves(fn.values) if type(fn) is Supplied else []


def of_values(fn: Any, arrays: Sequence[Any]) -> Any:
    """A function with other arrays than those of `as_values`: the part of one member or step."""
    if type(fn) is not Supplied:
        return fn
    values = jtu.tree_structure(fn.values).unflatten(arrays)
    return Supplied(fn.fn, fn.labels, values, fn.whole)


def check_slices(where: str, fn: Any, size: int | None) -> None:
    """Refuse supplied arrays that have not an entry for each member or step.

    Raises:
        ShapeError: there are some; their names are given.
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
        hint = ("as capture shows them:", "out, seen = pm.capture(fn, selector)(*args)")
        raise ShapeError(where, expected, "others", places=wrong, hint=hint)


def refuse_values(where: str, fn: Any) -> Any:
    """A function as it is: refused, if values are to go into a transform that takes none.

    Raises:
        CaptureError: some are.
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
        "a function that calls the same Modules in the same transforms each time it is called",
        "another",
        hint="what is called may depend on arguments and shapes, and on nothing else",
    )
