"""Compiling, devices and derivatives under value semantics: scenarios of Flax NNX's own suite.

Each test names its scenario there, and is written for values: a function returns its changes, one
array at two paths is two leaves, and programs run that NNX refuses because of shared objects.
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
    axes: tuple[str | None, ...] = pm.field(static=True, default=("data", "model"))

    def __call__(self, x):
        return x @ self.kernel + self.bias[None]

    def counted(self, x):
        return self(x), self.replace(count=self.count + 1)

    def loss(self, x):
        return jnp.mean(self(x) ** 2)


def linear(start=0.1):
    return Linear(ramp(4, 4) * start, ramp(4) * start, jnp.asarray(0))


X = ramp(8, 4) / 10


def test_what_changes_is_returned():
    """graph_updates: a value that a function sets inside jit is in its result."""
    step = pm.filter_jit(lambda m, value: m.replace(bias=value))
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
    lowered = pm.filter_jit(lambda m, x: inner(m, x)).lower(linear(), X)
    compiled, model = lowered.compile(), linear()
    for _ in range(3):
        y, model = compiled(model, X)

    assert int(model.count) == 3
    assert_close(y, linear()(X))
    assert "dot" in lowered.as_text()
    assert compiled.cost_analysis() is not None


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
    traces, losses = [], []

    def sgd(model, momentum, x):
        loss, grads = pm.filter_value_and_grad(lambda m: m.loss(x))(model)
        momentum = jax.tree.map(lambda v, g: 0.5 * v - 0.01 * g, momentum, grads)
        return loss, pm.apply_updates(model, momentum), momentum

    run = pm.filter_jit(lambda step, x: (traces.append(1), step(x))[1])
    model = linear()
    momentum = jax.tree.map(jnp.zeros_like, pm.filter(model, pm.is_inexact_array))
    for _ in range(4):
        loss, model, momentum = run(pm.Partial(sgd, model, momentum), X)
        losses.append(float(loss))

    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]
    assert len(traces) == 1


@pytest.mark.parametrize(
    "spec",
    [
        pm.by({"kernel": P("model", "data"), "bias": P("model"), ...: None}),
        Linear(P("model", "data"), P("model"), P()),
    ],
    ids=["by", "Module"],
)
def test_a_model_split_by_path(spec):
    """basic by filters, spec from a State tree: in and out by one spec."""
    double = lambda m: m.replace(kernel=m.kernel * 2)  # noqa: E731
    fn = pm.filter_shard_map(double, mesh=MESH, in_specs=(spec,), out_specs=spec)
    out = pm.filter_jit(fn)(linear())

    assert_same(out, double(linear()))
    assert all_lie(out) == [("model", "data"), ("model",), ()]


def test_axis_names_kept_beside_the_data():
    """with sharding-name metadata, metadata + counter update: names are configuration."""
    names = linear().axes
    specs = Linear(P(*names), P(names[1]), P(), names)
    fn = pm.filter_shard_map(
        lambda m: m.replace(count=m.count + 1), mesh=MESH, in_specs=(specs,), out_specs=specs
    )
    out = pm.filter_jit(lambda m: fn(fn(m)))(linear())
    assert (out.axes, int(out.count), all_lie(out)) == (names, 2, LAID)


def test_pmap_with_shared_and_own_values():
    """demo, replicate: the same weights for all members, a counter for each."""
    axes = pm.by({"count": 0, ...: None})
    fn = pm.filter_pmap(Linear.counted, in_axes=(axes, 0), out_axes=(0, axes), axis_name="device")
    y, model = fn(linear().replace(count=jnp.zeros(4, int)), X.reshape(4, 2, 4))

    assert_close(y.reshape(8, 4), linear()(X))
    assert_same(model, linear().replace(count=jnp.ones(4, int)))


class Point(pm.Module):
    """Two numbers, one of them a statistic."""

    x: jax.Array
    y: jax.Array = pm.buffer()


POINT = Point(jnp.asarray(1.0), jnp.asarray(2.0))


def test_grad_by_the_other_kind():
    """grad_with_type_predicate: `wrt` picks the statistics instead."""
    grads = pm.filter_grad(lambda m: m.x * m.y, wrt=pm.select.role("buffer"))(POINT)
    assert_close(grads, Point(None, jnp.asarray(1.0)))


@pytest.mark.parametrize("inside", [False, True], ids=["arguments", "containers"])
@pytest.mark.parametrize("with_value", [False, True])
def test_grad_by_parts_of_several_models(inside, with_value):
    """multiple_args, multiple_args_in_pytrees: kernel of the first, bias of the second."""
    a, b = linear(0.1), linear(0.2)
    make = pm.filter_value_and_grad if with_value else pm.filter_grad
    loss = lambda m1, m2: jnp.mean(m2(m1(X)) ** 2)  # noqa: E731

    if inside:
        wrt = [{"model": "kernel"}, {"model": "bias"}]
        run = make(lambda ms: loss(ms[0]["model"], ms[1]["model"]), wrt=wrt)
        result = run([{"model": a}, {"model": b}])
    else:
        result = make(loss, argnums=(0, 1), wrt=("kernel", "bias"))(a, b)
    expected = pm.filter_grad(loss, argnums=(0, 1))(a, b)
    grads = jax.tree.leaves(
        result[1] if with_value else result, is_leaf=lambda x: isinstance(x, Linear)
    )

    assert_close(grads[0], Linear(expected[0].kernel, None, None))
    assert_close(grads[1], Linear(None, expected[1].bias, None))
    if with_value:
        assert_close(result[0], loss(a, b))


def test_custom_vjp_by_one_part():
    """diff_state: a gradient for x alone; the rule learns that y needs none."""
    log = []

    @pm.filter_custom_vjp
    def f(m):
        return jnp.sin(m.x) * m.y, m.replace(x=m.x + 1)

    @f.def_fwd
    def f_fwd(perturbed, m):
        log.append(perturbed)
        return f(m), {"cos": jnp.cos(m.x), "sin": jnp.sin(m.x)}

    @f.def_bwd
    def f_bwd(residuals, grad_out, perturbed, m):
        g, of_changed = grad_out
        log.append(of_changed)
        return Point(2 * residuals["cos"] * g * m.y, 2 * residuals["sin"] * g)

    grads = pm.filter_grad(lambda m: f(m)[0])(POINT)
    assert_close(grads, Point(2 * jnp.cos(1.0) * 2.0, None))
    assert log == [Point(True, False), Point(None, None)]
