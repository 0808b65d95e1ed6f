"""Laws of flattening: `unflatten(flatten(m)) == m`, whatever the class and whatever the leaves."""

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

import pytreemod as pm
from tests.helpers.comparing import assert_identical
from tests.helpers.trees import MODULES, double, every_module, every_tree

ODD_LEAVES = [
    object(),
    jax.ShapeDtypeStruct((2,), jnp.float32),
    "a string",
    double,
    int,
    pm.Partial(double),
    [1, 2],
]


@every_tree
def test_unflatten_undoes_flatten(make):
    """unflatten(flatten(t)) == t, and every leaf is the same object."""
    tree = make()
    leaves, treedef = jax.tree.flatten(tree)

    assert_identical(jax.tree.unflatten(treedef, leaves), tree)


@every_module
def test_odd_leaves_do_not_change_the_structure(make):
    """After tree_map to an odd leaf, each leaf is that one, and the tree unflattens as before."""
    module = make()
    leaves, treedef = jax.tree.flatten(module)
    for odd in ODD_LEAVES:
        mapped = jax.tree.map(lambda _, odd=odd: odd, module)

        found, odd_treedef = jax.tree.flatten(mapped, is_leaf=lambda x, odd=odd: x is odd)
        assert odd_treedef == treedef
        assert len(found) == len(leaves)
        assert all(leaf is odd for leaf in found)
        assert_identical(odd_treedef.unflatten(leaves), module)
        odd_leaves, plain_treedef = jax.tree.flatten(mapped)
        assert_identical(plain_treedef.unflatten(odd_leaves), mapped)


@every_module
def test_none_for_every_leaf_leaves_the_configuration(make):
    """After tree_map to None there are no leaves, and filling the holes restores the tree."""
    module = make()
    leaves, treedef = jax.tree.flatten(module, is_leaf=lambda x: x is None)
    hollow = jax.tree.map(lambda _: None, module)

    assert jax.tree.leaves(hollow) == []
    holes, hollow_treedef = jax.tree.flatten(hollow, is_leaf=lambda x: x is None)
    assert len(holes) == len(leaves)
    assert hollow_treedef == treedef
    assert_identical(hollow_treedef.unflatten(leaves), module)


@every_tree
def test_paths_lead_to_the_leaves(make):
    """flatten_with_path gives the leaves of flatten, each with the path at which it is."""
    tree = make()
    pairs, treedef = jtu.tree_flatten_with_path(tree)
    leaves, plain = jax.tree.flatten(tree)

    assert treedef == plain
    assert all(x is y for (_, x), y in zip(pairs, leaves, strict=True))
    for path, leaf in pairs:
        node = tree
        for key in path:
            node = dict(children_by_key(node))[key]
        assert node is leaf


def children_by_key(node):
    """The children of one node, by key, from JAX."""
    pairs, _ = jtu.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    return [(path[0], child) for path, child in pairs]


@every_module
def test_equal_modules_have_equal_structures(make):
    """Two instances that were built in the same way have one structure, with one hash."""
    first, second = jax.tree.structure(make()), jax.tree.structure(make())
    if make is MODULES["token"]:
        # Tokens are distinguished by identity until they have names.
        assert first != second
        return

    assert first == second
    assert hash(first) == hash(second)
