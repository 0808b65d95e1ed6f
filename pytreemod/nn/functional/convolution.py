"""Convolution over any number of spatial axes, channels first."""

from __future__ import annotations

import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from pytreemod.module.field_kinds import check_choice, check_sizes
from pytreemod.nn.functional.explicit_meshes import entries, factors, resharded, sharding
from pytreemod.nn.functional.promotion import promote, with_shared
from pytreemod.nn.functional.windows import Padding, Pads, check_padding, extents, resolve_padding
from pytreemod.tree.split_arrays import explicit_mesh

PaddingMode: TypeAlias = Literal["ZEROS", "REFLECT", "REPLICATE", "CIRCULAR"]
"""The kinds of values that padded positions have."""

PADDING_MODES = {"ZEROS": "constant", "REFLECT": "reflect", "REPLICATE": "edge", "CIRCULAR": "wrap"}


def conv(
    x: Shaped[Array, ...],
    weight: Shaped[Array, ...],
    bias: Shaped[Array, ...] | None = None,
    *,
    stride: int | Sequence[int] = 1,
    padding: Padding = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    padding_mode: str = "ZEROS",
) -> Shaped[Array, ...]:
    r"""Convolve x with weight (cross-correlation, as everywhere in deep learning).

    $y_{o,i} = b_o + \sum_{c,k} W_{o,c,k} \, x_{c, s i + d k}$, where x is padded, s is the stride,
    d the dilation, and c runs over the channels in the group of o. The number of spatial axes is
    `weight.ndim - 2`.

    Shapes:
        x: (..., in_channels, *spatial)
        weight: (out_channels, in_channels // groups, *kernel_size)
        bias: (out_channels,) or (out_channels, 1, ..., 1) or None
        return: (..., out_channels, *spatial_out)

    Args:
        x: input; every axis before the channels is a batch axis.
        weight: the kernels.
        bias: added to each output channel.
        stride: step of the kernel, for all axes or for each.
        padding: an amount, one per axis, (low, high) per axis, `"SAME"`, `"SAME_LOWER"` or
            `"VALID"`.
        dilation: distance between the kernel's taps, for all axes or for each.
        groups: number of groups of channels.
        padding_mode: the values of the padding: `"ZEROS"`, `"REFLECT"`, `"REPLICATE"` or
            `"CIRCULAR"`.

    Returns:
        The convolved array.

    Raises:
        ArgumentError: if stride, padding, dilation or padding_mode is malformed.
        TypeError: if the channels disagree (raised by JAX).

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.functional.conv(jnp.ones((7, 2, 8, 8)), jnp.ones((4, 2, 3, 3)), padding="SAME").shape
        (7, 4, 8, 8)

    Source:
        The layout of `torch.nn.functional.conv2d`.
    """
    dims = weight.ndim - 2
    stride = check_sizes("conv(stride)", stride, dims, minimum=1)
    dilation = check_sizes("conv(dilation)", dilation, dims, minimum=1)
    named = check_padding("conv(padding)", padding, dims, words=True)
    mode = check_choice("conv(padding_mode)", padding_mode, tuple(PADDING_MODES))

    x, weight, bias = promote(x, weight, bias)
    pads = resolve_padding(named, x.shape[-dims:], extents(weight.shape[2:], dilation), stride)
    # JAX's convolution pads only with zeros.
    if mode != "ZEROS":
        x, pads = _pad(x, pads, mode), ((0, 0),) * dims
    y = convolved(x, weight, stride, pads, dilation, groups)
    return with_shared(lax.add, y, bias, y.ndim - dims - 1)


def _pad(x: Array, pads: Pads, mode: str) -> Array:
    widths = ((0, 0),) * (x.ndim - len(pads)) + pads
    return jnp.pad(x, widths, mode=PADDING_MODES[mode])


