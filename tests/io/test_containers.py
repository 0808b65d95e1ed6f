"""Arrays come back from a file as they went in, or there is a clear error."""

import contextlib
import gc
import itertools
import os
import random
import threading
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pytreemod as pm
from pytreemod.errors import ArgumentError, FileError
from tests.io.files import METADATA, OWN, header_of, write_plain

safetensors = pytest.importorskip("safetensors", reason="it judges what we write")
pytest.importorskip("safetensors.numpy")

CODED = [
    *("bool", "uint8", "int8", "uint16", "int16", "float16", "bfloat16", "uint32", "int32"),
    *("float32", "uint64", "int64", "float64", "complex64"),
]
FLOAT8 = ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"]
KINDS = ("int", "uint", "float", "bfloat", "complex")
EVERY = [
    name
    for name in dir(jnp)
    if name.startswith(("float8_", "float6_", "float4_"))
    or (name.rstrip("0123456789") in KINDS and name not in KINDS)
] + ["bool"]


def dtype_called(name):
    """Those of JAX as well."""
    return np.dtype(getattr(jnp, name))


def assert_same(left, right):
    """The same names in the same order, and for each the same dtype, shape and bits."""
    assert [*left] == [*right]
    for name, array in left.items():
        other = np.asarray(right[name])
        other = other.astype(other.dtype.newbyteorder("<"))
        assert (array.dtype, array.shape) == (other.dtype, other.shape), name
        assert array.tobytes() == other.tobytes(), name


@pytest.fixture
def path(tmp_path):
    """Where a file will be."""
    return tmp_path / "model.safetensors"


ARRAYS = {
    "weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "bias": np.arange(3, dtype=np.int8),
    "scale": np.array(2.5),
    "none": np.zeros((0, 3), np.float16),
    "phase": np.array([1 + 2j, 3]),
    "few bits": np.array([1, -2, 3], dtype_called("int4")),
    "flags": np.array([True, False]),
    "turned": np.arange(4, dtype=">i4").reshape(2, 2).T,
}


@pytest.mark.parametrize("dtype", EVERY)
def test_every_dtype_and_shape_comes_back(path, dtype):
    """Bit for bit; with a dtype that is unknown to other tools, they can still read the file."""
    arrays = {}
    for shape in [(), (0, 2), (2, 3), (1,) * 63]:
        array = np.arange(int(np.prod(shape)), dtype=np.int8).astype(dtype_called(dtype))
        arrays[f"x{len(shape)}"] = array.reshape(shape)
    pm.save(path, arrays)
    assert_same(pm.load(path), arrays)

    theirs = safetensors.numpy.load_file(path)["x2"]
    assert theirs.tobytes() == arrays["x2"].tobytes()
    assert theirs.dtype == (arrays["x2"].dtype if dtype in CODED else np.uint8)


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
        hnp.arrays(
            st.sampled_from([*CODED[:8], "float64", "complex128", ">f8", ">i2"]).map(
                lambda name: np.dtype(name) if name[0] == ">" else dtype_called(name)
            ),
            hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
            elements=st.just(1),
        ),
        max_size=6,
    ),
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])),
        st.text(st.characters(exclude_categories=["Cs"])),
        max_size=4,
    ),
)
@settings(max_examples=50)
def test_any_names_arrays_and_texts_come_back(tmp_path_factory, arrays, metadata):
    """A name is a text, and nothing else."""
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    pm.save(path, arrays, metadata)

    assert_same(pm.load(path), arrays)
    assert pm.read_metadata(path) == metadata


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.int32)[::-2],
        np.array(1.5, ">f4"),
        np.broadcast_to(np.float32(2), (3, 2)),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    ],
)
def test_bytes_are_little_endian_and_in_the_order_of_c(path, array):
    """Whatever the order in memory is."""
    pm.save(path, {"x": array})

    assert path.read_bytes().endswith(array.astype(array.dtype.newbyteorder("<")).tobytes())


