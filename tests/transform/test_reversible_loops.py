"""Loops of the kinds "checkpointed" and "bounded": derivatives, steps, members of a map."""

import functools as ft
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import pytreemod as pm
from pytreemod.errors import ArgumentError, StructureError

KINDS = {
    "checkpointed": {"kind": "checkpointed", "checkpoints": 2},
    "bounded": {"kind": "bounded", "max_steps": 20},
}
every_kind = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)


def wave(x, w, n, **options):
    """Step `n` times; the carry has an integer, a key and a text, too, and `w` is captured."""

    def step(v):
        key, noise = jax.random.split(v["key"])
        x = jnp.sin(v["x"] * w) + 0.1 * jax.random.uniform(noise)
        return {**v, "i": v["i"] + 1, "x": x, "key": key}

    init = {"i": 0, "x": x, "key": jax.random.key(0), "name": "wave"}
    return pm.filter_while_loop(lambda v: v["i"] < n, step, init, **options)


def by_hand(x, w, n):
    key = jax.random.key(0)
    for _ in range(n):
        key, noise = jax.random.split(key)
        x = jnp.sin(x * w) + 0.1 * jax.random.uniform(noise)
    return x


def gradients(f, x, w):
    return jax.value_and_grad(f, (0, 1))(x, w)


