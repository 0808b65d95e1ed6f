"""From names of axes to axes of a mesh: specs, shardings, and their table."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import pytreemod as pm
from pytreemod import nn

RULES = pm.AxisRules({"out_features": "tensor", "in_features": "fsdp", "layers": None})


def _mesh(kind: AxisType = AxisType.Auto) -> Any:
    return jax.make_mesh((2, 4), ("fsdp", "tensor"), axis_types=(kind, kind))


def test_rules_by_path(key: jax.Array):
    """A table for each part of a model, and a spec that is passed unchanged."""
    net = {"a": nn.Linear(4, 8, key=key), "b": nn.Linear(4, 8, key=key), "n": nn.LayerNorm(4)}
    rules = pm.by(
        {"a.weight": P("tensor"), "b.**": pm.AxisRules({"out_features": "fsdp"}), ...: RULES}
    )
    specs = pm.partition_specs(net, rules)

    assert (specs["a"].weight, specs["a"].bias) == (P("tensor"), P("tensor"))
    assert (specs["b"].weight, specs["b"].bias) == (P("fsdp", None), P("fsdp"))
    assert specs["n"].weight == P(None)


def test_what_follows_a_model_is_split_as_it(key: jax.Array):
    """An optimizer's moments, by class and field; counts, factored moments, State are whole."""
    net = nn.Stack(lambda key: nn.Linear(8, 8, key=key), 3, key=key)
    opt = pm.Optimizer(optax.adamw(1e-3)).init(net)
    specs = pm.partition_specs(opt, RULES)
    named = dict(zip(pm.named_leaves(opt), jax.tree.leaves(specs), strict=True))

    moments = {n for path, n in named.items() if path.endswith("mu.layer.weight")}
    assert moments == {P(None, "tensor", "fsdp")}
    assert {n for path, n in named.items() if path.endswith("count")} == {P()}
    factored = optax.adafactor(1e-3, min_dim_size_to_factor=2).init(net)
    assert jax.tree.structure(pm.partition_specs(factored, RULES)) == jax.tree.structure(factored)
    _, state = pm.make_with_state(nn.BatchNorm)(4)
    assert {*jax.tree.leaves(pm.partition_specs(state, pm.AxisRules({})))} == {P(None)}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_step_runs_as_on_one_device(kind: AxisType, key: jax.Array):
    """Model, gradient and optimizer lie by the rules, before the step and after it."""
    mesh, rules = _mesh(kind), pm.AxisRules({"out_features": "tensor"})
    net, x = nn.Linear(4, 8, key=key), jnp.ones((2, 4))
    opt = pm.Optimizer(optax.sgd(0.1, momentum=0.9)).init(net)

    def step(net: Any, opt: Any, x: Any) -> Any:
        return opt.update(net, grads=pm.filter_grad(lambda m, x: (m(x) ** 2).sum())(net, x))

    alone, _ = step(net, opt, x)
    with jax.set_mesh(mesh):
        net, opt = jax.device_put((net, opt), pm.shardings((net, opt), mesh, rules))
        after, opt = pm.filter_jit(step)(net, opt, jax.device_put(x, P()))

    for made, expected in zip(jax.tree.leaves(after), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(made, expected, rtol=1e-6)
    shapes = [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves((after, opt))]
    assert shapes.count((2, 4)) == 2


MISTAKES = {
    "no such name": ({"out_feature": "fsdp"}, "out_feature"),
    "one axis twice": ({"out_features": "fsdp", "in_features": "fsdp"}, "weight"),
    "uneven": ({"out_features": "tensor"}, r"weight: f32\[6,2\](.|\n)*bias(.|\n)*'tensor': 4"),
    "no such axis": ({"out_features": "data"}, "data"),
}


@pytest.mark.parametrize(("rules", "where"), MISTAKES.values(), ids=MISTAKES)
def test_rules_that_split_nothing_or_cannot_are_refused(rules: Any, where: str, key: jax.Array):
    """A leaf would lie whole on each device."""
    with pytest.raises(pm.PytreemodError, match=where):
        pm.shardings(nn.Linear(2, 6, key=key), _mesh(), pm.AxisRules(rules))
    with pytest.raises(pm.errors.ArgumentError, match="'fsdp' is neither AxisRules"):
        pm.shardings(nn.Linear(2, 6, key=key), _mesh(), "fsdp")


def test_a_table(key: jax.Array):
    """Each leaf with its shape, names, spec, and the bytes that JAX puts on a device."""
    net = {"stack": nn.Stack(lambda key: nn.Linear(8, 8, key=key), 3, key=key), "x": jnp.ones(4)}
    placed = jax.device_put(net, pm.shardings(net, _mesh(), RULES))
    net = pm.filter_eval_shape(lambda: net | {"no array": "text"})
    table = pm.sharding_table(net, _mesh().abstract_mesh, RULES)

    assert str(table).endswith("\n136 bytes on each device, of 880")
    whole = [line for line in str(table).splitlines() if "replicated" in line]
    assert [line.split()[0] for line in whole] == ["['x']"]
    assert table.rows[0][:2] == ("['stack'].layer.weight", (3, 8, 8))
    assert table.rows[0][2] == ("layers", "out_features", "in_features")
    assert table.rows[0].spec == P(None, "tensor", "fsdp")
    sizes = [leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(placed)]
    assert [row.bytes for row in table.rows] == sizes
