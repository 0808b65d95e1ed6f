"""The arithmetic of random streams: from a seed to a stream's key, and from that to each use's."""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import RngError, describe, explain


class Stream(NamedTuple):
    """The value of one stream: its key, how often it was used, and what it was split from."""

    key: Any = None
    count: Any = None
    outer: tuple[Any, ...] = ()


def check_key(where: str, key: Any) -> None:
    """Refuse what is no single random key.

    Raises:
        RngError: `key` is something else.
    """
    dtype = getattr(key, "dtype", None)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    shape = getattr(key, "shape", None)
    old = dtype == jnp.uint32 and shape is not None and len(shape) == 1
    if (typed and shape == ()) or old:
        return
    raise RngError(
        explain(
            where,
            "one random key",
            describe(key),
            cure=["make one:", "jax.random.key(0)"],
        )
    )


def seeded(key: Any, names: Sequence[str]) -> list[Stream]:
    """The first values of streams: the seed, folded with a stable hash of each stream's path."""
    if not names:
        return []
    digests = [hashlib.blake2b(name.encode(), digest_size=4).digest() for name in names]
    numbers = np.array([int.from_bytes(digest, "little") for digest in digests], np.uint32)
    # All at once: for a model with a hundred streams, one by one would take a hundred times as
    # long, to compile as well as to run.
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)
    # Each has a count of its own: one array in two places could not be donated.
    return [Stream(folded, jnp.zeros((), jnp.uint32)) for folded in keys]


def use(stream: Stream) -> tuple[Any, Stream]:
    """The next key of a stream, and the stream after it."""
    key = jax.random.fold_in(stream.key, stream.count)
    return key, stream._replace(count=stream.count + np.uint32(1))


def split(stream: Stream, n: int) -> Stream:
    """`n` streams, all different, on a leading axis; `join` gives back the one after them."""
    base, after = use(stream)

    def fold(i: jax.Array) -> jax.Array:
        return jax.random.fold_in(base, i)

    def repeat(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x, (n, *x.shape))

    keys = jax.vmap(fold)(jnp.arange(n, dtype=jnp.uint32))
    # What it is split from has a leading axis too, so that one axes spec fits the whole value.
    outer = jax.tree.map(repeat, (after.key, after.count, stream.outer))
    return Stream(keys, jnp.zeros(n, jnp.uint32), outer)


def join(stream: Stream) -> Stream:
    """The stream that `split` was given, advanced once: past all that its members used."""

    def first(x: jax.Array) -> jax.Array:
        return x[0]

    key, count, outer = jax.tree.map(first, stream.outer)
    return Stream(key, count, outer)
