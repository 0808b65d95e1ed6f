"""Functions that a Module keeps are pickled by reference."""

import dataclasses
import functools as ft
import pickle
import sys
import types
from typing import Any, NamedTuple

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.module.references import is_by_value
from tests.helpers.comparing import assert_same
from tests.helpers.copying import COPIES
from tests.helpers.trees import ramp


class Pair(NamedTuple):
    """Two functions."""

    first: Any
    second: Any


@jax.custom_vjp
def with_rule(x):
    """Found in this module, by a test that gives that to `sys.modules`."""
    return x


class Acts(pm.Module):
    """Functions in fields of every kind."""

    x: Any
    act: Any = jax.nn.relu
    fixed: Any = pm.field(static=True, default=None)

    @staticmethod
    @jax.jit
    def named(x):
        """Found in its class."""
        return x

    @jax.jit
    def jitted(self):
        """A method that is not a plain function."""
        return self.x


@pytest.fixture
def importable(monkeypatch):
    """This file as a module that is found under its name."""
    monkeypatch.setitem(sys.modules, __name__, types.ModuleType(__name__))
    vars(sys.modules[__name__]).update(globals())


FUNCTIONS = {
    "jitted": jax.nn.silu,
    "with a rule of its own": jax.nn.relu,
    "ufunc of JAX": jnp.add,
    "ufunc of NumPy": np.tanh,
    "plain": jax.nn.softmax,
    "built in": len,
    "a user's": with_rule,
    "in a class": Acts.named,
}


NESTED = {
    "alone": lambda f: f,
    "in a tuple": lambda f: (1, f),
    "in a named tuple": lambda f: Pair(f, 2),
    "in lists and dicts": lambda f: {"a": [f, 1], "b": 2},
    "in a partial": lambda f: ft.partial(f, axis=-1),
    "given to a partial": lambda f: ft.partial(map, f),
    "in a Module": lambda f: Acts(None, f),
    "in a Partial": lambda f: pm.Partial(f, 1),
    "jitted by us": pm.filter_jit,
}


def functions_in(value):
    """The content of a field, in order: functions, and their other values."""
    if isinstance(value, ft.partial):
        value = [value.func, value.args, value.keywords]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, pm.Module):
        value = [getattr(value, f.name) for f in dataclasses.fields(value) if f.name != "x"]
    if isinstance(value, (tuple, list)):
        return [function for part in value for function in functions_in(part)]
    return [value.fn if hasattr(value, "fn") else value]


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())
@pytest.mark.parametrize("nested", NESTED.values(), ids=NESTED.keys())
@pytest.mark.sampled
def test_a_function_that_a_module_keeps_stays_that_function(nested, function, copied):
    """Whatever kind of object it is, and wherever in a field: the structure is the same."""
    made = Acts(ramp(2), nested(function), nested(function))
    again = copied(made)

    assert type(again.act) is type(made.act)
    assert function in functions_in(again.act)
    assert functions_in([again.act, again.fixed]) == functions_in([made.act, made.fixed])
    # Two partials are never equal, whatever they hold.
    assert isinstance(made.act, ft.partial) or (
        jax.tree.structure(again) == jax.tree.structure(made)
    )


def test_a_network_of_the_library_is_pickled():
    """With its default activations; plainly pickled, it has the structure that it had."""
    mlp = pm.nn.MLP(2, 2, 2, 1, key=jax.random.key(0))
    model = pm.nn.Sequential([mlp, pm.nn.Lambda(jax.nn.gelu), pm.nn.MaxPool1d(2)])
    again = pickle.loads(pickle.dumps(model))

    assert jax.tree.structure(again) == jax.tree.structure(model)
    assert_same(again, model)


@pytest.mark.usefixtures("importable")
def test_a_jitted_method_is_pickled_with_its_instance():
    """A bound method of a transformed function, and a model that is called in other ways."""
    made = Acts(ramp(2))

    assert_same(pickle.loads(pickle.dumps(made.jitted))(), ramp(2))


def test_a_pickle_names_public_modules():
    """JAX may move its private modules in the next release."""
    told = pickle.dumps(Acts(None, jax.nn.relu, (jnp.tanh, jnp.add)))

    assert b"_src" not in told
    assert b"jax.nn" in told


def test_a_function_that_nobody_finds_is_refused_by_pickle():
    """As a lambda is: a function that was transformed inside another one."""
    with pytest.raises((pickle.PicklingError, AttributeError), match=r"Can't (pickle|get)"):
        pickle.dumps(Acts(None, jax.jit(lambda x: x)))


@pytest.mark.usefixtures("importable")
def test_modules_that_are_pickled_by_value_are_not_referred_to():
    """Modules registered so with cloudpickle are pickled, too: a worker does not have them."""
    module = sys.modules[__name__]
    refer, transformed = Acts(None, with_rule), Acts(None, pm.filter_jit(with_rule))
    told = cloudpickle.dumps(refer)
    cloudpickle.register_pickle_by_value(module)
    try:
        whole = [cloudpickle.dumps(refer), cloudpickle.dumps(transformed)]
    finally:
        cloudpickle.unregister_pickle_by_value(module)

    assert pickle.loads(told).act is with_rule
    assert all(len(value) > 2 * len(told) for value in whole)


def test_by_value_is_what_a_cloudpickle_that_is_at_work_says():
    """Whatever package it is in, and however far out."""
    named = {"a", "b.c"}
    scope = {
        "__name__": "vendored.cloudpickle",
        "list_registry_pickle_by_value": lambda: named,
        "call": lambda module: is_by_value(module),
    }
    ask = eval("lambda module: call(module)", scope)
    asked = ("__main__", "a", "a.b", "ab", "b", "b.c.d")

    assert [ask(module) for module in asked] == [True, True, True, False, False, True]
    assert not any(is_by_value(module) for module in asked)


class Maker:
    """Has the method that makes named tuples, but is not one."""

    @classmethod
    def _make(cls, items):
        return cls()


class Items(tuple):
    """A tuple of a custom class, which cannot be rebuilt."""

    __slots__ = ()


def test_containers_that_cannot_be_made_anew_are_pickled_as_they_are():
    """Neither other containers, nor a sequence of a class without `_make`."""
    copied = pickle.loads(pickle.dumps(Acts(None, fixed=(Maker(), Items((1, 2))))))

    assert [type(part) for part in copied.fixed] == [Maker, Items]
    assert copied.fixed[1] == (1, 2)
