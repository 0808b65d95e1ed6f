"""`conv_transpose`, over one, two and three axes, with every option."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod.nn.functional import conv, conv_transpose
from tests.goldens import refusals
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close, wave

CASES = {
    "1d": ((2, 2, 7), (2, 3, 3), {}),
    "2d": ((2, 2, 3, 4), (2, 3, 3, 2), {}),
    "3d": ((1, 2, 2, 3, 2), (2, 3, 2, 3, 2), {}),
    "stride": ((2, 2, 3, 4), (2, 3, 3, 2), {"stride": (2, 3)}),
    "padding": ((2, 2, 5, 6), (2, 3, 3, 2), {"padding": (2, 1)}),
    "output_padding": ((2, 2, 3, 4), (2, 3, 3, 2), {"stride": 3, "output_padding": (1, 2)}),
    "dilation": ((2, 2, 3, 4), (2, 3, 3, 2), {"dilation": (2, 3), "padding": 1}),
    "groups": ((2, 4, 3, 4), (4, 3, 3, 2), {"groups": 2}),
    "all": (
        (1, 4, 5),
        (4, 1, 3),
        {"stride": 3, "padding": 3, "output_padding": 1, "dilation": 2, "groups": 2},
    ),
}


def relaid(weight, groups):
    """PyTorch's weight as ours is: output channels first, the taps the other way round."""
    n_in, n_out, *taps = weight.shape
    blocks = [
        np.swapaxes(block, 0, 1) for block in weight.reshape(groups, n_in // groups, n_out, *taps)
    ]
    return np.flip(np.concatenate(blocks), tuple(range(2, weight.ndim))).copy()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=label)
@pytest.mark.parametrize("case", CASES)
def test_conv_transpose_is_pytorchs(torch, case, dtype):
    """The numbers, and the gradients, of conv_transpose1d, conv_transpose2d, conv_transpose3d."""
    x_shape, weight_shape, options = CASES[case]
    groups = options.get("groups", 1)
    given = wave(*x_shape), wave(*weight_shape, phase=1), wave(weight_shape[1] * groups, phase=2)
    x, weight, bias = (torch.tensor(array, requires_grad=True) for array in given)
    name = f"conv_transpose{len(x_shape) - 2}d"
    expected = getattr(torch.nn.functional, name)(x, weight, bias, **options)
    expected.sin().sum().backward()

    arrays = [jnp.asarray(array, dtype) for array in (given[0], relaid(given[1], groups), given[2])]
    out, backward = jax.vjp(lambda *arrays: conv_transpose(*arrays, **options), *arrays)
    grads = backward(jnp.cos(out))

    assert out.dtype == dtype
    if dtype == jnp.bfloat16:
        # Eight bits of each factor, and sums of up to a dozen of their products.
        assert_close(out.astype("f4"), expected, rtol=0.05, atol=0.15)
        return
    assert_close(out, expected)
    for grad, wanted in zip(
        grads, (x.grad, relaid(weight.grad.numpy(), groups), bias.grad), strict=True
    ):
        assert_close(grad, wanted, atol=1e-4)


def spread_by_hand(x, kernel, stride, low, high, size):
    """One channel, restated with loops: every entry is spread over a window."""
    # Ours is a correlation over the spread entries: the first entry is the last tap.
    out = np.zeros((len(x) - 1) * stride + len(kernel))
    for i, value in enumerate(x):
        out[i * stride : i * stride + len(kernel)] += value * kernel[::-1]
    return np.pad(out[low : len(out) - high], (0, size))


@pytest.mark.parametrize(
    ("padding", "taps", "stride", "more", "by_hand"),
    [
        ("VALID", 4, 2, 1, (0, 0, 1)),
        ("SAME", 4, 1, 0, (1, 2, 0)),
        ("SAME_LOWER", 4, 1, 0, (2, 1, 0)),
        ("SAME", 5, 2, 0, (1, 2, 0)),
        ("SAME", 5, 2, 1, (2, 2, 0)),
        ("SAME", 1, 3, 0, (0, 0, 2)),
        ([(0, 3)], 4, 2, 0, (0, 3, 0)),
    ],
)
def test_named_and_uneven_paddings(padding, taps, stride, more, by_hand):
    """ "SAME" gives size * stride outputs; odd amounts go above, or below for SAME_LOWER."""
    x, kernel = wave(5), wave(taps, phase=1)
    options = {"stride": stride, "padding": padding, "output_padding": more}

    found = conv_transpose(jnp.asarray(x)[None], jnp.asarray(kernel)[None, None], **options)

    assert_close(found[0], spread_by_hand(x, kernel, stride, *by_hand))
    if padding in ("SAME", "SAME_LOWER"):
        assert found.shape[1] == 5 * stride - more


@pytest.mark.parametrize("taps", [1, 4, 9])
@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("padding", ["SAME", "SAME_LOWER"])
@pytest.mark.sampled
def test_around_a_circle_nothing_is_cut_off(padding, stride, taps):
    """Entries beyond one end are added at the other, as often as needed."""
    x, kernel, size = wave(3), wave(taps, phase=1), 3 * stride
    beyond = max(2 * stride + taps - size, 0)
    low = beyond // 2 if padding == "SAME" else -(-beyond // 2)
    expected = np.zeros(size)
    for i, value in enumerate(spread_by_hand(x, kernel, stride, 0, 0, 0)):
        expected[(i - low) % size] += value

    found = conv_transpose(
        jnp.asarray(x)[None],
        jnp.asarray(kernel)[None, None],
        stride=stride,
        padding=padding,
        padding_mode="CIRCULAR",
    )

    assert_close(found[0], expected)


@pytest.mark.parametrize("padding", ["SAME", "SAME_LOWER", "VALID", ((1, 2),)], ids=label)
@pytest.mark.sampled
def test_it_is_the_transpose_of_a_convolution(padding):
    """With channels and taps swapped, it equals JAX's transpose of `conv`."""
    weight, y = jnp.asarray(wave(3, 2, 4)), jnp.asarray(wave(3, 5, phase=1))
    size = 10 if "SAME" in padding else 12 if padding == "VALID" else 9
    transpose = jax.linear_transpose(
        lambda x: conv(x, weight, stride=2, padding=padding), jnp.zeros((2, size))
    )

    found = conv_transpose(y, jnp.flip(jnp.swapaxes(weight, 0, 1), 2), stride=2, padding=padding)

    assert_close(found, transpose(y)[0])


test_refusals = refusals(globals())
