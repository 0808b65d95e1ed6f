"""The dense layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, PRNGKeyArray, Shaped

from pytreemod.errors import ArgumentError, ShapeError
from pytreemod.module.classes import Module
from pytreemod.module.fields import field
from pytreemod.nn.base import (
    AnyArray,
    Initializer,
    add_shared,
    check_shape,
    initial_bias,
    initial_weight,
    layer_call,
    split_key,
    title,
)
from pytreemod.state.key_sources import KeyLike

Sizes: TypeAlias = int | Sequence[int]
"""The size of an axis, or one for each of several."""


class Linear(Module):
    """Applies $y = Wx + b$ to the last axis of its input.

    A size of `"scalar"` means no axis: `Linear("scalar", 3)` maps each number of x to three, and
    `Linear(3, "scalar")` drops the last axis.

    Shapes:
        x: (..., in_features); (...) if in_features="scalar"
        return: (..., out_features); (...) if out_features="scalar"

    Fields:
        weight: (out_features, in_features), with 1 for "scalar"
        bias: (out_features,), or None if use_bias=False

    Args:
        in_features: size of the input's last axis, or "scalar".
        out_features: size of the output's last axis, or "scalar".
        use_bias: whether to add a bias.
        dtype: of weight and bias; JAX's default float if None.
        key: used once, for the initial weight and bias.
        weight_init: `(key, shape, dtype) -> array`, called with the shape
            `(in_features, out_features)`, which `jax.nn.initializers` expect; the result is
            transposed.
        bias_init: the same for the bias, called with `(out_features,)`.

    State and randomness: none.

    Raises:
        ShapeError: if the last axis of x does not have in_features entries, or weight or bias does
            not have the shape above.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> layer = nn.Linear(3, 4, key=jax.random.key(0))
        >>> layer(jnp.ones(3)).shape, layer(jnp.ones((7, 3))).shape
        ((4,), (7, 4))

    Source:
        Initial values U[-1/sqrt(in_features), 1/sqrt(in_features)], as in `torch.nn.Linear`.
    """

    weight: Inexact[Array, "out_features in_features"]
    bias: Inexact[Array, " out_features"] | None
    in_features: int | Literal["scalar"] = field(static=True)
    out_features: int | Literal["scalar"] = field(static=True)
    use_bias: bool = field(static=True)

    def __init__(
        self,
        in_features: int | Literal["scalar"],
        out_features: int | Literal["scalar"],
        use_bias: bool = True,
        dtype: Any = None,
        *,
        key: KeyLike,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
    ):
        self.in_features, self.out_features, self.use_bias = in_features, out_features, use_bias
        n_in, n_out = (1 if n == "scalar" else n for n in (in_features, out_features))
        weight_key, bias_key = split_key(key, 2)
        self.weight = initial_weight(weight_init, weight_key, (n_out, n_in), dtype)
        self.bias = initial_bias(bias_init, bias_key, (n_out,), dtype, n_in) if use_bias else None

    @layer_call(features=("weight", 0, -1))
    def __call__(self, x: AnyArray, *, key: KeyLike | None = None) -> Shaped[Array, ...]:
        """Apply the layer to the last axis of x; `key` is ignored."""
        if self.in_features == "scalar":
            x = jnp.expand_dims(x, -1)
        else:
            x = check_shape(self, x, ..., self.in_features)
        y = add_shared(jnp.inner(x, self.weight), self.bias)
        return y[..., 0] if self.out_features == "scalar" else y


class LinearGeneral(Module):
    r"""A dense layer over several axes at once: a `Linear` whose sizes are shapes.

    $y_{r,o} = b_o + \sum_i x_{r,i} W_{i,o}$, where i and o are several indices each.

    Sums over axes of x; the axes of out_features are the last ones of the result.

    Shapes:
        x: in_features on the axes of axis, by default the last ones
        return: the other axes of x, and then out_features

    Fields:
        weight: (*in_features, *out_features)
        bias: out_features, or None if use_bias=False

    Args:
        in_features: sizes of the axes that are summed over: a size, or a sequence of them.
        out_features: sizes of the new axes: a size, or a sequence of them.
        axis: the axes of x that are summed over, in the order of in_features. Axes that are counted
            from the back allow batch axes before them.
        **options: use_bias, dtype, key, weight_init and bias_init, as for a `Linear` whose sizes
            are the products of in_features and of out_features.

    State and randomness: none.

    Raises:
        ArgumentError: if axis and in_features differ in length.
        ShapeError: if weight or bias does not have the shape above.
        TypeError: if the axes of x are not in_features (raised by JAX).

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> heads = nn.LinearGeneral(6, (2, 3), key=jax.random.key(0))
        >>> heads(jnp.ones((7, 6))).shape
        (7, 2, 3)
        >>> back = nn.LinearGeneral((2, 3), 6, axis=(-2, -1), key=jax.random.key(0))
        >>> back(heads(jnp.ones((7, 6)))).shape
        (7, 6)

    Source:
        `flax.nnx.LinearGeneral`, without its batch_axis; use `pm.filter_vmap` for that. Initial
        values: those of a `Linear` of the same numbers of inputs and outputs.
    """

    weight: Inexact[Array, "*weight_shape"]
    bias: Inexact[Array, "*out_features"] | None
    in_features: tuple[int, ...] = field(static=True)
    out_features: tuple[int, ...] = field(static=True)
    axis: tuple[int, ...] = field(static=True)

    def __init__(self, in_features: Sizes, out_features: Sizes, axis: Sizes = -1, **options: Any):
        ins, outs, axes = map(_as_shape, (in_features, out_features, axis))
        if len(axes) != len(ins):
            raise ArgumentError("LinearGeneral(axis)", f"{len(ins)} axes", str(axes))
        self.in_features, self.out_features, self.axis = ins, outs, axes
        drawn = Linear(math.prod(ins), math.prod(outs), **options)
        self.weight = drawn.weight.T.reshape(self.weight_shape)
        self.bias = None if drawn.bias is None else drawn.bias.reshape(outs)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape of the weight: in_features, then out_features."""
        return (*self.in_features, *self.out_features)

    @layer_call(features=("weight", -1, -1))
    def __call__(self, x: AnyArray, *, key: KeyLike | None = None) -> Shaped[Array, ...]:
        """Sum over the axes of x; `key` is ignored."""
        y = jnp.tensordot(x, self.weight, (self.axis, tuple(range(len(self.axis)))))
        return add_shared(y, self.bias)

    def __axis_names__(self) -> dict[str, tuple[str, ...]]:
        outs = _numbered("out_features", self.out_features)
        return {"weight": (*_numbered("in_features", self.in_features), *outs), "bias": outs}


