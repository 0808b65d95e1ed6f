"""State."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import StateError
from tests.helpers.comparing import assert_same
from tests.helpers.equations import equations
from tests.helpers.racing import race
from tests.helpers.trees import Pair, ramp


class Net(pm.Module):
    """Two tokens."""

    mean: pm.StateIndex
    pair: pm.StateIndex

    def __init__(self) -> None:
        self.mean = pm.StateIndex(jnp.zeros(2))
        self.pair = pm.StateIndex(Pair(jnp.zeros((), jnp.int32), {"x": ramp(3)}))


class Other(pm.Module):
    """Another model."""

    token: pm.StateIndex

    def __init__(self) -> None:
        self.token = pm.StateIndex(jnp.zeros(2))


def make():
    """A model and its State."""
    return pm.make_with_state(Net)()


USES = {
    "get": lambda s, m: s.get(m.mean),
    "set": lambda s, m: s.set(m.mean, jnp.ones(2)),
    "substate": lambda s, m: s.substate(m.mean),
    "update": lambda s, m: s.update(make()[1]),
    "seed": lambda s, m: s.seed(jax.random.key(0)),
    "split": lambda s, m: s.split(3),
    "join": lambda s, m: s.join(),
    "fill": lambda s, m: s.fill(m),
    "leaves": lambda s, m: jax.tree.leaves(s),
    "jit": lambda s, m: jax.jit(lambda s: s)(s),
    "filter_jit": lambda s, m: pm.filter_jit(lambda s: s)(s),
    "filter_vmap": lambda s, m: pm.filter_vmap(lambda s: s)(s),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_an_old_state_refuses_every_use(use):
    """After set, update and fill, whatever uses or flattens it: an update would be lost."""
    for replace, by in (
        (lambda s, m: s.set(m.mean, jnp.ones(2)), r"set\(mean\)"),
        (lambda s, m: s.update(s.substate(m.mean)), "update"),
        (lambda s, m: s.fill(m), "fill"),
    ):
        model, state = make()
        replace(state, model)
        with pytest.raises(StateError, match=f"which {by} has replaced"):
            use(state, model)


class Bundle(pm.Module):
    """A Module with its State beside it."""

    weight: jax.Array
    state: pm.State


def test_a_call_sees_that_the_state_of_its_module_was_replaced():
    """Though the Module keeps its arrays in a list."""
    index = pm.StateIndex(jnp.zeros(()))
    state = pm.State(index)
    bundle = Bundle(jnp.ones(()), state)
    identity = pm.filter_jit(lambda bundle: bundle)
    identity(bundle)
    identity(bundle)
    state.set(index, jnp.ones(()))
    with pytest.raises(StateError, match="set"):
        identity(bundle)


MISFITS = {
    "shape": (lambda m: m.mean, jnp.zeros(3), r"f32\[2\] -> f32\[3\]"),
    "dtype": (lambda m: m.mean, jnp.zeros(2, jnp.bfloat16), r"f32\[2\] -> bf16\[2\]"),
    "structure": (lambda m: m.mean, [jnp.zeros(2)], "mean"),
    "nothing": (lambda m: m.mean, None, "mean"),
    "inside": (
        lambda m: m.pair,
        Pair(jnp.asarray(0, jnp.int32), {"x": ramp(4)}),
        r"pair\.second\['x'\]: f32\[3\] -> f32\[4\]",
    ),
}


@pytest.mark.parametrize(("token", "value", "match"), MISFITS.values(), ids=MISFITS)
def test_a_value_keeps_its_form(token, value, match):
    """Structure, shape and dtype."""
    model, state = make()
    with pytest.raises(StateError, match=match):
        state.set(token(model), value)


@pytest.mark.parametrize("name", ["get", "set", "substate", "update"])
def test_a_token_of_another_model_is_refused(name):
    """By its name, and before anything is changed."""
    model, other = make()[0], pm.make_with_state(Other)()[1]
    with pytest.raises(StateError, match="mean"):
        USES[name](other, model)


# ---- a State and its substates


class Four(pm.Module):
    """Values, and a stream."""

    a: pm.StateIndex
    b: pm.StateIndex
    c: pm.StateIndex
    noise: pm.RngStream

    def __init__(self) -> None:
        self.a, self.b, self.c = (pm.StateIndex(jnp.zeros(())) for _ in range(3))
        self.noise = pm.RngStream()

    def read(self, state: pm.State) -> list[float]:
        """All of its values."""
        return [float(state.get(token)) for token in (self.a, self.b, self.c)]


def four() -> tuple[Four, pm.State]:
    """A model and its State, with a key."""
    model, state = pm.make_with_state(Four)()
    return model, state.seed(jax.random.key(0))


def count(state, token):
    """One more, in either."""
    return state.set(token, state.get(token) + 1)


CHANGES = {
    "a value": lambda m, s: count(s, m.a),
    "a stream, which would give the same keys": lambda m, s: s.next_key(m.noise)[1],
    "another substate": lambda m, s: s.update(count(s.substate(m), m.a)),
    "a transform": lambda m, s: pm.filter_jit(count)(s, m.a),
}


@pytest.mark.parametrize("changed", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_a_substate_of_an_older_state_is_refused(changed, transform):
    """Changed itself or not: one of the updates would be lost. Neither is used up by asking."""
    model, state = four()

    def run(state):
        for part in (state.substate(model), count(state.restored().substate(model), model.b)):
            after = changed(model, state.restored())
            with pytest.raises(StateError, match=r"other values[\s\S]*  at (a|noise)\n"):
                after.update(part)
            after, part = count(after, model.c), count(part, model.b)
        return after

    assert model.read(transform(run)(state))[2] == 1


def test_substates_of_substates():
    """Each knows its origin, through all of its successors."""
    model, state = four()
    part = state.substate((model.a, model.b))
    inner = count(part.substate(model.a), model.a)
    part = count(part, model.b).update(inner)
    state = count(state, model.c).update(part)
    assert model.read(state) == [1, 1, 1]

    part = state.restored().substate(model)
    inner = count(part.substate(model.a), model.a)
    with pytest.raises(StateError, match="  at a\n"):
        count(part, model.a).update(inner)


@pytest.mark.parametrize("transform", [jax.jit, pm.filter_jit, pm.filter_checkpoint])
def test_what_a_transform_returns_is_put_back_as_it_is(transform):
    """Inside of other transforms, too; its origin is not known, so nothing is refused."""
    model, state = four()

    def step(state):
        part = transform(lambda s: count(s, model.a))(state.substate((model.a, model.b)))
        return count(state, model.c).update(part)

    assert model.read(jax.jit(step)(step(state))) == [2, 0, 2]


def test_states_of_other_origins_are_put_in():
    """Loaded or copied: nothing of them is older."""
    model, state = four()
    saved = pickle.dumps(count(state.substate(model.a), model.a))
    for other in (pickle.loads(saved), copy.copy(pickle.loads(saved))):
        state = state.set(model.a, jnp.full((), 3.0)).update(other)
        assert model.read(state) == [1, 0, 0]


# ---- a State that was used up by a call that failed


def test_a_state_is_restored():
    """It has the earlier values, and is used up like any other; the old one is unchanged."""
    model, state = four()
    key, _ = state.next_key(model.noise)
    state = state.restored()
    after = count(state, model.a)
    again, _ = state.restored().next_key(model.noise)

    assert_same(jax.random.key_data(key), jax.random.key_data(again))
    assert model.read(after) == [1, 0, 0]
    assert model.read(state.restored()) == [0, 0, 0]
    # A copy, in this process or another, too: a late save loses nothing.
    for through in (copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))):
        late = through(state)
        with pytest.raises(StateError, match=r"set\(a\)"):
            late.get(model.a)
        assert late.restored() == four()[1]


def test_repr_shows_paths():
    """Each value under its token's path; a used-up State says so."""
    model, state = make()
    assert repr(state) == "State(mean=f32[2], pair=Pair(first=i32[], second={'x': f32[3]}))"
    state.set(model.mean, jnp.ones(2))

    assert repr(state) == "State(<used up by set(mean)>)"
    assert repr([state]) == "[State(<used up by set(mean)>)]"


