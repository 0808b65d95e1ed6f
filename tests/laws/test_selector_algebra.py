"""Laws of selectors: under `&`, `|` and `~` they form a Boolean algebra, mask by mask.

And of rules of them: a misspelt path is refused, wherever a rule is accepted.
"""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import SpecError
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


X = jnp.ones(4)


def net():
    """Two linear layers at the paths `first` and `second`."""
    keys = jax.random.split(jax.random.key(0))
    return {"first": nn.Linear(4, 4, key=keys[0]), "second": nn.Linear(4, 4, key=keys[1])}


def stacked():
    """Two of them."""
    return jax.tree.map(lambda x: jnp.stack([x, x]), net())


def apply(model):
    """Call both."""
    return model["second"](model["first"](X))


# Each takes a rule for a model; and a value for it.
TAKERS = {
    "call": (lambda tmp, r: r(net()), 0),
    "vmap in_axes": (lambda tmp, r: pm.filter_vmap(apply, in_axes=(r,))(stacked()), 0),
    "Optimizer": (lambda tmp, r: pm.Optimizer(r).init(net()), optax.sgd(1.0)),
    "with_precision": (lambda tmp, r: pm.with_precision(net(), r), "float32"),
    "load cast": (lambda tmp, r: pm.load(tmp / "net", net(), cast=r), None),
}


@pytest.mark.parametrize("taker", TAKERS)
def test_a_misspelt_path_is_refused_wherever_a_rule_is_accepted(taker, tmp_path):
    """Although a default has all its leaves."""
    take, value = TAKERS[taker]
    pm.save(tmp_path / "net", net())
    take(tmp_path, pm.by({nn.Linear: value, "second": value, ...: value}))

    with pytest.raises(SpecError, match="secnd"):
        take(tmp_path, pm.by({"secnd": value, ...: value}))
