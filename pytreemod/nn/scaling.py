"""A layer of learned factors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxtyping import Array, Inexact, Shaped

from pytreemod.module.field_kinds import assign_fields, sizes
from pytreemod.nn.arguments import (
    Title,
    check_array,
    check_dtype,
    check_key,
    check_spread,
    named,
    own_arrays,
)
from pytreemod.nn.calling import ignores_key, in_scope
from pytreemod.nn.functional.linear_functions import scale
from pytreemod.nn.initializing import Initializer, filled, initialize
from pytreemod.nn.layer import Layer
from pytreemod.state.key_sources import KeyLike
from pytreemod.typing import AnyArray


class Scale(Layer):
    r"""Multiplies the last axes of x by learned factors, entry by entry: $y = w x$.

    For example, with small initial values (`weight_init`), a residual branch has little effect at
    first.

    Shapes:
        x: (..., *shape), where 1 in shape means any size
        return: the shape of x

    Fields:
        weight: shape

    Args:
        shape: of the factors: a size, or a sequence of them; `()` for a single one. A factor for
            each channel of an image is of shape `(channels, 1, 1)`.
        dtype: of weight; JAX's default float if None.
        weight_init: `(key, shape, dtype) -> array`; ones if None.
        key: used once, for weight_init; not needed without it.

    State and randomness: none.

    Raises:
        ArgumentError: if an argument is invalid.
        RngError: if key is not a random key, or is missing for an initializer.
        ShapeError: if shape cannot be broadcast to the last axes of x, or weight does not have the
            shape above.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> small = jax.nn.initializers.constant(0.25)
        >>> nn.Scale(2, weight_init=small, key=jax.random.key(0))(jnp.ones((3, 2)))[0].tolist()
        [0.25, 0.25]

    Source:
        Touvron et al. 2021, https://arxiv.org/abs/2103.17239, eq. (4).
    """

    shape: tuple[int, ...] = sizes()
    weight: Inexact[Array, "*shape"]

    def __init__(
        self,
        shape: int | Sequence[int] = (),
        dtype: Any = None,
        *,
        weight_init: Initializer | None = None,
        key: KeyLike | None = None,
    ):
        assign_fields(self, shape=shape)
        dtype = check_dtype(named(self, "dtype"), dtype)
        # Ones need no key, but an invalid key is refused.
        drawn_with: Any = None
        if key is not None or weight_init is not None:
            drawn_with = check_key(named(self, "key"), key)
        if weight_init is None:
            self.weight = filled(1.0, self.shape, dtype)
        else:
            where = named(self, "weight_init")
            self.weight = initialize(where, weight_init, drawn_with, self.shape, dtype)

    @ignores_key
    @in_scope("pm.nn.Scale")
    def __call__(self, x: AnyArray, *, key: KeyLike | None = None) -> Shaped[Array, ...]:
        """Multiply the last axes of x; `key` is ignored."""
        del key
        where = Title(self, "shape")
        (weight,) = own_arrays(where, "weight")
        x = check_array(where, x)
        check_spread(where, x, self.shape)
        return scale(x, weight)
