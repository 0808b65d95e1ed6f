"""Normalization: subtract a mean, divide by a standard deviation, scale and shift.

Computes in float32 or wider and returns the dtype of the input.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Shaped

from pytreemod.nn.functional.explicit_meshes import resharded, sharded_like
from pytreemod.nn.functional.inlining import as_arrays, traced_once
from pytreemod.nn.functional.promotion import computing_dtype, narrow, place
from pytreemod.tree.split_arrays import explicit_mesh
from pytreemod.typing import TracedNumber


@traced_once("shape")
def layer_norm(
    x: Shaped[Array, ...],
    shape: Sequence[int],
    weight: Shaped[Array, ...] | None = None,
    bias: Shaped[Array, ...] | None = None,
    *,
    eps: TracedNumber = 1e-5,
) -> Shaped[Array, ...]:
    r"""Normalize each trailing block of x: $(x - E[x]) / \sqrt{Var[x] + eps} \cdot w + b$.

    Shapes:
        x: (..., *shape)
        weight: shape or None
        bias: shape or None
        return: (..., *shape)

    Args:
        x: input; every axis before `shape` is a batch axis.
        shape: the trailing axes over which mean and (biased) variance are taken.
        weight: factor for each entry.
        bias: summand for each entry.
        eps: added to the variance.

    Returns:
        An array of the shape of x, and of its dtype if that is inexact.

    Raises:
        ArgumentError: if x is complex.
        TypeError: if weight or bias does not fit (raised by JAX).

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.functional.layer_norm(jnp.array([1.0, 3.0]), (2,), eps=0.0)
        Array([-1.,  1.], dtype=float32)

    Source:
        Ba, Kiros & Hinton 2016, https://arxiv.org/abs/1607.06450, eq. (4).
    """
    first = x.ndim - len(shape)
    out = _standardize(x.astype(computing_dtype(x.dtype)), first, eps)
    return narrow(_scale_and_shift(out, weight, bias, first), x)


def _standardize(wide: Array, first: int, eps: TracedNumber) -> Array:
    """Standardize to mean zero and variance one over the axes from `first` on."""
    axes = tuple(range(first, wide.ndim))
    # Centered before squaring, as in `_moments`.
    mean = jnp.mean(wide, axes, keepdims=True)
    centered = wide - mean
    var = jnp.mean(_square(centered), axes, keepdims=True)
    return centered * lax.rsqrt(var + eps)


@jax.custom_jvp
def _square(x: Array) -> Array:
    """`jnp.square`, for which JAX would store not x, but a second array: 2 * x."""
    return jnp.square(x)


@_square.defjvp
def _derivative_of_square(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (tangent,) = primals, tangents
    return jnp.square(x), 2 * (x * tangent)


@traced_once("shape")
def rms_norm(
    x: Shaped[Array, ...],
    shape: Sequence[int],
    weight: Shaped[Array, ...] | None = None,
    bias: Shaped[Array, ...] | None = None,
    *,
    eps: TracedNumber = 1e-5,
) -> Shaped[Array, ...]:
    r"""Divide each block of x by its root mean square: $x / \sqrt{E[x^2] + eps} \cdot w + b$.

    Shapes:
        x: (..., *shape)
        weight: shape or None
        bias: shape or None
        return: (..., *shape)

    Args:
        x: input; every axis before `shape` is a batch axis.
        shape: the trailing axes over which the mean of the squares is taken.
        weight: factor for each entry.
        bias: summand for each entry.
        eps: added to the mean of the squares.

    Returns:
        An array of the shape of x, and of its dtype if that is inexact.

    Raises:
        ArgumentError: if x is complex.
        TypeError: if weight or bias does not fit (raised by JAX).

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.functional.rms_norm(jnp.array([-2.0, 2.0]), (2,), eps=0.0).tolist()
        [-1.0, 1.0]

    Source:
        Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467, eq. (4).
    """
    first = x.ndim - len(shape)
    wide = x.astype(computing_dtype(x.dtype))
    mean = jnp.mean(_square(wide), tuple(range(first, x.ndim)), keepdims=True)
    return narrow(_scale_and_shift(wide * lax.rsqrt(mean + eps), weight, bias, first), x)


@traced_once("groups", "channel_axis")
def group_norm(
    x: Shaped[Array, ...],
    groups: int,
    weight: Shaped[Array, " channels"] | None = None,
    bias: Shaped[Array, " channels"] | None = None,
    *,
    channel_axis: int = 0,
    eps: TracedNumber = 1e-5,
) -> Shaped[Array, ...]:
    r"""Normalize each group of channels of x: $(x - E[x]) / \sqrt{Var[x] + eps} \cdot w + b$.

    Shapes:
        x: (..., channels, *spatial)
        weight, bias: (channels,) or None
        return: (..., channels, *spatial)

    Args:
        x: input; every axis before that of the channels is a batch axis.
        groups: number of groups of adjacent channels; mean and (biased) variance are taken over
            the channels of a group and all axes after the channels.
        weight: factor for each channel.
        bias: summand for each channel.
        channel_axis: the axis of the channels, counted from the front.
        eps: added to the variance.

    Returns:
        An array of the shape of x, and of its dtype if that is inexact.

    Raises:
        ArgumentError: if x is complex.
        TypeError: if groups do not divide the channels, or weight or bias does not fit (raised by
            JAX).

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> x = jnp.array([[1.0], [3.0], [5.0], [9.0]])
        >>> nn.functional.group_norm(x, 2, eps=0.0)[:, 0]
        Array([-1.,  1., -1.,  1.], dtype=float32)

    Source:
        Wu & He 2018, https://arxiv.org/abs/1803.08494, eq. (7).
    """
    batch, (channels, *spatial) = x.shape[:channel_axis], x.shape[channel_axis:]
    wide = x.astype(computing_dtype(x.dtype))
    # The group becomes an axis; the axes after it are averaged over, as in a LayerNorm.
    grouped = wide.reshape(*batch, groups, channels // groups, *spatial)
    out = _standardize(grouped, channel_axis + 1, eps).reshape(x.shape)
    return narrow(_scale_and_shift(out, weight, bias, channel_axis), x)


@traced_once("channel_axis")
def instance_norm(
    x: Shaped[Array, ...],
    weight: Shaped[Array, " channels"] | None = None,
    bias: Shaped[Array, " channels"] | None = None,
    *,
    channel_axis: int = 0,
    eps: TracedNumber = 1e-5,
) -> Shaped[Array, ...]:
    r"""Normalize each channel of each example: $(x - E[x]) / \sqrt{Var[x] + eps} \cdot w + b$.

    Shapes:
        x: (..., channels, *spatial)
        weight, bias: (channels,) or None
        return: (..., channels, *spatial)

    Args:
        x: input; every axis before that of the channels is a batch axis. Mean and (biased) variance
            are taken over all axes after it.
        weight: factor for each channel.
        bias: summand for each channel.
        channel_axis: the axis of the channels, counted from the front.
        eps: added to the variance.

    Returns:
        An array of the shape of x, and of its dtype if that is inexact.

    Raises:
        ArgumentError: if x is complex.
        TypeError: if weight or bias does not fit (raised by JAX).

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.functional.instance_norm(jnp.array([[1.0, 3.0], [9.0, 5.0]]), eps=0.0).tolist()
        [[-1.0, 1.0], [1.0, -1.0]]

    Source:
        Ulyanov, Vedaldi & Lempitsky 2016, https://arxiv.org/abs/1607.08022, eq. (4).
    """
    out = _standardize(x.astype(computing_dtype(x.dtype)), channel_axis + 1, eps)
    return narrow(_scale_and_shift(out, weight, bias, channel_axis), x)


def batch_statistics(
    x: Shaped[Array, ...], *, channel_axis: int, axis_name: Sequence[Hashable] = ()
) -> tuple[Shaped[Array, " channels"], Shaped[Array, " channels"], int]:
    """Compute mean and biased variance of each channel, over every other axis and mapped axes.

    $E[x]$ and $E[(x - E[x])^2]$.

    Shapes:
        x: any, channels at `channel_axis`
        return: ((channels,), (channels,), int)

    Args:
        x: input.
        channel_axis: the axis of the channels, counted from the front.
        axis_name: names of axes mapped by `jax.vmap` (or `shard_map`) to reduce over, too.

    Returns:
        The means, the variances, and the number of entries of each channel.

    Raises:
        ArgumentError: if x is complex.
        NameError: if an axis of `axis_name` is not bound (raised by JAX).

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> x = jnp.array([[1.0], [3.0]])
        >>> nn.functional.batch_statistics(x, channel_axis=1)
        (Array([2.], dtype=float32), Array([1.], dtype=float32), 2)

    Source:
        Ioffe & Szegedy 2015, https://arxiv.org/abs/1502.03167, algorithm 1.
    """
    names = tuple(axis_name)
    count = _count(x, channel_axis, names)
    mean, var, _ = _moments(*as_arrays(x), channel_axis=channel_axis, names=names)
    return mean, var, count


def _count(x: Array, channel_axis: int, names: tuple[Hashable, ...]) -> int:
    """Return the number of entries of each channel."""
    count = math.prod(size for axis, size in enumerate(x.shape) if axis != channel_axis)
    # psum of a Python number is one, too: the size of a mapped axis is known while tracing.
    return count * cast("int", lax.psum(1, names)) if names else count


@traced_once("channel_axis", "names")
def _moments(
    x: Array, *, channel_axis: int, names: tuple[Hashable, ...]
) -> tuple[Array, Array, Array]:
    """Return mean and biased variance of each channel, and x without its mean."""
    axes = tuple(axis for axis in range(x.ndim) if axis != channel_axis)
    wide = x.astype(computing_dtype(x.dtype))
    mean = _mean_over(names, jnp.mean(wide, axes))
    # Centered before squaring: E[x^2] - E[x]^2 cancels badly, and may be negative.
    centered = wide - place(mean, wide, channel_axis)
    var = _mean_over(names, jnp.mean(_square(centered), axes))
    return mean, var, centered


def _mean_over(names: tuple[Hashable, ...], value: Array) -> Array:
    """Average over mapped axes of these names."""
    # All parts of a mapped axis have equally many entries: the mean of their means is the mean.
    if not names:
        return value
    # JAX cannot average over the axis of a `vmap` if the value is split over another mesh axis.
    mesh = explicit_mesh(value)
    return lax.pmean(value if mesh is None else resharded(value, mesh, ((),) * value.ndim), names)


@traced_once("channel_axis")
def batch_norm(
    x: Shaped[Array, ...],
    mean: Shaped[Array, " channels"],
    var: Shaped[Array, " channels"],
    weight: Shaped[Array, " channels"] | None = None,
    bias: Shaped[Array, " channels"] | None = None,
    *,
    channel_axis: int = 1,
    eps: TracedNumber = 1e-5,
) -> Shaped[Array, ...]:
    r"""Normalize each channel by given statistics: $(x - mean) / \sqrt{var + eps} \cdot w + b$.

    Shapes:
        x: any, channels at `channel_axis`
        mean, var, weight, bias: (channels,)
        return: the shape of x

    Args:
        x: input.
        mean: subtracted from x, see `batch_statistics`.
        var: the variance to divide by.
        weight: factor for each channel.
        bias: summand for each channel.
        channel_axis: the axis of the channels, counted from the front.
        eps: added to the variance.

    Returns:
        An array of the shape of x, and of its dtype if that is inexact.

    Raises:
        ArgumentError: if x is complex.
        TypeError: if an argument does not fit the channels (raised by JAX).

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
    centered = wide - place(mean, wide, channel_axis)
    return narrow(_rescale(centered, var, weight, bias, eps, channel_axis), x)


