"""Instances that are pickled and copied, and classes of scripts, which are pickled by value."""

import abc
import base64
import copy
import copyreg
import dataclasses
import json
import os
import pickle
import re
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import FieldError, FieldWarning
from pytreemod.module.pickling import fill
from pytreemod.module.schema import Schema
from tests.helpers.comparing import assert_same
from tests.helpers.computing import scaled
from tests.helpers.copying import COPIES
from tests.helpers.trees import ramp

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
    def scaled(self, x):
        return self.weight * x

class Base(Scales, pm.Module, Generic[T]):
    weight: jax.Array = pm.field(converter=jnp.asarray)

    @abc.abstractmethod
    def rule(self, x):
        ...

    def __call__(self, x):
        return self.rule(self.scaled(x))

class Written(Base[int]):
    size: int = pm.field(static=True, default=3)
    mean: Any = pm.buffer(default=1.0)
    parts: list = pm.field(default_factory=lambda: [2.0])
    activation: Callable = jnp.tanh
    F: Callable = jnp.sin

    def rule(self, x):
        return self.activation(x) + self.F(self.mean * self.size) + self.parts[0]

    @pm.filter_jit
    def jitted(self, x):
        return self(x)

    @jax.jit
    def plainly(self, x):
        return self(x)

    @property
    def again(self):
        return type(self)(self.weight)

class Own(pm.Module):
    inner: Any
    kind: str = pm.field(static=True)
    doubled: Any

    def __init__(self, inner):
        self.inner, self.kind = inner, "own"
        self.set_more()

    def set_more(self):
        self.doubled = self.inner

    def __check_init__(self):
        if not hasattr(self.inner, "shape") and type(self.inner) is not Written:
            raise ValueError("checked")

    def of_example(self, x):
        return EXAMPLE.inner(x)

class Sub(Own):
    extra: Any = None

    @property
    def doubled(self):
        return 2 * self.inner

    def set_more(self):
        self.extra = 3.0

class Posted(pm.Module):
    x: Any
    y: Any = pm.field(init=False)

    def __post_init__(self):
        self.y = 2 * self.x

class Layer(pm.nn.Linear):
    name: str = "layer"

class Plain(pm.Module):
    a: jax.Array
    n: int = pm.field(static=True, default=2)

    def early(self):
        return EARLY.a

EARLY = Plain(jnp.ones(2))  # Pickled with its class, before that has any fields.
EXAMPLE = Own(Written(jnp.ones(2)))

