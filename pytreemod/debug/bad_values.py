"""`first_bad`: find the first value that is not finite.

A rule around the calls of all Modules notes a few numbers for each call: whether its results are
finite, and the range of its arguments. They leave compiled code as captured values do
(`debug.capturing`). Whether a cotangent is finite is known in the backward pass: it is returned as
the gradient by a zero that is supplied where the numbers are noted.

Notes from a loop are stacked. The calls are put back into the order in which they ran: by the
steps of the loops that they share (`transform.boundary.stacked_notes`), and then by location.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.debug.capturing import with_later, with_shown, without_state
from pytreemod.errors import ArgumentError, SpecError
from pytreemod.transform.boundary.cotangents import WithCotangent
from pytreemod.transform.boundary.signatures import positional_names
from pytreemod.transform.boundary.sowing import Label, capturing, note, offered
from pytreemod.transform.boundary.stacked_notes import NoteAxis, StackedNote
from pytreemod.transform.boundary.supplying import planned
from pytreemod.transform.boundary.wrapping import (
    Transformed,
    argument_name,
    check_callable,
    function_name,
)
from pytreemod.transform.interception.surrounded_calls import (
    AbstractCallRule,
    CallSite,
    released,
    surround_all,
    surrounding,
)
from pytreemod.tree.effects import is_state
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_inexact_array
from pytreemod.tree.selecting import as_selector
from pytreemod.tree.snapshots import divide
from pytreemod.typing import PyTree, Tracer, jtu


@dataclass(frozen=True, repr=False)
class FirstBad:
    """The result of [`first_bad`][pytreemod.debug.first_bad]: false if everything is finite.

    Fields:
        kind: the value that is not finite: an `"argument"` (a parameter is one), the `"output"` of
            a Module, its `"cotangent"` in the backward pass, or the `"result"`; None if all are
            finite.
        path: of the Module, as in `capture`, or of the array.
        layers: the numbers of the layers of the Stacks in which the Module was called, outermost
            first.
        steps: the same for the steps of other loops.
        members: the same for the members of maps.
        call: the number of earlier calls of the Module in the program.
        low: the least finite number in the Module's arguments; None if there was none.
        high: the greatest.
        was_bad: whether its arguments had a number that is not finite.
        after: the last call of a Module that ended before; None for the first.
        others: the number of other calls, or arrays, that are not finite.
        checked: the number of calls that were checked.
    """

    kind: Literal["argument", "output", "cotangent", "result"] | None = None
    path: str = ""
    layers: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    members: tuple[int, ...] = ()
    call: int = 0
    low: float | None = None
    high: float | None = None
    was_bad: bool = False
    after: str | None = None
    others: int = 0
    checked: int = 0

    def __bool__(self) -> bool:
        return self.kind is not None

    def __repr__(self) -> str:
        if self.kind is None:
            return f"FirstBad: none in {_counted(self.checked, 'call')} of Modules"
        what = {
            "argument": f"the argument {self.path}",
            "output": f"the output of {self.path}",
            "cotangent": f"the cotangent of the output of {self.path}",
            "result": self.path,
        }[self.kind]
        numbers = _numbers_text(self.layers, self.steps, self.members, self.call)
        text = f"FirstBad: {', '.join([what, *numbers])}"
        after = "" if self.after is None else f", after {self.after}"
        if self.kind == "result":
            text += after
        if self.was_bad:
            text += f"; its arguments were not finite{after}"
        elif self.low is not None:
            text += f"; its arguments ranged from {self.low:.4g} to {self.high:.4g}"
        if self.others:
            text += f"; and {self.others} more"
        return text

    __str__ = __repr__


def _numbers_text(
    layers: Sequence[int], steps: Sequence[int], members: Sequence[int], call: int
) -> list[str]:
    groups = (("layer", layers), ("step", steps), ("member", members))
    found = [f"{name} {', '.join(map(str, numbers))}" for name, numbers in groups if numbers]
    return [*found, f"call {call}"] if call else found


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def first_bad(fn: Callable[..., Any]) -> Callable[..., FirstBad]:
    """Find the first value that is NaN or infinite.

    It searches in this order:

    1. an argument, or a parameter in one;
    2. the output of a Module: of the one called first, and of nested Modules the innermost;
    3. the cotangent of an output, if `fn` computes gradients by
       [`filter_grad`][pytreemod.filter_grad] or
       [`filter_value_and_grad`][pytreemod.filter_value_and_grad]: in the order of the backward
       pass, from the last call to the first;
    4. the result.

    All calls of Modules in the arguments are checked: inside compiled code, too, and in a
    [`Stack`][pytreemod.nn.Stack], [`filter_scan`][pytreemod.filter_scan] and
    [`filter_vmap`][pytreemod.filter_vmap]. For steps of one loop, the earlier counts. `fn` is
    traced twice, and compiled again for this; its calls are unchanged.

    Args:
        fn: the function, which may be a Module.

    Returns:
        A function of the same arguments that returns a `FirstBad`: false if everything is finite.
        It does not use up a State in the arguments.

    Raises:
        ArgumentError: if `fn` is not callable; or the arguments are traced.
        CaptureError: if a Module is called in a transform that cannot return captured values.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> from pytreemod import nn
        >>> net = nn.Sequential([nn.LayerNorm(2), nn.Lambda(jnp.log)])
        >>> pm.debug.first_bad(pm.filter_jit(net))(jnp.asarray([1.0, 3.0]))
        FirstBad: the output of layers[1]; its arguments ranged from -1 to 1; and 1 more
        >>> bool(pm.debug.first_bad(net.layers[0])(jnp.ones(2)))
        False
    """
    check_callable("first_bad", fn, "fn")
    return _FirstBad(fn, ())


# ---- notes


class _Looking(AbstractCallRule):
    """Notes whether the result of a Module is finite, and the range of its arguments."""

    level: int
    uses_layer: ClassVar[bool] = True

    def around(
        self,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        where: CallSite,
    ) -> Any:
        """Make the call, and take notes."""
        # First, because the call uses States up.
        given = _looked_at((args, kwargs))
        out = call(*args, **kwargs)
        label, shown = Label(self.level, where.path), without_state(out)
        numbers = jnp.concatenate([_looked_at(shown)[:1], given])
        note(label, StackedNote((numbers, where.layers)))
        zeros = offered(label)
        if zeros is None:
            return out
        leaves, treedef = jtu.tree_flatten(shown)
        floating = [x for x in leaves if is_inexact_array(x)]
        passed: Any = iter(cast("Any", _let_through)(floating, zeros[0]))
        new: list[Any] = [next(passed) if is_inexact_array(x) else x for x in leaves]
        return with_shown(out, treedef.unflatten(new))


def _looked_at(tree: PyTree) -> jax.Array:
    """Whether a number in a tree is not finite, and the range of its finite numbers."""
    bad, low, high = [jnp.zeros((), bool)], [jnp.float32(jnp.inf)], [jnp.float32(-jnp.inf)]
    for leaf in jtu.tree_leaves(tree, is_leaf=is_state):
        if is_inexact_array(leaf):
            x = jax.lax.stop_gradient(jnp.asarray(leaf))
            is_finite = jnp.isfinite(x)
            x = (jnp.abs(x) if jnp.iscomplexobj(x) else x).astype(jnp.float32)
            bad.append(jnp.any(~is_finite))
            low.append(jnp.min(jnp.where(is_finite, x, jnp.inf), initial=jnp.inf))
            high.append(jnp.max(jnp.where(is_finite, x, -jnp.inf), initial=-jnp.inf))
    parts = jnp.any(jnp.stack(bad)).astype(jnp.float32), jnp.stack(low).min(), jnp.stack(high).max()
    return jnp.stack(parts)


@jax.custom_vjp
def _let_through(leaves: list[Any], zeros: Any) -> list[Any]:
    """Return the leaves unchanged; the gradient by the zeros reports their cotangents."""
    return leaves


def _forward(leaves: list[Any], zeros: Any) -> tuple[list[Any], None]:
    return leaves, None


def _backward(_: None, cotangents: list[Any]) -> tuple[list[Any], Any]:
    return cotangents, jnp.concatenate([_looked_at(cotangents)[:1], jnp.zeros(3)])


_let_through.defvjp(_forward, _backward)


# ---- the call


class _FirstBad(Transformed):
    """A function under `first_bad`."""

    __slots__ = ()

    transform_name = "first_bad"

    def __call__(self, /, *args: Any, **kwargs: Any) -> FirstBad:
        """Call the function, and report the first value that is not finite."""
        # A copy of the arguments, so that the caller's States are not used up.
        arrays, structure = divide((self.fn, args, kwargs))
        if any(isinstance(x, Tracer) for x in arrays):
            raise ArgumentError(
                f"first_bad of {function_name(self.fn)}",
                "arrays with values",
                "traced ones",
                hint=["call it outside compiled code:", "pm.debug.first_bad(step)(model, x)"],
            )
        bad = [path for path, leaf in self._named(args, kwargs) if _is_bad(leaf)]
        if bad:
            return FirstBad("argument", bad[0], others=len(bad) - 1)
        fn, args, kwargs = structure.assemble(arrays)
        with capturing(cotangents=True) as collector, surrounding() as level:
            trees = _looking([fn, *args, *kwargs.values()], _Looking(collector.level), level)
            fn, *rest = trees
            rest, named = rest[: len(args)], dict(zip(kwargs, rest[len(args) :], strict=True))
            plan = planned(fn, rest, named).at(collector.level)
            out = released(fn(*rest, **named), level)
        noted = zip(collector.labels, collector.values, strict=True)
        found = with_later([pair for pair in noted if pair[0].level == collector.level])
        where = with_later(zip(plan.labels, plan.shapes, strict=True))
        calls = _in_order(where, [value for _, value in found])
        return _judged(calls, [path for path, x in _leaves("result", out) if _is_bad(x)])

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
        names = positional_names(self.fn)
        found = _leaves(function_name(self.fn), self.fn)
        for i, tree in enumerate(args):
            found += _leaves(argument_name(names, i), tree)
        for name, tree in kwargs.items():
            found += _leaves(name, tree)
        return found


def _looking(trees: list[PyTree], rule: _Looking, level: int) -> list[PyTree]:
    try:
        return surround_all("first_bad", trees, as_selector(...), rule, level=level)
    except SpecError:  # There are no Modules: arguments and the result remain.
        return trees


def _leaves(root: str, tree: PyTree) -> list[tuple[str, Any]]:
    return [(path_text(path, root), leaf) for path, leaf in jtu.tree_leaves_with_path(tree)]


def _is_bad(leaf: Any) -> bool:
    return is_inexact_array(leaf) and not bool(jnp.all(jnp.isfinite(leaf)))


# ---- the order of the calls


class _Call(NamedTuple):
    """One call of a Module, with its notes."""

    # Calls ran in the order of their keys.
    key: tuple[tuple[int, int], ...]
    path: str
    number: int
    layers: tuple[int, ...]
    steps: tuple[int, ...]
    members: tuple[int, ...]
    output_is_bad: bool
    cotangent_is_bad: bool
    input_is_bad: bool
    low: float
    high: float

    def text(self) -> str:
        """Return the name of the call: `blocks.layer (layer 2)`."""
        numbers = _numbers_text(self.layers, self.steps, self.members, self.number)
        return f"{self.path} ({', '.join(numbers)})" if numbers else self.path


def _in_order(where: Sequence[tuple[Label, Any]], found: Sequence[Any]) -> list[_Call]:
    """Return every call, in the order in which they ran.

    Args:
        where: from the plan: the notes, with the routes of the labels.
        found: the noted values.
    """
    labels, axes = [label for label, _ in where], [_unwrapped(x)[0].axes for _, x in where]
    # A loop runs at the position of its first call.
    starts: dict[tuple[int, ...], int] = {}
    for i, (label, own) in enumerate(zip(labels, axes, strict=True)):
        for axis in own:
            starts.setdefault(axis.prefix(label.route), i)
    counts: dict[str, int] = {}
    calls: list[_Call] = []
    for i, (label, own, each) in enumerate(zip(labels, axes, found, strict=True)):
        count = counts.get(label.name, 0)
        counts[label.name] = count + 1
        stacked, cotangent = _unwrapped(each)
        numbers, layers = jax.tree.map(np.asarray, stacked.value)
        lengths = numbers.shape[:-1]
        flags: Any = np.zeros(lengths, bool)
        if cotangent is not None:
            # A pullback may be mapped: then there are several for each call.
            flags = np.asarray(cotangent.value[0])[..., 0].reshape(-1, *lengths).any(0)
        of_layers = _axes_of_layers(own, layers, lengths)
        for index in np.ndindex(*lengths):
            key = [
                (starts[axis.prefix(label.route)], j if axis.kind == "loop" else n - 1 - j)
                for axis, j, n in zip(own, index, lengths, strict=True)
                if axis.kind != "map"
            ]
            is_out_bad, is_in_bad, low, high = map(float, numbers[index])
            pairs = list(enumerate(zip(own, index, strict=True)))
            calls.append(
                _Call(
                    (*key, (i, 0)),
                    label.name,
                    count,
                    tuple(int(layer[index]) for layer in layers),
                    tuple(j for k, (a, j) in pairs if a.kind != "map" and k not in of_layers),
                    tuple(j for _, (a, j) in pairs if a.kind == "map"),
                    is_out_bad > 0,
                    bool(flags[index]),
                    is_in_bad > 0,
                    low,
                    high,
                )
            )
    return sorted(calls, key=lambda call: call.key)


def _unwrapped(value: Any) -> tuple[StackedNote, Any]:
    if isinstance(value, WithCotangent):
        return value.value, value.cotangent
    return value, None


def _axes_of_layers(
    axes: Sequence[NoteAxis], layers: Sequence[Any], lengths: tuple[int, ...]
) -> set[int]:
    """Return the axes along which the numbers of the layers increase."""
    found: set[int] = set()
    for numbers in reversed(layers):
        for k in reversed(range(len(axes))):
            steps = np.arange(lengths[k]).reshape([-1 if i == k else 1 for i in range(len(axes))])
            is_its = axes[k].kind != "map" and bool(np.all(numbers == steps))
            if is_its and k not in found:
                found.add(k)
                break
    return found


# ---- the result


def _judged(calls: Sequence[_Call], results: Sequence[str]) -> FirstBad:
    outputs = [i for i, call in enumerate(calls) if call.output_is_bad]
    # Calls are in the order in which they ended: of nested calls, the innermost is first.
    if outputs:
        return _of_call("output", calls, outputs[0], len(outputs) - 1)
    cotangents = [i for i, call in enumerate(calls) if call.cotangent_is_bad]
    if cotangents:
        return _of_call("cotangent", calls, cotangents[-1], len(cotangents) - 1)
    after = calls[-1].text() if calls else None
    if results:
        count = len(results) - 1
        return FirstBad("result", results[0], after=after, others=count, checked=len(calls))
    return FirstBad(checked=len(calls))


def _of_call(
    kind: Literal["output", "cotangent"], calls: Sequence[_Call], i: int, others: int
) -> FirstBad:
    call = calls[i]
    has_range = call.low <= call.high
    return FirstBad(
        kind,
        call.path,
        call.layers,
        call.steps,
        call.members,
        call.number,
        call.low if has_range else None,
        call.high if has_range else None,
        call.input_is_bad,
        calls[i - 1].text() if i else None,
        others,
        len(calls),
    )