def assert_close(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


@given(st.integers(0, 30), st.integers(1, 9), st.booleans())
@settings(max_examples=6, deadline=None)
def test_a_checkpointed_loop_has_the_gradient_of_the_steps(n, checkpoints, jit):
    """Whatever the number of steps, and of the carries that are stored."""
    options = {"kind": "checkpointed", "checkpoints": checkpoints}
    found = ft.partial(gradients, lambda x, w: wave(x, w, n, **options)["x"])
    found = (jax.jit(found) if jit else found)(0.7, 0.9)
    assert_close(found, gradients(lambda x, w: by_hand(x, w, n), 0.7, 0.9))


@pytest.mark.parametrize("n", [0, 1, 16, 20])
@pytest.mark.sampled(2)
def test_a_bounded_loop_has_every_derivative(n):
    """Forward, backward, and backward twice."""
    f, hand = (lambda x: wave(x, 0.9, n, **KINDS["bounded"])["x"]), lambda x: by_hand(x, 0.9, n)
    for derive in (jax.jacfwd, jax.grad, lambda f: jax.grad(jax.grad(f))):
        assert_close(jax.jit(derive(f))(0.7), derive(hand)(0.7))


def test_a_checkpointed_loop_has_a_hessian():
    """Forward mode of its reverse mode works; forward mode alone is JAX's error."""
    f = lambda x: wave(x, 0.9, 5, **KINDS["checkpointed"])["x"]  # noqa: E731
    assert_close(jax.hessian(f)(0.7), jax.hessian(lambda x: by_hand(x, 0.9, 5))(0.7))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jacfwd(f)(0.7)


def test_the_gradient_equals_finite_differences():
    """In float64."""
    with jax.enable_x64(True):
        f = jax.jit(lambda w: wave(0.7, w, 9, **KINDS["checkpointed"])["x"])
        w, h = jnp.float64(0.9), 1e-6
        np.testing.assert_allclose(jax.grad(f)(w), (f(w + h) - f(w - h)) / (2 * h), rtol=1e-7)


@every_kind
def test_members_of_a_map_take_steps_of_their_own(options):
    """vmap of grad, and grad of vmap; a finished member is not changed, nor counted."""
    xs, ns = jnp.array([0.1, 0.2, 0.3]), jnp.array([0, 3, 9])
    f = lambda x, w, n: wave(x, w, n, **options)["x"]  # noqa: E731
    expected = [jax.grad(by_hand, (0, 1))(x, 0.9, n) for x, n in zip(xs, [0, 3, 9], strict=True)]
    found = jax.vmap(jax.grad(f, (0, 1)), (0, None, 0))(xs, 0.9, ns)
    assert_close(found, jax.tree.map(lambda *g: jnp.stack(g), *expected))
    total = jax.grad(lambda w: jax.vmap(f, (0, None, 0))(xs, w, ns).sum())(0.9)
    assert_close(total, sum(g[1] for g in expected))
    count = jax.vmap(lambda x, n: wave(x, 0.9, n, return_steps=True, **options)[1])
    assert count(xs, ns).tolist() == [0, 3, 9]


@every_kind
def test_a_finished_member_gives_no_nan(options):
    """The derivative of a step that it no longer takes may be infinite."""

    def f(x):
        step = lambda x: jnp.sqrt(x - 1)  # noqa: E731
        return pm.filter_while_loop(lambda x: x > 1, step, x, **options)

    assert_close(jax.vmap(jax.grad(f))(jnp.array([2.0, 26.0])), jnp.array([0.5, 0.0125]))


@every_kind
def test_loops_nest(options):
    """A loop in a loop has the gradient of the product."""

    def inner(x):
        return wave(x, 0.9, 3, **options)["x"]

    def outer(x):
        step = lambda v: (v[0] + 1, inner(v[1]))  # noqa: E731
        return pm.filter_while_loop(lambda v: v[0] < 4, step, (0, x), **options)[1]

    def expected(x):
        for _ in range(4):
            x = by_hand(x, 0.9, 3)
        return x

    assert_close(jax.jit(jax.grad(outer))(0.7), jax.grad(expected)(0.7))


@pytest.mark.parametrize("kind", ["lax", "checkpointed", "bounded"])
def test_a_loop_stops_at_its_bound(kind):
    """After max_steps it returns the value that it has; return_steps counts."""
    run = ft.partial(pm.filter_while_loop, lambda x: x < 100.0, lambda x: 2 * x, kind=kind)
    value, steps = run(jnp.float32(1), max_steps=3, return_steps=True)
    assert (float(value), int(steps)) == (8, 3)
    value, steps = run(jnp.float32(1), max_steps=17, return_steps=True)
    assert (float(value), int(steps)) == (128, 7)
    assert float(run(jnp.float32(1), max_steps=0)) == 1


def calls(n, checkpoints):
    """Count the steps that a gradient computes."""
    count = []

    def step(v):
        jax.debug.callback(count.append, v[0])
        return v[0] + 1, jnp.sin(v[1])

    def f(x):
        options = {"kind": "checkpointed", "checkpoints": checkpoints}
        return pm.filter_while_loop(lambda v: v[0] < n, step, (0, x), **options)[1]

    jax.block_until_ready(jax.jit(jax.grad(f))(1.0))
    jax.effects_barrier()
    return len(count)


# Equinox 0.13.8, with 14 and 20 checkpoints: measured with the same callback.
@pytest.mark.parametrize(
    ("n", "stored", "theirs"),
    [(100, 14, 286), pytest.param(10_000, 20, 61_860, marks=pytest.mark.slow)],
)
def test_no_more_steps_than_equinox(n, stored, theirs):
    """The first carry is stored beside the others, so this is the same memory."""
    assert calls(n, stored - 1) <= theirs


@pytest.mark.parametrize("n", [1, 20, 105])
def test_each_step_is_computed_at_most_three_times(n):
    """With c checkpoints, in at most (c + 1)(c + 2) / 2 steps; twice, if all are stored."""
    assert calls(n, math.isqrt(2 * n)) <= 3 * n
    assert calls(n, n) == 2 * n


@pytest.mark.parametrize("reverse", [False, True])
def test_a_checkpointed_scan_is_the_scan(reverse):
    """Its results, its stacked results, and gradients by carry, elements and captured arrays."""

    def f(c, xs, w, kind):
        step = lambda c, x: (jnp.sin(c * x) + w, {"y": c * x, "name": "y"})  # noqa: E731
        c, ys = pm.filter_scan(step, c, xs, reverse=reverse, kind=kind)
        return c + ys["y"] @ jnp.arange(9.0), ys

    xs = jnp.linspace(0.1, 0.9, 9)
    run = ft.partial(pm.filter_jit(jax.value_and_grad(f, (0, 1, 2), has_aux=True)), 0.3, xs, 0.5)
    (found, ys), grads = run("checkpointed")
    (expected, expected_ys), expected_grads = run("lax")
    assert_close((found, ys["y"], grads), (expected, expected_ys["y"], expected_grads))
    assert ys["name"] == "y"


@pytest.mark.parametrize("reverse", [False, True])
def test_a_checkpointed_scan_shows_what_its_steps_sow(reverse):
    """Stacked as the elements are, and beside a gradient, too."""

    def f(c, xs, kind):
        step = lambda c, x: (jnp.sin(c * pm.sow("x", x)), None)  # noqa: E731
        return pm.filter_scan(step, c, xs, reverse=reverse, kind=kind)[0]

    xs = jnp.linspace(0.1, 0.9, 9)
    for fn in (f, pm.filter_jit(pm.filter_grad(f))):
        out, seen = pm.capture(fn)(jnp.float32(0.3), xs, "checkpointed")
        assert_close(out, fn(jnp.float32(0.3), xs, "lax"))
        assert_close(seen, {"x": xs})


@pytest.mark.parametrize("options", [{}, *KINDS.values()], ids=["lax", *KINDS])
def test_a_loop_is_found_again(options):
    """Outside of compiled code, too; after an error in its body, but for JAX's own loop."""
    traces, fails = [], bool(options)

    def body(x):
        traces.append(x)
        if fails and len(traces) == 1:
            raise RuntimeError("stop")
        return 2 * x

    run = ft.partial(pm.filter_while_loop, lambda x: x < 100.0, body, jnp.float32(1.0), **options)
    if fails:
        with pytest.raises(RuntimeError, match="stop"):
            run()
    assert [run(), run()] == [128.0, 128.0]
    count = len(traces)
    assert [run() for _ in range(5)] == [128.0] * 5
    assert len(traces) == count


def test_threads_share_a_loop():
    """Four at a time call one function: each gets the gradient for its own numbers."""
    start, grad = threading.Barrier(4), jax.grad(double_until)

    def run(limit):
        start.wait()
        return [float(grad(1.0, limit)) for _ in range(5)]

    limits = [1.0, 3.0, 9.0, 100.0]
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(run, limits)]
    assert found == [[2.0 ** math.ceil(math.log2(limit))] * 5 for limit in limits]


