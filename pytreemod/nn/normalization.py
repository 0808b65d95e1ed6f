"""The layers that normalize each example: by its mean and variance over some of its axes.

Statistics are in float32 or wider, and the result has the dtype of x. Each layer returns a State
that is passed in, so that it can stand where a `BatchNorm` stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pytreemod.errors import ArgumentError, ShapeError, describe
from pytreemod.module.classes import Module
from pytreemod.module.fields import field
from pytreemod.nn.base import (
    AnyArray,
    Initializer,
    add_shared,
    as_dtype,
    as_wide,
    check_shape,
    float_dtype,
    layer_call,
    scale_shared,
    split_key,
    square,
    title,
)
from pytreemod.state.key_sources import KeyLike
from pytreemod.state.values import State


def standardize(x: Array, axes: Sequence[int], eps: float) -> Array:
    """Subtract the mean over some axes, and divide by the standard deviation.

    Examples:
        >>> standardize(jnp.array([1.0, 3.0]), [0], 0.0)
        Array([-1.,  1.], dtype=float32)
    """
    # Not E[x^2] - E[x]^2, which cancels if the mean is large, and may be negative.
    centered = x - jnp.mean(x, axes, keepdims=True)
    return centered * lax.rsqrt(jnp.mean(square(centered), axes, keepdims=True) + eps)


def scale_and_shift(y: Array, weight: Array | None, bias: Array | None, dims: int = 0) -> Array:
    """Multiply and add arrays that all examples share, along the axes before the last `dims`."""

    def along(values: Array | None) -> Array | None:
        if values is None:
            return None
        values = as_dtype(values, y.dtype)
        return values.reshape(*values.shape, *(1,) * dims) if dims else values

    return add_shared(scale_shared(y, along(weight)), along(bias))


def initial_affine(
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None],
    dtype: Any,
    weight_init: Initializer | None,
    bias_init: Initializer | None,
    key: KeyLike | None,
) -> tuple[Any, Any]:
    """A weight of ones and a bias of zeros, or as the initializers draw them; None for no shape."""
    # A layer without initializers needs no key.
    keys: Any = split_key(key, 2) if weight_init or bias_init else (None, None)  # pyright: ignore[reportArgumentType]  (JAX refuses None)
    dtype = float_dtype(dtype)

    def made(init: Initializer | None, plain: Any, key: Any, shape: Any) -> Any:
        if shape is None:
            return None
        return plain(shape, dtype) if init is None else jnp.asarray(init(key, shape, dtype))

    weight = made(weight_init, jnp.ones, keys[0], shapes[0])
    return weight, made(bias_init, jnp.zeros, keys[1], shapes[1])


class _OverLastAxes(Module):
    """What `LayerNorm` and `RMSNorm` have in common: all but the formula."""

    shape: tuple[int, ...] = field(static=True)
    eps: float = field(static=True)
    use_weight: bool = field(static=True)
    use_bias: bool = field(static=True)
    weight: Float[Array, "*shape"] | None
    bias: Float[Array, "*shape"] | None

    def __init__(
        self,
        shape: int | Sequence[int],
        eps: int | float = 1e-5,
        use_weight: bool = True,
        use_bias: bool = True,
        dtype: Any = None,
        *,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        key: KeyLike | None = None,
    ):
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.eps, self.use_weight, self.use_bias = eps, use_weight, use_bias
        shapes = self.shape if use_weight else None, self.shape if use_bias else None
        self.weight, self.bias = initial_affine(shapes, dtype, weight_init, bias_init, key)

    def _axes(self, x: Array) -> range:
        return range(x.ndim - len(self.shape), x.ndim)


class LayerNorm(_OverLastAxes):
    r"""Layer normalization: $(x - E[x]) / \sqrt{Var[x] + eps} \cdot w + b$ over the last axes.

    Shapes:
        x: (..., *shape)
        return: (..., *shape)

    Fields:
        weight: shape, or None if use_weight=False
        bias: shape, or None if use_bias=False

    Args:
        shape: the last axes, over which to normalize: a size, or a sequence of them.
        eps: added to the variance.
        use_weight: whether to multiply by a weight, initially one.
        use_bias: whether to add a bias, initially zero.
        dtype: of weight and bias; JAX's default float if None.
        weight_init: `(key, shape, dtype) -> array`, for the weight; ones if None.
        bias_init: the same for the bias; zeros if None.
        key: used once, for weight_init and bias_init; not needed without them.

    State and randomness: none. A State that is passed in is returned with the result.

    Raises:
        ArgumentError: if x is not real and floating.
        ShapeError: if x does not end in shape, or weight or bias does not have the shape above.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.LayerNorm(2, eps=0.0)(jnp.array([[1.0, 3.0], [2.0, 0.0]])).tolist()
        [[-1.0, 1.0], [1.0, -1.0]]

    Source:
        Ba, Kiros & Hinton 2016, https://arxiv.org/abs/1607.06450, eq. (4).
    """

    @layer_call()
    def __call__(
        self, x: AnyArray, state: State | None = None, *, key: KeyLike | None = None
    ) -> Any:
        """Normalize x; `key` is ignored, `state` is returned if given."""
        array: Array = check_shape(self, x, ..., *self.shape)
        y = standardize(as_wide(self, array), self._axes(array), self.eps)
        y = as_dtype(scale_and_shift(y, self.weight, self.bias), array.dtype)
        return y if state is None else (y, state)


class RMSNorm(_OverLastAxes):
    r"""Root mean square normalization: $x / \sqrt{E[x^2] + eps} \cdot w + b$ over the last axes.

    `LayerNorm` without the mean.

    Shapes:
        x: (..., *shape)
        return: (..., *shape)

    Fields:
        weight: shape, or None if use_weight=False
        bias: shape, or None if use_bias=False

    Args:
        shape: the last axes, over which to normalize: a size, or a sequence of them.
        eps: added to the mean of the squares.
        use_weight: whether to multiply by a weight, initially one.
        use_bias: whether to add a bias, which PyTorch and Flax do not have.
        dtype: of weight and bias; JAX's default float if None.
        weight_init: `(key, shape, dtype) -> array`, for the weight; ones if None.
        bias_init: the same for the bias; zeros if None.
        key: used once, for weight_init and bias_init; not needed without them.

    State and randomness: none. A State that is passed in is returned with the result.

    Raises:
        ArgumentError: if x is not real and floating.
        ShapeError: if x does not end in shape, or weight or bias does not have the shape above.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.RMSNorm(2, eps=0.0)(jnp.array([[3.0, 3.0], [0.0, 0.5]])).tolist()
        [[1.0, 1.0], [0.0, 1.41...]]

    Source:
        Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467, eq. (4). The default of eps is
        Equinox's; `torch.nn.RMSNorm` uses the epsilon of the dtype of x.
    """

    @layer_call()
    def __call__(
        self, x: AnyArray, state: State | None = None, *, key: KeyLike | None = None
    ) -> Any:
        """Normalize x; `key` is ignored, `state` is returned if given."""
        array: Array = check_shape(self, x, ..., *self.shape)
        wide = as_wide(self, array)
        mean = jnp.mean(square(wide), self._axes(array), keepdims=True)
        y = wide * lax.rsqrt(mean + self.eps)
        y = as_dtype(scale_and_shift(y, self.weight, self.bias), array.dtype)
        return y if state is None else (y, state)


class GroupNorm(Module):
    r"""Group normalization: $(x - E[x]) / \sqrt{Var[x] + eps} \cdot w + b$ over groups of channels.

    Mean and (biased) variance are those of a group of adjacent channels, over all axes after the
    channels, too. One group normalizes all of x.

    Without num_spatial_dims, x is one example, as in Equinox: the layer cannot distinguish a batch
    from a larger example. For a batch, use `jax.vmap(layer)`, or set num_spatial_dims.

    Shapes:
        x: (channels, *spatial); (..., channels, *spatial) with num_spatial_dims
        return: the shape of x

    Fields:
        weight: (channels,), or None if channelwise_affine=False
        bias: (channels,), or None if channelwise_affine=False

    Args:
        groups: number of groups.
        channels: number of channels, a multiple of groups; None for any multiple, which requires
            channelwise_affine=False.
        eps: added to the variance.
        channelwise_affine: whether to scale and shift each channel.
        dtype: of weight and bias; JAX's default float if None.
        num_spatial_dims: number of axes after the channels; axes before the channels are batch
            axes. If None, there are no batch axes.
        weight_init: `(key, shape, dtype) -> array`, for the weight; ones if None.
        bias_init: the same for the bias; zeros if None.
        key: used once, for weight_init and bias_init; not needed without them.

    State and randomness: none. A State that is passed in is returned with the result.

    Raises:
        ArgumentError: if channels is None and there are weights, or x is not real and floating.
        ShapeError: if x has another number of channels, or weight or bias does not have the shape
            above.
        ArgumentError: if groups does not divide the channels; TypeError (by JAX) in the call, if
            the number of channels is not given.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> layer = nn.GroupNorm(groups=2, channels=4)
        >>> layer(jnp.ones((4, 5, 5))).shape, jax.vmap(layer)(jnp.ones((7, 4, 5, 5))).shape
        ((4, 5, 5), (7, 4, 5, 5))

    Source:
        Wu & He 2018, https://arxiv.org/abs/1803.08494, eq. (7).
    """

    groups: int = field(static=True)
    channels: int | None = field(static=True)
    eps: float = field(static=True)
    channelwise_affine: bool = field(static=True)
    weight: Float[Array, " channels"] | None
    bias: Float[Array, " channels"] | None
    num_spatial_dims: int | None = field(static=True, default=None)

    def __init__(
        self,
        groups: int,
        channels: int | None = None,
        eps: int | float = 1e-5,
        channelwise_affine: bool = True,
        dtype: Any = None,
        *,
        num_spatial_dims: int | None = None,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        key: KeyLike | None = None,
    ):
        if channels is None and channelwise_affine:
            raise ArgumentError("GroupNorm needs channels, or channelwise_affine=False")
        if channels is not None and channels % groups:
            raise ArgumentError("GroupNorm(groups)", f"a divisor of {channels}", str(groups))
        self.groups, self.channels, self.eps = groups, channels, eps
        self.channelwise_affine, self.num_spatial_dims = channelwise_affine, num_spatial_dims
        shape: Any = (channels,) if channelwise_affine else None
        self.weight, self.bias = initial_affine((shape, shape), dtype, weight_init, bias_init, key)

    @layer_call()
    def __call__(
        self, x: AnyArray, state: State | None = None, *, key: KeyLike | None = None
    ) -> Any:
        """Normalize x; `key` is ignored, `state` is returned if given."""
        size, dims = self.channels or "channels", self.num_spatial_dims
        wanted = (size, ...) if dims is None else (..., size, *("spatial",) * dims)
        array: Array = check_shape(self, x, *wanted)
        axis = 0 if dims is None else array.ndim - dims - 1
        batch, channels, spatial = array.shape[:axis], array.shape[axis], array.shape[axis + 1 :]
        # The groups become an axis; the axes after it are averaged over.
        inside = () if channels == self.groups else (channels // self.groups,)
        groups = as_wide(self, array).reshape(*batch, self.groups, *inside, *spatial)
        y = standardize(groups, range(axis + 1, groups.ndim), self.eps).reshape(array.shape)
        y = as_dtype(scale_and_shift(y, self.weight, self.bias, len(spatial)), array.dtype)
        return y if state is None else (y, state)


class InstanceNorm(GroupNorm):
    r"""Instance normalization: $(x - E[x]) / \sqrt{Var[x] + eps} \cdot w + b$ for each channel.

    A `GroupNorm` whose groups are single channels; by default without weights. Training and
    inference are the same, as in PyTorch by default.

    Shapes:
        x: (channels, *spatial); (..., channels, *spatial) with num_spatial_dims
        return: the shape of x

    Fields:
        weight: (channels,), or None if channelwise_affine=False
        bias: (channels,), or None if channelwise_affine=False

    Args:
        channels: number of channels.
        eps: added to the variance.
        channelwise_affine: whether to scale and shift each channel.
        dtype: of weight and bias; JAX's default float if None.
        **options: `num_spatial_dims`, `weight_init`, `bias_init` and `key`, as for `GroupNorm`.

    State and randomness: none. A State that is passed in is returned with the result.

    Raises:
        ArgumentError: if x is not real and floating.
        ShapeError: if x has another number of channels, or one value for each channel; or weight or
            bias does not have the shape above.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.InstanceNorm(2, eps=0.0)(jnp.array([[1.0, 3.0], [9.0, 5.0]])).tolist()
        [[-1.0, 1.0], [1.0, -1.0]]
        >>> nn.InstanceNorm(3, num_spatial_dims=2)(jnp.ones((7, 3, 8, 8))).shape
        (7, 3, 8, 8)

    Source:
        Ulyanov, Vedaldi & Lempitsky 2016, https://arxiv.org/abs/1607.08022, eq. (4); defaults as
        in `torch.nn.InstanceNorm2d`.
    """

    def __init__(
        self,
        channels: int,
        eps: int | float = 1e-5,
        channelwise_affine: bool = False,
        dtype: Any = None,
        **options: Any,
    ):
        super().__init__(channels, channels, eps, channelwise_affine, dtype, **options)

    def __call__(
        self, x: AnyArray, state: State | None = None, *, key: KeyLike | None = None
    ) -> Any:
        """Normalize x; `key` is ignored, `state` is returned if given."""
        dims = self.num_spatial_dims
        if {*jnp.shape(x)[1 if dims is None else jnp.ndim(x) - dims :]} <= {1}:
            # A single value is its own mean: the result would be zero.
            raise ShapeError(title(self), "several values for each channel", describe(x))
        return super().__call__(x, state, key=key)
