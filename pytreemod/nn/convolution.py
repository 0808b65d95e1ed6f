"""The convolutional layers, and the transposed ones."""

from __future__ import annotations

import functools as ft
import inspect
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Inexact, Shaped

from pytreemod.errors import ArgumentError, ShapeError, describe
from pytreemod.module.classes import Module
from pytreemod.module.fields import field
from pytreemod.nn.base import (
    AnyArray,
    Initializer,
    add_shared,
    as_dtype,
    check_shape,
    initial_bias,
    initial_weight,
    layer_call,
    split_key,
    title,
)
from pytreemod.state.key_sources import KeyLike
from pytreemod.tree.split_arrays import explicit_mesh, split_axes
from pytreemod.typing import class_of

_Rest = ParamSpec("_Rest")

Sizes: TypeAlias = int | Sequence[int]
"""A size for all spatial axes, or one for each."""

Amounts: TypeAlias = int | Sequence[int] | Sequence[tuple[int, int]]
"""One amount of padding, one per axis, or (low, high) per axis."""

Pads: TypeAlias = tuple[tuple[int, int], ...]
"""The padding below and above each spatial axis."""

WORDS = ("SAME", "SAME_LOWER", "VALID")
MODES = {"ZEROS": "constant", "REFLECT": "reflect", "REPLICATE": "edge", "CIRCULAR": "wrap"}


# ---- windows


def per_axis(value: Any, dims: int) -> tuple[int, ...]:
    """A size for each axis, from one for all or one for each."""
    sizes = [value] * dims if hasattr(value, "__index__") else value
    return tuple(operator.index(size) for size in sizes)


def pads_per_axis(padding: Any, dims: int) -> Any:
    """(low, high) for each axis; or a word, in upper case."""
    if isinstance(padding, str):
        return padding.upper()
    amounts = [padding] * dims if hasattr(padding, "__index__") else padding
    return tuple(per_axis(amount, 2) for amount in amounts)


def check_sizes(layer: Any, dims: int, **sizes: Any) -> None:
    """Require one size >= 1 for each axis; also of what `replace` and `with_mode` store."""
    for name, size in sizes.items():
        if class_of(size) is not tuple or len(size) != dims or not all(n >= 1 for n in size):
            where = f"{type(layer).__name__}({name})"
            raise ArgumentError(where, f"{dims} sizes >= 1, or one for all axes", str(size))


def check_padding(layer: Any, padding: Any, dims: int, *words: str) -> None:
    """Require one of the words, or (low, high) for each axis: JAX would cut a negative amount."""
    pairs = padding if class_of(padding) is tuple and len(padding) == dims else ((),)
    if padding not in words and not all(len(pair) == 2 and min(pair) >= 0 for pair in pairs):
        forms = ["an integer >= 0", "one per axis", "(low, high) per axis", *words]
        where = f"{type(layer).__name__}(padding)"
        raise ArgumentError(where, " or ".join(forms), repr(padding))


def check_window(layer: Any, x: Array, window: Sequence[int], pads: Any) -> None:
    """Require that a window fits into the padded x: JAX would return an array without entries."""
    spatial = x.shape[x.ndim - len(window) :]
    for size, extent, (low, high) in zip(spatial, window, pads, strict=True):
        if low + size + high < extent:
            raise ShapeError(title(layer), f"x not smaller than the window {window}", describe(x))


def any_sizes(dims: int) -> tuple[str, ...]:
    """Names for spatial axes of any size, for `check_shape`."""
    known = ("depth", "height", "width")[-dims:] if 1 < dims <= 3 else ()
    return known or tuple(f"size_{i}" for i in range(dims))


# ---- the layers


