"""Predicates: which values are arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.parity.helpers import same_under_both_imports

PREDICATES = ["is_array", "is_array_like", "is_inexact_array", "is_inexact_array_like"]


class Convertible:
    """Something that JAX can make an array of."""

    def __init__(self, value):
        self.value = value

    def __jax_array__(self):
        return jnp.asarray(self.value)


CANDIDATES = {
    "f32": jnp.float32(1.0),
    "i32": jnp.int32(1),
    "bool array": jnp.array(True),
    "c64": jnp.complex64(1j),
    "bf16": jnp.zeros(2, jnp.bfloat16),
    "key": jax.random.key(0),
    "numpy": np.zeros(2),
    "numpy int": np.zeros(2, np.int32),
    "numpy scalar": np.float32(1),
    "numpy bool": np.bool_(True),
    "struct": jax.ShapeDtypeStruct((2,), jnp.float32),
    "convertible": Convertible(1.0),
    "convertible int": Convertible(1),
    "float": 1.0,
    "int": 1,
    "complex": 1j,
    "bool": True,
    "str": "a",
    "None": None,
    "function": jnp.sin,
    "list": [jnp.zeros(1)],
}


@pytest.mark.parametrize("name", PREDICATES)
@same_under_both_imports
def test_predicates_agree_on_every_kind_of_value(eqx, name):
    """Each predicate says the same bool about arrays, scalars, keys, shapes and strangers."""
    predicate = getattr(eqx, name)
    return {kind: predicate(value) for kind, value in CANDIDATES.items()}
