"""Layers and members are one by one in a file: a list, a Stack and an Ensemble have one form."""

import functools as ft
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import FileError
from tests.helpers.comparing import assert_same
from tests.helpers.trees import ramp

KEY = jax.random.key(0)
RULE = optax.chain(optax.scale(0.5), optax.adam(0.1))
FORMS = ("list", "Stack", "Ensemble")
PAIRS = [*itertools.product(FORMS, FORMS)]


def linear(key):
    return nn.Linear(2, 2, key=key)


def in_form(form, make, count, key):
    if form == "list":
        return [make(each) for each in jax.random.split(key, count)]
    return getattr(nn, form)(make, count, key=key)


def listed(layers):
    """The layers, and those in them, in lists."""
    return [listed(layer) for layer in layers] if hasattr(layers, "__len__") else layers


class Block(nn.StatefulLayer):
    """A layer with everything: arrays, statistics, configuration, and maybe a stream."""

    linear: nn.Linear
    norm: nn.BatchNorm
    drop: nn.Dropout

    def __init__(self, key, stream=None):
        self.linear, self.norm = linear(key), nn.BatchNorm(2)
        self.drop = nn.Dropout(0.5, stream=stream)

    def __call__(self, x, state):
        return self.norm(self.linear(x), state)


@ft.cache
def run(form, seed):
    """A model, its State with statistics, and its Optimizer after a step."""

    def make(key):
        return {"blocks": in_form(form, Block, 2, key), "head": linear(key)}

    model, state = pm.make_with_state(make)(jax.random.key(seed))
    state = jax.tree.map(lambda x: ramp(*x.shape) + seed, state)
    # optax promotes as JAX does by default.
    with jax.numpy_dtype_promotion("standard"):
        opt = pm.Optimizer(RULE).init(model)
        model, opt = opt.update(model, grads=pm.filter(model, pm.is_inexact_array))
    return {"model": model, "state": state, "opt": opt}


def by_layer(tree):
    """The arrays, by the names that they would have for layers in a list."""
    found = {}
    for name, leaf in pm.named_leaves(tree).items():
        words = ["*" if word in ("layer", "member") else word for word in name.split(".")]
        parts = enumerate(leaf) if "*" in words else [("", leaf)]
        found |= {".".join(words).replace("*", str(i)): np.asarray(x) for i, x in parts}
    return found


@pytest.mark.parametrize("form", FORMS)
def test_a_file_has_a_name_for_each_layer(form, tmp_path):
    """In model, State and Optimizer; each is an array of one layer."""
    pm.save(tmp_path / "file", run(form, 1))
    arrays = pm.load(tmp_path / "file")

    assert_same(arrays, by_layer(run(form, 1)))
    assert {n for n in arrays if n.startswith(("model.blocks.1.", "state"))} == {
        *(
            f"model.blocks.1.{layer}.{n}"
            for layer in ("linear", "norm")
            for n in ("weight", "bias")
        ),
        *(f"state.blocks.{i}.norm.state_index.{j}" for i in range(2) for j in range(2)),
    }
    assert arrays["opt.states.0.1.0.mu.blocks.1.linear.weight"].shape == (2, 2)


@pytest.mark.parametrize(("given", "wanted"), PAIRS)
def test_each_form_is_loaded_into_each_other(given, wanted, tmp_path):
    """Strictly: model, State and Optimizer, concrete and abstract."""
    pm.save(tmp_path / "file", run(given, 1))
    loaded = pm.load(tmp_path / "file", run(wanted, 2))

    assert_same(by_layer(loaded), by_layer(run(given, 1)))
    like = jax.eval_shape(lambda: run(wanted, 2))
    assert pm.tree_equal(pm.load(tmp_path / "file", like), loaded)


NESTED = [("list", "list"), *itertools.product(FORMS, ("Stack", "Ensemble"))]


def nested(outer, inner, seed):
    """Twice two layers: a swapped axis would not be an error of shapes."""
    return in_form(outer, lambda key: in_form(inner, linear, 2, key), 2, jax.random.key(seed))


@pytest.mark.parametrize("given", NESTED, ids="-".join)
@pytest.mark.parametrize("wanted", NESTED, ids="-".join)
@pytest.mark.sampled
def test_layers_in_layers_keep_their_places(given, wanted, tmp_path):
    """The number of the outer one is before that of the inner one, in names as in axes."""
    tree = {"net": nested(*given, 0)}
    pm.save(tmp_path / "file", tree)
    loaded = pm.load(tmp_path / "file", {"net": nested(*wanted, 1)})

    assert_same(listed(loaded["net"]), listed(tree["net"]))
    bias = pm.load(tmp_path / "file")["net.1.0.bias"]
    assert_same(bias, np.asarray(listed(tree["net"])[1][0].bias))


@pytest.mark.parametrize(("given", "wanted"), PAIRS)
def test_fewer_layers_are_the_first_ones(given, wanted, tmp_path):
    """If not strict; else the others are unexpected. More layers keep those of `like`."""
    three, two = (in_form(given, linear, n, jax.random.key(n)) for n in (3, 2))
    pm.save(tmp_path / "three", three)
    pm.save(tmp_path / "two", two)
    small, large = (in_form(wanted, linear, n, jax.random.key(7)) for n in (2, 3))

    loaded, report = pm.load(tmp_path / "three", small, strict=False)
    assert_same(listed(loaded), listed(three)[:2])
    assert sorted(report.unexpected) == ["2.bias", "2.weight"]
    loaded, report = pm.load(tmp_path / "two", large, strict=False)
    assert_same(listed(loaded), [*listed(two), listed(large)[2]])
    assert sorted(report.missing) == ["2.bias", "2.weight"]
    for name, like, word in (("three", small, "unexpected"), ("two", large, "missing")):
        with pytest.raises(FileError, match=rf"at 2\.weight: {word}\n  at 2\.bias: {word}"):
            pm.load(tmp_path / name, like)


