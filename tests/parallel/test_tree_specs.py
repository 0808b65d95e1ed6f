"""From names of axes to axes of a mesh."""

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
    """An optimizer's moments, by class and field; counts and factored moments are whole."""
    net = nn.Stack(lambda key: nn.Linear(8, 8, key=key), 3, key=key)
    opt = pm.Optimizer(optax.adamw(1e-3)).init(net)
    specs = pm.partition_specs(opt, RULES)
    named = dict(zip(pm.named_leaves(opt), jax.tree.leaves(specs), strict=True))

    assert {n for path, n in named.items() if path.endswith("mu.layer.weight")} == {
        P(None, "tensor", "fsdp")
    }
    assert {n for path, n in named.items() if path.endswith("count")} == {P()}
    factored = optax.adafactor(1e-3, min_dim_size_to_factor=2).init(net)
    assert jax.tree.structure(pm.partition_specs(factored, RULES)) == jax.tree.structure(factored)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_step_runs_as_on_one_device(kind: AxisType, key: jax.Array):
    """Model, gradient and optimizer lie by the rules, before the step and after it."""
    mesh = _mesh(kind)
    rules = pm.AxisRules({"out_features": "tensor"})
    net, x = nn.Linear(4, 8, key=key), jnp.ones((2, 4))
    opt = pm.Optimizer(optax.sgd(0.1, momentum=0.9)).init(net)

    def step(net: Any, opt: Any, x: Any) -> Any:
        grads = pm.filter_grad(lambda m, x: (m(x) ** 2).sum())(net, x)
        return opt.update(net, grads)

    alone, _ = step(net, opt, x)
    where = pm.shardings((net, opt), mesh, rules)
    with jax.set_mesh(mesh):
        lying, moments = jax.device_put((net, opt), where)
        after, moments = pm.filter_jit(step)(lying, moments, jax.device_put(x, P()))

    for made, expected in zip(jax.tree.leaves(after), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(made, expected, rtol=1e-6)
    assert after.weight.sharding.shard_shape((8, 4)) == (2, 4)
    shapes = [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(moments)]
    assert shapes.count((2, 4)) == 1


def test_a_load_goes_to_where_the_rules_say(key: jax.Array, tmp_path: Any):
    net = nn.Linear(4, 8, key=key)
    pm.save(tmp_path / "net", net)
    where = pm.shardings(net, _mesh(), RULES)
    like = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), net, where)
    loaded = pm.load(tmp_path / "net", like)

    assert loaded.weight.sharding.is_equivalent_to(where.weight, 2)
    assert loaded == net


def test_a_state_is_whole(key: jax.Array):
    """State has no annotations, and is replicated."""
    _, state = pm.make_with_state(nn.BatchNorm)(4)

    assert {*jax.tree.leaves(pm.partition_specs(state, pm.AxisRules({})))} == {P(None)}


MISTAKES = {
    "no such name": ({"out_feature": "fsdp"}, "out_feature"),
    "one axis twice": ({"out_features": "fsdp", "in_features": "fsdp"}, "weight"),
    "no such axis": ({"out_features": "data"}, "data"),
    "size": ({"out_features": ("fsdp", "tensor")}, r"6"),
}


@pytest.mark.parametrize(("rules", "where"), MISTAKES.values(), ids=MISTAKES)
def test_rules_that_split_nothing_or_cannot_are_refused(rules: Any, where: str, key: jax.Array):
    """A leaf would lie whole on each device."""
    with pytest.raises((pm.PytreemodError, ValueError), match=where):
        pm.shardings(nn.Linear(2, 6, key=key), _mesh(), pm.AxisRules(rules))
