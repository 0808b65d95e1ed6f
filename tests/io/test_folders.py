"""A folder of files is one table, or there is a clear error."""

import contextlib
import io
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import FileAccessError, FileError, FileMissingError
from tests.goldens import refusals
from tests.io.files import array_of, header_of, write_plain
from tests.io.test_containers import VALUES, damage, peak_of
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
    """Only headers of the others are read, whichever shard it is in."""
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
    assert [row.name for row in pm.diff(folder, other).values] == ["layers.1.weight", "head.bias"]
    assert diff_files(folder, other).startswith("Diff: 2 values, 2 equal")


def test_pytorchs_layers_come_from_a_folder(tmp_path):
    """Under the names of PyTorch."""
    model = nn.Linear(3, 2, key=jax.random.key(0))
    arrays = {name: np.asarray(array) for name, array in pm.to_torch(model).items()}
    write_shard(tmp_path, ONE, {"weight": arrays["weight"]})
    write_shard(tmp_path, TWO, {"bias": arrays["bias"]})
    write_index(tmp_path, {"weight": ONE, "bias": TWO})

    assert pm.from_torch(nn.Linear(3, 2, key=jax.random.key(1)), tmp_path) == model


# ---- errors in a folder


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
    """As in an emptied cache: a link of the file, the index, a shard."""
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
    """The result of loading a folder with such files, none of which is a model's."""
    for name in names:
        (folder / name).write_text("")
    return pm.load(folder)


def read(folder, content):
    """The result of loading through an index with this text."""
    text = content if isinstance(content, str) else json.dumps(content)
    (write_folder(folder) / INDEX).write_text(text)
    return pm.load(folder)


def read_mapped(folder, **changed):
    """The result of loading through an index that names other files for some arrays."""
    return read(folder, {"weight_map": {**shard_of(), **changed}})


def read_shards(folder, shards, named=None):
    """The result of loading a folder whose shards have these arrays, and its index those names."""
    for shard, names in shards.items():
        write_shard(folder, shard, {name: ARRAYS[name] for name in names})
    write_index(folder, named or shard_of(shards))
    return pm.load(folder)


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


@pytest.mark.parametrize("shard_bytes", [64, 1e9, float("inf"), np.int64(64)])
def test_one_file_has_no_index(tmp_path, shard_bytes):
    """Nor does a tree without arrays have one."""
    for tree in ({"x": np.zeros(8)}, {}):
        pm.save(tmp_path, tree, shard_bytes=shard_bytes)
        assert os.listdir(tmp_path) == [SINGLE]
        assert pm.load(tmp_path).keys() == tree.keys()


def test_safetensors_reads_each_shard(tmp_path):
    """The arrays that the index says, and checksums of ours."""
    pm.save(tmp_path, ARRAYS, shard_bytes=20)
    read = {}
    for shard in shards_in(tmp_path):
        read |= safetensors.numpy.load_file(tmp_path / shard)
        metadata = header_of(tmp_path / shard)["__metadata__"]
        assert len(metadata["pytreemod.container.array-checksums"]) >= 8
    assert_same({name.strip("'"): array for name, array in read.items()})
    assert index_of(tmp_path)["weight_map"].keys() == read.keys()


def test_other_tools_are_told_in_each_shard(tmp_path):
    """Of a model under their names; it is said to be one of PyTorch's, which transformers asks."""
    tree = [np.full(2, i, np.float32) for i in range(3)]
    pm.save(tmp_path, tree, {"by": "me"}, shard_bytes=8, rename={"*": "h.*.weight"})

    assert index_of(tmp_path)["weight_map"].keys() == {f"h.{i}.weight" for i in range(3)}
    for shard in shards_in(tmp_path):
        metadata = header_of(tmp_path / shard)["__metadata__"]
        assert metadata["format"] == "pt"
        assert "pytreemod.tree" not in metadata
    assert pm.load(tmp_path, tree, rename={"h.*.weight": "*"})[2].tolist() == [2, 2]


def test_a_byte_that_changes_is_noticed_unless_nobody_looks(tmp_path):
    """In any of the shards."""
    pm.save(tmp_path, {"x": np.zeros(8, np.int8), "y": np.zeros(8, np.int8)}, shard_bytes=8)
    with open(tmp_path / shards_in(tmp_path)[1], "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")

    with pytest.raises(FileError, match=r"model-00002-of.* fit their checksums, got .*\n  at y"):
        pm.load(tmp_path)
    assert pm.load(tmp_path, verify=False)["y"].sum() == 1


KINDS = {"few": 1e9, "many": 8, "more": 4}
"""How folders are written that follow one another."""


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("then", KINDS)
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


class Killed(BaseException):
    """The process has ended: nothing that it still does has an effect."""


