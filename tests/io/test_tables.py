"""Trees by names: what is renamed, and layers as one or in a list."""

import json
import re

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, FileError
from pytreemod.io.containers import write_container
from pytreemod.io.descriptions import describe_tree
from pytreemod.io.tables import Leaf, Source, Table, read_table, renamed_table
from tests.helpers.comparing import assert_same
from tests.helpers.trees import ramp


def table_of(tree):
    described = describe_tree(tree, "save")
    arrays = {
        name: Leaf({}, jnp.shape(leaf), leaf.dtype, Source((name,)))
        for name, leaf in described.leaves.items()
        if isinstance(leaf, jax.Array)
    }
    return read_table(described.tree, arrays)


def test_a_table_has_leaves_classes_and_configuration():
    model = nn.Sequential([nn.Identity(), nn.Linear(3, 4, key=jax.random.key(0))])
    table = table_of({"net": model, "rate": 0.5})

    assert list(table.leaves) == ["net.layers.1.weight", "net.layers.1.bias", "rate"]
    assert table.leaves["rate"].form == {"value": 0.5}
    assert table.classes["net.layers.0"] == "pytreemod.nn.Identity"
    assert table.config["net.layers.1.out_features"] == 4


MALFORMED = {
    "an array that is not there": {"leaf": "b", "is": "jax"},
    "a name that is none": {"leaf": 3, "value": 1},
    "two of one name": {"list": [{"leaf": "a", "value": 1}, {"leaf": "a", "value": 2}]},
    "a State without names": {"state": [[1]]},
    "a class that is none": {"module": [3, {}, {}]},
    "another node": {"eval": [1]},
    "no list": {"list": 3},
    "no node": 3,
}


