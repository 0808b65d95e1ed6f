"""`conv`, over one, two and three axes, with every option."""

import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod.nn.functional import conv
from tests.goldens import refusals
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close, wave

CASES = {
    "1d": ((2, 2, 7), (3, 2, 3), {}),
    "2d": ((2, 2, 5, 6), (3, 2, 3, 2), {}),
    "3d": ((1, 2, 3, 4, 3), (3, 2, 2, 3, 2), {}),
    "stride": ((2, 2, 7, 6), (3, 2, 3, 2), {"stride": (2, 3)}),
    "padding": ((2, 2, 5, 6), (3, 2, 3, 2), {"padding": (2, 1)}),
    "dilation": ((2, 2, 7, 6), (3, 2, 3, 2), {"dilation": (2, 3), "padding": 1}),
    "groups": ((2, 4, 5, 6), (6, 2, 3, 2), {"groups": 2}),
    "all": ((1, 4, 9), (2, 2, 3), {"stride": 2, "padding": 3, "dilation": 2, "groups": 2}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled
def test_conv_is_pytorchs(torch, case):
    """The same numbers as torch.nn.functional.conv1d, conv2d and conv3d."""
    x_shape, weight_shape, options = CASES[case]
    x, weight, bias = wave(*x_shape), wave(*weight_shape, phase=1), wave(weight_shape[0], phase=2)
    reference = getattr(torch.nn.functional, f"conv{len(x_shape) - 2}d")

    assert_close(
        conv(*map(jnp.asarray, (x, weight, bias)), **options),
        reference(*map(torch.tensor, (x, weight, bias)), **options),
    )


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_padding_modes_are_pytorchs(torch, mode):
    """The same numbers as torch.nn.Conv2d with each padding_mode."""
    x, weight = wave(2, 2, 5, 6), wave(3, 2, 3, 2, phase=1)
    layer = torch.nn.Conv2d(2, 3, (3, 2), stride=2, padding=(2, 1), padding_mode=mode, bias=False)
    layer.weight.data = torch.tensor(weight)

    found = conv(
        jnp.asarray(x), jnp.asarray(weight), stride=2, padding=(2, 1), padding_mode=mode.upper()
    )

    assert_close(found, layer(torch.tensor(x)))


def conv1d_by_hand(x, kernel, low, high, stride):
    """One channel, restated with loops."""
    padded = np.concatenate([np.zeros(low), x, np.zeros(high)])
    starts = range(0, len(padded) - len(kernel) + 1, stride)
    return np.array([padded[start : start + len(kernel)] @ kernel for start in starts])


@pytest.mark.parametrize(
    ("padding", "size", "stride", "pads"),
    [
        ("VALID", 5, 1, (0, 0)),
        ("SAME", 5, 1, (1, 2)),
        ("SAME_LOWER", 5, 1, (2, 1)),
        ("SAME", 5, 2, (1, 2)),
        ("SAME", 6, 3, (0, 1)),
        ([(0, 3)], 5, 2, (0, 3)),
    ],
)
def test_named_and_uneven_paddings(padding, size, stride, pads):
    """ "SAME" gives ceil(size / stride) outputs; odd amounts go above, or below for SAME_LOWER."""
    x, kernel = wave(size), wave(4, phase=1)

    found = conv(
        jnp.asarray(x)[None], jnp.asarray(kernel)[None, None], stride=stride, padding=padding
    )

    assert_close(found[0], conv1d_by_hand(x, kernel, *pads, stride))


@pytest.mark.parametrize("bias_shape", [(3,), (3, 1, 1)], ids=label)
@pytest.mark.parametrize("batch", [(), (2,), (2, 3), (2, 1, 2), (0,)], ids=label)
@pytest.mark.sampled
def test_every_axis_before_the_channels_is_a_batch_axis(batch, bias_shape):
    """Any number of leading axes equals one call for each image."""
    x, weight = jnp.asarray(wave(*batch, 2, 4, 4)), jnp.asarray(wave(3, 2, 2, 2))
    bias = jnp.asarray(wave(*bias_shape))

    found = conv(x, weight, bias)

    expected = [conv(image, weight, bias) for image in x.reshape(-1, 2, 4, 4)]
    assert_close(found, jnp.reshape(jnp.array(expected), (*batch, 3, 3, 3)))


test_refusals = refusals(globals())
