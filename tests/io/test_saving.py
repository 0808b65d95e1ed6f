"""`save`: the content of a file, for other tools."""

import os
import socket
import subprocess
import sys
from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, FileError, StateError
from tests.helpers.comparing import assert_same
from tests.helpers.trees import Static, ramp


def test_other_tools_read_the_arrays_by_path(tmp_path):
    """The package of safetensors finds them."""
    model = nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
    pm.save(tmp_path / "model.safetensors", model, {"step": 1})
    arrays = safetensors.numpy.load_file(tmp_path / "model.safetensors")

    assert sorted(arrays) == [
        "layers.0.bias",
        "layers.0.weight",
        "layers.1.bias",
        "layers.1.weight",
    ]
    np.testing.assert_array_equal(arrays["layers.1.weight"], model.layers[1].weight)


@pytest.mark.parametrize(
    "metadata", [None, {"step": 3, "loss": 0.5, "names": ["a", None]}, [1, 2], "text", 0], ids=str
)
def test_metadata_comes_back(metadata, tmp_path):
    """Any JSON."""
    pm.save(tmp_path / "file", ramp(2), metadata)

    assert pm.read_metadata(tmp_path / "file") == metadata


@pytest.mark.parametrize(
    "metadata",
    [{"loss": jnp.ones(())}, {1: "a"}, (1, 2), {"x": {1, 2}}, {"x": float("nan")}, [float("inf")]],
    ids=str,
)
def test_metadata_that_json_would_change_is_refused(metadata, tmp_path):
    """Numbers as keys would come back as texts, tuples as lists; JSON knows no infinity."""
    with pytest.raises(ArgumentError, match="metadata"):
        pm.save(tmp_path / "file", ramp(2), metadata)
    assert not (tmp_path / "file").exists()


def test_metadata_that_holds_itself_is_refused(tmp_path):
    """Or is too deep for anybody."""
    round_trip, deep = [], []
    round_trip.append(round_trip)
    for _ in range(100_000):
        deep = [deep]
    for metadata in (round_trip, deep):
        with pytest.raises(ArgumentError, match="metadata"):
            pm.save(tmp_path / "file", ramp(2), metadata)


def test_a_refused_save_leaves_the_old_file(tmp_path):
    """And nothing beside it."""
    pm.save(tmp_path / "file", ramp(2))
    donated = ramp(3)
    donated.delete()
    with pytest.raises(FileError, match="donated"):
        pm.save(tmp_path / "file", [ramp(3), donated])

    assert_same(pm.load(tmp_path / "file"), ramp(2))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_keys_weak_types_and_odd_dtypes_come_back(tmp_path):
    """Values that Equinox's files, NumPy's and those of safetensors lose."""
    tree = {
        "keys": jax.random.split(jax.random.key(0, impl="rbg"), 3),
        "weak": jnp.asarray(2.0),
        "weak matrix": jnp.broadcast_to(jnp.asarray(2), (2, 3)),
        "int4": jnp.arange(4).astype("int4"),
        "bfloat16": jnp.ones((2, 1), jnp.bfloat16),
        "float8": jnp.ones(3, jnp.float8_e4m3fn),
        "complex": np.asarray([1 + 2j]),
        "numpy": np.arange(6.0).reshape(2, 3).T,
        "scalar": np.float64(0.1),
        "bool": True,
        "empty": jnp.zeros((0, 3)),
        "nan": float("nan"),
    }
    pm.save(tmp_path / "file", tree)
    loaded = pm.load(tmp_path / "file")

    assert_same(loaded, tree)
    assert loaded["weak"].weak_type
    assert loaded["weak matrix"].weak_type
    assert type(loaded["scalar"]) is np.float64
    loaded["numpy"][0, 0] = 5.0  # It is the reader's own, and can be written to.


def test_one_array_twice_is_two_in_the_file(tmp_path):
    """Sharing is not stored."""
    x = ramp(2)
    pm.save(tmp_path / "file", {"a": x, "b": x})
    loaded = pm.load(tmp_path / "file")

    assert_same(loaded, {"a": x, "b": x})


def test_sharded_arrays_are_saved_whole(tmp_path):
    """And placed as those of `like` are."""
    mesh = jax.make_mesh(
        (4,), ("data",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Explicit,)
    )
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    x = jax.device_put(ramp(8, 2), sharding)
    pm.save(tmp_path / "file", x)

    assert_same(pm.load(tmp_path / "file"), ramp(8, 2))
    # And placed as the arrays of `like` are, abstract or not.
    half = jax.sharding.NamedSharding(
        jax.make_mesh(
            (2,), ("d",), devices=jax.devices()[4:6], axis_types=(jax.sharding.AxisType.Explicit,)
        ),
        jax.sharding.PartitionSpec(None, "d"),
    )
    like = jax.ShapeDtypeStruct((8, 2), jnp.float32, sharding=half)
    assert pm.load(tmp_path / "file", like).sharding == half
    assert pm.load(tmp_path / "file", x).sharding == sharding