def killed_after(patch, count):
    """After so many steps no file changes any more, as after a kill."""
    steps = itertools.count()

    def mortal(real):
        def work(*args, **kwargs):
            if next(steps) >= count:
                raise Killed
            return real(*args, **kwargs)

        return work

    class File(io.FileIO):
        write = mortal(io.FileIO.write)

    patch.setattr(io, "FileIO", File)
    for name in ("link", "replace", "unlink", "mkdir", "rmdir", "open", "fsync"):
        patch.setattr(os, name, mortal(getattr(os, name)))


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


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize(("first", "then"), [*itertools.product(KINDS, KINDS)])
def test_a_kill_at_any_step_leaves_a_whole_folder(tmp_path, first, then, durable):
    """The old one or the new one; the next save removes the leftovers."""
    seen = []
    for count in itertools.count():
        folder = tmp_path / f"{count}"
        pm.save(folder, numbers(1), shard_bytes=KINDS[first])
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
            killed_after(patch, count)
            pm.save(folder, numbers(2), shard_bytes=KINDS[then], durable=durable)
            break
        seen.append(number_in(folder))
        grow_old(folder)
        pm.save(folder, numbers(3), shard_bytes=KINDS[first])
        assert number_in(folder) == 3
        assert len(os.listdir(folder)) == (1 if first == "few" else 4)
    assert seen == sorted(seen)
    assert {*seen} == {1, 2}


def test_a_kill_in_a_new_folder_leaves_no_part(tmp_path):
    """There is a whole model, or none."""
    for count in itertools.count():
        folder = tmp_path / f"{count}"
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
            killed_after(patch, count)
            pm.save(folder, numbers(2), shard_bytes=8)
            break
        with contextlib.suppress(FileMissingError):
            assert number_in(folder) == 2
    assert count > 10


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize(("first", "then"), [("few", "many"), ("many", "many"), ("many", "few")])
def test_what_fails_leaves_the_old_files_alone(tmp_path, monkeypatch, error, first, then):
    """Whatever fails at whichever step, the person at the keyboard included."""
    for count in itertools.count():
        folder = tmp_path / f"{count}"
        pm.save(folder, numbers(1), shard_bytes=KINDS[first])
        before = sorted(os.listdir(folder))
        raised = False
        with monkeypatch.context() as patch:
            steps = failing_at(patch, count, error("stop"))
            try:
                pm.save(folder, numbers(2), shard_bytes=KINDS[then], durable=True)
            except error:
                raised = True
        is_half_way = {SINGLE, INDEX} <= {*os.listdir(folder)}
        if number_in(folder) == 1 and not is_half_way:
            assert raised
            assert sorted(os.listdir(folder)) == before
        else:
            # The next save completes a save that was too late to undo, as after a kill.
            grow_old(folder)
            pm.save(folder, numbers(3), shard_bytes=8)
            assert len(os.listdir(folder)) == 4
        if next(steps) < count:
            break
    assert count > 10


def failing_at(patch, count, error):
    """One step fails, and those after it do not."""
    steps = itertools.count()

    def failing(real):
        def work(*args, **kwargs):
            if next(steps) == count:
                raise error
            return real(*args, **kwargs)

        return work

    class File(io.FileIO):
        write = failing(io.FileIO.write)

    patch.setattr(io, "FileIO", File)
    for name in ("link", "replace", "open", "fsync"):
        patch.setattr(os, name, failing(getattr(os, name)))
    return steps


def test_a_folder_that_is_replaced_while_it_is_opened_is_read_whole(tmp_path, monkeypatch):
    """Also if the files of another model have the names of the first one's."""
    pm.save(tmp_path, numbers(1), shard_bytes=8)
    names, real = shards_in(tmp_path), io.FileIO

    def opening(path, *mode):
        if str(path).endswith(names[1]) and not mode:
            monkeypatch.setattr(io, "FileIO", real)
            for number in (2, 3):
                pm.save(tmp_path, numbers(number), shard_bytes=8)
            assert shards_in(tmp_path) == names
        return real(path, *mode)

    monkeypatch.setattr(io, "FileIO", opening)
    assert number_in(tmp_path) == 3


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


@pytest.mark.slow
def test_of_two_that_write_at_once_one_wins_whole(tmp_path):
    """A reader always sees a complete folder, too."""
    pm.save(tmp_path, numbers(7), shard_bytes=8)
    processes = [start(tmp_path, number, 200) for number in (7, 8)]
    seen = set()
    while any(process.poll() is None for process in processes):
        seen.add(number_in(tmp_path))
    for process in processes:
        process.stdout.close()

    assert [process.returncode for process in processes] == [0, 0]
    assert seen == {7, 8}
    grow_old(tmp_path)
    pm.save(tmp_path, numbers(9), shard_bytes=8)
    assert len(os.listdir(tmp_path)) == 4


# ---- any damage


