"""Compiling and several devices under value semantics: scenarios of reference libraries.

Each test is a scenario of Flax NNX's own suite (its name is in the docstring) that is written for
values: a function returns its changes, one array at two paths is two leaves, and programs that NNX
refuses because of shared objects run.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import pytreemod as pm
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.meshes import MESH, all_lie, on
from tests.helpers.trees import ramp


class Linear(pm.Module):
    """A layer with a counter of its calls."""

    kernel: jax.Array
    bias: jax.Array
    count: jax.Array
    size: int = pm.field(static=True, default=4)

    def __call__(self, x):
        return x @ self.kernel + self.bias[None]

    def counted(self, x):
        return self(x), self.replace(count=self.count + 1)

    def loss(self, x):
        return jnp.mean(self(x) ** 2)


def linear(start=0.1, size=4):
    return Linear(ramp(size, size) * start, ramp(size) * start, jnp.asarray(0), size)


X = ramp(8, 4) / 10


def traced(fn, **options):
    """`filter_jit(fn)`, and a list that grows by one with each trace."""
    traces = []

    def noting(*args, **kwargs):
        traces.append(1)
        return fn(*args, **kwargs)

    return pm.filter_jit(noting, **options), traces


# ---- TestJIT


def test_what_changes_is_returned():
    """graph_updates: a value that a function sets inside jit is in its result."""
    step, _ = traced(lambda m, value: m.replace(bias=value))

    assert_close(step(linear(), ramp(4)).bias, ramp(4))


BY_PATH = pm.by({"kernel": on("data", "model"), "bias": on("model"), ...: on()})
LAID = [("data", "model"), ("model",), ()]


def test_shardings_by_path():
    """apply_shardings: kernel and bias by path, the rest everywhere."""
    assert all_lie(pm.filter_jit(lambda m: m, out_shardings=BY_PATH)(linear())) == LAID
    assert all_lie(pm.filter_jit(lambda: pm.filter_shard(linear(), BY_PATH))()) == LAID
    assert all_lie(pm.filter_jit(linear, out_shardings=BY_PATH)()) == LAID


def test_nested_and_staged():
    """jit_wrapped: jit in jit; the compiled function continues to update the counter."""
    inner = pm.filter_jit(lambda m, x: m.counted(x))
    outer = pm.filter_jit(lambda m, x: inner(m, x))

    lowered = outer.lower(linear(), X)
    compiled = lowered.compile()
    model = linear()
    for _ in range(3):
        y, model = compiled(model, X)

    assert int(model.count) == 3
    assert_close(y, linear()(X))
    assert "dot" in lowered.as_text()
    assert compiled.cost_analysis() is not None


# ---- TestTreeJIT


def test_one_argument_twice():
    """no_shared_variable_refs, an error there: one value at two paths is two leaves."""
    leaf, model = ramp(2), linear()

    @pm.filter_jit
    def step(a, b, tree):
        return a.replace(bias=a.bias + 1), b, {**tree, "x": tree["x"] + 1}

    first, second, tree = step(model, model, {"x": leaf, "y": leaf})

    assert_close(first.bias - second.bias, jnp.ones(4))
    assert_same(tree, {"x": leaf + 1, "y": leaf})


def test_a_training_step_of_a_bound_pair():
    """jit_partial_train_step: the loss goes down."""

    def sgd(model, momentum, x):
        loss, grads = pm.filter_value_and_grad(lambda m: m.loss(x))(model)
        momentum = jax.tree.map(lambda v, g: 0.5 * v - 0.01 * g, momentum, grads)
        return loss, pm.apply_updates(model, momentum), momentum

    run, traces = traced(lambda step, x: step(x))
    model = linear()
    momentum = jax.tree.map(jnp.zeros_like, pm.filter(model, pm.is_inexact_array))
    losses = []
    for _ in range(4):
        loss, model, momentum = run(pm.Partial(sgd, model, momentum), X)
        losses.append(float(loss))

    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]
    assert len(traces) == 1


# ---- TestShardMap


@pytest.mark.parametrize(
    "spec",
    [
        pm.by({"kernel": P("model", "data"), "bias": P("model"), ...: None}),
        Linear(P("model", "data"), P("model"), P()),
        lambda leaf: P(*["model", "data"][: leaf.ndim]),
    ],
    ids=["by", "Module", "function"],
)
@pytest.mark.slow
def test_a_model_split_by_path(spec):
    """basic by filters, spec from a State tree: in and out by one spec."""
    fn = pm.filter_shard_map(
        lambda m: m.replace(kernel=m.kernel * 2), mesh=MESH, in_specs=(spec,), out_specs=spec
    )

    out = fn(linear())

    assert_same(out, linear().replace(kernel=linear().kernel * 2))
    assert all_lie(out) == [("model", "data"), ("model",), ()]


def test_axis_names_kept_beside_the_data():
    """with sharding-name metadata, metadata + counter update: names are configuration."""

    class Named(Linear):
        axes: tuple[str | None, ...] = pm.field(static=True, default=("data", "model"))

    def specs_of(model):
        return Named(P(*model.axes), P(model.axes[1]), P(), model.size, model.axes)

    model = Named(*jax.tree.leaves(linear()))
    specs = specs_of(model)
    fn = pm.filter_shard_map(
        lambda m: m.replace(count=m.count + 1), mesh=MESH, in_specs=(specs,), out_specs=specs
    )
    out = fn(fn(model))

    assert out.axes == ("data", "model")
    assert int(out.count) == 2
    assert all_lie(out) == LAID


# ---- TestPmap


def test_pmap_with_shared_and_own_values():
    """demo, replicate: the same weights for all members, a counter for each."""
    axes = pm.by({"count": 0, ...: None})
    model = linear().replace(count=jnp.zeros(4, int))
    fn = pm.filter_pmap(
        lambda m, x: m.counted(x), in_axes=(axes, 0), out_axes=(0, axes), axis_name="device"
    )
    y, model = fn(model, X.reshape(4, 2, 4))

    assert_close(y.reshape(8, 4), linear()(X))
    assert_same(model.replace(count=jnp.asarray(0)), linear())
    assert model.count.tolist() == [1] * 4
