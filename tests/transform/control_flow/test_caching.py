"""Steps and branches are traced once, and go with their functions."""

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from tests.helpers.comparing import assert_close
from tests.helpers.trees import ramp

X = ramp(2)
FACTOR = {"now": 1.0}


def reading(x):
    """A function that is not pure."""
    return x * FACTOR["now"]


NEVER_CACHED = {
    "map": lambda: pm.filter_map(reading, X),
    "vmap": lambda: pm.filter_vmap(reading)(X),
    "associative scan": lambda: pm.filter_associative_scan(lambda a, b: a + reading(b), X),
    "jvp": lambda: pm.filter_jvp(reading, (X,), (X,))[1],
    "vjp": lambda: pm.filter_vjp(reading, X)[1](X),
    "jacrev": lambda: pm.filter_jacrev(reading)(X),
}


@pytest.mark.parametrize("run", NEVER_CACHED.values(), ids=NEVER_CACHED)
def test_a_function_that_reads_what_changes_is_called_again(run, monkeypatch):
    """Where JAX calls it again, too: `filter_map` used its first value."""
    before = run()
    monkeypatch.setitem(FACTOR, "now", 3.0)

    assert not jnp.array_equal(run(), before)


def step(carry, x):
    """A lasting step, with a function in the carry."""
    y, f = carry
    return (f(y) + x, f), None


def same(carry):
    return carry


def later(carry):
    return carry[1](carry[0]), carry[1]


RUNS = {
    "scan": lambda f: pm.filter_scan(step, (jnp.float32(0), f), X)[0][1],
    "while": lambda f: pm.filter_while_loop(lambda c: c[0] < 3, later, (jnp.float32(1), f))[1],
    "fori": lambda f: pm.filter_fori_loop(0, 2, lambda i, c: later(c), (jnp.float32(1), f))[1],
    "cond": lambda f: pm.filter_cond(True, same, later, (jnp.float32(1), f))[1],
}


@pytest.mark.parametrize("name", RUNS)
def test_a_static_function_is_not_kept_alive(name):
    """A lasting step with new functions beside it: none is cached, nor its captured values."""
    alive = []
    for _ in range(3):
        big = ramp(3)

        def f(y, big=big):
            return y + big[0]

        assert RUNS[name](f) is f
        alive += [weakref.ref(big), weakref.ref(f)]
        del big, f
    gc.collect()

    assert [ref() for ref in alive] == [None] * 6


def test_a_static_function_is_found_as_long_as_it_is_there():
    """Two functions are two programs, and each is traced once."""
    traces = []

    def traced(carry, x):
        traces.append(carry[1])
        return step(carry, x)

    def adding(big):
        return lambda y: y + big[0]

    first, second = adding(ramp(1)), adding(ramp(1, start=2.0))
    for f, expected in [(first, 5.0), (second, 7.0), (first, 5.0), (second, 7.0)]:
        assert_close(pm.filter_scan(traced, (jnp.float32(0), f), X)[0][0], jnp.float32(expected))
    assert traces == [first, second]


def test_no_tracer_is_cached():
    """What is cached of a step inside a trace goes with the trace."""
    alive = []

    @jax.jit
    def run(x):
        tracer = x + 1
        alive.append(weakref.ref(tracer))
        return pm.filter_scan(lambda c, y: (c * tracer + y, None), x, X)[0]

    with jax.checking_leaks():
        run(jnp.float32(2))
    gc.collect()

    assert alive[0]() is None
