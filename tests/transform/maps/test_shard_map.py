"""filter_shard_map."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pytreemod as pm
from pytreemod import nn
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


@pytest.mark.parametrize(
    "in_specs",
    [
        (None, P("data")),
        [P(), P("data")],
        (None, on("data")),
        {"x": P("data")},
        {"model": None, "x": P(("data", "model"))},
        (Affine(P(), None), P("data")),
        (pm.by({...: P()}), P("data")),
        pm.by({pm.select.type(Affine): None, ...: P("data")}),
        lambda a: P("data") if a.shape == (8, 2) else None,
        (None, pm.by({...: lambda a: P(*(["data"] + [None] * (a.ndim - 1)))})),
    ],
)
@pytest.mark.sampled
def test_arguments_are_split_as_the_spec_says(in_specs):
    """By position, by name, by rule, by function, by Module."""
    out_specs = (
        P(("data", "model"))
        if in_specs == {"model": None, "x": P(("data", "model"))}
        else P("data")
    )
    fn = pm.filter_shard_map(apply, mesh=MESH, in_specs=in_specs, out_specs=out_specs)  # fmt: skip

    assert_close(fn(model(), BATCH), EXPECTED)
    assert_close(pm.filter_jit(fn)(model(), x=BATCH), EXPECTED)


@pytest.mark.parametrize(
    "out_specs",
    [
        (P("data"), Affine(None, P()), None),
        (on("data"), None, P()),
        pm.by({"0": P("data"), ...: None}),
        lambda a: P("data") if a.shape == (2, 4) else None,
        (lambda a: P("data"), pm.by({...: lambda a: P()}), None),
    ],
)
@pytest.mark.sampled
def test_results_are_put_together_as_the_spec_says(out_specs):
    """The same specs; non-array leaves are returned as the function returned them."""
    fn = pm.filter_shard_map(
        lambda m, x: (apply(m, x), m, ("text", double, x.shape)),
        mesh=MESH,
        in_specs=(None, P("data")),
        out_specs=out_specs,
    )

    for call in (fn, pm.filter_jit(fn)):
        y, same, rest = call(model(), BATCH)
        assert_close(y, EXPECTED)
        assert_same(same, model())
        assert rest == ("text", double, (2, 2))
        assert all_lie((y, same)) == [("data",), (), ()]


def test_data_parallel_training():
    """Gradients of the parts, averaged, are the gradient of the whole."""

    @pm.filter_jit
    @pm.filter_shard_map(mesh=MESH, in_specs={"x": P("data")}, out_specs=None)
    def step(model, x):
        def loss(model):
            return jax.lax.pmean(jnp.mean(apply(model, x) ** 2), "data")

        value, grads = pm.filter_value_and_grad(loss)(model)
        return value, grads

    value, grads = step(model(), BATCH)
    expected = pm.filter_value_and_grad(lambda m: jnp.mean(apply(m, BATCH) ** 2))(model())

    assert_close((value, grads), expected)


def test_gradients_through_it():
    """With the model as argument, as the function itself, and captured."""

    def loss(wrapped):
        return lambda m: jnp.mean(wrapped(m, BATCH) ** 2)

    def with_specs(fn, in_specs):
        return pm.filter_shard_map(fn, mesh=MESH, in_specs=in_specs, out_specs=P("data"))

    class Callable(Affine):
        def __call__(self, x):
            return apply(self, x)

    m = Callable(*jax.tree.leaves(model()))
    ways = [
        with_specs(apply, (None, P("data"))),
        lambda m, x: with_specs(m, P("data"))(x),
        lambda m, x: with_specs(m.__call__, {"x": P("data")})(x),
        lambda m, x: with_specs(lambda x: apply(m, x), P("data"))(x),
    ]
    expected = pm.filter_grad(loss(apply))(m)
    for way in ways:
        assert_close(pm.filter_grad(loss(way))(m), expected)
    assert_close(pm.filter_jit(pm.filter_grad(loss(ways[1])))(m), expected)


def test_collectives_and_keys():
    """Inside, the mesh's axes have names; typed keys are split as other arrays."""

    @pm.filter_shard_map(
        mesh=MESH, in_specs=P(("data", "model")), out_specs=(P(("data", "model")), None)
    )
    def noise(keys):
        x = jax.random.uniform(keys[0], (1,))
        return x, jax.lax.psum(x, ("data", "model"))

    keys = jax.random.split(jax.random.key(0), 8)  # fmt: skip
    each, total = noise(keys)

    assert_close(each, jax.vmap(jax.random.uniform)(keys))
    assert_close(total, jnp.sum(each, keepdims=True))


@pytest.mark.parametrize("mesh", [MESH, EXPLICIT])
def test_the_mesh_in_context(mesh):
    """Set by jax.set_mesh, whatever the type of its axes."""
    fn = pm.filter_shard_map(apply, in_specs=(None, P("data")), out_specs=P("data"))

    with jax.set_mesh(mesh):
        batch = pm.filter_shard(np.asarray(BATCH), P("data"))
        assert_close(pm.filter_jit(fn)(model(), batch), EXPECTED)


@pytest.mark.parametrize(
    "out_specs", [(P("data"), None, P()), lambda a: P(*["data"] * (a.ndim > 1))]
)
def test_no_equation_is_added(out_specs):  # fmt: skip
    """The program is the one written by hand."""

    def by_hand(weight, bias, x):
        specs = {"in_specs": (P(), P(), P("data")), "out_specs": (P("data"), P(), P())}
        return jax.shard_map(lambda w, b, x: (x @ w.T, w[0], b), mesh=MESH, **specs)(
            weight, bias, x
        )

    def filtered(weight, bias, x):
        fn = pm.filter_shard_map(
            lambda m, x, how: (x @ m.weight.T, m.weight[0], m.bias),
            mesh=MESH,
            in_specs={"x": P("data")},
            out_specs=out_specs,
        )
        return fn(Affine(weight, bias), x, "how")

    arrays = (*jax.tree.leaves(model()), BATCH)
    assert equations(filtered, *arrays) == equations(by_hand, *arrays)


# ---- bad input


class Dropped(pm.Module):
    """Two layers with a stream, of which the second is a Stack of three."""

    first: nn.Dropout
    stack: nn.Stack

    def __init__(self):
        self.first = nn.Dropout(0.5, stream=pm.RngStream())
        layer = nn.Dropout(0.5, stream=pm.RngStream())
        self.stack = nn.Stack(lambda key: layer, 3, key=jax.random.key(0))

    def __call__(self, x, state):
        x, state = self.first(x, state)
        return self.stack(x, state)


def test_a_split_stream_is_one_on_each_device():
    """A device's shard of the streams draws the same as a member of a map."""
    model, state = pm.make_with_state(Dropped)()
    state = state.seed(jax.random.key(0)).split(4)
    shards = pm.by({pm.RngStream: P("data"), ...: P()})
    members = pm.by({pm.RngStream: 0, ...: None})
    xs = jnp.ones((4, 32))

    specs = P("data"), shards
    mapped = pm.filter_shard_map(model, mesh=MESH, in_specs=specs, out_specs=specs)
    out, after = mapped(xs, state)
    vmapped = pm.filter_vmap(model, in_axes=(0, members), out_axes=(0, members))
    expected, then = vmapped(xs, state.restored())

    assert_same(out, expected)
    assert len({tuple(row) for row in out.tolist()}) == 4
    assert after.join() == then.join()
