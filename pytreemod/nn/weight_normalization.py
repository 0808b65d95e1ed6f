"""`WeightNorm`: a weight that is trained as directions and lengths."""

from __future__ import annotations

from typing import Any, TypeVar

import jax.numpy as jnp
from jaxtyping import Array

from pytreemod.errors import ArgumentError
from pytreemod.module.computed_leaves import Computed
from pytreemod.module.fields import field
from pytreemod.nn.base import wide_dtype
from pytreemod.tree.surgery import tree_at
from pytreemod.typing import Tracer

_L = TypeVar("_L")


def WeightNorm(layer: _L, weight_name: Any = "weight", axis: int | None = 0) -> _L:
    r"""Let a layer train a weight as directions and lengths: $g_i \, v_i / \lVert v_i \rVert$.

    There is a direction and a length for each slice of the weight along `axis`. In the matrix of a
    `Linear`, a slice is a row, which computes one number of the output. The weight of the result is
    a [`Computed`][pytreemod.Computed] leaf with two arrays: `weight.v`, initially the old weight,
    and `weight.g`, initially its lengths. So at first the layer computes the same.

    To share `v` with another weight, use `pm.tie(layer, "weight.v", to=...)` afterwards.

    Args:
        layer: a Module, such as `Linear` or `Conv2d`.
        weight_name: the field, a path such as `"query_proj.weight"`, or whatever
            [`tree_at`][pytreemod.tree_at] accepts; each of several weights is normalized.
        axis: the axis of the slices; if None, the whole weight is one slice.

    Returns:
        The layer with such a weight.

    Raises:
        ArgumentError: if the weight has a slice of zeros, which has no direction.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import pytreemod as pm
        >>> from pytreemod import nn
        >>> linear = nn.Linear(3, 2, key=jax.random.key(0))
        >>> layer = nn.WeightNorm(linear)
        >>> bool(jnp.allclose(layer(jnp.ones(3)), linear(jnp.ones(3))))
        True
        >>> {name: leaf.shape for name, leaf in pm.named_leaves(layer).items()}
        {'weight.v': (2, 3), 'weight.g': (2, 1), 'bias': (2,)}

    Source:
        Salimans & Kingma 2016, https://arxiv.org/abs/1602.07868, eq. (2).
    """

    def normed(weight: Any) -> NormedWeight:
        # A weight that is computed itself stays so: what it is computed from is trained.
        g = _lengths(jnp.asarray(weight), axis)
        if not isinstance(g, Tracer) and not g.all():
            raise ArgumentError("WeightNorm(layer): a slice of zeros has no direction")
        return NormedWeight(weight, g, axis)

    return tree_at(weight_name, layer, replace_fn=normed)


class NormedWeight(Computed):
    """What `WeightNorm` puts in place of a weight."""

    v: Array
    g: Array
    axis: int | None = field(static=True)

    def value(self) -> Array:
        """Return the weight, computed in float32 or wider."""
        wide = wide_dtype(self.v.dtype)
        # The length is rounded as g is, so that equal ones cancel in half precision, too.
        factor = self.g.astype(wide) / _lengths(self.v, self.axis).astype(wide)
        return (self.v.astype(wide) * factor).astype(self.v.dtype)


def _lengths(v: Array, axis: int | None) -> Array:
    """The length of each slice along one axis; the other axes keep size one."""
    own = None if axis is None else range(v.ndim)[axis]
    wide = v.astype(wide_dtype(v.dtype))
    squares = jnp.square(wide) if jnp.isrealobj(v) else jnp.real(wide * wide.conj())
    others = [i for i in range(v.ndim) if i != own]
    return jnp.sqrt(jnp.sum(squares, others, keepdims=True)).astype(jnp.real(v).dtype)
