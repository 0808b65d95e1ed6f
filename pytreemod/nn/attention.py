"""`MultiheadAttention`: what a sequence finds in another one, or in itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Shaped

from pytreemod.errors import ArgumentError, RngError, ShapeError, describe, explain
from pytreemod.module.classes import Module
from pytreemod.module.fields import field
from pytreemod.nn.arguments import (
    Title,
    as_sequence,
    check_array,
    check_dtype,
    check_flag,
    check_key,
    check_number,
    check_size,
    divide_key,
    named,
    renamed,
)
from pytreemod.nn.calling import uses_key_if, wants_key
from pytreemod.nn.dropout import Dropout
from pytreemod.nn.functional.attention import dot_product_attention
from pytreemod.nn.initializing import Initializer
from pytreemod.nn.linear import Linear
from pytreemod.state.key_sources import KeyLike
from pytreemod.typing import AnyArray

Heads: TypeAlias = Shaped[Array, "*batch seq heads size"]
ProcessHeads: TypeAlias = Callable[[Heads, Heads, Heads], tuple[Heads, Heads, Heads]]
"""From the heads of queries, keys and values to those that are used, of the same shapes."""


class MultiheadAttention(Module):
    r"""Each query finds a mean of values: $\mathrm{softmax}(q k^\top / \sqrt{d}) \, v$, by heads.

    Queries, keys and values are projected to num_heads vectors each, every head attends for
    itself, and what all of them find is projected once more.

    Called with one sequence it attends to itself: key_ is the query, and value the key, where they
    are left out.

    Shapes:
        query: (..., q_seq, query_size)
        key_: (..., kv_seq, key_size)
        value: (..., kv_seq, value_size)
        mask: (q_seq, kv_seq), (num_heads, q_seq, kv_seq), or (..., num_heads, q_seq, kv_seq)
        return: (..., q_seq, output_size)

    Fields:
        query_proj: Linear, its weight of shape (num_heads * qk_size, query_size)
        key_proj: Linear, its weight of shape (num_heads * qk_size, key_size)
        value_proj: Linear, its weight of shape (num_heads * vo_size, value_size)
        output_proj: Linear, its weight of shape (output_size, num_heads * vo_size)
        dropout: Dropout, of the attention's weights

    Args:
        num_heads: number of heads, >= 1.
        query_size: size of a query.
        key_size: size of a key; that of a query if None.
        value_size: size of a value; that of a query if None.
        output_size: size of what is returned; that of a query if None.
        qk_size: size in which a head compares; query_size // num_heads, without a rest, if None.
        vo_size: size of what a head finds; query_size // num_heads, without a rest, if None.
        use_query_bias: whether the projection of queries has a bias.
        use_key_bias: whether that of keys has one.
        use_value_bias: whether that of values has one.
        use_output_bias: whether the last projection has one.
        dropout_p: probability with which a weight is dropped while training, from 0 to 1.
        inference: whether nothing is dropped, see `inference_mode`.
        dtype: of all weights and biases; JAX's default float if None.
        key: used once, for the initial weights and biases.
        weight_init: passed on to every `Linear`.
        bias_init: passed on to every `Linear`.

    State and randomness: uses one key when training, if dropout_p is not 0.

    Raises:
        ArgumentError: an argument is unusable, num_heads does not divide query_size where it must,
            or mask is not boolean.
        RngError: training without a key, or key is no random key.
        ShapeError: a sequence has not the size above, keys and values or batches are not equally
            many, or mask or what process_heads gives has another shape.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> layer = nn.MultiheadAttention(num_heads=2, query_size=4, key=jax.random.key(0))
        >>> x = jnp.ones((7, 5, 4))
        >>> layer(x, x, x).shape, layer(x).shape
        ((7, 5, 4), (7, 5, 4))

        Each place may see itself and those before it:

        >>> layer(x, x, x, mask=jnp.tril(jnp.ones((5, 5), bool))).shape
        (7, 5, 4)

    Source:
        Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, sec. 3.2.2; sizes and initial
        values as in Equinox.
    """

    query_proj: Linear
    key_proj: Linear
    value_proj: Linear
    output_proj: Linear
    dropout: Dropout
    num_heads: int = field(static=True)
    query_size: int = field(static=True)
    key_size: int = field(static=True)
    value_size: int = field(static=True)
    output_size: int = field(static=True)
    qk_size: int = field(static=True)
    vo_size: int = field(static=True)
    use_query_bias: bool = field(static=True)
    use_key_bias: bool = field(static=True)
    use_value_bias: bool = field(static=True)
    use_output_bias: bool = field(static=True)

    def __init__(
        self,
        num_heads: int,
        query_size: int,
        key_size: int | None = None,
        value_size: int | None = None,
        output_size: int | None = None,
        qk_size: int | None = None,
        vo_size: int | None = None,
        use_query_bias: bool = False,
        use_key_bias: bool = False,
        use_value_bias: bool = False,
        use_output_bias: bool = False,
        dropout_p: int | float = 0.0,
        inference: bool = False,
        dtype: Any = None,
        *,
        key: KeyLike,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
    ):
        heads = self.num_heads = check_size(named(self, "num_heads"), num_heads, 1)
        own_size = self.query_size = check_size(named(self, "query_size"), query_size)
        self.key_size = self._size("key_size", key_size, own_size)
        self.value_size = self._size("value_size", value_size, own_size)
        self.output_size = self._size("output_size", output_size, own_size)
        self.qk_size = self._head_size("qk_size", qk_size)
        self.vo_size = self._head_size("vo_size", vo_size)
        self.use_query_bias = check_flag(named(self, "use_query_bias"), use_query_bias)
        self.use_key_bias = check_flag(named(self, "use_key_bias"), use_key_bias)
        self.use_value_bias = check_flag(named(self, "use_value_bias"), use_value_bias)
        self.use_output_bias = check_flag(named(self, "use_output_bias"), use_output_bias)
        # Under the names that they have here; Dropout calls them otherwise.
        p = check_number(named(self, "dropout_p"), dropout_p, 0.0, 1.0)
        self.dropout = Dropout(p, check_flag(named(self, "inference"), inference))

        dtype = check_dtype(named(self, "dtype"), dtype)
        # Taken apart in one go: to read one key after the other takes as long as to make a layer.
        for_query, for_key, for_value, for_output = divide_key(named(self, "key"), key, 4)
        linear = partial(Linear, dtype=dtype, weight_init=weight_init, bias_init=bias_init)
        compared, found = heads * self.qk_size, heads * self.vo_size
        self.query_proj = linear(own_size, compared, self.use_query_bias, key=for_query)
        self.key_proj = linear(self.key_size, compared, self.use_key_bias, key=for_key)
        self.value_proj = linear(self.value_size, found, self.use_value_bias, key=for_value)
        self.output_proj = linear(found, self.output_size, self.use_output_bias, key=for_output)

    def __check_init__(self) -> None:
        # Here as well, for `replace` and `with_mode` come this way.
        check_size(named(self, "num_heads"), self.num_heads, 1)
        for name in ("query_size", "key_size", "value_size", "output_size", "qk_size", "vo_size"):
            check_size(named(self, name), getattr(self, name))

    @uses_key_if(lambda layer: wants_key(layer.dropout))
    @jax.named_scope("pm.nn.MultiheadAttention")
    def __call__(
        self,
        query: AnyArray,
        key_: AnyArray | None = None,
        value: AnyArray | None = None,
        mask: Bool[Array, ...] | None = None,
        *,
        key: KeyLike | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        process_heads: ProcessHeads | None = None,
    ) -> Shaped[Array, ...]:
        """Let each query find its mean of values.

        Args:
            query: what looks.
            key_: what is looked at; the query itself if None.
            value: what is found there; the keys themselves if None.
            mask: True where a query may look; a query that may look nowhere looks everywhere alike.
                (PyTorch's masks say the opposite: where it may not.)
            key: decides which weights are dropped.
            inference: overrides that of `dropout` if not None.
            deterministic: an older name of `inference`, which is told by a warning.
            process_heads: from the projected queries, keys and values, each of shape
                (..., seq, num_heads, size), to those that are used, of the same shapes; see
                `RotaryPositionalEmbedding` for one.

        Returns:
            What is found, an output for each query.
        """
        where = Title(self, "num_heads", "query_size")
        if deterministic is not None:
            inference = renamed(str(where), "deterministic", deterministic, "inference")
        key_ = query if key_ is None else key_
        query, key_, value = self._sequences(where, query, key_, key_ if value is None else value)
        heads = (
            self._projected(where, "query_proj", query, self.qk_size),
            self._projected(where, "key_proj", key_, self.qk_size),
            self._projected(where, "value_proj", value, self.vo_size),
        )
        if process_heads is not None:
            heads = _processed(where, process_heads, heads)
        mask = _check_mask(where, mask, (*query.shape[:-2], self.num_heads), query, key_)
        dropout = partial(self._dropped, where, key, inference)
        found = dot_product_attention(*heads, mask, dropout=dropout)
        return self.output_proj(found.reshape((*query.shape[:-1], self.num_heads * self.vo_size)))

    @property
    def deterministic(self) -> bool:
        """An older name of the `inference` of `dropout`."""
        return self.dropout.inference

    def _size(self, name: str, size: Any, other: int) -> int:
        """A size that was given, or else another one."""
        return other if size is None else check_size(named(self, name), size)

    def _head_size(self, name: str, size: Any) -> int:
        """A size that was given, or else a head's share of the query's."""
        where = named(self, name)
        if size is not None:
            return check_size(where, size)
        share, rest = divmod(self.query_size, self.num_heads)
        if rest != 0:
            expected = f"num_heads to divide query_size={self.query_size}, or a size of its own"
            cure = ("If heads are to have another size, say which:", f"{name}={share}")
            raise ArgumentError(explain(where, expected, f"num_heads={self.num_heads}", cure=cure))
        return share

    def _sequences(self, where: Title, query: Any, key_: Any, value: Any) -> tuple[Array, ...]:
        """Queries, keys and values that go together."""
        sizes = (self.query_size, self.key_size, self.value_size)
        names = ("query", "key_", "value")
        found = tuple(
            _check_sequence(where, name, x, size)
            for name, x, size in zip(names, (query, key_, value), sizes, strict=True)
        )
        query, key_, value = found
        if value.shape[:-1] != key_.shape[:-1]:
            expected = "a value for each key"
            got = f"key_ {describe(key_)} and value {describe(value)}"
            raise ShapeError(explain(str(where), expected, got))
        if query.shape[:-2] != key_.shape[:-2]:
            cure: Sequence[str] = (
                "For all queries the same keys and values:",
                "jax.vmap(lambda query: layer(query, key_, value))(queries)",
            )
            expected = "equal batch axes of query and key_"
            got = f"query {describe(query)} and key_ {describe(key_)}"
            raise ShapeError(explain(str(where), expected, got, cure=cure))
        return found

    def _projected(self, where: Title, name: str, x: Array, size: int) -> Array:
        """The heads of a sequence: (..., seq, num_heads, size)."""
        y = getattr(self, name)(x)
        wanted = (*x.shape[:-1], self.num_heads * size)
        if y.shape != wanted:
            expected = f"{name} to give shape {wanted}, for {self.num_heads} heads of {size}"
            cure = (
                "Projections and sizes go together; where they change, they change in one step:",
                f"layer = layer.replace({name}={name}, num_heads=..., qk_size=..., vo_size=...)",
            )
            raise ShapeError(explain(str(where), expected, describe(y), cure=cure))
        return y.reshape((*x.shape[:-1], self.num_heads, size))

    def _dropped(
        self, where: Title, key: KeyLike | None, inference: bool | None, weights: Array
    ) -> Array:
        """Weights of which some are dropped; each head by a key of its own, as in Equinox."""
        p, is_off = self.dropout.p, self.dropout.inference if inference is None else inference
        if p == 0 or is_off:
            return weights
        if key is None:
            raise RngError(_key_missing(where))
        keys = jax.random.split(check_key(where, key), self.num_heads)

        def drop(head: Array, key: Array) -> Array:
            return self.dropout(head, key=key, inference=False)

        return jax.vmap(drop, (-3, 0), -3)(weights, keys)


def _check_sequence(where: Title, name: str, x: Any, size: int) -> Array:
    """Require a floating array (..., seq, size)."""
    x = check_array(where, x, name)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        cure: Sequence[str] = ("Convert it first:", f"{name} = {name}.astype(float)")
        if x.dtype == jnp.bool_:
            cure = ("A mask comes fourth, or by name:", "layer(x, x, x, mask=mask)")
        raise ArgumentError(
            explain(str(where), f"{name} of a floating dtype", describe(x), cure=cure)
        )
    if x.ndim >= 2 and x.shape[-1] == size:
        return x
    cure = ()
    if x.shape == (size,):
        cure = (f"{name} lacks the axis of places; for a sequence of one, write", f"{name}[None]")
    elif x.ndim >= 2 and x.shape[-2] == size:
        cure = ("The axis before the last one fits; to exchange them, write", f"{name}.mT")
    raise ShapeError(
        explain(str(where), f"{name} of shape (..., seq, {size})", describe(x), cure=cure)
    )


def _processed(
    where: Title, process_heads: Any, heads: tuple[Array, Array, Array]
) -> tuple[Array, Array, Array]:
    """Heads after the user's function."""
    if not callable(process_heads):
        expected = "process_heads to be a function (query, key, value) -> (query, key, value)"
        raise ArgumentError(explain(str(where), expected, describe(process_heads)))
    processed = process_heads(*heads)
    found = as_sequence(processed) or [processed]
    shapes = [getattr(x, "shape", None) for x in found]
    if shapes != [x.shape for x in heads]:
        wanted = ", ".join(map(describe, heads))
        got = ", ".join(map(describe, found))
        raise ShapeError(explain(str(where), f"process_heads to give {wanted}", got))
    query, key, value = found
    return query, key, value


def _check_mask(
    where: Title, mask: Any, lead: tuple[int, ...], query: Array, key_: Array
) -> Array | None:
    """Require a mask for all, for each head, or for each example and head, if there is one."""
    if mask is None:
        return None
    mask = check_array(where, mask, "mask")
    if mask.dtype != jnp.bool_:
        cure: Sequence[str] = ("True is where a query may look:", "mask = mask.astype(bool)")
        expected = "mask of booleans"
        raise ArgumentError(explain(str(where), expected, describe(mask), cure=cure))
    places = (query.shape[-2], key_.shape[-2])
    wanted = dict.fromkeys([places, (*lead[-1:], *places), (*lead, *places)])
    if mask.shape not in wanted:
        cure = ()
        if len(lead) > 1 and mask.shape == (*lead[:-1], *places):
            cure = (
                "It has no axis for heads; one that is the same for all of them:",
                f"mask = jnp.repeat(mask[..., None, :, :], {lead[-1]}, axis=-3)",
            )
        expected = f"mask of shape {' or '.join(map(str, wanted))}"
        raise ShapeError(explain(str(where), expected, describe(mask), cure=cure))
    return mask


def _key_missing(where: Title) -> str:
    cure = (
        "Pass a key, or switch to inference:",
        "layer(query, key_, value, key=jax.random.key(0))",
        "layer = nn.inference_mode(layer)",
    )
    return explain(str(where), "a random key when training", "none", cure=cure)
