"""Leaves that reach a loss or not: by expectation, and by JAX leaf by leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pytreemod as pm
from pytreemod.transform.derivatives.reaching import reach_of
from pytreemod.tree.traces import zero_tangents
from tests.goldens import refusals
from tests.helpers.trees import ramp

VALUES = [ramp(3), ramp(3) + 1, ramp(3) - 1]
R, C, U = "reaches", "cut off", "unused"


@jax.custom_vjp
def second_gets_none(a, b):
    """A product whose rule has no cotangent for one of its factors."""
    return jnp.sum(a * b)


second_gets_none.defvjp(
    lambda a, b: (second_gets_none(a, b), (a, b)), lambda kept, ct: (ct * kept[1], None)
)


@jax.custom_jvp
def second_is_constant(a, b):
    """A product whose rule has no tangent of one of its factors."""
    return jnp.sum(a * b)


second_is_constant.defjvp(
    lambda primals, tangents: (second_is_constant(*primals), jnp.sum(tangents[0] * primals[1]))
)


def scanned(is_cut):
    """Two carries in a scan, one of which is not returned."""

    def run(v):
        def step(carry, _):
            a, b = carry
            seen = lax.stop_gradient(b) if is_cut else 0.0
            return (a * jnp.sum(v[0]) + seen, b * jnp.sum(v[1])), None

        return lax.scan(step, (1.0, 1.0), None, length=2)[0][0]

    return run


def count_is_traced(v):
    """As often as a parameter says."""
    return lax.fori_loop(0, v[1][0].astype(int), lambda i, c: c * jnp.sum(v[0]), 1.0)


CASES = {
    "plain": (lambda v: jnp.sum(v[0] * v[1]), [R, R, U]),
    "times zero": (lambda v: jnp.sum(v[0] + 0 * v[1]), [R, R, U]),
    "stop": (lambda v: jnp.sum(v[0] * lax.stop_gradient(v[1])), [R, C, U]),
    "round": (lambda v: jnp.sum(v[0] * jnp.round(v[1])), [R, C, U]),
    "sign": (lambda v: jnp.sum(v[0] * jnp.sign(v[1])), [R, C, U]),
    "compare": (lambda v: jnp.sum(jnp.where(v[1] > 0, v[0], -v[0])), [R, C, U]),
    "index": (lambda v: v[0][jnp.argmax(v[1])], [R, C, U]),
    "shape": (lambda v: jnp.sum(v[0]) + jnp.sum(jnp.zeros_like(v[1])), [R, U, U]),
    "constant": (lambda v: jnp.float32(1), [U, U, U]),
    "dead in jit": (lambda v: jax.jit(lambda a, b: (a[0], b[0]))(*v[:2])[0], [R, U, U]),
    "stop in remat": (
        lambda v: jax.checkpoint(lambda a, b: jnp.sum(a * lax.stop_gradient(b)))(*v[:2]),
        [R, C, U],
    ),
    "dead in scan": (scanned(is_cut=False), [R, U, U]),
    "stop in scan": (scanned(is_cut=True), [R, C, U]),
    "predicate": (lambda v: lax.cond(v[1][0] > 0, jnp.sum, jnp.max, v[0]), [R, C, U]),
    "one branch": (lambda v: lax.cond(True, lambda: v[0][0], lambda: v[1][0]), [R, R, U]),
    "while": (count_is_traced, [R, C, U]),
    "custom vjp": (lambda v: second_gets_none(*v[:2]), [R, R, U]),
    "custom jvp": (lambda v: second_is_constant(*v[:2]), [R, C, U]),
    "vmap": (lambda v: jnp.sum(jax.vmap(lambda a: a * jnp.round(v[1]))(v[0])), [R, C, U]),
}


@pytest.mark.parametrize("name", CASES)
def test_each_leaf_reaches_the_loss_as_expected(name):
    """Dead code, zero derivatives, and leaves with neither."""
    run, expected = CASES[name]
    assert reach_of(run, VALUES) == expected


@pytest.mark.parametrize("name", [name for name in CASES if "custom" not in name])
def test_a_leaf_reaches_the_loss_if_jax_has_a_tangent_for_it(name):
    """The check of linear maps, in a trace for each leaf; it does not look into custom rules."""
    run, expected = CASES[name]

    def is_zero(i):
        notes = []

        def alone(marker, x):
            loss = run([x if j == i else v for j, v in enumerate(VALUES)])
            notes.extend(zero_tangents(marker, [loss]))
            return loss

        jax.jvp(alone, (1.0, VALUES[i]), (1.0, VALUES[i]))
        return notes[0]

    assert [is_zero(i) for i in range(3)] == [way != R for way in expected]


@pytest.mark.parametrize("name", CASES)
def test_what_is_unused_may_be_anything(name):
    """NaN as an unused leaf changes nothing."""
    run, expected = CASES[name]
    changed = [v * np.nan if way == U else v for v, way in zip(VALUES, expected, strict=True)]
    np.testing.assert_array_equal(run(VALUES), run(changed))


# ---- filter_grad(unused=)


def product(model, x):
    """A loss with a parameter that it uses, one that it cuts off, and one that it does not use."""
    return jnp.sum(model["a"] * jnp.round(model["b"]) * x)


MODEL = {"a": ramp(2), "b": ramp(2) + 1, "c": jnp.float32(1), "n": 3}


def test_unused_parameters_are_named_by_a_warning_and_the_gradient_is_the_same():
    """Under filter_jit, too, where the check runs once for each trace."""
    plain = pm.filter_grad(product)(MODEL, 2.0)
    for jit in (lambda f: f, pm.filter_jit):
        with pytest.warns(pm.UnusedParameterWarning, match=r"model\['c'\]: f32\[\], unused"):
            gradient = jit(pm.filter_grad(product, unused="warn"))(MODEL, 2.0)
        assert pm.tree_equal(gradient, plain)


def test_parameters_that_are_left_out_may_be_unused():
    """Leaves that are not differentiated are not checked; a loss with an aux is."""
    both = pm.filter_value_and_grad(
        lambda model, x: (product(model, x), model["c"]), has_aux=True, unused="error", wrt="a"
    )
    (value, aux), gradient = both(MODEL, 2.0)
    assert (value, aux) == (product(MODEL, 2.0), 1)
    assert gradient["b"] is None


def test_looking_uses_no_state_up_and_sows_nothing():
    """The function is traced once more, with separate States, without side effects."""

    class Counting(pm.Module):
        weight: jax.Array
        count: pm.StateIndex

        def __init__(self):
            self.weight, self.count = ramp(2), pm.StateIndex(jnp.int32(0))

        def __call__(self, x, state):
            state = state.set(self.count, state.get(self.count) + 1)
            return pm.sow("out", jnp.sum(self.weight * x)), state

    model, state = pm.make_with_state(Counting)()
    grad = pm.filter_grad(lambda model, x, state: model(x, state), has_aux=True, unused="error")
    (_, state), seen = pm.capture(grad)(model, 2.0, state)
    assert state.get(model.count) == 1
    assert list(seen) == ["out"]


def test_by_default_a_function_is_traced_once():
    """Looking is for those who ask for it."""
    calls = []

    def loss(x):
        calls.append(1)
        return jnp.sum(x)

    pm.filter_grad(loss)(ramp(2))
    assert len(calls) == 1
    pm.filter_grad(loss, unused="error")(ramp(2))
    assert len(calls) == 3


test_refusals = refusals(globals())
