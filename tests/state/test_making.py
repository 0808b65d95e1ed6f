"""Tokens, make_with_state, and giving a model its values back."""

import copy
import inspect
from collections import OrderedDict

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, StateError
from tests.helpers.comparing import assert_same
from tests.helpers.trees import ramp


class Counter(pm.Module):
    count: pm.StateIndex
    stream: pm.RngStream | None
    step: int = pm.field(static=True)

    def __init__(self, step=1, *, start=0, noisy=False):
        self.count = pm.StateIndex(jnp.asarray(start))
        self.stream = pm.RngStream() if noisy else None
        self.step = step

    def __call__(self, x, state):
        if self.stream is not None:
            key, state = state.next_key(self.stream)
            x = x + jax.random.normal(key, x.shape)
        n = state.get(self.count) + self.step
        return x * n.astype(x.dtype), state.set(self.count, n)


def several():
    return {"first": Counter(), "rest": [Counter(2), Counter(3)]}


def counts_of(model, state):
    return [int(state.get(layer.count)) for layer in (model["first"], *model["rest"])]


def test_a_token_keeps_its_identity_and_its_value():
    """Until it is in a State, the value is data; later, copies find it, and other tokens do not."""
    token, other = pm.StateIndex({"a": ramp(2)}), pm.StateIndex({"a": ramp(2)})
    state = pm.State([token, other])
    state = state.set(other, {"a": ramp(2, start=5.0)})

    assert_same(pm.filter_jit(lambda t: t.init["a"] * 2)(token), ramp(2) * 2)
    assert token != other
    for same in (
        jax.tree.map(lambda x: x, token),
        pm.filter_jit(lambda t: t)(token),
        pm.tree_at(lambda t: t.init, token, None),
        copy.copy(token),
        token.replace(init=None),
        nn.delete_init_state(token),
    ):
        assert_same(state.get(same)["a"], ramp(2))
    # None is a value, and no value that is gone.
    token = pm.StateIndex(None)
    for same in (token, copy.deepcopy(token), jax.tree.map(jnp.copy, token)):
        assert pm.State(same).set(same, None).get(same) is None


def test_model_and_state_come_together():
    """The State has every value under its token's path, and the model has none: each counts."""
    make = pm.make_with_state(several)
    for model, state in (make(), pm.filter_jit(make)()):
        layers = [model["first"], *model["rest"]]
        names = ["['first'].count", "['rest'][0].count", "['rest'][1].count"]
        assert repr(state) == f"State({'=i32[], '.join(names)}=i32[])"
        tokens = [layer.count for layer in layers]
        assert [(token.marker, token.init) for token in tokens] == [(n, None) for n in names]
        for layer in [*layers, *layers[1:]]:
            _, state = layer(ramp(1), state)
        assert counts_of(model, state) == [1, 4, 6]


def test_the_maker_looks_like_the_function():
    """Its name and its signature are the same."""
    maker = pm.make_with_state(Counter)
    assert (maker.__name__, maker.__doc__) == ("Counter", Counter.__doc__)
    assert list(inspect.signature(maker).parameters) == ["step", "start", "noisy"]


def test_values_that_began_as_one_array_can_be_donated():
    """Each entry has a separate array, a random key like any other."""
    token = pm.StateIndex((ramp(2), jax.random.key(0)))
    tokens, state = pm.make_with_state(lambda: [token, token, pm.StateIndex([ramp(1)] * 2)])()
    step = jax.jit(lambda state: state.set(tokens[0], state.get(tokens[1])), donate_argnums=0)
    assert_same(step(step(state)).get(tokens[1])[0], ramp(2))


def made(start, seed):
    model, state = pm.make_with_state(Counter)(start=start, noisy=True)
    _, state = model(ramp(2), state.seed(jax.random.key(seed)))
    return model, state


def test_states_of_two_models_are_merged():
    """Two models with tokens of the same names become one: each goes on where it was."""
    pairs = [made(10, 0), made(20, 1)]
    expected = [model(ramp(2), copy.copy(state))[0] for model, state in pairs]
    filled = [state.fill(model) for model, state in pairs]
    models, state = pm.make_with_state(lambda: filled)()

    for model, y in zip(models, expected, strict=True):
        got, state = model(ramp(2), state)
        assert_same(got, y)
    assert [int(state.get(model.count)) for model in models] == [12, 22]


def test_a_layer_that_surgery_added_gets_its_place_in_the_state():
    """The others keep their values; the new layer has its initial one, and is named by its path."""
    model, state = pm.make_with_state(several)()
    _, state = model["first"](ramp(1), state)
    changed = pm.tree_at(lambda m: m["rest"][0], model, Counter(5))
    changed, state = pm.make_with_state(state.fill)(changed)
    _, state = changed["rest"][0](ramp(1), state)

    assert counts_of(changed, state) == [1, 5, 0]
    assert changed["rest"][0].count.marker == "['rest'][0].count"


@pytest.mark.parametrize("transform", [lambda f: f, pm.filter_jit])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: layer])
def test_a_layer_in_a_second_place_begins_with_its_values_but_without_a_key(transform, copied):
    """With the key of the first, the second would draw the same numbers."""
    model, state = made(0, 0)
    expected, _ = state.restored().next_key(model.stream)

    @transform
    def remade(model, state):
        filled = state.fill(model)
        return pm.make_with_state(lambda: [filled, copied(filled)])()

    (first, second), state = remade(model, state)
    assert [int(state.get(layer.count)) for layer in (first, second)] == [1, 1]
    assert_same(state.restored().next_key(first.stream)[0], expected)
    with pytest.raises(StateError, match=r"\[1\]\.stream"):
        state.restored().next_key(second.stream)
    other, _ = state.seed(jax.random.key(0), "[1]").next_key(second.stream)
    assert jnp.any(jax.random.key_data(other) != jax.random.key_data(expected))


TOKEN = pm.StateIndex(ramp(1))
STREAMS = pm.make_with_state(lambda: [pm.RngStream()])()[0]
(ONE, TWO), THEIRS = pm.make_with_state(lambda: [Counter(1), Counter(2)])()
NET, OF_NET = pm.make_with_state(lambda: {"first": Counter()})()
REFUSED = {
    "one token at two paths": (lambda: pm.State({"a": [TOKEN], "b": TOKEN}), r"\['a'\]\[0\]"),
    "two layers of one name": (lambda: THEIRS.fill([ONE, copy.deepcopy(ONE)]), r"\[0\]\.count"),
    "a layer for its class": (lambda: pm.make_with_state(nn.BatchNorm(2)), "make_with_state"),
    "a substate of two paths": (lambda: THEIRS.substate([ONE, ONE]), r"\[0\]\.count"),
    "models that have a State": (lambda: pm.make_with_state(lambda: [ONE])(), r"\[0\]\.count"),
    "streams that have one": (lambda: pm.make_with_state(lambda: STREAMS)(), r"\[0\]"),
    "paths that read the same": (
        lambda: pm.make_with_state(OrderedDict)([(float("nan"), Counter()) for _ in range(2)]),
        r"\[nan\]",
    ),
    "a layer of another model": (lambda: THEIRS.fill([ONE, TWO, NET]), r"first'\]\.count"),
    "a value for a State": (lambda: THEIRS.restored().update({}), "expected a State"),
    "a layer without a State": (lambda: Counter()(ramp(1), OF_NET), r"first'\]\.count"),
}


@pytest.mark.parametrize(("call", "match"), REFUSED.values(), ids=REFUSED)
def test_what_would_share_or_lose_a_value_is_refused(call, match):
    with pytest.raises((StateError, ArgumentError), match=match):
        call()
