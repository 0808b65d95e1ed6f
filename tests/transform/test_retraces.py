"""Why a function was traced again: each kind of change is named, with its path."""

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import CheckError
from tests.helpers.meshes import EXPLICIT, on
from tests.helpers.trees import Holder, Pair, Registered, Static, affine, ramp


def fresh():
    return lambda x: x


FRESH = f"{fresh().__qualname__} (test_retraces.py:{fresh().__code__.co_firstlineno})"


class Awkward:
    """A class whose == raises."""

    def __eq__(self, other):
        raise ZeroDivisionError

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


X, Y = ramp(2), ramp(1)
SHARDINGS = on("data", mesh=EXPLICIT), on(mesh=EXPLICIT)
CHANGES = {
    "weak type": (jnp.float32(1.0), jnp.asarray(1.0), "x: f32[] -> f32[] (weak)"),
    # Of explicit axes, the sharding is part of an array's type.
    "sharding": (*(jax.device_put(ramp(8), s) for s in SHARDINGS), "x: f32[8@data] -> f32[8]"),
    "another mesh": (ramp(8), jax.device_put(ramp(8), on("data")), "'data': 4"),
    "in a Module": ([Holder([X])], [Holder([Y])], "x[0].content[0]: f32[2] -> f32[1]"),
    "array or not": (1, X, "x: 1 -> f32[2]"),
    "new key": ([{"a": X}], [{"a": X, "b": X}], "x[0]['b']: nothing -> f32[2]"),
    "container": ([[X]], [(X,)], "x[0]: list of 1 -> tuple of 1"),
    "class": (affine(), Pair(X, X), "x: Affine -> Pair"),
    "in configuration": (Static(X, (1, 2)), Static(X, (1, 2.0)), "x.size: (1, 2) -> (1, 2.0)"),
    "node": (Registered(X, "a"), Registered(X, "b"), "x: Registered -> Registered, with"),
    "of what": (*(jax.tree_util.Partial(f, X) for f in (max, min)), "x: Partial -> Partial, with"),
    # Made anew for each call, and never equal.
    "lambda": (fresh(), fresh(), f"x: {FRESH} -> {FRESH} (an equal function, created again"),
    "== raises": (Awkward(), Awkward(), f"x: <{__name__}.Awkward object"),
    "token": (pm.StateIndex(X), pm.StateIndex(X), "x.marker: "),
    # As a transformation of optax is, in a static field.
    "lambda in a static tuple": (Static(X, (max, fresh())), Static(X, (max, fresh())), "x.size"),
}


@pytest.mark.parametrize(("old", "new", "text"), CHANGES.values(), ids=CHANGES)
def test_each_kind_of_change_is_named(old, new, text):
    """The report has the path, the old value and the new value."""
    (line,) = changes({"x": old}, {"x": new})

    assert text in line


def test_arguments_are_named():
    """Present or absent, by keyword, several at once; compared with the last trace."""
    calls = [{"x": X}, {"x": X, "how": 1, "flag": 1}, {"x": Y, "flag": 2}]

    assert changes(*calls[:2]) == ["how: not given before", "flag: not given before"]
    assert changes(*calls) == ["how: not given now", "x: f32[2] -> f32[1]", "flag: 1 -> 2"]


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
    by: jax.Array
    mode: str = pm.field(static=True)

    def __call__(self, x):
        return x + self.by.sum()

    @pm.filter_jit
    def apply(self, x):
        return self(x)


def test_one_trace_too_many_raises_each_time():
    """With the reason; earlier traces can be called as before. Each Module has its own count."""
    own = pm.filter_jit(lambda x: x, max_traces=1)
    models = [Shift(X, "a"), Shift(X, "b"), Shift(ramp(3), "b"), Shift(2 * X, "a")]
    for f in (own, *(pm.filter_jit(model, max_traces=1) for model in models[:-1])):
        f(X)
        for _ in range(2):
            with pytest.raises(CheckError, match=r"x: f32\[2\] -> f32\[3\]"):
                f(ramp(3))
            f(2 * X)
    pm.filter_jit(models[-1], max_traces=1)(X)
