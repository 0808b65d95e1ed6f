"""`filter_grad` and `filter_value_and_grad`: which leaves, and the order of results."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.parity.helpers import ramp, same_under_both_imports


def make_net(eqx):
    """A Module with float, integer, numpy and plain leaves, nested, and a static field."""

    class Layer(eqx.Module):
        weight: jax.Array
        bias: Any
        power: int = eqx.field(static=True, default=2)

        def __call__(self, x):
            return jnp.sum(self.weight * x**self.power) + self.bias

    class Net(eqx.Module):
        layers: tuple
        steps: jax.Array
        host: np.ndarray
        rate: float = 0.5

        def __call__(self, x):
            total = sum(layer(x) for layer in self.layers)
            return self.rate * total * self.steps.astype(jnp.float32) + jnp.sum(self.host)

    layers = (Layer(ramp(2), jnp.float32(0.5)), Layer(ramp(2) + 1, 1.0))
    return Net(layers, jnp.int32(3), np.ones(2, np.float32))


@same_under_both_imports
def test_inexact_arrays_of_the_first_argument_get_a_gradient(eqx):
    """Float arrays of both libraries get one; integers and plain numbers get None."""
    net = make_net(eqx)
    grads = eqx.filter_grad(lambda n, x: n(x))(net, ramp(2))
    return grads, jax.tree.structure(grads) == jax.tree.structure(
        eqx.filter(net, eqx.is_inexact_array)
    )


@same_under_both_imports
def test_leaves_that_are_not_differentiated_are_none(eqx):
    """In any container: integers, Python floats, strings, None and functions."""
    tree = {"x": jnp.float32(2.0), "n": jnp.int32(2), "rest": ["a", 3.0, None, jnp.sin]}
    return eqx.filter_grad(lambda t: t["rest"][3](t["x"]) * t["rest"][1])(tree)


@same_under_both_imports
def test_value_and_grad(eqx):
    """The value comes first, then the gradient."""
    return eqx.filter_value_and_grad(lambda n, x: n(x))(make_net(eqx), ramp(2))


@pytest.mark.parametrize("name", ["filter_grad", "filter_value_and_grad"])
@same_under_both_imports
def test_has_aux(eqx, name):
    """`filter_grad` gives (grad, aux); `filter_value_and_grad` gives ((value, aux), grad)."""

    @getattr(eqx, name)(has_aux=True)
    def loss(x, y):
        return jnp.sum(x**2 * y), {"y": y, "name": "aux", "n": 3, "x": x + 1}

    return loss(ramp(2), 3.0)


@same_under_both_imports
def test_other_arguments_are_not_differentiated(eqx):
    """Later positions and keywords are passed on, whatever they are."""

    @eqx.filter_grad
    def loss(x, power, *scales, shift=0.0, mode):
        total = jnp.sum((x + shift) ** power) * sum(scales)
        return -total if mode == "minus" else total

    return loss(ramp(2), 3, 1.0, 2.0, mode="minus"), loss(ramp(2), 2, 1.0, shift=ramp(2), mode="")


@same_under_both_imports
def test_a_tuple_differentiates_by_several(eqx):
    """Packing arguments in a tuple differentiates by all of them."""
    grads = eqx.filter_grad(lambda xy: jnp.sum(xy[0] * xy[1] ** 2))
    return grads((ramp(2), ramp(2) + 1)), grads([ramp(2), np.float32(3.0)])


@same_under_both_imports
def test_half_a_model_is_differentiated_by_partition(eqx):
    """The idiom for freezing: differentiate one half, combine inside."""
    net = make_net(eqx)
    nothing = jax.tree.map(lambda _: False, net)
    spec = eqx.tree_at(lambda n: n.layers[1].weight, nothing, True)
    kept, rest = eqx.partition(net, spec)

    @eqx.filter_value_and_grad
    def loss(kept, rest, x):
        return eqx.combine(kept, rest)(x)

    return loss(kept, rest, ramp(2))


@same_under_both_imports
def test_methods(eqx):
    """A decorated method differentiates by `self`; a bound method by its first argument."""

    class Layer(eqx.Module):
        weight: jax.Array
        count: jax.Array

        @eqx.filter_grad
        def slopes(self, x):
            return jnp.sum(self.weight**2 * x)

        @eqx.filter_value_and_grad(has_aux=True)
        def __call__(self, x):
            return jnp.sum(self.weight * x), "aux"

        def loss(self, x):
            return jnp.sum(self.weight * x**2)

    layer = Layer(ramp(2), jnp.int32(1))
    return layer.slopes(3.0), layer(2.0), eqx.filter_grad(layer.loss)(ramp(2))


@same_under_both_imports
def test_a_module_is_the_function(eqx):
    """The gradient of a Module is by its argument, with the Module's arrays constant."""
    net = make_net(eqx)
    return eqx.filter_grad(net)(ramp(2)), eqx.filter_value_and_grad(net)(ramp(2))
