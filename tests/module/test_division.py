"""Data and configuration."""

import copy
import enum
import functools as ft
import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pytreemod as pm
from pytreemod.errors import FieldWarning
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
    with pytest.warns(FieldWarning, match="static") as told:
        make(ramp(2))
    assert told[0].filename == __file__


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


class Color(enum.Enum):
    """An item is distinguished by its class, and by itself."""

    RED = 1


def test_callables_strings_and_classes_are_configuration():
    """Values that JAX cannot have as data are configuration without a declaration."""
    for value in CONFIGURATION.values():
        assert jax.tree.leaves(Holder(value)) == []
        assert jax.tree.map(lambda x: 1 / 0, Holder(value)).content is value


def test_everything_else_is_data():
    """Numbers, arrays, containers, Modules and unknown objects are children."""
    for value in DATA.values():
        found = jax.tree.structure(Holder(value)).num_leaves
        assert found == jax.tree.structure(value).num_leaves
        children, _ = pm.tree_flatten_one_level(Holder(value))
        assert children == [value] if not pm.is_array(value) else children[0] is value


def test_an_array_in_a_static_field_is_told():
    """By construction, replace and under a trace."""
    with pytest.warns(FieldWarning, match=r"(?s)Static\.size.*f32\[2\]"):
        Static(ramp(2), ramp(2))
    with pytest.warns(FieldWarning, match=r"(?s)Static\.size.*key"):
        Static(1.0, 2).replace(size=jax.random.key(0))
    with pytest.warns(FieldWarning, match=r"Static\.size"):
        assert_same(jax.jit(lambda x: Static(1.0, x).size * 2)(ramp(2)), 2 * ramp(2))


def test_a_function_of_jax_around_a_module_is_told():
    """Its arrays would be constants that nothing trains; also after a plain function."""
    Holder(double)
    for hidden in (jax.jit(affine()), jax.vmap(affine().scaled)):
        with pytest.warns(FieldWarning, match=r"Holder\.content"):
            assert jax.tree.leaves(Holder(hidden)) == []
    for value in (pm.filter_jit(affine()), pm.Partial(double, ramp(2)), jax.jit(double)):
        Holder(value)


@pytest.mark.parametrize("value", [np.prod((2, 3)), np.bool_(True), np.float32(1), (np.int8(1),)])
def test_numpy_scalars_are_configuration_like_others(value):
    """They have a hash and an `==`: there is no warning."""
    made = Static(ramp(2), value)

    assert jax.tree.structure(made) == jax.tree.structure(Static(ramp(2), copy.copy(value)))
    assert_same(jax.jit(lambda m: m.weight)(made), ramp(2))


@pytest.mark.parametrize("transform", [jax.jit, pm.filter_jit])
def test_configuration_that_python_calls_equal_has_its_own_program(transform):
    """One configuration never runs the program of another; nor are the two equal."""
    traced = transform(lambda m: jnp.asarray(m.size[0]) * 2)
    one, other = Static(jnp.asarray(3.0), (1,)), Static(jnp.asarray(3.0), (1.0,))

    assert one != other
    assert not pm.tree_equal(one, other)
    for m in (one, other, one):
        assert traced(m).dtype == (jnp.int32 if m is one else jnp.float32)
