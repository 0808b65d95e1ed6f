"""`materialize`: finishes models with missing sizes, by an example of their input.

It runs the model once, on shapes alone. Each unfinished instance in it (see
[`unfinished`][pytreemod.module.unfinished]) gets its path and a `_Watch`. When it is called, it
reports its sizes, and continues as the finished layer. Afterwards each instance is replaced by a
finished one.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import jax

from pytreemod.errors import ShapeError, UnfinishedError
from pytreemod.module.ties import node_at, tie_waiting, waiting_ties
from pytreemod.module.unfinished import (
    answering,
    count_axes,
    finish,
    is_unfinished,
    sizes_by_call,
    with_given,
)
from pytreemod.state.tokens import tokens_of
from pytreemod.state.values import State, joined_states, reduced_state
from pytreemod.transform.abstract_calls import filter_eval_shape
from pytreemod.transform.vmap import filter_vmap
from pytreemod.tree.paths import path_text
from pytreemod.tree.renewing import with_new_containers
from pytreemod.tree.surgery import replace_at
from pytreemod.typing import KeyPath, class_of, jtu

_M = TypeVar("_M")


def materialize(
    model: _M, /, *args: Any, method: str | Callable[..., Any] | None = None, **kwargs: Any
) -> _M:
    """Finish a model: infer sizes that were given as None from an example of its input.

    Runs the model on the shapes and dtypes of the example. Nothing is computed, and only the
    parameters need memory. Every unfinished layer that the call reaches is then made, with the
    arguments that it was given.

    Call it before anything else: before `make_with_state` (inside the function that you pass to
    it), optimizers, ties, surgery. The page of a layer lists which of its sizes may be None; for
    your own Modules use [`sizes_follow`][pytreemod.sizes_follow].

    **Laws.** The result equals the model with its sizes written out, to the last bit: keys are
    used in the same way. `materialize` of a finished model returns that model. Members of a Stack
    or an Ensemble, and models that `filter_vmap` has made as one, are finished as one.

    Args:
        model: a model, or any tree that has some.
        *args: arguments of the call: arrays, or `jax.ShapeDtypeStruct`. For a State, pass
            `pm.State(model)`, which has the tokens that exist already.
        method: the name of the method to call, or a function of the model and args; the model
            itself if None.
        **kwargs: further arguments of the call, by name.

    Returns:
        The model, finished.

    Raises:
        UnfinishedError: if the call did not reach a layer.
        ShapeError: if a layer is called with inputs of different sizes.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import pytreemod as pm
        >>> from pytreemod import nn
        >>> keys = pm.init_keys(jax.random.key(0))
        >>> model = nn.Sequential([
        ...     nn.Conv2d(None, 4, 3, key=keys), nn.Lambda(jnp.ravel), nn.Linear(None, 10, key=keys)
        ... ])
        >>> model = pm.materialize(model, jnp.ones((3, 8, 8)))
        >>> model[0].in_channels, model[2].in_features
        (3, 144)

        With State:

        >>> def make(key):
        ...     model = nn.Sequential([nn.Linear(None, 4, key=key), nn.BatchNorm(None)])
        ...     return pm.materialize(model, jnp.ones((8, 3)), pm.State(model))
        >>> model, state = pm.make_with_state(make)(jax.random.key(0))
        >>> model[1].input_size
        4

    Source:
        Shape inference at initialization: `flax.linen`; `torch.nn.LazyLinear`.
    """
    model = with_new_containers(model)
    found: dict[KeyPath, Any] = {}

    def note(path: KeyPath, node: Any) -> Any:
        found[path] = node
        return node

    _visit(note, model)
    if not found:
        return _tied(model, model)
    watch = _Watch()
    questioning = _visit(lambda path, node: answering(node, ft.partial(watch.call, path)), model)
    # Sizes follow from shapes: nothing is computed, however large the model is.
    filter_eval_shape(_called(method), questioning, *args, **kwargs)
    missed = {path: node for path, node in found.items() if path not in watch.sizes}
    if missed:
        _refuse_missed(missed)
    return _visit(lambda path, node: _finished(node, watch.sizes[path]), model)


def _visit(change: Callable[[KeyPath, Any], Any], tree: Any, path: KeyPath = ()) -> Any:
    """Replace each unfinished instance in a tree.

    Unfinished arguments of another instance are replaced first, because it is made from them.
    """

    def visit(below: KeyPath, node: Any) -> Any:
        if not is_unfinished(node):
            return node
        whole = (*path, *below)
        return change(whole, with_given(node, lambda given: _visit(change, given, whole)))

    return _tied(jtu.tree_map_with_path(visit, tree, is_leaf=is_unfinished), tree)


def _tied(tree: Any, before: Any) -> Any:
    """Make the ties of a tree that had to wait for unfinished parts."""
    for path in waiting_ties(before):
        lacking = filter(
            is_unfinished, jtu.tree_leaves(node_at(before, path), is_leaf=is_unfinished)
        )
        make = tie_waiting
        for _ in range(min(map(count_axes, lacking), default=0)):
            make = filter_vmap(make)
        tree = replace_at(tree, [(path, make(node_at(tree, path)))])
    return tree


class _Watch:
    """The sizes found in one run, by the paths of the unfinished instances."""

    def __init__(self) -> None:
        self.sizes: dict[KeyPath, dict[str, Any]] = {}

    def call(self, path: KeyPath, node: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note the sizes that follow from a call, and return the finished layer's result."""
        sizes = sizes_by_call(node, args, kwargs)
        before = self.sizes.setdefault(path, sizes)
        if before != sizes:
            _refuse_other(path, node, before, sizes)
        # Later layers in the call need an output of the right shape.
        return _call(finish(node, sizes), args, kwargs)


