"""Which parameters have no gradient: unused, or cut off; as `gradient_report` says it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import pytreemod as pm
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
    "custom vjp": (lambda v: second_gets_none(*v[:2]), [R, R, U]),
    "custom jvp": (lambda v: second_is_constant(*v[:2]), [R, C, U]),
    "vmap": (lambda v: jnp.sum(jax.vmap(lambda a: a * jnp.round(v[1]))(v[0])), [R, C, U]),
}


@pytest.mark.parametrize("name", CASES)
def test_each_leaf_reaches_the_loss_as_expected(name):
    """Dead code, derivatives that are zero everywhere, and leaves with neither."""
    run, expected = CASES[name]
    kinds = [row.kind for row in pm.debug.gradient_report(run)(VALUES)]

    assert [kind if kind in (C, U) else R for kind in kinds] == expected


def test_unused_parameters_are_named_by_a_warning_and_the_gradient_is_the_same():
    """`filter_grad(unused="warn")`, under filter_jit, too."""
    model = {"a": ramp(2), "c": jnp.float32(1)}

    def loss(model):
        return jnp.sum(model["a"])

    for jit in (lambda f: f, pm.filter_jit):
        with pytest.warns(pm.UnusedParameterWarning, match=r"model\['c'\]"):
            gradient = jit(pm.filter_grad(loss, unused="warn"))(model)
        assert pm.tree_equal(gradient, pm.filter_grad(loss)(model))
