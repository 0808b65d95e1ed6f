"""The programs of the founding documents that are about state, with the numbers printed there.

Rows G6 and G10 to G15, L17, X4, X6 and X12 of `tests/docs/founding-documents.md`.
"""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import SpecError, StateError
from tests.helpers.comparing import assert_close
from tests.helpers.trees import ramp

MEMBERS = 10
BY_STREAMS = pm.by({pm.RngStream: 0, ...: None})


class Weights(pm.Module):
    """The guide's example: weights, a count of the calls, and perhaps noise."""

    kernel: jax.Array
    bias: jax.Array
    count: pm.StateIndex
    noise: pm.RngStream | None

    def __init__(self, kernel, bias, count=0, *, noisy=False):
        self.kernel, self.bias = kernel, bias
        self.count = pm.StateIndex(jnp.asarray(count, jnp.int32))
        self.noise = pm.RngStream() if noisy else None

    def __call__(self, x, state):
        state = state.set(self.count, state.get(self.count) + 1)
        y = x @ self.kernel + self.bias
        if self.noise is not None:
            key, state = state.next_key(self.noise)
            y = y + jax.random.normal(key, y.shape)
        return y, state


make_noisy = pm.make_with_state(ft.partial(Weights, noisy=True))


def arrays():
    """Ten kernels and biases, and an input for each."""
    kernel = jax.random.uniform(jax.random.key(0), (MEMBERS, 2, 3))
    return kernel, jnp.zeros((MEMBERS, 3)), jax.random.normal(jax.random.key(1), (MEMBERS, 2))


def call(model, x, state):
    return model(x, state)


def test_g6_a_count_for_each_member():
    """Mapped with its State on axis 0, `count` from arange(10) is [1, ..., 10] after a call."""
    kernel, bias, x = arrays()
    make = pm.filter_vmap(pm.make_with_state(Weights))
    models, states = make(kernel, bias, jnp.arange(MEMBERS))
    y, states = pm.filter_vmap(call, out_axes=(1, 0))(models, x, states)

    assert y.shape == (3, 10)
    assert states.get(models.count).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    np.testing.assert_allclose(y, jnp.einsum("mi,mio->om", x, kernel), rtol=1e-5)


def shared():
    """Ten models that have one State, as `StateAxes({Param: 0, Count: None})` has it."""
    kernel, bias, x = arrays()
    return *pm.make_with_state(Weights)(kernel, bias), x


@pytest.mark.parametrize("axes", [None, pm.by({"count": None, ...: 0})], ids=["None", "by"])
def test_g10_a_count_that_is_broadcast(axes):
    """The weights are mapped, the count is not: it is a scalar, and 1 after the call."""
    model, state, x = shared()
    y, state = pm.filter_vmap(call, in_axes=(0, 0, axes), out_axes=(1, axes))(model, x, state)

    assert y.shape == (3, 10)
    assert state.get(model.count).shape == ()
    assert int(state.get(model.count)) == 1


def test_g11_a_broadcast_value_must_be_the_same_for_all():
    """A count that depends on the member is refused where one for all was promised, by path."""
    model, state, x = shared()

    def add(model, x, state):
        return state.set(model.count, x[0].astype(int))

    with pytest.raises(SpecError, match=r"result\['count'\]"):
        pm.filter_vmap(add, in_axes=(0, 0, None), out_axes=None)(model, x, state)


def test_g12_a_rule_inside_a_tree_of_models():
    """`by` selects one of two models and one of two States, inside dicts."""
    model, state, x = shared()
    many = jax.tree.map(lambda n: n + jnp.arange(MEMBERS, dtype=n.dtype), state)
    axes = {"a": pm.by({"count": None}), "b": pm.by({pm.StateIndex: 0})}

    def both(models, x, states):
        return {name: models[name](x, states[name])[1] for name in models}

    run = pm.filter_vmap(both, in_axes=(0, 0, axes), out_axes=axes)
    states = run({"a": model, "b": model}, x, {"a": state, "b": many})
    assert int(states["a"].get(model.count)) == 1
    assert states["b"].get(model.count).tolist() == list(range(1, 11))


def test_g13_random_state_inside_modules():
    """Streams split ten ways, the rest broadcast: two calls differ, and every count is 2."""
    kernel, bias, x = arrays()
    model, state = make_noisy(kernel[0], bias[0])
    state = state.seed(jax.random.key(0)).split(MEMBERS)
    run = pm.filter_vmap(call, in_axes=(None, 0, BY_STREAMS), out_axes=(1, BY_STREAMS))
    y1, state = run(model, x, state)
    y2, state = run(model, x, state)

    assert not jnp.allclose(y1, y2)
    assert len(np.unique(y1)) == 30
    assert pm.named_leaves(state)["noise.count"].tolist() == [2] * 10
    assert int(state.get(model.count)) == 2


