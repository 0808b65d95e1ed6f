"""Pooling layers whose output has a given size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Shaped

from pytreemod.errors import ShapeError, describe
from pytreemod.module.field_kinds import check_size, check_sizes, sizes
from pytreemod.module.fields import field
from pytreemod.nn.arguments import (
    Title,
    check_array,
    check_channels,
    function,
    named,
    spatial_names,
)
from pytreemod.nn.calling import ignores_key, in_scope
from pytreemod.nn.dimensions import filled_in
from pytreemod.nn.functional.adaptive_windows import adaptive_pool
from pytreemod.nn.layer import Layer
from pytreemod.state.key_sources import KeyLike
from pytreemod.typing import AnyArray


class AdaptivePool(Layer):
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
        target_shape: size of the output's spatial axes, for all axes or for each, >= 1.
        num_spatial_dims: number of spatial axes, >= 1.
        operation: from an array of one axis to one number, such as `jax.numpy.mean`; applied axis
            after axis.

    State and randomness: none.

    Raises:
        ArgumentError: if an argument is not a size, or operation does not return a number.
        ShapeError: if x lacks an axis, or an axis is smaller than in target_shape.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.AdaptivePool(3, 1, jnp.max)(jnp.arange(7.0)[None]).tolist()
        [[2.0, 4.0, 6.0]]

    Source:
        `equinox.nn.AdaptivePool`.
    """

    target_shape: tuple[int, ...] = sizes(1, count="num_spatial_dims")
    operation: Callable[[Any], Any] = field(
        static=True,
        accepts=function(
            "a function", "Pass a function from an array to a number:", "operation=jnp.mean"
        ),
    )

    def __init__(
        self,
        target_shape: int | Sequence[int],
        num_spatial_dims: int,
        operation: Callable[[Any], Any],
    ):
        dims = check_size(named(self, "num_spatial_dims"), num_spatial_dims, 1)
        self.target_shape = check_sizes(named(self, "target_shape"), target_shape, dims, 1)
        self.operation = operation

    @property
    def num_spatial_dims(self) -> int:
        """The number of spatial axes."""
        return len(self.target_shape)

    @ignores_key
    @in_scope("pm.nn.AdaptivePool")
    def __call__(self, x: AnyArray, *, key: KeyLike | None = None) -> Shaped[Array, ...]:
        """Reduce the spatial axes of x; `key` is ignored."""
        del key
        where, dims = Title(self, "target_shape"), len(self.target_shape)
        x = check_array(where, x)
        check_channels(where, x, None, dims)
        sizes = x.shape[-dims:]
        if any(size < count for size, count in zip(sizes, self.target_shape, strict=True)):
            least = ", ".join(
                f"{name} >= {count}"
                for name, count in zip(spatial_names(dims), self.target_shape, strict=True)
            )
            raise ShapeError(where, f"x with {least}", describe(x))
        return adaptive_pool(x, self.target_shape, self.operation)


class _AdaptiveAvgPool(AdaptivePool):
    def __init__(self, num_spatial_dims: int, target_shape: int | Sequence[int]):
        super().__init__(target_shape, num_spatial_dims, jnp.mean)


class _AdaptiveMaxPool(AdaptivePool):
    def __init__(self, num_spatial_dims: int, target_shape: int | Sequence[int]):
        super().__init__(target_shape, num_spatial_dims, jnp.max)


class AdaptiveAvgPool1d(_AdaptiveAvgPool):
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

    @filled_in(_AdaptiveAvgPool.__init__, 1)
    def __init__(self): ...


class AdaptiveAvgPool2d(_AdaptiveAvgPool):
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

    @filled_in(_AdaptiveAvgPool.__init__, 2)
    def __init__(self): ...


class AdaptiveAvgPool3d(_AdaptiveAvgPool):
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

    @filled_in(_AdaptiveAvgPool.__init__, 3)
    def __init__(self): ...


class AdaptiveMaxPool1d(_AdaptiveMaxPool):
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

    @filled_in(_AdaptiveMaxPool.__init__, 1)
    def __init__(self): ...


class AdaptiveMaxPool2d(_AdaptiveMaxPool):
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

    @filled_in(_AdaptiveMaxPool.__init__, 2)
    def __init__(self): ...


class AdaptiveMaxPool3d(_AdaptiveMaxPool):
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

    @filled_in(_AdaptiveMaxPool.__init__, 3)
    def __init__(self): ...
