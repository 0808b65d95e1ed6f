"""A damaged or hostile file gives a clear error, and a save that fails leaves the old file."""

import json
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import FileError
from tests.io.files import METADATA, damaged, entry, faults, peak_of, write_plain
from tests.io.writers import WRITERS, numbers

NAME = "model.safetensors"
LIKE = {"a": np.zeros(2, np.float32)}
SLOW = pytest.mark.slow


@pytest.fixture
def watched():
    """What hangs becomes an error."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it hangs"))
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def read_all(path, like=LIKE, first=0):
    """Every way to read a file: the results, or the errors; other errors go through."""
    found = []
    for read in (pm.load, lambda path: pm.load(path, like), pm.read_metadata)[first:]:
        try:
            found.append(read(path))
        except FileError as error:
            found.append(error)
    return found


# ---- hostile headers

ONE, DEEP = entry(), "[" * 100_000 + "]" * 100_000
TEXT = json.dumps(ONE)
# Each is wrong for a file of eight bytes, and an array of one element.
SHAPES = [[2], [-1, -1], [True], [1.0], ["1"], "", {}, None, 1, [1] * 100, [2**62, 4]]
OFFSETS = [[1, 9], [-8, 0], [8, 0], [0, 4, 8], ["0", "8"], [0.0, 8.0], [None, 8], 8, [0, 2**42]]
CODES = ["F31", "object", "os.system", ["F64"], None]
FORMS = ["1", '"ab"', '["object", [1]]', '["float64", [2]]', '["bool", [true]]', '["os", [8]]']
NOTES = [("keys", text) for text in ("", "[1]", '{"a": ["rbg"]}', '{"a": 1}', "NaN", DEEP)]
NOTES += [("dtypes", text) for text in ("", "[1]", *(f'{{"a": {x}}}' for x in FORMS), DEEP)]
HEADERS = {
    "no JSON": ("hello", 8),
    "no object": ("[]", 0),
    "a number": ("1", 0),
    "no UTF-8": (b'{"\xff": 1}', 0),
    "a deep one": (f'{{"a": {DEEP}}}', 0),
    "one name twice": (f'{{"a": {TEXT}, "a": {TEXT}}}', 8),
    "many digits": (TEXT.replace("[2]", f"[{'9' * 5000}]"), 8),
    "an array that is none": ({"a": 1}, 0),
    "no extent": ({"a": {"dtype": "F32", "shape": [2]}}, 8),
    "fewer bytes": ({"a": ONE}, 7),
    "more bytes": ({"a": ONE}, 9),
    "a hole": ({"a": ONE, "b": entry(offsets=[12, 20])}, 20),
    "a hole at the start": ({"a": entry(offsets=[4, 12])}, 12),
    "nothing times a lot": ({"a": entry(shape=[0, 2**62], offsets=[0, 0])}, 0),
    "an overlap": ({"a": ONE, "b": entry(offsets=[4, 12])}, 12),
    "the same bytes twice": ({"a": ONE, "b": ONE}, 8),
    "keys of floats": ({METADATA: {"pytreemod.keys": '{"a": "rbg"}'}, "a": ONE}, 8),
    **{f"shape {x}"[:20]: ({"a": entry("F64", x)}, 8) for x in SHAPES},
    **{f"offsets {x}": ({"a": entry("F64", [1], x)}, 8) for x in OFFSETS},
    **{f"dtype {x}": ({"a": entry(x, [1])}, 8) for x in CODES},
    **{f"metadata {x}": ({METADATA: x, "a": ONE}, 8) for x in (None, ["x"], 1, {"x": 1})},
    **{f"{n} {x[:20]}": ({METADATA: {f"pytreemod.{n}": x}, "a": ONE}, 8) for n, x in NOTES},
}


@pytest.mark.parametrize(("header", "size"), HEADERS.values(), ids=HEADERS)
def test_a_header_that_cannot_be_true_is_refused(path, header, size):
    """Or other bytes would be read as numbers; with little memory, whatever it claims."""
    write_plain(path, header, bytes(size))
    peak, errors = peak_of(lambda: read_all(path))

    assert [type(error) for error in errors] == [FileError] * 3
    assert all(NAME in str(error) for error in errors)
    assert peak < 4e6


@pytest.mark.parametrize("header", [{"a": ONE}, {METADATA: {"x": "y"}, "a": ONE}], ids=str)
def test_a_header_that_is_true_is_read(path, header):
    """So the cases above are refused for what is wrong in each."""
    arrays, loaded, texts = read_all(write_plain(path, header, bytes(8)))

    assert [faults(arrays, LIKE), faults(loaded, LIKE), texts] == [[], [], header.get(METADATA)]


LENGTHS = [n.to_bytes(8, "little") + bytes(20) for n in (0, 3, 2**20, 2**31, 2**60, 2**64 - 1)]
OTHERS = [b"", b"{}", bytes(7), b"PK\3\4" + bytes(50), b"\xff" * 50, b"a text", *LENGTHS]


@pytest.mark.parametrize("content", OTHERS, ids=lambda content: ascii(content[:8]))
def test_a_file_of_another_kind_is_refused(path, content):
    """However it begins, and whatever length it claims to have."""
    path.write_bytes(content)
    assert [type(error) for error in read_all(path)] == [FileError] * 3


WRONG = [
    "",
    "[]",
    "1",
    "null",
    '{"config": 1}',
    '{"ties": {"a": 1}}',
    '{"config": {"": null}}',
    DEEP,
]


@pytest.mark.parametrize("text", WRONG, ids=lambda text: text[:30])
def test_a_description_that_is_none_is_refused(path, text):
    """The texts of the user are not in it."""
    write_plain(
        path, {METADATA: {"pytreemod": text, "pytreemod.metadata": "3"}, "a": ONE}, bytes(8)
    )
    _, error, metadata = read_all(path)

    assert isinstance(error, FileError)
    assert metadata == 3


TIES = {
    "a star from nothing": {"b": "*"},
    "stars from nothing": {"b": "*", "*": "b.*.**"},
    "names from nothing": {"": "a", "b": ""},
    "circles": {"b": "c", "c": "b", "a": "a"},
    "slow patterns": {f"{'**.' * 15}{end}": f"{'**.' * 15}a" for end in ("zz", "b")},
    "no patterns": {"(": "[", "\\": "(?P<x>", "b": "\\1", "\ud800": "\0"},
}


@pytest.mark.parametrize("ties", TIES.values(), ids=TIES)
def test_ties_of_a_file_are_no_more_than_names(path, ties, watched):
    """Whatever they say, a leaf that is missing is missing."""
    about = json.dumps({"config": {}, "ties": ties})
    write_plain(path, {METADATA: {"pytreemod": about}, "a": ONE}, bytes(8))
    deep = np.zeros(2, np.float32)
    for _ in range(25):
        deep = {"k": deep}

    with pytest.raises(FileError, match=NAME):
        pm.load(path, {**LIKE, "b": np.zeros(3), "k": deep})


def test_a_terabyte_that_is_there_is_not_read_for_a_tree_of_bytes(path):
    """An array is read after its form was compared, and metadata without any."""
    size = 2**40
    write_plain(path, {METADATA: {"x": "y"}, "a": entry("U8", [size], [0, size])})
    try:
        os.truncate(path, path.stat().st_size + size)
    except OSError:
        pytest.skip("this disk has no files of a terabyte, not even empty ones")
    peak, (error, metadata) = peak_of(lambda: read_all(path, first=1))

    assert f"{size}" in str(error)
    assert metadata == {"x": "y"}
    assert peak < 4e6


class Marking:
    """What is executed when a pickle is loaded."""

    def __reduce__(self):
        return (exec, ("import evil",))


def test_nothing_runs_because_a_file_says_so(tmp_path, monkeypatch):
    """Names are only compared, modules are not imported, and pickles not read."""
    (tmp_path / "evil.py").write_text("import pathlib\npathlib.Path('ran').touch()")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    about = {"config": {"": "class evil.Model", "a": "evil.f()"}, "ties": {"b": "evil"}}
    texts = {"format": "evil", "pytreemod": json.dumps(about), "pytreemod.metadata": '"evil.f()"'}
    write_plain(tmp_path / NAME, {METADATA: texts, "a": ONE}, bytes(8))
    (tmp_path / "config.json").write_text('{"auto_map": {"AutoModel": "evil.Model"}}')
    for name in ("pytorch_model.bin", "pickle.eqx"):
        (tmp_path / name).write_bytes(pickle.dumps(Marking()))
    np.save(tmp_path / "x.npy", np.array([Marking()]), allow_pickle=True)

    assert [type(x) for x in read_all(tmp_path)] == [dict, dict, str]
    for name in ("pickle.eqx", "x.npy"):
        assert [type(x) for x in read_all(tmp_path / name)] == [FileError] * 3
        with pytest.raises(FileError, match=r"pickle|magic"):
            pm.tree_deserialise_leaves(tmp_path / name, np.array([None]))
    assert "evil" not in sys.modules
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", [NAME, f"{NAME}.index.json"])
def test_a_pipe_is_refused(tmp_path, name, watched):
    """It would keep its reader waiting for ever, and a writer would remove it."""
    os.mkfifo(tmp_path / name)
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(FileError, match=name):
            pm.load(path)
    for write in (pm.save, pm.tree_serialise_leaves):
        with pytest.raises((OSError, FileError), match=name):
            write(tmp_path / name, {"x": np.ones(2)})
    assert (tmp_path / name).is_fifo()


# ---- random damage


def tree_of(fill):
    layers = [{"weight": np.full((2, 3), fill, np.float16), "bias": jnp.full(3, fill)}]
    numbers = [int(fill), fill + 0.5, fill > 1, complex(0, fill), np.float64(fill)]
    key, flags = jax.random.key(int(fill)), np.array([fill > 1] * 3)
    model = nn.Sequential([nn.Dropout(0.5), nn.Linear(2, 2, key=key)])
    return {"few": jnp.full(4, fill, "int4"), "x": [layers, numbers, flags, model], "key": key}


def plain(tree):
    """Its leaves by name, in NumPy."""
    leaves = pm.named_leaves(tree)
    leaves["key"] = jax.random.key_data(leaves["key"])
    return {name: np.asarray(leaf) for name, leaf in leaves.items()}


SEEDS = pytest.mark.parametrize(
    "seeds", [range(100), pytest.param(range(100, 1000), marks=SLOW)], ids=["few", "many"]
)


@SEEDS
@pytest.mark.parametrize("is_ours", [True, False], ids=["ours", "of another tool"])
def test_a_damaged_file_gives_an_error_or_the_right_values(path, is_ours, seeds):
    """A byte inside of an array is not checked: it is another number, and nothing else."""
    like, tree = tree_of(1.0), tree_of(2.0)
    right = plain(tree)
    pm.save(path, tree, {"step": 3})
    if not is_ours:
        right = {name: x for name, x in right.items() if x.dtype not in ("int4", "complex128")}
        like = {name: np.zeros_like(array) for name, array in right.items()}
        safetensors.numpy.save_file(right, path, {"step": "3"})
    good, metadata, kinds = path.read_bytes(), pm.read_metadata(path), set()
    head = int.from_bytes(good[:8], "little") + 8
    for seed in seeds:
        content = damaged(good, head, random.Random(seed))
        path.write_bytes(content)
        arrays, loaded, texts = read_all(path, like)

        size = len(content) - 8 - int.from_bytes(content[:8], "little")
        assert isinstance(arrays, FileError) or size == sum(x.nbytes for x in arrays.values()), seed
        assert isinstance(texts, FileError) or texts == metadata or content[:head] != good[:head]
        kinds.add(type(loaded))
        if not isinstance(loaded, FileError):
            assert jax.tree.structure(loaded) == jax.tree.structure(like), seed
            found = plain(loaded) if is_ours else loaded
            empty = [{name: x[..., None][..., :0] for name, x in t.items()} for t in (found, right)]
            assert faults(*empty) == [], seed
            assert not content.endswith(good[head:]) or faults(found, right) == [], seed
    assert len(kinds) == 2


@SEEDS
def test_a_damaged_file_of_equinox_gives_an_error_or_a_tree_of_the_same_form(tmp_path, seeds):
    """It has no names, and NumPy's parser raises whatever it meets."""
    like = [1.0, 3, True, 1j, np.ones(2), jnp.ones((2, 3)), jnp.ones(3, "bfloat16"), np.int8(3)]
    path = tmp_path / "model.eqx"
    pm.tree_serialise_leaves(path, like)
    good = path.read_bytes()
    for seed in seeds:
        path.write_bytes(damaged(good, len(good), random.Random(seed)))
        try:
            loaded = pm.tree_deserialise_leaves(path, like)
        except FileError:
            continue
        assert [(type(x), np.shape(x)) for x in loaded] == [(type(x), np.shape(x)) for x in like]


