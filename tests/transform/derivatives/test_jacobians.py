"""filter_jacfwd, filter_jacrev and filter_hessian of functions of any trees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import DerivativeError
from tests.helpers.comparing import assert_close
from tests.helpers.equations import equations
from tests.helpers.trees import Affine, Buffered, affine, ramp

JACOBIANS = {"filter_jacfwd": jax.jacfwd, "filter_jacrev": jax.jacrev}
both = pytest.mark.parametrize("name", JACOBIANS)
ALL = {**JACOBIANS, "filter_hessian": jax.hessian}
every = pytest.mark.parametrize("name", ALL)


class Net(pm.Module):
    """Floating arrays beside everything else."""

    inner: Affine
    steps: jax.Array
    act: object = jnp.tanh
    rate: float = 0.5
    names: tuple = ("a", None)

    def __call__(self, x):
        return self.rate * self.act(self.inner.weight @ x + self.inner.bias)


def net():
    return Net(affine(2, 3, np.float32(-0.4)), jnp.asarray(3))


X = ramp(3, start=np.float32(0.2))


def quotients(f, x, step=1e-2):
    """The Jacobian of an array by one, from central differences in NumPy."""
    columns = [
        (np.asarray(f(x + step * d)) - np.asarray(f(x - step * d))) / (2 * step)
        for d in np.eye(x.size, dtype=np.float32).reshape(x.size, *x.shape)
    ]
    return np.stack(columns, -1).reshape(*columns[0].shape, *x.shape)


@both
def test_it_is_jaxs_on_the_arrays_alone(name):
    """filter_jac(f)(m) == jax.jac(f on the partition)(m's arrays), with None elsewhere."""
    arrays, rest = pm.partition(net(), pm.is_inexact_array)
    expected = jax.jit(JACOBIANS[name](lambda arrays: pm.combine(arrays, rest)(X)))(arrays)
    found = pm.filter_jit(getattr(pm, name)(lambda m, x: m(x)))(net(), X)

    assert_close(found, expected)
    assert found.inner.weight.shape == (2, 2, 3)
    assert (found.steps, found.rate, found.names) == (None, None, (None, None))


@every
@pytest.mark.slow
def test_it_is_what_finite_differences_say(name):
    """First derivatives agree with difference quotients, second with those of the first."""

    def f(tree):
        return jnp.sin(tree["x"]) * tree["x"][::-1]

    def plain(x):
        return f({"x": x})

    below = jax.jacrev(plain) if name == "filter_hessian" else plain
    found = getattr(pm, name)(f)({"x": X, "n": 3})["x"]
    found = found["x"] if name == "filter_hessian" else found

    assert_close(found, jnp.asarray(quotients(below, X)), rtol=1e-2, atol=1e-2)


@both
def test_results_of_any_kind(name):
    """Floating arrays and numbers of the result have a tree of the argument, the rest has None."""

    def f(d):
        return {"y": d["x"] * 2, "z": [jnp.sum(d["x"]), np.ones(1, np.float32), 1.5], "rest": rest}

    rest = [jnp.arange(2), "text", None, double]
    found = getattr(pm, name)(f)({"x": jnp.ones(2), "s": "a"})

    like = {"x": jnp.ones(2), "s": None}
    expected = {
        "y": {**like, "x": 2 * jnp.eye(2)},
        "z": [like, {**like, "x": jnp.zeros((1, 2))}, {**like, "x": jnp.zeros(2)}],
        "rest": [None, None, None, None],
    }
    assert_close(found, expected)


def double(x):
    return 2 * x


@both
def test_a_module_as_the_result(name):
    """The Jacobian of a construction is an instance that holds matrices."""
    found = getattr(pm, name)(lambda x: Affine(jnp.outer(x, x), x))(jnp.ones(2))

    assert isinstance(found, Affine)
    assert (found.weight.shape, found.bias.shape) == ((2, 2, 2), (2, 2))


def test_hessian_is_jacfwd_of_jacrev():
    """filter_hessian(f) == filter_jacfwd(filter_jacrev(f)), and so of jax.hessian."""

    def loss(m, x):
        return jnp.sum(m(x) ** 2)

    def by_hand(w):
        return loss(pm.tree_at(lambda m: m.inner.weight, net(), w), X)

    # Compiled: one program instead of a hundred small ones.
    found = pm.filter_jit(pm.filter_hessian(loss))(net(), X)
    nested = pm.filter_jit(pm.filter_jacfwd(pm.filter_jacrev(loss)))(net(), X)
    expected = jax.jit(jax.hessian(by_hand))(net().inner.weight)

    assert_close(found, nested)
    assert_close(found.inner.weight.inner.weight, expected, rtol=1e-4, atol=1e-5)
    assert found.inner.bias.inner.weight.shape == (2, 2, 3)
    assert found.inner.bias.steps is None


@every
def test_argnums(name):
    """One argument gives a tree for each result, several give a tuple, as in JAX."""

    def f(x, d, y):
        return jnp.sum(x * d["x"] ** 2 * y)

    def plain(x, d, y):
        return f(x, {"x": d}, y)

    a, b, c = jnp.ones(2), ramp(2), ramp(2) + 1.0
    make, by_hand = getattr(pm, name), ALL[name]
    several = make(f, argnums=[0, -1])(a, {"x": b, "s": "a"}, c)
    one = make(f, argnums=1)(a, {"x": b, "s": "a"}, c)

    assert_close(several, by_hand(plain, argnums=(0, 2))(a, b, c))
    plain_one = by_hand(plain, argnums=1)(a, b, c)
    assert_close(one["x"]["x"] if name == "filter_hessian" else one["x"], plain_one)


@every
def test_wrt(name):
    """Buffers are left out, unless `wrt` says otherwise; it may differ by argument."""
    model = Buffered(ramp(2), ramp(2), ramp(2))

    def f(m, x):
        return jnp.sum(m.weight * m.mean * m.low_rank * x)

    make = getattr(pm, name)
    default = make(f)(model, ramp(2))
    only = make(f, wrt=pm.select.role("lora"))(model, ramp(2))
    mixed = make(f, argnums=(0, 1), wrt={"m": pm.select.role("buffer")})(model, ramp(2))

    def picked(tree):
        return [leaf is not None for leaf in (tree.weight, tree.mean, tree.low_rank)]

    assert picked(default) == [True, False, True]
    assert picked(only) == [False, False, True]
    assert picked(mixed[0]) == [False, True, False]
    assert mixed[1] is not None


@every
def test_holomorphic_functions(name):
    """`holomorphic` goes to JAX; where it is missing, complex leaves are named."""
    z = jnp.asarray([1.0 + 2.0j])
    make = getattr(pm, name)

    assert_close(make(jnp.sin, holomorphic=True)(z), ALL[name](jnp.sin, holomorphic=True)(z))
    place = "result" if name == "filter_jacrev" else "x"
    with pytest.raises(DerivativeError, match=rf"{name}[\s\S]*at {place}: c64\[1\]"):
        make(jnp.sin)(z)


@every
def test_no_operation_is_added(name):
    """The program has the operations of JAX's transform on the arrays alone."""
    model = affine()

    def by_hand(arrays):
        return jnp.sum(jnp.tanh(arrays[0] @ X + arrays[1]))

    def of_a_tree(model, x):
        return {"y": jnp.sum(jnp.tanh(model.weight @ x + model.bias)), "name": "n", "x": None}

    def through_pm(weight, bias):
        return getattr(pm, name)(of_a_tree)(Affine(weight, bias), X)["y"]

    assert equations(through_pm, model.weight, model.bias) == equations(
        lambda *arrays: ALL[name](by_hand)(list(arrays)), model.weight, model.bias
    )
