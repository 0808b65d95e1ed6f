"""Caches for steps and branches: they are found again, and freed with their functions."""

import gc
import itertools
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.transform.compilation import store, weak_functions
from pytreemod.transform.compilation.store import Options, store_for
from pytreemod.transform.compilation.weak_functions import (
    MAX_STEPS,
    Parts,
    WeakTable,
    cached,
    functions,
)
from tests.helpers.comparing import assert_close
from tests.helpers.trees import Holder, ramp

XS = ramp(2)


def adding(big):
    """A new function that has captured an array."""
    return lambda y: y + big[0]


def step(carry, x):
    y, f = carry
    return (f(y) + x, f), None


def step_that_returns(carry, x):
    y, f = carry
    return (f(y) + x, f), {"f": f, "y": y, "held": Holder([f])}


def step_of_elements(carry, x):
    y, f = x
    return carry + f(y), None


def same(x):
    return x


def later(carry):
    return carry[1](carry[0]), carry[1]


RUNS = {
    "carried": lambda f: pm.filter_scan(step, (jnp.float32(0), f), XS)[0][1],
    "returned": lambda f: pm.filter_scan(step_that_returns, (jnp.float32(0), f), XS)[1]["f"],
    "scanned": lambda f: pm.filter_scan(step_of_elements, jnp.float32(0), (XS, f)) and f,
    "while": lambda f: pm.filter_while_loop(small, later, (jnp.float32(1), f))[1],
    "fori": lambda f: pm.filter_fori_loop(0, 2, ignoring, (jnp.float32(1), f))[1],
    "cond": lambda f: pm.filter_cond(True, same, later, (jnp.float32(1), f))[1],
    "promoted": lambda f: pm.filter_cond(True, one, half, f)["f"],
    "switch": lambda f: pm.filter_switch(1, [same, later], (jnp.float32(1), f))[1],
}


def small(carry):
    return carry[0] < 3


def ignoring(i, carry):
    return later(carry)


def one(f):
    return {"f": f, "n": 1}


def half(f):
    return {"f": f, "n": 0.5}


FACTOR = {"now": 1.0}
X = ramp(2)


def reading(x):
    """A function that is not pure."""
    return x * FACTOR["now"]


def reading_step(carry, x):
    return carry, reading(x)


def reading_in_loop(i, x):
    return reading(x)


def reading_and_adding(a, b):
    return a + reading(b)


NEVER_CACHED = {
    "map": lambda: pm.filter_map(reading, X),
    "map in batches": lambda: pm.filter_map(reading, X, batch_size=2),
    "vmap": lambda: pm.filter_vmap(reading)(X),
    "associative scan": lambda: pm.filter_associative_scan(reading_and_adding, X),
    "jvp": lambda: pm.filter_jvp(reading, (X,), (X,))[1],
    "vjp": lambda: pm.filter_vjp(reading, X)[1](X),
    "linearize": lambda: pm.filter_linearize(reading, X)[1](X),
    "jacfwd": lambda: pm.filter_jacfwd(reading)(X),
    "jacrev": lambda: pm.filter_jacrev(reading)(X),
}
CACHED = {
    "scan": lambda: pm.filter_scan(reading_step, 0, X)[1],
    "loop": lambda: pm.filter_fori_loop(0, 1, reading_in_loop, X),
    "cond": lambda: pm.filter_cond(True, reading, same, X),
}


@pytest.mark.parametrize("name", [*NEVER_CACHED, *CACHED])
def test_a_function_that_reads_what_changes(name, monkeypatch):
    """It is called again where JAX calls it again: `filter_map` used its first value."""
    run = (NEVER_CACHED | CACHED)[name]
    before = run()
    monkeypatch.setitem(FACTOR, "now", 3.0)

    is_new = not jnp.array_equal(run(), before)

    assert is_new is (name in NEVER_CACHED)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.sampled
