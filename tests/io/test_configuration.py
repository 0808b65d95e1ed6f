"""Configuration as JSON: written and read back, compared, and never believed."""

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
from pytreemod.tree.kinds import are_one
from tests.goldens import refusals
from tests.helpers.comparing import assert_same
from tests.io.files import tree_in, write_described

WEIGHT = np.zeros(1, np.float32)


@pm.register_for_files(name="test_configuration.Configured")
class Configured(pm.Module):
    """Configuration of any kind, beside an array."""

    weight: np.ndarray
    place: object = pm.field(static=True)


@pm.register_for_files(name="test_configuration.Color")
class Color(enum.Enum):
    RED = 1


@pm.register_for_files(name="test_configuration.Options")
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
    tree = {"module": ["test_configuration.Configured", {"weight": leaf}, {"place": written}]}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        yield write_described(Path("file"), tree, {"weight": WEIGHT})


def written(value):
    """The form of a value in a file."""
    with file_of(value) as path:
        return tree_in(path)["module"][2]["place"]


def again(value):
    """A value, written to a file and read."""
    with file_of(value) as path:
        return pm.load(path).place


def read(said):
    """A value from its form in a file."""
    with file_saying(said) as path:
        return pm.load(path).place


def told(path, value):
    """The difference between a file and a `like` with a value; "" if there is none."""
    try:
        pm.load(path, Configured(WEIGHT, value))
    except FileError as error:
        return str(error).split("\n  at place: ")[1].split("\n")[0]
    return ""


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


@given(values)
def test_read_of_write_is_the_value(value):
    """read(write(v)) is v, of the same kind: 1 is not True, and -0.0 is not 0.0."""
    assert are_one(again(value), value)


@pytest.mark.parametrize(
    "value",
    [
        ...,
        slice(1, None, 2),
        range(0, 5, 2),
        2**80,
        -math.inf,
        np.float32(1.5),
        jnp.bfloat16,
        np.dtype("int8"),
        np.float32,
        jnp.bool_,
        Color.RED,
        Options(3, ("a", "b")),
        jax.nn.relu,
        ft.partial(jax.nn.leaky_relu, negative_slope=0.2),
        pm.nn.Linear,
        jax.sharding.PartitionSpec("data", None, ("a", "b")),
        {1: "a", "1": {2, 3}},
    ],
    ids=shown,
)
def test_values_of_rare_kinds_come_back(value):
    made = again(value)

    if isinstance(value, ft.partial):
        assert (made.func, made.args, made.keywords) == (value.func, value.args, value.keywords)
    else:
        assert are_one(made, value)


def test_numbers_are_those_that_other_languages_have():
    """Of 64 bits; a larger number is a string."""
    assert written(2**63 - 1) == 2**63 - 1
    assert written(2**63) == {"int": hex(2**63)}
    assert written(-(2**63)) == {"int": hex(-(2**63))}


def test_tokens_without_a_name_stay_one_or_two(tmp_path):
    """The marker of a token and the one in its State are one object, and others are others."""
    one, two = pm.StateIndex(jnp.zeros(2)), pm.StateIndex(jnp.ones(2))
    pm.save(tmp_path / "f", ([one, two], pm.nn.State([one, two])))
    tokens, state = pm.load(tmp_path / "f")

    assert [state.get(token).tolist() for token in tokens] == [[0, 0], [1, 1]]


def test_two_files_of_one_set_are_the_same():
    """Sets have no order, and strings another hash in each process."""
    items = ["a", "b", "c", "d"]
    assert written({*items}) == written({*reversed(items)}) == {"set": items}


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (1, True, False),
        (0.0, -0.0, False),
        (math.nan, math.nan, True),
        ((1, 2), [1, 2], False),
        ((1, 2), (1,), False),
        ((), (1,), False),
        (1, (1,), False),
        ((1,), "1", False),
        (jnp.float32, np.dtype("float32"), True),
        (jnp.float32, jnp.float16, False),
        (Options(1), Options(2), False),
        (jax.nn.relu, jax.nn.gelu, False),
        (ft.partial(jax.nn.relu), ft.partial(jax.nn.relu), True),
        (ft.partial(max, 1), ft.partial(max, 2), False),
        ({"a": 1}, {"a": 2}, False),
        (object(), object(), True),
    ],
    ids=shown,
)
def test_a_difference_is_told_where_the_file_can_tell(a, b, same):
    with file_of(a) as path:
        assert (told(path, b) == "") is same


class Net(pm.Module):
    """A class that is not registered."""


def test_names_agree_if_one_of_two_is_not_registered():
    """A class of a script is `__main__.Net` there, and another module's where the file is read."""
    for name, agrees in (("?Net", True), ("project.Net", True), ("?Nets", False), (3, False)):
        for kind in ("class", "function"):
            with file_saying({kind: name}) as path:
                assert (told(path, Net) == "") is (agrees and kind == "class")
    with file_saying({"class": "two.Linear"}) as path:
        assert told(path, pm.nn.Linear)
    for said in ({"tuple": ["mine.Net"]}, {"tuple": ["?Net"]}):
        with file_saying(said) as path:
            assert (told(path, ("?Net",)) == "") is (said["tuple"] == ["?Net"])


