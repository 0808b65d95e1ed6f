"""`reinitialize`."""

import functools as ft
import inspect
import math

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod import nn
from tests.goldens import refusals
from tests.nn.numbers_to_compare import assert_close

LECUN = jax.nn.initializers.lecun_normal()
MAKES = {
    "Linear": (lambda **options: nn.Linear(128, 16, **options), 128),
    "Conv2d": (lambda **options: nn.Conv2d(16, 8, (4, 2), groups=2, **options), 64),
    "ConvTranspose1d": (lambda **options: nn.ConvTranspose1d(32, 16, 4, **options), 128),
    "LinearGeneral": (lambda **options: nn.LinearGeneral((16, 8), 16, (-2, -1), **options), 128),
    "Einsum": (lambda **options: nn.Einsum("...hi,oih->...ho", (32, 64, 4), **options), 64),
}


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.sampled
def test_layers_are_drawn_as_they_draw_themselves(key, name):
    """With the fan-in of the layer, whatever the layout of its arrays; the rest is unchanged."""
    make, fan_in = MAKES[name]
    layer = make(key=key)

    new = pm.reinitialize(layer, "weight", LECUN, key)

    (used,) = jax.random.split(key, 1)
    assert new.weight.shape == layer.weight.shape
    assert new.bias is layer.bias
    assert abs(float(jnp.var(new.weight)) * fan_in - 1) < 0.15
    # As the layer would have drawn it, with that key.
    again = make(key=key, weight_init=lambda _, shape, dtype: LECUN(used, shape, dtype))
    if name != "Einsum":
        assert_close(new.weight, again.weight)


@pytest.mark.slow
def test_layers_as_one_are_drawn_one_for_one(key):
    """Those of a Stack, and of a map over a map: different values, each with its own fan-in."""
    stack = nn.Stack(ft.partial(nn.Linear, 64, 64), 3, key=key)
    grid = pm.filter_vmap(lambda keys: pm.filter_vmap(lambda k: nn.Linear(64, 64, key=k))(keys))(
        jax.random.split(key, (2, 2))
    )
    for model in (stack, grid):
        new = pm.reinitialize(model, "**.weight", LECUN, key)
        (weight,) = [leaf for leaf in jax.tree.leaves(new) if leaf.shape[-2:] == (64, 64)]
        members = weight.reshape(-1, 64, 64)
        assert len({float(member[0, 0]) for member in members}) == len(members)
        assert all(abs(float(jnp.var(member)) * 64 - 1) < 0.15 for member in members)


def test_a_bias_and_an_array_of_ones_own(key):
    """That of a convolution is drawn flat; an array of any other Module in its own shape."""

    class Own(pm.Module):
        table: jax.Array
        conv: nn.Conv1d

    shapes = []

    def noted(key, shape, dtype):
        shapes.append((shape, dtype.name))
        return jnp.zeros(shape, dtype)

    model = Own(jnp.ones((2, 3), jnp.bfloat16), nn.Conv1d(2, 5, 3, key=key))
    new = pm.reinitialize(model, pm.select.path("table") | pm.select.path("conv.bias"), noted, key)

    assert {*shapes} == {((2, 3), "bfloat16"), ((5,), "float32")}
    assert new.conv.bias.shape == (5, 1)
    assert new.conv.weight is model.conv.weight


def test_each_array_gets_a_key_of_its_own(key):
    """Two layers of a kind differ, under jit as well."""
    mlp = nn.MLP(4, 4, 4, 1, key=key)

    new = pm.filter_jit(pm.reinitialize)(mlp, "layers.*.weight", LECUN, key)

    one, two = new.layers
    assert not jnp.allclose(one.weight, two.weight)
    zeros = pm.reinitialize(mlp, nn.Linear, jax.nn.initializers.zeros, key)
    assert all(not leaf.any() for leaf in jax.tree.leaves(zeros))


CELL = {"weight_ih": "weight_init", "weight_hh": "recurrent_weight_init", "bias": "bias_init"}
BOTH = {"weight": "weight_init", "bias": "bias_init"}
WEIGHT = {"weight": "weight_init"}
LAYERS = [
    (nn.Linear, (3, 2), BOTH),
    (nn.Conv, (2, 2, 4, (3, 2), 1, 0, 1, 2), BOTH),
    (nn.Conv1d, (2, 3, 2), BOTH),
    (nn.Conv2d, (2, 4, (3, 2)), BOTH),
    (nn.Conv3d, (1, 2, (1, 2, 3)), BOTH),
    (nn.ConvTranspose, (1, 4, 2, 3, 1, 0, 0, 1, 2), BOTH),
    (nn.ConvTranspose1d, (2, 3, 2), BOTH),
    (nn.ConvTranspose2d, (2, 4, (3, 2)), BOTH),
    (nn.ConvTranspose3d, (1, 2, (1, 2, 3)), BOTH),
    (nn.LinearGeneral, ((3, 2), (4,), (-2, -1)), BOTH),
    (nn.Einsum, ("...hi,hio->...ho", (2, 3, 4), (2, 4)), BOTH),
    (nn.Embedding, (3, 2), WEIGHT),
    (nn.Scale, ((2, 1),), WEIGHT),
    (nn.LayerNorm, ((2, 3),), BOTH),
    (nn.RMSNorm, ((2, 3),), BOTH),
    (nn.GroupNorm, (1, 4), BOTH),
    (nn.InstanceNorm, (2, 1e-5, True), BOTH),
    (nn.BatchNorm, (3,), BOTH),
    (nn.GRUCell, (3, 2), CELL),
    (nn.LSTMCell, (3, 2), CELL),
    (nn.SimpleCell, (3, 2), CELL),
    (
        nn.MLP,
        (3, 2, 4, 1),
        {"layers[*].weight": "weight_init", "layers[*].bias": "bias_init"},
    ),
    (
        nn.MultiheadAttention,
        (2, 4, 3, 5, 6, 8, 7),
        {"*.weight": "weight_init"},
    ),
]


