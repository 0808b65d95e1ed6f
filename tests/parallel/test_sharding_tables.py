"""The shards of each leaf on each device, as a table."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import pytreemod as pm
from pytreemod import nn


def _abstract(**sizes: int) -> Any:
    types = (AxisType.Auto,) * len(sizes)
    return jax.sharding.AbstractMesh((*sizes.values(),), (*sizes,), axis_types=types)


class Net(pm.Module):
    """A net with a leaf that nothing names."""

    stack: nn.Stack[nn.Linear]
    scale: jax.Array


def _net(key: jax.Array) -> Net:
    return Net(nn.Stack(lambda key: nn.Linear(8, 8, key=key), 3, key=key), jnp.ones(4))


def test_a_table(key: jax.Array):
    mesh = _abstract(fsdp=2, tensor=4)
    rules = pm.AxisRules({"out_features": "tensor", "in_features": "fsdp"})
    table = pm.sharding_table(_net(key), mesh, rules)

    assert str(table).splitlines() == [
        "path                shape    names                            spec"
        "                      bytes/device",
        "stack.layer.weight  [3,8,8]  layers out_features in_features  (None, 'tensor', 'fsdp')"
        "            96",
        "stack.layer.bias    [3,8]    layers out_features              (None, 'tensor')"
        "                    24",
        "scale               [4]      (its annotation names no axes)   replicated"
        "                          16",
        "136 bytes on each device, of 880",
    ]
    assert (table.bytes, table.bytes_whole) == (136, 880)
    assert table.rows[0].spec == P(None, "tensor", "fsdp")


def test_bytes_are_those_of_the_devices(key: jax.Array):
    """Compared with the arrays that JAX puts on a device."""
    mesh = jax.make_mesh((2, 4), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    rules = pm.AxisRules({"out_features": ("fsdp", "tensor")})
    net = _net(key)
    placed = jax.device_put(net, pm.shardings(net, mesh, rules))
    sizes = [leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(placed)]
    table = pm.sharding_table(jax.eval_shape(lambda: net), mesh, rules)

    assert [row.bytes for row in table.rows] == sizes
