"""`GroupNorm`: normalizes each example by the mean and variance of each group of channels."""

from __future__ import annotations

from typing import Any, ClassVar

from jaxtyping import Array, Inexact

from pytreemod.errors import ArgumentError
from pytreemod.module.field_kinds import array, check_size, flag, number, size
from pytreemod.module.fields import field
from pytreemod.nn.arguments import Title
from pytreemod.nn.calling import in_scope
from pytreemod.nn.functional.normalization import group_norm
from pytreemod.nn.initializing import Initializer
from pytreemod.nn.normalizing import Normalization, axis_of_channels
from pytreemod.state.key_sources import KeyLike


def _accept_channels(where: str, channels: Any, layer: GroupNorm) -> int | None:
    if channels is None:
        if not layer.channelwise_affine:
            return None
        hint = (
            "Without weights, any number of channels works:",
            "GroupNorm(groups, channelwise_affine=False)",
        )
        raise ArgumentError(where, "the number of channels, for weight and bias", "None", hint=hint)
    count = check_size(where, channels)
    if count % layer.groups != 0:
        raise ArgumentError(f"{where}: groups={layer.groups} does not divide {count}")
    return count


class GroupNorm(Normalization):
    r"""Group normalization: $(x - E[x]) / \sqrt{Var[x] + eps} \cdot w + b$ over groups of channels.

    Takes mean and (biased) variance over each group of adjacent channels, and all axes after the
    channels. One group normalizes all of x; as many groups as channels normalize each channel.

    Without num_spatial_dims, x is one example, as in Equinox. The layer cannot distinguish a batch
    from a larger example, because x decides the number of spatial axes. To normalize a batch, use
    `jax.vmap(layer)`, or make the layer with num_spatial_dims.

    Computes in float32 or wider, and returns the dtype of x.

    Shapes:
        x: (channels, *spatial); (..., channels, *spatial) with num_spatial_dims
        return: the shape of x

    Fields:
        weight: (channels,), or None if channelwise_affine=False
        bias: (channels,), or None if channelwise_affine=False

    Args:
        groups: number of groups, >= 1.
        channels: number of channels, a multiple of groups; None for any multiple, which requires
            channelwise_affine=False.
        eps: added to the variance, >= 0.
        channelwise_affine: whether to scale and shift each channel.
        dtype: of weight and bias; JAX's default float if None.
        num_spatial_dims: number of axes after the channels, >= 0; axes before the channels are
            batch axes. If None, there are no batch axes.
        weight_init: `(key, shape, dtype) -> array`, for the weight; ones if None.
        bias_init: the same for the bias; zeros if None.
        key: used once, for weight_init and bias_init; not needed without them.

    State and randomness: none. A State that is passed in is returned with the result.

    Raises:
        ArgumentError: if an argument is invalid, or x is not floating.
        RngError: if key is not a random key, or is missing for an initializer.
        ShapeError: if the number of channels of x is not channels, or not a multiple of groups; or
            weight or bias does not have the shape above.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> layer = nn.GroupNorm(groups=2, channels=4)
        >>> layer(jnp.ones((4, 5, 5))).shape, jax.vmap(layer)(jnp.ones((7, 4, 5, 5))).shape
        ((4, 5, 5), (7, 4, 5, 5))

    Source:
        Wu & He 2018, https://arxiv.org/abs/1803.08494, eq. (7).
    """

    shown: ClassVar[tuple[str, ...]] = ("groups", "channels")

    groups: int = size(1)
    channels: int | None = field(static=True, accepts=_accept_channels)
    eps: float = number(0.0)
    channelwise_affine: bool = flag()
    weight: Inexact[Array, " channels"] | None = array(given="channelwise_affine")
    bias: Inexact[Array, " channels"] | None = array(given="channelwise_affine")
    num_spatial_dims: int | None = size(optional=True, default=None)

    def __init__(
        self,
        groups: int,
        channels: int | None = None,
        eps: int | float = 1e-5,
        channelwise_affine: bool = True,
        dtype: Any = None,
        *,
        num_spatial_dims: int | None = None,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        key: KeyLike | None = None,
    ):
        # The check of channels needs the other two.
        self.groups, self.channelwise_affine, self.channels = groups, channelwise_affine, channels
        self.eps, self.num_spatial_dims = eps, num_spatial_dims
        self._start(dtype, weight_init, bias_init, key)

    __call__ = in_scope("pm.nn.GroupNorm")(Normalization.__call__)

    def _normalize(self, where: Title, x: Array, weight: Any, bias: Any) -> Array:
        axis = axis_of_channels(where, x, self.channels, self.num_spatial_dims, self.groups)
        return group_norm(x, self.groups, weight, bias, channel_axis=axis, eps=self.eps)
