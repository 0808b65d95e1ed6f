"""Comparing trees, and opening one level of one."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import StructureError
from pytreemod.tree.predicates import is_array
from pytreemod.typing import PyTree, Tracer, jtu


def tree_equal(
    *pytrees: PyTree, typematch: bool = False, rtol: int | float = 0.0, atol: int | float = 0.0
) -> bool | jax.Array:
    """Whether trees are equal: structure, configuration, and leaf by leaf type, shape and value.

    Args:
        *pytrees: two or more trees.
        typematch: whether equal values of different types are different: a NumPy array and a JAX
            array, `1` and `1.0`.
        rtol: relative tolerance for floating arrays.
        atol: absolute tolerance for floating arrays.

    Returns:
        A bool if no JAX arrays were compared. Otherwise a scalar bool array, so that `~` negates
        it; under a trace a traced one: there, even constants are compared when the program runs.

    Examples:
        >>> tree_equal({"a": jnp.ones(2)}, {"a": jnp.ones(2)})
        Array(True, dtype=bool)
        >>> tree_equal([1, "a"], [1, "b"])
        False
    """
    pairs = _pairs(pytrees, typematch)
    same = pairs is not None and _all_equal(pairs, rtol, atol)
    has_jax = any(isinstance(leaf, jax.Array) for pair in pairs or () for leaf in pair)
    return jnp.asarray(same) if has_jax else bool(same)


def are_equal(one: PyTree, two: PyTree) -> bool:
    """Whether two trees are equal, as a concrete bool, for `==`."""
    pairs = _pairs((one, two), False)
    return pairs is not None and bool(_all_equal(pairs, 0.0, 0.0))


def _pairs(pytrees: tuple[PyTree, ...], typematch: bool) -> list[tuple[Any, Any]] | None:
    """Return the arrays whose values decide; None if the trees differ in anything else."""
    found: list[tuple[Any, Any]] = []
    first, *others = [jtu.tree_flatten(tree) for tree in pytrees]
    for leaves, treedef in others:
        if treedef != first[1]:
            return None
        for x, y in zip(first[0], leaves, strict=True):
            if not _is_alike(x, y, typematch):
                return None
            found += [(x, y)] if is_array(x) else []
    return found


def _is_alike(x: Any, y: Any, typematch: bool) -> bool:
    """Whether two leaves are equal, apart from the values of arrays."""
    if typematch and _family(x) is not _family(y):
        return False
    if is_array(x) and is_array(y):
        return x.shape == y.shape and x.dtype == y.dtype
    return is_array(x) is is_array(y) and (x is y or bool(x == y))


def _family(x: object) -> type:
    return jax.Array if isinstance(x, jax.Array) else type(x)


def _all_equal(pairs: list[tuple[Any, Any]], rtol: float, atol: float) -> Any:
    same: Any = True
    for x, y in pairs:
        # Tangents of integers have a shape but no values.
        if x.dtype == jax.dtypes.float0:
            continue
        is_traced = isinstance(x, Tracer) or isinstance(y, Tracer)
        # Concrete keys stay concrete under a trace.
        with contextlib.nullcontext() if is_traced else jax.ensure_compile_time_eval():
            x, y = _numbers(x), _numbers(y)
        # NumPy where values are concrete: it has nothing to compile.
        numpy: Any = jnp if is_traced else np
        is_near = (rtol or atol) and jnp.issubdtype(x.dtype, jnp.inexact)
        equal = numpy.isclose(x, y, rtol=rtol, atol=atol) if is_near else numpy.equal(x, y)
        same = numpy.all(equal) & same
    return same


def largest_difference(a: Any, b: Any) -> tuple[float, float, int, int] | None:
    """Return how far two arrays of one shape and dtype are apart, computed on the host.

    Args:
        a: an array, of JAX or NumPy.
        b: another.

    Returns:
        The largest difference; its ratio to the largest number of `a`; how many numbers differ;
        and how many there are. NaN equals NaN. None if the arrays are equal.

    Examples:
        >>> largest_difference(np.array([1.0, 2.0]), np.array([1.0, 2.5]))
        (0.5, 0.25, 1, 2)
    """
    x, y = np.asarray(_numbers(a)), np.asarray(_numbers(b))
    differ = (x != y) & ~((x != x) & (y != y))
    count = int(np.count_nonzero(differ))
    if not count:
        return None
    # Half precision cannot represent the differences of its own numbers.
    wide = np.complex128 if x.dtype.kind == "c" else np.float64
    x, y = x.astype(wide), y.astype(wide)
    with np.errstate(all="ignore"):
        largest = float(np.max(np.abs(x - y)[differ]))
        scale = float(np.max(np.abs(x), initial=0, where=np.isfinite(x)))
    return largest, largest / scale if scale else float("inf"), count, x.size


def _numbers(array: Any) -> Any:
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(array) if is_key else array


def tree_flatten_one_level(pytree: PyTree) -> tuple[list[PyTree], Any]:
    """Return the immediate children of a node, and the structure that rebuilds the node from them.

    Args:
        pytree: a node, or a leaf (whose only child is itself).

    Returns:
        The children, and a `PyTreeDef` that has them as leaves.

    Raises:
        StructureError: if the node is its own child.

    Examples:
        >>> tree_flatten_one_level([1, (2, 3)])[0]
        [1, (2, 3)]
    """
    seen: list[Any] = []

    def stop(node: Any) -> bool:
        if node is not pytree:
            return True
        # JAX visits the root first. A second visit means that the root is inside itself.
        if seen:
            raise StructureError("tree_flatten_one_level: a node contains itself")
        seen.append(node)
        return False

    return jtu.tree_flatten(pytree, is_leaf=stop)
