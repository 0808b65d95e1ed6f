"""Laws of State: `get` returns the value of `set`, and nothing else changes."""

import copy
import pickle

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given

import pytreemod as pm
from pytreemod.errors import StateError
from tests.helpers.comparing import assert_same
from tests.helpers.laws import array_trees, law

values = st.lists(array_trees.filter(lambda t: jax.tree.leaves(t) != []), min_size=2, max_size=3)


class Net(pm.Module):
    """Tokens at several depths, one of them at two paths."""

    first: pm.StateIndex
    rest: list
    shared: pm.StateIndex

    def __init__(self, *inits):
        tokens = [pm.StateIndex(init) for init in inits]
        self.first, *self.rest = tokens
        self.shared = tokens[-1]

    def tokens(self):
        """All tokens, once each."""
        return [self.first, *self.rest]


def make(inits):
    """A model and its State."""
    return pm.make_with_state(Net)(*inits)


def as_jax(tree):
    """The tree as a State holds it."""
    return jax.tree.map(jnp.asarray, tree)


@law
@given(values)
def test_initial_values_are_got(inits):
    """state.get(token) == init, for every token of the model."""
    model, state = make(inits)

    for token, init in zip(model.tokens(), inits, strict=True):
        assert_same(state.get(token), as_jax(init))
    assert_same(state.get(model.shared), as_jax(inits[-1]))


@law
@given(values, st.data())
def test_set_then_get(inits, data):
    """state.set(i, v).get(i) == v, and for another token j, get(j) is unchanged."""
    model, state = make(inits)
    i = data.draw(st.integers(0, len(inits) - 1))
    value = jax.tree.map(lambda x: x if x.dtype == bool else x + x.dtype.type(1), as_jax(inits[i]))
    before = [state.get(token) for token in model.tokens()]

    after = state.set(model.tokens()[i], value)
    for j, token in enumerate(model.tokens()):
        assert_same(after.get(token), value if j == i else before[j])


writes = st.lists(st.tuples(st.booleans(), st.integers(0, 2)), max_size=6)


@law
@given(writes, st.booleans())
def test_update_has_what_the_part_has_changed_or_refuses(writes, whole):
    """state.update(part) has every write to both; or there were some to the State's own part."""
    tokens = [pm.StateIndex(jnp.asarray(-1.0)) for _ in range(3)]
    state = pm.State(tokens)
    part = state.substate(tokens if whole else tokens[:2])
    written = {True: {}, False: {}}
    for number, (to_part, i) in enumerate(writes):
        to_part = to_part and (whole or i < 2)
        value = jnp.asarray(float(number))
        written[to_part][i] = value
        if to_part:
            part = part.set(tokens[i], value)
        else:
            state = state.set(tokens[i], value)

    if any(whole or i < 2 for i in written[False]):
        with pytest.raises(StateError, match="other values"):
            state.update(part)
        return
    after = state.update(part)
    for i, token in enumerate(tokens):
        assert after.get(token) == {**written[True], **written[False]}.get(i, -1.0)


@law
@given(values)
def test_fill_undoes_make_with_state(inits):
    """make_with_state(state.fill)(model) == (model, state)."""
    model, state = make(inits)
    kept = copy.copy(state)

    assert pm.make_with_state(state.fill)(model) == (model, kept)


@law
@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_seed_gives_what_it_gave(seed, count):
    """state.seed(k) == state.seed(k): of the old State, only the values are left."""
    make = pm.make_with_state(lambda: [*(pm.RngStream() for _ in range(count)), Net(1.0)])
    streams, state = make()
    key = jax.random.key(seed)
    fresh, used = copy.copy(state).seed(key), copy.copy(state).seed(jax.random.key(0))
    for stream in streams[:-1]:
        _, used = used.next_key(stream)

    assert used.seed(key) == fresh


COPIES = [
    lambda layer: layer,
    copy.deepcopy,
    lambda layer: pickle.loads(pickle.dumps(layer)),
    lambda layer: jax.tree.map(jnp.copy, layer),
    pm.filter_jit(lambda layer: layer),
    lambda layer: layer.replace(),
]


@law
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(COPIES)), min_size=1, max_size=4))
def test_every_place_is_a_token_of_its_own(places):
    """A model with n tokens has n values, whichever objects and copies they are."""
    layers = [Net(float(i)) for i in range(3)]
    model, state = pm.make_with_state(lambda: [copied(layers[i]) for i, copied in places])()

    assert [state.get(layer.first) for layer in model] == [i for i, _ in places]
    for number, layer in enumerate(model):
        state = state.set(layer.first, jnp.asarray(10.0 + number))
    assert [state.get(layer.first) for layer in model] == [10 + n for n in range(len(places))]


@law
@given(values)
def test_state_is_a_pytree_of_arrays(inits):
    """unflatten(flatten(s)) == s, its leaves are arrays, and jit gives it back."""
    _, state = make(inits)
    leaves, treedef = jax.tree.flatten(state)

    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    assert treedef.unflatten(leaves) == state
    assert jax.jit(lambda s: s)(state) == state
