"""The format: other tools read what we write, we read what they write, and nothing changes."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import example, given, settings
from hypothesis import strategies as st

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, FileError
from tests.io.files import entry, faults, header_of, peak_of, write_plain

CODED = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "float8_e4m3fn"),
    *("float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"),
]
WITHOUT_CODE = [
    *("int2", "int4", "uint2", "uint4", "complex128", "float4_e2m1fn", "float8_e3m4"),
    *("float8_e4m3", "float8_e4m3b11fnuz"),
]
DTYPES = [x for x in (*CODED, *WITHOUT_CODE) if x == "bool" or hasattr(jnp, x)]


def array_of(dtype, *shape):
    """Random bits: among them NaN with payloads, infinities, and a negative zero."""
    dtype, size = jnp.dtype(dtype), int(np.prod(shape))
    rng = np.random.default_rng(0)
    if dtype.kind == "b" or dtype.name.lstrip("u") in ("int2", "int4", "float4_e2m1fn"):
        return rng.integers(0, 2, shape).astype(dtype)
    return np.frombuffer(rng.bytes(size * dtype.itemsize), dtype).reshape(shape)


def theirs(path):
    """What the package of safetensors finds: code, shape and bytes by name."""
    found = safetensors.deserialize(path.read_bytes())
    return {name: (x["dtype"], x["shape"], bytes(x["data"])) for name, x in found}


def write_theirs(path, dtype, arrays):
    specs = {}
    for name, array in arrays.items():
        about = {"data_ptr": array.ctypes.data, "data_len": array.nbytes}
        specs[name] = safetensors.TensorSpec(dtype=dtype, shape=[*array.shape], **about)
    safetensors.serialize_file(specs, path)


# ---- arrays


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_bit_for_bit(path, dtype):
    """Alone and into a tree; another tool finds and writes the same."""
    shapes = [(), (0, 2), (2, 3), (500,), (1,) * 32]
    arrays = {f"x{i}": array_of(dtype, *shape) for i, shape in enumerate(shapes)}
    pm.save(path, arrays)

    assert faults(pm.load(path), arrays) == []
    assert faults(pm.load(path, {x: np.zeros_like(arrays[x]) for x in arrays}), arrays) == []
    found = theirs(path)
    for name, (_, shape, data) in found.items():
        array = arrays[name]
        right = [*array.shape] if dtype in CODED else [array.nbytes]
        assert (shape, data) == (right, array.tobytes())
    if dtype in CODED:
        write_theirs(path, dtype, arrays)
        assert theirs(path) == found
        assert faults(pm.load(path), arrays) == []
    if array_of(dtype).itemsize < 8:
        like = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}
        loaded = pm.load(path, like)
        assert all(isinstance(array, jax.Array) for array in loaded.values())
        assert faults(loaded, arrays) == []


def test_a_byte_is_true_or_false(path):
    """NumPy would compute nonsense with a third value."""
    write_plain(path, {"x": entry("BOOL", [4], [0, 4])}, bytes([0, 1, 2, 255]))

    assert pm.load(path)["x"].view(np.uint8).tolist() == [0, 1, 1, 1]


FORMS = {
    "strided": np.arange(12, dtype=np.int32)[::-2],
    "turned": np.arange(6.0).reshape(2, 3).T,
    "Fortran's order": np.asfortranarray(np.arange(24, dtype=np.int16).reshape(2, 3, 4)),
    "big-endian": np.arange(6, dtype=">f4").reshape(2, 3),
    "big-endian scalar": np.array(1.5, ">f8"),
    "big-endian and turned": np.arange(4, dtype=">i4").reshape(2, 2).T,
    "broadcast": np.broadcast_to(np.float32(2), (3, 2)),
    "read-only": np.frombuffer(b"\1\2\3", np.uint8),
    "few bits, strided": np.arange(6).astype(jnp.dtype("int4"))[::2],
}


@pytest.mark.parametrize("array", FORMS.values(), ids=FORMS)
def test_the_order_in_memory_does_not_matter(path, array):
    """A file has the numbers in C's order, and little-endian."""
    pm.save(path, {"x": array, "y": np.ones(3)})

    assert faults({"x": pm.load(path)["x"]}, {"x": array}) == []
    assert theirs(path)["x"][2] == array.astype(array.dtype.newbyteorder("<")).tobytes()
    loaded = pm.load(path, {"x": np.zeros_like(array), "y": np.zeros(3)})["x"]
    assert (loaded == array).all()
    assert loaded.dtype == array.dtype


