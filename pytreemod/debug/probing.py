"""Functions that return their argument, and report the operations on it.

Put them into a program while you look for a bug, as a `print`.
"""

from __future__ import annotations

import functools as ft
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from pytreemod.errors import ArgumentError, describe
from pytreemod.transform.runtime_checks import error_if
from pytreemod.tree.partitioning import combine, partition
from pytreemod.tree.predicates import is_array, is_inexact_array
from pytreemod.tree.printing import tree_pformat
from pytreemod.tree.traces import watched
from pytreemod.typing import jtu

_T = TypeVar("_T")


def announce_transform(
    x: _T,
    name: str | None = None,
    intermediates: bool = False,
    announce: Callable[[str], Any] = print,
) -> _T:
    """Return a tree, and announce each JAX transform that is applied to it.

    A line has the transforms, outermost first, and the final operation: `vmap:impl` for an
    eager call under `jax.vmap`; `jvp_p` is the primal and `jvp_t` the tangent part of a derivative;
    `abstract` is tracing, and `mlir` lowering into a compiled program.

    Args:
        x: any tree; its arrays are watched.
        name: a prefix for the lines.
        intermediates: whether to announce transforms before the final operation as well.
        announce: the function that prints.

    Returns:
        `x`.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import pytreemod as pm
        >>> y = jax.jit(jax.vmap(pm.debug.announce_transform))(jnp.ones(3))
        vmap:abstract
        vmap:mlir
    """
    return _with_watched(x, _Announcing(name, intermediates, announce))


@dataclass(frozen=True)
class _Announcing:
    """Compared by its fields, so that JAX does not evaluate the same thing twice.

    Not a tuple: JAX 0.8 makes weak references to it.
    """

    name: str | None
    intermediates: bool
    announce: Callable[[str], Any]

    def __call__(self, steps: tuple[str, ...], is_end: bool) -> None:
        if is_end or self.intermediates:
            start = "" if self.name is None else f"({self.name}) "
            self.announce(start + ":".join(steps))


def _with_watched(x: Any, report: Callable[[tuple[str, ...], bool], object]) -> Any:
    arrays, rest = partition(x, is_array)
    leaves, treedef = jtu.tree_flatten(arrays)
    return combine(treedef.unflatten(watched(leaves, report)), rest)


def backward_nan(x: _T, name: str | None = None, terminate: bool = True) -> _T:
    """Return a tree; print it and its cotangent in the backward pass, and stop at a NaN.

    Args:
        x: any tree; its floating arrays are checked.
        name: a title for the output.
        terminate: whether a NaN in the cotangent is an error, as
            [`error_if`][pytreemod.error_if] raises it.

    Returns:
        `x`.

    Raises:
        CheckError: in the backward pass: if a cotangent has a NaN.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import pytreemod as pm
        >>> def f(x):
        ...     return jnp.sqrt(pm.debug.backward_nan(x, name="here"))
        >>> y = jax.grad(f)(4.0)
        here:
           primals=Array(4., dtype=float32, weak_type=True)
        cotangents=Array(0.25, dtype=float32, weak_type=True)
    """
    floating, rest = partition(x, is_inexact_array)
    return combine(_backward_nan(name, terminate, floating), rest)


@ft.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _backward_nan(name: str | None, terminate: bool, x: Any) -> Any:
    return x


def _forward(name: str | None, terminate: bool, x: Any) -> tuple[Any, Any]:
    return x, x


def _backward(name: str | None, terminate: bool, x: Any, cotangents: Any) -> tuple[Any]:
    def show(x: Any, cotangents: Any) -> None:
        title = "" if name is None else f"{name}:\n"
        texts = (tree_pformat(tree, short_arrays=False) for tree in (x, cotangents))
        print("{}   primals={}\ncotangents={}".format(title, *texts))

    jax.debug.callback(show, x, cotangents, ordered=False)
    if terminate:
        flags = [jnp.isnan(leaf).any() for leaf in jtu.tree_leaves(cotangents)]
        bad = jnp.stack(flags).any() if flags else False
        cotangents = error_if(cotangents, bad, "backward_nan: a cotangent has a NaN")
    return (cotangents,)


