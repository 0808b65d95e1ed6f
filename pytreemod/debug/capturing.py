"""`capture`: return the values inside a function, by submodule or by name.

A rule around the calls of the chosen Modules (`transform.interception.surrounded_calls`) collects
their results under their paths, as `sow` collects a value under its name. The results have their
own classes again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple, ParamSpec, TypeVar

from pytreemod.transform.boundary.cotangents import Cotangent, WithCotangent, look
from pytreemod.transform.boundary.sowing import (
    EVERY_CAPTURE,
    Collector,
    Label,
    capturing,
    note,
    offered,
    shown_names,
)
from pytreemod.transform.boundary.supplying import Handed, handing, next_call, with_values
from pytreemod.transform.boundary.wrapping import Transformed, check_callable, function_name
from pytreemod.transform.interception.surrounded_calls import (
    AbstractCallRule,
    CallSite,
    released,
    surround_all,
    surrounding,
)
from pytreemod.tree.effects import is_state
from pytreemod.tree.selecting import Selector, as_selector
from pytreemod.typing import FilterSpec, class_of, jtu

_P = ParamSpec("_P")
_R = TypeVar("_R")


def capture(
    fn: Callable[_P, _R], selector: FilterSpec | None = None, *, cotangents: bool = False
) -> Callable[_P, tuple[_R, dict[str, Any]]]:
    """Call a function, and return the results of chosen submodules and sown values, too.

    Works through every filtered transform that can return them, inside and outside of it. Values
    captured under [`filter_vmap`][pytreemod.filter_vmap] or in the steps of
    [`filter_scan`][pytreemod.filter_scan] are stacked along axis 0. Both branches of
    [`filter_cond`][pytreemod.filter_cond] must have the same. Capturing in a transform that cannot
    return values (one of plain JAX, a while loop) is an error.

    A compiled function is compiled a second time for its first capture, and for each other choice
    of submodules; without a capture it runs as before.

    Captures may be nested: each takes the submodules that it chose, and the outer one also sees
    values sown inside the inner one.

    With `cotangents=True`, every value is a pair: the value, and its cotangent in the
    backward pass of a [`filter_grad`][pytreemod.filter_grad],
    [`filter_value_and_grad`][pytreemod.filter_value_and_grad] or
    [`filter_vjp`][pytreemod.filter_vjp] inside `fn`, whatever is differentiated there. Cotangents
    are stacked as the values are. The differentiated function is traced once more. For
    nested derivatives, the innermost counts.

    **Law.** `capture(fn, s)(*args)[0]` equals `fn(*args)`.

    Args:
        fn: the function, which may be a Module, or a method of one.
        selector: picks Modules in the arguments (and in `fn`): a class (`nn.Linear`), a path
            (`"blocks.*.attention"`), `select.at(lambda m: m.head)`, a predicate on Modules, or a
            combination of these. None for sown values alone. A path is that of the Module itself
            in its argument.
        cotangents: whether to return cotangents, too.

    Returns:
        A function of the same arguments that returns a pair: the result of `fn`, and a dict, in the
        order of the calls. Its keys are paths of submodules (`blocks[0].attention`; `<root>` for an
        argument itself) and the names given to [`sow`][pytreemod.sow]. The key of a second value is
        `name#2`, and so on, unless that name was sown itself. A State is left out: for a layer that
        returns `(out, state)`, the value is `out`. A submodule that was not called has no key. With
        `cotangents=True` each value is a pair `(value, cotangent)`. The cotangent is a tree like
        the value, with None for leaves that are not floating arrays; it is None if nothing is
        differentiated.

    Raises:
        ArgumentError: if `fn` is not callable.
        SpecError: if `selector` is not a selector, or picks no Module in the arguments.
        CaptureError: if a value cannot leave the transform that it is in.

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> from pytreemod import nn
        >>> net = nn.MLP(2, 1, 8, 1, key=jax.random.key(0))
        >>> out, seen = pm.capture(net, nn.Linear)(jax.numpy.ones(2))
        >>> jax.tree.map(jax.numpy.shape, seen)
        {'layers[0]': (8,), 'layers[1]': (1,)}

        >>> grad = pm.filter_grad(lambda net, x: jax.numpy.sum(net(x)))
        >>> _, seen = pm.capture(grad, "layers.1", cotangents=True)(net, jax.numpy.ones(2))
        >>> value, cotangent = seen["layers[1]"]
        >>> cotangent
        Array([1.], dtype=float32)
    """
    check_callable("capture", fn, "fn")
    chosen = None if selector is None else as_selector(selector)
    return _Captured(fn, _Options(chosen, bool(cotangents)))


# ---- the rule around a Module


class _Showing(AbstractCallRule):
    """Gives the result of a Module to the capture of a level."""

    level: int
    # Results in a Stack are stacked, in the order of the layers.
    uses_layer: ClassVar[bool] = False

    def around(
        self,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        where: CallSite,
    ) -> Any:
        """Make the call, and record its result."""
        out = call(*args, **kwargs)
        label, shown = Label(self.level, where.path), without_state(out)
        note(label, shown)
        zeros = offered(label)
        return out if zeros is None else with_shown(out, look(shown, zeros))


def without_state(out: Any) -> Any:
    """Return the result of a layer, without State: for `(out, state)`, `out`."""
    if class_of(out) is tuple and any(map(is_state, out)):
        rest = tuple(x for x in out if not is_state(x))
        return without_state(rest[0] if len(rest) == 1 else rest)

    def hide(node: Any) -> Any:
        return None if is_state(node) else node

    # Containers are copied, because the function may change them later.
    return jtu.tree_map(hide, out, is_leaf=is_state)


def with_shown(out: Any, shown: Any) -> Any:
    """`out` with another value for the part that `without_state` returned."""
    if class_of(out) is tuple and any(map(is_state, out)):
        rest = [i for i, x in enumerate(out) if not is_state(x)]
        parts, new = list(out), [shown] if len(rest) == 1 else shown
        for i, part in zip(rest, new, strict=True):
            parts[i] = with_shown(out[i], part)
        return tuple(parts)
    leaves, treedef = jtu.tree_flatten(out, is_leaf=is_state)
    new = iter(jtu.tree_leaves(shown))
    return treedef.unflatten([x if is_state(x) else next(new) for x in leaves])


# ---- the call


class _Options(NamedTuple):
    selector: Selector | None
    cotangents: bool


class _Captured(Transformed):
    """A function under `capture`."""

    __slots__ = ()

    options: _Options

    transform_name = "capture"

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function; return its result and the captured values."""
        selector, cotangents = self.options
        # For the code around it, this is a transform that may return values.
        handed = next_call() if handing else Handed()
        with capturing(cotangents=cotangents) as collector, surrounding() as level:
            trees = [self.fn, *args, *kwargs.values()]
            if selector is not None:
                rule = _Showing(collector.level)
                trees = surround_all("capture", trees, selector, rule, level=level)
            fn, *rest = trees
            named = dict(zip(kwargs, rest[len(args) :], strict=True))
            try:
                out = with_values(fn, handed)(*rest[: len(args)], **named)
            except (TypeError, ValueError) as error:
                self._explain(error)
                raise
            out = released(out, level)
            collector.values = [released(value, level) for value in collector.values]
        return out, _seen(collector, cotangents)

    def _explain(self, error: Exception) -> None:
        # JAX has no class for these errors; their messages differ in capitals.
        if self.options.selector is not None and (
            "ustom node" in str(error) or "pytree" in str(error)
        ):
            error.add_note(
                f"Inside capture of {function_name(self.fn)}, the structure of chosen Modules has "
                "their names, so that models with other names, or without, cannot be mapped "
                "together with them. Capture the code that calls the model, not the update."
            )


