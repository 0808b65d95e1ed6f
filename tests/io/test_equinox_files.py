"""Equinox's files: written by either library, read by the other, and invalid files."""

import io
import os
import pathlib
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pytreemod as pm
from pytreemod import (
    default_deserialise_filter_spec,
    default_serialise_filter_spec,
    tree_deserialise_leaves,
    tree_serialise_leaves,
)
from pytreemod.errors import (
    EquinoxFileError,
)
from tests.helpers.comparing import assert_same
from tests.nn.both_libraries import LAYERS, Both

KEYS = jax.random.split(jax.random.key(0), 4)
# One pool of each kind: the others are the same classes.
POOLS = {"MaxPool1d", "AvgPool2d", "AdaptiveMaxPool3d"}
EXCHANGED = [row for row in LAYERS if "Pool" not in row.name or row.name in POOLS]
every_layer = pytest.mark.parametrize("row", EXCHANGED, ids=[row.name for row in EXCHANGED])


def written(tree, lib=None, **options):
    """The content of the file of a tree."""
    file = io.BytesIO()
    (lib.tree_serialise_leaves if lib else tree_serialise_leaves)(file, tree, **options)
    return file.getvalue()


def read(data, like, lib=None, **options):
    """A tree from the content of a file."""
    function = lib.tree_deserialise_leaves if lib else tree_deserialise_leaves
    return function(io.BytesIO(data), like, **options)


def check_exchange(theirs, ours):
    """Each library reads the other's file, and writes the same bytes again."""
    their_file, our_file = written(theirs, eqx), written(ours)

    assert written(read(their_file, ours)) == their_file
    assert written(read(our_file, theirs, eqx), eqx) == our_file


# ---- exchange


@pytest.mark.slow
@every_layer
def test_a_layer_is_exchanged(row: Both):
    """With its values, with its flags, and with its State, beside it and alone."""
    check_exchange(row.make(eqx, KEYS[0]), row.make(pm, KEYS[1]))
    theirs = eqx.nn.make_with_state(lambda: row.make(eqx, KEYS[0]))()
    ours = pm.make_with_state(lambda: row.make(pm, KEYS[1]))()
    check_exchange(theirs, ours)
    check_exchange(theirs[1], ours[1])
    check_exchange(theirs[0], ours[0])


def network(lib, key):
    """A convolutional network with State, keys and flags."""
    one, two, three = jax.random.split(key, 3)
    return lib.nn.Sequential(
        [
            lib.nn.Conv2d(1, 2, 3, key=one),
            lib.nn.BatchNorm(2, "batch", momentum=0.5, mode="ema"),
            lib.nn.Lambda(jax.nn.relu),
            lib.nn.MaxPool2d(2),
            lib.nn.BatchNorm(2, "batch", momentum=0.5, mode="batch"),
            lib.nn.Dropout(0.3),
            lib.nn.AvgPool2d(2),
            lib.nn.Lambda(jnp.ravel),
            lib.nn.SpectralNorm(lib.nn.Linear(8, 3, key=two), "weight", key=two),
            lib.nn.MLP(3, 2, 4, 1, key=three),
        ]
    )


def made(lib, key):
    """The network and its State."""
    return lib.nn.make_with_state(network)(lib, key)


@eqx.filter_jit
def applied(model, state, x, keys):
    """The output of the network for a batch."""

    def one(x, state, key):
        return model(x, state, key=key)

    return jax.vmap(one, in_axes=(0, None, 0), out_axes=(0, None), axis_name="batch")(
        x, state, keys
    )


X = jnp.sin(jnp.arange(4 * 6 * 6.0)).reshape(4, 1, 6, 6)


def trained(lib, key, steps=2):
    """The network after some batches."""
    model, state = made(lib, key)
    for step in range(steps):
        _, state = applied(model, state, X + step, KEYS)
    return model, state


def inferred(lib, model, state):
    """The output of the network in inference mode."""
    # Equinox's count is not a weak integer after reading, and is an exponent.
    with jax.numpy_dtype_promotion("standard"):
        return applied(lib.nn.inference_mode(model), state, X, KEYS)[0]


