"""How arrays are split over a mesh, as their types say."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pytreemod.tree.split_arrays import split_axes, split_text
from tests.helpers.meshes import EXPLICIT, MESH

MIXED = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Auto))


@pytest.mark.parametrize(
    ("mesh", "spec", "axes", "text"),
    [
        (EXPLICIT, P("data", None), (("data",), ()), "f32[8@data,8]"),
        (EXPLICIT, P(("data", "model")), (("data", "model"), ()), "f32[8@(data,model),8]"),
        (EXPLICIT, P(), (), "f32[8,8]"),
        (MESH, P("data", "model"), (), "f32[8,8]"),
        (MIXED, P("data", "model"), (("data",), ()), "f32[8@data,8]"),
    ],
)
def test_explicit_axes_are_in_the_type(mesh, spec, axes, text):
    """Eagerly and in a trace, of the array and of its type; other axes are not."""
    x = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, spec))
    traced = []
    jax.jit(lambda x: traced.append((split_axes(x), split_text(x))))(x)

    assert split_axes(x) == split_axes(jax.typeof(x)) == traced[0][0] == axes
    assert split_text(x) == split_text(jax.typeof(x)) == traced[0][1] == text


def test_what_lies_on_one_device_is_not_split():
    """Arrays, keys, and values of types without a sharding."""
    for value in (jnp.ones(3), jax.random.key(0), jax.ShapeDtypeStruct((3,), jnp.float32)):
        assert split_axes(value) == ()
