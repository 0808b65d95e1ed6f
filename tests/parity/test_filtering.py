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
    """A tree with one leaf of each kind that matters."""
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


@same_under_both_imports
def test_predicates_agree_on_tracers(eqx):
    """Under `jax.jit` a traced array counts as an array, with its own dtype."""
    # Not is_inexact_array_like: Equinox 0.13.8 fails on a tracer of JAX 0.10.
    names = ["is_array", "is_array_like", "is_inexact_array"]
    seen = []

    @jax.jit
    def trace(x, n):
        seen.extend(getattr(eqx, name)(leaf) for name in names for leaf in (x, n))
        return x

    trace(1.0, 2)
    return seen


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


@same_under_both_imports
def test_partition_by_a_prefix_that_mixes_predicates(eqx):
    """Predicates may stand in the prefix tree, each for the part below it."""
    spec = {"weight": False, "count": eqx.is_array, "host": True, "rest": eqx.is_inexact_array_like}
    return eqx.partition(example(), spec)


@same_under_both_imports
def test_none_can_be_a_leaf(eqx):
    """`is_leaf` may make leaves of the Nones, which the predicate then sees."""
    is_none = lambda node: node is None  # noqa: E731
    return eqx.filter([None, ramp(2), (None, 1)], is_none, replace="full", is_leaf=is_none)
