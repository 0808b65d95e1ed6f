"""`RotaryPositionalEmbedding`: encodes positions in a sequence as angles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from pytreemod.errors import ArgumentError, ShapeError, describe
from pytreemod.module.classes import Module
from pytreemod.module.field_kinds import (
    as_integer,
    as_sequence,
    check_number,
    check_size,
    checked,
    flag,
)
from pytreemod.nn.arguments import Title, check_array, check_dtype, check_floating, check_last_axis
from pytreemod.nn.calling import ignores_key, in_scope
from pytreemod.nn.functional.rotary_embeddings import (
    Scaling,
    rotary_angles,
    rotary_embedding,
    rotary_tables,
    rotate_half,
)
from pytreemod.state.key_sources import KeyLike
from pytreemod.tree.traces import value_apart
from pytreemod.typing import AnyArray

IN_PROCESS_HEADS = "in process_heads"
"""Whether a call is within `process_heads`. There, the axis before the last of an array with more
than two axes may count heads or positions, and the shape does not show which."""

SCALINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""The numbers of each kind of scaling, by their names in `config.json`."""


def _check_even(where: str, size: Any) -> int:
    count = check_size(where, size)
    if count % 2 != 0:
        hint = ("for example:", f"RotaryPositionalEmbedding({count + 1})")
        raise ArgumentError(where, "an even number, for pairs", str(count), hint=hint)
    return count


def _check_positive(where: str, value: Any) -> float:
    number = check_number(where, value, 0.0)
    if number == 0:
        raise ArgumentError(where, "a number > 0", describe(value))
    return number


def _check_scaling(where: str, scaling: Any) -> tuple[tuple[str, Any], ...] | None:
    """Return the kind and its numbers as pairs, which can be hashed; None for "default"."""
    if scaling is None:
        return None
    given = scaling
    if not isinstance(scaling, Mapping):
        # In the form that the field has.
        pairs = as_sequence(scaling) or ()
        if not pairs or any(len(as_sequence(pair) or ()) != 2 for pair in pairs):
            hint = (
                "Pass the entry of config.json:",
                "scaling={'rope_type': 'linear', 'factor': 2.0}",
            )
            raise ArgumentError(where, "a mapping, or None", describe(scaling), hint=hint)
        given = dict(pairs)
    numbers = dict(cast("Mapping[str, Any]", given))
    kind = numbers.pop("rope_type", None)
    names = SCALINGS.get(kind) if isinstance(kind, str) else None
    if names is None:
        expected = f"rope_type to be one of {', '.join(map(repr, SCALINGS))}"
        raise ArgumentError(where, expected, describe(kind))
    if {*numbers} != {*names}:
        expected = f"{', '.join(names) or 'nothing else'} with rope_type={kind!r}"
        raise ArgumentError(where, expected, ", ".join(map(str, numbers)) or "nothing else")
    found: dict[str, Any] = {}
    for name in names:
        at, number = f"{where[:-1]}[{name!r}])", numbers[name]
        is_count = name == "original_max_position_embeddings"
        found[name] = check_size(at, number, 1) if is_count else _check_positive(at, number)
    if kind == "llama3" and found["low_freq_factor"] >= found["high_freq_factor"]:
        low, high = found["low_freq_factor"], found["high_freq_factor"]
        expected = "low_freq_factor < high_freq_factor"
        raise ArgumentError(where, expected, f"{low:g} and {high:g}")
    return (("rope_type", kind), *found.items()) if found else None


