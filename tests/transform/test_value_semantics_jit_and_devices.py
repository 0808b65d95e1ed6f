"""Compiling and several devices under value semantics: what reference libraries test, for values.

Each test is a scenario of Flax NNX's own suite (its name is in the docstring) that is written for
values: what a function changes it returns, one array held at two places is two leaves, and programs
that are refused there because objects are shared simply run.
"""

from typing import TypedDict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import PartitionSpec as P

import pytreemod as pm
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.meshes import MESH, all_lie, lies, on
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


class Point(pm.Module):
    """Two leaves."""

    a: jax.Array
    b: jax.Array


class Pair(pm.Module):
    """Two parts, of any types."""

    first: object
    second: object

    def swapped(self):
        return Pair(self.second, self.first)


def linear(start=0.1, size=4):
    return Linear(ramp(size, size) * start, ramp(size) * start, jnp.asarray(0), size)


def point(a=1.0, b=2.0):
    return Point(jnp.asarray(a), jnp.asarray(b))


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
    """graph_updates: what a function sets inside jit is in what it returns."""
    step, _ = traced(lambda m, value: m.replace(bias=value))

    assert_close(step(linear(), ramp(4)).bias, ramp(4))


def test_a_second_call_does_not_trace():
    """simple_double_call, tree_jit_no_retrace, graph_updates with a counter."""
    forward, traces = traced(lambda m, x: m.counted(x))
    model = linear()
    for _ in range(3):
        y, model = forward(model, X)

    assert int(model.count) == 3
    assert_close(y, linear()(X))
    assert len(traces) == 1


def test_jit_on_a_constructor():
    """jit_on_init: static ints stay ints, and two builds are one trace."""
    traces = []

    class Built(pm.Module):
        weight: jax.Array
        sizes: tuple[int, int] = pm.field(static=True)

        def __init__(self, rows, columns, *, key):
            traces.append(1)
            self.sizes = (rows, columns)
            self.weight = jax.random.normal(key, (rows, columns))

    build = pm.filter_jit(Built)
    first, second = build(2, 3, key=jax.random.key(0)), build(2, 3, key=jax.random.key(1))

    assert first.sizes == second.sizes == (2, 3)
    assert type(first.sizes[0]) is int
    assert not np.allclose(first.weight, second.weight)
    assert len(traces) == 1


def test_jit_on_call():
    """jit_on_call: the decorator in the class, on `__call__`; one trace."""
    traces = []

    class Decorated(Linear):
        @pm.filter_jit
        def __call__(self, x):
            traces.append(1)
            return x @ self.kernel + self.bias[None]

    model = Decorated(ramp(4, 4), ramp(4), jnp.asarray(0))
    for _ in range(3):
        out = model(X)

    assert_close(out, X @ ramp(4, 4) + ramp(4)[None])
    assert len(traces) == 1


def test_swapping_parts():
    """graph_updates_unflatten and _same_type: of different types 2 traces, of one type 1."""
    swap, traces = traced(lambda pair: pair.swapped())
    mixed, alike = Pair(linear(), point()), Pair(point(), point(3.0, 4.0))

    assert_same(swap(swap(mixed)), mixed)
    assert len(traces) == 2
    assert_same(swap(swap(alike)), alike)
    assert len(traces) == 3


def test_swapping_leaves():
    """graph_updates_swap_variables."""
    swap, traces = traced(lambda p: Point(p.b, p.a))

    assert_same(swap(swap(point())), point())
    assert_same(swap(point()), point(2.0, 1.0))
    assert len(traces) == 1


def test_jit_of_a_custom_vjp():
    """jit_custom_vjp: what jax.jit gives."""

    @jax.custom_vjp
    def clip(x):
        return jnp.sum(x**2)

    clip.defvjp(lambda x: (clip(x), x), lambda x, g: (g * jnp.minimum(x, 1.5),))

    assert_close(pm.filter_jit(clip)(ramp(3)), jax.jit(clip)(ramp(3)))
    assert_close(pm.filter_jit(jax.grad(clip))(ramp(3)), jnp.minimum(ramp(3), 1.5))


