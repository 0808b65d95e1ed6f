"""`filter_vmap`: axes of every spelling, over functions, classes, methods and Modules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.parity.helpers import ramp, same_under_both_imports


def make_layer(eqx):
    """The class of a small layer with an array, a second array and a static field."""

    class Layer(eqx.Module):
        weight: jax.Array
        bias: jax.Array
        size: int = eqx.field(static=True, default=2)

        def __call__(self, x):
            return self.weight @ x + self.bias

    return Layer


@same_under_both_imports
def test_by_default_arrays_are_mapped_and_the_rest_is_shared(eqx):
    """Every array on axis 0; numbers, strings and functions go to every call."""
    shapes = []

    @eqx.filter_vmap
    def apply(tree, factor, f, name):
        shapes.append((tree["x"].shape, tree["host"].shape, factor, name))
        return f(tree["x"]) * factor + tree["host"]

    tree = {"x": ramp(3, 2), "host": np.ones((3, 2), np.float32), "none": None}
    return apply(tree, 2.0, jnp.sin, "a"), shapes


@pytest.mark.parametrize("out_axes", [0, -1, lambda leaf: 0])
@same_under_both_imports
def test_numbers_as_results_are_repeated(eqx, out_axes):
    """A number with an axis is stacked, as in `jax.vmap`; by default, it remains one."""

    def fn(x):
        return (x * 2, 1.0, {"count": 3, "done": True})

    return eqx.filter_vmap(fn, out_axes=out_axes)(ramp(3)), eqx.filter_vmap(fn)(ramp(3))


SPECS = {
    "ints": (0, 1),
    "none": (None, 0),
    "negative": (-1, -2),
    "callable": (lambda leaf: 0, None),
    "callable by shape": (lambda leaf: 0 if leaf.shape[0] == 3 else None, 1),
}


@pytest.mark.parametrize("spec", SPECS)
@same_under_both_imports
@pytest.mark.sampled
def test_in_axes_as_a_tuple(eqx, spec):
    """One entry for each argument: an axis, None, or a function from leaf to axis."""
    x, y = ramp(3, 3), ramp(3, 3) + 2
    return eqx.filter_vmap(lambda a, b: a * 2 + b.sum(), in_axes=SPECS[spec])(x, y)


@same_under_both_imports
def test_in_axes_by_argument_name(eqx):
    """A dict names arguments; other arguments are mapped as by default."""

    @eqx.filter_vmap(in_axes={"b": None, "c": 1})
    def apply(a, b, c):
        return a * b.sum() + c

    @eqx.filter_vmap(in_axes={"model": eqx.if_array(1)})
    def scaled(model, x):
        return model["w"] * x * model["n"]

    return apply(ramp(3), ramp(2), ramp(1, 3)), scaled({"w": ramp(2, 3), "n": 2}, ramp(3))


@same_under_both_imports
def test_if_array(eqx):
    """`if_array(i)` maps arrays over axis i and shares everything else."""
    axes = eqx.if_array(1)
    mapped = eqx.filter_vmap(lambda t: t[0] * t[1], in_axes=(axes,))([ramp(2, 3), 4.0])
    return axes(ramp(2)), axes(3.0), axes("a"), mapped, eqx.if_array(0) == eqx.if_array(0)


OUT_SPECS = {
    "int": 1,
    "none": (0, None),
    "negative": -1,
    "tuple": (1, 0),
    "callable": (lambda leaf: leaf.ndim, 0),
}


@pytest.mark.parametrize("spec", OUT_SPECS)
@same_under_both_imports
@pytest.mark.sampled
def test_out_axes(eqx, spec):
    """An output may be stacked on any axis, or be the same for every call."""
    shared = ramp(4)

    def apply(x):
        return jnp.outer(x, ramp(2)), shared if OUT_SPECS[spec] == (0, None) else x

    return eqx.filter_vmap(apply, out_axes=OUT_SPECS[spec])(ramp(3, 5))


@same_under_both_imports
def test_axis_name_and_axis_size(eqx):
    """Collectives use the name; a size makes up for arguments without arrays."""
    normalized = eqx.filter_vmap(lambda x: x - jax.lax.pmean(x, "batch"), axis_name="batch")
    numbered = eqx.filter_vmap(lambda _: jax.lax.axis_index("i"), axis_name="i", axis_size=3)
    repeated = eqx.filter_vmap(lambda x: x, in_axes=None, axis_size=2)
    return normalized(ramp(3, 2)), numbered("nothing"), repeated(ramp(2))


@same_under_both_imports
def test_an_ensemble_by_mapping_the_constructor(eqx):
    """Mapping over keys builds a Module of stacked arrays, which maps again when called."""

    class Layer(eqx.Module):
        weight: jax.Array
        size: int = eqx.field(static=True)

        def __init__(self, size, key):
            self.size = size
            self.weight = jax.random.normal(key, (size,))

        def __call__(self, x):
            return jnp.sum(self.weight * x)

    keys = jax.random.split(jax.random.key(0), 3)
    build = eqx.filter_vmap(lambda key: Layer(2, key))
    ensemble = build(keys)
    direct = eqx.filter_vmap(Layer, in_axes=(None, 0))(2, keys)

    @eqx.filter_vmap(in_axes=(eqx.if_array(0), None))
    def evaluate(model, x):
        return model(x)

    return ensemble, direct, evaluate(ensemble, ramp(2))