class RotaryPositionalEmbedding(Module):
    r"""Rotates each vector of a sequence by angles that grow with its position.

    The vector at position $t$ has the pairs $(x_i, x_{i + d/2})$. Each pair is rotated by
    $t \cdot \theta^{-2i/d}$, so that the product of two vectors depends on their distance, not on
    their positions. Use it for the queries and keys of each attention head, not for the values.

    Positions start at 0, or at `offset`; or pass the position of each vector in `positions`. With
    interleaved=True, a pair is two adjacent numbers, $(x_{2i}, x_{2i+1})$. The weights in a file
    require one of the two.

    Nothing is cached between calls: layers of several sizes, bases and dtypes are independent, and
    a compiled program computes its own angles.

    Shapes:
        x: (..., seq_length, embedding_size), or with another axis before the last, see `axis`
        return: the shape of x

    Args:
        embedding_size: size of a vector, an even number >= 0.
        theta: the base, > 0; a larger base means slower growth of the angles.
        dtype: of the cosines and sines; JAX's default float if None. The result is computed in the
            wider of this dtype and that of x, and returned in that of x.
        interleaved: whether a pair is two adjacent numbers, as in the paper and in GPT-J, instead
            of one number of each half, as in GPT-NeoX, Llama and Equinox.
        scaling: makes the angles smaller, for sequences longer than those in training. A mapping
            with the names of Hugging Face's `config.json`. For the `rope_type` "linear", all angles
            are divided by `factor`. For "llama3", pass `factor`, `low_freq_factor`,
            `high_freq_factor` and `original_max_position_embeddings`. Pairs that rotate more than
            high_freq_factor times in a sequence of the original length are unchanged. Pairs that
            rotate less than low_freq_factor times are divided by `factor`. The transition between
            them is smooth. Stored as a tuple of its items; no scaling if None, or for the type
            "default".

    State and randomness: none.

    Raises:
        ArgumentError: if an argument is invalid, x is not floating, or positions are not numbers.
        ShapeError: if x has no axis of positions, or its last axis does not have embedding_size
            entries; or the shape of positions or offset does not fit x. Also if x has more than two
            axes within `process_heads`, and `axis` is None.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> rope = nn.RotaryPositionalEmbedding(4)
        >>> rope(jnp.ones((7, 5, 4))).shape
        (7, 5, 4)

        The same vectors later in the sequence:

        >>> x = jnp.arange(20.0).reshape(5, 4)
        >>> bool(jnp.allclose(rope(x)[2:], rope(x[2:], offset=2)))
        True
        >>> bool(jnp.allclose(rope(x)[::2], rope(x[::2], positions=jnp.array([0, 2, 4]))))
        True

        In attention, whose heads have the axes (..., seq_length, num_heads, size), the layer does
        it with `rotary=rope`. By hand, `axis` is the one of positions:

        >>> def process_heads(query, key, value, positions):
        ...     turned = [rope(x, positions=positions, axis=-3) for x in (query, key)]
        ...     return *turned, value
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

    embedding_size: int = checked(_check_even)
    theta: float = checked(_check_positive)
    dtype: Any = checked(partial(check_dtype, real=True))
    # A default, although __init__ sets it: a value equal to its default is not printed.
    interleaved: bool = flag(default=False)
    scaling: Scaling | None = checked(_check_scaling, default=None)

    def __init__(
        self,
        embedding_size: int,
        theta: int | float = 10_000.0,
        dtype: Any = None,
        *,
        interleaved: bool = False,
        scaling: Scaling | None = None,
    ):
        self.embedding_size, self.theta = embedding_size, theta
        self.dtype, self.interleaved, self.scaling = dtype, interleaved, scaling

    @staticmethod
    def rotate_half(x: Shaped[Array, "*batch size"]) -> Shaped[Array, "*batch size"]:
        """Swap the halves of the last axis, and change the sign of the first."""
        return rotate_half(x)

    @staticmethod
    def precompute_freqs_cis(
        embedding_size: int, end: int, theta: float, dtype: Any
    ) -> tuple[Float[Array, "end half"], Float[Array, "end half"]]:
        """Compute the cosines and sines of the angles of all positions."""
        return rotary_tables(embedding_size, end, theta, dtype)

    @ignores_key
    @in_scope("pm.nn.RotaryPositionalEmbedding")
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
            positions: the position of each vector, of shape (seq_length,) or (..., seq_length);
                counted from 0 if None.
            offset: added to all positions: a number, or one for each sequence.
            axis: the axis of positions in x, counted from the end; -2 if None. Vectors along axes
                between it and the last one have the same position: use -3 for heads,
                (..., seq, num_heads, size).
            key: ignored.

        Returns:
            The rotated vectors.
        """
        del key
        where = Title(self, "embedding_size")
        x = check_array(where, x)
        check_floating(where, x)
        if x.ndim == 1:
            expected = f"x of shape (..., seq_length, {self.embedding_size})"
            hint = ("x has no axis of positions; for a sequence of one, write", "layer(x[None])")
            raise ShapeError(where, expected, describe(x), hint=hint)
        check_last_axis(where, x, self.embedding_size, "embedding_size")
        turn: Callable[[Array], Array] = partial(self._turned, where, positions, offset)
        for _ in range(-2 - _check_axis(where, x, axis)):
            turn = jax.vmap(turn, in_axes=-2, out_axes=-2)
        return turn(x)

    def _turned(self, where: Title, positions: Any, offset: Any, x: Array) -> Array:
        """Rotate vectors (..., seq, size), each by the angles of its position."""
        size, options = self.embedding_size, (self.theta, self.dtype, self.scaling)
        # All sequences start at 0: one table is enough for the whole batch.
        if positions is None and isinstance(offset, int) and offset == 0:
            tables = rotary_tables(size, x.shape[-2], *options)
        else:
            tables = rotary_angles(_places(where, x, positions, offset), size, *options)
        return rotary_embedding(x, *tables, interleaved=self.interleaved)


def _check_axis(where: Title, x: Array, axis: int | None) -> int:
    """Return the axis of positions, counted from the end."""
    if axis is None:
        if x.ndim == 2 or not value_apart(IN_PROCESS_HEADS):
            return -2
        hint = (
            "Without a map, heads have the axes (..., seq, num_heads, size):",
            "rope(query, axis=-3)",
        )
        expected = "an explicit axis of positions in process_heads"
        raise ShapeError(where, expected, f"only x, {describe(x)}", hint=hint)
    number = as_integer(axis)
    if number is None or not -x.ndim <= number <= -2:
        expected = f"axis from {-x.ndim} to -2"
        raise ArgumentError(where, expected, describe(axis))
    return number


def _places(where: Title, x: Array, positions: Any, offset: Any) -> Array:
    """Return the position of each vector: (seq,), or (..., seq)."""
    # Floats, because a position may be between two integers.
    wide = jnp.result_type(float)
    count = x.shape[-2:-1]
    places = jnp.arange(count[0]) if positions is None else positions
    places = _numbers(where, "positions", places, (count, x.shape[:-1])).astype(wide)
    start = _numbers(where, "offset", jnp.asarray(offset), ((), x.shape[:-2])).astype(wide)
    if not start.ndim:
        return places + start
    shape = x.shape[:-1]
    placed = lax.broadcast_in_dim(places, shape, range(len(shape) - places.ndim, len(shape)))
    return placed + lax.broadcast_in_dim(start, shape, range(start.ndim))


def _numbers(where: Title, name: str, value: Any, shapes: Sequence[tuple[int, ...]]) -> Array:
    """Require real numbers of one of two shapes."""
    value = check_array(where, value, name)
    dtype = value.dtype
    if not (jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)):
        raise ArgumentError(where, f"{name} of real numbers", describe(value))
    if value.shape not in shapes:
        expected = f"{name} of shape {' or '.join(map(str, dict.fromkeys(shapes)))}"
        raise ShapeError(where, expected, describe(value))
    return value
