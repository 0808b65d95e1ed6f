"""filter_shard_map: each device runs a function of any trees on its part."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, ShapeError, SpecError
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.equations import equations
from tests.helpers.meshes import EXPLICIT, MESH, all_lie, on
from tests.helpers.trees import Affine, double, ramp


def model():
    """Two arrays whose axes the mesh divides: f32[4,2] and f32[4]."""
    return Affine(ramp(4, 2), ramp(4))


def apply(model, x):
    """A model on a batch."""
    return x @ model.weight.T


BATCH = ramp(8, 2)
EXPECTED = apply(model(), BATCH)


IN_SPECS = [
    (None, P("data")),
    [P(), on("data")],
    {"x": P("data")},
    {"model": None, "x": P("data", None)},
    (Affine(P(), None), P("data")),
    pm.by({pm.select.type(Affine): None, ...: P("data")}),
    lambda a: P("data") if a.shape == (8, 2) else None,
    (None, pm.by({...: lambda a: P("data", *[None] * (a.ndim - 1))})),
]
OUT_SPECS = [(P("data"), Affine(None, P()), None), (on("data"), None, P())]


@pytest.mark.parametrize("in_specs", IN_SPECS)
@pytest.mark.parametrize("out_specs", [*OUT_SPECS, pm.by({"0": P("data"), ...: None})])
@pytest.mark.sampled
def test_arguments_and_results_are_split_as_the_specs_say(in_specs, out_specs):
    """By position, by name, by rule, by function, by Module; other leaves are unchanged."""
    fn = lambda model, x: (apply(model, x), model, ("text", double, x.shape))  # noqa: E731
    specs = {"in_specs": in_specs, "out_specs": out_specs}
    found = pm.filter_jit(pm.filter_shard_map(fn, mesh=MESH, **specs))(model(), x=BATCH)

    assert_same(found, (EXPECTED, model(), ("text", double, (2, 2))))
    assert all_lie(found[:2]) == [("data",), (), ()]


def test_outside_filter_jit_by_keyword_and_without_arguments():
    """One operation at a time, with the same result."""
    specs = {"mesh": MESH, "in_specs": {"x": P("data"), "y": P("data")}, "out_specs": P("data")}
    fn = pm.filter_shard_map(lambda x, *, y, n: (x * y, n), **specs)
    assert_same(fn(np.asarray(BATCH), y=BATCH, n=None), (BATCH**2, None))
    index = pm.filter_shard_map(
        lambda: jax.lax.axis_index("data")[None], **specs | {"in_specs": ()}
    )
    assert index().tolist() == [0, 1, 2, 3]


def test_data_parallel_training():
    """Gradients of the parts, averaged, are the gradient of the whole."""

    @pm.filter_jit
    @pm.filter_shard_map(mesh=MESH, in_specs={"x": P("data")}, out_specs=None)
    def step(model, x):
        loss = lambda model: jax.lax.pmean(jnp.mean(apply(model, x) ** 2), "data")  # noqa: E731
        return pm.filter_value_and_grad(loss)(model)

    expected = pm.filter_value_and_grad(lambda m: jnp.mean(apply(m, BATCH) ** 2))(model())
    assert_close(step(model(), BATCH), expected)


class Layer(Affine):
    """A model that is the function itself."""

    def __call__(self, x):
        return apply(self, x)


split = ft.partial(pm.filter_shard_map, mesh=MESH, out_specs=P("data"))
WAYS = {
    "argument": split(apply, in_specs=(None, P("data"))),
    "function": lambda m, x: split(m, in_specs=P("data"))(x),
    "method": lambda m, x: split(m.__call__, in_specs={"x": P("data")})(x),
    "captured": lambda m, x: split(lambda x: apply(m, x), in_specs=P("data"))(x),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_gradients_through_it(way):
    """With the model as argument, as the function itself, as its method, and captured."""
    m = Layer(*jax.tree.leaves(model()))
    grad = pm.filter_jit(pm.filter_grad(lambda m, way: jnp.mean(way(m, BATCH) ** 2)))

    assert_close(grad(m, way), grad(m, apply))


def test_collectives_and_keys():
    """Inside, the mesh's axes have names; typed keys are split as other arrays."""
    both = P(("data", "model"))

    @pm.filter_jit
    @pm.filter_shard_map(mesh=MESH, in_specs=both, out_specs=(both, None))
    def noise(keys):
        x = jax.random.uniform(keys[0], (1,))
        return x, jax.lax.psum(x, ("data", "model"))

    keys = jax.random.split(jax.random.key(0), 8)
    each, total = noise(keys)
    assert_close(each, jax.vmap(jax.random.uniform)(keys))
    assert_close(total, jnp.sum(each, keepdims=True))


