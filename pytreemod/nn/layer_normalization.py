"""`LayerNorm`: normalizes each example by its mean and variance over the last axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxtyping import Array

from pytreemod.module.unfinished import sizes_follow
from pytreemod.nn.arguments import Title, check_trailing, renamed
from pytreemod.nn.calling import in_scope
from pytreemod.nn.functional.normalization import layer_norm
from pytreemod.nn.initializing import Initializer
from pytreemod.nn.normalizing import TrailingNormalization
from pytreemod.state.key_sources import KeyLike


class LayerNorm(TrailingNormalization):
    r"""Layer normalization: $(x - E[x]) / \sqrt{Var[x] + eps} \cdot w + b$ over trailing axes.

    Computes in float32 or wider, and returns the dtype of x.

    Shapes:
        x: (..., *shape)
        return: (..., *shape)

    Fields:
        weight: shape, or None if use_weight=False
        bias: shape, or None if use_bias=False

    Args:
        shape: the trailing axes over which to normalize: a size, or a sequence of them; None for
            the last one, whose size follows from x ([`materialize`][pytreemod.materialize]).
        eps: added to the variance, >= 0.
        use_weight: whether to multiply by a weight, initially one.
        use_bias: whether to add a bias, initially zero.
        dtype: of weight and bias; JAX's default float if None.
        elementwise_affine: an older name of `use_weight` and `use_bias` together, with a
            warning.
        weight_init: `(key, shape, dtype) -> array`, for the weight; ones if None.
        bias_init: the same for the bias; zeros if None.
        key: used once, for weight_init and bias_init; not needed without them.

    State and randomness: none. A State that is passed in is returned with the result.

    Raises:
        ArgumentError: if an argument is invalid, or x is not floating.
        RngError: if key is not a random key, or is missing for an initializer.
        ShapeError: if x does not end in shape, or weight or bias does not have the shape above.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.LayerNorm(2, eps=0.0)(jnp.array([[1.0, 3.0], [2.0, 0.0]])).tolist()
        [[-1.0, 1.0], [1.0, -1.0]]

    Source:
        Ba, Kiros & Hinton 2016, https://arxiv.org/abs/1607.06450, eq. (4).
    """

    @sizes_follow(shape=lambda x: x.shape[-1])
    def __init__(
        self,
        shape: int | Sequence[int] | None,
        eps: int | float = 1e-5,
        use_weight: bool = True,
        use_bias: bool = True,
        dtype: Any = None,
        *,
        elementwise_affine: bool | None = None,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        key: KeyLike | None = None,
    ):
        if elementwise_affine is not None:
            old, new = "elementwise_affine", ("use_weight", "use_bias")
            use_weight = use_bias = renamed("LayerNorm(...)", old, elementwise_affine, *new)
        self.shape = shape  # pyright: ignore[reportAttributeAccessIssue]  (None is refused)
        self.eps, self.use_weight, self.use_bias = eps, use_weight, use_bias
        self._start(dtype, weight_init, bias_init, key)

    __call__ = in_scope("pm.nn.LayerNorm")(TrailingNormalization.__call__)

    def _normalize(self, where: Title, x: Array, weight: Any, bias: Any) -> Array:
        check_trailing(where, x, self.shape)
        return layer_norm(x, self.shape, weight, bias, eps=self.eps)
