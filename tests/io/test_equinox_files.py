"""Equinox's files: written by either library, read by the other, and invalid files."""

import io
import os
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import pytreemod as pm
from pytreemod import tree_deserialise_leaves, tree_serialise_leaves
from pytreemod.errors import FileError
from tests.helpers.comparing import assert_same
from tests.nn.both_libraries import LAYERS

KEYS = jax.random.split(jax.random.key(0), 4)


def written(tree, lib=pm, **options):
    file = io.BytesIO()
    lib.tree_serialise_leaves(file, tree, **options)
    return file.getvalue()


def read(data, like, lib=pm, **options):
    return lib.tree_deserialise_leaves(io.BytesIO(data), like, **options)


def check_exchange(theirs, ours):
    """Each library reads the other's file, and writes the same bytes again."""
    their_file, our_file = written(theirs, eqx), written(ours)

    assert written(read(their_file, ours)) == their_file
    assert written(read(our_file, theirs, eqx), eqx) == our_file


@pytest.mark.sampled
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_exchanged(name):
    """With its flags, and with its State, beside it and alone."""
    make, *_ = LAYERS[name]
    theirs = eqx.nn.make_with_state(make)(eqx.nn, KEYS[0])
    ours = pm.make_with_state(make)(pm.nn, KEYS[1])

    check_exchange(theirs, ours)
    check_exchange(theirs[1], ours[1])
    check_exchange(theirs[0], ours[0])


def network(lib, key):
    nn, (one, two, three) = lib.nn, jax.random.split(key, 3)
    norms = (nn.BatchNorm(2, "batch", momentum=0.5, mode=mode) for mode in ("ema", "batch"))
    pool, spectral = nn.MaxPool2d(2), nn.SpectralNorm(nn.Linear(50, 3, key=two), "weight", key=two)
    layers = [nn.Conv2d(1, 2, 3, key=one), *norms, pool, nn.Dropout(0.3), nn.Lambda(jnp.ravel)]
    return nn.Sequential([*layers, spectral, nn.MLP(3, 2, 4, 1, key=three)])


@eqx.filter_jit
def applied(model, state, x):
    """The output of the network for a batch, and its State."""

    def one(x, state, key):
        return model(x, state, key=key)

    mapped = jax.vmap(one, in_axes=(0, None, 0), out_axes=(0, None), axis_name="batch")
    return mapped(x, state, KEYS)


@pytest.mark.slow
@pytest.mark.parametrize("libraries", [(eqx, pm), (pm, eqx)], ids=["from Equinox", "to Equinox"])
def test_a_trained_network_goes_on_with_the_same_numbers(libraries):
    """Its outputs in inference and in training, and the statistics afterwards."""
    pairs = [lib.nn.make_with_state(network)(lib, KEYS[i]) for i, lib in enumerate(libraries)]
    x = jnp.sin(jnp.arange(4 * 8 * 8.0)).reshape(4, 1, 8, 8)
    pairs[0] = pairs[0][0], applied(*pairs[0], x)[1]
    pairs[1] = read(written(pairs[0], libraries[0]), pairs[1], libraries[1])

    found = []
    # The count of Equinox is not a weak integer after reading, and is an exponent.
    with jax.numpy_dtype_promotion("standard"):
        for lib, (model, state) in zip(libraries, pairs, strict=True):
            _, state = applied(model, state, x + 1)
            found.append(applied(lib.nn.inference_mode(model), state, x)[0])
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)


def model_of_user(lib, value):
    """A Module as users write them, with either library."""

    class Inner(lib.Module):
        weight: Any
        gain: float = 2.0
        flag: bool = True
        phase: complex = 1j
        name: str = "inner"
        act: Any = jnp.tanh
        size: int = lib.field(static=True, default=4)
        nothing: Any = None

    class Outer(lib.Module):
        state_index: Any  # as BatchNorm has
        parts: Any

    parts = {"b": [Inner(value), lib.nn.Dropout(0.2)], "a": (np.ones((2, 2), order="F"), 3)}
    return lib.nn.make_with_state(lambda: Outer(lib.nn.StateIndex((value, value)), parts))()


