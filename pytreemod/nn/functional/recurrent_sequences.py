"""`flip_sequences`: sequences of different lengths, each from its own end."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Integer, Shaped

from pytreemod.nn.functional.inlining import as_arrays, traced_once
from pytreemod.nn.functional.promotion import countable


def flip_sequences(
    x: Shaped[ArrayLike, "time ..."], seq_lengths: Integer[ArrayLike, "*batch"]
) -> Shaped[Array, "time ..."]:
    """Turn each sequence of a batch around, and leave what comes after its end where it is.

    Shapes:
        x: (time, *batch, ...)
        seq_lengths: (*batch)
        return: (time, *batch, ...)

    Args:
        x: sequences, filled up to one length.
        seq_lengths: how long each of them is. Below zero counts as zero, and beyond the end of
            `x` as all of it.

    Returns:
        The sequences from their ends.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> x = jnp.array([[1, 2, 3, 0], [4, 5, 0, 0]]).T
        >>> nn.functional.flip_sequences(x, jnp.array([3, 2])).T.tolist()
        [[3, 2, 1, 0], [5, 4, 0, 0]]
    """
    return _flip_sequences(*as_arrays(x, seq_lengths))


@traced_once()
def _flip_sequences(x: Array, seq_lengths: Array) -> Array:
    steps, axes = x.shape[0], tuple(range(1, seq_lengths.ndim + 1))
    lengths = jnp.clip(countable(seq_lengths), 0, steps)
    lengths = lax.broadcast_in_dim(lengths, (steps, *lengths.shape), axes)
    now = lax.broadcasted_iota(lengths.dtype, lengths.shape, 0)
    source = jnp.where(now < lengths, lengths - 1 - now, now)
    # With one entry on the axes that are left, on which all of a time stays together.
    source = lax.expand_dims(source, range(source.ndim, x.ndim))
    return jnp.take_along_axis(x, source, axis=0)
