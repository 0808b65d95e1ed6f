"""`prelu`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod.nn.functional import prelu
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close, wave


@pytest.mark.parametrize("spatial", [(), (5,), (2, 3)], ids=label)
@pytest.mark.slow
def test_prelu_is_pytorchs(torch, spatial):
    """The same numbers and gradients, also at zero, for a slope for each channel."""
    x = wave(3, 4, *spatial)
    x.reshape(-1)[:2] = 0.0
    slope = wave(4, phase=1)
    theirs = [torch.tensor(array, requires_grad=True) for array in (x, slope)]
    torch.nn.functional.prelu(*theirs).sin().sum().backward()

    ours = jnp.asarray(x), jnp.asarray(slope).reshape(4, *(1,) * len(spatial))
    grads = jax.grad(lambda x, slope: jnp.sin(prelu(x, slope)).sum(), (0, 1))(*ours)

    assert_close(prelu(*ours), torch.nn.functional.prelu(*theirs))
    assert_close(grads[0], theirs[0].grad)
    assert_close(grads[1].reshape(4), theirs[1].grad)


def test_prelu_is_its_formula():
    """By NumPy, for one slope and for one for each entry."""
    x = wave(2, 3)
    for slope in (np.float32(0.25), wave(3), wave(2, 1)):
        assert_close(prelu(jnp.asarray(x), jnp.asarray(slope)), np.where(x > 0, x, slope * x))


def test_half_precision_is_added_up_in_single():
    """The gradient of one slope is a sum over x: in bfloat16 it would stop at 256."""
    x = -jnp.ones(1000, jnp.bfloat16)

    grad = jax.grad(lambda slope: prelu(x, slope).astype("f4").sum())(jnp.asarray(0.5, x.dtype))

    assert prelu(x, jnp.float32(0.5)).dtype == jnp.bfloat16
    assert float(grad) == -1000
