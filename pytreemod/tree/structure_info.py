"""What all trees of one structure have in common: the roles of their leaves, and rare nodes.

Transforms take care of things that few trees have: only a State can be used up, only a computed
leaf can be misread among gradients. Whether a tree has such a node follows from its structure. So
it is computed once per structure, and a call with trees that have none pays one look-up for all.
"""

from __future__ import annotations

import functools as ft
from typing import Any, NamedTuple

import jax

from pytreemod.tree.nodes import locations, schema_of
from pytreemod.tree.snapshots import AbstractState
from pytreemod.typing import jtu


class StructureInfo(NamedTuple):
    """Traits that all trees of one structure have in common.

    Attributes:
        roles: of the leaves, in JAX's order.
        has_states: whether a node is a state.
        has_computed: whether a node is a computed leaf.
        has_modules: whether a node is a Module.
    """

    roles: tuple[str, ...]
    has_states: bool
    has_computed: bool
    has_modules: bool


# Cached, because it walks through a tree: without this line, an eager `filter_grad` of 21 layers
# would take an eighth longer.
@ft.lru_cache(maxsize=512)
def info_of(treedef: Any) -> StructureInfo:
    """Return the traits of trees that have this structure.

    **Law.** `info_of(jax.tree.structure(tree))` is the same for all trees of that structure,
    whatever their leaves are.

    Args:
        treedef: as JAX gives it.
    """
    # Any leaves would do; but a node of another library may look at the shapes of its children.
    tree = treedef.unflatten([jax.ShapeDtypeStruct((), "float32")] * treedef.num_leaves)
    nodes: list[Any] = []
    # It notes each node, and calls none a leaf.
    jtu.tree_leaves(tree, is_leaf=nodes.append)
    schemas = [schema for schema in map(schema_of, nodes) if schema is not None]
    return StructureInfo(
        roles=tuple(loc.role for loc in locations(tree)),
        has_states=any(isinstance(node, AbstractState) for node in nodes),
        has_computed=any(schema.computes for schema in schemas),
        has_modules=bool(schemas),
    )
