"""explain_retraces, assert_max_traces and get_num_traces: which traces there were, and why."""

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError, CheckError
from tests.helpers.trees import ramp


@pytest.fixture
def scale():
    @pm.filter_jit
    def scale(x, factor=1.0):
        return x * factor

    return scale


SECOND = "scale was traced again (trace 2), because of\n  factor: 1.0 -> 2.0"
THIRD = "scale was traced again (trace 3), because of\n  x: f32[2] -> f32[3]"


def test_each_trace_after_the_first_is_reported(scale):
    """While the context is open; and later, those that are stored."""
    announced = []
    assert str(pm.debug.explain_retraces(scale)) == "no retraces"
    scale(ramp(2), 1.0)
    with pm.debug.explain_retraces(scale, announce=announced.append) as report:
        scale(ramp(2), 2.0)
        scale(ramp(2), 1.0)
        scale(ramp(3), 2.0)
    scale(ramp(4), 2.0)

    assert report.reports == announced == [SECOND, THIRD]
    assert str(report) == f"{SECOND}\n{THIRD}"
    assert str(pm.debug.explain_retraces(scale)).startswith(f"{SECOND}\n{THIRD}\n")


def test_reports_are_printed_and_only_of_jitted_functions(scale, capsys):
    with pm.debug.explain_retraces(scale):
        scale(ramp(2), 1.0)
        scale(ramp(2), 2.0)
    assert capsys.readouterr().err == f"{SECOND}\n"
    with pytest.raises(ArgumentError, match="function ramp is not jitted"):
        pm.debug.explain_retraces(ramp)


def test_in_the_functions_place(scale):
    """It can be called instead of the function, and listens during its calls only."""
    announced = []
    explained = pm.debug.explain_retraces(scale, announce=announced.append)
    assert (explained(ramp(2), 1.0) == ramp(2)).all()
    # The trace that fails was reported before it ran.
    with pytest.raises(TypeError, match="NoneType"):
        explained(ramp(2), None)
    with pytest.raises(KeyError, match="mine"), explained:
        raise KeyError("mine")
    scale(ramp(3), 1.0)
    assert (explained(ramp(2), factor=2.0) == 2 * ramp(2)).all()

    assert [text.splitlines()[1] for text in announced] == [
        "  factor: 1.0 -> None",
        "  x: f32[3] -> f32[2]",
    ]


def counted(max_traces=None):
    @pm.debug.assert_max_traces(max_traces=max_traces)
    def f(x, how="a"):
        return x

    return f


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
    for n in (2, 2, 3, 2):
        wrapped(ramp(n))
    assert pm.debug.get_num_traces(wrapped) == 2


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
    with pytest.raises(CheckError, match=place):
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
    with pytest.raises(CheckError, match=r"apply(.|\n)*at x: f32"):
        Model(jnp.ones(())).apply(ramp(3))
    assert pm.debug.get_num_traces(Model.apply) == 1


def test_a_function_that_counts_no_traces_is_refused():
    with pytest.raises(AttributeError, match="__wrapped__"):
        pm.debug.get_num_traces(ramp)
