"""Arrays on their way from a device to a file, one at a time.

Owns: which memory of the host that takes. An array that is on the host already is used where it is.
Of others there is one copy, and of those that come next as much as the largest array is big.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np

from pytreemod.errors import ArgumentError, DonatedError, describe, explain


class ArraySource(NamedTuple):
    """An array that will be written: what it is, and how to get it."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    make: Callable[[], Any]
    """Gives a JAX or NumPy array; called once, when its turn comes."""

    @property
    def nbytes(self) -> int:
        """Of the array in memory, and in the file."""
        return prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, name: str, value: Any) -> ArraySource:
        """An array that is there already."""
        if not hasattr(value, "dtype") or not hasattr(value, "shape"):
            value = np.asarray(value)
        return cls(name, value.dtype, tuple(value.shape), lambda: value)


def host_bytes(path: str, sources: Sequence[ArraySource]) -> Iterator[memoryview]:
    """The bytes of each array in turn, as a file holds them: little-endian, in the order of C.

    Args:
        path: of the file, for the errors.
        sources: the arrays.

    Yields:
        The bytes of one; they are read before the next ones are asked for.

    Raises:
        ArgumentError: what a source makes is not what it was said to be.
        DonatedError: the memory of an array was given away.
    """
    limit = max((source.nbytes for source in sources), default=0)
    waiting = deque(sources)
    coming: deque[tuple[ArraySource, Any]] = deque()
    under_way = 0
    while waiting or coming:
        # The next ones are on their way while this one is written.
        while waiting and (not coming or under_way + waiting[0].nbytes <= limit):
            source = waiting.popleft()
            coming.append((source, _start(path, source)))
            under_way += source.nbytes
        source, started = coming.popleft()
        array = _on_host(started)
        # From here on nothing but the view that is handed out keeps a copy alive.
        del started
        yield _as_bytes(array)
        del array
        under_way -= source.nbytes


def _start(path: str, source: ArraySource) -> Any:
    """The array, on its way to the host if it is not there."""
    value = source.make()
    where = f"{path}, {describe(source.name)}"
    if isinstance(value, jax.core.Tracer):
        raise ArgumentError(explain(where, "an array with values", f"{describe(value)}, traced"))
    if (value.dtype, tuple(value.shape)) != (source.dtype, source.shape):
        expected = describe(np.broadcast_to(np.empty((), source.dtype), source.shape))
        raise ArgumentError(explain(where, expected, describe(value)))
    if not isinstance(value, jax.Array):
        return value
    if value.is_deleted():
        raise DonatedError(
            explain(where, "an array that is there", "one whose memory was given away")
        )
    if not value.is_fully_addressable:
        got = "one that is spread over several processes"
        raise ArgumentError(explain(where, "an array that this process has all of", got))
    if value.is_fully_replicated:
        value = value.addressable_shards[0].data
        # An array keeps what it once copied to the host, for as long as it lives itself: all of a
        # model would pile up there. This is another one, of the same memory on the device.
        value = jax.device_put(value, value.sharding)
        value.copy_to_host_async()
    return value


def _on_host(value: Any) -> np.ndarray[Any, Any]:
    if not isinstance(value, jax.Array) or value.is_fully_replicated:
        return np.asarray(value)
    whole = np.empty(value.shape, value.dtype)
    for shard in value.addressable_shards:
        if shard.replica_id == 0:
            whole[shard.index] = np.asarray(jax.device_put(shard.data, shard.data.sharding))
    return whole


def _as_bytes(array: np.ndarray[Any, Any]) -> memoryview:
    # At most one copy, if the order of elements or of bytes is another; none otherwise.
    plain = np.asarray(array, array.dtype.newbyteorder("<"), order="C")
    return memoryview(plain.reshape(-1).view(np.uint8))
