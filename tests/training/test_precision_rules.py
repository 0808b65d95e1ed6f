"""Precision by selector: dtypes of storage, computation and output."""

import functools as ft
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from tests.helpers.computing import Scaled
from tests.helpers.trees import ramp
from tests.nn.catalogue import CATALOGUE

MIXED = "params=float32,compute=bfloat16,output=float32"
KEY = jax.random.key(0)
X = ramp(4) / 4


def dtypes(tree):
    """The names of the dtypes of the arrays in a tree, without repetitions."""
    return sorted({leaf.dtype.name for leaf in jax.tree.leaves(tree)})


class Seeing(pm.Module):
    """Gives the dtypes that it sees, of its arrays and of its arguments; adds all up."""

    weight: jax.Array
    inner: pm.Module | None = None
    table: jax.Array = pm.buffer(default_factory=lambda: jnp.ones(4))
    counts: jax.Array = pm.field(default_factory=lambda: jnp.arange(4))

    def __call__(self, x, **further):
        pm.sow("seen", [self.weight, x, *further.values()])
        x = x if self.inner is None else self.inner(x)
        return self.weight + x.astype(self.weight.dtype)

    def encode(self, x):
        return self.weight + x.astype(self.weight.dtype)


def seeing(inner=None):
    return Seeing(jnp.ones(4), inner)


def seen(model, *args, **kwargs):
    """The result, and the dtypes in the calls, outermost first."""
    out, values = pm.capture(model)(*args, **kwargs)
    return out, [[value.dtype.name for value in found] for found in values.values()]


def net():
    one, two = jax.random.split(KEY)
    return nn.Sequential(
        [
            nn.Linear(4, 8, key=one),
            nn.LayerNorm(8),
            nn.Lambda(jax.nn.relu),
            nn.Linear(8, 2, key=two),
        ]
    )


# ---- casts


def test_arguments_are_cast_in_containers_and_by_name():
    """NumPy's arrays as well; but no integers, numbers, keys or bools."""

    class Arguments(pm.Module):
        weight: jax.Array

        def __call__(self, *args, **kwargs):
            return args, kwargs

    model = pm.with_precision(Arguments(X), "params=float32,compute=bfloat16")
    left = (1.0, 2, KEY, jnp.arange(2), np.array([True]), jnp.ones(2, complex), "text", None)

    args, kwargs = model([X, np.ones(2)], *left, by={"name": (X, np.float32(1))})

    assert dtypes((args[0], kwargs)) == ["bfloat16"]
    assert all(new is old for new, old in zip(args[1:], left, strict=True))


def test_buffers_and_integers_are_left_alone():
    """In storage and in use; a parameter may get the role of a buffer later."""
    model = pm.with_role(seeing(), "weight", "buffer")
    model = pm.with_precision(model, "bfloat16")

    assert (model.weight.dtype, model.table.dtype) == (jnp.bfloat16, jnp.float32)
    assert model.counts.dtype == jnp.int32


def test_state_is_left_alone():
    """Running statistics and streams have the dtype that they began with."""

    def make():
        return nn.Sequential([nn.BatchNorm(3), nn.Dropout(0.5)])

    model, state = pm.make_with_state(make)()
    model = pm.with_precision(model, MIXED)
    early, of_early = pm.make_with_state(lambda: pm.with_precision(make(), MIXED))()

    out, after = model(ramp(5, 3), state, key=KEY)
    _, after_early = early(ramp(5, 3), of_early, key=KEY)

    assert dtypes((out, after)) == ["float32"]
    assert pm.tree_equal(after, after_early)
    assert pm.tree_equal(model, early)


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.name)
@pytest.mark.sampled
def test_every_layer_computes_nearly_the_same_in_bfloat16(entry):
    """As in float32; and its State keeps its dtypes, as a loop over steps needs."""
    expected, _ = entry.apply(*entry.build())
    layer, state = entry.build()
    before = [leaf.dtype for leaf in jax.tree.leaves(state)]

    out, after = entry.apply(pm.with_precision(layer, MIXED), state)

    assert dtypes(out) == ["float32"]
    assert [leaf.dtype for leaf in jax.tree.leaves(after)] == before
    for new, old in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(new, old, atol=0.1)


