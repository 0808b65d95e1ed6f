"""Why a function was traced again: each kind of change is named, with its path."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import RetraceError
from tests.helpers.trees import Affine, Color, Holder, Pair, Registered, Static, affine, ramp


def first(x):
    return x


def second(x):
    return x


FIRST = f"first (test_retraces.py:{first.__code__.co_firstlineno})"
SECOND = f"second (test_retraces.py:{second.__code__.co_firstlineno})"


def fresh():
    return lambda x: x


FRESH = f"fresh.<locals>.<lambda> (test_retraces.py:{fresh.__code__.co_firstlineno + 1})"


class Silent:
    """A class without ==."""


class Vague(Silent):
    """A class whose == gives an array."""

    def __eq__(self, other):
        return np.array([True, False])

    __hash__ = object.__hash__


class Broken(Silent):
    """A class whose == raises."""

    def __eq__(self, other):
        raise RuntimeError

    __hash__ = object.__hash__

    def __repr__(self):
        return "Broken()"


class Configured(pm.Module):
    """A Module with any value for its configuration."""

    pair: Any = pm.field(static=True)


def reports(jitted, *calls):
    """The reports of these calls; each a dict of arguments by name, or one argument x."""
    found = []
    with pm.debug.explain_retraces(jitted, announce=found.append):
        for call in calls:
            jitted(**call) if type(call) is dict else jitted(call)
    return found


def changes(*calls):
    """The changes that the last report names."""

    def f(x=None, how=None, *, flag=None):
        return x if isinstance(x, jax.Array) else None

    *_, last = reports(pm.filter_jit(f), *calls)
    heading, *lines = last.splitlines()
    assert heading.startswith("f ")
    assert str(len(calls)) in heading
    return [line.removeprefix("  ") for line in lines]


X = ramp(2)
ARRAYS = {
    "shape": (X, ramp(3), "x: f32[2] -> f32[3]"),
    "dtype": (X, X.astype(jnp.int32), "x: f32[2] -> i32[2]"),
    "weak type": (
        jnp.float32(1.0),
        jnp.asarray(1.0),
        "x: f32[] -> f32[] (weak)",
    ),
    "deep inside": ([{"a": (X,)}], [{"a": (ramp(1),)}], "x[0]['a'][0]: f32[2] -> f32[1]"),
    "in a Module": (Holder([X]), Holder([ramp(1)]), "x.content[0]: f32[2] -> f32[1]"),
}

STRUCTURES = {
    "array or not": (1, X, "x: 1 -> f32[2]"),
    "None or not": (Holder(None), Holder(X), "x.content: None -> f32[2]"),
    "one item more": ([X], [X, X], "x[1]: nothing -> f32[2]"),
    "one item less": ([X, 1], [X], "x[1]: 1 -> nothing"),
    "new key": ([{"a": X}], [{"a": X, "b": X}], "x[0]['b']: nothing -> f32[2]"),
    "container": ([[X]], [(X,)], "x[0]: list of 1 -> tuple of 1"),
    "class": (affine(), Pair(X, X), "x: Affine -> Pair"),
    "Module or not": (affine(), None, "x: Affine -> None"),
    "division": (Holder(first), Holder(X), f"x.content: {FIRST} -> f32[2]"),
}

STATIC = {
    "number": ([1], [2], "x[0]: 1 -> 2"),
    "type of a number": ([1], [1.0], "x[0]: 1 -> 1.0"),
    "sign of zero": ([0.0], [-0.0], "x[0]: 0.0 -> -0.0"),
    "string": (["mean"], ["sum"], "x[0]: 'mean' -> 'sum'"),
    "enum": (Color.RED, Color.BLUE, "x: <Color.RED: 1> -> <Color.BLUE: 2>"),
    "function": (first, second, f"x: {FIRST} -> {SECOND}"),
    "class": (Affine, Holder, "x: the class Affine -> the class Holder"),
    "dtype": (jnp.dtype("int8"), jnp.dtype("int16"), "x: dtype('int8') -> dtype('int16')"),
    "configuration": (Static(X, 1), Static(X, 2), "x.size: 1 -> 2"),
    "function as configuration": (Holder(first), Holder(second), f"x.content: {FIRST} -> {SECOND}"),
    "tuple as configuration": (
        Static(X, (1, 2)),
        Static(X, (1, 2.0)),
        "x.size: (1, 2) -> (1, 2.0)",
    ),
    "in a tuple": ([(1, "a")], [(1, "b")], "x[0][1]: 'a' -> 'b'"),
    "partial's function": (pm.Partial(first), pm.Partial(second), f"x.func: {FIRST} -> {SECOND}"),
    "jitted function": (
        pm.filter_jit(first),
        pm.filter_jit(second),
        f"x (auxiliary data): {FIRST} -> {SECOND}",
    ),
    "registered node": (
        Registered(X, "a"),
        Registered(X, "b"),
        "x (auxiliary data): 'a' -> 'b'",
    ),
}

# Each is made anew for each call.
NEVER_EQUAL = {
    "lambda": (fresh, f"x: {FRESH} -> {FRESH}"),
    "functools.partial": (lambda: ft.partial(first, 1), "x: functools.partial"),
    "object": (object, "x: <object object> -> <object object>"),
    "class without ==": (Silent, f"x: <{__name__}.Silent object>"),
    "token without a name": (lambda: pm.StateIndex(jnp.zeros(2)), "x.marker: "),
    "== is an array": (Vague, f"x: <{__name__}.Vague object>"),
    "== raises": (Broken, "x: Broken() -> Broken()"),
    "lambda in a Module": (lambda: [Holder(fresh())], f"x[0].content: {FRESH}"),
    # As a transformation of optax is, in a static field.
    "lambda in a static tuple": (lambda: Configured((first, (1, fresh()))), "x.pair: "),
}
CHANGES = {
    **ARRAYS,
    **STRUCTURES,
    **STATIC,
    **{name: (make(), make(), text) for name, (make, text) in NEVER_EQUAL.items()},
}


@pytest.mark.parametrize(("old", "new", "text"), CHANGES.values(), ids=CHANGES.keys())
def test_each_kind_of_change_is_named(old, new, text):
    """The report has the path, the old value and the new value."""
    (line,) = changes({"x": old}, {"x": new})

    assert line.startswith(text)


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        (({"x": X}, {"x": X, "how": 1}), ["how: not given before, now 1"]),
        (({"x": X, "how": 1}, {"x": X}), ["how: 1 before, not given now"]),
        (({"x": X, "flag": 1}, {"x": X, "flag": 2}), ["flag: 1 -> 2"]),
        (({"x": X, "how": 1}, {"x": ramp(1), "how": 2}), ["x: f32[2] -> f32[1]", "how: 1 -> 2"]),
        (
            ({"x": {"a": X}}, {"x": {"b": X}}),
            ["x['a']: f32[2] -> nothing", "x['b']: nothing -> f32[2]"],
        ),
    ],
    ids=["given", "not given", "keyword", "two", "keys"],
)
def test_arguments_are_named(calls, text):
    """Present or absent arguments, by position or keyword; and several changes at once."""
    assert changes(*calls) == text


def test_a_change_outside_of_the_arguments():
    """If no argument changed, the report says where else to look."""

    def program(x):
        return x @ x

    jitted = pm.filter_jit(program)
    found = []
    with pm.debug.explain_retraces(jitted, announce=found.append):
        jitted(X)
        with jax.default_matmul_precision("float32"):
            jitted(X)

    (report,) = found
    assert report.startswith("program ")
    assert "no argument" in report


def test_methods():
    """A method is named as such, and its instance as self."""

    class Model(pm.Module):
        weight: jax.Array
        size: int = pm.field(static=True, default=1)

        @pm.filter_jit
        def apply(self, x):
            return self.weight * x

    model, other = Model(jnp.ones(())), Model(jnp.ones(()), 2)
    found = []
    with pm.debug.explain_retraces(model.apply, announce=found.append):
        model.apply(X)
        model.apply(ramp(3))
        other.apply(X)

    assert [text.splitlines()[1:] for text in found] == [
        ["  x: f32[2] -> f32[3]"],
        ["  self.size: 1 -> 2"],
    ]
    assert all(text.startswith("apply ") for text in found)


# ---- max_traces


def limited(max_traces):
    def f(x, how=None):
        return x

    return pm.filter_jit(f, max_traces=max_traces)


def test_one_trace_too_many_raises_each_time():
    """Earlier traces can be called as before."""
    f = limited(1)
    f(X)
    for _ in range(2):
        with pytest.raises(RetraceError, match=r"x: f32\[2\] -> f32\[3\]") as caught:
            f(ramp(3))
        assert isinstance(caught.value, RuntimeError)
        f(X)


def test_max_traces_lets_equal_calls_pass():
    """Calls that need no trace are not counted, nor is a function without the limit."""
    f, unlimited = limited(1), limited(None)
    for n in range(1, 4):
        f(X * n)
        unlimited(ramp(n))

    with pytest.raises(RetraceError, match=r"f32\[3\]"):
        f(ramp(3))


class Shift(pm.Module):
    """A Module to call, of any size."""

    by: jax.Array
    mode: str = pm.field(static=True)

    def __call__(self, x):
        return x + self.by.sum()


def test_max_traces_of_functions_that_are_pytrees():
    """Each Module has its own count, by structure and shapes: another one is another function."""
    for model in (Shift(ramp(2), "a"), Shift(ramp(2), "b"), Shift(ramp(3), "b")):
        call = pm.filter_jit(model, max_traces=1)
        call(ramp(2))
        call(ramp(2))
        with pytest.raises(RetraceError, match=r"x: f32\[2\] -> f32\[3\]"):
            call(ramp(3))
        same = pm.filter_jit(model.replace(by=2 * model.by), max_traces=1)
        same(ramp(2))
        with pytest.raises(RetraceError, match=r"x: f32\[2\] -> f32\[4\]"):
            same(ramp(4))
