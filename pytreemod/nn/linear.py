"""The dense layer."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Inexact, PRNGKeyArray, Shaped

from pytreemod.module.classes import Module
from pytreemod.module.fields import field
from pytreemod.module.unfinished import sizes_follow
from pytreemod.nn.arguments import (
    ArrayShapes,
    Title,
    check_array,
    check_dtype,
    check_feature_size,
    check_flag,
    check_last_axis,
    named,
    own_arrays,
    split_key,
)
from pytreemod.nn.calling import ignores_key, in_scope
from pytreemod.nn.functional.linear_functions import linear
from pytreemod.nn.initializing import Initializer, initialize, uniform_by_fan_in
from pytreemod.state.key_sources import KeyLike
from pytreemod.typing import AnyArray


class Linear(Module):
    """A dense layer: $y = Wx + b$ on the last axis.

    A size of `"scalar"` means no axis at all: `Linear("scalar", 3)` takes each number of x to
    three, `Linear(3, "scalar")` drops the last axis.

    Shapes:
        x: (..., in_features); (...) if in_features="scalar"
        return: (..., out_features); (...) if out_features="scalar"

    Fields:
        weight: (out_features, in_features), with 1 for "scalar"
        bias: (out_features,), or None if use_bias=False

    Args:
        in_features: size of the input's last axis, >= 0, or "scalar"; None if it follows from x
            ([`materialize`][pytreemod.materialize]).
        out_features: size of the output's last axis, >= 0, or "scalar".
        use_bias: whether to add a bias.
        dtype: of weight and bias; JAX's default float if None.
        key: used once, for the initial weight and bias.
        weight_init: `(key, shape, dtype) -> array`, called with the shape
            `(in_features, out_features)` that `jax.nn.initializers` reckon with; the result is
            transposed.
        bias_init: the same for the bias, called with `(out_features,)`.

    State and randomness: none.

    Raises:
        ArgumentError: a size is negative or not an integer, or another argument is unusable.
        RngError: key is no random key.
        ShapeError: the last axis of x has not in_features entries, or weight or bias has not the
            shape above.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> layer = nn.Linear(3, 4, key=jax.random.key(0))
        >>> layer(jnp.ones(3)).shape, layer(jnp.ones((7, 3))).shape
        ((4,), (7, 4))

    Source:
        Initial values U[-1/sqrt(in_features), 1/sqrt(in_features)], as `torch.nn.Linear`.
    """

    weight: Inexact[Array, "out in"]
    bias: Inexact[Array, " out"] | None
    in_features: int | Literal["scalar"] = field(static=True)
    out_features: int | Literal["scalar"] = field(static=True)
    use_bias: bool = field(static=True)

    @sizes_follow(in_features=lambda x: x.shape[-1])
    def __init__(
        self,
        in_features: int | Literal["scalar"] | None,
        out_features: int | Literal["scalar"],
        use_bias: bool = True,
        dtype: Any = None,
        *,
        key: KeyLike,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
    ):
        self.in_features = check_feature_size(named(self, "in_features"), in_features)
        self.out_features = check_feature_size(named(self, "out_features"), out_features)
        self.use_bias = check_flag(named(self, "use_bias"), use_bias)
        dtype = check_dtype(named(self, "dtype"), dtype)
        # Split without a bias, too, so that the weight is the same with and without.
        weight_key, bias_key = split_key(named(self, "key"), key, 2)

        fan_in, fan_out = _count(self.in_features), _count(self.out_features)
        where = named(self, "weight_init")
        self.weight = initial_matrix(where, self, weight_init, weight_key, dtype)
        self.bias = None
        if self.use_bias:
            start = uniform_by_fan_in(fan_in) if bias_init is None else bias_init
            self.bias = initialize(named(self, "bias_init"), start, bias_key, (fan_out,), dtype)

    def __check_init__(self) -> None:
        # Here as well, for `replace` and `with_mode` come this way.
        check_feature_size(named(self, "in_features"), self.in_features)
        check_feature_size(named(self, "out_features"), self.out_features)
        check_flag(named(self, "use_bias"), self.use_bias)

    def __array_shapes__(self) -> ArrayShapes:
        fan_in, fan_out = _count(self.in_features), _count(self.out_features)
        return {"weight": (fan_out, fan_in), "bias": (fan_out,) if self.use_bias else None}

    @ignores_key
    @in_scope("pm.nn.Linear")
    def __call__(self, x: AnyArray, *, key: KeyLike | None = None) -> Shaped[Array, ...]:
        """Apply the layer to the last axis of x; `key` is ignored."""
        del key
        where = Title(self, "in_features", "out_features")
        weight, bias = own_arrays(where, **self.__array_shapes__())
        x = check_array(where, x)
        if self.in_features == "scalar":
            # A number is an axis of one, so that there is one formula.
            x = lax.expand_dims(x, (x.ndim,))
        else:
            check_last_axis(where, x, self.in_features, "in_features")
        y = linear(x, weight, bias)
        return lax.squeeze(y, (y.ndim - 1,)) if self.out_features == "scalar" else y


def _count(size: int | Literal["scalar"]) -> int:
    """How many numbers a size stands for."""
    return 1 if size == "scalar" else size


def initial_matrix(
    where: str, layer: Linear, weight_init: Initializer | None, key: PRNGKeyArray, dtype: Any
) -> Array:
    """The weight, (out, in), from an initializer that counts its inputs on the first axis.

    JAX's initializers take fan-in from the axis before the last: handed (out, in) they would
    silently scale by the wrong size.
    """
    fan_in, fan_out = _count(layer.in_features), _count(layer.out_features)
    if weight_init is None:
        # Drawn in the layout of the field, so that a seed gives the numbers it gives in Equinox.
        return initialize(where, uniform_by_fan_in(fan_in), key, (fan_out, fan_in), dtype)
    return jnp.transpose(initialize(where, weight_init, key, (fan_in, fan_out), dtype))
