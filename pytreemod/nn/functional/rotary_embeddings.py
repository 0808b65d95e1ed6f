"""`rotary_embedding`: rotates vectors by angles that grow with their positions in a sequence."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Shaped

from pytreemod.nn.functional.inlining import as_arrays, traced_once
from pytreemod.nn.functional.promotion import with_shared

Scaling: TypeAlias = Mapping[str, Any] | Sequence[tuple[str, Any]]
"""How to make angles smaller, as in the `config.json` of a model; or the items of that mapping."""


def rotary_tables(
    embedding_size: int,
    end: int,
    theta: Any = 10_000.0,
    dtype: Any = None,
    scaling: Scaling | None = None,
) -> tuple[Shaped[Array, "end half"], Shaped[Array, "end half"]]:
    r"""Compute cosine and sine of $t \cdot \theta^{-2i/d}$, for $t$ from 0 to end - 1.

    Shapes:
        return: (end, embedding_size // 2), twice

    Args:
        embedding_size: the size $d$ of a vector, an even number.
        end: number of positions.
        theta: the base; it may be an array.
        dtype: of the result; the angles are computed in JAX's default float, which is the dtype if
            None.
        scaling: makes the angles smaller; a mapping, or its items, as
            [RotaryPositionalEmbedding][pytreemod.nn.RotaryPositionalEmbedding] takes them.

    Returns:
        The cosines, and the sines.

    Raises:
        KeyError: if the rope_type of scaling is neither "linear" nor "llama3".
        TypeError: if scaling does not have the numbers of its type.

    Examples:
        >>> from pytreemod import nn
        >>> cos, sin = nn.functional.rotary_tables(4, end=2)
        >>> cos.shape, sin[:, 0].round(3).tolist()
        ((2, 2), [0.0, 0.8410000205039978])

    Source:
        Su et al. 2021, https://arxiv.org/abs/2104.09864, eq. (15).
    """
    wide = jnp.result_type(float)
    result_dtype = jnp.dtype(wide if dtype is None else dtype)
    base = jnp.asarray(theta, wide)
    numbers = _hashable(scaling)
    return _tables(
        base, embedding_size=embedding_size, end=end, dtype=result_dtype, scaling=numbers
    )


def _hashable(scaling: Scaling | None) -> tuple[tuple[str, Any], ...] | None:
    return None if scaling is None else tuple(dict(scaling).items())


@traced_once("embedding_size", "end", "dtype", "scaling")
def _tables(
    theta: Array, *, embedding_size: int, end: int, dtype: Any, scaling: Any
) -> tuple[Array, Array]:
    places = jnp.arange(end, dtype=theta.dtype)
    # In a wide dtype until here: in bfloat16 the position 257 would be 256.
    angles = jnp.outer(places, _frequencies(theta, embedding_size, scaling))
    return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


def _frequencies(theta: Array, embedding_size: int, scaling: Any) -> Array:
    evens = jnp.arange(0, embedding_size, 2, dtype=theta.dtype)
    frequencies = 1 / theta ** (evens / embedding_size)
    if scaling is None:
        return frequencies
    numbers = dict(scaling)
    return _SCALINGS[numbers.pop("rope_type")](frequencies, **numbers)


def _linear(frequencies: Array, factor: float) -> Array:
    return frequencies / factor


def _llama3(
    frequencies: Array,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> Array:
    # The number of full rotations of a pair in a sequence of the length that the model knows.
    turns = original_max_position_embeddings * frequencies / (2 * math.pi)
    unscaled = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    unscaled = jnp.clip(unscaled, 0.0, 1.0)
    return unscaled * frequencies + (1 - unscaled) * frequencies / factor


_SCALINGS: dict[str, Callable[..., Array]] = {"linear": _linear, "llama3": _llama3}


def rotary_angles(
    positions: Shaped[ArrayLike, "*batch seq"],
    embedding_size: int,
    theta: Any = 10_000.0,
    dtype: Any = None,
    scaling: Scaling | None = None,
) -> tuple[Shaped[Array, "*batch seq half"], Shaped[Array, "*batch seq half"]]:
    r"""Compute cosine and sine of $t \cdot \theta^{-2i/d}$, for any positions $t$.

    Shapes:
        positions: (..., seq)
        return: (..., seq, embedding_size // 2), twice

    Args:
        positions: integers or other numbers.
        embedding_size: the size $d$ of a vector, an even number.
        theta: the base; it may be an array.
        dtype: of the result; the angles are computed in JAX's default float, which is the dtype if
            None.
        scaling: makes the angles smaller; a mapping, or its items, as
            [RotaryPositionalEmbedding][pytreemod.nn.RotaryPositionalEmbedding] takes them.

    Returns:
        The cosines, and the sines.

    Raises:
        KeyError: if the rope_type of scaling is neither "linear" nor "llama3".
        TypeError: if scaling does not have the numbers of its type.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> cos, sin = nn.functional.rotary_angles(jnp.array([1]), 4)
        >>> sin[:, 0].round(3).tolist()
        [0.8410000205039978]

    Source:
        Su et al. 2021, https://arxiv.org/abs/2104.09864, eq. (15).
    """
    wide = jnp.result_type(float)
    result_dtype = jnp.dtype(wide if dtype is None else dtype)
    places, base = jnp.asarray(positions).astype(wide), jnp.asarray(theta, wide)
    numbers = _hashable(scaling)
    return _angles(places, base, embedding_size=embedding_size, dtype=result_dtype, scaling=numbers)


@traced_once("embedding_size", "dtype", "scaling")
def _angles(
    places: Array, theta: Array, *, embedding_size: int, dtype: Any, scaling: Any
) -> tuple[Array, Array]:
    frequencies = _frequencies(theta, embedding_size, scaling)
    shape = (*places.shape, embedding_size // 2)
    angles = lax.broadcast_in_dim(places, shape, range(places.ndim)) * lax.broadcast_in_dim(
        frequencies, shape, (places.ndim,)
    )
    return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


def rotate_half(x: Shaped[ArrayLike, "*batch size"]) -> Shaped[Array, "*batch size"]:
    """Swap the halves of the last axis, and negate one: $(x_1, x_2)$ becomes $(-x_2, x_1)$.

    Shapes:
        x: (..., size), of an even size
        return: (..., size)

    Args:
        x: input.

    Returns:
        The negated second half, then the first half.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.functional.rotate_half(jnp.arange(4.0)).tolist()
        [-2.0, -3.0, 0.0, 1.0]
    """
    (x,) = as_arrays(x)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([-second, first], axis=-1)


def rotary_embedding(
    x: Shaped[ArrayLike, "*batch seq size"],
    cos: Shaped[ArrayLike, "*#batch seq half"],
    sin: Shaped[ArrayLike, "*#batch seq half"],
    *,
    interleaved: bool = False,
) -> Shaped[Array, "*batch seq size"]:
    r"""Rotate each pair $(x_i, x_{i + d/2})$ of a vector by the angle of its position.

    $y_i = x_i \cos - x_{i+d/2} \sin$ and $y_{i+d/2} = x_{i+d/2} \cos + x_i \sin$: a pair has one
    number of each half, as in GPT-NeoX and Llama. Interleaved, a pair has two adjacent numbers,
    $(x_{2i}, x_{2i+1})$, as in the paper and in GPT-J.

    Shapes:
        x: (..., seq, size), of an even size
        cos, sin: (seq, size // 2), or (..., seq, size // 2) if positions differ in a batch
        return: (..., seq, size)

    Args:
        x: vectors, one for each position.
        cos: cosines of the angles, see `rotary_tables` and `rotary_angles`.
        sin: their sines.
        interleaved: whether pairs are adjacent numbers, instead of numbers of both halves.

    Returns:
        The rotated vectors, computed in the wider of the dtypes, in the dtype of x.

    Raises:
        TypeError: if the shapes disagree (raised by JAX).

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> tables = nn.functional.rotary_tables(2, end=3)
        >>> nn.functional.rotary_embedding(jnp.ones((3, 2)), *tables).round(2).tolist()[0]
        [1.0, 1.0]

    Source:
        Su et al. 2021, https://arxiv.org/abs/2104.09864, eq. (34).
    """
    return _rotary_embedding(*as_arrays(x, cos, sin), interleaved=interleaved)


@traced_once("interleaved")
def _rotary_embedding(x: Array, cos: Array, sin: Array, *, interleaved: bool) -> Array:
    # The dtype of the angles was chosen for that of x, even if promotion is strict.
    with jax.numpy_dtype_promotion("standard"):
        dtype = jnp.promote_types(x.dtype, cos.dtype)
    wide = x.astype(dtype)

    def times(x: Array, table: Array, repeats: int) -> Array:
        both = jnp.concatenate([table] * repeats, axis=-1).astype(dtype)
        return with_shared(lax.mul, x, both, x.ndim - both.ndim)

    if not interleaved:
        # Both halves use the same table, so one product serves the whole vector.
        turned = times(wide, cos, 2) + times(rotate_half(wide), sin, 2)
        return turned.astype(x.dtype)
    pairs = wide.reshape((*wide.shape[:-1], wide.shape[-1] // 2, 2))
    first, second = pairs[..., 0], pairs[..., 1]
    one = times(first, cos, 1) - times(second, sin, 1)
    other = times(second, cos, 1) + times(first, sin, 1)
    return jnp.stack([one, other], axis=-1).reshape(x.shape).astype(x.dtype)
