"""`from_torch` and `to_torch`: the arrays of a model as a PyTorch state dict.

A layer whose arrays have PyTorch's names and shapes needs nothing. For the others there is a
layout: where each array comes from, and how it is made. The way back follows from it: the function
is called with the numbers of the places, and so tells where each number belongs. PyTorch itself is
not imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np

from pytreemod.io.container import Entry, StrPath, Table, opened
from pytreemod.io.loading import AS_LIKE, Fit
from pytreemod.io.names import parts_of, places_of
from pytreemod.io.renaming import NameTable, mapped, renamed
from pytreemod.io.saving import table_of
from pytreemod.nn.activations import PReLU
from pytreemod.nn.attention import MultiheadAttention
from pytreemod.nn.batch_normalization import BatchNorm
from pytreemod.nn.convolution import Conv
from pytreemod.nn.members.layer import Members
from pytreemod.nn.recurrent_cells import GRUCell, LSTMCell, SimpleCell
from pytreemod.nn.sequential import Sequential
from pytreemod.nn.spectral_normalization import SpectralNorm
from pytreemod.nn.transposed_convolution import ConvTranspose
from pytreemod.nn.weight_normalization import WeightNorm
from pytreemod.state.tokens import is_token
from pytreemod.state.values import State
from pytreemod.tree.nodes import children_of, record_of
from pytreemod.tree.paths import step_name
from pytreemod.typing import PyTree

_M = TypeVar("_M")
_COUNTS = "num_batches_tracked"


class Source(NamedTuple):
    """Where an array of a layer comes from.

    Attributes:
        names: of the tensors, relative to the layer.
        make: returns our array from these tensors, in NumPy; it moves and adds numbers only.
        shape: of each tensor; None for that of our array.
    """

    names: tuple[str, ...]
    make: Callable[..., Any] = lambda x: x
    shape: tuple[int, ...] | None = None


def from_torch(
    model: _M, state_dict: Mapping[str, Any] | StrPath, rename: NameTable | None = None
) -> _M:
    """Return a model with the arrays of a PyTorch state dict.

    Every array of the model, and of its State, must be given, and every tensor must be used, except
    for `num_batches_tracked`. One error lists all differences. Floating tensors are cast to the
    dtypes of the model.

    **Law.** `from_torch(model, to_torch(model)) == model`.

    Args:
        model: a tree of Modules, which may be abstract (`pm.filter_eval_shape`); or a pair of it
            and its State, for BatchNorm and SpectralNorm.
        state_dict: tensors of PyTorch, or arrays, by name; or the path of a safetensors file or
            folder.
        rename: from names in the state dict to those that the model would have in PyTorch, as for
            [`load`][pytreemod.load].

    Returns:
        The model, or the pair, with the values of the state dict.

    Raises:
        FileError: if tensors are missing, unexpected, or do not fit.
        ArgumentError: if a pattern in `rename` matches nothing.

    Examples:
        >>> import jax, numpy as np
        >>> from pytreemod import nn
        >>> model = {"out": nn.Linear(3, 1, key=jax.random.key(0))}
        >>> tensors = {"fc.weight": np.ones((1, 3), "f"), "fc.bias": np.zeros(1, "f")}
        >>> model = from_torch(model, tensors, {"fc": "out"})
        >>> model["out"](jax.numpy.ones(3))
        Array([3.], dtype=float32)
    """
    if isinstance(state_dict, (str, os.PathLike)):
        with opened(state_dict) as (table, _):
            return _filled(model, table, rename)
    table = {name: _entry_of(tensor) for name, tensor in state_dict.items()}
    return _filled(model, table, rename)


def _filled(model: Any, table: Table, rename: NameTable | None) -> Any:
    if rename is not None:
        table, _ = renamed(table, rename, "from_torch")
    net, state = model if _has_state(model) else (model, None)
    left = {name: entry for name, entry in table.items() if not name.endswith(_COUNTS)}
    ours: dict[str, Entry] = {}
    for name, (names, make, _) in _sources_of(net):
        if all(each in table for each in names):
            ours[name] = mapped([table[each] for each in names], make)
            for each in names:
                left.pop(each, None)
    ours = left | ours
    if state is not None:
        # A value of the State has the name of its token in the model.
        held = {part.name for part in parts_of(places_of(state))}
        ours = {f"{int(name in held)}.{name}": entry for name, entry in ours.items()}
    fit = Fit(ours, model, cast=AS_LIKE)
    fit.refuse("from_torch: the tensors do not fit the model")
    return fit.tree()


def _has_state(model: Any) -> bool:
    return isinstance(model, tuple) and len(model) == 2 and isinstance(model[1], State)


def to_torch(model: PyTree) -> dict[str, np.ndarray]:
    """Return the arrays of a model as a PyTorch state dict: with PyTorch's names and layouts.

    PyTorch accepts no bfloat16 from NumPy: pass `array.view(np.int16)`, and view it as bfloat16.

        net.load_state_dict({name: torch.from_numpy(x) for name, x in to_torch(model).items()})

    Args:
        model: a tree of Modules; or a pair of it and its State, for BatchNorm and SpectralNorm.

    Returns:
        Arrays by name: copies, which you may change.

    Raises:
        FileError: if a leaf is neither an array nor a number, or has no values on this host.

    Examples:
        >>> import jax
        >>> from pytreemod import nn
        >>> layer = nn.Conv2d(3, 8, 3, key=jax.random.key(0))
        >>> {name: array.shape for name, array in to_torch(layer).items()}
        {'weight': (8, 3, 3, 3), 'bias': (8,)}
    """
    net, state = model if _has_state(model) else (model, ())
    table = table_of(places_of(net), "to_torch") | table_of(places_of(state), "to_torch")
    made: dict[str, np.ndarray] = {}
    for name, (names, make, shape) in _sources_of(net):
        if name not in table:
            continue
        array = table[name].read()
        shape = array.shape if shape is None else shape
        for each in names:
            made.setdefault(each, np.zeros(shape, array.dtype))
        # The numbers of the places that ours are from; those of other tensors stay zero.
        numbers = np.arange(prod(shape)).reshape(shape)
        places = make(numbers, *[np.zeros_like(numbers)] * (len(names) - 1))
        made[names[0]].reshape(-1)[places] = array
    return made


def _entry_of(tensor: Any) -> Entry:
    """Return the entry of a tensor of PyTorch, or of another array."""
    if not hasattr(tensor, "detach"):
        return Entry.of(tensor if hasattr(tensor, "dtype") else np.asarray(tensor))
    name = str(tensor.dtype).rpartition(".")[2]
    # NumPy has no bfloat16, and no floats of 8 bits.
    is_known = name == "bool" or hasattr(np, name)

    def read() -> np.ndarray:
        plain = tensor.detach().cpu()
        return plain.numpy() if is_known else plain.float().numpy().astype(dtype)

    dtype = np.dtype(bool if name == "bool" else getattr(jnp, name))
    return Entry(tuple(tensor.shape), dtype, read)


# ---- names

Layout = Mapping[str, str | Source]
"""What differs in PyTorch, by path in the layer: the name of a part, or the source of an array."""


def _sources_of(node: Any, ours: str = "", theirs: str = "") -> Iterator[tuple[str, Source]]:
    """Yield the name of each array here, and its tensors there.

    Args:
        node: a model, or a part of one.
        ours: its name here.
        theirs: its name in PyTorch.
    """
    children, record = children_of(node), record_of(node)
    is_hole = record is not None and record.is_hole
    if is_token(node):
        # Its values are in the State: a layout has their names.
        return
    if children is None or is_hole:
        yield ours, Source((theirs,))
        return
    layout = next((make(node) for cls, make in _LAYOUTS.items() if isinstance(node, cls)), {})
    own = {path: rule for path, rule in layout.items() if isinstance(rule, Source)}
    parts = {path: rule for path, rule in layout.items() if isinstance(rule, str)}
    for path, (names, make, shape) in own.items():
        there = tuple(_join(theirs, name) for name in names)
        yield _join(ours, path), Source(there, make, shape)
    taken = {_join(ours, path) for path in own}
    for key, child in children:
        name = step_name(key)
        # The layers of a Stack have numbers on both sides.
        words = [str(i) for i in range(len(node))] if isinstance(node, Members) else [name]
        for word in words:
            below = _sources_of(child, _join(ours, word), _join(theirs, parts.get(name, word)))
            yield from ((found, source) for found, source in below if found not in taken)


def _join(*words: str) -> str:
    return ".".join(filter(None, words))


# ---- the layers whose arrays have other names or shapes


def _of_conv(layer: Any) -> Layout:
    # A bias has an axis of size 1 for each spatial one, as in Equinox; PyTorch's is a vector.
    axes = (1,) * layer.num_spatial_dims
    shape = (layer.out_channels,)
    return {"bias": Source(("bias",), lambda bias: bias.reshape(-1, *axes), shape)}


def _of_conv_transpose(layer: ConvTranspose) -> Layout:
    dims, groups = layer.num_spatial_dims, layer.groups

    def exchange(weight: Any) -> Any:
        """Turn (groups * a, b, *taps) into (groups * b, a, *taps), with the taps in reverse."""
        a, b, *kernel = weight.shape
        swapped = weight.reshape(groups, a // groups, b, *kernel).swapaxes(1, 2)
        made = swapped.reshape(groups * b, a // groups, *kernel)
        return np.flip(made, range(-dims, 0))

    shape = (layer.in_channels, layer.out_channels // groups, *layer.kernel_size)
    return {"weight": Source(("weight",), exchange, shape), **_of_conv(layer)}


def _of_prelu(layer: PReLU) -> Layout:
    make = lambda slope: slope.reshape(layer.shape)  # noqa: E731
    return {"negative_slope": Source(("weight",), make, (prod(layer.shape),))}


def _of_batch_norm(layer: BatchNorm) -> Layout:
    means = {"state_index.0": Source(("running_mean",)), "state_index.1": Source(("running_var",))}
    return means if layer.mode == "torch" else {}


def _of_spectral_norm(layer: SpectralNorm[Any]) -> Layout:
    # As `torch.nn.utils.parametrizations.spectral_norm` has it.
    place = f"parametrizations.{layer.weight_name}"
    vectors = {f"uv_index.{i}": Source((f"{place}.0._{x}",)) for i, x in enumerate("uv")}
    return {"layer": "", f"layer.{layer.weight_name}": Source((f"{place}.original",)), **vectors}


def _of_weight_norm(layer: WeightNorm[Any]) -> Layout:
    # As `torch.nn.utils.parametrizations.weight_norm` has it.
    place = f"parametrizations.{layer.weight_name}"
    weight = Source((f"{place}.original1",))
    return {"layer": "", f"layer.{layer.weight_name}": weight, "g": Source((f"{place}.original0",))}


def _of_cell(layer: Any) -> Layout:
    # One bias is enough where PyTorch adds two.
    return {"bias": Source(("bias_ih", "bias_hh"), np.add)}


def _of_gru(layer: GRUCell) -> Layout:
    size = layer.hidden_size

    def together(bias_ih: Any, bias_hh: Any) -> Any:
        # The last third of the second one is inside the reset gate.
        return bias_ih + np.concatenate([bias_hh[: 2 * size], np.zeros_like(bias_hh[2 * size :])])

    inner = Source(("bias_hh",), lambda bias_hh: bias_hh[2 * size :], (3 * size,))
    return {"bias": Source(("bias_ih", "bias_hh"), together), "bias_n": inner}


def _of_attention(layer: MultiheadAttention) -> Layout:
    kv_heads = layer.num_heads if layer.num_kv_heads is None else layer.num_kv_heads
    rows = [layer.num_heads * layer.qk_size, kv_heads * layer.qk_size, kv_heads * layer.vo_size]
    are_packed = layer.query_size == layer.key_size == layer.value_size
    has_biases = layer.use_query_bias and layer.use_key_bias and layer.use_value_bias
    layout: dict[str, str | Source] = {"output_proj": "out_proj"}
    for i, name in enumerate(("query", "key", "value")):
        own = slice(sum(rows[:i]), sum(rows[: i + 1]))
        layout[f"{name}_proj.weight"] = Source((f"{name[0]}_proj_weight",))
        if are_packed:
            shape = (sum(rows), layer.query_size)
            layout[f"{name}_proj.weight"] = _rows_of("in_proj_weight", own, shape)
        if has_biases:
            layout[f"{name}_proj.bias"] = _rows_of("in_proj_bias", own, (sum(rows),))
    return layout


def _rows_of(name: str, own: slice, shape: Sequence[int]) -> Source:
    return Source((name,), lambda x: x[own], (*shape,))


_LAYOUTS: dict[type, Callable[[Any], Layout]] = {
    Sequential: lambda layer: {"layers": ""},
    ConvTranspose: _of_conv_transpose,
    Conv: _of_conv,
    PReLU: _of_prelu,
    BatchNorm: _of_batch_norm,
    WeightNorm: _of_weight_norm,
    SpectralNorm: _of_spectral_norm,
    GRUCell: _of_gru,
    LSTMCell: _of_cell,
    SimpleCell: _of_cell,
    MultiheadAttention: _of_attention,
}
