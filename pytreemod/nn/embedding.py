"""The embedding layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Inexact, Integer, Shaped

from pytreemod.errors import ArgumentError, describe
from pytreemod.module.classes import Module
from pytreemod.module.fields import field
from pytreemod.nn.base import (
    AnyArray,
    Initializer,
    check_shape,
    float_dtype,
    layer_call,
    one_key,
    title,
    wide_dtype,
)
from pytreemod.state.key_sources import KeyLike


class Embedding(Module):
    """A table of vectors, read by row number.

    $y_i = W_{x_i}$.

    Shapes:
        x: any, of integers
        return: (*x.shape, embedding_size)

    Fields:
        weight: (num_embeddings, embedding_size)

    Args:
        num_embeddings: number of rows; taken from weight if None.
        embedding_size: size of each row; taken from weight if None.
        weight: the table; drawn from a normal distribution if None.
        dtype: of the drawn table; JAX's default float if None.
        key: used once, for the initial table; not needed with weight.
        weight_init: `(key, shape, dtype) -> array`, called with
            `(num_embeddings, embedding_size)`.

    State and randomness: none.

    Raises:
        ArgumentError: in the call, if x is not integer.
        ShapeError: in the call, if weight does not have the shape above.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> layer = nn.Embedding(10, 4, key=jax.random.key(0))
        >>> layer(jnp.array([[1, 2, 3]])).shape
        (1, 3, 4)
        >>> nn.Embedding(weight=jnp.eye(2))(1)
        Array([0., 1.], dtype=float32)

    Source:
        Initial values N(0, 1), as in `torch.nn.Embedding`. A row number out of range gives NaN,
        never another row.
    """

    num_embeddings: int = field(static=True)
    embedding_size: int = field(static=True)
    weight: Inexact[Array, "num_embeddings embedding_size"]

    def __init__(
        self,
        num_embeddings: int | None = None,
        embedding_size: int | None = None,
        weight: Inexact[ArrayLike, "num_embeddings embedding_size"] | None = None,
        dtype: Any = None,
        *,
        key: KeyLike | None = None,
        weight_init: Initializer | None = None,
    ):
        if weight is None:
            shape: Any = (num_embeddings, embedding_size)
            weight = (weight_init or jax.random.normal)(one_key(key), shape, float_dtype(dtype))
        self.weight = jnp.asarray(weight)
        rows, size = self.weight.shape
        self.num_embeddings = rows if num_embeddings is None else num_embeddings
        self.embedding_size = size if embedding_size is None else embedding_size

    @layer_call(features=("weight", 1, -1))
    def __call__(
        self, x: Integer[ArrayLike, ...], *, key: KeyLike | None = None
    ) -> Shaped[Array, ...]:
        """Read the rows with the numbers in x; `key` is ignored."""
        # JAX would cut NumPy's 64 bits to 32, which may be the number of another row.
        rows: Any = x if isinstance(x, (np.ndarray, np.generic)) else jnp.asarray(x)
        if not jnp.issubdtype(rows.dtype, jnp.integer):
            raise ArgumentError(title(self), "x of an integer dtype", describe(rows))
        limits = jnp.iinfo(rows.dtype)
        if limits.bits > 32:
            rows = rows.clip(max(-self.num_embeddings - 1, int(limits.min)), self.num_embeddings)
        # JAX adds num_embeddings to negative numbers in their own dtype, in which it may overflow.
        rows = jnp.asarray(rows, jnp.int32 if limits.bits < 32 else None)
        narrow = wide_dtype(self.weight.dtype) != self.weight.dtype
        return (_read_narrow if narrow else _read)(self.weight, rows)

    @layer_call(features=("weight", 0, -1))
    def attend(self, x: AnyArray) -> Shaped[Array, ...]:
        """Compute the product of x with each row, such as the logits of tied weights.

        Args:
            x: vectors of embedding_size entries, with any number of leading axes.

        Returns:
            An array of shape (..., num_embeddings).

        Raises:
            ShapeError: if the last axis of x does not have embedding_size entries, or weight does
                not have the shape of the class.

        Examples:
            >>> import jax.numpy as jnp
            >>> from pytreemod import nn
            >>> layer = nn.Embedding(weight=jnp.array([[1.0, 0.0], [0.5, 2.0]]))
            >>> layer.attend(jnp.array([2.0, 1.0]))
            Array([2., 3.], dtype=float32)
        """
        return jnp.inner(check_shape(self, x, ..., self.embedding_size), self.weight)


def _read(weight: Array, rows: Array, fill: Any = None) -> Array:
    # Not `weight[rows]`, which clips a number out of range to the last row.
    return jnp.take(weight, rows, axis=0, mode="fill", fill_value=fill)


@jax.custom_jvp
def _read_narrow(weight: Array, rows: Array) -> Array:
    return _read(weight, rows)


@_read_narrow.defjvp
def _tangent_of_narrow(primals: tuple[Array, Array], tangents: tuple[Array, Any]) -> Any:
    """Compute in float32, so that the gradient of a row is summed over its uses in float32."""
    weight, rows = primals
    change = _read(tangents[0].astype(wide_dtype(weight.dtype)), rows, 0)
    return _read(weight, rows), change.astype(weight.dtype)
