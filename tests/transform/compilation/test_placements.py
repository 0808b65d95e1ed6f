"""filter_shard, and features that all specs of shardings share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.sharding import SingleDeviceSharding

import pytreemod as pm
from pytreemod.errors import ArgumentError, ShapeError, SpecError
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.equations import equations
from tests.helpers.meshes import DEVICES, EXPLICIT, MESH, all_lie, lies, on
from tests.helpers.trees import Affine, OwnInit, double, ramp


def model():
    """Two arrays whose axes the mesh divides: f32[4,2] and f32[4]."""
    return Affine(ramp(4, 2), ramp(4))


DEFAULT = DEVICES[0]
BY = pm.by({"weight": on("data", "model"), ...: None})


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (on("data"), [("data",), ("data",)]),
        (on(), [(), ()]),
        (DEVICES[3], [DEVICES[3], DEVICES[3]]),
        (SingleDeviceSharding(DEVICES[3]), [DEVICES[3], DEVICES[3]]),
        (None, [DEFAULT, DEFAULT]),
        (Affine(on("data", "model"), None), [("data", "model"), DEFAULT]),
        (Affine(on(None, "model"), on("model")), [(None, "model"), ("model",)]),
        (BY, [("data", "model"), DEFAULT]),
        (lambda x: on("data") if x.ndim == 1 else None, [DEFAULT, ("data",)]),
        (lambda x: DEVICES[x.ndim], [DEVICES[2], DEVICES[1]]),
        (pm.by({"bias": lambda x: on("model"), ...: on()}), [(), ("model",)]),
    ],
)
def test_arrays_lie_as_the_spec_says(spec, expected):
    """Shardings, devices, None, functions, rules and Modules of these; numbers stay the same."""
    laid = pm.filter_shard(model(), spec)

    assert all_lie(laid) == expected
    assert_same(laid, model())


@pytest.mark.parametrize("spec", [on("data"), Affine(on("data", "model"), on("data")), BY])
def test_inside_jit(spec):
    """There, it constrains the sharding."""
    laid = pm.filter_jit(lambda m: pm.filter_shard(m, spec))(model())

    assert lies(laid.weight)[0] == "data"
    assert_same(laid, model())


def test_what_is_no_array_stays_as_it_is():
    """Strings, functions, numbers, configuration and None pass; NumPy arrays become JAX's."""
    tree = {"x": np.ones(4, np.float32), "act": double, "n": 3, "name": "a", "none": None}

    laid = pm.filter_shard([tree, OwnInit(4)], on("data"))

    assert lies(laid[0].pop("x")) == ("data",)
    assert laid[0] == {"act": double, "n": 3, "name": "a", "none": None}
    assert laid[1].size == 4


def test_arrays_move_from_wherever_they_lie():
    """From a device to the mesh, between meshes, and back."""
    x = pm.filter_shard(ramp(8), DEVICES[5])
    for spec in (on("data"), on("data", mesh=EXPLICIT), on("model"), DEVICES[1]):
        x = pm.filter_shard(x, spec)

    assert lies(x) == DEVICES[1]
    assert_same(x, ramp(8))


@pytest.mark.parametrize("mesh", [MESH, EXPLICIT])
def test_partition_specs_mean_the_mesh_in_context(mesh):
    """Inside jit and outside, whatever the type of the mesh's axes."""
    with jax.set_mesh(mesh):
        assert lies(pm.filter_shard(ramp(8), P("data"))) == ("data",)
        assert lies(pm.filter_jit(lambda x: pm.filter_shard(x, P("data")))(ramp(8))) == ("data",)


def test_through_grad_and_vmap():
    """A constraint has the derivative one, and maps."""
    grad = pm.filter_grad(lambda x: jnp.sum(pm.filter_shard(x, on("data")) ** 2))(ramp(8))
    mapped = pm.filter_vmap(lambda x: pm.filter_shard(x, on("model")) + 1)(ramp(3, 4))

    assert_close(grad, 2 * ramp(8))
    assert_close(mapped, ramp(3, 4) + 1)


@pytest.mark.parametrize("mesh", [MESH, EXPLICIT])
@pytest.mark.parametrize("axis_names", [{"data"}, {"data", "model"}])
def test_manual_axes_of_the_mesh_fall_away(mesh, axis_names):
    """In `filter_shard_map` an array is a shard; other axes of the mesh have their usual meaning.

    A constant of the function is laid out as its arguments are.
    """
    spec = {"x": P("data", "model"), "constant": P(("data", "model"))}
    spec = jax.tree.map(lambda s: on(*s, mesh=mesh), spec)
    types = []

    def part(x):
        laid = pm.filter_shard({"x": x, "constant": np.ones((2, 8), np.float32)}, spec)
        types.append([jax.typeof(laid[name]).sharding.spec for name in ("x", "constant")])
        return laid["x"] + pm.filter_shard(laid["constant"], spec["x"])

    of_parts = pm.filter_shard_map(
        part, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names=axis_names
    )
    x = pm.filter_shard(ramp(8, 8), on("data", mesh=mesh))

    assert_same(pm.filter_jit(of_parts)(x), ramp(8, 8) + 1)
    is_split = mesh is EXPLICIT and axis_names == {"data"}
    assert types[0] == [P(None, "model"), P("model", None)] if is_split else [P(None, None)] * 2


def test_one_equation_for_each_array():
    """Inside jit it is `with_sharding_constraint`, and None adds nothing."""

    def by_hand(weight, bias):
        return jax.lax.with_sharding_constraint(weight, on("data")), bias

    def filtered(weight, bias):
        laid = pm.filter_shard(Affine(weight, bias), Affine(on("data"), None))
        return laid.weight, laid.bias

    assert equations(filtered, *jax.tree.leaves(model())) == equations(
        by_hand, *jax.tree.leaves(model())
    )


MISFITS = {
    "size": (lambda: pm.filter_shard({"a": ramp(3)}, on("data")), ShapeError, r"\['a'\]"),
    "rank": (lambda: pm.filter_shard({"m": model()}, on(None, "data")), ShapeError, "bias"),
    "no mesh": (lambda: pm.filter_shard(ramp(8), P("data")), ArgumentError, "mesh"),
    "structure": (lambda: pm.filter_shard(model(), (on(), on())), SpecError, "filter_shard"),
    "path": (
        lambda: pm.filter_shard(model(), pm.by({"wight": on(), ...: None})),
        SpecError,
        "wight",
    ),
}


@pytest.mark.parametrize(("call", "error", "where"), MISFITS.values(), ids=MISFITS)
def test_specs_that_do_not_fit_are_refused(call, error, where):
    """What cannot lie so is an error, and no silent copy."""
    with pytest.raises(error, match=where):
        call()
