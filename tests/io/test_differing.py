"""diff: how two trees, or files, differ."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import FileError

KEY = jax.random.key(0)
MODEL = nn.MLP(3, 2, 4, 1, key=KEY)
OTHER = pm.tree_at(lambda m: m.layers[1].bias, MODEL, replace_fn=lambda b: b + 0.5)
ONES = jnp.ones(2)


def test_each_kind_of_difference_has_its_list():
    """A leaf that comes, goes, or has another shape, dtype, class, configuration or value."""
    one = {"new": None, "gone": ONES, "shape": ONES, "dtype": ONES, "value": ONES, "same": ONES}
    one |= {"layer": nn.Identity(), "rate": nn.Dropout(0.5), "key": KEY, "text": "a", "number": 1}
    two = {"new": ONES, "gone": None, "shape": jnp.ones(3), "dtype": np.ones(2), "value": 3 * ONES}
    two |= {"layer": nn.Lambda(jnp.tanh), "rate": nn.Dropout(0.3), "key": jax.random.key(9)}
    found = pm.diff(one, two | {"same": np.ones(2, "f"), "text": "b", "number": 4})

    assert found
    assert str(found).startswith("Diff: 1 added, 1 removed, 3 configuration, 2 forms, 3 values\n")
    assert found.added == ["new: f32[2]"]
    assert found.removed == ["gone: f32[2]"]
    assert found.forms == ["dtype: f32[2] -> f64[2]", "shape: f32[2] -> f32[3]"]
    texts = ["layer: class Identity -> class Lambda", "rate.p: 0.5 -> 0.3", "text: 'a' -> 'b'"]
    assert sorted(found.configuration) == texts
    values = ["key: 1 of 2 differ, by 9", "number: 1 of 1 differ, by 3"]
    assert found.values == [*values, "value: 2 of 2 differ, by 2"]


@pytest.mark.parametrize(
    "tree",
    [MODEL, {"a": [1, None, "text"]}, ONES, [], {"n": jnp.array([jnp.nan, 1])}, [KEY]],
    ids=["model", "dict", "array", "empty", "NaN", "key"],
)
def test_equal_trees_have_no_difference(tree):
    """NaN equals NaN here, and a copy the original."""
    found = pm.diff(tree, jax.tree.map(lambda x: x, tree))
    assert not found
    assert str(found) == "Diff: none"
    assert found == pm.diff(tree, tree)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "uint8", "int4", "bool"])
def test_numbers_are_subtracted_without_overflow(dtype):
    """The largest difference is that of the numbers, whatever their dtype holds."""
    one, two = jnp.array([0, 1, 1]).astype(dtype), jnp.array([1, 0, 1]).astype(dtype)
    assert pm.diff({"x": one}, {"x": two}).values == ["x: 2 of 3 differ, by 1"]


@pytest.mark.parametrize(("x", "y"), [(jnp.nan, 1.0), (1.0, jnp.nan), (jnp.inf, -jnp.inf)])
def test_what_is_not_finite_differs_from_other_numbers(x, y):
    (line,) = pm.diff({"x": jnp.array([x, 2])}, {"x": jnp.array([y, 2])}).values
    assert line.startswith("x: 1 of 2 differ")


def test_files_and_trees_are_compared_alike(tmp_path):
    """Either side may be a path, also to a file of another tool, which has names alone."""
    first, second = tmp_path / "first.safetensors", str(tmp_path / "second.safetensors")
    pm.save(first, MODEL)
    pm.save(second, OTHER)
    expected = pm.diff(MODEL, OTHER)

    assert expected.values == ["layers.1.bias: 2 of 2 differ, by 0.5"]
    assert [pm.diff(a, b) for a in (MODEL, first) for b in (OTHER, second)] == [expected] * 4
    assert not pm.diff(first, MODEL)
    safetensors.numpy.save_file({"a": np.ones(2, "f")}, second)
    assert not pm.diff({"a": ONES}, second)
    (tmp_path / "first.safetensors").write_bytes(first.read_bytes()[:-8])
    with pytest.raises(FileError, match=r"first\.safetensors"):
        pm.diff(first, MODEL)


def test_a_stack_is_compared_with_a_list_of_its_layers():
    """By the names that both have in files."""
    stack = nn.Stack(lambda key: nn.Linear(2, 2, key=key), 2, key=KEY)
    layers = [nn.Linear(2, 2, key=key) for key in jax.random.split(KEY, 2)]
    assert not pm.diff(stack, layers)
    layers[1] = nn.Linear(2, 2, False, key=KEY)
    assert pm.diff(stack, layers).removed == ["1.bias: f32[2]"]
