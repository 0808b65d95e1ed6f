"""`SpectralNorm`: a layer with a weight divided by its largest singular value."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pytreemod.errors import ArgumentError, describe
from pytreemod.module.fields import field
from pytreemod.module.ties import untie
from pytreemod.nn.base import AnyArray, StatefulLayer, call_layer, layer_call, one_key, wide_dtype
from pytreemod.nn.meshes import call_on_mesh
from pytreemod.state.key_sources import KeyLike
from pytreemod.state.tokens import StateIndex
from pytreemod.state.values import State
from pytreemod.tree.split_arrays import explicit_mesh
from pytreemod.tree.surgery import tree_at
from pytreemod.typing import Tracer

_L = TypeVar("_L")

INITIAL_ITERATIONS = 15


class SpectralNorm(StatefulLayer, Generic[_L]):
    r"""Calls a layer with one of its weights divided by its largest singular value.

    The weight is $W / \sigma$ with $\sigma = u^\top W v$, where u and v approximate the first
    singular vectors. This bounds how much the layer can stretch its input, as in the discriminator
    of a generative adversarial network. Each call in training improves u and v by power iteration;
    in inference mode they stay.

    Shapes:
        x: any input of the layer
        return: the output of the layer, and State

    Fields:
        layer: the layer, with its weight before the division
        uv_index: token of the first singular vectors, (u, v), in float32 or wider

    Args:
        layer: a Module that can be called, such as `Linear` or `Conv2d`.
        weight_name: the field to divide, or a path of fields such as `"query_proj.weight"`. All
            axes of the weight but the first are merged.
        num_power_iterations: number of power iterations at each call in training.
        eps: a norm smaller than this is replaced by it.
        inference: whether to leave the singular vectors unchanged, see `inference_mode`.
        key: used once, for the vectors from which 15 power iterations start.

    State and randomness: reads `uv_index`, and writes it in training. Passes State and key on to
        the layer if it takes them.

    Raises:
        ArgumentError: if the weight is complex or all zero.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> def make(key):
        ...     one, two = jax.random.split(key)
        ...     return nn.SpectralNorm(nn.Linear(3, 3, use_bias=False, key=one), "weight", key=two)
        >>> layer, state = nn.make_with_state(make)(jax.random.key(0))
        >>> matrix, state = layer(jnp.eye(3), state)
        >>> f"{jnp.linalg.svd(matrix, compute_uv=False)[0]:.3f}"
        '1.000'

    Source:
        Miyato et al. 2018, https://arxiv.org/abs/1802.05957, algorithm 1.
    """

    layer: _L
    weight_name: str = field(static=True)
    uv_index: StateIndex[tuple[Float[Array, " out"], Float[Array, " in"]]]
    num_power_iterations: int = field(static=True)
    eps: float = field(static=True)
    inference: bool = field(static=True)

    def __init__(
        self,
        layer: _L,
        weight_name: str,
        num_power_iterations: int = 1,
        eps: int | float = 1e-12,
        inference: bool = False,
        *,
        key: KeyLike,
    ):
        self.layer, self.weight_name = layer, weight_name
        self.num_power_iterations, self.eps, self.inference = num_power_iterations, eps, inference
        weight: Array = attrgetter(weight_name)(layer)
        if jnp.iscomplexobj(weight):
            raise ArgumentError("SpectralNorm", "real weights", describe(weight))
        keys = jax.random.split(one_key(key))
        sizes = (weight.shape[0], weight.size // max(weight.shape[0], 1))
        dtype = wide_dtype(weight.dtype)
        u, v = (jax.random.normal(k, (n,), dtype) for k, n in zip(keys, sizes, strict=True))
        start, mesh = (u, v, INITIAL_ITERATIONS, eps), explicit_mesh(weight)
        if mesh is None:
            u, v = _power_iteration(weight, *start)
        else:
            u, v = call_on_mesh(mesh, _power_iteration, weight, start, {}, None)
        if not isinstance(u, Tracer) and not u.any():
            raise ArgumentError("SpectralNorm: a weight of zeros cannot be normalized")
        self.uv_index = StateIndex((u, v))

    def __call__(
        self,
        x: AnyArray,
        state: State,
        *,
        key: KeyLike | None = None,
        inference: bool | None = None,
    ) -> tuple[Any, State]:
        """Call the layer with its weight divided.

        Args:
            x: the layer's input.
            state: has the singular vectors.
            key: passed on to the layer.
            inference: overrides the field of that name if not None.

        Returns:
            The layer's output, and the new State.
        """
        inference = self.inference if inference is None else inference
        weight, state = self._normed(attrgetter(self.weight_name)(self.layer), state, inference)
        # A tied weight reads as any other, but only without its tie can it be another here.
        layer = tree_at(self.weight_name, untie(self.layer), weight)
        return call_layer(layer, (x,), state, key)

    @layer_call()
    def _normed(self, weight: Array, state: State, inference: bool) -> tuple[Array, State]:
        u, v = state.get(self.uv_index)
        if not inference:
            u, v = _power_iteration(weight, u, v, self.num_power_iterations, self.eps)
            state = state.set(self.uv_index, (u, v))
        matrix = _matrix(weight)
        normed = matrix / jnp.vdot(u, matrix @ v)
        return normed.reshape(weight.shape).astype(weight.dtype), state


def _power_iteration(
    weight: Array, u: Array, v: Array, num_iterations: int, eps: float
) -> tuple[Array, Array]:
    """Move u and v towards the first singular vectors."""
    # They are constants, so that the gradient of the singular value is u v^T.
    matrix = lax.stop_gradient(_matrix(weight))
    for _ in range(num_iterations):
        u = _unit(matrix @ v, eps)
        v = _unit(matrix.T @ u, eps)
    return u, v


def _matrix(weight: Array) -> Array:
    columns = weight.size // max(weight.shape[0], 1)
    return weight.astype(wide_dtype(weight.dtype)).reshape(weight.shape[0], columns)


def _unit(vector: Array, eps: float) -> Array:
    # Not plus eps: then no vector would have length one, and the singular value would be too small.
    return vector / jnp.maximum(jnp.sqrt(jnp.sum(jnp.square(vector))), eps)
