"""The multilayer perceptron."""

from __future__ import annotations

import functools as ft
import operator
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
from jaxtyping import Array, Shaped

from pytreemod.module.classes import Module
from pytreemod.module.fields import field
from pytreemod.nn.base import AnyArray, Initializer, divide_key, layer_call
from pytreemod.nn.linear import Linear
from pytreemod.state.key_sources import KeyLike
from pytreemod.transform.vmap import filter_vmap
from pytreemod.tree.nodes import is_node
from pytreemod.tree.predicates import is_array
from pytreemod.typing import jtu

_T = TypeVar("_T")


def identity(x: _T) -> _T:
    """Return x: the default `final_activation` of an `MLP`."""
    return x


class MLP(Module):
    r"""A multilayer perceptron: `depth` hidden layers of equal width, then an output layer.

    Computes $x \leftarrow \phi(W_i x + b_i)$ for each hidden layer, then
    $y = \phi_{out}(W x + b)$. For many layers, a [`Stack`][pytreemod.nn.Stack] compiles faster.

    Shapes:
        x: (..., in_size); (...) if in_size="scalar"
        return: (..., out_size); (...) if out_size="scalar"

    An activation that is a function gets the whole array. An activation that is a tree (a Module, a
    `Partial`, a bound method of a Module) can have parameters. It is copied for each neuron of each
    hidden layer, and each copy gets the one number of its neuron.

    Fields:
        layers: depth + 1 `Linear` layers
        activation: configuration if a function; otherwise its arrays have two leading axes,
            (depth, width_size)
        final_activation: the same, with one leading axis (out_size,), or none for "scalar"

    Args:
        in_size: size of the input's last axis, or "scalar".
        out_size: size of the output's last axis, or "scalar".
        width_size: size of each hidden layer.
        depth: number of hidden layers; with 0 there is only the output layer.
        activation: applied after each hidden layer: a function, or a Module that is copied.
        final_activation: the same for the output layer.
        use_bias: whether hidden layers have a bias.
        use_final_bias: whether the output layer has one.
        dtype: of all weights and biases; JAX's default float if None.
        key: used once, for the initial weights and biases.
        weight_init: passed on to every `Linear`.
        bias_init: passed on to every `Linear`.

    State and randomness: none.

    Raises:
        ShapeError: if the last axis of x does not have in_size entries.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> mlp = nn.MLP(2, 1, width_size=8, depth=3, key=jax.random.key(0))
        >>> mlp(jnp.ones((5, 2))).shape, len(mlp.layers)
        ((5, 1), 4)

        With a learned activation:

        >>> import pytreemod as pm
        >>> class Slope(pm.Module):
        ...     factor: jax.Array
        ...     def __call__(self, x):
        ...         return jnp.where(x > 0, x, self.factor * x)
        >>> mlp = nn.MLP(2, 1, 8, 3, Slope(jnp.asarray(0.1)), key=jax.random.key(0))
        >>> mlp.activation.factor.shape
        (3, 8)

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
        self.in_size, self.out_size = in_size, out_size
        self.width_size, self.depth = width_size, depth
        self.use_bias, self.use_final_bias = use_bias, use_final_bias
        sizes: list[Any] = [in_size, *[width_size] * depth, out_size]
        biases = [use_bias] * depth + [use_final_bias]
        inits: dict[str, Any] = {"weight_init": weight_init, "bias_init": bias_init}
        self.layers = tuple(
            Linear(n_in, n_out, bias, dtype, key=own_key, **inits)
            for n_in, n_out, bias, own_key in zip(
                sizes[:-1], sizes[1:], biases, divide_key(key, depth + 1), strict=True
            )
        )
        self.activation = _copied(activation, depth, width_size)
        outputs = () if out_size == "scalar" else (out_size,)
        self.final_activation = _copied(final_activation, *outputs)

    @layer_call()
    def __call__(self, x: AnyArray, *, key: KeyLike | None = None) -> Shaped[Array, ...]:
        """Apply the layers one after the other; `key` is ignored."""
        *hidden, last = self.layers
        for i, layer in enumerate(hidden):
            x = _activated(jtu.tree_map(ft.partial(_at, i), self.activation), layer(x))
        return _activated(self.final_activation, last(x), self.out_size != "scalar")


def _at(index: int, leaf: Any) -> Any:
    return leaf[index] if is_array(leaf) else leaf


def _copied(activation: Callable[..., Any], *sizes: int) -> Callable[..., Any]:
    """Copy an activation that has parameters for each entry of some leading axes."""
    if not is_node(activation):
        return activation
    # From the inside out: the axis that is mapped last becomes the first.
    for size in reversed(sizes):
        activation = filter_vmap(identity, in_axes=None, axis_size=size)(activation)
    return activation


def _activated(activation: Callable[..., Any], x: Array, by_neuron: bool = True) -> Array:
    """Apply a function to all of x, or each copy of a Module to each number of its neuron."""
    if not is_node(activation):
        return activation(x)
    # A copy gets one number, which it may branch on; the other axes are examples, which share it.
    mapped: Any = filter_vmap(operator.call) if by_neuron else operator.call
    for _ in range(x.ndim - by_neuron):
        mapped = filter_vmap(mapped, in_axes=(None, 0))
    return mapped(activation, x)