@pm.filter_jit
def step(model, x):
    return model(x), jax.tree.map(lambda leaf: 2 * leaf, model)

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
    """The output of a program in a separate process, read as JSON."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, str(source), str(path)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_classes_of_a_script_work_in_another_process(tmp_path):
    """Every kind of field, base, method and constructor; the worker has not the script."""
    for name, source in (("script", SCRIPT), ("worker", WORKER)):
        (tmp_path / f"{name}.py").write_text(source)
    pickled = tmp_path / "pickled"

    there = run(tmp_path / "script.py", pickled)
    here = run(tmp_path / "worker.py", pickled)

    assert here == there
    assert all(there[2])
    assert "ValueError" in there[1][5]


def local():
    """A local class, with values that only its function can name."""
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
    structure, made = jax.tree.structure(before), cls.__init__

    after = pickle.loads(cloudpickle.dumps(before))

    assert type(after) is cls
    assert cls.__init__ is made
    assert jax.tree.structure(after) == structure == jax.tree.structure(cls(ramp(2)))
    assert_same(after(2.0), before(2.0))
    assert_same(pickle.loads(cloudpickle.dumps(cls))(ramp(2)).n, 2)
    assert not hasattr(cls, "x")
    cls.x = 1.0
    pickle.loads(cloudpickle.dumps(cls))
    assert cls.x == 1.0
    assert_same(before.x, ramp(2))


def test_what_is_missing_is_recognized_after_it_was_copied():
    """A class that is pickled by value brings a copy of the mark, which is known by identity."""

    class Local(pm.Module):
        x: object
        n: int = 3
        made: object = pm.field(default_factory=list)

    schema, missing = Local.__record__, dataclasses.MISSING
    make, (fields, *rest) = copyreg.dispatch_table[Schema](schema)
    copied = {name: copy.copy(field) for name, field in fields.items()}
    for field in copied.values():
        for option in ("default", "default_factory"):
            if getattr(field, option) is missing:
                setattr(field, option, type(missing)())
    fill(schema, make(copied, *rest))

    assert [f.default for f in schema.fields.values()] == [missing, 3, missing]
    assert [f.default_factory for f in schema.fields.values()] == [missing, missing, list]


def elsewhere(value):
    """Pickle a value, and load it as a process that does not have its classes."""
    # cloudpickle finds the classes of this process by the ids in the pickle.
    pickled = cloudpickle.dumps(value)
    return pickle.loads(re.sub(rb"[0-9a-f]{32}", lambda found: found[0][::-1], pickled))


def classes_of_every_kind():
    """Local classes, by name: with defaults, a base, an own `__init__`, and an early instance."""

    class Base(pm.Module):
        x: object = pm.field(converter=jnp.asarray)
        fixed: int = pm.field(static=True, default=3)

    class Defaults(Base):
        act: object = jnp.tanh
        # cloudpickle sorts attributes, so that these arrive before the fields.
        F: object = jnp.sin
        G: object = lambda x: 3 * x
        made: object = pm.field(default_factory=list)
        later: object = pm.field(init=False)

        def __post_init__(self):
            self.later = 2 * self.x

        def early(self):
            return EARLY

    class OfTheLibrary(pm.nn.Linear):
        name: str = "layer"

    class Redeclared(Base):
        x: object = pm.field(kw_only=True)

    class Overriding(Base):
        @property
        def fixed(self):
            return 4

    class Own(pm.Module):
        x: object

        def __init__(self, x):
            self.x = x

    class ReadsItself(pm.Module):
        x: object

        def __getattribute__(self, name):
            return super().__getattribute__(name)

    class Abstract(pm.Module):
        x: object

        @abc.abstractmethod
        def rule(self): ...

    EARLY = Defaults(ramp(2))
    return dict(locals())


def facts(cls):
    """The facts about a class that its instances depend on."""
    schema = cls.__record__
    options = ("name", "default", "default_factory", "kw_only", "init")
    found = [getattr(field, option) for field in schema.fields.values() for option in options]
    # A lambda is copied with its class, and then has the same code.
    values = [getattr(value, "__code__", value) for value in found]
    missing = [value is dataclasses.MISSING for value in found]
    named = ("static", "custom_init", "refusal", "can_wait", "shown")
    is_default = [getattr(cls, n) is f.default for n, f in schema.fields.items() if n in "FG"]
    return values, missing, [getattr(schema, name) for name in named], is_default


def test_classes_have_the_same_schema_in_another_process():
    """Fields and their defaults, those of bases, and how instances are made."""
    here = classes_of_every_kind()
    early = here.pop("EARLY")
    there, arrived = elsewhere((here, early))

    for name, cls in here.items():
        assert there[name] is not cls
        assert facts(there[name]) == facts(cls), name
    assert type(arrived) is there["Defaults"]
    assert repr(arrived) == repr(early)
    assert_same(jax.tree.leaves(arrived), jax.tree.leaves(early))
    assert jax.tree.structure(arrived) == jax.tree.structure(there["Defaults"](ramp(2)))


CLASSES = json.loads((Path(__file__).parent / "classes_of_0_1.json").read_text())
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.mark.skipif(VERSION not in CLASSES, reason="code is read by one version of Python only")
def test_classes_that_version_0_1_pickled_by_value_are_read():
    """An instance of a notebook's class: `slope * x + width`, with `width: int = 3`."""
    line = pickle.loads(zlib.decompress(base64.b85decode(CLASSES[VERSION])))

    assert_same(line(4.0), jnp.asarray(2.0) * 4.0 + 3)
    assert repr(type(line)(1.0)) == "Line(slope=1.0)"
    assert_same(pickle.loads(cloudpickle.dumps(line))(4.0), line(4.0))


@pytest.mark.parametrize("change", [lambda m: m.__call__, lambda m: pm.Partial(m, 2.0)])
def test_what_holds_an_instance_goes_along(change):
    """Bound methods and Partials."""
    made = change(local()(ramp(2)))
    copied = pickle.loads(cloudpickle.dumps(made))

    assert_same(jax.tree.leaves(copied), jax.tree.leaves(made))
    assert jnp.array_equal(copied(*([2.0] if type(made) is pm.BoundMethod else [])), 6.0 * ramp(2))


class Cached(pm.Module):
    """Defines its pickled state, and how to restore it."""

    x: jax.Array
    cache: object
    act: object = jnp.negative

    def __getstate__(self):
        return {"x": self.x, "act": None}

    def __setstate__(self, state):
        for name, value in state.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "cache", "made anew")


class OnlyGetter(pm.Module):
    """Leaves something out."""

    x: jax.Array
    cache: object

    def __getstate__(self):
        return {"x": self.x, "cache": None}


class PythonsGetter(pm.Module):
    """Changes the default state of Python, which is the instance's dict."""

    x: jax.Array
    cache: object

    def __getstate__(self):
        state = super().__getstate__()
        assert state.keys() >= {"x", "cache"}
        # Custom keys, which only the class understands.
        return {**state, "cache": None, "x.y": 1}

    def __setstate__(self, state):
        assert state.pop("x.y") == 1
        assert state.keys() == {"x", "cache"}
        self.__dict__ = state


class OnlySetter(pm.Module):
    """Adds something."""

    x: jax.Array
    cache: object

    def __setstate__(self, state):
        self.__dict__.update(state, cache="made anew")


class Reduced(pm.Module):
    """Is made by its class."""

    x: jax.Array
    cache: object = None

    def __reduce__(self):
        return Reduced, (self.x, "made anew")


