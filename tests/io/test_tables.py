"""Trees by names, and what is renamed."""

import json
from collections import OrderedDict, defaultdict
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import FileError
from pytreemod.io.containers import write_container
from pytreemod.io.descriptions import describe_tree
from pytreemod.io.tables import (
    Clear,
    Leaf,
    Stacked,
    Table,
    Unstacked,
    first_name,
    read_table,
    renamed_table,
)
from tests.goldens import refusals
from tests.helpers.trees import ramp


def table_of(tree):
    described = describe_tree(tree, "save")
    arrays = {
        name: Leaf({}, jnp.shape(leaf), leaf.dtype, name)
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


def test_containers_are_their_keys():
    """In the order of the reader's own dict; None is nowhere."""
    tree = {
        "b": OrderedDict(z=1, a=2),
        "a": defaultdict(list, x=[3, None, (4,)]),
        "pair": Pair(5, {"c.d": 6}),
    }
    assert {name: leaf.form["value"] for name, leaf in table_of(tree).leaves.items()} == {
        "b.z": 1,
        "b.a": 2,
        "a.x.0": 3,
        "a.x.2.0": 4,
        "pair.one": 5,
        "pair.two.'c.d'": 6,
    }


class Pair(NamedTuple):
    """A named tuple."""

    one: int
    two: dict


MALFORMED = {
    "an array that is not there": {"leaf": "b", "is": "jax"},
    "a name that is none": {"leaf": 3, "value": 1},
    "two of one name": {"list": [{"leaf": "a", "value": 1}, {"leaf": "a", "value": 2}]},
    "a State without names": {"state": [[1]]},
    "a class that is none": {"module": [3, {}, {}]},
    "another node": {"eval": [1]},
    "another node, well made": {"eval": ["Thing", []]},
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


def test_rename_takes_configuration_classes_and_states_along():
    """Or the new name would have none, and the old one would be of nothing."""
    model, state = pm.make_with_state(nn.BatchNorm)(3)
    table, changed = renamed_table(
        table_of({"net": model, "state": state}), {"net": "model", "state": "stats"}, "load"
    )

    assert list(table.leaves) == [
        "model.weight",
        "model.bias",
        "stats.state_index.0",
        "stats.state_index.1",
    ]
    assert table.states == ["stats"]
    assert [name for name in table.classes if not name.startswith("model")] == []
    assert table.config["model.input_size"] == 3
    assert changed["stats.state_index.0"] == "state.state_index.0"


class Counting(dict):
    """A dict that counts how often it is asked."""

    asked = 0

    def __contains__(self, key):
        self.asked += 1
        return super().__contains__(key)


def test_rename_is_a_look_up():
    """What a name is in is asked for, and not each entry whether it is of that name."""
    rename = Counting({f"old{i}.w": f"new{i}.w" for i in range(100)})
    table, _ = renamed_table(names(*(f"old{i}.w" for i in range(100)), *"ab"), rename, "load")

    assert [*table.leaves] == [*(f"new{i}.w" for i in range(100)), *"ab"]
    assert rename.asked == 100 + 2 * 2


def test_a_source_begins_with_its_first_array():
    """Arrays are read in the order of the file."""
    assert first_name("a") == first_name(Stacked(("a", "b"), 0)) == "a"
    assert first_name(Unstacked(Stacked((Unstacked("a", 0, 1), "b"), 1), 0, 2)) == "a"
    assert first_name(Clear(None, abs)) == ""


test_refusals = refusals(globals())
