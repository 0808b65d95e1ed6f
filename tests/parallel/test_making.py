"""Models that are made in parts."""

import contextlib
import gc
import threading
import weakref
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
MESHES = [MESH, Mesh(DEVICES, ("fsdp", "tensor"), (AxisType.Auto,) * 2)]
RULES = pm.AxisRules({"out_features": "fsdp", "in_features": "tensor", "layers": None})


class Net(pm.Module):
    """With State, a stream, a computed leaf, a tie, a stack, a number and a function."""

    lin: nn.Linear
    low_rank: Any
    norm: nn.BatchNorm
    dropout: nn.Dropout
    stack: nn.Stack
    size: int
    act: Any

    def __init__(self, size: int, *, key: jax.Array):
        keys = jax.random.split(key, 4)
        self.lin = nn.Linear(size, size, key=keys[0])
        self.low_rank = pm.lora(nn.Linear(size, size, key=keys[1]), nn.Linear, rank=2, key=keys[2])
        self.norm = nn.BatchNorm(size)
        self.dropout = nn.Dropout(0.5)
        self.stack = nn.Stack(lambda key: nn.Linear(size, size, key=key), 3, key=keys[3])
        self.size = size
        self.act = jax.nn.relu


def _tied(key: jax.Array) -> Any:
    model, state = nn.make_with_state(Net)(8, key=key)
    return pm.tie(model, "low_rank.bias", to="lin.bias"), state


@pytest.mark.parametrize("mesh", MESHES)
def test_the_parts_are_those_of_the_model(mesh: Mesh, key: jax.Array):
    """Bit for bit, with State; each leaf is where the rules say."""
    model, state = made = pm.make_sharded(_tied, mesh, RULES)(key)
    alone = pm.filter_jit(_tied)(key)

    assert jax.tree.structure(made) == jax.tree.structure(alone)
    assert made == alone
    where = jax.tree.leaves(pm.shardings(alone, mesh, RULES))
    for leaf, sharding in zip(jax.tree.leaves(made), where, strict=True):
        if isinstance(leaf, jax.Array):
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    assert model.stack.layer.weight.sharding.spec == P(None, "fsdp", "tensor")
    assert model.lin.weight.addressable_shards[0].data.shape == (4, 2)
    assert model.size == 8
    # The State is as good as any.
    _, state = model.norm(jnp.ones((4, 8)), state)


@pytest.mark.parametrize("mesh", MESHES)
def test_inside_compiled_code_and_lowered(mesh: Mesh, key: jax.Array):
    make = pm.make_sharded(nn.Linear, mesh, RULES)
    calls = [
        lambda key: make.lower(4, 8, key=key).compile()(4, 8, key=key),
        jax.jit(lambda key: make(4, 8, key=key)),
        pm.filter_jit(lambda key: make(4, 8, key=key)),
        lambda key: pm.filter_jit(make).lower(4, 8, key=key).compile()(4, 8, key=key),
    ]
    for call in calls:
        made = call(key)
        assert made == nn.Linear(4, 8, key=key)
        assert made.weight.sharding.spec == P("fsdp", "tensor")
    assert repr(make) == "<make_sharded of Linear>"


def test_an_abstract_mesh_is_lowered_under_one_of_devices(key: jax.Array):
    make = pm.make_sharded(nn.Linear, MESH.abstract_mesh, RULES)
    with jax.set_mesh(MESH):
        made = make.lower(4, 8, key=key).compile()(4, 8, key=key)

    assert made == nn.Linear(4, 8, key=key)
    assert made.weight.sharding.spec == P("fsdp", "tensor")


def test_a_function_is_compiled_once(key: jax.Array):
    """For each shardings: traced twice at first, and once in each later call, for the names."""
    count = 0

    def make(key: jax.Array) -> Any:
        nonlocal count
        count += 1
        return nn.Linear(4, 8, key=key)

    for i in range(3):
        pm.make_sharded(make, MESH, RULES)(jax.random.key(i))
    assert count == 4
    pm.make_sharded(make, MESH, pm.AxisRules({}))(key)
    assert count == 6


def test_shapes_with_shardings(key: jax.Array):
    """For `load`, and on a mesh without devices; other leaves are unchanged."""
    make = pm.make_sharded(nn.make_with_state(Net), MESH.abstract_mesh, RULES)
    model, _ = make.eval_shape(8, key=key)

    assert model.lin.weight.sharding == NamedSharding(MESH.abstract_mesh, P("fsdp", "tensor"))
    assert (model.lin.weight.shape, model.lin.weight.dtype) == ((8, 8), jnp.float32)
    assert (model.size, model.act) == (8, jax.nn.relu)