@pytest.mark.parametrize(
    "shape", [(1,) * 33, (1,) * 64, (0, 2**50)], ids=["33 axes", "64 axes", "huge but empty"]
)
def test_what_cannot_be_read_is_not_written(path, shape):
    """Arrays of many axes, and empty ones of huge sizes, come back; or the old file stays."""
    pm.save(path, {"x": np.ones(2)})
    tree = {"x": np.zeros(shape, np.int8)}
    try:
        pm.save(path, tree)
    except FileError:
        tree = {"x": np.ones(2)}

    assert faults(pm.load(path), tree) == []


@pytest.mark.slow
def test_metadata_that_no_header_can_hold_is_refused(path):
    """Readers take no header of more than 100 MB: such a file would be lost."""
    pm.save(path, {"x": np.ones(2)})
    with pytest.raises((FileError, ArgumentError), match="100"):
        pm.save(path, {"x": np.zeros(2)}, "x" * 100_000_000)

    assert pm.load(path)["x"].tolist() == [1, 1]


def test_each_array_is_aligned(path):
    """Other tools map the file into memory."""
    shapes = {"int8": (3,), "float64": (1,), "bfloat16": (5,), "complex128": (3,), "int32": ()}
    pm.save(path, {name: np.ones(shape, jnp.dtype(name)) for name, shape in shapes.items()})
    header = header_of(path)
    start = int.from_bytes(path.read_bytes()[:8], "little") + 8

    for name in shapes:
        begin = start + header[name]["data_offsets"][0]
        assert begin % min(jnp.dtype(name).itemsize, 8) == 0, name


def test_what_was_read_stays_when_the_file_changes_or_goes(path):
    """It is a copy, not a map of the file, and can be written to."""
    pm.save(path, {"x": np.ones(1 << 19), "y": np.ones(3)})
    arrays = pm.load(path)
    path.write_bytes(bytes(path.stat().st_size))
    os.truncate(path, 0)

    for array in arrays.values():
        assert (array == 1).all()
        array[0] = 2
        assert array[0] == 2


def test_neither_way_takes_more_memory_than_the_arrays_have(path):
    """Writing takes none for arrays on the host; reading takes the size of the arrays."""
    arrays = {f"x{i}": np.zeros(1 << 18, np.float32) for i in range(8)}
    writing, _ = peak_of(lambda: pm.save(path, arrays))
    reading, _ = peak_of(lambda: pm.load(path))

    # The buffer of a file has a megabyte.
    assert writing < (1 << 20) + (1 << 18)
    assert reading < 8 * (1 << 20) + (1 << 18)


# ---- names and metadata

NAMES = ["", ".", "a.b", "a", "..", "a/b", "/etc/passwd", "ü 🎉", "a\nb", "\0", "*", "**.x", "'a'"]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(st.dictionaries(TEXTS, st.integers(0, 3), max_size=6), st.dictionaries(TEXTS, TEXTS))
@example({name: i for i, name in enumerate(NAMES)}, {})
@settings(max_examples=50)
def test_any_names_and_texts_come_back(tmp_path_factory, sizes, metadata):
    """Also where others read them; what was loaded is saved as the same file."""
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    arrays = {name: np.ones(size) for name, size in sizes.items() if name != "__metadata__"}
    pm.save(path, arrays, metadata)
    content, loaded = path.read_bytes(), pm.load(path)
    pm.save(path, loaded, metadata)

    assert path.read_bytes() == content
    assert faults(loaded, arrays) == faults(pm.load(path, arrays), arrays) == []
    assert {*theirs(path)} == {*arrays}
    assert pm.read_metadata(path) == metadata


METADATA = [
    *(None, {}, [], "", "text", 0, False, 2**70),
    {"step": 3, "loss": [0.5, None], "name": "ü\n\0"},
    [float("nan"), {"pytreemod": "x", "pytreemod.dtypes": "{}", "metadata": 1, "format": "np"}],
]


@pytest.mark.parametrize("metadata", METADATA, ids=str)
def test_metadata_comes_back(path, metadata):
    """Anything that JSON has; other tools read the file, and transformers asks for the format."""
    pm.save(path, {"x": np.ones(2)}, metadata)

    # NaN is equal to nothing.
    assert repr(pm.read_metadata(path)) == repr(metadata)
    assert faults(pm.load(path), {"x": np.ones(2)}) == []
    with safetensors.safe_open(path, "np") as file:
        assert (file.keys(), file.metadata()["format"]) == (["x"], "pt")


