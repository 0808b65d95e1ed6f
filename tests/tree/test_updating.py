"""apply_updates."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError, ShapeError, StructureError
from tests.helpers.trees import Static, affine, ramp


def test_adds_leaf_by_leaf():
    """model + updates, with the structure and configuration of the model."""
    model = Static(jnp.ones(2), 3)
    updated = pm.apply_updates(model, Static(jnp.full(2, 0.5), 3))

    assert updated.size == 3
    np.testing.assert_array_equal(updated.weight, [1.5, 1.5])


def test_none_leaves_a_leaf_or_a_subtree_as_it_is():
    """Where the update is None, the same object remains, be it a leaf or a subtree."""
    model = {"a": [1, 2], "b": affine(), "c": "text"}
    updated = pm.apply_updates(model, {"a": [None, 5], "b": None, "c": None})

    assert updated["a"] == [1, 7]
    assert updated["b"] is model["b"]
    assert updated["c"] == "text"


@pytest.mark.parametrize("shape", [(4, 3, 2), (1, 1), (2,), (1, 3, 2), ()])
def test_an_update_is_of_the_shape_of_what_it_is_for(shape):
    """Nothing is broadcast: neither the update nor the model."""
    model = {"weight": jnp.ones((3, 2))}
    update = {"weight": jnp.ones(shape)}
    with jax.numpy_rank_promotion("allow"), pytest.raises(ShapeError, match=r"model\['weight'\]"):
        pm.apply_updates(model, update)


def test_derivatives_of_integers_are_no_update():
    """JAX's zeros, which cannot be added, leave a leaf unchanged, as None does."""
    model = {"count": jnp.arange(3), "w": ramp(2)}
    _, pullback = jax.vjp(lambda m: m["w"] * m["count"][2].astype(float), model)
    (grads,) = pullback(jnp.ones(2))

    new = pm.apply_updates(model, grads)
    assert new["count"] is model["count"]
    np.testing.assert_array_equal(new["w"], model["w"] + 2)


@pytest.mark.parametrize("add", [pm.apply_updates, jax.jit(pm.apply_updates)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "complex64"])
def test_a_step_changes_no_dtype(add, dtype):
    """Half precision stays half, whatever the optimizer computes in; as with optax."""
    model = jnp.ones(2, dtype)
    with jax.numpy_dtype_promotion("standard"):
        updated = add(model, jnp.full(2, 0.5, "float32"))
        expected = optax.apply_updates(model, jnp.full(2, 0.5, "float32"))

    assert updated.dtype == expected.dtype == dtype
    np.testing.assert_array_equal(updated, expected)


@pytest.mark.parametrize(
    ("model", "updates", "text"),
    [
        ([affine()], [[jnp.ones(2)]], "model"),
        ({"w": None, "b": 1.0}, {"w": 1.0, "b": 1.0}, r"model\['w'\]"),
        (affine(), jnp.ones(3), r"f32\[3\]"),
        ({"a": "text"}, {"a": 1.0}, r"model\['a'\]"),
    ],
)
def test_updates_of_another_structure_are_refused(model, updates, text):
    """An update for what is not there does not pass in silence; nor do swapped arguments."""
    with pytest.raises(StructureError, match=text):
        pm.apply_updates(model, updates)


def test_no_imaginary_part_is_dropped():
    """A complex update of what is real is refused."""
    with pytest.raises(ArgumentError, match=r"(?s)model\.weight.*c64\[2\]"):
        pm.apply_updates(Static(jnp.ones(2), 3), Static(jnp.full(2, 1 + 5j), 3))
