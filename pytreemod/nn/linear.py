"""The dense layer."""

from __future__ import annotations

from typing import Any, Literal

from jax import lax
from jaxtyping import Array, Inexact, Shaped

from pytreemod.module.field_kinds import array, assign_fields, flag, size
from pytreemod.module.unfinished import sizes_follow
from pytreemod.nn.arguments import Title, check_array, check_last_axis, own_arrays
from pytreemod.nn.calling import ignores_key, in_scope
from pytreemod.nn.functional.linear_functions import linear
from pytreemod.nn.initializing import Initializer, initial_pair
from pytreemod.nn.layer import Layer
from pytreemod.state.key_sources import KeyLike
from pytreemod.typing import AnyArray


class Linear(Layer):
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
        in_features: size of the input's last axis, >= 0, or "scalar"; None if it follows from x
            ([`materialize`][pytreemod.materialize]).
        out_features: size of the output's last axis, >= 0, or "scalar".
        use_bias: whether to add a bias.
        dtype: of weight and bias; JAX's default float if None.
        key: used once, for the initial weight and bias.
        weight_init: `(key, shape, dtype) -> array`, called with the shape
            `(in_features, out_features)`, which `jax.nn.initializers` expect; the result is
            transposed.
        bias_init: the same for the bias, called with `(out_features,)`.

    State and randomness: none.

    Raises:
        ArgumentError: if a size is negative or not an integer, or another argument is invalid.
        RngError: if key is not a random key.
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
    bias: Inexact[Array, " out_features"] | None = array(given="use_bias")
    in_features: int | Literal["scalar"] = size(scalar=True)
    out_features: int | Literal["scalar"] = size(scalar=True)
    use_bias: bool = flag()

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
        assign_fields(self, in_features=in_features, out_features=out_features, use_bias=use_bias)
        self.weight, self.bias = initial_pair(self, dtype, key, weight_init, bias_init)

    @ignores_key
    @in_scope("pm.nn.Linear")
    def __call__(self, x: AnyArray, *, key: KeyLike | None = None) -> Shaped[Array, ...]:
        """Apply the layer to the last axis of x; `key` is ignored."""
        del key
        where = Title(self, "in_features", "out_features")
        weight, bias = own_arrays(where, "weight", "bias")
        x = check_array(where, x)
        # One formula for both: a number becomes an axis of size one.
        x = lax.expand_dims(x, (x.ndim,)) if self.in_features == "scalar" else x
        n_in = 1 if self.in_features == "scalar" else self.in_features
        check_last_axis(where, x, n_in, "in_features")
        y = linear(x, weight, bias)
        return lax.squeeze(y, (y.ndim - 1,)) if self.out_features == "scalar" else y
