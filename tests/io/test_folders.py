"""A folder of files is one table, or there is a clear error."""

import json
import os
import signal
import subprocess
import sys
import time
import warnings

import jax
import numpy as np
import pytest
import safetensors.numpy

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, FileError, FileMissingError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ARRAYS = {
    "embed.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "layers.0.weight": np.arange(4, dtype=np.float16),
    "layers.1.weight": np.ones((2, 2), np.int8),
    "head.bias": np.array([True, False]),
}
SHARDS = {
    "model-00001-of-00002.safetensors": ["embed.weight", "layers.0.weight"],
    "model-00002-of-00002.safetensors": ["layers.1.weight", "head.bias"],
}
ONE, TWO = SHARDS


def shard_of(shards=None):
    """The map of an index."""
    return {name: shard for shard, names in (shards or SHARDS).items() for name in names}


def write_index(folder, weight_map=None, **rest):
    """An index; of the two shards, if nothing else is asked for."""
    content = {"metadata": {"total_size": 38}, "weight_map": weight_map or shard_of(), **rest}
    (folder / INDEX).write_text(json.dumps(content))


def write_shard(folder, shard, arrays):
    """A file as others write it."""
    (folder / shard).parent.mkdir(exist_ok=True)
    safetensors.numpy.save_file(arrays, folder / shard, {"format": "pt"})


def write_folder(folder, shards=None):
    """A folder as Hugging Face writes it."""
    for shard, names in (shards or SHARDS).items():
        write_shard(folder, shard, {name: ARRAYS[name] for name in names})
    write_index(folder, shard_of(shards))
    return folder


@pytest.fixture
def folder(tmp_path):
    """Two shards and their index."""
    return write_folder(tmp_path)


def assert_same(arrays, expected=None):
    """The same names, and for each the same bits."""
    expected = ARRAYS if expected is None else expected
    assert arrays.keys() == expected.keys()
    for name, array in expected.items():
        assert (arrays[name].dtype, arrays[name].shape) == (array.dtype, array.shape)
        assert np.asarray(arrays[name]).tobytes() == array.tobytes()


def test_a_folder_is_one_table(folder):
    """As the file would be that has all of its arrays; whatever ends the path."""
    for path in (folder, str(folder), f"{folder}/"):
        assert_same(pm.load(path))
    assert pm.read_metadata(folder) == {"format": "pt"}


def test_a_folder_of_one_file_needs_no_index(tmp_path):
    """It has the name that others give it."""
    model = nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
    pm.save(tmp_path / SINGLE, model, {"step": 3})

    assert pm.load(tmp_path) == model
    assert pm.load(tmp_path, pm.filter_eval_shape(lambda: model)) == model
    assert pm.read_metadata(tmp_path) == {"step": 3}


def test_shards_may_be_links_and_in_folders(folder):
    """In Hugging Face's cache all files are links; a name may lead down."""
    blobs = folder.parent / f"{folder.name}-blobs"
    blobs.mkdir()
    (folder / ONE).rename(blobs / "abc")
    (folder / ONE).symlink_to(blobs / "abc")
    (folder / INDEX).rename(blobs / "def")
    (folder / INDEX).symlink_to(blobs / "def")
    assert_same(pm.load(folder))
    (folder / "inner").mkdir()
    (folder / TWO).rename(folder / "inner" / TWO)
    write_index(folder, shard_of({ONE: SHARDS[ONE], f"inner/{TWO}": SHARDS[TWO]}))
    assert_same(pm.load(folder))


def test_the_single_file_wins(folder):
    """Beside an index; which is said."""
    pm.save(folder / SINGLE, {"x": np.ones(2)})
    with pytest.warns(UserWarning, match=r"model\.safetensors"):
        assert pm.load(folder)["x"].tolist() == [1, 1]


def test_pytorchs_layers_come_from_a_folder(tmp_path):
    """Under the names of PyTorch."""
    model = nn.Linear(3, 2, key=jax.random.key(0))
    arrays = {name: np.asarray(array) for name, array in pm.to_torch(model).items()}
    write_shard(tmp_path, ONE, {"weight": arrays["weight"]})
    write_shard(tmp_path, TWO, {"bias": arrays["bias"]})
    write_index(tmp_path, {"weight": ONE, "bias": TWO})

    assert pm.from_torch(nn.Linear(3, 2, key=jax.random.key(1)), tmp_path) == model


# ---- errors in a folder


