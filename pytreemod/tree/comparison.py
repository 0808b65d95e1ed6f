"""Comparing two trees: whether they are equal, how far arrays are apart, and where trees differ.

`compare` compares containers key by key, Modules field by field, and leaves and configuration by
`same_static`. Every table of two trees is built on it: of carries, branches, traces, the values of
a State.
"""

from __future__ import annotations

import contextlib
import re
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import describe
from pytreemod.tree.instances import is_module, split_of, stored
from pytreemod.tree.nodes import children_of, own_class, stop_below
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import NUMBERS, is_array, same_static
from pytreemod.tree.split_arrays import split_text
from pytreemod.typing import KeyPath, PyTree, Tracer, class_of, jtu


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
        it; under a trace a traced one.

    Examples:
        >>> tree_equal({"a": jnp.ones(2)}, {"a": jnp.ones(2)})
        Array(True, dtype=bool)
        >>> tree_equal([1, "a"], [1, "b"])
        False
    """
    same = _are_all_equal(pytrees, typematch, rtol, atol)
    if isinstance(same, bool):
        return same  # No arrays were compared.
    has_jax = any(isinstance(leaf, jax.Array) for leaf in jtu.tree_leaves(pytrees))
    return jnp.asarray(same) if has_jax else bool(same)


def are_equal(one: PyTree, two: PyTree) -> bool:
    """Whether two trees are equal, as a concrete bool, for `==`."""
    return bool(_are_all_equal((one, two)))


def _are_all_equal(
    pytrees: tuple[PyTree, ...], typematch: bool = False, rtol: float = 0.0, atol: float = 0.0
) -> Any:
    """Whether trees are equal: a bool if no values of arrays decide, which may be traced."""
    (leaves, treedef), *others = map(jtu.tree_flatten, pytrees)
    same: Any = True
    for found, structure in others:
        if structure != treedef:
            return False
        pairs = list(zip(leaves, found, strict=True))
        if not all(_is_alike(x, y, typematch) for x, y in pairs):
            return False
        # Tangents of integers have a shape but no values.
        arrays = [(x, y) for x, y in pairs if is_array(x) and x.dtype != jax.dtypes.float0]
        for x, y in arrays:
            same = _has_equal_values(x, y, rtol, atol) & same
    return same


def _is_alike(x: Any, y: Any, typematch: bool) -> bool:
    """Whether two leaves are equal, apart from the values of arrays."""
    if typematch and _family(x) is not _family(y):
        return False
    if is_array(x) and is_array(y):
        return x.shape == y.shape and x.dtype == y.dtype
    return is_array(x) is is_array(y) and (x is y or bool(x == y))


def _family(leaf: object) -> type:
    return jax.Array if isinstance(leaf, jax.Array) else type(leaf)


def _has_equal_values(x: Any, y: Any, rtol: float, atol: float) -> Any:
    is_traced = isinstance(x, Tracer) or isinstance(y, Tracer)
    # Concrete keys stay concrete under a trace.
    with contextlib.nullcontext() if is_traced else jax.ensure_compile_time_eval():
        x, y = _numbers(x), _numbers(y)
    # NumPy where values are concrete: it has nothing to compile.
    numpy: Any = jnp if is_traced else np
    if (rtol or atol) and jnp.issubdtype(x.dtype, jnp.inexact):
        return numpy.all(numpy.isclose(x, y, rtol=rtol, atol=atol))
    return numpy.all(numpy.equal(x, y))


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

    Examples:
        >>> tree_flatten_one_level([1, (2, 3)])[0]
        [1, (2, 3)]
    """
    return jtu.tree_flatten(pytree, is_leaf=stop_below())


# What describes an array: its shape, dtype and, if JAX made it, weak type and sharding.
_TYPES = (class_of(jax.typeof(0)), jax.ShapeDtypeStruct)


def is_number(leaf: Any) -> bool:
    """Whether `leaf` is a plain Python number, which JAX converts to an array."""
    return type(leaf) in NUMBERS


def is_value(leaf: Any) -> bool:
    """Whether `leaf` is an array, or converted to one when JAX computes with it."""
    return is_array(leaf) or is_number(leaf)


def is_type(leaf: Any) -> bool:
    """Whether `leaf` is the type of an array, which may stand in a tree in the array's place."""
    return isinstance(leaf, _TYPES)


def have_one_type(a: Any, b: Any) -> bool:
    """Whether two arrays have one shape and dtype; other leaves have to be equal."""
    if is_array(a) and is_array(b):
        return a.shape == b.shape and a.dtype == b.dtype
    return not is_array(a) and not is_array(b) and same_static(a, b)


def aval_of(value: Any) -> Any:
    """Shape, dtype and weak type of an array, a number or the type of an array."""
    return value if is_type(value) else jax.typeof(value)


def varying_axes(aval: Any) -> frozenset[Any]:
    """The mesh axes over which an array differs from device to device, inside a `shard_map`."""
    # Newer JAX has renamed the attribute.
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset(getattr(aval, "vma", None) or getattr(manual, "varying", ()))


