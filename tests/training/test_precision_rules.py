"""Precision by selector: dtypes of storage, computation and output."""

import copy
import functools as ft
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, SpecError
from tests.goldens import refusals
from tests.helpers.computing import Scaled
from tests.helpers.trees import ramp
from tests.nn.catalogue import CATALOGUE

MIXED = "params=float32,compute=bfloat16,output=float32"
HALF = "params=float32,compute=float16,output=float32"
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
        """The sum, in the dtype of the weight."""
        pm.sow("seen", [self.weight, x, *further.values()])
        x = x if self.inner is None else self.inner(x)
        return self.weight + x.astype(self.weight.dtype)

    def encode(self, x):
        """The same, by another name."""
        return self.weight + x.astype(self.weight.dtype)


def seeing(inner=None):
    """One of these."""
    return Seeing(jnp.ones(4), inner)


def seen(model, *args, **kwargs):
    """The result, and the dtypes in the calls, outermost first."""
    out, values = pm.capture(model)(*args, **kwargs)
    return out, [[value.dtype.name for value in found] for found in values.values()]


def net():
    """Two linear layers, with a norm between them."""
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


def test_three_dtypes():
    """Of storage, of computation, and of the output."""
    model = pm.with_precision(seeing(), "params=float16,compute=bfloat16,output=float32")

    out, found = seen(model, X)

    assert model.weight.dtype == jnp.float16
    assert found == [["bfloat16", "bfloat16"]]
    assert out.dtype == jnp.float32


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
def test_every_layer_may_compute_in_bfloat16(entry):
    """And its State keeps its dtypes, as a loop over steps needs."""

    def run():
        layer, state = entry.build()
        before = jax.tree.leaves(state)
        out, after = entry.apply(pm.with_precision(layer, MIXED), state)
        return out, before, jax.tree.leaves(after)

    # Nothing need be computed to know it.
    out, before, after = pm.filter_eval_shape(run)

    assert dtypes(out) == ["float32"]
    assert [leaf.dtype for leaf in after] == [leaf.dtype for leaf in before]


@pytest.mark.slow
@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.name)
@pytest.mark.parametrize("precision", [MIXED, HALF])
def test_every_layer_computes_nearly_the_same(entry, precision):
    """As in float32."""
    expected, _ = entry.apply(*entry.build())
    layer, state = entry.build()

    out, _ = entry.apply(pm.with_precision(layer, precision), state)

    for new, old in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(new, old, atol=0.1)


# ---- which Modules


def test_the_innermost_wins():
    """A LayerNorm in the middle of bfloat16 computes in float32, however the rule is ordered."""
    for rule in ({nn.LayerNorm: "float32", ...: MIXED}, {...: MIXED, nn.LayerNorm: "float32"}):
        model = pm.with_precision(net(), pm.by(rule))
        out, values = pm.filter_eval_shape(pm.capture(model, "layers.*"), X)

        names = [value.dtype.name for value in values.values()]
        assert names == ["bfloat16", "float32", "bfloat16", "bfloat16"]
        assert out.dtype == jnp.float32


def test_what_is_inside_of_a_chosen_module_is_chosen_with_it():
    """Unless it is chosen itself; the first selector that picks a Module decides."""
    model = seeing(seeing(seeing(seeing())))
    rule = pm.by({"inner.inner": HALF, "inner": "bfloat16", "inner.**": None, ...: "float32"})

    _, found = seen(pm.with_precision(model, rule), X)

    # The innermost is left alone in the middle of another.
    assert found == [["float32"] * 2, ["bfloat16"] * 2, ["float16"] * 2, ["float32", "float16"]]


def test_none_leaves_alone_in_the_middle():
    """Also inside of a region: it sees its inputs, and its own arrays unchanged."""
    model = pm.with_precision(seeing(seeing(seeing())), pm.by({"inner": None, ...: "bfloat16"}))

    _, found = seen(model, X)

    assert dtypes(model.inner) == ["float32", "int32"]
    assert found == [["bfloat16"] * 2, ["float32", "bfloat16"], ["float32", "bfloat16"]]


