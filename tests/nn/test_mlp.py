"""`MLP`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod import nn
from pytreemod.errors import ArgumentError, RngError, ShapeError
from tests.labels import label
from tests.nn.catalogue import Slope
from tests.nn.numbers_to_compare import assert_close, wave


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_mlp_is_a_chain_of_layers(torch, key, depth):
    """depth hidden layers with an activation after each, then an output layer, as in PyTorch."""
    mlp = nn.MLP(3, 2, 4, depth, jnp.tanh, jax.nn.sigmoid, key=key)
    x = wave(5, 3)

    expected = torch.tensor(x)
    for number, layer in enumerate(mlp.layers):
        weight, bias = (torch.tensor(np.array(leaf)) for leaf in (layer.weight, layer.bias))
        expected = torch.nn.functional.linear(expected, weight, bias)
        expected = expected.sigmoid() if number == depth else expected.tanh()

    assert len(mlp.layers) == depth + 1
    assert_close(mlp(jnp.asarray(x)), expected)


def test_by_default_hidden_layers_are_rectified_and_the_output_is_not(key):
    """activation=jax.nn.relu, final_activation=the identity."""
    mlp = nn.MLP(3, 2, 4, 1, key=key)
    first, last = mlp.layers
    x = jnp.asarray(wave(3))

    assert mlp.activation is jax.nn.relu
    assert_close(mlp(x), last(jnp.maximum(first(x), 0)))


@pytest.mark.parametrize(("use_bias", "use_final_bias"), [(True, False), (False, True)])
def test_biases_of_hidden_and_final_layers(key, use_bias, use_final_bias):
    """Each flag is for its own layers."""
    mlp = nn.MLP(3, 2, 4, 2, use_bias=use_bias, use_final_bias=use_final_bias, key=key)

    has_bias = [layer.bias is not None for layer in mlp.layers]
    assert has_bias == [use_bias, use_bias, use_final_bias]


@pytest.mark.parametrize(
    ("sizes", "x", "shape"),
    [
        (("scalar", 2), (), (2,)),
        ((3, "scalar"), (3,), ()),
        (("scalar", "scalar"), (5,), (5,)),
        ((3, 2), (4, 5, 3), (4, 5, 2)),
    ],
    ids=label,
)
def test_shapes(key, sizes, x, shape):
    """The last axis is mapped; "scalar" stands for none."""
    assert nn.MLP(*sizes, 4, 1, key=key)(jnp.ones(x)).shape == shape


def test_an_activation_that_is_a_module_is_data_and_shared(key):
    """Its array is one leaf, trained by all hidden layers together."""
    mlp = nn.MLP(3, 2, 4, 2, Slope(jnp.array(0.1)), key=key)

    leaves = jax.tree.leaves(mlp.activation)
    assert [leaf.shape for leaf in leaves] == [()]
    assert len(jax.tree.leaves(mlp)) == 7


def test_initializers_and_dtype_reach_every_layer(key):
    """weight_init, bias_init and dtype are those of the Linear layers."""
    ones, zeros = jax.nn.initializers.ones, jax.nn.initializers.zeros
    mlp = nn.MLP(3, 2, 4, 1, dtype=jnp.bfloat16, key=key, weight_init=ones, bias_init=zeros)

    for layer in mlp.layers:
        assert layer.weight.dtype == layer.bias.dtype == jnp.bfloat16
        assert (layer.weight == 1).all()
        assert (layer.bias == 0).all()


def test_a_wrong_feature_axis_is_refused_in_the_name_of_the_mlp(key):
    """Not in that of the first Linear inside, which the user did not write."""
    text = (
        r"^MLP\(in_size=3, out_size=2, width_size=4, depth=1\): expected x of shape \(\.\.\., 3\)"
    )

    with pytest.raises(ShapeError, match=text + r", got f32\[5\](.|\n)*in_size=5"):
        nn.MLP(3, 2, 4, 1, key=key)(jnp.ones(5))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"in_size": -3}, r"MLP\(in_size\): expected an integer of at least 0 or 'scalar', got -3"),
        ({"out_size": 1.5}, r"MLP\(out_size\): expected .*, got 1\.5"),
        ({"width_size": "scalar"}, r"MLP\(width_size\): expected an integer of .*, got 'scalar'"),
        ({"depth": -1}, r"MLP\(depth\): expected an integer of at least 0, got -1"),
        ({"activation": "relu"}, r"MLP\(activation\): expected a function or a Module, got 'relu'"),
        ({"final_activation": None}, r"MLP\(final_activation\): expected a function .*, got None"),
        ({"use_final_bias": None}, r"MLP\(use_final_bias\): expected True or False, got None"),
    ],
    ids=label,
)
def test_bad_arguments_are_refused(key, arguments, text):
    """Each by its name."""
    given = {"in_size": 3, "out_size": 2, "width_size": 4, "depth": 1} | arguments

    with pytest.raises(ArgumentError, match=f"^{text}"):
        nn.MLP(**given, key=key)


def test_what_is_no_key_is_refused():
    """In the name of the MLP."""
    with pytest.raises(RngError, match=r"^MLP\(key\): expected a random key, got 0"):
        nn.MLP(3, 2, 4, 1, key=0)
