"""Names and layouts of layers' arrays in PyTorch: one entry for each layer that differs.

A layer whose arrays have PyTorch's names and shapes needs no entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from pytreemod.errors import ArgumentError
from pytreemod.io.layout_rules import Packed, Relaid
from pytreemod.nn.activations import PReLU
from pytreemod.nn.attention import MultiheadAttention
from pytreemod.nn.batch_normalization import BatchNorm
from pytreemod.nn.convolution import Conv
from pytreemod.nn.mlp import MLP
from pytreemod.nn.recurrent_cells import GRUCell, LSTMCell, SimpleCell
from pytreemod.nn.sequential import Sequential
from pytreemod.nn.spectral_normalization import SpectralNorm
from pytreemod.nn.stack.layer import Stack
from pytreemod.nn.transposed_convolution import ConvTranspose
from pytreemod.nn.weight_normalization import WeightNorm
from pytreemod.tree.paths import parse_name


@dataclass(frozen=True)
class Numbered:
    """A rule of a layout: a leading axis here is several numbered objects in PyTorch.

    Attributes:
        name: PyTorch's name of all of them; empty if the numbers have no prefix.
        count: how many there are.
        first: the number of the first.
    """

    name: str
    count: int
    first: int = 0


@dataclass(frozen=True)
class Summed:
    """A rule of a layout: PyTorch has an array as several, which it adds up when it is called.

    Several arrays may have parts under one name, which are added, too. The layers around such an
    array do not affect its name.

    Attributes:
        names: the names in PyTorch.
        to: converts our array to PyTorch's, one for each name.
        back: converts PyTorch's arrays, one argument for each, to ours.

    Examples:
        Two biases where one would be enough:

        >>> rule = Summed(("a", "b"), to=lambda x: (x, np.zeros_like(x)), back=np.add)
        >>> rule.back(*rule.to(np.ones(2)))
        array([1., 1.])
    """

    names: tuple[str, ...]
    to: Callable[[Any], tuple[Any, ...]]
    back: Callable[..., Any]


LayoutRule: TypeAlias = str | Relaid | Numbered | Summed | Packed | None
SUMMED = (Summed, Packed)
"""Rules of arrays that have other names than the layers around say, and may share them."""
LayoutRules: TypeAlias = Mapping[str, LayoutRule]


@dataclass(frozen=True)
class TorchLayout:
    """The layout of a class of layers in PyTorch.

    An array without a rule has the name of its field. The innermost rule determines the form of an
    array, the outermost its name.
    """

    rules: LayoutRules | Callable[[Any], LayoutRules]
    """By path in a layer (that of a token is the path of its value), or a function from the layer.

    A rule is PyTorch's name with dots (empty if PyTorch has no component for it), one of the
    classes above, `Relaid` or `Packed`, or None for an array that PyTorch does not have."""

    unused: tuple[str, ...] = ()
    """Names in PyTorch that are not needed here."""

    def rules_of(self, layer: Any) -> list[tuple[tuple[str, ...], LayoutRule]]:
        """Return the rules for one layer, each with the components of its path in the layer."""
        rules = self.rules(layer) if callable(self.rules) else self.rules
        return [(parse_name(path), rule) for path, rule in rules.items()]


def layout_of(node: Any) -> TorchLayout | None:
    """Return the layout of a node's class, or of its first base that has one."""
    for cls in type(node).__mro__:
        if cls in _LAYOUTS:
            return _LAYOUTS[cls]
    return None


# ---- the library's layers


def _rules_of_conv(layer: Conv | ConvTranspose) -> LayoutRules:
    # A bias has an axis of size 1 for each spatial one, as in Equinox; PyTorch's is a vector.
    axes = tuple(range(-layer.num_spatial_dims, 0))

    def to(bias: Any) -> Any:
        return np.squeeze(bias, axes)

    def back(bias: Any) -> Any:
        return np.expand_dims(bias, axes)

    return {"bias": Relaid("bias", to, back)}


