"""`from_torch` and `to_torch`: the arrays of a model as a PyTorch state dict.

A layer whose arrays have PyTorch's names and shapes needs nothing. For the others there is a
layout: where each array comes from, and how it is made. The way back follows from it: the function
is called with the numbers of the places, and so tells where each number belongs. PyTorch itself is
not imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from math import prod
from operator import itemgetter, methodcaller
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np

from pytreemod import nn
from pytreemod.errors import ArgumentError, FileError
from pytreemod.io.container import Entry, StrPath, Table, opened
from pytreemod.io.loading import AS_LIKE, Fit
from pytreemod.io.names import is_key, places_of
from pytreemod.io.renaming import NameTable, Renaming, mapped
from pytreemod.io.saving import table_of
from pytreemod.module.ties import untie
from pytreemod.nn.stacked_layers import Stacked
from pytreemod.state.tokens import is_token
from pytreemod.state.values import State
from pytreemod.tree.nodes import children_of
from pytreemod.tree.paths import step_name
from pytreemod.tree.predicates import is_abstract
from pytreemod.typing import PyTree, is_instance

_M = TypeVar("_M")


class Source(NamedTuple):
    """Where an array of a layer comes from: all of the array, or some of its numbers.

    Attributes:
        names: of the tensors, relative to the layer.
        shape: of each tensor; None for that of our array.
        make: returns our array from these tensors, in NumPy; it moves and adds numbers only.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...] | None = None
    make: Callable[..., Any] = np.asarray


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
            and its State, for BatchNorm.
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
    renaming, given = Renaming(rename), table
    table, _ = renaming.table(given)
    renaming.refuse_unused(given)
    trees = _trees_of(model)
    sources = dict(_sources_of(trees[0]))
    ours = {n: x for n, x in table.items() if not n.endswith("num_batches_tracked")}
    lines: list[str] = []
    for name, (names, shape, make) in sources.items():
        if not table.keys() >= set(names):
            continue
        entries = [table[each] for each in names]
        for each, entry in zip(names, entries, strict=True):
            ours.pop(each, None)
            if shape is not None and entry.shape != shape:
                lines.append(f"{each}: expected the shape {shape}, got {entry.shape}")
        if not lines:
            ours[name] = mapped(entries, make)
    # A value of the State has the name of its token in the model. What PyTorch does not have, such
    # as the keys of a stream, stays as it is.
    places = [place for tree in trees for place in places_of(tree)]
    known = sources.keys() | ours.keys()
    fit = Fit(ours, trees, cast=AS_LIKE, places=places, names=known)
    missing = {each: None for name in fit.report.missing for each in sources[name].names}
    lines += [*fit.wrong, *(f"{name}: missing" for name in missing if name not in table)]
    unexpected = {name: sources.get(name, Source((name,))) for name in fit.report.unexpected}
    lines += [f"{each}: unexpected" for source in unexpected.values() for each in source.names]
    if lines:
        needs_state = len(trees) == 1 and unexpected.keys() & sources.keys()
        hint = "pm.from_torch((model, state), state_dict)" if needs_state else ()
        fact = "from_torch: the tensors do not fit the model"
        raise FileError(fact, at=lines, hint=hint, most=40)
    made = fit.tree()
    return made if len(made) > 1 else made[0]


def _trees_of(model: Any) -> tuple[Any, ...]:
    """Return a model, and its State if that is there."""
    is_pair = is_instance(model, tuple) and len(model) == 2 and isinstance(model[1], State)
    return model if is_pair else (model,)


def to_torch(model: PyTree) -> dict[str, np.ndarray]:
    """Return the arrays of a model as a PyTorch state dict: with PyTorch's names and layouts.

    PyTorch accepts no bfloat16 from NumPy: pass `array.view(np.int16)`, and view it as bfloat16.

        net.load_state_dict({name: torch.from_numpy(x) for name, x in to_torch(model).items()})

    Args:
        model: a tree of Modules; or a pair of it and its State, for BatchNorm.

    Returns:
        Arrays by name: copies, which you may change.

    Raises:
        FileError: if a leaf is neither an array nor a number, or has no values on this host.

    Examples:
        >>> import jax
        >>> from pytreemod import nn
        >>> layer = nn.Conv2d(3, 8, 3, key=jax.random.key(0))
        >>> {name: array.shape for name, array in sorted(to_torch(layer).items())}
        {'bias': (8,), 'weight': (8, 3, 3, 3)}
    """
    # PyTorch has a tied array under both of its names.
    trees = untie(_trees_of(model))
    table = table_of([place for tree in trees for place in places_of(tree)], "to_torch")
    made: dict[str, np.ndarray] = {}
    for name, (names, shape, make) in _sources_of(trees[0]):
        if name not in table:
            raise ArgumentError(f"to_torch has no {name}", hint="pm.to_torch((model, state))")
        array = table[name].read()
        shape = array.shape if shape is None else shape
        for each in names:
            made.setdefault(each, np.zeros(shape, array.dtype))
        # Our numbers go where those of their places come from; in other tensors they are zero.
        numbers = np.arange(prod(shape)).reshape(shape)
        zeros = [np.zeros_like(numbers)] * (len(names) - 1)
        made[names[0]].reshape(-1)[make(numbers, *zeros)] = array
    return made


