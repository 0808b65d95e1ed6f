"""Comparing trees, checking them for shared nodes, and opening one level."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import StructureError, explain
from pytreemod.tree.nodes import children_of, places
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
        A bool; under a trace, where the answer depends on traced values, a scalar bool array.

    Examples:
        >>> tree_equal({"a": jnp.ones(2)}, {"a": jnp.ones(2)})
        True
        >>> tree_equal([1, "a"], [1, "b"])
        False
    """
    first, *others = [jtu.tree_flatten(tree) for tree in pytrees]
    result: bool | jax.Array = True
    for leaves, treedef in others:
        if treedef != first[1]:
            return False
        for x, y in zip(first[0], leaves, strict=True):
            same = _leaf_equal(x, y, typematch, rtol, atol)
            if same is False:
                return False
            if same is not True:
                result = same if result is True else jnp.logical_and(result, same)
    return result


def _leaf_equal(
    x: Any, y: Any, typematch: bool, rtol: int | float, atol: int | float
) -> bool | jax.Array:
    if is_array(x) and is_array(y):
        if typematch and _family(x) is not _family(y):
            return False
        if x.shape != y.shape or x.dtype != y.dtype:
            return False
        return (
            True
            if x is y and rtol == 0.0 == atol and not _may_be_nan(x)
            else _values_equal(x, y, rtol, atol)
        )
    if is_array(x) or is_array(y):
        return False
    if typematch and type(x) is not type(y):
        return False
    return x is y or bool(x == y)


def _family(x: object) -> type:
    return jax.Array if isinstance(x, jax.Array) else type(x)


def _may_be_nan(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _values_equal(x: Any, y: Any, rtol: int | float, atol: int | float) -> bool | jax.Array:
    traced = isinstance(x, Tracer) or isinstance(y, Tracer)
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x, y = jax.random.key_data(x), jax.random.key_data(y)
    numpy: Any = jnp if traced else np
    close = jnp.issubdtype(x.dtype, jnp.inexact) and (rtol != 0.0 or atol != 0.0)
    same = numpy.isclose(x, y, rtol=rtol, atol=atol) if close else numpy.equal(x, y)
    return numpy.all(same) if traced else bool(np.all(same))


def tree_flatten_one_level(pytree: PyTree) -> tuple[list[PyTree], Any]:
    """The immediate children of a node, and the structure that puts them together again.

    Args:
        pytree: a node, or a leaf (whose only child is itself).

    Returns:
        The children, and a `PyTreeDef` whose leaves they are.

    Raises:
        StructureError: the node is its own child.

    Examples:
        >>> tree_flatten_one_level([1, (2, 3)])[0]
        [1, (2, 3)]
    """
    seen = [False]

    def stop(node: Any) -> bool:
        if node is not pytree:
            return True
        if seen[0]:
            raise StructureError(
                explain("tree_flatten_one_level", "a tree", "a node that contains itself")
            )
        seen[0] = True
        return False

    return jtu.tree_flatten(pytree, is_leaf=stop)


def tree_check(pytree: PyTree) -> None:
    """Check that nothing stands in a tree twice, and that no node contains itself.

    A tree that is no tree comes out of a transform as one: a layer that was shared becomes two, and
    so does a parameter. Nodes without leaves may be shared, and so may other leaves: buffers,
    numbers, and the small arrays (of one axis, or none) of different layers.

    Args:
        pytree: the tree.

    Raises:
        StructureError: a node, or a parameter, appears twice; all its paths are named.

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
    chosen = [is_inexact_array(place.leaf) and place.role != "buffer" for place in places(pytree)]
    for group in places_of_shared(pytree, chosen):
        raise StructureError(
            explain(
                "tree_check",
                "each parameter once",
                f"one array at {len(group)} places",
                places=[path_text(place.path) for place in group],
            )
        )


def _check(
    node: Any, path: tuple[Any, ...], seen: dict[int, tuple[Any, ...]], open_ids: set[int]
) -> None:
    if id(node) in open_ids:
        places = [path_text(seen[id(node)]), path_text(path)]
        raise StructureError(
            explain("tree_check", "a tree", "a node that contains itself", places=places)
        )
    children = children_of(node)
    if not children:
        return
    if id(node) in seen:
        places = [path_text(seen[id(node)]), path_text(path)]
        raise StructureError(
            explain("tree_check", "each node once", "one node twice", places=places)
        )
    seen[id(node)] = path
    open_ids.add(id(node))
    for key, child in children:
        _check(child, (*path, key), seen, open_ids)
    open_ids.discard(id(node))
