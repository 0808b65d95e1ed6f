"""A tree as JSON in a file: every node, every leaf's form, and nodes that cannot be saved."""

import dataclasses
from collections import OrderedDict, defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import FileError
from tests.goldens import refusals
from tests.helpers.trees import Pair, Registered, ramp
from tests.io.files import tree_in


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Struct:
    """A dataclass that is registered as a node."""

    value: jax.Array
    name: str = dataclasses.field(metadata={"static": True})


@pytest.fixture
def described(tmp_path):
    """The description in the file of a tree."""

    def described_in_file(tree):
        pm.save(tmp_path / "file", tree)
        return tree_in(tmp_path / "file")

    return described_in_file


def test_nodes_are_told_by_kind(described):
    tree = {"list": [1, None], "pair": Pair(2, (3,)), "struct": Struct(ramp(1), "a")}
    told = described(tree)

    assert told == {
        "dict": [
            ["list", {"list": [{"leaf": "list.0", "value": 1}, None]}],
            [
                "pair",
                {
                    "named": [
                        "?Pair",
                        [
                            ["first", {"leaf": "pair.first", "value": 2}],
                            ["second", {"tuple": [{"leaf": "pair.second.0", "value": 3}]}],
                        ],
                    ]
                },
            ],
            [
                "struct",
                {
                    "struct": [
                        "?Struct",
                        {"value": {"leaf": "struct.value", "is": "jax"}},
                        {"name": "a"},
                    ]
                },
            ],
        ]
    }


def test_a_module_is_told_by_fields_and_configuration(described):
    layer = nn.Linear(3, 4, key=jax.random.key(0))
    [[name, data, config]] = described(layer).values()

    assert name == "pytreemod.nn.Linear"
    assert data == {
        "weight": {"leaf": "weight", "is": "jax"},
        "bias": {"leaf": "bias", "is": "jax"},
    }
    assert config == {"in_features": 3, "out_features": 4, "use_bias": True}


def test_dicts_keep_their_order_and_kind(described):
    tree = [OrderedDict(b=1, a=2), defaultdict(list, b=1, a=2), {"b": 1, "a": 2}]
    ordered, default, plain = described(tree)["list"]

    assert [key for key, _ in ordered["ordered"]] == ["b", "a"]
    assert default["default"][0] == {"class": "list"}
    assert [key for key, _ in plain["dict"]] == ["b", "a"]


def test_a_state_is_told_by_tokens(described):
    norm, state = nn.make_with_state(nn.BatchNorm)(2)
    told = described((norm, state))["tuple"][1]["state"]

    assert [row[:3] for row in told] == [
        ["state_index", "pytreemod.StateIndex", {"path": ["state_index", ["state_index"]]}]
    ]


def test_a_value_with_other_ranks_than_it_was_made_with_tells_them(described):
    """Otherwise they are left out: older files are read as before."""
    _, state = nn.make_with_state(nn.BatchNorm)(2)
    many = jax.tree.map(lambda x: jnp.stack([x, x]), state)

    assert [len(row) for row in described(state)["state"]] == [4]
    assert [row[4] for row in described(many)["state"]] == [[1, 1]]


def test_a_used_up_state_is_refused(described):
    norm, state = nn.make_with_state(nn.BatchNorm)(2)
    norm(ramp(4, 2), state)

    with pytest.raises(pm.errors.StateError, match="Attempted to use old state"):
        described(state)


def test_other_nodes_are_told_by_their_children(described):
    assert described(Registered(1, "note")) == {
        "node": ["?Registered", [["value", {"leaf": "value", "value": 1}]]]
    }


@pytest.mark.parametrize(
    ("leaf", "form"),
    [
        (jnp.ones(2), {"is": "jax"}),
        (jnp.asarray(1.0), {"is": "jax", "weak": True}),
        (np.ones(2), {"is": "numpy"}),
        (np.float32(1), {"is": "scalar"}),
        (jax.random.key(0), {"is": "key", "impl": "threefry2x32"}),
        (jax.random.key(0, impl="rbg"), {"is": "key", "impl": "rbg"}),
        (1.0, {"value": 1.0}),
        ("text", {"value": "text"}),
    ],
    ids=str,
)
def test_the_form_of_a_leaf(described, leaf, form):
    assert described([leaf]) == {"list": [{"leaf": "0", **form}]}


def test_arrays_without_values_are_refused(tmp_path):
    """Donated arrays: the text file has traced and abstract ones."""
    array = ramp(2)
    array.delete()
    with pytest.raises(FileError, match=r"(?s)donated.*at a.b.*what the step returned"):
        pm.save(tmp_path / "f", {"a": {"b": array}})


def test_an_instance_with_a_computed_leaf_is_of_the_class_that_was_written(described):
    """Its class is a variant, which has no name for a file."""
    model = pm.nn.Linear(2, 2, key=jax.random.key(0))
    computed = model.replace(weight=pm.computed(jnp.negative, model.weight))

    assert type(computed) is not type(model)
    assert described(computed)["module"][0] == "pytreemod.nn.Linear"


test_refusals = refusals(globals())
