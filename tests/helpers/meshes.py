"""Eight virtual devices as a mesh of four by two, and the shardings of arrays on it."""

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

DEVICES = jax.devices()
MESH = Mesh(np.array(DEVICES).reshape(4, 2), ("data", "model"))
OTHER_MESH = Mesh(np.array(DEVICES).reshape(2, 4), ("data", "model"))
EXPLICIT = Mesh(np.array(DEVICES).reshape(4, 2), ("data", "model"), (AxisType.Explicit,) * 2)


def on(*entries: Any, mesh: Mesh = MESH) -> NamedSharding:
    """The sharding with these entries: `on("data")`."""
    return NamedSharding(mesh, P(*entries))


def lies(array: jax.Array) -> Any:
    """The spec of an array without the Nones at its end; its device if it is on a single one."""
    if not isinstance(array.sharding, NamedSharding):
        (device,) = array.devices()
        return device
    entries = tuple(array.sharding.spec)
    while entries and entries[-1] is None:
        entries = entries[:-1]
    return entries


def all_lie(tree: Any) -> list[Any]:
    """The specs of the arrays of a tree, in order."""
    return [lies(leaf) for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
