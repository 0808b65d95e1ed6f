"""Names for classes and functions that a file may name: which one a name stands for, and back.

A file holds names only. What a name stands for is looked up in tables that this process has filled,
and nowhere else: no file can make anything be imported. From the start they have the library's own
layers, and the functions that layers are given: those of `jax.nn`, and what JAX applies to each
element; and Python's types for numbers, texts and containers.
"""

from __future__ import annotations

import functools as ft
import threading
from collections.abc import Callable
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
from jax import lax

from pytreemod import nn
from pytreemod.errors import ArgumentError, describe
from pytreemod.module.classes import Module
from pytreemod.module.computed_leaves import Function
from pytreemod.module.constrained_leaves import Constrained
from pytreemod.module.partials import Partial
from pytreemod.module.ties import Through, Tied
from pytreemod.nn import functional
from pytreemod.nn.mlp import identity
from pytreemod.nn.recurrent import concatenate
from pytreemod.state.streams import Stream
from pytreemod.state.tokens import Nothing, RngStream, StateIndex
from pytreemod.training.constraints import KINDS
from pytreemod.training.dtype_policies import Precision
from pytreemod.training.loss_scaling import LossScale
from pytreemod.training.low_rank import LowRank
from pytreemod.transform.host.enumerations import EnumerationItem

_T = TypeVar("_T", bound="type | Callable[..., Any]")

_OWN = "pytreemod"
_ELEMENTWISE = (
    "abs absolute arccos arccosh arcsin arcsinh arctan arctanh cbrt ceil clip cos cosh exp exp2 "
    "expm1 floor log log10 log1p log2 logaddexp maximum mean minimum negative rint round sign sin "
    "sinc sinh sqrt square sum tan tanh add subtract multiply divide power max min prod"
)
# Through these, one array is tied to another.
_OF_SHAPES = (
    "broadcast_to concatenate expand_dims flip matrix_transpose moveaxis permute_dims ravel repeat "
    "reshape roll squeeze stack swapaxes tile transpose tril triu"
)
_OF_LAX = "abs add cos erf exp integer_pow log logistic max min mul neg rsqrt sin sqrt sub tanh"
_POLICIES = (
    "checkpoint_dots checkpoint_dots_with_no_batch_dims dots_saveable "
    "dots_with_no_batch_dims_saveable everything_saveable nothing_saveable"
)


