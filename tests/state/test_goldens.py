"""The programs of the founding documents that are about state, with the numbers printed there.

Rows G6 and G10 to G15, L16 and L17, X4, X6 and X12 of `docs/explanation/founding-documents.md`.
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
    """The guide's example: weights, and a count of the calls."""

    kernel: jax.Array
    bias: jax.Array
    count: pm.StateIndex

    def __init__(self, kernel, bias, count=0):
        self.kernel, self.bias = kernel, bias
        self.count = pm.StateIndex(jnp.asarray(count, jnp.int32))

    def __call__(self, x, state):
        state = state.set(self.count, state.get(self.count) + 1)
        return x @ self.kernel + self.bias, state


class NoisyWeights(Weights):
    """The same with a separate noise."""

    noise: pm.RngStream

    def __init__(self, kernel, bias):
        super().__init__(kernel, bias)
        self.noise = pm.RngStream()

    def __call__(self, x, state):
        y, state = super().__call__(x, state)
        key, state = state.next_key(self.noise)
        return y + jax.random.normal(key, y.shape), state


def arrays():
    """Ten kernels and biases, and an input for each."""
    kernel = jax.random.uniform(jax.random.key(0), (MEMBERS, 2, 3))
    return kernel, jnp.zeros((MEMBERS, 3)), jax.random.normal(jax.random.key(1), (MEMBERS, 2))


def call(model, x, state):
    """Call a model; for maps."""
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
    model, state = pm.make_with_state(Weights)(kernel, bias)
    return model, x, state


@pytest.mark.parametrize("axes", [None, pm.by({"count": None, ...: 0})], ids=["None", "by"])
def test_g10_a_count_that_is_broadcast(axes):
    """The weights are mapped, the count is not: it is a scalar, and 1 after the call."""
    model, x, state = shared()
    run = pm.filter_vmap(call, in_axes=(0, 0, axes), out_axes=(1, axes))
    y, state = run(model, x, state)

    assert y.shape == (3, 10)
    assert state.get(model.count).shape == ()
    assert int(state.get(model.count)) == 1


def test_g11_a_broadcast_value_must_be_the_same_for_all():
    """A count that depends on the member is refused where one for all was promised, by path."""
    model, x, state = shared()

    def add(model, x, state):
        return state.set(model.count, x[0].astype(int))

    with pytest.raises(SpecError, match=r"result\['count'\]"):
        pm.filter_vmap(add, in_axes=(0, 0, None), out_axes=None)(model, x, state)


def test_g12_a_rule_inside_a_tree_of_models():
    """`by` selects one of two models and one of two States, inside dicts."""
    model, x, state = shared()
    other, _, other_state = shared()
    other_states = jax.tree.map(lambda n: n + jnp.arange(MEMBERS, dtype=n.dtype), other_state)
    axes = {"a": pm.by({"count": None}), "b": pm.by({pm.StateIndex: 0})}

    def both(models, x, states):
        _, a = models["a"](x, states["a"])
        _, b = models["b"](x, states["b"])
        return {"a": a, "b": b}

    states = pm.filter_vmap(both, in_axes=(0, 0, axes), out_axes=axes)(
        {"a": model, "b": other}, x, {"a": state, "b": other_states}
    )
    assert int(states["a"].get(model.count)) == 1
    assert states["b"].get(other.count).tolist() == list(range(1, 11))


def test_g13_random_state_inside_modules():
    """Streams split ten ways, the rest broadcast: two calls differ, and every count is 2."""
    kernel, bias, x = arrays()
    model, state = pm.make_with_state(NoisyWeights)(kernel[0], bias[0])
    state = state.seed(jax.random.key(0)).split(MEMBERS)
    run = pm.filter_jit(
        pm.filter_vmap(call, in_axes=(None, 0, BY_STREAMS), out_axes=(1, BY_STREAMS))
    )
    y1, state = run(model, x, state)
    y2, state = run(model, x, state)
    counts = {jax.tree_util.keystr(p): n for p, n in jax.tree_util.tree_leaves_with_path(state)}

    assert not jnp.allclose(y1, y2)
    assert len(np.unique(y1)) == 30
    assert counts["['noise'].count"].tolist() == [2] * 10
    assert int(state.get(model.count)) == 2