class Batch(TypedDict):
    """A container with names."""

    model: Linear
    others: tuple[Point, jax.Array]


def test_modules_inside_containers():
    """objects_in_pytree: in tuples and typed dicts, in and out."""
    step, traces = traced(
        lambda batch, pair: (
            {**batch, "model": batch["model"].counted(X)[1]},
            (pair[0], Point(pair[1].b, pair[1].a)),
        )
    )
    batch: Batch = {"model": linear(), "others": (point(), ramp(2))}
    for _ in range(2):
        batch, pair = step(batch, (1, point()))

    assert int(batch["model"].count) == 2
    assert_same(pair, (1, point(2.0, 1.0)))
    assert len(traces) == 1


BY_PATH = pm.by({"kernel": on("data", "model"), "bias": on("model"), ...: on()})
LAID = [("data", "model"), ("model",), ()]


def test_shardings_by_path():
    """apply_shardings: kernel and bias by path, the rest everywhere."""
    assert all_lie(pm.filter_jit(lambda m: m, out_shardings=BY_PATH)(linear())) == LAID
    assert all_lie(pm.filter_jit(lambda: pm.filter_shard(linear(), BY_PATH))()) == LAID
    assert all_lie(pm.filter_jit(linear, out_shardings=BY_PATH)()) == LAID


def test_bound_once_called_often():
    """cache_args: a function that has its model already is a value like others."""
    bound = pm.Partial(lambda model, x: model(x), linear())
    forward, traces = traced(lambda fn, x: fn(x))

    for _ in range(3):
        assert_close(forward(bound, X), linear()(X))
    assert_close(pm.filter_jit(bound)(X), linear()(X))
    assert_close(pm.filter_jit(linear().__call__)(X), linear()(X))
    assert len(traces) == 1


def test_nested_and_staged():
    """jit_wrapped: jit in jit; what was compiled goes on updating the counter."""
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


@pytest.mark.parametrize(
    "in_shardings", [(on(), on("data"), None), {"model": BY_PATH, "x": on("data")}]
)
def test_static_arguments_together_with_shardings(in_shardings):
    """jit_static_args_with_shardings, with_sharding_and_static_args: by position and by name."""

    @pm.filter_jit(static="repeat", in_shardings=in_shardings, out_shardings=on("data"))
    def forward(model, x, repeat, activation="relu"):
        for _ in range(repeat):
            x = getattr(jax.nn, activation)(model(x))
        return x

    expected = jax.nn.relu(linear()(jax.nn.relu(linear()(X))))
    for out in (
        forward(linear(), X, 2),
        forward(linear(), X, np.int32(2)),
        forward(model=linear(), x=X, repeat=2),
    ):
        assert_close(out, expected)
        assert lies(out) == ("data",)


# ---- TestTreeJIT


def test_the_elementary_contract():
    """tree_jit_basic, _module, _variable_update, _static_argnums."""
    scale, traces = traced(lambda tree, n, mode: ({"x": tree["x"] * n}, mode, n))

    assert_same(scale({"x": ramp(2)}, 2, "train"), ({"x": ramp(2) * 2}, "train", 2))
    assert_same(scale({"x": ramp(2)}, 3, "train"), ({"x": ramp(2) * 3}, "train", 3))
    assert_same(scale({"x": ramp(2) + 1}, 3, "train"), ({"x": ramp(2) * 3 + 3}, "train", 3))
    assert len(traces) == 2


def test_inputs_may_be_outputs():
    """no_input_output_aliasing, an error there: returning an argument is the identity."""
    model = linear()
    out, part, again = pm.filter_jit(lambda m: (m, m.kernel, m))(model)

    assert_same((out, part, again), (model, model.kernel, model))
    assert not model.kernel.is_deleted()


def test_one_argument_twice():
    """no_shared_variable_refs, an error there: one value at two places is two leaves."""
    leaf, model = ramp(2), linear()

    @pm.filter_jit
    def step(a, b, tree):
        return a.replace(bias=a.bias + 1), b, {**tree, "x": tree["x"] + 1}

    first, second, tree = step(model, model, {"x": leaf, "y": leaf})

    assert_close(first.bias - second.bias, jnp.ones(4))
    assert_same(tree, {"x": leaf + 1, "y": leaf})


