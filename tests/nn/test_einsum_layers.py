"""`LinearGeneral` and `Einsum`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod import nn
from tests.goldens import refusals
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close, wave


@pytest.mark.parametrize("axis", [(-2, -1), (1, 2), (-1, 1)], ids=label)
@pytest.mark.sampled
def test_linear_general_is_flaxs(key, axis):
    """The same sums in NumPy and in Flax, with Flax's names; the new axes are last."""
    nnx = pytest.importorskip(
        "flax.nnx", reason="compares numbers with Flax: tasks.py install peers"
    )
    x = wave(5, 2, 3)
    sizes = tuple(x.shape[i] for i in axis)
    layer = nn.LinearGeneral(sizes, (4, 2), axis=axis, key=key)

    out = layer(jnp.asarray(x))

    letters = [("a", "b", "c")[i] for i in axis]
    by_hand = np.einsum(f"abc,{''.join(letters)}yz->ayz", x, layer.weight) + np.asarray(layer.bias)
    assert_close(out, by_hand)
    # It sorts the axes, but not the sizes that belong to them.
    if axis != (-1, 1):
        theirs = nnx.LinearGeneral(sizes, (4, 2), axis=axis, rngs=nnx.Rngs(0))
        theirs.kernel[...], theirs.bias[...] = layer.weight, layer.bias
        assert_close(out, theirs(jnp.asarray(x)))


def test_over_the_last_axis_it_is_linear(key):
    """The same initial numbers, but for the layout, and so the same range."""
    general, plain = nn.LinearGeneral(64, 32, key=key), nn.Linear(64, 32, key=key)

    assert_close(general.bias, plain.bias)
    assert general.weight.shape == (64, 32)
    assert 0.1 < float(jnp.abs(general.weight).max()) <= 1 / 8


@pytest.mark.parametrize("make", ["LinearGeneral", "Einsum"])
@pytest.mark.sampled
def test_fan_in_is_all_that_is_summed_over(key, make):
    """lecun_normal() gives variance 1 / fan_in, for several axes, and for matrices side by side."""
    init = jax.nn.initializers.lecun_normal()
    if make == "LinearGeneral":
        layer = nn.LinearGeneral((16, 8), (4, 8), (-2, -1), key=key, weight_init=init)
    else:
        layer = nn.Einsum("...hij,jhoi->...ho", (8, 6, 16, 16), key=key, weight_init=init)

    assert abs(float(jnp.var(layer.weight)) * 128 - 1) < 0.1


def test_einsum_keeps_the_axes_apart(key):
    """An initializer that expects (in, out) is applied to these axes of the equation."""

    def numbered(key, shape, dtype):
        return jnp.arange(np.prod(shape), dtype=dtype).reshape(shape)

    layer = nn.Einsum("...hi,ohi->...ho", (4, 2, 3), key=key, weight_init=numbered)

    assert_close(layer.weight, np.stack([np.arange(12).reshape(3, 4).T] * 2, 1))


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
    """With the bias on the last axes."""
    ones = jax.nn.initializers.ones
    layer = nn.Einsum(equation, weight, bias, key=key, bias_init=ones)
    x = wave(*x)

    expected = np.einsum(equation, x, layer.weight) + (0 if bias is None else 1)
    assert_close(layer(jnp.asarray(x)), expected)
    assert (layer.bias is None) == (bias is None)


test_refusals = refusals(globals())