def test_g14_seeds_that_were_split_before_construction():
    """Ten models, each seeded with its own key; used outside the map, the stream says so."""
    kernel, bias, x = arrays()

    def make(kernel, bias, key):
        model, state = pm.make_with_state(NoisyWeights)(kernel, bias)
        return model, state.seed(key)

    keys = jax.random.split(jax.random.key(0), MEMBERS)
    models, states = pm.filter_vmap(make)(kernel, bias, keys)
    y1, states = pm.filter_vmap(call)(models, x, states)
    y2, states = pm.filter_vmap(call)(models, x, states)

    assert not jnp.allclose(y1, y2)
    assert states.get(models.count).tolist() == [2] * 10
    with pytest.raises(StateError, match="noise"):
        states.next_key(models.noise)


def test_g15_split_around_a_map_and_join_after_it():
    """After two rounds the key has shape () again, the noise count is 2, and `count` is 2."""
    kernel, bias, x = arrays()
    model, state = pm.make_with_state(NoisyWeights)(kernel, bias)
    run = pm.filter_jit(pm.filter_vmap(call, in_axes=(0, 0, BY_STREAMS), out_axes=(1, BY_STREAMS)))
    state, ys = state.seed(jax.random.key(0)), []
    for _ in range(2):
        y, state = run(model, x, state.split(MEMBERS))
        state = state.join()
        ys.append(y)
    leaves = {jax.tree_util.keystr(p): n for p, n in jax.tree_util.tree_leaves_with_path(state)}

    assert not jnp.allclose(*ys)
    assert leaves["['noise'].key"].shape == ()
    assert int(leaves["['noise'].count"]) == 2
    assert int(state.get(model.count)) == 2


class Classifier(pm.Module):
    """Linen's example: a perceptron with BatchNorm, for one example at a time."""

    hidden: nn.Linear
    norm: nn.BatchNorm
    out: nn.Linear

    def __init__(self, *, key):
        keys = jax.random.split(key)
        self.hidden = nn.Linear(3, 4, key=keys[0])
        self.norm = nn.BatchNorm(4, axis_name="batch", momentum=0.9)
        self.out = nn.Linear(4, 1, key=keys[1])

    def __call__(self, x, state):
        h, state = self.norm(self.hidden(x), state)
        return self.out(jax.nn.relu(h)), state


def ensemble(members):
    """Members and their States, made under a map over keys; the keys, too."""
    keys = jax.random.split(jax.random.key(0), members)
    make = pm.filter_jit(pm.filter_vmap(lambda key: pm.make_with_state(Classifier)(key=key)))
    return *make(keys), keys


def train_step(model, state, x, y):
    """One step of gradient descent on a batch of examples."""

    def loss_fn(model, state):
        batched = jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
        predicted, state = batched(x, state)
        return jnp.mean((predicted - y) ** 2), state

    (loss, state), grads = pm.filter_value_and_grad(loss_fn, has_aux=True)(model, state)
    model = pm.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))
    return model, state, loss


def test_l16_a_class_is_mapped():
    """`nn.vmap(MLP, variable_axes={"params": 0}, split_rngs={"params": True})`."""
    keys = jax.random.split(jax.random.key(0), 3)
    models = pm.filter_vmap(lambda key: nn.MLP(3, 1, width_size=4, depth=1, key=key))(keys)
    y = pm.filter_vmap(lambda model, x: model(x))(models, ramp(3, 3))

    shapes = [leaf.shape for leaf in jax.tree.leaves(models)]
    assert shapes == [(3, 4, 3), (3, 4), (3, 1, 4), (3, 1)]
    assert y.shape == (3, 1)
    one = nn.MLP(3, 1, width_size=4, depth=1, key=keys[2])
    np.testing.assert_allclose(y[2], one(ramp(3, 3)[2]), rtol=1e-5)


