"""A parameter at two paths of a model causes a warning where the model enters training."""

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import SharedParameterWarning

X = jnp.ones((2, 3))


def loss(model, x):
    """A scalar."""
    return jnp.sum(model(x) ** 2)


def linear():
    """A layer."""
    return nn.Linear(3, 3, key=jax.random.key(0))


class Own(pm.Module):
    """A user's class that keeps one layer in two fields."""

    encode: nn.Linear
    decode: nn.Linear

    def __init__(self):
        self.encode = self.decode = linear()

    def __call__(self, x):
        return self.decode(self.encode(x))


class Masked(pm.Module):
    """A layer with a buffer."""

    weight: jax.Array
    mask: jax.Array = pm.buffer()

    def __call__(self, x):
        return x @ (self.weight * self.mask)


SHARED = {
    "one layer": lambda: nn.Sequential([linear()] * 2),
    "one array": lambda: nn.Sequential([(a := linear()), linear().replace(weight=a.weight)]),
    "two fields": Own,
}
WAYS = {
    "trainable": pm.trainable,
    "filter_grad": lambda m: pm.filter_grad(loss)(m, X),
    "filter_jacrev": lambda m: pm.filter_jacrev(loss)(m, X),
    "filter_vjp": lambda m: pm.filter_vjp(loss, m, X),
}


@pytest.mark.parametrize(
    ("kind", "way"), [("one layer", way) for way in WAYS] + [(kind, "trainable") for kind in SHARED]
)
def test_a_shared_parameter_is_told(kind, way):
    """Once, in the user's line; in silence it would be two from the first step on."""
    with pytest.warns(SharedParameterWarning, match="weight") as told:
        WAYS[way](SHARED[kind]())

    assert len(told) == 1
    assert told[0].filename == __file__


@pytest.mark.filterwarnings("error::pytreemod.errors.SharedParameterWarning")
def test_what_is_two_or_not_trained_is_not_told():
    """Buffers, small arrays, what wrt excludes, a layer called twice, a model and its average."""
    mask, zeros, model = jnp.eye(3), jnp.zeros(3), linear()
    pair = {"model": model, "average": model}
    small = nn.Sequential([linear().replace(bias=zeros), linear().replace(bias=zeros)])

    for way in WAYS.values():
        way(small)
        way(nn.Sequential([Masked(jnp.eye(3) + i, mask) for i in range(2)]))
    pm.filter_grad(loss, wrt=pm.select.path("layers.0.bias"))(SHARED["one array"](), X)
    pm.filter_grad(lambda model, average: loss(model, model(X)))(model, model)
    pm.filter_grad(lambda both: loss(both["model"], X), wrt="model")(pair)
