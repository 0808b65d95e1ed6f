"""The names of a tree's leaves: `layers.2.weight`.

A name is the leaf's path with dots. The layers of a `Stack`, and the members of an `Ensemble`, are
one array in memory. In a file they have one name each, as in a list of them: `blocks.3.up.weight`,
with the number in the place of the field. So a file fits a Stack as well as a list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import StructureError, describe
from pytreemod.state.values import State
from pytreemod.tree.nodes import children_of, record_of
from pytreemod.tree.paths import parse_pattern, plain_name, step_name, step_names
from pytreemod.tree.predicates import is_array
from pytreemod.typing import PyTree, class_of, jtu

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
        return is_array(new) and (old.shape, old.dtype) == (new.shape, new.dtype)
    return type(old) is type(new)


def _as_kind_of(old: Any, new: Any) -> Any:
    if isinstance(old, (np.ndarray, np.generic)):
        return new if isinstance(new, jax.core.Tracer) else np.asarray(new)[...]
    # A copy, because the caller may still write into the array.
    return jnp.array(new) if isinstance(new, np.ndarray) and hasattr(old, "dtype") else new


def check_distinct(names: Iterable[str], where: str) -> None:
    """Refuse names that occur twice."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise StructureError(f"{where}: two leaves have one name", at=twice)


# ---- names in files


class Place(NamedTuple):
    """A node of a tree, and its name in a file."""

    words: tuple[str, ...]
    layers: tuple[int, ...]
    """Which words are fields of layers, in whose place a file has the number of the layer."""
    node: Any
    is_leaf: bool

    def name(self, numbers: Iterable[int | str]) -> str:
        """Return its name, with the numbers of the layer."""
        words = [*self.words]
        for i, number in zip(self.layers, numbers, strict=False):
            words[i] = str(number)
        return ".".join(words)


def places_of(tree: PyTree) -> Iterator[Place]:
    """Yield each node of a tree, the leaves in JAX's order."""
    yield from _places(tree, (), (), ())


# What is left of a path below which arrays have a layer axis, and where it begins.
_Start = tuple[tuple[str, ...], int]


def _places(
    node: Any, words: tuple[str, ...], layers: tuple[int, ...], starts: tuple[_Start, ...]
) -> Iterator[Place]:
    children = children_of(node)
    yield Place(words, layers, node, children is None)
    if not children:
        return
    if isinstance(node, State):
        # A value is at the place of its token, which knows the layers above it.
        for (key, child), axes in zip(children, node.__layers__(), strict=True):
            found = tuple(len(words) + i for i in axes)
            yield from _places(child, (*words, *step_names((key,))), (*layers, *found), starts)
        return
    stacked = getattr(class_of(node), "__stacked__", None)
    if stacked is not None:
        starts = (*starts, *((parse_pattern(text), len(words)) for text in stacked(node)))
    for key, child in children:
        word = step_name(key)
        if not starts:
            yield from _places(child, (*words, word), layers, ())
            continue
        left = [(steps[1:], i) for steps, i in starts if steps[0] == word]
        begun = tuple(i for steps, i in left if not steps)
        rest = tuple((steps, i) for steps, i in left if steps)
        yield from _places(child, (*words, word), tuple(sorted((*layers, *begun))), rest)


class Part(NamedTuple):
    """A leaf, or one layer of a leaf, that has a name of its own."""

    name: str
    leaf: int
    at: tuple[int, ...]
    """The number of the layer; empty for the whole leaf."""


def parts_of(places: Iterable[Place]) -> list[Part]:
    """Return what has a name in a file, in the order of the leaves."""
    parts: list[Part] = []
    leaves = (place for place in places if place.is_leaf)
    for i, place in enumerate(leaves):
        if not place.layers:
            parts.append(Part(".".join(place.words), i, ()))
            continue
        sizes = np.shape(place.node)[: len(place.layers)] if hasattr(place.node, "shape") else ()
        parts += [Part(place.name(at), i, at) for at in np.ndindex(sizes)]
    return parts


class TiedNames(NamedTuple):
    """A place in a tree that has its value from another one, which alone is in a file."""

    place: str
    """With `*` for the number of a layer."""
    source: str
    through: Callable[[Any], Any] | None


def ties_of(places: Iterable[Place]) -> list[TiedNames]:
    """Return the ties of a tree."""
    found: list[TiedNames] = []
    for place in places:
        record = record_of(place.node)
        if record is None or not record.is_hole:
            continue
        # Both are below the node that has the tie.
        above = place.words[: len(place.words) - place.node.depth]
        layers = tuple(i for i in place.layers if i < len(above))
        source = Place((*above, *parse_pattern(place.node.to)), layers, None, True)
        stars = "*" * len(layers)
        found.append(TiedNames(place.name(stars), source.name(stars), place.node.through))
    return found


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of random keys, or an abstract one."""
    dtype = getattr(leaf, "dtype", None)
    is_plain = dtype is None or isinstance(dtype, np.dtype)
    return not is_plain and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def generator_of(leaf: Any) -> str | None:
    """Return the name of the generator of random keys, which may be abstract; None for others."""
    if not is_key(leaf):
        return None
    found: list[str] = []
    # JAX tells it for arrays only.
    jax.eval_shape(lambda key: found.append(str(jax.random.key_impl(key))), leaf)
    return found[0]
