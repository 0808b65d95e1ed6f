"""Laws of files: a saved tree is loaded, into a tree like it, or alone if all is registered."""

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.io.configuration import registered_name
from tests.helpers import trees
from tests.helpers.comparing import assert_same
from tests.helpers.trees import ALL_TREES
from tests.nn.catalogue import CATALOGUE, Slope, flatten

SAVED = {name: make for name, make in ALL_TREES.items() if name != "holds a struct"}

every_tree = pytest.mark.parametrize("make", SAVED.values(), ids=SAVED.keys())
every_layer = pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.name)


def cleared(leaf):
    """A different leaf for the same path."""
    if isinstance(leaf, jax.Array):
        return leaf if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else jnp.zeros_like(leaf)
    if isinstance(leaf, np.ndarray):
        return np.zeros_like(leaf)
    return type(leaf)(0) if type(leaf) in (bool, int, float, complex) else leaf


@every_tree
@pytest.mark.sampled
def test_load_of_save_is_the_tree(make, tmp_path):
    """load(path, like) == tree after save(path, tree), for a `like` with other numbers."""
    tree = make()
    pm.save(tmp_path / "tree", tree)
    loaded = pm.load(tmp_path / "tree", jtu.tree_map(cleared, tree))

    assert_same(loaded, tree)


@every_layer
@pytest.mark.sampled
def test_layers_and_their_state_are_rebuilt_from_the_file_alone(entry, tmp_path):
    """load(path) == tree after save(path, tree), for each layer, its State and its streams."""
    pm.register_for_files(Slope)
    pm.register_for_files(flatten)
    tree = entry.build()
    pm.save(tmp_path / "layer", tree)

    rebuilt = pm.load(tmp_path / "layer")
    assert_same(rebuilt, tree)
    assert jtu.tree_structure(rebuilt) == jtu.tree_structure(tree)
    other = jtu.tree_map(cleared, tree)
    assert_same(pm.load(tmp_path / "layer", other), tree)


# Only a program has these: functions, objects, and nodes that cannot be rebuilt.
NOT_ALONE = {
    "a Module where others hold a function": "none",
    "automatic configuration": "TRIPLE holds a function",
    "holds a bound method": "a node of another kind",
    "holds a filter_jit": "a node of another kind",
    "holds a filter_jit of a Module": "a node of another kind",
    "registered": "a node of another kind",
}


# The name of a function is code; and a token without a name equals only itself.
OTHER_STRUCTURE = {"token", "wraps a function"}


@pytest.mark.parametrize("name", [name for name in SAVED if name not in NOT_ALONE])
@pytest.mark.sampled
def test_what_is_registered_is_rebuilt_from_the_file_alone(name, tmp_path):
    """load(path) == tree, for classes in every style, once they have names."""
    tree = SAVED[name]()
    for thing in [*vars(trees).values(), *vars(trees.string_annotations).values()]:
        is_own = callable(thing) and getattr(thing, "__module__", "").startswith("tests.helpers")
        if is_own and thing is not trees.JITTED and registered_name(thing) is None:
            pm.register_for_files(thing, name=f"{thing.__module__}.{thing.__qualname__}")
    for builtin in (max, abs, np.exp):
        pm.register_for_files(builtin, name=f"python.{builtin.__name__}")
    pm.save(tmp_path / "tree", tree)

    rebuilt = pm.load(tmp_path / "tree")
    assert_same(rebuilt, tree)
    if name not in OTHER_STRUCTURE:
        assert jtu.tree_structure(rebuilt) == jtu.tree_structure(tree)


@pytest.mark.parametrize("name", [name for name, why in NOT_ALONE.items() if "another" in why])
def test_a_node_of_another_kind_needs_like(name, tmp_path):
    """For a node that a file cannot rebuild, the error has its path and the line to write."""
    pm.save(tmp_path / "tree", SAVED[name]())

    with pytest.raises(pm.errors.FileError, match=r"pass a tree that has one|is not registered"):
        pm.load(tmp_path / "tree")
