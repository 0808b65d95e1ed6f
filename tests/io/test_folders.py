"""A folder of files is one table, or there is a clear error."""

import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import FileAccessError, FileError, FileMissingError
from tests.goldens import refusals
from tests.io.files import array_of, header_of, write_plain
from tests.io.test_showing import diff_files, show_file

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ARRAYS = {
    "embed.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "layers.0.weight": np.arange(4, dtype=np.float16),
    "layers.1.weight": np.ones((2, 2), np.int8),
    "head.bias": np.array([True, False]),
}
LIKE = {
    "embed": {"weight": np.zeros((2, 3), np.float32)},
    "layers": [{"weight": np.zeros(4, np.float16)}, {"weight": np.zeros((2, 2), np.int8)}],
    "head": {"bias": np.zeros(2, bool)},
}
"""A tree of these names."""
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


def test_all_options_are_those_of_a_file(folder):
    """Names, casts, parts."""
    like = {"table": jnp.zeros((2, 3), "bfloat16"), "new": jnp.ones(2)}
    made, report = pm.load(
        folder, like, strict=False, rename={"embed.weight": "table"}, cast="bfloat16"
    )

    assert made["table"].tolist() == ARRAYS["embed.weight"].tolist()
    assert report.missing == ("new",)
    assert "head.bias" in report.unexpected


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="by which files are read")
def test_an_array_is_read_alone(folder, monkeypatch):
    """Of the rest nothing but headers is read, whichever shard it is in."""
    read, real = [], os.preadv

    def counting(descriptor, buffers, start):
        count = real(descriptor, buffers, start)
        read.append((start, start + count))
        return count

    monkeypatch.setattr(os, "preadv", counting)
    for shard, names in SHARDS.items():
        header = (folder / shard).read_bytes()
        begin = 8 + int.from_bytes(header[:8], "little")
        for name in names:
            read.clear()
            pm.load(folder, LIKE, only=name)
            spans = [span for span in read if span[0] > 9]
            offsets = array_of(header_of(folder / shard), name)
            assert spans == [(begin + offsets[0], begin + offsets[1])]


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
    with pytest.warns(UserWarning, match="expected either model.safetensors or .*, got both; mod"):
        assert pm.load(folder)["x"].tolist() == [1, 1]


def test_the_command_line_takes_folders(folder):
    """To show one, and to compare two."""
    assert show_file(folder).splitlines()[-1] == "4 leaves, 16 numbers, 38 B"
    other = shutil.copytree(folder, folder.parent / f"{folder.name}-other")
    write_shard(other, TWO, {name: ~ARRAYS[name] for name in SHARDS[TWO]})
    assert diff_files(folder, other).splitlines() == [
        "! layers.1.weight: i8[2,2] of other values",
        "! head.bias: bool[2] of other values",
    ]


def test_pytorchs_layers_come_from_a_folder(tmp_path):
    """Under the names of PyTorch."""
    model = nn.Linear(3, 2, key=jax.random.key(0))
    arrays = {name: np.asarray(array) for name, array in pm.to_torch(model).items()}
    write_shard(tmp_path, ONE, {"weight": arrays["weight"]})
    write_shard(tmp_path, TWO, {"bias": arrays["bias"]})
    write_index(tmp_path, {"weight": ONE, "bias": TWO})

    assert pm.from_torch(nn.Linear(3, 2, key=jax.random.key(1)), tmp_path) == model


# ---- what is wrong with a folder


def test_every_way_to_cut_a_shard_off_is_noticed(folder):
    """And the shard is named, whichever part of it is asked for."""
    content = (folder / TWO).read_bytes()
    for length in range(len(content)):
        (folder / TWO).write_bytes(content[:length])
        with pytest.raises(FileError, match=f"{TWO}: expected"):
            pm.load(folder, LIKE, only="embed.weight")


def test_a_shard_may_not_be_a_pipe(folder):
    """It would keep its reader waiting for ever."""
    (folder / TWO).unlink()
    os.mkfifo(folder / TWO)
    with pytest.raises(FileAccessError, match=f"{TWO}: expected .*, got a pipe or a device"):
        pm.load(folder)


def test_a_link_that_leads_nowhere_is_named(folder):
    """As in a cache that somebody has emptied: of the file, the index, a shard."""
    for name in (TWO, INDEX, SINGLE):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to("gone")
        with pytest.raises(FileMissingError, match=name):
            pm.load(folder)


@pytest.mark.parametrize("kind", ["F4", "F6_E2M3", "X", 3])
def test_a_dtype_that_is_not_known_is_named(folder, kind):
    """With its tensor and its file."""
    entry = {"dtype": kind, "shape": [2], "data_offsets": [0, 1]}
    write_plain(folder / TWO, {"packed": entry}, b"1")
    write_index(folder, {**shard_of({ONE: SHARDS[ONE]}), "packed": TWO})
    text = f"{TWO}: expected the code of a dtype, such as F32, got {kind!r}.\n  at packed"
    with pytest.raises(FileError, match=text):
        pm.load(folder)


def test_all_shards_are_closed_again(folder):
    """After an error, too."""
    for name in ("whole", "broken"):
        before = len(os.listdir("/proc/self/fd"))
        if name == "broken":
            (folder / TWO).unlink()
            with pytest.raises(FileMissingError, match=INDEX):
                pm.load(folder)
        else:
            pm.load(folder)
        assert len(os.listdir("/proc/self/fd")) == before


def load_among(folder, *names):
    """What is read from a folder that has such files, none of which is a model's."""
    for name in names:
        (folder / name).write_text("")
    return pm.load(folder)


def read(folder, content):
    """What is read through an index that has this text."""
    text = content if isinstance(content, str) else json.dumps(content)
    (write_folder(folder) / INDEX).write_text(text)
    return pm.load(folder)


def read_mapped(folder, **changed):
    """What is read through an index that names other files for some arrays."""
    return read(folder, {"weight_map": {**shard_of(), **changed}})


def read_shards(folder, shards, named=None):
    """What is read from a folder whose shards have these arrays, and its index those names."""
    for shard, names in shards.items():
        write_shard(folder, shard, {name: ARRAYS[name] for name in names})
    write_index(folder, named or shard_of(shards))
    return pm.load(folder)


test_refusals = refusals(globals())
