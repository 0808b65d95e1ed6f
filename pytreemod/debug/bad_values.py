"""`first_bad`: find the first value that is not finite.

Every call of a Module is captured, as a flag: whether its result is finite. Flags from the steps
of a loop, or the layers of a Stack, are stacked; they are put back into the order of the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.transform.arguments import Parameters, function_name
from pytreemod.transform.call_rules import has_method, offered
from pytreemod.transform.capturing import call_captured, without_state
from pytreemod.transform.sowing import Label
from pytreemod.transform.wrapping import check_callable
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_inexact_array
from pytreemod.tree.selecting import as_selector
from pytreemod.tree.snapshots import divide
from pytreemod.typing import PyTree, jtu


@dataclass(frozen=True, repr=False)
class FirstBad:
    """The result of [`first_bad`][pytreemod.debug.first_bad]: false if everything is finite.

    Fields:
        kind: the value that is not finite: an `"argument"` (a parameter is one), the `"output"` of
            a Module, or the `"result"`; None if all are finite.
        path: of the Module, as in `capture`, or of the array.
        index: the number of the layer, step or member, on each of the axes along which calls of
            the Module are stacked.
        checked: how many calls of Modules were checked; the layers of a Stack count once.
    """

    kind: Literal["argument", "output", "result"] | None = None
    path: str = ""
    index: tuple[int, ...] = ()
    checked: int = 0

    def __bool__(self) -> bool:
        return self.kind is not None

    def __repr__(self) -> str:
        if self.kind is None:
            return f"FirstBad: none in {self.checked} calls of Modules"
        what = {"argument": "the argument ", "output": "the output of "}.get(self.kind, "")
        number = f", number {', '.join(map(str, self.index))}" if self.index else ""
        return f"FirstBad: {what}{self.path}{number}"


def first_bad(fn: Callable[..., Any]) -> Callable[..., FirstBad]:
    """Find the first value that is NaN or infinite.

    It searches in this order: an argument, or a parameter in one; the output of a Module, of the
    one called first, and of nested Modules the innermost; the result. Of the members of a map the
    first counts. All calls of Modules in the arguments are checked: inside compiled code, too, and
    in a [`Stack`][pytreemod.nn.Stack], [`filter_scan`][pytreemod.filter_scan] and
    [`filter_vmap`][pytreemod.filter_vmap]. For the backward pass, use
    [`backward_nan`][pytreemod.debug.backward_nan].

    Args:
        fn: the function, which may be a Module.

    Returns:
        A function of the same arguments that returns a `FirstBad`: false if everything is finite.
        It works on a copy of the arguments: it uses up no State, and donates nothing. It can't be
        called in compiled code.

    Raises:
        ArgumentError: if `fn` is not callable.
        StateError: if a Module is called in a transform that cannot return captured values.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> from pytreemod import nn
        >>> net = nn.Sequential([nn.LayerNorm(2), nn.Lambda(jnp.log)])
        >>> pm.debug.first_bad(pm.filter_jit(net))(jnp.asarray([1.0, 3.0]))
        FirstBad: the output of layers[1]
        >>> bool(pm.debug.first_bad(net.layers[0])(jnp.ones(2)))
        False
    """
    check_callable("first_bad", fn, "fn")

    def find(*args: Any, **kwargs: Any) -> FirstBad:
        named = [(function_name(fn), fn), *Parameters.of(fn).named(args, kwargs)]
        for path in (path for name, tree in named for path in _bad_places(name, tree)):
            return FirstBad("argument", path)
        # A copy, so that the caller's States are not used up, and nothing of theirs is donated.
        arrays, structure = divide((fn, args, kwargs))
        copies = [jnp.array(x, copy=True) if isinstance(x, jax.Array) else x for x in arrays]
        has_modules = any(offered(tree, has_method) for _, tree in named)
        selector = as_selector(...) if has_modules else None
        again, given, by_name = structure.assemble(copies)
        out, flags = call_captured("first_bad", again, given, by_name, selector, _is_finite, False)
        labels = [label for label, _ in flags]
        found: list[Any] = [
            (_moment(labels, i, index), labels[i].name, index)
            for i, (_, flag) in enumerate(flags)
            for index in map(tuple, np.argwhere(~np.asarray(flag)).tolist())
        ]
        if found:
            return FirstBad("output", min(found)[1], min(found)[2], len(flags))
        for path in _bad_places("result", out):
            return FirstBad("result", path, (), len(flags))
        return FirstBad(checked=len(flags))

    return find


def _is_finite(out: PyTree) -> jax.Array:
    leaves = filter(is_inexact_array, jtu.tree_leaves(without_state(out)))
    return jnp.all(jnp.stack([jnp.asarray(True), *(jnp.all(jnp.isfinite(x)) for x in leaves)]))


def _bad_places(root: str, tree: PyTree) -> list[str]:
    leaves = jtu.tree_leaves_with_path(tree)
    return [path_text(p, root) for p, x in leaves if is_inexact_array(x) and not _is_finite(x)]


def _moment(labels: Sequence[Label], i: int, index: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return when a call was made: steps one after the other, and in each step its Modules.

    A loop runs at the position of the first Module in it.
    """
    found: list[tuple[int, int]] = []
    for axis, (kind, _) in enumerate(labels[i].stacked):
        if kind != "map":
            inside = labels[i].stacked[: axis + 1]
            start = next(j for j, label in enumerate(labels) if label.stacked[: axis + 1] == inside)
            found.append((start, index[axis] if kind == "loop" else -index[axis]))
    return [*found, (i, 0)]
