"""`BatchNorm`: normalizes each channel by its mean and variance over a batch."""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Inexact, Int, Shaped

from pytreemod.errors import ArgumentError, ShapeError, describe
from pytreemod.module.field_kinds import (
    array,
    as_integer,
    as_sequence,
    assign_fields,
    checked,
    flag,
    fraction,
    number,
    size,
)
from pytreemod.module.fields import field
from pytreemod.module.unfinished import sizes_follow
from pytreemod.nn.arguments import (
    Title,
    check_array,
    check_dtype,
    check_floating,
    in_inference,
    named,
    own_arrays,
    refuse_tree,
    required_state,
)
from pytreemod.nn.calling import ABSENT, Absent, StatefulLayer, ignores_key, in_scope
from pytreemod.nn.functional.normalization import (
    batch_norm,
    batch_statistics,
    moving_average,
    normalize_batch,
    update_running,
)
from pytreemod.nn.functional.promotion import computing_dtype
from pytreemod.nn.initializing import Initializer, filled, initial_affine
from pytreemod.nn.layer import Layer
from pytreemod.state.key_sources import KeyLike
from pytreemod.state.tokens import StateIndex
from pytreemod.state.values import State
from pytreemod.typing import AnyArray

Statistics: TypeAlias = tuple[Float[Array, " input_size"], Float[Array, " input_size"]]
"""The mean and the variance of each channel."""


def _count_channels(x: AnyArray, axis_name: Hashable, channel_axis: int | None) -> int:
    return jnp.shape(x)[_axis_of_channels(axis_name, channel_axis)]


def _axis_of_channels(axis_name: Hashable, channel_axis: int | None) -> int:
    if channel_axis is None:
        # Under a map the layer sees one example: the batch is the named axis.
        return 1 if axis_name is None else 0
    return channel_axis


def _check_axis_name(where: str, axis_name: Any) -> Hashable:
    """Accept None, one name, or a sequence of different names."""
    names = as_sequence(axis_name)
    given = (axis_name,) if names is None else tuple(names)
    # No names would make each example its own batch; a repeated name would count twice.
    if given and all(isinstance(name, Hashable) for name in given) and len({*given}) == len(given):
        return axis_name if names is None else given
    hint = ("For whole batches, without a mapped axis:", "BatchNorm(input_size)")
    expected = "the name of a mapped axis, several different ones, or None"
    raise ArgumentError(where, expected, describe(axis_name), hint=hint)


def _check_channel_axis(where: str, axis: Any) -> int | None:
    """Accept None, or the number of an axis, counted from the front or from the back."""
    if axis is None:
        return None
    whole = as_integer(axis)
    if whole is None:
        raise ArgumentError(where, "the number of an axis, or None", describe(axis))
    return whole


def _accept_mode(where: str, mode: Any, layer: BatchNorm) -> str:
    if not isinstance(mode, str) or mode not in ("torch", "batch", "ema"):
        hint = ("Equinox's 'legacy' is", "mode='ema'") if mode == "legacy" else ()
        raise ArgumentError(where, "'torch', 'batch' or 'ema'", describe(mode), hint=hint)
    made = "batch" if layer.batch_counter is not None else "torch"
    made = made if layer.ema_first_time_index is None else "ema"
    if mode != made:
        hint = (
            "The mode determines the contents of the State; create a layer:",
            f"BatchNorm(mode={mode!r})",
        )
        raise ArgumentError(where, f"{made!r}, the mode of its State", repr(mode), hint=hint)
    return mode


