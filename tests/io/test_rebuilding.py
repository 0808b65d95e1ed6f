"""Trees from their description alone: only what is registered, whole, and as its class allows."""

import copy
import dataclasses
import enum
import functools as ft
import json
import random
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import FileError, PytreemodError
from pytreemod.io.configuration import ConfigurationWriter
from pytreemod.io.containers import write_container
from pytreemod.io.descriptions import describe_tree
from pytreemod.io.rebuilding import rebuild_tree
from tests.goldens import refusals
from tests.helpers.comparing import assert_same
from tests.helpers.trees import ramp


def rebuilt(tree, leaves=None):
    return rebuild_tree(tree, lambda name, form: (leaves or {}).get(name, name), "load")


def described(tree):
    told = describe_tree(tree, "save")
    return json.loads(json.dumps(told.tree)), told.leaves


@pm.register_for_files(name="test_rebuilding.Range")
class Range(pm.Module):
    """A class with a check, a default, and configuration of its own choice."""

    low: jax.Array
    high: jax.Array
    name: str = "range"
    size: int = pm.field(static=True, default=1)

    def __check_init__(self):
        if self.size < 1:
            raise ValueError("size must be positive")


def test_a_field_that_the_class_has_got_since_takes_its_default():
    tree, leaves = described(Range(ramp(1), ramp(1), "a", 2))
    del tree["module"][2]["name"], tree["module"][2]["size"]

    made = rebuilt(tree, leaves)
    assert_same(made, Range(ramp(1), ramp(1)))
    # As configuration, if that is what it is.
    assert jax.tree.structure(made) == jax.tree.structure(Range(ramp(1), ramp(1)))


def test_a_field_that_is_missing_or_gone_is_told():
    tree, leaves = described(Range(ramp(1), ramp(1)))
    lacking = copy.deepcopy(tree)
    del lacking["module"][1]["high"]
    with pytest.raises(
        FileError, match=r"(?s)fields of Range: low, high, name, size, got low, name, size"
    ):
        rebuilt(lacking, leaves)
    tree["module"][2]["old"] = 1
    with pytest.raises(FileError, match=r"(?s)got low, high, name, size, old.*strict=False"):
        rebuilt(tree, leaves)


def test_the_checks_of_the_class_run():
    tree, leaves = described(Range(ramp(1), ramp(1)))
    tree["module"][2]["size"] = 0
    with pytest.raises(FileError, match=r"(?s)fields that Range takes.*size must be positive"):
        rebuilt(tree, leaves)
    tree, leaves = described(nn.Dropout(0.5))
    tree["module"][2]["p"] = 2.0
    with pytest.raises(FileError, match=r"(?s)Dropout takes.*p\): expected"):
        rebuilt(tree, leaves)


class Pair(NamedTuple):
    """A named tuple."""

    a: jax.Array
    b: jax.Array


@pytest.mark.parametrize("fields", ["ba", "ac", "a", "abc"])
def test_a_named_tuple_with_other_fields_is_told(fields):
    """By their order alone, values would be in one another's place."""
    pm.register_for_files(Pair, name="test_rebuilding.Pair")
    leaf = {"leaf": "x", "value": 1}
    assert rebuilt({"named": ["test_rebuilding.Pair", [["a", leaf], ["b", leaf]]]}) == Pair(1, 1)
    with pytest.raises(FileError, match=r"the fields of Pair: a, b, got "):
        rebuilt({"named": ["test_rebuilding.Pair", [[field, leaf] for field in fields]]})


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([["__cell__", None]], r"with_precision\(methods\): .* got '__cell__'"),
        (
            [["__call__", ["int8", "float32", "float32"]]],
            r"Precision\(params\): expected a floating",
        ),
        ([["__call__"]], r"expected"),
        ("__call__", r"expected"),
    ],
)
def test_precisions_are_of_methods_that_are_there(given, text):
    tree, leaves = described(pm.with_precision(nn.Dropout(0.5), "float32"))
    tree["module"][2]["<precision>"] = ConfigurationWriter().write(given)

    with pytest.raises(FileError, match=text):
        rebuilt(tree, leaves)


def test_an_abstract_class_is_not_made():
    class Base(pm.Module, is_abstract=True):
        pass

    pm.register_for_files(Base, name="test_rebuilding.Base")
    with pytest.raises(FileError, match="Cannot instantiate abstract Module"):
        rebuilt({"module": ["test_rebuilding.Base", {}, {}]})


