"""Layers for activations with parameters."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, Shaped

from pytreemod.errors import ArgumentError, describe
from pytreemod.module.field_kinds import sizes
from pytreemod.nn.arguments import (
    Title,
    check_array,
    check_floating,
    check_spread,
    named,
    own_arrays,
    shape_of,
)
from pytreemod.nn.calling import ignores_key, in_scope
from pytreemod.nn.functional.activation_functions import prelu
from pytreemod.nn.layer import Layer
from pytreemod.state.key_sources import KeyLike
from pytreemod.tree.predicates import is_array_like
from pytreemod.typing import AnyArray


class PReLU(Layer):
    r"""An activation with a learned negative slope: $x > 0 \mathbin{?} x : a x$.

    Computes in float32 or wider, and returns the dtype of x, or floats if x is integer. The
    derivative at zero is $a$, as in PyTorch.

    Shapes:
        x: (..., *shape), where shape is that of init_alpha, and 1 means any size
        return: the shape of x

    Fields:
        negative_slope: the shape of init_alpha

    Args:
        init_alpha: the initial slope: a number, for all of x; or an array, with a slope for each
            entry of the trailing axes. For a slope for each channel of an image, pass an array of
            shape `(channels, 1, 1)`. 0.25 if None.

    State and randomness: none.

    Raises:
        ArgumentError: if init_alpha or x is not of real numbers; or init_alpha is not floating.
        ShapeError: if init_alpha cannot be broadcast to the trailing axes of x; or negative_slope
            does not have the shape above.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.PReLU()(jnp.array([-4.0, 2.0])).tolist()
        [-1.0, 2.0]
        >>> per_channel = nn.PReLU(jnp.full((3, 1, 1), 0.1))
        >>> per_channel(jnp.ones((7, 3, 8, 8))).shape
        (7, 3, 8, 8)

    Source:
        He et al. 2015, https://arxiv.org/abs/1502.01852, eq. (1); the initial slope as in
        `torch.nn.PReLU`.
    """

    negative_slope: Inexact[Array, "*shape"]
    shape: tuple[int, ...] = sizes()

    def __init__(self, init_alpha: float | Inexact[Array, "*shape"] | None = 0.25):
        self.negative_slope = _initial_slope(
            named(self, "init_alpha"), 0.25 if init_alpha is None else init_alpha
        )
        self.shape = self.negative_slope.shape

    @ignores_key
    @in_scope("pm.nn.PReLU")
    def __call__(self, x: AnyArray, *, key: KeyLike | None = None) -> Shaped[Array, ...]:
        """Apply the activation to each number of x; `key` is ignored."""
        del key
        where = Title(self, "shape")
        (slope,) = own_arrays(where, "negative_slope")
        x = check_array(where, x)
        if not jnp.issubdtype(x.dtype, jnp.integer):
            check_floating(where, x)
        check_spread(where, x, self.shape)
        return prelu(x, slope)


def _initial_slope(where: str, value: Any) -> Array:
    if is_array_like(value) and shape_of(value) is not None:
        dtype = jnp.result_type(value)
        if jnp.issubdtype(dtype, jnp.floating):
            # A number would make a weak type, whose dtype updates decide; JAX converts it slowly.
            value = np.asarray(value, dtype) if isinstance(value, float) else value
            return jnp.asarray(value, dtype)
    expected = "a floating number, or an array of them"
    raise ArgumentError(where, expected, describe(value))