def read(folder, content):
    """The result of loading through an index with this text."""
    text = content if isinstance(content, str) else json.dumps(content)
    (write_folder(folder) / INDEX).write_text(text)
    return pm.load(folder)


def read_mapped(folder, **changed):
    """The result of loading through an index that names other files for some arrays."""
    return read(folder, {"weight_map": {**shard_of(), **changed}})


@pytest.mark.parametrize("content", ["", "[]", "{", {}, {"weight_map": {"a": 1}}], ids=str)
def test_an_index_that_is_none_is_refused(folder, content):
    """Nothing is loaded by half."""
    with pytest.raises(FileError, match="index"):
        read(folder, content)


@pytest.mark.parametrize(
    "changed",
    [
        {"a": "../model.safetensors"},
        {"a": "/etc/passwd"},
        {"a": "x/../../y"},
        {"a": "gone.safetensors"},
        {"missing": ONE},
        {"embed.weight": TWO},
    ],
    ids=str,
)
def test_an_index_names_files_of_its_folder_and_what_they_have(folder, changed):
    """No file outside is read, and no array comes from another file than the index says."""
    with pytest.raises(FileError, match=INDEX):
        read_mapped(folder, **changed)


def test_a_folder_without_a_model_is_refused(tmp_path):
    """Its files of PyTorch are pickles, which are not read."""
    (tmp_path / "pytorch_model.bin").write_text("")
    with pytest.raises(FileMissingError, match="safetensors"):
        pm.load(tmp_path)


@pytest.mark.parametrize("array", [np.array([None]), np.ma.masked_array([1], [True])], ids=str)
def test_a_refused_save_leaves_the_folder(folder, array):
    """Whichever shard the array would be in."""
    with pytest.raises((ArgumentError, FileError), match="b"):
        pm.save(folder, {"a": np.ones(3), "b": array}, shard_bytes=1)
    assert_same(pm.load(folder))
    with pytest.raises(ArgumentError, match="shard_bytes"):
        pm.save(folder, {"a": np.ones(3)}, shard_bytes=0)


def test_a_rename_that_fails_leaves_the_old_folder(folder, monkeypatch):
    """A disk may refuse when everything is written."""
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", lambda *_: os.stat(folder / "gone"))
        with pytest.raises(FileError, match="no such file"):
            pm.save(folder, {"a": np.ones(8), "b": np.ones(8)}, shard_bytes=8)
    assert_same(pm.load(folder))


# ---- writing


def shards_in(folder):
    """The files of arrays of a folder, in order."""
    return sorted(path.name for path in folder.iterdir() if path.name.endswith(".safetensors"))


def index_of(folder):
    """The content of the index."""
    return json.loads((folder / INDEX).read_text())


def test_a_folder_comes_back(tmp_path):
    """With a tree to load into, and alone; its metadata is in one of the shards."""
    model = nn.MLP(3, 2, 4, 2, key=jax.random.key(0))
    pm.save(tmp_path / "model", model, {"step": 3}, shard_bytes=50)
    like = nn.MLP(3, 2, 4, 2, key=jax.random.key(1))

    assert len(shards_in(tmp_path / "model")) > 2
    assert pm.load(tmp_path / "model", like) == model
    assert pm.load(tmp_path / "model") == model
    assert pm.read_metadata(tmp_path / "model") == {"step": 3}


def test_files_have_the_names_and_the_size_that_others_give_them(tmp_path):
    """And the same limit of bytes; larger arrays have separate files."""
    arrays = {f"x{i}": np.zeros(size, np.int8) for i, size in enumerate((4, 4, 2, 30, 10, 1))}
    pm.save(tmp_path, arrays, shard_bytes=10)

    names = [f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)]
    assert sorted(os.listdir(tmp_path)) == [*names, INDEX]
    assert index_of(tmp_path) == {
        "metadata": {"total_size": 51},
        "weight_map": dict(
            zip(arrays, [*[names[0]] * 3, names[1], names[2], names[3]], strict=True)
        ),
    }


@pytest.mark.parametrize("shard_bytes", [64, float("inf")])
def test_one_file_has_no_index(tmp_path, shard_bytes):
    """Nor does a tree without arrays have one."""
    for tree in ({"x": np.zeros(8)}, {}):
        pm.save(tmp_path, tree, shard_bytes=shard_bytes)
        assert os.listdir(tmp_path) == [SINGLE]
        assert pm.load(tmp_path).keys() == tree.keys()


