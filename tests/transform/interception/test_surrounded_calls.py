"""Rules around calls: when they are asked, in which order; everything else is unchanged."""

import copy
import functools as ft
import pickle
import threading
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.transform.interception.surrounded_calls import (
    AbstractCallRule,
    CallSite,
    released,
    surround,
    surrounding,
)
from tests.helpers.trees import Affine, affine, ramp

X = ramp(2)

SEEN = threading.local()
"""Where rules of this file note that they were asked, in each thread."""


def asked(fn, *args):
    """The paths at which rules are asked while a function runs, in order."""
    SEEN.sites = sites = []
    fn(*args)
    return sites


class Times(AbstractCallRule):
    """Multiplies the output."""

    by: float = 2.0

    def around(self, call, args, kwargs, where):
        """Make the call, and note where."""
        if hasattr(SEEN, "sites"):
            SEEN.sites.append((self.by, where))
        return self.by * call(*args, **kwargs)


class Plus(AbstractCallRule):
    """Adds to the output."""

    by: float = 1.0
    uses_layer: ClassVar[bool] = False

    def around(self, call, args, kwargs, where):
        """Make the call, and note where."""
        if hasattr(SEEN, "sites"):
            SEEN.sites.append((self.by, where))
        return self.by + call(*args, **kwargs)


class Numbered(AbstractCallRule):
    """Adds the number of the layer, or of the call, so that a traced one is seen."""

    what: str = "layer"

    def around(self, call, args, kwargs, where):
        """Make the call."""
        return call(*args, **kwargs) + jnp.asarray(getattr(where, self.what), jnp.float32)


class Pair(pm.Module):
    """Two layers, of which the first is called twice."""

    first: Affine
    second: Affine

    def __call__(self, x):
        return self.second(self.first(self.first(x)))

    def encode(self, x, *, twice=False):
        """A method that is not a call."""
        return self.encode(self.first(x)) if twice else self.first(x)


PAIR = Pair(affine(2, 2), affine(2, 2, -1.0))
same = ft.partial(np.testing.assert_allclose, rtol=1e-5)


def test_a_rule_is_asked_at_each_call_of_what_is_chosen():
    """With the path, the method and the count; the number of calls before."""
    model = surround(PAIR, ..., Times(1.0))
    sites = [where for _, where in asked(model, X)]
    assert sites == [
        CallSite("<root>", "__call__", 0, ()),
        CallSite("first", "__call__", 0, ()),
        CallSite("first", "__call__", 1, ()),
        CallSite("second", "__call__", 0, ()),
    ]
    assert sites[0].layer is None


def test_rules_are_nested_the_latest_outermost():
    """As decorators are."""
    model = surround(surround(PAIR, "second", Times()), "second", Plus())
    same(model(X), 1 + 2 * PAIR(X))
    same(surround(surround(PAIR, "second", Plus()), "second", Times())(X), 2 * (1 + PAIR(X)))
    assert [by for by, _ in asked(model, X)] == [1.0, 2.0]


def test_any_method_can_be_named():
    """Alone, and beside the call; its arguments by name arrive."""
    encoding = surround(PAIR, Pair, Times(), "encode")
    assert asked(encoding, X) == []
    same(encoding.encode(X), 2 * PAIR.encode(X))
    sites = asked(ft.partial(encoding.encode, twice=True), X)
    assert [(where.method, where.call) for _, where in sites] == [("encode", 0), ("encode", 1)]
    both = surround(encoding, Pair, Plus())
    same(both(X), 1 + PAIR(X))
    same(both.encode(X), 2 * PAIR.encode(X))
    same(released(both, 0)(X), PAIR(X))


def test_a_chosen_module_passes_for_what_it_was():
    """Its class, its repr, changes to it, results of its methods, and its use as a prefix."""
    model = surround(PAIR, Affine, Times())
    layer = model.first
    assert isinstance(layer, Affine)
    assert type(layer).__qualname__ == "Affine"
    assert repr(layer) == repr(PAIR.first)
    for one in (layer, jax.tree.map(lambda x: x, layer), pm.filter_jit(lambda m: m)(layer)):
        assert [*vars(one)] == [*vars(PAIR.first)]
    assert layer.__match_args__ == PAIR.first.__match_args__
    same(layer.replace(bias=layer.bias + 1)(X), 2 * (PAIR.first(X) + 1))
    assert type(type(layer)(layer.weight, layer.bias)) is Affine
    assert type(layer)(layer.weight, layer.bias) == PAIR.first
    axes = Affine(None, None)
    mapped = pm.filter_vmap(lambda m, x: m(x), in_axes=(axes, 0))(layer, ramp(3, 2))
    assert mapped.shape == (3, 2)
    assert len(jax.tree.leaves(model)) == len(jax.tree.leaves(PAIR))


def test_plain_jax_takes_it():
    """It is a tree like any other."""
    model = surround(PAIR, Affine, Times())
    gradient = jax.jit(jax.grad(lambda m, x: jnp.sum(m(x))))(model, X)
    assert jax.tree.structure(gradient) == jax.tree.structure(model)
    same(jax.jit(lambda m, x: m(x))(model, X), model(X))
    same(jax.vmap(model)(ramp(3, 2))[0], model(X))


COPIES = {
    "pickle": lambda tree: pickle.loads(pickle.dumps(tree)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "jit": pm.filter_jit(lambda tree: tree),
    "map": lambda tree: jax.tree.map(lambda leaf: leaf, tree),
}


@pytest.mark.parametrize("remade", COPIES.values(), ids=COPIES)
def test_rules_stay_on_copies(remade):
    """They equal their originals, are of the same class, and so are their methods."""
    model = surround(surround(PAIR, ..., Times()), "first", Plus(), "scaled")
    made = remade(model)
    assert made == model
    assert jax.tree.structure(made) == jax.tree.structure(model)
    assert type(made.first) is type(model.first)
    same(made(X), model(X))
    same(made.first.scaled(X), model.first.scaled(X))
    method = remade(model.encode)
    same(method(X), model.encode(X))


def test_equal_rules_are_compiled_for_once():
    """Rules that Python calls equal, but a program distinguishes, are not taken for equal."""

    class Long(AbstractCallRule):
        value: Any

        def around(self, call, args, kwargs, where):
            return call(*args, **kwargs) + jnp.float32(len(repr(self.value)))

    traces = []

    @pm.filter_jit
    def call(model, x):
        traces.append(1)
        return model(x)

    for value in (2.0, 2.0, 3.0, 1, True, 1.0, 0.0, -0.0, 3.0, (1,), (True,)):
        long = jnp.float32(len(repr(value)))
        same(call(surround(PAIR, "second", Long(value)), X), PAIR(X) + long)
    assert len(traces) == 9


# ---- counting


@pytest.mark.parametrize("jit", [jax.jit, pm.filter_jit])
def test_a_compiled_function_counts_its_own_calls(jit):
    """So a trace of one call is correct for the next one, and for one that is not counted.

    A count that went on from outside would stay in the compiled function.
    """
    model = surround(PAIR, "first", Numbered("call"))
    fn = jit(lambda model, x: (model.first(x), model.first(x)))
    first = PAIR.first(X)

    for _ in range(2):
        with surrounding():
            for _ in range(2):
                same(fn(model, X), (first, first + 1))
            same(model.first(X), first)
            same(fn(model, X), (first, first + 1))
            same(model.first(X), first + 1)
        same(fn(model, X), (first, first))