def test_new_leaves_in_the_result():
    """new_variable_output_ok: a Module that did not exist before."""
    made = pm.filter_jit(lambda p, n: Pair(Point(p.a + 1, jnp.zeros(n)), "new"))(point(), 3)

    assert_same(made, Pair(Point(jnp.asarray(2.0), jnp.zeros(3)), "new"))


def test_a_donated_argument_that_is_returned():
    """donate_argnums_unchanged_var: the value goes on in what was returned, call after call."""
    step = pm.filter_jit(lambda m, x: (m, m.loss(x)), donate="m")
    model = pm.filter_jit(lambda: linear())()
    for _ in range(3):
        model, loss = step(model, X)

    assert_same(model, linear())
    assert_close(loss, linear().loss(X))


@pytest.mark.parametrize(
    ("donate", "gone"),
    [
        ("model", {"kernel", "bias", "count"}),
        (("model", "x"), {"kernel", "bias", "count", "x"}),
        (pm.select.path("model.kernel"), {"kernel"}),
        (pm.select.path("model") & ~pm.select.path("model.bias"), {"kernel", "count"}),
        ("all", {"kernel", "bias", "count", "x"}),
        ("all-except-first", {"x"}),
    ],
)
def test_donation(donate, gone):
    """donate_argnums_module, _with_mutation, _donate_argnames, _donate_selective."""
    step = pm.filter_jit(lambda model, x: (model.counted(x)[1], x * 2), donate=donate)
    model, x = pm.filter_jit(lambda: (linear(), X + 0))()
    arrays = {"kernel": model.kernel, "bias": model.bias, "count": model.count, "x": x}

    new, doubled = step(model, x)

    assert {name for name, array in arrays.items() if array.is_deleted()} == gone
    assert int(new.count) == 1
    assert_close(doubled, X * 2)


def forward_of(model, x, *, scale=1.0):
    """What a call of the model gives, and the model with one call more."""
    y, model = model.counted(x)
    return y * scale, model


def test_functions_bound_to_their_model():
    """jit_partial_basic, _multiple_args, _no_partial_args, _variable_update, _no_retrace(...)."""
    run, traces = traced(forward_of)
    fn = pm.filter_jit(lambda bound, *args: bound(*args))

    model = linear()
    for _ in range(3):
        y, model = fn(pm.Partial(run, model, scale=2.0), X)

    assert int(model.count) == 3
    assert_close(y, 2 * linear()(X))
    assert len(traces) == 1
    assert_close(fn(pm.Partial(run, model, X))[0], linear()(X))
    assert_close(fn(pm.Partial(run), model, X)[0], linear()(X))
    assert len(traces) == 2


def test_bound_functions_are_staged():
    """jit_partial_lower_compile."""
    bound = pm.filter_jit(pm.Partial(forward_of, linear()))
    compiled = bound.lower(X).compile()

    assert_close(compiled(X)[0], linear()(X))
    assert int(compiled(X)[1].count) == 1


@pytest.mark.parametrize(
    ("in_shardings", "expected"),
    [
        (None, None),
        ((None,), None),
        (on("data"), ("data",)),
        ((on("data"),), ("data",)),
        ({"x": on("data")}, ("data",)),
    ],
)
def test_shardings_of_bound_functions(in_shardings, expected):
    """jit_partial_in_shardings_none_broadcast, _named, _mixed_shardings, _non_tuple."""

    class Bound(Linear):
        def run(self, x):
            return self(x), x * 2

    model = Bound(*jax.tree.leaves(linear()))
    fn = pm.filter_jit(model.run, in_shardings=in_shardings)

    y, doubled = fn(X)

    assert_close((y, doubled), (model(X), X * 2))
    if expected is not None:
        assert lies(doubled) == expected


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


# ---- TestEvalShape