def test_equality():
    """By tokens and values; States have no hash."""
    (model, a), (_, b) = make(), make()
    assert a == b
    assert a != b.set(model.mean, jnp.ones(2))
    assert a != pm.make_with_state(Other)()[1]
    assert a != 3


# ---- in calls


def test_a_returned_state_is_read_like_any_other():
    """It has its values, names and kinds, filled in or not; the caller's own stays usable."""
    tokens = (pm.StateIndex(jnp.zeros(2)), pm.StateIndex({"a": jnp.ones(3)}), pm.RngStream())
    state = pm.State(tokens).seed(jax.random.key(0))
    step = pm.filter_jit(lambda state: state.set(tokens[0], state.get(tokens[0]) + 1))
    back = step(step(state))
    assert back == step(step(state)) != state
    assert repr(back) == repr(state)
    assert back.get(tokens[0]).tolist() == [2.0, 2.0]
    assert back.get(tokens[1])["a"].tolist() == [1.0, 1.0, 1.0]
    assert back.next_key(tokens[2])[1] != step(step(state))


def changed_in_place(value):
    """Exchange everything in a value that can be."""
    if isinstance(value, dict):
        value["a"] = jnp.full((), 7.0)
    elif isinstance(value, list):
        value.append(jnp.full((), 7.0))
    else:
        changed_in_place(value[-1])


