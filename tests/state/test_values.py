"""State."""

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError, SpecError, StateError
from tests.helpers.comparing import assert_same
from tests.helpers.equations import equations
from tests.helpers.racing import race
from tests.helpers.trees import Pair, new, ramp


class Net(pm.Module):
    """Values, one of which is a tree, and a stream."""

    a: pm.StateIndex
    b: pm.StateIndex
    pair: pm.StateIndex
    noise: pm.RngStream

    def __init__(self):
        self.a, self.b = (pm.StateIndex(jnp.zeros(())) for _ in range(2))
        self.pair = pm.StateIndex(Pair(jnp.zeros((), jnp.int32), {"x": ramp(3)}))
        self.noise = pm.RngStream()

    def read(self, state):
        return [float(state.get(token)) for token in (self.a, self.b)]


def make():
    model, state = pm.make_with_state(Net)()
    return model, state.seed(jax.random.key(0))


def count(state, token):
    return state.set(token, state.get(token) + 1)


COPIES = [copy.copy, copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))]


USES = {
    "get": lambda s, m: s.get(m.a),
    "set": lambda s, m: s.set(m.a, jnp.ones(())),
    "substate": lambda s, m: s.substate(m.a),
    "update": lambda s, m: s.update(make()[1]),
    "seed": lambda s, m: s.seed(jax.random.key(0)),
    "split": lambda s, m: s.split(3),
    "join": lambda s, m: s.join(),
    "fill": lambda s, m: s.fill(m),
    "leaves": lambda s, m: jax.tree.leaves(s),
    "leaves with paths": lambda s, m: jax.tree_util.tree_leaves_with_path(s),
    "jit": lambda s, m: jax.jit(lambda s: s)(s),
    "filter_jit": lambda s, m: pm.filter_jit(lambda s: s)(s),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_an_old_state_refuses_every_use(use):
    """After set, update and fill, whatever uses or flattens it: an update would be lost."""
    for replace, by in (
        (lambda s, m: count(s, m.a), r"set\(a\)"),
        (lambda s, m: s.update(s.substate(m.a)), "update"),
        (lambda s, m: s.fill(m), "fill"),
    ):
        model, state = make()
        replace(state, model)
        with pytest.raises(StateError, match=f"which {by} has replaced"):
            use(state, model)


def test_a_call_sees_that_the_state_of_a_module_was_replaced():
    """Though the Module keeps its arrays in a list."""
    model, state = make()
    bundle = Pair(jnp.ones(()), state)
    identity = pm.filter_jit(lambda bundle: bundle)
    identity(bundle)
    identity(bundle)
    count(state, model.a)
    with pytest.raises(StateError, match=r"set\(a\)"):
        identity(bundle)


def test_a_state_is_restored():
    """It has the earlier values, and is used up like any other; the old one is unchanged."""
    model, state = make()
    key, _ = state.next_key(model.noise)
    state = state.restored()
    after = count(state, model.a)
    again, _ = state.restored().next_key(model.noise)

    assert_same(jax.random.key_data(key), jax.random.key_data(again))
    assert [model.read(s) for s in (after, state.restored())] == [[1, 0], [0, 0]]
    # A copy, in this process or another, too: a late save loses nothing.
    for through in COPIES:
        late = through(state)
        with pytest.raises(StateError, match=r"set\(a\)"):
            late.get(model.a)
        assert late.restored() == make()[1]


def test_one_thread_replaces_a_state():
    """The others are refused, even if all of them have looked before one was done."""
    model, whole = make()
    for _ in range(10):
        state = whole.restored()

        def use(_, state=state):
            try:
                return state.next_key(model.noise)
            except StateError:
                return None

        assert sum(each is not None for each in race(use, threads=4)) == 1


MISFITS = [
    (jnp.asarray(0.0), {"x": ramp(3)}, r"pair\.first: i32\[\] -> f32\[\]"),
    (jnp.asarray(0), {"x": [ramp(3)]}, r"pair\.second\['x'\]: f32\[3\] ->"),
    ("text", {"x": ramp(3)}, r"pair\.first: i32\[\] -> 'text'"),
]


@pytest.mark.parametrize(("first", "second", "match"), MISFITS)
def test_a_value_keeps_its_form(first, second, match):
    model, state = make()
    with pytest.raises(StateError, match=match):
        state.set(model.pair, Pair(first, second))


@pytest.mark.parametrize("name", ["get", "set", "substate", "update"])
def test_a_token_of_another_model_is_refused(name):
    """By its name, and before anything is changed."""
    token, other = pm.make_with_state(lambda: {"other": pm.StateIndex(jnp.zeros(2))})()
    with pytest.raises(StateError, match="'a'"):
        USES[name](other, make()[0])
    assert_same(other.get(token["other"]), jnp.zeros(2))


@pytest.mark.parametrize("item", [0, "a", "noise"])
def test_what_is_no_token_of_the_kind_is_refused(item):
    """A value has no keys, and the counter of a stream is not for its users to set."""
    model, state = make()
    token = getattr(model, item) if isinstance(item, str) else item
    with pytest.raises(ArgumentError, match="a token"):
        state.next_key(token) if item == "a" else state.set(token, token)


# ---- a State and its substates

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
    model, state = make()

    @transform
    def run(state):
        for part in (state.substate(model), count(state.restored().substate(model), model.a)):
            after = changed(model, state.restored())
            with pytest.raises(StateError, match=r"other values[\s\S]*  at (a|noise)\n"):
                after.update(part.restored())
            after, part = count(after, model.b), count(part, model.b)
        return after

    assert model.read(run(state))[1] == 1


def test_substates_of_substates():
    """Each knows its origin, through all of its successors."""
    model, state = make()
    part = state.substate((model.a, model.noise))
    inner = count(part.substate(model.a), model.a)
    part = part.next_key(model.noise)[1].update(inner)
    assert model.read(count(state, model.b).update(part)) == [1, 1]
    with pytest.raises(StateError, match="update has replaced"):
        part.get(model.a)

    part = state.restored().substate(model)
    inner = count(part.substate(model.a), model.a)
    with pytest.raises(StateError, match="  at a\n"):
        count(part, model.a).update(inner)


@pytest.mark.parametrize("transform", [jax.jit, pm.filter_jit])
def test_a_part_of_unknown_origin_is_put_in(transform):
    """From a transform, also inside of another one; loaded or copied: nothing of it is older."""
    model, state = make()

    def step(state):
        part = transform(lambda s: count(s, model.a))(state.substate((model.a, model.pair)))
        return count(state, model.b).update(part)

    state = jax.jit(step)(step(state))
    assert model.read(state) == [2, 2]
    part = count(state.substate(model.a), model.a)
    for through in COPIES:
        state = state.set(model.a, jnp.zeros(())).update(through(part))
        assert model.read(state) == [3, 2]


# ---- as a value


def test_repr_and_equality():
    """Each value under its token's path; a used-up State says so. States have no hash."""
    (model, state), (_, other) = pm.make_with_state(lambda: Net().pair)(), make()
    assert repr(state) == "State(<root>=Pair(first=i32[], second={'x': f32[3]}))"
    assert state == state.restored() == copy.deepcopy(state) != other != make()[1].split(2) != 1
    one, two = (pm.State({name: pm.StateIndex(1.0)}) for name in "ab")
    assert one != two
    after = state.set(model, Pair(jnp.ones((), jnp.int32), {"x": ramp(3)}))
    assert after != state.restored()
    assert repr([state]) == "[State(<used up by set(<root>)>)]"
    with pytest.raises(TypeError, match="unhashable"):
        hash(state)


@pytest.mark.parametrize("jit", [jax.jit, pm.filter_jit])
def test_states_with_values_in_another_order_are_two_structures(jit):
    """Of classes with the same fields: the program for one would read the other's values."""
    get, orders = jit(lambda state, token: state.get(token)), (["a", "b"], ["b", "a"])
    for names in orders:
        model = new(fields=dict.fromkeys(names, Any))(*map(pm.StateIndex, map(ord, names)))
        model, state = pm.make_with_state(lambda model=model: model)()
        assert [int(get(state, getattr(model, name))) for name in "ab"] == [97, 98]


def test_a_selector_that_picks_nothing_lists_the_names():
    """As they are to be written: in brackets where a key of a dict is no word."""
    _, state = pm.make_with_state(lambda: {"a b": [pm.StateIndex(0.0)], "c": {"d": Net()}})()
    with pytest.raises(SpecError, match=r"the tree has: \['a b'\]\[0\], \['c'\]\['d'\]\.a, "):
        state.seed(jax.random.key(0), "nothing")
    assert state.seed(jax.random.key(0), "['c']['d'].noise") != state.restored()


def test_a_returned_state_is_like_any_other():
    """It has its values, names and kinds, filled in or not; the caller's own stays usable."""
    model, state = make()
    step = pm.filter_jit(lambda state: count(state, model.a))
    back = step(step(state))

    assert back == step(step(state)) != state
    assert repr(back) == repr(state)
    assert model.read(back) == [2, 0]
    for copied in COPIES:
        again = copied(step(step(state)))
        assert again == back
        assert jax.tree.structure(again) == jax.tree.structure(back)
        assert len(jax.tree.leaves(pm.filter(again, "pair.second.x"))) == 1
    assert back.next_key(model.noise)[1] != step(step(state))


SHARED = {
    "init": lambda s, index, value: (s, value),
    "get": lambda s, index, value: (s, s.get(index)),
    "set": lambda s, index, value: (s.set(index, value), value),
    "substate": lambda s, index, value: (s, s.substate(index).get(index)),
    "update": lambda s, index, value: (s.update(s.substate(index).set(index, value)), value),
    "fill": lambda s, index, value: (pm.make_with_state(s.fill)(index)[1], s.restored().get(index)),
}


@pytest.mark.parametrize("shared", SHARED.values(), ids=SHARED)
def test_what_is_changed_in_place_changes_no_state(shared):
    """Arguments and results belong to the caller, as do NumPy's arrays; the State has a copy."""
    value = {"a": np.zeros(2, np.float32)}
    index, state = pm.make_with_state(lambda: pm.StateIndex(value))()
    state, shared_value = shared(state, index, value)
    value["a"][:] = 7
    shared_value["a"] = jnp.full((2,), 7.0)

    assert_same(pm.filter_jit(lambda state: jax.tree.leaves(state))(state), [jnp.zeros(2)])
    assert_same(state.get(index), {"a": jnp.zeros(2)})


def test_get_and_set_add_nothing_to_a_program():
    """Reading and writing is bookkeeping in Python: the program has the user's operations alone."""
    model, state = make()

    def step(state, x):
        for _ in range(5):
            state = state.set(model.a, state.get(model.a) + x)
        return state.update(state.substate(model.pair))

    assert equations(step, state, jnp.ones(())) == {"add": 5}


def test_a_value_has_no_weak_type():
    """A step that is compiled for the first State works for all later ones."""
    token = pm.StateIndex({"n": jnp.asarray(0), "x": 1.5})
    state = pm.State(token)
    after = copy.copy(state).set(token, {"n": jnp.asarray(3), "x": jnp.ones(())})
    for each in (state, after):
        assert not any(x.weak_type for x in jax.tree.leaves(each))


def test_plain_jax_takes_a_state():
    """grad, vmap, cond, fori_loop and checkpoint, with no filter."""
    model, state = make()

    def step(x, state):
        state = count(state, model.a)
        return x * state.get(model.a), state

    gradient, state = jax.grad(step, has_aux=True)(3.0, state)
    state = jax.lax.cond(True, lambda s: step(1.0, s)[1], lambda s: s, state)
    state = jax.lax.fori_loop(0, 3, lambda i, s: jax.checkpoint(step)(1.0, s)[1], state)
    assert (gradient, model.read(state)) == (1, [5, 0])
    assert_same(jax.vmap(step, in_axes=(0, None))(ramp(2), state)[0], 6 * ramp(2))


# ---- values with the axis of a map


def layer(model, x, state):
    """A scalar, which would broadcast with anything."""
    return x, count(state, model.a)


MAPPED = {"in_axes": (None, 0, None), "out_axes": 0}


MADE_WITH_AN_AXIS = {
    "filter_vmap": lambda m, s: pm.filter_vmap(layer, **MAPPED)(m, ramp(3), s)[1],
    "split": lambda m, s: s.split(3, pm.StateIndex),
    "stack": lambda m, s: jax.tree.map(lambda *x: jnp.stack(x), s, copy.copy(s)),
    "made in a map": lambda m, s: jax.vmap(lambda _: pm.make_with_state(Net)()[1])(ramp(3)),
}


@pytest.mark.parametrize("made", MADE_WITH_AN_AXIS.values(), ids=MADE_WITH_AN_AXIS)
def test_a_value_with_the_axis_of_a_map_is_set_inside_of_one(made):
    """Outside it is read; a layer that sets it would only broadcast. Both, jitted or not."""
    model, state = make()
    many = made(model, state).substate(model.a)
    before = many.get(model.a)
    for call in (layer, jax.jit(layer)):
        with pytest.raises(StateError, match=r"at a: f32\[\d\]"):
            call(model, 1.0, many)
    _, after = jax.vmap(layer, (None, None, 0))(model, 1.0, many)
    assert_same(after.get(model.a), before + 1)

    # One value from now on, which has that axis; or one of the members.
    one_model, one = pm.make_with_state(copy.copy(after).fill)(model.a)
    assert_same(one.set(one_model, before).get(one_model), before)
    first = count(jax.tree.map(lambda x: x[0], after), model.a)
    assert_same(first.get(model.a), before[0] + 2)


def test_values_that_were_made_for_all_members_have_fewer_axes_in_each():
    """Under a map over models that were made beforehand; a second axis is refused as ever."""
    models, state = pm.make_with_state(lambda: jax.vmap(lambda _: Net())(ramp(3)))()
    _, after = jax.vmap(layer, (None, None, 0))(models, 1.0, state)
    assert after.get(models.a).tolist() == [1, 1, 1]
    after = after.set(models.a, jnp.zeros(3))
    _, after = jax.vmap(layer, **MAPPED)(models, ramp(2), after)
    with pytest.raises(StateError, match=r"pair\.second\['x'\]: f32\[2,3,3\]"):
        after.set(models.pair, after.get(models.pair))