@pytest.mark.slow
def test_a_trained_network_of_equinox_infers_the_same_here():
    """Whose running statistics are corrected for their start when they are read."""
    theirs = trained(eqx, KEYS[0])
    ours = read(written(theirs, eqx), made(pm, KEYS[1]))

    np.testing.assert_allclose(inferred(pm, *ours), inferred(eqx, *theirs), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_trained_network_infers_the_same_in_equinox():
    """And goes on from its statistics, which it does not take for those of no batch yet."""
    ours = trained(pm, KEYS[0])
    model, state = read(written(ours), made(eqx, KEYS[1]), eqx)

    np.testing.assert_allclose(
        inferred(eqx, model, state), inferred(pm, *ours), rtol=1e-5, atol=1e-6
    )
    before = inferred(eqx, model, state)
    with jax.numpy_dtype_promotion("standard"):
        _, state = applied(model, state, X, KEYS)
    assert jnp.abs(inferred(eqx, model, state) - before).max() < 10 * jnp.abs(before).max()
    check_exchange((model, read(written(ours[1]), state, eqx)), ours)


class OfUser:
    """Modules as users write them, with either library."""

    def __init__(self, lib: Any):
        class Inner(lib.Module):
            weight: jax.Array
            gain: float = 2.0
            flag: bool = True
            steps: int = 3
            phase: complex = 1j
            name: str = "inner"
            act: Any = jnp.tanh
            size: int = lib.field(static=True, default=4)
            numbers: Any = lib.field(default_factory=lambda: np.arange(3))
            scalar: Any = np.float32(0.5)
            half: Any = lib.field(default_factory=lambda: jnp.ones(2, jnp.bfloat16))
            nothing: Any = None

        class Outer(Inner):
            state_index: Any = None
            parts: Any = None

            def __init__(self, value):
                self.weight = value
                self.gain, self.flag, self.steps, self.phase = 0.5, False, 7, 2j
                self.name, self.act, self.size = "outer", jnp.sin, 5
                self.numbers, self.scalar = np.ones((2, 2), order="F"), np.float64(1)
                self.half, self.nothing = jnp.zeros(3, jnp.bfloat16), None
                # Its field has the name of BatchNorm's, but it is not a BatchNorm.
                self.state_index = lib.nn.StateIndex((value, value))
                self.parts = {"b": [Inner(value), lib.nn.Dropout(0.2)], "a": (value, 3)}

        self.make = lambda value: lib.nn.make_with_state(Outer)(value)


def test_modules_of_the_user_are_exchanged():
    """Numbers are leaves in both, functions and strings in neither; fields are in order."""
    theirs, ours = OfUser(eqx).make(jnp.ones(2)), OfUser(pm).make(jnp.zeros(2))

    check_exchange(theirs, ours)
    model, _ = read(written(theirs, eqx), ours)
    assert model.parts["b"][1] == pm.nn.Dropout(0.2)
    assert (model.gain, model.flag, model.steps, model.phase) == (0.5, False, 7, 2j)


@pytest.mark.parametrize(
    "opt",
    [
        optax.chain(optax.clip(1.0), optax.masked(optax.adam(1e-3), True), optax.ema(0.9)),
        optax.inject_hyperparams(optax.adam)(1e-3),
    ],
    ids=["chain", "hyperparameters"],
)
def test_states_of_optax_are_exchanged(opt):
    """Equinox's users filter out their non-array leaves."""
    theirs, their_state = made(eqx, KEYS[0])
    ours, our_state = made(pm, KEYS[1])
    opts = [opt.init(eqx.filter(theirs, eqx.is_inexact_array)), opt.init(pm.trainable(ours)[0])]

    check_exchange((theirs, opts[0], their_state), (ours, opts[1], our_state))
    check_exchange(opts[0], opts[1])


def test_members_of_an_ensemble_are_exchanged():
    """Layers that `filter_vmap` made as one, with a State that has a value for each."""

    def make(lib, key):
        def one(key):
            # Whose statistics need no correction.
            mode = "batch" if lib is eqx else "torch"
            layers = [lib.nn.BatchNorm(2, "b", mode=mode), lib.nn.Linear(2, 1, key=key)]
            return lib.nn.Sequential([*layers, lib.nn.Dropout(0.2)])

        return lib.filter_vmap(lib.nn.make_with_state(one))(KEYS)

    theirs, ours = make(eqx, KEYS[0]), make(pm, KEYS[1])
    check_exchange(theirs, ours)
    # Each member has seen another number of batches.
    counted = eqx.tree_at(
        lambda state: state.get(theirs[0].layers[0].batch_counter), theirs[1], jnp.arange(4)
    )
    data = written((theirs[0], counted), eqx)
    _, var = read(data, ours)[1].get(ours[0].layers[0].state_index)
    scale = [1, *(1 - 0.99**n for n in (1, 2, 3))]
    np.testing.assert_allclose(var, np.outer(1 / np.asarray(scale), np.ones(2)), rtol=1e-5)


def test_configuration_comes_from_the_file():
    """As Equinox restores its leaves; a layer refuses the same values as elsewhere."""
    data = written(eqx.nn.Dropout(0.3, inference=True), eqx)
    assert read(data, pm.nn.Dropout(0.5)) == pm.nn.Dropout(0.3, inference=True)
    net = pm.nn.Sequential([pm.nn.Dropout(0.5), pm.nn.Dropout(0.2)])
    other = pm.nn.inference_mode(net.replace(layers=(pm.nn.Dropout(0.1), pm.nn.Dropout(0.4))))
    assert read(written(other), net) == other


# ---- leaves


LEAVES = [
    True,
    3,
    0.1,
    1j,
    np.float32(1.5),
    np.int8(-3),
    np.asfortranarray(np.ones((2, 3))),
    np.array(["text"]),
    np.zeros(2, [("a", "<f4"), ("b", "<i2")]),
    jnp.ones((2, 3)),
    jnp.asarray(1.0),
    jnp.asarray(1.5, jnp.bfloat16),
    jnp.ones(2, jnp.complex64),
    jnp.ones(2, bool),
    "a string",
    None,
    jnp.tanh,
    object(),
]


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: repr(leaf).partition(" at 0x")[0][:30])
def test_a_leaf_is_written_as_equinox_does(leaf):
    """The same bytes, and the same value is read; other leaves are not written."""
    data = written([leaf, 1.0])

    assert data == written([leaf, 1.0], eqx)
    again, _ = read(data, [leaf, 0.0])
    assert type(again) is type(leaf)
    if hasattr(leaf, "dtype"):
        assert (again.shape, again.dtype) == (leaf.shape, leaf.dtype)
        np.testing.assert_array_equal(np.asarray(again), np.asarray(leaf))
    else:
        assert again == leaf


