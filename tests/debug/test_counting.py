"""debug.assert_max_traces and get_num_traces: counting under any transform."""

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import RetraceError
from tests.helpers.trees import ramp


def counted(max_traces=None):
    """A new function that counts."""

    @pm.debug.assert_max_traces(max_traces=max_traces)
    def f(x, how="a"):
        return x

    return f


TRANSFORMS = {"filter_jit": pm.filter_jit, "jax.jit": lambda f: jax.jit(f, static_argnames="how")}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_traces_are_counted_under_every_jit(transform):
    """Each call of the function itself counts: under jit, each trace."""
    f = counted()
    jitted = transform(f)
    for n in (2, 2, 3, 2):
        jitted(ramp(n))

    assert pm.debug.get_num_traces(f) == 2


WRAPPED = {
    "jax.jit": jax.jit,
    "several": lambda f: pm.filter_jit(pm.filter_vmap(f)),
    "jitted Partial": lambda f: pm.filter_jit(pm.Partial(f, how="b")),
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED.keys())
def test_the_count_is_found_below_transforms(wrap):
    """get_num_traces takes the function, or the wrapped one."""
    wrapped = wrap(counted())
    assert pm.debug.get_num_traces(wrapped) == 0
    pm.filter_eval_shape(wrapped, ramp(2))

    assert pm.debug.get_num_traces(wrapped) == 1


LIMITS = {
    "shape": (1, [(ramp(2),), (ramp(3),)], r"at x: f32\[2\] -> f32\[3\]"),
    "static": (1, [(ramp(2), "a"), (ramp(2), "b")], "at how: 'a' -> 'b'"),
    "none": (0, [(ramp(2),)], "f"),
}


@pytest.mark.parametrize(("limit", "calls", "place"), LIMITS.values(), ids=LIMITS.keys())
def test_one_trace_too_many_raises(limit, calls, place):
    """The error names the change; the count is unchanged."""
    f = counted(limit)
    jitted = pm.filter_jit(f)
    *allowed, last = calls
    for call in allowed:
        jitted(*call)
    with pytest.raises(RetraceError, match=place):
        jitted(*last)

    assert pm.debug.get_num_traces(f) == limit


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
    with pytest.raises(RetraceError, match=r"apply(.|\n)*at x: f32"):
        Model(jnp.ones(())).apply(ramp(3))
    assert pm.debug.get_num_traces(Model.apply) == 1