def _rules_of_conv_transpose(layer: ConvTranspose) -> LayoutRules:
    dims, groups = layer.num_spatial_dims, layer.groups
    taps = tuple(range(-dims, 0))

    def exchange(weight: Any) -> Any:
        """Turn (groups * a, b, *taps) into (groups * b, a, *taps), with the taps in reverse."""
        *leading, a, b = weight.shape[:-dims]
        kernel = weight.shape[-dims:]
        grouped = np.reshape(weight, (*leading, groups, a // groups, b, *kernel))
        swapped = np.swapaxes(grouped, -dims - 2, -dims - 1)
        return np.flip(np.reshape(swapped, (*leading, groups * b, a // groups, *kernel)), taps)

    return {"weight": Relaid("weight", exchange, exchange), **_rules_of_conv(layer)}


def _rules_of_prelu(layer: PReLU) -> LayoutRules:
    def to(slope: Any) -> Any:
        return np.reshape(slope, (*slope.shape[: slope.ndim - len(layer.shape)], -1))

    def back(slope: Any) -> Any:
        return np.reshape(slope, (*slope.shape[:-1], *layer.shape))

    # PyTorch has one number, or one for each channel, in a vector.
    return {"negative_slope": Relaid("weight", to, back)}


def _is_first(count: Any) -> Any:
    return np.equal(count, 0)


def _count_of(is_first: Any) -> Any:
    # The number of batches is unknown here, and with a momentum PyTorch does not use it.
    return np.logical_not(is_first).astype(np.int64)


def _rules_of_spectral_norm(layer: SpectralNorm[Any]) -> LayoutRules:
    # As in `torch.nn.utils.parametrizations.spectral_norm`: the path of the layer is unchanged.
    place = f"parametrizations.{layer.weight_name}"
    return {
        "layer": "",
        f"layer.{layer.weight_name}": f"{place}.original",
        "uv_index.0": f"{place}.0._u",
        "uv_index.1": f"{place}.0._v",
    }


def _rules_of_weight_norm(layer: WeightNorm[Any]) -> LayoutRules:
    # As in `torch.nn.utils.parametrizations.weight_norm`: the path of the layer is unchanged.
    place, inner = f"parametrizations.{layer.weight_name}", layer.layer
    known = layout_of(inner)
    rule = dict(known.rules_of(inner)).get((layer.weight_name,)) if known is not None else None
    if layer.axis is not None and isinstance(inner, ConvTranspose) and inner.groups > 1:
        where = "to_torch, from_torch: WeightNorm"
        expected = "ConvTranspose(groups=1), because PyTorch orders its axes differently"
        raise ArgumentError(where, expected, f"groups={inner.groups}")
    lengths: LayoutRule = f"{place}.original0"
    if layer.axis is None:
        lengths = _one_number(f"{place}.original0")
    elif isinstance(rule, Relaid):
        # The lengths have the axes of the weight, and so are converted with them.
        lengths = Relaid(f"{place}.original0", rule.to, rule.back)
    return {"layer": "", f"layer.{layer.weight_name}": f"{place}.original1", "g": lengths}


def _one_number(name: str) -> Relaid:
    """Return the rule for a single number, which has axes of size 1 here."""

    def to(number: Any) -> Any:
        return np.reshape(number, ())

    # It gets the shape of our array when it replaces that.
    return Relaid(name, to, np.asarray)


def _rules_of_mlp(layer: MLP) -> LayoutRules:
    if not layer.scan or layer.depth == 0:
        return {}
    # The layers between are stacked here, so the last one has another number.
    return {"layers.1": Numbered("layers", layer.depth - 1, 1), "layers.2": f"layers.{layer.depth}"}


def _and_nothing(bias: Any) -> Any:
    return bias, np.zeros_like(bias)


def _rules_of_batch_norm(layer: BatchNorm) -> LayoutRules:
    if layer.mode == "batch":
        hint = ("Make it without mode=:", "nn.BatchNorm(input_size)")
        expected = "a BatchNorm with running statistics as PyTorch's"
        raise ArgumentError("to_torch, from_torch: BatchNorm", expected, "mode='batch'", hint=hint)
    return {
        "state_index.0": "running_mean",
        "state_index.1": "running_var",
        "ema_first_time_index": Relaid("num_batches_tracked", _count_of, _is_first),
    }


# One bias is enough where two are added; to PyTorch, the second is zero.
_TWO_BIASES = {"bias": Summed(("bias_ih", "bias_hh"), _and_nothing, np.add)}


def _rules_of_gru(layer: GRUCell) -> LayoutRules:
    gates = 2 * layer.hidden_size

    def together(bias_ih: Any, bias_hh: Any) -> Any:
        return bias_ih + np.concatenate([bias_hh[:gates], np.zeros_like(bias_hh[gates:])])

    def to(bias_n: Any) -> Any:
        return (np.concatenate([np.zeros(gates, bias_n.dtype), bias_n]),)

    def back(bias_hh: Any) -> Any:
        return bias_hh[gates:]

    # The last third of the second bias is inside the reset gate, so it cannot be added to the
    # first.
    return {
        "bias": Summed(("bias_ih", "bias_hh"), _and_nothing, together),
        "bias_n": Summed(("bias_hh",), to, back),
    }


def _rules_of_stack(layer: Stack[Any]) -> LayoutRules:
    return {"layer": Numbered("", layer.depth)}


def _rules_of_attention(layer: MultiheadAttention) -> LayoutRules:
    sizes = {layer.query_size, layer.key_size, layer.value_size}
    kv_heads = layer.num_heads if layer.num_kv_heads is None else layer.num_kv_heads
    rows = (
        layer.num_heads * layer.qk_size,
        kv_heads * layer.qk_size,
        kv_heads * layer.vo_size,
    )
    # The cache is not learned.
    rules: dict[str, LayoutRule] = {"output_proj": "out_proj", "cache": None}
    for part, name in enumerate(("query", "key", "value")):
        # One array if inputs of one size allow it; always for biases.
        is_one = len(sizes) == 1
        weight = Packed("in_proj_weight", part, rows) if is_one else f"{name[0]}_proj_weight"
        rules[f"{name}_proj.weight"] = weight
        if layer.use_query_bias and layer.use_key_bias and layer.use_value_bias:
            rules[f"{name}_proj.bias"] = Packed("in_proj_bias", part, rows)
    return rules


# By class; a subclass has the layout of its base.
_LAYOUTS: dict[type, TorchLayout] = {
    Conv: TorchLayout(_rules_of_conv),
    ConvTranspose: TorchLayout(_rules_of_conv_transpose),
    PReLU: TorchLayout(_rules_of_prelu),
    # The count is unused unless it says whether there was a batch, as with mode="ema".
    BatchNorm: TorchLayout(_rules_of_batch_norm, unused=("num_batches_tracked",)),
    GRUCell: TorchLayout(_rules_of_gru),
    LSTMCell: TorchLayout(_TWO_BIASES),
    SimpleCell: TorchLayout(_TWO_BIASES),
    SpectralNorm: TorchLayout(_rules_of_spectral_norm),
    WeightNorm: TorchLayout(_rules_of_weight_norm),
    MLP: TorchLayout(_rules_of_mlp),
    MultiheadAttention: TorchLayout(_rules_of_attention),
    Sequential: TorchLayout({"layers": ""}),
    Stack: TorchLayout(_rules_of_stack),
}
