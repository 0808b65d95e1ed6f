"""`flip_sequences`: reverses sequences of different lengths, each from its own end."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Integer, Shaped

from pytreemod.nn.functional.inlining import as_arrays, traced_once
from pytreemod.nn.functional.promotion import countable


def flip_sequences(
    x: Shaped[ArrayLike, "time ..."], seq_lengths: Integer[ArrayLike, "*batch"]
) -> Shaped[Array, "time ..."]:
    """Reverse each sequence of a batch, and leave entries after its end unchanged.

    Shapes:
        x: (time, *batch, ...)
        seq_lengths: (*batch)
        return: (time, *batch, ...)

    Args:
        x: sequences, filled up to one length.
        seq_lengths: the length of each sequence. Negative lengths count as zero, and lengths beyond
            the end of `x` as all of it.

    Returns:
        The reversed sequences.

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
    # With size 1 on the remaining axes, along which all entries of a time step stay together.
    source = lax.expand_dims(source, range(source.ndim, x.ndim))
    return jnp.take_along_axis(x, source, axis=0)
