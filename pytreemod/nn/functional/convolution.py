"""Convolution over any number of spatial axes, channels first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from pytreemod.module.field_kinds import check_choice, check_sizes
from pytreemod.nn.functional.promotion import promote, with_shared
from pytreemod.nn.functional.windows import Padding, Pads, check_padding, extents, resolve_padding

PaddingMode: TypeAlias = Literal["ZEROS", "REFLECT", "REPLICATE", "CIRCULAR"]
"""What the padded positions hold."""

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
    d the dilation, and c goes over the channels of the group that o is in.

    The number of spatial axes is `weight.ndim - 2`.

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
        groups: number of groups into which the channels are divided.
        padding_mode: what is padded: `"ZEROS"`, `"REFLECT"`, `"REPLICATE"` or `"CIRCULAR"`.

    Returns:
        The convolved array.

    Raises:
        ArgumentError: stride, padding, dilation or padding_mode is malformed.
        TypeError: the channels disagree (raised by JAX).

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
    # JAX's convolution pads with zeros only.
    if mode != "ZEROS":
        x, pads = _pad(x, pads, mode), ((0, 0),) * dims
    y = _convolve(x, weight, stride, pads, dilation, groups)
    return with_shared(lax.add, y, bias, y.ndim - dims - 1)


def _pad(x: Array, pads: Pads, mode: str) -> Array:
    widths = ((0, 0),) * (x.ndim - len(pads)) + pads
    return jnp.pad(x, widths, mode=PADDING_MODES[mode])


def _convolve(
    x: Array,
    weight: Array,
    stride: tuple[int, ...],
    pads: Pads,
    dilation: tuple[int, ...],
    groups: int,
) -> Array:
    """JAX's convolution, which wants exactly one batch axis, with any number of them."""
    batch, image = x.shape[: 1 - weight.ndim], x.shape[1 - weight.ndim :]
    # With one batch axis the program has no reshape, as if it were written by hand.
    flat = x if len(batch) == 1 else x.reshape((math.prod(batch), *image))
    y = lax.conv_general_dilated(
        flat, weight, stride, pads, rhs_dilation=dilation, feature_group_count=groups
    )
    return y if len(batch) == 1 else y.reshape((*batch, *y.shape[1:]))
