"""`filter_shard`, `filter_pmap` and `filter_pure_callback`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from tests.parity.helpers import caught, ramp, same_under_both_imports

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


@same_under_both_imports
def test_shard_takes_a_prefix(eqx):
    """A tree of shardings whose leaves apply to subtrees."""
    tree = {"a": [ramp(4), (ramp(8), "text")], "b": ramp(4)}
    moved = eqx.filter_shard(tree, {"a": [SPLIT, WHOLE], "b": WHOLE})
    return moved, where(moved)


@same_under_both_imports
def test_shard_inside_jit(eqx):
    """There it constrains the sharding, and derivatives pass through it."""

    def loss(layer, x):
        layer = eqx.filter_shard(layer, WHOLE)
        x = eqx.filter_shard(x, SPLIT)
        return jnp.sum(jax.vmap(layer)(x) ** 2), eqx.filter_shard(x * 2, SPLIT)

    layer, x = make_layer(eqx)(2), ramp(8, 4)
    (value, doubled), grads = eqx.filter_jit(eqx.filter_value_and_grad(loss, has_aux=True))(
        layer, x
    )
    return value, doubled, grads, where(doubled)


@same_under_both_imports
def test_shard_refuses_what_does_not_fit(eqx):
    """More axes than the array has; a tree that is not a prefix."""
    return [
        caught(lambda: eqx.filter_shard(ramp(4), NamedSharding(MESH, P(None, "data")))),
        caught(lambda: eqx.filter_shard({"a": ramp(4)}, {"b": SPLIT})),
        caught(lambda: eqx.filter_shard(ramp(3), SPLIT)),
    ]


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


@pytest.mark.parametrize("out_axes", [0, 1, {"a": 1, "b": 0}, lambda leaf: leaf.ndim])
@pmapped
def test_pmap_axes_of_results(eqx, out_axes):
    """Where the members are stacked."""
    fn = eqx.filter_pmap(lambda x: {"a": x, "b": x + 1}, out_axes=out_axes)
    return fn(ramp(4, 2))


@pmapped
def test_pmap_collectives_and_size(eqx):
    """Names for axes; a number of members where nothing is mapped."""
    mean = eqx.filter_pmap(lambda x: x - jax.lax.pmean(x, "i"), axis_name="i")
    copies = eqx.filter_pmap(lambda x: x, in_axes=None, axis_size=3)
    same = eqx.filter_pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i", out_axes=None)
    return mean(ramp(4)), copies(ramp(2)), same(ramp(4))


@pmapped
def test_pmap_refuses(eqx):
    """More members than devices, sizes that differ, nothing to map, an unknown name."""
    fn = eqx.filter_pmap(lambda x, y: x)
    return [
        caught(lambda: fn(ramp(16), ramp(16))),
        caught(lambda: fn(ramp(4), ramp(2))),
        caught(lambda: eqx.filter_pmap(lambda x: x, in_axes=None)(ramp(4))),
        caught(lambda: eqx.filter_pmap(lambda x: x, in_axes={"z": 0})(ramp(4))),
    ]


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


@pytest.mark.parametrize("vmap_method", ["sequential", "expand_dims", "broadcast_all"])
@same_under_both_imports
def test_callbacks_under_vmap(eqx, vmap_method):
    """JAX's ways to map them."""

    def fn(x, y):
        return eqx.filter_pure_callback(
            lambda x, y, name: (np.asarray(x) * np.asarray(y), name),
            x,
            y,
            "name",
            result_shape_dtypes=(x, "name"),
            vmap_method=vmap_method,
        )

    return eqx.filter_vmap(fn, in_axes=(0, None))(ramp(3), jnp.float32(2))


@same_under_both_imports
def test_callbacks_that_return_something_else(eqx):
    """Other static values, another structure, another shape: JAX's error from the host."""

    def fail(result, promised):
        call = eqx.filter_pure_callback
        return caught(
            lambda: jax.block_until_ready(call(lambda: result, result_shape_dtypes=promised))
        )

    x = np.ones(2, np.float32)
    return [fail((x, "a"), (ramp(2), "b")), fail([x], (ramp(2),)), fail(x, ramp(3))]
