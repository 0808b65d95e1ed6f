"""Layers beside PyTorch's functions: results and gradients in float64, one row for each option.

A row's function gets the arrays of the layer in our layout, as tensors, and converts them to
PyTorch's: so gradients are compared in ours.
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


@dataclass(frozen=True)
class Row:
    """A layer, the shape of an input, and PyTorch's function of the input and of the arrays."""

    name: str
    layer: Any
    shape: tuple[int, ...]
    theirs: Callable[..., Any]


def functional(name: str, **options: Any) -> Callable[..., Any]:
    """PyTorch's function of that name; a bias is flat there."""

    def call(torch: Any, x: Any, *arrays: Any) -> Any:
        arrays = [*arrays[:1], *(array.reshape(-1) for array in arrays[1:])]
        return getattr(torch.nn.functional, name)(x, *arrays, **options)

    return call


def conv(name: str, x: tuple[int, ...], layer: Any, **options: Any) -> Row:
    """A convolution; one that pads in another mode does so before."""
    dims = len(x) - 2
    mode = options.pop("padding_mode", None)

    def around(torch: Any, x: Any, weight: Any, bias: Any) -> Any:
        # The last axis first.
        flat = [amount for amount in reversed(options["padding"]) for _ in range(2)]
        padded = torch.nn.functional.pad(x, flat, mode)
        return functional(f"conv{dims}d")(torch, padded, weight, bias)

    return Row(f"Conv {name}", layer, x, around if mode else functional(f"conv{dims}d", **options))


def conv_transpose(name: str, x: tuple[int, ...], layer: Any, **options: Any) -> Row:
    """There, input channels are first, and the taps are the other way round."""

    def call(torch: Any, x: Any, weight: Any, bias: Any) -> Any:
        groups, taps = layer.groups, weight.shape[2:]
        blocks = weight.flip([*range(2, weight.ndim)]).reshape(groups, -1, *weight.shape[1:])
        turned = blocks.transpose(1, 2).reshape(layer.in_channels, -1, *taps)
        function = getattr(torch.nn.functional, f"conv_transpose{len(taps)}d")
        return function(x, turned, bias.reshape(-1), groups=groups, **options)

    return Row(f"ConvTranspose {name}", layer, x, call)


def attention(torch: Any, x: Any, query: Any, key: Any, value: Any, out: Any) -> Any:
    """Two heads that see what came before."""
    heads = [
        (x @ weight.T).unflatten(-1, (2, -1)).transpose(-2, -3) for weight in (query, key, value)
    ]
    found = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
    return found.transpose(-2, -3).flatten(-2) @ out.T


def over_time(kind: str, directions: int = 1) -> Row:
    """A cell in one direction or in both; two biases of PyTorch are one here."""
    make = {"lstm": nn.LSTMCell, "gru": nn.GRUCell, "rnn_tanh": nn.SimpleCell}[kind]
    cells = [nn.RNN(make(3, 2, key=key)) for key in jax.random.split(KEY, directions)]
    layer = cells[0] if directions == 1 else nn.Bidirectional(*cells)
    count = 4 if kind == "gru" else 3

    def call(torch: Any, x: Any, *arrays: Any) -> Any:
        given = []
        for i in range(0, len(arrays), count):
            w, u, bias, *rest = arrays[i : i + count]
            # Of a GRU, the second bias within the reset gate is one of ours, too.
            inner = torch.cat([torch.zeros(4), *rest]) if rest else torch.zeros_like(bias)
            given += [w, u, bias, inner.to(x.dtype)]
        start = torch.zeros(directions, x.shape[0], 2, dtype=x.dtype)
        carry = (start, start) if kind == "lstm" else start
        return getattr(torch, kind)(x, carry, given, True, 1, 0.0, True, directions == 2, True)[0]

    return Row(f"{kind} in {directions} directions", layer, (2, 4, 3), call)


def conv_row(name: str, x: tuple[int, ...], **options: Any) -> Row:
    """A convolution from four channels to two, with windows of three."""
    make = [nn.Conv1d, nn.Conv2d, nn.Conv3d][len(x) - 3]
    return conv(name, x, make(4, 2, 3, **options, key=KEY), **options)


def transpose_row(name: str, x: tuple[int, ...], groups: int = 1, **options: Any) -> Row:
    """A transposed one from four channels to six, with windows of three."""
    make = [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d][len(x) - 3]
    layer = make(4, 6, 3, groups=groups, **options, key=KEY)
    return conv_transpose(name, x, layer, **options)


