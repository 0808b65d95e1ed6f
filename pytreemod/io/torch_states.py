"""Models from and to PyTorch's state dicts: tensors by name.

PyTorch itself is not imported: a tensor is any object that can be detached and copied to NumPy.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast, overload

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import ArgumentError, StructureError, describe, with_article
from pytreemod.io.access import StrPath
from pytreemod.io.containers import FileArrays, is_whole_here
from pytreemod.io.folders import open_arrays
from pytreemod.io.layout_rules import Packed, Relaid
from pytreemod.io.tables import TABLE, as_kind_of, mismatches
from pytreemod.io.torch_entries import (
    LeafEntries,
    Renaming,
    TensorEntries,
    TensorEntry,
    sources_of,
    tensor_entries,
)
from pytreemod.io.torch_layouts import SUMMED, Summed
from pytreemod.module.ties import holds_ties, untie
from pytreemod.nn.nets import Stateful
from pytreemod.state.values import State
from pytreemod.transform.compilation.abstract_calls import filter_eval_shape
from pytreemod.tree.paths import pattern_text
from pytreemod.tree.predicates import is_array
from pytreemod.typing import PyTree, jtu

_M = TypeVar("_M")


def to_torch(model: PyTree, state: State | None = None) -> dict[str, np.ndarray]:
    """Return the arrays of a model as a PyTorch state dict: with PyTorch's names and layouts.

    Arrays of the library's layers get the names and shapes of the layers of `torch.nn`. In other
    Modules an array has the name of its path. Python numbers, random keys and streams are left out.
    So is the count of batches of a BatchNorm (`num_batches_tracked`), which PyTorch's
    `load_state_dict` does not require.

        import torch
        state_dict = {name: torch.from_numpy(array) for name, array in to_torch(model).items()}
        net.load_state_dict(state_dict)

    PyTorch accepts no bfloat16 from NumPy. Pass it as integers:
    `torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)`.

    Args:
        model: any tree of Modules; or the result of `stateful`, with its State.
        state: the State of the model, if it has any; it stays usable.

    Returns:
        Arrays by name: copies, which you may change.

    Raises:
        StateError: if the model's State was not given, or is that of another model.
        StructureError: if an array is abstract, has parts only on other hosts, or lacks the shape
            that its layout requires; or if two arrays would have one name.

    Examples:
        >>> import jax
        >>> from pytreemod import nn
        >>> def make(key):
        ...     return nn.Sequential([nn.Conv2d(3, 8, 3, key=key), nn.BatchNorm(8)])
        >>> model, state = nn.make_with_state(make)(jax.random.key(0))
        >>> for name, array in to_torch(model, state).items():
        ...     print(name, array.shape)
        0.weight (8, 3, 3, 3)
        0.bias (8,)
        1.weight (8,)
        1.bias (8,)
        1.running_mean (8,)
        1.running_var (8,)
    """
    where = "to_torch(model)"
    model, state, _ = _taken_apart(where, model, state)
    # PyTorch names a tied parameter at each of its paths.
    model = _untied(model)
    named: dict[str, np.ndarray] = {}
    wrong: list[str] = []
    for entry in tensor_entries(where, model, state).arrays:
        if isinstance(entry.leaf, jax.ShapeDtypeStruct):
            wrong.append(f"{entry.own}: {describe(entry.leaf)}, without values")
            continue
        if isinstance(entry.leaf, jax.Array) and not is_whole_here(entry.leaf):
            wrong.append(f"{entry.own}: {describe(entry.leaf)}, of which other hosts have parts")
            continue
        array = np.asarray(entry.leaf)
        groups = entry.names_by_member()
        members = array.reshape((len(groups), *array.shape[len(entry.lead) :]))
        for names, member in zip(groups, members, strict=True):
            given = _as_theirs(entry.form, member)
            if given is None:
                wrong.append(f"{entry.own}: {describe(member)}, which does not fit {names[0]}")
                continue
            for name, part in zip(names, given, strict=True):
                named[name] = np.array(named[name] + part if name in named else part, order="C")
    if wrong:
        expected, got = "arrays that PyTorch supports", f"{len(wrong)} others"
        raise StructureError(where, expected, got, at=wrong, most=TABLE)
    return named


@overload
def from_torch(
    model: _M,
    state_dict: Mapping[str, Any] | StrPath,
    mapping: Renaming = None,
    *,
    state: None = None,
) -> _M: ...


@overload
def from_torch(
    model: _M,
    state_dict: Mapping[str, Any] | StrPath,
    mapping: Renaming = None,
    *,
    state: State,
) -> tuple[_M, State]: ...


def from_torch(
    model: Any,
    state_dict: Mapping[str, Any] | StrPath,
    mapping: Renaming = None,
    *,
    state: State | None = None,
) -> Any:
    """Return a model with the arrays of a PyTorch state dict; the inverse of `to_torch`.

    Every array of the model, and of its State, must be given, and every given tensor must be used.
    One table lists all differences. There are two exceptions: `num_batches_tracked`, which
    BatchNorm does not use, and names that `mapping` maps to None.

    Shapes must agree. The dtypes are those of the model, if the cast loses nothing: bfloat16 is
    cast to float32, but not float32 to bfloat16. (PyTorch's `load_state_dict` does both.)

    BatchNorm's `momentum` is not in a state dict: here it is one minus PyTorch's. A tied parameter
    is in the dict at each of its paths, with one tensor.

    **Laws.** `from_torch(model, to_torch(model)) == model`, and with a State
    `from_torch(model, to_torch(model, state), state=state) == (model, state)`.

    Args:
        model: a tree of Modules; its arrays determine shapes, dtypes and devices, and may be
            abstract (`pm.filter_eval_shape`). Or the result of `stateful`, with its State.
        state_dict: tensors of PyTorch, or arrays of NumPy or JAX, by name; or the path of a
            safetensors file, or of a folder of such files (see [`load`][pytreemod.load]). Only the
            tensors that the model needs are read.
        mapping: a dict from prefixes of names in the state dict (some first components, or all) to
            those in the model, `{"features.0": "conv1"}`; the longest matching prefix wins. Names
            in the model are those of `to_torch`, or paths. None skips the tensors under a prefix.
            Or a function from a name to a name or None.
        state: the model's State, if it has any; it is used up.

    Returns:
        The model; with `state`, the pair of it and the new State.

    Raises:
        ArgumentError: if `state_dict` is invalid, or `mapping` renames missing tensors.
        FileError: if the file is damaged or missing (`FileMissingError`).
        StateError: if the model's State was not given, is that of another model, or was used up.
        StructureError: if a tensor is missing, unexpected, or does not fit.

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
        # Close the file in any case; arrays that were read stay valid.
        with open_arrays(state_dict) as file:
            return from_torch(model, FileArrays(file), mapping, state=cast("Any", state))
    where = "from_torch(model, state_dict)"
    _check_state_dict(where, state_dict)
    tied, state, net = _taken_apart(where, model, state)
    model = _untied(tied)
    entries = tensor_entries(where, model, state)
    sources = sources_of(where, entries, [*state_dict], mapping)
    found, wrong, narrow = _found(entries, state_dict, sources)
    names = dict.fromkeys(name for entry in entries.arrays for name in entry.names)
    wrong += mismatches([*names], sources)
    if wrong:
        hint = _hint_of_cast(state_dict, narrow)
        fact = f"{where}: the tensors do not match the model: {len(wrong)} differences"
        raise StructureError(fact, at=wrong, hint=hint, most=TABLE)

    def filled(tree: Any, entries: LeafEntries) -> Any:
        leaves, treedef = jtu.tree_flatten(tree)
        pairs = zip(leaves, entries, strict=True)
        return treedef.unflatten(
            [leaf if entry is None else found.get(id(entry), leaf) for leaf, entry in pairs]
        )

    made = filled(model, entries.leaves)
    if model is not tied:
        made = _tied_again(where, tied, made)
    if state is None:
        return made
    for token, of_value in entries.values:
        # A value without tensors, such as a dropout's keys, is not written: that would be an
        # update.
        if any(entry is not None for entry in of_value):
            # Not `set`, which refuses values of several members.
            state = state.update(filled(state.substate(token), of_value))
    return (made, state) if net is None else net.replace(model=made, state=state)


def _untied(model: Any) -> Any:
    """Return a model, maybe an abstract one, with an array at each tied path."""
    if not holds_ties(model):
        return model
    # For an abstract model, copy the shapes to each path.
    is_abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in jtu.tree_leaves(model))
    return filter_eval_shape(untie, model) if is_abstract else untie(model)


