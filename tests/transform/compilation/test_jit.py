"""filter_jit: when it traces again, donates, frees memory; and never a stale result."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import DonatedError
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.trees import (
    Affine,
    Buffered,
    Color,
    Defaults,
    Holder,
    Pair,
    Registered,
    Static,
    affine,
    by_hand,
    double,
    ramp,
)


def counting(fn):
    """The function under filter_jit, and the list of its traces."""
    traces = []

    def traced(*args, **kwargs):
        traces.append((args, kwargs))
        return fn(*args, **kwargs)

    return pm.filter_jit(traced), traces


# ---- when a function is traced again


def test_arrays_are_traced_and_the_rest_is_static():
    """Inside the function arrays are tracers and all other values are those of the call."""
    seen = []

    @pm.filter_jit
    def look(*args):
        seen.extend(args)

    args = (
        ramp(2),
        np.ones(2),
        np.float32(1),
        1,
        1.5,
        True,
        "text",
        None,
        double,
        Color.RED,
        Affine,
    )
    look(*args)
    assert [isinstance(x, jax.core.Tracer) for x in seen] == [True] * 3 + [False] * 8
    assert all(x is y for x, y in zip(seen[3:], args[3:], strict=True))


SAME = {
    "values": (ramp(2), ramp(2, start=5.0)),
    "equal numbers": (1.5, 1.5),
    "equal tuples": ((1, "a"), (1, "a")),
    "equal strings": ("abc", "".join(["a", "bc"])),
    "NaN": (float("nan"), float("nan")),
    "Modules": (affine(), affine(start=3.0)),
    "configuration": (Static(1.0, (1, "a")), Static(1.0, (1, "a"))),
    "NaN as configuration": (Static(1.0, float("nan")), Static(1.0, float("nan"))),
    "NumPy for JAX": (ramp(2), np.ones(2, np.float32)),
    "built and returned": (affine(), pm.filter_jit(lambda m: m)(affine())),
    "built and put together": (affine(), by_hand()),
    "enumeration": (Color.RED, Color(1)),
    "order of keys": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "one function": (double, double),
    "one bound method": (affine().scaled, affine().scaled),
    "one transform": (pm.filter_jit(double), pm.filter_jit(double)),
    "slices": (slice(1, 2), slice(1, 2))
    if hasattr(slice, "__hash__") and slice.__hash__
    else (1, 1),
}


@pytest.mark.parametrize(("a", "b"), SAME.values(), ids=SAME.keys())
def test_one_trace_for_equal_calls(a, b):
    """Equal static values and arrays of one type find the function that was compiled."""
    fn, traces = counting(lambda x: 0)
    for x in (a, b, a, b):
        fn(x)

    assert len(traces) == 1


DIFFERENT = {
    "shape": (ramp(2), ramp(3)),
    "dtype": (ramp(2), ramp(2).astype(jnp.bfloat16)),
    "weak type": (jnp.asarray(1.0), jnp.ones(())),
    "int and float": (1, 1.0),
    "int and bool": (1, True),
    "float and bool": (0.0, False),
    "sign of zero": (0.0, -0.0),
    "static and traced": (1.0, jnp.ones(())),
    "numbers in a Module": (Holder(1), Holder(True)),
    "configuration": (Static(1.0, 1), Static(1.0, 2)),
    "type of configuration": (Static(1.0, 1), Static(1.0, True)),
    "another type of configuration": (Static(1.0, 1), Static(1.0, 1.0)),
    "sign of zero in configuration": (Static(1.0, 0.0), Static(1.0, -0.0)),
    "in a tuple in configuration": (Static(1.0, (1, 2)), Static(1.0, (1, 2.0))),
    "None": (None, 0),
    "container": ([1], (1,)),
    "class": (Affine(1, 2), Pair(1, 2)),
    "function": (double, lambda x: x),
    "division": (Defaults(1.0, act=double), Defaults(1.0, act=affine())),
    "a list's length": ([1], [1, 1]),
    "auxiliary data": (Registered(1, "a"), Registered(1, "b")),
}


@pytest.mark.parametrize(("a", "b"), DIFFERENT.values(), ids=DIFFERENT.keys())
@pytest.mark.sampled
def test_two_traces_for_different_calls(a, b):
    """Calls with different programs have different traces, in any order; both are found again."""
    for first, second in ((a, b), (b, a)):
        fn, traces = counting(lambda x: 0)
        for x in (first, second, first, second):
            fn(x)
        assert len(traces) == 2


def test_results_do_not_depend_on_what_was_called_before():
    """1, True, 1.0, -0.0: the result has the type and sign that the call has without jit."""

    def fn(x, n):
        return jnp.asarray(n), n, [n], Holder(n), Static(x, n), f"{n!r}"

    jitted = pm.filter_jit(fn)
    for n in (1, True, 0, False, 1.0, 0.0, -0.0, float("nan"), 2, 2.0):
        assert_same(jitted(ramp(1), n), fn(ramp(1), n))


class Awkward:
    """A static value whose == does not answer with a bool."""

    def __init__(self, name, answer):
        self.name = name
        self.answer = answer

    def __eq__(self, other):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def __hash__(self):
        return 7


@pytest.mark.parametrize("answer", [np.ones(2, bool), ValueError("no")], ids=repr)
def test_static_values_with_awkward_equality(answer):
    """A static value whose == gives an array, or raises, is the same only if it is one object."""
    fn, traces = counting(lambda x, thing: (x, thing.name))
    first, second = Awkward("first", answer), Awkward("second", answer)
    for thing in (first, second, first, second):
        assert fn(ramp(1), thing)[1] == thing.name

    assert len(traces) == 2


def test_keyword_and_position_are_one_trace():
    """An argument is the same however it was spelled."""
    traces = []
    named = pm.filter_jit(lambda a, b: traces.append(None) or a)
    for args, kwargs in [((1, 2), {}), ((1,), {"b": 2}), ((), {"b": 2, "a": 1})]:
        assert named(*args, **kwargs) == 1

    assert len(traces) == 1


# ---- inside other transforms


def test_without_jit():
    """Under jax.disable_jit() the function runs in Python, with arrays that have values."""
    seen = []

    @pm.filter_jit
    def look(model, x):
        seen.append(float(x[0]))
        return model, x

    with jax.disable_jit():
        for i in range(2):
            found = look(affine(), ramp(2, start=float(i)))
            assert_same(found, (affine(), ramp(2, start=float(i))))
    assert seen == [0.0, 1.0]


def test_errors_inside_are_the_users():
    """An exception in the function is passed on unchanged, and the next call works."""

    @pm.filter_jit
    def fn(x, fail):
        if fail:
            raise KeyError("mine")
        return x

    for _ in range(2):
        with pytest.raises(KeyError, match="mine") as caught:
            fn(ramp(1), True)
        # Its context shows no failed lookup of ours.
        assert caught.value.__context__ is None
        assert_same(fn(ramp(1), False), ramp(1))


def test_other_options_go_to_jax_jit():
    """They arrive; an unknown one is jax.jit's error."""
    kept = pm.filter_jit(lambda x, y: x, keep_unused=True).lower(ramp(1), ramp(2))
    dropped = pm.filter_jit(lambda x, y: x).lower(ramp(1), ramp(2))
    assert "tensor<2xf32>" in kept.as_text()
    assert "tensor<2xf32>" not in dropped.as_text()


