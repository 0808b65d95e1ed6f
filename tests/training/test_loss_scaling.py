"""Loss scaling: the factor as a value, and steps that are skipped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from tests.helpers.trees import affine, ramp


def history(scale, answers):
    factors = []
    for finite in answers:
        scale = scale.adjust(finite)
        factors.append(float(scale.loss_scale))
    return factors


def test_the_factor_grows_and_shrinks():
    """After `period` finite steps in a row, and at each that is not finite; not below `minimum`."""
    scale = pm.LossScale(8.0, period=2, growth=4.0, minimum=2.0)

    assert history(scale, [True, True, True, False, True, True]) == [8, 32, 32, 8, 8, 32]
    assert history(scale, [False, False, False]) == [2, 2, 2]
    # The step that was not finite starts a new row.
    assert history(scale, [True, False, True, True]) == [8, 2, 2, 8]
    assert history(pm.LossScale(8.0, period=3), [True] * 4) == [8, 8, 16, 16]


def test_the_factor_grows_as_long_as_one_can_divide_by_it():
    """At 2**127 one over it was taken for 0 by XLA: all gradients were 0, and finite."""
    scale = pm.LossScale(2.0**124, period=1)
    grown = [2.0**125, 2.0**126, 2.0**126]
    assert history(scale, [True] * 3) == grown

    for _ in grown:
        scale = scale.adjust(True)
    assert float(scale.unscale(scale.scale(jnp.ones(())))) == 1
    # Also where the factor is a constant of the program.
    assert float(jax.jit(scale.unscale)(jnp.asarray(2.0**126))) == 1


def test_an_overflow_never_raises_the_factor():
    """With a minimum above the factor it did."""
    assert history(pm.LossScale(0.5, minimum=0.25), [False, False]) == [0.25, 0.25]
    # One that never changes is never raised.
    still = pm.LossScale(0.5, period=None)
    assert still.adjust(False) is still


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64])
def test_scaling_and_unscaling_is_exact(dtype):
    """For factors that are powers of two, in the dtype of the scaled value."""
    scale = pm.LossScale(2.0**10)
    tree = {"a": jnp.asarray([1.5, -3.0], dtype), "b": None, "c": jnp.arange(3), "d": "text"}

    back = scale.unscale(scale.scale(tree))

    assert scale.scale(tree)["a"].dtype == dtype
    assert pm.tree_equal(back, tree)


def test_factors_beyond_float16_serve_for_float16():
    """They are never made float16: 2**20 would be infinite, and 2**-20 a denormal."""
    scale = pm.LossScale(2.0**20)

    assert float(scale.scale(jnp.asarray(2.0**-10, jnp.float16))) == 2.0**10
    assert float(scale.unscale(jnp.asarray(2.0**12, jnp.float16))) == 2.0**-8


def test_it_goes_through_jit_and_scan():
    """Its structure never changes, and one trace serves for all of its values."""
    answers = jnp.asarray([True, True, False, True])

    @pm.filter_jit(max_traces=1)
    def run(scale, answers):
        def step(scale, finite):
            scale = scale.adjust(finite)
            return scale, scale.loss_scale

        return pm.filter_scan(step, scale, answers)

    last, factors = run(pm.LossScale(8.0, period=2), answers)
    run(last, answers)

    assert factors.tolist() == [8, 16, 8, 8]
    assert jax.tree.structure(last) == jax.tree.structure(pm.LossScale(8.0, period=2))


FINITE = {
    "nothing": ({}, True),
    "no floating array": ([jnp.arange(3), None, "text"], True),
    "finite": ([jnp.ones(2), np.ones(3), jnp.ones(2, jnp.bfloat16)], True),
    "an infinity": ([jnp.ones(2), jnp.asarray([1, -jnp.inf])], False),
    "no number": ([np.asarray([np.nan])], False),
    "a complex one": ([jnp.asarray(complex(0, jnp.inf))], False),
}


@pytest.mark.parametrize(("tree", "expected"), FINITE.values(), ids=FINITE)
def test_all_finite(tree, expected):
    assert bool(pm.all_finite(tree)) is expected
    assert pm.all_finite(tree).shape == ()
    assert bool(pm.filter_jit(pm.all_finite)(tree)) is expected


def test_a_tree_is_selected():
    """Models, keys and State; non-arrays must be equal."""
    new, old = affine(2, 2), affine(2, 2, start=np.float32(5))
    key, other = jax.random.key(0), jax.random.key(1)
    select = pm.filter_jit(pm.select_tree)

    assert pm.tree_equal(select(jnp.asarray(True), (new, key, 1), (old, other, 1)), (new, key, 1))
    assert pm.tree_equal(select(jnp.asarray(False), (new, key), (old, other)), (old, other))
    assert pm.select_tree(False, [1.0], [1.0]) == [1.0]


def test_the_state_of_a_skipped_step_is_the_one_before():
    """An old State may be taken, as long as the step has not used it up outside of a transform."""
    model, state = pm.make_with_state(pm.nn.BatchNorm)(2)

    @pm.filter_jit
    def step(model, state, x):
        def loss(model, state):
            out, state = model(x, state)
            return jnp.sum(out**2), state

        (_, new), grads = pm.filter_value_and_grad(loss, has_aux=True)(model, state)
        return pm.select_tree(pm.all_finite(grads), new, state)

    running = step(model, state, ramp(3, 2)).get(model.state_index)[0]
    skipped = step(model, state, ramp(3, 2).at[0, 0].set(jnp.inf)).get(model.state_index)

    assert not np.array_equal(running, np.zeros(2))
    np.testing.assert_array_equal(skipped, [[0, 0], [1, 1]])