SHARED = {
    "init": lambda state, index, value: (state, value),
    "get": lambda state, index, value: (state, state.get(index)),
    "set": lambda state, index, value: (state.set(index, value), value),
    "substate": lambda state, index, value: (state, state.substate(index).get(index)),
    "update": lambda state, index, value: (
        state.update(state.substate(index).set(index, value)),
        value,
    ),
    "jit": lambda state, index, value: (pm.filter_jit(lambda s: s)(state), state.get(index)),
    "fill": lambda state, index, value: (
        pm.make_with_state(lambda: state.restored().fill(index))()[1],
        state.get(index),
    ),
}


@pytest.mark.parametrize("shared", SHARED.values(), ids=SHARED)
@pytest.mark.parametrize(
    "value", [{"a": jnp.zeros(())}, Pair(jnp.zeros(()), [jnp.zeros(())])], ids=["dict", "Module"]
)
def test_a_container_that_is_changed_in_place_changes_no_state(value, shared):
    """Arguments and results belong to the caller; the State has a copy."""
    value = copy.deepcopy(value)
    index, state = pm.make_with_state(lambda: pm.StateIndex(value))()
    state, value = shared(state, index, value)
    read = pm.filter_jit(lambda state: jax.tree.leaves(state))
    before = read(state)
    changed_in_place(value)

    assert read(state) == before == [0.0] * len(before)
    assert jax.tree.leaves(state.get(index)) == before


def test_arrays_of_numpy_are_copied():
    """Later changes of the caller's buffer do not affect the State."""
    buffer = np.zeros(2, np.float32)
    token = pm.StateIndex(buffer)
    state = pm.State(token).set(token, buffer)
    buffer[:] = 7

    assert_same(state.get(token), jnp.zeros(2))


# ---- cost, and plain JAX


def test_get_and_set_add_nothing_to_a_program():
    """Reading and writing is bookkeeping in Python: the program has the user's operations alone."""
    model, state = make()

    def step(state, x):
        for _ in range(5):
            state = state.set(model.mean, state.get(model.mean) + x)
        part = state.substate(model.pair)
        return state.update(part)

    assert equations(step, state, jnp.ones(2)) == {"add": 5}


def test_a_value_has_a_type_of_its_own():
    """No weak types: a step that is compiled for the first State works for all later ones."""
    token = pm.StateIndex({"n": jnp.asarray(0), "x": 1.5})
    state = pm.State(token)
    traces = []

    @pm.filter_jit
    def step(state):
        traces.append(None)
        value = state.get(token)
        return state.set(token, {"n": jnp.asarray(3), "x": value["x"] * jnp.ones(())})

    for _ in range(3):
        state = step(state)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(state))
    assert len(traces) == 1


def test_plain_jax_takes_a_state():
    """jit, vmap, grad, scan, cond, while_loop and checkpoint, with no filter."""
    model, state = pm.make_with_state(Other)()

    def step(state, x):
        new = state.get(model.token) + x
        return state.set(model.token, new), new.sum()

    xs = ramp(3, 2)
    after, sums = jax.jit(lambda s: jax.lax.scan(step, s, xs))(state)
    np.testing.assert_allclose(after.get(model.token), xs.sum(axis=0))
    np.testing.assert_allclose(sums, xs.sum(axis=1).cumsum(), rtol=1e-6)

    many, _ = jax.vmap(step, in_axes=(None, 0))(state, xs)
    np.testing.assert_allclose(many.get(model.token), xs)
    gradient, one = jax.grad(lambda x, s: step(s, x)[::-1], has_aux=True)(xs[0], copy.copy(state))
    np.testing.assert_allclose(gradient, jnp.ones(2))
    np.testing.assert_allclose(one.get(model.token), xs[0])

    chosen = jax.lax.cond(True, lambda s: step(s, xs[1])[0], lambda s: s, state)
    np.testing.assert_allclose(chosen.get(model.token), xs[1])
    looped = jax.lax.fori_loop(0, 3, lambda i, s: jax.checkpoint(step)(s, xs[0])[0], state)
    np.testing.assert_allclose(looped.get(model.token), 3 * xs[0], rtol=1e-6)


class Counter(pm.Module):
    """A scalar, which would broadcast with anything, and a tree of values."""

    count: pm.StateIndex
    pair: pm.StateIndex

    def __init__(self) -> None:
        self.count = pm.StateIndex(jnp.asarray(0.0))
        self.pair = pm.StateIndex((jnp.zeros(2), jnp.zeros(2)))

    def __call__(self, x, state):
        count = state.get(self.count) + 1
        mean, last = state.get(self.pair)
        state = state.set(self.count, count)
        return x + count, state.set(self.pair, (mean + x, last))


