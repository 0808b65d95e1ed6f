"""When two static values are one."""

import copy
import dataclasses
import enum
import math
import types
from collections import OrderedDict, defaultdict, deque

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytreemod.tree.kinds import are_one, kind_of
from tests.helpers.trees import Pair
from tests.labels import label

ZEROS = [0, False, 0.0, -0.0, 0j, complex(0.0, -0.0), complex(-0.0, 0.0), complex(-0.0, -0.0)]
ONES = [1, True, 1.0, 1 + 0j, complex(1.0, -0.0)]
NUMBERS = [*ZEROS, *ONES, np.float32(0.0), np.float32(-0.0), np.float64(0.0), np.float64(-0.0)]
NUMBERS += [
    np.float64(1),
    np.float32(1),
    np.int64(0),
    np.int32(0),
    np.complex64(complex(0.0, -0.0)),
]


@dataclasses.dataclass(frozen=True)
class Settings:
    """Configuration is often a dataclass; its `==` calls `1` and `1.0` equal."""

    value: object
    note: object = dataclasses.field(default=None, compare=False)


class Inherits(Settings):
    """With the `==` of its base."""


@dataclasses.dataclass(frozen=True)
class Rounded:
    """Has a custom `==`."""

    value: float

    def __eq__(self, other):
        return round(self.value) == round(other.value)

    def __hash__(self):
        return round(self.value)


in_containers = {
    "dataclass": Settings,
    "derived": Inherits,
    "dataclass, deep": lambda x: {"a": frozenset({Settings((x,))})},
    "list": lambda x: [x],
    "tuple": lambda x: (x, "a"),
    "named tuple": lambda x: Pair(x, 1),
    "dict": lambda x: {"a": x},
    "key": lambda x: {x: "a"},
    "ordered": lambda x: OrderedDict(a=x),
    "read only": lambda x: types.MappingProxyType({"a": x}),
    "set": lambda x: {x},
    "frozenset": lambda x: frozenset({x, "a"}),
    "deque": lambda x: deque([x]),
    "slice": lambda x: slice(x),
    "namespace": lambda x: types.SimpleNamespace(a=x),
    "deep": lambda x: [({"a": {x}},)],
}


@pytest.mark.parametrize("make", in_containers.values(), ids=in_containers.keys())
def test_equal_numbers_are_not_one(make):
    """Equal numbers are one only with the same type, at any depth."""
    for i, x in enumerate(NUMBERS):
        for j, y in enumerate(NUMBERS):
            assert are_one(x, y) == (i == j)
            assert are_one(make(x), make(y)) == (i == j)


def again(value):
    """A copy of a value."""
    if isinstance(value, types.MappingProxyType):
        return types.MappingProxyType(dict(value))
    return copy.copy(value)


LOOK_ALIKES = [
    ({"a": 1, "b": 1}, {"b": 1, "a": 1}),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ([{"a": 1, "b": 1}], [{"b": 1, "a": 1}]),
    (
        types.MappingProxyType({"a": 1, "b": 1}),
        types.MappingProxyType({"b": 1, "a": 1}),
    ),
    (types.SimpleNamespace(a=1, b=1), types.SimpleNamespace(b=1, a=1)),
    ({1, 2.0}, {1.0, 2}),
    (frozenset({(1, 2.0)}), frozenset({(1.0, 2)})),
    ([1], (1,)),
    ({1}, frozenset({1})),
    (OrderedDict(a=1), {"a": 1}),
    (Pair(1, 2), (1, 2)),
    (deque([1]), deque([1], maxlen=3)),
    (defaultdict(list, a=1), defaultdict(int, a=1)),
    (Settings(1), Inherits(1)),
    ({np.datetime64("2020", "Y")}, {np.datetime64("2020-01-01", "D")}),
    ({np.timedelta64(60, "s")}, {np.timedelta64(1, "m")}),
    (range(0), range(1, 1)),
    (range(0, 3, 2), range(0, 4, 2)),
]


@pytest.mark.parametrize(("a", "b"), LOOK_ALIKES, ids=label)
def test_look_alikes_are_not_one(a, b):
    """Values that a program can distinguish: types, orders, limits."""
    assert not are_one(a, b)
    assert not are_one(b, a)
    assert are_one(a, again(a))
    assert are_one(b, again(b))


class Color(enum.Enum):
    """Some static values."""

    RED = 1


STATIC = [
    *[np.dtype("float64"), np.float64, jnp.float64, np.dtype("float32"), jnp.float32, np.float32],
    *[None, "float64", "mean", "", float, int, object, list, Color, Color.RED, 0, 1.5, (), (None,)],
    *[np.zeros(2), np.float64(0), len, jnp.add, test_equal_numbers_are_not_one, slice(None)],
    *[frozenset(), types.SimpleNamespace(), Settings(None), range(0), ..., NotImplemented],
]


def test_static_values_of_all_sorts_are_not_one():
    """In NumPy, the dtype float64 equals None, and so everything without a dtype."""
    spellings = {id(x): np.dtype(x) for x in STATIC[:6]}
    for a in STATIC:
        for b in STATIC:
            same = a is b or (
                id(a) in spellings and id(b) in spellings and spellings[id(a)] == spellings[id(b)]
            )
            assert are_one(a, b) == same, (a, b)
            assert are_one([a], [b]) == same, (a, b)


