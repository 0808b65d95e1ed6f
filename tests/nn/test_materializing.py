"""`materialize`: models whose sizes follow equal those whose sizes are written out."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import SpecError, UnfinishedError
from tests.labels import label

KEY = jax.random.key(0)
ones = jnp.ones


def size(n: int, is_given: bool) -> Any:
    """A size, or None."""
    return n if is_given else None


# A function of whether sizes are given and of a source of keys; and inputs.
LAYERS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "Linear": (lambda s, k: nn.Linear(s(3), 4, key=k), (ones((2, 3)),)),
    "MLP": (lambda s, k: nn.MLP(s(3), 2, 4, 2, key=k), (ones(3),)),
    "MLP, scanned": (lambda s, k: nn.MLP(s(3), 2, 4, 3, scan=True, key=k), (ones(3),)),
    "Conv": (lambda s, k: nn.Conv(1, s(2), 3, 2, key=k), (ones((2, 5)),)),
    "Conv2d": (lambda s, k: nn.Conv2d(s(6), 4, 2, groups=2, key=k), (ones((2, 6, 3, 3)),)),
    "ConvTranspose": (lambda s, k: nn.ConvTranspose(1, s(2), 3, 2, key=k), (ones((2, 5)),)),
    "ConvTranspose2d": (lambda s, k: nn.ConvTranspose2d(s(2), 3, 2, key=k), (ones((2, 3, 3)),)),
    "LayerNorm": (lambda s, k: nn.LayerNorm(s(3)), (ones((2, 3)),)),
    "RMSNorm": (lambda s, k: nn.RMSNorm(s(3)), (ones((2, 3)),)),
    "InstanceNorm": (
        lambda s, k: nn.InstanceNorm(s(3), channelwise_affine=True, num_spatial_dims=1),
        (ones((2, 3, 4)),),
    ),
    "InstanceNorm, one": (lambda s, k: nn.InstanceNorm(s(3)), (ones((3, 4)),)),
    "GRUCell": (lambda s, k: nn.GRUCell(s(3), 2, key=k), (ones(3), ones(2))),
    "LSTMCell": (lambda s, k: nn.LSTMCell(s(3), 2, key=k), (ones(3), (ones(2), ones(2)))),
    "SimpleCell": (lambda s, k: nn.SimpleCell(s(3), 2, key=k), (ones(3), ones(2))),
    "RNN": (lambda s, k: nn.RNN(nn.LSTMCell(s(3), 2, key=k)), (ones((5, 3)),)),
    "MultiheadAttention": (
        lambda s, k: nn.MultiheadAttention(2, s(4), qk_norm="rms", key=k),
        (ones((5, 4)),),
    ),
    "Stack": (lambda s, k: nn.Stack(lambda key: nn.Linear(s(3), 3, key=key), 2, key=k), (ones(3),)),
    "Ensemble": (
        lambda s, k: nn.Ensemble(lambda key: nn.Linear(s(3), 2, key=key), 2, key=k),
        (ones(3),),
    ),
}


@pytest.mark.parametrize(("make", "inputs"), LAYERS.values(), ids=LAYERS.keys())
def test_written_out_and_materialized_models_are_equal(make, inputs):
    """`materialize(Layer(None), x) == Layer(size)`, also after another one that takes keys."""

    def source():
        return pm.init_keys(KEY)

    pair = [lambda n, g=is_given: size(n, g) for is_given in (False, True)]
    # Two layers, because the second one shows which keys the first one took.
    left, right = (
        [make(s, keys), make(s, keys)] for s, keys in zip(pair, (source(), source()), strict=True)
    )
    made = pm.materialize(left, *inputs, method=lambda both, *x: [one(*x) for one in both])
    assert jax.tree.structure(made) == jax.tree.structure(right)
    assert made == right


class Block(nn.StatefulLayer):
    """A layer with statistics, a stream and parameters."""

    linear: nn.Linear
    norm: nn.BatchNorm
    drop: nn.Dropout

    def __init__(self, s: Any, n: int, *, key: Any):
        self.linear = nn.Linear(s(n), n, key=key)
        self.norm = nn.BatchNorm(s(n))
        self.drop = nn.Dropout(0.5, stream=nn.RngStream())

    def __call__(self, x: Any, state: Any, *, key: Any = None) -> Any:
        """Mix, normalize, drop."""
        x, state = self.norm(self.linear(x), state)
        return self.drop(x, state)


def stateful_net(s: Any, key: Any) -> Any:
    """Blocks, alone and in a Stack."""
    keys = pm.init_keys(key)
    inner = nn.Stack(ft.partial(Block, s, 4), 3, key=keys)
    return nn.Sequential([nn.Linear(s(3), 4, key=keys), Block(s, 4, key=keys), inner])


def test_a_model_with_state_equals_the_one_written_out():
    """Statistics and streams are where they would be, in a Stack, too; so is the State."""
    pairs = []
    for is_given in (False, True):

        def make(is_given: bool = is_given) -> Any:
            net = stateful_net(lambda n: size(n, is_given), KEY)
            return pm.materialize(net, ones((2, 3)), pm.State(net).seed(KEY))

        pairs.append(pm.make_with_state(make)())
    (left, left_state), (right, right_state) = pairs
    assert left == right
    assert jax.tree.structure(left_state) == jax.tree.structure(right_state)
    out, _ = left(ones((2, 3)), left_state.seed(KEY))
    assert out.shape == (2, 4)


def test_models_that_were_made_as_one_are_finished_as_one():
    """Mapped once and twice over keys."""
    keys = jax.random.split(KEY, (2, 3))

    def make(is_given: bool, key: Any) -> Any:
        n = size(3, is_given)
        return nn.Sequential([nn.Linear(n, 3, key=key), nn.LayerNorm(n)])

    def run(models: Any, x: Any) -> Any:
        once = pm.filter_vmap(lambda m: m(x))
        return pm.filter_vmap(once)(models)

    unfinished, written = (
        pm.filter_vmap(pm.filter_vmap(ft.partial(make, is_given)))(keys)
        for is_given in (False, True)
    )
    made = pm.materialize(unfinished, ones(3), method=run)
    assert made[1].weight.shape == (2, 3, 3)
    assert made == written


def test_a_finished_model_is_given_back_and_not_run():
    """`materialize(m) is m`, whatever it would be called with."""
    model = nn.Linear(3, 2, key=KEY)
    assert pm.materialize(model) is model


def test_shapes_alone_are_enough():
    """A `ShapeDtypeStruct` works like an array."""
    spec = jax.ShapeDtypeStruct((7, 3), jnp.float32)
    assert pm.materialize(nn.Linear(None, 2, key=KEY), spec).in_features == 3


class Coder(pm.Module):
    """A model that is used in two ways."""

    into: nn.Linear
    back: nn.Linear

    def encode(self, x: Any) -> Any:
        """To the code."""
        return self.into(x)

    def decode(self, code: Any) -> Any:
        """From the code."""
        return self.back(code)


@pytest.fixture
def coder() -> Coder:
    """One whose sizes follow."""
    return Coder(nn.Linear(None, 2, key=KEY), nn.Linear(None, 3, key=KEY))


def test_another_method_is_called(coder):
    """By its name, or by a function."""
    both = pm.materialize(coder, ones(3), method=lambda m, x: m.decode(m.encode(x)))
    assert (both.into.in_features, both.back.in_features) == (3, 2)
    inner = coder.replace(back=nn.Identity())
    assert pm.materialize(inner, ones(3), method="encode").into.in_features == 3


def test_a_layer_that_the_call_does_not_come_to_is_named(coder):
    """Nothing is finished by halves."""
    with pytest.raises(UnfinishedError, match="back"):
        pm.materialize(coder, ones(3), method="encode")


class Noisy(nn.StatefulLayer):
    """Two sizes that follow, and a stream that no State knows before."""

    weight: jax.Array
    stream: nn.RngStream

    @pm.sizes_follow(rows=lambda x: x.shape[0], columns=lambda x: x.shape[1])
    def __init__(self, rows: Any, columns: Any):
        self.weight, self.stream = ones((rows, columns)), nn.RngStream()

    def __call__(self, x: Any, state: Any, *, key: Any = None) -> Any:
        """Draw."""
        key, state = state.next_key(self.stream)
        return self.weight * x + jax.random.normal(key, x.shape), state


@pytest.mark.parametrize("given", [(None, None), (2, None), (None, 3)], ids=label)
def test_several_sizes_and_streams_of_an_unfinished_layer(given):
    """Each that is missing is found; a stream needs no seed for it."""
    layer = Noisy(*given)
    made = pm.materialize(layer, ones((2, 3)), pm.State(layer))
    assert made.weight.shape == (2, 3)


@pytest.mark.parametrize(
    "use",
    [
        lambda model: model[0](ones(3)),
        lambda model: model[0].weight,
        lambda model: pm.filter_grad(lambda m: jax.tree.leaves(m)[0].sum())(model[0]),
        pm.trainable,
        lambda model: pm.make_with_state(lambda: model)(),
        lambda model: pm.save("never.safetensors", model),
        lambda model: pm.Optimizer(optax.sgd(0.1)).init(model),
    ],
    ids=["call", "read", "grad", "trainable", "state", "save", "optimizer"],
)
def test_an_unfinished_model_is_not_used(use):
    """Its leaves are the keys that its arrays will be made with, not parameters."""
    with pytest.raises((UnfinishedError, SpecError), match="materialize"):
        use([nn.Linear(None, 2, key=KEY), nn.Dropout(0.5)])
