"""`InstanceNorm`: each channel of each example by its own mean and variance."""

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

    Mean and (biased) variance are those of one channel of one example, over its spatial axes: a
    layer for images whose contrast is not to matter. The same in training and in inference, as
    PyTorch's is by default; running statistics, for which that has an option, there are none.

    How many spatial axes there are is for x to say, so that x is one example, and a batch would be
    taken for a larger one: `jax.vmap(layer)` takes a batch. So does a layer made with
    num_spatial_dims, as PyTorch's are by their names.

    Computed in float32 or wider, returned in the dtype of x.

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
        num_spatial_dims: number of axes after the channels, >= 1, where those before them are batch
            axes; None where there are no batch axes.
        weight_init: `(key, shape, dtype) -> array`, for the weight; one if None.
        bias_init: the same for the bias; zero if None.
        key: used once, for weight_init and bias_init; not needed without.

    State and randomness: none. A State passed in is handed back beside the result.

    Raises:
        ArgumentError: an argument is unusable, or x is not floating.
        RngError: key is no random key, or an initializer has none.
        ShapeError: x has other channels, or a single value for each; or weight or bias has not the
            shape above.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.InstanceNorm(2, eps=0.0)(jnp.array([[1.0, 3.0], [9.0, 5.0]])).tolist()
        [[-1.0, 1.0], [1.0, -1.0]]
        >>> nn.InstanceNorm(3, num_spatial_dims=2)(jnp.ones((7, 3, 8, 8))).shape
        (7, 3, 8, 8)

    Source:
        Ulyanov, Vedaldi & Lempitsky 2016, https://arxiv.org/abs/1607.08022, eq. (4); defaults as
        `torch.nn.InstanceNorm2d`.
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
            # Whose mean it is itself: nothing would be left of it.
            expected = "more than one value for each channel of an example"
            raise ShapeError(where, expected, describe(x))
        return instance_norm(x, weight, bias, channel_axis=axis, eps=self.eps)
