"""Which axes of an array are of layers, or members, that a node holds as one.

This is the one file that knows: optimizers, initial values and computed leaves all ask it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

from pytreemod.tree.nodes import Location, StandsFor, locations
from pytreemod.tree.paths import parse_pattern, step_names
from pytreemod.typing import KeyPath, PyTree, class_of, jtu


def layer_axes(tree: PyTree) -> PyTree:
    """How many leading axes of each leaf are axes of layers, or of members.

    [`nn.Stack`][pytreemod.nn.Stack], [`nn.Ensemble`][pytreemod.nn.Ensemble] and an `MLP` with
    `scan=True` add one such axis to their arrays; nested, each adds one. Arrays that the members of
    an Ensemble share have none. Layers stacked by `filter_vmap` alone count as plain arrays: 0;
    `nn.Stack.from_layers(pm.unstack(layers))` makes a Stack of them.

    Args:
        tree: a model, or what has the structure of one, such as its gradients.

    Returns:
        A tree of the structure of `tree`, of numbers.

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> from pytreemod import nn
        >>> stack = nn.Stack(lambda key: nn.Linear(3, 3, key=key), 4, key=jax.random.key(0))
        >>> axes = pm.layer_axes({"blocks": stack, "head": stack[0]})
        >>> axes["blocks"].layer.weight, axes["head"].weight
        (1, 0)
    """
    return jtu.tree_structure(tree).unflatten([len(holds_of(loc)) for loc in locations(tree)])


class Hold(NamedTuple):
    """One axis of a leaf: of what several are held as one.

    Attributes:
        path: from the root, to the node that holds them.
        whole: from the root, to the node in which they are stacked.
        is_independent: whether they are members that do not see each other.
    """

    path: KeyPath
    whole: KeyPath
    is_independent: bool


def holds_of(loc: Location) -> list[Hold]:
    """The axes of a leaf that are of layers or members, the first axis first."""
    left_out = _LEFT_OUT.get()
    if left_out == "all":
        return []
    # What only says whose child something is has no step in the path.
    nodes = [node for node in loc.nodes if type(node) is not StandsFor]
    found: list[Hold] = []
    for i, node in enumerate(nodes):
        length = _stacked_length(node, loc.path[i:])
        if length is not None:
            independent = getattr(class_of(node), "__has_independent_members__", False)
            found = [] if independent and left_out else found
            hold = Hold(loc.path[:i], loc.path[: i + length], independent)
            found += [] if independent and left_out else [hold]
    return found


_LEFT_OUT: ContextVar[Literal["members", "all"] | None] = ContextVar("left_out", default=None)


def axes_left_out() -> Literal["members", "all"] | None:
    """Which axes trees lack at the moment, though their nodes say otherwise; see `without_axes`."""
    return _LEFT_OUT.get()


@contextlib.contextmanager
def without_axes(which: Literal["members", "all"] | None) -> Generator[None]:
    """Say that trees are of one layer or member, though their nodes say otherwise.

    Args:
        which: `"members"`, if the axes as far as those of the innermost members have been taken
            away by a map; `"all"`, if those of layers have, too; None, if trees are whole again.

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
    """How many leading axes of what is at a path are of layers that are held as one.

    A node that holds layers as one has a method `__stacked__`, without arguments, which gives the
    paths below which every array has one such axis.

    Args:
        nodes: those above, from the root; one for each step of the path.
        path: from the root.

    Returns:
        A number, one for each such node.

    Examples:
        >>> import jax
        >>> class Layers(dict):
        ...     def __stacked__(self):
        ...         return ("['w']",)
        >>> count_member_axes([Layers()], (jax.tree_util.DictKey("w"),))
        1
    """
    return sum(_stacked_length(node, path[i:]) is not None for i, node in enumerate(nodes))


def _stacked_length(node: Any, below: KeyPath) -> int | None:
    """How many steps below a node the part begins that it has stacked, on the way to a leaf."""
    # Asked of any node, for this room does not know layers.
    stacked = getattr(class_of(node), "__stacked__", None)
    if stacked is None:
        return None
    steps = step_names(below)
    starts = (parse_pattern(text) for text in stacked(node))
    return next((len(start) for start in starts if steps[: len(start)] == start), None)