class Opaque:
    """An object that JAX and files know nothing of."""

    def __init__(self, value):
        self.value = value


@pytest.mark.parametrize("hold", [lambda x: x, lambda x: {"a": (1, x)}])
def test_an_object_of_which_a_file_could_hold_the_text_alone_is_refused(tmp_path, hold):
    """Its values would be lost without a word: at the save, by path, before anything is written."""
    path = tmp_path / "file"
    for leaf in (Opaque(1), jax.new_ref(jnp.arange(3.0)), object(), frozenset({Opaque(1)})):
        with pytest.raises(FileError, match="at model"):
            pm.save(path, {"model": hold(leaf), "b": jnp.ones(2)})
        with pytest.raises(FileError, match="at model"):
            pm.Checkpoints(tmp_path / "run").save(0, {"model": hold(leaf)})
    assert not path.exists()

    ref = jax.new_ref(jnp.arange(3.0))
    pm.save(path, {"model": jax.freeze(ref)})
    assert pm.load(path)["model"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: OrderedDict([(0, 1), ("0", 2)]), "0"),
        (lambda: {"a": jax.ShapeDtypeStruct((2,), jnp.float32)}, "a"),
        (lambda: used_up_state(), "state_index"),
    ],
    ids=["two of one name", "no values", "a State that is used up"],
)
def test_what_would_be_lost_is_refused_before_anything_is_written(make, word, tmp_path):
    """By path; nothing is left out unseen."""
    with pytest.raises((FileError, StateError), match=word):
        pm.save(tmp_path / "file", make())
    with pytest.raises((FileError, ArgumentError, StateError), match="a"):
        jax.jit(lambda x: pm.save(tmp_path / "file", {"a": x}))(jnp.ones(2))
    assert os.listdir(tmp_path) == []


def used_up_state():
    """A State whose successor has other values."""
    norm, state = nn.make_with_state(nn.BatchNorm)(2)
    norm(ramp(4, 2), state)
    return state


def test_configuration_may_be_an_object(tmp_path):
    """It is that of `like`, and is compared by its text."""
    model, path = Static(jnp.ones(2), object()), tmp_path / "file"
    pm.save(path, model)

    assert pm.load(path, model) == model


OF_TWO = r"""
import sys
import jax
import jax.numpy as jnp
import pytest
import pytreemod as pm
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from tests.helpers.comparing import assert_same

me, port, folder = sys.argv[1:]
jax.distributed.initialize(f"localhost:{port}", 2, int(me))
path = f"{folder}/{me}"
mesh = jax.make_mesh((len(jax.devices()),), ("d",), axis_types=(AxisType.Auto,))


def tree():
    return {"w": jnp.arange(16.0), "few": jnp.asarray(3, "int4"), "key": jax.random.key(3)}


def made(spec, tree):
    return jax.jit(tree, out_shardings=NamedSharding(mesh, spec))()


whole, split = made(P(), tree), made(P("d"), lambda: jnp.ones(16))
assert not whole["w"].is_fully_addressable
# A process saves alone: nothing here may wait for the other one.
if me == "1":
    pm.save(path, whole)
    assert_same(pm.load(path), tree())
    with pm.Checkpoints(path + "steps") as steps:
        steps.save(1, whole)
    assert_same(steps.restore(tree()), tree())
    pm.tree_serialise_leaves(path + ".eqx", whole["w"])
    assert_same(pm.tree_deserialise_leaves(path + ".eqx", tree()["w"]), tree()["w"])
    assert pm.to_torch({"w": whole["w"]})["w"].tolist() == tree()["w"].tolist()
    parts = "parts on other hosts only"
    with pytest.raises(pm.errors.FileError, match=parts):
        pm.save(path, {"w": split})
    with pytest.raises(pm.errors.FileError, match=parts):
        pm.tree_serialise_leaves(path, {"w": split})
    with pytest.raises(pm.errors.StructureError, match="w: f32.16., of which other hosts have"):
        pm.to_torch({"w": split})
    print("done")
"""


@pytest.mark.slow
def test_one_of_two_processes_saves_what_each_has_whole(tmp_path):
    """And says of an array in parts that it is; in files of both kinds, and for PyTorch."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", OF_TWO, me, port, tmp_path],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for me in "01"
    ]
    told = [process.communicate()[0] for process in both]

    assert [process.returncode for process in both] == [0, 0], told
    assert "done" in told[1]
