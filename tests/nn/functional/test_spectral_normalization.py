"""`power_iteration` and `divide_by_spectral_norm`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod.errors import ArgumentError
from pytreemod.nn.functional import divide_by_spectral_norm, power_iteration
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close, wave


@pytest.mark.parametrize("shape", [(3, 4), (5, 2), (3, 2, 2), (3, 2, 2, 1)], ids=label)
@pytest.mark.slow
def test_many_iterations_give_the_first_singular_vectors(shape):
    """Up to the sign that both have in common, those of NumPy's singular value decomposition."""
    weight = wave(*shape)
    matrix = weight.reshape(shape[0], -1)
    left, values, right = np.linalg.svd(matrix)

    start = jnp.ones(matrix.shape[0]), jnp.ones(matrix.shape[1])
    u, v = power_iteration(jnp.asarray(weight), *start, num_iterations=50)

    sign = np.sign(np.vdot(u, left[:, 0]))
    assert_close(sign * u, left[:, 0], atol=1e-3)
    assert_close(sign * v, right[0], atol=1e-3)
    normed = divide_by_spectral_norm(jnp.asarray(weight), u, v)
    assert_close(normed, weight / values[0], atol=1e-4)


def test_no_iteration_changes_nothing():
    """Neither vector, whatever its length."""
    given = jnp.array([3.0, 4.0]), jnp.array([2.0])

    assert_close(jnp.concat(power_iteration(jnp.ones((2, 1)), *given, num_iterations=0)), [3, 4, 2])


def test_one_iteration_is_the_default():
    """u = Wv / |Wv|, then v = u'W / |u'W|, restated in NumPy."""
    weight, v = wave(2, 3), np.array([0.6, 0.0, 0.8], np.float32)
    u = weight @ v / np.linalg.norm(weight @ v)

    found = power_iteration(jnp.asarray(weight), jnp.ones(2), jnp.asarray(v))

    assert_close(found[0], u)
    assert_close(found[1], u @ weight / np.linalg.norm(u @ weight))


def test_a_norm_below_eps_is_not_divided_by():
    """A weight of zero gives zero vectors, not nan."""
    u, v = power_iteration(jnp.zeros((2, 3)), jnp.ones(2), jnp.ones(3))

    assert u.tolist() == [0, 0]
    assert v.tolist() == [0, 0, 0]


@pytest.mark.slow
def test_the_gradient_sees_the_norm_but_not_the_iteration():
    """The vectors are constants; d(W / s)/dW has the part that comes from s."""
    weight, u, v = jnp.asarray(wave(2, 3)), jnp.array([0.6, 0.8]), jnp.array([1.0, 0.0, 0.0])
    out = jnp.asarray(wave(2, 3, phase=1))

    grad = jax.grad(lambda w: jnp.vdot(out, divide_by_spectral_norm(w, u, v)))(weight)
    through = jax.grad(lambda w: sum(map(jnp.sum, power_iteration(w, u, v))))(weight)

    sigma = jnp.vdot(u, weight @ v)
    expected = out / sigma - jnp.vdot(out, weight) / sigma**2 * jnp.outer(u, v)
    assert_close(grad, expected, rtol=1e-4, atol=1e-4)
    assert not through.any()


def test_half_precision_weights_have_single_precision_vectors():
    """The quotient has the dtype of the weight again."""
    weight = jnp.asarray(wave(2, 3)).astype(jnp.bfloat16)

    u, v = power_iteration(weight, jnp.ones(2), jnp.ones(3))

    assert u.dtype == v.dtype == jnp.float32
    assert divide_by_spectral_norm(weight, u, v).dtype == jnp.bfloat16
    with pytest.raises(ArgumentError, match=r"^normalization: expected real numbers, got complex"):
        power_iteration(jnp.ones((2, 3), jnp.complex64), jnp.ones(2), jnp.ones(3))
