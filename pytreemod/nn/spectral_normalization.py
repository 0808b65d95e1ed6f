"""Layers that rescale the weight of another layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from pytreemod.errors import ArgumentError, ShapeError, describe
from pytreemod.module.field_kinds import (
    flag,
    is_traced,
    number,
    size,
)
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

    $W / \sigma$ with $\sigma = u^\top W v$, where u and v are the first singular vectors, nearly.

    That bounds how much the layer can stretch its input, as the discriminator of a generative
    adversarial network wants it. The singular value is estimated by power iteration, which goes on
    from call to call while training, and is constant in inference mode.

    Shapes:
        x: whatever the layer takes
        return: whatever the layer gives, and State

    Fields:
        layer: the layer, with its weight as it is trained
        uv_index: token of the first singular vectors, (u, v), in float32 or wider

    Args:
        layer: a Module that can be called, such as `Linear` or `Conv2d`.
        weight_name: the field to rescale, an array of two axes or more. All axes but the first
            are taken as one.
        num_power_iterations: how many power iterations to do at each call when training, >= 0.
        eps: a norm smaller than this is not divided by, >= 0.
        inference: whether to leave the singular vectors alone, see `inference_mode`.
        key: used once, for the vectors from which 15 power iterations start.

    State and randomness: reads `uv_index`, and writes it when training. State and key are passed
        on to the layer if it takes them.

    Raises:
        ArgumentError: an argument is invalid, or the weight is complex or all zero.
        RngError: key is not a random key.
        ShapeError: the weight has fewer than two axes, or not those of its singular vectors.

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
        # In the State, and no buffers: they move on with each call while training.
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
            state: holds the singular vectors; it cannot be left out.
            key: passed on to the layer.
            inference: overrides the field of that name if not None.

        Returns:
            The layer's output, and the State to go on with.
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
        # Also without a step: in inference the weight is divided by what was found last.
        normed = divide_by_spectral_norm(weight, u, v)
        return call_layer(with_weight(self.layer, self.weight_name, normed), x, state, key)

    def _vectors(self, weight: Array, state: State) -> tuple[Array, Array]:
        """The singular vectors; refused if they are not those of a weight of that shape."""
        u, v = state.get(self.uv_index)
        shape = shape_of(weight)
        if shape is not None and (u.shape, v.shape) == (shape[:1], (math.prod(shape[1:]),)):
            return u, v
        where, hint = str(Title(self, "weight_name")), mapped_hint(self)
        expected = f"a weight whose singular vectors have the shapes {u.shape} and {v.shape}"
        raise ShapeError(where, expected, describe(weight), hint=hint)


def _check_weight(where: str, layer: Any, name: Any) -> Array:
    """The array of that name."""
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
    # Also for a weight without rows, which has no columns that could be counted.
    v = jax.random.normal(right, (weight.size // max(weight.shape[0], 1),), dtype)
    u, v = power_iteration(weight, u, v, num_iterations=INITIAL_ITERATIONS, eps=eps)
    # From zero vectors no iteration leads away, and the layer would give nan forever.
    if not is_traced(u) and not bool(jnp.any(u)):
        raise ArgumentError(where, "a weight to normalize", "one that is all zero")
    return u, v