def test_numpy_arrays_and_scalars_in_bfloat16_come_back():
    """Equinox writes them, and cannot read the arrays."""
    leaves = [np.ones(2, ml_dtypes.bfloat16), ml_dtypes.bfloat16(1.5)]
    data = written(leaves)

    assert data == written(leaves, eqx)
    again = read(data, leaves)
    assert again[0].dtype == again[1].dtype == ml_dtypes.bfloat16
    assert (again[0] == 1).all()
    assert again[1] == 1.5


def test_arrays_are_read_into_memory_of_their_own():
    """The file may change afterwards, and an array of NumPy may be written to."""
    data = bytearray(written([np.arange(3.0), jnp.arange(3.0)]))
    one, two = read(data, [np.zeros(3), jnp.zeros(3)])
    one[0] = 7
    data[-24:] = bytes(24)

    assert list(one) == [7, 1, 2]
    assert list(two) == [0, 1, 2]


@pytest.mark.parametrize(
    ("leaf", "got"),
    [
        (jax.random.key(0), r"key<fry>\[\]"),
        (jnp.ones(2, jnp.float8_e4m3fn), r"f8_e4m3fn\[2\]"),
        (jnp.ones(2, jnp.int4), r"i4\[2\]"),
        (np.ones(2, ml_dtypes.float8_e5m2), r"f8_e5m2\[2\]"),
        (2**70, "1180591620717411303424"),
    ],
    ids=["key", "float8", "int4", "float8 of NumPy", "a large int"],
)
def test_what_the_format_has_nothing_for_is_refused(leaf, got):
    """Equinox fails for keys, and writes the others so that it cannot read them."""
    for work in (written, lambda tree: read(written([1.0, 1.0]), tree)):
        if work is not written and isinstance(leaf, int):
            continue
        with pytest.raises(EquinoxFileError, match=rf"\[1\].*{got}"):
            work([1.0, leaf])