def test_results_inside_of_a_region_stay_in_the_dtype_to_compute_in():
    """The outermost of one precision gives the output; a part that is called alone is outermost."""
    model = pm.with_precision(nn.MLP(4, 4, 4, 2, key=KEY), MIXED)

    _, values = pm.filter_eval_shape(pm.capture(model, "layers.*"), X)

    assert dtypes(values) == ["bfloat16"]
    assert model.layers[0](X).dtype == jnp.float32


def test_inside_and_outside_are_compiled_apart():
    """The same part, through the same compiled function."""
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
        assert call(model.layer, X.astype(jnp.bfloat16)).dtype == jnp.float32


def test_a_module_that_comes_out_of_a_region_is_outside():
    """It has its old precision."""

    class Giving(pm.Module):
        layer: nn.Linear

        def __call__(self):
            return self.layer

    model = pm.with_precision(Giving(nn.Linear(4, 4, key=KEY)), MIXED)

    assert model()(X).dtype == jnp.float32
    assert jax.tree.structure(model()) == jax.tree.structure(model.layer)
    assert dtypes(model()) == ["float32"]


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


def test_any_tree_of_models():
    """Each is selected by its path; wrapped Modules are reached."""
    models = pm.with_precision({"a": net(), "b": [net()]}, pm.by({"b.*": MIXED, "a": None}))
    wrapped = pm.with_precision(pm.filter_jit(net()), pm.by({"layers.0": "bfloat16", ...: None}))

    assert type(models["a"]) is nn.Sequential
    assert models["b"][0](X).dtype == jnp.float32
    assert dtypes(wrapped) == ["bfloat16", "float32"]


# ---- results


def test_gradients_arrive_in_the_dtype_of_params():
    """And are near those of float32."""
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
        return nn.functional.linear(x, layer.weight.astype(low), layer.bias.astype(low))

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


def test_a_precision_of_what_is_there_already_costs_nothing():
    """No conversion is left in the program where all is float32 anyway."""
    model = nn.MLP(4, 2, 4, 2, key=KEY)

    assert casts(lambda m, x: m(x), pm.with_precision(model, "float32"), X) == (0, 0)


