"""make_with_state and delete_init_state."""

import copy
import inspect
import pickle

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError, StateError
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.trees import ramp


class Counter(pm.Module):
    """Counts its calls."""

    count: pm.StateIndex
    step: int = pm.field(static=True)

    def __init__(self, step: int = 1) -> None:
        self.count = pm.StateIndex(jnp.asarray(0))
        self.step = step

    def __call__(self, x: jax.Array, state: pm.State) -> tuple[jax.Array, pm.State]:
        n = state.get(self.count) + self.step
        return x * n.astype(x.dtype), state.set(self.count, n)


class Net(pm.Module):
    """Counters at several depths."""

    first: Counter
    rest: dict
    weight: jax.Array

    def __init__(self, *, size: int) -> None:
        self.first = Counter()
        self.rest = {"a": [Counter(2), Counter(3)]}
        self.weight = ramp(size)


def test_model_and_state_come_together():
    """The State has every token's value under its path; the model has none."""
    model, state = pm.make_with_state(Net)(size=2)

    assert pm.tree_pformat(state, width=200) == (
        "State(first.count=i32[], rest['a'][0].count=i32[], rest['a'][1].count=i32[])"
    )
    assert [leaf.shape for leaf in jax.tree.leaves(model)] == [(2,)]
    assert [int(leaf) for leaf in jax.tree.leaves(state)] == [0, 0, 0]


def test_each_layer_finds_its_own_value():
    """Layers of one class count apart."""
    model, state = pm.make_with_state(Net)(size=2)
    x = ramp(1)
    _, state = model.first(x, state)
    for layer in model.rest["a"] * 2:
        _, state = layer(x, state)

    counts = [state.get(layer.count) for layer in (model.first, *model.rest["a"])]
    assert [int(n) for n in counts] == [1, 4, 6]


def test_any_function_that_builds_a_model():
    """A function, a partial, a class method; its signature and name are the same."""

    def build(size, *, scale=1.0):
        """Builds."""
        return [Counter(), ramp(size) * scale]

    maker = pm.make_with_state(build)
    model, state = maker(2, scale=2.0)
    assert_same(model[1], ramp(2) * 2)
    assert len(jax.tree.leaves(state)) == 1
    assert (maker.__name__, maker.__doc__) == ("build", "Builds.")
    assert list(inspect.signature(maker).parameters) == ["size", "scale"]


def test_under_jit_and_vmap():
    """Models with State may be made inside transforms: an ensemble has a stacked State."""

    def make(scale):
        model, state = pm.make_with_state(Net)(size=2)
        return jax.tree.map(lambda w: w * scale, model), state

    models, states = pm.filter_vmap(make)(ramp(3))
    assert models.weight.shape == (3, 2)
    assert [leaf.shape for leaf in jax.tree.leaves(states)] == [(3,)] * 3
    jitted_model, jitted_state = pm.filter_jit(make)(jnp.asarray(2.0))
    assert_same(jitted_model.weight, ramp(2) * 2)
    _, after = jitted_model.first(ramp(1), jitted_state)
    assert int(after.get(jitted_model.first.count)) == 1


def test_a_token_in_two_places_is_one_for_each():
    """Each path has an entry, named by the path, with the initial value of the token."""

    def build():
        token = pm.StateIndex(ramp(1))
        return {"b": token, "a": [token]}

    model, state = pm.make_with_state(build)()
    assert repr(state) == "State(['a'][0]=f32[1], ['b']=f32[1])"
    state = state.set(model["b"], ramp(1) * 3)
    assert_same(state.get(model["b"]), ramp(1) * 3)
    assert_same(state.get(model["a"][0]), ramp(1))


def doubles_of(layer):
    """A layer and another one like it."""
    return {
        "same": [layer, layer],
        "deepcopy": [layer, copy.deepcopy(layer)],
        "pickle": [layer, pickle.loads(pickle.dumps(layer))],
        "tree.map": [layer, jax.tree.map(jnp.copy, layer)],
        "filter_jit": [layer, pm.filter_jit(lambda layer: layer)(layer)],
    }


def doubles(norm):
    """A BatchNorm and another one like it, in every way to come by it."""
    return {
        **doubles_of(norm),
        "tree_at": [norm, pm.tree_at(lambda m: m.weight, norm, norm.weight * 1)],
    }


