"""Laws of files: a saved tree is loaded into a tree like it, and a layer from its file alone."""

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import pytreemod as pm
from tests.helpers.comparing import assert_same
from tests.helpers.trees import ALL_TREES
from tests.nn.catalogue import CATALOGUE

SAVED = {name: make for name, make in ALL_TREES.items() if name != "holds a struct"}


def cleared(leaf):
    """A different leaf for the same path."""
    if isinstance(leaf, jax.Array):
        return leaf if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else jnp.zeros_like(leaf)
    if isinstance(leaf, np.ndarray):
        return np.zeros_like(leaf)
    return type(leaf)(0) if type(leaf) in (bool, int, float, complex) else leaf


@pytest.mark.parametrize("make", SAVED.values(), ids=SAVED.keys())
@pytest.mark.sampled
def test_load_of_save_is_the_tree(make, tmp_path):
    """load(path, like) == tree after save(path, tree), for a `like` with other numbers."""
    tree = make()
    pm.save(tmp_path / "tree", tree)
    loaded = pm.load(tmp_path / "tree", jtu.tree_map(cleared, tree))

    assert_same(loaded, tree)


# A file names their functions and classes, which only a program has.
WITH_CODE_OF_TESTS = {"MLP with a Module between", "Sequential"}


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.name)
@pytest.mark.sampled
def test_layers_and_their_state_are_loaded(entry, tmp_path):
    """load(path) == load(path, like) == tree, for each layer, its State and its streams."""
    tree = entry.build()
    pm.save(tmp_path / "layer", tree)

    assert_same(pm.load(tmp_path / "layer", jtu.tree_map(cleared, tree)), tree)
    if entry.name not in WITH_CODE_OF_TESTS:
        rebuilt = pm.load(tmp_path / "layer")
        assert_same(rebuilt, tree)
        assert jtu.tree_structure(rebuilt) == jtu.tree_structure(tree)