class Einsum(Module):
    r"""Sums products of x and a weight by an equation, and adds a bias.

    $y = b + \sum x W$, over the letters that are not in the result.

    Shapes:
        x: as in the equation, with the sizes of the letters in weight_shape; `...` means any number
            of axes
        return: as in the equation

    Fields:
        weight: weight_shape
        bias: bias_shape, or None if that is None

    Args:
        equation: of x and the weight, as for `jax.numpy.einsum`: `"...i,io->...o"`.
        weight_shape: the shape of the weight.
        bias_shape: the shape of a bias, added to the last axes of the result, with 1 for any size;
            None for no bias.
        dtype: of weight and bias; JAX's default float if None.
        key: used once, for the initial weight and bias.
        weight_init: `(key, shape, dtype) -> array`, called with `(n, m)`, as `jax.nn.initializers`
            expect: n is the product of the axes that are summed over, m that of the others. If x,
            weight and result share an axis, it is called once for each entry of that axis.
        bias_init: the same for the bias, called with bias_shape; zeros if None.

    State and randomness: none.

    Raises:
        ShapeError: if x does not fit the equation, bias_shape the result, or weight does
            not have the shape above.
        ValueError: if the equation is not of two arrays, with an arrow.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> per_head = nn.Einsum("...hi,hio->...ho", (2, 3, 4), (2, 4), key=jax.random.key(0))
        >>> per_head(jnp.ones((7, 2, 3))).shape
        (7, 2, 4)

    Source:
        `flax.nnx.Einsum`. Initial values U[-1/sqrt(n), 1/sqrt(n)] with n as above, as in
        `torch.nn.Linear`.
    """

    weight: Inexact[Array, "*weight_shape"]
    bias: Inexact[Array, "*bias_shape"] | None
    equation: str = field(static=True)
    weight_shape: tuple[int, ...] = field(static=True)
    bias_shape: tuple[int, ...] | None = field(static=True)

    def __init__(
        self,
        equation: str,
        weight_shape: Sequence[int],
        bias_shape: Sizes | None = None,
        dtype: Any = None,
        *,
        key: KeyLike,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
    ):
        self.equation, self.weight_shape = "".join(equation.split()), tuple(weight_shape)
        self.bias_shape = None if bias_shape is None else _as_shape(bias_shape)
        weight_key, bias_key = split_key(key, 2)
        self.weight = _factors(self, weight_init, weight_key, dtype)
        init = bias_init or jax.nn.initializers.zeros
        shape = self.bias_shape
        self.bias = None if shape is None else initial_bias(init, bias_key, shape, dtype, 0)

    @layer_call(features=("weight", -1, -1))
    def __call__(self, x: AnyArray, *, key: KeyLike | None = None) -> Shaped[Array, ...]:
        """Sum products of x and the weight; `key` is ignored."""
        of_x, letters, _ = _terms(self.equation)
        sizes: dict[str, Any] = {".": ..., **dict(zip(letters, self.weight_shape, strict=True))}
        # By JAX, an axis of size 1 would broadcast.
        x = check_shape(self, x, *(sizes.get(axis, axis) for axis in of_x.replace("...", ".")))
        sums = jnp.einsum(self.equation, x, self.weight)
        if np.broadcast_shapes(sums.shape, self.bias_shape or ()) != sums.shape:
            expected = f"bias_shape to fit a result of shape {sums.shape}"
            raise ShapeError(title(self), expected, str(self.bias_shape))
        return add_shared(sums, self.bias)

    def __axis_names__(self) -> dict[str, tuple[str, ...]]:
        _, letters, out = _terms(self.equation)
        count = len(self.bias_shape or ())
        return {"weight": tuple(letters), "bias": tuple(out[len(out) - count :])}


