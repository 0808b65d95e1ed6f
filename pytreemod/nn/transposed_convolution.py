"""The transposed convolutional layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxtyping import Array, Shaped

from pytreemod.errors import ShapeError, describe
from pytreemod.module.fields import field
from pytreemod.module.unfinished import sizes_follow
from pytreemod.nn.arguments import Title
from pytreemod.nn.calling import ignores_key, in_scope
from pytreemod.nn.convolution import Convolution
from pytreemod.nn.dimensions import filled_in
from pytreemod.nn.functional.transposed_convolution import (
    check_output_padding,
    check_transposed_mode,
    conv_transpose,
    cut_for,
)
from pytreemod.nn.functional.windows import Padding, extents
from pytreemod.nn.initializing import Initializer, initial_pair
from pytreemod.state.key_sources import KeyLike
from pytreemod.typing import AnyArray


def _accept_more(where: str, more: Any, layer: Any) -> tuple[int, ...]:
    return check_output_padding(where, more, layer.stride)


def _accept_mode(where: str, mode: Any, layer: Any) -> str:
    return check_transposed_mode(where, mode, layer.padding, layer.output_padding)


class ConvTranspose(Convolution):
    r"""A transposed convolution over any number of spatial axes, channels first.

    $y_{o, s i + d (K - 1 - k)} = b_o + \sum_{c,i,k} W_{o,c,k} \, x_{c,i}$, with both ends cut by
    the padding. The sum is over all i and k that lead to that entry; s is the stride, d the
    dilation, and K the size of the kernel.

    With the same arguments except the channels, it maps the output shape of a `Conv` back to the
    input shape: it enlarges what a strided convolution shrinks. An axis of n entries becomes one
    of `(n - 1) * stride + (kernel_size - 1) * dilation + 1 - low - high + output_padding`.

    `ConvTranspose1d`, `ConvTranspose2d` and `ConvTranspose3d` are this layer with
    `num_spatial_dims` filled in. **They take output_padding before padding**, as in Equinox.

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
        stride: distance in the output between adjacent windows, for all axes or for each.
        padding: how much of the output to cut off: an amount, one per axis, (low, high) per axis,
            "SAME", "SAME_LOWER" or "VALID". With "SAME", n entries become n * stride.
        output_padding: how many entries to add at the end of the output (with "SAME": to remove),
            for all axes or for each; less than stride.
        dilation: distance between the kernel's taps, for all axes or for each.
        groups: number of groups of channels, a divisor of in_channels and out_channels.
        use_bias: whether to add a bias.
        padding_mode: "ZEROS"; or "CIRCULAR", with padding="SAME" or "SAME_LOWER": entries beyond
            one end of the output are added at the other end.
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
        ShapeError: if x lacks an axis, does not have in_channels channels, or the output would be
            empty; or weight or bias does not have the shape above.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> keys = jax.random.split(jax.random.key(0))
        >>> down = nn.Conv(2, 3, 8, kernel_size=3, stride=2, padding=1, key=keys[0])
        >>> up = nn.ConvTranspose(2, 8, 3, kernel_size=3, stride=2, padding=1, key=keys[1])
        >>> down(jnp.ones((3, 9, 9))).shape, up(down(jnp.ones((3, 9, 9)))).shape
        ((8, 5, 5), (3, 9, 9))

    Source:
        Dumoulin & Visin 2016, https://arxiv.org/abs/1603.07285, chapter 4. Initial values
        U[-1/sqrt(n), 1/sqrt(n)] with n = in_channels // groups times the number of the kernel's
        taps, as in Equinox; `torch.nn.ConvTranspose2d` uses out_channels there. PyTorch's weight
        has the order of the channels and of the taps reversed; `from_torch` and `to_torch` convert
        it.
    """

    output_padding: tuple[int, ...] = field(static=True, accepts=_accept_more)
    padding_mode: str = field(static=True, accepts=_accept_mode)

    @sizes_follow(in_channels=lambda x, num_spatial_dims: x.shape[-1 - num_spatial_dims])
    def __init__(
        self,
        num_spatial_dims: int,
        in_channels: int | None,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: Padding = 0,
        output_padding: int | Sequence[int] = 0,
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
        more: Any = (output_padding, dilation, groups, use_bias, padding_mode)
        self.output_padding, self.dilation, self.groups, self.use_bias, self.padding_mode = more
        self.weight, self.bias = initial_pair(self, dtype, key, weight_init, bias_init)

    @ignores_key
    @in_scope("pm.nn.ConvTranspose")
    def __call__(self, x: AnyArray, *, key: KeyLike | None = None) -> Shaped[Array, ...]:
        """Spread the channel and spatial axes of x; `key` is ignored."""
        del key
        where, x, weight, bias = self._read(x)
        self._check_left(where, x)
        return conv_transpose(
            x,
            weight,
            bias,
            stride=self.stride,
            padding=self.padding,
            output_padding=self.output_padding,
            dilation=self.dilation,
            groups=self.groups,
            padding_mode=self.padding_mode,
        )

    def _check_left(self, where: Title, x: Array) -> None:
        """Require that the padding does not cut off the whole output of the windows."""
        spatial = x.shape[-self.num_spatial_dims :]
        window = extents(self.kernel_size, self.dilation)
        # Without output_padding, whose entries do not depend on x.
        none = (0,) * len(spatial)
        cuts = cut_for(self.padding, spatial, window, self.stride, none)
        sizes = tuple(cut.size for cut in cuts)
        if min(sizes) < 1:
            expected = (
                f"padding={self.padding} that leaves at least one element of each spatial axis"
            )
            raise ShapeError(where, expected, f"{sizes} from {describe(x)}")


class _Arranged(ConvTranspose):
    """`ConvTranspose` with Equinox's order of arguments for one, two and three axes."""

    @sizes_follow(in_channels=lambda x, num_spatial_dims: x.shape[-1 - num_spatial_dims])
    def __init__(
        self,
        num_spatial_dims: int,
        in_channels: int | None,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        output_padding: int | Sequence[int] = 0,
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
        super().__init__(
            num_spatial_dims,
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            output_padding,
            dilation,
            groups,
            use_bias,
            padding_mode,
            dtype,
            key=key,
            weight_init=weight_init,
            bias_init=bias_init,
        )


class ConvTranspose1d(_Arranged):
    """`ConvTranspose` over one spatial axis.

    Shapes:
        x: (..., in_channels, length)
        return: (..., out_channels, length_out)

    Args:
        Those of `ConvTranspose`, without num_spatial_dims, and with output_padding before padding.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.ConvTranspose1d(2, 4, 3, key=jax.random.key(0))(jnp.ones((2, 9))).shape
        (4, 11)
    """

    @filled_in(_Arranged.__init__, 1)
    def __init__(self): ...


class ConvTranspose2d(_Arranged):
    """`ConvTranspose` over two spatial axes.

    Shapes:
        x: (..., in_channels, height, width)
        return: (..., out_channels, height_out, width_out)

    Args:
        Those of `ConvTranspose`, without num_spatial_dims, and with output_padding before padding.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> layer = nn.ConvTranspose2d(2, 4, 3, stride=2, padding="SAME", key=jax.random.key(0))
        >>> layer(jnp.ones((7, 2, 9, 9))).shape
        (7, 4, 18, 18)
    """

    @filled_in(_Arranged.__init__, 2)
    def __init__(self): ...


class ConvTranspose3d(_Arranged):
    """`ConvTranspose` over three spatial axes.

    Shapes:
        x: (..., in_channels, depth, height, width)
        return: (..., out_channels, depth_out, height_out, width_out)

    Args:
        Those of `ConvTranspose`, without num_spatial_dims, and with output_padding before padding.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.ConvTranspose3d(1, 2, 2, key=jax.random.key(0))(jnp.ones((1, 4, 4, 4))).shape
        (2, 5, 5, 5)
    """

    @filled_in(_Arranged.__init__, 3)
    def __init__(self): ...