@pytest.mark.parametrize("spec", [(None, "b"), (("a", "b"),), ()])
def test_arrays_on_several_devices_come_whole(path, spec):
    """Sharded, replicated, and both."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("a", "b"))
    # Other numbers each time: new memory may well have those of the case before in it.
    array = jnp.arange(64, dtype=jnp.int32).reshape(8, 8) + 100 * len(f"{spec}")
    pm.save(path, {"x": jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))})

    assert_same(safetensors.numpy.load_file(path), {"x": array})


def test_safetensors_reads_what_we_write(path):
    """Every array of a dtype that it has; the others as bytes."""
    pm.save(path, ARRAYS, {"author": "me"})

    with safetensors.safe_open(path, "np") as file:
        for name in ARRAYS.keys() - {"phase", "few bits"}:
            named = name if " " not in name else f"'{name}'"
            assert_same({name: file.get_tensor(named)}, {name: ARRAYS[name]})
        assert file.get_tensor("phase").tobytes() == ARRAYS["phase"].tobytes()
        assert file.get_tensor("phase").shape == (2, 16)


@pytest.mark.parametrize("dtype", FLOAT8)
def test_float8_with_the_code_of_others_is_read(path, dtype):
    """PyTorch writes such files, and earlier versions of this library did."""
    array = np.asarray([0.5, 1.0, 2.0]).astype(dtype_called(dtype))
    code = "F8_" + dtype.removeprefix("float8_").upper().removesuffix("FN").removesuffix("FNU")
    entry = {"dtype": code, "shape": [3], "data_offsets": [0, 3]}

    assert_same(pm.load(write_plain(path, {"x": entry}, array.tobytes())), {"x": array})


def test_we_read_what_safetensors_writes(path):
    """With the metadata of others, and without."""
    names = [name for name in CODED if "64" not in name]
    arrays = {name: np.arange(3, dtype=np.int8).astype(dtype_called(name)) for name in names}
    arrays["scalar"] = np.array(2.5, np.float32)
    for metadata in (None, {"format": "np"}):
        safetensors.numpy.save_file(arrays, path, metadata)
        read = pm.load(path)
        assert_same({name: read[name] for name in arrays}, arrays)
        assert pm.read_metadata(path) == metadata


def test_pytorch_reads_what_we_write_and_we_what_it_writes(path):
    """Dtypes that NumPy alone does not know among them."""
    torch = pytest.importorskip("torch", reason="its dtypes are compared: tasks.py install peers")
    load = pytest.importorskip("safetensors.torch")
    names = [n for n in CODED if hasattr(torch, n) and "uint" not in n and "64" not in n]
    arrays = {n: np.arange(3, dtype=np.int8).astype(dtype_called(n)) for n in names}
    assert len(arrays) >= 7
    pm.save(path, arrays)
    tensors = load.load_file(path)
    for name, tensor in tensors.items():
        assert tensor.dtype == getattr(torch, name)
        assert tensor.view(torch.uint8).numpy().tobytes() == arrays[name].tobytes()
    load.save_file(tensors, path)
    read = pm.load(path)
    assert_same({name: read[name] for name in arrays}, arrays)


def test_what_was_read_stays_when_the_file_changes_or_goes(path):
    """It is a copy, not a map of the file."""
    pm.save(path, {"x": np.ones(1 << 19)})
    array = pm.load(path)["x"]
    path.write_bytes(bytes(path.stat().st_size))
    os.truncate(path, 0)
    path.unlink()

    assert (array == 1).all()
    array[0] = 2
    assert array[0] == 2


@pytest.mark.parametrize("size", [10, (3 << 20) + 4321])
def test_a_byte_that_changes_is_noticed_unless_nobody_looks(path, size):
    """In any part of an array; and the array is named."""
    pm.save(path, {"weight": np.zeros(size, np.int8), "bias": np.zeros(3)})
    begin = path.stat().st_size - size
    for position in (begin, begin + size - 1, begin + size // 2):
        with open(path, "r+b") as file:
            file.seek(position)
            file.write(b"\x01")
        with pytest.raises(FileError, match="at weight"):
            pm.load(path)
        assert pm.load(path, verify=False)["weight"].sum() >= 1
        like = {"weight": np.zeros(size, np.int8), "bias": np.ones(3)}
        assert pm.load(path, like, only="bias")["bias"].tolist() == [0, 0, 0]


def test_booleans_are_two(path):
    """With others NumPy would compute nonsense, whether a checksum fits them or not."""
    safetensors.numpy.save_file({"flags": np.zeros(3, bool)}, path)
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x02")
    for verify in (True, False):
        with pytest.raises(FileError, match="at flags"):
            pm.load(path, verify=verify)


@pytest.mark.parametrize(
    "array",
    [
        np.array([None, {}], object),
        np.array(["a", "b"]),
        np.zeros(2, [("a", "f4"), ("b", "i4")]),
        np.array(["2026-01-01"], "M8[D]"),
        np.zeros(2, np.longdouble),
        np.ma.masked_array([1, 2], [True, False]),
    ],
    ids=["objects", "texts", "records", "dates", "long doubles", "a mask"],
)
def test_what_is_no_array_of_numbers_is_refused_and_the_old_file_stays(path, array):
    """A mask would be lost, and NumPy would pickle objects."""
    pm.save(path, ARRAYS)
    with pytest.raises(ArgumentError, match="x"):
        pm.save(path, {"w": np.ones(2), "net": {"x": array}})

    assert_same(pm.load(path), ARRAYS)
    assert os.listdir(path.parent) == [path.name]


def test_several_threads_read_from_one_file(path):
    """Each gets its own arrays."""
    arrays = {f"x{i}": np.full(200_000, i, np.int32) for i in range(8)}
    pm.save(path, arrays)
    like, read = {name: np.zeros(200_000, np.int32) for name in arrays}, {}

    def work(name):
        read[name] = pm.load(path, like, only=name)[name]

    threads = [threading.Thread(target=work, args=(name,)) for name in arrays]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_same({name: read[name] for name in arrays}, arrays)


def peak_of(work):
    """The peak memory of Python and NumPy during a call, and its result."""
    gc.collect()
    tracemalloc.start()
    try:
        result = work()
        return tracemalloc.get_traced_memory()[1], result
    finally:
        tracemalloc.stop()


def test_neither_way_takes_more_memory_than_the_arrays_have(path):
    """Writing takes none for arrays on the host; reading takes the size of the arrays."""
    arrays = {f"x{i}": np.zeros(1 << 18, np.float32) for i in range(8)}
    writing, _ = peak_of(lambda: pm.save(path, arrays))
    reading, _ = peak_of(lambda: pm.load(path))

    assert writing < 1 << 18
    assert reading < 8 * (1 << 20) + (1 << 18)


def damage(content, rng):
    """A file in which something is wrong, or perhaps nothing."""
    content = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        i, j = sorted(rng.randrange(len(content) + 1) for _ in range(2))
        j = min(j, i + rng.choice([1, 4, 16, 1000]))
        kind = rng.randrange(9)
        if kind <= 1 and i < len(content):
            content[i] ^= 1 << rng.randrange(8)
        elif kind == 2:
            content[i:j] = rng.randbytes(j - i)
        elif kind == 3:
            del content[i:j]
        elif kind == 4:
            content[i:i] = content[i:j]
        elif kind == 5:
            content[i:j] = bytes(j - i)
        elif kind == 6:
            del content[i:]
        elif kind == 7:
            # Digits, quotes and brackets, as in a header.
            content[i : i + 1] = rng.choice([b"9", b"-", b'"', b"]", b"}", b"1e9", b"\\u", b","])
        else:
            content[:8] = rng.randrange(2 ** rng.choice([8, 16, 64])).to_bytes(8, "little")
        content = content or bytearray(b"\0")
    return bytes(content)


def check_damaged(path, content, arrays):
    """Either an error of this library, or the right arrays; and never much memory."""
    path.write_bytes(content)

    def read():
        with contextlib.suppress(FileError):
            return pm.load(path)

    peak, read = peak_of(read)
    assert peak < 400_000 + 50 * len(content)
    if read is not None and arrays is not None:
        assert_same(read, arrays)
    return read is not None


def fuzz(path, seeds):
    """Damaged files, with checksums and without; counts those that were read nevertheless."""
    pm.save(path, ARRAYS, {"author": "me"})
    ours = path.read_bytes()
    plain_arrays = {"w": np.arange(6, dtype=np.float32), "b": np.zeros(2, bool)}
    safetensors.numpy.save_file(plain_arrays, path, {"format": "np"})
    plain = path.read_bytes()
    whole = 0
    for seed in seeds:
        rng = random.Random(seed)
        # Without checksums a flipped byte of an array is just another array.
        file, arrays = (ours, ARRAYS) if seed % 3 else (plain, None)
        whole += check_damaged(path, damage(file, rng), arrays)
    return whole


@pytest.mark.parametrize(
    ("seeds", "most"),
    [(range(100), 35), pytest.param(range(1_000, 4_000), 900, marks=pytest.mark.slow)],
    ids=["few", "many"],
)
def test_damaged_files_give_a_clear_error_or_the_right_arrays(path, seeds, most):
    """Most give an error. (Ten thousand passed once.)"""
    assert fuzz(path, seeds) < most


def test_the_checksum_of_an_array_never_changes(path):
    """Files last longer than versions of this library."""
    data = (np.arange(400_000, dtype="<u4") * 2_654_435_761).view(np.uint8)
    for array, checksum in ((data, 0xD5168E96), (np.frombuffer(b"123456789", "u1"), 0xCBF43926)):
        pm.save(path, {"x": array})
        assert int(header_of(path)[METADATA][f"{OWN}array-checksums"], 16) == checksum


@pytest.mark.parametrize("distance", [1, 1024, 1025])
def test_words_that_cancel_are_noticed(path, distance):
    """In a row, in a column, or in neither, one word grows as much as another shrinks."""
    words = np.arange(1024 * 16, dtype="<u8")
    pm.save(path, {"x": words})
    right = words.tobytes()
    words[5] += 1
    words[5 + distance] -= 1
    path.write_bytes(path.read_bytes().replace(right, words.tobytes()))
    with pytest.raises(FileError, match="at x"):
        pm.load(path)


def test_every_way_to_cut_a_file_off_is_noticed(path):
    """After each byte of the header, and each of the arrays."""
    pm.save(path, ARRAYS)
    content = path.read_bytes()
    for length in itertools.chain(range(64), range(64, len(content), 13), [len(content) - 1]):
        path.write_bytes(content[:length])
        with pytest.raises(FileError, match=r"model\.safetensors"):
            pm.load(path)