def test_l16_a_lifted_class_is_called():
    """`nn.vmap(MLP, in_axes=0)`: called like one of them; hidden (3, 4, 4) and out (3, 1, 4)."""
    make = ft.partial(nn.MLP, 4, 1, width_size=4, depth=1)
    nets = nn.Ensemble(make, 3, key=jax.random.key(0))
    y = nets(ramp(3, 4), in_axes=0)

    shapes = [leaf.shape for leaf in jax.tree.leaves(nets)]
    assert shapes == [(3, 4, 4), (3, 4), (3, 1, 4), (3, 1)]
    assert y.shape == (3, 1)
    by_hand = pm.filter_vmap(lambda key: make(key=key))(jax.random.split(jax.random.key(0), 3))
    assert nets.member == by_hand
    assert_close(y, pm.filter_vmap(lambda model, x: model(x))(by_hand, ramp(3, 4)))


def test_l16_parameters_for_all_members():
    """`variable_axes={"params": None}` for a part: held once, and its gradient is the sum."""
    trunk = nn.Linear(4, 4, key=jax.random.key(0))
    heads = nn.Ensemble(ft.partial(nn.Linear, 4, 1), 3, key=jax.random.key(1)).member
    axes = pm.by({"trunk": None, "heads": 0})

    @pm.filter_vmap(in_axes=(axes,))
    def each(net):
        return net["heads"](jnp.tanh(net["trunk"](ramp(4))))

    net = {"trunk": trunk, "heads": heads}
    grads = pm.filter_grad(lambda net: jnp.sum(each(net)))(net)

    assert [leaf.shape for leaf in jax.tree.leaves(net)] == [(3, 1, 4), (3, 1), (4, 4), (4,)]
    alone = [
        pm.filter_grad(lambda trunk, head=head: jnp.sum(head(jnp.tanh(trunk(ramp(4))))))(trunk)
        for head in pm.unstack(heads)
    ]
    assert_close(grads["trunk"].weight, sum(g.weight for g in alone), rtol=1e-5)


def test_l17_an_ensemble_of_batchnorm_networks_is_called():
    """`variable_axes={"params": 0, "batch_stats": 0}`, `axis_name` inside: as the map by hand."""
    models, states, _ = ensemble(3)
    nets, state = pm.make_with_state(nn.Ensemble)(Classifier, 3, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (8, 3))

    def on_batch(model, x, state, axis):
        call = jax.vmap(model, (0, None), (axis, None), axis_name="batch")
        return call(x, state)

    y, state = pm.filter_jit(on_batch)(nets, x, state, 1)
    by_hand = pm.filter_vmap(on_batch, in_axes=(0, None, 0, None))
    expected, states = by_hand(models, x, states, 0)

    assert nets.member.hidden == models.hidden
    assert y.shape == (3, 8, 1)
    assert_close(y, expected, rtol=1e-4, atol=1e-5)
    statistics = state.get(nets.member.norm.state_index)
    assert_close(statistics, states.get(models.norm.state_index), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_l17_an_ensemble_of_batchnorm_networks():
    """Made and trained by vmap, with axis_name inside: each member is as if it were alone."""
    models, states, keys = ensemble(3)
    x = jax.random.normal(jax.random.key(1), (3, 8, 3))
    y = jnp.sum(x, axis=2, keepdims=True)
    step = pm.filter_jit(pm.filter_vmap(train_step))
    together = models, states
    for _ in range(2):
        *together, _ = step(*together, x, y)

    alone = pm.filter_jit(train_step)
    for i, key in enumerate(keys):
        single = pm.make_with_state(Classifier)(key=key)
        for _ in range(2):
            *single, _ = alone(*single, x[i], y[i])
        member = jax.tree.map(lambda leaf, i=i: leaf[i], tuple(together))
        assert_close(member, tuple(single), rtol=1e-4, atol=1e-5)


def test_x4_flags_for_all_submodules():
    """`apply(use_running_average=True)`: a model in inference mode, which leaves State alone."""
    models, states, _ = ensemble(2)
    x = ramp(2, 5, 3)
    run = pm.filter_jit(
        pm.filter_vmap(lambda m, x, s: jax.vmap(m, (0, None), (0, None), axis_name="batch")(x, s))
    )
    y, after = run(nn.inference_mode(models), x, states)

    assert after == states
    assert y.shape == (2, 5, 1)


def test_x6_a_step_that_changes_model_and_state():
    """The original has "no return"; here both are returned, and donated instead of copied."""
    model, state = pm.make_with_state(Weights)(ramp(2, 3), jnp.zeros(3))

    @pm.filter_jit(donate=("model", "state"))
    def step(model, state, x):
        def loss_fn(model, state):
            y, state = model(x, state)
            return jnp.mean(y**2), state

        (loss, state), grads = pm.filter_value_and_grad(loss_fn, has_aux=True)(model, state)
        return pm.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), state, loss

    losses = []
    for _ in range(3):
        old = state
        model, state, loss = step(model, state, ramp(2))
        losses.append(float(loss))

    assert losses == sorted(losses, reverse=True)
    assert int(state.get(model.count)) == 3
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))