def test_a_static_function_is_not_kept_alive(name):
    """A lasting step with new functions beside it: none is cached, nor its captured values."""
    run = RUNS[name]
    gc.collect()
    before = len(weak_functions._steps.entries)
    gc.disable()
    try:
        alive = []
        for _ in range(3):
            big = ramp(3)
            f = adding(big)
            assert run(f) is f
            # Cached as long as it exists.
            assert len(weak_functions._steps.entries) == before + 1
            alive += [weakref.ref(big), weakref.ref(f)]
            del big, f
        assert [ref() for ref in alive] == [None] * 6
        assert len(weak_functions._steps.entries) == before
    finally:
        gc.enable()


def test_a_static_function_is_found_as_long_as_it_is_there():
    """Two functions are two programs, and each is traced once."""
    traces = []

    def traced(carry, x):
        traces.append(carry[1])
        return step(carry, x)

    first, second = adding(ramp(1)), adding(ramp(1, start=2.0))
    for f, expected in [(first, 5.0), (second, 7.0), (first, 5.0), (second, 7.0)]:
        assert_close(pm.filter_scan(traced, (jnp.float32(0), f), XS)[0][0], jnp.float32(expected))
    assert traces == [first, second]


class Stepping(pm.Module):
    """A Module with a function as configuration."""

    fn: Callable[..., jax.Array]

    def step(self, carry, x):
        return self.fn(carry) + x, None


def test_no_tracer_is_cached():
    """An entry for a pytree inside a trace is freed with the trace."""
    alive = []

    @jax.jit
    def run(x):
        tracer = x + 1
        alive.append(weakref.ref(tracer))
        return pm.filter_scan(Stepping(lambda c: c * tracer).step, x, XS)[0]

    # Other tests may have left unused entries.
    weak_functions.forget_steps()
    with jax.checking_leaks():
        run(jnp.float32(2))
    gc.collect()

    assert not weak_functions._steps.entries
    assert alive[0]() is None


# ---- lifetimes


def new_function(i):
    return lambda carry, x: (carry + i, x)


def test_ten_thousand_functions_in_four_threads():
    """Those of jit go with the functions; of those of steps there is a bound meanwhile.

    For each third function an exception is raised instead.
    """
    gc.collect()
    before = len(store._stores.entries), len(weak_functions._steps.entries)
    start, most, numbers = threading.Barrier(4), [0], itertools.count()

    def failing():
        raise ValueError("while it is made")

    def run(_):
        start.wait()
        alive = []
        for i in itertools.islice(numbers, 2500):
            fn, parts = new_function(i), Parts((XS, new_function(-i)))
            if i % 3:
                made = cached(("a test",), functions([fn]), [parts], object)
                assert cached(("a test",), functions([fn]), [parts], object) is made
                assert store_for(fn, Options()) is store_for(fn, Options())
                alive.append(fn)
            else:
                with pytest.raises(ValueError, match="while it is made"):
                    cached(("a test",), functions([fn]), [parts], failing)
            most[0] = max(most[0], len(weak_functions._steps.entries))
        return alive

    with ThreadPoolExecutor(4) as pool:
        alive = [*itertools.chain(*pool.map(run, range(4)))]
    assert len(store._stores.entries) - before[0] == len(alive) > 6000
    assert most[0] <= MAX_STEPS + 4

    del alive
    gc.collect()
    assert len(store._stores.entries) == before[0]
    assert len(weak_functions._steps.entries) <= before[1]


class Slotted:
    """A callable without weak references."""

    __slots__ = ()

    def __call__(self, carry, x):
        return carry, x


def test_one_function_that_cannot_be_weak_is_enough_to_cache_nothing():
    """Its entry would never be freed."""
    assert functions([step, same]).key is not None
    assert functions([step, Slotted()]).key is None
    assert functions([Slotted(), step]).key is None


# ---- the table


def test_the_oldest_goes():
    """There is room for so many, and for one more."""
    table = WeakTable(3)
    made = [table.find(i, [], object) for i in range(3)]
    assert [table.find(i, [], object) for i in range(3)] == made

    fourth = table.find(3, [], object)
    assert len(table.entries) == 3
    assert [table.find(i, [], object) for i in (1, 2, 3)] == [*made[1:], fourth]
    assert table.find(0, [], object) is not made[0]
