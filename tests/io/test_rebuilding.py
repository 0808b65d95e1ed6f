"""Trees from their description alone: of the library's own classes, with their checks."""

import contextlib
import copy
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


class Own(pm.Module):
    """A class that the library does not know."""

    x: jax.Array


class Pair(NamedTuple):
    """A named tuple of a user's."""

    a: jax.Array


@pytest.mark.parametrize("tree", [Own(ramp(1)), [Pair(ramp(1))], nn.Lambda(lambda x: x)], ids=str)
def test_classes_and_functions_of_a_user_need_like(tree, tmp_path):
    """No file makes anything be imported or looked up; with `like` all of it is loaded."""
    pm.save(tmp_path / "file", tree)
    with pytest.raises(FileError, match=r"Own|Pair|lambda"):
        pm.load(tmp_path / "file")

    assert pm.load(tmp_path / "file", tree) == tree


@pytest.mark.parametrize(
    "tree",
    [
        {"module": ["os.system", {}, {"command": "true"}]},
        {"module": ["jax.nn.relu", {}, {}]},
        {"module": ["pytreemod.nn.Identity", {"x": None}, {}]},
        {"module": ["pytreemod.nn.Linear", {}, {}]},
        {"struct": ["pytreemod.nn.Linear", {}, {}]},
        {"state": [["a", "pytreemod.nn.Linear", {"path": ["a", ["a"]]}, None]]},
        {"leaf": "x", "value": {"function": "os.system"}},
        {"leaf": "x", "value": {"enum": ["bool", "real"]}},
        {"dict": [[{"list": []}, None]]},
        {"init__": []},
    ],
    ids=str,
)
def test_nothing_else_is_made(tree):
    """Neither what the library does not know, nor what it knows as something else."""
    with pytest.raises(FileError, match="load"):
        rebuilt(tree)


def test_the_checks_of_the_class_run():
    """A layer from a file is one that its constructor could have made."""
    tree, leaves = described(nn.Dropout(0.5))
    tree["module"][2]["p"] = 2.0
    with pytest.raises(FileError, match="Dropout"):
        rebuilt(tree, leaves)


def test_precisions_are_of_methods_that_are_there():
    """Those of a misspelled method would be ignored."""
    tree, leaves = described(pm.with_precision(nn.Dropout(0.5), "float32"))
    tree["module"][2]["<precision>"] = {"list": [{"list": ["__cell__", None]}]}
    with pytest.raises(FileError, match="__cell__"):
        rebuilt(tree, leaves)


def test_a_state_has_the_ranks_that_its_values_were_made_with():
    """Of members, of one, and of streams, which have none; a file without ranks is of one."""
    layers = [nn.BatchNorm(2), nn.Dropout(0.5)]
    _, state = pm.make_with_state(lambda: nn.Sequential(layers))()
    state = state.seed(jax.random.key(0))
    many = jax.tree.map(lambda x: jnp.stack([x, x]), state)
    for each in (state, many, copy.copy(state).split(3)):
        tree, leaves = described(each)
        assert jax.tree.structure(rebuilt(tree, leaves)) == jax.tree.structure(each)


MALFORMED = {
    "an array that is not there": {"leaf": "b", "is": "jax"},
    "a name that is none": {"leaf": 3, "value": 1},
    "two of one name": {"list": [{"leaf": "a", "value": 1}, {"leaf": "a", "value": 2}]},
    "a State without names": {"state": [[1]]},
    "a class that is none": {"module": [3, {}, {}]},
    "another node": {"eval": ["Thing", []]},
    "no list": {"list": 3},
    "no node": 3,
}


@pytest.mark.parametrize("tree", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_description_is_told(tree, tmp_path):
    """With `like` as without: nothing of it is believed."""
    path = write_described(tmp_path / "file", tree, {"a": np.ones(1, np.float32)})
    for arguments in ((), ({"a": ramp(1)},)):
        with pytest.raises(FileError, match="file"):
            pm.load(path, *arguments)


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


def with_update(key):
    return pm.lora(nn.Linear(2, 2, key=key), "weight", 1, key=key)


def with_tie(key):
    mlp = nn.MLP(2, 2, 3, 1, key=key)
    return pm.tie(mlp, "layers[1].weight", to="layers[0].weight", through=jnp.transpose)


def tied_to_an_update(key):
    mlp = pm.lora(nn.MLP(2, 2, 3, 1, key=key), "layers[0].weight", 1, key=key)
    return pm.tie(mlp, "layers[1].weight", to="layers[0].weight", through=jnp.transpose)


@pytest.mark.parametrize("make", [with_update, with_tie, tied_to_an_update])
@pytest.mark.parametrize("several", [nn.Stack, nn.Ensemble, None])
def test_what_several_as_one_are_made_of_is_rebuilt_as_each_has_it(make, several, key):
    """A file had no layer axes: its result could not be called."""
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
        with pytest.raises(FileError, match="file"):
            rebuilt(tree, leaves)


def test_an_instance_with_a_computed_leaf_is_of_the_class_that_was_written(key, tmp_path):
    """Its class is a variant, which has no name for a file."""
    model = pm.nn.Linear(2, 2, key=key)
    computed = model.replace(weight=pm.computed(jnp.negative, model.weight))
    pm.save(tmp_path / "file", computed)

    assert type(computed) is not type(model)
    assert_same(pm.load(tmp_path / "file"), computed)


def try_mutations(count, seed, tmp_path):
    """Load `count` files whose description was changed, their checksums being right."""
    rng = random.Random(seed)
    layers = [nn.Linear(2, 2, key=jax.random.key(0)), nn.BatchNorm(2), nn.Dropout(0.5)]
    model, state = pm.make_with_state(lambda: nn.Sequential(layers))()
    tree = (model, state, jax.random.key(0), {"a": 1.5, "b": (jnp.asarray(1), None)})
    tree = (*tree, nn.Stack(with_update, 2, key=jax.random.key(0)), with_tie(jax.random.key(2)))
    tree = (*tree, nn.Stack(tied_to_an_update, 2, key=jax.random.key(3)))
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


@pytest.mark.parametrize(
    ("count", "seed"), [(60, 0), pytest.param(600, 1, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_a_hostile_description_gives_a_clean_error_or_a_tree(count, seed, tmp_path):
    """Whatever is exchanged in it; two thousand passed once."""
    assert try_mutations(count, seed, tmp_path) == []
