"""Laws of files: a saved tree is loaded into a tree like it, or is a dict of arrays."""

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given

import pytreemod as pm
from tests.helpers.comparing import assert_same
from tests.helpers.laws import law, trees
from tests.helpers.trees import ALL_TREES
from tests.nn.catalogue import CATALOGUE

# A struct has no numbers to save.
SAVED = {name: make for name, make in ALL_TREES.items() if name != "holds a struct"}


def is_key(leaf):
    """Whether a leaf is a random key."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def cleared(leaf):
    """A different leaf for the same path."""
    if is_key(leaf):
        return jax.random.wrap_key_data(jax.random.key_data(leaf) * 0)
    if isinstance(leaf, jax.Array):
        return jnp.zeros_like(leaf)
    if isinstance(leaf, np.ndarray):
        return np.zeros_like(leaf)
    return type(leaf)(0) if type(leaf) in (bool, int, float, complex) else leaf


def assert_loads(path, tree):
    """The law for a `like` with other numbers, strictly or not."""
    pm.save(path, tree)
    like = jtu.tree_map(cleared, tree)
    assert_same(pm.load(path, like), tree)
    assert_same(pm.load(path, like, strict=False)[0], tree)


@pytest.mark.parametrize("make", SAVED.values(), ids=SAVED.keys())
@pytest.mark.sampled
def test_load_of_save_is_the_tree(make, tmp_path):
    """load(path, like) == tree after save(path, tree), for a `like` with other numbers."""
    assert_loads(tmp_path / "tree", make())


@pytest.mark.parametrize("make", SAVED.values(), ids=SAVED.keys())
@pytest.mark.sampled
def test_load_without_like_is_a_dict_of_arrays(make, tmp_path):
    """load(path) has the arrays and numbers of the tree by name, in NumPy, and nothing else."""
    tree = make()
    pm.save(tmp_path / "tree", tree)
    numbers = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)
    named = {n: x for n, x in pm.named_leaves(tree).items() if isinstance(x, numbers)}
    plain = {n: jax.random.key_data(x) if is_key(x) else x for n, x in named.items()}

    assert_same(pm.load(tmp_path / "tree"), {n: np.asarray(x) for n, x in plain.items()})


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.name)
@pytest.mark.sampled
def test_layers_and_their_state_are_loaded(entry, tmp_path):
    """load(path, like) == tree, for each layer, its State and its streams."""
    assert_loads(tmp_path / "layer", entry.build())
    like = pm.filter_eval_shape(entry.build, 1)
    assert_same(pm.load(tmp_path / "layer", like), entry.build())


@law
@given(trees)
def test_load_of_save_is_the_tree_for_any_tree(tmp_path_factory, tree):
    """For random trees of containers, Modules, and leaves of all kinds."""
    assert_loads(tmp_path_factory.mktemp("trees") / "tree", tree)
