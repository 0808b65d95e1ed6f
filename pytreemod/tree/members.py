"""Which axes of an array are layer axes, of a Stack or an Ensemble.

Only this file knows: optimizers, initial values and computed leaves all use it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

from pytreemod.tree.nodes import Location, locations
from pytreemod.tree.paths import parse_pattern, step_names
from pytreemod.typing import KeyPath, PyTree, class_of, jtu


def layer_axes(tree: PyTree) -> PyTree:
    """Return the number of leading axes of each leaf that are layer axes.

    [`nn.Stack`][pytreemod.nn.Stack] and [`nn.Ensemble`][pytreemod.nn.Ensemble] add one such axis to
    their arrays; nested, each adds one. Layers stacked by `filter_vmap` alone are plain arrays: 0;
    `nn.Stack.from_layers(pm.unstack(layers))` makes a Stack of them.

    Args:
        tree: a model, or a tree of its structure, such as its gradients.

    Returns:
        A tree of the structure of `tree`, with a number for each leaf.

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> from pytreemod import nn
        >>> stack = nn.Stack(lambda key: nn.Linear(3, 3, key=key), 4, key=jax.random.key(0))
        >>> axes = pm.layer_axes({"blocks": stack, "head": stack[0]})
        >>> axes["blocks"].layer.weight, axes["head"].weight
        (1, 0)
    """
    return jtu.tree_structure(tree).unflatten([len(layer_axes_of(loc)) for loc in locations(tree)])


class LayerAxis(NamedTuple):
    """One layer axis of a leaf.

    Attributes:
        path: from the root to the node that contains the layers.
        whole: from the root to the node in which they are stacked.
        is_independent: whether they are members that do not see each other.
    """

    path: KeyPath
    whole: KeyPath
    is_independent: bool


def layer_axes_of(loc: Location) -> list[LayerAxis]:
    """Return the layer axes of a leaf, the first axis first."""
    left_out = _LEFT_OUT.get()
    if left_out == "all":
        return []
    found: list[LayerAxis] = []
    for i, node in enumerate(loc.holders):
        length = _stacked_length(node, loc.path[i:])
        if length is None:
            continue
        is_independent = getattr(class_of(node), "__has_independent_members__", False)
        if is_independent and left_out:
            found.clear()
        else:
            found.append(LayerAxis(loc.path[:i], loc.path[: i + length], is_independent))
    return found


_LEFT_OUT: ContextVar[Literal["members", "all"] | None] = ContextVar("left_out", default=None)


@contextlib.contextmanager
def without_axes(which: Literal["members", "all"] | None) -> Generator[None]:
    """Declare that trees lack layer axes at the moment, although their nodes have them.

    Args:
        which: `"members"` if a map has removed the axes through the innermost members;
            `"all"` if it has removed those of layers, too; None if trees have all axes again.

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> stack = pm.nn.Stack(lambda: pm.nn.LayerNorm(2), 3)
        >>> with without_axes("all"):
        ...     pm.layer_axes(stack).layer.weight
        0
    """
    token = _LEFT_OUT.set(which)
    try:
        yield
    finally:
        _LEFT_OUT.reset(token)


def count_member_axes(nodes: Sequence[Any], path: KeyPath) -> int:
    """Return the number of leading axes at a path that are layer axes.

    A node whose children have a layer axis has a method `__stacked__` without arguments. It returns
    the paths below which every array has one such axis.

    Args:
        nodes: the nodes above, from the root; one for each key of the path.
        path: from the root.

    Returns:
        A number for each such node.

    Examples:
        >>> import jax
        >>> class Layers(dict):
        ...     def __stacked__(self):
        ...         return ("['w']",)
        >>> count_member_axes([Layers()], (jax.tree_util.DictKey("w"),))
        1
    """
    return sum(_stacked_length(node, path[i:]) is not None for i, node in enumerate(nodes))


def layer_fields(tree: PyTree, is_meant: Callable[[Any], bool]) -> list[tuple[int, ...]]:
    """Return, for each node that satisfies a test, which keys of its path are fields of layers.

    Examples:
        >>> import pytreemod as pm
        >>> stack = pm.nn.Stack(lambda: pm.nn.LayerNorm(2), 3)
        >>> layer_fields([stack], lambda node: isinstance(node, pm.nn.LayerNorm))
        [(1,)]
    """
    found = (loc for loc in locations(tree, is_leaf=is_meant) if is_meant(loc.leaf))
    return [tuple(len(axis.path) for axis in layer_axes_of(loc)) for loc in found]


def _stacked_length(node: Any, below: KeyPath) -> int | None:
    """The number of keys below a node at which the stacked part begins, on the way to a leaf."""
    # Looked up on any node, because this room does not know layers.
    stacked = getattr(class_of(node), "__stacked__", None)
    if stacked is None:
        return None
    steps = step_names(below)
    starts = (parse_pattern(text) for text in stacked(node))
    return next((len(start) for start in starts if steps[: len(start)] == start), None)