class Blocks(pm.Module):
    """Two blocks that share one layer, with its count and its noise."""

    shared: NoisyWeights
    first: nn.Linear
    second: nn.Linear

    def __init__(self, *, key):
        keys = jax.random.split(key)
        self.shared = NoisyWeights(ramp(2, 2), jnp.zeros(2))
        self.first, self.second = (nn.Linear(2, 2, key=k) for k in keys)

    def __call__(self, x, state):
        x, state = self.shared(self.first(x), state)
        return self.shared(self.second(x), state)


def test_x12_two_blocks_share_a_layer_with_state():
    """Held once and called twice: its count is 2, and its gradient is the sum of both uses."""
    model, state = pm.make_with_state(Blocks)(key=jax.random.key(0))
    state = state.seed(jax.random.key(1))

    def loss_fn(kernels, state):
        first, second = (pm.tree_at(lambda m: m.shared.kernel, model, k) for k in kernels)
        x, state = first.shared(model.first(ramp(2)), state)
        y, state = second.shared(model.second(x), state)
        return jnp.sum(y), state

    def both(kernel, state):
        return loss_fn((kernel, kernel), state)

    kernel = model.shared.kernel
    total, after = jax.jit(jax.grad(both, has_aux=True))(kernel, state)
    parts, _ = jax.jit(jax.grad(loss_fn, has_aux=True))((kernel, kernel), state)

    np.testing.assert_allclose(total, parts[0] + parts[1], rtol=1e-5)
    assert int(after.get(model.shared.count)) == 2


def test_x12_two_layers_with_one_token_are_two():
    """As their weights are two: to share a value, a layer is held once and called twice."""

    def build():
        first = NoisyWeights(ramp(2, 2), jnp.zeros(2))
        return [first, pm.tree_at(lambda m: m.kernel, first, 2 * first.kernel)]

    (first, second), state = pm.make_with_state(build)()
    state = state.seed(jax.random.key(0))
    _, state = first(ramp(2), state)
    _, state = second(ramp(2), state)

    assert len(jax.tree.leaves(state)) == 6
    assert [int(state.get(layer.count)) for layer in (first, second)] == [1, 1]
    keys = [state.substate(layer).next_key(layer.noise)[0] for layer in (first, second)]
    assert jnp.any(jax.random.key_data(keys[0]) != jax.random.key_data(keys[1]))
