"""Data and configuration."""

import copy
import enum
import functools as ft
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pytreemod as pm
from pytreemod.errors import FieldWarning
from pytreemod.module.division import is_configuration
from tests.helpers.comparing import assert_same
from tests.helpers.trees import Affine, Holder, OwnInit, Pair, Static, affine, double, ramp

CONFIGURATION = {
    "function": double,
    "lambda": lambda x: x,
    "built-in": max,
    "method of a built-in": [].append,
    "jitted": jax.jit(double),
    "custom_jvp": jax.custom_jvp(double),
    "custom_vjp": jax.custom_vjp(double),
    "jax.nn.relu": jax.nn.relu,
    "ufunc": np.exp,
    "jnp ufunc": jnp.add,
    "functools.partial": ft.partial(double, 1),
    "vmapped": jax.vmap(double),
    "grad": jax.grad(double),
    "string": "text",
    "string enumeration": enum.StrEnum("Mode", ["TRAIN"]).TRAIN,
    "class": int,
    "Module class": Affine,
    "method of a plain class": ft.partial(str.join, ","),
    "operator": operator.itemgetter(1),
    "optax transformation's function": optax.sgd(0.1).init,
}
DATA = {
    "number": 1,
    "float": 1.0,
    "complex": 1j,
    "bool": True,
    "None": None,
    "array": ramp(2),
    "NumPy array": np.ones(2),
    "NumPy scalar": np.float32(1),
    "key": jax.random.key(0),
    "struct": jax.ShapeDtypeStruct((), jnp.float32),
    "list": [1],
    "tuple": (double, 1),
    "dict": {"a": "b"},
    "named tuple": Pair(1, 2),
    "Module": affine(),
    "callable Module": OwnInit(2),
    "Partial": pm.Partial(double, 1),
    "jax Partial": jax.tree_util.Partial(double, 1),
    "bound method": affine().scaled,
    "filter_jit": pm.filter_jit(double),
    "filter_jit of a Module": pm.filter_jit(affine()),
    "object": object(),
    "bytes": b"bytes",
    "set": frozenset({1}),
    "enumeration": enum.Enum("Color", ["RED"]).RED,
    "optax transformation": optax.sgd(0.1),
}


@pytest.mark.parametrize("value", CONFIGURATION.values(), ids=CONFIGURATION.keys())
def test_callables_strings_and_classes_are_configuration(value):
    """Values that JAX cannot have as data are configuration without a declaration."""
    assert is_configuration(value)
    assert jax.tree.leaves(Holder(value)) == []
    assert jax.tree.map(lambda x: 1 / 0, Holder(value)).content is value


@pytest.mark.parametrize("value", DATA.values(), ids=DATA.keys())
def test_everything_else_is_data(value):
    """Numbers, arrays, containers, Modules and unknown objects are children."""
    assert not is_configuration(value)
    assert jax.tree.structure(Holder(value)).num_leaves == jax.tree.structure(value).num_leaves
    children, _ = pm.tree_flatten_one_level(Holder(value))
    assert children == [value] if not pm.is_array(value) else children[0] is value


def test_one_class_may_divide_in_several_ways():
    """A field may hold a function in one instance and a Module in the next."""
    with_function, with_module = Holder(double), Holder(affine())

    assert jax.tree.structure(with_function) == jax.tree.structure(Holder(double))
    assert jax.tree.structure(with_function) != jax.tree.structure(with_module)
    assert len(jax.tree.leaves([with_function, with_module, Holder(1)])) == 3


def test_the_division_is_made_once():
    """Unflattening restores the split that flattening made, whatever the leaves have become."""
    functions = jax.tree.map(lambda _: double, affine())
    assert jax.tree.leaves(functions) == [double, double]

    hollow = jax.tree.map(lambda _: None, Holder(1))
    filled = jax.tree.unflatten(jax.tree.structure(Holder(1)), ["text"])
    assert jax.tree.leaves(hollow) == []
    assert jax.tree.leaves(filled) == ["text"]