def test_the_skeleton_of_a_model():
    """abstract model from a constructor; a Module as input; nothing is computed."""
    called = []

    def build(size):
        called.append(size)
        return linear(size=size)

    skeleton = pm.filter_eval_shape(build, 3)
    out, counted = pm.filter_eval_shape(lambda m, x: m.counted(x), linear(), X)

    assert [leaf.shape for leaf in jax.tree.leaves(skeleton)] == [(3, 3), (3,), ()]
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(skeleton))
    assert (skeleton.size, called) == (3, [3])
    assert (out.shape, counted.kernel.shape, counted.size) == ((8, 4), (4, 4), 4)
    assert pm.filter_eval_shape(lambda m, x: m(x), skeleton, ramp(2, 3)).shape == (2, 3)


def test_the_shapes_of_shared_values():
    """input/output aliasing and shared inputs, errors there: one value at several places."""
    model = linear()
    first, second, same = pm.filter_eval_shape(lambda a, b: (a, b, a.kernel), model, model)

    assert jax.tree.structure(first) == jax.tree.structure(second)
    assert same.shape == (4, 4)


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


def test_bare_leaves():
    """bare leaves: arrays alone, in a tuple and in a dict."""
    fn = pm.filter_shard_map(
        lambda x, d: (x * 2, {"y": d["y"] + 1}),
        mesh=MESH,
        in_specs=(P("data"), {"y": P("model")}),
        out_specs=(P("data"), {"y": P("model")}),
    )

    assert_same(fn(ramp(4), {"y": ramp(2)}), (ramp(4) * 2, {"y": ramp(2) + 1}))


def test_data_parallelism_with_a_counter():
    """data parallel, module counter update: gradients are averaged, the counter counts once."""

    @pm.filter_jit
    @pm.filter_shard_map(mesh=MESH, in_specs={"x": P("data")}, out_specs=None)
    def step(model, x):
        grads = pm.filter_grad(lambda m: jax.lax.pmean(m.loss(x), "data"))(model)
        _, model = model.counted(x)
        return pm.apply_updates(model, jax.tree.map(lambda g: -0.01 * g, grads))

    model = linear()
    for _ in range(2):
        model = step(model, X)

    expected = linear()
    for _ in range(2):
        grads = pm.filter_grad(lambda m: m.loss(X))(expected)
        expected = pm.apply_updates(expected, jax.tree.map(lambda g: -0.01 * g, grads))
    assert_close(model.kernel, expected.kernel)
    assert int(model.count) == 2


def test_tensor_parallelism_by_paths():
    """tensor parallel, path filters + psum: columns in the first layer, rows in the second."""
    specs = pm.by(
        {
            "first.kernel": P(None, "model"),
            "first.bias": P("model"),
            "second.kernel": P("model"),
            ...: None,
        }
    )

    @pm.filter_jit
    @pm.filter_shard_map(mesh=MESH, in_specs=(specs, P("data")), out_specs=P("data"))
    def forward(pair, x):
        hidden = jax.nn.relu(pair.first(x))
        return jax.lax.psum(hidden @ pair.second.kernel, "model") + pair.second.bias[None]

    pair = Pair(linear(), linear(0.2))  # fmt: skip

    assert_close(forward(pair, X), pair.second(jax.nn.relu(pair.first(X))))


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


def test_pmap_on_one_device():
    """basic single device: build, and build with what was built."""
    keys = jax.random.split(jax.random.key(0), 1)
    built = pm.filter_pmap(lambda key: linear().replace(kernel=jax.random.normal(key, (4, 4))))(
        keys
    )
    y = pm.filter_pmap(lambda m, x: m(x))(built, X[None])

    assert built.kernel.shape == (1, 4, 4)
    assert_close(y[0], X @ jax.random.normal(keys[0], (4, 4)) + linear().bias[None])


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


# ---- TestCheckify, TestMakeJaxpr


def test_checkify_through_a_module():
    """nan caught through a module; stateful: the counter comes out beside the error."""
    fn = pm.filter_jit(pm.filter_checkify(lambda m, x: m.counted(x), errors=checkify.nan_checks))

    error, (_, model) = fn(linear(), X)
    assert (error.get(), int(model.count)) == (None, 1)
    error, (_, model) = fn(model, X * jnp.nan)
    assert "nan generated by primitive: dot_general" in error.get()
    assert int(model.count) == 2


