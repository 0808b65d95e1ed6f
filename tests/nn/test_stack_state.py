"""`Stack` of layers with tokens: values and random streams, one by one and as one."""

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import StateError
from tests.helpers.equations import operations
from tests.nn.numbers_to_compare import assert_close, wave

DEPTH = 3
X = jnp.asarray(wave(5, 2))


def make_normed(key):
    return nn.Sequential([nn.Linear(2, 2, key=key), nn.BatchNorm(2), nn.Lambda(jnp.tanh)])


class Noise(nn.StatefulLayer):
    """Adds a random number from a stream, and notes it; does nothing in inference mode."""

    stream: pm.RngStream
    drawn: pm.StateIndex
    inference: bool = pm.field(static=True)

    def __init__(self):
        self.stream = pm.RngStream()
        self.drawn = pm.StateIndex(jnp.zeros(()))
        self.inference = False

    def __call__(self, x, state, *, key=None):
        if self.inference:
            return x, state
        key, state = state.next_key(self.stream)
        drawn = jax.random.uniform(key)
        return x + drawn, state.set(self.drawn, drawn)


def net(make_layer, *, key=None):
    """A model with a Stack in it, beside other tokens."""
    return nn.Sequential([nn.BatchNorm(2), nn.Stack(make_layer, DEPTH, key=key)])


def normed():
    return pm.make_with_state(nn.Stack)(make_normed, DEPTH, key=jax.random.key(0))


call = pm.filter_jit(lambda layer, x, state: layer(x, state))


def exchanged(model, state, change):
    """The same model with another form of its Stack, and its State."""
    model = pm.tree_at("layers[1]", state.fill(model), replace_fn=change)
    return pm.make_with_state(lambda: model)()


def as_list(model, state):
    return exchanged(model, state, lambda stack: nn.Sequential(stack.unstack()))


def as_stack(model, state):
    return exchanged(model, state, nn.Stack.from_layers)


def test_each_layer_has_values_of_its_own():
    """One token, whose value has a leading axis; numbers are those of layers one by one."""
    stack, state = normed()
    layers = [
        pm.make_with_state(make_normed)(key) for key in jax.random.split(jax.random.key(0), DEPTH)
    ]

    assert str(state) == "State(layer.layers[1].state_index=(f32[3,2], f32[3,2]))"
    out, expected = X, X
    for _ in range(2):
        out, state = call(stack, out, state)
        for i, (layer, own) in enumerate(layers):
            expected, own = call(layer, expected, own)
            layers[i] = layer, own
    assert_close(out, expected)
    running = state.get(stack.layer[1].state_index)
    for i, (layer, own) in enumerate(layers):
        for found, statistic in zip(running, own.get(layer[1].state_index), strict=True):
            assert_close(found[i], statistic)


def test_the_stream_is_one_and_each_layer_draws_its_own():
    """The State has one stream; noise differs from layer to layer and from call to call."""
    stack, state = pm.make_with_state(nn.Stack)(Noise, DEPTH)
    state = state.seed(jax.random.key(1))
    drawn = []
    for _ in range(3):
        _, state = call(stack, X, state)
        drawn += state.get(stack.layer.drawn).tolist()

    assert len(set(drawn)) == 3 * DEPTH
    assert [leaf.shape for leaf in jax.tree.leaves(state.substate(stack.layer.stream))] == [(), ()]


def test_streams_of_nested_stacks_are_all_different():
    make = pm.make_with_state(lambda: nn.Stack(lambda: nn.Stack(Noise, 2), DEPTH))
    stack, state = make()
    state = state.seed(jax.random.key(0))
    drawn = []
    for _ in range(2):
        _, state = call(stack, X, state)
        found = state.get(stack.layer.layer.drawn)
        assert found.shape == (DEPTH, 2)
        drawn += found.ravel().tolist()

    assert len(set(drawn)) == 2 * 2 * DEPTH


# ---- as a list


def test_a_model_with_a_list_computes_the_same():
    """fill, unstack, make_with_state: values and streams are those of the Stack's next call."""

    def make(key):
        return nn.Sequential([Noise(), make_normed(key)])

    model, state = pm.make_with_state(net)(make, key=jax.random.key(0))
    _, state = call(model, X, state.seed(jax.random.key(1)))
    listed, list_state = as_list(model, jax.tree.map(jnp.copy, state))

    assert type(listed[1]) is nn.Sequential
    assert_close(call(listed, X, list_state)[0], call(model, X, state)[0])


