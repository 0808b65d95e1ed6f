"""`rename`: names by pattern, from a file to `like` and from a tree to a file; other forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError
from tests.helpers.comparing import assert_same
from tests.helpers.laws import law
from tests.helpers.trees import ramp


def written(folder, arrays):
    safetensors.numpy.save_file(arrays, folder / "theirs")
    return folder / "theirs"


# ---- patterns

NAMES = ["a.0.b.1.w", "a.1.b.1.w", "fc3.w", "c"]


@pytest.mark.parametrize(
    ("rename", "names"),
    [
        ({"c": "x"}, ["a.0.b.1.w", "a.1.b.1.w", "fc3.w", "x"]),
        ({"a": "x.y"}, ["x.y.0.b.1.w", "x.y.1.b.1.w", "fc3.w", "c"]),
        ({"a.*.b.*.w": "d.*.*.v"}, ["d.0.1.v", "d.1.1.v", "fc3.w", "c"]),
        ({"fc*": "fc.*"}, ["a.0.b.1.w", "a.1.b.1.w", "fc.3.w", "c"]),
        ({"a.*": "h*"}, ["h0.b.1.w", "h1.b.1.w", "fc3.w", "c"]),
        ({"*": "m.*"}, ["m.a.0.b.1.w", "m.a.1.b.1.w", "m.fc3.w", "m.c"]),
        ({"": "m"}, ["m.a.0.b.1.w", "m.a.1.b.1.w", "m.fc3.w", "m.c"]),
        ({"a": ""}, ["0.b.1.w", "1.b.1.w", "fc3.w", "c"]),
        ({"**.b.*.w": "**.w*"}, ["a.0.w1", "a.1.w1", "fc3.w", "c"]),
        ({"**.w": "**.v"}, ["a.0.b.1.v", "a.1.b.1.v", "fc3.v", "c"]),
        ({"a.**.1.w": "e.**"}, ["e.0.b", "e.1.b", "fc3.w", "c"]),
        ({"a.0": "x", "a.*": "y.*"}, ["x.b.1.w", "y.1.b.1.w", "fc3.w", "c"]),
        ({"a.0": "a.1", "a.1": "a.0"}, ["a.1.b.1.w", "a.0.b.1.w", "fc3.w", "c"]),
        ({"a.0": None, "c": None}, ["a.1.b.1.w", "fc3.w"]),
        ({"a.0": None, "a": "x", "zz": None}, ["x.1.b.1.w", "fc3.w", "c"]),
        ({"a.0": "a.0", "**": None}, ["a.0.b.1.w"]),
    ],
    ids=str,
)
def test_wildcards_are_bound_in_order_and_the_first_pattern_counts(tmp_path, rename, names):
    """A pattern is of components, or parts of them, and stands for everything below it."""
    arrays = {name: np.full(1, i, np.float32) for i, name in enumerate(NAMES)}
    found = pm.load(written(tmp_path, arrays), rename=rename)
    assert sorted(found, key=lambda name: found[name][0]) == names


@pytest.mark.parametrize(
    ("rename", "word"),
    [
        ({"fc": "x"}, r"\n  at 'fc'"),
        ({"a.*.b.*.v": "x.*.*"}, r"'a\.\*\.b\.\*\.v'"),
        ({"a": "x", "a.0": "y"}, r"\n  at 'a\.0'$"),
        ({"a.*": "x"}, "two arrays get the name x"),
        ({"a.0": "a.1"}, r"two arrays get the name a\.1"),
        ({"a": "x.*"}, r"'x\.\*' has more wildcards than 'a'"),
        ({"a.*": "**.x"}, r"'\*\*\.x' has more wildcards than 'a\.\*'"),
    ],
    ids=str,
)
def test_a_table_that_does_not_fit_is_refused(tmp_path, rename, word):
    """In load and in save: a misspelled pattern, a name for two arrays, a wildcard too many."""
    tree = {"a": [{"b": [0, {"weight": ramp(1)}]}, {"b": [0, {"weight": ramp(1)}]}]}
    pm.save(tmp_path / "file", tree)
    for call in (
        lambda: pm.load(tmp_path / "file", tree, rename=rename),
        lambda: pm.save(tmp_path / "other", tree, rename=rename),
    ):
        with pytest.raises(ArgumentError, match=word):
            call()
    assert not (tmp_path / "other").exists()


components = st.sampled_from(["a", "b", "ab", "0", "1"])
nested = st.recursive(
    st.just(1), lambda x: st.dictionaries(components, x, max_size=3), max_leaves=9
)


@settings(law, max_examples=60)
@given(st.dictionaries(components, nested, min_size=1), st.data())
def test_renamed_in_save_and_back_in_load_is_the_tree(tmp_path_factory, tree, data):
    """For random nodes of a random tree, which get new names: all leaves are there and back."""
    path = tmp_path_factory.mktemp("names") / "file"
    names = [*pm.named_leaves(tree)]
    nodes = sorted({".".join(name.split(".")[:i]) for name in names for i in range(1, 4)})
    some = data.draw(st.lists(st.sampled_from(nodes), unique=True)) if nodes else []
    # None of them is in another one.
    some = [x for x in some if not any(x.startswith(f"{other}.") for other in some)]
    there = {node: f"new{i}.{i}" for i, node in enumerate(some)}
    pm.save(path, tree, rename=there)

    assert len(pm.load(path)) == len(names)
    back = {new: old for old, new in there.items()}
    assert_same(pm.load(path, jax.tree.map(lambda _: 0, tree), rename=back), tree)


def test_dots_in_the_keys_of_a_dict_are_dots_in_the_file(tmp_path):
    """So a state dict of PyTorch, as a dict of arrays, has its names."""
    tree = {"layers.0.weight": ramp(2), "head": {"v1.5": ramp(1)}}
    pm.save(tmp_path / "file", tree)

    assert {*pm.load(tmp_path / "file")} == {"head.v1.5", "layers.0.weight"}
    assert_same(pm.load(tmp_path / "file", tree), tree)
    like = {"body": [{"weight": jnp.zeros(2)}], "head": {"v1.5": ramp(1)}}
    found = pm.load(tmp_path / "file", like, rename={"layers": "body"})
    assert_same(found["body"][0]["weight"], ramp(2))


def test_an_array_alone_may_get_a_name(tmp_path):
    pm.save(tmp_path / "alone", ramp(2), rename={"": "x"})
    assert [*pm.load(tmp_path / "alone")] == ["x"]
    assert_same(pm.load(tmp_path / "alone", ramp(2) * 0, rename={"x": ""}), ramp(2))


# ---- arrays in another form


class Block(pm.Module):
    """Projections as we have them."""

    query: nn.Linear
    key: nn.Linear
    output: nn.Linear

    def __init__(self, *, key):
        make = [nn.Linear(4, 4, key=each) for each in jax.random.split(key, 3)]
        self.query, self.key, self.output = make

    def __call__(self, x):
        return self.output(self.query(x) + self.key(x))


PARTS = ["blocks.*.query", "blocks.*.key"]
GPT2 = {
    "wte": "embedding",
    "h.*.attn.bias": None,
    "h.*.attn.c_attn.weight": ([f"{n}.weight" for n in PARTS], lambda w: np.split(w.T, 2)),
    "h.*.attn.c_attn.bias": (tuple(f"{n}.bias" for n in PARTS), lambda b: np.split(b, 2)),
    "h.*.attn.c_proj.weight": ("blocks.*.output.weight", np.transpose),
    "h.*.attn.c_proj": "blocks.*.output",
}
"""As GPT-2 has them: one matrix for several, and transposed."""
SHAPES = {"bias": (1, 2), "c_attn.weight": (4, 8), "c_attn.bias": (8,)}
SHAPES |= {"c_proj.weight": (4, 4), "c_proj.bias": (4,)}


@pytest.mark.parametrize("kind", ["Stack", "list"])
def test_packed_and_transposed_matrices_of_each_layer(kind, tmp_path):
    """Each layer's matrix is two here, for layers in a Stack and in a list."""
    shapes = {f"h.{i}.attn.{name}": s for i in range(3) for name, s in SHAPES.items()}
    arrays = {name: np.random.default_rng(0).normal(size=s) for name, s in shapes.items()}
    arrays = {name: x.astype("f") + i for i, (name, x) in enumerate(arrays.items())}
    stack = nn.Stack(Block, 3, key=jax.random.key(0))
    like = {"embedding": jnp.zeros(2), "blocks": stack if kind == "Stack" else stack.unstack()}
    path = written(tmp_path, arrays | {"wte": np.ones(2, "f")})
    made = pm.load(path, like, rename=GPT2)

    assert_same(made["embedding"], jnp.ones(2))
    for i, block in enumerate(made["blocks"]):
        theirs = {name: arrays[f"h.{i}.attn.{name}"] for name in SHAPES}
        parts = np.split(theirs["c_attn.weight"], 2, axis=1), np.split(theirs["c_attn.bias"], 2)
        for layer, weight, bias in zip((block.query, block.key), *parts, strict=True):
            assert_same([layer.weight, layer.bias], [jnp.asarray(weight.T), jnp.asarray(bias)])
        assert_same(block.output.weight, jnp.asarray(theirs["c_proj.weight"].T))
        assert_same(block.output.bias, jnp.asarray(theirs["c_proj.bias"]))


