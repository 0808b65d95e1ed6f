"""Variants: all kinds together, and their pickles."""

import base64
import copy
import itertools as it
import json
import pickle
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import FieldError, UnfinishedError
from pytreemod.transform.interception.surrounded_calls import (
    AbstractCallRule,
    surround,
    with_own_rules,
)
from pytreemod.tree.nodes import own_class
from tests.helpers.racing import race
from tests.helpers.trees import ramp

X = ramp(2)


class Layer(pm.Module):
    """Three arrays, one of which may be tied to another."""

    weight: jax.Array
    scale: jax.Array
    bias: jax.Array

    def __call__(self, x):
        return self.scale * (self.weight * x) + self.bias

    def again(self):
        """Another one of its class."""
        return type(self)(self.weight, self.scale, self.bias)


class Times(AbstractCallRule):
    """Multiplies the output."""

    by: float = 2.0

    def around(self, call, args, kwargs, where):
        return self.by * call(*args, **kwargs)


LAYER = Layer(ramp(2), ramp(2), ramp(2))

# Changes that make an instance one of a variant, and the changes back.
CHANGES = {
    "computed": (
        lambda m: pm.tree_at("weight", m, pm.computed(jnp.multiply, ramp(2), jnp.asarray(1.0))),
        lambda m: pm.tree_at("weight", m, ramp(2)),
    ),
    "tied": (lambda m: pm.tie(m, "scale", to="bias"), pm.untie),
    "precise": (
        lambda m: pm.with_precision(m, "params=float32,compute=float16,output=float32"),
        lambda m: pm.with_precision(m, None),
    ),
    "intercepted": (
        lambda m: surround(m, ..., Times()),
        lambda m: with_own_rules(m, Times, {}),
    ),
}
ORDERS = [
    order
    for n in range(1, 5)
    for names in it.combinations(CHANGES, n)
    for order in dict.fromkeys((names, names[::-1]))
]
JOURNEYS = {
    "flattening": lambda m: jax.tree.map(lambda leaf: leaf, m),
    "jit": jax.jit(lambda m: m),
    "filter_jit": pm.filter_jit(lambda m: m),
    "replace": lambda m: m.replace(bias=m.bias),
    "surgery": lambda m: pm.tree_at("bias", m, ramp(2)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
}


def changed(order):
    """The layer with changes, one after the other."""
    made = LAYER
    for name in order:
        made = CHANGES[name][0](made)
    return made


@pytest.mark.parametrize("order", ORDERS, ids="+".join)
def test_all_kinds_are_combined(order):
    """In any order: there is one class, and each kind has its effect."""
    made = changed(order)

    assert isinstance(made, Layer)
    assert own_class(made) is Layer
    assert type(made) is type(changed(sorted(order)))
    assert type(made).__mro__.count(Layer) == 1
    np.testing.assert_allclose(made(X), LAYER(X) * (2 if "intercepted" in order else 1), rtol=1e-3)
    assert len(jax.tree.leaves(made)) == 3 + ("computed" in order) - ("tied" in order)
    assert isinstance(made.weight, jax.Array)
    assert isinstance(made.scale, jax.Array)
    assert (made.scale is made.bias) == ("tied" in order)
    assert ("float16" in repr(made)) == ("precise" in order)


@pytest.mark.parametrize("order", ORDERS, ids="+".join)
@pytest.mark.parametrize("journey", JOURNEYS.values(), ids=JOURNEYS)
@pytest.mark.sampled
def test_they_stay_on_every_journey(order, journey):
    """The class, the structure and the result of a call; of methods, too."""
    made = changed(order)

    found = journey(made)

    assert type(found) is type(made)
    assert jax.tree.structure(found) == jax.tree.structure(made)
    np.testing.assert_allclose(found(X), made(X))
    np.testing.assert_allclose(pickle.loads(pickle.dumps(found.__call__))(X), made(X))


@pytest.mark.parametrize("order", ORDERS, ids="+".join)
def test_without_them_it_is_of_its_own_class(order):
    """Each is taken away alone, and leaves the others."""
    made = changed(order)
    for i, name in enumerate(order):
        made = CHANGES[name][1](made)
        assert type(made) is type(changed(order[i + 1 :]))
    assert type(made) is Layer
    assert jax.tree.structure(made) == jax.tree.structure(LAYER)


@pytest.mark.parametrize("order", ORDERS, ids="+".join)
def test_what_a_method_makes_of_its_class_is_no_variant(order):
    """The values of its fields have neither ties nor source fields."""
    made = changed(order)
    if {"computed", "tied"} & {*order}:
        with pytest.raises(FieldError, match=r"computed leaves \((weight|scale)"):
            made.again()
    else:
        assert type(made.again()) is Layer


def test_a_class_is_made_once():
    """From however many threads."""

    class Fresh(Layer):
        pass

    fresh = Fresh(ramp(2), ramp(2), ramp(2))

    for change, _ in CHANGES.values():
        assert len(set(race(lambda i, change=change: type(change(fresh))))) == 1
    assert len(Fresh.__subclasses__()) == len(CHANGES) - 1  # Precision is an interceptor.


class Keeping(pm.Module):
    """Has a custom `__getstate__`."""

    weight: jax.Array
    name: str

    def __call__(self, x):
        return self.weight * x

    def __getstate__(self):
        return {**self.__dict__, "name": "pickled"}

    def __setstate__(self, state):
        self.__dict__.update(state)


@pytest.mark.parametrize("name", ["computed", "precise", "intercepted"])
def test_a_class_may_say_what_is_pickled(name):
    """The reason for the variant is pickled as well."""
    made = CHANGES[name][0](Keeping(ramp(2), "made"))

    for remade in (JOURNEYS["pickle"], copy.deepcopy):
        found = remade(made)
        assert found.name == "pickled"
        assert type(found) is type(made)
        np.testing.assert_allclose(found(X), made(X))


def test_an_unfinished_layer_can_be_captured():
    """It is captured during materialization, and refuses what would be lost then."""
    layer = nn.Linear(None, 3, key=jax.random.key(0))
    finished = nn.Linear(2, 3, key=jax.random.key(0))
    seen = []

    def call(model, x):
        out, captured = pm.capture(model, nn.Linear)(x)
        seen.append(list(captured))
        return out

    assert pm.materialize(layer, X, method=call) == finished
    assert seen == [["<root>"]]
    assert own_class(layer) is nn.Linear
    intercepted = surround(layer, ..., Times())
    assert isinstance(intercepted, nn.Linear)
    for change in (lambda m: m, copy.copy, copy.deepcopy, JOURNEYS["pickle"]):
        with pytest.raises(UnfinishedError, match="before materialize"):
            pm.materialize(change(intercepted), X)


PICKLES = json.loads((Path(__file__).parent / "pickles_of_0_1.json").read_text())


@pytest.mark.parametrize("name", PICKLES)
def test_pickles_of_an_earlier_version_are_read(name):
    """Each has a model, and its output for an input."""
    model, expected = pickle.loads(zlib.decompress(base64.b85decode(PICKLES[name])))

    def call(model, x):
        return pm.filter_vmap(lambda m: m(x))(model) if "several" in name else model(x)

    x = jnp.linspace(-1.0, 1.0, 2)
    finished = pm.materialize(model, x, method=call) if "unfinished" in name else model
    np.testing.assert_allclose(np.asarray(call(finished, x), np.float32), expected, rtol=1e-5)
    again = pickle.loads(pickle.dumps(model))
    assert jax.tree.structure(again) == jax.tree.structure(model)
