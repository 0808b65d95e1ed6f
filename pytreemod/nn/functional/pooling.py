"""Reductions over sliding windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Shaped

from pytreemod.module.field_kinds import check_sizes
from pytreemod.nn.functional.promotion import narrow, widen
from pytreemod.nn.functional.windows import check_padding, cover


def pool(
    x: Shaped[Array, ...],
    init: Any,
    operation: Callable[[Any, Any], Any],
    kernel_size: Sequence[int],
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | Sequence[tuple[int, int]] = 0,
    use_ceil: bool = False,
) -> Shaped[Array, ...]:
    r"""Reduce windows over the last axes of x with an operation of two arguments.

    $y_i = x_{s i} \circ x_{s i + 1} \circ \dots \circ x_{s i + k - 1}$, where x is padded with
    init, s is the stride and k the size of the window.

    Floats narrower than float32 are reduced in float32 and returned in the dtype of x. Integers
    are reduced in their own dtype, and their sums may overflow.

    Shapes:
        x: (..., *spatial), as many spatial axes as `kernel_size` has entries
        return: (..., *spatial_out)

    Args:
        x: input; every axis before the spatial ones is a batch axis.
        init: the operation's neutral element, also the padding. An infinity means the extreme
            value of the dtype of x.
        operation: an associative function such as `jax.lax.add`. Only JAX's own `add`, `max` and
            `min` can be differentiated.
        kernel_size: size of the window on each spatial axis.
        stride: step of the window, for all axes or for each.
        padding: an amount, one per axis, or (low, high) per axis.
        use_ceil: whether a last window that overhangs the input counts.

    Returns:
        One value for each window.

    Raises:
        ArgumentError: if an argument is malformed.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax import lax
        >>> from pytreemod import nn
        >>> nn.functional.pool(jnp.arange(6.0), 0.0, lax.add, (2,), stride=2)
        Array([1., 5., 9.], dtype=float32)

    Source:
        `use_ceil` as PyTorch's `ceil_mode`.
    """
    dims = len(kernel_size)
    window = check_sizes("pool(kernel_size)", kernel_size, dims, minimum=1)
    step = check_sizes("pool(stride)", stride, dims, minimum=1)
    pads = check_padding("pool(padding)", padding, dims, words=False)
    assert not isinstance(pads, str)
    if use_ceil:
        pads = cover(pads, x.shape[-dims:], window, step)
    # Along axes before the spatial ones each entry is a separate window.
    ones = (1,) * (x.ndim - dims)
    # A maximum needs no wider dtype, but its gradient is a sum if windows overlap.
    wide = widen(x)
    out = lax.reduce_window(
        wide,
        saturate(init, wide.dtype),
        operation,
        (*ones, *window),
        (*ones, *step),
        ((0, 0),) * (x.ndim - dims) + pads,
    )
    return out if wide is x else out.astype(x.dtype)


def saturate(value: Any, dtype: Any) -> Any:
    """Return `value` as a constant of `dtype`; an infinity becomes its extreme if it has none.

    Args:
        value: a number.
        dtype: an array's dtype.

    Returns:
        A NumPy scalar: JAX recognizes `max` with its neutral element only in a known constant.

    Examples:
        >>> import jax.numpy as jnp
        >>> int(saturate(-math.inf, jnp.int8)), float(saturate(-math.inf, jnp.float32))
        (-128, -inf)
    """
    if isinstance(value, float) and math.isinf(value) and not jnp.issubdtype(dtype, jnp.inexact):
        if jnp.issubdtype(dtype, jnp.bool_):
            return np.bool_(value > 0)
        # A maximum of integers starts with the least integer.
        limits = jnp.iinfo(dtype)
        value = limits.max if value > 0 else limits.min
    return np.asarray(value, dtype)[()]


def max_pool(
    x: Shaped[Array, ...],
    kernel_size: Sequence[int],
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | Sequence[tuple[int, int]] = 0,
    use_ceil: bool = False,
) -> Shaped[Array, ...]:
    r"""Take the largest entry of each window over the last axes of x.

    $y_i = \max_{0 \le j < k} x_{s i + j}$, where s is the stride and k the size of the window.

    Shapes:
        x: (..., *spatial), as many spatial axes as `kernel_size` has entries
        return: (..., *spatial_out)

    Args:
        x: input; every axis before the spatial ones is a batch axis.
        kernel_size: size of the window on each spatial axis.
        stride: step of the window, for all axes or for each.
        padding: an amount, one per axis, or (low, high) per axis; padding is never the maximum.
        use_ceil: whether a last window that overhangs the input counts.

    Returns:
        One value for each window.

    Raises:
        ArgumentError: if an argument is malformed.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.functional.max_pool(jnp.arange(6.0), (2,), stride=2)
        Array([1., 3., 5.], dtype=float32)

    Source:
        `torch.nn.functional.max_pool2d`, whose default stride is the kernel size.
    """
    return pool(
        x, -math.inf, lax.max, kernel_size, stride=stride, padding=padding, use_ceil=use_ceil
    )


def avg_pool(
    x: Shaped[Array, ...],
    kernel_size: Sequence[int],
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | Sequence[tuple[int, int]] = 0,
    use_ceil: bool = False,
) -> Shaped[Array, ...]:
    r"""Take the mean of each window over the last axes of x; padding counts as zeros.

    $y_i = \frac{1}{k} \sum_{j=0}^{k-1} x_{s i + j}$, where s is the stride and k the size of the
    window. Computes in float32 or wider and returns the dtype of x; the mean of integers is a
    float.

    Shapes:
        x: (..., *spatial), as many spatial axes as `kernel_size` has entries
        return: (..., *spatial_out)

    Args:
        x: input; every axis before the spatial ones is a batch axis.
        kernel_size: size of the window on each spatial axis.
        stride: step of the window, for all axes or for each.
        padding: an amount, one per axis, or (low, high) per axis.
        use_ceil: whether a last window that overhangs the input counts; its entries outside the
            input count as zeros.

    Returns:
        One value for each window.

    Raises:
        ArgumentError: if an argument is malformed.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.functional.avg_pool(jnp.arange(6.0), (2,), stride=2)
        Array([0.5, 2.5, 4.5], dtype=float32)

    Source:
        `torch.nn.functional.avg_pool2d` with `count_include_pad=True`. Unlike there, an overhanging
        window is divided by its full size, as in Equinox.
    """
    # Integers become floats before they are added: in int8 the sum of a window would overflow.
    wide = widen(x) if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.asarray(x, float)
    total = pool(wide, 0, lax.add, kernel_size, stride=stride, padding=padding, use_ceil=use_ceil)
    # Divided by the whole window, padding included, as in PyTorch by default, and in Equinox.
    return narrow(total / math.prod(kernel_size), x)