LINE, IMAGE, VOLUME = (2, 4, 7), (2, 4, 6, 5), (2, 4, 4, 5, 3)

ROWS = [
    Row("Linear", nn.Linear(3, 4, key=KEY), (2, 3), functional("linear")),
    Row("Linear without bias", nn.Linear(3, 4, False, key=KEY), (3,), functional("linear")),
    Row("PReLU", nn.PReLU(), (3, 4), functional("prelu")),
    conv_row("of a line", LINE),
    conv_row("of a volume", VOLUME),
    conv_row("with all of it", IMAGE, stride=2, padding=1, dilation=2, groups=2),
    conv_row("of the same size", IMAGE, padding="same", dilation=(1, 2)),
    conv_row("around a reflection", IMAGE, padding=(1, 2), padding_mode="reflect"),
    conv_row("around a replicate", LINE, padding=(1,), padding_mode="replicate"),
    conv_row("around a circle", VOLUME, padding=(1, 2, 1), padding_mode="circular"),
    transpose_row("of a line", LINE),
    transpose_row("of a volume", VOLUME),
    transpose_row("with more at the end", LINE, stride=3, output_padding=1),
    transpose_row("with all of it", IMAGE, 2, stride=2, padding=1, dilation=2, output_padding=1),
    Row(
        "MaxPool2d",
        nn.MaxPool2d((2, 3), 2, 1, True),
        IMAGE,
        functional("max_pool2d", kernel_size=(2, 3), stride=2, padding=1, ceil_mode=True),
    ),
    Row(
        "AvgPool2d",
        nn.AvgPool2d((2, 3), 2, 1),
        IMAGE,
        functional("avg_pool2d", kernel_size=(2, 3), stride=2, padding=1),
    ),
    # Where sizes divide: where they do not, PyTorch's windows overlap.
    Row(
        "AdaptiveAvgPool2d",
        nn.AdaptiveAvgPool2d((3, 1)),
        IMAGE,
        functional("adaptive_avg_pool2d", output_size=(3, 1)),
    ),
    Row(
        "AdaptiveMaxPool2d",
        nn.AdaptiveMaxPool2d((3, 1)),
        IMAGE,
        functional("adaptive_max_pool2d", output_size=(3, 1)),
    ),
    Row(
        "LayerNorm",
        nn.LayerNorm((3, 4)),
        (2, 3, 4),
        lambda torch, x, *arrays: torch.nn.functional.layer_norm(x, (3, 4), *arrays),
    ),
    Row(
        "RMSNorm",
        nn.RMSNorm(4, use_bias=False),
        (2, 3, 4),
        lambda torch, x, weight: torch.nn.functional.rms_norm(x, (4,), weight, 1e-5),
    ),
    Row(
        "GroupNorm",
        nn.GroupNorm(2, 4, num_spatial_dims=2),
        IMAGE,
        lambda torch, x, *arrays: torch.nn.functional.group_norm(x, 2, *arrays),
    ),
    Row(
        "InstanceNorm",
        nn.InstanceNorm(4, channelwise_affine=True, num_spatial_dims=1),
        LINE,
        lambda torch, x, *arrays: torch.nn.functional.instance_norm(x, None, None, *arrays),
    ),
    Row(
        "BatchNorm",
        nn.BatchNorm(4),
        IMAGE,
        lambda torch, x, *arrays: torch.nn.functional.batch_norm(x, None, None, *arrays, True),
    ),
    Row(
        "MultiheadAttention",
        nn.MultiheadAttention(2, 4, is_causal=True, key=KEY),
        (2, 5, 4),
        attention,
    ),
    *(over_time(kind, n) for kind in ("lstm", "gru", "rnn_tanh") for n in (1, 2)),
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


@pytest.mark.parametrize("rows", [[[3, 0], [3, 4]], 2], ids=str)
def test_rows_of_a_table_and_their_gradients_are_pytorchs(torch, rows):
    """A row that is read twice gets both gradients."""
    weight = wave(5, 2)
    tensor = torch.tensor(weight, requires_grad=True)
    expected = torch.nn.functional.embedding(torch.tensor(rows), tensor)
    expected.sin().sum().backward()

    def loss(weight):
        out = nn.Embedding(weight=weight)(jnp.asarray(rows))
        return jnp.sum(jnp.sin(out)), out

    grad, found = jax.grad(loss, has_aux=True)(jnp.asarray(weight))

    assert_close(found, expected)
    assert_close(grad, tensor.grad)