# ---- which Modules


def test_the_innermost_wins():
    """A part computes as it is chosen, however the rule is ordered, and gives what is around it."""
    for rule in ({"inner": "float32", ...: MIXED}, {...: MIXED, "inner": "float32"}):
        out, found = seen(pm.with_precision(seeing(seeing()), pm.by(rule)), X)
        assert found == [["bfloat16", "bfloat16"], ["float32", "float32"]]
        assert out.dtype == jnp.float32
    for rule in ({nn.LayerNorm: "float32", ...: MIXED}, {...: MIXED, nn.LayerNorm: "float32"}):
        model = pm.with_precision(net(), pm.by(rule))
        out, values = pm.filter_eval_shape(pm.capture(model, "layers.*"), X)

        names = [value.dtype.name for value in values.values()]
        assert names == ["bfloat16"] * 4
        assert out.dtype == jnp.float32


def test_inside_and_outside_are_compiled_apart():
    call = pm.filter_jit(lambda layer, x: layer(x))

    class Calling(pm.Module):
        layer: nn.Linear

        def __call__(self, x):
            out = call(self.layer, x)
            pm.sow("inside", out)
            return out

    model = pm.with_precision(Calling(nn.Linear(4, 4, key=KEY)), MIXED)
    for _ in range(2):
        out, values = pm.capture(model)(X)
        assert (values["inside"].dtype, out.dtype) == (jnp.bfloat16, jnp.float32)
        assert call(model.layer, X).dtype == jnp.float32


def test_a_net_that_gives_itself_back_is_not_rounded():
    """Its arrays are the old ones, its computed leaves too; new values are in `params`."""

    class Giving(pm.Module):
        layer: nn.Linear
        factor: jax.Array

        def __call__(self, x):
            return self.layer(x), pm.tree_at("factor", self, self.factor * 3)

    layer = nn.Linear(4, 4, key=KEY)
    layer = layer.replace(weight=Scaled(layer.weight, jnp.asarray(1.1)))
    model = pm.with_precision(Giving(layer, jnp.ones(())), "params=float32,compute=bfloat16")

    for call in (lambda m: m(X), pm.filter_jit(lambda m: m(X))):
        out, after = call(model)
        assert out.dtype == jnp.bfloat16
        assert pm.tree_equal(after, pm.tree_at("factor", model, jnp.asarray(3.0)))


def test_a_net_that_carries_its_state():
    """Its structure stays from call to call, and so do its arrays."""

    def make():
        return nn.Sequential([nn.Linear(4, 4, key=KEY), nn.BatchNorm(4)])

    net = pm.with_precision(pm.stateful(*pm.make_with_state(make)()), MIXED)
    structure, weights = jax.tree.structure(net), jax.tree.leaves(pm.trainable(net)[0])

    out, net = pm.filter_jit(lambda net, x: net(x))(net, ramp(3, 4))

    assert out.dtype == jnp.float32
    assert jax.tree.structure(net) == structure
    for new, old in zip(jax.tree.leaves(pm.trainable(net)[0]), weights, strict=True):
        np.testing.assert_array_equal(new, old)


def test_methods_may_be_named():
    """Beside `__call__`; one that calls another passes inner values."""

    class Both(Seeing):
        def __call__(self, x):
            pm.sow("encoded", self.encode(x))
            return self.encode(x)

    model = pm.with_precision(Both(jnp.ones(4)), MIXED, methods="encode")

    assert model.encode(X).dtype == jnp.float32
    assert pm.capture(model)(X)[1]["encoded"].dtype == jnp.bfloat16
    assert pm.with_precision(seeing(), MIXED).encode(X).dtype == jnp.float32


