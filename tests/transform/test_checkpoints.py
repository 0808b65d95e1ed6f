"""filter_checkpoint."""

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.trees import Holder, affine, double, ramp

FORMS = {
    "function": lambda m, x: pm.filter_checkpoint(lambda m, *, x: m(x))(m, x=x),
    "for scans": pm.filter_checkpoint(prevent_cse=False)(lambda m, x: m(x)),
    "Module": lambda m, x: pm.filter_checkpoint(m)(x),
    "method": lambda m, x: pm.filter_checkpoint(m.__call__)(x),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("transform", [lambda f: f, pm.filter_jit, jax.jit])
@pytest.mark.sampled
def test_values_and_gradients_are_those_of_the_function(transform, form):
    """filter_checkpoint(f) == f, in value and gradient, jitted or not, inside a scan."""

    def loss(fn, model):
        step = lambda total, x: (total + jnp.sum(jnp.sin(fn(model, x))), None)  # noqa: E731
        return pm.filter_scan(step, jnp.zeros(()), ramp(2, 3))[0]

    both = jax.value_and_grad(loss, argnums=1)
    expected = both(lambda m, x: m(x), affine())
    assert_close(transform(lambda m: both(form, m))(affine()), expected)


def test_results_may_hold_anything():
    """Strings, functions and Modules are returned unchanged; a State has its new value."""
    count = pm.StateIndex(jnp.asarray(0))

    @pm.filter_checkpoint
    def fn(x, state):
        return (x, "text", Holder([double, x]), None), state.set(count, state.get(count) + 1)

    found, state = fn(ramp(2), state=pm.State(count))
    assert_same(found, (ramp(2), "text", Holder([double, ramp(2)]), None))
    assert int(state.get(count)) == 1
    assert_same(pm.filter_checkpoint(lambda: (1, "a"))(), (1, "a"))


EVERYTHING = {"policy": jax.checkpoint_policies.everything_saveable}


@pytest.mark.parametrize(("options", "is_again"), [({}, True), (EVERYTHING, False)])
def test_the_backward_pass_recomputes(options, is_again):
    """The backward program holds the forward pass again, unless the policy stores everything."""
    fn = pm.filter_checkpoint(lambda x: jnp.sin(jnp.exp(x)), **options)
    _, back = jax.vjp(fn, jnp.asarray(1.0))
    assert ("exp" in str(jax.make_jaxpr(back)(jnp.asarray(1.0)))) is is_again


def test_what_is_no_function_is_refused_at_once():
    """Before it is called, where the error would be about something else."""
    with pytest.raises(ArgumentError, match=r"filter_checkpoint\(fun\)"):
        pm.filter_checkpoint(3)
