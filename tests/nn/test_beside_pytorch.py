"""Layers beside PyTorch's functions: results and gradients in float64.

`test_beside_equinox.py` has the layers and options that are Equinox's, too. A row's function gets
the arrays of the layer in our layout, as tensors, and converts them to PyTorch's: so gradients are
compared in ours.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod import nn
from tests.nn.numbers_to_compare import assert_close, wave

KEY = jax.random.key(0)
IMAGE = (2, 4, 6, 5)


@pytest.fixture
def torch():
    """PyTorch, or the test is skipped."""
    return pytest.importorskip(
        "torch", reason="compares numbers with PyTorch: tasks.py install peers"
    )


@dataclass(frozen=True)
class Row:
    """A layer, the shape of an input, and PyTorch's function of the input and of the arrays."""

    name: str
    layer: Any
    shape: tuple[int, ...]
    theirs: Callable[..., Any]


def functional(name: str, *between: Any, **options: Any) -> Callable[..., Any]:
    """PyTorch's function of that name, with what it takes between x and the arrays."""
    return lambda torch, x, *arrays: getattr(torch.nn.functional, name)(
        x, *between, *arrays, **options
    )


def conv(name: str, **options: Any) -> Row:
    """A convolution of an image from four channels to two; a bias is flat there."""

    def call(torch: Any, x: Any, weight: Any, bias: Any) -> Any:
        return torch.nn.functional.conv2d(x, weight, bias.reshape(-1), **options)

    return Row(f"Conv {name}", nn.Conv2d(4, 2, 3, **options, key=KEY), IMAGE, call)


def conv_transpose(**options: Any) -> Row:
    """There, input channels are first, and the taps are the other way round."""

    def call(torch: Any, x: Any, weight: Any, bias: Any) -> Any:
        blocks = weight.flip(2, 3).reshape(2, -1, *weight.shape[1:])
        turned = blocks.transpose(1, 2).reshape(4, -1, 3, 3)
        function = torch.nn.functional.conv_transpose2d
        return function(x, turned, bias.reshape(-1), groups=2, **options)

    return Row(
        "ConvTranspose", nn.ConvTranspose2d(4, 6, 3, groups=2, **options, key=KEY), IMAGE, call
    )


ROWS = [
    conv("with all of it", stride=2, padding=1, dilation=2, groups=2),
    conv("of the same size", padding="same", dilation=(1, 2)),
    conv_transpose(stride=2, padding=1, dilation=2, output_padding=1),
    Row("LayerNorm", nn.LayerNorm((3, 4)), (2, 3, 4), functional("layer_norm", (3, 4))),
    Row("RMSNorm", nn.RMSNorm(4, use_bias=False), (3, 4), functional("rms_norm", (4,), eps=1e-5)),
    Row("GroupNorm", nn.GroupNorm(2, 4, num_spatial_dims=2), IMAGE, functional("group_norm", 2)),
    Row("BatchNorm", nn.BatchNorm(4), IMAGE, functional("batch_norm", None, None, training=True)),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.sampled(4)
def test_results_and_gradients_are_pytorchs(torch, row):
    """Of the input, and of every array of the layer."""
    layer, state = nn.make_with_state(lambda: row.layer)()
    leaves = [wave(*leaf.shape, phase=i) for i, leaf in enumerate(jax.tree.leaves(layer))]
    given = [np.asarray(array, "f8") / 2 for array in (wave(*row.shape, phase=9), *leaves)]

    tensors = [torch.tensor(array, requires_grad=True) for array in given]
    expected = row.theirs(torch, *tensors)
    factors = np.asarray(wave(*expected.shape, phase=5), "f8")
    expected.backward(torch.tensor(factors))

    with jax.enable_x64(True):

        def loss(x, *arrays):
            changed = jax.tree.unflatten(jax.tree.structure(layer), arrays)
            out = changed(x, state)[0] if isinstance(layer, nn.BatchNorm) else changed(x)
            return jnp.sum(out * factors), out

        argnums = tuple(range(len(given)))
        grads, found = jax.jit(jax.grad(loss, argnums, has_aux=True))(*map(jnp.asarray, given))

    for mine, other in zip([found, *grads], [expected, *[t.grad for t in tensors]], strict=True):
        assert_close(mine, other.detach().numpy(), rtol=1e-9, atol=1e-9)
