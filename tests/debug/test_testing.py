"""pytreemod.testing: assertions that name the paths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import SpecError

KEY = jax.random.key(0)
BEFORE = nn.MLP(3, 2, 4, 1, key=KEY)
AFTER = pm.tree_at(lambda m: m.layers[1].bias, BEFORE, replace_fn=lambda b: b + 1)
assert_changed, assert_trees_close = pm.testing.assert_changed, pm.testing.assert_trees_close


def test_what_changed():
    for only in (..., "layers.1", pm.select.path("**.bias"), ["layers.1.bias"]):
        assert_changed(BEFORE, AFTER, only=only)
    assert_changed(BEFORE, BEFORE, only=[])


WRONG = {
    "outside": (AFTER, "layers.0", r"no change outside of 'layers.0'\n  at layers\[1\].bias"),
    "one of two": (AFTER, ["layers.1.bias", "layers.0"], r"a change in 'layers.0'\n  at layers"),
    "nothing": (BEFORE, ..., "a change in"),
    "nothing may": (AFTER, [], r"no change outside of \[\]"),
    "nothing picked": (BEFORE, lambda leaf: False, "no leaf"),
    "a shape": (pm.tree_at("layers.1.bias", BEFORE, jnp.ones(3)), ..., r"f32\[2\] -> f32\[3\]"),
    "a dtype": (pm.tree_at("layers.1.bias", BEFORE, jnp.ones(2, "int8")), ..., "f32.* -> i8"),
}


@pytest.mark.parametrize(("after", "only", "match"), WRONG.values(), ids=WRONG)
def test_what_must_not_change(after, only, match):
    """Other leaves, and those that were to change and have not; shapes and dtypes never."""
    with pytest.raises(AssertionError, match=match):
        assert_changed(BEFORE, after, only)


def test_a_misspelt_path_is_refused():
    with pytest.raises(SpecError, match="biass"):
        assert_changed(BEFORE, AFTER, "layers.1.biass")


def test_nan_equals_nan():
    tree, same = {"a": jnp.array([1.0, jnp.nan])}, {"a": np.array([1.0, np.nan], np.float32)}
    assert_changed(tree, same, only=[])
    assert_trees_close(tree, same)
    assert_trees_close(tree, {"a": tree["a"] * (1 + 1e-6)})


@given(
    dtype=st.sampled_from(["float16", "bfloat16", "float32", "complex64"]),
    exponent=st.floats(-6, 1),
)
def test_tolerances_by_dtype(dtype, exponent):
    """Close by default is close by NumPy's rule with the tolerance of the dtype."""
    near = {"float16": 1e-3, "bfloat16": 1e-2}.get(dtype, 1e-5)
    a = jnp.asarray([1.0, 2.0], dtype)
    b = a + jnp.asarray(10**exponent, dtype)
    wide = [np.asarray(x).astype(np.complex128) for x in (a, b)]
    if np.allclose(*wide, near, near):
        assert_trees_close(a, b)
    else:
        with pytest.raises(AssertionError, match="<root>: largest difference"):
            assert_trees_close(a, b)
    assert_trees_close(a, b, rtol=0, atol=20)


@pytest.mark.parametrize(
    ("a", "b", "match"),
    [
        (jnp.array([2, 3]), jnp.array([2, 4]), "at x: largest difference 1"),
        (KEY, jax.random.key(1), "at x"),
        (1.0, 1.5, "x.*: 1.0 -> 1.5"),
        (jnp.ones(()), 1.0, "x.*: f32"),
        ([1.0], (1.0,), "x.*: list of 1 -> tuple"),
    ],
    ids=["integers", "keys", "numbers", "an array and a number", "containers"],
)
def test_what_is_not_floating_is_equal_or_not(a, b, match):
    assert_trees_close({"x": a}, {"x": a})
    with pytest.raises(AssertionError, match=match):
        assert_trees_close({"x": a}, {"x": b}, rtol=10.0)
