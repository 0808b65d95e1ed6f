"""Instances that are pickled and copied, and classes of scripts, which are pickled by value."""

import copy
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
from tests.helpers.trees import ramp

COPIES = {
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "cloudpickle": lambda m: pickle.loads(cloudpickle.dumps(m)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "deepcopy in a list": lambda m: copy.deepcopy([m, m])[1],
}

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
    assert "ValueError" in outputs[0][1][5]


def local():
    scale = 3.0

    class Local(pm.Module):
        x: jax.Array
        n: int = pm.field(static=True, default=2)

        def __call__(self, y):
            return scale * self.x * y

    return Local


def test_in_the_same_process_it_is_the_same_class():
    """Loading leaves the class unchanged: instances from before and after have one structure."""
    cls = local()
    before = cls(ramp(2))
    structure = jax.tree.structure(before)
    after = pickle.loads(cloudpickle.dumps(before))
    assert type(after) is cls
    assert jax.tree.structure(after) == structure == jax.tree.structure(cls(ramp(2)))
    assert_same(after(2.0), before(2.0))
    assert_same(pickle.loads(cloudpickle.dumps(cls))(ramp(2)).n, 2)
    assert not hasattr(cls, "x")
    cls.x = 1.0
    pickle.loads(cloudpickle.dumps(cls))
    assert cls.x == 1.0
    assert_same(before.x, ramp(2))
    # What holds an instance goes along.
    for made, args in ((before.__call__, (2.0,)), (pm.Partial(before, 2.0), ())):
        copied = pickle.loads(cloudpickle.dumps(made))
        assert_same(jax.tree.leaves(copied), jax.tree.leaves(made))
        assert jnp.array_equal(copied(*args), 6.0 * ramp(2))


class Cached(pm.Module):
    x: jax.Array
    cache: object
    act: object = jnp.negative

    def __getstate__(self):
        return {"x": self.x, "act": None}

    def __setstate__(self, state):
        for name, value in state.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "cache", "made anew")


class PythonsGetter(pm.Module):
    x: jax.Array
    cache: object

    def __getstate__(self):
        state = super().__getstate__()
        assert state.keys() >= {"x", "cache"}
        # Custom keys, which only the class understands.
        return {**state, "cache": "made anew", "x.y": 1}

    def __setstate__(self, state):
        assert state.pop("x.y") == 1
        assert state.keys() == {"x", "cache"}
        self.__dict__ = state


class OnlySetter(pm.Module):
    x: jax.Array
    cache: object

    def __setstate__(self, state):
        self.__dict__.update(state, cache="made anew")


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
def test_what_a_class_says_of_its_pickles_is_done(copied):
    """By pickle, copy and deepcopy; the result is a finished instance."""
    for cls in (Cached, PythonsGetter, OnlySetter):
        made = copied(cls(ramp(2), "old"))
        assert (type(made), made.cache) == (cls, "made anew")
        assert_same(made.x, ramp(2))
        assert_same(
            jax.tree.leaves(jax.tree.map(lambda x: 2 * x, pm.filter(made, pm.is_array))),
            [2 * ramp(2)],
        )
        with pytest.raises(pm.errors.FrozenError, match="x"):
            made.x = 1


class Stating(pm.Module):
    weight: Any
    other: Any

    def __getstate__(self):
        return {"other": self.other, **vars(self)}


def test_an_own_state_has_computed_leaves_ties_and_roles():
    """They are read as before."""
    made = pm.tie(Stating(scaled(), ramp(2)), "other", to="weight.array")
    frozen = pm.with_role(Stating(ramp(1), ramp(2)), "other", "buffer")
    for each in (made, frozen):
        copied = pickle.loads(pickle.dumps(each))
        assert_same((copied.weight, copied.other), (each.weight, each.other))
        assert jax.tree.structure(copied) == jax.tree.structure(each)


class Acts(pm.Module):
    x: Any
    act: Any = jax.nn.relu
    fixed: Any = pm.field(static=True, default=None)

    @staticmethod
    @jax.jit
    def named(x): ...


FUNCTIONS = (jax.nn.silu, jax.nn.relu, jnp.add, np.tanh, jax.nn.softmax, len, Acts.named)


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
def test_functions_of_a_model_are_pickled_by_name(copied):
    """Whatever kind of object a function is: Python pickles neither a jitted one nor a ufunc."""
    for function in FUNCTIONS:
        made = Acts(ramp(2), function, (1, function))
        again = copied(made)
        assert again.act is function
        assert again.fixed == (1, function)
        assert jax.tree.structure(again) == jax.tree.structure(made)
    mlp = pm.nn.MLP(2, 2, 2, 1, key=jax.random.key(0))
    model = pm.nn.Sequential([mlp, pm.nn.Lambda(jax.nn.gelu), pm.nn.MaxPool1d(2)])
    assert_same(copied(model), model)


def test_a_pickle_names_public_modules():
    """JAX may move its private modules in the next release; a local function has no name."""
    told = pickle.dumps(Acts(None, jax.nn.relu, (jnp.tanh, jnp.add)))
    assert b"_src" not in told
    assert b"jax.nn" in told
    with pytest.raises((pickle.PicklingError, AttributeError), match=r"Can't (pickle|get)"):
        pickle.dumps(Acts(None, jax.jit(lambda x: x)))