def _tied_again(where: str, tied: Any, made: Any) -> Any:
    """Tie a model again, with the arrays of the untied one.

    Raises:
        StructureError: if the arrays at a tied path and at its source differ.
    """
    given = dict(jtu.tree_leaves_with_path(made))
    paths, treedef = jtu.tree_flatten_with_path(tied)
    model = treedef.unflatten([given[path] for path, _ in paths])
    again = dict(jtu.tree_leaves_with_path(untie(model)))
    wrong = [
        f"{pattern_text(path)}: another tensor than at the path it is tied to"
        for path in given.keys() - {path for path, _ in paths}
        # A nan equals itself here: the question is whether the tensors are the same.
        if not np.array_equal(np.asarray(given[path]), np.asarray(again[path]), equal_nan=True)
    ]
    if wrong:
        expected = "the same tensor at tied paths"
        hint = ["to give each its own tensor:", "pm.from_torch(pm.untie(model), state_dict)"]
        got = f"{len(wrong)} with another tensor"
        raise StructureError(where, expected, got, at=wrong, hint=hint, most=TABLE)
    return model


def _taken_apart(
    where: str, model: Any, state: State | None
) -> tuple[Any, State | None, Stateful[Any] | None]:
    """Return a model, its State, and the stateful net that has both, if there is one."""
    if isinstance(model, Stateful):
        net = cast("Stateful[Any]", model)
        if state is not None:
            hint = "A net has its own State."
            raise ArgumentError(where, "a model beside its State", "a net", hint=hint)
        return net.model, net.state, net
    if state is not None and not isinstance(state, State):  # pyright: ignore[reportUnnecessaryIsInstance]  (callers may be unchecked)
        raise ArgumentError(where, "a State", describe(state))
    return model, state, None