def _call(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a layer that has tokens which its State does not know.

    The State has these only during the call: loops pass it on, and a carry must not change its
    structure.
    """
    given = [part for part in (*args, *kwargs.values()) if isinstance(part, State)]
    if not given or not tokens_of(layer):
        return layer(*args, **kwargs)
    # Any key is fine: nothing is drawn.
    own = State(layer).seed(jax.random.key(0))

    def with_own(part: Any) -> Any:
        return joined_states(part, own) if isinstance(part, State) else part

    def without_own(part: Any) -> Any:
        return reduced_state(part, given[0]) if isinstance(part, State) else part

    out = layer(*map(with_own, args), **{name: with_own(part) for name, part in kwargs.items()})
    return jtu.tree_map(without_own, out, is_leaf=_is_state)


def _is_state(part: object) -> bool:
    return isinstance(part, State)


def _called(method: str | Callable[..., Any] | None) -> Callable[..., Any]:
    if callable(method):
        return method

    def call(model: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(model, method or "__call__")(*args, **kwargs)

    return call


def _finished(node: Any, sizes: dict[str, Any]) -> Any:
    """Finish one instance, or several that were made as one."""

    def build(node: Any) -> Any:
        return finish(node, sizes)

    # A map has made the members of a Stack or an Ensemble: their keys have leading axes.
    for _ in range(count_axes(node)):
        build = filter_vmap(build)
    return build(node)


def _refuse_missed(missed: dict[KeyPath, Any]) -> NoReturn:
    raise UnfinishedError(
        "materialize",
        "a call that runs every unfinished layer",
        f"a call that misses {len(missed)}",
        at=[f"{path_text(path)}: {node!r}" for path, node in missed.items()],
        hint=[
            "run them: pass the name of a method, or a function:",
            "pm.materialize(model, x, method='decode')",
            "pm.materialize(model, x, method=lambda m, x: m.decode(m.encode(x)))",
            "or pass the size to the layer",
        ],
    )


def _refuse_other(path: KeyPath, node: Any, before: Any, sizes: Any) -> NoReturn:
    name = next(name for name in sizes if before[name] != sizes[name])
    raise ShapeError(
        f"materialize: {path_text(path) or class_of(node).__qualname__}",
        f"{name}={before[name]!r}, as in an earlier call",
        f"{name}={sizes[name]!r}",
        hint=["one layer takes inputs of one size; make two layers, or pass the size"],
    )