def _entry_of(tensor: Any) -> Entry:
    """Return the entry of a tensor of PyTorch, or of another array; it reads copies."""
    if not hasattr(tensor, "detach"):
        return Entry(np.shape(tensor), np.asarray(tensor).dtype, lambda: np.array(tensor))
    name = str(tensor.dtype).rpartition(".")[2]
    dtype = np.dtype(bool if name == "bool" else getattr(jnp, name))

    def read() -> np.ndarray:
        plain = tensor.detach().resolve_conj().resolve_neg().cpu()
        # NumPy has no bfloat16, and no floats of 8 bits.
        plain = plain if dtype.type.__module__ == "numpy" else plain.float()
        return np.array(plain.numpy(), dtype)

    return Entry(tuple(tensor.shape), dtype, read)


# ---- names

# What differs in PyTorch, by path in the layer: the name of a part, or the source of an array.
Layout = Mapping[str, str | Source]


def _sources_of(node: Any, ours: str = "", theirs: str = "") -> Iterator[tuple[str, Source]]:
    """Yield the name of each array here, and its tensors there.

    Args:
        node: a model, or a part of one.
        ours: its name here.
        theirs: its name in PyTorch.
    """
    children = children_of(node)
    if is_token(node):
        # Its values are in the State: a layout has their names.
        return
    if children is None:
        if is_abstract(node) and not is_key(node):
            yield ours, Source((theirs,))
        return
    found = (make(node) for cls, make in _LAYOUTS.items() if is_instance(node, cls))
    layout: Layout = next(found, dict[str, str | Source]())
    own = {path: rule for path, rule in layout.items() if not isinstance(rule, str)}
    for path, (names, shape, make) in own.items():
        there = tuple(_join(theirs, name) for name in names)
        yield _join(ours, path), Source(there, shape, make)
    taken = {_join(ours, path) for path in own}
    for key, child in children:
        name = step_name(key)
        # The layers of a Stack have numbers on both sides.
        words = [str(i) for i in range(len(node))] if is_instance(node, Stacked) else [name]
        for word in words:
            rule = layout.get(name, word)
            there = _join(theirs, rule) if isinstance(rule, str) else ""
            below = _sources_of(child, _join(ours, word), there)
            yield from ((found, source) for found, source in below if found not in taken)


def _join(*words: str) -> str:
    return ".".join(filter(None, words))


# ---- the layers whose arrays have other names or shapes


def _of_conv(layer: Any) -> Layout:
    # A bias has an axis of size 1 for each spatial one, as in Equinox; PyTorch's is a vector.
    make = methodcaller("reshape", -1, *[1] * layer.num_spatial_dims)
    own = {"bias": Source(("bias",), (layer.out_channels,), make)}
    return own if layer.use_bias else {}


def _of_conv_transpose(layer: nn.ConvTranspose) -> Layout:
    dims, groups = layer.num_spatial_dims, layer.groups

    def exchange(weight: Any) -> Any:
        """Turn (groups * a, b, *taps) into (groups * b, a, *taps), with the taps in reverse."""
        a, b, *kernel = weight.shape
        swapped = weight.reshape(groups, a // groups, b, *kernel).swapaxes(1, 2)
        made = swapped.reshape(groups * b, a // groups, *kernel)
        return np.flip(made, tuple(range(-dims, 0)))

    shape = (layer.in_channels, layer.out_channels // groups, *layer.kernel_size)
    return {"weight": Source(("weight",), shape, exchange), **_of_conv(layer)}


def _of_prelu(layer: nn.PReLU) -> Layout:
    make = methodcaller("reshape", layer.shape)
    return {"negative_slope": Source(("weight",), (prod(layer.shape),), make)}


def _of_mlp(layer: nn.MLP) -> Layout:
    # The arrays of an activation have axes for its units, which no layer of PyTorch has.
    names = "activation", "final_activation"
    found = [path for name in names for path, _ in _sources_of(getattr(layer, name), name)]
    return {path: Source((path,)) for path in found}


def _of_batch_norm(layer: nn.BatchNorm) -> Layout:
    if layer.mode != "torch":
        raise ArgumentError(f"PyTorch has no BatchNorm with mode={layer.mode!r}")
    return {"state_index.0": Source(("running_mean",)), "state_index.1": Source(("running_var",))}


def _of_cell(layer: Any) -> Layout:
    # One bias is enough where PyTorch adds two.
    size = layer.weight_hh.shape[-2]
    return {"bias": Source(("bias_ih", "bias_hh"), (size,), np.add)} if layer.use_bias else {}


def _of_gru(layer: nn.GRUCell) -> Layout:
    size = layer.hidden_size

    def together(bias_ih: Any, bias_hh: Any) -> Any:
        # The last third of the second one is inside the reset gate.
        return bias_ih + np.concatenate([bias_hh[: 2 * size], np.zeros_like(bias_hh[2 * size :])])

    own = {
        "bias": Source(("bias_ih", "bias_hh"), (3 * size,), together),
        "bias_n": _rows_of("bias_hh", slice(2 * size, None), (3 * size,)),
    }
    return own if layer.use_bias else {}


def _of_attention(layer: nn.MultiheadAttention) -> Layout:
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


def _rows_of(name: str, own: slice, shape: tuple[int, ...]) -> Source:
    return Source((name,), shape, itemgetter(own))


_LAYOUTS: dict[type, Callable[[Any], Layout]] = {
    nn.Sequential: lambda layer: {"layers": ""},
    nn.ConvTranspose: _of_conv_transpose,
    nn.Conv: _of_conv,
    nn.PReLU: _of_prelu,
    nn.MLP: _of_mlp,
    nn.BatchNorm: _of_batch_norm,
    nn.GRUCell: _of_gru,
    nn.LSTMCell: _of_cell,
    nn.SimpleCell: _of_cell,
    nn.MultiheadAttention: _of_attention,
}