def test_a_state_has_the_ranks_that_its_values_were_made_with():
    """Of members, of one, and of streams, which tell none; a file without is of one."""
    layers = [nn.BatchNorm(2), nn.Dropout(0.5)]
    _, state = pm.make_with_state(lambda: nn.Sequential(layers))()
    state = state.seed(jax.random.key(0))
    many = jax.tree.map(lambda x: jnp.stack([x, x]), state)
    for each in (state, many, copy.copy(state).split(3)):
        tree, leaves = described(each)
        assert jax.tree.structure(rebuilt(tree, leaves)) == jax.tree.structure(each)


@pytest.mark.parametrize(
    ("tree", "place", "hint"),
    [
        ({"module": ["?Net", {}, {}]}, "<root>: Net", "pm.register_for_files(Net)"),
        ({"list": [{"module": ["?a.b.Net", {}, {}]}]}, "0: a.b.Net", "pm.register_for_files(Net)"),
        ({"leaf": "x", "value": {"function": "?<lambda>"}}, "<root>: <lambda>", "that has it:"),
        ({"leaf": "x", "value": {"unknown": ["Odd", ""]}}, "<root>", "that has it:"),
    ],
    ids=str,
)
def test_the_hint_is_code_that_can_be_run(tree, place, hint):
    """The root has a name to be read, and a lambda none to be registered by."""
    with pytest.raises(FileError, match="load: expected") as caught:
        rebuilt(tree)

    text = str(caught.value)
    assert f"\n  at {place}\n" in text
    assert hint in text
    assert text.endswith("pm.load(path, like)")
    assert "register_for_files(<" not in text


def test_a_deep_description_is_not_taken_for_a_malformed_one():
    """What is wrong with it is its depth, as the caller says."""
    tree = None
    for _ in range(5000):
        tree = {"list": [tree]}
    with pytest.raises(RecursionError, match="maximum recursion depth exceeded"):
        rebuilt(tree)


@pm.register_for_files(name="test_rebuilding.Setting")
@dataclasses.dataclass(frozen=True)
class Setting:
    """Configuration of a user's own class."""

    value: object


@pm.register_for_files(name="test_rebuilding.Mode")
class Mode(enum.Enum):
    """An enumeration of a user's own."""

    TRAIN = 1
    TEST = 2


@pm.register_for_files(name="test_rebuilding.Configured")
class Configured(pm.Module):
    """Configuration of any kind."""

    weight: jax.Array
    config: object = pm.field(static=True)


def mutated(node, rng):
    """A description with one thing in it exchanged, removed or doubled."""
    node = copy.deepcopy(node)
    spots = []

    def walk(parent):
        for key in list(parent) if isinstance(parent, dict) else range(len(parent)):
            spots.append((parent, key))
            if isinstance(parent[key], (dict, list)):
                walk(parent[key])

    walk(node)
    parent, key = rng.choice(spots)
    other_parent, other = rng.choice(spots)
    odd = [None, -1, 2**70, 1.5, "", "pytreemod.nn.Linear", "?x", [], {}, {"list": []}, True]
    odd += [{"function": "jax.nn.relu"}, {"leaf": "0.weight", "is": "jax"}, {"unnamed": 0}]
    what = rng.randrange(4)
    if what == 0:
        parent[key] = rng.choice(odd)
    elif what == 1:
        parent[key] = copy.deepcopy(other_parent[other])
    elif what == 2:
        del parent[key]
    elif isinstance(parent, list):
        parent.insert(key, rng.choice(odd))
    else:
        parent[rng.choice(["list", "module", "leaf", "value", "class", "x"])] = rng.choice(odd)
    return node


class Rate(pm.Module):
    """One number within bounds, that is called."""

    rate: jax.Array = pm.field(constraint=pm.constraints.simplex)

    def __call__(self, x):
        return self.rate * x


def with_update(key):
    return pm.lora(nn.Linear(2, 2, key=key), "weight", 1, key=key)


def with_tie(key):
    mlp = nn.MLP(2, 2, 3, 1, key=key)
    return pm.tie(mlp, "layers[1].weight", to="layers[0].weight", through=jnp.transpose)


def tied_to_an_update(key):
    mlp = pm.lora(nn.MLP(2, 2, 3, 1, key=key), "layers[0].weight", 1, key=key)
    return pm.tie(mlp, "layers[1].weight", to="layers[0].weight", through=jnp.transpose)


def with_bounds(key):
    return Rate(jax.nn.softmax(jax.random.normal(key, 2)))


