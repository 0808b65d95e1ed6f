"""The common part of the layers that normalize each example.

Each has an optional weight and bias, ignores keys, and returns a State that is passed in, so that
it can replace a `BatchNorm`. A layer adds its formula, and the check of its input.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, overload

from jaxtyping import Array, Inexact, Shaped

from pytreemod.errors import ShapeError, describe
from pytreemod.module.field_kinds import array, flag, number, sizes
from pytreemod.nn.arguments import (
    Title,
    check_array,
    check_channels,
    check_dtype,
    check_floating,
    check_state,
    named,
    own_arrays,
)
from pytreemod.nn.calling import ABSENT, Absence, Absent, ignores_key
from pytreemod.nn.initializing import Initializer, initial_affine
from pytreemod.nn.layer import Layer
from pytreemod.state.key_sources import KeyLike
from pytreemod.state.values import State
from pytreemod.typing import AnyArray


class Normalization(Layer, is_abstract=True):
    """Base of layers that normalize each example separately."""

    shown: ClassVar[tuple[str, ...]] = ()
    """The fields that errors show."""

    @overload
    def __call__(self, x: AnyArray, *, key: KeyLike | None = None) -> Shaped[Array, ...]: ...

    @overload
    def __call__(
        self, x: AnyArray, state: State, *, key: KeyLike | None = None
    ) -> tuple[Shaped[Array, ...], State]: ...

    @ignores_key
    def __call__(
        self, x: AnyArray, state: State | Absent = ABSENT, *, key: KeyLike | None = None
    ) -> Shaped[Array, ...] | tuple[Shaped[Array, ...], State]:
        """Normalize x; `key` is ignored, `state` is returned if given."""
        del key
        where = Title(self, *self.shown)
        check_state(where, state)
        weight, bias = own_arrays(where, "weight", "bias")
        x = check_array(where, x)
        check_floating(where, x)
        out = self._normalize(where, x, weight, bias)
        return out if isinstance(state, Absence) else (out, state)

    @abstractmethod
    def _normalize(self, where: Title, x: Array, weight: Any, bias: Any) -> Array:
        """Check the shape of a floating array, and apply the formula."""

    def _start(
        self: Any,
        dtype: Any,
        weight_init: Initializer | None,
        bias_init: Initializer | None,
        key: KeyLike | None,
    ) -> None:
        """Set weight and bias, after the configuration."""
        dtype, shapes = check_dtype(named(self, "dtype"), dtype, real=True), self.__array_shapes__()
        sizes, inits = (shapes["weight"], shapes["bias"]), (weight_init, bias_init)
        self.weight, self.bias = initial_affine(self, sizes, dtype, inits, key)


class TrailingNormalization(Normalization, is_abstract=True):
    """Base of `LayerNorm` and `RMSNorm`, which normalize over the last axes."""

    shown: ClassVar[tuple[str, ...]] = ("shape",)

    shape: tuple[int, ...] = sizes()
    eps: float = number(0.0)
    use_weight: bool = flag()
    use_bias: bool = flag()
    weight: Inexact[Array, "*shape"] | None = array(given="use_weight")
    bias: Inexact[Array, "*shape"] | None = array(given="use_bias")


def axis_of_channels(
    where: Title, x: Array, channels: int | None, dims: int | None, groups: int = 1
) -> int:
    """Return the axis of the channels: before `dims` spatial axes, or the first of one example.

    Args:
        where: the layer's title.
        x: the input.
        channels: number of channels; None for any multiple of groups.
        dims: number of spatial axes; None if x decides it.
        groups: number of groups of channels.

    Returns:
        The axis, counted from the front.

    Raises:
        ShapeError: if that axis does not have the channels.

    Examples:
        >>> import jax.numpy as jnp
        >>> axis_of_channels(Title(None), jnp.ones((7, 3, 8)), 3, 1)
        1
    """
    if dims is not None:
        check_channels(where, x, channels, dims)

    def fits(axis: int) -> bool:
        if not -x.ndim <= axis < x.ndim:
            return False
        return x.shape[axis] % groups == 0 and channels in (None, x.shape[axis])

    axis = 0 if dims is None else x.ndim - dims - 1
    if fits(axis):
        return axis
    wanted = f"a multiple of {groups}" if channels is None else str(channels)
    if dims is not None:
        raise ShapeError(where, f"{wanted} channels on axis {axis} of x", describe(x))
    if fits(1):
        hint: Sequence[str] = (
            "x looks like a batch; map over it, or set the number of spatial axes:",
            "jax.vmap(layer)(x)",
            f"{type(where.layer).__name__}(..., num_spatial_dims={x.ndim - 2})",
        )
    elif fits(-1):
        moved = "layer(jnp.moveaxis(x, -1, 0))"
        hint = ("The last axis fits, but channels come first here:", moved)
    else:
        hint = "Neither the first axis of x fits, nor another that may hold the channels."
    raise ShapeError(where, f"x of shape ({wanted}, ...)", describe(x), hint=hint)
