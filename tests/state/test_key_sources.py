"""init_keys: keys for all parts of a model, without a tower of splits."""

import copy
import itertools
import pickle
import sys
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError
from tests.helpers.comparing import assert_same
from tests.helpers.equations import equations


def data(keys):
    """Keys as plain numbers."""
    return np.asarray(jax.random.key_data(keys))


def first_of(keys, n):
    """The next `n` keys as plain numbers, one by one."""
    return np.stack([data(key) for key in itertools.islice(keys, n)])


def murmur(number):
    """The last step of MurmurHash3, in Python's integers."""
    number ^= number >> 16
    number = number * 0x85EBCA6B % 2**32
    number ^= number >> 13
    number = number * 0xC2B2AE35 % 2**32
    return number ^ number >> 16


def test_keys_are_the_hashed_key_mixed_with_a_count(key):
    """The numbers, which may never change."""
    root = data(jax.random.fold_in(key, int.from_bytes(b"keys"))).tolist()
    expected = [
        [word ^ murmur((i + place * 0x9E3779B9) % 2**32) for place, word in enumerate(root, 1)]
        for i in range(70)
    ]

    assert_same(first_of(pm.init_keys(key), 70), np.array(expected, np.uint32))


def test_keys_of_keys_are_all_different(key):
    """Mixed in twice, two counts would be the same in either order: the hash in between sees to it.

    In a Stack each member makes keys from one of the keys that were taken for it.
    """
    outer = pm.init_keys(key).take(30)
    inner = jax.vmap(lambda key: pm.init_keys(key).take(30))(outer)
    everything = np.concatenate([data(outer), data(inner).reshape(-1, 2)])

    assert len(np.unique(everything, axis=0)) == 30 + 30 * 30


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_numbers_do_not_depend_on_how_they_are_asked_for(impl):
    """One by one, several at once, under jit: the n-th key is the same."""
    key = jax.random.key(1, impl=impl)
    mixed = pm.init_keys(key)
    parts = [first_of(mixed, 3), data(mixed.take(2)), first_of(mixed, 40), data(mixed.take(0))]
    jitted = jax.jit(lambda key: jnp.stack(list(itertools.islice(pm.init_keys(key), 6))))

    assert_same(np.concatenate(parts), first_of(pm.init_keys(key), 45))
    assert_same(data(jitted(key)), first_of(pm.init_keys(key), 6))


def test_old_style_keys():
    """A raw key gives raw keys with the same numbers."""
    keys = pm.init_keys(jax.random.PRNGKey(0))

    assert_same(np.asarray(next(keys)), data(next(pm.init_keys(jax.random.key(0)))))
    assert keys.take(3).shape == (3, 2)


class Block(pm.Module):
    """A layer with layers in it, as a user writes it."""

    first: nn.Linear
    second: nn.MLP

    def __init__(self, size, *, key):
        keys = pm.init_keys(key)
        self.first = nn.Linear(size, 4, key=keys)
        self.second = nn.MLP(4, size, 3, 1, key=keys)


LAYERS = {
    "Linear": lambda key: nn.Linear(2, 3, key=key),
    "Linear without bias": lambda key: nn.Linear(2, 3, use_bias=False, key=key),
    "Conv2d": lambda key: nn.Conv2d(1, 2, 3, key=key),
    "Embedding": lambda key: nn.Embedding(4, 2, key=key),
    "MLP": lambda key: nn.MLP(2, 2, 3, 2, key=key),
    "Block": lambda key: Block(2, key=key),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_take_it_in_the_place_of_a_key(name, key):
    """Each array has separate values, and the key is hashed once, however many are drawn."""
    keys = pm.init_keys(key)
    first, second = LAYERS[name](keys), LAYERS[name](keys)
    arrays = [np.ravel(leaf) for leaf in jax.tree.leaves((first, second))]
    program = equations(lambda key: LAYERS[name](pm.init_keys(key)), key)

    assert len(np.unique(np.concatenate(arrays))) == sum(map(len, arrays))
    assert program["random_split"] == 0
    assert program["random_fold_in"] == 1
    assert program["random_bits"] > 0


@pytest.mark.parametrize("name", ["Linear", "Conv2d", "Embedding", "MLP"])
def test_plain_keys_give_the_numbers_that_they_gave(name, key):
    """A layer splits a plain key as it always did."""
    layer = LAYERS[name](key)
    leaf = jax.tree.leaves(layer)[0]
    if name == "Embedding":
        expected = jax.random.normal(key, (4, 2))
    else:
        own = jax.random.split(key, 3)[0] if name == "MLP" else key
        limit = 1 / 3 if name == "Conv2d" else 1 / np.sqrt(2)
        expected = jax.random.uniform(
            jax.random.split(own)[0], leaf.shape, minval=-limit, maxval=limit
        )

    np.testing.assert_allclose(leaf, expected, rtol=1e-6)


def test_calls_take_it_too(key):
    """Dropout in a Sequential: each layer has a separate mask, and no split."""
    net = nn.Sequential([nn.Dropout(0.5), nn.Sequential([nn.Dropout(0.5)]), nn.Dropout(0.5)])
    x = jnp.ones(2000)
    kept = net(x, key=pm.init_keys(key)) != 0
    program = equations(lambda key: net(x, key=pm.init_keys(key)), key)

    assert abs(float(kept.mean()) - 0.125) < 0.03
    assert program["random_split"] == 0
    assert program["random_fold_in"] == 1


def test_threads_get_different_keys():
    """However their calls are interleaved, also if one takes several."""
    keys = pm.init_keys(jax.random.key(0))

    def draw(number):
        drawn = [next(keys) for _ in range(60)] + list(keys.take(number))
        return [tuple(jax.random.key_data(key).tolist()) for key in drawn]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with futures.ThreadPoolExecutor(4) as pool:
            drawn = [key for part in pool.map(draw, range(4)) for key in part]
    finally:
        sys.setswitchinterval(interval)

    whole = jax.random.key_data(pm.init_keys(jax.random.key(0)).take(4 * 60 + 6)).tolist()
    assert sorted(drawn) == sorted(map(tuple, whole))


REFUSED = {
    "a map": lambda keys: jax.vmap(lambda x: x * jax.random.normal(next(keys)))(jnp.ones(3)),
    "a layer in jit": lambda keys: jax.jit(lambda x: nn.Linear(2, 2, key=keys)(x))(jnp.ones(2)),
    "take in filter_jit": lambda keys: pm.filter_jit(lambda keys: keys.take(2))(keys),
    "a copy": copy.copy,
    "a deep copy": copy.deepcopy,
    "a pickle": pickle.dumps,
    "a function of JAX": jax.random.normal,
}


@pytest.mark.parametrize("use", REFUSED.values(), ids=REFUSED)
def test_what_would_give_the_same_keys_again_is_refused(use, key):
    """In a compiled function, for the members of a map, or from a copy."""
    with pytest.raises(ArgumentError, match="init_keys"):
        use(pm.init_keys(key))
