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


def answers(value):
    """Those of the four predicates, as letters."""
    predicates = (pm.is_array, pm.is_array_like, pm.is_inexact_array, pm.is_inexact_array_like)
    found = [predicate(value) for predicate in predicates]
    assert {*map(type, found)} == {bool}
    return "".join("ny"[answer] for answer in found)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (jnp.ones(2), "yyyy"),
        (jnp.ones(2, jnp.complex64), "yyyy"),
        (jnp.arange(2), "yynn"),
        (jnp.asarray(True), "yynn"),
        (jax.random.key(0), "yynn"),
        (np.ones(2), "yyyy"),
        (np.float32(1), "yyyy"),
        (1.0, "nyny"),
        (1, "nynn"),
        (True, "nynn"),
        (HasJaxArray(1.0), "nyny"),
        (HasJaxArray(1), "nynn"),
        ("text", "nnnn"),
        (None, "nnnn"),
        (max, "nnnn"),
        (jax.ShapeDtypeStruct((2,), jnp.float32), "nnnn"),
    ],
    ids=label,
)
def test_predicates(value, expected):
    """NumPy arrays and scalars are arrays; Python numbers are array-like; structs are neither."""
    assert answers(value) == expected


def test_tracers_are_arrays():
    """Under a trace the answers are those for the array of the tracer."""
    seen = []
    jax.make_jaxpr(lambda x, n: seen.append((answers(x), answers(n))))(jnp.ones(2), 3)
    assert seen == [("yyyy", "yynn")]
