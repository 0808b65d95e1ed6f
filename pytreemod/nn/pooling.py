"""The pooling layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jaxtyping import Array, Shaped

from pytreemod.errors import ArgumentError, describe
from pytreemod.module.field_kinds import as_number, assign_fields, checked, flag, size, sizes
from pytreemod.module.fields import field
from pytreemod.nn.arguments import Title, check_array, check_channels, check_window, function
from pytreemod.nn.calling import ignores_key, in_scope
from pytreemod.nn.dimensions import filled_in
from pytreemod.nn.functional.pooling import avg_pool, pool
from pytreemod.nn.functional.windows import Pads, check_padding, cover
from pytreemod.nn.layer import Layer
from pytreemod.state.key_sources import KeyLike
from pytreemod.typing import AnyArray


def _check_init(where: str, init: Any) -> int | float:
    """Accept a Python number: an array would be a leaf that no optimizer should see."""
    number = as_number(init)
    if number is None:
        raise ArgumentError(where, "a number", describe(init))
    return number


def _accept_pads(where: str, padding: Any, layer: Pool) -> Pads:
    window = layer.kernel_size
    pads = check_padding(where, padding, len(window), words=False)
    assert not isinstance(pads, str)
    # A window of padding alone would give the neutral element, -inf for a maximum.
    if any(max(pair) >= extent for pair, extent in zip(pads, window, strict=True)):
        expected = f"less than kernel_size={window} on each side"
        raise ArgumentError(where, expected, describe(padding))
    return pads


_OPERATION = function("a function", "Pass a function of two arguments:", "operation=jax.lax.max")


class Pool(Layer):
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
        num_spatial_dims: number of spatial axes, >= 1.
        kernel_size: size of the window, for all axes or for each.
        stride: step of the window, for all axes or for each.
        padding: an amount, one per axis, or (low, high) per axis; each less than the window.
        use_ceil: whether a last window that overhangs the input counts.

    State and randomness: none.

    Raises:
        ArgumentError: if an argument is negative, not an integer, or does not fit the others.
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

    init: int | float = checked(_check_init)
    operation: Callable[[Any, Any], Any] = field(static=True, accepts=_OPERATION)
    num_spatial_dims: int = size(1)
    kernel_size: tuple[int, ...] = sizes(1, count="num_spatial_dims")
    stride: tuple[int, ...] = sizes(1, count="num_spatial_dims")
    padding: tuple[tuple[int, int], ...] = field(static=True, accepts=_accept_pads)
    use_ceil: bool = flag()

    def __init__(
        self,
        init: int | float | Array,
        operation: Callable[[Any, Any], Any],
        num_spatial_dims: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | Sequence[tuple[int, int]] = 0,
        use_ceil: bool = False,
    ):
        self.num_spatial_dims, self.operation, self.use_ceil = num_spatial_dims, operation, use_ceil
        assign_fields(self, init=init, kernel_size=kernel_size, stride=stride, padding=padding)

    @ignores_key
    @in_scope("pm.nn.Pool")
    def __call__(self, x: AnyArray, *, key: KeyLike | None = None) -> Shaped[Array, ...]:
        """Reduce the windows over the spatial axes of x; `key` is ignored."""
        del key
        x, pads = self._check(x)
        return pool(
            x, self.init, self.operation, self.kernel_size, stride=self.stride, padding=pads
        )

    def _check(self, x: AnyArray) -> tuple[Array, Pads]:
        """Return the input as an array, and the padding of its spatial axes."""
        where = Title(self, "kernel_size")
        x, dims, pads = check_array(where, x), self.num_spatial_dims, self.padding
        check_channels(where, x, None, dims)
        # Here, because the overhang of the last window depends on the size of x.
        if self.use_ceil:
            pads = cover(pads, x.shape[-dims:], self.kernel_size, self.stride)
        check_window(where, x, self.kernel_size, pads)
        return x, pads


class MaxPool(Pool):
    """Takes the largest entry of each window, over any number of spatial axes; see `MaxPool2d`."""

    @filled_in(Pool.__init__, -math.inf, lax.max)
    def __init__(self): ...


class AvgPool(Pool):
    """Takes the mean of each window, over any number of spatial axes; see `AvgPool2d`."""

    @filled_in(Pool.__init__, 0, lax.add)
    def __init__(self): ...

    @ignores_key
    @in_scope("pm.nn.AvgPool")
    def __call__(self, x: AnyArray, *, key: KeyLike | None = None) -> Shaped[Array, ...]:
        """Average the windows over the spatial axes of x; `key` is ignored."""
        del key
        x, pads = self._check(x)
        return avg_pool(x, self.kernel_size, stride=self.stride, padding=pads)


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

    @filled_in(MaxPool.__init__, 1)
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

    @filled_in(MaxPool.__init__, 2)
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

    @filled_in(MaxPool.__init__, 3)
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

    @filled_in(AvgPool.__init__, 1)
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

    @filled_in(AvgPool.__init__, 2)
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

    @filled_in(AvgPool.__init__, 3)
    def __init__(self): ...