class Convolution(Module):
    """Base of `Conv` and `ConvTranspose`: what they are made of, and how they are called."""

    num_spatial_dims: int = field(static=True)
    weight: Inexact[Array, "out_channels group_channels *kernel_size"]
    bias: Inexact[Array, " out_channels *offset_axes"] | None
    in_channels: int = field(static=True)
    out_channels: int = field(static=True)
    kernel_size: tuple[int, ...] = field(static=True)
    stride: tuple[int, ...] = field(static=True)
    padding: str | Pads = field(static=True)
    dilation: tuple[int, ...] = field(static=True)
    groups: int = field(static=True)
    use_bias: bool = field(static=True)
    padding_mode: str = field(static=True)

    def __init__(
        self,
        num_spatial_dims: int,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: str | Amounts = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        use_bias: bool = True,
        padding_mode: str = "ZEROS",
        dtype: Any = None,
        *,
        key: KeyLike,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
    ):
        self.num_spatial_dims = dims = num_spatial_dims
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size, self.stride = per_axis(kernel_size, dims), per_axis(stride, dims)
        self.padding, self.dilation = pads_per_axis(padding, dims), per_axis(dilation, dims)
        self.use_bias, self.padding_mode = use_bias, padding_mode.upper()
        weight_key, bias_key = split_key(key, 2)
        shape = (out_channels, self.group_channels, *self.kernel_size)
        self.weight = initial_weight(weight_init, weight_key, shape, dtype)
        self.bias = None
        if use_bias:
            bias = initial_bias(bias_init, bias_key, shape[:1], dtype, math.prod(shape[1:]))
            self.bias = bias.reshape(out_channels, *self.offset_axes)

    def __check_init__(self) -> None:
        dims, name = self.num_spatial_dims, type(self).__name__
        check_sizes(self, dims, kernel_size=self.kernel_size, stride=self.stride)
        check_sizes(self, dims, dilation=self.dilation)
        check_padding(self, self.padding, dims, *WORDS)
        if self.in_channels % self.groups or self.out_channels % self.groups:
            channels = f"in_channels={self.in_channels} and out_channels={self.out_channels}"
            raise ArgumentError(f"{name}(groups)", f"a divisor of {channels}", str(self.groups))
        if self.padding_mode not in MODES:
            raise ArgumentError(f"{name}(padding_mode)", " or ".join(MODES), self.padding_mode)

    @property
    def group_channels(self) -> int:
        """How many channels of the input a filter sees: those of its group."""
        return self.in_channels // self.groups

    @property
    def offset_axes(self) -> tuple[int, ...]:
        """The spatial axes of the bias, of size 1."""
        return (1,) * self.num_spatial_dims

    @property
    def channel_axis(self) -> int:
        """The axis of the channels, counted from the back."""
        return -1 - self.num_spatial_dims

    def __call__(self, x: AnyArray, *, key: KeyLike | None = None) -> Shaped[Array, ...]:
        """Apply the layer to the channel and spatial axes of x; `key` is ignored."""
        split = None
        if self.groups > 1 and explicit_mesh(x) is not None:
            # Read here: in the call, all axes of the mesh are automatic.
            split = (split_axes(x) or ((),) * jnp.ndim(x))[: self.channel_axis + 1 or None]
        return self._apply(x, split)

    def _apply(self, x: AnyArray, split: Any) -> Array:
        """The call, inside of which all axes of a mesh are automatic."""
        raise NotImplementedError

    def _read(self, x: Any) -> tuple[Array, tuple[int, ...], tuple[int, ...]]:
        """The input, the sizes of its spatial axes, and those of the dilated kernel."""
        x = check_shape(self, x, ..., self.in_channels, *any_sizes(self.num_spatial_dims))
        pairs = zip(self.kernel_size, self.dilation, strict=True)
        window = tuple((size - 1) * step + 1 for size, step in pairs)
        return x, x.shape[-self.num_spatial_dims :], window

    def _convolve(self, x: Array, split: Any, **options: Any) -> Array:
        dtype = jnp.result_type(x, self.weight)
        options["rhs_dilation"] = self.dilation
        x, weight = as_dtype(x, dtype), as_dtype(self.weight, dtype)
        return add_shared(_convolved(x, weight, self.groups, split, options), self.bias)

    def _padded(self, x: Array, pads: Sequence[tuple[int, int]]) -> Array:
        """The input with larger spatial axes, as the padding mode says."""
        return jnp.pad(x, [(0, 0)] * (x.ndim - len(pads)) + [*pads], MODES[self.padding_mode])