def test_a_stream_is_one_for_all_layers_of_a_stack(tmp_path):
    """So it does not fit the streams of a list: an error by path, for these alone."""

    def seeded(form, seed):
        blocks = ft.partial(in_form, form, lambda key: Block(key, pm.RngStream()), 2, KEY)
        model, state = pm.make_with_state(blocks)()
        return {"model": model, "state": state.seed(jax.random.key(seed))}

    pm.save(tmp_path / "Stack", seeded("Stack", 1))
    pm.save(tmp_path / "list", seeded("list", 1))
    assert pm.tree_equal(pm.load(tmp_path / "Stack", seeded("Stack", 2)), seeded("Stack", 1))
    for name, other in (("Stack", "list"), ("list", "Stack")):
        with pytest.raises(FileError, match=r"at state\.1\.drop\.stream\.key: ") as error:
            pm.load(tmp_path / name, seeded(other, 2))
        _, *lines = str(error.value).splitlines()
        assert all("stream" in line for line in lines if line.startswith("  at "))


def net(p=0.5, size=2, use_bias=True):
    layer = nn.Linear(size, 2, use_bias, key=KEY)
    return nn.Sequential([layer] if p is None else [layer, nn.Dropout(p)])


@pytest.mark.parametrize(
    ("layer", "line"),
    [
        (net(0.1), r"1\.layers\.1\.p: expected 0\.5, got 0\.1"),
        (net(None), r"1\.layers\.1: expected class Dropout, got nothing"),
        (net(use_bias=False), r"1\.layers\.0\.bias: missing"),
        (net(size=3), r"1\.layers\.0\.weight: expected f32\[2,2\], got f32\[2,3\]"),
    ],
    ids=["p", "a Module less", "an array less", "a shape"],
)
def test_layers_that_differ_are_no_stack(layer, line, tmp_path):
    pm.save(tmp_path / "file", [net(), layer])
    with pytest.raises(FileError, match=f"at {line}"):
        pm.load(tmp_path / "file", nn.Stack.from_layers([net(), net()]))


class Holder(pm.Module):
    leaf: object

    def __call__(self, x):
        return x


LEAVES = {
    "keys": jax.random.key,
    "weak numbers": lambda i: jnp.asarray(float(i)),
    "bfloat16": lambda i: jnp.full(2, i, "bfloat16"),
    "NumPy": lambda i: np.full(2, i, np.float32),
}


@pytest.mark.parametrize("make", LEAVES.values(), ids=LEAVES.keys())
def test_layers_have_leaves_of_any_kind(make, tmp_path):
    """Keys have an axis less than their numbers, and a part of NumPy's is an array."""
    layers = [Holder(make(i)) for i in range(3)]
    stack = nn.Stack.from_layers(layers)
    pm.save(tmp_path / "list", layers)
    pm.save(tmp_path / "stack", stack)
    like = jax.tree.map(lambda x: x[::-1], stack)

    assert (tmp_path / "list").read_bytes() == (tmp_path / "stack").read_bytes()
    assert_same(pm.load(tmp_path / "list", like), stack)
    assert_same(pm.load(tmp_path / "stack", layers[::-1]), layers)
    pm.save(tmp_path / "one", [Holder(make(7))])
    one, _ = pm.load(tmp_path / "one", like, strict=False)
    assert_same(listed(one), [Holder(make(7)), *layers[1::-1]])
    assert getattr(one.layer.leaf, "weak_type", None) == getattr(make(0), "weak_type", None)


def test_the_state_of_a_mapped_rule_fits_no_list(tmp_path):
    """It has one state for each group of layers."""
    one, several = (in_form(form, linear, 3, KEY) for form in ("Stack", "list"))
    mapped = pm.Optimizer(pm.per_layer(optax.lars(0.1)))
    pm.save(tmp_path / "file", mapped.init(one))
    assert_same(pm.load(tmp_path / "file", mapped.init(one)), mapped.init(one))
    with pytest.raises(FileError, match=r"states\.0.*(unexpected|missing)"):
        pm.load(tmp_path / "file", pm.Optimizer(optax.lars(0.1)).init(several))


REDUCED = {"numbers": lambda x: x.ndim, "sums": jnp.sum, "sums of each": lambda x: x.sum((1, 2))}


@pytest.mark.parametrize("reduce", REDUCED.values(), ids=REDUCED.keys())
def test_what_is_computed_from_layers_need_not_have_their_axis(reduce, tmp_path):
    """A leaf without it has one name, that of its field."""
    made = jax.tree.map(reduce, nn.Stack(ft.partial(nn.Linear, 2, 2, use_bias=False), 3, key=KEY))
    pm.save(tmp_path / "file", made)

    assert_same(pm.load(tmp_path / "file", jax.tree.map(lambda x: 0 * x, made)), made)
    assert len(pm.load(tmp_path / "file")) == (3 if np.ndim(made.layer.weight) else 1)