class ReducedByVersion(pm.Module):
    """The same, by the other name."""

    x: jax.Array
    cache: object = None

    def __reduce_ex__(self, protocol):
        return ReducedByVersion, (self.x, "made anew")


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
@pytest.mark.parametrize(
    "cls", [Cached, OnlyGetter, PythonsGetter, OnlySetter, Reduced, ReducedByVersion]
)
def test_what_a_class_says_of_its_pickles_is_done(cls, copied):
    """By pickle, copy and deepcopy; the result is a finished instance."""
    made = copied(cls(ramp(2), "old"))

    assert type(made) is cls
    assert made.cache == (None if cls in (OnlyGetter, PythonsGetter) else "made anew")
    assert_same(made.x, ramp(2))
    assert_same(jax.tree.leaves(jax.tree.map(lambda x: 2 * x, made)), [2 * ramp(2)])
    with pytest.raises(pm.errors.FrozenError, match="no assignment"):
        made.x = 1


def version(fields, **methods):
    """A class of one version of a program: it has the name of all others."""
    annotations = dict.fromkeys(fields, Any)
    defaults = {name: value for name, value in fields.items() if value is not ...}
    names = {"__module__": __name__, "__qualname__": "Versioned", "__annotations__": annotations}
    cls = type(pm.Module)("Versioned", (pm.Module,), {**names, **defaults, **methods})
    globals()["Versioned"] = cls
    return cls


@pytest.fixture
def pickled():
    """An instance of a first version, pickled."""
    yield pickle.dumps(version({"a": ..., "n": pm.field(static=True)})(ramp(2), 1))
    del globals()["Versioned"]


def test_new_fields_get_what_a_new_instance_has_there(pickled):
    """Data in the tree, configuration in the structure, converted and constrained."""
    cls = version(
        {
            "n": pm.field(static=True),
            "a": ...,
            "default": 3.0,
            "made": pm.field(default_factory=lambda: [1.0]),
            "converted": pm.field(default=2, converter=jnp.asarray),
            "bounded": pm.field(default=1.0, constraint=pm.constraints.positive),
            "activation": jnp.tanh,
            "mode": pm.field(static=True, default=("x",)),
        }
    )
    made, expected = pickle.loads(pickled), cls(1, ramp(2))

    assert type(made) is type(expected)
    assert_same(jax.tree.leaves(made), jax.tree.leaves(expected))
    assert jax.tree.structure(made) == jax.tree.structure(expected)
    assert_same(made.bounded, expected.bounded)
    again = pickle.loads(pickle.dumps(made))
    assert jax.tree.structure(again) == jax.tree.structure(made)


def test_a_field_that_has_become_static_is_configuration(pickled):
    """As the class says."""
    cls = version({"a": pm.field(static=True), "n": pm.field(static=True)})

    with pytest.warns(FieldWarning, match="Versioned"):
        assert jax.tree.structure(pickle.loads(pickled)) == jax.tree.structure(cls(ramp(2), 1))


def test_a_field_that_is_no_longer_static_is_data(pickled):
    """As the class says; a string there is configuration, as in a new instance."""
    cls = version({"a": ..., "n": ...})

    assert jax.tree.structure(pickle.loads(pickled)) == jax.tree.structure(cls(ramp(2), 1))
    version({"a": ..., "n": pm.field(static=True)})
    named = pickle.dumps(globals()["Versioned"](ramp(2), "name"))
    cls = version({"a": ..., "n": ...})
    assert jax.tree.structure(pickle.loads(named)) == jax.tree.structure(cls(ramp(2), "name"))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (["a", "n", "new"], r"(?s)no value for new\.\n.*state\.setdefault\(\"new\", \.\.\.\)"),
        (["n"], r"(?s)got a, which the class does not have.*state\.pop\(\"a\", None\)"),
        (
            ["b", "n"],
            r"(?s)no value for b; and a, .*setdefault\(\"b\", state\.pop\(\"a\", None\)\)",
        ),
    ],
)
def test_what_the_class_has_no_more_or_cannot_know_is_refused(pickled, fields, text):
    """No field is lost, and none is made up."""
    version(dict.fromkeys(fields, ...))

    with pytest.raises(FieldError, match=text):
        pickle.loads(pickled)


def test_an_own_setstate_decides_what_becomes_of_a_version(pickled):
    """Of a pickle from before the class had it, too; fields that it leaves out have defaults."""

    def set_state(self, state):
        state.setdefault("b", state.pop("a", None))
        self.__dict__.update(state)

    cls = version({"b": ..., "n": ..., "new": 5.0}, __setstate__=set_state)
    made = pickle.loads(pickled)

    for found in (made, pickle.loads(pickle.dumps(made))):
        assert_same(jax.tree.leaves(found), jax.tree.leaves(cls(ramp(2), 1)))


class Stating(pm.Module):
    """Its state is what it prints."""

    weight: Any
    other: Any

    def __getstate__(self):
        return {"other": self.other, **vars(self)}


def test_an_own_state_has_computed_leaves_and_ties():
    """They are read as before."""
    made = pm.tie(Stating(scaled(), ramp(2)), "other", to="weight.array")
    copied = pickle.loads(pickle.dumps(made))

    assert_same(copied.weight, made.weight)
    assert_same(copied.other, made.other)
    assert jax.tree.structure(copied) == jax.tree.structure(made)