def test_a_load_gives_each_device_its_part(key: jax.Array, tmp_path: Any):
    """Into shapes with shardings, and into a model that was made in parts."""
    net = nn.Linear(64, 64, key=key)
    pm.save(tmp_path / "net", net)
    make = pm.make_sharded(nn.Linear, MESH, RULES)
    for like in (make.eval_shape(64, 64, key=key), make(64, 64, key=jax.random.key(1))):
        loaded = pm.load(tmp_path / "net", like)

        assert loaded == net
        assert {s.data.nbytes for s in loaded.weight.addressable_shards} == {64 * 64 * 4 // 8}


def test_what_the_rules_leave_whole_may_be_a_constant(key: jax.Array):
    """A table of NumPy, a scalar; but arguments are not constants."""
    table = np.arange(8, dtype=np.float32)

    def make(given: jax.Array, key: jax.Array) -> Any:
        return {"table": jnp.asarray(table), "given": given, "linear": nn.Linear(4, 8, key=key)}

    made = pm.make_sharded(make, MESH, RULES)(jnp.ones((4, 4)), key)

    np.testing.assert_array_equal(made["table"], table)
    np.testing.assert_array_equal(made["given"], np.ones((4, 4)))


def test_a_multiple_of_a_constant_is_one(key: jax.Array):
    """XLA computes it while it compiles."""
    table = np.ones((8, 4), np.float32)

    def make(key: jax.Array) -> Any:
        return nn.Linear(4, 8, key=key).replace(weight=2 * jnp.asarray(table))

    with pytest.raises(pm.PytreemodError, match="weight"):
        pm.make_sharded(make, MESH, RULES)(key)


def test_an_array_as_an_index_is_a_value_that_is_read(key: jax.Array):
    def make(key: jax.Array) -> Any:
        return nn.Linear(4, [8, 16][jax.random.randint(key, (), 0, 2)], key=key)

    with pytest.raises(pm.PytreemodError, match="make"):
        pm.make_sharded(make, MESH, RULES)(key)


def test_rules_by_path_and_an_optimizer(key: jax.Array):
    """An optimizer of a model is made in shards, as the model is."""

    def make(key: jax.Array) -> Any:
        net = nn.Linear(8, 8, key=key)
        return net, pm.Optimizer(optax.adam(1e-3)).init(net)

    rules = pm.by({"[0].bias": P(), ...: RULES})
    net, opt = pm.make_sharded(make, MESH, rules)(key)

    assert (net.weight.sharding.spec, net.bias.sharding.spec) == (P("fsdp", "tensor"), P())
    specs = [leaf.sharding.spec for leaf in jax.tree.leaves(opt) if leaf.ndim == 2]
    assert specs == [P("fsdp", "tensor")] * 2


def test_an_error_of_the_constructor_comes_out_as_it_is(key: jax.Array):
    def make(key: jax.Array) -> Any:
        raise ZeroDivisionError("of the constructor")

    with pytest.raises(ZeroDivisionError, match="of the constructor"):
        pm.make_sharded(make, MESH, RULES)(key)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("depth", [1, 6])
@pytest.mark.usefixtures("optimized")
def test_nothing_is_whole_on_a_device(mesh: Mesh, depth: int, key: jax.Array):
    """Temporary memory: at most four shards of the largest leaf, and less than half of it."""
    size, init = 256, jax.nn.initializers.truncated_normal()

    def make(key: jax.Array) -> Any:
        keys = jax.random.split(key, depth)
        net = [nn.Linear(size, size, weight_init=init, key=key) for key in keys]
        return net, nn.Linear(size, size, key=key)

    shard = size * size * 4 // 8
    memory = pm.make_sharded(make, mesh, RULES).lower(key).compile().memory_analysis()

    assert memory.temp_size_in_bytes <= 4 * shard
    assert memory.output_size_in_bytes <= 1.1 * (depth + 1) * shard


def test_what_is_dropped_is_not_stored():
    """Constructors and rules, those that fail too, made in two threads."""
    dropped: list[Any] = []

    def run(is_failing: bool) -> None:
        for number in range(3):

            def make(key: jax.Array, number: int = number) -> Any:
                return nn.Linear(4, 8, key=key) if not is_failing else 1 / 0

            rules = pm.AxisRules({"out_features": "fsdp", f"name{number}": None})
            maker = pm.make_sharded(make, MESH, rules)
            dropped.extend(map(weakref.ref, (make, rules, maker)))
            with contextlib.suppress(ZeroDivisionError):
                maker(jax.random.key(number))

    threads = [threading.Thread(target=run, args=(is_failing,)) for is_failing in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()

    assert len(dropped) == 18
    assert [ref() for ref in dropped if ref() is not None] == []
