"""`Shared`."""

import equinox
import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, ShapeError, SpecError
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close

KEY = jax.random.key(0)


def pair(lib=pm):
    """An embedding, and a head for it."""
    return lib.nn.Embedding(5, 3, key=KEY), lib.nn.Linear(3, 5, key=KEY)


def head(pair):
    """The weight that is what another is."""
    return pair[1].weight


def embedding(pair):
    """What it is."""
    return pair[0].weight


def test_fields_and_leaves_are_equinoxs():
    """One array for what is shared, in the same order."""
    theirs, ours = (lib.nn.Shared(pair(lib), head, embedding) for lib in (equinox, pm))
    arrays = [leaf for leaf in jax.tree.leaves(theirs) if equinox.is_array(leaf)]

    assert [leaf.tolist() for leaf in jax.tree.leaves(ours)] == [leaf.tolist() for leaf in arrays]
    assert (ours.where, ours.get) == (theirs.where, theirs.get)
    assert ours()[1].weight is ours()[0].weight
    assert repr(ours.pytree[1].weight) == "SharedNode()"


def test_a_gradient_is_the_sum_of_both_uses():
    """As Equinox has it; under jit, and stacked."""

    def loss(shared):
        one, two = shared()
        return jnp.sum(jnp.sin(one.weight)) + jnp.sum(two.weight**2)

    shared = nn.Shared(pair(), head, embedding)
    theirs = equinox.filter_grad(loss)(equinox.nn.Shared(pair(equinox), head, embedding))
    grads = pm.filter_jit(pm.filter_grad(loss))(shared)
    several = pm.filter_vmap(loss)(pm.stack([shared, shared]))

    assert_close(embedding(grads.pytree), embedding(theirs.pytree))
    assert_close(embedding(grads.pytree), jnp.cos(embedding(pair())) + 2 * embedding(pair()))
    assert_close(several, jnp.stack([loss(shared)] * 2))


def test_what_is_taken_may_be_computed_and_may_be_whole_layers():
    """Several at once, and the tree as it was made of else."""
    one, two, three = (nn.Linear(3, 3, key=key) for key in jax.random.split(KEY, 3))
    turned = nn.Shared([one, two], lambda t: t[1].weight, lambda t: jnp.transpose(t[0].weight))
    whole = nn.Shared([one, two, three], lambda t: (t[1], t[0]), lambda t: (t[2], t[2]))

    assert turned()[1].weight.tolist() == one.weight.T.tolist()
    assert turned()[1].bias is two.bias
    assert [layer is whole.pytree[2] for layer in whole()] == [True] * 3
    assert len(jax.tree.leaves(whole)) == 2


@pytest.mark.parametrize(
    ("where", "get", "kind", "text"),
    [
        (3, embedding, ArgumentError, r"^Shared\(where\): expected a function of the tree, got 3"),
        (head, "e", ArgumentError, r"^Shared\(get\): expected a function of the tree, got 'e'"),
        (
            head,
            lambda pair: pair[0].weight.T,
            ShapeError,
            r"^Shared\(get\): expected what fits in the place of f32\[5,3\], got f32\[3,5\]\.\n"
            r"  at \[1\]\.weight\n  shapes are changed on the way:\n"
            r"      lambda pair: jnp\.transpose\(pair\[0\]\.weight\)$",
        ),
        (
            head,
            lambda pair: pair[0].weight.astype(jnp.bfloat16),
            ShapeError,
            r"in the place of f32\[5,3\], got bf16\[5,3\]",
        ),
        (
            lambda pair: [pair[1].weight, pair[1].bias],
            lambda pair: (pair[0].weight, pair[0].weight[:, 0]),
            ShapeError,
            r"\n  a node for each, in the same kind of sequence:\n",
        ),
        (
            lambda pair: pair[1],
            lambda pair: pair[0],
            ShapeError,
            r"place of weight f32\[5,3\], bias f32\[5\], got weight f32\[5,3\]\.\n  at \[1\]",
        ),
        (
            head,
            head,
            SpecError,
            r"^Shared\(get\): expected nodes that stay in the tree, got one that `where` takes out"
            r"\.\n  at \[1\]\.weight$",
        ),
        (head, lambda pair: -pair[1].weight, SpecError, r"stay in the tree, got one that `where`"),
    ],
    ids=label,
)
def test_what_does_not_go_together_is_refused(where, get, kind, text):
    """When it is made, not when it is called."""
    with pytest.raises(kind, match=text):
        nn.Shared(pair(), where, get)


def test_a_place_that_is_no_node_is_refused():
    """As by `tree_at`."""
    with pytest.raises(pm.PytreemodError, match=r"expected a function that only picks nodes"):
        nn.Shared(pair(), lambda pair: pair[1].weight.T, embedding)
