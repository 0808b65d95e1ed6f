"""From the names in a state dict to those that a model asks for."""

import jax
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.io.torch_places import tensor_places
from pytreemod.io.torch_renaming import mapping_by_order, sources_of, with_other_start
from tests.goldens import refusals


def make(key):
    """A model in which names and paths differ."""
    return {"body": nn.Sequential([nn.Linear(2, 2, key=key), nn.BatchNorm(2)])}


MODEL, STATE = pm.make_with_state(make)(jax.random.key(0))
PLACES = tensor_places("f(model)", MODEL, STATE)


def sources(given, mapping=None):
    """What becomes of names."""
    return sources_of("f(model)", PLACES, given, mapping)


@pytest.mark.parametrize(
    "mapping",
    [
        {"net": "body"},
        {"net": "body.layers"},
        {"net.0": "body.layers.0", "net.1": "body.1"},
        {"": "", "net": "body"},
        {"net.0.weight": "body.0.weight", "net.1.mean": "body.1.running_mean", "net": "other"},
        {"net.0": "body.0", "net.1.mean": "body.layers.1.state_index.0"},
        lambda name: name.replace("net.", "body."),
    ],
)
def test_names_are_those_of_pytorch_or_paths(mapping):
    """Of a layer or of one array, as PyTorch calls it or by its path in the model."""
    found = sources(["net.0.weight", "net.1.mean", "net.1.num_batches_tracked"], mapping)

    assert found["body.0.weight"] == "net.0.weight"
    assert {*found.values()} >= {"net.0.weight", "net.1.mean"}


def test_without_a_mapping_names_stay():
    """What the layout says is unused is left out, and only that."""
    given = ["body.0.weight", "body.1.num_batches_tracked", "num_batches_tracked"]

    assert sources(given) == {name: name for name in given if name != given[1]}


@pytest.mark.parametrize("mapping", [{"head": None}, lambda name: None if "head" in name else name])
def test_what_goes_to_none_is_not_used(mapping):
    """For parts of a file that this model has not."""
    assert sources(["body.0.weight", "head.weight"], mapping) == {"body.0.weight": "body.0.weight"}


@pytest.mark.parametrize(
    ("name", "starts", "expected"),
    [
        ("a.b.c", {"a": "x"}, "x.b.c"),
        ("a.b.c", {"a": "x", "a.b": "y"}, "y.c"),
        ("a.b.c", {"a.b.c": "x.y"}, "x.y"),
        ("ab.c", {"a": "x"}, "ab.c"),
        ("module.a", {"module": ""}, "a"),
        ("a.b", {"": "x"}, "x.a.b"),
        ("a.b", {"a": None, "a.b": "c"}, "c"),
        ("a.c", {"a": None, "a.b": "c"}, None),
    ],
)
def test_the_longest_beginning_counts(name, starts, expected):
    """Whole words only; nothing may become something, and the other way round."""
    assert with_other_start(name, starts) == expected


# ---- what an error proposes


def proposed(given, wanted):
    """The mapping between layers of these names, each with a weight of the shape of its number."""
    as_shapes = [
        {f"{name}.{last}": (number,) for name, number in layers for last in ("weight", "bias")}
        for layers in (given, wanted)
    ]
    return mapping_by_order(PLACES, *as_shapes)


@pytest.mark.parametrize(
    ("given", "wanted", "expected"),
    [
        ([("0", 1), ("3", 2)], [("conv", 1), ("fc", 2)], {"0": "conv", "3": "fc"}),
        ([("net.a", 1), ("net.b", 2)], [("a", 1), ("b", 2)], {"net": ""}),
        ([("a", 1), ("b", 2)], [("net.a", 1), ("net.b", 2)], {"": "net"}),
        ([("f.0", 1), ("f.3", 1)], [("g.0", 1), ("g.1", 1)], {"f": "g", "f.3": "g.1"}),
        ([("f.0", 1), ("f.2", 1)], [("f.0", 1), ("f.1", 1)], {"f.2": "f.1"}),
        ([("f.10", 2), ("f.2", 1)], [("g.2", 1), ("g.10", 2)], {"f": "g"}),
        ([("a.x", 1), ("b.x", 2)], [("c.x", 1), ("c.y.x", 2)], {"a": "c", "b": "c.y"}),
        ([("0", 1), ("1", 2)], [("1", 1), ("0", 2)], {"0": "1", "1": "0"}),
        ([("a", 1), ("b", 2)], [("c", 2), ("d", 1)], None),
        ([("a", 1)], [("c", 1), ("d", 1)], None),
    ],
)
def test_layers_that_agree_in_order_have_a_mapping(given, wanted, expected):
    """As short as it can be, and checked; none where shapes differ."""
    assert proposed(given, wanted) == expected


def test_what_is_unused_is_in_nobodys_way():
    """The count of batches is no reason why layers do not fit."""
    given = {"a.running_mean": (2,), "a.num_batches_tracked": ()}

    assert mapping_by_order(PLACES, given, {"b.running_mean": (2,)}) == {"a": "b"}


test_refusals = refusals(globals())
