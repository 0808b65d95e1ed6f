"""Which leaves count as arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from tests.labels import label


class HasJaxArray:
    """Something that JAX can make an array of."""

    def __init__(self, value):
        self.value = value

    def __jax_array__(self):
        return jnp.asarray(self.value)


def columns(value):
    """The answers of the four predicates."""
    predicates = (pm.is_array, pm.is_array_like, pm.is_inexact_array, pm.is_inexact_array_like)
    return tuple(predicate(value) for predicate in predicates)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (jnp.ones(2), (True, True, True, True)),
        (jnp.ones(2, jnp.complex64), (True, True, True, True)),
        (jnp.arange(2), (True, True, False, False)),
        (jnp.asarray(True), (True, True, False, False)),
        (jax.random.key(0), (True, True, False, False)),
        (np.ones(2), (True, True, True, True)),
        (np.float32(1), (True, True, True, True)),
        (1.0, (False, True, False, True)),
        (1, (False, True, False, False)),
        (True, (False, True, False, False)),
        (HasJaxArray(1.0), (False, True, False, True)),
        (HasJaxArray(1), (False, True, False, False)),
        ("text", (False, False, False, False)),
        (None, (False, False, False, False)),
        (max, (False, False, False, False)),
        (jax.ShapeDtypeStruct((2,), jnp.float32), (False, False, False, False)),
    ],
    ids=label,
)
def test_predicates(value, expected):
    """NumPy arrays and scalars are arrays; Python numbers are array-like; structs are neither."""
    found = columns(value)

    assert found == expected
    assert all(type(answer) is bool for answer in found)


def test_tracers_are_arrays():
    """Under a trace the answers are those for the array of the tracer."""
    seen = []
    jax.make_jaxpr(lambda x, n: seen.append((columns(x), columns(n))))(jnp.ones(2), 3)

    assert seen == [((True, True, True, True), (True, True, False, False))]
