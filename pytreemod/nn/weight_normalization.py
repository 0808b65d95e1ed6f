"""`WeightNorm`: a layer whose weight is a direction and a length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from pytreemod.errors import ArgumentError, ShapeError, describe
from pytreemod.module.field_kinds import as_integer, checked, is_traced
from pytreemod.module.fields import field
from pytreemod.nn.arguments import (
    Title,
    check_key,
    check_state,
    mapped_hint,
    named,
    refuse_label,
    shape_of,
)
from pytreemod.nn.calling import (
    ABSENT,
    Absence,
    Absent,
    StatefulLayer,
    call_layer,
    in_scope,
    is_stateful,
    refuse_no_state,
    requires_state,
    uses_key_if,
    wants_key,
)
from pytreemod.nn.functional.weight_normalization import norm_except, weight_norm
from pytreemod.nn.weights_by_name import accept_weight_name, weight_by_name, with_weight
from pytreemod.state.key_sources import InitKeys, KeyLike
from pytreemod.state.values import State
from pytreemod.typing import AnyArray

_L = TypeVar("_L", bound=Callable[..., Any])


def _check_axis(where: str, axis: Any, weight: Any) -> int | None:
    """Accept None, or an axis; if there is a weight, one of its axes."""
    if axis is None:
        return None
    whole = as_integer(axis)
    if whole is not None and (weight is None or -weight.ndim <= whole < weight.ndim):
        return whole
    expected = "an axis or None" if weight is None else f"an axis of {describe(weight)}, or None"
    raise ArgumentError(where, expected, describe(axis))


class WeightNorm(StatefulLayer, Generic[_L]):
    r"""Calls a layer whose weight is trained as a direction and a length.

    The weight is $g_i \, v_i / \lVert v_i \rVert$ for each of its slices along `axis`. In the
    matrix of a `Linear`, a slice is a row, which computes one number of the output. The layer has
    `v` instead of its weight. Initially `g` are the lengths, so that the output is the layer's.

    Shapes:
        x: any input of the layer
        return: the output of the layer

    Fields:
        layer: the layer, with the directions as its weight
        g: the shape of the weight, with 1 for all axes but `axis`

    Args:
        layer: a Module that can be called, such as `Linear` or `Conv2d`.
        weight_name: the field that is normalized.
        axis: the axis of the slices; if None, the whole weight is one slice.

    State and randomness: passes State and key on to the layer if it takes them.

    Raises:
        ArgumentError: if an argument is invalid; or the weight is complex, or has a slice of zeros,
            which has no direction.
        ShapeError: if `g` does not have the shape above.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> linear = nn.Linear(3, 2, key=jax.random.key(0))
        >>> layer = nn.WeightNorm(linear)
        >>> layer.g.shape, bool(jnp.allclose(layer(jnp.ones(3)), linear(jnp.ones(3))))
        ((2, 1), True)

    Source:
        Salimans & Kingma 2016, https://arxiv.org/abs/1602.07868, eq. (2). To compute a weight in
        another way from trained arrays, see [`Computed`][pytreemod.Computed].
    """

    layer: _L
    g: Float[Array, ...]
    weight_name: str = field(static=True, accepts=accept_weight_name)
    axis: int | None = checked(_check_axis, None)

    def __init__(self, layer: _L, weight_name: str = "weight", axis: int | None = 0):
        v = weight_by_name(named(self, "weight_name"), layer, weight_name)
        self.layer, self.weight_name = layer, weight_name
        self.axis = _check_axis(named(self, "axis"), axis, v)
        self.g = norm_except(v, axis=self.axis)
        # A slice of zeros would become NaN. A transform has no values to check.
        if v.size and not is_traced(self.g) and not bool(jnp.all(self.g)):
            expected = "a weight whose slices all have a direction"
            found = f"a weight with a slice of zeros, along axis {axis}"
            raise ArgumentError(named(self, "layer"), expected, found)

    @uses_key_if(lambda layer: wants_key(layer.layer))
    @in_scope("pm.nn.WeightNorm")
    def __call__(
        self, x: AnyArray, state: State | Absent = ABSENT, *, key: KeyLike | None = None
    ) -> Any:
        """Call the layer with its weight normalized.

        Args:
            x: the layer's input.
            state: for a layer that is stateful.
            key: passed on to the layer.

        Returns:
            The layer's output; with `state`, the pair of it and the new State.
        """
        where = Title(self, "weight_name", "axis")
        check_state(where, state)
        if isinstance(state, Absence) and requires_state(self.layer):
            refuse_no_state(where, f"layer: {type(self.layer).__name__}")
        if key is not None and not isinstance(key, InitKeys):
            check_key("WeightNorm(...)", key)
        layer = with_weight(self.layer, self.weight_name, self._weight(where))
        out, state = call_layer(layer, x, state, key)
        return out if isinstance(state, Absence) else (out, state)

    def _weight(self, where: Title) -> Array:
        v = getattr(self.layer, self.weight_name)
        refuse_label(where, f"{self.weight_name} to be an array", v)
        refuse_label(where, "g to be an array", self.g)
        shape = shape_of(v)
        if shape is not None:
            _check_axis(str(where), self.axis, v)
            # An index from the back becomes one from the front.
            own_axis = range(len(shape))[self.axis] if self.axis is not None else None
            expected = tuple(size if i == own_axis else 1 for i, size in enumerate(shape))
            if shape_of(self.g) == expected:
                return weight_norm(v, self.g, axis=self.axis)
            raise ShapeError(
                where,
                f"g of shape {expected}, because {self.weight_name} has the shape {shape}",
                describe(self.g),
                hint=mapped_hint(self),
            )
        raise ShapeError(where, f"{self.weight_name} to be an array", describe(v))

    def is_stateful(self) -> bool:
        """Whether the layer needs State.

        Returns:
            True or False.
        """
        return is_stateful(self.layer)

    def needs_state(self) -> bool:
        """Whether the layer must be called with State.

        Returns:
            True or False.
        """
        return requires_state(self.layer)
