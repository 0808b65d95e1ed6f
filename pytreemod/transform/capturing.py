"""`capture` and `intervene`: look at the values inside a function, and change them.

Both are rules around the calls of chosen Modules (`call_rules`). A captured result is sown under
the Module's path. An intervention changes it by a function and by values, which are data of the
changed model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from pytreemod.errors import StateError
from pytreemod.module.fields import field
from pytreemod.transform.arguments import function_name
from pytreemod.transform.call_rules import CallRule, unwrap_calls, wrap_calls
from pytreemod.transform.sowing import Label, capturing, sow_value
from pytreemod.transform.wrapping import Transformed, check_callable
from pytreemod.tree.selecting import Selector, as_selector
from pytreemod.tree.snapshots import is_state
from pytreemod.typing import FilterSpec, PyTree, class_of, jtu

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")


class _Showing(CallRule):
    """Gives something of each result of a Module to the capture of a depth."""

    show: Callable[[Any], Any] = field(static=True)
    path: str = field(static=True)
    depth: int = field(static=True)

    def around(self, call: Any, module: Any, args: Any, kwargs: Any) -> Any:
        """Make the call, and show its result."""
        out = call(module, *args, **kwargs)
        sow_value(Label(self.depth, self.path), self.show(out))
        return out


def without_state(out: Any) -> Any:
    """Return the result of a layer, without State: for `(out, state)`, `out`."""
    if class_of(out) is tuple and any(map(is_state, out)):
        rest = tuple(x for x in out if not is_state(x))
        return without_state(rest[0] if len(rest) == 1 else rest)
    leaves, treedef = jtu.tree_flatten(out, is_leaf=is_state)
    return treedef.unflatten([None if is_state(x) else x for x in leaves])


def capture(
    fn: Callable[_P, _R], selector: FilterSpec | None = None
) -> Callable[_P, tuple[_R, dict[str, Any]]]:
    """Call a function, and return the results of chosen submodules and sown values, too.

    Works through every filtered transform that can return them, inside and outside of it. Values
    captured under [`filter_vmap`][pytreemod.filter_vmap], in the steps of
    [`filter_scan`][pytreemod.filter_scan] or in a [`Stack`][pytreemod.nn.Stack] are stacked along
    axis 0. Both branches of [`filter_cond`][pytreemod.filter_cond] must have the same.

    A compiled function is compiled a second time for its first capture, and for each other choice
    of submodules; without a capture it runs as before. Captures may be nested: each takes the
    submodules that it chose, and the outer one also sees values sown inside the inner one.

    **Law.** `capture(fn, s)(*args)[0]` equals `fn(*args)`.

    Args:
        fn: the function, which may be a Module, or a method of one.
        selector: picks Modules in the arguments (and in `fn`): a class (`nn.Linear`), a path
            (`"blocks.*.attention"`), `select.at(lambda m: m.head)`, a predicate on Modules, or a
            combination of these. None for sown values alone. A path is that of the Module itself
            in its argument.

    Returns:
        A function of the same arguments that returns a pair: the result of `fn`, and a dict, in the
        order of the calls. Its keys are paths of submodules (`blocks[0].attention`; `<root>` for an
        argument itself) and the names given to [`sow`][pytreemod.sow]. The key of a second value is
        `name#2`, and so on, unless that name was sown itself. A State is left out: for a layer that
        returns `(out, state)`, the value is `out`. A submodule that was not called has no key.

    Raises:
        ArgumentError: if `fn` is not callable.
        SpecError: if `selector` is not a selector, or picks no Module in the arguments.
        StateError: if a value cannot leave the transform that it is in (one of plain JAX, a while
            loop), or the function is a step with the state of an optimizer.

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> from pytreemod import nn
        >>> net = nn.MLP(2, 1, 8, 1, key=jax.random.key(0))
        >>> out, seen = pm.capture(net, nn.Linear)(jax.numpy.ones(2))
        >>> jax.tree.map(jax.numpy.shape, seen)
        {'layers[0]': (8,), 'layers[1]': (1,)}
    """
    check_callable("capture", fn, "fn")
    return _Captured(fn, None if selector is None else as_selector(selector))


class _Captured(Transformed):
    __slots__ = ()

    options: Selector | None
    transform_name = "capture"

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function; return its result and the captured values."""
        out, found = call_captured("capture", self.fn, args, kwargs, self.options, without_state)
        names = _shown_names([label.name for label, _ in found])
        return out, {name: value for name, (_, value) in zip(names, found, strict=True)}


