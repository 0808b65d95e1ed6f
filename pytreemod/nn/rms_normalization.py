"""`RMSNorm`: divides each example by its root mean square."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxtyping import Array

from pytreemod.module.unfinished import sizes_follow
from pytreemod.nn.arguments import Title, check_trailing
from pytreemod.nn.calling import in_scope
from pytreemod.nn.functional.normalization import rms_norm
from pytreemod.nn.initializing import Initializer
from pytreemod.nn.normalizing import TrailingNormalization
from pytreemod.state.key_sources import KeyLike


class RMSNorm(TrailingNormalization):
    r"""Root mean square normalization: $x / \sqrt{E[x^2] + eps} \cdot w + b$ over trailing axes.

    `LayerNorm` without the mean. Computes in float32 or wider, and returns the dtype of x.

    Shapes:
        x: (..., *shape)
        return: (..., *shape)

    Fields:
        weight: shape, or None if use_weight=False
        bias: shape, or None if use_bias=False

    Args:
        shape: the trailing axes over which to normalize: a size, or a sequence of them; None for
            the last one, whose size follows from x ([`materialize`][pytreemod.materialize]).
        eps: added to the mean of the squares, >= 0.
        use_weight: whether to multiply by a weight.
        use_bias: whether to add a bias, which PyTorch and Flax do not have.
        dtype: of weight and bias; JAX's default float if None.
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
        >>> nn.RMSNorm(2, eps=0.0)(jnp.array([[3.0, 3.0], [0.0, 0.5]])).tolist()
        [[1.0, 1.0], [0.0, 1.41...]]

    Source:
        Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467, eq. (4). The default of eps is
        Equinox's; `torch.nn.RMSNorm` uses the epsilon of the dtype of x.
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
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        key: KeyLike | None = None,
    ):
        self.shape = shape  # pyright: ignore[reportAttributeAccessIssue]  (None is refused)
        self.eps, self.use_weight, self.use_bias = eps, use_weight, use_bias
        self._start(dtype, weight_init, bias_init, key)

    __call__ = in_scope("pm.nn.RMSNorm")(TrailingNormalization.__call__)

    def _normalize(self, where: Title, x: Array, weight: Any, bias: Any) -> Array:
        check_trailing(where, x, self.shape)
        return rms_norm(x, self.shape, weight, bias, eps=self.eps)
