"""Training on a mesh is training on one device: losses, parameters, State and moments.

For each feature of a model, with the batch split (data), the parameters split along its axis of the
mesh, too (FSDP), or along another (tensor). None of the models has a line about devices.
"""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import pytreemod as pm
from pytreemod import nn
from tests.helpers.meshes import EXPLICIT

X = np.cos(np.arange(8.0 * 8, dtype=np.float32)).reshape(8, 8)

# The rules, and how the batch is split.
MODES = {
    "data": (pm.AxisRules({}), P("data")),
    "fsdp": (pm.AxisRules({"out_features": "data"}), P("data")),
    "tensor": (pm.AxisRules({"out_features": "model"}), P()),
}


def net(*between: Any, key: jax.Array) -> nn.Sequential:
    """Two dense layers, and the features between them."""
    one, two = jax.random.split(key)
    return nn.Sequential([nn.Linear(8, 16, key=one), *between, nn.Linear(16, 8, key=two)])


def normed(key: jax.Array) -> Any:
    """Running statistics, of the whole batch."""
    return net(nn.BatchNorm(16), nn.Lambda(jnp.tanh), key=key)


def noisy(key: jax.Array) -> Any:
    """One mask for the whole batch, wherever its parts are."""
    return net(nn.Dropout(0.5, stream=pm.RngStream()), key=key)


def mixed(key: jax.Array) -> Any:
    """Parameters in float32, computed in bfloat16."""
    return pm.with_precision(net(key=key), pm.by({...: "params=float32,compute=bfloat16"}))


def tied(key: jax.Array) -> Any:
    """One matrix in two layers."""
    return pm.tie(net(key=key), "layers.1.weight", to="layers.0.weight", through=jnp.transpose)


def low_rank(key: jax.Array) -> Any:
    """Matrices plus products of two factors."""
    return pm.lora(net(key=key), pm.matrices, rank=2, key=key)


def stacked(key: jax.Array) -> Any:
    """For rules that count in each layer for itself."""
    return nn.Stack(lambda key: nn.Linear(8, 8, key=key), 3, key=key)


SGD = optax.sgd(0.1, momentum=0.9)
CASES: dict[str, tuple[Any, Any]] = {
    "BatchNorm": (normed, SGD),
    "Dropout": (noisy, SGD),
    "precision": (mixed, SGD),
    "tie": (tied, SGD),
    "lora": (low_rank, SGD),
    "by layer": (
        stacked,
        pm.by({pm.matrices: optax.chain(optax.clip_by_global_norm(0.1), SGD), ...: SGD}),
    ),
}


@pm.filter_jit
def step(model: Any, opt: Any, state: Any, x: Any) -> Any:
    """A step towards the mirrored input."""

    def loss(model: Any) -> Any:
        out, new = model(x, state)
        return ((out.astype(jnp.float32) - x[:, ::-1]) ** 2).mean(), new

    (value, state), grads = pm.filter_value_and_grad(loss, has_aux=True)(model)
    return *opt.update(model, grads=grads), state, value


def start(case: str) -> Any:
    """Model, optimizer and State before the first step."""
    make, rule = CASES[case]
    model, state = pm.make_with_state(make)(jax.random.key(0))
    state = state.seed(jax.random.key(1)) if case == "Dropout" else state
    return model, pm.Optimizer(rule).init(model), state


def train(run: Any, x: Any) -> Any:
    """Three steps."""
    losses = []
    for _ in range(3):
        *run, loss = step(*run, x)
        losses.append(loss)
    return losses, run


@ft.cache
def on_one_device(case: str) -> Any:
    return train(start(case), X)


# The mode in which fewest can go wrong runs with the slow tests.
@pytest.mark.parametrize("mode", [pytest.param("data", marks=pytest.mark.slow), "fsdp", "tensor"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(3)
def test_training_on_a_mesh_is_training_on_one_device(case: str, mode: str):
    """To rounding; shardings after the steps are the same as before."""
    rules, batch = MODES[mode]
    run = start(case)
    where = pm.shardings(run, EXPLICIT, rules)
    with jax.set_mesh(EXPLICIT):
        found = train(pm.filter_shard(run, where), jax.device_put(X, batch))

    numbers = [x for x in jax.tree.leaves(found) if jnp.issubdtype(x.dtype, jnp.number)]
    right = [x for x in jax.tree.leaves(on_one_device(case)) if jnp.issubdtype(x.dtype, jnp.number)]
    for leaf, expected in zip(numbers, right, strict=True):
        np.testing.assert_allclose(leaf, expected, atol=1e-2 if case == "precision" else 1e-5)
    for leaf, sharding in zip(jax.tree.leaves(found[1]), jax.tree.leaves(where), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
