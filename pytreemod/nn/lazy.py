"""`Lazy` and `materialize`: layers whose size follows from an example of the input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from pytreemod.errors import ShapeError, StateError
from pytreemod.module.fields import field
from pytreemod.nn.base import StatefulLayer, call_layer, one_key
from pytreemod.state.tokens import tokens_of
from pytreemod.state.values import State
from pytreemod.transform.abstract_calls import filter_eval_shape
from pytreemod.transform.vmap import filter_vmap
from pytreemod.tree.nodes import locations, with_new_containers
from pytreemod.tree.paths import path_text
from pytreemod.tree.snapshots import is_state
from pytreemod.typing import class_of, jtu

_M = TypeVar("_M")


class _Note:
    """The size that a call has found; equal only to itself, so that no earlier trace is reused."""

    size: Any = None


class Lazy(StatefulLayer):
    """A layer whose input size is not known yet; [`materialize`][pytreemod.materialize] makes it.

    Args:
        make: called as `make(size, key=key)`, or `make(size)` without a key; returns the layer.
        key: a random key for `make`. It is data: do not close over one in `make`, or all layers of
            a `Stack` would be equal.
        axis: the axis of the first input whose size is passed.

    Raises:
        StateError: if it is called before `materialize`.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import pytreemod as pm
        >>> from pytreemod import nn
        >>> layer = nn.Lazy(lambda n, key: nn.Linear(n, 10, key=key), key=jax.random.key(0))
        >>> pm.materialize(layer, jnp.ones((8, 3)))
        Linear(weight=f32[10,3], bias=f32[10], in_features=3, out_features=10)

    Source:
        Shape inference at initialization: `flax.linen`; `torch.nn.LazyLinear`.
    """

    make: Callable[..., Any] = field(static=True)
    key: Any
    axis: int = field(static=True)
    # Empty, with an axis for each map over this layer: a `Stack`, an `Ensemble`, `filter_vmap`.
    maps: jax.Array
    note: Any = field(static=True, default=None, repr=False)

    def __init__(self, make: Callable[..., Any], *, key: Any = None, axis: int = -1):
        self.make, self.axis, self.key = make, axis, one_key(key)
        self.maps = jnp.zeros((0,), bool)

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Note the size of x in `materialize`, and continue as the layer."""
        if self.note is None:
            hint = "model = pm.materialize(model, x)"
            raise StateError("a Lazy layer has no arrays before materialize", hint=hint)
        if not -x.ndim <= self.axis < x.ndim:
            raise ShapeError("Lazy", f"x with an axis {self.axis}", f"{x.ndim} axes")
        size = x.shape[self.axis]
        if self.note.size not in (None, size):
            raise ShapeError("materialize", f"size {self.note.size}, as before", str(size))
        self.note.size, layer = size, self.made(size)
        given = next((part for part in (*args, *kwargs.values()) if isinstance(part, State)), None)
        # Its tokens are not in the State of the model.
        own = _seeded(State(layer)) if given and tokens_of(layer) else given
        inputs = [x, *(part for part in args if part is not given)]
        options: Any = {name: part for name, part in kwargs.items() if part is not given}
        out, _ = call_layer(layer, inputs, own, options.pop("key", None), **options)
        return out if given is None else (out, given)

    def made(self, size: int) -> Any:
        """Make the layer, or several at once."""

        def make(lazy: Lazy) -> Any:
            return lazy.make(size) if lazy.key is None else lazy.make(size, key=lazy.key)

        for _ in range(self.maps.ndim - 1):
            make = filter_vmap(make)
        return make(self)


def materialize(
    model: _M, /, *args: Any, method: str | Callable[..., Any] | None = None, **kwargs: Any
) -> _M:
    """Make every [`Lazy`][pytreemod.nn.Lazy] layer of a model, by an example of its input.

    Runs the model on the shapes and dtypes of the example; nothing is computed. Call it before
    anything else: before `make_with_state` (inside the function that you pass to it), optimizers,
    ties, surgery.

    **Law.** The result equals the model with its layers written out, to the last bit.

    Args:
        model: a model, or any tree that has some.
        *args: arguments of the call: arrays, or `jax.ShapeDtypeStruct`. For a State, pass
            `pm.State(model)`, which has the tokens that exist already; its streams need no seed.
        method: the name of the method to call, or a function of the model and args; the model
            itself if None.
        **kwargs: further arguments of the call, by name.

    Returns:
        The model with all its layers.

    Raises:
        StateError: if the call did not reach a layer.
        ShapeError: if a layer is called with inputs of different sizes.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import pytreemod as pm
        >>> from pytreemod import nn
        >>> def make(key):
        ...     first = nn.Lazy(lambda n, key: nn.Linear(n, 4, key=key), key=key)
        ...     model = nn.Sequential([first, nn.Lazy(nn.BatchNorm)])
        ...     return pm.materialize(model, jnp.ones((8, 3)), pm.State(model))
        >>> model, state = pm.make_with_state(make)(jax.random.key(0))
        >>> model[0].in_features, model[1].input_size
        (3, 4)
    """

    def ask(node: Any) -> Any:
        return node.replace(note=_Note()) if isinstance(node, Lazy) else node

    def call(model: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = jtu.tree_map(_seeded, (args, kwargs), is_leaf=is_state)
        function = method if callable(method) else getattr(class_of(model), method or "__call__")
        return function(model, *args, **kwargs)

    def finish(node: Any) -> Any:
        return node.made(node.note.size) if isinstance(node, Lazy) else node

    model = with_new_containers(model)
    asking = jtu.tree_map(ask, model, is_leaf=_is_lazy)
    places = [place for place in locations(asking, _is_lazy) if isinstance(place.leaf, Lazy)]
    if not places:
        return model
    filter_eval_shape(call, asking, *args, **kwargs)
    missed = [path_text(place.path) for place in places if place.leaf.note.size is None]
    if missed:
        fact = "materialize: the call did not reach every Lazy layer"
        hint = "pm.materialize(model, x, method=lambda model, x: model.decode(model.encode(x)))"
        raise StateError(fact, at=missed, hint=hint)
    return jtu.tree_map(finish, asking, is_leaf=_is_lazy)


def _seeded(node: Any) -> Any:
    # Any key is fine: nothing is drawn.
    return node.seed(jax.random.key(0)) if is_state(node) else node


def _is_lazy(node: object) -> bool:
    return isinstance(node, Lazy)
