"""Derivatives under value semantics: scenarios of reference libraries, for values.

Each test is a scenario of Flax NNX's own suite (its name is in the docstring) that is written for
values: a function returns its changes, one leaf used twice has the sum of its gradients, and one
array at two paths is two leaves.
"""

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from tests.helpers.comparing import assert_close
from tests.helpers.trees import ramp


class Linear(pm.Module):
    """A layer with a counter of its calls."""

    kernel: jax.Array
    bias: jax.Array
    count: jax.Array

    def __call__(self, x):
        return x @ self.kernel + self.bias

    def counted(self, x):
        return self(x), self.replace(count=self.count + 1)


class Point(pm.Module):
    """Two numbers, one of them a statistic."""

    x: jax.Array
    y: jax.Array = pm.buffer()


def linear(size=2, start=0.1):
    return Linear(ramp(size, size) * start, ramp(size) * start, jnp.asarray(0))


def point(x=1.0, y=2.0):
    return Point(jnp.asarray(x), jnp.asarray(y))


X = ramp(2) / 10


# ---- TestGrad


def test_grad_by_the_other_kind():
    """grad_with_type_predicate: `wrt` picks the statistics instead."""
    grads = pm.filter_grad(lambda m: m.x * m.y, wrt=pm.select.role("buffer"))(point())
    assert_close(grads, Point(None, jnp.asarray(1.0)))


@pytest.mark.parametrize("inside", [False, True], ids=["arguments", "containers"])
@pytest.mark.parametrize("with_value", [False, True])
def test_grad_by_parts_of_several_models(inside, with_value):
    """multiple_args, multiple_args_in_pytrees: kernel of the first, bias of the second."""
    a, b = linear(start=0.1), linear(start=0.2)
    make = pm.filter_value_and_grad if with_value else pm.filter_grad

    def loss(m1, m2):
        return jnp.mean(m2(m1(X)) ** 2)

    if inside:
        wrt = [{"model": "kernel"}, {"model": "bias"}]
        result = make(lambda ms: loss(ms[0]["model"], ms[1]["model"]), wrt=wrt)(
            [{"model": a}, {"model": b}]
        )
    else:
        result = make(loss, argnums=(0, 1), wrt=("kernel", "bias"))(a, b)
    g1, g2 = jax.tree.leaves(
        result[1] if with_value else result, is_leaf=lambda x: isinstance(x, Linear)
    )

    expected = pm.filter_grad(loss, argnums=(0, 1))(a, b)
    assert_close(g1, Linear(expected[0].kernel, None, None))
    assert_close(g2, Linear(None, expected[1].bias, None))
    if with_value:
        assert_close(result[0], loss(a, b))


# ---- TestCustomVJP


def make_product(log=None):
    """`sin(x) * y` of a Module, with its gradient times two, and a counter that is returned."""

    @pm.filter_custom_vjp
    def f(m):
        return jnp.sin(m.x) * m.y, m.replace(x=m.x + 1)

    @f.def_fwd
    def f_fwd(perturbed, m):
        if log is not None:
            log.append(perturbed)
        return f(m), {"cos": jnp.cos(m.x), "sin": jnp.sin(m.x)}

    @f.def_bwd
    def f_bwd(residuals, grad_out, perturbed, m):
        g, of_changed = grad_out
        assert of_changed == Point(None, None)
        return Point(2 * residuals["cos"] * g * m.y, 2 * residuals["sin"] * g)

    return f


def test_custom_vjp_by_one_part():
    """diff_state: a gradient for x alone; the rule learns that y needs none."""
    log = []
    grads = pm.filter_grad(lambda m: make_product(log)(m)[0])(point())

    assert_close(grads, Point(2 * jnp.cos(1.0) * 2.0, None))
    assert log == [Point(True, False)]


# ---- TestRemat


def test_remat_of_a_counting_layer():
    """stateful: a counter that is returned counts once, though the layer runs twice."""

    @pm.filter_value_and_grad(has_aux=True)
    def loss(layer, x):
        y, layer = pm.filter_checkpoint(Linear.counted)(layer, x)
        return jnp.sum(jnp.sin(y)), layer

    (_, layer), grads = loss(linear(), X)

    assert int(layer.count) == 1
    assert_close(grads, pm.filter_grad(lambda m: jnp.sum(jnp.sin(m(X))))(linear()))