def values_gone():
    """A donated array."""
    gone = jnp.ones(2)
    gone.delete()
    return gone


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (values_gone, "donated"),
        (lambda: jax.ShapeDtypeStruct((2,), jnp.float32), "abstract"),
        (lambda: jax.random.key(0), "key"),
    ],
    ids=["donated", "abstract", "key"],
)
def test_a_refused_leaf_leaves_the_old_file(make, word, tmp_path):
    """An error in the middle leaves the old file, and nothing beside it."""
    path = tmp_path / "model.eqx"
    tree_serialise_leaves(path, [1.0])
    with pytest.raises(EquinoxFileError, match=word):
        tree_serialise_leaves(path, [2.0, make()])

    assert tree_deserialise_leaves(path, [0.0]) == [1.0]
    assert os.listdir(tmp_path) == ["model.eqx"]


# ---- filter specs


def test_a_filter_spec_leaves_leaves_out():
    """One function for all, and a prefix tree of them: the files are Equinox's."""

    def skip(f, x):
        if not isinstance(x, float):
            default_serialise_filter_spec(f, x)

    theirs, ours = network(eqx, KEYS[0]), network(pm, KEYS[0])
    ours = read(written(theirs, eqx), ours)
    nothing = lambda f, x: None  # noqa: E731
    for spec in (skip, nothing):
        assert written([ours, 1.0], filter_spec=spec) == written(
            [theirs, 1.0], eqx, filter_spec=spec
        )
    prefix = [skip, default_serialise_filter_spec]
    assert written([ours, 1.0], filter_spec=prefix) == written(
        [theirs, 1.0], eqx, filter_spec=prefix
    )


@pytest.mark.parametrize(
    "where", [lambda m: m.layers[0], lambda m: m.layers[5], lambda m: m.layers[8]]
)
def test_a_filter_spec_of_the_structure_of_the_model(where):
    """Made by a tree map, with one part replaced: flags are treated like their siblings."""
    theirs = network(eqx, KEYS[0])
    ours = read(written(theirs, eqx), network(pm, KEYS[1]))
    files = []
    for lib, model in ((eqx, theirs), (pm, ours)):
        spec = jax.tree.map(lambda _: eqx.default_serialise_filter_spec, model)
        spec = lib.tree_at(where, spec, replace=lambda f, x: None)
        files.append(written(model, lib if lib is eqx else None, filter_spec=spec))

    assert files[0] == files[1]
    assert len(files[0]) < len(written(theirs, eqx))


# ---- files