def test_modules_of_the_user_are_exchanged():
    """Numbers are leaves in both, functions and strings in neither; fields are in order."""
    theirs, ours = model_of_user(eqx, jnp.ones(2)), model_of_user(pm, jnp.zeros(2))

    check_exchange(theirs, ours)
    assert_same(read(written(theirs, eqx), ours)[0].parts["b"][0].weight, jnp.ones(2))


@pytest.mark.parametrize("make", [optax.adam, optax.inject_hyperparams(optax.adam)])
def test_states_of_optax_are_exchanged(make):
    """They have no flags, because Equinox's users pass only arrays to a rule."""

    def pair(lib):
        model = lib.nn.Sequential([lib.nn.Linear(3, 2, key=KEYS[0]), lib.nn.Dropout(0.5)])
        rule = optax.chain(optax.clip(1.0), make(1e-3))
        return model, rule.init(lib.filter(model, lib.is_inexact_array))

    check_exchange(pair(eqx), pair(pm))


def test_members_of_an_ensemble_are_exchanged():
    """Layers that `filter_vmap` made as one, with a State that has a value for each."""

    def make(lib):
        def one(key):
            norm, linear = lib.nn.BatchNorm(2, "b", mode="batch"), lib.nn.Linear(2, 1, key=key)
            return lib.nn.Sequential([norm, linear, lib.nn.Dropout(0.2)])

        return lib.filter_vmap(lib.nn.make_with_state(one))(KEYS)

    check_exchange(make(eqx), make(pm))


def test_flags_are_written_and_skipped():
    """They are configuration here, and so those of `like`, which may be abstract."""
    layers = [[lib.nn.Dropout(0.3, inference=True), jnp.ones(2)] for lib in (eqx, pm)]
    data = written(layers[0], eqx)
    assert written(layers[1]) == data
    like = jax.eval_shape(lambda: [pm.nn.Dropout(0.5), jnp.zeros(2)])
    assert_same(read(data, like), [pm.nn.Dropout(0.5), jnp.ones(2)])


LEAVES = {"bool": True, "int": 3, "complex": 1j, "str": "a", "None": None, "function": jnp.tanh}
LEAVES |= {
    "NumPy float": np.float32(1.5),
    "Fortran's order": np.asfortranarray(np.ones((2, 3))),
    "fields": np.zeros(2, [("a", "<f4"), ("b", "<i2")]),
    "array": jnp.ones((2, 3)),
    "bfloat16": jnp.asarray(1.5, jnp.bfloat16),
    "NumPy bfloat16": np.ones(2, ml_dtypes.bfloat16),
}


@pytest.mark.parametrize("leaf", LEAVES.values(), ids=LEAVES)
def test_a_leaf_is_written_as_equinox_does(leaf):
    """The same bytes, and the same value is read; other leaves are not written."""
    data = written([leaf, 1.0])

    assert data == written([leaf, 1.0], eqx)
    assert_same(read(data, [leaf, 0.0]), [leaf, 1.0])


@pytest.mark.parametrize(
    ("value", "like"),
    [(2.5, 0), (1, True), (True, 1), (0.1, np.float32(0)), ([0.5], 0.0), ("x", 0)]
    + [([0.5], like) for like in (np.ones(1, "f4"), jnp.ones(1, int), np.ones(2), jnp.ones(()))],
    ids=["rounded", "int", "bool", "narrow", "array", "text", "dtype", "kind", "size", "axes"],
)
def test_what_does_not_fit_is_told_with_its_path(value, like):
    """A RuntimeError, as Equinox's is; which makes 2 of 2.5, and True of 7."""
    with pytest.raises(FileError, match=r"at \[0\]") as caught:
        read(written([np.asarray(value)]), [like])
    assert isinstance(caught.value, RuntimeError)


def skip_floats(file, leaf):
    if not isinstance(leaf, float):
        pm.default_serialise_filter_spec(file, leaf)