COPIES = list(doubles(pm.nn.BatchNorm(2)))


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.sampled
def test_copies_of_a_layer_have_statistics_of_their_own(way):
    """Weights diverge, and so do values: inference uses those of training."""
    first, second = doubles(pm.nn.BatchNorm(2, momentum=0.5))[way]
    layers = [first, pm.nn.Lambda(lambda x: x * 5 + 100), second]
    net, state = pm.make_with_state(pm.nn.Sequential)(layers)
    x = jnp.asarray([[1.0, 10.0], [3.0, 30.0], [8.0, -5.0]])
    for _ in range(30):
        y, state = pm.filter_jit(net)(x, state)

    ready = pm.nn.inference_mode(net)
    means = [state.get(layer.state_index)[0] for layer in (net[0], net[2])]
    assert_close(means[0], jnp.mean(x, axis=0), rtol=1e-4)
    assert_close(means[1], jnp.full(2, 100.0), rtol=1e-4)
    # The running variance is unbiased, 3/2 of the variance of a batch of three; in both layers.
    assert_close(ready(x, state)[0], y * 2 / 3, rtol=1e-3, atol=1e-3)


class Unkeyed:
    """A node whose children JAX gives keys that read the same."""

    def __init__(self, *children):
        self.children = children


jax.tree_util.register_pytree_with_keys(
    Unkeyed,
    lambda node: ([(jax.tree_util.GetAttrKey("x"), c) for c in node.children], None),
    lambda _, children: Unkeyed(*children),
)


def test_delete_init_state():
    """Takes the values out of the tokens; everything else is unchanged."""
    model = Net(size=2)
    state = pm.State(model)
    bare = pm.nn.delete_init_state(model)

    assert [leaf.shape for leaf in jax.tree.leaves(bare)] == [(2,)]
    assert int(state.get(bare.first.count)) == 0
    assert bare.rest["a"][1].step == 3
    assert model.first.count.init is not None


# ---- giving a model its values back, and making it anew


class Noisy(pm.Module):
    """A count and a stream, as a layer of a larger model has them."""

    count: pm.StateIndex
    stream: pm.RngStream

    def __init__(self, start: int = 0) -> None:
        self.count = pm.StateIndex(jnp.asarray(start, jnp.int32))
        self.stream = pm.RngStream()

    def __call__(self, x: jax.Array, state: pm.State) -> tuple[jax.Array, pm.State]:
        key, state = state.next_key(self.stream)
        state = state.set(self.count, state.get(self.count) + 1)
        return x + jax.random.normal(key, x.shape), state


def made(start: int, seed: int) -> tuple[Noisy, pm.State]:
    """A model and its State, after one step."""
    model, state = pm.make_with_state(Noisy)(start)
    _, state = model(ramp(2), state.seed(jax.random.key(seed)))
    return model, state


def test_states_of_two_models_are_merged():
    """Two models with tokens of the same names become one: each goes on where it was."""
    (first, first_state), (second, second_state) = made(10, 0), made(20, 1)
    pairs = [(first, first_state), (second, second_state)]
    expected = [model(ramp(2), copy.copy(state))[0] for model, state in pairs]
    models, state = pm.make_with_state(lambda *models: list(models))(
        first_state.fill(first), second_state.fill(second)
    )

    assert repr(state).startswith("State(\n  [0].count=i32[],")
    assert [int(state.get(model.count)) for model in models] == [11, 21]
    for model, y in zip(models, expected, strict=True):
        got, state = model(ramp(2), state)
        assert_same(got, y)
    assert [int(state.get(model.count)) for model in models] == [12, 22]


def test_a_layer_that_surgery_added_gets_its_place_in_the_state():
    """The others keep their values; the new layer has its initial one, and is named by its path."""
    model, state = pm.make_with_state(Net)(size=2)
    _, state = model.first(ramp(1), state)
    changed = pm.tree_at(lambda m: m.rest["a"][0], model, Counter(5))
    changed, state = pm.make_with_state(state.fill)(changed)
    _, state = changed.rest["a"][0](ramp(1), state)

    layers = (changed.first, *changed.rest["a"])
    assert [int(state.get(layer.count)) for layer in layers] == [1, 5, 0]
    assert repr(state) == (
        "State(first.count=i32[], rest['a'][0].count=i32[], rest['a'][1].count=i32[])"
    )


def test_a_layer_is_put_in_a_second_place_once_it_is_filled():
    """Both paths start with its value, and then diverge."""
    model, state = pm.make_with_state(lambda: {"a": Counter(), "b": Counter()})()
    _, state = model["a"](ramp(1), state)
    filled = state.fill(model)
    changed = pm.tree_at(lambda m: m["b"], filled, filled["a"])
    model, state = pm.make_with_state(lambda: changed)()
    _, state = model["b"](ramp(1), state)

    assert [int(state.get(model[name].count)) for name in "ab"] == [1, 2]