def test_a_dataclass_is_compared_as_it_says():
    """By the fields that count for `==`; by its own `==` where it has one."""
    assert are_one(Settings(1, note=1), Settings(1, note=2.0))
    assert are_one(Rounded(1.0), Rounded(1.2))
    assert not are_one(Rounded(1.0), Rounded(2.2))


@pytest.mark.parametrize("name", sorted(in_containers.keys() - {"key", "set", "frozenset", "deep"}))
def test_nan_is_one_for_all(name):
    """It is not equal to itself, but programs are the same; also in containers and dataclasses."""
    make = in_containers[name]
    one, other = make(math.nan), make(float("nan"))

    assert are_one(math.nan, float("nan"))
    # A frozenset finds its items by `==`.
    assert are_one(one, other) == ("frozenset" not in repr(one))
    assert not are_one(one, make(1.0))


class Odd:
    """Returns a chosen answer from `==`."""

    def __init__(self, answer):
        self.answer = answer

    def __eq__(self, other):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    __hash__ = object.__hash__


@pytest.mark.parametrize(
    ("answer", "expected"),
    [(True, True), (False, False), (1, False), (np.ones(2), False), (ValueError("no"), False)],
)
def test_a_classs_own_equality_is_believed_if_it_is_plain(answer, expected):
    """Only a plain True counts, alone or in a container."""
    assert are_one(Odd(answer), Odd(answer)) is expected
    assert are_one([Odd(answer)], [Odd(answer)]) is expected
    assert are_one({"a": (Odd(answer),)}, {"a": (Odd(answer),)}) is expected


scalars = st.sampled_from([*ZEROS, *ONES, "a", b"a", None, 2, -1.5])
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(deque),
        st.dictionaries(scalars, inner, max_size=3),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(types.MappingProxyType),
        scalars.map(lambda x: frozenset({x})),
    ),
    max_leaves=5,
)


@given(a=values, b=values)
def test_values_are_one_if_they_are_written_alike(a, b):
    """are_one(a, b) == (repr(a) == repr(b)), for trees of plain values."""
    assert are_one(a, b) == (repr(a) == repr(b))
    assert are_one(a, b) == are_one(b, a)


@given(a=values, b=values)
def test_what_is_one_is_of_one_kind(a, b):
    """Equal values of one kind are one, and kinds can be hashed."""
    assert are_one(a, b) == (a == b and kind_of(a) == kind_of(b))
    assert not are_one(a, b) or hash(kind_of(a)) == hash(kind_of(b))


SPELLINGS = [jnp.float32, np.float32, np.dtype("float32"), jnp.zeros(()).dtype]


@pytest.mark.parametrize("one", SPELLINGS)
@pytest.mark.parametrize("two", SPELLINGS)
def test_spellings_of_a_dtype_are_one(one, two):
    """Alone and in containers; different dtypes are distinguished."""
    assert are_one(one, two)
    assert kind_of(one) == kind_of(two)
    assert are_one((1, one), (1, two))
    assert not are_one(one, np.dtype("float16"))
    assert not are_one(jnp.bfloat16, two)


@pytest.mark.parametrize("scalar", [bool, int, float, complex])
def test_pythons_numbers_are_no_spelling_of_a_dtype(scalar):
    """NumPy calls them equal, but they promote weakly."""
    assert np.dtype(scalar) == scalar
    assert not are_one(scalar, np.dtype(scalar))
    assert kind_of(scalar) != kind_of(np.dtype(scalar))
    assert kind_of(scalar) != kind_of(str)


ARRAYS = [
    np.ones(2),
    np.ones(2, np.float32),
    np.zeros(2),
    -np.zeros(2),
    np.full(2, np.nan),
    np.ones((2, 1)),
    jnp.ones(2),
    jnp.asarray(1.0),
    jnp.asarray(1.0, jnp.float32),
    jnp.full(2, jnp.nan),
    jax.random.key(0),
    jax.random.key(1),
]


def test_arrays_are_one_by_their_values():
    """NaN is one, zeros have signs; dtype, shape, weak type and library count."""
    for i, one in enumerate(ARRAYS):
        for j, two in enumerate(ARRAYS):
            assert are_one(one, copy.copy(two)) is (i == j), (one, two)


def test_traced_arrays_are_one_by_identity():
    """Their values are not known."""

    @jax.jit
    def compare(x, y):
        assert are_one(x, x)
        assert not are_one(x, y)
        return x

    compare(jnp.ones(2), jnp.ones(2))


@pytest.mark.parametrize("hold", [lambda x: x, lambda x: (x,), lambda x: [x], lambda x: {"a": x}])
def test_scalars_of_numpy_are_one_by_value_wherever_they_stand(hold):
    """Their `==` gives no bool of Python's; a list or dict of them was traced at each call."""
    assert are_one(hold(np.float32(1.5)), hold(np.float32(1.5)))
    assert are_one(hold(np.float32("nan")), hold(np.float32("nan")))
    assert not are_one(hold(np.float32(1.5)), hold(np.float32(2.5)))
    assert not are_one(hold(np.float32(0.0)), hold(np.float32(-0.0)))
    assert not are_one(hold(np.float32(1.5)), hold(np.float64(1.5)))


def test_keys_are_compared_while_something_is_traced():
    """A dict of structures compares them when garbage is collected, whatever is under way then."""
    same, again_same, other = jax.random.key(0), jax.random.key(0), jax.random.key(1)

    def traced(x):
        assert not are_one(same, other)
        assert are_one(same, again_same)
        return x

    jax.jit(traced)(1.0)
    jax.vmap(traced)(np.ones(2, np.float32))
