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
    """A layer with arrays, a static field and a method."""

    class Layer(eqx.Module):
        weight: jax.Array
        bias: jax.Array | None
        size: int = eqx.field(static=True)

        def __init__(self, size, key=None):
            self.size = size
            self.weight = ramp(4, 4) if key is None else jax.random.normal(key, (4, 4))
            self.bias = None if size == 0 else ramp(4)

        def __call__(self, x):
            y = self.weight @ x
            return y if self.bias is None else y + self.bias

        def method(self, x):
            return self(x) * self.size

    return Layer


# ---- filter_shard


@pytest.mark.parametrize(
    "spec", [SPLIT, WHOLE, DEVICES[3], SingleDeviceSharding(DEVICES[2])], ids=str
)
@same_under_both_imports
def test_shard_puts_arrays_where_it_is_told(eqx, spec):
    """Modules, containers, NumPy arrays; other leaves are unchanged."""
    tree = {"layer": make_layer(eqx)(2), "host": np.ones(4, np.float32), "s": "text", "f": jnp.sin}
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


@pytest.mark.parametrize(
    ("in_axes", "x", "y"),
    [
        ((0, 0), ramp(4, 2), ramp(4)),
        ((1, None), ramp(2, 4), ramp(2)),
        ((None, 0), ramp(2), ramp(4)),
        ((lambda leaf: leaf.ndim - 1, 0), ramp(2, 4), ramp(4)),
        ({"y": None}, ramp(4, 2), ramp(2)),
        (({"a": 0, "b": None}, None), {"a": ramp(4), "b": ramp(2)}, 1.0),
    ],
)
@pmapped
def test_pmap_axes_of_arguments(eqx, in_axes, x, y):
    """Ints, None, functions, trees, and dicts by name."""
    return eqx.filter_pmap(lambda x, y: (jax.tree.map(lambda x: x * 2, x), y), in_axes=in_axes)(
        x, y
    )


# ---- filter_pure_callback


@pytest.mark.parametrize("jit", [True, False])
@same_under_both_imports
def test_callbacks_take_and_give_any_trees(eqx, jit):
    """Modules, strings and functions go to the host and come back."""
    layer = make_layer(eqx)(2)

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