def _rescale(
    centered: Array,
    var: Array,
    weight: Array | None,
    bias: Array | None,
    eps: TracedNumber,
    channel_axis: int,
) -> Array:
    scale = lax.rsqrt(var.astype(centered.dtype) + eps)
    # One factor for each channel, so that the weight needs no pass over the whole array.
    scale = scale if weight is None else scale * weight.astype(centered.dtype)
    out = centered * place(scale, centered, channel_axis)
    return _scale_and_shift(out, None, bias, channel_axis)


def normalize_batch(
    x: Shaped[Array, ...],
    weight: Shaped[Array, " channels"] | None = None,
    bias: Shaped[Array, " channels"] | None = None,
    *,
    channel_axis: int = 1,
    axis_name: Sequence[Hashable] = (),
    eps: int | float = 1e-5,
) -> tuple[Shaped[Array, ...], Shaped[Array, " channels"], Shaped[Array, " channels"], int]:
    r"""Normalize each channel by the statistics of the batch itself, as in training.

    $(x - E[x]) / \sqrt{Var[x] + eps} \cdot w + b$.

    The same as `batch_statistics` and `batch_norm`. But the mean is subtracted only once, so that
    the gradient takes one reduction less.

    Shapes:
        x: any, channels at `channel_axis`
        weight, bias: (channels,)
        return: (the shape of x, (channels,), (channels,), int)

    Args:
        x: input.
        weight: factor for each channel.
        bias: summand for each channel.
        channel_axis: the axis of the channels, counted from the front.
        axis_name: names of axes mapped by `jax.vmap` (or `shard_map`) to reduce over, too.
        eps: added to the variance.

    Returns:
        The normalized array, the means, the biased variances, and the number of entries of each
        channel.

    Raises:
        ArgumentError: if x is complex.
        NameError: if an axis of `axis_name` is not bound (raised by JAX).
        TypeError: if an argument does not fit the channels (raised by JAX).

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> x = jnp.array([[1.0], [3.0]])
        >>> out, mean, var, count = nn.functional.normalize_batch(x, eps=0.0)
        >>> out.tolist(), mean, var, count
        ([[-1.0], [1.0]], Array([2.], dtype=float32), Array([1.], dtype=float32), 2)

    Source:
        Ioffe & Szegedy 2015, https://arxiv.org/abs/1502.03167, algorithm 1.
    """
    names = tuple(axis_name)
    count = _count(x, channel_axis, names)
    out, mean, var = _normalize_batch(
        *as_arrays(x, weight, bias), eps=eps, channel_axis=channel_axis, names=names
    )
    return out, mean, var, count