# ---- donation


def update(model, opt_state, x):
    """Returns its argument, changed."""
    return jax.tree.map(lambda w: w + x, model), jax.tree.map(lambda s: s * x, opt_state)


def arguments():
    """New arguments, for each call may give them away."""
    return Buffered(ramp(5), ramp(6), ramp(7)), [ramp(8), ramp(9)], jnp.full((), 2.0)


def deleted(donate, by_keyword=False):
    """Which of the arguments' arrays a call gives away."""
    args = arguments()
    step = pm.filter_jit(update, donate=donate)
    if by_keyword:
        step(**dict(zip(("model", "opt_state", "x"), args, strict=True)))
    else:
        step(*args)
    return [leaf.is_deleted() for leaf in jax.tree.leaves(args)]


@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize(
    ("donate", "expected"),
    [
        ("none", "- - - - - -"),
        ("model", "d d d - - -"),
        (["opt_state"], "- - - d d -"),
        (("opt_state", "model"), "d d d d d -"),
        (pm.select.path("model.mean"), "- d - - - -"),
    ],
    ids=repr,
)
def test_what_is_donated(donate, expected, by_keyword):
    """By name, by names, by a selector over the arguments: exactly these are gone."""
    assert ["d" if x else "-" for x in deleted(donate, by_keyword)] == expected.split()


@pytest.mark.parametrize(
    ("donate", "expected"),
    [("all", [True] * 3), ("all-except-first", [False, True, True])],
)
def test_equinoxs_strings(donate, expected):
    """Quiet ones: no warning for a donated array that was of no use."""
    args = ramp(3), ramp(4), ramp(5)
    pm.filter_jit(lambda a, b, c: (a + 1, b + 1, jnp.sum(c), c * 2), donate=donate)(*args)

    assert [x.is_deleted() for x in args] == expected
    pm.filter_jit(lambda a, b: jnp.sum(a) + jnp.sum(b), donate=donate)(ramp(3), ramp(4))


