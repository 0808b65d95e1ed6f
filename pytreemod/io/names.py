"""The names of a tree's leaves in a file: `layers.2.weight`.

A name is the leaf's path with dots. The layers of a `Stack`, and the members of an `Ensemble`, are
one array in memory. They have one name each, as in a list of them: `blocks.3.up.weight`,
with the number in the place of the field. So a file fits a Stack as well as a list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.nn.stacked_layers import Stacked
from pytreemod.state.values import State
from pytreemod.tree.instances import is_module, notes_of
from pytreemod.tree.nodes import children_of
from pytreemod.tree.paths import parse_pattern, step_name, step_names
from pytreemod.typing import PyTree, class_of, is_instance


class Place(NamedTuple):
    """A node of a tree, and its names in a file."""

    words: tuple[str, ...]
    # Which words are fields of layers, in whose place a file has the number of the layer.
    layers: tuple[int, ...]
    # How many layers there are, for each of these.
    sizes: tuple[int, ...]
    node: Any
    # None for a leaf.
    children: list[tuple[Any, Any]] | None

    def name(self, numbers: Iterable[object]) -> str:
        """Return one name."""
        words = [*self.words]
        for i, number in zip(self.layers, numbers, strict=False):
            words[i] = str(number)
        return ".".join(words)

    def parts(self) -> Iterable[tuple[int, ...]]:
        """Return the numbers of each layer that has a name; an array has an axis for each."""
        shape: tuple[int, ...] = getattr(self.node, "shape", ())
        return np.ndindex(shape[: len(self.layers)] if self.children is None else self.sizes)


def places_of(tree: PyTree) -> Iterator[Place]:
    """Yield each node of a tree, the leaves in JAX's order."""
    yield from _places(Place((), (), (), tree, children_of(tree)), ())


def _places(here: Place, starts: tuple[tuple[tuple[str, ...], int], ...]) -> Iterator[Place]:
    # A start is what is left of a path below which arrays have a layer axis, and where it begins.
    words, layers, sizes, node, children = here
    yield here
    if isinstance(node, State):
        # A value is at the place of its token, which knows the layers above it.
        for (key, child), fields in zip(children or (), node.__layers__(), strict=True):
            more = tuple(len(words) + i for i in fields)
            name = (*words, *step_names((key,)))
            below = Place(name, (*layers, *more), sizes, child, children_of(child))
            yield from _places(below, starts)
        return
    stacked = getattr(class_of(node), "__stacked__", None)
    if stacked is not None:
        starts = (*starts, *((parse_pattern(text), len(words)) for text in stacked(node)))
    for key, child in children or ():
        word = step_name(key)
        left = [(steps[1:], i) for steps, i in starts if steps[0] == word]
        begun = [i for steps, i in left if not steps]
        counts = [len(node) if is_instance(node, Stacked) else 1 for _ in begun]
        below = (*words, word), (*layers, *begun), (*sizes, *counts), child, children_of(child)
        yield from _places(Place(*below), tuple([item for item in left if item[0]]))


class Part(NamedTuple):
    """A leaf, or one layer of a leaf, that has a name of its own."""

    name: str
    leaf: int
    # The number of the layer; empty for the whole leaf.
    at: tuple[int, ...]


def parts_of(places: Iterable[Place]) -> list[Part]:
    """Return what has a name in a file, in the order of the leaves."""
    leaves = (place for place in places if place.children is None)
    return [Part(place.name(at), i, at) for i, place in enumerate(leaves) for at in place.parts()]


def nodes_above(names: Iterable[str]) -> set[str]:
    """Return the name of every node above, or at, one of these names."""
    steps = (name.split(".") for name in names)
    return {".".join(each[:i]) for each in steps for i in range(len(each) + 1)}


class TiedNames(NamedTuple):
    """A place in a tree that has its value from another one, which alone is in a file."""

    # With `*` for the number of a layer.
    place: str
    source: str
    through: Callable[[Any], Any] | None


def ties_of(places: Iterable[Place]) -> list[TiedNames]:
    """Return the ties of a tree."""
    found: list[TiedNames] = []
    for place in places:
        # Both paths are below the Module that keeps the tie.
        for tie in notes_of(place.node).ties if is_module(place.node) else ():
            words = [(*place.words, *step_names(keys)) for keys in (tie.place, tie.source)]
            stars = "*" * len(place.layers)
            names = [Place(each, place.layers, (), None, None).name(stars) for each in words]
            found.append(TiedNames(names[0], names[1], tie.through))
    return found


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of random keys, or an abstract one."""
    dtype: Any = getattr(leaf, "dtype", None)
    is_numpys = is_instance(dtype, (np.dtype, type(None)))
    return not is_numpys and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def generator_of(leaf: Any) -> str | None:
    """Return the name of the generator of random keys, which may be abstract; None for others."""
    found: list[str] = []

    def note(key: Any) -> None:
        found.append(str(jax.random.key_impl(key)))

    if is_key(leaf):
        # JAX tells it for arrays only.
        jax.eval_shape(note, leaf)
    return found[0] if found else None