ARRAYS_IN = {
    "array": (ramp(2), r"got f32\[2\]\.\n  it is a constant"),
    "NumPy array": (np.ones((2, 1)), r"got f64\[2,1\]\."),
    "key": (jax.random.key(0), r"got key<fry>\[\]\."),
    "in a tuple": ((1, ramp(2)), r"got f32\[2\]\.\n  at size\[1\]: f32\[2\]\n"),
    "in a list": ([ramp(2)], r"\n  at size\[0\]: f32\[2\]\n"),
    "in a dict": ({"a": (0, ramp(3))}, r"\n  at size\['a'\]\[1\]: f32\[3\]\n"),
    "in a Module": (Holder([ramp(2, 3)]), r"got f32\[2,3\]\."),
    "in a callable Module": (affine(), r"got f32\[2,3\]\."),
}


class OwnInit(pm.Module):
    """A static field, and an `__init__` that sets it."""

    size: object = pm.field(static=True)

    def __init__(self, size):
        self.size = size


@pytest.mark.parametrize(
    "make", [lambda size: Static(1.0, size), OwnInit], ids=["generated", "own"]
)
def test_the_warning_is_at_the_line_that_makes_the_instance(make):
    """And not in the constructor that was written for the class."""
    with pytest.warns(FieldWarning, match="expected no array in a static field") as told:
        make(ramp(2))
    assert told[0].filename == __file__


@pytest.mark.parametrize(("value", "text"), ARRAYS_IN.values(), ids=ARRAYS_IN.keys())
def test_an_array_in_a_static_field_is_told(value, text):
    """By construction, replace and surgery; the hints are code, and the instance works."""
    text = rf"^Static\.size: expected no array in a static field, {text}" if "got" in text else text
    with pytest.warns(FieldWarning, match=text) as told:
        made = Static(ramp(2), value)
    assert "size: jax.Array = pm.buffer()" in str(told[0].message)
    assert "size: tuple[float, ...] = pm.field(static=True)" in str(told[0].message)
    assert len(told) == 1
    with pytest.warns(FieldWarning, match="expected no array in a static field"):
        Static(1.0, 2).replace(size=value)
    with pytest.warns(FieldWarning, match="expected no array in a static field"):
        pm.tree_at(lambda m: m.size, Static(1.0, 2), value)
    assert_same(jax.tree.leaves(jax.tree.map(lambda x: 2 * x, made)), [2 * ramp(2)])


@pytest.mark.filterwarnings("ignore::pytreemod.errors.FieldWarning")
@pytest.mark.parametrize("value", [v for v, _ in ARRAYS_IN.values()], ids=ARRAYS_IN.keys())
def test_static_arrays_are_compared_by_value(value):
    """An equal copy is of the same structure and compiles nothing; another value does."""
    traces = []

    def call(model):
        traces.append(model)
        return model.weight

    def other(x):
        is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.random.key(1) if is_key else x + 1

    models = [
        Static(ramp(2), copy.deepcopy(value)),
        Static(ramp(2), value),
        Static(ramp(2), jax.tree.map(other, value)),
    ]
    same, _, changed = map(jax.tree.structure, models)
    assert jax.tree.structure(Static(ramp(2), value)) == same != changed
    for transform in (pm.filter_jit, jax.jit):
        traces.clear()
        jitted = transform(call)
        for model in models:
            assert_same(jitted(model), ramp(2))
        assert len(traces) == 2


def test_a_static_array_that_is_changed_in_place_is_another():
    """The structure that JAX keeps has a copy."""
    array = np.zeros(2)
    with pytest.warns(FieldWarning, match="static field"):
        made = Static(1.0, array)
    before = jax.tree.structure(made)
    array[0] = 1.0

    assert jax.tree.structure(made) != before


def test_a_traced_array_in_a_static_field_is_told():
    """It may be used as long as it does not leave its trace."""
    with pytest.warns(FieldWarning, match=r"Static\.size: expected no array in a static field"):
        y = jax.jit(lambda x: Static(1.0, x).size * 2)(ramp(2))
    assert_same(y, 2 * ramp(2))


