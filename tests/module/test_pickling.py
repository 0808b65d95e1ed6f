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

SCRIPT = """
from __future__ import annotations
import abc, dataclasses, pickle, sys
from collections.abc import Callable
from typing import Any, Generic, TypeVar
import cloudpickle
import jax, jax.numpy as jnp
import pytreemod as pm
T = TypeVar("T")
class Scales:
    def scaled(self, x): return self.weight * x
class Base(Scales, pm.Module, Generic[T]):
    weight: jax.Array = pm.field(converter=jnp.asarray)
    @abc.abstractmethod
    def rule(self, x): ...
    def __call__(self, x): return self.rule(self.scaled(x))
class Written(Base[int]):
    size: int = pm.field(static=True, default=3)
    mean: Any = pm.buffer(default=1.0)
    parts: list = pm.field(default_factory=lambda: [2.0])
    activation: Callable = jnp.tanh
    F: Callable = jnp.sin
    def rule(self, x): return self.activation(x) + self.F(self.mean * self.size) + self.parts[0]
    @pm.filter_jit
    def jitted(self, x): return self(x)
    @jax.jit
    def plainly(self, x): return self(x)
    @property
    def again(self): return type(self)(self.weight)
class Own(pm.Module):
    inner: Any
    kind: str = pm.field(static=True)
    doubled: Any
    def __init__(self, inner):
        self.inner, self.kind = inner, "own"
        self.set_more()
    def set_more(self): self.doubled = self.inner
    def __check_init__(self):
        if not hasattr(self.inner, "shape") and type(self.inner) is not Written:
            raise ValueError("checked")
    def of_example(self, x): return EXAMPLE.inner(x)
class Sub(Own):
    extra: Any = None
    @property
    def doubled(self): return 2 * self.inner
    def set_more(self): self.extra = 3.0
class Posted(pm.Module):
    x: Any
    y: Any = pm.field(init=False)
    def __post_init__(self): self.y = 2 * self.x
class Layer(pm.nn.Linear): name: str = "layer"
class Plain(pm.Module):
    a: jax.Array
    n: int = pm.field(static=True, default=2)
    def early(self): return EARLY.a
EARLY = Plain(jnp.ones(2))  # Pickled with its class, before that has any fields.
EXAMPLE = Own(Written(jnp.ones(2)))
@pm.filter_jit
def step(model, x): return model(x), jax.tree.map(lambda leaf: 2 * leaf, model)
def results(found):
    x = jnp.ones(2)
    made = Written(x, size=2)
    raised = []
    for wrong in (lambda: Own("wrong"), lambda: Base(x), lambda: setattr(made, "weight", x)):
        try:
            wrong()
        except Exception as error:
            raised.append(type(error).__name__)
    grads = pm.filter_grad(lambda m: m(x).sum())(made)
    values = [found["written"](x), found["jitted"](x), found["method"](x), made.plainly(x),
              made.again(x), EXAMPLE.of_example(x), EXAMPLE.doubled(x), *step(made, x),
              made.jitted(x), Posted(x).y, Sub(x).extra, Sub(x).doubled, grads.weight,
              made.scaled(x), found["layer"](x), made.replace(weight=[3.0]).weight]
    texts = [repr(made), repr(found["sub"]), str(jax.tree.structure(made).num_leaves),
             found["layer"].name,
             str([(f.name, f.init) for f in dataclasses.fields(Sub)]), str(raised),
             repr(Posted(1.0)),
             str(grads.mean), type(made.scaled).__name__, str(hash(made.scaled) is not None)]
    values += jax.tree.leaves([EARLY, Plain(x), jax.tree.map(lambda leaf: 3 * leaf, EARLY)])
    values += [Plain(x).early()]
    same = [jax.tree.structure(EARLY) == jax.tree.structure(Plain(x)),
            found["written"] == Written(x), type(found["written"]) is Written,
            jax.tree.structure(found["written"]) == jax.tree.structure(Written(x)),
            jax.tree.structure(EXAMPLE) == jax.tree.structure(Own(Written(x))),
            jax.tree.structure(found["sub"]) == jax.tree.structure(Sub(x))]
    return [jax.tree.map(lambda leaf: float(jnp.sum(leaf)), jax.tree.leaves(values)), texts, same]
if __name__ == "__main__":
    written = Written(jnp.ones(2))
    found = {"written": written, "jitted": written.jitted, "method": Own(written).of_example,
             "layer": Layer(2, 2, key=jax.random.key(0)), "sub": Sub(jnp.ones(2)),
             "results": results}
    with open(sys.argv[1], "wb") as file:
        file.write(cloudpickle.dumps(found))
    import json
    print(json.dumps(results(found)))
"""

WORKER = """
import json, pickle, sys
with open(sys.argv[1], "rb") as file:
    found = pickle.loads(file.read())
print(json.dumps(found["results"](found)))
"""


def run(source, path):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()}
    command = [sys.executable, str(source), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_classes_of_a_script_work_in_another_process(tmp_path):
    """Every kind of field, base, method and constructor; the worker has not the script."""
    for name, source in (("script", SCRIPT), ("worker", WORKER)):
        (tmp_path / f"{name}.py").write_text(source)
    there, here = (run(tmp_path / f"{name}.py", tmp_path / "out") for name in ("script", "worker"))
    assert here == there
    assert all(there[2])
    assert "ValueError" in there[1][5]


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
