"""`weight_norm` and `norm_except`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod.nn.functional import norm_except, weight_norm
from tests.goldens import refusals
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close, wave


def by_hand(v, g, axis):
    """The formula in NumPy, in float64."""
    v = np.asarray(v, np.float64)
    others = tuple(i for i in range(v.ndim) if axis is None or i != axis % v.ndim)
    return np.asarray(g, np.float64) * v / np.sqrt((v**2).sum(others, keepdims=True))


@pytest.mark.parametrize("axis", [0, 1, -1, None], ids=label)
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 2)], ids=label)
@pytest.mark.sampled
def test_it_is_the_formula(shape, axis):
    """Beside NumPy, for each axis and for none."""
    v = jnp.asarray(wave(*shape))
    g = 2.0 + norm_except(v, axis=axis)

    assert_close(weight_norm(v, g, axis=axis), by_hand(v, g, axis))


@pytest.mark.parametrize("dim", [0, 1, None], ids=label)
@pytest.mark.slow
def test_numbers_and_gradients_are_pytorchs(torch, dim):
    """Of both arguments, through a function that weighs each number otherwise."""
    v, g = wave(4, 3), wave(*[n if i == dim else 1 for i, n in enumerate((4, 3))], phase=1)
    inner = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 4), dim=dim)
    lengths, directions = inner.parametrizations.weight.parameters()
    lengths.data = torch.tensor(g if dim is not None else g.reshape(lengths.shape))
    directions.data = torch.tensor(v)
    (inner.weight * torch.tensor(wave(4, 3, phase=2))).sum().backward()

    def weighed(v, g):
        return jnp.sum(weight_norm(v, g, axis=dim) * wave(4, 3, phase=2))

    grads = jax.grad(weighed, (0, 1))(jnp.asarray(v), jnp.asarray(g))
    assert_close(weight_norm(v, g, axis=dim), inner.weight)
    assert_close(grads[0], directions.grad, atol=1e-4)
    assert_close(grads[1].reshape(-1), lengths.grad.reshape(-1), atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=label)
def test_narrow_numbers_are_added_up_in_wide_ones(dtype):
    """300 squares of 15 are more than float16 has, and more than bfloat16 can add up."""
    v = jnp.full((1, 300), 15, dtype)

    norm = norm_except(v)

    assert norm.dtype == dtype
    assert_close(norm.astype(float), [[np.sqrt(300) * 15]], rtol=float(jnp.finfo(dtype).eps))
    assert weight_norm(v, norm).tolist() == v.tolist()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=label)
def test_with_its_own_lengths_it_is_the_array(dtype):
    """Up to the rounding of a sum in float32: in narrow dtypes to the bit."""
    v = jnp.asarray(wave(7, 5), dtype)
    found = weight_norm(v, norm_except(v))

    assert_close(found.astype(float), v.astype(float), rtol=3e-7, atol=0)
    assert dtype == jnp.float32 or found.tolist() == v.tolist()


test_refusals = refusals(globals())
