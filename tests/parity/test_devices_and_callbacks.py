"""`filter_shard`, `filter_pmap` and `filter_pure_callback`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from tests.parity.helpers import ramp, same_under_both_imports

# Everything here compiles twice, so it is slow. The features have their own tests.
pytestmark = pytest.mark.slow

DEVICES = jax.devices()
MESH = Mesh(np.array(DEVICES).reshape(4, 2), ("data", "model"))
SPLIT = NamedSharding(MESH, P("data"))
WHOLE = NamedSharding(MESH, P())


def where(tree: Any) -> list[str]:
    """How the arrays of a tree lie."""
    return [str(leaf.sharding) for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]


def make_layer(eqx):
    """A layer with an array, a None and a static field."""

    class Layer(eqx.Module):
        weight: jax.Array
        bias: jax.Array | None
        size: int = eqx.field(static=True)

    return Layer(ramp(4, 4), None, 2)


# ---- filter_shard


@pytest.mark.parametrize(
    "spec", [SPLIT, WHOLE, DEVICES[3], SingleDeviceSharding(DEVICES[2])], ids=str
)
@same_under_both_imports
def test_shard_puts_arrays_where_it_is_told(eqx, spec):
    """Modules, containers, NumPy arrays; other leaves are unchanged."""
    tree = {"layer": make_layer(eqx), "host": np.ones(4, np.float32), "s": "text", "f": jnp.sin}
    moved = eqx.filter_shard(tree, spec)
    return moved, where(moved)


# ---- filter_pmap: deprecated in Equinox's own words, and JAX 0.12 warns of axis_size


def pmapped(program):
    """A program with filter_pmap under both imports."""
    return same_under_both_imports(program, equinox_warns=".*")


@pmapped
def test_pmap_maps_arrays_and_passes_the_rest(eqx):
    """Every array over axis 0; strings, numbers, functions and configuration are unchanged."""

    @eqx.filter_pmap
    def fn(x, tree, how):
        return x * 2 + tree["y"], {"how": how, "n": tree["n"], "f": jnp.sin}

    return fn(ramp(4), {"y": ramp(4), "n": 3}, "how"), fn(np.ones(2), {"y": ramp(2), "n": 1}, "a")


# ---- filter_pure_callback


@pytest.mark.parametrize("jit", [True, False])
@same_under_both_imports
def test_callbacks_take_and_give_any_trees(eqx, jit):
    """Modules, strings and functions go to the host and come back."""
    layer = make_layer(eqx)

    def on_host(layer, x, how, *, scale):
        y = np.asarray(layer.weight) @ np.asarray(x) * scale
        return {"y": y, "how": how + "!"}, (layer, None, 3)

    def fn(layer, x, how):
        struct = jax.ShapeDtypeStruct((4,), jnp.float32)
        promised = {"y": struct, "how": how + "!"}, (layer, None, 3)
        return eqx.filter_pure_callback(
            on_host, layer, x, how, scale=2.0, result_shape_dtypes=promised
        )

    return (eqx.filter_jit(fn) if jit else fn)(layer, ramp(4), "how")