def useless(a, b):
    return jnp.sum(a) + jnp.sum(b)


@pytest.mark.parametrize(
    ("donate", "where"), [("model", r"model\.weight"), ("all-except-first", r"opt_state\[0\]")]
)
def test_a_donated_array_used_again_is_refused(donate, where):
    """By path, whichever function the second call is of."""
    step = pm.filter_jit(update, donate=donate)
    args = arguments()
    step(*args)
    for other in (step, pm.filter_jit(update)):
        with pytest.raises(DonatedError, match=where) as caught:
            other(*args)
        assert isinstance(caught.value, RuntimeError)


def test_a_donation_that_was_of_no_use_warns_where_asked():
    """JAX's own warning comes through, except for the quiet strings."""
    for donate in ("warn", ("b",)):
        with pytest.warns(UserWarning, match="donated buffers were not usable"):
            pm.filter_jit(lambda a, b: useless(a, b), donate=donate)(ramp(3), ramp(4))


# ---- caching, and freeing


def test_written_in_a_loop_it_compiles_once():
    """filter_jit(f) of one function finds its compiled programs."""
    traces = []

    def fn(x):
        traces.append(None)
        return x

    for _ in range(3):
        pm.filter_jit(fn)(ramp(2))
    assert len(traces) == 1
    pm.filter_jit(fn, donate="all")(ramp(2))
    assert len(traces) == 2


def test_modules_as_functions_are_let_go():
    """A jitted Module's arrays go with it."""
    layer = affine()
    watched = weakref.ref(layer.weight)
    jitted = pm.filter_jit(layer)
    jitted(ramp(3))
    del layer, jitted
    gc.collect()

    assert watched() is None


def test_programs_of_static_values_are_bounded(monkeypatch):
    """The oldest goes, with its static value, and is right when it comes back."""
    monkeypatch.setattr("pytreemod.transform.compilation.store.MAX_ENTRIES", 2)

    class Value:
        """A static value that can be watched."""

    def use():
        value = Value()
        jitted(ramp(1), value)
        return weakref.ref(value)

    jitted = pm.filter_jit(lambda x, how: x)
    watched = use()
    for n in range(20):
        jitted(ramp(1), n)
    gc.collect()

    assert watched() is None
    assert_same(jitted(ramp(1), 0), ramp(1))


def test_each_call_that_traces_is_counted_once():
    """To look for checks does not trace a second time."""
    traces = []
    jitted = pm.filter_jit(lambda x: traces.append(x.shape) or pm.error_if(x, x > 9, "too large"))
    for size in (2, 2, 3, 2, 3):
        jitted(ramp(size))
    jitted.lower(ramp(4)).compile()
    jitted(ramp(4))

    assert traces == [(2,), (3,), (4,)]


def test_an_argument_that_is_named_static_may_hold_numpy_arrays():
    """Its numbers are sizes and indices of the program, compared by value."""
    traces = []

    @pm.filter_jit(static="n")
    def fn(x, n):
        traces.append(n)
        return x[:n]

    for size in np.array([1, 2, 2]):
        assert fn(ramp(4), size).shape == (size,)
    assert len(traces) == 2


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_clear_caches(shared):
    """Everything is traced again afterwards, and right; callables that are pytrees, too."""
    function, traces = counting(double)
    jitted = pm.filter_jit(pm.Partial(function.__wrapped__)) if shared else function
    jitted(ramp(2))
    pm.clear_caches()

    assert_same(jitted(ramp(2)), ramp(2) * 2)
    assert len(traces) == 2


# ---- threads


def test_threads_call_and_trace_at_once():
    """Threads that trace one function for different static values get their own results."""

    @pm.filter_jit
    def fn(model, x, n):
        return model(x) * n, n, jax.tree.map(lambda w: w * n, model)

    expected = [affine()(ramp(3)) * float(n) for n in range(6)]
    barrier = threading.Barrier(6)

    def work(i):
        barrier.wait()
        return [fn(affine(), ramp(3), float((i + j) % 6)) for j in range(6)]

    with ThreadPoolExecutor(6) as pool:
        for i, results in enumerate(pool.map(work, range(6))):
            for j, (y, n, model) in enumerate(results):
                assert n == (i + j) % 6
                assert_close(y, expected[(i + j) % 6])
                assert_close(model.weight, affine().weight * n)
