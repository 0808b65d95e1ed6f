"""filter_checkpoint."""

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.trees import Holder, affine, double, ramp


def block(model, x, *, how):
    """Something worth recomputing."""
    return jnp.sin(jnp.sin(model(x))) if how == "twice" else model(x)


@pytest.mark.parametrize("transform", [lambda f: f, pm.filter_jit, jax.jit])
def test_values_and_gradients_are_those_of_the_function(transform):
    """filter_checkpoint(f) == f, in value and gradient, jitted or not."""

    def loss(fn):
        return lambda model: jnp.sum(fn(model, ramp(3), how="twice"))

    checked = loss(pm.filter_checkpoint(block))
    assert_close(transform(checked)(affine()), loss(block)(affine()))
    assert_close(transform(jax.grad(checked))(affine()), jax.grad(loss(block))(affine()))


def test_results_may_hold_anything():
    """Strings, functions and Modules are returned unchanged."""
    found = pm.filter_checkpoint(lambda x: (x, "text", Holder([double, x])))(ramp(2))

    assert_same(found, (ramp(2), "text", Holder([double, ramp(2)])))


def test_of_a_module():
    """A callable Module is differentiated through its own arrays."""
    gradient = pm.filter_grad(lambda m: jnp.sum(pm.filter_checkpoint(m)(ramp(3))))(affine())

    assert_close(gradient.bias, jnp.ones(2))


@pytest.mark.parametrize(
    ("options", "sines"),
    [({}, True), ({"policy": jax.checkpoint_policies.everything_saveable}, False)],
)
def test_the_backward_pass_recomputes(options, sines):
    """The backward program holds the forward pass again, unless the policy stores everything."""
    fn = pm.filter_checkpoint(lambda x: jnp.sin(jnp.exp(x)), **options)
    _, back = jax.vjp(fn, jnp.asarray(1.0))
    text = str(jax.make_jaxpr(back)(jnp.asarray(1.0)))

    assert ("exp" in text) is sines


def test_inside_scan():
    """prevent_cse=False, the form for loops, gives the same gradient."""

    def loss(step):
        def total(model):
            final, _ = jax.lax.scan(lambda h, _: (step(model, h), None), ramp(2), length=3)
            return jnp.sum(final)

        return total

    def step(model, h):
        return jnp.tanh(model.bias * h)

    found = jax.grad(loss(pm.filter_checkpoint(step, prevent_cse=False)))(affine())
    assert_close(found, jax.grad(loss(step))(affine()))


def test_what_is_no_function_is_refused_at_once():
    """Before it is called, where the error would be about something else."""
    with pytest.raises(ArgumentError, match="filter_checkpoint"):
        pm.filter_checkpoint(3)  # pyright: ignore
