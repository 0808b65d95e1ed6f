"""The dropout layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from jaxtyping import Array, PRNGKeyArray, Shaped

from pytreemod.errors import ArgumentError, ShapeError, StateError, describe
from pytreemod.module.field_kinds import (
    as_integer,
    as_sequence,
    assign_fields,
    checked,
    flag,
    fraction,
)
from pytreemod.module.fields import field
from pytreemod.nn.arguments import (
    Title,
    check_array,
    check_state,
    in_inference,
    instance,
    renamed,
    required_key,
)
from pytreemod.nn.calling import ABSENT, Absence, Absent, StatefulLayer, in_scope, uses_key_if
from pytreemod.nn.functional.dropout_masks import dropout
from pytreemod.state.key_sources import KeyLike
from pytreemod.state.tokens import RngStream
from pytreemod.state.values import State
from pytreemod.typing import AnyArray


def _check_dims(where: str, dims: Any) -> tuple[int, ...]:
    given = as_sequence([dims] if as_integer(dims) is not None else dims)
    axes = [None] if given is None else [as_integer(axis) for axis in given]
    if None in axes or len({*axes}) < len(axes):
        expected = "the number of an axis, or a sequence of different ones"
        raise ArgumentError(where, expected, describe(dims))
    return tuple(axis for axis in axes if axis is not None)


_STREAM = instance(
    RngStream,
    "an RngStream or None",
    "Pass a stream, and its key to the State:",
    "Dropout(p, stream=pm.RngStream())",
)


class Dropout(StatefulLayer):
    """Sets entries to zero with probability p in training, and divides the others by 1 - p.

    $y = m x / (1 - p)$, where each m is 1 with probability $1 - p$, and 0 otherwise.

    The random key is an argument of the call, or comes from the layer's stream. With a stream the
    layer is stateful: each call takes a new key from State.

    Shapes:
        x: any
        return: the shape of x; a pair with the State if one was passed in

    Fields:
        stream: token of the random keys, or None
        p, inference and broadcast_dims are configuration

    Args:
        p: probability of zero, from 0 to 1.
        inference: whether to do nothing, see `inference_mode`.
        broadcast_dims: axes along which all entries are dropped together: with
            `broadcast_dims=(0,)` the same entries in all examples of a batch.
        stream: `RngStream()`, to make the layer stateful. Layers with the same `stream` draw
            different keys, because their paths in the model differ.
        deterministic: an older name of `inference`, with a warning.

    State and randomness: uses one key in training, unless p is 0: `key` if given, otherwise the
        next key of its stream. In inference, State is unchanged.

    Raises:
        ArgumentError: if p is not a number from 0 to 1, or another argument is invalid, such as a
            key instead of the State.
        RngError: if training has no key.
        ShapeError: if x lacks an axis of broadcast_dims.
        StateError: if training has a stream, but neither State nor key.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import pytreemod as pm
        >>> from pytreemod import nn
        >>> layer = nn.Dropout(0.5)
        >>> sorted(set(layer(jnp.ones(100), key=jax.random.key(0)).tolist()))
        [0.0, 2.0]
        >>> layer(jnp.ones(2), inference=True)
        Array([1., 1.], dtype=float32)

        With a stream:

        >>> layer, state = nn.make_with_state(nn.Dropout)(0.5, stream=pm.RngStream())
        >>> state = state.seed(jax.random.key(0))
        >>> first, state = layer(jnp.ones(100), state)
        >>> second, state = layer(jnp.ones(100), state)
        >>> bool((first == second).all())
        False

    Source:
        Srivastava et al. 2014, https://jmlr.org/papers/v15/srivastava14a.html, in the form that
        scales in training.
    """

    p: float = fraction()
    inference: bool = flag()
    # Defaults, although __init__ sets them: a value equal to its default is not printed.
    broadcast_dims: tuple[int, ...] = checked(_check_dims, default=())
    stream: RngStream | None = field(default=None, accepts=_STREAM)

    def __init__(
        self,
        p: int | float = 0.5,
        inference: bool = False,
        *,
        broadcast_dims: int | Sequence[int] = (),
        stream: RngStream | None = None,
        deterministic: bool | None = None,
    ):
        if deterministic is not None:
            inference = renamed("Dropout(...)", "deterministic", deterministic, "inference")
        self.p, self.inference = p, inference
        assign_fields(self, broadcast_dims=broadcast_dims)
        self.stream = stream

    @overload
    def __call__(
        self,
        x: AnyArray,
        *,
        key: KeyLike | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
    ) -> Shaped[Array, ...]: ...

    @overload
    def __call__(
        self,
        x: AnyArray,
        state: State,
        *,
        key: KeyLike | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
    ) -> tuple[Shaped[Array, ...], State]: ...

    @uses_key_if(lambda layer: layer.p > 0 and not layer.inference)
    @in_scope("pm.nn.Dropout")
    def __call__(
        self,
        x: AnyArray,
        state: State | Absent = ABSENT,
        *,
        key: KeyLike | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
    ) -> Shaped[Array, ...] | tuple[Shaped[Array, ...], State]:
        """Drop entries of x.

        Args:
            x: any array.
            state: has the keys of the layer's stream, if it has one.
            key: decides which entries to drop, instead of the stream.
            inference: overrides the field of that name if not None.
            deterministic: an older name of `inference`, with a warning.

        Returns:
            An array of the same shape; with `state`, the pair of it and the new State.
        """
        where = Title(self, "p")
        if deterministic is not None:
            inference = renamed(str(where), "deterministic", deterministic, "inference")
        check_state(where, state)
        out = check_array(where, x)
        if self.p > 0 and not in_inference(where, self.inference, inference):
            _check_axes(where, out, self.broadcast_dims)
            own_key, state = self._key(where, key, state)
            out = dropout(out, self.p, key=own_key, broadcast_dims=self.broadcast_dims)
        return out if isinstance(state, Absence) else (out, state)

    @property
    def deterministic(self) -> bool:
        """An older name of `inference`."""
        return self.inference

    def _key(
        self, where: Title, key: KeyLike | None, state: State | Absent
    ) -> tuple[PRNGKeyArray, State | Absent]:
        """Return the key to use, and the new State."""
        # A given key takes precedence, and the stream does not advance.
        if key is not None or self.stream is None:
            return required_key(where, key, "layer(x, key=jax.random.key(0))"), state
        if isinstance(state, Absence):
            hint = (
                "The layer's keys are in the State that was made with the model:",
                "x, state = layer(x, state)",
            )
            expected = "a State, or a key, when training"
            raise StateError(where, expected, "neither", hint=hint)
        return state.next_key(self.stream)

    def is_stateful(self) -> bool:
        """Whether the layer has a stream.

        Returns:
            True or False.
        """
        return self.stream is not None


def _check_axes(where: Title, x: Array, dims: tuple[int, ...]) -> None:
    if all(-x.ndim <= axis < x.ndim for axis in dims):
        return
    expected = f"x with the axes that broadcast_dims={dims} names"
    raise ShapeError(where, expected, describe(x))
