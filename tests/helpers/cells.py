"""Functions for loops: a recurrent cell, stacked layers, a function that counts its traces."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np

import pytreemod as pm
from tests.helpers.trees import affine, ramp


class Cell(pm.Module):
    """A recurrent cell: arrays, a number, a function and a string."""

    weight: jax.Array
    rate: float = 0.5
    act: object = jnp.tanh
    name: str = "cell"

    def __call__(self, carry, x):
        return self.step(carry, x)

    def step(self, carry, x):
        carry = self.act(self.weight @ carry + self.rate * x)
        return carry, carry

    def advance(self, x):
        return self.act(self.weight @ x)

    def is_small(self, x):
        return jnp.sum(jnp.abs(x * self.rate)) < 100.0


def cell(start=0.1):
    """A small `Cell`."""
    return Cell(ramp(2, 2, start=np.float32(start)))


def stacked(count=3):
    """One square layer with stacked arrays."""
    return pm.filter_vmap(lambda start: affine(2, 2, start))(jnp.arange(float(count)))


def counted(fn):
    """A function that counts its traces."""
    traces = []

    @ft.wraps(fn)
    def run(*args):
        traces.append(None)
        return fn(*args)

    return run, traces
