"""The pooling layers: reductions of windows of a given size, or of a given number of windows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Shaped

from pytreemod.errors import ArgumentError, ShapeError, describe
from pytreemod.module.classes import Module
from pytreemod.module.fields import field
from pytreemod.nn.base import AnyArray, check_shape, layer_call, title, wide_dtype
from pytreemod.nn.convolution import (
    Amounts,
    Pads,
    Sizes,
    any_sizes,
    check_padding,
    check_sizes,
    check_window,
    pads_per_axis,
    per_axis,
    with_spatial_dims,
)
from pytreemod.state.key_sources import KeyLike


class Pool(Module):
    r"""Reduces windows over the spatial axes with any associative operation.

    $y_i = x_{s i} \circ x_{s i + 1} \circ \dots \circ x_{s i + k - 1}$, where x is padded with
    init, s is the stride and k the size of the window.

    `MaxPool1d`, `MaxPool2d`, `MaxPool3d`, `AvgPool1d`, `AvgPool2d` and `AvgPool3d` are the common
    cases. Floats narrower than float32 are reduced in float32, and returned in the dtype of x.

    Shapes:
        x: (..., channels, *spatial)
        return: (..., channels, *spatial_out)

    Fields:
        no arrays

    Args:
        init: the operation's neutral element, a number; also the padding. An infinity means the
            extreme value of the dtype of x.
        operation: an associative function of two arguments such as `jax.lax.add`. Only JAX's own
            `add`, `max` and `min` can be differentiated.
        num_spatial_dims: number of spatial axes.
        kernel_size: size of the window, for all axes or for each.
        stride: step of the window, for all axes or for each.
        padding: an amount, one per axis, or (low, high) per axis; each less than the window.
        use_ceil: whether a last window that overhangs the input counts.

    State and randomness: none.

    Raises:
        ArgumentError: if a size or the padding is none of the above.
        ShapeError: if x lacks an axis, or is smaller than the window.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> layer = nn.Pool(0, jax.lax.add, num_spatial_dims=1, kernel_size=2, stride=2)
        >>> layer(jnp.ones((1, 6))).tolist()
        [[2.0, 2.0, 2.0]]

    Source:
        `use_ceil` is PyTorch's `ceil_mode`. The default stride is 1, as in Equinox.
    """

    init: int | float = field(static=True)
    operation: Callable[[Any, Any], Any] = field(static=True)
    num_spatial_dims: int = field(static=True)
    kernel_size: tuple[int, ...] = field(static=True)
    stride: tuple[int, ...] = field(static=True)
    padding: Pads = field(static=True)
    use_ceil: bool = field(static=True)

    def __init__(
        self,
        init: int | float | Array,
        operation: Callable[[Any, Any], Any],
        num_spatial_dims: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Amounts = 0,
        use_ceil: bool = False,
    ):
        # A Python number: an array would be a leaf that no optimizer should see.
        self.init, self.operation = np.asarray(init).item(), operation
        self.num_spatial_dims, self.use_ceil = num_spatial_dims, use_ceil
        self.kernel_size = per_axis(kernel_size, num_spatial_dims)
        self.stride = per_axis(stride, num_spatial_dims)
        self.padding = pads_per_axis(padding, num_spatial_dims)

    def __check_init__(self) -> None:
        dims, window = self.num_spatial_dims, self.kernel_size
        check_sizes(self, dims, kernel_size=window, stride=self.stride)
        check_padding(self, self.padding, dims)
        # A window of padding alone would give the neutral element, -inf for a maximum.
        if any(max(pair) >= extent for pair, extent in zip(self.padding, window, strict=True)):
            where, expected = f"{type(self).__name__}(padding)", f"less than kernel_size={window}"
            raise ArgumentError(where, expected, str(self.padding))

    @layer_call()
    def __call__(self, x: AnyArray, *, key: KeyLike | None = None) -> Shaped[Array, ...]:
        """Reduce the windows over the spatial axes of x; `key` is ignored."""
        return self._reduce(x)

    def _reduce(self, x: Any) -> Array:
        x = check_shape(self, x, ..., "channels", *any_sizes(self.num_spatial_dims))
        window, stride, pads = self.kernel_size, self.stride, self.padding
        # Here, because the overhang of the last window depends on the size of x.
        if self.use_ceil:
            axes = zip(x.shape[-len(window) :], window, stride, pads, strict=True)
            pads = tuple(_with_overhang(*axis) for axis in axes)
        check_window(self, x, window, pads)
        # A maximum needs no wider dtype, but its gradient is a sum if windows overlap.
        wide = x.astype(wide_dtype(x.dtype))
        # Along axes before the spatial ones each entry is a window.
        n = x.ndim - self.num_spatial_dims
        window, stride, pads = (1,) * n + window, (1,) * n + stride, ((0, 0),) * n + pads
        init = _neutral(self.init, wide.dtype)
        return lax.reduce_window(wide, init, self.operation, window, stride, pads).astype(x.dtype)


def _with_overhang(size: int, extent: int, step: int, pads: tuple[int, int]) -> tuple[int, int]:
    """Padding that is larger at the end, so that the last, overhanging window counts, too.

    A window that would start beyond the input and its lower padding does not count, as in PyTorch.
    """
    low, high = pads
    total = low + size + high
    last_start = -(-(total - extent) // step) * step
    # Such a window has only padding: its maximum would be -inf.
    if last_start >= low + size:
        last_start -= step
    return low, high + max(last_start + extent - total, 0)


def _neutral(value: Any, dtype: Any) -> Any:
    """A constant of a dtype; an infinity becomes the extreme of a dtype that has none.

    A NumPy scalar: JAX recognizes `max` with its neutral element only in a known constant.
    """
    if value in (math.inf, -math.inf) and not jnp.issubdtype(dtype, jnp.inexact):
        if jnp.issubdtype(dtype, jnp.bool_):
            return np.bool_(value > 0)
        limits = jnp.iinfo(dtype)
        value = limits.max if value > 0 else limits.min
    return np.asarray(value, dtype)[()]


class MaxPool(Pool):
    """Takes the largest entry of each window, over any number of spatial axes; see `MaxPool2d`."""

    def __init__(
        self,
        num_spatial_dims: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Amounts = 0,
        use_ceil: bool = False,
    ):
        super().__init__(
            -math.inf, lax.max, num_spatial_dims, kernel_size, stride, padding, use_ceil
        )


class AvgPool(Pool):
    """Takes the mean of each window, over any number of spatial axes; see `AvgPool2d`."""

    def __init__(
        self,
        num_spatial_dims: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Amounts = 0,
        use_ceil: bool = False,
    ):
        super().__init__(0, lax.add, num_spatial_dims, kernel_size, stride, padding, use_ceil)

    @layer_call()
    def __call__(self, x: AnyArray, *, key: KeyLike | None = None) -> Shaped[Array, ...]:
        """Average the windows over the spatial axes of x; `key` is ignored."""
        values = jnp.asarray(x)
        # Integers become floats before they are added: in int8 the sum of a window would overflow.
        is_exact = not jnp.issubdtype(values.dtype, jnp.inexact)
        dtype = jnp.result_type(float) if is_exact else values.dtype
        total = self._reduce(values.astype(wide_dtype(dtype)))
        # Divided by the whole window, padding included, as in PyTorch by default, and in Equinox.
        return (total / math.prod(self.kernel_size)).astype(dtype)


class MaxPool1d(MaxPool):
    """Takes the largest entry of each window over one spatial axis.

    Shapes:
        x: (..., channels, length)
        return: (..., channels, length_out)

    Args:
        kernel_size, stride, padding, use_ceil: as for `Pool`; padding is never the maximum.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.MaxPool1d(2, stride=2)(jnp.arange(6.0)[None]).tolist()
        [[1.0, 3.0, 5.0]]
    """

    @with_spatial_dims(MaxPool.__init__, 1)
    def __init__(self): ...


class MaxPool2d(MaxPool):
    """Takes the largest entry of each window over two spatial axes.

    Shapes:
        x: (..., channels, height, width)
        return: (..., channels, height_out, width_out)

    Args:
        kernel_size, stride, padding, use_ceil: as for `Pool`; padding is never the maximum.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.MaxPool2d(2, stride=2)(jnp.ones((7, 3, 8, 8))).shape
        (7, 3, 4, 4)
    """

    @with_spatial_dims(MaxPool.__init__, 2)
    def __init__(self): ...


class MaxPool3d(MaxPool):
    """Takes the largest entry of each window over three spatial axes.

    Shapes:
        x: (..., channels, depth, height, width)
        return: (..., channels, depth_out, height_out, width_out)

    Args:
        kernel_size, stride, padding, use_ceil: as for `Pool`; padding is never the maximum.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.MaxPool3d(2, stride=2)(jnp.ones((3, 4, 4, 4))).shape
        (3, 2, 2, 2)
    """

    @with_spatial_dims(MaxPool.__init__, 3)
    def __init__(self): ...


class AvgPool1d(AvgPool):
    """Takes the mean of each window over one spatial axis; padding counts as zeros.

    Shapes:
        x: (..., channels, length)
        return: (..., channels, length_out)

    Args:
        kernel_size, stride, padding, use_ceil: as for `Pool`; an overhang counts as zeros.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.AvgPool1d(2, stride=2)(jnp.arange(6.0)[None]).tolist()
        [[0.5, 2.5, 4.5]]
    """

    @with_spatial_dims(AvgPool.__init__, 1)
    def __init__(self): ...


class AvgPool2d(AvgPool):
    """Takes the mean of each window over two spatial axes; padding counts as zeros.

    Shapes:
        x: (..., channels, height, width)
        return: (..., channels, height_out, width_out)

    Args:
        kernel_size, stride, padding, use_ceil: as for `Pool`; an overhang counts as zeros.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.AvgPool2d(2, stride=2)(jnp.ones((7, 3, 8, 8))).shape
        (7, 3, 4, 4)
    """

    @with_spatial_dims(AvgPool.__init__, 2)
    def __init__(self): ...


class AvgPool3d(AvgPool):
    """Takes the mean of each window over three spatial axes; padding counts as zeros.

    Shapes:
        x: (..., channels, depth, height, width)
        return: (..., channels, depth_out, height_out, width_out)

    Args:
        kernel_size, stride, padding, use_ceil: as for `Pool`; an overhang counts as zeros.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.AvgPool3d(2, stride=2)(jnp.ones((3, 4, 4, 4))).shape
        (3, 2, 2, 2)
    """

    @with_spatial_dims(AvgPool.__init__, 3)
    def __init__(self): ...


# ---- a given number of windows


class AdaptivePool(Module):
    r"""Reduces spatial axes of any size to a given size.

    $y_i = \mathrm{operation}(x_{a_i}, \dots, x_{a_{i+1} - 1})$ with
    $a_i = i \lfloor n / t \rfloor + \min(i, n \bmod t)$.

    An axis of n entries is divided into t windows that do not overlap. As in Equinox, the first
    n % t of them have one entry more than the others. PyTorch's windows differ if t does not divide
    n: window i goes from floor(i n / t) to ceil((i + 1) n / t), so its windows overlap. PyTorch
    also repeats entries if n is smaller than t, which is an error here.

    `AdaptiveAvgPool1d` and similar layers are the common cases. Floats narrower than float32 are
    reduced in float32, and returned in the dtype of x.

    Shapes:
        x: (..., channels, *spatial)
        return: (..., channels, *target_shape)

    Fields:
        no arrays

    Args:
        target_shape: size of the output's spatial axes, for all axes or for each.
        num_spatial_dims: number of spatial axes.
        operation: from an array of one axis to one number, such as `jax.numpy.mean`; applied axis
            after axis.

    State and randomness: none.

    Raises:
        ArgumentError: if target_shape has no sizes, or operation does not return a number.
        ShapeError: if x lacks an axis, or an axis is smaller than in target_shape.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.AdaptivePool(3, 1, jnp.max)(jnp.arange(7.0)[None]).tolist()
        [[2.0, 4.0, 6.0]]

    Source:
        `equinox.nn.AdaptivePool`.
    """

    target_shape: tuple[int, ...] = field(static=True)
    operation: Callable[[Any], Any] = field(static=True)

    def __init__(self, target_shape: Sizes, num_spatial_dims: int, operation: Callable[[Any], Any]):
        self.target_shape = per_axis(target_shape, num_spatial_dims)
        self.operation = operation
        check_sizes(self, num_spatial_dims, target_shape=self.target_shape)

    @property
    def num_spatial_dims(self) -> int:
        """The number of spatial axes."""
        return len(self.target_shape)

    @layer_call()
    def __call__(self, x: AnyArray, *, key: KeyLike | None = None) -> Shaped[Array, ...]:
        """Reduce the spatial axes of x; `key` is ignored."""
        values: Array = check_shape(self, x, ..., "channels", *any_sizes(self.num_spatial_dims))
        wide = out = values.astype(wide_dtype(values.dtype))
        first = values.ndim - self.num_spatial_dims
        for axis, count in enumerate(self.target_shape, first):
            if out.shape[axis] < count:
                expected = f"x with at least {self.target_shape} entries on its last axes"
                raise ShapeError(title(self), expected, describe(values))
            out = self._reduce(out, axis, count)
        # Results of another dtype, such as positions, are unchanged.
        return out.astype(values.dtype) if out.dtype == wide.dtype else out

    def _reduce(self, x: Array, axis: int, count: int) -> Array:
        """Reduce the windows of one axis: first those that are larger by one, then the others."""
        width, larger = divmod(x.shape[axis], count)
        middle, parts = larger * (width + 1), list[Array]()
        for start, n, size in ((0, larger, width + 1), (middle, count - larger, width)):
            if n:
                part = lax.slice_in_dim(x, start, start + n * size, axis=axis)
                windows = part.reshape(*x.shape[:axis], n, size, *x.shape[axis + 1 :])
                parts.append(jnp.apply_along_axis(self._to_number, axis + 1, windows))
        return parts[0] if len(parts) == 1 else lax.concatenate(parts, axis)

    def _to_number(self, window: Array) -> Array:
        number = self.operation(window)
        # Several numbers would add axes.
        if getattr(number, "shape", None) != ():
            where, got = f"{type(self).__name__}(operation)", describe(number)
            raise ArgumentError(where, "a function that returns one number", got)
        return number


class AdaptiveAvgPool1d(AdaptivePool):
    """Takes the mean of each window over one spatial axis, for a given number of windows.

    If the sizes do not divide, the windows are those of `AdaptivePool`, not PyTorch's.

    Shapes:
        x: (..., channels, length)
        return: (..., channels, length_out)

    Args:
        target_shape: as for `AdaptivePool`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.AdaptiveAvgPool1d(3)(jnp.arange(6.0)[None]).tolist()
        [[0.5, 2.5, 4.5]]
    """

    def __init__(self, target_shape: Sizes):
        super().__init__(target_shape, 1, jnp.mean)


class AdaptiveAvgPool2d(AdaptivePool):
    """Takes the mean of each window over two spatial axes, for a given number of windows.

    If the sizes do not divide, the windows are those of `AdaptivePool`, not PyTorch's.

    Shapes:
        x: (..., channels, height, width)
        return: (..., channels, height_out, width_out)

    Args:
        target_shape: as for `AdaptivePool`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.AdaptiveAvgPool2d(1)(jnp.ones((7, 3, 8, 5))).shape
        (7, 3, 1, 1)
    """

    def __init__(self, target_shape: Sizes):
        super().__init__(target_shape, 2, jnp.mean)


class AdaptiveAvgPool3d(AdaptivePool):
    """Takes the mean of each window over three spatial axes, for a given number of windows.

    If the sizes do not divide, the windows are those of `AdaptivePool`, not PyTorch's.

    Shapes:
        x: (..., channels, depth, height, width)
        return: (..., channels, depth_out, height_out, width_out)

    Args:
        target_shape: as for `AdaptivePool`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.AdaptiveAvgPool3d((2, 1, 2))(jnp.ones((3, 4, 4, 5))).shape
        (3, 2, 1, 2)
    """

    def __init__(self, target_shape: Sizes):
        super().__init__(target_shape, 3, jnp.mean)


class AdaptiveMaxPool1d(AdaptivePool):
    """Takes the largest entry of each window over one spatial axis, for a given number of windows.

    If the sizes do not divide, the windows are those of `AdaptivePool`, not PyTorch's.

    Shapes:
        x: (..., channels, length)
        return: (..., channels, length_out)

    Args:
        target_shape: as for `AdaptivePool`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.AdaptiveMaxPool1d(3)(jnp.arange(6.0)[None]).tolist()
        [[1.0, 3.0, 5.0]]
    """

    def __init__(self, target_shape: Sizes):
        super().__init__(target_shape, 1, jnp.max)


class AdaptiveMaxPool2d(AdaptivePool):
    """Takes the largest entry of each window over two spatial axes, for a given number of windows.

    If the sizes do not divide, the windows are those of `AdaptivePool`, not PyTorch's.

    Shapes:
        x: (..., channels, height, width)
        return: (..., channels, height_out, width_out)

    Args:
        target_shape: as for `AdaptivePool`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.AdaptiveMaxPool2d(2)(jnp.ones((7, 3, 8, 5))).shape
        (7, 3, 2, 2)
    """

    def __init__(self, target_shape: Sizes):
        super().__init__(target_shape, 2, jnp.max)


class AdaptiveMaxPool3d(AdaptivePool):
    """Takes the largest entry of each window over three spatial axes, for a number of windows.

    If the sizes do not divide, the windows are those of `AdaptivePool`, not PyTorch's.

    Shapes:
        x: (..., channels, depth, height, width)
        return: (..., channels, depth_out, height_out, width_out)

    Args:
        target_shape: as for `AdaptivePool`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.AdaptiveMaxPool3d((2, 1, 2))(jnp.ones((3, 4, 4, 5))).shape
        (3, 2, 1, 2)
    """

    def __init__(self, target_shape: Sizes):
        super().__init__(target_shape, 3, jnp.max)
