"""Models as transformations are shown them."""

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod import nn
from pytreemod.training.layered.lists import (
    abstract,
    as_one,
    leaves_of,
    listed,
    only,
    owners,
    without,
)
from pytreemod.tree.paths import path_text
from tests.helpers.comparing import assert_same


def stack():
    """Two times three layers."""
    inner = nn.Stack(lambda key: nn.Linear(2, 2, key=key), 3, key=jax.random.key(0))
    return {"blocks": nn.Stack.from_layers([inner, inner]), "head": jnp.ones((4,))}


def test_layers_in_lists_are_as_they_would_be_alone():
    """In one another, and back; with an axis in front, too."""
    model = stack()
    shown = listed(model)
    assert len(jax.tree.leaves(shown)) == 2 * 3 * 2 + 1
    paths = [path_text(path) for path, _ in jax.tree_util.tree_leaves_with_path(shown)]
    assert paths[0].endswith("weight")
    assert paths[-1] == "['head']"
    np.testing.assert_array_equal(jax.tree.leaves(shown)[0], model["blocks"][0][0].weight)
    assert_same(as_one(shown), model)

    rows = listed(model, by_leaf=True)
    assert [len(jax.tree.leaves(x)) for x in jax.tree.structure(model).flatten_up_to(rows)] == [
        6,
        6,
        1,
    ]
    assert_same(as_one(rows), model)

    examples = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), model)
    rows = jax.tree.leaves(listed(examples, axis=1))
    np.testing.assert_array_equal(rows[0][1], 2 * model["blocks"][0][0].weight)


def test_shapes_of_one_layer_and_some_leaves():
    """As specs; None for excluded leaves."""
    model = stack()
    one = without(model, [len(leaf.layers) for leaf in leaves_of(model)])
    assert [x.shape for x in jax.tree.leaves(one)] == [(2, 2), (2,), (4,)]
    assert [x.shape for x in jax.tree.leaves(abstract(model))] == [(2, 3, 2, 2), (2, 3, 2), (4,)]
    assert len(jax.tree.leaves(only(model, [1]))) == 1


def test_each_leaf_knows_its_layer():
    """For each axis of layers, which one of two."""
    found = owners(listed(abstract(stack()), copies=2))
    layers = [layer for _, layer in found]
    assert layers[:8:2] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert layers[-1] == ()
    assert len({leaf for leaf, _ in found}) == 3