def test_a_byte_that_changes_is_noticed_unless_nobody_looks(tmp_path):
    """In any of the shards."""
    pm.save(tmp_path, {"x": np.zeros(8, np.int8), "y": np.zeros(8, np.int8)}, shard_bytes=8)
    with open(tmp_path / shards_in(tmp_path)[1], "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")

    with pytest.raises(FileError, match=r"(?s)model-00002-of.*at y"):
        pm.load(tmp_path)
    assert pm.load(tmp_path, verify=False)["y"].sum() == 1


KINDS = {"few": 1e9, "many": 8, "more": 4}
"""How folders are written that follow one another."""


@pytest.mark.parametrize(
    ("first", "then"), [("few", "many"), ("many", "many"), ("many", "more"), ("many", "few")]
)
def test_the_new_files_take_the_place_of_the_old_ones(tmp_path, first, then):
    """One or several, by one or several; other files are unchanged."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "another.safetensors").write_text("")
    for number, kind in enumerate((first, then, then, first)):
        tree = [np.full(2, number, np.float32)] * 3
        pm.save(tmp_path, tree, shard_bytes=KINDS[kind])
        count = {"few": 1, "many": 3, "more": 3}[kind]
        assert len(os.listdir(tmp_path)) == 2 + count + (count > 1)
        assert [array[0] for array in pm.load(tmp_path)] == [number] * 3


def test_what_others_wrote_is_replaced(folder):
    """Shards that their index names, and no other file, whatever an index names."""
    write_index(folder, {**shard_of(), "x": "../outside", "y": "config.json"})
    outside = folder.parent / "outside"
    for path in (folder / "config.json", outside, folder / "model-00003-of-00003.safetensors"):
        path.write_text("kept")
    for _ in range(2):
        pm.save(folder, ARRAYS, shard_bytes=20)
        write_index(folder, {**index_of(folder)["weight_map"], "y": "config.json"})
    pm.save(folder, ARRAYS, shard_bytes=1000)

    assert sorted(os.listdir(folder)) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model-00003-of-00003.safetensors",
        SINGLE,
    ]
    assert outside.read_text() == "kept"


def test_links_are_replaced_and_not_what_they_lead_to(folder):
    """Hugging Face's cache shares the files with other versions of the model."""
    blobs = folder.parent / f"{folder.name}-blobs"
    blobs.mkdir()
    for name in (ONE, TWO, INDEX):
        (folder / name).rename(blobs / name)
        (folder / name).symlink_to(blobs / name)
    before = {path.name: path.read_bytes() for path in blobs.iterdir()}
    for shard_bytes in (20, 1000):
        pm.save(folder, {"x": np.ones(8)}, shard_bytes=shard_bytes)
        assert pm.load(folder)["x"].tolist() == [1.0] * 8

    assert {path.name: path.read_bytes() for path in blobs.iterdir()} == before
    assert os.listdir(folder) == [SINGLE]


# ---- while something fails


def grow_old(folder):
    """Make the files look old."""
    then = time.time() - 1000
    for path in folder.iterdir():
        os.utime(path, (then, then))


def number_in(folder):
    """The number of which all arrays are; a folder may have both kinds of files for a moment."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        arrays = pm.load(folder)
    (number,) = {array[0] for array in arrays}
    assert len(arrays) == 3
    return int(number)


def numbers(number):
    """A tree of one number."""
    return [np.full(2, number, np.float32)] * 3


PROGRAM = """
import itertools, sys
import numpy as np
import pytreemod as pm
path, number, times = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
tree = [np.full(10_000, number, np.float32)] * 3
for i in range(times):
    # One file now and then, and three mostly.
    pm.save(path, tree, shard_bytes=1e9 if i % 5 == 4 else 50_000)
    if i == 0:
        print("writing", flush=True)
"""


def start(path, number, times):
    """A process that replaces a folder again and again."""
    command = [sys.executable, "-c", PROGRAM, str(path), str(number), str(times)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_killed_process_leaves_a_whole_folder(tmp_path):
    """At any moment; the next save removes the leftovers."""
    process = start(tmp_path, 7, 1_000_000)
    assert process.stdout.readline() == "writing\n"
    time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()

    assert number_in(tmp_path) == 7
    grow_old(tmp_path)
    pm.save(tmp_path, numbers(8), shard_bytes=8)
    assert number_in(tmp_path) == 8
    assert len(os.listdir(tmp_path)) == 4