class Flags(enum.Flag):
    A = 1
    B = 2


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (np.dtype(">f4"), np.dtype("<f4")),
        (np.dtype("U3"), np.dtype("U4")),
        (np.str_("a"), np.str_("b")),
        (np.datetime64("2020"), np.datetime64("2021")),
        (Flags.A | Flags.B, Flags.A),
        (Flags(0), Flags.B),
        (np.arange(2), np.arange(1, 3)),
        (jax.random.key(0), jax.random.key(1)),
        (jax.random.key(0, impl="unsafe_rbg"), jax.random.key(0, impl="rbg")),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*expected no array in a static field")
def test_what_a_name_does_not_tell_is_compared_only(value, other):
    """It was read as another value, or was taken for a description."""
    pm.register_for_files(Flags, name="test_configuration.Flags")
    with file_of(value) as path:
        assert told(path, value) == ""
        assert told(path, other) != ""


@pytest.mark.parametrize(
    "kind", [bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple]
)
def test_pythons_own_types_come_back(kind):
    assert again(kind) is kind


def test_a_module_in_configuration_is_as_its_class_allows():
    """It was built from the file without the checks of its class."""
    layer = pm.nn.Dropout(0.5, broadcast_dims=(0,))
    said = written(layer)
    assert_same(read(said), layer)
    said["dataclass"][1][0] = ["p", 5.0]
    with pytest.raises(FileError, match=r"(?s)fields that Dropout takes, got place.p?.*which it"):
        read(said)


def test_a_name_that_was_given_later_is_found():
    class Later(pm.Module):
        pass

    assert written(Later) == {"class": "?Later"}
    pm.register_for_files(Later)
    assert read({"class": "?Later"}) is Later


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"function": "?my_act"}, "my_act"),
        ({"dtype": "float32", "spelling": "type"}, "float32"),
        ({"enum": ["?Color", "RED"]}, "Color.RED"),
        (
            {"dataclass": ["?Options", [["depth", 1], ["names", {"tuple": []}]]]},
            "Options(depth=1, names=())",
        ),
        ({"unknown": ["Thing", ""]}, "Thing"),
        ({"unknown": ["Thing", "Thing(3)"]}, "Thing(3)"),
        ({"function": [1]}, "[1]"),
        ({"enum": 3}, "{'enum': 3}"),
        ({"range": [None]}, "range(None)"),
        ({"int": "x"}, "{'int': 'x'}"),
        ({}, "{}"),
        ("relu", "'relu'"),
        (3, "3"),
    ],
    ids=str,
)
def test_written_configuration_is_shown_shortly(said, text):
    """Whatever it is, where it is refused."""
    with file_saying(said) as path:
        assert told(path, b"another") == f"like has b'another', the file {text}"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": 1, 2: (3,)}, "{'a': 1, 2: (3,)}"),
        ({1, 2}, "{1, 2}"),
        (frozenset([1]), "frozenset({1})"),
        (ft.partial(jax.nn.gelu, approximate=True), "partial(jax.nn.gelu, approximate=True)"),
        (ft.partial(jax.nn.relu), "partial(jax.nn.relu)"),
        (slice(1, None), "slice(1, None, None)"),
        (range(1, 5), "range(1, 5, 1)"),
        (jax.sharding.PartitionSpec("a", None), "P('a', None)"),
        (2**70, str(2**70)),
        (1j, "1j"),
        (b"ab", "b'ab'"),
        (np.float32(1.5), "np.float32(1.5)"),
        (..., "Ellipsis"),
        (list(range(20)), "[0, 1, 2, 3, 4, 5, 6, 7, ...]"),
    ],
    ids=shown,
)
def test_a_difference_is_shown_as_it_would_be_written(value, text):
    """It was shown as it stands in the file: `{'dict': [['a', 1]]}`."""
    with file_of(value) as path:
        assert told(path, None) == f"like has None, the file {text}"


def test_a_long_value_is_cut():
    with file_of(dict.fromkeys(range(20), "a" * 30)) as path:
        text = told(path, None).removeprefix("like has None, the file ")
    assert text.startswith("{0: 'aaa")
    assert text.endswith("a...")
    assert len(text) == 100


@pytest.mark.parametrize("kind", ["enum", "dataclass"])
@pytest.mark.parametrize("content", [None, 1, "ab", [], ["a"], ["a", "b", "c"], {"a": 1, "b": 2}])
def test_malformed_pairs_are_not_the_same(kind, content):
    """A file may hold anything; it is compared before it is read."""
    with file_saying({kind: content}) as path:
        assert told(path, Color.RED) != ""
        assert told(path, Options(1)) != ""


test_refusals = refusals(globals())
