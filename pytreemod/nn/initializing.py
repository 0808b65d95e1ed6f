"""Where the first values of weights and biases come from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from pytreemod.errors import ArgumentError, describe
from pytreemod.nn.arguments import check_dtype, check_key, named, split_key
from pytreemod.state.key_sources import KeyLike
from pytreemod.typing import untyped_jax

Initializer: TypeAlias = Callable[[PRNGKeyArray, tuple[int, ...], Any], Array]
"""A function `(key, shape, dtype) -> array`, as in `jax.nn.initializers`."""


def uniform_by_fan_in(fan_in: int) -> Initializer:
    """Uniform between -1/sqrt(fan_in) and 1/sqrt(fan_in), as PyTorch's layers start.

    Args:
        fan_in: how many inputs go into one output. With none, every value is zero.

    Returns:
        An initializer. For complex dtypes, real and imaginary part are drawn alike.

    Examples:
        >>> values = uniform_by_fan_in(4)(jax.random.key(0), (100,), jnp.float32)
        >>> bool(jnp.all(jnp.abs(values) <= 0.5))
        True

    Source:
        The defaults of `torch.nn.Linear` and `torch.nn.Conv2d`.
    """
    # What PyTorch's kaiming_uniform_ with a = sqrt(5) comes to: sqrt(3 / fan_in) / sqrt(3).
    limit = 1 / math.sqrt(fan_in) if fan_in > 0 else 0.0

    def draw(key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any) -> Array:
        if not jnp.issubdtype(dtype, jnp.complexfloating):
            return jax.random.uniform(key, shape, dtype, -limit, limit)
        # JAX draws no complex numbers that are uniform.
        real = np.float32 if dtype == jnp.complex64 else np.float64
        # Each part for itself: together they fill a square, and not a disk.
        parts = [
            jax.random.uniform(part, shape, real, -limit, limit) for part in jax.random.split(key)
        ]
        return jax.lax.complex(*parts)

    return draw


def initialize(
    where: str, initializer: Initializer, key: PRNGKeyArray, shape: Sequence[int], dtype: Any
) -> Array:
    """Call an initializer and check what it gives.

    Args:
        where: names the layer and the argument in the error.
        initializer: see `Initializer`.
        key: passed on.
        shape: passed on.
        dtype: passed on.

    Returns:
        The initial values.

    Raises:
        ArgumentError: not callable, or its result is no array of that shape and dtype.

    Examples:
        >>> zeros = jax.nn.initializers.zeros
        >>> initialize("Linear(bias_init)", zeros, jax.random.key(0), (2,), jnp.float32)
        Array([0., 0.], dtype=float32)
    """
    if not callable(initializer):
        expected = "a function (key, shape, dtype) -> array"
        raise ArgumentError(where, expected, describe(initializer))
    values = initializer(key, tuple(shape), dtype)
    wanted = jax.ShapeDtypeStruct(tuple(shape), dtype)
    found = getattr(values, "shape", None), getattr(values, "dtype", None)
    if found != (wanted.shape, wanted.dtype):
        raise ArgumentError(where, f"it to return {describe(wanted)}", describe(values))
    # An initializer may be NumPy's; a layer's leaves are JAX's, which jit need not convert. Those
    # that are take as long to be converted as to be drawn.
    return values if isinstance(values, jax.Array) else jnp.asarray(values)  # pyright: ignore[reportUnnecessaryIsInstance]  (callers may be unchecked)


def begin(layer: Any, dtype: Any, key: Any, n: int | None = None) -> tuple[Any, ...]:
    """The dtype of a layer's arrays, and a key for each of `n` of them.

    Args:
        layer: errors name it.
        dtype: what its constructor was given; JAX's default float if None.
        key: what its constructor was given.
        n: how many keys there are, whether all are used or not: so that an array is the same with
            and without another. The key itself if None.

    Returns:
        The dtype, and the keys.

    Raises:
        ArgumentError: dtype is no floating one.
        RngError: key is not a random key.

    Examples:
        >>> from types import SimpleNamespace
        >>> dtype, first, second = begin(SimpleNamespace(), None, jax.random.key(0), 2)
        >>> dtype.name, first.shape
        ('float32', ())
    """
    where = named(layer, "key")
    dtype = check_dtype(named(layer, "dtype"), dtype)
    return dtype, *([check_key(where, key)] if n is None else split_key(where, key, n))


def initial_pair(
    layer: Any,
    dtype: Any,
    key: Any,
    weight_init: Initializer | None,
    bias_init: Initializer | None,
) -> tuple[Array, Any]:
    """The first weight and bias of a layer, whose annotations say their shapes.

    Args:
        layer: what they are for; errors name it.
        dtype: what its constructor was given; JAX's default float if None.
        key: the same.
        weight_init: the same, see `initial_weight`.
        bias_init: the same, see `initial_bias`.

    Returns:
        Both; None for a bias that is not wanted.
    """
    dtype, weight_key, bias_key = begin(layer, dtype, key, 2)
    weight = initial_weight(layer, weight_init, weight_key, dtype)
    return weight, initial_bias(layer, bias_init, bias_key, dtype)


def initial_weight(
    layer: Any,
    initializer: Initializer | None,
    key: PRNGKeyArray,
    dtype: Any,
    where: str | None = None,
) -> Array:
    """A weight (out, in, *taps), from an initializer that wants (*taps, in, out).

    JAX's initializers take fan-in from all axes but the last: handed the layout of the field they
    would silently scale by the wrong size.

    Args:
        layer: what it is for, whose annotation says the shape.
        initializer: None for the default, which is drawn in the layout of the field, so that a
            seed gives the numbers that it gives in Equinox.
        key: for the initializer.
        dtype: of the result.
        where: names the initializer in errors; the layer's own argument if None.
    """
    n_out, n_in, *taps = layer.__array_shapes__()["weight"]
    where = named(layer, "weight_init") if where is None else where
    if initializer is None:
        start = uniform_by_fan_in(n_in * math.prod(taps))
        return initialize(where, start, key, (n_out, n_in, *taps), dtype)
    values = initialize(where, initializer, key, (*taps, n_in, n_out), dtype)
    return jnp.moveaxis(values, (-1, -2), (0, 1))


def initial_bias(
    layer: Any,
    initializer: Initializer | None,
    key: PRNGKeyArray,
    dtype: Any,
    where: str | None = None,
) -> Any:
    """The bias of a layer, from an initializer that wants (*out,); None if there is none.

    Args: as for `initial_weight`; the default is scaled as that of the weight.
    """
    shapes = layer.__array_shapes__()
    shape = shapes["bias"]
    if shape is None:
        return None
    where = named(layer, "bias_init") if where is None else where
    start = initializer or uniform_by_fan_in(math.prod(shapes["weight"][1:]))
    # Some have axes to be broadcast over, as in Equinox: its files and programs rely on that.
    offset = len(getattr(layer, "offset_axes", ()))
    values = initialize(where, start, key, shape[: len(shape) - offset], dtype)
    return values.reshape(shape) if offset else values


def filled(value: float, shape: tuple[int, ...], dtype: Any) -> Array:
    """An array of one number: `jnp.full` at a quarter of what a call of it takes (8 us, not 30).

    Args:
        value: the number.
        shape: of the array.
        dtype: of the array.

    Examples:
        >>> filled(1.0, (2,), jnp.float32)
        Array([1., 1.], dtype=float32)
    """
    return _filled(value, shape, dtype)


def _full(value: float, shape: tuple[int, ...], dtype: Any) -> Array:
    return jnp.full(shape, value, dtype)


# In other programs it leaves no trace.
_filled: Callable[[float, tuple[int, ...], Any], Array] = untyped_jax.jit(
    _full, static_argnums=(0, 1, 2), inline=True
)


def initial_affine(
    layer: Any,
    shapes: tuple[Sequence[int] | None, Sequence[int] | None],
    dtype: Any,
    initializers: tuple[Initializer | None, Initializer | None],
    key: KeyLike | None,
) -> tuple[Array | None, Array | None]:
    """The weight and bias that scale and shift what a layer has normalized: at first one and zero.

    Args:
        layer: what they are for; errors name it.
        shapes: of the weight and of the bias; None where there is to be none.
        dtype: of both.
        initializers: for the one and for the other, instead of ones and of zeros.
        key: for these; not needed without.

    Returns:
        Both, or None where there is none.

    Raises:
        ArgumentError: an initializer cannot be called, or gives something else.
        RngError: there is an initializer, and no key for it.

    Examples:
        >>> from types import SimpleNamespace
        >>> layer = SimpleNamespace()
        >>> initial_affine(layer, ((2,), None), jnp.float32, (None, None), None)
        (Array([1., 1.], dtype=float32), None)
    """
    keys: Any = (None, None)
    # Ones and zeros are not drawn, so that a layer without initializers needs no key.
    if any(start is not None for start in initializers):
        keys = split_key(named(layer, "key"), cast("KeyLike", key), 2)
    elif key is not None:
        check_key(named(layer, "key"), key)
    values: list[Array | None] = []
    for i, name in enumerate(("weight_init", "bias_init")):
        shape, start = shapes[i], initializers[i]
        if shape is None:
            values.append(None)
        elif start is None:
            values.append(filled(1.0 - i, tuple(shape), dtype))
        else:
            values.append(initialize(named(layer, name), start, keys[i], shape, dtype))
    return values[0], values[1]