def _convolved(x: Array, weight: Array, groups: int, split: Any, options: Any) -> Array:
    """Call JAX's convolution, which requires one batch axis, with any number of them.

    Args:
        x: (..., in_channels, *spatial)
        weight: (out_channels, in_channels // groups, *kernel_size)
        groups: number of groups of channels.
        split: the mesh axes over which x is split along each of its axes up to the channels;
            None if there is no mesh with explicit axes.
        options: of `jax.lax.conv_general_dilated`.
    """

    def apply(groups: int, x: Array, weight: Array) -> Array:
        batch, image = x.shape[: 1 - weight.ndim], x.shape[1 - weight.ndim :]
        # With one batch axis the program has no reshape, as if it were written by hand.
        flat = x if len(batch) == 1 else x.reshape(math.prod(batch), *image)
        y = lax.conv_general_dilated(flat, weight, feature_group_count=groups, **options)
        return y if len(batch) == 1 else y.reshape(*batch, *y.shape[1:])

    if groups == 1 or split is None:
        return apply(groups, x, weight)
    # Each device computes its own groups, and its part of the batch: if the batch is split, and the
    # mesh has another axis, XLA multiplies the gradient of the weight by the size of that axis (in
    # JAX 0.10 and 0.12).
    *batch, channels = split
    mesh = jax.sharding.get_abstract_mesh()
    parts = math.prod(mesh.shape[name] for name in channels)
    if groups % parts:
        channels, parts = (), 1
    x_at, weight_at = PartitionSpec(*batch, channels), PartitionSpec(channels)
    local = ft.partial(apply, groups // parts)
    return jax.shard_map(local, in_specs=(x_at, weight_at), out_specs=x_at)(x, weight)


def with_spatial_dims(
    init: Callable[Concatenate[Any, int, _Rest], None], dims: int
) -> Callable[[Any], Callable[Concatenate[Any, _Rest], None]]:
    """Replace an empty `__init__` by another one whose parameter num_spatial_dims is filled in."""

    def decorate(empty: Any) -> Any:
        def fixed(self: Any, /, *args: _Rest.args, **kwargs: _Rest.kwargs) -> None:
            init(self, dims, *args, **kwargs)

        signature = inspect.signature(init)
        layer, _, *rest = signature.parameters.values()
        for name in ("__module__", "__qualname__", "__doc__"):
            setattr(fixed, name, getattr(empty, name))
        vars(fixed)["__signature__"] = signature.replace(parameters=[layer, *rest])
        return fixed

    return decorate


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
        num_spatial_dims: number of spatial axes.
        in_channels: size of the input's channel axis.
        out_channels: size of the output's channel axis.
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
        ArgumentError: if a size, the padding, its mode or groups is none of the above.
        ShapeError: if x does not have in_channels channels, or is smaller than the kernel; or
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

    @layer_call(features=("weight", 0, "channel_axis"))
    def _apply(self, x: AnyArray, split: Any) -> Array:
        values, spatial, window = self._read(x)
        pads: Any = self.padding
        if isinstance(pads, str):
            # By JAX's own rule, so that a word means the same as in `lax`.
            pads = lax.padtype_to_pads(spatial, window, self.stride, pads)
        check_window(self, values, window, pads)
        # JAX's convolution pads only with zeros.
        if self.padding_mode != "ZEROS":
            values, pads = self._padded(values, pads), "VALID"
        return self._convolve(values, split, window_strides=self.stride, padding=pads)


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

    @with_spatial_dims(Conv.__init__, 1)
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

    @with_spatial_dims(Conv.__init__, 2)
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

    @with_spatial_dims(Conv.__init__, 3)
    def __init__(self): ...


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
        num_spatial_dims: number of spatial axes.
        in_channels: size of the input's channel axis.
        out_channels: size of the output's channel axis.
        kernel_size: size of the kernel, for all axes or for each.
        stride: distance in the output between adjacent windows, for all axes or for each.
        padding: how much of the output to cut off: an amount, one per axis, (low, high) per axis,
            "SAME", "SAME_LOWER" or "VALID". With "SAME", n entries become n * stride.
        output_padding: how many entries to add at the end of the output (with "SAME": to remove),
            for all axes or for each; less than stride.
        dilation: distance between the kernel's taps, for all axes or for each.
        groups: number of groups of channels, a divisor of in_channels and out_channels.
        use_bias: whether to add a bias.
        padding_mode: "ZEROS"; or "CIRCULAR", with padding="SAME" or "SAME_LOWER" and without
            output_padding: entries beyond one end of the output are added at the other end.
        dtype: of weight and bias; JAX's default float if None.
        key: used once, for the initial weight and bias.
        weight_init: `(key, shape, dtype) -> array`, called with the shape
            `(*kernel_size, in_channels // groups, out_channels)`, which `jax.nn.initializers`
            expect; the axes of the result are reordered.
        bias_init: the same for the bias, called with `(out_channels,)`.

    State and randomness: none.

    Raises:
        ArgumentError: if a size, the padding, its mode or groups is none of the above.
        ShapeError: if x does not have in_channels channels, or the output would be empty; or weight
            or bias does not have the shape above.

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

    output_padding: tuple[int, ...] = field(static=True)

    def __init__(
        self,
        num_spatial_dims: int,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: str | Amounts = 0,
        output_padding: Sizes = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        use_bias: bool = True,
        padding_mode: str = "ZEROS",
        dtype: Any = None,
        *,
        key: KeyLike,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
    ):
        sizes = (num_spatial_dims, in_channels, out_channels, kernel_size)
        options = (stride, padding, dilation, groups, use_bias, padding_mode, dtype)
        init: Any = {"key": key, "weight_init": weight_init, "bias_init": bias_init}
        super().__init__(*sizes, *options, **init)
        self.output_padding = per_axis(output_padding, num_spatial_dims)

    def __check_init__(self) -> None:
        where = type(self).__name__
        check_sizes(self, self.num_spatial_dims, stride=self.stride)
        pairs = zip(self.output_padding, self.stride, strict=True)
        # Sizes that a convolution maps to the same size differ by less than the stride.
        if not all(0 <= more < step for more, step in pairs):
            expected = f"0 or more, and less than stride={self.stride}"
            raise ArgumentError(f"{where}(output_padding)", expected, str(self.output_padding))
        # In an output of another size it is not defined which entries meet.
        is_circle = self.padding in ("SAME", "SAME_LOWER") and not any(self.output_padding)
        if self.padding_mode != "ZEROS" and (self.padding_mode != "CIRCULAR" or not is_circle):
            expected = "'ZEROS', or 'CIRCULAR' with padding='SAME' and output_padding=0"
            raise ArgumentError(f"{where}(padding_mode)", expected, repr(self.padding_mode))

    @layer_call(features=("weight", 0, "channel_axis"))
    def _apply(self, x: AnyArray, split: Any) -> Array:
        values, spatial, window = self._read(x)
        # A convolution of x with `stride - 1` zeros between its entries. Its padding makes `size`
        # windows, the first of which ends `low` entries after the first one that reaches into x.
        wraps: list[tuple[int, int]] = []
        pads: list[tuple[int, int]] = []
        for i, (n, extent, step) in enumerate(zip(spatial, window, self.stride, strict=True)):
            reach, more = (n - 1) * step + extent, self.output_padding[i]
            if self.padding in ("SAME", "SAME_LOWER"):
                # The largest of the sizes that a convolution maps to n; or a smaller one.
                size = n * step - more
                beyond = max(reach - size, 0)
                # An odd entry is cut as a convolution pads it: SAME pads more at the end.
                low = beyond // 2 if self.padding == "SAME" else -(-beyond // 2)
            else:
                low, high = (0, 0) if isinstance(self.padding, str) else self.padding[i]
                size = reach - low - high + more
            if size < 1:
                expected = f"x of which padding={self.padding} leaves entries"
                raise ShapeError(title(self), expected, describe(values))
            if self.padding_mode == "CIRCULAR":
                # Rounded up: an extra entry only affects entries that are cut off.
                wraps.append((max(-(-(extent - 1 - low) // step), 0), -(-low // step)))
                n, low = n + sum(wraps[i]), low + wraps[i][0] * step
            start = extent - 1 - low
            # Of `start + entries + end` positions, the last `extent - 1` do not start a window.
            pads.append((start, size + extent - 1 - start - ((n - 1) * step + 1)))
        values = self._padded(values, wraps) if wraps else values
        # The stride is the distance between the entries; the window moves by one.
        moved = {"window_strides": (1,) * len(window), "lhs_dilation": self.stride}
        return self._convolve(values, split, padding=pads, **moved)


class _Arranged(ConvTranspose):
    """`ConvTranspose` with Equinox's order of arguments for one, two and three axes."""

    def __init__(
        self,
        num_spatial_dims: int,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        output_padding: Sizes = 0,
        padding: str | Amounts = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        use_bias: bool = True,
        padding_mode: str = "ZEROS",
        dtype: Any = None,
        *,
        key: KeyLike,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
    ):
        sizes = (num_spatial_dims, in_channels, out_channels, kernel_size)
        options = (stride, padding, output_padding, dilation, groups, use_bias, padding_mode, dtype)
        init: Any = {"key": key, "weight_init": weight_init, "bias_init": bias_init}
        super().__init__(*sizes, *options, **init)


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

    @with_spatial_dims(_Arranged.__init__, 1)
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

    @with_spatial_dims(_Arranged.__init__, 2)
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

    @with_spatial_dims(_Arranged.__init__, 3)
    def __init__(self): ...