TRANSFORMED = {
    "jit": pm.filter_jit(lambda model, xs: model(xs)),
    "vmap": lambda model, xs: pm.filter_vmap(model)(xs),
    "JAX's vmap": lambda model, xs: jax.vmap(model)(xs),
    "JAX's jit": lambda model, xs: jax.jit(lambda model, xs: model(xs))(model, xs),
    "map": lambda model, xs: pm.filter_map(model, xs),
    "scan": lambda model, xs: pm.filter_scan(lambda c, x: (c, c(x)), model, xs)[1],
    "checkpoint": lambda model, xs: pm.filter_checkpoint(model)(xs),
    "cond": lambda model, xs: pm.filter_cond(xs[0, 0] > 0, model, model, xs),
    "a copy": lambda model, xs: copy.deepcopy(model)(xs),
    "a pickle": lambda model, xs: pickle.loads(pickle.dumps(model))(xs),
    "tree_map": lambda model, xs: jax.tree.map(lambda leaf: leaf, model)(xs),
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


def test_ensembles():
    """Selected in an Ensemble, or in its constructor: the same as a member alone."""
    rule = pm.by({nn.LayerNorm: "float32", ...: MIXED})

    def make(key):
        return nn.Sequential([nn.Linear(4, 4, key=key), nn.LayerNorm(4)])

    plain = nn.Ensemble(make, 2, key=KEY)
    nets = pm.with_precision(plain, rule)
    out = nets(X)
    assert out.dtype == jnp.float32
    within = nn.Ensemble(lambda key: pm.with_precision(make(key), rule), 2, key=KEY)
    alone = jnp.stack([pm.with_precision(net, rule)(X) for net in plain])
    # bfloat16 has 8 bits: a sum in another order differs in the last one.
    np.testing.assert_allclose(within(X), alone, atol=2**-7)
    np.testing.assert_allclose(out, alone, atol=2**-7)
    assert float(jnp.abs(out - plain(X)).max()) > 0
    _, values = pm.capture(nets, "member.layers.*")(X)
    assert [value.dtype.name for value in values.values()] == ["bfloat16", "float32"]
    assert pm.with_precision(nets, None) == plain


def test_layers_that_stand_apart_keep_one_structure():
    """Arithmetic on two of them goes on as before: rules know no paths."""
    model = pm.with_precision(nn.MLP(4, 4, 4, 1, key=KEY), MIXED)

    mean = jax.tree.map(lambda a, b: (a + b) / 2, *model.layers)

    assert mean(X).dtype == jnp.float32


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
    exact = nn.functional.linear(
        X.astype(jnp.bfloat16),
        jnp.full((4, 4), 1.001 * 1.01, jnp.bfloat16),
        layer.bias.astype(jnp.bfloat16),
    )
    np.testing.assert_array_equal(model(X), exact)
    assert float(pm.named_leaves(grads)["weight.factor"]) != 0


def test_computed_leaves_in_a_stack():
    """They are as many as there are layers."""

    def make(key):
        layer = nn.Linear(4, 4, key=key)
        return layer.replace(weight=Scaled(layer.weight, jnp.asarray(0.5)))

    stack = nn.Stack(make, 3, key=KEY)

    np.testing.assert_allclose(pm.with_precision(stack, MIXED)(X), stack(X), atol=0.1)


class Tying(pm.Module):
    """Two layers, that a tie can join."""

    embed: nn.Linear
    head: nn.Linear

    def __call__(self, x):
        return self.head(self.embed(x))


def test_ties():
    """One leaf, which each of two layers reads in its own precision."""
    model = Tying(nn.Linear(4, 4, key=KEY), nn.Linear(4, 4, key=KEY))
    model = pm.tie(model, "head.weight", to="embed.weight", through=jnp.transpose)
    rule = pm.by({"embed": "float32", "head": "params=float32,compute=float16", ...: MIXED})
    mixed = pm.with_precision(model, rule)

    out, values = pm.capture(mixed, "*")(X)
    grads = pm.filter_grad(lambda m: jnp.sum(m(X)))(mixed)

    assert [value.dtype.name for value in values.values()] == ["float32", "float16"]
    np.testing.assert_allclose(out, model(X), atol=0.05)
    assert len(jax.tree.leaves(grads)) == len(jax.tree.leaves(model)) == 3
    assert dtypes(grads) == ["float32"]


def test_a_training_step():
    """With an optimizer by selector, compiled once."""
    optax = pytest.importorskip("optax")
    model = pm.with_precision(net(), pm.by({nn.LayerNorm: "float32", ...: MIXED}))
    opt = pm.Optimizer(optax.sgd(0.1)).init(model)

    @pm.filter_jit(max_traces=1)
    def step(model, opt, x):
        loss, grads = pm.filter_value_and_grad(lambda m: jnp.sum(m(x) ** 2))(model)
        model, opt = opt.update(model, grads)
        return model, opt, loss

    model, opt, first = step(model, opt, X)
    model, opt, second = step(model, opt, X)

    assert second < first
    assert dtypes(model) == ["float32"]


# ---- taking away, and giving again


def test_none_takes_it_away():
    """Classes are the original ones; cast arrays remain cast."""
    model = net()
    mixed = pm.with_precision(model, MIXED)

    bare = pm.with_precision(mixed, None)
    assert type(mixed.layers[0]) is not nn.Linear
    assert type(bare.layers[0]) is nn.Linear
    assert pm.tree_equal(bare, model)
    assert pm.with_precision(model, None) is model
    assert dtypes(pm.with_precision(pm.with_precision(model, "bfloat16"), None)) == ["bfloat16"]


def test_the_later_one_replaces_the_former():
    """They do not add up."""
    model = net()

    again = pm.with_precision(pm.with_precision(model, HALF), MIXED)

    assert pm.tree_equal(again, pm.with_precision(model, MIXED))


def test_edits_keep_it():
    """A new leaf is cast when the call starts; a new layer brings its own precision."""
    model = pm.with_precision(seeing(seeing()), "bfloat16")

    edited = pm.tree_at(lambda m: m.weight, model, jnp.ones(4))
    exchanged = pm.tree_at(lambda m: m.inner, model, seeing())

    assert seen(edited, X)[1] == [["bfloat16"] * 2] * 2
    assert seen(exchanged, X)[1] == [["bfloat16"] * 2] * 2


def test_abstract_models():
    """As the concrete model."""
    spec = pm.filter_eval_shape(net)

    cast = pm.with_precision(spec, "bfloat16")

    assert dtypes(cast) == ["bfloat16"]
    assert jax.tree.structure(cast) == jax.tree.structure(pm.with_precision(net(), "bfloat16"))


def test_files_keep_it(tmp_path):
    """Loaded like a model, that decides how is computed."""
    path = tmp_path / "model.safetensors"
    rule = pm.by({nn.LayerNorm: None, ...: "params=bfloat16,compute=float32"})
    model = pm.with_precision(net(), rule)
    pm.save(path, model)

    loaded = pm.load(path)
    bare = pm.with_precision(model, None)
    assert pm.tree_equal(loaded, model)
    assert loaded(X).dtype == jnp.float32
    assert pm.tree_equal(pm.load(path, bare), bare)
    pm.save(path, bare)
    assert pm.tree_equal(pm.load(path, model), model)


def test_files_say_nothing_of_what_has_no_precision(tmp_path):
    """They are unchanged from before the feature existed."""
    pm.save(tmp_path / "model.safetensors", net())

    assert b"<precision>" not in (tmp_path / "model.safetensors").read_bytes()


@pytest.mark.parametrize("precision", [MIXED, "float32", "params=float32,compute=bfloat16"])
def test_a_precision_is_printed(precision):
    """Once, behind the outermost Module that has it, in words that give it."""
    model = seeing(seeing())
    given = pm.with_precision(model, precision)

    assert repr(given).startswith(f"{model!r} in ")
    text = repr(given).removeprefix(f"{model!r} in ")
    assert pm.with_precision(model, text) == given
    assert repr(pm.with_precision(given, None)) == repr(model)


def test_each_precision_is_printed_where_it_begins():
    """The innermost wins; an excluded inner part is printed, too."""
    rule = pm.by({"inner.inner": "bfloat16", "inner": None, ...: "float32"})
    text = pm.tree_pformat(pm.with_precision(seeing(seeing(seeing())), rule), width=1000)

    assert re.findall(r"\) in (\w+)", text) == ["bfloat16", "no", "float32"]


# ---- refusals


def test_arrays_that_nothing_would_cast():
    """They belong to a Module that cannot be called, or to none."""

    class Bare(pm.Module):
        weight: jax.Array
        layer: nn.Linear

    bare = Bare(jnp.ones(2), nn.Linear(2, 2, key=KEY))
    with pytest.raises(
        SpecError, match=r'(?s)got arrays in other Modules.*  at weight\n.*methods="encode"'
    ):
        pm.with_precision(bare, MIXED)

    # An array in the dtype of computation need not be cast.
    assert dtypes(pm.with_precision(bare, "bfloat16")) == ["bfloat16"]
    assert dtypes(pm.with_precision(bare, pm.by({nn.Linear: "bfloat16", ...: None}))) == [
        "bfloat16",
        "float32",
    ]


def test_a_method_that_is_not_there():
    """By its name."""
    for methods in (jnp.bfloat16, seeing(), ["encode", 1]):
        with pytest.raises(ArgumentError, match=r"\(methods\): expected the names of methods, got"):
            pm.with_precision(seeing(), MIXED, methods)


test_refusals = refusals(globals())
