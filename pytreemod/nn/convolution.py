"""The convolutional layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from jaxtyping import Array, Inexact, Shaped

from pytreemod.errors import ArgumentError
from pytreemod.module.field_kinds import array, check_size, choice, flag, size, sizes
from pytreemod.module.fields import field
from pytreemod.module.unfinished import sizes_follow
from pytreemod.nn.arguments import (
    Title,
    check_array,
    check_channels,
    check_window,
    named,
    own_arrays,
)
from pytreemod.nn.calling import ignores_key, in_scope
from pytreemod.nn.dimensions import filled_in
from pytreemod.nn.functional.convolution import PADDING_MODES, conv
from pytreemod.nn.functional.windows import Padding, check_padding, extents, resolve_padding
from pytreemod.nn.initializing import Initializer, initial_pair
from pytreemod.nn.layer import Layer
from pytreemod.state.key_sources import KeyLike
from pytreemod.typing import AnyArray

AnyConv: TypeAlias = Any
"""A convolution, transposed or not, under construction: some fields are not set yet, so a check at
run time could not recognize it."""


def accept_padding(where: str, padding: Any, layer: Any) -> Any:
    """Accept every way to write a padding, for as many axes as the layer has."""
    return check_padding(where, padding, layer.num_spatial_dims, words=True)


def accept_groups(where: str, groups: Any, layer: Any) -> int:
    """Accept a divisor of the input's channels."""
    count = check_size(where, groups, 1)
    check_divisor(where, count, "in_channels", layer.in_channels)
    return count


class Convolution(Layer, is_abstract=True):
    """Base of `Conv` and `ConvTranspose`: shapes of their arrays, and a check of their input."""

    num_spatial_dims: int = size(1)
    weight: Inexact[Array, "out_channels group_channels *kernel_size"]
    bias: Inexact[Array, " out_channels *offset_axes"] | None = array(given="use_bias")
    in_channels: int = size(1)
    out_channels: int = size(1)
    kernel_size: tuple[int, ...] = sizes(1, count="num_spatial_dims")
    stride: tuple[int, ...] = sizes(1, count="num_spatial_dims")
    padding: str | tuple[tuple[int, int], ...] = field(static=True, accepts=accept_padding)
    dilation: tuple[int, ...] = sizes(1, count="num_spatial_dims")
    groups: int = field(static=True, accepts=accept_groups)
    use_bias: bool = flag()

    @property
    def group_channels(self: Any) -> int:
        """How many channels of the input a filter sees: those of its group."""
        return self.in_channels // self.groups

    @property
    def offset_axes(self: Any) -> tuple[int, ...]:
        """The spatial axes of the bias, of size 1."""
        return (1,) * self.num_spatial_dims

    def _read(self: Any, x: AnyArray) -> tuple[Title, Array, Array, Array | None]:
        """Return the layer's title for errors, the input as an array, weight and bias."""
        where = Title(self, "in_channels", "out_channels")
        weight, bias = own_arrays(where, "weight", "bias")
        # Not earlier: as in Equinox, you can make a layer whose groups do not divide out_channels.
        check_divisor(named(self, "groups"), self.groups, "out_channels", self.out_channels)
        x = check_array(where, x)
        check_channels(where, x, self.in_channels, self.num_spatial_dims)
        return where, x, weight, bias


