"""Steps and branches outside `jit`: traced once for their functions, and forgotten with them."""

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from tests.helpers.cells import counted
from tests.helpers.trees import ramp

X = ramp(2)
ONE = jnp.float32(1)
YES = jnp.asarray(True)


class Traces:
    """A static value that is equal to itself alone, and counts."""

    count = 0

    def add(self):
        self.count += 1


class Model(pm.Module):
    """Its methods count their traces."""

    w: jax.Array
    traces: Traces = pm.field(static=True)

    def __call__(self, c):
        self.traces.add()
        return c * self.w

    def grow(self, *args):
        self.traces.add()
        return args[-1] + self.w

    def step(self, c, x):
        self.traces.add()
        return c + x * self.w, None

    def is_small(self, c):
        self.traces.add()
        return c < 3 * self.w


# How to call methods, the result, and how many functions are traced.
CALLS = {
    "scan": (lambda m: pm.filter_scan(m.step, ONE, X)[0], lambda w: 1 + 3 * w, 1),
    "cond": (lambda m: pm.filter_cond(YES, m.grow, m, ONE), lambda w: 1 + w, 2),
    "switch": (lambda m: pm.filter_switch(jnp.asarray(1), [m.grow, m], ONE), lambda w: w, 2),
    "while": (lambda m: pm.filter_while_loop(m.is_small, m.grow, ONE), lambda w: 1 + 3 * w, 2),
    "fori": (lambda m: pm.filter_fori_loop(0, 3, m.grow, ONE), lambda w: 1 + 3 * w, 1),
}


@pytest.mark.parametrize(("call", "expected", "count"), CALLS.values(), ids=CALLS)
def test_modules_and_methods_are_traced_once(call, expected, count):
    """For other arrays, too: those are inputs of the program; not for another static value."""
    traces, others = Traces(), Traces()
    for w in (2.0, 3.0, 2.0):
        assert float(call(Model(jnp.float32(w), traces))) == expected(w)
    call(Model(ONE, others))
    assert (traces.count, others.count) == (count, count)


REVERSIBLE = {
    "while": lambda m: pm.filter_while_loop(m.is_small, m.grow, ONE, kind="checkpointed"),
    "bounded": lambda m: pm.filter_while_loop(m.is_small, m.grow, ONE, kind="bounded", max_steps=9),
    "fori": lambda m: pm.filter_fori_loop(0, 3, m.grow, ONE, kind="checkpointed"),
    "scan": lambda m: pm.filter_scan(m.step, ONE, X, kind="checkpointed")[0],
}


@pytest.mark.parametrize("call", REVERSIBLE.values(), ids=REVERSIBLE)
def test_loops_with_a_reverse_mode_are_traced_in_one_call(call):
    """Later ones find the program, and leave nothing behind."""
    # What it imports adds settings of JAX, by which traces are told apart.
    call(Model(ONE, Traces()))
    traces = Traces()
    models = [Model(jnp.float32(w), traces) for w in (2.0, 3.0)]
    first, count = call(models[0]), traces.count
    gc.collect()
    objects = len(gc.get_objects())
    for _ in range(100):
        assert float(call(models[1])) != float(first)
        call(models[0])
    gc.collect()
    assert traces.count == count
    assert len(gc.get_objects()) < objects + 100


def test_functions_are_traced_once(monkeypatch):
    """For other values; not for another static value, nor after clear_caches."""
    monkeypatch.setattr(jax, "clear_caches", lambda: None)
    step, traces = counted(lambda c, x: ((c[1](c[0]) + x, c[1]), None))
    first, ones = counted(lambda x: x)
    second, others = counted(lambda x: -x)
    negated = lambda x: -x  # noqa: E731

    def run(start, f):
        pm.filter_cond(jnp.asarray(start > 0), first, second, jnp.float32(start))
        return float(pm.filter_scan(step, (jnp.float32(start), f), X)[0][0])

    assert [run(0, abs), run(1, abs), run(0, abs)] == [3, 4, 3]
    assert (len(traces), len(ones), len(others)) == (1, 1, 1)
    assert [run(1, negated), run(1, abs), run(1, negated)] == [2, 4, 2]
    assert (len(traces), len(ones)) == (2, 1)
    pm.clear_caches()
    run(1, negated)
    assert (len(traces), len(ones)) == (3, 2)


LOOPS = {
    "scan": lambda f: pm.filter_scan(lambda c, x: (f(c), None), ONE, length=2)[0],
    "map": lambda f: pm.filter_map(f, X)[0],
    "while": lambda f: pm.filter_while_loop(lambda x: x < 1, f, ONE),
    "fori": lambda f: pm.filter_fori_loop(0, 2, lambda i, x: f(x), ONE),
    "reversible": lambda f: pm.filter_while_loop(lambda x: x < 1, f, ONE, kind="checkpointed"),
    "cond": lambda f: pm.filter_cond(YES, f, lambda x: x, ONE),
}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_nothing_outlives_the_function(loop):
    """What is cached for a function is freed with it, and so are its captured values."""
    captured = Traces()
    alive = weakref.ref(captured)
    loop(lambda x, captured=captured: x + captured.count)
    del captured
    gc.collect()
    assert alive() is None


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


def test_a_new_function_is_not_taken_for_a_deleted_one():
    """Though it is found at the same place in memory."""
    places, same = set(), lambda c: c
    for i in range(100):
        f = eval(f"lambda c, *x: (c + {i}, None) if x else c + {i}")
        assert float(pm.filter_scan(f, jnp.float32(0), length=2)[0]) == 2 * i
        assert float(pm.filter_cond(YES, f, same, jnp.float32(0))) == i
        assert float(pm.filter_cond(~YES, same, f, jnp.float32(0))) == i
        if id(f) in places:
            return
        places.add(id(f))
        del f
    pytest.fail("no function was found at the place of another")


def test_what_cannot_be_hashed_is_carried_all_the_same():
    """Leaves without a hash are compared by `==`; nothing is cached for them."""

    class Unhashable:
        __hash__ = None

        def __eq__(self, other):
            return isinstance(other, Unhashable)

    step = lambda c, x: ((c[0] + x, Unhashable()), None)  # noqa: E731
    assert pm.filter_scan(step, (ONE, Unhashable()), X)[0][1] == Unhashable()


FACTOR = {"now": 1.0}


def reading(x):
    """A function that is not pure."""
    return x * FACTOR["now"]


NEVER_CACHED = {"map": pm.filter_map, "vjp": lambda f, x: pm.filter_vjp(f, x)[1](x)}


@pytest.mark.parametrize("run", NEVER_CACHED.values(), ids=NEVER_CACHED)
def test_a_function_that_reads_what_changes_is_called_again(run, monkeypatch):
    """Where JAX calls it again, too: `filter_map` used its first value."""
    before = run(reading, X)
    monkeypatch.setitem(FACTOR, "now", 3.0)
    assert not jnp.array_equal(run(reading, X), before)
