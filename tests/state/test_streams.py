"""The arithmetic of random streams: the dependencies of keys, and that there are no others."""

import copy

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax.sharding import AxisType, Mesh

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import StateError
from tests.helpers.comparing import assert_same
from tests.helpers.equations import equations
from tests.helpers.laws import law
from tests.helpers.meshes import DEVICES, on


class Layers(pm.Module):
    """Streams and a value, at two depths."""

    first: nn.Dropout
    rest: list
    mean: pm.StateIndex

    def __init__(self, count=3):
        self.first, *self.rest = (nn.Dropout(stream=pm.RngStream()) for _ in range(count + 1))
        self.mean = pm.StateIndex(jnp.zeros(2))

    def streams(self):
        return [layer.stream for layer in (self.first, *self.rest)]


def make(count=3, seed=0, impl=None):
    model, state = pm.make_with_state(Layers)(count)
    return model, state.seed(jax.random.key(seed, impl=impl))


def data(keys):
    return np.asarray(jax.random.key_data(keys))


def draw(state, stream, n):
    keys = []
    for _ in range(n):
        key, state = state.next_key(stream)
        keys.append(data(key))
    return np.asarray(keys), state


BY_STREAMS = pm.by({pm.RngStream: 0, ...: None})


def draw_each(state, stream):
    """The next key of each member of a State that was split, and the State after them."""
    axes = {"in_axes": (BY_STREAMS,), "out_axes": (0, BY_STREAMS)}
    return pm.filter_vmap(lambda state: state.next_key(stream), **axes)(state)


def test_a_key_is_the_seed_folded_with_path_and_count():
    """The numbers themselves must never change, or results could not be reproduced."""
    model, state = make()
    keys, _ = draw(state, model.first.stream, 2)
    digest = 0x6CEA2FF5  # The first four bytes of blake2b("first.stream"), little end first.
    base = jax.random.fold_in(jax.random.key(0), digest)

    assert_same(keys, data(jnp.stack([jax.random.fold_in(base, i) for i in range(2)])))
    assert keys.tolist() == [[3597418500, 2610732737], [3320283783, 2230803629]]


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
@pytest.mark.sampled
def test_adding_a_layer_changes_no_other_layers_numbers(impl):
    """A stream's keys depend on its own path alone, whatever generator the seed is of."""
    (small, state), (large, larger_state) = make(1, impl=impl), make(3, impl=impl)
    for mine, others in zip(small.streams(), large.streams(), strict=False):
        keys, state = draw(state, mine, 2)
        same, larger_state = draw(larger_state, others, 2)
        assert_same(keys, same)
    if impl != "unsafe_rbg":  # It is called so because a map may change its numbers.
        few, many = (draw_each(state.restored().split(n), small.first.stream)[0] for n in (2, 3))
        assert_same(data(few), data(many)[:2])
        # A single member, as each device has of several, may be used without a map.
        one, after = state.restored().split(1).next_key(small.first.stream)
        assert_same(data(one), data(few)[0])
        assert after == draw_each(state.restored().split(1), small.first.stream)[1]


def test_an_older_key_draws_the_same():
    """As `jax.random.PRNGKey` makes it; also after a split."""
    model, state = make()
    older = state.restored().seed(jax.random.PRNGKey(0))
    for change in (lambda s: s, lambda s: s.split(3).join()):
        states = (change(each.restored()) for each in (state, older))
        key, raw = (each.next_key(model.first.stream)[0] for each in states)
        assert_same(data(key), np.asarray(raw))


@law
@given(st.integers(0, 2**31), st.lists(st.integers(0, 3), max_size=4))
def test_the_order_of_uses_between_streams_does_not_matter(seed, uses):
    """The n-th key of a stream is the same, however its uses and others' are interleaved."""
    model, state = make(3, seed)
    fresh = state.restored()
    got = {i: [] for i in range(4)}
    for i in uses:
        keys, state = draw(state, model.streams()[i], 1)
        got[i] += keys.tolist()
    for i, stream in enumerate(model.streams()):
        expected, fresh = draw(fresh, stream, len(got[i]))
        assert got[i] == expected.tolist()


@pytest.mark.parametrize("run", [lambda f: f, pm.filter_jit], ids=["eager", "jit"])
def test_streams_split_over_a_mesh_join(run, key):
    """All devices gather the stream that was split; explicit axes leave that choice to us."""
    _, state = pm.make_with_state(nn.Dropout)(0.5, stream=pm.RngStream())
    parts = state.seed(key).split(8)
    split = pm.filter_shard(parts, on("data", mesh=Mesh(DEVICES, "data", (AxisType.Explicit,))))

    assert pm.tree_equal(run(lambda s: s.join())(split), parts.restored().join())


