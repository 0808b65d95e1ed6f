"""`Sequential`, `Identity`, and `Lambda`, which makes a layer from a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, overload

import jax

from pytreemod.errors import ArgumentError, describe
from pytreemod.module.classes import Module
from pytreemod.nn.base import StatefulLayer, call_layer, divide_key, takes_state
from pytreemod.state.key_sources import KeyLike
from pytreemod.state.values import State
from pytreemod.tree.nodes import is_node

_T = TypeVar("_T")


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

    def __call__(self, x: _T, *, key: KeyLike | None = None) -> _T:
        """Return x; `key` is ignored."""
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

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.Lambda(jax.nn.relu)(jnp.array([-1.0, 1.0]))
        Array([0., 1.], dtype=float32)
    """

    fn: Callable[[Any], Any]

    def __call__(self, x: Any, *, key: KeyLike | None = None) -> Any:
        """Call the function; `key` is ignored."""
        with jax.named_scope("pm.nn.Lambda"):
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

    State and randomness: passes the State to each layer that is a
        [`StatefulLayer`][pytreemod.nn.StatefulLayer], or has a parameter named `state`. A key is
        split between the layers; those without a parameter `key` get none.

    Raises:
        ArgumentError: if a layer is not a callable Module.
        StateError: if a layer that got a State does not return it.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> net = nn.Sequential([nn.Linear(3, 4, key=jax.random.key(0)), nn.Lambda(jax.nn.relu)])
        >>> net(jnp.ones((7, 3))).shape, len(net), len(net[:1])
        ((7, 4), 2, 1)
    """

    layers: tuple[Callable[..., Any], ...]

    def __init__(self, layers: Sequence[Callable[..., Any]]):
        self.layers = tuple(layers)
        for number, layer in enumerate(self.layers):
            # In a tuple a function would be a leaf that is not an array, which plain JAX refuses.
            # `Lambda` makes it configuration, in a field.
            if not callable(layer) or not is_node(layer):
                fact = f"Sequential(layers)[{number}] is not a layer, but {describe(layer)}"
                raise ArgumentError(fact, hint="nn.Lambda(f)" if callable(layer) else ())

    @overload
    def __call__(self, x: Any, state: None = None, *, key: KeyLike | None = None) -> Any: ...

    @overload
    def __call__(
        self, x: Any, state: State, *, key: KeyLike | None = None
    ) -> tuple[Any, State]: ...

    def __call__(self, x: Any, state: State | None = None, *, key: KeyLike | None = None) -> Any:
        """Apply the layers.

        Args:
            x: the first layer's input.
            state: for the layers that take one.
            key: split between the layers.

        Returns:
            The last layer's output; with `state`, the pair of it and the new State.
        """
        given = state
        keys = [None] * len(self) if key is None else divide_key(key, len(self))
        with jax.named_scope("pm.nn.Sequential"):
            for number, layer in enumerate(self.layers):
                try:
                    x, state = call_layer(layer, (x,), state, keys[number])
                except Exception as error:
                    error.add_note(f"in layers[{number}]: {type(layer).__name__}")
                    raise
        return x if given is None else (x, state)

    @overload
    def __getitem__(self, index: int) -> Callable[..., Any]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequential: ...

    def __getitem__(self, index: int | slice) -> Callable[..., Any] | Sequential:
        """Return a layer by number, or several as a `Sequential`."""
        chosen: Any = self.layers[index]
        return Sequential(chosen) if isinstance(index, slice) else chosen

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        yield from self.layers

    def __len__(self) -> int:
        return len(self.layers)

    def is_stateful(self) -> bool:
        """Whether any of the layers is called with a State, if there is one."""
        return any(map(takes_state, self.layers))
