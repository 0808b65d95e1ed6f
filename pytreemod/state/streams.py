"""The arithmetic of random streams: from a seed to a stream's key, and from that to each use's."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from pytreemod.tree.split_arrays import split_axes
from pytreemod.typing import PyTree, Tracer, untyped_jax

EXACT_UNDER_VMAP = ("threefry2x32", "rbg")


class Stream(NamedTuple):
    """The value of one stream: its key, how often it was used, and the stream before a split."""

    key: Any = None
    count: Any = None
    outer: tuple[Any, ...] = ()


def fold_each(key: Any, numbers: Any) -> Any:
    """Return an array of keys: `key` folded with each number, independently of the others.

    All at once: for a model with a hundred streams, one by one would take a hundred times as long,
    to compile and to run. But only for some generators does JAX guarantee that this changes no
    number.
    """
    if str(jax.random.key_impl(key)) in EXACT_UNDER_VMAP:
        return jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)
    return jnp.stack([jax.random.fold_in(key, number) for number in numbers])


def seeded(key: Any, names: Sequence[str]) -> list[Stream]:
    """The first values of streams: the seed, folded with a stable hash of each stream's path."""
    keys = fold_each(key, hashes_of(names)) if names else ()
    # Each has its own count: one array at two paths could not be donated.
    return [Stream(folded, jnp.zeros((), jnp.uint32)) for folded in keys]


def hashes_of(names: Sequence[str]) -> Any:
    """Return a number for each name, to be folded into a key: the same in every process."""
    digests = [hashlib.blake2b(name.encode(), digest_size=4).digest() for name in names]
    return np.array([int.from_bytes(digest, "little") for digest in digests], np.uint32)


def use(stream: Stream) -> tuple[Any, Stream]:
    """Return the next key of a stream, and the stream after it.

    A device's shard of a split stream is a single member that still has a leading axis.
    """
    if stream.count.ndim:
        key, after = use(Stream(stream.key[0], stream.count[0]))
        return key, Stream(after.key[None], after.count[None], stream.outer)
    stream = _consumed(stream)
    key = jax.random.fold_in(stream.key, stream.count)
    # The operator checks its operands slowly; outside of a trace, lax is even slower.
    is_traced = isinstance(stream.count, Tracer)
    one = np.uint32(1)
    count = jax.lax.add(stream.count, one) if is_traced else stream.count + one
    return key, Stream(key=stream.key, count=count, outer=stream.outer)


def _consumed(stream: Stream) -> Stream:
    """Consume a stream's key, so that JAX's check for keys that are used twice finds this use.

    Folding a number into a key does not count as a use. So without this, JAX would not notice code
    that goes on with the State from before a call, and gets the same numbers again.
    """
    if not (untyped_jax.config.jax_debug_key_reuse and _is_typed(stream.key)):
        return stream
    fresh: Any = untyped_jax.random.clone(stream.key)
    jax.random.split(stream.key)
    return stream._replace(key=fresh)


def fork(stream: Stream, n: int) -> tuple[Stream, Stream]:
    """`n` streams, all different, on a leading axis; and the one after them."""
    base, after = use(stream)
    return Stream(fold_each(base, np.arange(n, dtype=np.uint32)), jnp.zeros(n, jnp.uint32)), after


def split(stream: Stream, n: int) -> Stream:
    """`n` streams, all different, on a leading axis; `join` returns the one after them."""
    members, after = fork(stream, n)
    # The stream before the split has a leading axis too, so that one axes spec fits the whole
    # value. Its key is stored as plain numbers, because JAX's check of key reuse rejects copies.
    outer = repeated((numbers_of(after.key), after.count, stream.outer), n)
    return members._replace(outer=outer)


def repeated(tree: PyTree, n: int) -> PyTree:
    """Return a tree with each array `n` times, on a leading axis."""

    def repeat(x: Any) -> Any:
        return jnp.broadcast_to(x, (n, *jnp.shape(x)))

    return jax.tree.map(repeat, tree)


def join(stream: Stream) -> Stream:
    """Return the stream before `split`, advanced once: past all that its members used."""
    numbers, count, outer = jax.tree.map(_first, stream.outer)
    return Stream(like(stream.key, numbers), count, outer)


def _first(x: Any) -> Any:
    """The first item of an array, on every device if explicit mesh axes split the array there."""
    if any(split_axes(x)[:1]):
        sharding: Any = jax.typeof(x).sharding if isinstance(x, Tracer) else x.sharding
        spec = PartitionSpec(None, *sharding.spec[1:])
        x = untyped_jax.sharding.reshard(x, NamedSharding(sharding.mesh, spec))
    return x[0]


def _is_typed(key: Any) -> bool:
    return bool(jnp.issubdtype(key.dtype, jax.dtypes.prng_key))


def numbers_of(key: Any) -> Any:
    """Return a key as plain numbers."""
    return jax.random.key_data(key) if _is_typed(key) else key


def like(key: Any, numbers: Any) -> Any:
    """Return a key, or an array of keys, from plain numbers: of the same kind as `key`."""
    if not _is_typed(key):
        return numbers
    return untyped_jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(key))