@pytest.mark.parametrize("value", [np.prod((2, 3)), np.bool_(True), np.float32(1), (np.int8(1),)])
def test_numpy_scalars_are_configuration_like_others(value):
    """They have a hash and an `==`: there is no warning."""
    made = Static(ramp(2), value)

    assert jax.tree.structure(made) == jax.tree.structure(Static(ramp(2), copy.copy(value)))
    assert_same(jax.jit(lambda m: m.weight)(made), ramp(2))


WITH_ARRAYS_INSIDE = {
    "functools.partial": (ft.partial(double, ramp(2)), r"content\.args\[0\]: f32\[2\]"),
    "partial by keyword": (ft.partial(double, x=ramp(2)), r"content\.keywords\['x'\]: f32\[2\]"),
    "partial of a Module": (ft.partial(affine(), 1), r"content\.func: f32\[2,3\]"),
    "jax.jit of a Module": (jax.jit(affine()), r"content\.__wrapped__: f32\[2,3\]"),
    "jax.jit of a bound method": (jax.jit(affine().scaled), r"content\.__wrapped__: f32\[2,3\]"),
    "jax.vmap of a Module": (jax.vmap(affine()), r"content\.__wrapped__: f32\[2,3\]"),
    "jax.jit of a partial": (
        jax.jit(ft.partial(double, ramp(2))),
        r"content\.__wrapped__\.args\[0\]: f32\[2\]",
    ),
}


@pytest.mark.parametrize(
    ("value", "place"), WITH_ARRAYS_INSIDE.values(), ids=WITH_ARRAYS_INSIDE.keys()
)
def test_a_callable_that_hides_arrays_is_told(value, place):
    """Arrays inside a wrapped function would be constants that nothing trains; see the hint."""
    with pytest.warns(
        FieldWarning,
        match=rf"^Holder\.content: expected a callable without arrays inside, or a pytree, got "
        rf"[^\n]* which hides f32[^\n]*\n  at {place}\n",
    ) as told:
        made = Holder(value)
    assert "pm.Partial(f, array) instead of functools.partial(f, array)" in str(told[0].message)
    assert "pm.filter_jit(f)" in str(told[0].message)
    assert made.content is value
    assert jax.tree.leaves(made) == []


def test_the_hints_of_that_error_work():
    """filter_jit and Partial keep the arrays visible."""
    for value in (pm.filter_jit(affine()), pm.Partial(double, ramp(2)), pm.filter_vmap(affine())):
        assert jax.tree.leaves(Holder(value)) != []


def test_functions_that_close_over_arrays_are_let_be():
    """A closure is opaque: its arrays cannot be seen, here or in JAX."""
    x = ramp(2)

    assert jax.tree.leaves(Holder(lambda: x)) == []


def test_construction_never_flattens_field_values():
    """A node of an unknown kind is stored unopened, beside data and configuration."""
    opened = []

    @jax.tree_util.register_pytree_node_class
    class Touchy:
        def tree_flatten(self):
            opened.append(self)
            raise RuntimeError("do not touch")

        @classmethod
        def tree_unflatten(cls, aux, children):
            return cls()

    thing = Touchy()
    for value in (thing, [thing], {"a": thing}, Holder(thing), Affine(thing, thing)):
        Holder(value)
        OwnInit(2)
    assert opened == []


def in_order(m):
    """Goes through a static dict."""
    y = m.weight
    for name in m.size:
        y = {"square": jnp.square, "increase": lambda x: x + 1}[name](y)
    return y


def under_root(m):
    """Which side of the branch cut."""
    return jnp.sqrt(jnp.asarray(m.size)).imag


def type_inside(m):
    """The type of the content of a static container."""
    return jnp.asarray(next(iter(m.size))) * 2


PROGRAMS = {
    "order of keys": (
        in_order,
        {"square": 1, "increase": 1},
        {"increase": 1, "square": 1},
    ),
    "signs of zeros": (under_root, complex(-1.0, 0.0), complex(-1.0, -0.0)),
    "set": (type_inside, {1}, {1.0}),
    "frozenset": (type_inside, frozenset({1}), frozenset({1.0})),
    "list": (type_inside, [1], [1.0]),
    "tuple": (type_inside, (1,), (1.0,)),
}


