"""Stacks, ensembles and scanned MLPs on a mesh of explicit axes: equal to one device."""

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.nn.members.resharding import gathered, split_alike
from tests.goldens import refusals
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.counting_collectives import collectives
from tests.helpers.meshes import EXPLICIT, lies, on
from tests.helpers.trees import ramp

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (8, 4))


def at(x, *entries):
    """The array, split over the mesh."""
    return pm.filter_shard(x, on(*entries, mesh=EXPLICIT))


WAYS = {
    "column": (None, ("model", None), ("model",)),
    "row": (None, (None, "model"), (None,)),
    "along the batch": (None, ("data", None), ("data",)),
    "layers": ("data", (None, None), (None,)),
    "layers and columns": ("data", ("model", None), ("model",)),
}


def laid(model, way):
    """A model whose weights are split in a way; those that have no layers, without that axis."""
    first, weight, bias = WAYS[way]

    def lay(path, leaf):
        is_bias = path[-1].name == "bias"
        own = bias if is_bias else weight
        lead = (first,) if leaf.ndim > len(own) else ()
        return at(leaf, *lead, *own)

    return jax.tree_util.tree_map_with_path(lay, model)


@pm.filter_jit
def both(model, x):
    """The output, and the gradient by the model and by x."""

    def loss(pair):
        y = call(*pair)
        return jnp.mean(y**2), y

    def call(model, x):
        return model(x, in_axes=0) if x.ndim == 3 else model(x)

    (_, y), grads = pm.filter_value_and_grad(loss, has_aux=True)((model, x))
    return y, grads


def layer(key):
    return nn.MLP(4, 4, 4, 0, final_activation=jnp.tanh, key=key)


STACK = nn.Stack(layer, 4, key=KEY)
MLP = nn.MLP(4, 4, 4, 5, key=KEY, scan=True)
NETS = nn.Ensemble(layer, 4, key=KEY)
SHARING = nn.Ensemble(lambda key: nn.MLP(4, 4, 4, 1, key=key), 4, key=KEY, shared="layers[0]")
CASES = {
    "Stack": (STACK, X),
    "recomputing": (STACK.replace(remat=True, unroll=2), X),
    "MLP": (MLP, X),
    "Ensemble": (NETS, X),
    "shared": (SHARING, X),
    "own inputs": (NETS, jnp.stack([X, -X, 2 * X, 0 * X])),
}


@pytest.fixture(scope="module", params=CASES)
def case(request):
    """A model and its input, with the output and the gradients on one device."""
    return (*CASES[request.param], both(*CASES[request.param]))


@pytest.mark.sampled
@pytest.mark.parametrize("way", WAYS)
def test_equal_to_one_device(case, way):
    """Forward and backward, whatever is split; gradients are sharded as their arrays."""
    model, x, expected = case
    model, x = laid(model, way), at(x, "data")
    y, grads = both(model, x)

    assert_close((y, grads), expected, atol=1e-6)
    assert list(map(jax.typeof, jax.tree.leaves(grads))) == list(
        map(jax.typeof, jax.tree.leaves((model, x)))
    )
    assert "data" in jax.typeof(y).sharding.spec


@pytest.mark.parametrize("way", ["column", "layers"])
def test_an_input_on_one_device_is_whole(way):
    """The output of a Stack has the type of its input, on the mesh of its weights."""
    y = laid(STACK, way)(X)

    assert lies(y) == ()
    assert_close(y, STACK(X), atol=1e-6)


def test_inputs_lead_where_members_are_split_over_the_same_axis():
    """The members are gathered, as other weights are, but never the inputs."""
    own = jnp.stack([X] * 4)
    nets = laid(NETS, "layers")

    assert lies(nets(at(X, "model"))) == ("data", "model")
    assert lies(nets(at(X, "data"))) == (None, "data")
    assert lies(nets(at(own, None, "data"), in_axes=0)) == (None, "data")
    assert lies(nets(at(own, "model"), in_axes=0)) == ("model",)
    assert lies(nets(at(jnp.moveaxis(own, 0, 2), "model"), in_axes=-1)) == (
        "data",
        "model",
    )


class Remembering(pm.Module):
    """A layer that stores the mean of its input, and adds noise."""

    mean: pm.StateIndex
    noise: pm.RngStream

    def __init__(self):
        self.mean, self.noise = pm.StateIndex(jnp.zeros(4)), pm.RngStream()

    def __call__(self, x, state):
        key, state = state.next_key(self.noise)
        state = state.set(self.mean, jnp.mean(x, 0))
        return x + jax.random.normal(key, x.shape), state


@pytest.mark.parametrize("kind", [nn.Stack, nn.Ensemble])
@pytest.mark.parametrize("entries", [("data",), ("data", "model"), (None, "model")])
def test_values_in_state_lie_as_they_did(kind, entries):
    """Written values are sharded as the old ones; streams are split as usual."""
    model, state = pm.make_with_state(kind)(Remembering, 4)
    state = state.seed(jax.random.key(0))
    expected, after = pm.filter_jit(model)(X, state.restored())
    state = state.set(model_mean(model), at(jnp.zeros((4, 4)), *entries))
    y, new = pm.filter_jit(model)(at(X, "data"), state)

    assert_close(y, expected, atol=1e-6)
    assert_close(new.get(model_mean(model)), after.get(model_mean(model)), atol=1e-6)
    assert lies(new.get(model_mean(model))) == entries
    assert_same(jax.tree.leaves(new)[1:], jax.tree.leaves(after)[1:])


def model_mean(model):
    return getattr(model, model.owner.member).mean


class Scaling(pm.Module):
    """A layer with an argument."""

    def __call__(self, x, *, scale):
        return x * scale


def test_keys_and_further_arguments_of_each_layer():
    """Keys are made on one device; arguments for each layer may be split along the layers."""
    stack = nn.Stack(Scaling, 4)
    nets = nn.Ensemble(lambda key: nn.Sequential([layer(key), nn.Dropout(0.5)]), 4, key=KEY)
    x, scale = at(X, "data"), at(1 + ramp(4), "data")

    assert_close(stack(x, per_layer={"scale": scale}), X * jnp.prod(1 + ramp(4)))
    assert_close(laid(nets, "layers")(at(X, "model"), key=KEY), nets(X, key=KEY), atol=1e-6)


def test_layers_are_gathered_once(optimized):
    """Before the scan, each array once; and nothing else is sent."""
    stack = laid(nn.Stack(layer, 4, key=KEY), "layers")
    lowered = jax.jit(lambda stack, x: stack(x)).lower(stack, at(X, "data"))
    found = collectives(lowered.compile().as_text())

    assert dict(found.numbers) == {"all-gather": 2}
    assert found.size == 4 * (4 * 4 + 4)


def test_without_a_mesh_nothing_is_done():
    """Trees are returned as the same objects."""
    x = ramp(4)

    assert gathered({"x": x, "n": 3})["x"] is x
    assert split_alike([x], (x,), [x, 1], [0, None]) == ([x], (x,), [x, 1])


test_refusals = refusals(globals())
