"""Arrays on their way to a file: which bytes, in what order, and how much memory they take."""

import gc
import time
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pytreemod.errors import DonatedError
from pytreemod.io.fetching import ArraySource, bytes_of, host_bytes
from tests.goldens import refusals


def fetched(*values):
    """The bytes of each value."""
    sources = [ArraySource.of(f"a{i}", value) for i, value in enumerate(values)]
    return [bytes(data) for data in host_bytes("my.file", sources)]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int16).reshape(2, 3).T,
        np.arange(12, dtype=np.int32)[::-2],
        np.arange(4, dtype=">f8"),
        np.array(1.5, ">f4"),
        np.zeros((0, 3)),
        np.broadcast_to(np.float32(2), (3, 2)),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    ],
)
def test_bytes_are_little_endian_and_in_the_order_of_c(array):
    """Whatever the order in memory is."""
    expected = array.astype(array.dtype.newbyteorder("<")).tobytes()

    assert bytes(bytes_of(array)) == expected
    assert fetched(array) == [expected]


def test_an_array_in_order_is_not_copied():
    """What is handed out is the array's own memory."""
    array = np.zeros(8, np.float32)
    data = bytes_of(array)
    array[0] = 1

    assert np.frombuffer(data, np.float32)[0] == 1


@pytest.mark.parametrize("spec", [("a",), ("b",), (None, "b"), ("a", "b"), (("a", "b"),), ()])
def test_arrays_on_several_devices_come_whole(spec):
    """Sharded, replicated, and both."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("a", "b"))
    # Other numbers each time: new memory may well have those of the case before in it.
    array = jnp.arange(64, dtype=jnp.int32).reshape(8, 8) + 100 * len(f"{spec}")
    spread = jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

    assert fetched(spread) == [np.asarray(array).tobytes()]


@pytest.mark.parametrize("dtype", ["int4", "int2", "float4_e2m1fn", "bfloat16", "bool"])
def test_every_dtype_has_whole_bytes(dtype):
    """A host has one byte for each element that a device may pack."""
    array = jnp.asarray(np.array([1, 0, 1], np.int8).astype(np.dtype(getattr(jnp, dtype))))

    assert fetched(array) == [np.asarray(array).tobytes()]


def traced_peak(sources, pause=0.0):
    """The most memory of NumPy's that there was while each was read, by one who takes so long."""
    gc.collect()
    tracemalloc.start()
    try:
        for data in host_bytes("my.file", sources):
            assert len(data)
            del data
            time.sleep(pause)
        gc.collect()
        return tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["sharded", "packed", "strided", "big-endian"])
def test_copies_take_as_much_as_the_largest_array(kind):
    """A copy goes when the next one comes, and JAX's arrays keep none."""
    size, count = 1 << 20, 6
    mesh = Mesh(np.array(jax.devices()[:8]), ("a",))
    make = {
        "sharded": lambda: jax.device_put(
            jnp.zeros(size, jnp.int8), NamedSharding(mesh, PartitionSpec("a"))
        ),
        "packed": lambda: jnp.zeros(size, jnp.int4),
        "strided": lambda: np.zeros((1024, 1024), np.int8).T,
        "big-endian": lambda: np.zeros(size // 4, ">i4"),
    }[kind]
    values = [make() for _ in range(count)]

    # JAX frees the copy of packed elements a moment later, in a thread of its own.
    pause = 0.02 if kind == "packed" else 0.0
    sources = [ArraySource.of(str(i), value) for i, value in enumerate(values)]
    kept, peak = traced_peak(sources, pause)

    # That moment may be when the next one is there.
    assert peak < (2.2 if kind == "packed" else 1.2) * size
    assert kept < 0.2 * size


def test_what_is_made_on_the_way_is_made_once_and_in_order():
    """And no more of it at once than the largest takes."""
    made = []

    def source(i, size):
        def make():
            made.append(i)
            return np.zeros(size, np.int8)

        return ArraySource(str(i), np.dtype(np.int8), (size,), make)

    sources = [source(i, size) for i, size in enumerate([1, 2, 8, 3, 5, 4])]
    seen = [[*made] for _ in host_bytes("my.file", sources)]

    assert made == [0, 1, 2, 3, 4, 5]
    assert seen == [[0, 1], [0, 1], [0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4], made]


def test_what_has_no_values_is_refused():
    """Traced, given away, or hidden by a mask."""
    donated = jnp.ones(3)
    donated.delete()
    with pytest.raises(DonatedError, match="a0: expected an array that is there"):
        fetched(donated)


test_refusals = refusals(globals())