@pytest.mark.parametrize("make", [with_update, with_tie, tied_to_an_update, with_bounds])
@pytest.mark.parametrize("several", [nn.Stack, nn.Ensemble, None])
def test_what_several_as_one_are_made_of_is_rebuilt_as_each_has_it(make, several, key):
    """A file did not say that an axis is of layers: what it gave could not be called."""
    pm.register_for_files(Rate, name="test_rebuilding.Rate")
    keys = jax.random.split(key)
    many = pm.filter_vmap(make)(keys) if several is None else several(make, 2, key=key)
    tree, leaves = described(many)

    made = rebuilt(tree, leaves)
    assert jax.tree.structure(made) == jax.tree.structure(many)
    if several is None:
        call = pm.filter_vmap(lambda model, x: model(x), in_axes=(0, None))
        np.testing.assert_array_equal(call(made, ramp(2)), call(many, ramp(2)))
    else:
        np.testing.assert_array_equal(made(ramp(2)), many(ramp(2)))


def test_the_number_of_members_is_a_number(key):
    """Whatever else stands there is the file's fault."""
    tree, leaves = described(nn.Stack(with_update, 2, key=key))
    update = tree["module"][1]["layer"]["module"][1]["weight"]["module"][2]

    assert update["<members>"] == 1
    for wrong in (-1, True, "1", 7):
        update["<members>"] = wrong
        with pytest.raises(FileError, match=r"expected a description that `pm.save` wrote"):
            rebuilt(tree, leaves)


def try_mutations(count, seed, tmp_path):
    """Load `count` files whose description was changed, their checksums being right."""
    rng = random.Random(seed)
    layers = [nn.Linear(2, 2, key=jax.random.key(0)), nn.BatchNorm(2), nn.Dropout(0.5)]
    model, state = pm.make_with_state(lambda: nn.Sequential(layers))()
    tree = (model, state, jax.random.key(0), {"a": 1.5, "b": (jnp.asarray(1), None)})
    tree = (*tree, nn.Stack(lambda key: nn.Linear(2, 2, key=key), 2, key=jax.random.key(0)))
    # Configuration of every kind, and what is computed.
    rare = (Mode.TRAIN, Setting(2), ft.partial(jax.nn.gelu, approximate=True), slice(1), {2}, 1j)
    linear = pm.lora(nn.Linear(2, 2, key=jax.random.key(0)), "weight", 1, key=jax.random.key(1))
    net = nn.MLP(2, 2, 2, 1, key=jax.random.key(2))
    tied = pm.tie(net, "layers[1].weight", to="layers[0].weight", through=jnp.transpose)
    several = nn.Stack(lambda key: nn.MLP(2, 2, 2, 1, key=key), 2, key=jax.random.key(3))
    several = pm.lora(several, "layer.layers[0].weight", 1, key=jax.random.key(4))
    several = pm.tie(
        several, "layer.layers[1].weight", to="layer.layers[0].weight", through=jnp.transpose
    )
    tree = (*tree, Configured(jnp.ones(1), rare), linear, tied, several)
    told = describe_tree(tree, "save")
    arrays = {
        n: jax.random.key_data(x) if "key" in str(x.dtype) else x
        for n, x in told.leaves.items()
        if hasattr(x, "dtype")
    }
    failures = []
    for _ in range(count):
        about = {"version": 1, "tree": mutated(json.loads(json.dumps(told.tree)), rng)}
        path = tmp_path / "file"
        write_container(path, arrays, {"pytreemod.tree": json.dumps(about)}, durable=False)
        for arguments in ((), (tree,)):
            try:
                pm.load(path, *arguments, strict=not arguments or rng.random() < 0.5)
            except FileError:
                pass
            except Exception as error:  # Any other kind is what is looked for.
                failures.append((about["tree"], repr(error)))
    return failures


def test_a_hostile_description_gives_a_clean_error_or_a_tree(tmp_path):
    assert try_mutations(60, 0, tmp_path) == []


@pytest.mark.slow
def test_thousands_of_hostile_descriptions_give_clean_errors(tmp_path):
    assert try_mutations(2000, 1, tmp_path) == []


def test_errors_of_files_are_the_librarys():
    assert issubclass(FileError, PytreemodError)


def test_words_of_a_file_reach_readers_alone():
    """Each kind of node that is written has one; the names of other methods are no kinds."""
    for word in (
        "values",
        "class__",
        "constrain",
        "other_fields",
        "precisions",
        "x",
    ):
        with pytest.raises(FileError, match="expected"):
            rebuilt({word: ["pytreemod.nn.Identity", {}, {}]})


test_refusals = refusals(globals())
