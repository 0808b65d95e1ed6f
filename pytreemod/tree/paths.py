"""Paths as strings, `layers[2].weight`, patterns over them, and leaves by name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import SpecError, StructureError, describe
from pytreemod.tree.predicates import is_abstract, is_array
from pytreemod.typing import KeyPath, PyTree, Tracer, is_instance, jtu

_NAMED = 10


def step_name(key: Any) -> str:
    """Return one key of a path as a bare word: the attribute's name, the index, the dict's key."""
    return jtu.keystr((key,), simple=True)


class PathName(str):
    """A path as a string that serves as a key and remembers its keys: the name of a token."""

    steps: tuple[str, ...]

    @classmethod
    def of(cls, path: KeyPath) -> PathName:
        """Return the name of a JAX key path."""
        name = cls(path_text(path))
        name.steps = step_names(path)
        return name


def step_names(path: KeyPath) -> tuple[str, ...]:
    """The keys of a path as bare words; a key that is itself a path gives all of its keys."""
    names: list[str] = []
    for key in path:
        # In a State, the key of a value is the path of its token.
        inner = key.key if isinstance(key, jtu.DictKey) else None
        names += inner.steps if isinstance(inner, PathName) else (step_name(key),)
    return tuple(names)


def path_text(path: KeyPath, root: str = "") -> str:
    """Return a JAX key path as Python code that accesses the leaf.

    Args:
        path: keys, as `jax.tree_util` gives them.
        root: the first part, such as an argument's name.

    Returns:
        `layers[2].weight`, `batch['x']`; `root` itself (or `<root>`) for the empty path.

    Examples:
        >>> path_text((jtu.GetAttrKey("layers"), jtu.SequenceKey(2), jtu.GetAttrKey("weight")))
        'layers[2].weight'
    """
    return (root + jtu.keystr(path)).removeprefix(".") or "<root>"


def pattern_text(path: KeyPath) -> str:
    """Return a JAX key path as the pattern that picks it, with as few quotes as possible.

    Args:
        path: keys, as `jax.tree_util` gives them.

    Returns:
        The string that `parse_pattern` parses into `step_names(path)`; `<root>` for the empty path.

    Examples:
        >>> pattern_text((jtu.DictKey("model"), jtu.SequenceKey(2), jtu.DictKey("mlp/w")))
        "model[2]['mlp/w']"
    """
    text = ""
    for key in path:
        word: Any = key.key if isinstance(key, jtu.DictKey) else None
        # A PathName is written unchanged: it has its own keys.
        is_bare = isinstance(word, PathName) or (isinstance(word, str) and word.isidentifier())
        text += f"{'.' * (word[:1] != '[')}{word}" if is_bare else jtu.keystr((key,))
    return text.removeprefix(".") or "<root>"


def some_of(names: Sequence[str]) -> str:
    """Return the first of many names, as a readable list."""
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")


# A key in brackets, with quotes or without, or a bare word; before it, perhaps a separator.
_STEP = r"""[./]?(?:\[\s*+(?:'([^']*)'|"([^"]*)"|([^\]'"]*))\s*\]|([^./\[\]]++))"""


def parse_pattern(pattern: str) -> tuple[str, ...]:
    """Split `layers[2].*.weight` (`layers.2.*.weight`, `layers/2/*/weight`) into its keys.

    A key in quotes is one key, whatever it contains: `params['a/b'].weight`.

    Raises:
        SpecError: if the pattern is empty or has an empty key.
    """
    if not re.fullmatch(f"(?![./])(?:{_STEP})+", pattern):
        raise SpecError(
            f"select.path({pattern!r}): no keys with dots or slashes between them",
            hint='pm.select.path("layers.*.weight")',
        )
    return tuple("".join(groups).strip() for groups in re.findall(_STEP, pattern))


def matches(steps: tuple[str, ...], names: tuple[str, ...], exactly: bool = False) -> bool:
    """Whether a pattern matches a path or, if not `exactly`, a node above it.

    `*` matches one key, `**` any number.
    """
    if not steps:
        return not (exactly and names)
    if steps[0] == "**":
        return any(matches(steps[1:], names[i:], exactly) for i in range(len(names) + 1))
    if not names or not fnmatchcase(names[0], steps[0]):
        return False
    return matches(steps[1:], names[1:], exactly)


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
