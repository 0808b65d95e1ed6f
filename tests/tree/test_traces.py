"""Traces are told apart, and a trace is the same at two moments of it."""

import jax
import jax.numpy as jnp

from pytreemod.tree.traces import current_trace


def test_a_trace_is_itself_and_no_other():
    """Equal twice in the same place; different inside jit, vmap and scan, and in two of them."""
    outside = current_trace()
    seen = []

    def note(x):
        seen.append(current_trace())
        assert seen[-1] == current_trace()
        return x

    jax.jit(note)(1.0)
    jax.vmap(note)(jnp.ones(2))
    jax.lax.scan(lambda carry, x: (note(carry), x), 1.0, jnp.ones(2))

    assert current_trace() == outside
    assert all(a != b for i, a in enumerate(seen) for b in [outside, *seen[:i]])
