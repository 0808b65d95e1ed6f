"""Modules, State and keys in orbax's checkpointers, without conversion."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pytreemod as pm
from pytreemod import nn
from tests.helpers.comparing import assert_same
from tests.helpers.meshes import DEVICES

# Importing orbax alone takes two seconds.
pytestmark = pytest.mark.slow

EIGHT, FOUR = (Mesh(np.array(DEVICES[:count]), ("data",)) for count in (8, 4))


class Net(pm.Module):
    """Of every kind of leaf that a checkpoint meets, and of tokens."""

    body: nn.Sequential
    stack: nn.Stack
    scale: jax.Array
    mean: jax.Array = pm.buffer()
    gain: float = 2.0
    counts: np.ndarray = pm.field(default_factory=lambda: np.arange(3))


def net(key):
    drop = nn.Dropout(0.5, stream=pm.RngStream())
    body = nn.Sequential([nn.Linear(8, 8, key=key), nn.BatchNorm(8), drop])
    stack = nn.Stack(lambda key: nn.Linear(8, 8, key=key), 2, key=key)
    return Net(body, stack, jax.random.normal(key, (8,), jnp.bfloat16), jnp.zeros(2))


def training(seed):
    """The complete state of training."""
    key = jax.random.key(seed)
    model, state = pm.make_with_state(net)(key)
    _, state = model.body(jax.random.normal(key, (4, 8)), state.seed(key))
    opt_state = optax.adam(1e-3).init(pm.trainable(model)[0])
    return {"model": model, "state": state, "opt_state": opt_state, "key": key, "step": seed}


@pytest.fixture
def checkpointer():
    with ocp.StandardCheckpointer() as made:
        yield made


def test_a_whole_training_run_comes_back(checkpointer, tmp_path):
    """Arrays, keys, streams, counts, numbers and the optimizer's state; `like` may be abstract."""
    saved = training(1)
    checkpointer.save(tmp_path / "run", saved)
    checkpointer.wait_until_finished()

    restored = checkpointer.restore(tmp_path / "run", training(2))
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    assert_same(restored, saved)
    like = jax.tree.map(ocp.utils.to_shape_dtype_struct, pm.filter_eval_shape(training, 2))
    restored = checkpointer.restore(tmp_path / "run", like)
    assert_same(restored["model"].body, saved["model"].body)
    assert_same(restored["state"], saved["state"])


def placed(tree, mesh):
    """Arrays of eight rows are divided; others replicated."""

    def place(leaf):
        spec = P("data") if np.shape(leaf)[:1] == (8,) else P()
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(lambda x: place(x) if isinstance(x, jax.Array) else x, tree)


def test_what_was_divided_over_eight_devices_is_restored_on_four(checkpointer, tmp_path):
    """Each leaf goes where the one of `like` is."""
    saved, like = placed(training(1), EIGHT), placed(training(2), FOUR)
    checkpointer.save(tmp_path / "run", saved)
    checkpointer.wait_until_finished()

    restored = checkpointer.restore(tmp_path / "run", like)

    assert_same(jax.device_get(restored["model"]), jax.device_get(saved["model"]))
    assert len(restored["model"].body.layers[0].weight.addressable_shards) == 4
    for new, old in zip(jax.tree.leaves(restored), jax.tree.leaves(like), strict=True):
        assert not isinstance(old, jax.Array) or new.sharding == old.sharding