@pytest.mark.parametrize("way", ["same", "pickle"])
def test_a_stream_in_a_second_place_begins_without_a_key(way):
    """With the key of the first it would draw the same numbers."""
    model, state = pm.make_with_state(lambda: {"a": Noisy()})()
    _, state = model["a"](ramp(2), state.seed(jax.random.key(0)))
    expected, _ = state.restored().next_key(model["a"].stream)
    layers = doubles_of(state.fill(model)["a"])[way]
    (first, second), state = pm.make_with_state(lambda: layers)()

    assert [int(state.get(layer.count)) for layer in (first, second)] == [1, 1]
    assert_same(state.restored().next_key(first.stream)[0], expected)
    with pytest.raises(StateError, match=r"\[1\]\.stream"):
        state.restored().next_key(second.stream)
    other, _ = state.seed(jax.random.key(0), "[1]").next_key(second.stream)
    assert jnp.any(jax.random.key_data(other) != jax.random.key_data(expected))


@pytest.mark.parametrize(
    "donating",
    [lambda step: jax.jit(step, donate_argnums=0), pm.filter_jit(donate="state")],
    ids=["jax.jit", "filter_jit"],
)
def test_values_that_began_as_one_array_can_be_donated(donating):
    """Each entry has a separate array, a random key like any other."""
    token = pm.StateIndex((ramp(2), jax.random.key(0)))
    tokens, state = pm.make_with_state(lambda: [token, token, pm.StateIndex([ramp(1)] * 2)])()
    step = donating(lambda state: state.set(tokens[0], state.get(tokens[1])))
    state = step(step(state))

    assert_same(state.get(tokens[1])[0], ramp(2))


def test_a_traced_stream_in_a_second_place_begins_without_a_key():
    """Where its numbers cannot be compared, it is the same object."""

    @pm.filter_jit
    def remade(model, state):
        filled = state.fill(model)
        return pm.make_with_state(lambda: [filled, filled])()

    layers, state = remade(*made(0, 0))
    _, state = state.next_key(layers[0].stream)
    with pytest.raises(StateError, match=r"\[1\]\.stream"):
        state.next_key(layers[1].stream)


def test_fill_uses_the_state_up():
    """Its values went into the model: what follows with the State would be lost."""
    model, state = made(0, 0)
    state.fill(model)
    with pytest.raises(StateError, match="count"):
        state.get(model.count)


TWO = made(0, 0)[0]
STREAMS = pm.make_with_state(lambda: [pm.RngStream()])()[0]
COUNTERS, THEIRS = pm.make_with_state(lambda: [Counter(1), Counter(2)])()
NET, OF_NET = pm.make_with_state(Net)(size=2)
REFUSED = {
    "two places of one name": (
        lambda: THEIRS.fill([COUNTERS[0], copy.deepcopy(COUNTERS[0])]),
        StateError,
        r"\[0\]\.count",
    ),
    "a substate of two places": (
        lambda: THEIRS.substate([COUNTERS[0], COUNTERS[0]]),
        StateError,
        r"\[0\]\.count",
    ),
    "models that have a State, in a new one": (
        lambda: pm.make_with_state(lambda: [TWO, TWO])(),
        StateError,
        r"\[0\]\.count",
    ),
    "models whose streams would become one": (
        lambda: pm.make_with_state(lambda: [STREAMS, STREAMS])(),
        StateError,
        r"\[0\]",
    ),
    "a model whose values are gone": (lambda: pm.State(NET), StateError, r"first\.count"),
    "a layer of another model": (
        lambda: THEIRS.fill([*COUNTERS, NET]),
        StateError,
        r"first\.count",
    ),
    "a layer that was added without its State": (
        lambda: pm.tree_at(lambda m: m.first, NET, Counter()).first(ramp(1), OF_NET),
        StateError,
        r"first\.count",
    ),
    "places that read the same": (
        lambda: pm.make_with_state(lambda: Unkeyed(Counter(), Counter()))(),
        StateError,
        "x",
    ),
    "a layer in the place of what makes it": (
        lambda: pm.make_with_state(pm.nn.BatchNorm(2)),
        ArgumentError,
        "BatchNorm",
    ),
}


@pytest.mark.parametrize(("call", "error", "match"), REFUSED.values(), ids=REFUSED)
def test_what_would_share_or_lose_a_value_is_refused(call, error, match):
    """By the place of its token."""
    with pytest.raises(error, match=match):
        call()
