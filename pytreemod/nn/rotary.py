"""Rotary positional embeddings: positions in a sequence as angles."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from pytreemod.errors import ArgumentError, ShapeError, describe
from pytreemod.module.classes import Module
from pytreemod.module.fields import field
from pytreemod.nn.base import AnyArray, check_shape, layer_call, title
from pytreemod.state.key_sources import KeyLike

Scaling: TypeAlias = Mapping[str, Any] | Sequence[tuple[str, Any]]
"""How to make angles smaller, as in the `config.json` of a model; or the items of that mapping."""


def _scaling_items(scaling: Scaling | None) -> tuple[tuple[str, Any], ...] | None:
    """The items, which can be hashed; None for no scaling."""
    items: dict[str, Any] = {"rope_type": "default"} if scaling is None else dict(scaling)
    kind = items.get("rope_type")
    if kind not in ("default", "linear", "llama3"):
        expected = "a rope_type of 'default', 'linear' or 'llama3'"
        raise ArgumentError("RotaryPositionalEmbedding(scaling)", expected, describe(kind))
    return None if kind == "default" else tuple(items.items())


class RotaryPositionalEmbedding(Module):
    r"""Rotates each vector of a sequence by angles that grow with its position.

    The vector at position $t$ has the pairs $(x_i, x_{i + d/2})$. Each pair is rotated by
    $t \cdot \theta^{-2i/d}$, so that the product of two vectors depends on their distance, not on
    their positions. Use it for the queries and keys of each attention head, not for the values.

    Positions start at 0, or at `offset`; or pass the position of each vector in `positions`. With
    interleaved=True, a pair is two adjacent numbers, $(x_{2i}, x_{2i+1})$. The weights in a file
    require one of the two.

    Shapes:
        x: (seq_length, embedding_size), or with more axes, see `axis`
        return: the shape of x

    Args:
        embedding_size: size of a vector, an even number.
        theta: the base; a larger base means slower growth of the angles.
        dtype: of the cosines and sines; JAX's default float if None. The result is computed in the
            wider of this dtype and that of x, and returned in that of x.
        interleaved: whether a pair is two adjacent numbers, as in the paper and in GPT-J, instead
            of one number of each half, as in GPT-NeoX, Llama and Equinox.
        scaling: makes the angles smaller, for sequences longer than those in training. A mapping
            with the names of Hugging Face's `config.json`. For the `rope_type` "linear", all angles
            are divided by `factor`. For "llama3", pass `factor`, `low_freq_factor`,
            `high_freq_factor` and `original_max_position_embeddings`: pairs that rotate more than
            high_freq_factor times in a sequence of the original length are unchanged; pairs that
            rotate less than low_freq_factor times are divided by `factor`; the transition is
            smooth. Stored as a tuple of its items; no scaling if None, or for the type "default".

    State and randomness: none.

    Raises:
        ArgumentError: if x has no floating dtype, or the rope_type of scaling is another one.
        ShapeError: if x has no axis of positions, or its last axis does not have embedding_size
            entries; if x has more than two axes, and `axis` is None; or the shape of positions or
            offset does not fit x.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> rope = nn.RotaryPositionalEmbedding(4)
        >>> x = jnp.arange(20.0).reshape(5, 4)
        >>> rope(x).shape, rope(jnp.ones((7, 5, 4)), axis=-2).shape
        ((5, 4), (7, 5, 4))

        The same vectors later in the sequence:

        >>> bool(jnp.allclose(rope(x)[2:], rope(x[2:], offset=2)))
        True
        >>> bool(jnp.allclose(rope(x)[::2], rope(x[::2], positions=jnp.array([0, 2, 4]))))
        True

        In attention, whose heads have the axes (..., seq_length, num_heads, size), the layer does
        it with `rotary=rope`. By hand, `axis` is the one of positions:

        >>> def process_heads(query, key, value):
        ...     return rope(query, axis=-3), rope(key, axis=-3), value
        >>> attention = nn.MultiheadAttention(2, 8, key=jax.random.key(0))
        >>> x = jnp.ones((5, 8))
        >>> attention(x, x, x, process_heads=process_heads).shape
        (5, 8)

        Twice as many positions, at angles that the model knows:

        >>> half = nn.RotaryPositionalEmbedding(4, scaling={"rope_type": "linear", "factor": 2.0})
        >>> x = jnp.ones((6, 4))
        >>> bool(jnp.allclose(half(x)[::2], rope(x[:3])))
        True

    Source:
        Su et al. 2021, https://arxiv.org/abs/2104.09864, with pairs across the halves of a vector
        as in GPT-NeoX and Equinox. Linear scaling: Chen et al. 2023,
        https://arxiv.org/abs/2306.15595; that of Llama 3.1 as in transformers 5.
    """

    embedding_size: int = field(static=True)
    theta: float = field(static=True)
    dtype: Any = field(static=True)
    # Defaults, although __init__ sets them: a value equal to its default is not printed.
    interleaved: bool = field(static=True, default=False)
    scaling: Any = field(static=True, default=None, converter=_scaling_items)

    def __init__(
        self,
        embedding_size: int,
        theta: int | float = 10_000.0,
        dtype: Any = None,
        *,
        interleaved: bool = False,
        scaling: Scaling | None = None,
    ):
        self.embedding_size, self.theta = embedding_size, float(theta)
        self.dtype = None if dtype is None else jnp.dtype(dtype)
        self.interleaved, self.scaling = interleaved, scaling

    @layer_call()
    def __call__(
        self,
        x: AnyArray,
        *,
        positions: AnyArray | None = None,
        offset: AnyArray | int = 0,
        axis: int | None = None,
        key: KeyLike | None = None,
    ) -> Shaped[Array, ...]:
        """Rotate each vector by the angles of its position.

        Args:
            x: see the class.
            positions: the position of each vector, of shape (seq_length,), or of that shape after
                the axes of x before `axis`; counted from 0 if None.
            offset: added to all positions: a number, or one for each sequence.
            axis: the axis of positions in x, counted from the end; required if x has more than two
                axes. Vectors along axes between it and the last one have the same position: use -3
                for heads, (..., seq_length, num_heads, size), and otherwise -2.
            key: ignored.

        Returns:
            The rotated vectors.
        """
        values: Any = check_shape(self, x, ..., "seq_length", self.embedding_size)
        axis = -2 if axis is None and values.ndim == 2 else axis
        if axis is None or not -values.ndim <= axis <= -2:
            expected = "the axis of positions in x, counted from the end"
            hint = ("Heads have the axes (..., seq_length, num_heads, size):", "rope(x, axis=-3)")
            raise ShapeError(title(self), expected, f"{axis=} for {describe(x)}", hint=hint)
        if not jnp.issubdtype(values.dtype, jnp.floating):
            raise ArgumentError(title(self), "x of a floating dtype", describe(x))
        batch, count = values.shape[:axis], values.shape[axis]
        # Floats, because a position may be between two integers.
        wide = jnp.result_type(float)
        positions = jnp.arange(count, dtype=wide) if positions is None else jnp.asarray(positions)
        offset = jnp.asarray(offset)
        if positions.shape not in ((count,), (*batch, count)) or offset.shape not in ((), batch):
            expected = (
                f"positions of shape {(count,)} or {(*batch, count)}, offset of () or {batch}"
            )
            got = f"{describe(positions)} and {describe(offset)}"
            raise ShapeError(title(self), expected, got)
        positions = _with_rank(positions.astype(wide), len(batch) + 1)
        positions += _with_rank(offset[..., None].astype(wide), len(batch) + 1)
        angles = rotary_angles(positions, self.embedding_size, self.theta, self.scaling)
        # The axes between that of positions and the last one.
        angles = jnp.expand_dims(angles, range(axis + 1, -1))
        dtype = wide if self.dtype is None else self.dtype
        cos, sin = jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)
        return rotate(values, cos, sin, interleaved=self.interleaved)

    @staticmethod
    def rotate_half(x: Shaped[Array, "*batch size"]) -> Shaped[Array, "*batch size"]:
        """Swap the halves of the last axis, and change the sign of the first."""
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([-second, first], axis=-1)

    @staticmethod
    def precompute_freqs_cis(
        embedding_size: int, end: int, theta: float, dtype: Any
    ) -> tuple[Float[Array, "end half"], Float[Array, "end half"]]:
        """Compute the cosines and sines of the angles of all positions."""
        angles = rotary_angles(jnp.arange(end, dtype=float), embedding_size, theta)
        return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


def rotary_angles(
    positions: Float[Array, "*batch seq"], size: int, theta: float, scaling: Any = None
) -> Float[Array, "*batch seq half"]:
    """The angle of each pair of a vector at each position, in the dtype of the positions."""
    # Wide until the cosine: in bfloat16 the position 257 would be 256.
    evens = jnp.arange(0, size, 2, dtype=positions.dtype)
    frequencies = 1 / jnp.asarray(theta, positions.dtype) ** (evens / size)
    if scaling is not None:
        numbers = dict(scaling)
        scale = {"linear": _linear, "llama3": _llama3}[numbers.pop("rope_type")]
        frequencies = scale(frequencies, **numbers)
    return positions[..., None] * _with_rank(frequencies, positions.ndim + 1)


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
    rotations = original_max_position_embeddings * frequencies / (2 * math.pi)
    unscaled = (rotations - low_freq_factor) / (high_freq_factor - low_freq_factor)
    unscaled = jnp.clip(unscaled, 0.0, 1.0)
    return unscaled * frequencies + (1 - unscaled) * frequencies / factor


def rotate(x: Array, cos: Array, sin: Array, *, interleaved: bool) -> Array:
    """Rotate each pair of numbers in x by its angle, in the wider dtype; in the dtype of x."""
    # The dtype of the angles was chosen for that of x, even if promotion is strict.
    with jax.numpy_dtype_promotion("standard"):
        dtype = jnp.promote_types(x.dtype, cos.dtype)
    wide = x.astype(dtype)
    cos, sin = (_with_rank(table.astype(dtype), x.ndim) for table in (cos, sin))
    if not interleaved:
        # Both halves use the same table, so one product serves the whole vector.
        cos, sin = (jnp.concatenate([table, table], axis=-1) for table in (cos, sin))
        rotated = wide * cos + RotaryPositionalEmbedding.rotate_half(wide) * sin
        return rotated.astype(x.dtype)
    first, second = wide[..., ::2], wide[..., 1::2]
    pairs = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return pairs.reshape(x.shape).astype(x.dtype)


def _with_rank(x: Array, ndim: int) -> Array:
    """Add axes of size 1 in front."""
    return x.reshape((1,) * (ndim - x.ndim) + x.shape)