# ---- saves that fail

writers = pytest.mark.parametrize(("write", "read"), WRITERS.values(), ids=["ours", "Equinox's"])


@contextmanager
def left_alone(path, write, read):
    """The old file stays as it is, with nothing beside it."""
    write(path, numbers(1))
    yield
    assert [x.tolist() for x in read(path, numbers(2))] == [x.tolist() for x in numbers(1)]
    assert os.listdir(path.parent) == [path.name]


@writers
@pytest.mark.parametrize("at", ["fsync", "replace"])
@pytest.mark.parametrize("error", [KeyboardInterrupt("stop"), OSError(28, "stop")], ids=repr)
def test_what_fails_at_the_end_leaves_the_old_file(path, monkeypatch, write, read, at, error):
    """The person at the keyboard, and a disk that notices late that it is full."""

    def fail(*_):
        raise error

    with left_alone(path, write, read), monkeypatch.context() as patched:
        patched.setattr(os, at, fail)
        with pytest.raises(type(error), match="stop"):
            write(path, numbers(2))


@writers
def test_a_full_disk_leaves_the_old_file(path, write, read):
    """The error is that of the system, or NumPy's."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with left_alone(path, write, read):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, before[1]))
        try:
            with pytest.raises(OSError, match=r"File too large|requested and \d* written"):
                write(path, numbers(2))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


@writers
def test_a_folder_that_cannot_be_written_to_is_named(write, read):
    """It is missing, or none, or in the place of the file, or read-only."""
    # Not in the folder of the test, where only this user may look.
    folder, user = Path(tempfile.mkdtemp(suffix=".run")), os.geteuid()
    path = folder / "file.eqx"
    with left_alone(path, write, read):
        for wrong in (path / "x", folder / "no" / "x", folder):
            with pytest.raises((OSError, FileError), match=f"{wrong}"):
                write(wrong, numbers(2))
        folder.chmod(0o555)
        # Root may write anywhere.
        os.seteuid(user or 65534)
        try:
            with pytest.raises(PermissionError, match=rf"denied: '{path}"):
                write(path, numbers(2))
        finally:
            os.seteuid(user)
    shutil.rmtree(folder)


@writers
def test_the_data_is_on_the_disk_before_the_name(path, monkeypatch, write, read):
    """Or a machine that loses power would have a new name for an empty file."""
    done, real = [], {"fsync": os.fsync, "replace": os.replace}
    for name in real:
        monkeypatch.setattr(os, name, lambda *a, name=name: (done.append(name), real[name](*a)))
    write(path, numbers(1))

    assert done == ["fsync", "replace"]


@writers
def test_what_a_link_leads_to_is_replaced(path, write, read):
    (path.parent / "folder").mkdir()
    path.symlink_to("folder/file")
    for number in (1, 2):
        write(path, numbers(number))
        assert path.is_symlink()
        assert read(path, numbers(0))[0][0] == number
    assert os.listdir(path.parent / "folder") == ["file"]


ALL = ["at once", "SIGINT", "SIGKILL"]


@pytest.mark.parametrize(
    ("count", "jobs"), [(4, ALL[::2]), pytest.param(30, ALL, marks=SLOW)], ids=["few", "many"]
)
def test_whoever_reads_finds_a_whole_file(tmp_path, count, jobs):
    """While others write, and after each was killed; Ctrl-C leaves nothing beside it, either."""
    command = [sys.executable, "-m", "tests.io.writers", str(tmp_path), str(count), *jobs]
    root = Path(__file__).parents[2]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=root)

    assert ended.stdout == "done\n", ended.stdout + ended.stderr