# ---- one array


def _as_theirs(form: Relaid | Summed | Packed | None, member: Any) -> list[Any] | None:
    """Return PyTorch's arrays for one of ours, by name; None if its shape does not fit."""
    if form is None:
        return [member]
    try:
        parts = form.among_zeros(member) if isinstance(form, Packed) else form.to(member)
        return [np.asarray(part) for part in (parts if isinstance(form, SUMMED) else (parts,))]
    except (ValueError, IndexError, TypeError):
        return None


def _as_ours(form: Relaid | Summed | Packed | None, parts: Sequence[Any]) -> Any:
    """Return our array for those of PyTorch; None if their shapes do not fit."""
    if form is None:
        return parts[0]
    try:
        if isinstance(form, Packed):
            return np.asarray(form.part_of(parts[0]))
        return np.asarray(form.back(*parts))
    except (ValueError, IndexError, TypeError):
        return None


def _given(entry: TensorEntry) -> list[Any] | None:
    """Return arrays with PyTorch's shapes and dtypes, for each member."""
    # An array that uses no memory, whatever its size.
    member = np.broadcast_to(np.zeros((), entry.leaf.dtype), entry.leaf.shape[len(entry.lead) :])
    return _as_theirs(entry.form, member)


def as_numpy(tensor: Any) -> Any:
    """Return a PyTorch tensor or an array as a NumPy array; None for other values.

    Args:
        tensor: any value. A tensor may require gradients, or be on a GPU.

    Returns:
        The array, in the dtype of that name, which may be one of `ml_dtypes`.

    Examples:
        >>> as_numpy(jnp.ones(2, jnp.bfloat16))
        array([1, 1], dtype=bfloat16)
    """
    if is_array(tensor):
        is_key = jnp.issubdtype(tensor.dtype, jax.dtypes.prng_key)
        return None if is_key else np.asarray(tensor)
    if not hasattr(tensor, "detach"):
        return None
    try:
        plain = tensor.detach().cpu().resolve_conj().resolve_neg()
        name = str(plain.dtype).rpartition(".")[2]
        if name.startswith(("bfloat", "float8")):
            # NumPy gets them from `ml_dtypes`; float32 can represent each of their numbers.
            return plain.float().numpy().astype(jnp.dtype(name))
        return plain.numpy()
    except (TypeError, RuntimeError, NotImplementedError):
        # It is sparse, quantized, or has no values.
        return None


