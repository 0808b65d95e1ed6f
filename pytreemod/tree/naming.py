"""Leaves by name: a tree as a flat dict, and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from pytreemod.errors import StructureError, describe
from pytreemod.tree.paths import plain_name
from pytreemod.tree.predicates import is_abstract
from pytreemod.typing import PyTree, Tracer, is_instance, jtu

_T = TypeVar("_T")


def named_leaves(tree: PyTree, sep: str = ".") -> dict[str, Any]:
    """Return every leaf of a tree by its name: `layers.2.weight`.

    A component of the path is quoted if it is empty, contains `sep`, begins with a quote, or cannot
    be printed: `'v1.5'.weight`. Values in a State have the path of their token.

    **Law.** `from_named(tree, named_leaves(tree)) == tree`.

    Args:
        tree: any tree.
        sep: the separator of the components.

    Returns:
        The leaves, unchanged, in the order of the tree.

    Raises:
        ArgumentError: if `sep` is empty, no string, or contains a quote.
        StructureError: if two leaves have one name, as the keys 0 and "0" of a dict give.

    Examples:
        >>> import jax
        >>> from pytreemod import nn
        >>> net = nn.Sequential([nn.Identity(), nn.Linear(3, 4, key=jax.random.key(0))])
        >>> {name: leaf.shape for name, leaf in named_leaves(net).items()}
        {'layers.1.weight': (4, 3), 'layers.1.bias': (4,)}
    """
    pairs = jtu.tree_leaves_with_path(tree)
    names = [plain_name(path, sep) for path, _ in pairs]
    check_distinct(names, "named_leaves")
    return dict(zip(names, (leaf for _, leaf in pairs), strict=True))


def from_named(like: _T, named: Mapping[str, Any], sep: str = ".") -> _T:
    """Return a tree like another one, with leaves given by name; the inverse of `named_leaves`.

    Args:
        like: a tree, which may be abstract (`pm.filter_eval_shape`).
        named: a leaf for each name; an array has the shape and dtype of the one in `like`.
        sep: the separator of the components of a name.

    Returns:
        A tree of the structure of `like`; an array is one of JAX or of NumPy, as in `like`.

    Raises:
        StructureError: if names are missing or unknown, or leaves do not fit: all in one table.

    Examples:
        >>> import jax.numpy as jnp
        >>> from_named({"a": [jnp.zeros(2), 1]}, {"a.0": jnp.ones(2), "a.1": 5})
        {'a': [Array([1., 1.], dtype=float32), 5]}
    """
    olds = named_leaves(like, sep)
    wrong = [f"{name}: missing" for name in olds if name not in named]
    wrong += [f"{name}: unexpected" for name in named if name not in olds]
    wrong += [
        f"{name}: like has {describe(old)}, named {describe(named[name])}"
        for name, old in olds.items()
        if name in named and not _fits(old, named[name])
    ]
    if wrong:
        raise StructureError("from_named: the leaves do not fit like", at=wrong, most=40)
    news = [_as_kind_of(old, named[name]) for name, old in olds.items()]
    return jtu.tree_structure(like).unflatten(news)


def _fits(old: Any, new: Any) -> bool:
    if hasattr(old, "dtype"):
        return is_abstract(new) and _form_of(old) == _form_of(new)
    return type(old) is type(new)


def _form_of(leaf: Any) -> tuple[Any, ...]:
    dtype: Any = leaf.dtype
    # In any byte order.
    return leaf.shape, dtype.newbyteorder("=") if is_instance(dtype, np.dtype) else dtype


def _as_kind_of(old: Any, new: Any) -> Any:
    if is_instance(old, (np.ndarray, np.generic)) and not isinstance(new, Tracer):
        made = np.asarray(new, old.dtype)
        return made[()] if is_instance(old, np.generic) else made
    # A copy, because the caller may still write into the array.
    is_other = is_instance(new, np.ndarray) and hasattr(old, "dtype")
    return jnp.array(np.asarray(new, old.dtype)) if is_other else new


def check_distinct(names: Iterable[str], where: str) -> None:
    """Refuse names that occur twice."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise StructureError(f"{where}: two leaves have one name", at=twice)
