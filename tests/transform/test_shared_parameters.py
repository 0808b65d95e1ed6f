"""A parameter at two paths of a model causes a warning where the model enters training."""

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import SharedParameterWarning
from tests.helpers.trees import Buffered, ramp

X = jnp.ones((2, 3))


def loss(model, x):
    return jnp.sum(model(x) ** 2)


def linear():
    return nn.Linear(3, 3, key=jax.random.key(0))


def one_array():
    layer = linear()
    return nn.Sequential([layer, linear().replace(weight=layer.weight)])


WAYS = {
    "trainable": pm.trainable,
    "filter_grad": lambda m: pm.filter_grad(loss)(m, X),
    "filter_jacrev": lambda m: pm.filter_jacrev(loss)(m, X),
    "filter_vjp": lambda m: pm.filter_vjp(loss, m, X),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("make", [one_array, lambda: nn.Sequential([linear()] * 2)])
def test_a_shared_parameter_is_told(make, way):
    """Once, in the user's line; in silence it would be two from the first step on."""
    with pytest.warns(SharedParameterWarning, match="weight") as told:
        way(make())

    assert len(told) == 1
    assert told[0].filename == __file__


@pytest.mark.filterwarnings("error::pytreemod.errors.SharedParameterWarning")
def test_what_is_two_or_not_trained_is_not_told():
    """Buffers, small arrays, what wrt excludes, a layer called twice, a model and its average."""
    mask, zeros, model = jnp.eye(3), jnp.zeros(3), linear()
    small = nn.Sequential([linear().replace(bias=zeros), linear().replace(bias=zeros)])
    with_buffers = [Buffered(ramp(3, 3), mask, ramp(3, 3)) for _ in range(2)]

    for way in WAYS.values():
        way(small)
    pm.trainable(with_buffers)
    pm.filter_grad(loss, wrt=pm.select.path("layers.0.bias"))(one_array(), X)
    pm.filter_grad(lambda model, average: loss(model, model(X)))(model, model)
    pm.filter_grad(lambda both: loss(both["model"], X), wrt="model")(
        {"model": model, "average": model}
    )
