"""Formulas that are traced once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod.nn.functional import batch_statistics, layer_norm, linear, normalize_batch
from pytreemod.nn.functional.inlining import as_arrays, traced_once
from tests.helpers.equations import equations
from tests.nn.numbers_to_compare import assert_close, wave


def test_calls_with_the_same_shapes_are_traced_once():
    """Under whatever function; other shapes and other static arguments are traced anew."""
    traces = []

    @traced_once("n")
    def power(x, *, n):
        traces.append((x.shape, n))
        return x**n

    for shape, n in (((3,), 2), ((3,), 2), ((4,), 2), ((3,), 3)):
        x = jnp.asarray(wave(*shape))
        jax.make_jaxpr(lambda x, n=n: power(x, n=n) + power(2 * x, n=n))(x)
        assert_close(power(x, n=n), x**n, rtol=1e-4)

    assert traces == [((3,), 2), ((4,), 2), ((3,), 3)]


X, WEIGHT, BIAS = jnp.ones((5, 3)), jnp.ones((4, 3)), jnp.ones(4)
FORMULAS = {
    "linear": lambda x: linear(x, WEIGHT, BIAS),
    "layer_norm": lambda x: layer_norm(x, (3,), jnp.ones(3), jnp.ones(3)),
    "normalize_batch": lambda x: normalize_batch(x)[:3],
    "batch_statistics": lambda x: batch_statistics(x, channel_axis=1)[:2],
}


@pytest.mark.parametrize("name", FORMULAS)
def test_the_program_has_no_trace_of_it(name):
    """The operations stand in the program one by one, as if written there, and nothing else."""
    formula = FORMULAS[name]
    found = equations(formula, X)
    with jax.disable_jit():  # which leaves the formulas unchanged
        plain = equations(formula, X)

    assert found["jit"] == found["pjit"] == 0
    assert found == plain


def test_what_is_no_array_becomes_one():
    """Numbers, NumPy arrays and objects that know how to; None stays."""

    class Wrapped:
        def __jax_array__(self):
            return jnp.ones(3)

    given = (1.0, np.ones(2, np.float32), Wrapped(), X)
    arrays = as_arrays(*given, None)

    assert [a.shape for a in arrays[:4]] == [(), (2,), (3,), (5, 3)]
    assert all(isinstance(a, jax.Array) for a in arrays[:4])
    assert arrays[3] is X
    assert arrays[4] is None
    assert_close(linear(Wrapped(), WEIGHT), jnp.full(4, 3.0))
