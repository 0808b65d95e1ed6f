"""`SpectralNorm`: a layer with a weight divided by its largest singular value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from pytreemod.errors import ArgumentError, ShapeError, describe
from pytreemod.module.field_kinds import flag, is_traced, number, size
from pytreemod.module.fields import field
from pytreemod.nn.arguments import (
    Title,
    check_key,
    in_inference,
    mapped_hint,
    named,
    refuse_label,
    required_state,
    shape_of,
)
from pytreemod.nn.calling import (
    ABSENT,
    Absent,
    StatefulLayer,
    call_layer,
    in_scope,
    uses_key_if,
    wants_key,
)
from pytreemod.nn.functional.promotion import computing_dtype
from pytreemod.nn.functional.spectral_normalization import divide_by_spectral_norm, power_iteration
from pytreemod.nn.weights_by_name import accept_weight_name, weight_by_name, with_weight
from pytreemod.state.key_sources import KeyLike
from pytreemod.state.tokens import StateIndex
from pytreemod.state.values import State
from pytreemod.typing import AnyArray

_L = TypeVar("_L", bound=Callable[..., Any])

INITIAL_ITERATIONS = 15


class SpectralNorm(StatefulLayer, Generic[_L]):
    r"""Calls a layer with one of its weights divided by its largest singular value.

    The weight is $W / \sigma$ with $\sigma = u^\top W v$, where u and v approximate the first
    singular vectors. This bounds how much the layer can stretch its input, as in the discriminator
    of a generative adversarial network. Power iteration estimates the singular value. It continues
    from call to call in training, and stops in inference mode.

    Shapes:
        x: any input of the layer
        return: the output of the layer, and State

    Fields:
        layer: the layer, with its weight before the division
        uv_index: token of the first singular vectors, (u, v), in float32 or wider

    Args:
        layer: a Module that can be called, such as `Linear` or `Conv2d`.
        weight_name: the field to rescale, an array of two axes or more. All axes but the first
            are merged.
        num_power_iterations: number of power iterations at each call in training, >= 0.
        eps: a norm smaller than this is replaced by it, >= 0.
        inference: whether to leave the singular vectors unchanged, see `inference_mode`.
        key: used once, for the vectors from which 15 power iterations start.

    State and randomness: reads `uv_index`, and writes it in training. Passes State and key on to
        the layer if it takes them.

    Raises:
        ArgumentError: if an argument is invalid, or the weight is complex or all zero.
        RngError: if key is not a random key.
        ShapeError: if the weight has fewer than two axes, or does not fit its singular vectors.

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
    weight_name: str = field(static=True, accepts=accept_weight_name)
    uv_index: StateIndex[tuple[Float[Array, " out"], Float[Array, " in"]]]
    num_power_iterations: int = size()
    eps: float = number(0.0)
    inference: bool = flag()

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
        weight = _check_weight(named(self, "weight_name"), layer, weight_name)
        self.layer, self.weight_name = layer, weight_name
        self.num_power_iterations, self.eps, self.inference = num_power_iterations, eps, inference
        key = check_key(named(self, "key"), key)
        # In the State, not as buffers: each call in training changes them.
        self.uv_index = StateIndex(_initial_vectors(named(self, "layer"), weight, self.eps, key))

    @uses_key_if(lambda layer: wants_key(layer.layer))
    @in_scope("pm.nn.SpectralNorm")
    def __call__(
        self,
        x: AnyArray,
        state: State | Absent = ABSENT,
        *,
        key: KeyLike | None = None,
        inference: bool | None = None,
    ) -> tuple[Any, State]:
        """Call the layer with its weight rescaled.

        Args:
            x: the layer's input.
            state: has the singular vectors; required.
            key: passed on to the layer.
            inference: overrides the field of that name if not None.

        Returns:
            The layer's output, and the new State.
        """
        where, weight = Title(self, "weight_name"), getattr(self.layer, self.weight_name)
        refuse_label(where, f"{self.weight_name} to be an array", weight)
        state = required_state(where, state)
        u, v = self._vectors(weight, state)
        if self.num_power_iterations and not in_inference(where, self.inference, inference):
            u, v = power_iteration(
                weight, u, v, num_iterations=self.num_power_iterations, eps=self.eps
            )
            state = state.set(self.uv_index, (u, v))
        # Also without a step: inference divides by the last estimate.
        normed = divide_by_spectral_norm(weight, u, v)
        return call_layer(with_weight(self.layer, self.weight_name, normed), x, state, key)

    def _vectors(self, weight: Array, state: State) -> tuple[Array, Array]:
        """Return the singular vectors, after a check that they fit the shape of the weight."""
        u, v = state.get(self.uv_index)
        shape = shape_of(weight)
        if shape is not None and (u.shape, v.shape) == (shape[:1], (math.prod(shape[1:]),)):
            return u, v
        where, hint = str(Title(self, "weight_name")), mapped_hint(self)
        expected = f"a weight whose singular vectors have the shapes {u.shape} and {v.shape}"
        raise ShapeError(where, expected, describe(weight), hint=hint)


def _check_weight(where: str, layer: Any, name: Any) -> Array:
    """Return the array of that name, after checks."""
    weight = weight_by_name(where, layer, name)
    if weight.ndim < 2:
        raise ShapeError(where, "a weight of two axes or more", describe(weight))
    return weight


def _initial_vectors(
    where: str, weight: Array, eps: float, key: PRNGKeyArray
) -> tuple[Array, Array]:
    dtype = computing_dtype(weight.dtype)
    left, right = jax.random.split(key)
    u = jax.random.normal(left, weight.shape[:1], dtype)
    # Also for a weight without rows, whose columns cannot be counted.
    v = jax.random.normal(right, (weight.size // max(weight.shape[0], 1),), dtype)
    u, v = power_iteration(weight, u, v, num_iterations=INITIAL_ITERATIONS, eps=eps)
    # Zero vectors never change by iteration, and the result of the layer would always be NaN.
    if not is_traced(u) and not bool(jnp.any(u)):
        raise ArgumentError(where, "a weight to normalize", "a weight of zeros")
    return u, v
