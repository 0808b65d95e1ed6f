"""Names by pattern, from a file to `like` and from a tree to a file; arrays in another form."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, FileError
from tests.helpers.comparing import assert_same
from tests.helpers.trees import ramp
from tests.io.files import OWN, header_of

WIDTH, DEPTH = 4, 3


class Block(nn.StatefulLayer):
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    output: nn.Linear

    def __init__(self, *, key):
        keys = jax.random.split(key, 4)
        make = [nn.Linear(WIDTH, WIDTH, key=each) for each in keys]
        self.query, self.key, self.value, self.output = make

    def __call__(self, x, state):
        return self.output(self.query(x) + self.key(x) + self.value(x)), state


class Net(pm.Module):
    embedding: nn.Embedding
    blocks: nn.Stack

    def __init__(self, *, key):
        self.embedding = nn.Embedding(5, WIDTH, key=key)
        self.blocks = nn.Stack(Block, DEPTH, key=key)


NAMES = {
    "transformer.wte": "embedding",
    "transformer.h.*.attn.bias": None,
    "transformer.h.*.attn.c_attn.**": pm.Packed(
        ["blocks.*.query.**", "blocks.*.key.**", "blocks.*.value.**"], axis=-1, to=jnp.transpose
    ),
    "transformer.h.*.attn.c_proj.**": pm.Relaid("blocks.*.output.**", to=np.transpose),
}
"""As GPT-2 has them."""


def tensors(depth=DEPTH):
    """A file's arrays, under the names that GPT-2 has for them."""
    numbers = np.random.default_rng(0)
    made = {"transformer.wte.weight": numbers.normal(size=(5, WIDTH))}
    for i in range(depth):
        base = f"transformer.h.{i}.attn"
        made[f"{base}.bias"] = numbers.normal(size=(1, 1, 2, 2))
        made[f"{base}.c_attn.weight"] = numbers.normal(size=(WIDTH, 3 * WIDTH))
        made[f"{base}.c_attn.bias"] = numbers.normal(size=3 * WIDTH)
        made[f"{base}.c_proj.weight"] = numbers.normal(size=(WIDTH, WIDTH))
        made[f"{base}.c_proj.bias"] = numbers.normal(size=WIDTH)
    return {name: array.astype(np.float32) for name, array in made.items()}


def written(folder, arrays):
    safetensors.numpy.save_file(arrays, folder / "theirs")
    return folder / "theirs"


def test_packed_and_transposed_matrices_go_into_a_stack(tmp_path):
    """Each layer's matrix is three here, and the layers are one."""
    theirs = tensors()
    net = pm.load(written(tmp_path, theirs), Net(key=jax.random.key(0)), rename=NAMES)

    assert_same(net.embedding.weight, jnp.asarray(theirs["transformer.wte.weight"]))
    for i, block in enumerate(net.blocks.unstack()):
        base = f"transformer.h.{i}.attn"
        parts = np.split(theirs[f"{base}.c_attn.weight"], 3, axis=1)
        biases = np.split(theirs[f"{base}.c_attn.bias"], 3)
        for name, weight, bias in zip(("query", "key", "value"), parts, biases, strict=True):
            np.testing.assert_array_equal(getattr(block, name).weight, weight.T)
            np.testing.assert_array_equal(getattr(block, name).bias, bias)
        np.testing.assert_array_equal(block.output.weight, theirs[f"{base}.c_proj.weight"].T)


@pytest.mark.parametrize(
    ("rename", "names"),
    [
        ({"a.*.b.*.w": "c.*.*.v"}, ["c.0.1.v", "c.1.1.v"]),
        ({"a.*.b": "**.c.*"}, None),
        ({"a.**": "**"}, ["0.b.1.w", "1.b.1.w"]),
        ({"a.0": "x", "a.*": "y.*"}, ["x.b.1.w", "y.1.b.1.w"]),
        ({"**.b.*.w": "**.w*"}, ["a.0.w1", "a.1.w1"]),
        ({"a[*].b[1]": "b.*"}, ["b.0.w", "b.1.w"]),
    ],
)
def test_stars_are_bound_in_order_and_the_first_pattern_wins(tmp_path, rename, names):
    path = written(tmp_path, {"a.0.b.1.w": np.zeros(1), "a.1.b.1.w": np.ones(1)})
    if names is None:
        with pytest.raises(ArgumentError, match=r"\*\* in a new name only if it is in the old"):
            pm.load(path, {}, rename=rename)
        return
    with pytest.raises(FileError) as told:
        pm.load(path, {"absent": ramp(1)}, rename=rename)
    assert all(f"at {name}: unexpected" in str(told.value) for name in names)