@pytest.mark.parametrize("transform", [jax.jit, pm.filter_jit])
@pytest.mark.parametrize(("fn", "first", "second"), PROGRAMS.values(), ids=PROGRAMS.keys())
@pytest.mark.sampled
def test_configuration_that_python_calls_equal_has_its_own_program(fn, first, second, transform):
    """One configuration never runs the program of another; nor are the two equal."""
    traced = transform(lambda m: fn(m))
    one, other = Static(jnp.asarray(3.0), first), Static(jnp.asarray(3.0), second)

    assert first == second
    assert one != other
    assert not pm.tree_equal(one, other)
    for m in (one, other, one):
        assert_same(traced(m), fn(m))


def test_configuration_changed_in_place_runs_its_own_program():
    """An error, because a Module is a value; but the current content is compared."""
    model = Static(jnp.asarray(3.0), [1])
    traced = pm.filter_jit(type_inside)

    assert traced(model).dtype == jnp.int32
    model.size[0] = 1.0
    assert traced(model).dtype == jnp.float32


def test_classes_in_static_fields_divide_alike_however_they_come():
    """A dtype in any spelling, a class, one of Python's numbers: in every order of instances."""
    local = type("Local", (), {})
    values = [int, jnp.float32, np.float32, np.dtype("float32"), float, np.dtype(float), str, local]
    rounds = [[jax.tree.structure(Static(1, v)) for v in order] for order in (values, values)]
    backwards = [jax.tree.structure(Static(1, v)) for v in values[::-1]][::-1]

    assert rounds[0] == rounds[1] == backwards
    first = [backwards.index(structure) for structure in backwards]
    assert first == [0, 1, 1, 1, 4, 5, 6, 7]


class Color(enum.Enum):
    """An item is distinguished by its class, and by itself."""

    RED = 1


VALUES = [
    *(1, True, 1.0, 1j, "a", b"a", None, 0.0, -0.0, math.nan),
    *((1, "a"), (1.0, "a"), (0.0,), (-0.0,), (1, (2.0, (True,))), (1, (2.0, (1,))), (math.nan,)),
    *(frozenset({1}), frozenset({True}), slice(1), slice(1.0), Color.RED, range(2)),
    *(ft.partial(double, 1), np.float32(1), [1], [1.0], {"a": 1}, {1}, {True}),
]


def test_static_values_are_compared_by_value_and_kind():
    """In every order of instances; values that only Python calls equal are distinguished."""
    apart = [v if isinstance(v, ft.partial) else copy.deepcopy(v) for v in VALUES]
    rounds = [[jax.tree.structure(Static(1, v)) for v in values] for values in (VALUES, apart)]
    backwards = [jax.tree.structure(Static(1, v)) for v in VALUES[::-1]][::-1]

    for i, one in enumerate(rounds[0]):
        assert [one == other for other in rounds[1]] == [j == i for j in range(len(VALUES))]
        assert [one != other for other in backwards] == [j != i for j in range(len(VALUES))]


@pytest.mark.parametrize("make", [tuple, list, lambda given: ft.partial(double, *given)])
def test_arrays_are_found_in_values_of_a_type_that_was_met_without(make):
    """The layout of an instance with the same types does not decide for these values."""
    for _ in range(3):
        Static(1, make([1, 2]))
    with pytest.warns(FieldWarning, match="array"):
        held = Static(1, make([1, ramp(2)]))
    assert held.size is not None
    Static(1, make([1, 2]))


def test_a_partial_of_what_hides_an_array_is_looked_into_as_its_function_is():
    """Whatever partials of its type were met before."""
    hides = jax.jit(ft.partial(double, ramp(2)))
    for _ in range(3):
        Static(1, ft.partial(double, 1))
        Static(1, double)
    for value in (hides, ft.partial(hides, 1)):
        with pytest.warns(FieldWarning, match="hides"):
            Static(1, value)
