"""debug.assert_max_traces and get_num_traces: counting under any transform."""

import re

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import RetraceError
from tests.goldens import refusals
from tests.helpers.trees import affine, ramp

HINT = (
    "\n  keep these values the same from call to call, or pass them as arrays:"
    "\n      jnp.asarray(number)"
)


def counted(max_traces=None):
    """A new function that counts."""

    @pm.debug.assert_max_traces(max_traces=max_traces)
    def f(x, how="a"):
        return x

    return f


TRANSFORMS = {
    "filter_jit": pm.filter_jit,
    "jax.jit": lambda f: jax.jit(f, static_argnames="how"),
    "jit of vmap": lambda f: pm.filter_jit(pm.filter_vmap(f)),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_traces_are_counted_under_every_jit(transform):
    """Each call of the function itself counts: under jit, each trace."""
    f = counted()
    jitted = transform(f)
    for n in (2, 2, 3, 2):
        jitted(ramp(n))

    assert pm.debug.get_num_traces(f) == 2


def test_without_a_transform_calls_are_counted():
    """Nothing is cached, so every call counts."""
    f = counted()
    for _ in range(3):
        f(ramp(2))

    assert pm.debug.get_num_traces(f) == 3


WRAPPED = {
    "itself": lambda f: f,
    "filter_jit": pm.filter_jit,
    "jax.jit": jax.jit,
    "filter_vmap": pm.filter_vmap,
    "filter_grad": pm.filter_grad,
    "several": lambda f: pm.filter_jit(pm.filter_vmap(f)),
    "Partial": lambda f: pm.Partial(f, how="b"),
    "jitted Partial": lambda f: pm.filter_jit(pm.Partial(f, how="b")),
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED.keys())
def test_the_count_is_found_below_transforms(wrap):
    """get_num_traces takes the function, or the wrapped one."""
    wrapped = wrap(counted())
    assert pm.debug.get_num_traces(wrapped) == 0
    pm.filter_eval_shape(wrapped, ramp() if wrap is pm.filter_grad else ramp(2))

    assert pm.debug.get_num_traces(wrapped) == 1


def test_counts_are_those_of_one_function():
    """Two functions count apart; the same one wrapped twice counts together."""
    f, g = counted(), counted()
    pm.filter_jit(f)(ramp(2)), jax.jit(f)(ramp(2))

    assert (pm.debug.get_num_traces(f), pm.debug.get_num_traces(g)) == (2, 0)


def test_methods():
    """A method counts for all instances of its class."""

    class Model(pm.Module):
        weight: jax.Array

        @pm.filter_jit
        @pm.debug.assert_max_traces(max_traces=1)
        def apply(self, x):
            return self.weight * x

    assert Model(jnp.ones(())).apply(ramp(2)).shape == (2,)
    Model(jnp.zeros(())).apply(ramp(2))
    with pytest.raises(RetraceError, match=r"apply: expected at most 1 trace .*\n  at x: f32"):
        Model(jnp.ones(())).apply(ramp(3))
    assert pm.debug.get_num_traces(Model.apply) == 1


def test_modules_can_be_counted():
    """A Module is a function, too."""
    layer = pm.debug.assert_max_traces(affine(), max_traces=1)
    jitted = pm.filter_jit(layer)

    assert (jitted(ramp(3)) == affine()(ramp(3))).all()
    jitted(2 * ramp(3))
    assert pm.debug.get_num_traces(jitted) == 1


LIMITS = {
    "shape": (1, [(ramp(2),), (ramp(3),)], "\n  at x: f32[2] -> f32[3]"),
    "static": (1, [(ramp(2), "a"), (ramp(2), "b")], "\n  at how: 'a' -> 'b'"),
    "given": (1, [(ramp(2),), (ramp(2), "b")], "\n  at how: not given before, now 'b'"),
    "second": (2, [(ramp(2),), (ramp(3),), (ramp(4),)], "\n  at x: f32[3] -> f32[4]"),
    "none": (0, [(ramp(2),)], ""),
}


@pytest.mark.parametrize(("limit", "calls", "place"), LIMITS.values(), ids=LIMITS.keys())
def test_one_trace_too_many_raises(limit, calls, place):
    """The error has the limit, and names the change; the count is unchanged."""
    f = counted(limit)
    jitted = pm.filter_jit(f)
    *allowed, last = calls
    for call in allowed:
        jitted(*call)
    plural = "trace" if limit == 1 else "traces"
    text = f"f: expected at most {limit} {plural} (max_traces), got a call that needs one more."
    with pytest.raises(RetraceError, match=rf"\A{re.escape(text + place + HINT)}(\n---|\Z)"):
        jitted(*last)

    assert pm.debug.get_num_traces(f) == limit


def test_no_limit_never_raises():
    """max_traces=None counts only."""
    f = counted(None)
    for n in range(20):
        pm.filter_eval_shape(f, ramp(n))

    assert pm.debug.get_num_traces(f) == 20


def test_names_and_signatures_are_kept():
    """The counting function has the name and signature of its function."""
    f = counted()

    assert f.__name__ == "f"
    assert f.__wrapped__(3) == 3
    assert f(x=1, how="b") == 1


test_refusals = refusals(globals())
