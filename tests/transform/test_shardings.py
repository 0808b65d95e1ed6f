"""filter_jit with in_shardings and out_shardings."""

import jax
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
    return model, x @ model.weight.T, "done"


BATCH = ramp(8, 2)
STRUCT = jax.ShapeDtypeStruct((8, 2), np.float32)
WHOLE, SPLIT = (), ("data",)


ARGUMENTS = {
    "tuple": (on(), on("data")),
    "dict": {"x": on("data"), "model": on()},
    "Module": (Affine(on(), on()), on("data")),
    "rule": pm.by({pm.select.type(Affine): on(), ...: on("data")}),
}


@pytest.mark.parametrize("spec", ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_lie_as_the_spec_says(spec):
    """By position, by name, by path, by Module: JAX gets a sharding for each array."""
    fn = pm.filter_jit(apply, in_shardings=spec)
    for args in ((model(), BATCH), (model(), STRUCT)):
        shardings = jax.tree.leaves(fn.lower(*args).compile().input_shardings)
        assert [tuple(s.spec) for s in shardings] == [WHOLE, WHOLE, SPLIT]
    out = fn(model(), BATCH)
    assert_close(out[:2], apply(model(), BATCH)[:2])
    assert_same(fn(model(), BATCH), out)


RESULTS = {
    "tuple": ((on("data"), on(), None), [SPLIT, SPLIT, WHOLE]),
    "Module": ((Affine(on("data"), on("model")), on(), None), [SPLIT, ("model",), WHOLE]),
    "rule": (pm.by({"[0].bias": on("model"), ...: on("data")}), [SPLIT, ("model",), SPLIT]),
    "one": (on("data"), [SPLIT, SPLIT, SPLIT]),
}


@pytest.mark.parametrize(("spec", "expected"), RESULTS.values(), ids=RESULTS)
def test_results_lie_as_the_spec_says(spec, expected):
    """The same specs; what is no array is returned; called, compiled or with shapes."""
    fn = pm.filter_jit(apply, out_shardings=spec)
    for call in (fn, fn, fn.lower(model(), STRUCT).compile()):
        out = call(model(), BATCH)
        assert all_lie(out) == expected
        assert_close(out[:2], apply(model(), BATCH)[:2])
        assert out[2] == "done"


def test_what_is_sown_stays_where_it_is():
    """A tree of specs is for the result; a value that is sown need not fit it."""
    spec = {"y": on("data")}
    fn = pm.filter_jit(lambda x: {"y": pm.sow("sum", x.sum()) + x}, out_shardings=spec)
    out, seen = pm.capture(fn)(ramp(4))

    assert lies(out["y"]) == SPLIT
    assert_close(seen, {"sum": ramp(4).sum()})


def test_no_equation_is_added():
    """The program is the one that jax.jit has with a tree of shardings."""

    def fn(x):
        return {"a": x * 2, "b": x}

    theirs = jax.jit(fn, in_shardings=on()).trace(ramp(4)).jaxpr
    for spec in (on("data"), {"a": on("data"), "b": on()}, pm.by({"a": on("data"), ...: None})):
        ours = pm.filter_jit(fn, in_shardings=on(), out_shardings=spec).trace(ramp(4)).jaxpr
        assert [e.primitive.name for e in ours.eqns] == [e.primitive.name for e in theirs.eqns]


def test_partition_specs_mean_the_mesh_in_context():
    """At each call, so that one function serves two meshes; filter_shard looks it up, too."""
    fn = pm.filter_jit(lambda x: (x, x), in_shardings=P("data"), out_shardings=(P("data"), P()))
    shard = lambda x: pm.filter_shard(x, P("data"))  # noqa: E731
    jitted = pm.filter_jit(shard)
    for mesh in (MESH, OTHER_MESH, EXPLICIT):
        with jax.set_mesh(mesh):
            split, whole = fn(np.ones(8, np.float32))
            laid = [split, shard(ramp(8)), jitted(ramp(8))]
        assert [x.sharding.mesh.shape for x in laid] == [mesh.shape] * 3
        assert [lies(x) for x in (*laid, whole)] == [SPLIT, SPLIT, SPLIT, WHOLE]


def test_equal_specs_share_what_was_compiled():
    """The decorator may be inside a loop."""
    traces = []
    fn = lambda x: traces.append(None) or x  # noqa: E731
    for _ in range(3):
        pm.filter_jit(fn, in_shardings={"x": on("data")}, out_shardings=pm.by({...: on()}))(ramp(4))

    assert len(traces) == 1


MISFITS = {
    "count": ({"in_shardings": (on(),)}, SpecError, "in_shardings"),
    "rank": ({"in_shardings": {"model": on(None, "model")}}, ShapeError, r"model\.bias"),
    "rank of one": ({"out_shardings": (on(None, "model"), None, None)}, ShapeError, r"\.bias"),
    "function": ({"out_shardings": lambda x: on()}, ArgumentError, "looks at arrays"),
    "no placement": ({"in_shardings": {"x": 3}}, SpecError, "3 is no sharding"),
}


@pytest.mark.parametrize(("options", "error", "where"), MISFITS.values(), ids=MISFITS)
def test_specs_that_do_not_fit_are_refused(options, error, where):
    """By argument, path and shape."""
    with pytest.raises(error, match=where):
        pm.filter_jit(apply, **options)(model(), BATCH)
