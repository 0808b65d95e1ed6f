"""Activations with parameters."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Inexact, Shaped

from pytreemod.module.classes import Module
from pytreemod.module.fields import field
from pytreemod.nn.base import AnyArray, check_shape, layer_call, scale_shared, wide_dtype
from pytreemod.state.key_sources import KeyLike


class PReLU(Module):
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
    shape: tuple[int, ...] = field(static=True)

    def __init__(self, init_alpha: float | Inexact[Array, "*shape"] | None = 0.25):
        slope: Any = 0.25 if init_alpha is None else init_alpha
        # With a dtype: the weak type of a number would take that of any update.
        self.negative_slope = jnp.asarray(slope, jnp.result_type(slope, float))
        self.shape = self.negative_slope.shape

    @layer_call()
    def __call__(self, x: AnyArray, *, key: KeyLike | None = None) -> Shaped[Array, ...]:
        """Apply the activation to each number of x; `key` is ignored."""
        given = check_shape(self, x, ..., *("any" if n == 1 else n for n in self.shape))
        is_float = jnp.issubdtype(given.dtype, jnp.inexact)
        dtype = given.dtype if is_float else jnp.result_type(float)
        # The gradient of the slope is a sum over all of x.
        wide = given.astype(wide_dtype(dtype))
        slope = self.negative_slope.astype(wide.dtype)
        return jnp.where(wide > 0, wide, scale_shared(wide, slope)).astype(dtype)