def test_the_jaxpr_of_a_call():
    """jaxpr of a module call: its inputs are the arrays, in order."""
    jaxpr, dynamic, static = pm.filter_make_jaxpr(lambda m, x: m.counted(x))(linear(), X)

    assert len(jaxpr.jaxpr.invars) == 4
    assert len(jaxpr.jaxpr.eqns) == len(
        jax.make_jaxpr(lambda k, b, c, x: (x @ k + b[None], c + 1))(
            *jax.tree.leaves(linear()), X
        ).eqns
    )
    assert dynamic[0].shape == (8, 4)
    assert static[1].size == 4


# ---- TestBoundMethodTransforms


def via_custom_vjp(method):
    """A rule of one's own around a method, and the value under it."""
    fn = pm.filter_custom_vjp(method)
    fn.def_fwd(lambda perturbed, x: (method(x), None))
    fn.def_bwd(lambda residuals, g, perturbed, x: jnp.ones_like(x))
    return fn(X)


THROUGH = {
    "jit": lambda method: pm.filter_jit(method)(X),
    "grad": lambda method: pm.filter_value_and_grad(method)(X)[0],
    "vmap": lambda method: pm.filter_vmap(method)(X[:, None]).mean(),
    "pmap": lambda method: pm.filter_pmap(method)(X[:, None]).mean(),
    "shard_map": lambda method: pm.filter_shard_map(
        method, mesh=MESH, in_specs=None, out_specs=None
    )(X),
    "remat": lambda method: pm.filter_checkpoint(method)(X),
    "checkify": lambda method: pm.filter_checkify(method)(X)[1],
    "jvp": lambda method: pm.filter_jvp(method, (X,), (X,))[0],
    "vjp": lambda method: pm.filter_vjp(method, X)[0],
    "scan": lambda method: pm.filter_scan(lambda c, x: (c, method(x)), 0, X[None])[1][0],
    "cond": lambda method: pm.filter_cond(jnp.asarray(True), method, lambda x: -method(x), X),
    "switch": lambda method: pm.filter_switch(jnp.asarray(0), [method, method], X),
    "map": lambda method: pm.filter_map(method, X[None])[0],
    "custom_vjp": via_custom_vjp,
}


@pytest.mark.parametrize("transformed", THROUGH.values(), ids=THROUGH)
@pytest.mark.sampled
def test_bound_methods_go_through_every_transform(transformed):
    """An error there for eleven transforms: a bound method is a value, its model a part of it."""
    model = linear()

    assert_close(transformed(model.loss), model.loss(X))
    assert_close(pm.filter_jit(lambda m: transformed(m.loss))(model), model.loss(X))
    assert pm.filter_eval_shape(model.loss, X).shape == ()


@pytest.mark.slow
def test_gradients_reach_the_model_of_a_bound_method():
    """Through the transforms above, the model that the method is bound to is data."""
    expected = pm.filter_grad(lambda m: m.loss(X))(linear())
    for name in ("jit", "shard_map", "remat", "scan", "cond", "map"):
        grads = pm.filter_grad(lambda m, f=THROUGH[name]: f(m.loss))(linear())
        assert_close(grads, expected)


@pytest.mark.parametrize("out_axes", [0, 1])
def test_pmap_of_bound_methods(out_axes):
    """tree-mode pmap tests: arrays, axes, Modules in and out, one more call."""

    class Counter(pm.Module):
        count: jax.Array

        def add(self, x, by=1):
            return x + self.count, Counter(self.count + by)

    counter = Counter(jnp.asarray([1.0, 2.0]))
    fn = pm.filter_pmap(counter.add, out_axes=(out_axes, 0))
    for _ in range(2):
        y, new = fn(ramp(4, 2), by=2)
        assert_close(y, jnp.moveaxis(ramp(4, 2) + counter.count[None], 0, out_axes))
        assert_close(new.count, jnp.stack([counter.count + 2] * 4))
