"""Arrays come back from a file as they went in, or there is a clear error."""

import contextlib
import errno
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pytreemod.errors import ArgumentError, FileError
from pytreemod.io import containers
from pytreemod.io.containers import Container, write_container
from pytreemod.io.fetching import ArraySource
from tests.goldens import refusals

safetensors = pytest.importorskip("safetensors", reason="it judges what we write")
pytest.importorskip("safetensors.numpy")

CODED = [
    *("bool", "uint8", "int8", "uint16", "int16", "float16", "bfloat16", "uint32", "int32"),
    *("float32", "uint64", "int64", "float64", "complex64"),
]
FLOAT8 = ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"]
UNCODED = [
    *FLOAT8,
    *("complex128", "int4", "uint4", "int2", "float8_e3m4", "float4_e2m1fn", "float6_e2m3fn"),
]


def dtype_called(name):
    """Those of JAX as well."""
    return np.dtype(getattr(jnp, name))


def read_all(path, **options):
    """Every array of a file."""
    with Container.open(path, **options) as container:
        return {name: container.read(name) for name in container.entries}


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
    "layers[0].weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "bias": np.arange(3, dtype=np.int8),
    "scale": np.array(2.5),
    "none": np.zeros((0, 3), np.float16),
    "phase": np.array([1 + 2j, 3]),
    "few bits": np.array([1, -2, 3], dtype_called("int4")),
    "": np.array([True, False]),
    "../ünï\n": np.arange(4, dtype=">i4").reshape(2, 2).T,
}


@pytest.mark.parametrize("dtype", [*CODED, *UNCODED])
@pytest.mark.parametrize("shape", [(), (0, 2), (2, 3), (1,) * 64])
def test_every_dtype_and_shape_comes_back(path, dtype, shape):
    """Bit for bit."""
    size = int(np.prod(shape))
    array = np.arange(size, dtype=np.int8).astype(dtype_called(dtype)).reshape(shape)
    write_container(path, {"x": array})

    assert_same(read_all(path), {"x": array})


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(
            lambda name: name != "__metadata__"
        ),
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
    write_container(path, arrays, metadata)

    assert_same(read_all(path), arrays)
    with Container.open(path) as container:
        assert container.metadata == metadata


def test_jax_arrays_come_back(path):
    """As NumPy arrays: which device they go to is not the file's business."""
    arrays = {"x": jnp.arange(3.0), "y": jnp.ones((2, 2), jnp.bfloat16), "z": [1, 2]}
    write_container(path, arrays)

    assert_same(read_all(path), arrays)


def test_arrays_may_be_made_when_their_turn_comes(path):
    """Nothing is made before it is known that all of it can be written."""
    made = []

    def source(name, dtype):
        return ArraySource(name, np.dtype(dtype), (2,), lambda: made.append(name) or np.ones(2))

    with pytest.raises(ArgumentError, match="arrays of numbers and booleans, got object"):
        write_container(path, [source("a", float), source("b", object)])
    assert made == []
    write_container(path, iter([source("a", float), source("b", float)]))
    assert made == ["a", "b"]
    assert [*read_all(path)] == ["a", "b"]


@pytest.mark.parametrize("size", [(1 << 20) - 1, 1 << 20, (1 << 22) + 4321])
def test_large_arrays_come_back(path, size):
    """Those that several threads read."""
    array = np.random.default_rng(0).integers(0, 255, size, np.uint8)
    write_container(path, {"x": array, "y": array[:5]})

    assert_same(read_all(path), {"x": array, "y": array[:5]})
    assert_same(read_all(path, verify=False), {"x": array, "y": array[:5]})


def test_safetensors_reads_what_we_write(path):
    """Every array of a dtype that it has; the others as bytes."""
    write_container(path, ARRAYS, {"author": "me"})

    with safetensors.safe_open(path, "np") as file:
        assert file.metadata()["author"] == "me"
        for name in ARRAYS.keys() - {"phase", "few bits"}:
            assert_same({name: file.get_tensor(name)}, {name: ARRAYS[name]})
        assert file.get_tensor("phase").tobytes() == ARRAYS["phase"].tobytes()
        assert file.get_tensor("phase").shape == (2, 16)
        assert file.get_tensor("few bits").tolist() == ARRAYS["few bits"].view(np.uint8).tolist()