# What a tree has where the other has an entry, and it has none.
_MISSING: Any = object()


class Difference(NamedTuple):
    """One difference between two trees.

    Attributes:
        path: its location.
        old: what the first tree has there.
        new: what the second tree has there.
        is_static: whether it is in the configuration.
    """

    path: KeyPath
    old: Any
    new: Any
    is_static: bool = False

    @property
    def texts(self) -> tuple[str, str]:
        """Both sides in short form."""
        return side_text(self.old, self.is_static), side_text(self.new, self.is_static)

    def line(self, root: str = "", form: str = "{} -> {}") -> str:
        """Return the path, and both sides in short form.

        Args:
            root: the name of the trees.
            form: a format string for the two sides.
        """
        old, new = self.texts
        if old == new:
            new += ", not equal" if children_of(self.new) is None else ", with other configuration"
        return f"{path_text(self.path, root)}: {form.format(old, new)}"


def compare(
    old: PyTree, new: PyTree, fits: Callable[[Any, Any], bool] = same_static
) -> list[Difference]:
    """Return the differences of two trees.

    Args:
        old: a tree.
        new: another.
        fits: whether two arrays, or numbers, or types of arrays, count as the same.

    Returns:
        The differences in order; empty if the trees agree.
    """
    (leaves, treedef), (others, other) = map(jtu.tree_flatten, (old, new))
    # Compare flat first: most trees agree, and the walk takes a hundred times as long.
    is_one = _are_one(treedef, other)
    if is_one and all(_agree(a, b, fits) for a, b in zip(leaves, others, strict=True)):
        return []
    found = [*_walk(old, new, fits, ())]
    return found or ([] if is_one is None else [Difference((), old, new)])


def _walk(
    old: Any, new: Any, fits: Callable[[Any, Any], bool], path: KeyPath
) -> Iterator[Difference]:
    mine, others = children_of(old), children_of(new)
    if mine is None or others is None or own_class(old) is not own_class(new):
        yield from [] if _agree(old, new, fits) else [Difference(path, old, new)]
        return
    before, after = _entries(old, mine), _entries(new, others)
    found: list[Difference] = []
    for key in before | after:
        (a, a_static), (b, b_static) = before.get(key, _ABSENT), after.get(key, _ABSENT)
        if not a_static and not b_static:
            found += _walk(a, b, fits, (*path, key))
        elif not same_static(a, b):
            found.append(Difference((*path, key), a, b, a_static and b_static))
    yield from found
    # A difference below already explains why the nodes differ.
    if not found and _are_one(_bare(old), _bare(new)) is False:
        yield Difference(path, old, new)


_ABSENT = (_MISSING, True)


def _entries(node: Any, children: list[tuple[Any, Any]]) -> dict[Any, tuple[Any, bool]]:
    """The contents of a node by key, each with whether it is configuration."""
    if not is_module(node):
        return {key: (child, False) for key, child in children}
    split = split_of(node)
    return {jtu.GetAttrKey(n): (stored(node, n), n not in split.data) for n in split.names}


def _bare(node: Any) -> Any:
    """Return the structure of a node alone, without that of its children."""
    return jtu.tree_structure(node, is_leaf=stop_below())


def _are_one(treedef: Any, other: Any) -> bool | None:
    try:
        return treedef == other
    except Exception:  # Of a class of the user's, which keeps what cannot be compared.
        return None


def _agree(a: Any, b: Any, fits: Any) -> bool:
    return fits(a, b) if _is_typed(a) and _is_typed(b) else same_static(a, b)


def _is_typed(value: Any) -> bool:
    return is_type(value) or is_value(value)


def side_text(value: Any, is_static: bool = False) -> str:
    """Return a node or leaf in short form: `f32[2]`, `list of 3`, `Linear`.

    Args:
        value: the node or leaf.
        is_static: whether it is configuration, of which the contents are shown.
    """
    if value is _MISSING:
        return "nothing"
    if _is_typed(value) and not is_number(value):
        aval = aval_of(value)
        varying = sorted(map(str, varying_axes(aval)))
        weak = " (weak)" if getattr(aval, "weak_type", False) else ""
        return split_text(aval) + weak + (f" varying over {', '.join(varying)}" if varying else "")
    children = children_of(value)
    if is_static or not children:
        return leaf_text(value)
    name = class_of(value).__qualname__
    return f"{name} of {len(children)}" if isinstance(value, (tuple, list, dict)) else name


def leaf_text(value: Any) -> str:
    """Return a leaf in short form: functions by name and line, and without addresses."""
    code = getattr(value, "__code__", None)
    if isinstance(code, types.CodeType):
        return f"{value.__qualname__} ({code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno})"
    # An address differs from run to run, and would look like the reason.
    return re.sub(r" at 0x[0-9a-fA-F]+", "", describe(value))
