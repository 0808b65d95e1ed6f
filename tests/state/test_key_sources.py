"""init_keys: keys for all parts of a model, one split for every 32 of them."""

import copy
import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import StateError
from tests.helpers.comparing import assert_same
from tests.helpers.equations import equations


def first_of(keys, n):
    """The next `n` keys, one by one."""
    return jnp.stack(list(itertools.islice(keys, n)))


@pytest.mark.parametrize("impl", [None, "rbg", "raw"])
def test_keys_are_those_of_split(impl):
    """Of each 33 keys, the last is for the next ones; jitted or not, and for a raw key, too."""
    key = jax.random.PRNGKey(1) if impl == "raw" else jax.random.key(1, impl=impl)
    one = jax.random.split(key, 33)
    another = jax.random.split(one[32], 33)
    expected = jnp.concatenate([one[:32], another[:4]])
    keys = pm.init_keys(key)

    assert_same(first_of(keys, 36), expected)
    assert_same(keys.take(3), jax.random.split(another[4], 3))
    assert_same(jax.jit(lambda key: first_of(pm.init_keys(key), 36))(key), expected)


def make_mlp(key):
    return nn.MLP(2, 2, 3, 2, key=key)


def test_layers_take_it_in_the_place_of_a_key(key):
    """Each array has its own numbers; one split, and an operation for each key that is used."""
    keys = pm.init_keys(key)
    arrays = [np.ravel(leaf) for leaf in jax.tree.leaves((make_mlp(keys), make_mlp(keys)))]
    program = equations(lambda key: make_mlp(pm.init_keys(key)), key)

    assert len(np.unique(np.concatenate(arrays))) == sum(map(len, arrays))
    assert program["random_split"] == 1
    assert program["slice"] == program["random_bits"] > 0


REFUSED = {
    "a map": lambda keys: jax.vmap(lambda x: x * jax.random.normal(next(keys)))(jnp.ones(3)),
    "a layer in jit": lambda keys: jax.jit(lambda x: nn.Linear(2, 2, key=keys)(x))(jnp.ones(2)),
}


@pytest.mark.parametrize("use", REFUSED.values(), ids=REFUSED)
def test_it_is_used_where_it_was_made(use, key):
    """In a compiled function, or for the members of a map, all keys would be one; none leaks."""
    keys = pm.init_keys(key)
    next(keys)
    with pytest.raises(StateError, match="init_keys"):
        use(keys)
    assert_same(next(keys), first_of(pm.init_keys(key), 2)[1])


def test_copies_do_not_give_the_same_keys_again(key):
    """A shallow copy goes on with the original; others are refused by Python."""
    keys = pm.init_keys(key)
    drawn = [next(keys), next(copy.copy(keys)), next(keys)]

    assert_same(jnp.stack(drawn), first_of(pm.init_keys(key), 3))
    for other in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="generator"):
            other(keys)
