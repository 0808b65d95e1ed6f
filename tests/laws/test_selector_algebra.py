"""Laws of selectors: under `&`, `|` and `~` they form a Boolean algebra, mask by mask."""

import hypothesis.strategies as st
import jax
from hypothesis import given

import pytreemod as pm
from tests.helpers.laws import law, trees
from tests.helpers.trees import Affine, Buffered, Pair

atoms = st.sampled_from(
    [
        pm.select.type(Affine),
        pm.select.type(list, Pair),
        pm.select.type(int),
        pm.select.role("buffer"),
        pm.select.role("param", "lora"),
        pm.select.role("nobody's"),
        pm.select.at(lambda tree: tree["root"]),
        # These match in every tree of the form below: one that matches nothing is refused.
        pm.select.path("**"),
        pm.select.path("root"),
        pm.select.path("root.*"),
        pm.select.path("r??t[1]"),
        pm.select.path("*.1") & pm.select.type(Buffered),
        pm.select.type(dict) & pm.is_array,
        True & pm.select.type(Affine),
    ]
)
rooted = trees.map(lambda tree: {"root": [tree, 1], "other": tree})
selectors = st.recursive(
    atoms,
    lambda inner: st.one_of(
        inner.map(lambda a: ~a),
        st.tuples(inner, inner).map(lambda pair: pair[0] & pair[1]),
        st.tuples(inner, inner).map(lambda pair: pair[0] | pair[1]),
    ),
    max_leaves=4,
)


def masks_differ(left, right, tree):
    """Whether two selectors pick differently."""
    mask = left.mask(tree)
    assert len(mask) == len(jax.tree.leaves(tree))
    return mask != right.mask(tree)


@law
@given(rooted, selectors, selectors)
def test_masks_combine_leaf_by_leaf(tree, a, b):
    """The masks of a & b, a | b and ~a are *and*, *or* and *not* of the masks of a and b."""
    x, y = a.mask(tree), b.mask(tree)

    assert (a & b).mask(tree) == [p and q for p, q in zip(x, y, strict=True)]
    assert (a | b).mask(tree) == [p or q for p, q in zip(x, y, strict=True)]
    assert (~a).mask(tree) == [not p for p in x]


@law
@given(rooted, selectors, selectors, selectors)
def test_lattice_laws(tree, a, b, c):
    """Commutative, associative, absorbing and distributive."""
    laws = [
        (a & b, b & a),
        (a | b, b | a),
        ((a & b) & c, a & (b & c)),
        ((a | b) | c, a | (b | c)),
        (a & (a | b), a),
        (a | (a & b), a),
        (a & (b | c), (a & b) | (a & c)),
        (a | (b & c), (a | b) & (a | c)),
    ]
    assert not [pair for pair in laws if masks_differ(*pair, tree)]


@law
@given(rooted, selectors, selectors)
def test_complement_laws(tree, a, b):
    """Double negation, De Morgan, excluded middle, contradiction, neutral elements."""
    nothing, everything = a & False, a | True
    laws = [
        (~~a, a),
        (~(a & b), ~a | ~b),
        (~(a | b), ~a & ~b),
        (a | ~a, everything),
        (a & ~a, nothing),
        (a & everything, a),
        (a | nothing, a),
        (a & a, a),
        (a | a, a),
    ]
    assert not [pair for pair in laws if masks_differ(*pair, tree)]


@law
@given(rooted, selectors)
def test_selector_and_mask_tree_mean_the_same(tree, a):
    """filter(t, a) == filter(t, the tree of a's mask)."""
    leaves, treedef = jax.tree.flatten(tree)
    mask = a.mask(tree)
    by_mask = treedef.unflatten([x if m else None for x, m in zip(leaves, mask, strict=True)])

    found = pm.filter(tree, a)
    assert jax.tree.structure(found) == jax.tree.structure(by_mask)
    assert all(x is y for x, y in zip(*map(jax.tree.leaves, (found, by_mask)), strict=True))
