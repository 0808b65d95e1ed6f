"""A tree as JSON: every node, every leaf's form, and what cannot be saved."""

import dataclasses
import json
from collections import OrderedDict, defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import FileError
from pytreemod.io.descriptions import check_has_values, describe_tree, leaf_form, renew_modes
from tests.helpers.trees import Affine, Pair, Registered, ramp


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Struct:
    """A dataclass that somebody made a node of."""

    value: jax.Array
    name: str = dataclasses.field(metadata={"static": True})


def described(tree):
    return describe_tree(tree, "save")


def test_nodes_are_told_by_kind():
    tree = {"list": [1, None], "pair": Pair(2, (3,)), "struct": Struct(ramp(1), "a")}
    told = described(tree).tree

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


def test_a_module_is_told_by_fields_and_configuration():
    layer = nn.Linear(3, 4, key=jax.random.key(0))
    [[name, data, config]] = described(layer).tree.values()

    assert name == "pytreemod.nn.Linear"
    assert data == {
        "weight": {"leaf": "weight", "is": "jax"},
        "bias": {"leaf": "bias", "is": "jax"},
    }
    assert config == {"in_features": 3, "out_features": 4, "use_bias": True}


def test_dicts_keep_their_order_and_kind():
    tree = [OrderedDict(b=1, a=2), defaultdict(list, b=1, a=2), {"b": 1, "a": 2}]
    ordered, default, plain = described(tree).tree["list"]

    assert [key for key, _ in ordered["ordered"]] == ["b", "a"]
    assert default["default"][0] == {"class": "list"}
    assert [key for key, _ in plain["dict"]] == ["b", "a"]


def test_leaves_are_in_the_order_of_jax():
    """They are put back by `tree_unflatten`, in that order."""
    tree = {"b": ramp(1), "a": [ramp(2), OrderedDict(z=1.0, y=2.0)], "m": Affine(ramp(1), ramp(3))}
    leaves = list(described(tree).leaves.values())

    assert all(a is b for a, b in zip(leaves, jax.tree.leaves(tree), strict=True))


def test_a_state_is_told_by_tokens():
    norm, state = nn.make_with_state(nn.BatchNorm)(2)
    told = described((norm, state)).tree["tuple"][1]["state"]

    assert [row[:3] for row in told] == [
        ["state_index", "pytreemod.StateIndex", {"path": ["state_index", ["state_index"]]}]
    ]
    assert list(described((norm, state)).leaves) == [
        "0.weight",
        "0.bias",
        "1.state_index.0",
        "1.state_index.1",
    ]


def test_a_value_with_other_ranks_than_it_was_made_with_tells_them():
    """Only then: what is as it was made reads as ever."""
    _, state = nn.make_with_state(nn.BatchNorm)(2)
    many = jax.tree.map(lambda x: jnp.stack([x, x]), state)

    assert [len(row) for row in described(state).tree["state"]] == [4]
    assert [row[4] for row in described(many).tree["state"]] == [[1, 1]]


def test_a_used_up_state_is_refused():
    norm, state = nn.make_with_state(nn.BatchNorm)(2)
    norm(ramp(4, 2), state)

    with pytest.raises(pm.errors.StateError, match="Attempted to use old state"):
        described(state)


def test_other_nodes_are_told_by_their_children():
    assert described(Registered(1, "note")).tree == {
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
        (jax.ShapeDtypeStruct((), jnp.float32), {"is": "jax"}),
        (jax.ShapeDtypeStruct((), jax.random.key(0).dtype), {"is": "key"}),
        (1.0, {}),
        ("text", {}),
    ],
    ids=str,
)
def test_the_form_of_a_leaf(leaf, form):
    assert leaf_form(leaf) == form


def test_a_description_is_json():
    tree = {"x": jax.random.key(0), ("a", 1): [jnp.float32, nn.Dropout(0.5)], "nan": float("nan")}
    tree = [tree["x"], {("a", 1): nn.Dropout(0.5)}, float("nan"), 2**70]

    assert "nan" in json.dumps(described(tree).tree, allow_nan=False)


def test_two_leaves_of_one_name_are_refused():
    with pytest.raises(FileError, match=r"(?s)save: expected leaves with different names.*0"):
        described(OrderedDict([(0, 1), ("0", 2)]))


def test_arrays_without_values_are_refused():
    """Traced, donated, abstract: each is told with its name and what to do."""
    with pytest.raises(FileError, match=r"(?s)one that is traced.*outside of filter_jit"):
        jax.jit(lambda x: check_has_values("a.b", x, "save"))(ramp(2))
    array = ramp(2)
    array.delete()
    with pytest.raises(FileError, match=r"(?s)donated.*at a.b.*what the step returned"):
        check_has_values("a.b", array, "save")
    with pytest.raises(FileError, match="shapes alone"):
        check_has_values("a.b", jax.ShapeDtypeStruct((), jnp.float32), "save")


def test_an_instance_with_a_computed_leaf_is_of_the_class_that_was_written():
    """What it really is of was made for it, and has no name that a file could tell."""
    model = pm.nn.Linear(2, 2, key=jax.random.key(0))
    computed = model.replace(weight=pm.computed(jnp.negative, model.weight))

    assert type(computed) is not type(model)
    assert describe_tree(computed, "save").tree["module"][0] == "pytreemod.nn.Linear"


def test_the_mode_of_an_older_batch_norm_is_called_as_now():
    """Where its description knows of no counter; what else has a mode keeps it."""
    tree = {"dict": [["a", {"list": [{"module": ["x.Own", {}, {"mode": "batch"}]}]}]]}
    before = json.dumps(tree)
    renew_modes(tree)
    assert json.dumps(tree) == before

    for mode in ("batch", "torch", "ema"):
        written, _ = described(nn.BatchNorm(2, "batch", mode=mode))
        renew_modes(written)
        assert written["module"][2]["mode"] == mode
        del written["module"][1]["batch_counter"]
        tree["dict"][0][1]["list"] = [None, {"dict": [["b", written]]}]
        renew_modes(tree)
        assert written["module"][2]["mode"] == {"batch": "torch"}.get(mode, mode)


def test_a_tree_deeper_than_the_stack_is_refused_with_the_way_to_it():
    """Its beginning, for whole it would be as long as the tree is deep."""
    tree = ramp(2)
    for _ in range(1500):
        tree = [tree]
    with pytest.raises(FileError, match=r"\n  at \['a'\](\[0\]){5}\.\.\., \d{3} steps and more\n"):
        describe_tree({"a": tree, "b": 1}, "save")
