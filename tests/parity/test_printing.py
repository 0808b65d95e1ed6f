"""Printing trees."""

import dataclasses
import functools as ft
from collections import namedtuple
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.parity.helpers import ramp, same_under_both_imports

Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Plain:
    """A dataclass that is not a Module."""

    first: Any
    second: Any


def make_net(eqx):
    """A small Module of Modules, the same in both libraries."""

    class Layer(eqx.Module):
        weight: jax.Array
        bias: jax.Array | None
        size: int = eqx.field(static=True, default=2)

    class Net(eqx.Module):
        layers: list
        head: Layer
        extra: dict
        scale: float = 1.0

    layers = [Layer(ramp(2), ramp(1)), Layer(ramp(3), None)]
    return Net(layers, Layer(ramp(4), ramp(4) + 1), {"a": jnp.int32(1), "b": (2, 3)})


PRINTED = {
    "arrays": lambda eqx: [ramp(2, 3), jnp.int32(1), jnp.zeros((0,), jnp.bfloat16)],
    "more dtypes": lambda eqx: [
        jnp.array([True]),
        jnp.uint8(1),
        jnp.complex64(1),
        ramp(2).astype(jnp.float16),
        jnp.asarray(1.0),
    ],
    "numpy": lambda eqx: {"a": np.zeros((2, 3)), "b": np.int32(3)},
    "leaves": lambda eqx: [1, 2.5, None, "text", 1j, jax.ShapeDtypeStruct((2,), jnp.float32)],
    "containers": lambda eqx: {"a": [1, (2,)], "b": ({}, [], ()), "c": {"d": {1, 2}}},
    "functions": lambda eqx: [make_net, ramp, int, len],
    "partial": lambda eqx: ft.partial(make_net, 1, key=ramp(2)),
    "dataclass and named tuple": lambda eqx: Plain([1, ramp(2)], Pair(1, ramp(2))),
    "nested": lambda eqx: {"nets": [make_net(eqx), make_net(eqx).head]},
}


@pytest.mark.parametrize("tree", PRINTED)
@same_under_both_imports
def test_tree_pformat(eqx, tree):
    """Printed trees agree character for character, at every width and indent."""
    options = [{}, {"width": 30}, {"width": 5}, {"indent": 4}, {"short_arrays": False}]
    return [eqx.tree_pformat(PRINTED[tree](eqx), **chosen).splitlines() for chosen in options]
