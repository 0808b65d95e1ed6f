"""The convolutional layers, and the transposed ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod import nn
from tests.helpers.meshes import EXPLICIT, on
from tests.nn.numbers_to_compare import assert_close, wave


def test_initializers_keep_the_axes_apart(key):
    """Entry (height, width, in, out) of the initializer is entry (out, in, height, width)."""

    def numbered(key, shape, dtype):
        return jnp.arange(np.prod(shape), dtype=dtype).reshape(shape)

    for kind in (nn.Conv2d, nn.ConvTranspose2d):
        layer = kind(4, 5, (2, 3), key=key, weight_init=numbered, bias_init=numbered)
        assert_close(layer.weight, np.arange(120).reshape(2, 3, 4, 5).transpose(3, 2, 0, 1))
        assert_close(layer.bias, np.arange(5).reshape(5, 1, 1))


MODES = {"ZEROS": "constant", "reflect": "reflect", "REPLICATE": "edge", "CIRCULAR": "wrap"}


def test_four_spatial_axes_are_as_good_as_two(key):
    """JAX has convolutions over any number; restated for a kernel of one tap."""
    layer = nn.Conv(4, 2, 3, 1, use_bias=False, key=key)
    x = wave(2, 2, 1, 3, 2)

    expected = np.einsum("oi,iabcd->oabcd", np.array(layer.weight).reshape(3, 2), x)
    assert_close(layer(jnp.asarray(x)), expected)


@pytest.mark.parametrize(
    ("padding", "size", "stride", "pads"),
    [
        ("VALID", 5, 1, (0, 0)),
        ("SAME", 5, 1, (1, 2)),
        ("same_lower", 5, 1, (2, 1)),
        ("SAME", 5, 2, (1, 2)),
        ("SAME", 6, 3, (0, 1)),
        ([(0, 3)], 5, 2, (0, 3)),
        (np.int64(2), 5, 2, (2, 2)),
    ],
)
def test_paddings(key, padding, size, stride, pads):
    """ "SAME" gives ceil(size / stride) outputs; odd amounts go above, or below for SAME_LOWER."""
    for mode, numpys in MODES.items():
        options = {"use_bias": False, "padding_mode": mode}
        layer = nn.Conv1d(1, 1, 4, stride, padding, **options, key=key)
        x, kernel = np.pad(wave(size), pads, numpys), np.asarray(layer.weight)[0, 0]

        expected = [x[start : start + 4] @ kernel for start in range(0, len(x) - 3, stride)]
        assert_close(layer(jnp.asarray(wave(size))[None])[0], np.array(expected))


@pytest.mark.parametrize(("stride", "taps"), [(1, 4), (3, 1), (3, 9)])
@pytest.mark.parametrize("padding", ["SAME", "SAME_LOWER"])
def test_around_a_circle_nothing_is_cut_off(key, padding, stride, taps):
    """Entries beyond one end are added at the other, as often as needed."""
    options = {"padding": padding, "padding_mode": "circular", "use_bias": False}
    layer = nn.ConvTranspose1d(1, 1, taps, stride, **options, key=key)
    x, size = wave(3), 3 * stride
    beyond = max(2 * stride + taps - size, 0)
    low = beyond // 2 if padding == "SAME" else -(-beyond // 2)
    expected = np.zeros(size)
    # Every entry is spread over a window; the first entry is multiplied by the last tap.
    for i, k in np.ndindex(3, taps):
        expected[(i * stride + k - low) % size] += x[i] * layer.weight[0, 0, taps - 1 - k]

    assert_close(layer(jnp.asarray(x)[None])[0], expected)


@pytest.mark.parametrize("padding", ["SAME", "SAME_LOWER", "VALID", ((1, 2),)], ids=str)
@pytest.mark.sampled
def test_it_is_the_transpose_of_a_convolution(key, padding):
    """With channels and taps swapped, it equals JAX's transpose of the other layer."""
    down = nn.Conv1d(2, 3, 4, 2, padding, use_bias=False, key=key)
    up = nn.ConvTranspose1d(3, 2, 4, 2, padding=padding, use_bias=False, key=key)
    up = up.replace(weight=jnp.flip(jnp.swapaxes(down.weight, 0, 1), 2))
    size = 10 if "SAME" in padding else 12 if padding == "VALID" else 9
    y = jnp.asarray(wave(3, 5))

    transpose = jax.linear_transpose(down, jnp.zeros((2, size)))
    assert_close(up(y), transpose(y)[0])


@pytest.mark.parametrize("groups", [1, 4, 3])
@pytest.mark.parametrize(
    ("batch", "spec", "over"),
    [
        ((4,), ("data",), lambda layer: layer),
        ((3, 4), (None, "data", "model"), lambda layer: layer),
        ((4,), ("data",), jax.vmap),
    ],
    ids=["batch", "two axes and channels", "vmap"],
)
@pytest.mark.sampled(4)
def test_gradients_on_a_mesh_are_those_of_one_device(key, groups, batch, spec, over):
    """XLA multiplies those of grouped weights by the size of a mesh axis without a batch."""
    layer, x = nn.Conv1d(12, 12, 3, groups=groups, key=key), jnp.asarray(wave(*batch, 12, 4))

    def loss(layer, x):
        return jnp.sum(jnp.sin(over(layer)(x)))

    split = jax.device_put((layer, x), (on(mesh=EXPLICIT), on(*spec, mesh=EXPLICIT)))
    found, expected = jax.jit(jax.grad(loss))(*split), jax.jit(jax.grad(loss))(layer, x)
    jax.tree.map(assert_close, found, expected)