def test_all_layers_with_initializers_are_listed_above():
    """So that a new one is compared as well."""
    taking = {
        name
        for name, layer in vars(nn).items()
        if isinstance(layer, type) and any("_init" in word for word in signature(layer))
    }

    assert taking == {layer.__name__ for layer, *_ in LAYERS}


def signature(layer):
    """The words that a constructor takes."""
    return inspect.signature(layer.__init__).parameters


@pytest.mark.parametrize(
    "many", [None, nn.Stack, pytest.param(nn.Ensemble, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("layer", "sizes", "options"), LAYERS)
@pytest.mark.sampled
def test_every_layer_is_drawn_as_by_its_constructor(layer, sizes, options, many, key):
    """In the same shapes, put in the same order; one for one where several are held as one."""
    shapes = []

    def noted(key, shape, dtype):
        shapes.append(shape)
        return jnp.arange(1.0, math.prod(shape) + 1, dtype=dtype).reshape(shape)

    def made(**inits):
        make = ft.partial(layer, *sizes, **inits)
        return make(key=key) if many is None else many(make, 2, key=key)

    plain = made()
    below = {None: "", nn.Stack: "layer.", nn.Ensemble: "member."}[many]
    for path, option in options.items():
        shapes.clear()
        expected = made(**{option: noted})
        by_constructor = {*shapes}
        shapes.clear()
        found = pm.reinitialize(plain, below + path, noted, key)
        assert {*shapes} <= by_constructor
        for new, old in zip(*map(chosen(below + path), (found, expected)), strict=True):
            assert_close(new, old)


def chosen(path):
    """From a model to its arrays at a path."""
    return lambda model: jax.tree.leaves(pm.partition(model, pm.select.path(path))[0])


@pytest.mark.parametrize("many", [nn.Stack, nn.Ensemble])
def test_arrays_of_ones_own_are_drawn_one_for_one(many, key):
    """The number of arrays is not part of a receptive field."""

    class Own(pm.Module):
        table: jax.Array

        def __init__(self, *, key):
            self.table = jax.random.normal(key, (64, 64))

        def __call__(self, x):
            return self.table @ x

    new = pm.reinitialize(many(Own, 16, key=key), "**.table", LECUN, key)

    (table,) = jax.tree.leaves(new)
    assert abs(float(jnp.var(table)) * 64 - 1) < 0.15
    assert len({*table[:, 0, 0].tolist()}) == 16


def test_what_members_share_is_drawn_once(key):
    """All other leaves are drawn for each member."""
    nets = nn.Ensemble(ft.partial(nn.Linear, 2, 2), 3, key=key, shared="bias")
    shapes = []

    def noted(key, shape, dtype):
        shapes.append(shape)
        return jnp.zeros(shape, dtype)

    new = pm.reinitialize(nets, nn.Linear, noted, key)

    assert {*shapes} == {(2, 2), (2,)}
    assert new(jnp.ones(2)).tolist() == [[0, 0]] * 3


class Bounded(pm.Module):
    """A value with the shape of its parameter, and a value with another shape."""

    scale: jax.Array = pm.field(constraint=pm.constraints.positive)
    mix: jax.Array = pm.field(constraint=pm.constraints.simplex)


def test_what_is_drawn_for_a_constrained_field_is_its_value(key):
    """The value was taken for the parameter: 5 was read as 148."""
    one = Bounded(jnp.ones(2), jnp.full(3, 1 / 3))
    several = pm.filter_vmap(lambda scale: Bounded(scale, jnp.full(3, 1 / 3)))(jnp.ones((4, 2)))
    five = jax.nn.initializers.constant(5.0)

    def shares(key, shape, dtype):
        return jax.nn.softmax(jax.random.normal(key, shape, dtype))

    for path in ("scale", "scale.unconstrained"):
        assert_close(pm.reinitialize(one, path, five, key).scale, [5, 5])
    drawn = pm.filter_jit(pm.reinitialize)(one, "mix", shares, key)
    assert_close(drawn.mix.sum(), 1)
    assert drawn.scale.tolist() == [1, 1]
    assert_close(
        pm.resolve(pm.reinitialize(several, "scale", five, key)).scale, jnp.full((4, 2), 5)
    )


def test_a_computed_leaf_is_no_array(key):
    """All of its parts were drawn, each for itself; one of them may be."""
    model = pm.lora(nn.Linear(64, 4, key=key), "weight", 2, key=key)

    new = pm.reinitialize(pm.resolve(model), "weight", LECUN, key)
    assert abs(float(jnp.var(new.weight)) * 64 - 1) < 0.3
    part = pm.reinitialize(model, "weight.a", jax.nn.initializers.ones, key)
    assert pm.named_leaves(part)["weight.a"].tolist() == [[1] * 64] * 2
    assert pm.named_leaves(part)["weight.base"] is pm.named_leaves(model)["weight.base"]


test_refusals = refusals(globals())
