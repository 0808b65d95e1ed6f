"""`filter_pure_callback` and `filter_io_callback`: Python on the host, from compiled code.

JAX hands arrays to the host and takes arrays back. Everything else, in the arguments and in the
result, is known when the program is traced: it is kept beside the program, and what the callback
returns must match it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import ArgumentError, StructureError, explain
from pytreemod.transform.agreeing import Slot, differences, is_number, same_static
from pytreemod.transform.wrapping import check_callable, function_name
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_array
from pytreemod.tree.snapshots import Structure, divide
from pytreemod.typing import PyTree, jtu, untyped_jax

_KINDS = (
    (bool, jnp.bool_),
    (int, jnp.number),
    (float, jnp.inexact),
    (complex, jnp.complexfloating),
)


class _Promise:
    """What a callback is to return: arrays of given shapes and dtypes, and the rest as it is."""

    def __init__(self, result_shape_dtypes: PyTree, where: str, is_batched: bool):
        self.where = where
        # A callback that JAX calls for a whole batch returns arrays with more axes in front.
        self.is_batched = is_batched
        leaves, treedef = jtu.tree_flatten(result_shape_dtypes)
        at = tuple(i for i, leaf in enumerate(leaves) if _is_abstract(leaf))
        self.types = [jax.ShapeDtypeStruct(leaves[i].shape, leaves[i].dtype) for i in at]
        statics = tuple(None if i in at else leaf for i, leaf in enumerate(leaves))
        self.structure = Structure(treedef, at, statics)
        self.tree = self.structure.assemble([Slot(aval) for aval in self.types])

    @property
    def structs(self) -> list[jax.ShapeDtypeStruct]:
        """The arrays as JAX takes them from the host."""
        return [_plain_struct(struct) for struct in self.types]

    def arrays_of(self, result: PyTree) -> list[Any]:
        """The arrays in what the callback returned.

        Raises:
            StructureError: it is not what was promised; all paths are named.
        """
        found = differences(self.tree, result, self._fits)
        if found:
            places = [
                f"{path_text(place.path, 'result')}: {got} for {promised}"
                for place in found
                for promised, got in [place.texts()]
            ]
            raise StructureError(
                explain(self.where, "what result_shape_dtypes says", "something else", places=places)
            )
        leaves = jtu.tree_leaves(result)
        kept = [leaves[i] for i in self.structure.positions or ()]
        return [_plain(x, aval.dtype) for x, aval in zip(kept, self.types, strict=True)]

    def result(self, arrays: Sequence[Any]) -> PyTree:
        """The result, with what came from the host."""
        avals = self.types
        return self.structure.assemble(
            [_typed(x, aval.dtype) for x, aval in zip(arrays, avals, strict=True)]
        )

    def _fits(self, promised: Any, got: Any) -> bool:
        if not isinstance(promised, Slot):
            return same_static(promised, got)
        aval = promised.aval
        if is_number(got):
            kind = next(kind for number, kind in _KINDS if type(got) is number)
            return aval.shape == () and bool(jnp.issubdtype(aval.dtype, kind))
        shape = got.shape[got.ndim - len(aval.shape) :] if self.is_batched else got.shape
        return shape == aval.shape and _canonical(got.dtype) == aval.dtype


def _is_abstract(leaf: Any) -> bool:
    return is_array(leaf) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))


def _is_key(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def _canonical(dtype: Any) -> Any:
    return dtype if _is_key(dtype) else untyped_jax.dtypes.canonicalize_dtype(dtype)


def _plain_struct(struct: jax.ShapeDtypeStruct) -> Any:
    return jax.eval_shape(jax.random.key_data, struct) if _is_key(struct.dtype) else struct


def _plain(value: Any, dtype: Any) -> Any:
    """A value for the way between device and host: keys travel as the numbers that they are."""
    return np.asarray(jax.random.key_data(value) if _is_key(dtype) else value, None)


def _typed(array: Any, dtype: Any) -> Any:
    """An array as it was before it travelled."""
    if not _is_key(dtype):
        return array
    like = jax.eval_shape(lambda: jax.random.key(0))
    del like
    return jax.random.wrap_key_data(array, impl=str(dtype))


class _HostCall:
    """What runs on the host: a callback with all its arguments put together again."""

    def __init__(self, inputs: Structure, dtypes: list[Any], promise: _Promise):
        self.inputs = inputs
        self.dtypes = dtypes
        self.promise = promise

    def __call__(self, arrays: list[Any]) -> list[Any]:
        typed = [_typed(x, dtype) for x, dtype in zip(arrays, self.dtypes, strict=True)]
        callback, args, kwargs = self.inputs.assemble(typed)
        return self.promise.arrays_of(callback(*args, **kwargs))
