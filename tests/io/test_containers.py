"""Arrays come back from a file as they went in, or there is a clear error."""

import contextlib
import errno
import gc
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
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
from tests.goldens import refusals
from tests.io.files import header_of, write_plain

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


def test_there_are_dtypes_to_test():
    """The list comes from JAX, so that it has new dtypes, too."""
    assert {*CODED, *FLOAT8, "int4", "float8_e4m3b11fnuz", "complex128"} <= {*EVERY}


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


@pytest.mark.parametrize("size", [(1 << 20) - 1, 1 << 20, (1 << 22) + 4321])
def test_large_arrays_come_back(path, size):
    """Those that are summed by another thread, in several blocks."""
    array = np.random.default_rng(0).integers(0, 255, size, np.uint8)
    pm.save(path, {"x": array, "y": array[:5]})

    for verify in (True, False):
        assert_same(pm.load(path, verify=verify), {"x": array, "y": array[:5]})


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


@pytest.mark.parametrize("spec", [("a",), ("b",), (None, "b"), ("a", "b"), (("a", "b"),), ()])
def test_arrays_on_several_devices_come_whole(path, spec):
    """Sharded, replicated, and both."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("a", "b"))
    # Other numbers each time: new memory may well have those of the case before in it.
    array = jnp.arange(64, dtype=jnp.int32).reshape(8, 8) + 100 * len(f"{spec}")
    pm.save(path, {"x": jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))})

    assert_same(safetensors.numpy.load_file(path), {"x": array})


def test_arrays_lie_at_addresses_that_fit_their_elements(path):
    """The data begins at a multiple of 64, large elements first; loaded arrays are aligned, too."""
    arrays = {d: np.ones(1001, d) for d in ("int8", "float64", "bool", "float16", "int32")}
    pm.save(path, arrays)
    header, start = header_of(path), int.from_bytes(path.read_bytes()[:8], "little") + 8

    assert start % 64 == 0
    for name, array in pm.load(path).items():
        assert header[name]["data_offsets"][0] % array.itemsize == 0
        assert array.ctypes.data % 64 == 0


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
    torch = pytest.importorskip("torch", reason="its dtypes are compared")
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


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="by which the file is read")
def test_an_array_is_read_alone(path, monkeypatch):
    """Of the rest of the file no byte is."""
    tree = {"a": np.ones(3_000_000, np.int8), "b": np.arange(10_000, dtype=np.int8)}
    pm.save(path, tree)
    begin = int.from_bytes(path.read_bytes()[:8], "little") + 8
    read, real = [], os.preadv

    def counting(descriptor, buffers, start):
        count = real(descriptor, buffers, start)
        read.append((start - begin, start - begin + count))
        return count

    monkeypatch.setattr(os, "preadv", counting)
    for name in tree:
        read.clear()
        pm.load(path, tree, only=name)
        arrays = [span for span in read if span[1] > 0]
        assert [arrays[0][0], arrays[-1][1]] == header_of(path)[name]["data_offsets"]
        assert sum(stop - start for start, stop in arrays) == tree[name].size


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="by which the file is read")
@pytest.mark.parametrize("size", [10, 3 << 20])
def test_a_file_that_shrinks_is_noticed(path, monkeypatch, size):
    """Between the header and the array."""
    pm.save(path, {"x": np.ones(size, np.int8)})
    real = os.preadv

    def shrinking(descriptor, buffers, start):
        if start:
            os.truncate(path, header_size + size - 1)
        return real(descriptor, buffers, start)

    header_size = path.stat().st_size - size
    monkeypatch.setattr(os, "preadv", shrinking)
    with pytest.raises(FileError, match=r"expected .* more bytes, got the end of the file"):
        pm.load(path)


@pytest.mark.parametrize("size", [10, 3 << 20])
def test_a_byte_that_changes_is_noticed_unless_nobody_looks(path, size):
    """In any part of an array; and the array is named."""
    pm.save(path, {"weight": np.zeros(size, np.int8), "bias": np.zeros(3)})
    begin = path.stat().st_size - size
    for position in (begin, begin + size - 1, begin + size // 2):
        with open(path, "r+b") as file:
            file.seek(position)
            file.write(b"\x01")
        text = "expected arrays that fit their checksums, got .*damaged.\n  at weight$"
        with pytest.raises(FileError, match=text):
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
        with pytest.raises(FileError, match=r"expected booleans of 0 and 1, got 2\.\n  at flags"):
            pm.load(path, verify=verify)


@pytest.mark.parametrize(
    ("array", "got"),
    [
        (np.array([None, {}], object), "object"),
        (np.array(["a", "b"]), "<U1"),
        (np.array([b"a"]), r"\|S1"),
        (np.zeros(2, [("a", "f4"), ("b", "i4")]), r"\[\('a', '<f4'\), \('b', '<i4'\)\]"),
        (np.array(["2026-01-01"], "M8[D]"), r"datetime64\[D\]"),
        (np.zeros(2, np.longdouble), "float128|float96|longdouble"),
    ],
)
def test_what_is_no_array_of_numbers_is_named(path, array, got):
    """And nothing is written."""
    text = f"model.safetensors: expected arrays of numbers and booleans, got ({got}).*\n  at net.x$"
    with pytest.raises(ArgumentError, match=text):
        pm.save(path, {"w": np.ones(2), "net": {"x": array}})

    assert not path.exists()


def test_what_fails_while_writing_leaves_the_old_file(path):
    """Here the array that comes last."""
    pm.save(path, ARRAYS)
    masked = np.ma.masked_array([1, 2], [True, False])
    with pytest.raises(ArgumentError, match="b: expected an array, got a masked array, whose mask"):
        pm.save(path, {"a": np.ones(3), "b": masked})

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


@pytest.mark.parametrize("kind", ["sharded", "packed", "strided", "big-endian"])
def test_copies_take_as_much_as_the_largest_array(path, kind):
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
    values = {f"x{i}": make() for i in range(count)}
    peak, _ = peak_of(lambda: pm.save(path, values))

    # JAX frees the copy of packed elements a moment later, in another thread.
    assert peak < (4.0 if kind == "packed" else 1.2) * size
    time.sleep(0.05)


FULL = """
import os, resource, sys
import numpy as np
import pytreemod as pm
if sys.argv[2] == "writing":
    del os.posix_fallocate
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    pm.save(sys.argv[1], {"small": np.ones(3), "large": np.ones(100_000)})
except pm.errors.FileAccessError as error:
    print(error.errno, error, sep="|")
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["reserving", "writing"])
def test_a_full_disk_leaves_the_old_file(path, when):
    """As a limit on the size of files simulates it, in a process that has one."""
    pm.save(path, ARRAYS)
    command = [sys.executable, "-c", FULL, str(path), when]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    number, text = done.stdout.strip().split("|")
    assert int(number) == errno.EFBIG
    assert text == f"{path}: expected a file that can be written, got file too large."
    assert_same(pm.load(path), ARRAYS)
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_small_disk_that_is_full_leaves_the_old_file(tmp_path):
    """A disk in memory, of one megabyte."""
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        path = tmp_path / "model.safetensors"
        pm.save(path, ARRAYS)
        with pytest.raises(OSError, match="got no space left on device") as caught:
            pm.save(path, {"x": np.ones(1 << 20)})
        assert caught.value.errno == errno.ENOSPC
        assert_same(pm.load(path), ARRAYS)
        assert os.listdir(tmp_path) == [path.name]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


