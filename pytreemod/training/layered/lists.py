"""Models in the form that transformations get: layers in a list, one alone, or some leaves."""

from __future__ import annotations

import functools as ft
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pytreemod.tree.members import Hold, holds_of
from pytreemod.tree.nodes import locations
from pytreemod.typing import KeyPath, PyTree, jtu


class HeldLeaf(NamedTuple):
    """A leaf of parameters: its layer axes, and its shape.

    Attributes:
        holds: its layer axes.
        members: the number of those down to the innermost members, which are mapped over.
    """

    holds: tuple[Hold, ...]
    members: int

    @property
    def layers(self) -> tuple[Hold, ...]:
        """The axes of layers, below the members."""
        return self.holds[self.members :]


def leaves_of(tree: PyTree) -> list[HeldLeaf]:
    """Return the layer axes of each leaf of a tree, in order."""
    leaves: list[HeldLeaf] = []
    for loc in locations(tree):
        holds = tuple(holds_of(loc))
        last = max((i for i, hold in enumerate(holds) if hold.is_independent), default=-1)
        leaves.append(HeldLeaf(holds, last + 1))
    return leaves


def bare(leaf: Any, axes: int) -> Any:
    """Return the array of one layer, without some leading axes."""
    return jax.ShapeDtypeStruct(jnp.shape(leaf)[axes:], jnp.result_type(leaf))


def abstract(tree: PyTree) -> PyTree:
    """Return the shapes of a tree."""
    return jtu.tree_map(ft.partial(bare, axes=0), tree)


def without(params: PyTree, axes: Sequence[int]) -> PyTree:
    """Return the shapes of one layer, or member: each leaf without some leading axes."""
    leaves, structure = jtu.tree_flatten(params)
    return structure.unflatten([bare(x, n) for x, n in zip(leaves, axes, strict=True)])


def only(params: PyTree, own: Sequence[int]) -> PyTree:
    """Return some leaves, by number; None instead of the others, as for frozen leaves."""
    leaves, structure = jtu.tree_flatten(params)
    return structure.unflatten([x if i in own else None for i, x in enumerate(leaves)])


# ---- layers in a list


@jtu.register_pytree_with_keys_class
class Layers:
    """A list of layers, instead of the node that has them stacked."""

    def __init__(self, items: Sequence[Any]):
        self.items = tuple(items)

    def tree_flatten_with_keys(self) -> Any:
        """Return the layers by number."""
        return [(jtu.SequenceKey(i), item) for i, item in enumerate(self.items)], None

    @classmethod
    def tree_unflatten(cls, aux: None, children: Any) -> Layers:
        """Return the inverse."""
        return cls(children)


def _is_layers(node: Any) -> bool:
    return isinstance(node, Layers)


def listed(tree: PyTree, axis: int = 0, copies: int | None = None, by_leaf: bool = False) -> PyTree:
    """Return a tree with a list of layers instead of each layer axis.

    Args:
        tree: its leaves have no axes of members.
        axis: of the layers.
        copies: the number of layers, if it differs from the length of the axis.
        by_leaf: whether each leaf becomes a list of its rows instead, so that a mask, or a function
            of the model, still fits the tree.
    """
    if by_leaf:
        leaves, structure = jtu.tree_flatten(tree)
        pairs = zip(leaves, leaves_of(tree), strict=True)
        return structure.unflatten([_rows(x, len(of.layers), axis, copies) for x, of in pairs])
    wholes: dict[KeyPath, int] = {}
    for loc, leaf in zip(locations(tree), leaves_of(tree), strict=True):
        if leaf.layers:
            wholes[leaf.layers[0].whole] = copies or jnp.shape(loc.leaf)[axis]

    def visit(path: KeyPath, node: Any) -> Any:
        count = wholes.get(path)
        if count is None:
            return node

        leaves, structure = jtu.tree_flatten(node)
        items = [structure.unflatten([_item(x, i, axis) for x in leaves]) for i in range(count)]
        return Layers([listed(item, axis, copies) for item in items])

    def is_whole(path: KeyPath, node: Any) -> bool:
        return path in wholes

    if not wholes:
        return tree
    return jtu.tree_map_with_path(visit, tree, is_leaf=is_whole, is_leaf_takes_path=True)


def _rows(leaf: Any, axes: int, axis: int, copies: int | None) -> Any:
    if not axes:
        return leaf
    rows = [_item(leaf, i, axis) for i in range(copies or jnp.shape(leaf)[axis])]
    return Layers([_rows(row, axes - 1, axis, copies) for row in rows])


def _item(leaf: Any, i: int, axis: int) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape[:axis] + leaf.shape[axis + 1 :], leaf.dtype)
    return leaf[(slice(None),) * axis + (i,)]


def as_one(tree: PyTree) -> PyTree:
    """Return the inverse of `listed`."""

    def stack(*each: Any) -> Any:
        return jnp.stack(each)

    def visit(node: Any) -> Any:
        if not _is_layers(node):
            return node
        return jtu.tree_map(stack, *map(as_one, node.items))

    return jtu.tree_map(visit, tree, is_leaf=_is_layers)


def owners(two: PyTree) -> list[tuple[Any, tuple[int, ...]]]:
    """Return the number and the layer of each leaf of a tree in which layers are listed."""
    found: list[tuple[Any, tuple[int, ...]]] = []
    for loc in locations(two):
        steps = list(zip((type(node) is Layers for node in loc.nodes), loc.path, strict=True))
        leaf = tuple(key for is_number, key in steps if not is_number)
        found.append((leaf, tuple(key.idx for is_number, key in steps if is_number)))
    return found