@pytest.mark.parametrize("mesh", [MESH, EXPLICIT], ids=["auto", "explicit"])
def test_the_mesh_in_context(mesh):
    """Set by jax.set_mesh, whatever the type of its axes; Explicit ones need no in_specs."""
    specs = {} if mesh is EXPLICIT else {"in_specs": (None, P("data"))}
    fn = pm.filter_jit(pm.filter_shard_map(apply, out_specs=P("data"), **specs))

    with jax.set_mesh(mesh):
        assert_close(fn(model(), pm.filter_shard(np.asarray(BATCH), P("data"))), EXPECTED)


def test_some_axes_of_the_mesh():
    """A string is one name; the other axes stay automatic."""
    options = {"mesh": MESH, "in_specs": P("data"), "out_specs": None, "axis_names": "data"}
    total = pm.filter_jit(pm.filter_shard_map(lambda x: jax.lax.psum(x, "data"), **options))
    assert_close(total(ramp(8)), ramp(8).reshape(4, 2).sum(0))


def test_no_equation_is_added():
    """The program is the one written by hand."""
    options = {"mesh": MESH, "out_specs": (P("data"), P())}
    fn = lambda w, x: (x @ w.T, w[0])  # noqa: E731
    ours = pm.filter_shard_map(
        lambda m, x, how: fn(m.weight, x), in_specs={"x": P("data")}, **options
    )
    by_hand = jax.shard_map(fn, in_specs=(P(), P("data")), **options)

    filtered = lambda w, x: ours(Affine(w, None), x, "how")  # noqa: E731
    arrays = model().weight, BATCH
    assert equations(filtered, *arrays) == equations(by_hand, *arrays)


@pytest.mark.slow
def test_a_split_stream_is_one_on_each_device():
    """A device's shard of the streams draws the same as a member of a map."""
    model, state = pm.make_with_state(nn.Dropout)(0.5, stream=pm.RngStream())
    state = state.seed(jax.random.key(0)).split(4)
    specs = P("data"), pm.by({pm.RngStream: P("data"), ...: P()})
    axes = 0, pm.by({pm.RngStream: 0, ...: None})
    fn = pm.filter_jit(pm.filter_shard_map(model, mesh=MESH, in_specs=specs, out_specs=specs))

    x = jnp.ones((4, 64))
    out, after = fn(x, state)
    expected, then = pm.filter_vmap(model, in_axes=axes, out_axes=axes)(x, state)
    assert_close(out, expected)
    assert len({tuple(row) for row in out.tolist()}) == 4
    assert after.join() == then.join()


MISTAKES = {
    "sizes": ({}, P(), {"a": ramp(6, 2)}, r"x\['a'\]: f32\[6,2\]"),
    "rank": ({"in_specs": P(None, None, "data")}, P(), {"a": BATCH}, r"x\['a'\]"),
    "axis of the mesh": ({"in_specs": P("rows")}, P(), BATCH, "rows"),
    "axis of a result": ({}, P("rows"), BATCH, "rows"),
    "differs by device": ({}, P(), BATCH, "out_specs"),
    "no axis in a result": ({"in_specs": P()}, P("data"), jnp.asarray(1.0), "out_specs"),
    "name": ({"in_specs": {"z": P()}}, P(), BATCH, "'z'"),
    "path": ({"in_specs": pm.by({"z": P()})}, P(), {"a": BATCH}, "'z'"),
    "no spec": ({"in_specs": "data"}, P(), BATCH, "data"),
    "a function for results": ({}, lambda a: P(), BATCH, "out_specs"),
    "no mesh": ({"mesh": None}, P(), BATCH, "set_mesh"),
    "no specs": ({"in_specs": None}, P(), BATCH, "Auto|Explicit"),
}


@pytest.mark.parametrize(("options", "out", "x", "match"), MISTAKES.values(), ids=MISTAKES)
def test_what_does_not_fit_is_refused(options, out, x, match):
    """Before the program runs; arguments are named by path."""
    options = {"mesh": MESH, "in_specs": P("data"), "out_specs": out, **options}
    given = {name: value for name, value in options.items() if value is not None}
    with pytest.raises((ArgumentError, ShapeError, SpecError, ValueError, TypeError), match=match):
        pm.filter_shard_map(lambda x: x, **given)(x)
