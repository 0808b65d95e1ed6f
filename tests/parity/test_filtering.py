"""Predicates, and taking trees apart by them: filter, partition, combine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.parity.helpers import ramp, same_under_both_imports

PREDICATES = ["is_array", "is_array_like", "is_inexact_array", "is_inexact_array_like"]


class Convertible:
    """Something that JAX can make an array of."""

    def __jax_array__(self):
        return jnp.float32(1.0)


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
    "convertible": Convertible(),
    "float": 1.0,
    "int": 1,
    "complex": 1j,
    "bool": True,
    "str": "a",
    "None": None,
    "function": jnp.sin,
    "list": [jnp.zeros(1)],
}


def example():
    return {
        "weight": ramp(2, 3),
        "count": jnp.int32(3),
        "host": np.arange(3.0),
        "rest": (1.5, 2, "text", None, [True, ramp(2)]),
    }


@pytest.mark.parametrize("name", PREDICATES)
@same_under_both_imports
def test_predicates_agree_on_every_kind_of_value(eqx, name):
    """Each predicate says the same bool about arrays, scalars, keys, shapes and strangers."""
    predicate = getattr(eqx, name)
    return {kind: predicate(value) for kind, value in CANDIDATES.items()}


OTHERS = {"weight": False, "count": True, "host": False}
SPECS = {
    "all": True,
    "none": False,
    "bools": {**OTHERS, "rest": False},
    "in a tuple": {**OTHERS, "rest": (True, False, True, None, True)},
    "in full": {**OTHERS, "rest": (False, False, True, None, [True, False])},
}


@pytest.mark.parametrize("spec", SPECS)
@same_under_both_imports
def test_partition_by_a_prefix_of_bools(eqx, spec):
    """A tree of bools that is a prefix says for each part which half it goes to."""
    kept, rest = eqx.partition(example(), SPECS[spec])
    return kept, rest, eqx.combine(kept, rest)