def test_a_form_is_written_and_read_back(tmp_path):
    """A function of NumPy or JAX, in save and in load; its result has a shape and dtype."""
    tree = {"w": ramp(2, 3), "b": ramp(2)}
    out = {"w": ("t", np.transpose), "b": (("one", "two"), lambda b: [b[:1], jnp.exp(b[1:])])}
    back = {"t": ("w", jnp.transpose), "one": None, "two": ("b", lambda x: jnp.log(x).repeat(2))}
    pm.save(tmp_path / "file", tree, rename=out)

    found = pm.load(tmp_path / "file")
    assert {name: x.shape for name, x in found.items()} == {"t": (3, 2), "one": (1,), "two": (1,)}
    like = {"w": jnp.zeros((2, 3)), "b": np.zeros(2, "f")}
    made, report = pm.load(tmp_path / "file", like, strict=False, rename=back)
    assert_same(made["w"], tree["w"])
    np.testing.assert_allclose(made["b"], [2, 2], rtol=1e-6)
    assert report.renamed == ["b <- two", "w <- t"]


@pytest.mark.parametrize("parts", [1, 3])
def test_a_function_returns_an_array_for_each_name(tmp_path, parts):
    """A third one was once dropped."""
    pm.save(tmp_path / "file", {"a": ramp(6)})
    rename = {"a": (("b", "c"), lambda x: np.split(x, parts))}
    with pytest.raises(ArgumentError, match=f"'a' returns {parts} arrays for 2 names"):
        pm.load(tmp_path / "file", {"b": ramp(3), "c": ramp(3)}, rename=rename)
