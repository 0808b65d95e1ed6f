"""On which dtype values agree that JAX is to treat as one."""

import jax.numpy as jnp
import pytest

from pytreemod.transform.boundary.agreement import agreeing_dtype, may_be_promoted
from pytreemod.tree.differences import aval_of

WEAK, STRONG = aval_of(1.0), aval_of(jnp.ones((), jnp.float16))


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1.0, 2.0], jnp.float32),
        ([1, 2.0], jnp.float32),
        ([True, 1], None),
        ([1, jnp.ones((), jnp.float16)], jnp.float16),
        ([jnp.ones(()), jnp.ones((), jnp.float16)], None),
        ([1.0, jnp.arange(1)[0]], None),
        ([1, 2.0, 1j], jnp.complex64),
    ],
)
def test_the_dtype_on_which_values_agree(values, dtype):
    """That of the strong ones, to which the weak ones must promote."""
    avals = [aval_of(value) for value in values]
    assert agreeing_dtype(avals) == dtype
    assert agreeing_dtype(avals[::-1]) == dtype


def test_promotion_is_of_weak_values_alone():
    """A strongly typed value keeps its type."""
    assert may_be_promoted(WEAK, STRONG) == jnp.float16
    assert may_be_promoted(STRONG, WEAK) is None
