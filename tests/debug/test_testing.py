"""pytreemod.testing: assertions that name the paths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pytreemod as pm
from pytreemod import nn

KEY = jax.random.key(0)
BEFORE = nn.MLP(3, 2, 4, 1, key=KEY)
AFTER = pm.tree_at(lambda m: m.layers[1].bias, BEFORE, replace_fn=lambda b: b + 1)


def test_what_changed():
    pm.testing.assert_changed(BEFORE, AFTER)
    pm.testing.assert_changed(BEFORE, AFTER, only="layers.1")
    pm.testing.assert_changed(BEFORE, AFTER, only=pm.select.path("**.bias"))
    pm.testing.assert_changed(BEFORE, AFTER, only=["layers.1.bias"])
    pm.testing.assert_unchanged(BEFORE, AFTER, ~pm.select.path("layers.1.bias"))
    pm.testing.assert_unchanged(BEFORE, BEFORE)


def test_nan_equals_nan():
    tree = {"a": jnp.array([1.0, jnp.nan])}
    pm.testing.assert_unchanged(tree, {"a": jnp.array([1.0, jnp.nan])})
    pm.testing.assert_trees_close(tree, {"a": np.array([1.0, np.nan], np.float32)})


@given(dtype=st.sampled_from(["float16", "bfloat16", "float32"]), exponent=st.floats(-6, 1))
def test_tolerances_by_dtype(dtype, exponent):
    """Close by default is close by NumPy's rule with the tolerance of the dtype."""
    near = {"float16": 1e-3, "bfloat16": 1e-2, "float32": 1e-5}[dtype]
    a = jnp.asarray([1.0, 2.0], dtype)
    b = a + jnp.asarray(10**exponent, dtype)
    wide = [np.asarray(x).astype(np.float64) for x in (a, b)]
    if np.allclose(*wide, near, near):
        pm.testing.assert_trees_close(a, b)
    else:
        with pytest.raises(AssertionError, match="<root>"):
            pm.testing.assert_trees_close(a, b)
    pm.testing.assert_trees_close(a, b, rtol=0, atol=20)


def test_integers_and_keys_are_equal_or_not():
    with pytest.raises(AssertionError, match="at n"):
        pm.testing.assert_trees_close({"n": jnp.array([2, 3])}, {"n": jnp.array([2, 4])})
    with pytest.raises(AssertionError, match="at key"):
        pm.testing.assert_trees_close({"key": KEY}, {"key": jax.random.key(1)})