def damage_folder(folder, rng):
    """Something is wrong in a folder, or perhaps nothing."""
    for _ in range(rng.choice([1, 1, 2])):
        path, other = rng.sample(sorted(folder.iterdir()), 2)
        kind = rng.randrange(8)
        if kind == 0:
            path.unlink()
        elif kind == 1:
            shutil.copy(path, other)
        elif kind == 2:
            beside = path.with_name("aside")
            path.rename(beside)
            other.rename(path)
            beside.rename(other)
        elif kind == 3:
            path.rename(folder / SINGLE)
        else:
            path = path if kind < 7 else folder / INDEX
            path.write_bytes(damage(path.read_bytes() if path.exists() else b"{}", rng))
        if len([*folder.iterdir()]) < 2:
            return


def fuzz(folder, seeds):
    """Damaged folders, with checksums and without; counts those that were read nevertheless."""
    ours, plain = folder / "ours", folder / "plain"
    pm.save(ours, ARRAYS, shard_bytes=20)
    plain.mkdir()
    write_folder(plain)
    # Once before the measurement: the first load and the first error import modules.
    pm.load(ours)
    with pytest.raises(FileError, match="expected"):
        pm.load(folder)
    whole = 0
    for seed in seeds:
        rng = random.Random(seed)
        broken = shutil.copytree(ours if seed % 3 else plain, folder / "broken")
        damage_folder(broken, rng)

        def read(broken=broken):
            # Beside an index, a file may have become the single one.
            with warnings.catch_warnings(), contextlib.suppress(FileError):
                warnings.simplefilter("ignore", UserWarning)
                return pm.load(broken)

        # To measure takes fifty times as long as to read.
        peak, arrays = peak_of(read) if seed % 25 == 0 else (0, read())
        assert peak < 800_000
        if arrays is not None and seed % 3 and not (broken / SINGLE).exists():
            # No checksum connects one shard with another: a valid shard may be another model's.
            assert_same(arrays)
        whole += arrays is not None
        shutil.rmtree(broken)
    return whole


def test_damaged_folders_give_a_clear_error_or_the_right_arrays(tmp_path):
    """A hundred of them; most give an error."""
    assert fuzz(tmp_path, range(100)) < 35


@pytest.mark.slow
def test_many_damaged_folders_give_a_clear_error_or_the_right_arrays(tmp_path):
    """Three hundred of them, other ones. (Ten thousand passed once.)"""
    assert fuzz(tmp_path, range(1_000, 1_300)) < 105


NAMES = st.sampled_from([*ARRAYS, "x", ""]) | st.text(max_size=5)
FILES = st.sampled_from([ONE, TWO, f"./{ONE}", f"../{ONE}", INDEX, "", ".", "/", "inner"])
INDICES = st.fixed_dictionaries(
    {"weight_map": st.dictionaries(NAMES, FILES | VALUES, max_size=6) | VALUES},
    optional={"metadata": VALUES},
)


def check_lie(folder, content):
    """A wrong index gives an error, or the named arrays."""
    (folder / INDEX).write_text(json.dumps(content))
    with contextlib.suppress(FileError):
        arrays = pm.load(folder)
        assert arrays.keys() == content["weight_map"].keys()
        assert_same(arrays, {name: ARRAYS[name] for name in arrays})


@given(INDICES | VALUES)
@settings(max_examples=100)
def test_indices_that_say_anything_give_an_error_or_what_is_there(tmp_path_factory, content):
    """Right as JSON, and wrong in all other ways."""
    folder = tmp_path_factory.getbasetemp() / "lies"
    if not folder.exists():
        folder.mkdir()
        write_folder(folder)
    check_lie(folder, content)


@pytest.mark.slow
@given(INDICES | VALUES)
@settings(max_examples=1_000)
def test_many_indices_that_say_anything_give_an_error_or_what_is_there(tmp_path_factory, content):
    """More of them."""
    folder = tmp_path_factory.getbasetemp() / "more-lies"
    if not folder.exists():
        folder.mkdir()
        write_folder(folder)
    check_lie(folder, content)


def test_every_way_to_cut_an_index_off_is_noticed(folder):
    """After each byte but the last, which ends a line."""
    content = (folder / INDEX).read_bytes()
    for length in range(len(content)):
        (folder / INDEX).write_bytes(content[:length])
        with pytest.raises(FileError, match=rf"{INDEX}: expected an index in JSON"):
            pm.load(folder)


def test_an_index_is_no_larger_than_a_header(folder):
    """Before there is memory for it."""
    os.truncate(folder / INDEX, 100_000_001)

    def read():
        with pytest.raises(FileError, match="at most 100,000,000 bytes, got 100,000,001"):
            pm.load(folder)

    assert peak_of(read)[0] < 400_000


test_refusals = refusals(globals())