class Conv(Convolution):
    r"""Convolves over any number of spatial axes, channels first.

    $y_{o,i} = b_o + \sum_{c,k} W_{o,c,k} \, x_{c, s i + d k}$, where x is padded, s is the stride,
    d the dilation, and c runs over the channels in the group of o. `Conv1d`, `Conv2d` and `Conv3d`
    are this layer with `num_spatial_dims` filled in.

    Shapes:
        x: (..., in_channels, *spatial)
        return: (..., out_channels, *spatial_out)

    Fields:
        weight: (out_channels, in_channels // groups, *kernel_size)
        bias: (out_channels, 1, ..., 1), or None if use_bias=False

    Args:
        num_spatial_dims: number of spatial axes, >= 1.
        in_channels: size of the input's channel axis, >= 1; None if it follows from x
            ([`materialize`][pytreemod.materialize]).
        out_channels: size of the output's channel axis, >= 1.
        kernel_size: size of the kernel, for all axes or for each.
        stride: step of the kernel, for all axes or for each.
        padding: an amount, one per axis, (low, high) per axis, "SAME", "SAME_LOWER" or "VALID".
        dilation: distance between the kernel's taps, for all axes or for each.
        groups: number of groups of channels, a divisor of in_channels and out_channels.
        use_bias: whether to add a bias.
        padding_mode: the values of the padding: "ZEROS", "REFLECT", "REPLICATE" or "CIRCULAR".
        dtype: of weight and bias; JAX's default float if None.
        key: used once, for the initial weight and bias.
        weight_init: `(key, shape, dtype) -> array`, called with the shape
            `(*kernel_size, in_channels // groups, out_channels)`, which `jax.nn.initializers`
            expect; the axes of the result are reordered.
        bias_init: the same for the bias, called with `(out_channels,)`.

    State and randomness: none.

    Raises:
        ArgumentError: if an argument is negative, not an integer, or does not fit the others.
        RngError: if key is not a random key.
        ShapeError: if x lacks an axis, does not have in_channels channels, or is too small; or
            weight or bias does not have the shape above.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> layer = nn.Conv(2, 3, 8, kernel_size=3, padding="SAME", key=jax.random.key(0))
        >>> layer(jnp.ones((3, 5, 5))).shape, layer(jnp.ones((7, 3, 5, 5))).shape
        ((8, 5, 5), (7, 8, 5, 5))

    Source:
        Initial values U[-1/sqrt(n), 1/sqrt(n)] with n = in_channels // groups times the number of
        the kernel's taps, as in `torch.nn.Conv2d`.
    """

    padding_mode: str = choice(*PADDING_MODES)

    @sizes_follow(in_channels=lambda x, num_spatial_dims: x.shape[-1 - num_spatial_dims])
    def __init__(
        self,
        num_spatial_dims: int,
        in_channels: int | None,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: Padding = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        use_bias: bool = True,
        padding_mode: str = "ZEROS",
        dtype: Any = None,
        *,
        key: KeyLike,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
    ):
        self.num_spatial_dims = num_spatial_dims
        values: Any = (in_channels, out_channels, kernel_size, stride, padding)
        self.in_channels, self.out_channels, self.kernel_size, self.stride, self.padding = values
        more: Any = (dilation, groups, use_bias, padding_mode)
        self.dilation, self.groups, self.use_bias, self.padding_mode = more
        self.weight, self.bias = initial_pair(self, dtype, key, weight_init, bias_init)

    @ignores_key
    @in_scope("pm.nn.Conv")
    def __call__(self, x: AnyArray, *, key: KeyLike | None = None) -> Shaped[Array, ...]:
        """Convolve the channel and spatial axes of x; `key` is ignored."""
        del key
        where, x, weight, bias = self._read(x)
        window = extents(self.kernel_size, self.dilation)
        # Resolved here, not in the field: the padding of "SAME" depends on the size of x.
        pads = resolve_padding(self.padding, x.shape[-self.num_spatial_dims :], window, self.stride)
        check_window(where, x, window, pads)
        return conv(
            x,
            weight,
            bias,
            stride=self.stride,
            padding=pads,
            dilation=self.dilation,
            groups=self.groups,
            padding_mode=self.padding_mode,
        )


class Conv1d(Conv):
    """`Conv` over one spatial axis.

    Shapes:
        x: (..., in_channels, length)
        return: (..., out_channels, length_out)

    Args:
        Those of `Conv`, without num_spatial_dims.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.Conv1d(2, 4, 3, key=jax.random.key(0))(jnp.ones((2, 9))).shape
        (4, 7)
    """

    @filled_in(Conv.__init__, 1)
    def __init__(self): ...


class Conv2d(Conv):
    """`Conv` over two spatial axes.

    Shapes:
        x: (..., in_channels, height, width)
        return: (..., out_channels, height_out, width_out)

    Args:
        Those of `Conv`, without num_spatial_dims.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.Conv2d(2, 4, 3, stride=2, key=jax.random.key(0))(jnp.ones((7, 2, 9, 9))).shape
        (7, 4, 4, 4)
    """

    @filled_in(Conv.__init__, 2)
    def __init__(self): ...


class Conv3d(Conv):
    """`Conv` over three spatial axes.

    Shapes:
        x: (..., in_channels, depth, height, width)
        return: (..., out_channels, depth_out, height_out, width_out)

    Args:
        Those of `Conv`, without num_spatial_dims.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.Conv3d(1, 2, 3, padding=1, key=jax.random.key(0))(jnp.ones((1, 4, 4, 4))).shape
        (2, 4, 4, 4)
    """

    @filled_in(Conv.__init__, 3)
    def __init__(self): ...


def check_divisor(where: str, groups: int, name: str, channels: int) -> None:
    """Require that groups divide the number of channels."""
    if channels % groups != 0:
        raise ArgumentError(where, f"a divisor of {name}={channels}", str(groups))
