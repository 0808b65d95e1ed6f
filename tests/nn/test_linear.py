import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close, wave


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.complex64], ids=label)
@pytest.mark.slow
def test_initial_values_are_uniform_within_one_over_root_fan_in(key, dtype):
    """Bounded by 1/sqrt(in_features), with the variance of that uniform distribution."""
    layer = nn.Linear(16, 200, dtype=dtype, key=key)
    parts = [part(values) for part in (jnp.real, jnp.imag) for values in (layer.weight, layer.bias)]

    for values in parts if jnp.iscomplexobj(layer.weight) else parts[:2]:
        assert float(jnp.abs(values).max()) <= 0.25
        assert abs(float(jnp.std(values.astype(jnp.float32))) - 0.25 / 3**0.5) < 0.02


@pytest.mark.parametrize("axis", [(-2, -1), (1, 2), (-1, 1)], ids=label)
@pytest.mark.sampled
def test_linear_general_is_numpys(key, axis):
    """The new axes are last."""
    x = wave(5, 2, 3)
    sizes = tuple(x.shape[i] for i in axis)
    layer = nn.LinearGeneral(sizes, (4, 2), axis=axis, key=key)

    out = layer(jnp.asarray(x))

    letters = [("a", "b", "c")[i] for i in axis]
    by_hand = np.einsum(f"abc,{''.join(letters)}yz->ayz", x, layer.weight) + np.asarray(layer.bias)
    assert_close(out, by_hand)


@pytest.mark.parametrize(
    "make",
    [
        ft.partial(nn.Linear, 128, 80),
        ft.partial(nn.LinearGeneral, (16, 8), (4, 8), (-2, -1)),
        ft.partial(nn.Einsum, "...hij,jhoi->...ho", (8, 6, 16, 16)),
    ],
    ids=lambda make: make.func.__name__,
)
def test_fan_in_is_all_that_is_summed_over(key, make):
    """lecun_normal() gives variance 1 / fan_in, for several axes, and for matrices side by side."""
    layer = make(key=key, weight_init=jax.nn.initializers.lecun_normal())

    assert abs(float(jnp.var(layer.weight)) * 128 - 1) < 0.1


def test_initializers_keep_the_axes_apart(key):
    """One that expects (in, out) is applied to these axes, of an equation or of both sizes."""

    def numbered(key, shape, dtype):
        return jnp.arange(np.prod(shape), dtype=dtype).reshape(shape)

    layer = nn.Einsum("...hi,ohi->...ho", (4, 2, 3), key=key, weight_init=numbered)

    assert_close(layer.weight, np.stack([np.arange(12).reshape(3, 4).T] * 2, 1))
    general = nn.LinearGeneral((2, 3), (4, 1), (-2, -1), key=key, weight_init=numbered)
    assert_close(general.weight, np.arange(24).reshape(2, 3, 4, 1))


@pytest.mark.parametrize(
    ("equation", "weight", "bias", "x"),
    [
        ("...i,io->...o", (3, 2), (2,), (5, 4, 3)),
        ("bi, io -> ob", (3, 2), None, (5, 3)),
        ("b...i,ij->b...j", (3, 2), (1,), (5, 2, 2, 3)),
        ("i,o->io", (2,), (3, 1), (3,)),
    ],
)
def test_einsum_is_numpys(key, equation, weight, bias, x):
    ones = jax.nn.initializers.ones
    layer = nn.Einsum(equation, weight, bias, key=key, bias_init=ones)
    x = wave(*x)

    expected = np.einsum(equation, x, layer.weight) + (0 if bias is None else 1)
    assert_close(layer(jnp.asarray(x)), expected)
    assert (layer.bias is None) == (bias is None)


@pytest.mark.parametrize(("use_bias", "use_final_bias"), [(True, False), (False, True)])
def test_biases_of_hidden_and_final_layers_of_an_mlp(key, use_bias, use_final_bias):
    mlp = nn.MLP(3, 2, 4, 2, use_bias=use_bias, use_final_bias=use_final_bias, key=key)

    has_bias = [layer.bias is not None for layer in mlp.layers]
    assert has_bias == [use_bias, use_bias, use_final_bias]


def test_initializers_and_dtype_reach_every_layer_of_an_mlp(key):
    ones, zeros = jax.nn.initializers.ones, jax.nn.initializers.zeros
    mlp = nn.MLP(3, 2, 4, 1, dtype=jnp.bfloat16, key=key, weight_init=ones, bias_init=zeros)

    for layer in mlp.layers:
        assert layer.weight.dtype == layer.bias.dtype == jnp.bfloat16
        assert (layer.weight == 1).all()
        assert (layer.bias == 0).all()


def test_each_neuron_of_an_mlp_has_its_own_parameters_of_the_activation(key):
    """For each hidden layer, and of the results; a result without an axis has one copy."""
    x, (one, two, end) = wave(5, 3), np.abs(wave(3, 4))
    mlp = nn.MLP(3, 4, 4, 2, nn.PReLU(), nn.PReLU(), key=key)
    slopes = {"activation": np.stack([one, two]), "final_activation": end}
    mlp = mlp.replace(
        **{name: nn.PReLU().replace(negative_slope=jnp.asarray(s)) for name, s in slopes.items()}
    )
    y = x
    for layer, slope in zip(mlp.layers, (one, two, end), strict=True):
        y = np.asarray(layer(jnp.asarray(y)))
        y = np.where(y < 0, slope * y, y)
    assert_close(mlp(jnp.asarray(x)), y)
    scalar = nn.MLP(3, "scalar", 4, 1, final_activation=nn.PReLU(), key=key)
    before = scalar.replace(final_activation=lambda x: x)(jnp.asarray(x))
    assert_close(scalar(jnp.asarray(x)), np.where(before < 0, before / 4, before))


def test_axes_are_named_after_features_and_letters(key):
    """Several features by number; a bias has the last axes of the result."""
    layers = [
        nn.LinearGeneral(2, (3, 4), key=key),
        nn.LinearGeneral((2, 3), 4, (-2, -1), key=key),
        nn.Einsum("...hi,hio->...ho", (2, 3, 4), (1, 4), key=key),
    ]
    outs = "out_features_0", "out_features_1"
    assert [(n.weight, n.bias) for n in pm.axis_names(layers)] == [
        (("in_features", *outs), outs),
        (("in_features_0", "in_features_1", "out_features"), ("out_features",)),
        (("h", "i", "o"), ("h", "o")),
    ]