MADE_WITH_AN_AXIS = {
    "vmap": lambda layer, state: jax.vmap(layer, (0, None))(ramp(3), state)[1],
    "filter_vmap": lambda layer, state: pm.filter_vmap(layer, in_axes=(0, None))(ramp(3), state)[1],
    "split": lambda _, state: state.split(3, pm.StateIndex),
    "stack": lambda _, state: jax.tree.map(lambda *x: jnp.stack(x), state, copy.copy(state)),
    "made in a map": lambda *_: jax.vmap(lambda _: pm.make_with_state(Counter)()[1])(ramp(3)),
    "a part": lambda layer, state: jax.vmap(layer, (0, None))(ramp(3), state)[1].substate(layer),
}


@pytest.mark.parametrize("made", MADE_WITH_AN_AXIS.values(), ids=MADE_WITH_AN_AXIS)
def test_a_value_with_the_axis_of_a_map_is_set_inside_of_one(made):
    """Outside it is read; a layer that sets it would only broadcast. Both, jitted or not."""
    layer, state = pm.make_with_state(Counter)()
    many = made(layer, state)
    n = many.get(layer.count).size
    for call in (layer, jax.jit(layer)):
        with pytest.raises(StateError, match=r"at count: f32\[\d\]"):
            call(jnp.ones(()), copy.copy(many))
    before = many.get(layer.count)
    _, after = jax.vmap(layer)(jnp.ones(n), many)
    assert_same(after.get(layer.count), before + 1)

    # One value from now on, which has that axis; or one of the members.
    layer, one = pm.make_with_state(copy.copy(after).fill)(layer)
    assert_same(one.set(layer.count, before).get(layer.count), before)
    _, first = layer(1.0, jax.tree.map(lambda x: x[0], after))
    assert_same(first.get(layer.count), before[0] + 2)


def test_values_that_were_made_for_all_members_have_fewer_axes_in_each():
    """Under a map over models that were made beforehand; a second axis is refused as ever."""
    layers, state = pm.make_with_state(lambda: jax.vmap(lambda _: Counter())(ramp(3)))()
    _, after = jax.vmap(lambda layer, state: layer(1.0, state), (None, 0))(layers, state)
    assert after.get(layers.count).tolist() == [1, 1, 1]
    after = after.set(layers.count, jnp.zeros(3))
    _, after = jax.vmap(layers, (0, None))(ramp(2), after)
    with pytest.raises(StateError, match=r"pair\[0\]: f32\[2,3,2\]"):
        after.set(layers.pair, after.get(layers.pair))


class Deep(pm.Module):
    """Tokens below lists and dicts."""

    layers: list

    def __init__(self) -> None:
        self.layers = [{"net": Net(), "noise": pm.RngStream()} for _ in range(2)]


def test_entries_are_selected_by_the_steps_of_their_paths():
    """A pattern reads over a State as it does over the model: wildcards and indices work."""
    _, state = pm.make_with_state(Deep)()
    state = state.seed(jax.random.key(0))

    def names(pattern):
        kept = pm.filter(state, pattern)
        leaves = jax.tree_util.tree_leaves_with_path(kept)
        return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]

    assert names("layers.*.net.pair.second") == [
        "layers[0]['net'].pair/second/x",
        "layers[1]['net'].pair/second/x",
    ]
    assert names("**.noise.count") == [f"layers[{i}]['noise']/count" for i in range(2)]
    assert names(pm.RngStream) == names("layers.*.noise")


def test_a_state_that_was_returned_is_pickled_and_copied():
    """Also before anybody has read a value, and with random streams."""
    _, state = pm.make_with_state(Deep)()
    state = pm.filter_jit(lambda s: s)(state.seed(jax.random.key(0)).split(2))
    back = copy.deepcopy(state)

    assert back == state
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert copy.copy(state) == state
    plain = pm.make_with_state(Net)()[1]
    returned = pm.filter_jit(lambda s: s)(plain)
    read = pickle.loads(pickle.dumps(returned))
    assert read == plain
    assert jax.tree.structure(read) == jax.tree.structure(plain)
    assert len(jax.tree.leaves(pm.filter(read, pm.select.path("pair.second.x")))) == 1


def test_one_thread_replaces_a_state():
    """The others are refused, even if all of them have looked before one was done."""
    token, stream = pm.StateIndex(jnp.zeros(2)), pm.RngStream()
    whole = pm.State((token, stream)).seed(jax.random.key(0))

    def use(state, method):
        try:
            return state.next_key(stream) if method else state.set(token, jnp.ones(2))
        except StateError:
            return None

    for method in [0, 1] * 10:
        state = whole.restored()
        results = race(lambda _, state=state, method=method: use(state, method), threads=4)
        assert sum(each is not None for each in results) == 1
