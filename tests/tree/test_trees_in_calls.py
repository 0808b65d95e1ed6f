"""A jitted call sees a model as it is now: cached arrays are never stale, and never mixed up."""

import gc
import operator
import subprocess
import sys
import weakref

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import pytreemod as pm
from tests.helpers.comparing import assert_same
from tests.helpers.trees import Containers, Holder, Pair, double, ramp
from tests.helpers.trees import Static as WithStatic

identity = pm.filter_jit(lambda tree: tree)


@pytest.mark.parametrize("items", [(), (1, 2)])
def test_attributes_of_tuples_are_seen(items):
    """A subclass of tuple may be registered with its attributes as children."""

    class Held(Pair if items else tuple):
        pass

    def build(_, children):
        made = tuple.__new__(Held, children[:-1])
        made.inside = children[-1]
        return made

    jtu.register_pytree_node(Held, lambda t: ((*t, t.inside), None), build)
    for model in (
        Holder(build(None, (*items, ramp(2)))),
        identity(Holder(build(None, (*items, 1)))),
    ):
        for x in (ramp(3), ramp(2), ramp(3)):
            model.content.inside = x
            assert_same(identity(model.content).inside, x)
            assert_same(identity(model).content.inside, x)


def test_a_module_under_construction_is_not_remembered():
    """A jitted method may get a half-built self; what `__init__` sets later is seen."""
    seen = []

    class Growing(pm.Module):
        first: jax.Array
        second: jax.Array

        def __init__(self):
            self.first = ramp(1)
            seen.append(identity(Holder(self)).content)
            seen.append(identity(self))
            self.first = ramp(2)
            self.second = ramp(3)

    model = Growing()
    assert_same(seen[0].first, ramp(1))
    assert_same(identity(model).first, ramp(2))
    assert_same(identity(model).second, ramp(3))


CHANGES = {
    "append to a list": lambda m: m.items.append(3.0),
    "exchange an array in a list": lambda m: operator.setitem(m.items, 0, ramp(3)),
    "change a list in a list": lambda m: m.items[1].append("more"),
    "exchange a value in a dict": lambda m: operator.setitem(m.table, "a", {"deep": ramp(2)}),
    "in a Module in a dict": lambda m: operator.setitem(m.table["m"].content, "x", -1.0),
    "another key": lambda m: operator.setitem(m.table, "z", m.table.pop("a")),
    "in a tuple": lambda m: m.pair[1].clear(),
}


def containers():
    return Containers(
        [ramp(2), [1, ramp(1)]], {"a": 2.0, "m": Holder({"x": 1.0})}, (ramp(1), [ramp(2)], double)
    )


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_mutation_after_a_call_is_seen(change):
    """A list or dict inside a Module that is changed after a call is passed on as changed.

    Whether the Module was built, or returned by a call, or lies in another one.
    """
    for is_returned in (False, True):
        for wrap, unwrap in ((lambda m: m, lambda m: m), (Holder, lambda m: m.content)):
            model, expected = containers(), containers()
            identity(model)
            model = identity(model) if is_returned else model
            outer = wrap(model)
            identity(outer)
            for step in (change, CHANGES["append to a list"]):
                step(model)
                step(expected)
                assert_same(unwrap(identity(outer)), expected)


def test_numpy_arrays_changed_in_place_are_seen():
    """A NumPy array inside a Module is read at each call."""
    array = np.zeros(3, np.float32)
    model = Holder([array])
    total = pm.filter_jit(lambda m: jnp.sum(m.content[0]))
    assert total(model) == 0.0
    array[:] = 2.0

    assert total(model) == 6.0


SCALARS = [0, False, 0.0, 1, True, 1.0, 1 + 0j, float("nan"), None, "1", b"1"]
# In NumPy, the dtype float64 equals None, and the class float; which promotes weakly.
DTYPES = [np.dtype("float64"), float, np.dtype("float32"), "float64"]


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x,)], ids=["alone", "in a tuple"])
def test_configuration_comes_back_as_it_was(wrap):
    """Static values that Python or NumPy calls equal are several programs."""
    for values in (SCALARS, DTYPES):
        for value in [*values, *values]:
            assert repr(identity(WithStatic(1.0, wrap(value))).size) == repr(wrap(value))


@pytest.mark.parametrize(
    "make", [lambda: np.float32(1.5), lambda: (np.float32(1.5),), lambda: np.dtype("float32")]
)
def test_equal_configuration_is_one_program(make):
    """A scalar of NumPy was traced at each call: its `==` gives no bool of Python's."""
    traces = []
    run = pm.filter_jit(lambda m: traces.append(m.size) or m.weight)
    for _ in range(3):
        run(WithStatic(1.0, make()))

    assert len(traces) == 1


def test_an_array_that_was_replaced_goes_at_the_next_call():
    model = Holder([ramp(17)])
    replaced = weakref.ref(model.content[0])
    identity(model)
    model.content[0] = ramp(1)
    identity(model)
    gc.collect()
    assert replaced() is None


AT_THE_END = """
import jax
import pytreemod as pm

mlp = pm.nn.MLP(2, 3, 4, 1, key=jax.random.key(0))
adapted = pm.lora(mlp, "**.weight", 1, key=jax.random.key(1))
kept = [pm.filter_jit(lambda layer: layer)(layer) for layer in adapted.layers]
"""


@pytest.mark.slow
def test_nothing_is_printed_when_python_ends():
    """Structures that live as long as the program are not compared when its modules are gone."""
    command = [sys.executable, "-c", AT_THE_END]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert done.stderr == ""
