"""Transposed convolution over any number of spatial axes, channels first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from pytreemod.errors import ArgumentError
from pytreemod.module.field_kinds import check_choice, check_sizes
from pytreemod.nn.functional.convolution import convolved
from pytreemod.nn.functional.promotion import promote, with_shared
from pytreemod.nn.functional.windows import Padding, Pads, check_padding, extents

TRANSPOSED_PADDING_MODES = ("ZEROS", "CIRCULAR")


def conv_transpose(
    x: Shaped[Array, ...],
    weight: Shaped[Array, ...],
    bias: Shaped[Array, ...] | None = None,
    *,
    stride: int | Sequence[int] = 1,
    padding: Padding = 0,
    output_padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    padding_mode: str = "ZEROS",
) -> Shaped[Array, ...]:
    r"""Spread every entry of x over a window of the output: what a convolution's gradient does.

    $y_{o, s i + d (K - 1 - k)} = b_o + \sum_{c,i,k} W_{o,c,k} \, x_{c,i}$, cut at both ends by the
    padding: the sum is over all i and k that lead there; s is the stride, d the dilation, and K the
    size of the kernel.

    It takes an array of the shape of a convolution's output to the shape of its input. The number
    of spatial axes is `weight.ndim - 2`. With a window of `extent = (kernel_size - 1) * dilation +
    1` an axis of n entries becomes one of

        (n - 1) * stride + extent - low - high + output_padding.

    Shapes:
        x: (..., in_channels, *spatial)
        weight: (out_channels, in_channels // groups, *kernel_size)
        bias: (out_channels,) or (out_channels, 1, ..., 1) or None
        return: (..., out_channels, *spatial_out)

    Args:
        x: input; every axis before the channels is a batch axis.
        weight: the kernels, as Equinox lays them out: the last tap is the first of PyTorch's.
        bias: added to each output channel.
        stride: distance in the output between the windows of neighbors, for all axes or for each.
        padding: of the convolution that this one transposes, so that it is cut off here: an
            amount, one per axis, (low, high) per axis, `"SAME"`, `"SAME_LOWER"` or `"VALID"`. With
            `"SAME"` n entries become `n * stride - output_padding`.
        output_padding: how much longer the output is at its end, as several sizes become the same
            under a convolution with strides; for all axes or for each, less than stride.
        dilation: distance between the kernel's taps, for all axes or for each.
        groups: number of groups into which the channels are divided.
        padding_mode: `"ZEROS"`; or `"CIRCULAR"`, which goes with `"SAME"` and `"SAME_LOWER"`: what
            is beyond one end of the output is added at the other.

    Returns:
        The output.

    Raises:
        ArgumentError: an argument is malformed, or does not go with the others.
        TypeError: the channels disagree (raised by JAX).

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> x, weight = jnp.array([[1.0, 10.0]]), jnp.array([[[1.0, 2.0, 3.0]]])
        >>> nn.functional.conv_transpose(x, weight, stride=2).tolist()
        [[3.0, 2.0, 31.0, 20.0, 10.0]]

    Source:
        Dumoulin & Visin 2016, https://arxiv.org/abs/1603.07285, chapter 4.
    """
    dims = weight.ndim - 2
    stride = check_sizes("conv_transpose(stride)", stride, dims, minimum=1)
    dilation = check_sizes("conv_transpose(dilation)", dilation, dims, minimum=1)
    more = check_output_padding("conv_transpose(output_padding)", output_padding, stride)
    pads = check_padding("conv_transpose(padding)", padding, dims, words=True)
    mode = check_transposed_mode("conv_transpose(padding_mode)", padding_mode, pads, more)

    x, weight, bias = promote(x, weight, bias)
    wraps = mode != "ZEROS"
    window = extents(weight.shape[2:], dilation)
    cuts = cut_for(pads, x.shape[-dims:], window, stride, more)
    if wraps:
        x, cuts = _wrap(x, cuts, window, stride)
    y = _spread(x, weight, cuts, stride, dilation, groups)
    return with_shared(lax.add, y, bias, y.ndim - dims - 1)


def check_output_padding(
    where: str, value: int | Sequence[int], stride: Sequence[int]
) -> tuple[int, ...]:
    """Accept what is less than the stride, for all axes or for each."""
    more = check_sizes(where, value, len(stride))
    if any(n >= step for n, step in zip(more, stride, strict=True)):
        hint = "A convolution takes sizes to the same one only if they differ by less than a step."
        expected = f"less than stride={tuple(stride)}"
        raise ArgumentError(where, expected, str(more), hint=hint)
    return more


def check_transposed_mode(where: str, mode: str, padding: str | Pads, more: Sequence[int]) -> str:
    """Accept a padding mode that goes with the padding."""
    mode = check_choice(where, mode, TRANSPOSED_PADDING_MODES)
    # Of an output of another size there is no saying which entries meet.
    fits = padding in ("SAME", "SAME_LOWER") and not any(more)
    if mode == "ZEROS" or fits:
        return mode
    expected = "'ZEROS', unless padding is 'SAME' or 'SAME_LOWER' and output_padding is 0"
    raise ArgumentError(where, expected, f"{mode!r} with padding={padding!r}")


class Cut(NamedTuple):
    """What is left, on one axis, of all that the windows reach.

    Attributes:
        low: how much is cut off at the beginning.
        size: how much is left; zeros where no window reaches.
    """

    low: int
    size: int


def cut_for(
    padding: str | Pads,
    spatial: Sequence[int],
    window: Sequence[int],
    stride: Sequence[int],
    more: Sequence[int],
) -> list[Cut]:
    """What is left of each axis, for a padding in words or in numbers.

    Args:
        padding: one of the words, or (low, high) for each axis.
        spatial: sizes of the input's spatial axes.
        window: extent of the window on each axis, dilation included.
        stride: distance between windows on each axis.
        more: how much longer the output is than it would be.

    Returns:
        One for each axis.

    Examples:
        >>> cut_for("SAME", (4,), (3,), (2,), (0,)), cut_for(((1, 0),), (4,), (3,), (2,), (1,))
        ([Cut(low=0, size=8)], [Cut(low=1, size=9)])
    """
    cuts: list[Cut] = []
    for i, (n, extent, step) in enumerate(zip(spatial, window, stride, strict=True)):
        reach = (n - 1) * step + extent
        if padding in ("SAME", "SAME_LOWER"):
            # Of the sizes that a convolution takes to n, the largest; or one of those below.
            size = n * step - more[i]
            beyond = max(reach - size, 0)
            # Where an odd entry goes is as in the convolution: its SAME pads more at the end.
            cuts.append(Cut(beyond // 2 if padding == "SAME" else -(-beyond // 2), size))
        else:
            low, high = (0, 0) if isinstance(padding, str) else padding[i]
            cuts.append(Cut(low, reach - low - high + more[i]))
    return cuts


def _wrap(
    x: Array, cuts: Sequence[Cut], window: Sequence[int], stride: Sequence[int]
) -> tuple[Array, list[Cut]]:
    """The input continued on both sides as far as it reaches into the output, and the new cuts."""
    widths = [(0, 0)] * (x.ndim - len(cuts))
    moved: list[Cut] = []
    for cut, extent, step in zip(cuts, window, stride, strict=True):
        # Rounded up: an entry too many reaches nothing that is left after the cut.
        before = max(-(-(extent - 1 - cut.low) // step), 0)
        after = (cut.low + step - 1) // step
        widths.append((before, after))
        moved.append(Cut(cut.low + before * step, cut.size))
    return jnp.pad(x, widths, mode="wrap"), moved


def _spread(
    x: Array,
    weight: Array,
    cuts: Sequence[Cut],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> Array:
    """A convolution over x with `stride - 1` zeros between its entries."""
    dims = len(cuts)
    window = extents(weight.shape[2:], dilation)
    pads: list[tuple[int, int]] = []
    for cut, n, extent, step in zip(cuts, x.shape[-dims:], window, stride, strict=True):
        low = extent - 1 - cut.low
        # Of `low + entries + high` positions, `extent - 1` are no beginning of a window.
        pads.append((low, cut.size + extent - 1 - low - ((n - 1) * step + 1)))
    # The stride is in the distance of the entries; the window moves one by one.
    return convolved(x, weight, (1,) * dims, pads, dilation, groups, spread=stride)
