"""Configuration as JSON: written and read back, compared, and never believed."""

import dataclasses
import enum
import functools as ft
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import FileError
from pytreemod.io.configuration import (
    ConfigurationReader,
    ConfigurationWriter,
    are_same,
    are_same_name,
    describe_json,
    name_of,
)
from pytreemod.state.tokens import Unnamed
from pytreemod.tree.kinds import are_one
from pytreemod.tree.paths import PathName
from tests.goldens import refusals
from tests.helpers.comparing import assert_same


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


def through_json(value):
    """What becomes of a value in a file, which other programs can read, too."""
    return json.loads(json.dumps(ConfigurationWriter().write(value), allow_nan=False))


def read(written):
    """A value from what is in a file."""
    return ConfigurationReader("load").read(written, "place")


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
    """read(write(v)) is v, of the same kind: 1 is no True, and -0.0 no 0.0."""
    assert are_one(read(through_json(value)), value)


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
    made = read(through_json(value))

    if isinstance(value, ft.partial):
        assert (made.func, made.args, made.keywords) == (value.func, value.args, value.keywords)
    else:
        assert are_one(made, value)


def test_numbers_are_those_that_other_languages_have():
    """Of 64 bits; what is larger is a text."""
    assert through_json(2**63 - 1) == 2**63 - 1
    assert through_json(2**63) == {"int": hex(2**63)}
    assert through_json(-(2**63)) == {"int": hex(-(2**63))}


def test_tokens_without_a_name_stay_one_or_two():
    """The marker of a token and the one in its State are one object, and others are others."""
    one, two = Unnamed(), Unnamed()
    writer, reader = ConfigurationWriter(), ConfigurationReader("load")
    made = [reader.read(writer.write(marker), "") for marker in (one, two, one)]

    assert made[0] is made[2]
    assert made[0] is not made[1]


def test_a_path_knows_its_steps():
    path = PathName.parse("layers[2].bn")
    made = read(through_json(path))

    assert made == path
    assert made.steps == ("layers", "2", "bn")


def test_two_files_of_one_set_are_the_same():
    """Sets have no order, and strings another hash in each process."""
    items = ["a", "b", "c", "d"]
    assert through_json({"a", "b", "c", "d"}) == through_json({"d", "c", "b", "a"})
    assert through_json(set(items))["set"] == items


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
        (np.ones(2), np.ones(2), True),
        (np.ones(2), np.zeros(2), False),
        (object(), object(), True),
    ],
    ids=shown,
)
def test_are_same_tells_what_the_file_can_tell(a, b, same):
    assert are_same(through_json(a), through_json(b)) is same


@pytest.mark.parametrize(("a", "b"), [({"list": []}, []), ([1], {"list": [1]}), ([1], 1), ({}, 1)])
def test_what_stands_in_a_file_otherwise_is_not_the_same(a, b):
    assert not are_same(a, b)
    assert not are_same(b, a)


def test_names_agree_if_one_of_two_is_not_registered():
    """A class of a script is `__main__.Net` there, and another module's where the file is read."""
    assert are_same_name("?Net", "project.Net")
    assert are_same_name("?Net", "?Net")
    assert not are_same_name("one.Net", "two.Net")
    assert not are_same_name("?Net", "?Nets")
    assert not are_same_name("?Net", 3)


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
    ],
    ids=str,
)
def test_what_a_name_does_not_tell_is_compared_only(value, other):
    """It came back as something else, or was called a description that nobody had written."""
    pm.register_for_files(Flags, name="test_configuration.Flags")
    assert are_same(through_json(value), through_json(value))
    assert not are_same(through_json(value), through_json(other))


@pytest.mark.parametrize(
    "kind", [bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple]
)
def test_pythons_own_types_come_back(kind):
    assert read(through_json(kind)) is kind


def test_a_module_in_configuration_is_as_its_class_allows():
    """It was put together past its checks, by whatever a file had of it."""
    layer = pm.nn.Dropout(0.5, broadcast_dims=(0,))
    written = through_json(layer)
    assert_same(read(written), layer)
    written["dataclass"][1][0] = ["p", 5.0]
    with pytest.raises(FileError, match=r"(?s)fields that Dropout takes, got place.p?.*which it"):
        read(written)


def test_a_name_that_was_given_later_is_found():
    class Later(pm.Module):
        pass

    assert name_of(Later) == "?Later"
    pm.register_for_files(Later)
    assert read({"class": "?Later"}) is Later


@pytest.mark.parametrize(
    ("written", "text"),
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
def test_written_configuration_is_shown_shortly(written, text):
    """Whatever it is, for it is shown where it is refused."""
    assert describe_json(written) == text


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
    assert describe_json(through_json(value)) == text


def test_a_long_value_is_cut():
    text = describe_json(through_json(dict.fromkeys(range(20), "a" * 30)))
    assert text.startswith("{0: 'aaa")
    assert text.endswith("a...")
    assert len(text) == 100


def test_a_name_of_another_kind_is_refused():
    """Of what is registered, only an enum has members, and only a dataclass has fields."""
    reader = ConfigurationReader("load")
    for name, kind in (("pytreemod.nn.Linear", enum.Enum), ("jax.nn.relu", object)):
        with pytest.raises(FileError, match=r"load: expected a description that `pm.save` wrote"):
            reader.named(name, "x", kind)
    assert reader.named("pytreemod.nn.Linear", "x", pm.Module) is nn.Linear


@pytest.mark.parametrize("kind", ["enum", "dataclass"])
@pytest.mark.parametrize("content", [None, 1, "ab", [], ["a"], ["a", "b", "c"], {"a": 1, "b": 2}])
def test_malformed_pairs_are_not_the_same(kind, content):
    """A file may hold anything; it is compared before it is read."""
    whole = {kind: ["Color", "RED"]}

    assert not are_same(whole, {kind: content})
    assert not are_same({kind: content}, whole)
    assert are_same({kind: content}, {kind: content})


def test_names_are_compared_as_names_and_all_else_as_it_is_written():
    """A class that one of two processes has registered is one; `1` and `True` are two."""
    for kind in ("class", "function"):
        assert are_same({kind: "?Net"}, {kind: "mine.Net"})
    assert not are_same({"tuple": ["?Net"]}, {"tuple": ["mine.Net"]})
    assert not are_same({"tuple": [1]}, {"tuple": [True]})


def test_what_is_too_deep_is_not_malformed():
    """The caller says of both what they are."""
    deep = None
    for _ in range(5000):
        deep = {"tuple": [deep]}
    with pytest.raises(RecursionError, match="maximum recursion depth exceeded"):
        ConfigurationReader("load").read(deep, "place")


test_refusals = refusals(globals())