_backward_nan.defvjp(_forward, _backward)


def breakpoint_if(pred: Any, **kwargs: Any) -> None:
    """`jax.debug.breakpoint` if a condition is true; in compiled code, too.

    Under JAX 0.8.0, `jax.jit` drops it. Newer releases reach it.

    Args:
        pred: a boolean array; any true element counts.
        **kwargs: for `jax.debug.breakpoint`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> pm.debug.breakpoint_if(jnp.isnan(jnp.ones(3)))
    """

    def stop() -> None:
        jax.debug.breakpoint(**kwargs)

    # Under a map the condition is that of the whole batch: it must not become a selection.
    @custom_vmap
    def stop_if(pred: Any) -> Any:
        jax.lax.cond(jnp.any(pred), stop, lambda: None)
        return jnp.zeros(())

    @stop_if.def_vmap
    def _(axis_size: int, in_batched: list[bool], pred: Any) -> tuple[Any, bool]:
        return stop_if(pred), False

    stop_if(jax.lax.stop_gradient(pred))


# ---- dead code


class _Entry(NamedTuple):
    """One call of `store_dce`."""

    name: Hashable
    treedef: Any
    rest: Any
    texts: tuple[Any, ...]
    is_alive: list[bool]


_entries: list[_Entry] = []
_entries_lock = threading.Lock()


def store_dce(x: _T, name: Hashable = None) -> _T:
    """Return a tree, and record which of its arrays a compiled program needs.

    XLA removes computations that nothing depends on (dead code elimination, "DCE"). Put this into a
    jitted function, call that, and call [`inspect_dce`][pytreemod.debug.inspect_dce].

    Args:
        x: any tree; its arrays are watched.
        name: what distinguishes this call from others.

    Returns:
        `x`.

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> @jax.jit
        ... def f(x):
        ...     a, _ = pm.debug.store_dce((x**2, x + 1), name="example")
        ...     return a
        >>> y = f(1)
        >>> pm.debug.inspect_dce("example")
        Found 1 call to `store_dce`.
        Entry 0:
        (i32[], <DCE'd>)
    """
    try:
        hash(name)
    except TypeError as error:
        raise ArgumentError("store_dce(name)", "a value with a hash", describe(name)) from error
    arrays, rest = partition(x, is_array)
    leaves, treedef = jtu.tree_flatten(arrays)
    if not leaves:
        return x
    is_alive = [False] * len(leaves)
    structs = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
    with _entries_lock:
        _entries.append(_Entry(name, treedef, rest, structs, is_alive))
    # Each by itself: if one result of a primitive is needed, all of its inputs are.
    alive = [watched([leaf], _Alive(is_alive, i))[0] for i, leaf in enumerate(leaves)]
    return combine(treedef.unflatten(alive), rest)


class _Alive:
    """Records that a value is part of a program, or was computed."""

    def __init__(self, is_alive: list[bool], index: int):
        self.is_alive, self.index = is_alive, index

    def __call__(self, steps: tuple[str, ...], is_end: bool) -> None:
        """Record it."""
        if steps[-1] in ("mlir", "impl"):
            self.is_alive[self.index] = True


class _Dead:
    def __repr__(self) -> str:
        return "<DCE'd>"


def inspect_dce(name: Hashable = None) -> None:
    """Print the records of [`store_dce`][pytreemod.debug.store_dce].

    Args:
        name: the name of the calls; None for those without a name.

    Examples:
        See [`store_dce`][pytreemod.debug.store_dce].
    """
    with _entries_lock:
        found = [entry for entry in _entries if entry.name == name]
    print(f"Found {len(found)} call{'s' * (len(found) != 1)} to `store_dce`.")
    for number, entry in enumerate(found):
        pairs = zip(entry.texts, entry.is_alive, strict=True)
        leaves = [struct if is_alive else _Dead() for struct, is_alive in pairs]
        tree = combine(entry.treedef.unflatten(leaves), entry.rest)
        print(f"Entry {number}:\n{tree_pformat(tree, struct_as_array=True)}")
