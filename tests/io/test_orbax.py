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

EIGHT = Mesh(np.array(DEVICES), ("data",))
FOUR = Mesh(np.array(DEVICES[:4]), ("data",))


class Net(pm.Module):
    """Of every kind of leaf and token that a checkpoint meets."""

    body: nn.Sequential
    stack: nn.Stack
    scale: jax.Array
    mean: jax.Array = pm.buffer()
    gain: float = 2.0
    counts: np.ndarray = pm.field(default_factory=lambda: np.arange(3))

    def __init__(self, key, gain):
        one, two = jax.random.split(key)
        drop = nn.Dropout(0.5, stream=pm.RngStream())
        layers = [nn.Linear(8, 8, key=one), nn.BatchNorm(8), nn.Lambda(jax.nn.relu), drop]
        self.body = nn.Sequential(layers)
        self.stack = nn.Stack(lambda key: nn.Linear(8, 8, key=key), 2, key=two)
        self.scale = jax.random.normal(key, (8,), jnp.bfloat16)
        self.mean = jnp.zeros(2)
        self.gain = gain


def training(seed):
    """The complete state of training."""
    key = jax.random.key(seed)
    model, state = pm.make_with_state(Net)(key, 0.5 * seed)
    _, state = model.body(jax.random.normal(key, (4, 8)), state.seed(key))
    opt_state = optax.adam(1e-3).init(pm.trainable(model)[0])
    return {"model": model, "state": state, "opt_state": opt_state, "key": key, "step": seed}


def assert_equal(restored, saved):
    """All of it, State and keys included; the structure, too."""
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    assert_same(restored, saved)


@pytest.fixture
def checkpointer():
    """Orbax's own for trees."""
    with ocp.StandardCheckpointer() as made:
        yield made


def test_a_whole_training_run_comes_back(checkpointer, tmp_path):
    """Arrays, keys, streams, counts, numbers and the optimizer's state, by the names of fields."""
    saved = training(1)
    checkpointer.save(tmp_path / "run", saved)
    checkpointer.wait_until_finished()

    assert_equal(checkpointer.restore(tmp_path / "run", training(2)), saved)


def test_like_may_be_abstract(checkpointer, tmp_path):
    """A model that was never made is restored."""
    saved = training(1)
    checkpointer.save(tmp_path / "run", saved)
    checkpointer.wait_until_finished()
    like = jax.tree.map(ocp.utils.to_shape_dtype_struct, pm.filter_eval_shape(training, 2))

    restored = checkpointer.restore(tmp_path / "run", like)

    assert_same(restored["model"].body, saved["model"].body)
    assert_same(restored["state"], saved["state"])


def test_many_steps_are_kept_by_the_manager(tmp_path):
    """The newest one is restored, and training goes on from there."""
    runs = [training(step) for step in (1, 2, 3)]
    with ocp.CheckpointManager(tmp_path, options=ocp.CheckpointManagerOptions(max_to_keep=2)) as m:
        for run in runs:
            m.save(run["step"], args=ocp.args.StandardSave(run))
        m.wait_until_finished()
        restored = m.restore(m.latest_step(), args=ocp.args.StandardRestore(training(0)))

        assert list(m.all_steps()) == [2, 3]
    assert_equal(restored, runs[-1])
    x = jnp.ones((4, 8))
    body, state = restored["model"].body, restored["state"]
    assert_same(body(x, state)[0], runs[-1]["model"].body(x, runs[-1]["state"])[0])


def placed(tree, mesh):
    """Matrices and vectors sharded along their first axis, if it divides; others replicated."""

    def place(leaf):
        if not isinstance(leaf, jax.Array):
            return leaf
        is_divided = leaf.ndim > 0 and leaf.shape[0] % 8 == 0
        return jax.device_put(leaf, NamedSharding(mesh, P("data") if is_divided else P()))

    return jax.tree.map(place, tree)


def test_what_was_divided_over_eight_devices_is_restored_on_four(checkpointer, tmp_path):
    """Each leaf goes where the one of `like` is."""
    saved, like = placed(training(1), EIGHT), placed(training(2), FOUR)
    checkpointer.save(tmp_path / "run", saved)
    checkpointer.wait_until_finished()

    restored = checkpointer.restore(tmp_path / "run", like)

    assert_same(jax.device_get(restored["model"]), jax.device_get(saved["model"]))
    weight = restored["model"].body.layers[0].weight
    assert weight.sharding == NamedSharding(FOUR, P("data"))
    assert len(weight.addressable_shards) == 4
    for new, old in zip(jax.tree.leaves(restored), jax.tree.leaves(like), strict=True):
        assert not isinstance(old, jax.Array) or new.sharding == old.sharding


def test_a_model_of_another_structure_is_refused(checkpointer, tmp_path):
    """By orbax, with its message, which names the paths."""
    key = jax.random.key(0)
    checkpointer.save(tmp_path / "net", nn.Linear(2, 3, key=key))
    checkpointer.wait_until_finished()

    with pytest.raises(ValueError, match=r"structures do not match(.|\n)*layers"):
        checkpointer.restore(tmp_path / "net", nn.Sequential([nn.Linear(2, 3, key=key)]))


def test_what_orbax_does_not_see(checkpointer, tmp_path):
    """Configuration is that of `like`, and where that has None, nothing is restored."""
    key = jax.random.key(0)
    layers = nn.Sequential([nn.Linear(2, 3, key=key), nn.Dropout(0.3)])
    checkpointer.save(tmp_path / "net", layers)
    checkpointer.wait_until_finished()
    like = nn.Sequential([nn.Linear(2, 3, False, key=jax.random.key(1)), nn.Dropout(0.5)])

    restored = checkpointer.restore(tmp_path / "net", like)

    assert_same(restored.layers[0].weight, layers.layers[0].weight)
    assert restored.layers[0].bias is None
    assert restored.layers[1].p == 0.5