def _cast(array: Any, dtype: Any) -> Any:
    """Cast an array to a dtype, if that can represent all of its numbers; otherwise return None."""
    if array.dtype == dtype:
        return array
    for kind in (jnp.floating, jnp.complexfloating):
        if jnp.issubdtype(array.dtype, kind) and jnp.issubdtype(dtype, kind):
            return array.astype(dtype) if _is_wider(dtype, array.dtype) else None
    if jnp.issubdtype(array.dtype, jnp.integer) and jnp.issubdtype(dtype, jnp.integer):
        # All integers are int64 in PyTorch, and few are large.
        cast_array = array.astype(dtype)
        return cast_array if np.array_equal(cast_array, array) else None
    return None


def _is_wider(wide: Any, narrow: Any) -> bool:
    """Whether one dtype can represent each floating number of another."""
    about: Any = jnp.finfo
    a, b = about(wide), about(narrow)
    return a.nmant >= b.nmant and a.maxexp >= b.maxexp and a.minexp <= b.minexp


# ---- all arrays


def _found(
    entries: TensorEntries, state_dict: Mapping[str, Any], sources: Mapping[str, str]
) -> tuple[dict[int, Any], list[str], str]:
    """Return the new arrays, the mismatches, and a dtype that was too small."""
    found: dict[int, Any] = {}
    wrong: list[str] = []
    narrow = ""
    for entry in entries.arrays:
        wanted, groups = _given(entry), entry.names_by_member()
        members: list[Any] = []
        for names in groups:
            if any(name not in sources for name in names):
                continue
            given = [as_numpy(state_dict[sources[name]]) for name in names]
            shapes = [None] * len(names) if wanted is None else [part.shape for part in wanted]
            fitting = [
                part is not None and part.shape == shape
                for part, shape in zip(given, shapes, strict=True)
            ]
            member = _as_ours(entry.form, given) if all(fitting) else None
            member = None if member is None else _cast(member, entry.leaf.dtype)
            if member is not None:
                members.append(member)
                continue
            is_floating = jnp.issubdtype(entry.leaf.dtype, jnp.inexact)
            narrow = entry.leaf.dtype.name if all(fitting) and is_floating else narrow
            for i, name in enumerate(names):
                if fitting[i] and not all(fitting):
                    continue
                source = sources[name]
                unread = f"{describe(state_dict[source])} without an array for NumPy"
                got = unread if given[i] is None else describe(given[i])
                origin = "" if source == name else f" (from {source!r})"
                expected = describe(None if wanted is None else wanted[i])
                wrong.append(f"{name}: expected {expected}, got {got}{origin}")
        if groups and len(members) == len(groups):
            array: Any = np.stack(members) if entry.lead else members[0]
            # Arrays of JAX are copies already.
            array = np.array(array) if isinstance(entry.leaf, np.ndarray) else array
            found[id(entry)] = as_kind_of(entry.leaf, array.reshape(entry.leaf.shape))
    # A tensor that is a part of two arrays here is reported once.
    return found, [*dict.fromkeys(wrong)], narrow


# ---- refusals


def _check_state_dict(where: str, state_dict: Any) -> None:
    expected = "a state dict: tensors by name"
    if not isinstance(state_dict, Mapping):
        got, hint = describe(state_dict), ()
        if hasattr(state_dict, "state_dict"):
            got = with_article(type(state_dict).__name__)
            hint = ("write", "from_torch(model, net.state_dict())")
        raise ArgumentError(where, expected, got, hint=hint)
    entries = cast("Mapping[Any, Any]", state_dict)
    names = [name for name in entries if not isinstance(name, str)]
    if names:
        raise ArgumentError(where, expected, f"the name {describe(names[0])}")
    if isinstance(state_dict, FileArrays):
        return
    inner = [name for name, value in entries.items() if isinstance(value, Mapping)]
    if inner:
        # People save {"epoch": 3, "model": state_dict, ...}.
        hint = ("Select that of the model:", f"state_dict = state_dict[{inner[0]!r}]")
        raise ArgumentError(where, expected, "dicts in a dict", at=inner, hint=hint)


def _hint_of_cast(state_dict: Mapping[str, Any], narrow: str) -> Sequence[str]:
    """Return a hint if a dtype is too small: only for floats, an integer would change its value."""
    if not narrow:
        return ()
    is_numpy = not any(hasattr(value, "detach") for value in state_dict.values())
    change = f"value.astype(jnp.{narrow})" if is_numpy else f"value.to(torch.{narrow})"
    return (
        f"A cast would lose numbers; if {narrow} is enough, cast them first:",
        f"state_dict = {{name: {change} for name, value in state_dict.items()}}",
    )