class _Names:
    """What has a name, both ways."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.things: dict[str, Any] = {}
        # By id, for not all of them can be hashed; the other table keeps them alive.
        self.names: dict[int, str] = {}

    def add(self, name: str, thing: Any) -> None:
        """Name something; what has a name keeps that, and can be found by both."""
        with self.lock:
            self.things[name] = thing
            self.names.setdefault(id(thing), name)

    def rename(self, name: str, thing: Any) -> None:
        """Name something, and take the name from what had it."""
        with self.lock:
            old = self.things.get(name)
            if old is not None and self.names.get(id(old)) == name:
                del self.names[id(old)]
            self.things[name] = thing
            self.names[id(thing)] = name


def _add_all(table: _Names, prefix: str, room: Any, names: str | list[str]) -> None:
    for name in names.split() if isinstance(names, str) else names:
        # Older versions of JAX lack some.
        if hasattr(room, name):
            table.add(f"{prefix}.{name}", getattr(room, name))


@ft.cache
def _table() -> _Names:
    """The tables, made when a file is first written or read."""
    table = _Names()
    for builtin in (bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple):
        table.add(builtin.__name__, builtin)
    for kind in (EnumerationItem, Nothing, Partial, RngStream, StateIndex, Stream, Tied):
        table.add(f"{_OWN}.{kind.__name__}", kind)
    table.add(f"{_OWN}.LossScale", LossScale)
    table.add(f"{_OWN}.Precision", Precision)
    table.add(f"{_OWN}.computed", Function)
    table.add(f"{_OWN}.tie", Through)
    table.add(f"{_OWN}.lora", LowRank)
    for name, thing in vars(nn).items():
        if isinstance(thing, type) and issubclass(thing, Module):
            table.add(f"{_OWN}.nn.{name}", thing)
    table.add(f"{_OWN}.Constrained", Constrained)
    for name, thing in KINDS.items():
        table.add(f"{_OWN}.constraints.{name}", thing)
    # A default that has no public name.
    table.add(f"{_OWN}.nn.identity", identity)
    table.add(f"{_OWN}.nn.concatenate", concatenate)
    formulas = [n for n, f in vars(functional).items() if n[0] != "_" and callable(f)]
    _add_all(table, f"{_OWN}.nn.functional", functional, formulas)
    activations = [n for n, f in vars(jax.nn).items() if n[0] != "_" and callable(f)]
    _add_all(table, "jax.nn", jax.nn, activations)
    _add_all(table, "jax.numpy", jnp, f"{_ELEMENTWISE} {_OF_SHAPES}")
    _add_all(table, "jax.lax", lax, _OF_LAX)
    _add_all(table, "jax.checkpoint_policies", jax.checkpoint_policies, _POLICIES)
    return table


def registered_name(thing: Any) -> str | None:
    """The name that files have for a class or a function; None if it was given none."""
    # A class that was made for some instances is told as the one that it passes for.
    return _table().names.get(id(getattr(thing, "__passes_for__", thing)))


def registered_as(name: str) -> Any:
    """What a name in a file stands for; None if nothing was registered so."""
    return _table().things.get(name)


@overload
def register_for_files(thing: _T, *, name: str | None = None) -> _T: ...
@overload
def register_for_files(*, name: str | None = None) -> Callable[[_T], _T]: ...
def register_for_files(thing: Any = None, *, name: str | None = None) -> Any:
    """Let a file name a class or a function, so that `pm.load(path)` can rebuild what has it.

    Only [`load`][pytreemod.load] without `like` needs it. The library's layers, `jax.nn`'s
    functions and those of `jax.numpy` that work on each element, or on shapes, are registered
    already, and so are Python's own types, such as `float` and `list`.

    **Laws.** For a tree `t` whose classes and functions are registered, `save(path, t)` followed by
    `load(path)` gives `t`. What a file names, and nobody registered, is refused: nothing is
    imported because a file says so.

    Args:
        thing: a Module class, a named tuple, a dataclass, an enum; or a function. Returned as it
            is, so that this can stand as a decorator.
        name: what files call it: its own name if None. It should stay the same for as long as the
            files are to be read, wherever the class moves to.

    Returns:
        `thing`; without it, a decorator.

    Raises:
        ArgumentError: `thing` is no class and no function, or the name is none, or belongs to
            another.

    Examples:
        >>> import pytreemod as pm
        >>> @pm.register_for_files
        ... class Affine(pm.Module):
        ...     slope: float
        >>> pm.save("affine.safetensors", Affine(2.0))
        >>> pm.load("affine.safetensors")
        Affine(slope=2.0)
    """
    if thing is None:
        return ft.partial(register_for_files, name=name)
    where = "register_for_files(thing)"
    if not callable(thing):
        expected = "a class or a function"
        raise ArgumentError(where, expected, describe(thing))
    if name is None:
        name = own_name(thing)
        if name is None or name == "<lambda>":
            hint = ["give it a name:", 'pm.register_for_files(f, name="my_function")']
            raise ArgumentError(where, "something with a name", describe(thing), hint=hint)
    _check_name(where, name, thing)
    _table().rename(name, thing)
    return thing


def own_name(thing: Any) -> str | None:
    """The name that a class or a function has in Python; None if it has none."""
    name = getattr(thing, "__qualname__", getattr(thing, "__name__", None))
    return name.rpartition("<locals>.")[2] if isinstance(name, str) else None


def _check_name(where: str, name: Any, thing: Any) -> None:
    if not isinstance(name, str) or not name.strip():
        expected = "a text that is not empty"
        raise ArgumentError("register_for_files(name)", expected, describe(name))
    hint = ["choose another:", 'pm.register_for_files(thing, name="project.Name")']
    if name.partition(".")[0] in (_OWN, "jax") or name.startswith("?"):
        expected = "a name that is not the library's or JAX's own"
        raise ArgumentError(where, expected, repr(name), hint=hint)
    old = registered_as(name)
    if old is not None and old is not thing and not _is_again(old, thing):
        text = f"{name!r}, which stands for {'.'.join(_source_of(old))}"
        raise ArgumentError(where, "a name that is free", text, hint=hint)


def _is_again(old: Any, thing: Any) -> bool:
    """Whether one is the other, defined again: as by a cell of a notebook that is run twice."""
    name = own_name(thing)
    if name is None or type(old) is not type(thing) or _source_of(old) != _source_of(thing):
        return False
    # Lambdas are all called the same.
    codes = [getattr(function, "__code__", function) for function in (old, thing)]
    return not name.endswith("<lambda>") or codes[0] == codes[1]


def _source_of(thing: Any) -> tuple[str, str]:
    return str(getattr(thing, "__module__", "?")), str(getattr(thing, "__qualname__", "?"))