@pytest.mark.parametrize("dtype", [*CODED, *UNCODED])
def test_a_dtype_that_numpy_has_not_leaves_the_file_readable_for_others(path, dtype):
    """With a code that it has no dtype for, `safetensors.numpy` would refuse all arrays."""
    array = np.arange(3, dtype=np.int8).astype(dtype_called(dtype))
    write_container(path, {"x": array, "bias": ARRAYS["bias"]})
    arrays = safetensors.numpy.load_file(path)

    assert_same({"bias": arrays["bias"]}, {"bias": ARRAYS["bias"]})
    assert arrays["x"].tobytes() == array.tobytes()
    assert arrays["x"].dtype == (array.dtype if dtype in CODED else np.uint8)


@pytest.mark.parametrize("dtype", FLOAT8)
def test_float8_with_the_code_of_others_is_read(path, dtype):
    """PyTorch writes such files, and earlier versions of this library did."""
    array = np.asarray([0.5, 1.0, 2.0]).astype(dtype_called(dtype))
    code = "F8_" + dtype.removeprefix("float8_").upper().removesuffix("FN").removesuffix("FNU")
    text = json.dumps({"x": {"dtype": code, "shape": [3], "data_offsets": [0, 3]}}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + array.tobytes())

    assert_same(read_all(path), {"x": array})


def test_we_read_what_safetensors_writes(path):
    """With the metadata of others, and without."""
    arrays = {k: v for k, v in ARRAYS.items() if v.dtype.name in CODED and v.dtype.isnative}
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    arrays["scale"] = ARRAYS["scale"]
    for metadata in (None, {"format": "np"}):
        safetensors.numpy.save_file(arrays, path, metadata)
        read = read_all(path)
        assert_same({name: read[name] for name in arrays}, arrays)
        with Container.open(path) as container:
            assert container.metadata == (metadata or {})
            assert {entry.checksum for entry in container.entries.values()} == {None}


def test_pytorch_reads_what_we_write_and_we_what_it_writes(path):
    """Dtypes that NumPy alone does not know among them."""
    torch = pytest.importorskip("torch", reason="its dtypes are compared")
    load = pytest.importorskip("safetensors.torch")
    names = [name for name in CODED if hasattr(torch, name) and "uint" not in name]
    arrays = {n: np.arange(3, dtype=np.int8).astype(dtype_called(n)) for n in names}
    assert len(arrays) >= 10
    write_container(path, arrays)
    tensors = load.load_file(path)
    for name, tensor in tensors.items():
        assert tensor.dtype == getattr(torch, name)
        assert tensor.view(torch.uint8).numpy().tobytes() == arrays[name].tobytes()
    load.save_file(tensors, path)
    read = read_all(path)
    assert_same({name: read[name] for name in arrays}, arrays)


def test_arrays_begin_where_jax_takes_them_as_they_are(path):
    """On the CPU they are not copied again."""
    write_container(path, {f"{i}": np.ones(1000 + i, np.float32) for i in range(20)})

    for array in read_all(path).values():
        assert array.ctypes.data % 64 == 0
        assert jax.device_put(array).unsafe_buffer_pointer() == array.ctypes.data


def test_what_was_read_stays_when_the_file_changes_or_goes(path):
    """It is memory of one's own, and no map of the file."""
    write_container(path, {"x": np.ones(1 << 19)})
    array = read_all(path)["x"]
    path.write_bytes(bytes(path.stat().st_size))
    os.truncate(path, 0)
    path.unlink()

    assert (array == 1).all()
    array[0] = 2
    assert array[0] == 2


def test_a_file_that_is_open_stays_what_it_was_when_another_takes_its_place(path):
    """Who reads while somebody saves reads one model, and not parts of two."""
    write_container(path, {"x": np.zeros(3)})
    with Container.open(path) as container:
        write_container(path, {"x": np.ones(5), "y": np.ones(1)})
        assert container.read("x").tolist() == [0, 0, 0]
    assert read_all(path)["x"].shape == (5,)


