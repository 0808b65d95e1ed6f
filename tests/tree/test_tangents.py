"""apply_updates, and derivatives that are passed in."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pytreemod as pm
from pytreemod.errors import StructureError
from tests.helpers.comparing import assert_same
from tests.helpers.trees import Static, affine, ramp


def test_none_leaves_a_leaf_or_a_subtree_as_it_is():
    """Where the update is None, the same object remains; elsewhere the configuration does."""
    model = {"a": [1, 2], "b": affine(), "c": "text", "d": Static(jnp.ones(2), 3)}
    update = {"a": [None, 5], "b": None, "c": None, "d": Static(jnp.full(2, 0.5), 3)}
    updated = pm.apply_updates(model, update)

    assert updated["a"] == [1, 7]
    assert updated["b"] is model["b"]
    assert updated["c"] == "text"
    assert updated["d"] == Static(jnp.full(2, 1.5), 3)


def test_derivatives_of_integers_are_no_update():
    """JAX's zeros, which cannot be added, leave a leaf unchanged, as None does."""
    model = {"count": jnp.arange(3), "w": ramp(2)}
    _, pullback = jax.vjp(lambda m: m["w"] * m["count"][2].astype(float), model)
    new = pm.apply_updates(model, *pullback(jnp.ones(2)))
    assert new["count"] is model["count"]
    np.testing.assert_array_equal(new["w"], model["w"] + 2)


@pytest.mark.parametrize("add", [pm.apply_updates, jax.jit(pm.apply_updates)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "complex64"])
def test_a_step_changes_no_dtype(add, dtype):
    """Half precision stays half, whatever the optimizer computes in; as with optax."""
    model, update = jnp.ones(2, dtype), jnp.full(2, 0.5, "float32")
    with jax.numpy_dtype_promotion("standard"):
        updated, expected = add(model, update), optax.apply_updates(model, update)
    assert updated.dtype == expected.dtype == dtype
    np.testing.assert_array_equal(updated, expected)


W = {"w": jnp.ones((3, 2))}


@pytest.mark.parametrize(
    ("model", "updates", "error", "text"),
    [
        # Nothing is broadcast.
        *[
            (W, {"w": jnp.ones(shape)}, StructureError, r"model\['w'\]")
            for shape in [(4, 3, 2), (1, 1), (2,), (1, 3, 2), ()]
        ],
        ([affine()], [[jnp.ones(2)]], ValueError, "type"),
        ({"w": None, "b": 1.0}, {"w": 1.0, "b": 1.0}, StructureError, r"model\['w'\]"),
        (affine(), jnp.ones(3), StructureError, r"f32\[3\]"),
        ({"a": "text"}, {"a": 1.0}, StructureError, r"model\['a'\]"),
        # Its imaginary part would be dropped.
        (
            Static(ramp(2), 3),
            Static(jnp.full(2, 1j), 3),
            StructureError,
            r"(?s)c64\[2\].*model\.weight",
        ),
    ],
)
def test_updates_that_do_not_fit_are_refused(model, updates, error, text):
    """An update for what is not there does not pass in silence; nor do swapped arguments."""
    with jax.numpy_rank_promotion("allow"), pytest.raises(error, match=text):
        pm.apply_updates(model, updates)


@pytest.mark.parametrize("wrong", [jnp.ones(2), jnp.ones(3, "float16"), 1.0, "text"])
def test_a_cotangent_has_the_shape_and_dtype_of_its_value(wrong):
    """None is zero, of a leaf or of a whole node."""
    model = {"w": jnp.ones(3), "n": 2}
    pullback = pm.filter_vjp(lambda m: [2.0 * m["w"], m["n"]], model)[1]
    with pytest.raises(StructureError, match=r"cotangent\[0\].*for f32\[3\]"):
        pullback([wrong, None])
    for no_number in (None, np.zeros((), jax.dtypes.float0)):
        found = pullback([jnp.ones(3), no_number])[0]
        assert_same(found, {"w": jnp.full(3, 2.0), "n": None})
    for zero in (None, [None, None]):
        assert_same(pullback(zero)[0]["w"], jnp.zeros(3))
