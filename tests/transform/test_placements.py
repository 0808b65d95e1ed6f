"""filter_shard: arrays on devices, outside compiled code and inside."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pytreemod as pm
from pytreemod.errors import ShapeError, SpecError
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.equations import equations
from tests.helpers.meshes import DEVICES, EXPLICIT, MESH, all_lie, lies, on
from tests.helpers.trees import Affine, double, ramp


def model():
    """Two arrays whose axes the mesh divides: f32[4,2] and f32[4]."""
    return Affine(ramp(4, 2), ramp(4))


DEFAULT = DEVICES[0]
SPECS = {
    "one": (on("data"), [("data",), ("data",)]),
    "device": (DEVICES[3], [DEVICES[3], DEVICES[3]]),
    "None": (None, [DEFAULT, DEFAULT]),
    "Module": (Affine(on("data", "model"), on("model")), [("data", "model"), ("model",)]),
    "by": (pm.by({"weight": on("data", "model"), ...: None}), [("data", "model"), DEFAULT]),
    "function": (lambda x: on("data") if x.ndim == 1 else None, [DEFAULT, ("data",)]),
    "by functions": (pm.by({"bias": lambda x: on("model"), ...: on()}), [(), ("model",)]),
}


@pytest.mark.parametrize(("spec", "expected"), SPECS.values(), ids=SPECS)
def test_arrays_lie_as_the_spec_says(spec, expected):
    """Shardings, devices, None, functions, rules and Modules of these; numbers stay the same."""
    laid = pm.filter_shard(model(), spec)

    assert all_lie(laid) == expected
    assert_same(laid, model())


@pytest.mark.parametrize("name", ["one", "Module", "by"])
def test_inside_compiled_code(name):
    """There, it constrains the sharding, by one equation; None adds nothing. It maps, as x does."""
    spec, expected = SPECS[name]
    shard, constrain = pm.filter_shard, jax.lax.with_sharding_constraint
    laid = pm.filter_jit(lambda m: shard(m, spec))(model())

    assert lies(laid.weight) == expected[0]
    assert_same(laid, model())
    weight, spec = ramp(4, 2), on("data")
    assert equations(lambda w: shard((w, w), (spec, None)), weight) == equations(
        lambda w: constrain(w, spec), weight
    )
    assert_close(pm.filter_vmap(lambda x: shard(x, spec) + 1)(ramp(3, 4)), ramp(3, 4) + 1)
    grad = pm.filter_grad(lambda x: (shard(x, spec) ** 2).sum())(ramp(8))
    assert_close(grad, 2 * ramp(8))


def test_arrays_move_from_wherever_they_lie():
    """From the host to the mesh, between meshes, to a device; what is no array stays as it is."""
    rest = {"act": double, "n": 3, "name": "a", "none": None}
    tree = {"x": np.arange(8, dtype=np.float32), **rest}
    for spec in (on("data"), on("data", mesh=EXPLICIT), on("model"), DEVICES[1]):
        tree = pm.filter_shard(tree, spec)

    x = tree.pop("x")
    assert lies(x) == DEVICES[1]
    assert_same(x, ramp(8) - 1)
    assert_same(tree, rest)


@pytest.mark.parametrize("mesh", [MESH, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize("axis_names", [{"data"}, {"data", "model"}], ids=["one", "both"])
def test_manual_axes_of_the_mesh_fall_away(mesh, axis_names):
    """In `filter_shard_map` an array is a shard, also a constant; other axes mean what they do."""
    of_x, of_constant = on("data", "model", mesh=mesh), on(("data", "model"), mesh=mesh)
    types = []

    def part(x):
        with pm.use_rules(mesh, pm.AxisRules({"batch": "data", "embed": "model"})):
            named = pm.filter_shard(x, "batch embed")
        constant = pm.filter_shard(np.ones((2, 8), np.float32), of_constant)
        arrays = [pm.filter_shard(x, of_x), named, constant]
        types.append([jax.typeof(array).sharding.spec for array in arrays])
        return arrays[0] + pm.filter_shard(constant, of_x)

    specs = {"in_specs": P("data"), "out_specs": P("data"), "axis_names": axis_names}
    x = pm.filter_shard(ramp(8, 8), on("data", mesh=mesh))

    assert_same(pm.filter_jit(pm.filter_shard_map(part, mesh=mesh, **specs))(x), ramp(8, 8) + 1)
    split = [P(None, "model"), P(None, "model"), P("model", None)]
    is_split = mesh is EXPLICIT and axis_names == {"data"}
    assert types[0] == (split if is_split else [P(None, None)] * 3)


MISFITS = {
    "path of an array": ({"m": [ramp(4)]}, on(None, "data"), ShapeError, r"\['m'\]\[0\]"),
    "structure": (model(), (on(), on()), SpecError, "filter_shard"),
}


@pytest.mark.parametrize(("tree", "spec", "error", "where"), MISFITS.values(), ids=MISFITS)
def test_specs_that_do_not_fit_are_refused(tree, spec, error, where):
    """What cannot lie so is an error, and no silent copy."""
    with pytest.raises(error, match=where):
        pm.filter_shard(tree, spec)
