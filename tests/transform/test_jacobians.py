"""filter_jacfwd, filter_jacrev and filter_hessian of functions of any trees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError
from tests.helpers.comparing import assert_close
from tests.helpers.trees import Affine, affine, double, ramp

JACOBIANS = {"filter_jacfwd": jax.jacfwd, "filter_jacrev": jax.jacrev}
both = pytest.mark.parametrize("name", JACOBIANS)
ALL = {**JACOBIANS, "filter_hessian": jax.hessian}
every = pytest.mark.parametrize("name", ALL)
X = ramp(3, start=np.float32(0.2))


@every
def test_it_is_jaxs_on_the_arrays_alone(name):
    """filter_jac(f)(m) == jax.jac(f on the partition)(m's arrays), with None elsewhere."""
    model = {"inner": affine(2, 3, np.float32(-0.4)), "steps": jnp.asarray(3), "act": jnp.tanh}
    arrays, rest = pm.partition(model, pm.is_inexact_array)
    f = lambda m: m["act"](m["inner"](X))  # noqa: E731
    expected = jax.jit(ALL[name](lambda arrays: f(pm.combine(arrays, rest))))(arrays)
    assert_close(pm.filter_jit(getattr(pm, name)(f))(model), expected, rtol=1e-4)
    nested = pm.filter_jit(pm.filter_jacfwd(pm.filter_jacrev(f)))(model)
    if name == "filter_hessian":
        assert_close(nested, expected, rtol=1e-4)


@both
def test_results_of_any_kind(name):
    """Floating arrays and numbers of the result have a tree of the argument, the rest has None."""
    rest = [jnp.arange(2), "text", None, double]

    def f(d):
        return {"y": d["x"] * 2, "z": [jnp.sum(d["x"]), np.ones(1, np.float32), 1.5], "rest": rest}

    like = {"x": jnp.ones(2), "s": None}
    expected = {
        "y": {**like, "x": 2 * jnp.eye(2)},
        "z": [like, {**like, "x": jnp.zeros((1, 2))}, {**like, "x": jnp.zeros(2)}],
        "rest": [None, None, None, None],
    }
    assert_close(getattr(pm, name)(f)({"x": jnp.ones(2), "s": "a"}), expected)
    made = getattr(pm, name)(lambda x: Affine(jnp.outer(x, x), x))(jnp.ones(2))
    assert isinstance(made, Affine)
    assert (made.weight.shape, made.bias.shape) == ((2, 2, 2), (2, 2))


@every
def test_argnums_aux_keywords_and_options(name):
    """One argument gives a tree for each result, several give a tuple, as in JAX."""
    a, b, c = jnp.ones(2), ramp(2), ramp(2) + 1.0
    f = lambda x, d, y, *, power: (jnp.sum(x * d["x"] ** power * y), "aux")  # noqa: E731
    plain = lambda x, d, y: f(x, {"x": d}, y, power=2)[0]  # noqa: E731
    make, by_hand = getattr(pm, name), ALL[name]
    several, aux = make(f, argnums=[0, -1], has_aux=True)(a, {"x": b, "s": "a"}, c, power=2)
    one, _ = make(f, True, argnums=1)(a, {"x": b, "s": "a"}, c, power=2)

    assert aux == "aux"
    assert_close(several, by_hand(plain, argnums=(0, 2))(a, b, c))
    assert_close(jax.tree.leaves(one), [by_hand(plain, argnums=1)(a, b, c)])
    z = jnp.asarray([1.0 + 2.0j])
    assert_close(make(jnp.sin, holomorphic=True)(z), by_hand(jnp.sin, holomorphic=True)(z))


MISTAKES = {
    "keyword": (lambda make: make(jnp.sin)(x=X), "not passed by position"),
    "nothing": (lambda make: make(jnp.sin)(3), "no floating array to differentiate"),
    "no result": (lambda make: make(lambda x: [jnp.arange(2), "a"])(X), "no floating array"),
    "no pair": (lambda make: make(jnp.sin, has_aux=True)(X), r"no pair \(result, aux\)"),
}


@every
@pytest.mark.parametrize(("call", "match"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_those_of_gradients(name, call, match):
    """An empty Jacobian would be returned in silence."""
    with pytest.raises(ArgumentError, match=match):
        call(getattr(pm, name))
