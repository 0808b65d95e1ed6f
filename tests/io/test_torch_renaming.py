"""From the names in a state dict to those that a model asks for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, StructureError
from tests.helpers.comparing import assert_same


def make(key):
    """A model in which names and paths differ."""
    return {"body": nn.Sequential([nn.Linear(2, 2, key=key), nn.BatchNorm(2)])}


MODEL, STATE = pm.make_with_state(make)(jax.random.key(0))
ARRAYS = pm.to_torch(MODEL, STATE)


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


@pytest.mark.parametrize(
    ("mapping", "error", "word"),
    [
        ({"layers": "body"}, ArgumentError, "layers"),
        ({"body": 3}, ArgumentError, "body"),
        (lambda name: 3, ArgumentError, "3"),
        (lambda name: "body.0.weight", StructureError, r"body\.0\.weight"),
    ],
)
def test_a_mapping_that_loses_tensors_is_refused(mapping, error, word):
    """Of two tensors under one name one would be lost; a name of nothing would change nothing."""
    with pytest.raises(error, match=word):
        pm.from_torch(MODEL, ARRAYS, mapping, state=STATE)
