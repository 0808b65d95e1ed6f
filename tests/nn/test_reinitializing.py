"""`reinitialize`."""

import functools as ft

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, RngError, SpecError
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
    """With the fan-in that the layer has, whatever the layout of its arrays; all else stays."""
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


def test_what_cannot_be_drawn_is_refused(key):
    """Nothing chosen, what is no float, what is no initializer, what gives another shape."""
    model = {"layer": nn.Linear(2, 3, key=key), "count": jnp.array(0)}

    with pytest.raises(SpecError, match=r"'x'"):
        pm.reinitialize(model, "x", LECUN, key)
    with pytest.raises(SpecError, match=r"reinitialize\(selector\): expected some arrays of the"):
        pm.reinitialize(model, nn.MLP, LECUN, key)
    with pytest.raises(
        ArgumentError, match=r"expected floating arrays alone to be chosen(.|\n)*count"
    ):
        pm.reinitialize(model, "count", LECUN, key)
    with pytest.raises(
        ArgumentError, match=r"^reinitialize\(init\) at .*weight.*: expected a func"
    ):
        pm.reinitialize(model, "layer.weight", 0.0, key)
    with pytest.raises(
        ArgumentError, match=r"at .*weight.*: expected it to return f32\[2,3\], got"
    ):
        pm.reinitialize(model, "layer.weight", lambda key, shape, dtype: jnp.ones(3), key)
    with pytest.raises(RngError, match=r"^reinitialize\(key\): expected a random key, got 0"):
        pm.reinitialize(model, "layer.weight", LECUN, 0)
