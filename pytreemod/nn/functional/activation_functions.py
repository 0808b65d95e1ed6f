"""Activations with parameters."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Shaped

from pytreemod.nn.functional.inlining import traced_once
from pytreemod.nn.functional.promotion import computing_dtype, narrow, place


@traced_once()
def prelu(x: Shaped[Array, ...], slope: Shaped[Array, ...]) -> Shaped[Array, ...]:
    r"""Multiply negative numbers by a slope: $x > 0 \mathbin{?} x : a x$.

    Shapes:
        x: (..., *shape)
        slope: any shape that broadcasts to shape, with one size for each of its axes
        return: the shape of x

    Args:
        x: input; every axis before those of slope is a batch axis.
        slope: the factor $a$.

    Returns:
        An array of the shape of x, and of its dtype if that is inexact. Computed in float32 or
        wider.

    Raises:
        ArgumentError: if x is complex.
        TypeError: if slope does not fit (raised by JAX).

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.functional.prelu(jnp.array([-2.0, 3.0]), jnp.array(0.25)).tolist()
        [-0.5, 3.0]

    Source:
        He et al. 2015, https://arxiv.org/abs/1502.01852, eq. (1).
    """
    # The gradient of the slope is a sum over all of x.
    wide = x.astype(computing_dtype(x.dtype))
    out = jnp.where(wide > 0, wide, wide * place(slope, wide, wide.ndim - slope.ndim))
    return narrow(out, x)