def test_one_table_serves_both_directions(tmp_path):
    """What was loaded is written as it was; JAX's arrays, NumPy's, and layers of a list alike."""
    theirs = tensors()
    net = pm.load(written(tmp_path, theirs), Net(key=jax.random.key(0)), rename=NAMES)
    wanted = {name: array for name, array in theirs.items() if not name.endswith(".attn.bias")}
    trees = [net, jax.tree.map(np.asarray, net), net.replace(blocks=net.blocks.unstack())]
    for tree in trees:
        pm.save(tmp_path / "ours", tree, rename=pm.inverted_names(NAMES))
        found = safetensors.numpy.load_file(tmp_path / "ours")
        assert found.keys() == wanted.keys()
        for name, array in wanted.items():
            np.testing.assert_array_equal(found[name], array)
        kept = {name: new for name, new in NAMES.items() if new is not None}
        assert_same(pm.load(tmp_path / "ours", tree, rename=kept), tree)
        pm.save(tmp_path / "folder", tree, rename=pm.inverted_names(NAMES), shard_bytes=300)
        assert len([*(tmp_path / "folder").glob("*.safetensors")]) > 2
        assert_same(pm.load(tmp_path / "folder", tree, rename=kept), tree)


def test_a_file_for_other_tools_says_nothing_of_the_tree(tmp_path):
    """Transformers asks for the format; checksums are in our own keys."""
    linear = nn.Linear(2, 3, key=jax.random.key(0))
    path = tmp_path / "file"
    pm.save(path, {"a": linear, "n": 3, "x": 0.5}, {"by": "me"}, rename={"a": "b", "x": None})
    header = header_of(path)

    assert {*header} == {"__metadata__", "b.weight", "b.bias", "n"}
    metadata = header["__metadata__"]
    assert {key for key in metadata if not key.startswith(OWN)} == {"format", "by"}
    assert pm.read_metadata(path) == {"format": "pt", "by": "me"}
    like = {"b": jax.tree.map(jnp.zeros_like, linear), "n": 0}
    assert_same(pm.load(path, like), {"b": linear, "n": 3})


def test_a_layer_that_is_missing_is_named(tmp_path):
    """A number, or a leaf in one of them; also where all may be missing."""
    theirs = tensors()
    gap = {name.replace("h.1.", "h.5."): array for name, array in theirs.items()}
    like = Net(key=jax.random.key(0))
    for options in ({}, {"strict": False}, {"only": "blocks"}):
        with pytest.raises(FileError, match=r"(?s)got 0, 2, 5\.\n  at blocks.1: missing"):
            pm.load(written(tmp_path, gap), like, rename=NAMES, **options)
    assert (
        pm.load(written(tmp_path, gap), like, rename=NAMES, only="embedding").blocks == like.blocks
    )

    del theirs["transformer.h.2.attn.c_proj.bias"]
    with pytest.raises(
        FileError, match=r"got some with other leaves\.\n  at blocks.2.output.bias: m"
    ):
        pm.load(written(tmp_path, theirs), like, rename=NAMES)
    theirs["transformer.h.1.attn.c_proj.other"] = np.zeros(1)
    with pytest.raises(FileError, match=r"at blocks.0.output.other: missing"):
        pm.load(written(tmp_path, theirs), like, rename=NAMES)


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="by which files are read")
def test_each_packed_matrix_is_read_once(tmp_path, monkeypatch):
    """Though three stacks are made of them."""
    theirs, starts, real = tensors(), [], os.preadv

    def counting(descriptor, buffers, start):
        starts.append(start)
        return real(descriptor, buffers, start)

    path = written(tmp_path, theirs)
    monkeypatch.setattr(os, "preadv", counting)
    pm.load(path, Net(key=jax.random.key(0)), rename=NAMES)
    # The header is read in two steps.
    assert len(starts) == 2 + len([name for name in theirs if not name.endswith(".attn.bias")])
