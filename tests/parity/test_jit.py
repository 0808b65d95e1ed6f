"""`filter_jit`: traced and static arguments, results, donation."""

import jax
import numpy as np
import pytest

from tests.parity.helpers import ramp, same_under_both_imports

# Everything here compiles twice, so it is slow. The features have their own tests.
pytestmark = pytest.mark.slow


@same_under_both_imports
def test_arrays_are_traced_and_the_rest_is_static(eqx):
    """Inside, arrays of either library are tracers; numbers, strings and functions are not."""
    kinds = []

    @eqx.filter_jit
    def look(tree, **more):
        leaves = jax.tree.leaves((tree, more))
        names = ["T" if isinstance(x, jax.core.Tracer) else type(x).__name__ for x in leaves]
        kinds.append(names)
        return tree[0]

    look((ramp(2), np.arange(3), np.float32(1.0), 1, 2.0, True, "a"), key=jax.random.key(0), n=3)
    return kinds


@same_under_both_imports
def test_nested_jit(eqx):
    """A jitted function calls another with traced, static and Module arguments."""

    @eqx.filter_jit
    def inner(tree, n):
        return tree["x"] * n, tree["name"]

    @eqx.filter_jit
    def outer(x, n):
        y, name = inner({"x": x, "name": "a"}, n)
        z = jax.jit(lambda v: inner({"x": v, "name": "b"}, 3)[0])(y)
        return y + z, name

    return outer(ramp(2), 2)


@pytest.mark.parametrize("donate", ["all", "all-except-first"])
@pytest.mark.parametrize("kind", ["instance", "method", "Partial"])
@same_under_both_imports
def test_donation_of_a_callable_gives_its_own_arrays(eqx, donate, kind):
    """An instance, a bound method, a Partial: its arrays are not the first argument."""

    class Layer(eqx.Module):
        weight: jax.Array

        def __call__(self, x):
            return self.weight * x, self.weight + x

        def apply(self, x):
            return self(x)

    layer = Layer(ramp(3))
    partial = eqx.Partial(Layer.__call__, layer)
    call = {"instance": layer, "method": layer.apply, "Partial": partial}[kind]
    x = ramp(3) + 1
    out = eqx.filter_jit(call, donate=donate)(x)
    return out, layer.weight.is_deleted(), x.is_deleted()
