"""`InstanceNorm`."""

import inspect

import jax
import jax.numpy as jnp
import pytest

from pytreemod import nn
from pytreemod.errors import ArgumentError, ShapeError
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close, wave


@pytest.mark.slow
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_instance_norm_is_pytorchs(torch, dims):
    """The same numbers with the same defaults, by its rank or mapped; weights begin alike."""
    x = wave(2, 3, *range(2, 2 + dims))
    theirs = getattr(torch.nn, f"InstanceNorm{dims}d")(3)
    defaults = inspect.signature(nn.InstanceNorm).parameters

    expected = theirs(torch.tensor(x))

    assert_close(nn.InstanceNorm(3, num_spatial_dims=dims)(jnp.asarray(x)), expected)
    assert_close(jax.vmap(nn.InstanceNorm(3))(jnp.asarray(x)), expected)
    assert defaults["eps"].default == theirs.eps
    assert defaults["channelwise_affine"].default is theirs.affine is False
    layer = nn.InstanceNorm(3, channelwise_affine=True)
    assert (layer.weight.tolist(), layer.bias.tolist()) == ([1] * 3, [0] * 3)


@pytest.mark.parametrize(
    ("dims", "x", "text"),
    [
        (None, (7, 3, 5), r"expected x of shape \(3, \.\.\.\), (.|\n)*num_spatial_dims=1\)"),
        (
            None,
            (5, 5),
            r"expected x of shape \(3, \.\.\.\), (.|\n)*Neither the first axis of x fits",
        ),
        (None, (), r"expected x of shape \(3, \.\.\.\), got f32\[\]"),
        (2, (3, 5), r"expected x of shape \(\.\.\., 3, height, width\), got f32\[3,5\]"),
        (None, (3,), r"expected more than one value for each channel .*, got f32\[3\]"),
        (1, (7, 3, 1), r"expected more than one value for each channel .*, got f32\[7,3,1\]"),
    ],
    ids=label,
)
def test_instance_norm_refuses_what_is_no_example(dims, x, text):
    """A batch in its place, other channels, and channels of one value, which would all be zero."""
    with pytest.raises(ShapeError, match=rf"^InstanceNorm\(channels=3\): {text}"):
        nn.InstanceNorm(3, num_spatial_dims=dims)(jnp.ones(x))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"channels": "3"}, r"\(channels\): expected an integer of at least 0, got '3'"),
        ({"eps": -1.0}, r"\(eps\): expected a number >= 0"),
        ({"channelwise_affine": 1}, r"\(channelwise_affine\): expected True or False"),
        ({"num_spatial_dims": 0}, r"\(num_spatial_dims\): expected an integer of at least 1"),
        ({"dtype": int}, r"\(dtype\): expected a floating dtype"),
    ],
    ids=label,
)
def test_instance_norm_refuses_bad_arguments(arguments, text):
    """Each by its name."""
    with pytest.raises(ArgumentError, match=f"^InstanceNorm{text}"):
        nn.InstanceNorm(**({"channels": 3} | arguments))
