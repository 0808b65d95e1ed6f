"""filter_linear_transpose."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np

import pytreemod as pm
from tests.goldens import refusals
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.trees import Affine, Holder, ramp


def mixed(model, x, n):
    """Linear in the arrays of a Module and of a dict, which have other leaves, too."""
    y = model.weight @ jnp.asarray([1.0, -1.0, 2.0]) + n * model.bias
    return Holder({"y": y, "z": [x["a"] * 2, "text"], "n": n})


PRIMALS = Affine(ramp(2, 3), ramp(2)), {"a": ramp(2), "unit": "cm"}, 3


def dot(a, b):
    """The sum of the products of all arrays in two trees."""
    pairs = zip(*(filter(pm.is_array, jax.tree.leaves(x)) for x in (a, b)), strict=True)
    return sum(jnp.sum(x * y) for x, y in pairs)


def test_the_transpose_is_adjoint():
    """<transposed(ct), x> == <ct, fun(x)>, for trees with everything in them."""
    ct = Holder({"y": ramp(2, start=-1.0), "z": [ramp(2, start=0.5), None], "n": None})
    found = pm.filter_linear_transpose(mixed, *PRIMALS)(ct)

    assert_close(dot(found, PRIMALS), dot(ct, mixed(*PRIMALS)))
    assert (found[1]["unit"], found[2]) == (None, None)
    assert_same(found, pm.filter_vjp(mixed, *PRIMALS)[1](ct))


def test_on_arrays_it_is_that_of_jax():
    """filter_linear_transpose(f, x) == jax.linear_transpose(f, x), in and outside of jit."""
    fun = ft.partial(jnp.matmul, ramp(2, 3))
    expected = jax.linear_transpose(fun, ramp(3))(ramp(2))
    transposed = pm.filter_linear_transpose(fun, jax.ShapeDtypeStruct((3,), jnp.float32))

    assert_same(transposed(ramp(2)), expected)
    assert_same(pm.filter_jit(lambda ct: transposed(ct))(ramp(2)), expected)


def test_a_module_is_a_constant_function():
    """It is not linear in its arrays; a bias that it adds is left out."""
    model = Affine(ramp(2, 3), ramp(2))

    (found,) = pm.filter_linear_transpose(model, ramp(3))(ramp(2))
    assert_close(found, model.weight.T @ ramp(2))


def test_what_is_not_floating_is_constant():
    """Integers are passed unchanged, and None means a zero cotangent."""
    transposed = pm.filter_linear_transpose(lambda x, i: x[i], ramp(3), np.asarray([2, 0]))

    assert_same(transposed(ramp(2)), (jnp.asarray([2.0, 0.0, 1.0]), None))
    assert_same(transposed(None), (jnp.zeros(3), None))


test_refusals = refusals(globals())
