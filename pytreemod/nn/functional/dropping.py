"""Setting random entries to zero."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, Shaped


def dropout(x: Shaped[Array, "..."], p: float, *, key: PRNGKeyArray) -> Shaped[Array, "..."]:
    """Set each entry to zero with probability p, and divide the others by 1 - p.

    Shapes:
        x: any
        return: the shape of x

    Args:
        x: input.
        p: probability of zero, from 0 to 1.
        key: decides which entries.

    Returns:
        An array whose expectation is x (for p < 1).

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.functional.dropout(jnp.ones(3), 0.0, key=jax.random.key(0))
        Array([1., 1., 1.], dtype=float32)

    Source:
        Srivastava et al. 2014, https://jmlr.org/papers/v15/srivastava14a.html, in the form that
        scales while training.
    """
    if p == 0:
        return x
    if p == 1:
        # x / 0 would be inf, and its gradient nan even where it is masked.
        return jnp.zeros_like(x)
    keep = jax.random.bernoulli(key, 1 - p, x.shape)
    return jnp.where(keep, x / (1 - p), 0)
