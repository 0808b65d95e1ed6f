"""From the names in a state dict to those that a model asks for."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import StructureError
from tests.goldens import refusals
from tests.helpers.comparing import assert_same


def make(key):
    """A model in which names and paths differ."""
    return {"body": nn.Sequential([nn.Linear(2, 2, key=key), nn.BatchNorm(2)])}


MODEL, STATE = pm.make_with_state(make)(jax.random.key(0))
ARRAYS = pm.to_torch(MODEL, STATE)


def sources(given, mapping=None):
    """The result of loading a state dict with these names alone."""
    return pm.from_torch(MODEL, dict.fromkeys(given, np.ones((2, 2), "f")), mapping, state=STATE)


@pytest.mark.parametrize(
    "mapping",
    [
        {"net": "body"},
        {"net": "body.layers"},
        {"net.0": "body.layers.0", "net.1": "body.1"},
        {"": "", "net": "body"},
        {
            "net.0.weight": "body.0.weight",
            "net.1.running_mean": "body.1.running_mean",
            "net": "body",
        },
        {"net": "body", "net.1.running_mean": "body.layers.1.state_index.0"},
        lambda name: name.replace("net.", "body."),
    ],
)
def test_names_are_those_of_pytorch_or_paths(mapping):
    """Of a layer or of one array, by PyTorch's name or by its path; unused names are left out."""
    given = {name.replace("body", "net"): array for name, array in ARRAYS.items()}
    given |= {"net.1.num_batches_tracked": np.int64(3)}
    other, state = pm.make_with_state(make)(jax.random.key(1))

    assert_same(pm.to_torch(*pm.from_torch(other, given, mapping, state=state)), ARRAYS)


@pytest.mark.parametrize("mapping", [{"head": None}, lambda name: None if "head" in name else name])
def test_what_goes_to_none_is_not_used(mapping):
    """For parts of a file that this model has not."""
    given = {**ARRAYS, "head.weight": np.ones(2)}
    _, state = pm.make_with_state(make)(jax.random.key(1))

    assert_same(pm.to_torch(*pm.from_torch(MODEL, given, mapping, state=state)), ARRAYS)


def tree_of(names):
    """Dicts in dicts, with a vector of the given size at each name."""
    tree = {}
    for name, size in names.items():
        *steps, last = name.split(".")
        node = tree
        for step in steps:
            node = node.setdefault(step, {})
        node[last] = jnp.zeros(size)
    return tree


@pytest.mark.parametrize(
    ("names", "starts", "expected"),
    [
        (["a.b.c"], {"a": "x"}, ["x.b.c"]),
        (["a.b.c"], {"a": "x", "a.b": "y"}, ["y.c"]),
        (["a.b.c"], {"a.b.c": "x.y"}, ["x.y"]),
        (["ab.c", "a.b"], {"a": "x"}, ["ab.c", "x.b"]),
        (["module.a"], {"module": ""}, ["a"]),
        (["a.b"], {"": "x"}, ["x.a.b"]),
        (["a.b", "a.c"], {"a": None, "a.b": "c"}, ["c"]),
    ],
)
def test_the_longest_beginning_counts(names, starts, expected):
    """Whole words only; nothing may become something, and the other way round."""
    given = {name: np.full(2, i, "f") for i, name in enumerate(names, 1)}
    made = pm.from_torch(tree_of(dict.fromkeys(expected, 2)), given, starts)

    assert pm.named_leaves(made).keys() == {*expected}
    assert all(leaf[0] > 0 for leaf in pm.named_leaves(made).values())


# ---- suggestions of an error


def sized(layers):
    """Sizes of a weight and a bias for each layer."""
    return {f"{name}.{part}": n for name, n in layers for part in ("weight", "bias")}


@pytest.mark.parametrize(
    ("given", "wanted", "expected"),
    [
        ([("0", 1), ("3", 2)], [("conv", 1), ("fc", 2)], {"0": "conv", "3": "fc"}),
        ([("net.a", 1), ("net.b", 2)], [("a", 1), ("b", 2)], {"net": ""}),
        ([("a", 1), ("b", 2)], [("net.a", 1), ("net.b", 2)], {"": "net"}),
        ([("f.0", 1), ("f.3", 1)], [("g.0", 1), ("g.1", 1)], {"f": "g", "f.3": "g.1"}),
        ([("f.0", 1), ("f.2", 1)], [("f.0", 1), ("f.1", 1)], {"f.2": "f.1"}),
        ([("a.x", 1), ("b.x", 2)], [("c.x", 1), ("c.y.x", 2)], {"a": "c", "b": "c.y"}),
        ([("a", 1), ("b", 2)], [("c", 2), ("d", 1)], None),
        ([("a", 1)], [("c", 1), ("d", 1)], None),
    ],
)
def test_layers_that_agree_in_order_have_a_mapping(given, wanted, expected):
    """As short as it can be, and right; none where shapes differ."""
    state_dict = {name: np.ones(n, "f") for name, n in sized(given).items()}
    with pytest.raises(StructureError, match="a tensor for each array of the model") as caught:
        pm.from_torch(tree_of(sized(wanted)), state_dict)
    found = re.search(r"mapping = (\{.*?\n      \})", str(caught.value), re.S)

    assert (found and eval(found[1])) == expected
    if expected is not None:
        pm.from_torch(tree_of(sized(wanted)), state_dict, expected)


test_refusals = refusals(globals())
