"""Configuration in a file: it is compared with that of `like`, and is never believed."""

import contextlib
import dataclasses
import enum
import functools as ft
import math
import re
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pytreemod as pm
from pytreemod.errors import FileError
from tests.helpers.comparing import assert_same
from tests.io.files import tree_in, write_described
from tests.labels import label

WEIGHT = np.zeros(1, np.float32)


class Configured(pm.Module):
    """Configuration of any kind, beside an array."""

    weight: np.ndarray
    place: object = pm.field(static=True)


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Flags(enum.Flag):
    A = 1
    B = 2


@dataclasses.dataclass(frozen=True)
class Options:
    depth: int
    names: tuple[str, ...] = ()


def shown(value):
    """A name for a test, without addresses: those differ from process to process."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


@contextlib.contextmanager
def file_of(value):
    """A file with a value as configuration."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        path = Path("file")
        pm.save(path, Configured(WEIGHT, value))
        yield path


@contextlib.contextmanager
def file_saying(written):
    """A file that has this for the configuration."""
    leaf = {"leaf": "weight", "is": "numpy"}
    tree = {"module": ["?Configured", {"weight": leaf}, {"place": written}]}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        yield write_described(Path("file"), tree, {"weight": WEIGHT})


def differs(path, value):
    """Whether a load tells a difference between a file and a `like` with a value."""
    try:
        pm.load(path, Configured(WEIGHT, value))
    except FileError as error:
        return "place" in str(error)
    return False


plain = st.none() | st.booleans() | st.integers() | st.text()
plain |= st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False)
hashable = st.recursive(plain | st.binary(), lambda x: st.tuples(x, x), max_leaves=4)
values = st.recursive(
    hashable | st.just(math.nan),
    lambda x: (
        st.lists(x, max_size=3)
        | st.tuples(x, x)
        | st.dictionaries(hashable, x, max_size=3)
        | st.frozensets(hashable, max_size=3)
    ),
    max_leaves=8,
)


@given(values, values)
def test_a_value_is_the_same_as_itself_and_no_other(value, other):
    """A load is strict about configuration of any kind; the value is that of `like`."""
    with file_of(value) as path:
        assert not differs(path, value)
        if value != other and repr(value) != repr(other):
            assert differs(path, other)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (1, True, False),
        (0.0, -0.0, False),
        (math.nan, math.nan, True),
        ((1, 2), [1, 2], False),
        ((1,), "1", False),
        (2**80, 2**80 + 1, False),
        (range(5), range(6), False),
        (jnp.float32, np.dtype("float32"), True),
        (jnp.float32, jnp.float16, False),
        (np.float32(1.5), np.float32(2.5), False),
        (Color.RED, Color.RED, True),
        (Color.RED, Color.BLUE, False),
        (Options(1), Options(1), True),
        (Options(1), Options(2), False),
        (jax.nn.relu, jax.nn.gelu, False),
        (pm.nn.Linear, pm.nn.MLP, False),
        (ft.partial(jax.nn.relu), ft.partial(jax.nn.relu), True),
        (ft.partial(max, 1), ft.partial(max, 2), False),
        (jax.sharding.PartitionSpec("a"), jax.sharding.PartitionSpec("b"), False),
        ({"a": 1}, {"a": 2}, False),
        (object(), object(), True),
        (np.dtype(">f4"), np.dtype("<f4"), False),
        (np.datetime64("2020"), np.datetime64("2021"), False),
        (Flags.A | Flags.B, Flags.A, False),
        (np.arange(2), np.arange(1, 3), False),
        (jax.random.key(0), jax.random.key(1), False),
        (jax.random.key(0, impl="unsafe_rbg"), jax.random.key(0, impl="rbg"), False),
    ],
    ids=shown,
)
@pytest.mark.filterwarnings("ignore:.*static")
def test_a_difference_is_told_where_the_file_can_tell(a, b, same):
    """Values that a name does not tell were once read as other values."""
    with file_of(a) as path:
        assert differs(path, b) is not same


