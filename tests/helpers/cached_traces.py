"""Transforms whose traces JAX caches, as functions of `x` and a State."""

import jax
import jax.numpy as jnp

import pytreemod as pm


def _given(x, state):
    """A branch that changes nothing."""
    return x, state


def _scanned(f):
    """`f` as the only step of a loop."""

    def step(state, x):
        x, state = f(x, state)
        return state, x

    def run(x, state):
        state, xs = pm.filter_scan(step, state, x[None])
        return xs[0], state

    return run


def _repeated(f):
    """`f` in a loop with a counter."""

    def step(i, carry):
        return f(*carry)

    return lambda x, state: pm.filter_fori_loop(0, 1, step, (x, state))


def _conditional(f):
    """`f` in a loop with a condition, which is false."""

    def step(carry):
        return f(*carry)

    def never(carry):
        return jnp.asarray(False)

    return lambda x, state: pm.filter_while_loop(never, step, (x, state))


def _on_a_device(f):
    """`f` for one member, on one device."""
    mapped = pm.filter_pmap(f, in_axes=(0, None), out_axes=(0, None), devices=jax.devices()[:1])

    def run(x, state):
        xs, state = mapped(x[None], state)
        return xs[0], state

    return run


CACHING = {
    "filter_jit": pm.filter_jit,
    "filter_pmap": _on_a_device,
    "filter_scan": _scanned,
    "filter_cond": lambda f: lambda x, state: pm.filter_cond(True, _given, f, x, state),
    "filter_switch": lambda f: lambda x, state: pm.filter_switch(0, [_given, f], x, state),
    "filter_fori_loop": _repeated,
    "filter_while_loop": _conditional,
}
