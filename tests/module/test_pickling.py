"""Instances that are pickled and copied, and classes of scripts, which are pickled by value."""

import copy
import functools as ft
import json
import os
import pickle
import subprocess
import sys
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from tests.helpers import pickled_script
from tests.helpers.comparing import assert_same
from tests.helpers.computing import scaled
from tests.helpers.trees import Pair, ramp

COPIES = [
    lambda m: pickle.loads(pickle.dumps(m)),
    lambda m: pickle.loads(cloudpickle.dumps(m)),
    copy.copy,
    lambda m: copy.deepcopy([m, m])[1],
]

WORKER = """
import json, pickle, sys
with open(sys.argv[1], "rb") as file:
    found = pickle.loads(file.read())
print(json.dumps(found["results"](found)))
"""


@pytest.mark.slow
def test_classes_of_a_script_work_in_another_process(tmp_path):
    """Every kind of field, base, method and constructor; the worker cannot import the script."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()}
    outputs = []
    for program in ([pickled_script.__file__], ["-c", WORKER]):
        command = [sys.executable, *program, str(tmp_path / "pickled")]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        outputs.append(json.loads(done.stdout.splitlines()[-1]))
    assert outputs[0] == outputs[1]
    assert all(outputs[0][2])
    assert "ValueError" in outputs[0][1][4]


def test_a_class_that_is_sent_by_value_is_the_same_in_its_own_process():
    """Loading leaves it unchanged: instances from before and after have one structure."""
    scale = 3.0

    class Local(pm.Module):
        x: jax.Array
        n: int = pm.field(static=True, default=2)

        def __call__(self, y):
            return scale * self.x * y

    before = Local(ramp(2))
    structure = jax.tree.structure(before)
    # What holds an instance goes along.
    for made, args in ((before, (2.0,)), (before.__call__, (2.0,)), (pm.Partial(before, 2.0), ())):
        copied = pickle.loads(cloudpickle.dumps(made))
        assert_same(copied(*args), 6.0 * ramp(2))
    for instance in (pickle.loads(cloudpickle.dumps(before)), before, Local(ramp(2))):
        assert jax.tree.structure(instance) == structure
    assert not hasattr(Local, "x")
    Local.x = 1.0
    assert pickle.loads(cloudpickle.dumps(Local)).x == 1.0
    assert_same(before.x, ramp(2))


class Cached(pm.Module):
    x: Any
    cache: object
    act: object = jnp.negative

    def __getstate__(self):
        return {"x": self.x, "act": None}

    def __setstate__(self, state):
        for name, value in {**state, "cache": "made anew"}.items():
            object.__setattr__(self, name, value)


class PythonsGetter(pm.Module):
    x: Any
    cache: object

    def __getstate__(self):
        # Custom keys, which only the class understands.
        return {**super().__getstate__(), "cache": "made anew", "x.y": 1}

    def __setstate__(self, state):
        assert state.pop("x.y") == 1
        assert state.keys() == {"x", "cache"}
        self.__dict__ = state


class OnlySetter(pm.Module):
    x: Any
    cache: object

    def __setstate__(self, state):
        self.__dict__.update(state, cache="made anew")


class OnlyGetter(pm.Module):
    x: Any
    cache: Any

    def __getstate__(self):
        return {"cache": self.cache, **vars(self)}


@pytest.mark.parametrize("copied", COPIES)
def test_what_a_class_says_of_its_pickles_is_done(copied):
    """The result is a finished instance; computed leaves, ties and roles go along."""
    for cls in (Cached, PythonsGetter, OnlySetter):
        made = copied(cls(ramp(2), "old"))
        assert (type(made), made.cache) == (cls, "made anew")
        arrays = jax.tree.map(lambda x: 2 * x, pm.filter(made, pm.is_array))
        assert_same((made.x, jax.tree.leaves(arrays)), (ramp(2), [2 * ramp(2)]))
        with pytest.raises(pm.errors.FrozenError, match="x"):
            made.x = 1
    for each in (
        pm.tie(OnlyGetter(scaled(), ramp(2)), "cache", to="x.array"),
        pm.with_role(OnlyGetter(ramp(1), ramp(2)), "cache", "buffer"),
    ):
        again = copied(each)
        assert_same((again.x, again.cache), (each.x, each.cache))
        assert jax.tree.structure(again) == jax.tree.structure(each)


class Acts(pm.Module):
    x: Any
    act: Any = jax.nn.relu
    fixed: Any = pm.field(static=True, default=None)

    @staticmethod
    @jax.jit
    def named(x): ...


FUNCTIONS = (jax.nn.silu, jax.nn.relu, jnp.add, np.tanh, jax.nn.softmax, len, Acts.named)


@pytest.mark.parametrize("copied", COPIES)
def test_functions_of_a_model_are_pickled_by_name(copied):
    """Whatever kind of object a function is: Python pickles neither a jitted one nor a ufunc."""
    for function in FUNCTIONS:
        made = Acts(ramp(2), function, (1, Pair(2, function)))
        again = copied(made)
        assert again.act is function
        assert again.fixed == (1, Pair(2, function))
        assert jax.tree.structure(again) == jax.tree.structure(made)
        partial = copied(Acts(None, ft.partial(function, 3, key=4))).act
        assert (partial.func, partial.args, partial.keywords) == (function, (3,), {"key": 4})


def test_a_pickle_names_public_modules():
    """JAX may move its private modules in the next release; a local function has no name."""
    told = pickle.dumps(Acts(None, jax.nn.relu, (jnp.tanh, jnp.add)))
    assert b"_src" not in told
    assert b"jax.nn" in told
    with pytest.raises((pickle.PicklingError, AttributeError), match=r"Can't (pickle|get)"):
        pickle.dumps(Acts(None, jax.jit(lambda x: x)))


def test_a_module_that_is_registered_goes_by_value():
    """With cloudpickle alone: another process cannot import it."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        sent = [cloudpickle.dumps(fn) for fn in (Acts.named, Acts(None, Acts.named))]
        assert pickle.loads(pickle.dumps(Acts.named)) is Acts.named
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert all(b"CodeType" in each for each in sent)
    assert b"CodeType" not in cloudpickle.dumps(Acts.named)
