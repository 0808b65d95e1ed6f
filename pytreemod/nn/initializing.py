"""The initial values of weights and biases."""

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
    """Make a uniform initializer on [-1/sqrt(fan_in), 1/sqrt(fan_in)], as in PyTorch's layers.

    Args:
        fan_in: number of inputs of one output. If it is 0, every value is zero.

    Returns:
        An initializer. For complex dtypes, it draws real and imaginary part in the same way.

    Examples:
        >>> values = uniform_by_fan_in(4)(jax.random.key(0), (100,), jnp.float32)
        >>> bool(jnp.all(jnp.abs(values) <= 0.5))
        True

    Source:
        The defaults of `torch.nn.Linear` and `torch.nn.Conv2d`.
    """
    # PyTorch's kaiming_uniform_ with a = sqrt(5) has the same limit: sqrt(3 / fan_in) / sqrt(3).
    limit = 1 / math.sqrt(fan_in) if fan_in > 0 else 0.0

    def draw(key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any) -> Array:
        if not jnp.issubdtype(dtype, jnp.complexfloating):
            return jax.random.uniform(key, shape, dtype, -limit, limit)
        # JAX draws no uniform complex numbers.
        real = np.float32 if dtype == jnp.complex64 else np.float64
        # Each part separately: together they fill a square, not a disk.
        parts = [
            jax.random.uniform(part, shape, real, -limit, limit) for part in jax.random.split(key)
        ]
        return jax.lax.complex(*parts)

    return draw


def initialize(
    where: str, initializer: Initializer, key: PRNGKeyArray, shape: Sequence[int], dtype: Any
) -> Array:
    """Call an initializer and check its result.

    Args:
        where: names the layer and the argument in the error.
        initializer: see `Initializer`.
        key: passed on.
        shape: passed on.
        dtype: passed on.

    Returns:
        The initial values.

    Raises:
        ArgumentError: if it is not callable, or its result is not an array of that shape and dtype.

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
        raise ArgumentError(where, f"the function to return {describe(wanted)}", describe(values))
    # An initializer may return NumPy arrays; a layer's leaves are JAX's, which jit need not
    # convert. Converting a JAX array would take as long as drawing it.
    return values if isinstance(values, jax.Array) else jnp.asarray(values)  # pyright: ignore[reportUnnecessaryIsInstance]  (callers may be unchecked)


def begin(layer: Any, dtype: Any, key: Any, n: int | None = None) -> tuple[Any, ...]:
    """Return the dtype of a layer's arrays, and a key for each of `n` of them.

    Args:
        layer: errors name it.
        dtype: the argument of its constructor; JAX's default float if None.
        key: the argument of its constructor.
        n: number of keys, whether all are used or not, so that an array does not depend on the
            presence of another. If None, the key itself is returned.

    Returns:
        The dtype, and the keys.

    Raises:
        ArgumentError: if dtype is not floating.
        RngError: if key is not a random key.

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
    layer: Any, dtype: Any, key: Any, weight_init: Initializer | None, bias_init: Initializer | None
) -> tuple[Array, Any]:
    """Make the initial weight and bias of a layer, with the shapes of its annotations.

    Args:
        layer: the layer; errors name it.
        dtype: the argument of its constructor; JAX's default float if None.
        key: the argument of its constructor.
        weight_init: the same, see `initial_weight`.
        bias_init: the same, see `initial_bias`.

    Returns:
        Both; None for a bias if the layer has none.
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
    """Draw a weight (out, in, *taps), by an initializer that expects (*taps, in, out).

    JAX's initializers take fan-in from all axes but the last. With the layout of the field they
    would silently scale by the wrong size.

    Args:
        layer: the layer, whose annotation defines the shape.
        initializer: None for the default, which is drawn in the layout of the field, so that a
            seed gives the same numbers as in Equinox.
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
    """Draw the bias of a layer, by an initializer that expects (*out,); None if there is none.

    Args: as for `initial_weight`; the default has the scale of the weight's.
    """
    shapes = layer.__array_shapes__()
    shape = shapes["bias"]
    if shape is None:
        return None
    where = named(layer, "bias_init") if where is None else where
    start = initializer or uniform_by_fan_in(math.prod(shapes["weight"][1:]))
    # Some biases have axes to broadcast over, as in Equinox, whose files and programs need them.
    offset = len(getattr(layer, "offset_axes", ()))
    values = initialize(where, start, key, shape[: len(shape) - offset], dtype)
    return values.reshape(shape) if offset else values


def filled(value: float, shape: tuple[int, ...], dtype: Any) -> Array:
    """Make an array of one number, in a quarter of the time of `jnp.full` (8 us instead of 30).

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


# Inlining leaves no trace in other programs.
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
    """Make the weight and bias of a normalization: initially ones and zeros.

    Args:
        layer: the layer; errors name it.
        shapes: of the weight and of the bias; None for no array.
        dtype: of both.
        initializers: of the weight and of the bias; ones and zeros if None.
        key: for the initializers; not needed without them.

    Returns:
        Both, or None for no array.

    Raises:
        ArgumentError: if an initializer is not callable, or its result is invalid.
        RngError: if there is an initializer, and no key for it.

    Examples:
        >>> from types import SimpleNamespace
        >>> layer = SimpleNamespace()
        >>> initial_affine(layer, ((2,), None), jnp.float32, (None, None), None)
        (Array([1., 1.], dtype=float32), None)
    """
    keys: Any = (None, None)
    # Ones and zeros are not drawn, so a layer without initializers needs no key.
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