@pytest.mark.parametrize(
    ("name", "kind"), [("model", str), ("model.v2", str), ("folder.d/model", pathlib.Path)]
)
def test_an_ending_is_added_to_a_name_without(name, kind, tmp_path):
    """As Equinox does: each library finds the other's file."""
    path = kind(tmp_path / name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    tree_serialise_leaves(path, {"x": 1.0})
    here = sorted(os.listdir(os.path.dirname(path)))
    assert eqx.tree_deserialise_leaves(path, {"x": 0.0}) == {"x": 1.0}
    eqx.tree_serialise_leaves(path, {"x": 2.0})

    assert here == sorted(os.listdir(os.path.dirname(path)))
    assert tree_deserialise_leaves(path, {"x": 0.0}) == {"x": 2.0}


def test_several_trees_in_an_open_file(tmp_path):
    """Content before and after is unchanged: text, and another tree."""
    with open(tmp_path / "both", "wb") as file:
        file.write(b"{}\n")
        tree_serialise_leaves(file, [1.0, jnp.ones(2)])
        eqx.tree_serialise_leaves(file, (3,))
    with open(tmp_path / "both", "rb") as file:
        assert file.readline() == b"{}\n"
        assert_same(tree_deserialise_leaves(file, [0.0, jnp.zeros(2)]), [1.0, jnp.ones(2)])
        assert tree_deserialise_leaves(file, (0,)) == (3,)


@pytest.mark.parametrize(
    ("like", "text"),
    [
        ((jnp.ones(3), 3.0), r"\[0\]: f32\[3\] in like, f32\[2\] in the file"),
        ((jnp.ones(2, int), 3.0), r"\[0\]: i32\[2\] in like, f32\[2\] in the file"),
        ((np.ones(2), 3.0), r"\[0\]: f64\[2\] in like, f32\[2\] in the file"),
        ((jnp.ones((2, 1)), 3.0), r"\[0\]: f32\[2,1\] in like"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_path(like, text):
    """A RuntimeError, as Equinox's is."""
    with pytest.raises(EquinoxFileError, match=text) as caught:
        read(written((jnp.ones(2), 3.0)), like)
    assert isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize(
    ("value", "like", "expected"),
    [
        (3, 0.0, 3.0),
        (2, 0j, 2 + 0j),
        (np.float32(0.5), 0.0, 0.5),
        (2.5, 0, None),
        (1, True, None),
        (True, 1, None),
        (np.float64(0.1), np.float32(0), None),
        (np.ones(1), 0.0, None),
        ("x", 0.0, None),
    ],
    ids=repr,
)
def test_a_number_takes_the_place_of_one_that_can_hold_it(value, like, expected):
    """Equinox makes 2 of 2.5, and True of 7: here the file is of another tree."""
    data = written(np.asarray(value))
    if expected is None:
        with pytest.raises(EquinoxFileError, match="<root>"):
            read(data, like)
    else:
        assert read(data, like) == expected


def test_more_than_like_has_is_refused(tmp_path):
    """The file has another tree, unless you read it in parts or with your own function."""
    path = tmp_path / "model.eqx"
    tree_serialise_leaves(path, (1.0, 2.0))
    with pytest.raises(EquinoxFileError, match="more leaves"):
        tree_deserialise_leaves(path, (0.0,))
    assert eqx.tree_deserialise_leaves(path, (0.0,)) == (1.0,)
    with open(path, "rb") as file:
        assert tree_deserialise_leaves(file, (0.0,)) == (1.0,)
    spec = (default_deserialise_filter_spec, lambda f, x: x)
    assert tree_deserialise_leaves(path, (0.0, 5.0), filter_spec=spec) == (1.0, 5.0)


DATA = written([jnp.arange(6.0).reshape(2, 3), 0.5, np.arange(3)])
LIKE = [jnp.zeros((2, 3)), 0.0, np.zeros(3, int)]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", r"\[0\]"),
        (DATA[:60], r"\[0\]"),
        (DATA[:140], r"\[0\]"),
        (DATA[:152], r"\[1\]"),
        (DATA[:-3], r"\[2\]"),
        (b"PK" + DATA, r"\[0\]"),
        (DATA.replace(b"<f4", b"|O8"), r"\[0\]"),
        (DATA.replace(b"(2, 3), }       ", b"(9999999999999,)"), r"\[0\]"),
    ],
    ids=str,
)
def test_a_damaged_file_is_refused_with_the_path(data, text, tmp_path):
    """Truncated, of another kind, or with a header that lies."""
    with pytest.raises(EquinoxFileError, match=text):
        read(data, LIKE)
    (tmp_path / "model.eqx").write_bytes(data)
    with pytest.raises(EquinoxFileError, match=r"tree_deserialise_leaves\('.*model.eqx'\), \[\d\]"):
        tree_deserialise_leaves(tmp_path / "model", LIKE)


@settings(max_examples=100)
@given(st.data())
def test_bytes_that_were_changed_give_an_error_or_a_tree_of_the_structure(data):
    """Nothing else is raised, and nothing of another shape or dtype comes out."""
    changed = bytearray(DATA)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(DATA) - 1))] = data.draw(st.integers(0, 255))
    changed = changed[: data.draw(st.integers(len(DATA) // 2, len(DATA)))]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = read(bytes(changed), LIKE)
    except EquinoxFileError:
        return
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, LIKE)
    assert [type(leaf) for leaf in found] == [type(leaf) for leaf in LIKE]
