"""The embedding layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Inexact, Integer, Shaped

from pytreemod.errors import ArgumentError, ShapeError, describe
from pytreemod.module.field_kinds import assign_fields, size
from pytreemod.nn.arguments import Title, check_array, check_last_axis, named, own_arrays
from pytreemod.nn.calling import ignores_key, in_scope
from pytreemod.nn.functional.embeddings import embedding
from pytreemod.nn.functional.linear_functions import linear
from pytreemod.nn.initializing import Initializer, begin, initialize
from pytreemod.nn.layer import Layer
from pytreemod.state.key_sources import KeyLike
from pytreemod.typing import AnyArray


class Embedding(Layer):
    """A table of vectors, read by row number.

    $y_i = W_{x_i}$.

    Shapes:
        x: any, of integers
        return: (*x.shape, embedding_size)

    Fields:
        weight: (num_embeddings, embedding_size)

    Args:
        num_embeddings: number of rows, >= 0; taken from weight if None.
        embedding_size: size of each row, >= 0; taken from weight if None.
        weight: the table; drawn from a normal distribution if None.
        dtype: of the drawn table; JAX's default float if None.
        key: used once, for the initial table; not needed with weight.
        weight_init: `(key, shape, dtype) -> array`, called with
            `(num_embeddings, embedding_size)`.

    State and randomness: none.

    Raises:
        ArgumentError: if neither sizes nor weight are given, they disagree, or x is not integer.
        RngError: if key is not a random key.
        ShapeError: if weight does not have two axes; or, in a call, the shape above.

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

    num_embeddings: int = size()
    embedding_size: int = size()
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
            self._check_sizes_given(num_embeddings, embedding_size)
            assign_fields(self, num_embeddings=num_embeddings, embedding_size=embedding_size)
            dtype, first = begin(self, dtype, key)
            shape = (self.num_embeddings, self.embedding_size)
            start = jax.random.normal if weight_init is None else weight_init
            weight = initialize(named(self, "weight_init"), start, first, shape, dtype)
        self.weight = self._check_weight(weight, num_embeddings, embedding_size)
        # From the table: the sizes are optional if it is given.
        self.num_embeddings, self.embedding_size = self.weight.shape

    @ignores_key
    @in_scope("pm.nn.Embedding")
    def __call__(
        self, x: Integer[ArrayLike, ...], *, key: KeyLike | None = None
    ) -> Shaped[Array, ...]:
        """Read the rows with the numbers in x; `key` is ignored."""
        del key
        where = Title(self, "num_embeddings", "embedding_size")
        (weight,) = own_arrays(where, "weight")
        # NumPy arrays are not converted: 64 bits would become 32, which may select another row.
        rows: Any = x if isinstance(x, (np.ndarray, np.generic)) else check_array(where, x)
        if not jnp.issubdtype(rows.dtype, jnp.integer):
            raise ArgumentError(where, "x of an integer dtype", describe(rows))
        return embedding(rows, weight)

    @in_scope("pm.nn.Embedding.attend")
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
        where = Title(self, "num_embeddings", "embedding_size")
        (weight,) = own_arrays(where, "weight")
        x = check_array(where, x)
        check_last_axis(where, x, self.embedding_size, "embedding_size")
        return linear(x, weight)

    def _check_sizes_given(self, num_embeddings: Any, embedding_size: Any) -> None:
        if num_embeddings is None or embedding_size is None:
            hint = ("Write", "Embedding(num_embeddings, embedding_size, key=key)")
            where = f"{type(self).__name__}(num_embeddings, embedding_size)"
            got = f"{num_embeddings} and {embedding_size}"
            raise ArgumentError(where, "both, or weight=", got, hint=hint)

    def _check_weight(self, weight: Any, num_embeddings: Any, embedding_size: Any) -> Array:
        where = named(self, "weight")
        weight = check_array(where, weight)
        if weight.ndim != 2:
            expected = "shape (num_embeddings, embedding_size)"
            raise ShapeError(where, expected, describe(weight))
        given = (num_embeddings, embedding_size)
        if any(size not in (None, n) for size, n in zip(given, weight.shape, strict=True)):
            expected = f"num_embeddings={given[0]} rows of embedding_size={given[1]}"
            raise ArgumentError(where, expected, describe(weight))
        return weight