def call_captured(
    where: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    selector: Selector | None,
    show: Callable[[Any], Any],
    has_sown: bool = True,
) -> tuple[Any, list[tuple[Label, Any]]]:
    """Call a function; return its result, and what was captured, in the order of the calls.

    Args:
        where: the name of the caller, for errors.
        fn: the function.
        args: its arguments.
        kwargs: those by keyword.
        selector: picks Modules; None for sown values alone.
        show: what to show of the result of a Module.
        has_sown: whether to return sown values, too.
    """
    with capturing() as (depth, found):
        trees = [fn, *args, *kwargs.values()]
        if selector is not None:
            trees = wrap_calls(where, trees, selector, lambda path: _Showing(show, path, depth))
        fn, *rest = trees
        named = dict(zip(kwargs, rest[len(args) :], strict=True))
        try:
            out = fn(*rest[: len(args)], **named)
        except (TypeError, ValueError) as error:
            if selector is not None:
                _explain(where, fn, error)
            raise
    for label, value in found:
        # For the captures around this one; without one, they are dropped.
        if label.depth != depth:
            sow_value(label, value)
    depths = (0, depth) if has_sown else (depth,)
    mine = [(label, value) for label, value in found if label.depth in depths]
    out, mine = unwrap_calls(
        (out, mine), lambda rule: isinstance(rule, _Showing) and rule.depth == depth
    )
    return out, mine


def _explain(where: str, fn: Any, error: Exception) -> None:
    # The errors of JAX have no class.
    text = f"{error} {error.__cause__}".lower()
    if any(words in text for words in ("custom node", "different type", "__rules__")):
        call = "pm.capture(loss, selector)" if where == "capture" else "pm.debug.first_bad(loss)"
        raise StateError(
            f"{where} of {function_name(fn)}: a model with chosen Modules does not match another "
            "tree, such as the state of an optimizer",
            hint=f"{call}(model, x)",
        ) from error


def released(tree: _T) -> _T:
    """Return a tree without the rules of captures."""
    return unwrap_calls(tree, lambda rule: isinstance(rule, _Showing))


def _shown_names(names: list[str]) -> list[str]:
    """Return a key for each name: that of a second value is `name#2`, unless that is a name."""
    counts: dict[str, int] = {}
    taken, shown = {*names}, list[str]()
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        key = name
        while counts[name] > 1 and (key == name or key in taken):
            key = f"{name}#{counts[name]}"
            counts[name] += key in taken
        shown.append(key)
    return shown


class _Changing(CallRule):
    """Changes the result of a Module, or its arguments."""

    fn: Any
    values: tuple[PyTree, ...]
    inputs: bool = field(static=True)

    def around(self, call: Any, module: Any, args: Any, kwargs: Any) -> Any:
        """Make the call, and change its result."""
        if self.inputs:
            args, kwargs = self.fn((args, kwargs), *self.values)
            return call(module, *args, **kwargs)
        out = call(module, *args, **kwargs)
        if class_of(out) is not tuple or not any(map(is_state, out)):
            return self.fn(out, *self.values)
        new = self.fn(without_state(out), *self.values)
        rest = iter([new] if sum(not is_state(x) for x in out) == 1 else new)
        return tuple(x if is_state(x) else next(rest) for x in out)


def intervene(
    model: _T, selector: FilterSpec, fn: Callable[..., Any], *values: PyTree, inputs: bool = False
) -> _T:
    """Return a model in which the results of chosen Modules are `fn(out, *values)`.

    The values are data of the returned model. So other values need no new program (for one
    function object and arrays); they go through every transform; and a gradient by them is that by
    the changed result. In a [`Stack`][pytreemod.nn.Stack] they have its layer axis, as its other
    arrays have: `jnp.arange(depth)` says which layer it is. What is the same for all layers is
    closed over.

    **Law.** `intervene(model, s, lambda out: out)(x)` equals `model(x)`.

    Args:
        model: a model, or any tree that contains Modules.
        selector: picks Modules, as for [`capture`][pytreemod.capture].
        fn: returns the new result. For a layer that returns `(out, state)` it gets `out`.
        *values: further arguments for `fn`: any trees of arrays.
        inputs: whether to change the arguments instead: `fn((args, kwargs), *values)` returns the
            new `(args, kwargs)` of the call.

    Returns:
        The changed model: call it, compile it, differentiate it, capture it.

    Raises:
        ArgumentError: if `fn` is not callable.
        SpecError: if `selector` is not a selector, or picks no Module.

    Examples:
        Put a value of another run in place of a result:

        >>> import jax, jax.numpy as jnp
        >>> import pytreemod as pm
        >>> from pytreemod import nn
        >>> net = nn.MLP(2, 1, 8, 2, key=jax.random.key(0))
        >>> x, other = jnp.ones(2), jnp.zeros(2)
        >>> _, seen = pm.capture(net, "layers[0]")(other)
        >>> patched = pm.intervene(net, "layers[0]", lambda out, value: value, seen["layers[0]"])
        >>> bool(patched(x) == net(other))
        True

        The gradient by a result is that by zeros which are added to it:

        >>> def loss(zeros, net, x):
        ...     return jnp.sum(pm.intervene(net, "layers[1]", jnp.add, zeros)(x))
        >>> pm.filter_grad(loss)(jnp.zeros(8), net, x).shape
        (8,)
    """
    check_callable("intervene", fn, "fn")
    chosen = as_selector(selector)
    (made,) = wrap_calls("intervene", [model], chosen, lambda path: _Changing(fn, values, inputs))
    return made
