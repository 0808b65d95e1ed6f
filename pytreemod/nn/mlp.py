"""The multilayer perceptron."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
from jaxtyping import Array, Shaped

from pytreemod.errors import ArgumentError, describe, explain
from pytreemod.module.classes import Module
from pytreemod.module.fields import field
from pytreemod.nn.arguments import (
    Title,
    check_array,
    check_dtype,
    check_feature_size,
    check_flag,
    check_last_axis,
    check_size,
    divide_key,
    named,
)
from pytreemod.nn.calling import ignores_key
from pytreemod.nn.initializing import Initializer
from pytreemod.nn.linear import Linear
from pytreemod.state.key_sources import KeyLike
from pytreemod.typing import AnyArray


def identity(x: Array) -> Array:
    """Give back x: the default `final_activation` of an `MLP`."""
    return x


class MLP(Module):
    """A multilayer perceptron: `depth` hidden layers of one width, then an output layer.

    Shapes:
        x: (..., in_size); (...) if in_size="scalar"
        return: (..., out_size); (...) if out_size="scalar"

    Fields:
        layers: depth + 1 `Linear` layers
        activation, final_activation: configuration if functions, data if Modules

    Args:
        in_size: size of the input's last axis, >= 0, or "scalar".
        out_size: size of the output's last axis, >= 0, or "scalar".
        width_size: size of each hidden layer, >= 0.
        depth: number of hidden layers, >= 0; with 0 there is only the output layer.
        activation: applied to the whole array after each hidden layer. A function or a Module;
            a Module is shared by all hidden layers.
        final_activation: the same for the output.
        use_bias: whether hidden layers have a bias.
        use_final_bias: whether the output layer has one.
        dtype: of all weights and biases; JAX's default float if None.
        key: used once, for the initial weights and biases.
        weight_init: passed on to every `Linear`.
        bias_init: passed on to every `Linear`.

    State and randomness: none.

    Raises:
        ArgumentError: a size is negative or not an integer, or another argument is unusable.
        RngError: key is no random key.
        ShapeError: the last axis of x has not in_size entries.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> mlp = nn.MLP(2, 1, width_size=8, depth=3, key=jax.random.key(0))
        >>> mlp(jnp.ones((5, 2))).shape, len(mlp.layers)
        ((5, 1), 4)

    Source:
        Initial values as in `Linear`.
    """

    layers: tuple[Linear, ...]
    activation: Callable[..., Any]
    final_activation: Callable[..., Any]
    use_bias: bool = field(static=True)
    use_final_bias: bool = field(static=True)
    in_size: int | Literal["scalar"] = field(static=True)
    out_size: int | Literal["scalar"] = field(static=True)
    width_size: int = field(static=True)
    depth: int = field(static=True)

    def __init__(
        self,
        in_size: int | Literal["scalar"],
        out_size: int | Literal["scalar"],
        width_size: int,
        depth: int,
        activation: Callable[..., Any] = jax.nn.relu,
        final_activation: Callable[..., Any] = identity,
        use_bias: bool = True,
        use_final_bias: bool = True,
        dtype: Any = None,
        *,
        key: KeyLike,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
    ):
        self.in_size = check_feature_size(named(self, "in_size"), in_size)
        self.out_size = check_feature_size(named(self, "out_size"), out_size)
        self.width_size = check_size(named(self, "width_size"), width_size)
        self.depth = check_size(named(self, "depth"), depth)
        self.activation = _check_function(named(self, "activation"), activation)
        self.final_activation = _check_function(named(self, "final_activation"), final_activation)
        self.use_bias = check_flag(named(self, "use_bias"), use_bias)
        self.use_final_bias = check_flag(named(self, "use_final_bias"), use_final_bias)
        dtype = check_dtype(named(self, "dtype"), dtype)
        keys = divide_key(named(self, "key"), key, self.depth + 1)

        sizes = (self.in_size, *[self.width_size] * self.depth, self.out_size)
        biased = (*[self.use_bias] * self.depth, self.use_final_bias)
        self.layers = tuple(
            Linear(n_in, n_out, bias, dtype, key=k, weight_init=weight_init, bias_init=bias_init)
            for n_in, n_out, bias, k in zip(sizes[:-1], sizes[1:], biased, keys, strict=True)
        )

    @ignores_key
    @jax.named_scope("pm.nn.MLP")
    def __call__(self, x: AnyArray, *, key: KeyLike | None = None) -> Shaped[Array, ...]:
        """Apply the layers one after the other; `key` is ignored."""
        del key
        if self.in_size != "scalar":
            where = Title(self, "in_size", "out_size", "width_size", "depth")
            check_last_axis(where, check_array(where, x), self.in_size, "in_size")
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return self.final_activation(self.layers[-1](x))


def _check_function(where: str, value: Any) -> Callable[..., Any]:
    if callable(value):
        return value
    cure = ("Pass the function itself:", "activation=jax.nn.relu")
    raise ArgumentError(explain(where, "a function or a Module", describe(value), cure=cure))