def _terms(equation: str) -> tuple[str, str, str]:
    """The letters of x, of the weight, and of the result."""
    inputs, out = equation.split("->")
    of_x, letters = inputs.split(",")
    return of_x, letters, out


def _numbered(name: str, sizes: tuple[int, ...]) -> tuple[str, ...]:
    return (name,) if len(sizes) == 1 else tuple(f"{name}_{i}" for i in range(len(sizes)))


def _as_shape(sizes: Sizes) -> tuple[int, ...]:
    return (sizes,) if isinstance(sizes, int) else tuple(sizes)


def _factors(layer: Einsum, init: Initializer | None, key: PRNGKeyArray, dtype: Any) -> Array:
    """Draw the weight of an equation by an initializer of matrices (inputs, outputs).

    JAX's initializers take fan-in from the axis before the last. But the equation decides which
    axes of the weight are inputs.
    """
    of_x, letters, result = _terms(layer.equation)
    summed = [i for i, letter in enumerate(letters) if letter not in result]
    # Each entry along the axes that all three share is a matrix of its own.
    shared = [i for i, letter in enumerate(letters) if letter in of_x and letter in result]
    others = [i for i in range(len(letters)) if i not in (*summed, *shared)]
    n, n_in, n_out = (
        math.prod(layer.weight_shape[i] for i in axes) for axes in (shared, summed, others)
    )

    def draw(key: PRNGKeyArray) -> Array:
        return initial_bias(init, key, (n_in, n_out), dtype, n_in)

    values = jax.vmap(draw)(jax.random.split(key, n)) if shared else draw(key)
    order = [*shared, *summed, *others]
    shape = [layer.weight_shape[i] for i in order]
    return values.reshape(shape).transpose(np.argsort(order).tolist())
