"""Why a function was traced again: each kind of change is named, with its path."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import RetraceError
from tests.helpers.meshes import EXPLICIT, on
from tests.helpers.trees import Holder, Pair, Registered, Static, affine, ramp


def first(x):
    return x


def second(x):
    return x


def fresh():
    return lambda x: x


def line(fn):
    """A function as reports name it."""
    return f"{fn.__qualname__} (test_retraces.py:{fn.__code__.co_firstlineno})"


FIRST, SECOND, FRESH = line(first), line(second), line(fresh())


class Awkward:
    """A class whose == gives an array, or raises."""

    def __init__(self, answer):
        self.answer = answer

    def __eq__(self, other):
        return self.answer()

    __hash__ = object.__hash__


def changes(*calls):
    """The changes that the last report of these calls names, each a dict of arguments."""

    def f(x=None, how=None, *, flag=None):
        return x if isinstance(x, jax.Array) else None

    jitted, found = pm.filter_jit(f), []
    with pm.debug.explain_retraces(jitted, announce=found.append):
        for call in calls:
            jitted(**call)
    heading, *lines = found[-1].splitlines()
    assert heading == f"f was traced again (trace {len(calls)}), because of"
    return [line.removeprefix("  ") for line in lines]


X = ramp(2)
SHARDINGS = on("data", mesh=EXPLICIT), on(mesh=EXPLICIT)
AGAIN = "created again"
AWKWARD = f"x: <{__name__}.Awkward object>"


def two(make):
    """Two values that are made alike."""
    return make(), make()


CHANGES = {
    "shape": (X, ramp(3), "x: f32[2] -> f32[3]"),
    "dtype": (X, X.astype(jnp.int32), "x: f32[2] -> i32[2]"),
    "weak type": (jnp.float32(1.0), jnp.asarray(1.0), "x: f32[] -> f32[] (weak)"),
    # Of explicit axes, the sharding is part of an array's type.
    "sharding": (*(jax.device_put(ramp(8), s) for s in SHARDINGS), "x: f32[8@data] -> f32[8]"),
    "deep inside": ([{"a": (X,)}], [{"a": (ramp(1),)}], "x[0]['a'][0]: f32[2] -> f32[1]"),
    "in a Module": (Holder([X]), Holder([ramp(1)]), "x.content[0]: f32[2] -> f32[1]"),
    "array or not": (1, X, "x: 1 -> f32[2]"),
    "one item more": ([X], [X, X], "x[1]: nothing -> f32[2]"),
    "new key": ([{"a": X}], [{"a": X, "b": X}], "x[0]['b']: nothing -> f32[2]"),
    "container": ([[X]], [(X,)], "x[0]: list of 1 -> tuple of 1"),
    "class": (affine(), Pair(X, X), "x: Affine -> Pair"),
    "division": (Holder(first), Holder(X), f"x.content: {FIRST} -> f32[2]"),
    "number": ([1], [2], "x[0]: 1 -> 2"),
    "type of a number": ([1], [1.0], "x[0]: 1 -> 1.0"),
    "sign of zero": ([0.0], [-0.0], "x[0]: 0.0 -> -0.0"),
    "function": (first, second, f"x: {FIRST} -> {SECOND}"),
    "in configuration": (Static(X, (1, 2)), Static(X, (1, 2.0)), "x.size: (1, 2) -> (1, 2.0)"),
    "partial's function": (pm.Partial(first), pm.Partial(second), f"x.func: {FIRST} -> {SECOND}"),
    "node": (Registered(X, "a"), Registered(X, "b"), "x (auxiliary data): 'a' -> 'b'"),
    # Made anew for each call, and never equal.
    "lambda": (fresh(), fresh(), f"x: {FRESH} -> {FRESH} (an equal function, {AGAIN}"),
    "object": (object(), object(), f"x: <object object> -> <object object> ({AGAIN}"),
    "== is an array": (*two(lambda: Awkward(lambda: np.ones(2, bool))), AWKWARD),
    "== raises": (*two(lambda: Awkward(lambda: 1 / 0)), AWKWARD),
    "token": (pm.StateIndex(X), pm.StateIndex(X), "x.marker: "),
    # As a transformation of optax is, in a static field.
    "lambda in a static tuple": (*two(lambda: Static(X, (first, fresh()))), "x.size"),
}


@pytest.mark.parametrize(("old", "new", "text"), CHANGES.values(), ids=CHANGES)
def test_each_kind_of_change_is_named(old, new, text):
    """The report has the path, the old value and the new value."""
    (line,) = changes({"x": old}, {"x": new})

    assert line.startswith(text)


Y = ramp(1)
CALLS = {
    "given": ([{"x": X}, {"x": X, "how": 1}], ["how: not given before"]),
    "not given": ([{"x": X, "how": 1}, {"x": X}], ["how: not given now"]),
    "keyword": ([{"x": X, "flag": 1}, {"x": X, "flag": 2}], ["flag: 1 -> 2"]),
    "two": ([{"x": X, "how": 1}, {"x": Y, "how": 2}], ["x: f32[2] -> f32[1]", "how: 1 -> 2"]),
    "last": ([{"x": X}, {"x": X, "how": 1}, {"x": X, "how": 2}], ["how: 1 -> 2"]),
}


@pytest.mark.parametrize(("calls", "text"), CALLS.values(), ids=CALLS)
def test_arguments_are_named(calls, text):
    """Present or absent, by keyword, several at once; compared with the last trace."""
    assert changes(*calls) == text


def test_another_mesh_is_named():
    """An array that moves onto a mesh has another type, also if its axes are not explicit."""
    (line,) = changes({"x": ramp(8)}, {"x": jax.device_put(ramp(8), on("data"))})

    assert line.startswith("x: f32[8] ")
    assert "'data': 4" in line


def test_a_change_outside_of_the_arguments():
    """If no argument changed, the report says where else to look."""
    jitted, found = pm.filter_jit(lambda x: x @ x), []
    with pm.debug.explain_retraces(jitted, announce=found.append):
        jitted(X)
        with jax.default_matmul_precision("float32"):
            jitted(X)

    (report,) = found
    assert "no argument" in report


def test_methods():
    """A method is named as such, and its instance as self."""
    found = []
    with pm.debug.explain_retraces(Shift.apply, announce=found.append):
        Shift(X, "a").apply(X)
        Shift(X, "b").apply(X)

    assert found == ["apply was traced again (trace 2), because of\n  self.mode: 'a' -> 'b'"]


class Shift(pm.Module):
    """A Module to call, of any size."""

    by: jax.Array
    mode: str = pm.field(static=True)

    def __call__(self, x):
        return x + self.by.sum()

    @pm.filter_jit
    def apply(self, x):
        return self(x)


def test_one_trace_too_many_raises_each_time():
    """With the reason. Earlier traces can be called as before; equal calls need none.

    Each Module has its own count, by structure and shapes: another one is another function.
    """
    own = pm.filter_jit(lambda x: x, max_traces=1)
    models = [Shift(X, "a"), Shift(X, "b"), Shift(ramp(3), "b"), Shift(2 * X, "a")]
    for f in (own, *(pm.filter_jit(model, max_traces=1) for model in models[:-1])):
        f(X)
        for _ in range(2):
            with pytest.raises(RetraceError, match=r"x: f32\[2\] -> f32\[3\]"):
                f(ramp(3))
            f(2 * X)
    pm.filter_jit(models[-1], max_traces=1)(X)