def test_an_array_is_read_alone(path, monkeypatch):
    """Of the rest of the file no byte is."""
    write_container(path, {"a": np.ones(3_000_000, np.int8), "b": np.arange(10_000, dtype=np.int8)})
    with Container.open(path) as container:
        read = []
        real = containers._read_at

        def counting(file, start, data):
            count = real(file, start, data)
            read.append((start, start + count))
            return count

        monkeypatch.setattr(containers, "_read_at", counting)
        container.read("b")
        assert read == [container.entries["b"][3:5]]
        read.clear()
        container.read("a")
        assert sum(stop - start for start, stop in read) == 3_000_000
        assert (min(read)[0], max(read)[1]) == container.entries["a"][3:5]


@pytest.mark.parametrize("size", [10, 3 << 20])
def test_a_file_that_shrinks_is_noticed(path, size):
    """Between the header and the array."""
    write_container(path, {"x": np.ones(size, np.int8)})
    with Container.open(path) as container:
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(FileError, match=r"expected .* more bytes, got the end of the file"):
            container.read("x")


@pytest.mark.parametrize("size", [10, 3 << 20])
def test_a_byte_that_changes_is_noticed_unless_nobody_looks(path, size):
    """In any part of an array; and the array is named."""
    write_container(path, {"head.weight": np.zeros(size, np.int8), "bias": np.zeros(3)})
    with Container.open(path) as container:
        entry = container.entries["head.weight"]
    for position in (entry.start, entry.stop - 1, (entry.start + entry.stop) // 2):
        with open(path, "r+b") as file:
            file.seek(position)
            file.write(b"\x01")
        text = "expected arrays that fit their checksums, got .*damaged.\n  at head.weight$"
        with pytest.raises(FileError, match=text):
            read_all(path)
        assert read_all(path, verify=False)["head.weight"].sum() >= 1
        with Container.open(path) as container:
            assert container.read("bias").tolist() == [0, 0, 0]


def test_booleans_are_two(path):
    """With others NumPy would compute nonsense, whether a checksum fits them or not."""
    safetensors.numpy.save_file({"flags": np.zeros(3, bool)}, path)
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x02")
    for verify in (True, False):
        with pytest.raises(FileError, match=r"expected booleans of 0 and 1, got 2\.\n  at flags"):
            read_all(path, verify=verify)


@pytest.mark.parametrize(
    ("array", "got"),
    [
        (np.array([None, {}], object), "object"),
        (np.array(["a", "b"]), "<U1"),
        (np.array([b"a"]), r"\|S1"),
        (np.zeros(2, [("a", "f4"), ("b", "i4")]), r"\[\('a', '<f4'\), \('b', '<i4'\)\]"),
        (np.array(["2026-01-01"], "M8[D]"), r"datetime64\[D\]"),
        (np.zeros(2, np.longdouble), "float128|float96|longdouble"),
        (jax.random.key(0), "key<"),
        ("text", "<U4"),
        (object(), "object"),
    ],
)
def test_what_is_no_array_of_numbers_is_named(path, array, got):
    """And nothing is written."""
    text = f"model.safetensors: expected arrays of numbers and booleans, got ({got}).*\n  at net.x$"
    with pytest.raises(ArgumentError, match=text):
        write_container(path, {"w": np.ones(2), "net.x": array})

    assert not path.exists()


@pytest.mark.parametrize(
    ("arrays", "metadata", "text"),
    [
        ({"__metadata__": np.ones(1)}, {}, "a name of its own for each array, got one that is tak"),
        ({"\ud800": np.ones(1)}, {}, "a text, got '.ud800'"),
        ({1: np.ones(1)}, {}, "a text, got 1"),
        ({}, {"a": 1}, "a text, got 1"),
        ({}, {"a": "\udfff"}, "a text, got"),
        ({}, {1: "a"}, "a text, got 1"),
        ({}, {"pytreemod.container.version": "1"}, "keys of your own in the metadata, got one"),
    ],
)
def test_what_no_file_can_say_is_refused(path, arrays, metadata, text):
    """Before anything is written."""
    with pytest.raises(ArgumentError, match=text):
        write_container(path, arrays, metadata)

    assert not path.exists()


def test_a_name_is_given_once(path):
    """As sources there might be two."""
    twice = [ArraySource.of("x", np.ones(1)), ArraySource.of("x", np.zeros(1))]
    with pytest.raises(ArgumentError, match=r"got one that comes twice\.\n  at x"):
        write_container(path, twice)


def test_a_header_that_nobody_could_read_is_not_written(path, monkeypatch):
    """Safetensors reads a hundred million bytes; that many would take the test a while."""
    monkeypatch.setattr(containers, "LONGEST", 1000)
    with pytest.raises(ArgumentError, match="at most 1,000 bytes, got names and metadata that tak"):
        write_container(path, {}, {"text": "a" * 1000})


def test_what_fails_while_writing_leaves_the_old_file(path):
    """Here the array that is made last."""
    write_container(path, ARRAYS)

    def fail():
        raise KeyError("no such leaf")

    sources = [ArraySource.of("a", np.ones(3)), ArraySource("b", np.dtype("i1"), (3,), fail)]
    with pytest.raises(KeyError, match="no such leaf"):
        write_container(path, sources)

    assert_same(read_all(path), ARRAYS)
    assert os.listdir(path.parent) == [path.name]


def test_a_file_is_closed_when_it_cannot_be_read(path):
    """Or a warning would tell (and warnings are errors here)."""
    path.write_bytes(b"no model")
    with pytest.raises(FileError, match="in the format of safetensors"):
        Container.open(path)


def test_several_threads_read_from_one_file(path, monkeypatch):
    """Also where the system cannot read at a place, and they share the file's own."""
    arrays = {f"{i}": np.full(200_000, i, np.int32) for i in range(8)}
    write_container(path, arrays)
    for read_at in (containers._read_from, containers._seek_and_read):
        monkeypatch.setattr(containers, "_read_at", read_at)
        read = {}
        with Container.open(path) as container:

            def work(name, container=container, read=read):
                read[name] = container.read(name)

            threads = [threading.Thread(target=work, args=(name,)) for name in arrays]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert_same({name: read[name] for name in arrays}, arrays)


def peak_of(work):
    """The most memory that Python and NumPy take while something runs, and what it gives."""
    tracemalloc.start()
    try:
        result = work()
        return tracemalloc.get_traced_memory()[1], result
    finally:
        tracemalloc.stop()


def test_neither_way_takes_more_memory_than_the_arrays_have(path):
    """Writing takes none, where they are on the host; reading what they take themselves."""
    arrays = {f"{i}": jnp.zeros(1 << 18) for i in range(8)}
    jax.block_until_ready(arrays)
    writing, _ = peak_of(lambda: write_container(path, arrays))
    reading, _ = peak_of(lambda: read_all(path))

    assert writing < 1 << 18
    assert reading < 8 * (1 << 20) + (1 << 18)


def test_of_arrays_that_must_be_copied_one_is(path):
    """Those whose elements have another order in memory than in the file."""
    arrays = {f"{i}": np.zeros((1024, 1024), np.int8).T for i in range(6)}
    writing, _ = peak_of(lambda: write_container(path, arrays))

    assert writing < 1.2 * (1 << 20)


FULL = """
import resource, signal, sys
import numpy as np
from pytreemod.errors import FileAccessError
from pytreemod.io import replacing
from pytreemod.io.containers import write_container
if sys.argv[2] == "writing":
    replacing._reserve = lambda file, size: None
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    write_container(sys.argv[1], {"small": np.ones(3), "large": np.ones(100_000)})
except FileAccessError as error:
    print(error.errno, error, sep="|")
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["reserving", "writing"])
def test_a_full_disk_leaves_the_old_file(path, when):
    """As a limit on the size of files simulates it, in a process that has one."""
    write_container(path, ARRAYS)
    command = [sys.executable, "-c", FULL, str(path), when]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    number, text = done.stdout.strip().split("|")
    assert int(number) == errno.EFBIG
    assert text == f"{path}: expected a file that can be written, got file too large."
    assert_same(read_all(path), ARRAYS)
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_small_disk_that_is_full_leaves_the_old_file(tmp_path):
    """A disk in memory, of one megabyte."""
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        path = tmp_path / "model.safetensors"
        write_container(path, ARRAYS)
        with pytest.raises(OSError, match="got no space left on device") as caught:
            write_container(path, {"x": np.ones(1 << 20)})
        assert caught.value.errno == errno.ENOSPC
        assert_same(read_all(path), ARRAYS)
        assert os.listdir(tmp_path) == [path.name]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


LARGE = {"large": np.arange(500_000, dtype=np.float32), "small": np.arange(3.0)}


def test_checksums_computed_beside_are_those_computed_between(path, monkeypatch):
    """Whether another thread sums or this one, the file is the same, and read back checked."""
    monkeypatch.setattr(containers, "_SUMMED_BESIDE", 1)
    write_container(path, LARGE)
    beside = path.read_bytes()
    monkeypatch.setattr(containers, "_SUMMED_BESIDE", float("inf"))
    write_container(path, LARGE)
    assert path.read_bytes() == beside
    assert_same(read_all(path), LARGE)


def test_a_program_that_saves_as_it_ends(path):
    """No thread can be started any more by then: the checksums are computed between."""
    program = """if True:
        import atexit, sys
        import numpy as np
        from pytreemod.io import containers
        containers._SUMMED_BESIDE = 1
        arrays = {"large": np.arange(500_000, dtype=np.float32), "small": np.arange(3.0)}
        atexit.register(containers.write_container, sys.argv[1], arrays)
    """
    command = [sys.executable, "-c", program, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert_same(read_all(path), LARGE)


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
            # Digits, quotes and brackets: what a header is made of.
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
            return read_all(path)

    peak, read = peak_of(read)
    assert peak < 200_000 + 50 * len(content)
    if read is not None and arrays is not None:
        assert_same(read, arrays)
    return read is not None


def fuzz(path, seeds):
    """Damaged files, with checksums and without; counts those that were read all the same."""
    write_container(path, ARRAYS, {"author": "me"})
    ours = path.read_bytes()
    plain_arrays = {"w": np.arange(6, dtype=np.float32), "b": np.zeros(2, bool)}
    safetensors.numpy.save_file(plain_arrays, path, {"format": "np"})
    plain = path.read_bytes()
    whole = 0
    for seed in seeds:
        rng = random.Random(seed)
        # Without checksums a flipped byte of an array cannot be told from another array.
        file, arrays = (ours, ARRAYS) if seed % 3 else (plain, None)
        whole += check_damaged(path, damage(file, rng), arrays)
    return whole


def test_damaged_files_give_a_clear_error_or_the_right_arrays(path):
    """A hundred and fifty of them; most give an error."""
    assert fuzz(path, range(150)) < 50


@pytest.mark.slow
def test_many_damaged_files_give_a_clear_error_or_the_right_arrays(path):
    """Ten thousand of them, other ones."""
    assert fuzz(path, range(1_000, 11_000)) < 3_000


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
    text = json.dumps(content).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    with contextlib.suppress(FileError):
        arrays = read_all(path)
        assert sum(array.nbytes for array in arrays.values()) == len(data)


@given(HEADERS, st.binary(max_size=20))
@settings(max_examples=100)
def test_headers_that_say_anything_give_an_error_or_what_is_there(tmp_path_factory, content, data):
    """Right as JSON, and wrong in all other ways."""
    check_lie(tmp_path_factory.getbasetemp() / "lie", content, data)


@pytest.mark.slow
@given(HEADERS, st.binary(max_size=20))
@settings(max_examples=3_000)
def test_many_headers_that_say_anything_give_an_error_or_what_is_there(
    tmp_path_factory, content, data
):
    """More of them."""
    check_lie(tmp_path_factory.getbasetemp() / "lie", content, data)


def test_every_way_to_cut_a_file_off_is_noticed(path):
    """After each byte of the header, and each of the arrays."""
    write_container(path, ARRAYS)
    content = path.read_bytes()
    for length in itertools.chain(range(64), range(64, len(content), 13), [len(content) - 1]):
        path.write_bytes(content[:length])
        with pytest.raises(FileError, match=r"model\.safetensors: expected"):
            Container.open(path)


def test_every_flipped_byte_is_noticed(path):
    """None of them means nothing: no byte of a file is free."""
    arrays = {"w": np.arange(3, dtype=np.float32), "c": np.array([1j])}
    write_container(path, arrays)
    content = path.read_bytes()
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        with pytest.raises(FileError, match=r"model\.safetensors: expected"):
            read_all(path)


test_refusals = refusals(globals())
