"""Comparing trees, checking them for shared nodes, and opening one level."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import StructureError
from pytreemod.tree.nodes import children_of, locations
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_array, is_inexact_array
from pytreemod.tree.sharing import places_of_shared
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
    return _compare(pytrees, typematch, rtol, atol, is_array_wanted=True)


def are_equal(one: PyTree, two: PyTree) -> bool:
    """Whether two trees are equal, as a concrete bool, for `==`."""
    return bool(_compare((one, two), False, 0.0, 0.0, is_array_wanted=False))


def _compare(
    pytrees: tuple[PyTree, ...],
    typematch: bool,
    rtol: int | float,
    atol: int | float,
    *,
    is_array_wanted: bool,
) -> bool | jax.Array:
    first, *others = [jtu.tree_flatten(tree) for tree in pytrees]
    result: bool | jax.Array = True
    for leaves, treedef in others:
        if treedef != first[1]:
            return False
        for x, y in zip(first[0], leaves, strict=True):
            if not _is_alike(x, y, typematch):
                return False
            if not is_array(x):
                continue
            if is_array_wanted and result is True and _is_jax(x, y):
                # Under a trace the result is traced.
                result = jnp.asarray(True)
            is_traced = any(isinstance(array, Tracer) for array in (x, y, result))
            # Use NumPy where values are concrete: it has nothing to compile.
            same = _values_equal(x, y, rtol, atol, jnp if is_traced else np)
            if is_traced:
                result = jnp.logical_and(result, same)
            elif not same:
                return jnp.logical_not(result) if isinstance(result, jax.Array) else False
    return result


def _is_alike(x: Any, y: Any, typematch: bool) -> bool:
    """Whether two leaves are equal, apart from the values of arrays."""
    if is_array(x) and is_array(y):
        is_family = not typematch or _family(x) is _family(y)
        return is_family and x.shape == y.shape and x.dtype == y.dtype
    if is_array(x) or is_array(y):
        return False
    if typematch and type(x) is not type(y):
        return False
    return x is y or bool(x == y)


def _family(x: object) -> type:
    return jax.Array if isinstance(x, jax.Array) else type(x)


def _is_jax(x: object, y: object) -> bool:
    return isinstance(x, jax.Array) or isinstance(y, jax.Array)


def _values_equal(x: Any, y: Any, rtol: int | float, atol: int | float, numpy: Any) -> Any:
    is_inexact = jnp.issubdtype(x.dtype, jnp.inexact)
    # A float array may differ from itself: NaN is not equal to NaN.
    # Tangents of integers have a shape but no values.
    if (x is y and not is_inexact) or x.dtype == jax.dtypes.float0:
        return True
    if _is_jax(x, y) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        # Concrete keys stay concrete under a trace, unless the answer has to be traced.
        with contextlib.nullcontext() if numpy is jnp else jax.ensure_compile_time_eval():
            x, y = jax.random.key_data(x), jax.random.key_data(y)
    close = is_inexact and (rtol != 0.0 or atol != 0.0)
    same = numpy.isclose(x, y, rtol=rtol, atol=atol) if close else numpy.equal(x, y)
    return numpy.all(same)


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
    x, y = _on_host(a), _on_host(b)
    if x.dtype.kind in "fc" or jnp.issubdtype(x.dtype, jnp.inexact):
        # Half precision cannot represent the differences of its own numbers.
        wide: Any = np.complex128 if x.dtype.kind == "c" else np.float64
        x, y = x.astype(wide), y.astype(wide)
        differ = (x != y) & ~(np.isnan(x) & np.isnan(y))
    else:
        differ = x != y
        x, y = x.astype(np.float64), y.astype(np.float64)
    count = int(np.count_nonzero(differ))
    if not count:
        return None
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        largest = float(np.max(np.abs(x - y)[differ]))
        scale = float(np.max(np.abs(x), initial=0, where=np.isfinite(x)))
        relative = largest / scale if scale else float("inf")
    return largest, relative, count, x.size


def _on_host(array: Any) -> np.ndarray[Any, np.dtype[Any]]:
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array)


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
    seen = [False]

    def stop(node: Any) -> bool:
        if node is not pytree:
            return True
        # JAX visits the root first. A second visit means that the root is inside itself.
        if seen[0]:
            raise StructureError("tree_flatten_one_level", "a tree", "a node that contains itself")
        seen[0] = True
        return False

    return jtu.tree_flatten(pytree, is_leaf=stop)


def tree_check(pytree: PyTree) -> None:
    """Check that no node or parameter appears twice in a tree, and that no node contains itself.

    A transform turns shared nodes into separate ones: a shared layer becomes two layers, and a
    shared parameter becomes two parameters. Some sharing is allowed: nodes without leaves, leaves
    that are not parameters (buffers, numbers), and small arrays (at most one axis) of different
    layers.

    Args:
        pytree: the tree.

    Raises:
        StructureError: if a node, or a parameter, appears twice; all its paths are named.

    Examples:
        >>> tree_check([[1], [1]])
        >>> shared = [1]
        >>> tree_check([shared, shared])
        Traceback (most recent call last):
            ...
        pytreemod.errors.StructureError: tree_check: expected each node once, got one node twice.
          at [0]
          at [1]
    """
    _check(pytree, (), {}, set())
    # By identity alone, without paths: most trees share nothing.
    arrays = [id(leaf) for leaf in jtu.tree_leaves(pytree) if is_inexact_array(leaf)]
    if len(set(arrays)) == len(arrays):
        return
    chosen = [is_inexact_array(loc.leaf) and loc.role != "buffer" for loc in locations(pytree)]
    for group in places_of_shared(pytree, chosen):
        raise StructureError(
            "tree_check",
            "each parameter once",
            f"one array at {len(group)} paths",
            at=[path_text(loc.path) for loc in group],
        )


def _check(
    node: Any, path: tuple[Any, ...], seen: dict[int, tuple[Any, ...]], open_ids: set[int]
) -> None:
    if id(node) in open_ids:
        places = [path_text(seen[id(node)]), path_text(path)]
        raise StructureError("tree_check", "a tree", "a node that contains itself", at=places)
    children = children_of(node)
    # Sharing a node without children makes no difference.
    if not children:
        return
    if id(node) in seen:
        places = [path_text(seen[id(node)]), path_text(path)]
        raise StructureError("tree_check", "each node once", "one node twice", at=places)
    seen[id(node)] = path
    # The nodes above this one: a node inside itself must be found before it is followed.
    open_ids.add(id(node))
    for key, child in children:
        _check(child, (*path, key), seen, open_ids)
    open_ids.discard(id(node))