def double_until(x, limit):
    return pm.filter_while_loop(is_below, double, (x, limit), kind="checkpointed")[0]


def is_below(carry):
    return carry[0] < carry[1]


def double(carry):
    return 2 * carry[0], carry[1]


@pytest.mark.parametrize("traced", [False, True])
def test_a_checkpointed_fori_loop_is_the_loop(traced):
    """Also with a traced bound, for which JAX's has no reverse mode."""
    run = ft.partial(pm.filter_fori_loop, 2, body_fun=lambda i, x: jnp.sin(x) * jnp.float32(i))
    f = lambda x, upper: run(upper, init_val=x, kind="checkpointed")  # noqa: E731
    found = (jax.jit(jax.grad(f)) if traced else jax.grad(f, 0))(0.4, 7)
    assert_close(found, jax.grad(lambda x: run(7, init_val=x))(0.4))


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"kind": "other"}, "not 'other'"),
        ({"kind": "bounded"}, "max_steps"),
        ({"kind": "checkpointed", "checkpoints": 0}, "at least 1"),
    ],
)
def test_a_wrong_option_is_refused(options, fact):
    """By name."""
    with pytest.raises(ArgumentError, match=fact):
        wave(1.0, 1.0, 3, **options)


def test_unroll_is_refused():
    """A loop with a reverse mode would ignore it."""
    with pytest.raises(ArgumentError, match=r"filter_fori_loop of .*unroll is for the kind 'lax'"):
        pm.filter_fori_loop(0, 3, lambda i, x: x, 1.0, unroll=2, kind="bounded")
    with pytest.raises(ArgumentError, match=r"filter_scan of .*unroll is for the kind 'lax'"):
        pm.filter_scan(lambda c, x: (c, x), 1.0, length=3, unroll=True, kind="checkpointed")


@every_kind
def test_what_is_no_loop_is_refused(options):
    """A condition that is no scalar bool; a value that changes, by path."""
    for condition in (lambda v: v["x"], lambda v: v["x"] < jnp.ones(1)):
        with pytest.raises(StructureError, match="scalar bool"):
            pm.filter_while_loop(condition, lambda v: v, {"x": 1.0}, **options)
    change = lambda v: {"x": jnp.ones(2)}  # noqa: E731
    with pytest.raises(StructureError, match=r"\['x'\]"):
        pm.filter_while_loop(lambda v: True, change, {"x": jnp.ones(1)}, **options)
