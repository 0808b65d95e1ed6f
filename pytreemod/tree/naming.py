"""Leaves by name: a tree as a flat dict, and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import StructureError, describe
from pytreemod.tree.paths import step_names
from pytreemod.tree.predicates import is_abstract, is_array
from pytreemod.typing import PyTree, Tracer, is_instance, jtu

_T = TypeVar("_T")


def named_leaves(tree: PyTree, sep: str = ".") -> dict[str, Any]:
    """Return every leaf of a tree by its name: `layers.2.weight`.

    Its keys stand as bare words. Values in a State have the path of their token.

    **Law.** `from_named(tree, named_leaves(tree)) == tree`.

    Args:
        tree: any tree.
        sep: the separator of the components.

    Returns:
        The leaves, unchanged, in the order of the tree.

    Raises:
        StructureError: if two leaves have one name: then another `sep` may help.

    Examples:
        >>> import jax
        >>> from pytreemod import nn
        >>> net = nn.Sequential([nn.Identity(), nn.Linear(3, 4, key=jax.random.key(0))])
        >>> {name: leaf.shape for name, leaf in named_leaves(net).items()}
        {'layers.1.weight': (4, 3), 'layers.1.bias': (4,)}
    """
    pairs = [(sep.join(step_names(path)), leaf) for path, leaf in jtu.tree_leaves_with_path(tree)]
    check_distinct((name for name, _ in pairs), "named_leaves")
    return dict(pairs)


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
    wrong = [
        f"{name}: like has {_shown(name, olds)}, named has {_shown(name, named)}"
        for name in {**olds, **named}
        if name not in olds or name not in named or not _fits(olds[name], named[name])
    ]
    if wrong:
        raise StructureError("from_named: the leaves do not fit like", at=wrong, most=40)
    news = [_as_kind_of(old, named[name]) for name, old in olds.items()]
    return jtu.tree_structure(like).unflatten(news)


def _shown(name: str, leaves: Mapping[str, Any]) -> str:
    return describe(leaves[name]) if name in leaves else "no such leaf"


def _fits(old: Any, new: Any) -> bool:
    if not hasattr(old, "dtype"):
        return type(old) is type(new)
    return is_abstract(new) and old.shape == new.shape and old.dtype == new.dtype


def _as_kind_of(old: Any, new: Any) -> Any:
    is_numpy = is_instance(old, (np.ndarray, np.generic))
    if isinstance(new, jax.Array):
        return np.asarray(new)[()] if is_numpy and not isinstance(new, Tracer) else new
    # A copy, because the caller may still write into the array.
    return new if is_numpy or not is_array(new) else jnp.array(new)


def check_distinct(names: Iterable[str], where: str) -> None:
    """Refuse names that occur twice."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise StructureError(f"{where}: two leaves have one name", at=twice)
