"""`save`: what it writes, for us and for other tools, and what it refuses."""

import os
import socket
import subprocess
import sys
from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, FileError, StructureError
from tests.helpers.trees import ramp


def test_metadata_that_json_does_not_have_are_refused(tmp_path):
    itself, deep = [], []
    itself.append(itself)
    for _ in range(100_000):
        deep = [deep]
    for metadata, fact in (
        ({"a": {1, 2}}, r": \{1, 2\}$"),
        ({"key": jax.random.key(0)}, "key"),
        (itself, "Circular"),
        (deep, "recursion"),
    ):
        with pytest.raises(ArgumentError, match=f"metadata.*{fact}"):
            pm.save(tmp_path / "file", ramp(2), metadata)
    assert os.listdir(tmp_path) == []


def test_a_file_for_other_tools_has_no_configuration(tmp_path):
    """`rename` is for them: so another class with these names loads it."""
    pm.save(tmp_path / "file", {"a": nn.LayerNorm(2), "b": nn.Dropout(0.5)}, rename={"a": "c"})
    like = {"c": nn.GroupNorm(1, 2), "b": nn.Dropout(0.1)}

    assert pm.load(tmp_path / "file", like)["b"].p == 0.1


NOT_SAVED = {
    "an object": object,
    "a reference": lambda: jax.new_ref(jnp.arange(3.0)),
    "a struct": lambda: jax.ShapeDtypeStruct((2,), jnp.float32),
    "an array of texts": lambda: np.asarray(["a", "b"]),
    "a date": lambda: np.asarray(["2020"], "M8[s]"),
    # Numbers that would change.
    "of 65 bits": lambda: 2**64,
    "negative, of 65 bits": lambda: -(2**63) - 1,
    "records": lambda: np.zeros(2, [("a", "f4"), ("b", "i4")]),
    "long doubles": lambda: np.zeros(2, np.longdouble),
    "a mask": lambda: np.ma.masked_array([1, 2], [True, False]),
}


@pytest.mark.parametrize("make", NOT_SAVED.values(), ids=NOT_SAVED.keys())
def test_a_leaf_without_numbers_is_refused_by_path(make, tmp_path):
    """Before anything is written: the old file stays."""
    pm.save(tmp_path / "file", {"x": 1})
    with pytest.raises(FileError, match=r"at model\.a\.1: (?s:.*)at model\.b: "):
        pm.save(tmp_path / "file", {"w": ramp(2), "model": {"a": (1, make()), "b": make()}})

    assert pm.load(tmp_path / "file") == {"x": 1}
    assert os.listdir(tmp_path) == ["file"]


def donated():
    """An array whose memory another call got."""
    x = ramp(3)
    x.delete()
    return {"lost": x}


@pytest.mark.parametrize(
    ("make", "error", "word"),
    [
        (lambda: OrderedDict([(0, 1), ("0", 2)]), StructureError, "at 0"),
        (lambda: {"a.b": 1, "a": {"b": 2}}, StructureError, r"at a\.b"),
        (lambda: {"__metadata__": 1}, FileError, "__metadata__"),
        (donated, RuntimeError, "deleted"),
    ],
    ids=["0 and '0'", "dots in a key", "the format's own name", "donated"],
)
def test_what_would_be_lost_is_refused_before_anything_is_written(make, error, word, tmp_path):
    with pytest.raises(error, match=word):
        pm.save(tmp_path / "file", make())
    assert os.listdir(tmp_path) == []


def test_a_traced_array_is_refused_by_path(tmp_path):
    with pytest.raises(FileError, match=r"at a: f32\[2\]"):
        jax.jit(lambda x: pm.save(tmp_path / "file", {"a": x}))(jnp.ones(2))


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
mesh = jax.make_mesh((len(jax.devices()),), ("d",), axis_types=(AxisType.Auto,))
tree = lambda: {"w": jnp.arange(16.0), "few": jnp.asarray(3, "int4"), "key": jax.random.key(3)}
made = lambda spec, tree: jax.jit(tree, out_shardings=NamedSharding(mesh, spec))()
whole, split = made(P(), tree), made(P("d"), lambda: jnp.ones(16))
# A process saves alone: nothing here may wait for the other one.
if me == "1":
    with pm.Checkpoints(folder) as steps:
        steps.save(1, whole)
    assert_same(steps.restore(tree()), tree())
    with pytest.raises(pm.errors.FileError, match="at w: .*orbax"):
        pm.save(folder + "/split", {"w": split})
    print("done")
"""


@pytest.mark.slow
def test_one_of_two_processes_saves_what_each_has_whole(tmp_path):
    """And says of an array in parts that it is, and what saves it."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    commands = [[sys.executable, "-c", OF_TWO, me, port, tmp_path] for me in "01"]
    told = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    both = [subprocess.Popen(command, env=environment, **told) for command in commands]
    texts = [process.communicate()[0] for process in both]

    assert [process.returncode for process in both] == [0, 0], texts
    assert "done" in texts[1]
