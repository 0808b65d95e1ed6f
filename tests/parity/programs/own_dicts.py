"""Programs that inspect instances: to_dict, cached properties, states for pickle, protocols."""

import copy
import functools as ft
import pickle
from typing import Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp


class Serializable:
    """A plain mixin that knows nothing of Modules."""

    def to_dict(self):
        return {k: v for k, v in self.__dict__.items() if not k.startswith("_")}

    @classmethod
    def from_dict(cls, values):
        return cls(**values)

    def describe(self):
        return ", ".join(f"{k}={type(v).__name__}" for k, v in self.to_dict().items())


@runtime_checkable
class HasMean(Protocol):
    mean: jax.Array
    factor: jax.Array


class Gaussian(Serializable, eqx.Module):
    mean: jax.Array
    factor: jax.Array
    name: str = "x"

    @ft.cached_property
    def covariance(self):
        return self.factor @ self.factor.T

    @property
    def entropy(self):
        return 0.5 * jnp.linalg.slogdet(2 * jnp.pi * jnp.e * self.covariance)[1]


class Counted(eqx.Module):
    value: jax.Array
    hits: int

    def __getstate__(self):
        state = self.__dict__.copy()
        state["hits"] = 0
        return state

    def __setstate__(self, state):
        self.__dict__.update(state)


def main():
    model = Gaussian(jnp.zeros(2), jnp.array([[1.0, 0.0], [0.5, 2.0]]))
    first = model.covariance
    step = eqx.filter_jit(
        lambda m: eqx.apply_updates(m, jax.tree.map(jnp.ones_like, eqx.filter(m, eqx.is_array)))
    )
    stepped = step(model)
    shown = stepped.describe()
    edited = eqx.tree_at(lambda m: m.factor, model, 3 * model.factor)
    cached = [m.covariance for m in (edited, step(step(model)), copy.copy(model))]
    again = Gaussian.from_dict(step(model).to_dict())
    counted = eqx.filter_jit(lambda c: c)(Counted(jnp.ones(2), 5))
    return (
        first,
        sorted(step(model).to_dict()),
        shown,
        cached,
        edited.entropy,
        eqx.filter_grad(lambda m: m.entropy)(edited).factor,
        again.describe(),
        isinstance(model, HasMean),
        isinstance(step(model), HasMean),
        isinstance(counted, HasMean),
        pickle.loads(pickle.dumps(counted.__getstate__())),
        sorted(n for n in dir(step(model)) if n[0] != "_" and n != "replace"),
    )
