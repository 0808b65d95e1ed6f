"""apply_updates."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pytreemod as pm
from tests.helpers.comparing import assert_close
from tests.helpers.trees import Affine, Static, affine, double


def test_adds_leaf_by_leaf():
    """model + updates, with the structure and configuration of the model."""
    model = Static(jnp.ones(2), 3)
    updated = pm.apply_updates(model, Static(jnp.full(2, 0.5), 3))

    assert updated.size == 3
    np.testing.assert_array_equal(updated.weight, [1.5, 1.5])


def test_none_leaves_a_leaf_or_a_subtree_as_it_is():
    """Where the update is None, the very same object stays, be it a leaf or a whole subtree."""
    model = {"a": [1, 2], "b": affine(), "c": "text"}
    updated = pm.apply_updates(model, {"a": [None, 5], "b": None, "c": None})

    assert updated["a"] == [1, 7]
    assert updated["b"] is model["b"]
    assert updated["c"] == "text"


def test_with_optax():
    """What optax returns for the trainable half fits the whole model."""
    model = {"net": affine(), "act": double, "steps": 3}
    optimizer = optax.sgd(0.5)
    state = optimizer.init(pm.trainable(model)[0])
    grads = pm.filter_grad(lambda m: jnp.sum(m["net"].weight))(model)
    updates, _ = optimizer.update(grads, state)

    updated = pm.apply_updates(model, updates)
    assert (updated["act"], updated["steps"]) == (double, 3)
    assert_close(updated["net"].weight, model["net"].weight - 0.5)


def test_updates_of_another_structure_are_an_error():
    """An update for a field that is not there does not pass in silence."""
    with pytest.raises(ValueError, match=r"different types|Expected list"):
        pm.apply_updates([affine()], [[jnp.ones(2)]])


def test_under_jit():
    """The same inside a compiled function."""
    add = jax.jit(pm.apply_updates)

    assert_close(add(affine(), affine()), jax.tree.map(lambda x: x + x, affine()))
    assert isinstance(add(affine(), affine()), Affine)
