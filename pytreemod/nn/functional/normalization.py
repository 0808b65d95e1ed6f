"""Normalization: subtract a mean, divide by a standard deviation, scale and shift.

All of it is computed in float32 or wider and returned in the dtype of the input.
"""

import math
from collections.abc import Hashable, Sequence
from typing import cast

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from pytreemod.nn.functional.promotion import computing_dtype, place


def layer_norm(
    x: Shaped[Array, "..."],
    shape: Sequence[int],
    weight: Shaped[Array, "..."] | None = None,
    bias: Shaped[Array, "..."] | None = None,
    *,
    eps: float = 1e-5,
) -> Shaped[Array, "..."]:
    r"""Normalize each trailing block of x: $(x - E[x]) / \sqrt{Var[x] + eps} \cdot w + b$.

    Shapes:
        x: (..., *shape)
        weight: shape or None
        bias: shape or None
        return: (..., *shape)

    Args:
        x: input; every axis before `shape` is a batch axis.
        shape: the trailing axes over which mean and (biased) variance are taken.
        weight: elementwise factor.
        bias: elementwise summand.
        eps: added to the variance.

    Returns:
        An array of x's shape; of its dtype too where that is inexact.

    Raises:
        ArgumentError: x is complex.
        TypeError: weight or bias does not fit (raised by JAX).

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.functional.layer_norm(jnp.array([1.0, 3.0]), (2,), eps=0.0)
        Array([-1.,  1.], dtype=float32)

    Source:
        Ba, Kiros & Hinton 2016, https://arxiv.org/abs/1607.06450, eq. (4).
    """
    first = x.ndim - len(shape)
    axes = tuple(range(first, x.ndim))
    wide = x.astype(computing_dtype(x.dtype))
    mean = jnp.mean(wide, axes, keepdims=True)
    centered = wide - mean
    var = jnp.mean(jnp.square(centered), axes, keepdims=True)
    out = centered * lax.rsqrt(var + eps)
    return _narrow(_scale_and_shift(out, weight, bias, first), x)


def batch_statistics(
    x: Shaped[Array, "..."], *, channel_axis: int, axis_name: Sequence[Hashable] = ()
) -> tuple[Shaped[Array, " channels"], Shaped[Array, " channels"], int]:
    """Mean and biased variance of each channel, over every other axis and the mapped ones.

    Shapes:
        x: any, channels at `channel_axis`
        return: ((channels,), (channels,), int)

    Args:
        x: input.
        channel_axis: the axis that is kept, counted from the front.
        axis_name: names of axes mapped by `jax.vmap` (or `shard_map`) to reduce over as well.

    Returns:
        The means, the variances, and how many entries went into each.

    Raises:
        ArgumentError: x is complex.
        NameError: an axis of `axis_name` is not bound (raised by JAX).

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> x = jnp.array([[1.0], [3.0]])
        >>> nn.functional.batch_statistics(x, channel_axis=1)
        (Array([2.], dtype=float32), Array([1.], dtype=float32), 2)

    Source:
        Ioffe & Szegedy 2015, https://arxiv.org/abs/1502.03167, algorithm 1.
    """
    axes = tuple(axis for axis in range(x.ndim) if axis != channel_axis)
    names = tuple(axis_name)
    count = math.prod(x.shape[axis] for axis in axes)
    wide = x.astype(computing_dtype(x.dtype))
    mean = jnp.mean(wide, axes)
    if names:
        mapped = cast("int", lax.psum(1, names))
        count *= mapped
        mean = lax.pmean(mean, names)
    # Centered before squaring: E[x^2] - E[x]^2 cancels badly, and may come out negative.
    var = jnp.mean(jnp.square(wide - place(mean, wide, channel_axis)), axes)
    return mean, lax.pmean(var, names) if names else var, count


def batch_norm(
    x: Shaped[Array, "..."],
    mean: Shaped[Array, " channels"],
    var: Shaped[Array, " channels"],
    weight: Shaped[Array, " channels"] | None = None,
    bias: Shaped[Array, " channels"] | None = None,
    *,
    channel_axis: int = 1,
    eps: float = 1e-5,
) -> Shaped[Array, "..."]:
    r"""Normalize each channel by given statistics: $(x - mean) / \sqrt{var + eps} \cdot w + b$.

    Shapes:
        x: any, channels at `channel_axis`
        mean, var, weight, bias: (channels,)
        return: the shape of x

    Args:
        x: input.
        mean: what to subtract, see `batch_statistics`.
        var: variance to divide out.
        weight: factor for each channel.
        bias: summand for each channel.
        channel_axis: the axis of the channels, counted from the front.
        eps: added to the variance.

    Returns:
        An array of x's shape; of its dtype too where that is inexact.

    Raises:
        ArgumentError: x is complex.
        TypeError: an argument does not fit the channels (raised by JAX).

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> x = jnp.array([[1.0], [3.0]])
        >>> nn.functional.batch_norm(x, jnp.array([2.0]), jnp.array([1.0]), eps=0.0).tolist()
        [[-1.0], [1.0]]

    Source:
        Ioffe & Szegedy 2015, https://arxiv.org/abs/1502.03167, algorithm 1.
    """
    wide = x.astype(computing_dtype(x.dtype))
    scale = lax.rsqrt(var.astype(wide.dtype) + eps)
    # One factor for each channel: the weight costs no pass over the whole array.
    scale = scale if weight is None else scale * weight.astype(wide.dtype)
    centered = wide - place(mean, wide, channel_axis)
    out = centered * place(scale, wide, channel_axis)
    return _narrow(_scale_and_shift(out, None, bias, channel_axis), x)


def update_running(
    running: Float[Array, " channels"], new: Shaped[Array, " channels"], momentum: float
) -> Float[Array, " channels"]:
    """Move a running average a step: `momentum * running + (1 - momentum) * new`.

    Shapes:
        running, new, return: (channels,)

    Args:
        running: the average so far.
        new: the latest value; no gradient flows through it.
        momentum: how much of the old average stays (one minus PyTorch's `momentum`).

    Returns:
        The new average, in the dtype of `running`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.functional.update_running(jnp.array([1.0]), jnp.array([3.0]), 0.5)
        Array([2.], dtype=float32)
    """
    return momentum * running + (1 - momentum) * lax.stop_gradient(new).astype(running.dtype)


def _scale_and_shift(out: Array, weight: Array | None, bias: Array | None, axis: int) -> Array:
    out = out if weight is None else out * place(weight, out, axis)
    return out if bias is None else out + place(bias, out, axis)


def _narrow(out: Array, x: Array) -> Array:
    return out.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else out