def convolved(
    x: Shaped[Array, ...],
    weight: Shaped[Array, ...],
    stride: tuple[int, ...],
    pads: Sequence[tuple[int, int]],
    dilation: tuple[int, ...],
    groups: int,
    *,
    spread: tuple[int, ...] | None = None,
) -> Shaped[Array, ...]:
    """Call JAX's convolution, which requires one batch axis, with any number of them.

    Args:
        x: (..., in_channels, *spatial)
        weight: (out_channels, in_channels // groups, *kernel_size)
        stride: step of the kernel on each axis.
        pads: (low, high) for each axis.
        dilation: distance between the kernel's taps on each axis.
        groups: number of groups of channels.
        spread: distance to which the entries of x are moved apart, on each axis.

    Returns:
        (..., out_channels, *spatial_out)

    Examples:
        >>> convolved(jnp.ones((1, 3)), jnp.ones((4, 1, 2)), (1,), ((0, 0),), (1,), 1).shape
        (4, 2)
    """
    batch, image = x.shape[: 1 - weight.ndim], x.shape[1 - weight.ndim :]
    apply = ft.partial(
        lax.conv_general_dilated,
        window_strides=stride,
        padding=pads,
        lhs_dilation=spread,
        rhs_dilation=dilation,
        feature_group_count=groups,
    )
    mesh = explicit_mesh(x, weight)
    if mesh is not None:
        return _on_mesh(mesh, x, weight, groups > 1, apply)
    if len(batch) == 1:
        # With one batch axis the program has no reshape, as if it were written by hand.
        return apply(x, weight)
    y = apply(x.reshape((math.prod(batch), *image)), weight)
    return y.reshape((*batch, *y.shape[1:]))


# ---- on a mesh with explicit axes


def _on_mesh(
    mesh: Any, x: Array, weight: Array, grouped: bool, apply: Callable[..., Array]
) -> Array:
    """Convolve in parts: each device has its part of the batch, and of the channels."""
    n = x.ndim - weight.ndim + 1
    batch, split = x.shape[:n], entries(x)
    # Split batch axes come first, so that merged entries stay on their device.
    order = sorted(range(n), key=lambda axis: not split[axis])
    merged = tuple(name for axis in order for name in split[axis])
    flat = lax.reshape(
        lax.transpose(x, (*order, *range(n, x.ndim))),
        (math.prod(batch), *x.shape[n:]),
        out_sharding=sharding(mesh, (merged, *split[n:])),
    )
    y = (_grouped if grouped else _whole)(mesh, flat, weight, apply)
    y = lax.reshape(
        y,
        (*(batch[axis] for axis in order), *y.shape[1:]),
        out_sharding=sharding(mesh, (*(split[axis] for axis in order), *entries(y)[1:])),
    )
    return lax.transpose(y, (*map(order.index, range(n)), *range(n, y.ndim)))


def _whole(mesh: Any, x: Array, weight: Array, apply: Callable[..., Array]) -> Array:
    """Convolve one group of channels: sums over channels and taps; taps are never split."""
    spatial = range(2, x.ndim)
    taps = [f"tap {axis}" for axis in spatial]
    weight = resharded(weight, mesh, (*entries(weight)[:2], *((),) * len(taps)))
    terms = (("batch", "in", *spatial), ("out", "in", *taps), ("batch", "out", *spatial))
    x, weight, _ = factors(x, weight, terms)
    split = (entries(x)[0], entries(weight)[0], *entries(x)[2:])
    sizes = jax.eval_shape(apply, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, weight)))
    # The number of windows need not be divisible by the number of devices.
    pairs = zip(sizes.shape, split, strict=True)
    to = [names if size % _parts(mesh, names) == 0 else () for size, names in pairs]
    return apply(x, weight, out_sharding=sharding(mesh, to))


def _grouped(mesh: Any, x: Array, weight: Array, apply: Callable[..., Array]) -> Array:
    """Convolve several groups of channels: each device its own groups, and its part of the batch.

    This uses `shard_map` because XLA's gradient of the weight is wrong if a batch is split and the
    mesh has another axis: it is multiplied by the size of that axis (in JAX 0.10 and 0.12).
    """
    groups = x.shape[1] // weight.shape[1]
    batch, channels = entries(x)[:2]
    free = tuple(name for name in entries(weight)[0] if name not in batch)
    channels = channels or free
    channels = channels if groups % _parts(mesh, channels) == 0 else ()
    rest = ((),) * (x.ndim - 2)
    x = resharded(x, mesh, (batch, channels, *rest))
    weight = resharded(weight, mesh, (channels, (), *rest))
    local = ft.partial(apply, feature_group_count=groups // _parts(mesh, channels))
    specs = [sharding(mesh, entries(array)).spec for array in (x, weight)]
    return jax.shard_map(local, mesh=mesh, in_specs=tuple(specs), out_specs=specs[0])(x, weight)


def _parts(mesh: Any, names: tuple[str, ...]) -> int:
    """Return the number of parts into which these mesh axes split."""
    return math.prod(mesh.shape[name] for name in names)
