"""diff: how two trees, or files, differ."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pytreemod as pm
from pytreemod import nn

KEY = jax.random.key(0)
MODEL = nn.MLP(3, 2, 4, 1, key=KEY)


def changed(by=0.5):
    return pm.tree_at(lambda m: m.layers[1].bias, MODEL, replace_fn=lambda b: b + by)


def test_equal_trees_have_no_difference():
    """Containers, texts, None and nan among them."""
    for tree in (MODEL, {"a": [1, None, "text"]}, jnp.ones(3), [], {"n": jnp.array([jnp.nan])}):
        found = pm.diff(tree, jax.tree.map(lambda x: x, tree))
        assert not found
        assert found == pm.diff(tree, tree)
    assert str(pm.diff(MODEL, MODEL)) == "Diff: none in 4 leaves"


@given(
    st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=6),
    st.lists(st.floats(-100, 100, width=32), min_size=6, max_size=6),
    st.sampled_from(["float16", "bfloat16", "float32", "int8"]),
)
def test_numbers_are_those_of_numpy(first, second, dtype):
    """The largest and the relative difference, and how many numbers differ."""
    a = jnp.asarray(first).astype(dtype)
    b = jnp.asarray(second[: len(first)]).astype(dtype)
    found = pm.diff({"a": a}, {"a": b})
    x, y = (np.asarray(each).astype(np.float64) for each in (a, b))
    if (x == y).all():
        assert not found
        return
    (row,) = found.values
    assert row.largest == np.abs(x - y).max()
    assert (row.differing, row.size) == ((x != y).sum(), len(first))
    assert row.relative == (np.abs(x - y).max() / np.abs(x).max() if x.any() else np.inf)


def test_each_kind_of_difference_has_its_list():
    """A leaf that comes, goes, or has another shape, dtype, class or value."""
    ones = jnp.ones(2)
    one = {"added": None, "removed": ones, "shape": ones, "dtype": ones, "value": ones}
    one |= {"layer": nn.Identity(), "same": ones, "number": 1}
    two = {"added": ones, "removed": None, "shape": jnp.ones(3), "dtype": ones.astype("bfloat16")}
    two |= {"value": 0 * ones, "layer": nn.Lambda(jnp.tanh), "same": np.ones(2, "f"), "number": 2}
    found = pm.diff(one, two)

    assert found.added == ("added: f32[2]",)
    assert found.removed == ("removed: f32[2]",)
    assert found.shapes == ("shape: f32[2] -> f32[3]",)
    assert found.dtypes == ("dtype: f32[2] -> bf16[2]",)
    assert found.classes == ("layer: pytreemod.nn.Identity -> pytreemod.nn.Lambda",)
    assert found.configuration == ("number: 1 -> 2",)
    assert [row.name for row in found.values] == ["value"]
    assert found.equal == 1


def test_files_and_trees_are_compared_alike(tmp_path):
    """Either side may be a path."""
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    pm.save(first, MODEL)
    pm.save(second, changed())
    expected = pm.diff(MODEL, changed())

    assert expected.values[0].name == "layers.1.bias"
    for a in (MODEL, first):
        for b in (changed(), second):
            assert pm.diff(a, b) == expected
    assert not pm.diff(first, MODEL)
    assert not pm.diff(os.fspath(second), second)


def test_what_has_equal_checksums_is_not_read(tmp_path):
    """Equal damage in both files is not noticed; different arrays are read, and checked."""
    paths = [tmp_path / "first.safetensors", tmp_path / "second.safetensors"]
    for path, model in zip(paths, (MODEL, changed()), strict=True):
        pm.save(path, model)
        weight = np.asarray(MODEL.layers[0].weight).tobytes()
        path.write_bytes(path.read_bytes().replace(weight, bytes(len(weight))))
    assert [row.name for row in pm.diff(*paths).values] == ["layers.1.bias"]
    with pytest.raises(pm.errors.FileError, match="checksums"):
        pm.diff(paths[0], MODEL)


def test_a_file_of_other_tools(tmp_path):
    """Its names are those of a dict."""
    import safetensors.numpy

    path = tmp_path / "other.safetensors"
    safetensors.numpy.save_file({"a": np.ones(2, np.float32)}, path)
    assert not pm.diff(path, {"a": jnp.ones(2)})
    assert pm.diff(path, {"a": jnp.zeros(2)}).values[0].largest == 1


def test_shapes_alone_compare_as_shapes():
    """An abstract tree has no values that could differ."""
    skeleton = pm.filter_eval_shape(lambda: nn.MLP(3, 2, 4, 1, key=KEY))
    assert not pm.diff(skeleton, MODEL)
    assert pm.diff(skeleton, nn.MLP(3, 2, 5, 1, key=KEY)).shapes


def test_what_was_given_to_modules_is_a_difference(tmp_path):
    """Roles and precisions are in no leaf; files have them, too."""
    role = pm.with_role(MODEL, "layers.0.weight", "buffer")
    mixed = "params=float32,compute=bfloat16,output=float32"
    precision = pm.with_precision(MODEL, pm.by({"layers.1": mixed, ...: None}))
    expected = {
        "role": ("layers.0.<roles>: nothing -> ((('weight',), 'buffer'),)",),
        "precision": (f"layers.1.<precision>: nothing -> {mixed}",),
    }
    for name, model in {"role": role, "precision": precision}.items():
        pm.save(tmp_path / name, model)
        for other in (model, tmp_path / name):
            found = pm.diff(MODEL, other)
            assert found.configuration == expected[name]
            assert (found.equal, found.values) == (4, ())
        assert not pm.diff(tmp_path / name, model)


def test_what_is_in_no_table_is_a_difference_of_trees():
    """Functions of one name, kinds of containers, empty ones."""
    one, two = (nn.Lambda(lambda x, y=number: x + y) for number in (1, 2))
    (line,) = pm.diff([one], [two]).configuration
    assert line.startswith("0.fn: test_what_is_in_no_table")
    assert line.endswith(", not equal")
    assert not pm.diff([one], [one])
    assert pm.diff((1,), [1]).configuration == ("<root>: tuple of 1 -> list of 1",)
    assert pm.diff({"a": None}, {"a": []}).configuration == ("a: None -> list of 0",)
    # Said once.
    other = pm.with_mode(MODEL, activation=jax.nn.gelu)
    assert pm.diff([MODEL], [other]).configuration == ("0.activation: jax.nn.relu -> jax.nn.gelu",)


def test_ties_and_low_rank_updates_are_named_by_their_parts():
    """A matrix that became the base of an update is three arrays."""
    adapted = pm.lora(MODEL, "layers.0.weight", 1, key=KEY)
    found = pm.diff(MODEL, adapted)
    assert found.added == (
        "layers.0.weight.base: f32[4,3]",
        "layers.0.weight.a: f32[1,3]",
        "layers.0.weight.b: f32[4,1]",
    )
    assert found.removed == ("layers.0.weight: f32[4,3]",)


def test_a_damaged_file_is_refused(tmp_path):
    """It has no values to compare."""
    path = tmp_path / "model.safetensors"
    pm.save(path, MODEL)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(pm.errors.FileError, match=r"model\.safetensors"):
        pm.diff(path, MODEL)
