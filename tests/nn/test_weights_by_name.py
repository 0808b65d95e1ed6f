"""The weight of a layer that another layer changes."""

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError
from pytreemod.nn.weights_by_name import weight_by_name, with_weight
from tests.labels import label

LINEAR = nn.Linear(3, 2, key=jax.random.key(0))
HALF = LINEAR.replace(weight=pm.computed(jnp.multiply, LINEAR.weight, 0.5))


def test_it_is_what_the_field_reads_as():
    """A computed leaf, too, whose name is among those that are shown."""
    assert weight_by_name("Layer(name)", LINEAR, "bias") is LINEAR.bias
    assert weight_by_name("Layer(name)", HALF, "weight").tolist() == HALF.weight.tolist()
    assert nn.WeightNorm(LINEAR).replace(layer=HALF).weight_name == "weight"
    with pytest.raises(ArgumentError, match=r"\n  It has: weight, bias\.$"):
        nn.WeightNorm(LINEAR).replace(layer=HALF, weight_name="other")
    with pytest.raises(ArgumentError, match=r"a weight in Identity, got 'other'\.$"):
        nn.WeightNorm(LINEAR).replace(layer=nn.Identity(), weight_name="other")


@pytest.mark.parametrize("name", ["w", "in_features", 0, None], ids=label)
def test_what_is_no_weight_is_refused(name):
    """With the names that there are."""
    text = r"^Layer\(name\): expected the name of a weight in Linear, got (.|\n)*weight, bias\.$"
    with pytest.raises(ArgumentError, match=text):
        weight_by_name("Layer(name)", LINEAR, name)


class Two(pm.Module):
    """One of its arrays may be the other."""

    one: jax.Array
    two: jax.Array


def test_another_weight_takes_the_place_of_any():
    """An array, a computed leaf, a tied path; a tied path follows a new weight at its source."""
    two = pm.tie(Two(jnp.ones(2), jnp.zeros(2)), "two", to="one")
    new = jnp.full(2, 3.0)

    assert with_weight(LINEAR, "weight", new).weight is new
    assert with_weight(HALF, "weight", new).weight is new
    assert with_weight(two, "two", new).two is new
    assert with_weight(two, "two", new).one.tolist() == [1, 1]
    assert with_weight(two, "one", new).two is new
