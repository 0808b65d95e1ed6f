"""`Linear`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod import nn
from pytreemod.errors import ShapeError
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close, wave


@pytest.mark.parametrize(
    ("sizes", "x", "shape"),
    [
        ((3, 4), (3,), (4,)),
        (("scalar", 4), (), (4,)),
        (("scalar", 4), (2, 5), (2, 5, 4)),
        ((3, "scalar"), (3,), ()),
        ((3, "scalar"), (2, 3), (2,)),
        (("scalar", "scalar"), (2,), (2,)),
        ((0, 2), (5, 0), (5, 2)),
        ((2, 0), (2,), (0,)),
    ],
    ids=label,
)
def test_shapes(key, sizes, x, shape):
    """The last axis is mapped; "scalar" is no axis; sizes may be zero."""
    assert nn.Linear(*sizes, key=key)(jnp.ones(x)).shape == shape


def test_a_scalar_layer_takes_python_numbers(key):
    """A number is an array without axes."""
    layer = nn.Linear("scalar", 2, key=key)

    assert_close(layer(2.0), 2 * layer.weight[:, 0] + layer.bias)


@pytest.mark.parametrize("dtype", [None, jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64])
def test_dtype_is_that_of_weights_and_output(key, dtype):
    """None is JAX's default float."""
    expected = jnp.dtype(dtype or jnp.float32)
    layer = nn.Linear(3, 4, dtype=dtype, key=key)

    assert layer.weight.dtype == layer.bias.dtype == expected
    assert layer(jnp.ones(3, expected)).dtype == expected


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.complex64], ids=label)
@pytest.mark.slow
def test_initial_values_are_uniform_within_one_over_root_fan_in(key, dtype):
    """Bounded by 1/sqrt(in_features), with the variance of that uniform distribution."""
    layer = nn.Linear(16, 200, dtype=dtype, key=key)
    parts = [part(values) for part in (jnp.real, jnp.imag) for values in (layer.weight, layer.bias)]

    for values in parts if jnp.iscomplexobj(layer.weight) else parts[:2]:
        assert float(jnp.abs(values).max()) <= 0.25
        assert abs(float(jnp.std(values.astype(jnp.float32))) - 0.25 / 3**0.5) < 0.02


def test_a_bias_that_is_put_in_later_counts(key):
    """Together with the flag; where the two disagree, neither is taken for right."""
    layer = nn.Linear(2, 2, use_bias=False, key=key)
    biased = layer.replace(bias=jnp.ones(2), use_bias=True)

    assert_close(biased(jnp.ones(2)), layer(jnp.ones(2)) + 1)


def test_it_is_a_product_with_the_transposed_matrix(key):
    """x W^T + b, restated in NumPy; NumPy arrays are arrays."""
    layer, x = nn.Linear(3, 4, key=key), wave(2, 5, 3)

    assert_close(layer(x), x @ np.asarray(layer.weight).T + np.asarray(layer.bias))


def test_weight_init_is_called_with_inputs_first(key):
    """So JAX's initializers count the inputs: lecun_normal() gives variance 1 / in_features."""
    init = jax.nn.initializers.lecun_normal()
    layer = nn.Linear(400, 25, key=key, weight_init=init, bias_init=jax.nn.initializers.ones)

    assert layer.weight.shape == (25, 400)
    assert abs(float(jnp.var(layer.weight)) * 400 - 1) < 0.1
    assert (layer.bias == 1).all()


@pytest.mark.parametrize(
    ("use_bias", "changes"), [(False, {"bias": jnp.ones(2)}), (False, {"use_bias": True})]
)
def test_a_bias_that_its_flag_denies_is_refused(key, use_bias, changes):
    """It would be ignored, or missed."""
    layer = nn.Linear(2, 2, use_bias, key=key)

    with pytest.raises(ShapeError, match="bias"):
        layer.replace(**changes)(jnp.ones(2))


def test_a_last_axis_of_another_size_is_refused(key):
    """Whatever JAX would say, the error names the layer and the shape."""
    with pytest.raises(ShapeError, match=r"Linear.*f32\[3,7\]"):
        nn.Linear(3, 4, key=key)(jnp.ones((3, 7)))
