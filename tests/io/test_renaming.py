"""Names by pattern, from a file to `like` and from a tree to a file; arrays in another form."""

from contextlib import suppress

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, FileError, SpecError
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


def inverted(table):
    """The table of a save that writes what this table of a load reads."""
    made = {}
    for theirs, ours in table.items():
        if isinstance(ours, pm.Packed):
            form = {"axis": ours.axis, "to": ours.to, "back": ours.back}
            for i, name in enumerate(ours.names):
                made[name] = pm.Packed(theirs, i, ours.sizes, **form)
        elif isinstance(ours, pm.Relaid):
            made[ours.name] = pm.Relaid(theirs, ours.to, ours.back)
        elif ours is not None:
            made[ours] = theirs
    return made


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
    """In paths as in names."""
    path = written(tmp_path, {"a.0.b.1.w": np.zeros(1), "a.1.b.1.w": np.ones(1)})
    if names is None:
        with pytest.raises(ArgumentError, match=r"a\.\*\.b"):
            pm.load(path, {}, rename=rename)
        return
    with pytest.raises(FileError, match="absent: missing") as raised:
        pm.load(path, {"absent": ramp(1)}, rename=rename)
    assert all(f"at {name}: unexpected" in str(raised.value) for name in names)


def test_one_table_serves_both_directions(tmp_path):
    """A loaded file is written unchanged; for JAX's arrays, NumPy's, and layers of a list."""
    theirs = tensors()
    net = pm.load(written(tmp_path, theirs), Net(key=jax.random.key(0)), rename=NAMES)
    wanted = {name: array for name, array in theirs.items() if not name.endswith(".attn.bias")}
    trees = [net, jax.tree.map(np.asarray, net), net.replace(blocks=net.blocks.unstack())]
    for tree in trees:
        pm.save(tmp_path / "ours", tree, rename=inverted(NAMES))
        found = safetensors.numpy.load_file(tmp_path / "ours")
        assert found.keys() == wanted.keys()
        for name, array in wanted.items():
            np.testing.assert_array_equal(found[name], array)
        kept = {name: new for name, new in NAMES.items() if new is not None}
        assert_same(pm.load(tmp_path / "ours", tree, rename=kept), tree)
        pm.save(tmp_path / "folder", tree, rename=inverted(NAMES), shard_bytes=300)
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
        with pytest.raises(FileError, match=r"blocks\.1: missing"):
            pm.load(written(tmp_path, gap), like, rename=NAMES, **options)
    assert (
        pm.load(written(tmp_path, gap), like, rename=NAMES, only="embedding").blocks == like.blocks
    )

    del theirs["transformer.h.2.attn.c_proj.bias"]
    with pytest.raises(FileError, match=r"at blocks\.2\.output\.bias: missing"):
        pm.load(written(tmp_path, theirs), like, rename=NAMES)
    theirs["transformer.h.1.attn.c_proj.other"] = np.zeros(1)
    with pytest.raises(FileError, match=r"at blocks.0.output.other: missing"):
        pm.load(written(tmp_path, theirs), like, rename=NAMES)


words = st.sampled_from(["a", "b", "ab", "0", "1"])
pattern_words = st.sampled_from(["a", "b", "a*", "*", "*b", "0", "**"])
patterns = st.lists(pattern_words, min_size=1, max_size=4).filter(lambda x: x.count("**") < 2)
nested = st.recursive(st.just(1), lambda x: st.dictionaries(words, x, max_size=3), max_leaves=12)


@settings(max_examples=80)
@given(st.dictionaries(words, nested, min_size=1), st.lists(patterns, min_size=1, max_size=3))
def test_a_pattern_is_about_what_select_path_picks(tmp_path_factory, tree, several):
    """For random trees and patterns: the leaves that it selects are not written, all others are."""
    path = tmp_path_factory.mktemp("names") / "file"
    rename = {".".join(pattern): None for pattern in several}
    pm.save(path, tree, rename=rename)
    left = {*pm.named_leaves(tree)}
    for pattern in rename:
        with suppress(SpecError):
            picked = pm.select.path(pattern)(tree)
            left -= {name for name, is_one in pm.named_leaves(picked).items() if is_one}

    assert {*header_of(path)} - {"__metadata__"} == left