@pytest.mark.parametrize("tree", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_description_is_told(tree, tmp_path):
    """With `like` as without: nothing of it is believed."""
    about = json.dumps({"version": 1, "tree": tree})
    write_container(tmp_path / "file", {"a": ramp(1)}, {"pytreemod.tree": about})
    for arguments in ((), ({"a": ramp(1)},)):
        with pytest.raises(FileError, match=r"a description that `pm\.save` wrote"):
            pm.load(tmp_path / "file", *arguments)


def names(*leaves):
    return Table(leaves={name: Leaf({"is": "jax"}) for name in leaves})


@pytest.mark.parametrize(
    ("rename", "expected"),
    [
        ({"conv1": "input"}, ["input.weight", "conv10.weight", "head.w"]),
        ({"head.w": "head.weight"}, ["conv1.weight", "conv10.weight", "head.weight"]),
        ({"": "net"}, ["net.conv1.weight", "net.conv10.weight", "net.head.w"]),
        ({"": "net", "head": "top"}, ["net.conv1.weight", "net.conv10.weight", "top.w"]),
        ({"head": ""}, ["conv1.weight", "conv10.weight", "w"]),
        ({"conv1": "conv10", "conv10": "conv1"}, ["conv10.weight", "conv1.weight", "head.w"]),
    ],
)
def test_rename_takes_whole_steps_and_the_longest_name(rename, expected):
    table, changed = renamed_table(names("conv1.weight", "conv10.weight", "head.w"), rename, "load")

    assert list(table.leaves) == expected
    assert set(changed) == {new for new in expected if new not in names("a").leaves} & set(changed)
    assert all(old != new for new, old in changed.items())


def test_rename_of_what_is_not_there_or_to_one_name_is_refused():
    with pytest.raises(ArgumentError, match=r"(?s)rename: expected names in the file.*'b'.*\n.*a"):
        renamed_table(names("a"), {"b": "c"}, "load")
    with pytest.raises(ArgumentError, match="expected a name for each leaf, got 'b' for two"):
        renamed_table(names("a", "b"), {"a": "b"}, "load")


class Block(nn.StatefulLayer):
    """A layer with everything that a stack must take along: arrays, statistics, configuration."""

    linear: nn.Linear
    norm: nn.BatchNorm
    act: object

    def __init__(self, *, key, act=jax.nn.relu):
        self.linear = nn.Linear(3, 3, key=key)
        self.norm = nn.BatchNorm(3)
        self.act = act

    def __call__(self, x, state):
        y, state = self.norm(self.linear(x), state)
        return self.act(y), state


class Net(pm.Module):
    """A network whose blocks are kept as one."""

    blocks: nn.Stack
    head: nn.Linear

    def __init__(self, key):
        self.blocks = nn.Stack(Block, 3, key=key)
        self.head = nn.Linear(3, 2, key=key)


class ListNet(pm.Module):
    """The same with a list."""

    blocks: list[Block]
    head: nn.Linear

    def __init__(self, key):
        self.blocks = [Block(key=k) for k in jax.random.split(key, 3)]
        self.head = nn.Linear(3, 2, key=key)


class SequentialNet(pm.Module):
    """The same with a Sequential."""

    blocks: nn.Sequential
    head: nn.Linear

    def __init__(self, key):
        self.blocks = nn.Sequential([Block(key=k) for k in jax.random.split(key, 3)])
        self.head = nn.Linear(3, 2, key=key)


def made(cls, seed):
    """A network with statistics that are not those of a new one."""
    model, state = pm.make_with_state(cls)(jax.random.key(seed))
    x = ramp(4, 3, start=ramp(1)[0])
    if cls is ListNet:
        for block in model.blocks:
            x, state = block(x, state)
    else:
        x, state = model.blocks(x, state)
    return {"model": model, "state": state}


def outputs(tree):
    """What a network computes with its statistics."""
    model, state = pm.inference_mode(tree["model"]), tree["state"]
    x = ramp(2, 3)
    if isinstance(model, ListNet):
        for block in model.blocks:
            x, state = block(x, state)
    else:
        x, state = model.blocks(x, state)
    return model.head(x)


@pytest.mark.parametrize(
    ("cls", "other"), [(Net, ListNet), (ListNet, Net), (Net, SequentialNet), (SequentialNet, Net)]
)
def test_layers_as_one_and_in_a_list_are_loaded_into_one_another(cls, other, tmp_path):
    """With their statistics; the network computes what the one did that was saved."""
    tree, like = made(cls, 0), made(other, 1)
    pm.save(tmp_path / "net", tree)
    # Their own classes are two; of the layers' nothing may differ.
    loaded, report = pm.load(tmp_path / "net", like, strict=False)

    assert all("model: like" in line for line in report.configuration)
    assert not report.missing
    assert not report.unexpected
    expected = outputs(made(cls, 0))
    assert jnp.allclose(outputs(loaded), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("inner", [False, True])
def test_a_stack_and_a_sequential_are_one_in_a_strict_load(inner, tmp_path):
    def layers(seed):
        return [nn.Linear(3, 3, key=k) for k in jax.random.split(jax.random.key(seed), 2)]

    stack = nn.Stack(lambda key: nn.Linear(3, 3, key=key), 2, key=jax.random.key(2))
    one, two = (stack, nn.Sequential(layers(1)))
    if inner:
        one, two = {"a": one, "b": layers(2)}, {"a": two, "b": layers(3)}
    pm.save(tmp_path / "one", one)
    pm.save(tmp_path / "two", pm.load(tmp_path / "one", two))

    assert_same(pm.load(tmp_path / "two", one), one)


def test_layers_that_differ_cannot_be_one(tmp_path):
    """Neither in their configuration, nor in their shapes, nor in their number."""
    like = nn.Stack(lambda key: nn.Linear(3, 3, key=key), 2, key=jax.random.key(2))
    key = jax.random.key(0)
    odd = nn.Linear(3, 3, use_bias=False, key=key)
    pm.save(tmp_path / "odd", [nn.Linear(3, 3, key=key), odd])
    with pytest.raises(FileError, match=r"layers that differ in their numbers only"):
        pm.load(tmp_path / "odd", like)
    drops = [nn.Dropout(0.5), nn.Dropout(0.1)]
    pm.save(tmp_path / "drops", drops)
    with pytest.raises(FileError, match=r"layers that differ in their numbers only"):
        pm.load(tmp_path / "drops", nn.Stack(lambda: nn.Dropout(0.5), 2))
    pm.save(tmp_path / "more", [nn.Linear(3, 3, key=key)] * 3)
    with pytest.raises(FileError, match=re.escape("layer.weight: missing")):
        pm.load(tmp_path / "more", like)
