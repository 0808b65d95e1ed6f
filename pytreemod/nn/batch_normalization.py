"""`BatchNorm`: normalizes each channel by its mean and variance over a batch."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from pytreemod.errors import ArgumentError, ShapeError, describe
from pytreemod.module.fields import field
from pytreemod.nn.base import (
    AnyArray,
    Initializer,
    StatefulLayer,
    as_dtype,
    as_wide,
    check_shape,
    float_dtype,
    layer_call,
    square,
    title,
    wide_dtype,
)
from pytreemod.nn.normalization import initial_affine
from pytreemod.state.key_sources import KeyLike
from pytreemod.state.tokens import StateIndex
from pytreemod.state.values import State

Statistics: TypeAlias = tuple[Float[Array, " input_size"], Float[Array, " input_size"]]
"""The mean and the variance of each channel."""


class BatchNorm(StatefulLayer):
    r"""Batch normalization: $(x - E[x]) / \sqrt{Var[x] + eps} \cdot w + b$ for each channel.

    In training, mean and (biased) variance are those of the batch. The running statistics in State
    move towards them (the running variance towards the unbiased one). In inference mode, the layer
    uses the running statistics and does not change State.

    `mode="batch"` and `mode="ema"` are for programs written for Equinox:

    - `mode="batch"` returns the same numbers as Equinox. Training normalizes in the same way. The
      running variance is the biased one. Inference divides both running statistics by
      `1 - momentum ** n` after n batches. This corrects the mean, which starts at zero. The
      variance starts at one, so it is too large after few batches.
    - `mode="ema"` is Equinox's default. Training, too, normalizes by the running statistics, after
      their step towards those of the batch. They start with those of the first batch, and have the
      biased variance.

    If `channel_axis` is None, `axis_name` decides which axis has the channels:

    - `axis_name=None`: x is a whole batch, channels on axis 1, as in PyTorch;
    - `axis_name="batch"`: x is one example, channels on axis 0, and you call the layer under
      `jax.vmap(..., axis_name="batch")`, as in Equinox. Several names reduce over several axes.

    With `channel_axis`, the statistics are taken over all other axes of x and the named axes. For
    example, `BatchNorm(8, "data", channel_axis=1)` gets the part of a batch on each device of a
    mesh, and normalizes it by the whole batch.

    Shapes:
        x: (batch, input_size, *spatial); (input_size, *spatial) with axis_name; with channel_axis,
            any shape that has input_size on that axis
        return: the shape of x

    Fields:
        weight: (input_size,), or None if channelwise_affine=False
        bias: (input_size,), or None if channelwise_affine=False
        state_index: token of the running statistics, (mean, var) of shape (input_size,) each; also
            under Equinox's names `batch_state_index` or `ema_state_index`, depending on mode
        batch_counter: token of the number of batches seen; None unless mode="batch"
        ema_first_time_index: token of whether no batch was seen yet; None unless mode="ema"

    Args:
        input_size: number of channels.
        axis_name: name of the mapped batch axis, or a sequence of names; None for whole batches.
        eps: added to the variance.
        channelwise_affine: whether to scale and shift each channel.
        momentum: fraction of the running statistics that remains after each step, from 0 to 1 (one
            minus PyTorch's `momentum`). With the default, 60% of the initial values is left after
            50 steps: use 0.9 for short runs.
        inference: whether to use the running statistics, see `inference_mode`.
        dtype: of weight and bias; JAX's default float if None. Statistics are in float32 or wider.
        mode: "torch", "batch" or "ema", see above.
        channel_axis: the axis of the channels, counted from the front or from the back; if None,
            axis_name decides.
        weight_init: `(key, shape, dtype) -> array`, for the weight; ones if None.
        bias_init: the same for the bias; zeros if None.
        key: used once, for weight_init and bias_init; not needed without them.

    State and randomness: reads and writes its tokens in training, reads them in inference.

    Raises:
        ArgumentError: if there is no such mode, or x is not real and floating.
        NameError: if an axis of that name is not mapped, in training (raised by JAX).
        ShapeError: if x does not have input_size channels, or, in training, two values for each
            channel; or the arrays or the statistics do not have the shape above. Also if
            channel_axis is None, and each device of a mesh has a part of a batch with as many
            examples as channels.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> layer, state = nn.make_with_state(nn.BatchNorm)(3)
        >>> out, state = layer(jnp.ones((8, 3, 5, 5)), state)
        >>> out.shape
        (8, 3, 5, 5)

        One example at a time, under `jax.vmap`:

        >>> layer, state = nn.make_with_state(nn.BatchNorm)(3, axis_name="batch")
        >>> mapped = jax.vmap(layer, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
        >>> out, state = mapped(jnp.ones((8, 3, 5, 5)), state)
        >>> out.shape
        (8, 3, 5, 5)

    Source:
        Ioffe & Szegedy 2015, https://arxiv.org/abs/1502.03167, algorithms 1 and 2; running
        statistics as in `torch.nn.BatchNorm2d`.
    """

    weight: Float[Array, " input_size"] | None
    bias: Float[Array, " input_size"] | None
    # Before the statistics, as in Equinox, because its files have no names.
    ema_first_time_index: StateIndex[Bool[Array, ""]] | None = field(default=None, kw_only=True)
    batch_counter: StateIndex[Int[Array, ""]] | None = field(default=None, kw_only=True)
    state_index: StateIndex[Statistics]
    axis_name: Hashable = field(static=True)
    inference: bool = field(static=True)
    input_size: int = field(static=True)
    eps: float = field(static=True)
    channelwise_affine: bool = field(static=True)
    momentum: float = field(static=True)
    mode: str = field(static=True)
    channel_axis: int | None = field(static=True, default=None)

    def __init__(
        self,
        input_size: int,
        axis_name: Hashable | Sequence[Hashable] = None,
        eps: int | float = 1e-5,
        channelwise_affine: bool = True,
        momentum: int | float = 0.99,
        inference: bool = False,
        dtype: Any = None,
        mode: str = "torch",
        *,
        channel_axis: int | None = None,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        key: KeyLike | None = None,
    ):
        if mode not in ("torch", "batch", "ema"):
            # Equinox's "legacy" is "ema".
            raise ArgumentError("BatchNorm(mode)", "'torch', 'batch' or 'ema'", describe(mode))
        self.axis_name = tuple(axis_name) if isinstance(axis_name, list) else axis_name
        self.input_size, self.channel_axis, self.mode = input_size, channel_axis, mode
        self.eps, self.momentum, self.inference = eps, momentum, inference
        self.channelwise_affine = channelwise_affine
        self.ema_first_time_index = StateIndex(jnp.asarray(True)) if mode == "ema" else None
        self.batch_counter = StateIndex(jnp.asarray(0)) if mode == "batch" else None
        shape = (input_size,)
        shapes = (shape, shape) if channelwise_affine else (None, None)
        self.weight, self.bias = initial_affine(shapes, dtype, weight_init, bias_init, key)
        # Wide, whatever the weights are: at momentum 0.99, bfloat16 rounds most steps to nothing.
        wide = wide_dtype(float_dtype(dtype))
        self.state_index = StateIndex((jnp.zeros(shape, wide), jnp.ones(shape, wide)))

    @property
    def batch_state_index(self) -> StateIndex[Statistics] | None:
        """Equinox's name for `state_index`; None with mode="ema"."""
        return None if self.mode == "ema" else self.state_index

    @property
    def ema_state_index(self) -> StateIndex[Statistics] | None:
        """Equinox's name for `state_index` with mode="ema"; otherwise None."""
        return self.state_index if self.mode == "ema" else None

    @layer_call()
    def __call__(
        self,
        x: AnyArray,
        state: State,
        *,
        key: KeyLike | None = None,
        inference: bool | None = None,
    ) -> tuple[Shaped[Array, ...], State]:
        """Normalize each channel of x.

        Args:
            x: see the class.
            state: has the running statistics.
            key: ignored.
            inference: overrides the field of that name if not None.

        Returns:
            The normalized array, and the new State.
        """
        array, axis = self._checked(x)
        wide, old = as_wide(self, array), state.get(self.state_index)
        mean, var = old
        if mean.shape != (self.input_size,):
            # Those of several layers would broadcast.
            raise ShapeError(title(self), f"{self.input_size} running means", describe(mean))
        if self.inference if inference is None else inference:
            if self.batch_counter is not None:
                correction = 1 - self.momentum ** state.get(self.batch_counter)
                # Nothing to correct before the first batch, or with a momentum of one.
                correction = jnp.where(correction == 0, 1, correction)
                mean, var = mean / correction, var / correction
            centered = wide - _along(axis, mean, wide)
        else:
            mean, var, centered, count = self._moments(wide, axis)
            state = self._next(state, old, (mean, var), count)
            if self.mode == "ema":
                mean, var = state.get(self.state_index)
                centered = wide - _along(axis, mean, wide)
        scale = lax.rsqrt(var.astype(wide.dtype) + self.eps)
        # One factor for each channel, so that the weight needs no pass over the whole array.
        scale = scale if self.weight is None else scale * self.weight.astype(wide.dtype)
        y = centered * _along(axis, scale, wide)
        y = y if self.bias is None else y + _along(axis, self.bias, wide)
        return as_dtype(y, array.dtype), state

    def _checked(self, x: AnyArray) -> tuple[Array, int]:
        """Return x as an array, and the axis of its channels, counted from the front."""
        n, axis, names = self.input_size, self.channel_axis, _names(self.axis_name)
        if axis is None:
            axis = 0 if names else 1
            is_on_device = {*names} <= {*jax.sharding.get_abstract_mesh().manual_axes}
            if names and is_on_device and jnp.shape(x)[:2] == (n, n):
                # It is usually a part of the batch, and would pass for one example.
                raise ShapeError(f"{title(self)}: set channel_axis, 1 for a part of a batch")
        wanted = (*["batch"] * axis, n, ...) if axis >= 0 else (..., n, *["any"] * (-axis - 1))
        array: Array = check_shape(self, x, *wanted)
        return array, axis % array.ndim

    def _moments(self, x: Array, axis: int) -> tuple[Array, Array, Array, int]:
        """Return mean and biased variance, x without the mean, and the count of values."""
        axes, names = [i for i in range(x.ndim) if i != axis], _names(self.axis_name)
        count = math.prod(x.shape[i] for i in axes) * math.prod(map(lax.axis_size, names))
        if count < (2 if self.mode == "torch" else 1):
            # Without its mean, one value is zero. The mean of nothing is NaN, and would stay.
            raise ShapeError(title(self), "values to take a mean of", describe(x))

        def mean_of(values: Array) -> Array:
            mean = jnp.mean(values, axes)
            # All parts have equally many values: the mean of their means is the mean.
            return lax.pmean(mean, names) if names else mean

        mean = mean_of(x)
        # Not E[x^2] - E[x]^2, which cancels if the mean is large, and may be negative.
        centered = x - _along(axis, mean, x)
        return mean, mean_of(square(centered)), centered, count

    def _next(self, state: State, old: Statistics, batch: Statistics, count: int) -> State:
        """Return the State after a batch with these statistics."""
        mean, var = batch
        if self.mode == "torch":
            # x is divided by the biased variance, as in the paper.
            var = var * (count / (count - 1))
        if self.mode != "ema":
            # A gradient through a stored value would flow from one step into the next.
            mean, var = lax.stop_gradient((mean, var))
        # A value in a State keeps its dtype.
        new, keep = [value.astype(old[0].dtype) for value in (mean, var)], self.momentum
        after = [keep * a + (1 - keep) * b for a, b in zip(old, new, strict=True)]
        if self.ema_first_time_index is not None:
            is_first = state.get(self.ema_first_time_index)
            # An average that started with zeros would need a correction.
            after = [jnp.where(is_first, b, a) for a, b in zip(after, new, strict=True)]
            state = state.set(self.ema_first_time_index, jnp.zeros_like(is_first))
        if self.batch_counter is not None:
            state = state.set(self.batch_counter, state.get(self.batch_counter) + 1)
        return state.set(self.state_index, (after[0], after[1]))


def _names(axis_name: Hashable) -> tuple[Hashable, ...]:
    if isinstance(axis_name, tuple):
        return cast("tuple[Hashable, ...]", axis_name)
    return () if axis_name is None else (axis_name,)


def _along(axis: int, values: Array, x: Array) -> Array:
    """An array with a value for each channel, in a shape that broadcasts against x."""
    return as_dtype(values, x.dtype).reshape(
        [size if i == axis else 1 for i, size in enumerate(x.shape)]
    )
