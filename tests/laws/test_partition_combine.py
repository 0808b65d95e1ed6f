"""Laws of splitting: `combine(*partition(t, s)) == t`, and the content of each half."""

import hypothesis.strategies as st
import jax
from hypothesis import given

import pytreemod as pm
from tests.helpers.comparing import assert_identical
from tests.helpers.laws import law, trees
from tests.helpers.trees import SPECS, every_tree


@every_tree
def test_combine_undoes_partition(make):
    """combine(*partition(t, s)) == t for every spec, leaf for leaf the same objects."""
    tree = make()
    for spec in SPECS.values():
        assert_identical(pm.combine(*pm.partition(tree, spec)), tree)


@law
@given(trees, st.sampled_from(list(SPECS.values())))
def test_halves_are_filter_and_its_inverse(tree, spec):
    """partition(t, s) == (filter(t, s), filter(t, s, inverse=True))."""
    picked, rest = pm.partition(tree, spec)

    assert_identical(picked, pm.filter(tree, spec))
    assert_identical(rest, pm.filter(tree, spec, inverse=True))


@law
@given(trees, st.sampled_from(list(SPECS.values())))
def test_every_leaf_is_in_exactly_one_half(tree, spec):
    """The leaves of the halves are, together and in order, the leaves of the tree."""
    hole = object()
    picked, rest = pm.partition(tree, spec, replace=hole)

    pairs = list(zip(jax.tree.leaves(picked), jax.tree.leaves(rest), strict=True))
    assert all((a is hole) != (b is hole) for a, b in pairs)
    together = [b if a is hole else a for a, b in pairs]
    assert all(x is y for x, y in zip(together, jax.tree.leaves(tree), strict=True))


@law
@given(trees)
def test_trainable_splits_as_partition_does(tree):
    """combine(*trainable(t)) == t, and the first half holds inexact arrays only."""
    first, rest = pm.trainable(tree)

    assert_identical(pm.combine(first, rest), tree)
    assert all(map(pm.is_inexact_array, jax.tree.leaves(first)))