def _seen(collector: Collector, cotangents: bool) -> dict[str, Any]:
    levels = (EVERY_CAPTURE, collector.level)
    pairs = zip(collector.labels, collector.values, strict=True)
    found = with_later([(label, value) for label, value in pairs if label.level in levels])
    shown = (_pair(value) if cotangents else _pair(value)[0] for _, value in found)
    return dict(zip(shown_names([label.name for label, _ in found]), shown, strict=True))


def with_later(pairs: Iterable[tuple[Label, Any]]) -> list[tuple[Label, Any]]:
    """Return the noted values, with the cotangents that a pullback noted later."""
    found: list[tuple[Label, Any]] = []
    for label, value in pairs:
        if isinstance(value, Cotangent):
            _give(found, label, value)
        else:
            found.append((label, value))
    return found


def _give(found: list[tuple[Label, Any]], label: Label, cotangent: Cotangent) -> None:
    """Give a cotangent to the last value under a label that waits for one with its mark."""
    for i, (other, value) in reversed([*enumerate(found)]):
        is_meant = other[:2] == label[:2] and isinstance(value, WithCotangent)
        if is_meant and value.mark == cotangent.mark:
            found[i] = other, WithCotangent(value.value, cotangent.value)
            return


def _pair(value: Any) -> tuple[Any, Any]:
    if isinstance(value, WithCotangent):
        return value.value, value.cotangent
    return value, None
