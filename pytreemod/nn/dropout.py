"""The dropout layer."""

from __future__ import annotations

import functools as ft
from collections.abc import Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from pytreemod.errors import ArgumentError
from pytreemod.module.classes import Module
from pytreemod.module.fields import field
from pytreemod.nn.base import AnyArray, key_for_call, layer_call
from pytreemod.state.key_sources import KeyLike
from pytreemod.state.tokens import RngStream
from pytreemod.state.values import State
from pytreemod.typing import untyped_jax


class Dropout(Module):
    """Sets entries to zero with probability p in training, and divides the others by 1 - p.

    $y = m x / (1 - p)$, where each m is 1 with probability $1 - p$, and 0 otherwise.

    The random key is an argument of the call, or comes from the layer's stream: then each call
    takes a new key from State.

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
        stream: `RngStream()`, to take keys from State. Layers with the same `stream` draw
            different keys, because their paths in the model differ.

    State and randomness: uses one key in training, unless p is 0: `key` if given, otherwise the
        next key of its stream. In inference, State is unchanged.

    Raises:
        ArgumentError: if p is not from 0 to 1.
        ArgumentError: if training has neither a key, nor a stream and its State.

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

    p: float = field(static=True)
    inference: bool = field(static=True)
    # Defaults, although __init__ sets them: a value equal to its default is not printed.
    broadcast_dims: tuple[int, ...] = field(static=True, default=())
    stream: RngStream | None = None

    def __init__(
        self,
        p: int | float = 0.5,
        inference: bool = False,
        *,
        broadcast_dims: int | Sequence[int] = (),
        stream: RngStream | None = None,
    ):
        self.p, self.inference, self.stream = float(p), inference, stream
        is_several = isinstance(broadcast_dims, Sequence)
        self.broadcast_dims = tuple(broadcast_dims) if is_several else (broadcast_dims,)

    def __check_init__(self) -> None:
        if not 0 <= self.p <= 1:
            raise ArgumentError("Dropout(p)", "a number from 0 to 1", str(self.p))

    @overload
    def __call__(
        self,
        x: AnyArray,
        state: None = None,
        *,
        key: KeyLike | None = None,
        inference: bool | None = None,
    ) -> Shaped[Array, ...]: ...

    @overload
    def __call__(
        self,
        x: AnyArray,
        state: State,
        *,
        key: KeyLike | None = None,
        inference: bool | None = None,
    ) -> tuple[Shaped[Array, ...], State]: ...

    @layer_call()
    def __call__(
        self,
        x: AnyArray,
        state: State | None = None,
        *,
        key: KeyLike | None = None,
        inference: bool | None = None,
    ) -> Any:
        """Drop entries of x.

        Args:
            x: any array.
            state: has the keys of the layer's stream, if it has one.
            key: decides which entries to drop, instead of the stream.
            inference: overrides the field of that name if not None.

        Returns:
            An array of the same shape; with `state`, the pair of it and the new State.
        """
        out: Any = jnp.asarray(x)
        after = state
        if self.p > 0 and not (self.inference if inference is None else inference):
            key, after = key_for_call(self, self.stream, key, state)
            out = dropped(out, self.p, key, self.broadcast_dims)
        return out if state is None else (out, after)


# Compiled with a constant probability, so that the last bit is the same in a larger program.
@ft.partial(untyped_jax.jit, static_argnums=(1, 3), inline=True)
def dropped(x: Array, p: float, key: Any, broadcast_dims: tuple[int, ...] = ()) -> Array:
    """Drop entries of x with probability p, and divide the others by 1 - p."""
    if p == 1:
        # x / 0 would be inf, and its gradient NaN even where it is masked.
        return jnp.zeros_like(x)
    shape = list(x.shape)
    for axis in broadcast_dims:
        shape[axis] = 1
    mask = jax.random.bernoulli(key, 1 - p, shape)
    # Not a product with the mask: a dropped infinity would become NaN.
    return jnp.where(mask, x / (1 - p), 0)
