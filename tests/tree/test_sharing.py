"""Parameters that are at two paths of a tree."""

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.tree.sharing import places_of_shared
from tests.goldens import refusals
from tests.helpers.counting_calls import is_linear


class Layer(pm.Module):
    """A layer with a large and a small array, and one that is not a parameter."""

    weight: jax.Array
    bias: jax.Array
    scale: jax.Array = pm.buffer()


def layer(weight=None, bias=None, scale=None):
    """A layer whose arrays are its own, but for those that are given."""
    made = (jnp.ones((2, 2)), jnp.ones(2), jnp.ones((2, 2)))
    return Layer(*(new if old is None else old for old, new in zip((weight, bias, scale), made)))


def shared(tree):
    """The paths of shared leaves."""
    groups = places_of_shared(tree, [True] * len(jax.tree.leaves(tree)))
    return [[jax.tree_util.keystr(place.path) for place in group] for group in groups]


def test_a_large_array_is_a_parameter_wherever_it_is():
    """Two layers, one weight."""
    weight = jnp.ones((2, 2))

    assert shared([layer(weight), layer(weight)]) == [["[0].weight", "[1].weight"]]


def test_a_small_array_is_one_if_its_layer_is():
    """A bias of zeros may be anybody's."""
    bias, one = jnp.zeros(2), layer()

    assert shared([layer(bias=bias), layer(bias=bias)]) == []
    assert ["[0].bias", "[1].bias"] in shared([one, one])
    assert ["[0].bias", "[1]['a'].bias"] in shared([one, {"a": one}])


def test_a_record_that_holds_an_array_twice_is_not_at_two_places():
    """Its root is above both, at one path."""
    bias = jnp.zeros(2)

    assert shared(Layer(jnp.ones((2, 2)), bias, bias)) == []


def test_arrays_outside_of_records_are_no_model():
    """Values in a tuple."""
    array = jnp.ones((2, 2))

    assert shared([array, array]) == shared([array, layer(array)]) == []


@pytest.mark.parametrize(
    "use",
    [
        pm.tree_check,
        lambda layers: pm.filter_grad(lambda layers: layers[0].weight.sum())(layers),
        lambda layers: pm.trainable(layers),
    ],
    ids=["tree_check", "filter_grad", "trainable"],
)
def test_a_small_array_at_many_places_costs_by_their_number(use):
    """A bias of zeros that all layers share: each pair of paths was compared."""
    bias = jnp.zeros(2)
    layers = [layer(bias=bias, scale=jnp.ones(2)) for _ in range(400)]

    assert is_linear(lambda n: lambda: use(layers[:n]), 100)


test_refusals = refusals(globals())
