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
    r"""Add every entry of x to a window of the output, like the gradient of a convolution.

    $y_{o, s i + d (K - 1 - k)} = b_o + \sum_{c,i,k} W_{o,c,k} \, x_{c,i}$, with both ends cut by
    the padding. The sum is over all i and k that lead to that entry; s is the stride, d the
    dilation, and K the size of the kernel.

    Maps the output shape of a convolution back to its input shape. The number of spatial axes is
    `weight.ndim - 2`. With a window of `extent = (kernel_size - 1) * dilation + 1`, an axis of n
    entries becomes one of

        (n - 1) * stride + extent - low - high + output_padding.

    Shapes:
        x: (..., in_channels, *spatial)
        weight: (out_channels, in_channels // groups, *kernel_size)
        bias: (out_channels,) or (out_channels, 1, ..., 1) or None
        return: (..., out_channels, *spatial_out)

    Args:
        x: input; every axis before the channels is a batch axis.
        weight: the kernels, in Equinox's layout: the last tap is the first of PyTorch's.
        bias: added to each output channel.
        stride: distance in the output between adjacent windows, for all axes or for each.
        padding: the padding of the convolution that this one transposes, which is cut off here: an
            amount, one per axis, (low, high) per axis, `"SAME"`, `"SAME_LOWER"` or `"VALID"`. With
            `"SAME"`, n entries become `n * stride - output_padding`.
        output_padding: how many entries to add at the end of the output, because a strided
            convolution maps several sizes to one; for all axes or for each, less than stride.
        dilation: distance between the kernel's taps, for all axes or for each.
        groups: number of groups of channels.
        padding_mode: `"ZEROS"`; or `"CIRCULAR"`, with `"SAME"` or `"SAME_LOWER"`: entries beyond
            one end of the output are added at the other end.

    Returns:
        The output.

    Raises:
        ArgumentError: if an argument is malformed, or does not fit the others.
        TypeError: if the channels disagree (raised by JAX).

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
    """Accept amounts that are less than the stride, for all axes or for each."""
    more = check_sizes(where, value, len(stride))
    if any(n >= step for n, step in zip(more, stride, strict=True)):
        hint = "Sizes that a convolution maps to the same size differ by less than stride."
        expected = f"less than stride={tuple(stride)}"
        raise ArgumentError(where, expected, str(more), hint=hint)
    return more


def check_transposed_mode(where: str, mode: str, padding: str | Pads, more: Sequence[int]) -> str:
    """Accept a padding mode that the padding supports."""
    mode = check_choice(where, mode, TRANSPOSED_PADDING_MODES)
    # In an output of another size it is not defined which entries meet.
    fits = padding in ("SAME", "SAME_LOWER") and not any(more)
    if mode == "ZEROS" or fits:
        return mode
    expected = "'ZEROS', unless padding is 'SAME' or 'SAME_LOWER' and output_padding is 0"
    raise ArgumentError(where, expected, f"{mode!r} with padding={padding!r}")


class Cut(NamedTuple):
    """The part of one axis that remains of the output of all windows.

    Attributes:
        low: how many entries are cut off at the start.
        size: how many entries remain; zeros where no window reaches.
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
    """Compute the remaining part of each axis, for a padding in words or in numbers.

    Args:
        padding: one of the words, or (low, high) for each axis.
        spatial: sizes of the input's spatial axes.
        window: extent of the window on each axis, dilation included.
        stride: distance between windows on each axis.
        more: the output padding of each axis.

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
            # The largest of the sizes that a convolution maps to n; or a smaller one.
            size = n * step - more[i]
            beyond = max(reach - size, 0)
            # An odd entry is cut as a convolution pads it: SAME pads more at the end.
            cuts.append(Cut(beyond // 2 if padding == "SAME" else -(-beyond // 2), size))
        else:
            low, high = (0, 0) if isinstance(padding, str) else padding[i]
            cuts.append(Cut(low, reach - low - high + more[i]))
    return cuts


def _wrap(
    x: Array, cuts: Sequence[Cut], window: Sequence[int], stride: Sequence[int]
) -> tuple[Array, list[Cut]]:
    """Continue the input on both sides as far as it affects the output; return new cuts, too."""
    widths = [(0, 0)] * (x.ndim - len(cuts))
    moved: list[Cut] = []
    for cut, extent, step in zip(cuts, window, stride, strict=True):
        # Rounded up: an extra entry only affects entries that are cut off.
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
    """Convolve x with `stride - 1` zeros between its entries."""
    dims = len(cuts)
    window = extents(weight.shape[2:], dilation)
    pads: list[tuple[int, int]] = []
    for cut, n, extent, step in zip(cuts, x.shape[-dims:], window, stride, strict=True):
        low = extent - 1 - cut.low
        # Of `low + entries + high` positions, the last `extent - 1` do not start a window.
        pads.append((low, cut.size + extent - 1 - low - ((n - 1) * step + 1)))
    # The stride is the distance between the entries; the window moves by one.
    return convolved(x, weight, (1,) * dims, pads, dilation, groups, spread=stride)