class BatchNorm(StatefulLayer, Layer):
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

    Computes in float32 or wider, and returns the dtype of x.

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
        input_size: number of channels, >= 0; None if it follows from x
            ([`materialize`][pytreemod.materialize]).
        axis_name: name of the mapped batch axis, or a sequence of names; None for whole batches.
        eps: added to the variance, >= 0.
        channelwise_affine: whether to scale and shift each channel.
        momentum: fraction of the running statistics that remains after each step, from 0 to 1 (one
            minus PyTorch's `momentum`). With the default, 60% of the initial values is left after
            50 steps: use 0.9 for short runs.
        inference: whether to use the running statistics, see `inference_mode`.
        dtype: of weight and bias; JAX's default float if None. The running statistics are in
            float32 or wider.
        mode: "torch", "batch" or "ema", see above.
        channel_axis: the axis of the channels, counted from the front or from the back; if None,
            axis_name decides.
        weight_init: `(key, shape, dtype) -> array`, for the weight; ones if None.
        bias_init: the same for the bias; zeros if None.
        key: used once, for weight_init and bias_init; not needed without them.

    State and randomness: reads and writes its tokens in training, reads them in inference.

    Raises:
        ArgumentError: if an argument is invalid, x is not floating, or an axis_name is not bound.
        RngError: if key is not a random key, or is missing for an initializer.
        ShapeError: if x does not have input_size channels, lacks an axis, or has no value to
            average; or weight or bias does not have the shape above. Also if channel_axis is None,
            and each device of a mesh has a part of a batch with as many examples as channels.

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

    weight: Inexact[Array, " input_size"] | None = array(given="channelwise_affine")
    bias: Inexact[Array, " input_size"] | None = array(given="channelwise_affine")
    # Before the statistics, as in Equinox, because its files have no names. A default, although
    # __init__ sets it: a value equal to its default is not printed.
    ema_first_time_index: StateIndex[Bool[Array, ""]] | None = field(default=None, kw_only=True)
    batch_counter: StateIndex[Int[Array, ""]] | None = field(default=None, kw_only=True)
    state_index: StateIndex[Statistics]
    axis_name: Hashable = checked(_check_axis_name)
    inference: bool = flag()
    input_size: int = size()
    eps: float = number(0.0)
    channelwise_affine: bool = flag()
    momentum: float = fraction()
    mode: str = field(static=True, accepts=_accept_mode)
    channel_axis: int | None = checked(_check_channel_axis, default=None)

    @sizes_follow(input_size=_count_channels)
    def __init__(
        self,
        input_size: int | None,
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
        assign_fields(self, input_size=input_size)
        self.axis_name, self.eps, self.momentum = axis_name, eps, momentum
        self.channelwise_affine, self.inference = channelwise_affine, inference
        # An average that started at zero would need a correction; this one starts with a batch.
        self.ema_first_time_index = StateIndex(jnp.asarray(True)) if mode == "ema" else None
        self.batch_counter = StateIndex(jnp.asarray(0)) if mode == "batch" else None
        self.mode, self.channel_axis = mode, channel_axis
        dtype = check_dtype(named(self, "dtype"), dtype, real=True)
        # In a wide dtype, whatever the weights are: at momentum 0.99, bfloat16 would round most
        # steps to nothing.
        size, wide = (self.input_size,), computing_dtype(dtype)
        shape = size if self.channelwise_affine else None
        inits = (weight_init, bias_init)
        self.weight, self.bias = initial_affine(self, (shape, shape), dtype, inits, key)
        self.state_index = StateIndex((filled(0.0, size, wide), filled(1.0, size, wide)))

    @property
    def batch_state_index(self) -> StateIndex[Statistics] | None:
        """Equinox's name for `state_index`; None with mode="ema"."""
        return None if self.mode == "ema" else self.state_index

    @property
    def ema_state_index(self) -> StateIndex[Statistics] | None:
        """Equinox's name for `state_index` with mode="ema"; otherwise None."""
        return self.state_index if self.mode == "ema" else None

    @ignores_key
    @in_scope("pm.nn.BatchNorm")
    def __call__(
        self,
        x: AnyArray,
        state: State | Absent = ABSENT,
        *,
        key: KeyLike | None = None,
        inference: bool | None = None,
    ) -> tuple[Shaped[Array, ...], State]:
        """Normalize each channel of x.

        Args:
            x: see the class.
            state: has the running statistics; required.
            key: ignored.
            inference: overrides the field of that name if not None.

        Returns:
            The normalized array, and the new State.
        """
        del key
        where = self._title()
        # Before the check of State: a call with a tree is a mistake of another kind.
        refuse_tree(where, x)
        state = required_state(where, state)
        weight, bias = own_arrays(where, "weight", "bias")
        x = check_array(where, x)
        channel_axis = self._axis_of_channels(x)
        self._check(x, channel_axis)
        rescale = ft.partial(
            batch_norm, weight=weight, bias=bias, channel_axis=channel_axis, eps=self.eps
        )
        mean, var = self._running(state)
        # Before any statistics are computed: inference needs no mapped axis.
        if in_inference(where, self.inference, inference):
            if self.batch_counter is not None:
                # Corrects the start of the running statistics. Before the first batch, and with a
                # momentum of one, there is nothing to correct.
                scale = 1 - self.momentum ** state.get(self.batch_counter)
                scale = jnp.where(scale == 0, 1, scale)
                mean, var = mean / scale, var / scale
            return rescale(x, mean, var), state
        if self.ema_first_time_index is not None:
            is_first = state.get(self.ema_first_time_index)
            new_mean, new_var, _ = self._statistics(batch_statistics, x, channel_axis)
            mean = moving_average(mean, new_mean, self.momentum, is_first=is_first)
            var = moving_average(var, new_var, self.momentum, is_first=is_first)
            state = state.set(self.ema_first_time_index, jnp.zeros_like(is_first))
            return rescale(x, mean, var), state.set(self.state_index, (mean, var))
        normalize = ft.partial(normalize_batch, weight=weight, bias=bias, eps=self.eps)
        out, new_mean, new_var, count = self._statistics(normalize, x, channel_axis)
        if self.batch_counter is None:
            # The batch itself was divided by the biased variance, as in the paper. A single value
            # equals its mean and has variance 0.
            new_var = new_var * (count / max(count - 1, 1))
        else:
            state = state.set(self.batch_counter, state.get(self.batch_counter) + 1)
        mean = update_running(mean, new_mean, self.momentum)
        var = update_running(var, new_var, self.momentum)
        return out, state.set(self.state_index, (mean, var))

    def _title(self) -> Title:
        return Title(self, "input_size", "axis_name")

    def _running(self, state: State) -> tuple[Array, Array]:
        """Return the running statistics; those of several members would broadcast wrongly."""
        running = state.get(self.state_index)
        if all(value.shape == (self.input_size,) for value in running):
            return running
        hint = (
            "Map over the statistics of several members, in and out:",
            "axes = pm.by({pm.RngStream: 0, ...: None})",
            "pm.filter_vmap(layer, in_axes=(0, axes), out_axes=(0, axes))(x, state)",
        )
        expected = f"running statistics of shape ({self.input_size},) in the State"
        raise ShapeError(str(self._title()), expected, describe(running[0]), hint=hint)

    def _axis_of_channels(self, x: Array) -> int:
        """Return the axis of the channels, counted from the front."""
        axis = _axis_of_channels(self.axis_name, self.channel_axis)
        return axis + x.ndim * (axis < 0)

    def _check(self, x: Array, channel_axis: int) -> None:
        where = self._title()
        check_floating(where, x)
        if 0 <= channel_axis < x.ndim and x.shape[channel_axis] == self.input_size:
            self._check_whose(where, x)
            return
        if self.channel_axis is not None:
            expected = f"x with {self.input_size} channels on axis {self.channel_axis}"
            raise ShapeError(where, expected, describe(x))
        axes = ("batch",) * channel_axis + (str(self.input_size), "...")
        raise ShapeError(where, f"x of shape ({', '.join(axes)})", describe(x), hint=self._hint(x))

    def _check_whose(self, where: Title, x: Array) -> None:
        """Refuse a part of a batch that looks like one example.

        Under a map, each call gets one example; on a device of a mesh, usually several. If there
        are as many examples as channels, only the user knows which axis is which.
        """
        names = _axis_names(self.axis_name)
        if self.channel_axis is not None or not names or x.shape[1:2] != (self.input_size,):
            return
        if self._is_on_a_mesh():
            expected = "channel_axis to be set, because each device has a part of a batch"
            hint = ("set it; 0 if there is no batch axis:", self._with_channels())
            raise ShapeError(where, expected, describe(x), hint=hint)

    def _is_on_a_mesh(self) -> bool:
        """Whether the named axes are axes of a mesh, under `shard_map`."""
        return {*_axis_names(self.axis_name)} <= {*jax.sharding.get_abstract_mesh().manual_axes}

    def _with_channels(self) -> str:
        return f"BatchNorm({self.input_size}, {self.axis_name!r}, channel_axis=1)"

    def _hint(self, x: Array) -> Sequence[str]:
        """Return code that would move the channels to where this layer expects them."""
        if self.axis_name is None and x.shape[:1] == (self.input_size,):
            return (f"layer = BatchNorm({self.input_size}, axis_name='batch')  # for one example",)
        if self.axis_name is not None and x.shape[1:2] == (self.input_size,):
            if self._is_on_a_mesh():
                return (self._with_channels(),)
            return (*_mapping(_axis_names(self.axis_name)),)
        return ()

    def _statistics(self, compute: Callable[..., Any], x: Array, channel_axis: int) -> Any:
        """Call `compute` on the batch, which must not be empty; its last result is the count."""
        where, names = self._title(), _axis_names(self.axis_name)
        try:
            result = compute(x, channel_axis=channel_axis, axis_name=names)
        except NameError as error:
            expected = f"{', '.join(map(repr, names))} to name mapped axes"
            hint = (
                "Map over the batch, or create the layer without axis_name and pass whole batches:",
                *_mapping(names),
                f"layer = BatchNorm({self.input_size})",
            )
            raise ArgumentError(where, expected, "an axis that is not mapped", hint=hint) from error
        # JAX raises one of these errors, depending on the axes and its version.
        except (AssertionError, ValueError) as error:
            of_mesh = jax.sharding.get_abstract_mesh().manual_axes
            mapped = [name for name in names if name not in of_mesh]
            if not (of_mesh and mapped):
                raise
            shown = ", ".join(map(repr, mapped))
            expected = f"check_vma=False of the shard_map around a map over {shown}"
            got = "its default, under which JAX takes no mean over the axis of a vmap"
            hint = (
                "the means are still over the whole batch; take gradients outside the shard_map:",
                "pm.filter_shard_map(f, ..., check_vma=False)",
            )
            raise ArgumentError(where, expected, got, hint=hint) from error
        # The mean of nothing is NaN, and would stay in the running statistics.
        if result[-1] == 0:
            hint = ("For an empty batch, use the running statistics:", "pm.inference_mode(layer)")
            expected = "at least one value per channel to take a mean of"
            raise ShapeError(where, expected, describe(x), hint=hint)
        return result


def _axis_names(axis_name: Hashable) -> tuple[Hashable, ...]:
    if axis_name is None:
        return ()
    return cast("tuple[Hashable, ...]", axis_name) if isinstance(axis_name, tuple) else (axis_name,)


def _mapping(names: Sequence[Hashable]) -> list[str]:
    """Return the code that maps a layer over axes of these names."""
    maps = [
        f"jax.vmap(layer, in_axes=(0, None), out_axes=(0, None), axis_name={name!r})"
        for name in reversed(names)
    ]
    if len(maps) == 1:
        return [f"{maps[0]}(x, state)"]
    return [*(f"layer = {mapped}" for mapped in maps), "layer(x, state)"]
