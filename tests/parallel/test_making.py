"""Models that are made in parts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pytreemod as pm
from pytreemod import nn

DEVICES = np.array(jax.devices()).reshape(2, 4)
MESH = Mesh(DEVICES, ("fsdp", "tensor"), (AxisType.Explicit,) * 2)
AUTO = Mesh(DEVICES, ("fsdp", "tensor"), (AxisType.Auto,) * 2)
RULES = pm.AxisRules({"out_features": "fsdp", "in_features": "tensor", "layers": None})
OPTIMIZER = pm.Optimizer(optax.adam(1e-3))
TABLE = np.arange(8, dtype=np.float32)
every_mesh = pytest.mark.parametrize("mesh", [MESH, AUTO], ids=["explicit", "auto"])


class Net(pm.Module):
    """With State, a stream, a computed leaf, a stack, a number and a constant."""

    lin: nn.Linear
    low_rank: Any
    rest: tuple[Any, ...]

    def __init__(self, size: int, *, key: jax.Array):
        self.lin = nn.Linear(size, size, key=key)
        self.low_rank = pm.lora(nn.Linear(size, size, key=key), nn.Linear, rank=2, key=key)
        stack = nn.Stack(lambda key: nn.Linear(size, size, key=key), 3, key=key)
        self.rest = (stack, nn.BatchNorm(size), nn.Dropout(0.5), size, jnp.asarray(TABLE))


def make_all(key: jax.Array) -> Any:
    """A Net with a tie, its State and its Optimizer."""
    model, state = nn.make_with_state(Net)(8, key=key)
    model = pm.tie(model, "low_rank.bias", to="lin.bias")
    return model, state, OPTIMIZER.init(model)


@every_mesh
@pytest.mark.sampled
def test_the_parts_are_those_of_the_model(mesh: Mesh, key: jax.Array):
    """Bit for bit, with State and Optimizer; each leaf is where the rules say, by path or name."""
    rules = pm.by({"[0].lin.bias": P(), ...: RULES})
    model, *_ = made = pm.make_sharded(make_all, mesh, rules)(key)
    alone = pm.filter_jit(make_all)(key)

    assert jax.tree.structure(made) == jax.tree.structure(alone)
    assert made == alone
    where = jax.tree.leaves(pm.shardings(alone, mesh, rules))
    for leaf, sharding in zip(jax.tree.leaves(made), where, strict=True):
        if isinstance(leaf, jax.Array):
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    assert model.rest[0].layer.weight.sharding.spec == P(None, "fsdp", "tensor")
    assert model.lin.weight.addressable_shards[0].data.shape == (4, 2)


@every_mesh
@pytest.mark.sampled
def test_inside_compiled_code_and_lowered(mesh: Mesh, key: jax.Array):
    """It is a function as any other, also for a mesh without devices under one with devices."""
    make = pm.make_sharded(nn.Linear, mesh, RULES)
    with jax.set_mesh(mesh):
        abstract = pm.make_sharded(nn.Linear, mesh.abstract_mesh, RULES).lower(4, 8, key=key)
    calls = [make.lower(4, 8, key=key).compile(), abstract.compile(), pm.filter_jit(make), make]
    for made in [*(call(4, 8, key=key) for call in calls), jax.jit(lambda: make(4, 8, key=key))()]:
        assert made == nn.Linear(4, 8, key=key)
        assert made.weight.sharding.spec == P("fsdp", "tensor")


def test_a_function_is_compiled_once(key: jax.Array):
    """For each shardings: traced twice at first, and once in each later call, for the names."""
    traces: list[Any] = []

    def make(key: jax.Array) -> Any:
        traces.append(None)
        return nn.Linear(4, 8, key=key)

    for i in range(3):
        pm.make_sharded(make, MESH, RULES)(jax.random.key(i))
    assert len(traces) == 4
    pm.make_sharded(make, MESH, pm.AxisRules({}))(key)
    assert len(traces) == 6


def test_shapes_with_shardings(key: jax.Array):
    """For `load`, which gives each device its part; on a mesh without devices, too."""
    mesh = MESH.abstract_mesh
    model, _ = pm.make_sharded(nn.make_with_state(Net), mesh, RULES).eval_shape(8, key=key)

    assert model.lin.weight.sharding == NamedSharding(mesh, P("fsdp", "tensor"))
    assert (model.lin.weight.shape, model.rest[3]) == ((8, 8), 8)


@every_mesh
@pytest.mark.usefixtures("optimized")
@pytest.mark.sampled
def test_nothing_is_whole_on_a_device(mesh: Mesh, key: jax.Array):
    """Temporary memory: at most four shards of the largest leaf, and less than half of it."""
    init, shard = jax.nn.initializers.truncated_normal(), 256 * 256 * 4 // 8
    make = pm.make_sharded(nn.Linear, mesh, RULES)

    lowered = make.lower(256, 256, weight_init=init, key=key)
    memory = lowered.compile().memory_analysis()

    assert memory.temp_size_in_bytes <= 4 * shard
    assert memory.output_size_in_bytes <= 1.1 * shard
