"""A parameter at two paths of a model causes a warning where the model enters training."""

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import SharedParameterWarning

X = jnp.ones((2, 3))
KEY = jax.random.key(0)


def loss(model, x):
    """A scalar."""
    return jnp.sum(model(x) ** 2)


def linear():
    """A custom layer."""
    return nn.Linear(3, 3, key=KEY)


def of_one_layer():
    """The same object, twice."""
    layer = linear()
    return nn.Sequential([layer, layer])


def of_one_array():
    """Two layers around one weight."""
    layer = linear()
    return nn.Sequential([layer, linear().replace(weight=layer.weight)])


class Own(pm.Module):
    """A user's class that keeps one layer in two fields."""

    encode: nn.Linear
    decode: nn.Linear

    def __init__(self):
        self.encode = self.decode = linear()

    def __call__(self, x):
        """There and back."""
        return self.decode(self.encode(x))


SHARED = [of_one_layer, of_one_array, Own]
WAYS = {
    "trainable": lambda m: pm.trainable(m),
    "filter_grad": lambda m: pm.filter_grad(loss)(m, X),
    "filter_jacrev": lambda m: pm.filter_jacrev(loss)(m, X),
    "filter_vjp": lambda m: pm.filter_vjp(loss, m, X),
    "filter_jit of filter_grad": lambda m: pm.filter_jit(lambda m: pm.filter_grad(loss)(m, X))(m),
}


@pytest.mark.parametrize(
    ("make", "way"),
    [(of_one_layer, way) for way in WAYS] + [(make, "trainable") for make in SHARED[1:]],
)
def test_a_shared_parameter_is_told(make, way):
    """In silence it would be two from the first step on."""
    with pytest.warns(SharedParameterWarning, match=r"weight|scale|[ab]\b") as told:
        WAYS[way](make())

    assert len(told) == 1
    assert told[0].filename == __file__


def test_a_layer_called_twice_is_not_told():
    """The hint."""

    class Twice(pm.Module):
        layer: nn.Linear

        def __call__(self, x):
            return self.layer(self.layer(x))

    pm.filter_grad(loss)(Twice(linear()), X)


def test_small_arrays_in_common_are_not_told():
    """Two layers that began with one array of zeros are two layers."""
    zeros = jnp.zeros(3)
    model = nn.Sequential([linear().replace(bias=zeros), linear().replace(bias=zeros)])

    for way in WAYS.values():
        way(model)


def test_what_is_not_trained_is_not_told():
    """Buffers, and leaves that wrt excludes."""

    class Masked(pm.Module):
        weight: jax.Array
        mask: jax.Array = pm.buffer()

        def __call__(self, x):
            return x @ (self.weight * self.mask)

    mask = jnp.eye(3)
    pm.filter_grad(loss)(nn.Sequential([Masked(jnp.ones((3, 3)), mask) for _ in range(2)]), X)
    pm.filter_grad(loss, wrt=pm.select.path("layers.0.bias"))(of_one_array(), X)


def test_a_model_and_its_average_are_two():
    """They begin as one, as arguments or side by side in one; only one of them is trained."""
    model = linear()
    pm.filter_jit(lambda model, average, x: pm.filter_grad(loss)(model, x))(model, model, X)
    pm.filter_jit(lambda both, x: pm.filter_grad(loss)(both["model"], x))(
        {"model": model, "average": model}, X
    )


def test_the_hint_is_code_that_hints():
    """The hint works: the paths are tied, and have one gradient."""
    model = Own()
    with pytest.warns(SharedParameterWarning, match="pm.tie") as told:
        pm.trainable(model)
    lines = [line.strip() for line in str(told[0].message).splitlines() if "pm.tie" in line]

    names = {"pm": pm, "model": model}
    exec("\n".join(lines), names)

    assert lines[0] == "model = pm.tie(model, 'decode.weight', to='encode.weight')"
    grads = pm.filter_grad(loss)(names["model"], X)
    assert "decode.weight" not in pm.named_leaves(grads)
