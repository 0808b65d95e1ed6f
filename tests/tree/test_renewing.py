"""Functions that return a new model return new lists and dicts."""

import copy
from collections import OrderedDict
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod import nn
from tests.helpers.trees import Affine, affine, ramp


class Deep(pm.Module):
    layers: list[Any]
    table: dict[str, Any]
    pair: tuple[Any, ...]
    inner: Any


def deep(inner=None):
    """One with a layer that can be edited in every way."""
    layer = nn.Linear(2, 2, key=jax.random.key(0))
    content = Affine([ramp(2, 2)], layer) if inner is None else inner
    table = {"b": [ramp(2, 2)], "a": nn.Dropout(0.5)}
    return Deep([layer, affine(), [ramp(2, 2)]], table, ([ramp(2)], ramp(3)), content)


NEW = {
    "tree_at": lambda m: pm.tree_at(lambda m: m.layers[1].bias, m, ramp(2)),
    "tree_at, configuration": lambda m: pm.tree_at("table.a.p", m, 0.1),
    "replace": lambda m: m.replace(inner=1.0),
    "tie": lambda m: pm.tie(m, "inner.bias.weight", to="layers.0.weight"),
    "resolve": pm.resolve,
    "inference_mode": nn.inference_mode,
    "with_role": lambda m: pm.with_role(m, "layers.0.weight", "buffer"),
    "with_precision": lambda m: pm.with_precision(m, "bfloat16"),
    "lora": lambda m: pm.lora(m, "layers.0.weight", rank=1, key=jax.random.key(0)),
    "map_parameters": lambda m: pm.map_parameters(jnp.negative, m, "layers.0.weight"),
    "materialize": lambda m: pm.materialize(m, ramp(2)),
    "deepcopy": copy.deepcopy,
}


def containers(tree):
    found = []

    def note(node):
        if isinstance(node, (list, dict)):
            found.append(node)
        return False

    jax.tree.leaves(tree, is_leaf=note)
    return found


@pytest.mark.parametrize("change", NEW.values(), ids=NEW.keys())
def test_nothing_that_can_be_edited_is_shared(change):
    """After any edit of the new model, the old one is unchanged."""
    model = deep()
    known = {id(found) for found in containers(model)}
    made = change(model)

    assert not known & {id(found) for found in containers(made)}
    assert len(containers(made)) >= len(containers(model)) - 1


def test_a_new_node_is_stored_as_it_is():
    """The caller's node is stored without a copy, as at construction."""
    mine = [1.0]

    assert pm.tree_at(lambda m: m.layers, deep(), mine).layers is mine
    assert deep().replace(layers=mine).layers is mine


def test_what_cannot_be_edited_is_shared():
    """Nodes without lists or dicts are the same objects; so is a State, and order stays."""
    model, state = nn.make_with_state(nn.BatchNorm)(2)
    tree = {"b": [affine()], "a": (state, OrderedDict(z=[1], y=2)), "m": model}
    made: Any = pm.untie(tree)

    assert [*made] == ["b", "a", "m"]
    assert made["b"] is not tree["b"]
    assert made["b"][0] is tree["b"][0]
    assert made["a"][0] is state
    assert made["a"][1]["z"] is not tree["a"][1]["z"]
    assert made["m"] is model
