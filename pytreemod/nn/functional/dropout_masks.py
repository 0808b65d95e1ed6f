"""`dropout`: sets random elements to zero."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, Shaped

from pytreemod.nn.functional.inlining import as_arrays, traced_once


def dropout(
    x: Shaped[Array, ...], p: int | float, *, key: PRNGKeyArray, broadcast_dims: Sequence[int] = ()
) -> Shaped[Array, ...]:
    """Set each entry to zero with probability p, and divide the others by 1 - p.

    $y = m x / (1 - p)$, where each m is 1 with probability $1 - p$, and 0 otherwise.

    Shapes:
        x: any
        return: the shape of x

    Args:
        x: input.
        p: probability of zero, from 0 to 1.
        key: decides which entries to drop.
        broadcast_dims: axes along which all entries are dropped together.

    Returns:
        An array whose expectation is x (for p < 1).

    Raises:
        IndexError: if x has no axis of that number.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.functional.dropout(jnp.ones(3), 0.0, key=jax.random.key(0))
        Array([1., 1., 1.], dtype=float32)

    Source:
        Srivastava et al. 2014, https://jmlr.org/papers/v15/srivastava14a.html, in the form that
        scales in training.
    """
    # Nothing is drawn, so a layer that is switched off adds nothing to the program.
    if p == 0:
        return x
    if p == 1:
        # x / 0 would be inf, and its gradient NaN even where it is masked.
        return jnp.zeros_like(x)
    shape = list(jnp.shape(x))
    for axis in broadcast_dims:
        shape[axis] = 1
    return _dropout(*as_arrays(x, key), keep=float(1 - p), shape=tuple(shape))


# Compiled with a constant probability, so that the last bit is the same in a larger program.
@traced_once("keep", "shape")
def _dropout(x: Array, key: PRNGKeyArray, *, keep: float, shape: tuple[int, ...]) -> Array:
    mask = jax.random.bernoulli(key, keep, shape)
    # Not a product with the mask: a dropped infinity would become NaN.
    return jnp.where(mask, x / keep, 0)