@pytest.mark.parametrize("spec", [skip_floats, [skip_floats, pm.default_serialise_filter_spec]])
def test_a_filter_spec_leaves_leaves_out(spec):
    """One function for all leaves, and a tree of them: the files are Equinox's."""
    theirs, ours = (network(lib, KEYS[0]) for lib in (eqx, pm))
    ours = read(written(theirs, eqx), ours)
    expected = written([theirs, 1.0], eqx, filter_spec=spec)
    assert written([ours, 1.0], filter_spec=spec) == expected
    reading = (pm.default_deserialise_filter_spec, lambda file, leaf: leaf)
    assert read(written((1.0, 2.0)), (0.0, 5.0), filter_spec=reading) == (1.0, 5.0)


@pytest.mark.parametrize("name", ["model", "model.v2", "a.d/b"])
def test_an_ending_is_added_to_a_name_without(name, tmp_path):
    """As Equinox does: each library finds the other's file, and replaces it."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    tree_serialise_leaves(str(path), {"x": 1.0})
    assert eqx.tree_deserialise_leaves(path, {"x": 0.0}) == {"x": 1.0}
    eqx.tree_serialise_leaves(path, {"x": 2.0})
    assert tree_deserialise_leaves(path, {"x": 0.0}) == {"x": 2.0}
    assert len(os.listdir(path.parent)) == 1


def test_several_trees_in_an_open_file(tmp_path):
    """One after another, with text before."""
    with open(tmp_path / "both", "wb") as file:
        file.write(b"{}\n")
        tree_serialise_leaves(file, [1.0, jnp.ones(2)])
        eqx.tree_serialise_leaves(file, (3,))
    with open(tmp_path / "both", "rb") as file:
        assert file.readline() == b"{}\n"
        assert_same(tree_deserialise_leaves(file, [0.0, jnp.zeros(2)]), [1.0, jnp.ones(2)])
        assert tree_deserialise_leaves(file, (0,)) == (3,)


@pytest.mark.parametrize(
    "leaf",
    [KEYS[0], jax.eval_shape(lambda: jnp.ones(2)), np.array([None]), 2**70],
    ids=["key", "abstract", "objects", "large"],
)
def test_a_leaf_that_the_format_has_not_leaves_the_old_file(leaf, tmp_path):
    """An error in the middle changes nothing, and leaves nothing beside the file."""
    path = tmp_path / "model.eqx"
    tree_serialise_leaves(path, [1.0])
    with pytest.raises(FileError, match=r"Equinox's files have no"):
        tree_serialise_leaves(path, [2.0, leaf])

    assert tree_deserialise_leaves(path, [0.0]) == [1.0]
    assert os.listdir(tmp_path) == ["model.eqx"]


DATA = written([jnp.arange(6.0).reshape(2, 3), 0.5, np.arange(3)])
ZIP = io.BytesIO()
np.savez(ZIP, np.zeros((2, 3)))
DAMAGED = {"empty": (b"", 0), "header": (DATA[:60], 0), "array": (DATA[:140], 0)}
DAMAGED |= {"next": (DATA[:152], 1), "end": (DATA[:-3], 2), "zip": (ZIP.getvalue(), 0)}


@pytest.mark.parametrize(("data", "number"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_told_with_the_path(data, number, tmp_path):
    (tmp_path / "model.eqx").write_bytes(data)
    with pytest.raises(FileError, match=rf"at \[{number}\]"):
        tree_deserialise_leaves(tmp_path / "model", [jnp.zeros((2, 3)), 0.0, np.zeros(3, int)])


def test_a_file_with_more_leaves_is_of_another_tree(tmp_path):
    """With a function for each leaf, and in an open file, there may be more."""
    path, like = tmp_path / "two.eqx", [jnp.ones(2)]
    tree_serialise_leaves(path, [jnp.ones(2), jnp.ones(3)])
    with pytest.raises(FileError, match="more leaves than like"):
        tree_deserialise_leaves(path, like)
    spec = lambda file, leaf: pm.default_deserialise_filter_spec(file, leaf)  # noqa: E731
    assert_same(tree_deserialise_leaves(path, like, filter_spec=spec), like)
    with open(path, "rb") as file:
        assert_same(tree_deserialise_leaves(file, like), like)
