"""`filter_pure_callback` and `filter_io_callback`: Python on the host, from compiled code.

JAX passes arrays to the host and gets arrays back. Everything else, in the arguments and in the
result, is known when the program is traced. It is stored with the program, and the result of the
callback must match it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import ArgumentError, StructureError
from pytreemod.transform.boundary.sowing import closed, is_collecting
from pytreemod.transform.boundary.wrapping import check_callable, function_name
from pytreemod.tree.differences import (
    Slot,
    compare,
    is_number,
)
from pytreemod.tree.kinds import are_one
from pytreemod.tree.predicates import is_array
from pytreemod.tree.snapshots import Structure, divide, structure_of
from pytreemod.typing import PyTree, jtu, untyped_jax

_KINDS = (
    (bool, jnp.bool_),
    (int, jnp.number),
    (float, jnp.inexact),
    (complex, jnp.complexfloating),
)


class _Promise:
    """The result that a callback must return: types of arrays, and static values."""

    def __init__(self, result_shape_dtypes: PyTree, where: str, is_batched: bool):
        self.where = where
        # A callback that JAX calls for a whole batch returns arrays with more leading axes.
        self.is_batched = is_batched
        found, self.structure = divide(result_shape_dtypes, _is_promise)
        self.types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in found]
        self.tree = self.structure.assemble([Slot(aval) for aval in self.types])
        self.impls = [_impl_of(aval) for aval in self.types]
        # Equal for equal promises; batching is in the program's key already.
        self.key = _divide(self.structure.assemble(self.types))[1]

    @property
    def structs(self) -> list[Any]:
        """The types of the arrays as JAX takes them from the host."""
        return [_plain_struct(aval) for aval in self.types]

    def arrays_of(self, result: PyTree) -> list[Any]:
        """Return the arrays in the result of the callback.

        Raises:
            StructureError: if it is not as promised; the error names all paths.
        """
        found = compare(self.tree, result, self._fits)
        if found:
            places = [each.line("result", "{1} instead of {0}") for each in found]
            expected = "a result as in result_shape_dtypes"
            raise StructureError(self.where, expected, "another result", at=places)
        leaves = jtu.tree_leaves(result)
        # By position, because a Python number may replace a promised array.
        promised = [leaves[i] for i in self.structure.positions or ()]
        return [
            np.asarray(jax.random.key_data(x) if impl else x, None if impl else aval.dtype)
            for x, impl, aval in zip(promised, self.impls, self.types, strict=True)
        ]

    def result(self, arrays: Sequence[Any]) -> PyTree:
        """Return the result, with arrays from the host."""
        return self.structure.assemble(list(map(_typed, arrays, self.impls)))

    def _fits(self, promised: Any, got: Any) -> bool:
        if not isinstance(promised, Slot):
            return are_one(promised, got)
        aval = promised.aval
        if is_number(got):
            kind = next(kind for number, kind in _KINDS if type(got) is number)
            return aval.shape == () and bool(jnp.issubdtype(aval.dtype, kind))
        # Only JAX knows how many axes the batch adds, so the last axes are compared.
        shape = got.shape[max(got.ndim - len(aval.shape), 0) :] if self.is_batched else got.shape
        return shape == aval.shape and _canonical(got.dtype) == aval.dtype


def _divide(tree: PyTree) -> tuple[list[Any], Structure]:
    """The arrays in a tree, and the rest: the same object for equal trees, if it can be hashed."""
    try:
        return structure_of(*jtu.tree_flatten(tree))
    except TypeError:
        return divide(tree)


def _is_promise(leaf: Any) -> bool:
    return is_array(leaf) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))


def _canonical(dtype: Any) -> Any:
    # The host computes in 64 bits where JAX does not.
    return dtype if _is_key(dtype) else untyped_jax.dtypes.canonicalize_dtype(dtype)


# Keys are passed as the numbers they are made of.


def _is_key(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def _impl_of(array: Any) -> Any:
    """Return the implementation of an array of keys; None for other arrays."""
    if not _is_key(array.dtype):
        return None
    # From inside a trace, because a struct has no implementation.
    found: list[Any] = []

    def look(key: Any) -> None:
        found.append(jax.random.key_impl(key))

    jax.eval_shape(look, jax.ShapeDtypeStruct(array.shape, array.dtype))
    return found[0]


def _plain_struct(struct: Any) -> Any:
    return jax.eval_shape(jax.random.key_data, struct) if _is_key(struct.dtype) else struct


def _typed(array: Any, impl: Any) -> Any:
    return array if impl is None else untyped_jax.random.wrap_key_data(array, impl=impl)


class _HostCall:
    """A callback with all its arguments except the arrays: the function for the host.

    The program stores it while the program itself is cached, so it has no arrays. Equal calls are
    equal. Outside `jit`, JAX then reuses its program: 0.1 ms instead of 15 ms, and the megabyte,
    for compiling another.
    """

    def __init__(self, inputs: Structure, impls: list[Any], promise: _Promise):
        self.inputs, self.impls, self.promise = inputs, impls, promise
        # The host may use another thread, at any time, so nothing can be captured there.
        self.surroundings = closed if is_collecting() else nullcontext
        self.key = (inputs, tuple(impls), promise.key, self.surroundings)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _HostCall) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @classmethod
    def of(
        cls, callback: Any, args: tuple[Any, ...], kwargs: dict[str, Any], promise: _Promise
    ) -> tuple[_HostCall, list[Any]]:
        """Return the call, and its arrays as JAX takes them to the host."""
        arrays, inputs = _divide((callback, args, kwargs))
        impls = [_impl_of(array) for array in arrays]
        operands = [
            array if impl is None else jax.random.key_data(array)
            for array, impl in zip(arrays, impls, strict=True)
        ]
        return cls(inputs, impls, promise), operands

    def __call__(self, arrays: list[Any]) -> list[Any]:
        callback, args, kwargs = self.inputs.assemble(list(map(_typed, arrays, self.impls)))
        with self.surroundings():
            return self.promise.arrays_of(callback(*args, **kwargs))


def filter_pure_callback(
    callback: Callable[..., Any],
    *args: Any,
    result_shape_dtypes: PyTree,
    sharding: jax.sharding.Sharding | None = None,
    vmap_method: str | None = None,
    vectorized: bool | None = None,
    **kwargs: Any,
) -> PyTree:
    """`jax.pure_callback` with any trees: call a Python function on the host from compiled code.

    The function must be pure: JAX may call it more than once, or not at all.

    **Law.** `filter_jit(filter_pure_callback)(f, *args, result_shape_dtypes=s)` equals `f(*args)`.

    Args:
        callback: the function. It gets JAX arrays where you pass arrays, and everything else
            unchanged.
        *args: its arguments, of any trees.
        result_shape_dtypes: its result, with a `jax.ShapeDtypeStruct` (or an array) for each array.
            The callback must return the other leaves of this tree unchanged.
        sharding: the sharding from which the callback is called.
        vmap_method: how `jax.vmap` treats it: `"sequential"`, `"expand_dims"`, ...; see
            `jax.pure_callback`.
        vectorized: an older spelling: True for `vmap_method="legacy_vectorized"`, False for
            `"sequential"`.
        **kwargs: its arguments by keyword.

    Returns:
        The tree `result_shape_dtypes` with arrays.

    Raises:
        ArgumentError: if `callback` is not callable, or both `vmap_method` and `vectorized` are
            passed.
        StructureError: if the callback returns anything else; the error names all paths. It is
            raised on the host, so it appears as a `jax.errors.JaxRuntimeError` with this message.

    Examples:
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> import pytreemod as pm
        >>> @pm.filter_jit
        ... def sort(x, order):
        ...     def on_host(x, order):
        ...         return np.sort(x)[:: -1 if order == "falling" else 1], order
        ...     struct = jax.ShapeDtypeStruct(x.shape, x.dtype)
        ...     return filter_pure_callback(
        ...         on_host, x, order, result_shape_dtypes=(struct, order)
        ...     )
        >>> sort(jnp.asarray([1.0, 3.0, 2.0]), "falling")
        (Array([3., 2., 1.], dtype=float32), 'falling')
    """
    check_callable("filter_pure_callback", callback, "callback")
    if vectorized is not None:
        if vmap_method is not None:
            both = "vmap_method= or vectorized="
            raise ArgumentError("filter_pure_callback", both, "both")
        vmap_method = "legacy_vectorized" if vectorized else "sequential"
    where = f"filter_pure_callback of {function_name(callback)}"
    is_batched = vmap_method in ("expand_dims", "broadcast_all", "legacy_vectorized")
    promise = _Promise(result_shape_dtypes, where, is_batched)
    call, operands = _HostCall.of(callback, args, kwargs, promise)
    arrays = jax.pure_callback(
        call, promise.structs, operands, sharding=sharding, vmap_method=vmap_method
    )
    return promise.result(arrays)


def filter_io_callback(
    callback: Callable[..., Any],
    *args: Any,
    result_shape_dtypes: PyTree = None,
    sharding: jax.sharding.Sharding | None = None,
    ordered: bool = False,
    **kwargs: Any,
) -> PyTree:
    """`jax.experimental.io_callback` with any trees: like `filter_pure_callback`, with effects.

    JAX calls the function each time that the program reaches it.

    Args:
        callback: the function.
        *args: its arguments, of any trees.
        result_shape_dtypes: its result; see
            [`filter_pure_callback`][pytreemod.filter_pure_callback]. By default None.
        sharding: the sharding from which the callback is called.
        ordered: whether calls happen in the order of the program. Not together with `jax.vmap`.
        **kwargs: its arguments by keyword.

    Returns:
        The tree `result_shape_dtypes` with arrays.

    Raises:
        ArgumentError: if `callback` is not callable.
        StructureError: if the callback returns anything else; the error names all paths. It is
            raised on the host, so it appears as a `jax.errors.JaxRuntimeError` with this message.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> seen = []
        >>> @pm.filter_jit
        ... def double(x, name):
        ...     filter_io_callback(lambda x, name: seen.append((name, float(x))), x, name)
        ...     return 2 * x
        >>> y = double(jnp.asarray(1.0), "x")
        >>> jax.effects_barrier()
        >>> seen
        [('x', 1.0)]
    """
    check_callable("filter_io_callback", callback, "callback")
    # Imported here, because few programs need it, and the import takes time.
    from jax.experimental import io_callback

    where = f"filter_io_callback of {function_name(callback)}"
    promise = _Promise(result_shape_dtypes, where, is_batched=False)
    call, operands = _HostCall.of(callback, args, kwargs, promise)
    arrays = io_callback(call, promise.structs, operands, sharding=sharding, ordered=ordered)
    return promise.result(arrays)
