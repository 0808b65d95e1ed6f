"""look: returns a value unchanged, and notes its cotangent."""

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.transform.boundary.cotangents import beside_value, look
from tests.helpers.trees import ramp


def test_a_look_changes_no_bit_and_takes_the_cotangent():
    """Negative zero plus zero would be zero; integers are let through."""
    tree = {"x": jnp.asarray([-0.0, 2.0]), "n": jnp.asarray(3)}
    assert np.signbit(look(tree, [jnp.zeros(2)])["x"][0])

    def loss(x, zeros):
        return jnp.sum(look({"x": x, "n": jnp.asarray(3)}, [zeros])["x"] ** 2)

    of_x, of_zeros = jax.grad(loss, argnums=(0, 1))(ramp(2), jnp.zeros(2))
    np.testing.assert_array_equal(of_x, of_zeros)
    np.testing.assert_array_equal(of_x, 2 * ramp(2))


def test_a_look_can_be_differentiated_forwards_and_twice():
    """By the rule of a sum."""

    def run(x, zeros):
        return look(jnp.sin(x), [zeros]) ** 2

    moved = jax.jvp(run, (1.0, 0.0), (1.0, 3.0))[1]
    np.testing.assert_allclose(moved, 2 * jnp.sin(1.0) * (jnp.cos(1.0) + 3.0), rtol=1e-6)
    second = jax.jvp(jax.grad(run), (1.0, 0.0), (1.0, 0.0))[1]
    np.testing.assert_allclose(second, 2 * jnp.cos(2.0), rtol=1e-5)


def test_cotangents_are_put_where_the_floating_arrays_are():
    """None for other leaves, and nothing if there are no floating arrays."""
    tree = {"x": ramp(2), "n": jnp.asarray(3), "s": "text"}
    assert beside_value(tree, ["ct"]) == {"x": "ct", "n": None, "s": None}
    assert beside_value(jnp.asarray(3), []) is None