# ---- results


def test_gradients_arrive_in_the_dtype_of_params():
    model = net()

    def loss(model, x):
        return jnp.sum(model(x) ** 2)

    grad = pm.filter_jit(pm.filter_grad(loss))
    grads = grad(pm.with_precision(model, MIXED), X)

    assert dtypes(grads) == ["float32"]
    for new, old in zip(*map(jax.tree.leaves, (grads, grad(model, X))), strict=True):
        np.testing.assert_allclose(new, old, atol=0.05)
    half = pm.with_precision(model, "bfloat16")
    assert dtypes(pm.filter_eval_shape(grad, half, X)) == ["bfloat16"]


def by_hand(model, x):
    """`net` under bfloat16, its norm in float32, as one would write it."""
    low = jnp.bfloat16

    def linear(layer, x):
        y, bias = jnp.inner(x, layer.weight.astype(low)), layer.bias.astype(low)
        # The gradient of the bias is a sum over the examples, in float32.
        return (y.astype(jnp.float32) + bias[None].astype(jnp.float32)).astype(low)

    one, norm, relu, two = model.layers
    x = linear(one, x.astype(low))
    x = norm(x.astype(jnp.float32)).astype(low)
    return linear(two, relu(x)).astype(jnp.float32)


def casts(fn, *args):
    """The number of conversions in a program: as traced, and compiled."""
    lowered = pm.filter_jit(fn).lower(*args)
    compiled = lowered.compile().as_text()
    return lowered.as_text().count("stablehlo.convert"), len(re.findall(r" convert\(", compiled))


@pytest.mark.slow
def test_the_casts_are_those_of_code_by_hand():
    """No more of them, forwards and backwards; and the same numbers."""
    model, xs = net(), ramp(3, 4) / 12
    mixed = pm.with_precision(model, pm.by({nn.LayerNorm: "float32", ...: MIXED}))

    def loss(call, model, xs):
        return jnp.sum(call(model, xs) ** 2)

    def called(model, xs):
        return model(xs)

    np.testing.assert_array_equal(mixed(xs), by_hand(model, xs))
    assert casts(called, mixed, xs) == casts(by_hand, model, xs)
    mine, others = (pm.filter_grad(ft.partial(loss, call)) for call in (called, by_hand))
    assert casts(mine, mixed, xs) == casts(others, model, xs)


TRANSFORMED = {
    "jit": pm.filter_jit(lambda model, xs: model(xs)),
    "JAX's vmap": lambda model, xs: jax.vmap(model)(xs),
    "scan": lambda model, xs: pm.filter_scan(lambda c, x: (c, c(x)), model, xs)[1],
    "checkpoint": lambda model, xs: pm.filter_checkpoint(model)(xs),
    "cond": lambda model, xs: pm.filter_cond(xs[0, 0] > 0, model, model, xs),
    "a pickle": lambda model, xs: pickle.loads(pickle.dumps(model))(xs),
}


@pytest.mark.parametrize("call", TRANSFORMED.values(), ids=TRANSFORMED)
@pytest.mark.sampled
def test_it_goes_through_transforms_and_copies(call):
    """With the same result, except where XLA does not round intermediate values."""
    model, xs = pm.with_precision(nn.Linear(4, 2, key=KEY), MIXED), ramp(3, 4)

    out = call(model, xs)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, model(xs), rtol=0.01)
    # In float32 they would be this much nearer.
    assert not np.allclose(out, pm.with_precision(model, None)(xs), rtol=1e-6)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.sampled