def test_a_lambda_is_compared_by_its_name(tmp_path):
    """A file has names of functions; that of `like` is kept."""

    def own(x):
        return x

    tree = {"fn": own, "x": jnp.ones(2)}
    pm.save(tmp_path / "file", tree)
    assert pm.load(tmp_path / "file", tree)["fn"] is own


def test_two_files_of_one_set_are_the_same():
    """Sets have no order, and strings another hash in each process."""
    items = ["a", "b", "c", "d"]
    with file_of({*items}) as one, file_of({*reversed(items)}) as other:
        assert tree_in(one) == tree_in(other.absolute())


def test_classes_of_one_name_agree():
    """A class of a script is `__main__.Net` there, and another module's where the file is read."""
    for name, agrees in (("?Color", True), ("project.Color", True), ("?Colors", False), (3, False)):
        for kind in ("class", "function"):
            with file_saying({kind: name}) as path:
                assert differs(path, Color) is not (agrees and kind == "class")
    # The name of a layer is the library's, and not that of another library.
    with file_saying({"class": "two.Linear"}) as path:
        assert differs(path, pm.nn.Linear)


def test_tokens_without_a_name_stay_one_or_two(tmp_path):
    """The marker of a token and the one in its State are one object, and others are others."""
    one, two = pm.StateIndex(jnp.zeros(2)), pm.StateIndex(jnp.ones(2))
    pm.save(tmp_path / "f", ([one, two], pm.nn.State([one, two])))
    tokens, state = pm.load(tmp_path / "f")

    assert [state.get(token).tolist() for token in tokens] == [[0, 0], [1, 1]]


@pytest.mark.parametrize(
    "value",
    [
        *(float, -math.inf, 2**80, 1j, b"ab", ..., slice(1, None, 2), range(0, 5, 2)),
        *(jnp.bfloat16, np.dtype("int8"), jax.nn.relu, pm.nn.Linear),
        *(jax.sharding.PartitionSpec("data", None, ("a", "b")), frozenset({1, "a"})),
    ],
    ids=label,
)
def test_configuration_of_the_library_is_rebuilt(value, tmp_path):
    """In the place of a leaf, and as an argument of a layer's function."""
    tree = [pm.nn.Lambda(ft.partial(jax.nn.leaky_relu, negative_slope=value)), jnp.ones(2)]
    pm.save(tmp_path / "file", tree)
    made = pm.load(tmp_path / "file")

    assert made[0].fn.func is jax.nn.leaky_relu
    assert type(made[0].fn.keywords["negative_slope"]) is type(value)
    assert made[0].fn.keywords == {"negative_slope": value}


def test_a_module_in_configuration_is_as_its_class_allows(tmp_path):
    """It was built from the file without the checks of its class."""
    tree = [pm.nn.Lambda(ft.partial(jax.nn.relu, pm.nn.Dropout(0.5, broadcast_dims=(0,))))]
    pm.save(tmp_path / "file", tree)
    assert_same(pm.load(tmp_path / "file")[0].fn.args, tree[0].fn.args)
    said = tree_in(tmp_path / "file")
    said["list"][0]["module"][2]["fn"]["partial"][1][0]["dataclass"][1][0] = ["p", 5.0]
    with pytest.raises(FileError, match="Dropout"):
        pm.load(write_described(tmp_path / "file", said))


@pytest.mark.parametrize("kind", ["enum", "dataclass"])
@pytest.mark.parametrize("content", [None, "ab", ["a"], ["a", "b", "c"], {"a": 1, "b": 2}], ids=str)
def test_malformed_pairs_are_not_the_same(kind, content):
    """A file may hold anything; it is compared before it is read."""
    with file_saying({kind: content}) as path:
        assert differs(path, Color.RED)
        assert differs(path, Options(1))