def test_g14_seeds_that_were_split_before_construction():
    """Ten models, each seeded with its own key; used outside the map, the stream says so."""
    kernel, bias, x = arrays()

    def make(kernel, bias, key):
        model, state = make_noisy(kernel, bias)
        return model, state.seed(key)

    models, states = pm.filter_vmap(make)(kernel, bias, jax.random.split(jax.random.key(0), 10))
    y1, states = pm.filter_vmap(call)(models, x, states)
    y2, states = pm.filter_vmap(call)(models, x, states)

    assert not jnp.allclose(y1, y2)
    assert states.get(models.count).tolist() == [2] * 10
    with pytest.raises(StateError, match="noise"):
        states.next_key(models.noise)


def test_g15_split_around_a_map_and_join_after_it():
    """After two rounds the key has shape () again, the noise count is 2, and `count` is 2."""
    kernel, bias, x = arrays()
    model, state = make_noisy(kernel, bias)
    run = pm.filter_vmap(call, in_axes=(0, 0, BY_STREAMS), out_axes=(1, BY_STREAMS))
    state, ys = state.seed(jax.random.key(0)), []
    for _ in range(2):
        y, state = run(model, x, state.split(MEMBERS))
        state = state.join()
        ys.append(y)

    assert not jnp.allclose(*ys)
    assert pm.named_leaves(state)["noise.key"].shape == ()
    assert int(pm.named_leaves(state)["noise.count"]) == 2
    assert int(state.get(model.count)) == 2


class Classifier(pm.Module):
    """Linen's example: a perceptron with BatchNorm, for one example at a time."""

    hidden: nn.Linear
    norm: nn.BatchNorm
    out: nn.Linear

    def __init__(self, *, key):
        keys = jax.random.split(key)
        self.hidden, self.out = nn.Linear(3, 4, key=keys[0]), nn.Linear(4, 1, key=keys[1])
        self.norm = nn.BatchNorm(4, axis_name="batch", momentum=0.9)

    def __call__(self, x, state):
        h, state = self.norm(self.hidden(x), state)
        return self.out(jax.nn.relu(h)), state


def on_batch(model, x, state):
    return jax.vmap(model, (0, None), (0, None), axis_name="batch")(x, state)


def train_step(model, state, x, y):
    """One step of gradient descent on a batch of examples."""

    def loss_fn(model, state):
        predicted, state = on_batch(model, x, state)
        return jnp.mean((predicted - y) ** 2), state

    return descend(loss_fn, model, state)


def descend(loss_fn, model, state):
    (loss, state), grads = pm.filter_value_and_grad(loss_fn, has_aux=True)(model, state)
    return pm.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), state, loss


def test_l17_an_ensemble_of_batchnorm_networks():
    """`variable_axes={"params": 0, "batch_stats": 0}`: each member is as if it were alone."""
    keys = jax.random.split(jax.random.key(0), 3)
    models, states = pm.filter_vmap(lambda key: pm.make_with_state(Classifier)(key=key))(keys)
    x = jax.random.normal(jax.random.key(1), (3, 8, 3))
    y = jnp.sum(x, axis=2, keepdims=True)
    together = pm.filter_jit(pm.filter_vmap(train_step))(models, states, x, y)
    alone = pm.filter_jit(train_step)
    for i, key in enumerate(keys):
        single = alone(*pm.make_with_state(Classifier)(key=key), x[i], y[i])
        member = jax.tree.map(lambda leaf, i=i: leaf[i], together)
        assert_close(member, single, rtol=1e-4, atol=1e-5)


def test_x4_flags_for_all_submodules():
    """`apply(use_running_average=True)`: a model in inference mode, which leaves State alone."""
    model, state = pm.make_with_state(Classifier)(key=jax.random.key(0))
    y, after = on_batch(nn.inference_mode(model), ramp(5, 3), state)

    assert after == state
    assert y.shape == (5, 1)


def test_x6_a_step_that_changes_model_and_state():
    """The original has "no return"; here both are returned, and donated instead of copied."""
    model, state = pm.make_with_state(Weights)(ramp(2, 3), jnp.zeros(3))

    def loss_fn(model, state):
        y, state = model(ramp(2), state)
        return jnp.mean(y**2), state

    step = pm.filter_jit(ft.partial(descend, loss_fn), donate=("model", "state"))
    losses = []
    for _ in range(3):
        old = state
        model, state, loss = step(model, state)
        losses.append(float(loss))

    assert losses == sorted(losses, reverse=True)
    assert int(state.get(model.count)) == 3
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))


def test_x12_two_blocks_share_a_layer_with_state():
    """Held once and called twice: its count is 2, and its gradient is the sum of both uses."""
    layer, state = make_noisy(ramp(2, 2), jnp.zeros(2))
    state = state.seed(jax.random.key(1))

    def loss_fn(kernels, state):
        x = ramp(2)
        for kernel in kernels:
            x, state = layer.replace(kernel=kernel)(jnp.tanh(x), state)
        return jnp.sum(x), state

    grad = ft.partial(jax.grad, has_aux=True)
    total, after = grad(lambda kernel, state: loss_fn([kernel] * 2, state))(layer.kernel, state)
    parts, _ = grad(loss_fn)([layer.kernel] * 2, state.restored())

    np.testing.assert_allclose(total, parts[0] + parts[1], rtol=1e-5)
    assert int(after.get(layer.count)) == 2
