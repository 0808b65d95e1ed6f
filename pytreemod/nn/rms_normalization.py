"""`RMSNorm`: each example divided by its root mean square."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from jaxtyping import Array, Inexact, Shaped

from pytreemod.module.field_kinds import array, as_sequence, check_flag, check_number, check_sizes
from pytreemod.module.fields import field
from pytreemod.module.unfinished import sizes_follow
from pytreemod.nn.arguments import (
    Title,
    check_array,
    check_dtype,
    check_floating,
    check_kept,
    check_state,
    check_trailing,
    named,
    own_arrays,
)
from pytreemod.nn.calling import ABSENT, Absence, Absent, ignores_key, in_scope
from pytreemod.nn.functional.normalization import rms_norm
from pytreemod.nn.initializing import Initializer, initial_affine
from pytreemod.nn.layer import Layer
from pytreemod.state.key_sources import KeyLike
from pytreemod.state.values import State
from pytreemod.typing import AnyArray


class RMSNorm(Layer):
    r"""Root mean square normalization: $x / \sqrt{E[x^2] + eps} \cdot w + b$ over trailing axes.

    `LayerNorm` without its mean. Computed in float32 or wider, returned in the dtype of x.

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
        use_bias: whether to add a bias, which PyTorch's and Flax's have not.
        dtype: of weight and bias; JAX's default float if None.
        weight_init: `(key, shape, dtype) -> array`, for the weight; one if None.
        bias_init: the same for the bias; zero if None.
        key: used once, for weight_init and bias_init; not needed without.

    State and randomness: none. A State passed in is handed back beside the result.

    Raises:
        ArgumentError: an argument is unusable, or x is not floating.
        RngError: key is no random key, or an initializer has none.
        ShapeError: x does not end in shape, or weight or bias has not the shape above.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> nn.RMSNorm(2, eps=0.0)(jnp.array([[3.0, 3.0], [0.0, 0.5]])).tolist()
        [[1.0, 1.0], [0.0, 1.41...]]

    Source:
        Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467, eq. (4); the default of eps as
        Equinox's. That of `torch.nn.RMSNorm` is the epsilon of x's dtype.
    """

    shape: tuple[int, ...] = field(static=True)
    eps: float = field(static=True)
    use_weight: bool = field(static=True)
    use_bias: bool = field(static=True)
    weight: Inexact[Array, "*shape"] | None = array(given="use_weight")
    bias: Inexact[Array, "*shape"] | None = array(given="use_bias")

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
        sizes = as_sequence(shape)
        count = 1 if sizes is None else len(sizes)
        self.shape = check_sizes(named(self, "shape"), shape, count)
        self.eps = check_number(named(self, "eps"), eps, 0.0)
        self.use_weight = check_flag(named(self, "use_weight"), use_weight)
        self.use_bias = check_flag(named(self, "use_bias"), use_bias)
        dtype = check_dtype(named(self, "dtype"), dtype, real=True)
        shapes = (self._size(self.use_weight), self._size(self.use_bias))
        self.weight, self.bias = initial_affine(self, shapes, dtype, (weight_init, bias_init), key)

    def __check_init__(self) -> None:
        # Here as well, for `replace` and `with_mode` come this way.
        sizes = as_sequence(self.shape)
        count = 1 if sizes is None else len(sizes)
        check_kept(self, "shape", check_sizes(named(self, "shape"), self.shape, count))
        check_number(named(self, "eps"), self.eps, 0.0)

    @overload
    def __call__(self, x: AnyArray, *, key: KeyLike | None = None) -> Shaped[Array, ...]: ...

    @overload
    def __call__(
        self, x: AnyArray, state: State, *, key: KeyLike | None = None
    ) -> tuple[Shaped[Array, ...], State]: ...

    @ignores_key
    @in_scope("pm.nn.RMSNorm")
    def __call__(
        self,
        x: AnyArray,
        state: State | Absent = ABSENT,
        *,
        key: KeyLike | None = None,
    ) -> Shaped[Array, ...] | tuple[Shaped[Array, ...], State]:
        """Normalize the trailing axes of x; `key` is ignored, `state` handed back if given."""
        del key
        where = Title(self, "shape")
        # It needs none, and hands it back: so it may stand in the place of a BatchNorm.
        check_state(where, state)
        weight, bias = own_arrays(where, "weight", "bias")
        x = check_array(where, x)
        check_floating(where, x)
        check_trailing(where, x, self.shape)
        out = rms_norm(x, self.shape, weight, bias, eps=self.eps)
        return out if isinstance(state, Absence) else (out, state)

    def _size(self, is_used: bool) -> tuple[int, ...] | None:
        return self.shape if is_used else None