def test_a_list_becomes_a_stack_with_its_state():
    model, state = pm.make_with_state(net)(make_normed, key=jax.random.key(0))
    _, state = call(model, X, state)
    kept = jax.tree.map(jnp.copy, state)

    again, state = as_stack(*as_list(model, state))

    assert pm.tree_equal(again, model)
    assert state == kept


def test_the_first_stream_of_a_list_goes_on_for_all():
    """Layers of a list have a stream each; the Stack has one, which draws nothing twice."""
    model, state = pm.make_with_state(net)(Noise)
    listed, state = as_list(model, state.seed(jax.random.key(0)))
    _, state = call(listed, X, state)
    before = [state.get(layer.drawn).item() for layer in listed[1]]
    first = jax.tree.leaves(state.substate(listed[1][0].stream))

    again, state = as_stack(listed, state)
    for pair in zip(jax.tree.leaves(state.substate(again[1].layer.stream)), first, strict=True):
        assert pm.tree_equal(*pair)
    _, state = call(again, X, state)

    assert len({*before, *state.get(again[1].layer.drawn).tolist()}) == 2 * DEPTH


@pytest.mark.parametrize("part", [0, slice(1, 3)])
def test_a_part_of_a_stack_has_the_values_of_its_layers(part):
    """Taken from a filled Stack, a layer or a slice is made with its own State."""
    stack, state = normed()
    _, state = stack(X, state)
    mean, _ = state.get(stack.layer[1].state_index)

    taken, own = pm.make_with_state(lambda: state.fill(stack)[part])()

    norm = (taken if part == 0 else taken.layer)[1]
    assert_close(own.get(norm.state_index)[0], mean[part])
    assert taken(X, own)[0].shape == X.shape


# ---- the program


def test_the_program_with_state_is_that_of_a_scan_by_hand():
    """Values are taken apart and stacked by the scan; a stream is one use and a fold for each."""
    stack, state = pm.make_with_state(nn.Stack)(Noise, DEPTH)
    state = state.seed(jax.random.key(0))
    leaves, structure = jax.tree.flatten(state)

    def ours(leaves, x):
        out, state = stack(x, jax.tree.unflatten(structure, leaves))
        return out, jax.tree.leaves(state)

    def by_hand(leaves, x):
        key, count, drawn = leaves
        base = jax.random.fold_in(key, count)
        keys = jax.vmap(lambda i: jax.random.fold_in(base, i))(jnp.arange(DEPTH, dtype=jnp.uint32))
        counts = jnp.zeros(DEPTH, jnp.uint32)

        def step(x, each):
            key, count, _ = each
            number = jax.random.uniform(jax.random.fold_in(key, count))
            return x + number, number

        x, drawn = jax.lax.scan(step, x, (keys, counts, drawn))
        return x, (key, count + 1, drawn)

    counted = operations(ours, leaves, X)
    assert sum(counted.values()) > 100
    assert counted == operations(by_hand, leaves, X)


def test_a_stack_in_inference_mode_leaves_its_state_usable():
    """Nothing changed, so the State that was given comes back, and serves a second call."""

    def make(key):
        parts = [nn.Linear(3, 3, key=key), nn.BatchNorm(3), nn.Dropout(0.5, stream=pm.RngStream())]
        return nn.Sequential(parts)

    stack, state = pm.make_with_state(nn.Stack)(make, 2, key=jax.random.key(0))
    x = jnp.arange(6.0).reshape(2, 3)
    ready = nn.inference_mode(stack)

    first, after = ready(x, state)
    second, _ = ready(x, state)

    assert after is state
    assert_close(first, second)
    _, after = stack(x, state.seed(jax.random.key(1)))
    assert after is not state


def test_a_part_of_a_stack_is_refused_by_its_state():
    """The values in there are those of all layers: a layer must not take them for its own."""
    stack, state = normed()

    for part in (stack[0], stack[:2], stack.unstack()[1]):
        with pytest.raises(StateError, match="token"):
            part(X, state)
        state = state.restored()