@traced_once("channel_axis", "names")
def _normalize_batch(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    *,
    eps: TracedNumber,
    channel_axis: int,
    names: tuple[Hashable, ...],
) -> tuple[Array, Array, Array]:
    mean, var, centered = _moments(x, channel_axis=channel_axis, names=names)
    out = _rescale(centered, var, weight, bias, eps, channel_axis)
    return narrow(out, x), mean, var


def update_running(
    running: Float[Array, " channels"], new: Shaped[Array, " channels"], momentum: int | float
) -> Float[Array, " channels"]:
    r"""Move a running average a step: $momentum \cdot running + (1 - momentum) \cdot new$.

    Shapes:
        running, new, return: (channels,)

    Args:
        running: the average so far.
        new: the latest value; no gradient flows through it.
        momentum: fraction of the old average that remains (one minus PyTorch's `momentum`).

    Returns:
        The new average, in the dtype of `running`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.functional.update_running(jnp.array([1.0]), jnp.array([3.0]), 0.5)
        Array([2.], dtype=float32)
    """
    given = as_arrays(running, new)
    return _average(*given, old_share=momentum, new_share=1 - momentum)


def moving_average(
    running: Float[Array, " channels"],
    new: Shaped[Array, " channels"],
    momentum: int | float,
    *,
    is_first: Bool[Array, ""] | bool,
) -> Float[Array, " channels"]:
    r"""`update_running` for an average that starts with its first value, and passes gradients on.

    $momentum \cdot running + (1 - momentum) \cdot new$, and at first $new$.

    Shapes:
        running, new, return: (channels,)

    Args:
        running: the average so far.
        new: the latest value.
        momentum: fraction of the old average that remains.
        is_first: whether there is no average yet; then the result is `new`.

    Returns:
        The new average, in the dtype of `running`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> old, new = jnp.array([1.0]), jnp.array([3.0])
        >>> nn.functional.moving_average(old, new, 0.5, is_first=True)
        Array([3.], dtype=float32)
        >>> nn.functional.moving_average(old, new, 0.5, is_first=False)
        Array([2.], dtype=float32)
    """
    running, new = as_arrays(running, new)
    new = sharded_like(new, running, 0)
    # A value in State cannot change its dtype.
    new = new.astype(running.dtype)
    # Does not start from zeros, which every later call would have to correct for.
    return jnp.where(is_first, new, momentum * running + (1 - momentum) * new)


@traced_once()
def _average(
    running: Array, new: Array, *, old_share: TracedNumber, new_share: TracedNumber
) -> Array:
    # On a mesh the average keeps its sharding, or a second call would have other types.
    new = sharded_like(new, running, 0)
    # A gradient through a stored value would flow from one step into the next.
    return old_share * running + new_share * lax.stop_gradient(new).astype(running.dtype)


def _scale_and_shift(out: Array, weight: Array | None, bias: Array | None, axis: int) -> Array:
    out = out if weight is None else out * place(weight, out, axis)
    return out if bias is None else out + place(bias, out, axis)
