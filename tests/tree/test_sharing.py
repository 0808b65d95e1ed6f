"""tree_check: nodes and parameters that are at two paths of a tree."""

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import StructureError
from tests.helpers.counting_calls import is_linear
from tests.helpers.trees import ALL_TREES, ONE, affine


class Layer(pm.Module):
    """A layer with a large and a small array, and one that is not a parameter."""

    weight: jax.Array
    bias: jax.Array
    scale: jax.Array = pm.buffer()


def layer(**given):
    """A layer whose arrays are its own, but for those that are given."""
    made = {"weight": jnp.ones((2, 2)), "bias": jnp.ones(2), "scale": jnp.ones((2, 2))}
    return Layer(**{**made, **given})


W, B = jnp.ones((2, 2)), jnp.zeros(2)
SHARED, IN_ITSELF = affine(), {"a": []}
IN_ITSELF["a"].append(IN_ITSELF["a"])


@pytest.mark.parametrize(
    ("tree", "first", "second"),
    [
        ([layer(weight=W), layer(weight=W)], r"\[0\]\.weight", r"\[1\]\.weight"),
        ({"encoder": SHARED, "heads": [affine(), SHARED]}, r"\['encoder'\]", r"\['heads'\]\[1\]"),
        (IN_ITSELF, r"\['a'\]", r"\['a'\]\[0\]"),
    ],
    ids=["array", "layer", "in itself"],
)
def test_what_is_at_two_paths_is_refused(tree, first, second):
    """It would become two; a node in itself would have no end."""
    with pytest.raises(StructureError, match=f"at {first}\n  at {second}"):
        pm.tree_check(tree)


def test_what_may_be_shared():
    """Buffers, arrays outside of Modules, small arrays of several layers, what has no leaves."""
    pm.tree_check([layer(scale=W), layer(scale=W)])
    pm.tree_check([W, layer(weight=W), W])
    pm.tree_check([layer(bias=B), layer(bias=B)])
    pm.tree_check(Layer(W, B, B))
    pm.tree_check([ONE, ONE, None, None, (), (), pm.nn.Identity()])
    for make in ALL_TREES.values():
        pm.tree_check(make())


def test_a_small_array_at_many_places_costs_by_their_number():
    """A bias of zeros that all layers share: each pair of paths was compared."""
    layers = [layer(bias=B, scale=jnp.ones(2)) for _ in range(400)]
    assert is_linear(lambda n: lambda: pm.tree_check(layers[:n]), 100)
