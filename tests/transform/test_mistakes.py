"""Mistakes, transform by transform: each is an error of ours that names the argument or the path.

Where Python's or JAX's own message is the right one, it arrives unchanged.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding  # noqa: F401, the rows use it
from jax.sharding import PartitionSpec as P  # noqa: F401

import pytreemod as pm
from tests.goldens import refusals
from tests.helpers.meshes import DEVICES
from tests.helpers.trees import ramp

MESH = Mesh(np.array(DEVICES).reshape(4, 2), ("a", "b"))


class M(pm.Module):
    w: jax.Array
    name: str = "m"

    def __call__(self, x):
        return (self.w * x.sum()).sum()


x, v, s = ramp(3, 2), ramp(3), jnp.asarray(1.0)
m = M(x)


def f(x):
    return x.sum()


def two(x, y):
    return (x * y).sum()


def S(fn, mesh=MESH, **options):
    """Under filter_jit, where a shard_map is used."""
    return pm.filter_jit(pm.filter_shard_map(fn, mesh=mesh, **options))


test_refusals = refusals(globals())
