"""`GroupNorm`: each example by the means and variances of groups of its channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from jaxtyping import Array, Inexact

from pytreemod.errors import ArgumentError, ShapeError, describe
from pytreemod.module.field_kinds import array, flag, number, size
from pytreemod.nn.arguments import (
    Title,
    check_channels,
    named,
)
from pytreemod.nn.calling import in_scope
from pytreemod.nn.functional.normalization import group_norm
from pytreemod.nn.initializing import Initializer
from pytreemod.nn.normalizing import Normalization
from pytreemod.state.key_sources import KeyLike


class GroupNorm(Normalization):
    r"""Group normalization: $(x - E[x]) / \sqrt{Var[x] + eps} \cdot w + b$ over groups of channels.

    Mean and (biased) variance are those of a group: of neighbouring channels, and of all that
    comes after them. One group normalizes all of x, as many groups as channels each for itself.

    Without num_spatial_dims x is one example, as in Equinox: how many spatial axes there are is for
    x to say, so that a batch would be taken for a larger example. `jax.vmap(layer)` takes a batch;
    so does a layer that is told how many spatial axes there are.

    Computed in float32 or wider, returned in the dtype of x.

    Shapes:
        x: (channels, *spatial); (..., channels, *spatial) with num_spatial_dims
        return: the shape of x

    Fields:
        weight: (channels,), or None if channelwise_affine=False
        bias: (channels,), or None if channelwise_affine=False

    Args:
        groups: number of groups, >= 1.
        channels: number of channels, a multiple of groups; None, where channelwise_affine=False,
            for any multiple.
        eps: added to the variance, >= 0.
        channelwise_affine: whether to scale and shift each channel.
        dtype: of weight and bias; JAX's default float if None.
        num_spatial_dims: number of axes after the channels, >= 0, where those before them are batch
            axes; None where there are no batch axes.
        weight_init: `(key, shape, dtype) -> array`, for the weight; one if None.
        bias_init: the same for the bias; zero if None.
        key: used once, for weight_init and bias_init; not needed without.

    State and randomness: none. A State passed in is handed back beside the result.

    Raises:
        ArgumentError: an argument is unusable, or x is not floating.
        RngError: key is no random key, or an initializer has none.
        ShapeError: the first axis of x is not channels, or no multiple of groups; or weight or bias
            has not the shape above.

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
    channels: int | None = size(optional=True)
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
        self.groups, self.channels, self.eps = groups, channels, eps
        self.channelwise_affine, self.num_spatial_dims = channelwise_affine, num_spatial_dims
        self.__check_init__()
        self._start(dtype, weight_init, bias_init, key)

    def __check_init__(self) -> None:
        where, channels = named(self, "channels"), self.channels
        if channels is None and self.channelwise_affine:
            hint = (
                "Without weights, any number goes:",
                "GroupNorm(groups, channelwise_affine=False)",
            )
            expected = "how many there are, for weight and bias"
            raise ArgumentError(where, expected, "None", hint=hint)
        if channels is not None and channels % self.groups != 0:
            raise ArgumentError(where, f"a multiple of groups={self.groups}", str(channels))

    __call__ = in_scope("pm.nn.GroupNorm")(Normalization.__call__)

    def _normalize(self, where: Title, x: Array, weight: Any, bias: Any) -> Array:
        dims, axis = self.num_spatial_dims, 0
        if dims is None:
            _check_grouped(where, x, self.groups, self.channels)
        else:
            check_channels(where, x, self.channels, dims)
            axis = x.ndim - dims - 1
            _check_multiple(where, x, self.groups, axis)
        return group_norm(x, self.groups, weight, bias, channel_axis=axis, eps=self.eps)


def _check_multiple(where: Title, x: Array, groups: int, axis: int) -> None:
    """Require that the groups divide the channels, which may be any number of them."""
    if x.shape[axis] % groups != 0:
        expected = f"a multiple of {groups} channels on axis {axis} of x"
        raise ShapeError(where, expected, describe(x))


def _check_grouped(where: Title, x: Array, groups: int, channels: int | None) -> None:
    """Require channels on the first axis of x."""

    def fits(axis: int) -> bool:
        if not -x.ndim <= axis < x.ndim:
            return False
        size = x.shape[axis]
        # Without weights nothing says how many channels there are, but into how many groups they
        # fall.
        return size % groups == 0 if channels is None else size == channels

    if fits(0):
        return
    wanted = f"a multiple of {groups}" if channels is None else str(channels)
    if fits(1):
        hint: Sequence[str] = ("x looks like a batch; map over it:", "jax.vmap(layer)(x)")
    elif fits(-1):
        moved = "layer(jnp.moveaxis(x, -1, 0))"
        hint = ("The last axis fits, but channels come first here:", moved)
    else:
        hint = "Neither the first axis of x fits, nor another that may hold the channels."
    raise ShapeError(where, f"x of shape ({wanted}, ...)", describe(x), hint=hint)