def test_stacks(norm_first):
    """Carries keep their dtype, whichever of two precisions a layer ends with."""

    class Block(pm.Module):
        norm: nn.LayerNorm
        linear: nn.Linear

        def __call__(self, x):
            return x + self.linear(self.norm(x)) if norm_first else self.norm(self.linear(x))

    def make(key):
        return Block(nn.LayerNorm(4), nn.Linear(4, 4, key=key))

    stack = nn.Stack(make, 3, key=KEY)
    mixed = pm.with_precision(stack, pm.by({nn.LayerNorm: "float32", ...: MIXED}))

    out = mixed(X)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, stack(X), atol=0.1)
    np.testing.assert_allclose(mixed[0](X), stack[0](X), atol=0.1)
    # All layers have the same rules, so that they can be one again.
    again = nn.Stack.from_layers(mixed.unstack())
    assert pm.tree_equal(again.layer, mixed.layer)


def times(out, factor):
    return out * factor.astype(out.dtype)


def make_block(key):
    return nn.Sequential([nn.LayerNorm(4), nn.Linear(4, 4, key=key)])


FACTORS = jnp.asarray([1.0, 0.5, 2.0])


def test_rules_live_with_captures_and_interventions(tmp_path):
    """Whichever came first; in a Stack, in files; and each can be taken away."""
    stack = nn.Stack(make_block, 3, key=KEY)
    rule = pm.by({nn.LayerNorm: "float32", ...: MIXED})
    mixed = pm.with_precision(stack, rule)
    one = pm.intervene(mixed, nn.Linear, times, FACTORS)
    other = pm.with_precision(pm.intervene(stack, nn.Linear, times, FACTORS), rule)

    for model in (one, other):
        out, values = pm.capture(pm.filter_jit(model), "**")(X)
        # Of the layers, and of the Sequential, inside; and of the Stack.
        names = ["bfloat16", "bfloat16", "bfloat16", "float32"]
        assert [value.dtype.name for value in values.values()] == names
        np.testing.assert_array_equal(out, pm.filter_jit(one)(X))
        assert model.layer.layers[1].weight.dtype == out.dtype == jnp.float32
        assert repr(model) == repr(mixed)
        pm.save(tmp_path / "model", model)
        assert pm.load(tmp_path / "model", jax.tree.map(jnp.zeros_like, model)) == model
        bare = pm.with_precision(model, None)
        assert bare == pm.intervene(stack, nn.Linear, times, FACTORS)
    assert not np.allclose(one(X), mixed(X), rtol=0.1)


def test_computed_leaves_are_computed_in_params():
    """And cast afterwards: the source fields of a weight may need more precision."""
    layer = nn.Linear(4, 4, key=KEY)
    # In bfloat16 each factor is 1, and so is their product.
    layer = layer.replace(weight=Scaled(jnp.full((4, 4), 1.001), jnp.asarray(1.01)))
    model = pm.with_precision(layer, "params=float32,compute=bfloat16")
    seen = pm.capture(pm.with_precision(seeing(), "bfloat16"))(X)[1]["seen"][0]

    grads = pm.filter_grad(lambda m: jnp.sum(m(X).astype(jnp.float32)))(model)

    assert seen.dtype == jnp.bfloat16
    assert dtypes(pm.filter(model, pm.is_array)) == dtypes(grads) == ["float32"]
    weight = jnp.full((4, 4), 1.001 * 1.01, jnp.bfloat16)
    exact = jnp.inner(X.astype(jnp.bfloat16), weight) + layer.bias.astype(jnp.bfloat16)
    np.testing.assert_array_equal(model(X), exact)
    assert float(pm.named_leaves(grads)["weight.factor"]) != 0


def test_ties():
    """One leaf, which each of two layers reads in its own precision."""
    model = nn.Sequential([nn.Linear(4, 4, key=KEY), nn.Linear(4, 4, key=KEY)])
    model = pm.tie(model, "layers[1].weight", to="layers[0].weight", through=jnp.transpose)
    low = "params=float32,compute=float16"
    rule = pm.by({"layers[0]": "float32", "layers[1]": low, ...: MIXED})
    mixed = pm.with_precision(model, rule)

    out, values = pm.capture(mixed, "layers.*")(X)
    grads = pm.filter_grad(lambda m: jnp.sum(m(X)))(mixed)

    assert [value.dtype.name for value in values.values()] == ["bfloat16", "bfloat16"]
    np.testing.assert_allclose(out, model(X), atol=0.05)
    assert len(jax.tree.leaves(grads)) == len(jax.tree.leaves(model)) == 3
    assert dtypes(grads) == ["float32"]


