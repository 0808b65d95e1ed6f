"""`Linear`, `LinearGeneral` and `Einsum`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


def test_weight_init_is_called_with_inputs_first(key):
    """So JAX's initializers count the inputs: lecun_normal() gives variance 1 / in_features."""
    init = jax.nn.initializers.lecun_normal()
    layer = nn.Linear(400, 25, key=key, weight_init=init, bias_init=jax.nn.initializers.ones)

    assert layer.weight.shape == (25, 400)
    assert abs(float(jnp.var(layer.weight)) * 400 - 1) < 0.1
    assert (layer.bias == 1).all()


# ---- LinearGeneral, Einsum


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
    """With the bias on the last axes."""
    ones = jax.nn.initializers.ones
    layer = nn.Einsum(equation, weight, bias, key=key, bias_init=ones)
    x = wave(*x)

    expected = np.einsum(equation, x, layer.weight) + (0 if bias is None else 1)
    assert_close(layer(jnp.asarray(x)), expected)
    assert (layer.bias is None) == (bias is None)