class Layer(nn.StatefulLayer):
    """Three matrices of one width, of which the last one has more rows, and two other arrays."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array
    scale: jax.Array

    def __init__(self, *, key):
        shapes = {"query": (2, 3), "key": (2, 3), "value": (4, 3), "bias": (3,), "scale": ()}
        for each, (name, shape) in zip(jax.random.split(key, 5), shapes.items(), strict=True):
            setattr(self, name, jax.random.normal(each, shape))

    def __call__(self, x, state):
        return x, state


def turned(array):
    return np.flip(array, 0).T if np.ndim(array) else array


def turned_back(array):
    return np.flip(array.T, 0) if np.ndim(array) else array


WAYS = {
    "as it is": (lambda name: name, lambda x: x),
    "transposed": (lambda name: pm.Relaid(name, jnp.transpose), np.transpose),
    "turned": (lambda name: pm.Relaid(name, turned, turned_back), turned),
}


@settings(max_examples=40)
@given(
    depth=st.integers(1, 3),
    is_stack=st.booleans(),
    packed=st.sampled_from([(), ("query", "key"), ("query", "key", "value"), ("value", "query")]),
    ways=st.lists(st.sampled_from([*WAYS]), min_size=6, max_size=6),
    base=st.sampled_from(["h.*", "model.layers.*.inner", "layer*", "*.h"]),
)
def test_what_is_saved_is_loaded_for_random_tables(
    tmp_path_factory, depth, is_stack, packed, ways, base
):
    """And the file has the names and the numbers that are made of the tree without any table."""
    path = tmp_path_factory.mktemp("names") / "file"
    stack = nn.Stack(Layer, depth, key=jax.random.key(0))
    tree = {"net": {"blocks": stack if is_stack else stack.unstack()}, "rest": ramp(2)}
    names = [name for name in ("query", "key", "value", "bias", "scale") if name not in packed]
    table, wanted = {}, {"rest": np.asarray(tree["rest"])}

    def make(name, way):
        rule, function = WAYS[way]
        table[f"{base}.{name}"] = rule(f"net.blocks.*.{name}")
        for i, layer in enumerate(stack.unstack()):
            wanted[f"{base}.{name}".replace("*", str(i))] = function(
                np.asarray(getattr(layer, name))
            )

    for name, way in zip(names, ways, strict=False):
        make(name, way)
    if packed:
        sizes = None if packed == ("query", "key") else [4 if n == "value" else 2 for n in packed]
        targets = [f"net.blocks.*.{name}" for name in packed]
        # The parts are transposed, so that they are one after the other along the other axis.
        table[f"{base}.all"] = pm.Packed(targets, axis=1, sizes=sizes, to=jnp.transpose)
        for i, layer in enumerate(stack.unstack()):
            parts = [np.asarray(getattr(layer, name)).T for name in packed]
            wanted[f"{base}.all".replace("*", str(i))] = np.concatenate(parts, axis=1)
    pm.save(path, tree, rename=inverted(table))
    found = safetensors.numpy.load_file(path)

    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array)
    zeros = jax.tree.map(jnp.zeros_like, tree)
    assert_same(pm.load(path, zeros, rename=table), tree)


@pytest.mark.parametrize("number", ["blocks.{}", "**.blocks[{}]"])
def test_layers_of_a_stack_have_numbers_in_our_files_too(tmp_path, number):
    """A file that describes a Stack has them as one; they may be exchanged, or go into a list."""
    stack = nn.Stack(Layer, 3, key=jax.random.key(0))
    pm.save(tmp_path / "file", {"blocks": stack})
    rename = {number.format(old): f"layers.{2 - old}" for old in range(3)}
    like = nn.Stack(Layer, 3, key=jax.random.key(1))
    (loaded,) = pm.load(tmp_path / "file", {"layers": like}, rename=rename).values()
    assert_same(loaded.unstack(), stack.unstack()[::-1])
    (loaded,) = pm.load(tmp_path / "file", {"layers": like.unstack()}, rename=rename).values()
    assert_same(loaded, stack.unstack()[::-1])


def test_a_stack_may_be_named_as_the_tree_has_it(tmp_path):
    """Reports name the array `blocks.layer.query`; both calls accept this name."""
    stack = nn.Stack(Layer, 3, key=jax.random.key(0))
    swap = {"blocks.layer.query": "blocks.layer.key", "blocks.layer.key": "blocks.layer.query"}
    pm.save(tmp_path / "file", {"blocks": stack})
    loaded = pm.load(tmp_path / "file", {"blocks": stack}, rename=swap)["blocks"]
    assert_same((loaded.layer.key, loaded.layer.query), (stack.layer.query, stack.layer.key))
    pm.save(tmp_path / "other", {"blocks": stack}, rename={"blocks.layer": "all"})
    found = safetensors.numpy.load_file(tmp_path / "other")
    np.testing.assert_array_equal(found["all.query"], stack.layer.query)


def test_stacks_in_stacks_and_their_states_have_numbers(tmp_path):
    """Of a State, the names are those of its tokens; members of an Ensemble stay one."""

    class Norm(nn.StatefulLayer):
        norm: nn.BatchNorm

        def __init__(self, *, key):
            self.norm = nn.BatchNorm(3)

        def __call__(self, x, state):
            return self.norm(x, state)

    def inner(key):
        return nn.Stack(lambda key: nn.Linear(2, 2, key=key), 2, key=key)

    keys = jax.random.split(jax.random.key(0), 3)
    model, state = pm.make_with_state(lambda: nn.Stack(Norm, 2, key=keys[0]))()
    nets = nn.Ensemble(lambda key: nn.Linear(2, 2, key=key), 2, key=keys[1])
    tree = {"m": model, "s": state, "in": nn.Stack(inner, 3, key=keys[2]), "nets": nets}
    names = {
        "l.*.bn.running_mean": "s.*.norm.state_index.0",
        "l.*.bn.running_var": "s.*.norm.state_index.1",
        "l.*.bn.**": "m.*.norm.**",
        "outer.*.inner.*.**": "in.*.*.**",
    }
    pm.save(tmp_path / "file", tree, rename=inverted(names))
    found = {*header_of(tmp_path / "file")}
    assert {
        "l.1.bn.running_var",
        "l.0.bn.weight",
        "outer.2.inner.1.bias",
        "nets.member.bias",
    } < found
    like = jax.tree.map(jnp.zeros_like, tree)
    assert_same(pm.load(tmp_path / "file", like, rename=names), tree)


def test_what_is_not_written_need_not_be_an_array(tmp_path):
    """A table may leave out a function; else it is named."""
    tree = {"fn": lambda x: x, "text": "a", "w": ramp(2), "key": jax.random.key(3), "z": 2 + 1j}
    pm.save(tmp_path / "file", tree, rename={"fn": None, "text": None})
    like = {"w": ramp(2, start=1), "key": jax.random.key(0), "z": 0j}
    assert_same(pm.load(tmp_path / "file", like), {name: tree[name] for name in like})


SWAPPED = pm.Relaid("b", np.transpose, np.asarray)
"""Two functions of which one does not undo the other."""
LOADS = [
    ({"a": (2,)}, {"b": "c"}, "b"),
    ({"h.0.w": (2,)}, {"h.**": "x.**", "h.*.w": "y.*"}, r"h\.\*\.w"),
    ({"a.0.w": (2,), "a.1.w": (2,)}, {"**.w": "w"}, r"a\.1\.w"),
    ({"a": (2,), "b": (2,)}, {"a": pm.Packed(["b", "c"])}, "b"),
    ({"qkv": (32, 95)}, {"qkv": pm.Packed(["q", "k", "v"], axis=1)}, r"32,95"),
    ({"qkv": (32, 95)}, {"qkv": pm.Packed(["q", "k"], axis=1, sizes=(50, 50))}, r"32,95"),
    ({"a": (3, 3)}, {"a": SWAPPED}, "to.back"),
    ({"a": (3, 3)}, {"a": pm.Packed(["b"], to=lambda x: 2 * x)}, "to.back"),
    ({"a": (3, 3)}, {"a": pm.Relaid("b", lambda x: x.reshape(2, 2))}, r"3,3"),
]


@pytest.mark.parametrize(("arrays", "rename", "word"), LOADS, ids=range(len(LOADS)))
def test_a_table_that_loses_or_swaps_numbers_is_refused(tmp_path, arrays, rename, word):
    """Names of nothing, two arrays of one name, parts that do not split, other inverses."""
    path = written(tmp_path, {name: np.zeros(shape, "f") for name, shape in arrays.items()})
    with pytest.raises(ArgumentError, match=word):
        pm.load(path, {}, rename=rename)


PARTS = {"a": pm.Packed("c", 0, (2, 2)), "b": pm.Packed("c", 1, (2, 2))}
SAVES = [
    ({"a": ramp(2)}, {"model.a": "a"}, "model.a"),
    ({"a": ramp(2)}, {"a": "half \ud800"}, "half"),
    ({"a": ramp(2), "b": ramp(2)}, {"a": "b"}, "b"),
    ({"a": ramp(2), "b": ramp(3)}, PARTS, r"f32\[3\]"),
    ({"a": ramp(2)}, {"a": pm.Packed("c", 0, (2, 2))}, "part 1"),
    ({"a": ramp(2, 3)}, {"a": pm.Relaid("b", np.ravel, np.asarray)}, r"\(6,\)"),
    ({"a": 1}, {"a": pm.Relaid("b", np.transpose)}, "a"),
]


@pytest.mark.parametrize(("tree", "rename", "word"), SAVES, ids=range(len(SAVES)))
def test_a_file_for_other_tools_has_every_array_as_a_whole(tmp_path, tree, rename, word):
    """What does not go into the file is said, and no file is written."""
    with pytest.raises(ArgumentError, match=word):
        pm.save(tmp_path / "ours", tree, rename=rename)
    assert not (tmp_path / "ours").exists()


def test_columns_of_one_array_go_there_and_back(tmp_path):
    """Parts along a later axis than the first."""
    tree = {"a": ramp(3, 2), "b": ramp(3, 4)}
    parts = {name: pm.Packed("c", i, (2, 4), axis=1) for i, name in enumerate(tree)}
    pm.save(tmp_path / "ours", tree, rename=parts)
    whole = {"c": np.concatenate([*tree.values()], 1)}

    assert_same(safetensors.numpy.load_file(tmp_path / "ours"), whole)
    zeros = jax.tree.map(jnp.zeros_like, tree)
    back = {"c": pm.Packed(["a", "b"], axis=1, sizes=(2, 4))}
    assert_same(pm.load(tmp_path / "ours", zeros, rename=back), tree)
    pm.save(tmp_path / "apart", tree)
    assert_same(pm.load(tmp_path / "apart", {"c": np.zeros((3, 6), "f")}, rename=parts), whole)


def test_a_text_in_a_file_for_other_tools_is_refused_by_name(tmp_path):
    """It would be left out, and so would a number that no array holds."""
    with pytest.raises(FileError, match=r"(?s)at a: .*at c: "):
        pm.save(tmp_path / "ours", {"a": "text", "c": 10**30}, rename={})
