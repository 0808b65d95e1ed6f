"""filter_checkify."""

import jax.numpy as jnp
import pytest
from jax.experimental import checkify

import pytreemod as pm
from tests.helpers.comparing import assert_close
from tests.helpers.equations import equations
from tests.helpers.trees import ramp


def positive(x, name):
    """A check of the user's, and a non-array result."""
    checkify.check(jnp.all(x > 0), "must be positive, is {x}", x=jnp.min(x))
    return jnp.log(x), name


@pytest.mark.parametrize("through", [lambda f: f, pm.filter_jit])
def test_checks_come_out_as_a_value(through):
    """A pair: the error, which has methods, and the result of the function."""
    fn = through(pm.filter_checkify(positive))

    error, (y, name) = fn(ramp(2), "x")
    assert error.get() is None
    error.throw()
    assert_close(y, jnp.log(ramp(2)))
    assert name == "x"
    error, (y, _) = fn(ramp(2) - 2, "x")
    assert error.get().startswith("must be positive, is -1.0")


def test_only_the_checks_that_were_asked_for():
    """By default it does not check for NaNs."""
    error, out = pm.filter_checkify(lambda x: jnp.log(x))(-ramp(1))

    assert error.get() is None
    assert bool(jnp.isnan(out[0]))


def test_under_vmap():
    """The error knows the index of the member."""
    error, (_, name) = pm.filter_vmap(pm.filter_checkify(positive))(ramp(3) - 2, "x")

    assert "at mapped index 0" in error.get()
    assert "at mapped index 2" not in error.get()
    assert name == "x"


def test_together_with_error_if():
    """One raises, the other waits to be asked."""

    @pm.filter_jit
    @pm.filter_checkify
    def fn(x):
        checkify.check(jnp.all(x > 0), "functional")
        return pm.error_if(x, jnp.any(x > 1), "raised")

    assert fn(-ramp(1))[0].get().startswith("functional")


def test_no_equation_is_added():
    """The program has the equations of JAX's checkify on the arrays."""
    ours = equations(lambda x: pm.filter_checkify(positive)(x, "x")[0], ramp(2))

    assert ours == equations(lambda x: checkify.checkify(lambda x: positive(x, "")[0])(x), ramp(2))
    assert sum(ours.values()) > 3
