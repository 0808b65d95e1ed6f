"""Parameters that are at two paths of a tree."""

import jax
import jax.numpy as jnp

import pytreemod as pm
from pytreemod.errors import StructureError
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
    """The paths of the first shared parameter, as the error has them."""
    try:
        pm.tree_check(tree)
    except StructureError as error:
        return [line[5:] for line in str(error).splitlines() if line.startswith("  at ")]
    return []


def test_a_large_array_is_a_parameter_wherever_it_is():
    """Two layers, one weight; a buffer is nobody's, and an array outside of Modules no model."""
    weight, scale = jnp.ones((2, 2)), jnp.ones((2, 2))

    assert shared([layer(weight), layer(weight)]) == ["[0].weight", "[1].weight"]
    assert shared([layer(scale=scale), layer(scale=scale)]) == []
    assert shared([weight, weight]) == shared([weight, layer(weight)]) == []


def test_a_small_array_is_none():
    """A bias of zeros may be anybody's; and one Module may hold it twice."""
    bias = jnp.zeros(2)

    assert shared([layer(bias=bias), layer(bias=bias)]) == []
    assert shared(Layer(jnp.ones((2, 2)), bias, bias)) == []


def test_a_small_array_at_many_places_costs_by_their_number():
    """A bias of zeros that all layers share: each pair of paths was compared."""
    bias = jnp.zeros(2)
    layers = [layer(bias=bias, scale=jnp.ones(2)) for _ in range(400)]

    assert is_linear(lambda n: lambda: pm.tree_check(layers[:n]), 100)