@pytest.mark.parametrize(
    "texts", [{"format": "pt"}, {"metadata": "no JSON"}, {"metadata": "[1]", "x": "y"}], ids=str
)
def test_metadata_of_another_tool_are_its_texts(path, texts):
    """Whatever their names are; None if there are none."""
    safetensors.numpy.save_file({"x": np.ones(2)}, path, texts)
    assert pm.read_metadata(path) == texts

    safetensors.numpy.save_file({"x": np.ones(2)}, path)
    assert pm.read_metadata(path) is None


# ---- folders

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ARRAYS = {
    "embed.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "layers.0.weight": np.arange(4, dtype=np.float16),
    "layers.1.weight": np.ones((2, 2), np.int8),
    "head.bias": np.array([True, False]),
}
ONE, TWO = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
SHARDS = {ONE: ["embed.weight", "layers.0.weight"], TWO: ["layers.1.weight", "head.bias"]}
WEIGHT_MAP = {name: shard for shard, names in SHARDS.items() for name in names}


def write_index(folder, weight_map):
    """An index of these shards."""
    content = {"metadata": {"total_size": 38}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(content))


@pytest.fixture
def folder(tmp_path):
    """Two shards and their index, as Hugging Face writes them; and what else is there."""
    for shard, names in SHARDS.items():
        arrays = {name: ARRAYS[name] for name in names}
        safetensors.numpy.save_file(arrays, tmp_path / shard, {"format": "pt"})
    write_index(tmp_path, WEIGHT_MAP)
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "other.safetensors").write_text("")
    return tmp_path


def test_a_folder_is_one_table(folder):
    """As the file would be that has all of its arrays; whatever ends the path."""
    for path in (folder, str(folder), f"{folder}/"):
        assert faults(pm.load(path), ARRAYS) == []
    assert pm.read_metadata(folder) == {"format": "pt"}
    layers = [{"weight": np.zeros(4, np.float16)}, {"weight": np.zeros((2, 2), np.int8)}]
    loaded, report = pm.load(folder, {"layers": layers}, strict=False)
    assert loaded["layers"][1]["weight"].tolist() == [[1, 1], [1, 1]]
    assert sorted(report.unexpected) == ["embed.weight", "head.bias"]


def test_a_single_file_needs_no_index_and_wins_over_one(folder):
    """It has the name that others give it."""
    model = nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
    pm.save(folder / SINGLE, model, {"step": 3})

    assert pm.load(folder, pm.filter_eval_shape(lambda: model)) == model
    assert pm.read_metadata(folder) == {"step": 3}
    (folder / INDEX).unlink()
    assert pm.load(folder, model) == model


def test_files_may_be_links(folder, tmp_path_factory):
    """In Hugging Face's cache all files are links to other folders; they stay."""
    blobs = tmp_path_factory.mktemp("blobs")
    for blob, name in zip("abc", (ONE, TWO, INDEX), strict=True):
        (folder / name).rename(blobs / blob)
        (folder / name).symlink_to(blobs / blob)

    assert faults(pm.load(folder), ARRAYS) == []


OUTSIDE = ["../x", "/etc/passwd", "x/../../y", f"./{TWO}", "..", "", "x\0y", "\ud800", "sub"]


@pytest.mark.parametrize("name", [*OUTSIDE, 1, None, [TWO], {}], ids=ascii)
def test_an_index_names_files_of_its_folder(folder, name):
    """No other file is read."""
    (folder / "sub").mkdir()
    write_index(folder, {**WEIGHT_MAP, "x": name})
    with pytest.raises(FileError, match=r"index|/sub "):
        pm.load(folder)


@pytest.mark.parametrize("text", ["", "[]", "{", "{}", '{"weight_map": 1}', "[" * 100_000], ids=len)
def test_an_index_that_is_none_is_refused(folder, text):
    """Nothing is loaded by half."""
    (folder / INDEX).write_text(text)
    with pytest.raises(FileError, match=INDEX):
        pm.load(folder)


def test_a_file_that_is_missing_or_wrong_is_named(folder):
    """Or two that have arrays of one name."""
    write_index(folder, {**WEIGHT_MAP, "x": "gone"})
    with pytest.raises(FileNotFoundError, match="gone"):
        pm.load(folder)
    safetensors.numpy.save_file({"head.bias": np.ones(2)}, folder / "gone")
    with pytest.raises(FileError, match=rf"{TWO} and .* both have head\.bias"):
        pm.load(folder)
    write_index(folder, WEIGHT_MAP)
    os.truncate(folder / TWO, 60)
    with pytest.raises(FileError, match=TWO):
        pm.load(folder)
    (folder / INDEX).unlink()
    with pytest.raises(FileNotFoundError, match=INDEX):
        pm.load(folder)
