"""Arrays on their way from a device to a file, one at a time.

Owns: which memory of the host that takes. An array that is on the host already is used where it is.
Of others there is one copy, and of those that come next as much as the largest array is big.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jax.core import Tracer

from pytreemod.errors import ArgumentError, DonatedError, describe
from pytreemod.io.access import shown
from pytreemod.io.encodings import has_code


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
        yield bytes_of(array)
        del array
        under_way -= source.nbytes


def _start(path: str, source: ArraySource) -> Any:
    """The array, on its way to the host if it is not there."""
    value = source.make()
    _check_made(path, source, value)
    if not isinstance(value, jax.Array) or not value.is_fully_replicated:
        return value
    value = _fleeting(value.addressable_data(0))
    with _wanted():
        value.copy_to_host_async()
    return value


def _wanted() -> Any:
    """A transfer to the host that was asked for, whatever guards against those that were not."""
    return jax.transfer_guard_device_to_host("allow")


def _fleeting(value: jax.Array) -> jax.Array:
    """An array on one device that nobody else has, if it is not on the host as it stands in a file.

    An array keeps what was once copied to the host for as long as it lives itself, and so a whole
    model would pile up there. This one has the same memory on the device, and goes at once.
    """
    (device,) = value.devices()
    if device.platform != "cpu":
        return jax.device_put(value, device)
    # On the CPU it is the packed dtypes that are copied. If the memory were the same, JAX 0.10
    # would free the copies with Python's next garbage only.
    return value if has_code(value.dtype) else jax.device_put(value, device, may_alias=False)


def _on_host(value: Any) -> np.ndarray[Any, np.dtype[Any]]:
    with _wanted():
        if not isinstance(value, jax.Array) or value.is_fully_replicated:
            return np.asarray(value)
        whole = np.empty(value.shape, value.dtype)
        for shard in value.addressable_shards:
            if shard.replica_id == 0:
                whole[shard.index] = np.asarray(_fleeting(shard.data))
        return whole


def bytes_of(array: np.ndarray[Any, np.dtype[Any]]) -> memoryview:
    """The bytes of an array, little-endian and in the order of C.

    Args:
        array: of any dtype and order.

    Returns:
        Those of the array itself, or of a copy if their order is another.
    """
    plain = np.asarray(array, array.dtype.newbyteorder("<"), order="C")
    # (pyright takes arrays for buffers from Python 3.12 on only.)
    return memoryview(cast(Any, plain.reshape(-1).view(np.uint8)))


def is_whole_here(array: jax.Array) -> bool:
    """Whether this process has all numbers of an array, which may be on other hosts as well."""
    return array.is_fully_addressable or array.is_fully_replicated


def _check_made(path: str, source: ArraySource, value: Any) -> None:
    """What was made is what the header says, and has values that are here."""
    kind, expected, got = ArgumentError, "", ""
    if isinstance(value, Tracer):
        expected, got = "an array with values", f"{describe(value)}, traced"
    elif value.dtype != source.dtype or tuple(value.shape) != source.shape:
        expected, got = describe(source), describe(value)
    elif isinstance(value, np.ma.MaskedArray):
        expected, got = "an array", "a masked one, whose mask would go"
    elif isinstance(value, jax.Array) and value.is_deleted():
        kind, expected = DonatedError, "an array that is there"
        got = "one whose memory was given away"
    elif isinstance(value, jax.Array) and not is_whole_here(value):
        expected, got = "an array that this process has all of", "one that others have parts of"
    if got:
        raise kind(f"{shown(path)}, {shown(source.name or '<root>')}", expected, got)
