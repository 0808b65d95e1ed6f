"""`InstanceNorm`: normalizes each channel of each example by its mean and variance."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Inexact

from pytreemod.errors import ShapeError, describe
from pytreemod.module.field_kinds import array, flag, number, size
from pytreemod.module.unfinished import sizes_follow
from pytreemod.nn.arguments import Title
from pytreemod.nn.calling import in_scope
from pytreemod.nn.functional.normalization import instance_norm
from pytreemod.nn.initializing import Initializer
from pytreemod.nn.normalizing import Normalization, axis_of_channels
from pytreemod.state.key_sources import KeyLike
from pytreemod.typing import AnyArray


def _count_channels(x: AnyArray, num_spatial_dims: int | None) -> int:
    shape = jnp.shape(x)
    return shape[0 if num_spatial_dims is None else -1 - num_spatial_dims]


class InstanceNorm(Normalization):
    r"""Instance normalization: $(x - E[x]) / \sqrt{Var[x] + eps} \cdot w + b$ for each channel.

    Takes mean and (biased) variance over the spatial axes of each channel of each example, which
    removes the contrast of an image. Training and inference are the same, as in PyTorch by
    default; there are no running statistics, which PyTorch has as an option.

    Without num_spatial_dims, x is one example. The layer cannot distinguish a batch from a larger
    example, because x decides the number of spatial axes. To normalize a batch, use
    `jax.vmap(layer)`, or make the layer with num_spatial_dims, which PyTorch's layers have in
    their names.

    Computes in float32 or wider, and returns the dtype of x.

    Shapes:
        x: (channels, *spatial); (..., channels, *spatial) with num_spatial_dims
        return: the shape of x

    Fields:
        weight: (channels,), or None if channelwise_affine=False
        bias: (channels,), or None if channelwise_affine=False

    Args:
        channels: number of channels, >= 0; None if it follows from x
            ([`materialize`][pytreemod.materialize]).
        eps: added to the variance, >= 0.
        channelwise_affine: whether to scale and shift each channel.
        dtype: of weight and bias; JAX's default float if None.
        num_spatial_dims: number of axes after the channels, >= 1; axes before the channels are
            batch axes. If None, there are no batch axes.
        weight_init: `(key, shape, dtype) -> array`, for the weight; ones if None.
        bias_init: the same for the bias; zeros if None.
        key: used once, for weight_init and bias_init; not needed without them.

    State and randomness: none. A State that is passed in is returned with the result.

    Raises:
        ArgumentError: if an argument is invalid, or x is not floating.
        RngError: if key is not a random key, or is missing for an initializer.
        ShapeError: if x has another number of channels, or one value for each channel; or weight or
            bias does not have the shape above.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.InstanceNorm(2, eps=0.0)(jnp.array([[1.0, 3.0], [9.0, 5.0]])).tolist()
        [[-1.0, 1.0], [1.0, -1.0]]
        >>> nn.InstanceNorm(3, num_spatial_dims=2)(jnp.ones((7, 3, 8, 8))).shape
        (7, 3, 8, 8)

    Source:
        Ulyanov, Vedaldi & Lempitsky 2016, https://arxiv.org/abs/1607.08022, eq. (4); defaults as
        in `torch.nn.InstanceNorm2d`.
    """

    shown: ClassVar[tuple[str, ...]] = ("channels",)

    channels: int = size()
    eps: float = number(0.0)
    channelwise_affine: bool = flag()
    weight: Inexact[Array, " channels"] | None = array(given="channelwise_affine")
    bias: Inexact[Array, " channels"] | None = array(given="channelwise_affine")
    num_spatial_dims: int | None = size(1, optional=True, default=None)

    @sizes_follow(channels=_count_channels)
    def __init__(
        self,
        channels: int | None,
        eps: int | float = 1e-5,
        channelwise_affine: bool = False,
        dtype: Any = None,
        *,
        num_spatial_dims: int | None = None,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        key: KeyLike | None = None,
    ):
        self.channels = channels  # pyright: ignore[reportAttributeAccessIssue]  (None is refused)
        self.eps, self.channelwise_affine = eps, channelwise_affine
        self.num_spatial_dims = num_spatial_dims
        self._start(dtype, weight_init, bias_init, key)

    __call__ = in_scope("pm.nn.InstanceNorm")(Normalization.__call__)

    def _normalize(self, where: Title, x: Array, weight: Any, bias: Any) -> Array:
        axis = axis_of_channels(where, x, self.channels, self.num_spatial_dims)
        if x.shape[axis + 1 :].count(1) == x.ndim - axis - 1:
            # A single value is its own mean: the result would be zero.
            expected = "more than one value for each channel of an example"
            raise ShapeError(where, expected, describe(x))
        return instance_norm(x, weight, bias, channel_axis=axis, eps=self.eps)
