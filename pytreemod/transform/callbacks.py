"""`filter_pure_callback` and `filter_io_callback`: Python on the host, from compiled code.

JAX passes arrays to the host and gets arrays back. Everything else, in the arguments and in the
result, is known when the program is traced. It is stored with the program, and the result of the
callback must match it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import StructureError
from pytreemod.transform.arguments import function_name
from pytreemod.transform.tracebacks import with_short_errors
from pytreemod.transform.wrapping import check_callable
from pytreemod.tree.comparison import compare, is_type
from pytreemod.tree.predicates import is_abstract, same_static
from pytreemod.tree.snapshots import Structure, divide
from pytreemod.typing import PyTree, class_of, untyped_jax


class _HostCall:
    """A callback with all its arguments except the arrays: the function for the host.

    Equal calls are equal. Outside `jit`, JAX then reuses its program: 0.1 ms instead of 15.
    """

    def __init__(self, call: Structure, promise: Structure, structs: list[Any], where: str):
        self.call, self.promise, self.structs, self.where = call, promise, structs, where
        try:
            self.key: Any = (call.key, promise.key, tuple(map(repr, structs)))
            hash(self.key)
        except TypeError:
            self.key = object()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _HostCall) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __call__(self, arrays: list[Any]) -> list[Any]:
        callback, args, kwargs = self.call.assemble(arrays)
        result = callback(*args, **kwargs)
        expected = self.promise.assemble(self.structs)
        found = compare(expected, result, _fits)
        if found:
            at = [each.line("result", "{1} instead of {0}") for each in found]
            raise StructureError(f"{self.where}: the result is not as promised", at=at)
        # By position: a Python number may be in the place of a promised array.
        leaves = jax.tree.leaves(result)
        values = [leaves[i] for i in self.promise.positions or ()]
        return [np.asarray(x, s.dtype) for x, s in zip(values, self.structs, strict=True)]


def _fits(promised: Any, got: Any) -> bool:
    if not is_type(promised):
        return same_static(promised, got)
    shape = jnp.shape(got)
    # A callback that JAX calls for a whole batch returns arrays with more leading axes.
    more = len(shape) - len(promised.shape)
    same_shape = more >= 0 and shape[more:] == promised.shape
    if hasattr(got, "dtype"):
        return same_shape and _canonical(got.dtype) == promised.dtype
    # A Python number may be in the place of an array of its kind.
    return same_shape and bool(jnp.issubdtype(promised.dtype, _KINDS.get(class_of(got), jnp.bool_)))


_KINDS: dict[type, Any] = {
    bool: jnp.bool_,
    int: jnp.number,
    float: jnp.inexact,
    complex: jnp.complexfloating,
}


def _canonical(dtype: Any) -> Any:
    # The host computes in 64 bits where JAX does not.
    return untyped_jax.dtypes.canonicalize_dtype(dtype)


def _call_host(
    name: str,
    transform: Any,
    callback: Any,
    args: Any,
    kwargs: Any,
    promised: PyTree,
    **options: Any,
) -> PyTree:
    check_callable(name, callback, "callback")
    arrays, call = divide((callback, args, kwargs))
    found, promise = divide(promised, is_abstract)
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in found]
    host = _HostCall(call, promise, structs, f"{name} of {function_name(callback)}")
    return promise.assemble(transform(host, structs, arrays, **options))


@with_short_errors
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
        ArgumentError: if `callback` is not callable.
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
    if vectorized is not None:
        vmap_method = "legacy_vectorized" if vectorized else "sequential"
    options = {"sharding": sharding, "vmap_method": vmap_method}
    where, transform = "filter_pure_callback", jax.pure_callback
    return _call_host(where, transform, callback, args, kwargs, result_shape_dtypes, **options)


@with_short_errors
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
    # Imported here, because few programs need it, and the import takes time.
    from jax.experimental import io_callback

    options = {"sharding": sharding, "ordered": ordered}
    where = "filter_io_callback"
    return _call_host(where, io_callback, callback, args, kwargs, result_shape_dtypes, **options)
