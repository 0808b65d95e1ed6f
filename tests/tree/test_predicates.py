"""Which leaves count as arrays: `tests/parity/test_filtering.py` has values of every kind."""

import jax
import jax.numpy as jnp

import pytreemod as pm

PREDICATES = [pm.is_array, pm.is_array_like, pm.is_inexact_array, pm.is_inexact_array_like]


def test_tracers_are_arrays():
    """Under a trace the answers are those for the array of the tracer."""
    seen = []
    jax.make_jaxpr(lambda x, n: seen.extend([f(x), f(n)] for f in PREDICATES))(jnp.ones(2), 3)
    assert seen == [[True, True], [True, True], [True, False], [True, False]]
