"""What is kept for steps and branches: found again, and no longer there than what it is for."""

import gc
import weakref
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.transform.compilation import kept_functions
from pytreemod.transform.compilation.kept_functions import Callee, Parts, keep, lend, lent_by
from pytreemod.tree.snapshots import Structure
from tests.helpers.comparing import assert_close
from tests.helpers.trees import Color, Holder, affine, double, ramp

XS = ramp(2)


def adding(big):
    """A function of its own, with an array in it."""
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


NEVER_KEPT = {
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
KEPT = {
    "scan": lambda: pm.filter_scan(reading_step, 0, X)[1],
    "loop": lambda: pm.filter_fori_loop(0, 1, reading_in_loop, X),
    "cond": lambda: pm.filter_cond(True, reading, same, X),
}


@pytest.mark.parametrize("name", [*NEVER_KEPT, *KEPT])
def test_a_function_that_reads_what_changes(name, monkeypatch):
    """It is called anew where JAX's own does it: `filter_map` went on with what it read first."""
    run = (NEVER_KEPT | KEPT)[name]
    before = run()
    monkeypatch.setitem(FACTOR, "now", 3.0)

    is_new = not jnp.array_equal(run(), before)

    assert is_new is (name in NEVER_KEPT)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
@pytest.mark.sampled
def test_a_static_function_goes_when_nobody_has_it(run):
    """A lasting step with fresh functions beside it: none stays, nor what it had captured."""
    gc.collect()
    before = len(kept_functions._kept)
    gc.disable()
    try:
        alive = []
        for _ in range(3):
            big = ramp(3)
            f = adding(big)
            assert run(f) is f
            # Kept as long as it is there.
            assert len(kept_functions._kept) == before + 1
            alive += [weakref.ref(big), weakref.ref(f)]
            del big, f
        assert [ref() for ref in alive] == [None] * 6
        assert len(kept_functions._kept) == before
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
    """A function of its own as configuration."""

    fn: Callable[..., jax.Array]

    def step(self, carry, x):
        return self.fn(carry) + x, None


def test_no_tracer_is_kept():
    """What is made for a pytree inside a trace goes with the trace, and all that it has seen."""
    alive = []

    @jax.jit
    def run(x):
        tracer = x + 1
        alive.append(weakref.ref(tracer))
        return pm.filter_scan(Stepping(lambda c: c * tracer).step, x, XS)[0]

    # Others may have left what is no longer used.
    kept_functions.forget()
    with jax.checking_leaks():
        run(jnp.float32(2))
    gc.collect()

    assert not kept_functions._kept
    assert alive[0]() is None


# ---- keeping


def kept(fn, tree, make=object):
    parts = Parts(tree)
    return keep(("a test",), Callee([fn]), [parts], make)


def test_what_is_kept_is_found_again():
    """For the same function and an equal tree; not for another."""
    first = kept(double, (XS, 1, "a"))

    assert kept(double, (XS + 1, 1, "a")) is first
    for fn, tree in [(double, (XS, 1.0, "a")), (double, [XS, 1, "a"]), (same, (XS, 1, "a"))]:
        assert kept(fn, tree) is not first


def test_the_oldest_goes(monkeypatch):
    """There is room for so many, and for one more."""
    monkeypatch.setattr(kept_functions, "_kept", {})
    monkeypatch.setattr(kept_functions, "MAX_KEPT", 3)
    made = [kept(double, i) for i in range(3)]
    assert [kept(double, i) for i in range(3)] == made

    fourth = kept(double, 3)
    assert len(kept_functions._kept) == 3
    assert [kept(double, i) for i in (1, 2, 3)] == [*made[1:], fourth]
    assert kept(double, 0) is not made[0]


def test_nothing_is_kept_for_what_cannot_be_told_apart():
    """Without a hash, without weak references, or with tracers beside a pytree."""

    class Unhashable:
        __hash__ = None

    class Rigid:
        __slots__ = ()

        def __call__(self, x):
            return x

    rigid = Rigid()
    for fn, tree in [(double, Unhashable()), (rigid, XS)]:
        assert kept(fn, tree) is not kept(fn, tree)

    def within(x):
        module = affine().scaled
        assert kept(module, x) is not kept(module, x)
        assert kept(double, x) is kept(double, x)
        return x

    jax.jit(within)(XS)
    assert kept(affine(), XS) is kept(affine(), XS)


# ---- lending


class Plain:
    """Equal to itself alone."""


def test_what_is_lent():
    """What is equal to itself alone is held weakly; values, and what it cannot, as they are."""
    own, rigid = Plain(), object()
    statics = (own, same, Color.RED, "text", 1.5, rigid)
    give_back = Parts((*statics, XS)).lend()

    assert give_back().statics == (*statics, None)
    alive = weakref.ref(own)
    del own, statics
    assert alive() is None
    assert give_back().statics == (None, same, Color.RED, "text", 1.5, rigid, None)


def test_only_what_the_lenders_have_is_lent():
    """A function that a step made itself is nobody's but its result's."""
    mine, theirs = Plain(), Plain()
    treedef = jax.tree.structure((0, 0))
    ids = lent_by(Parts((theirs, "text")), Parts(same))
    assert ids() == {id(theirs), id(same)}
    give_back = lend(Structure(treedef, (), (mine, theirs)), ids())
    del theirs

    assert give_back().statics == (mine, None)
    assert ids() == {id(same)}
    whole = Structure(treedef, (), ("text", 1))
    assert lend(whole, ids())() is whole
