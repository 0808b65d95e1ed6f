"""filter_jit with in_shardings and out_shardings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pytreemod as pm
from pytreemod.errors import ArgumentError, ShapeError, SpecError
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.meshes import EXPLICIT, MESH, OTHER_MESH, all_lie, lies, on
from tests.helpers.trees import Affine, ramp


def model():
    """Two arrays whose axes the mesh divides: f32[4,2] and f32[4]."""
    return Affine(ramp(4, 2), ramp(4))


def apply(model, x):
    """A model, a batch, and a non-array."""
    return model, x @ model.weight.T, "done"


BATCH = ramp(8, 2)
WHOLE, SPLIT = (), ("data",)


@pytest.mark.parametrize(
    "spec",
    [
        (on(), on("data")),
        [on(), on("data")],
        {"x": on("data"), "model": on()},
        (Affine(on(), on()), on("data")),
        (pm.by({...: on()}), on("data")),
        pm.by({pm.select.type(Affine): on(), ...: on("data")}),
        lambda a: on("data") if a.shape[0] == 8 else on(),
        {"model": lambda a: on(), "x": lambda a: on("data")},
    ],
)
def test_arguments_lie_as_the_spec_says(spec):
    """By position, by name, by rule, by function, by Module: JAX gets a sharding for each array."""
    fn = pm.filter_jit(apply, in_shardings=spec)
    ((shardings,), _) = fn.lower(model(), BATCH).compile().input_shardings

    assert [tuple(s.spec) for s in shardings] == [WHOLE, WHOLE, SPLIT]
    out = fn(model(), BATCH)
    assert_close(out[:2], apply(model(), BATCH)[:2])
    assert_same(fn(model(), BATCH), out)


@pytest.mark.parametrize(
    "spec",
    [
        (on("data"), on("data"), on()),
        (Affine(on("data"), on("data")), on("data"), None),
        pm.by({...: on("data")}),
        on("data"),
        lambda a: on("data"),
        (pm.by({"weight": on("data"), ...: lambda a: on("data")}), on("data"), None),
    ],
    ids=["tuple", "module", "rule", "one", "function", "mixed"],
)
def test_results_lie_as_the_spec_says(spec):
    """The same specs; non-array leaves are returned, whatever the spec says of them."""
    fn = pm.filter_jit(apply, out_shardings=spec)
    for _ in range(2):
        out = fn(model(), BATCH)
        assert all_lie(out) == [SPLIT, SPLIT, SPLIT]
        assert_close(out[:2], apply(model(), BATCH)[:2])
        assert out[2] == "done"


def test_results_that_lie_differently():
    """Every array is returned at its path."""
    spec = ({"a": on("data"), "b": [None, on("model"), on("data")]}, on())
    fn = pm.filter_jit(lambda x: ({"a": x, "b": [x + 1, x + 2, x + 3]}, x + 4), out_shardings=spec)

    out = fn(ramp(4))

    assert all_lie(out) == [("data",), lies(out[0]["b"][0]), ("model",), ("data",), ()]
    x = np.asarray(ramp(4))
    assert_close(out, ({"a": x, "b": [x + 1, x + 2, x + 3]}, x + 4))


@pytest.mark.parametrize(
    "spec", [on("data"), {"a": on("data"), "b": on()}, pm.by({"a": on("data"), ...: None})]
)
def test_no_equation_is_added(spec):
    """The program is the one that jax.jit has with a tree of shardings."""

    def fn(x):
        return {"a": x * 2, "b": x}

    ours = pm.filter_jit(fn, in_shardings=on(), out_shardings=spec).trace(ramp(4)).jaxpr
    theirs = jax.jit(fn, in_shardings=on()).trace(ramp(4)).jaxpr

    assert [e.primitive.name for e in ours.eqns] == [e.primitive.name for e in theirs.eqns]


def test_functions_are_asked_for_each_shape():
    """One key, many shapes: a function in a spec sees the arrays of the call."""
    spec = {"x": lambda a: on("data") if a.shape[0] % 4 == 0 else on()}
    fn = pm.filter_jit(lambda x: x + 1, in_shardings=spec, out_shardings=lambda a: spec["x"](a))

    assert [lies(fn(ramp(n))) for n in (8, 3, 4, 8, 3)] == [
        SPLIT,
        WHOLE,
        SPLIT,
        SPLIT,
        WHOLE,
    ]
    assert lies(fn.lower(jax.ShapeDtypeStruct((8,), jnp.float32)).compile()(ramp(8))) == SPLIT
    assert fn.eval_shape(ramp(3)).shape == (3,)


def test_partition_specs_mean_the_mesh_in_context():
    """It is looked up at each call, so that one function serves two meshes."""
    fn = pm.filter_jit(lambda x: (x, x), in_shardings=P("data"), out_shardings=(P("data"), P()))
    for mesh in (MESH, OTHER_MESH, EXPLICIT):
        x = np.asarray(ramp(8))
        with jax.set_mesh(mesh):
            first, second = fn(x)
        assert first.sharding.mesh.shape == mesh.shape
        assert (lies(first), lies(second)) == (SPLIT, WHOLE)


def test_staged_functions():
    """lower, compile, trace and eval_shape go the same way."""
    split = {"in_shardings": (on(), on("data")), "out_shardings": (on(), on("data"), None)}
    fn = pm.filter_jit(apply, **split)
    compiled = fn.lower(model(), jax.ShapeDtypeStruct((8, 2), jnp.float32)).compile()

    assert all_lie(compiled(model(), BATCH)) == [WHOLE, WHOLE, SPLIT]
    assert fn.eval_shape(model(), BATCH)[1].shape == (8, 4)


def test_equal_specs_share_what_was_compiled():
    """The decorator may be inside a loop."""
    traces = []

    def fn(x):
        traces.append(x)
        return x

    for _ in range(3):
        pm.filter_jit(fn, in_shardings={"x": on("data")}, out_shardings=pm.by({...: on()}))(ramp(4))

    assert len(traces) == 1


# ---- what does not fit


MISFITS = {
    "count": ({"in_shardings": (on(),)}, SpecError, "in_shardings"),
    "structure": ({"in_shardings": (None, {"a": on()})}, SpecError, "x"),
    "path": ({"in_shardings": pm.by({"wight": on(), ...: None})}, SpecError, "wight"),
    "rank": ({"in_shardings": {"model": on(None, "model")}}, ShapeError, r"model\.bias"),
    "size": ({"in_shardings": {"x": on(None, "data")}}, ShapeError, r"\bx\b"),
    "result": ({"out_shardings": (on(),)}, SpecError, "result"),
    "result's rank": ({"out_shardings": on(None, "model")}, ShapeError, r"result\[0\]\.bias"),
}


@pytest.mark.parametrize(("options", "error", "where"), MISFITS.values(), ids=MISFITS)
def test_specs_that_do_not_fit_are_refused(options, error, where):
    """By argument, path and shape."""
    with pytest.raises(error, match=where):
        pm.filter_jit(apply, **options)(model(), BATCH)


def test_a_later_call_that_does_not_fit_is_refused():
    """Also where the function was compiled for another shape already."""
    fn = pm.filter_jit(lambda batch: batch, in_shardings=on("data"))
    fn({"x": ramp(8)})

    for call in (fn, fn.lower):
        with pytest.raises(ShapeError, match=r"batch\['x'\]: f32\[3\]"):
            call({"x": ramp(3)})


def test_arguments_that_lie_elsewhere_are_refused():
    """JAX does not move committed arrays."""
    with jax.set_mesh(MESH), pytest.raises(ArgumentError, match=r"at x: P\('model'\)"):
        pm.filter_jit(lambda x: x, in_shardings=P("data"))(pm.filter_shard(ramp(8), on("model")))