def test_none_takes_it_away():
    """Classes are the original ones; cast arrays remain cast."""
    model = net()
    mixed = pm.with_precision(model, MIXED)

    bare = pm.with_precision(mixed, None)
    assert type(mixed) is not nn.Sequential
    assert type(bare) is nn.Sequential
    assert pm.tree_equal(bare, model)
    assert pm.with_precision(model, None) is model
    assert dtypes(pm.with_precision(pm.with_precision(model, "bfloat16"), None)) == ["bfloat16"]


def test_files_keep_it(tmp_path):
    """Loaded into a model of the same rule; the arrays are those of any model."""
    path = tmp_path / "model.safetensors"
    rule = pm.by({nn.LayerNorm: None, ...: "params=bfloat16,compute=float32"})
    model = pm.with_precision(net(), rule)
    pm.save(path, model)

    loaded = pm.load(path, jax.tree.map(jnp.zeros_like, model))
    assert pm.tree_equal(loaded, model)
    assert loaded(X).dtype == jnp.float32
    bare = pm.with_precision(model, None)
    assert pm.tree_equal(pm.load(path, bare, strict=False)[0], bare)
    half = pm.by({nn.LayerNorm: None, ...: "params=bfloat16,compute=bfloat16"})
    with pytest.raises(pm.FileError, match=r"precision: expected .*bfloat16.*, got .*float32"):
        pm.load(path, pm.with_precision(bare, half))


@pytest.mark.parametrize("precision", [MIXED, "float32"])
def test_a_precision_is_printed(precision):
    """Once, behind the outermost Module that has it, in words that give it."""
    model = seeing(seeing())
    given = pm.with_precision(model, precision)

    assert repr(given).startswith(f"{model!r} in ")
    text = repr(given).removeprefix(f"{model!r} in ")
    assert pm.with_precision(model, text) == given
    assert repr(pm.with_precision(given, None)) == repr(model)
    inner = pm.with_precision(model, pm.by({"inner": None, ...: precision}))
    assert repr(inner).count(" in no precision") == 1


WRITTEN = {
    "bf16": ("bfloat16", "bfloat16", "bfloat16"),
    jnp.float16: ("float16", "float16", "float16"),
    " params = f16 , output = f32 ": ("float16", "float16", "float32"),
    "compute=bf16": ("float32", "bfloat16", "bfloat16"),
    "output=f32,params=bf16": ("bfloat16", "bfloat16", "float32"),
    "params=float16,compute=bfloat16,output=float32": ("float16", "bfloat16", "float32"),
}


@pytest.mark.parametrize(("spec", "expected"), WRITTEN.items(), ids=map(str, WRITTEN))
def test_a_precision_may_be_written(spec, expected):
    """Missing parts have defaults: params are float32, compute is params, output is compute."""
    made = pm.with_precision(seeing(), spec)
    out, found = seen(made, X)

    assert made == pm.with_precision(seeing(), pm.Precision(*expected))
    (compute,) = {*found[0]}
    assert (made.weight.dtype.name, compute, out.dtype.name) == expected


def test_64_bits_that_are_not_there_are_warned_of():
    """By JAX; the class of Python is what JAX has."""
    layer = nn.Linear(2, 2, dtype=float, key=KEY)
    for dtype in ("float64", np.dtype("float64")):
        with pytest.warns(UserWarning, match="float64"):
            mixed = pm.with_precision(layer, dtype)
        assert mixed.weight.dtype == jnp.float32
    pm.with_precision(layer, float)
    with jax.enable_x64(True):
        assert pm.with_precision(layer, "float64").weight.dtype == jnp.float64