AT_EXIT = """
import atexit, sys
import numpy as np
import pytreemod as pm
arrays = {"large": np.arange(2_000_000, dtype=np.float32), "small": np.arange(3.0)}
atexit.register(pm.save, sys.argv[1], arrays)
"""


def test_a_program_that_saves_as_it_ends(path):
    """No thread can start by then: the checksums are the same."""
    command = [sys.executable, "-c", AT_EXIT, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    written = path.read_bytes()
    large = {"large": np.arange(2_000_000, dtype=np.float32), "small": np.arange(3.0)}
    assert_same(pm.load(path), large)
    pm.save(path, large)
    assert path.read_bytes() == written


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


def test_damaged_files_give_a_clear_error_or_the_right_arrays(path):
    """A hundred of them; most give an error."""
    assert fuzz(path, range(100)) < 35


@pytest.mark.slow
def test_many_damaged_files_give_a_clear_error_or_the_right_arrays(path):
    """Three thousand of them, other ones. (Ten thousand passed once.)"""
    assert fuzz(path, range(1_000, 4_000)) < 900


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.sampled_from(["F32", "U8", "BOOL", "C64", "I64", "", "float32"])
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "U8", "BOOL", "C64", "F4"]) | VALUES,
        "shape": st.lists(st.integers(-1, 4) | st.just(2**62), max_size=3) | VALUES,
        "data_offsets": st.lists(st.integers(-1, 20), min_size=2, max_size=2) | VALUES,
    }
)
HEADERS = st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), ENTRIES | VALUES) | VALUES


def check_lie(path, content, data):
    """A header that may say anything gives an error, or arrays that are in the file."""
    write_plain(path, json.dumps(content), data)
    with contextlib.suppress(FileError):
        arrays = pm.load(path)
        assert sum(array.nbytes for array in arrays.values()) == len(data)


@given(HEADERS, st.binary(max_size=20))
@settings(max_examples=100)
def test_headers_that_say_anything_give_an_error_or_what_is_there(tmp_path_factory, content, data):
    """Right as JSON, and wrong in all other ways."""
    check_lie(tmp_path_factory.getbasetemp() / "lie", content, data)


@pytest.mark.slow
@given(HEADERS, st.binary(max_size=20))
@settings(max_examples=1_000)
def test_many_headers_that_say_anything_give_an_error_or_what_is_there(
    tmp_path_factory, content, data
):
    """More of them."""
    check_lie(tmp_path_factory.getbasetemp() / "lie", content, data)


def test_every_way_to_cut_a_file_off_is_noticed(path):
    """After each byte of the header, and each of the arrays."""
    pm.save(path, ARRAYS)
    content = path.read_bytes()
    for length in itertools.chain(range(64), range(64, len(content), 13), [len(content) - 1]):
        path.write_bytes(content[:length])
        with pytest.raises(FileError, match=r"model\.safetensors: expected"):
            pm.load(path)


def test_every_flipped_byte_is_noticed(path):
    """None of them means nothing: no byte of a file is free."""
    arrays = {"w": np.arange(3, dtype=np.float32), "c": np.array([1j])}
    pm.save(path, arrays)
    content = path.read_bytes()
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        with pytest.raises(FileError, match=r"model\.safetensors: expected"):
            pm.load(path)


test_refusals = refusals(globals())
