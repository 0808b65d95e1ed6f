"""Invariants: __check_init__ along the MRO, after conversion, once per construction."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp

CALLS = []


class Positive(eqx.Module):
    value: jax.Array = eqx.field(converter=jnp.asarray)

    def __check_init__(self):
        CALLS.append("Positive")
        if not eqx.is_array(self.value):
            raise TypeError("converted before it is checked")
        if not isinstance(self.value, jax.core.Tracer) and self.value <= 0:
            raise ValueError(f"{type(self).__name__} must be positive")


class Probability(Positive):
    def __check_init__(self):
        CALLS.append("Probability")
        if not isinstance(self.value, jax.core.Tracer) and self.value > 1:
            raise ValueError("at most one")

    def __invert__(self):
        return Probability(1 - self.value)

    def __and__(self, other):
        return Probability(self.value * other.value)


class Finite:
    def __check_init__(self):
        CALLS.append("Finite")


class Bounded(Finite, Probability):
    label: str = eqx.field(static=True, default="")

    def __init__(self, value, label=""):
        self.value = value
        self.label = label


def outcome(call):
    CALLS.clear()
    try:
        value = call()
    except (ValueError, TypeError) as error:
        value = str(error)
    return value, list(CALLS)


def main():
    half = Probability(0.5)
    return [
        outcome(lambda: Bounded(0.25, "quarter")),
        outcome(lambda: Bounded(-1.0)),
        outcome(lambda: Probability(2.0)),
        outcome(lambda: ~half & half),
        outcome(lambda: dataclasses.replace(half, value=0.75)),
        outcome(lambda: eqx.filter_jit(lambda p: ~p)(half)),
        outcome(lambda: eqx.tree_at(lambda p: p.value, half, jnp.array(3.0))),
        outcome(lambda: jax.tree.map(lambda x: x, half)),
    ]
