import equinox
import jax
import jax.numpy as jnp

import pytreemod as pm
from pytreemod import nn
from tests.nn.numbers_to_compare import assert_close

KEY = jax.random.key(0)


def pair(lib=pm):
    return lib.nn.Embedding(5, 3, key=KEY), lib.nn.Linear(3, 5, key=KEY)


def head(pair):
    return pair[1].weight


def embedding(pair):
    return pair[0].weight


def test_fields_and_leaves_are_equinoxs():
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
    """Several at once, and the tree is made of different leaves."""
    one, two, three = (nn.Linear(3, 3, key=key) for key in jax.random.split(KEY, 3))
    turned = nn.Shared([one, two], lambda t: t[1].weight, lambda t: jnp.transpose(t[0].weight))
    whole = nn.Shared([one, two, three], lambda t: (t[1], t[0]), lambda t: (t[2], t[2]))

    assert turned()[1].weight.tolist() == one.weight.T.tolist()
    assert turned()[1].bias is two.bias
    assert [layer is whole.pytree[2] for layer in whole()] == [True] * 3
    assert len(jax.tree.leaves(whole)) == 2