@pytest.mark.parametrize(("before", "members", "uses"), [(0, 1, 0), (2, 3, 1), (1, 2, 2)])
def test_join_of_split_advances_once(before, members, uses):
    """state.split(n).join() is every stream used once, whatever the members did."""
    model, state = make(1)
    _, state = draw(state, model.first.stream, before)
    split, once = copy.copy(state).split(members), state
    for stream in model.streams():
        _, once = once.next_key(stream)
    for _ in range(uses):
        _, split = draw_each(split, model.first.stream)

    assert split.join() == once


def test_a_key_costs_one_fold_in():
    """In a program: one fold_in and one addition for each use, and no split anywhere."""
    model, state = make()

    program = equations(lambda s: s.next_key(model.first.stream), state)
    assert program == {"random_fold_in": 1, "add": 1}
    seeding = equations(lambda s, k: s.seed(k), make()[1], jax.random.key(0))
    assert seeding["random_fold_in"] == 1
    assert seeding["random_split"] == 0


def test_keys_are_all_different():
    """Across seeds, paths, members and steps, also after a join."""
    model, state = make(2)

    def keys_of(seed):
        drawn, after = [], state.seed(jax.random.key(seed))
        for stream in model.streams():
            for _ in range(2):
                one, after = after.next_key(stream)
                several, split = draw_each(after.split(3), stream)
                drawn += [one[None], several, draw_each(split, stream)[0]]
                after = split.join()
        return jnp.concatenate(drawn)

    keys = data(jax.vmap(keys_of)(jnp.arange(3)))
    assert len(np.unique(keys.reshape(-1, 2), axis=0)) == 3 * 3 * 2 * (1 + 3 + 3)


def test_seed_of_some_streams_leaves_the_others():
    """By path: the chosen ones start anew, the others go on."""
    model, state = make()
    first, second = model.first.stream, model.rest[1].stream
    for stream in (first, second):
        _, state = draw(state, stream, 1)
    state = state.seed(jax.random.key(9), "rest.*.stream")

    kept, state = draw(state, first, 1)
    assert_same(kept, draw(make()[1], first, 2)[0][1:])
    assert_same(draw(state, second, 2)[0], draw(make(seed=9)[1], second, 2)[0])


def test_jax_accepts_streams_where_it_looks_for_key_reuse():
    """Call after call, in maps and scans; but not going on with the State from before a call."""
    model, state = make(1)
    stream = model.first.stream

    @jax.jit
    def step(state):
        first, state = state.next_key(stream)
        state = state.split(2).join()
        second, parts = draw_each(state.split(2), stream)
        draw = lambda state, _: state.next_key(stream)[::-1]  # noqa: E731
        state, third = jax.lax.scan(draw, parts.join(), length=2)
        next(pm.init_keys(first))
        return jax.vmap(jax.random.normal)(jnp.concatenate([second, third])), state

    expected = step(step(state)[1])[0]
    with jax.debug_key_reuse(True):
        _, after = step(state)
        assert_same(step(after)[0], expected)
        with pytest.raises(jax.errors.KeyReuseError, match="consumed"):
            step(state)


@pytest.mark.parametrize(
    ("select", "shapes"),
    [
        (None, [(4,), (4,), (2,)]),
        (pm.StateIndex, [(), (), (4, 2)]),
        ("rest.*.stream", [(), (4,), (2,)]),
        (..., [(4,), (4,), (4, 2)]),
    ],
)
def test_split_chooses_entries_by_kind_and_path(select, shapes):
    """By class, by path with wildcards, everything, or the rest; other entries are unchanged."""
    model, state = make(1)
    split = state.split(4, select)
    parts = [split.substate(token) for token in (*model.streams(), model.mean)]
    assert [jax.tree.leaves(part)[0].shape for part in parts] == shapes


UNSEEDED = pm.make_with_state(Layers)()[1]
REFUSED = {
    "no key": (lambda m, s: UNSEEDED.next_key(m.first.stream), r"first\.stream"),
    "no key, split": (lambda m, s: UNSEEDED.split(2), r"first\.stream"),
    "a split stream": (lambda m, s: s.split(4).next_key(m.first.stream), r"first\.stream"),
    "split again": (lambda m, s: s.split(3, "rest[1]").split(4), r"rest\[1\]\.stream"),
    "a selector of no stream": (lambda m, s: s.seed(jax.random.key(0), "mean"), "mean"),
}


@pytest.mark.parametrize(("call", "match"), REFUSED.values(), ids=REFUSED)
def test_what_would_give_no_keys_or_the_same_is_refused(call, match):
    with pytest.raises(StateError, match=match):
        call(*make())
