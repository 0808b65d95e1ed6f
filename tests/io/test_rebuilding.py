"""Trees from their description alone: only registered classes, complete, and with their checks."""

import contextlib
import copy
import dataclasses
import enum
import functools as ft
import random
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import FileError
from tests.goldens import refusals
from tests.helpers.comparing import assert_same
from tests.helpers.trees import ramp
from tests.io.files import tree_in, write_described


def rebuilt(tree, leaves=None):
    """The result of loading a file with this description."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        return pm.load(write_described(Path("file"), tree, leaves))


def described(tree):
    """The content of the file of a tree: its description, and its arrays."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        pm.save(path, tree)
        arrays = safetensors.numpy.load_file(path)
        return tree_in(path), {name: np.array(array) for name, array in arrays.items()}


@pm.register_for_files(name="test_rebuilding.Range")
class Range(pm.Module):
    """A class with a check, a default, and custom configuration."""

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
    # As configuration, if it was configuration.
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
    """By their order alone, values would be swapped."""
    pm.register_for_files(Pair, name="test_rebuilding.Pair")

    def described_as(fields):
        return {"named": ["test_rebuilding.Pair", [[f, {"leaf": f, "value": 1}] for f in fields]]}

    assert rebuilt(described_as("ab")) == Pair(1, 1)
    with pytest.raises(FileError, match=r"the fields of Pair: a, b, got "):
        rebuilt(described_as(fields))


def as_written(value):
    """Lists as configuration has them."""
    return {"list": [as_written(item) for item in value]} if isinstance(value, list) else value


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
    tree["module"][2]["<precision>"] = as_written(given)

    with pytest.raises(FileError, match=text):
        rebuilt(tree, leaves)


def test_an_abstract_class_is_not_made():
    class Base(pm.Module, is_abstract=True):
        pass

    pm.register_for_files(Base, name="test_rebuilding.Base")
    with pytest.raises(FileError, match="Cannot instantiate abstract Module"):
        rebuilt({"module": ["test_rebuilding.Base", {}, {}]})


def test_a_state_has_the_ranks_that_its_values_were_made_with():
    """Of members, of one, and of streams, which have none; a file without ranks is of one."""
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
    with pytest.raises(FileError, match=r"load\(.*\): expected") as caught:
        rebuilt(tree)

    text = str(caught.value)
    assert f"\n  at {place}\n" in text
    assert hint in text
    assert text.endswith("pm.load(path, like)")
    assert "register_for_files(<" not in text


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
    path = write_described(tmp_path / "file", tree, {"a": np.ones(1, np.float32)})
    for arguments in ((), ({"a": ramp(1)},)):
        with pytest.raises(FileError, match=r"a description that `pm\.save` wrote"):
            pm.load(path, *arguments)


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
    """A file had no layer axes: its result could not be called."""
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
    """Any other value there is an error of the file."""
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
    # Configuration of every kind, and computed leaves.
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
    told, arrays = described(tree)
    failures = []
    for _ in range(count):
        about = mutated(told, rng)
        path = write_described(tmp_path / "file", about, arrays)
        for arguments in ((), (tree,)):
            try:
                pm.load(path, *arguments, strict=not arguments or rng.random() < 0.5)
            except FileError:
                pass
            except Exception as error:  # The test looks for errors of other kinds.
                failures.append((about, repr(error)))
    return failures


def test_a_hostile_description_gives_a_clean_error_or_a_tree(tmp_path):
    assert try_mutations(60, 0, tmp_path) == []


@pytest.mark.slow
def test_hundreds_of_hostile_descriptions_give_clean_errors(tmp_path):
    """Two thousand passed once."""
    assert try_mutations(600, 1, tmp_path) == []


def test_words_of_a_file_reach_readers_alone():
    """Each kind of node that is written has a reader; the names of other methods are not kinds."""
    for word in ("values", "class__", "constrain", "other_fields", "precisions", "x"):
        with pytest.raises(FileError, match="expected"):
            rebuilt({word: ["pytreemod.nn.Identity", {}, {}]})


test_refusals = refusals(globals())
