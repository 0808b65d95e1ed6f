"""`Sequential`, `Identity`, and `Lambda`, which makes a layer from a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, overload

import jax

from pytreemod.errors import ArgumentError, describe
from pytreemod.module.classes import Module
from pytreemod.module.fields import field
from pytreemod.nn.arguments import check_key, check_state, function, named
from pytreemod.nn.calling import (
    ABSENT,
    Absence,
    Absent,
    StatefulLayer,
    call_layer,
    ignores_key,
    in_scope,
    is_stateful,
    refuse_no_state,
    requires_state,
    uses_key_if,
    wants_key,
)
from pytreemod.state.key_sources import InitKeys, KeyLike
from pytreemod.state.values import State
from pytreemod.typing import jtu

Value = TypeVar("Value")


class Identity(Module):
    """Returns its input; its constructor accepts, and ignores, any arguments.

    Shapes:
        x: anything
        return: x

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.Identity(3, bias=False)(jnp.ones(2))
        Array([1., 1.], dtype=float32)
    """

    def __init__(self, *args: Any, **kwargs: Any):
        del args, kwargs

    @ignores_key
    @in_scope("pm.nn.Identity")
    def __call__(self, x: Value, *, key: KeyLike | None = None) -> Value:
        """Return x; `key` is ignored."""
        del key
        return x


class Lambda(Module):
    """Makes a layer from a function.

    Shapes:
        x: any input of fn
        return: the result of fn

    Fields:
        fn: configuration if a function, data if a Module

    Args:
        fn: called with x alone.

    Raises:
        ArgumentError: if fn is not callable.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.Lambda(jax.nn.relu)(jnp.array([-1.0, 1.0]))
        Array([0., 1.], dtype=float32)
    """

    fn: Callable[[Any], Any] = field(accepts=function())

    @ignores_key
    @in_scope("pm.nn.Lambda")
    def __call__(self, x: Any, *, key: KeyLike | None = None) -> Any:
        """Call the function; `key` is ignored."""
        del key
        return self.fn(x)


class Sequential(StatefulLayer):
    """Applies layers in sequence.

    Indexing returns a layer, slicing a `Sequential`; `len` and iteration work.

    Shapes:
        x: any input of the first layer
        return: the output of the last layer; a pair with the State if one was passed in

    Fields:
        layers: a tuple of Modules

    Args:
        layers: callable Modules. Wrap functions: `Lambda(jax.nn.relu)`.

    State and randomness: passes State to the layers that are stateful. A key is split between
        the layers, unless none of them uses one. A layer that does not use its key gets none,
        and need not have a parameter `key`.

    Raises:
        ArgumentError: if a layer is not a callable Module, or state is not a State.
        RngError: if key is not a random key.
        StateError: if a layer needs State and none was passed in, or it does not return it.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> net = nn.Sequential([nn.Linear(3, 4, key=jax.random.key(0)), nn.Lambda(jax.nn.relu)])
        >>> net(jnp.ones((7, 3))).shape, len(net), len(net[:1])
        ((7, 4), 2, 1)
    """

    layers: tuple[Callable[..., Any], ...]

    def __init__(self, layers: Sequence[Callable[..., Any]], *more: Absent):
        # Type checkers refuse any `more`; it is there for an error that shows the right call.
        self.layers = _check_layers(named(self, "layers"), layers, more)

    @overload
    def __call__(self, x: Any, *, key: KeyLike | None = None) -> Any: ...

    @overload
    def __call__(
        self, x: Any, state: State, *, key: KeyLike | None = None
    ) -> tuple[Any, State]: ...

    @uses_key_if(lambda layer: any(wants_key(inner) for inner in layer.layers))
    @in_scope("pm.nn.Sequential")
    def __call__(
        self, x: Any, state: State | Absent = ABSENT, *, key: KeyLike | None = None
    ) -> Any:
        """Apply the layers.

        Args:
            x: the first layer's input.
            state: for the layers that are stateful.
            key: split between the layers that use one.

        Returns:
            The last layer's output; with `state`, the pair of it and the new State.
        """
        check_state("Sequential(...)", state)
        for number, (layer, layer_key) in enumerate(zip(self.layers, self._keys(key), strict=True)):
            if isinstance(state, Absence) and requires_state(layer):
                refuse_no_state("Sequential(...)", f"layers[{number}]: {type(layer).__name__}")
            x, state = call_layer(layer, x, state, layer_key)
        return x if isinstance(state, Absence) else (x, state)

    def _keys(self, key: KeyLike | None) -> Sequence[Any]:
        """Return a key for each layer that uses one."""
        if key is None:
            return [None] * len(self.layers)
        wanted = [wants_key(layer) for layer in self.layers]
        if not any(wanted):
            if not isinstance(key, InitKeys):  # A check would take an unused key from it.
                check_key("Sequential(...)", key)
            return [None] * len(self.layers)
        if isinstance(key, InitKeys):
            return [key if wants else None for wants in wanted]
        # Split by the number of all layers, so that a layer's key does not depend on the others.
        keys = jax.random.split(check_key("Sequential(...)", key), len(self.layers))
        return [keys[number] if wants else None for number, wants in enumerate(wanted)]

    @overload
    def __getitem__(self, index: int) -> Callable[..., Any]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequential: ...

    def __getitem__(self, index: int | slice) -> Callable[..., Any] | Sequential:
        """Return a layer by number, or several as a `Sequential`."""
        if isinstance(index, slice):
            return Sequential(self.layers[index])
        try:
            return self.layers[index]
        except TypeError as error:
            expected = "an integer or a slice"
            raise ArgumentError("Sequential[...]", expected, describe(index)) from error

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        yield from self.layers

    def __len__(self) -> int:
        return len(self.layers)

    def is_stateful(self) -> bool:
        """Whether any of the layers needs State.

        Returns:
            True or False.
        """
        return any(is_stateful(layer) for layer in self.layers)

    def needs_state(self) -> bool:
        """Whether any of the layers must be called with State.

        Returns:
            True or False.
        """
        return any(requires_state(layer) for layer in self.layers)


def _check_layers(where: str, layers: Any, more: Sequence[Any]) -> tuple[Callable[..., Any], ...]:
    if more or isinstance(layers, (str, bytes)) or not hasattr(layers, "__iter__"):
        got = f"{1 + len(more)} arguments" if more else describe(layers)
        fact = f"Sequential takes one list of layers, not {got}"
        raise ArgumentError(fact, hint="Sequential([layer1, layer2])")
    layers = tuple(layers)
    for number, layer in enumerate(layers):
        if not callable(layer) or isinstance(layer, type):
            raise ArgumentError(f"{where}[{number}] cannot be called: {describe(layer)}")
        # In a tuple a function would be a leaf that is not an array, which plain JAX refuses.
        # `Lambda` makes it configuration, in a field.
        if jtu.all_leaves([layer]):
            name = getattr(layer, "__name__", "f")
            raise ArgumentError(
                f"{where}[{number}] is not a Module, but {describe(layer)}",
                hint=f"nn.Lambda({name if name.isidentifier() else 'f'})",
            )
    return layers
