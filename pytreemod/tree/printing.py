"""Trees as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pytreemod.errors import short_dtype
from pytreemod.tree.stored_fields import reading_stored
from pytreemod.typing import PyTree

_WRAPPERS: tuple[type, ...] = (jax.custom_jvp, jax.custom_vjp, type(jax.jit(lambda: None)))


def tree_pformat(
    pytree: PyTree,
    *,
    width: int = 80,
    indent: int = 2,
    short_arrays: bool = True,
    struct_as_array: bool = False,
    truncate_leaf: Callable[[Any], bool] | None = None,
) -> str:
    """A tree as readable text, arrays as `f32[3,4]`; fields that hold their default are left out.

    Args:
        pytree: any tree.
        width: characters in a line, where they suffice.
        indent: characters by which each level is indented.
        short_arrays: `f32[3,4]` in place of an array's values.
        struct_as_array: print a `jax.ShapeDtypeStruct` as if it were an array.
        truncate_leaf: nodes to print as their type's name alone.

    Returns:
        The text.

    Examples:
        >>> import jax.numpy as jnp
        >>> tree_pformat({"a": jnp.ones((3, 4)), "b": "text"})
        "{'a': f32[3,4], 'b': 'text'}"
    """
    import wadler_lindig as wl  # Here, for a program that prints nothing need not wait for it.

    def custom(node: Any) -> Any:
        if truncate_leaf is not None and truncate_leaf(node):
            return wl.TextDoc(f"{type(node).__name__}(...)")
        if isinstance(node, _WRAPPERS):
            # JAX shows where in memory they lie, which says nothing and is never the same twice.
            return custom(node.__wrapped__) or wl.pdoc(node.__wrapped__)
        if struct_as_array and isinstance(node, jax.ShapeDtypeStruct):
            return wl.array_summary(node.shape, short_dtype(node.dtype), None)
        if short_arrays and isinstance(node, (jax.Array, np.ndarray)):
            return array_doc(node)
        return None

    # What a tree is, not what is computed from it.
    with reading_stored():
        return wl.pformat(
            pytree,
            width=width,
            indent=indent,
            custom=custom,
            short_arrays=short_arrays,
        )


def array_doc(array: Any, shape: Sequence[int] | None = None) -> Any:
    """How an array is shown; with a shape, one that is like it, but for the shape."""
    import wadler_lindig as wl

    dtype = short_dtype(array.dtype)
    if getattr(array, "weak_type", False):
        dtype = f"weak_{dtype}"
    kind = None if isinstance(array, jax.Array) else "numpy"
    return wl.array_summary(tuple(array.shape if shape is None else shape), dtype, kind)


def tree_pprint(pytree: PyTree, **options: Any) -> None:
    """Print what [`tree_pformat`][pytreemod.tree_pformat] gives.

    Args:
        pytree: any tree.
        **options: as for `tree_pformat`.

    Examples:
        >>> tree_pprint([1, "a"])
        [1, 'a']
    """
    print(tree_pformat(pytree, **options))
