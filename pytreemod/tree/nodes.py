"""How the tree room opens, names and rebuilds nodes, one level at a time.

JAX's registry has the children of every node. A Module's class says more, by its schema (see
[`module.schema`][pytreemod.module.schema]): which of its attributes are children, which are
configuration, and the role of each.
"""

from __future__ import annotations

import copy
import functools as ft
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax

from pytreemod.errors import nearest
from pytreemod.tree.instances import LeafNotes, flat_of, is_module, notes_of, schema_of
from pytreemod.tree.paths import pattern_text, some_of, step_name, step_names
from pytreemod.typing import IsLeaf, KeyPath, PyTree, class_of, jtu

DEFAULT_ROLE = "param"
DICTS = (dict, OrderedDict, defaultdict)


def own_class(node: object) -> Any:
    """Return the class of a node; for one that was made at run time, that which it passes for."""
    return getattr(type(node), "__passes_for__", type(node))


def is_node(value: object) -> bool:
    """Whether JAX takes `value` apart, judged by its class: the value is not opened."""
    # For JAX, None is a node without children.
    return not jtu.all_leaves([value])


def is_plain_tuple(node: object) -> bool:
    """Whether the items of a tuple, of any class, are all that it holds.

    They are for a tuple and a named tuple without attributes. JAX may take a class that derives
    from one apart into these, too.
    """
    kind = class_of(node)
    if kind is tuple:
        return True
    return tuple in kind.__mro__ and hasattr(kind, "_fields") and not getattr(node, "__dict__", ())


def stop_below() -> Callable[[Any], bool]:
    """Return an `is_leaf` for one walk, which opens the root and nothing below it."""
    # The root comes first. It may contain itself, so that its identity would not tell.
    answers = iter([False])
    return lambda _: next(answers, True)


def children_of(node: PyTree) -> list[tuple[Any, Any]] | None:
    """Return the children of a node with their keys; None where `node` is a leaf."""
    if is_module(node):
        children, (split, *_) = flat_of(node)
        return list(zip(split.keys, children, strict=True))
    if not is_node(node):
        return None
    pairs, _ = jtu.tree_flatten_with_path(node, is_leaf=stop_below())
    return [(path[0], child) for path, child in pairs]


def node_like(node: Any, children: Sequence[tuple[Any, Any]], parts: Sequence[Any]) -> Any:
    """Return a node like another one, which is no Module, with other children.

    Args:
        node: the other one.
        children: its children, with their keys.
        parts: the new ones, in that order.
    """
    if class_of(node) in DICTS:
        made = copy.copy(node)  # In its own order: JAX would sort the keys.
        made.update({key.key: part for (key, _), part in zip(children, parts, strict=True)})
        return made
    return jtu.tree_structure(node, is_leaf=stop_below()).unflatten(parts)


def found_in(
    tree: PyTree, is_meant: Callable[[Any], bool], is_leaf: IsLeaf = None
) -> list[tuple[KeyPath, Any]]:
    """Return the outermost nodes of a tree that satisfy a test, with their paths."""

    def stops(node: Any) -> bool:
        return is_meant(node) or (is_leaf is not None and is_leaf(node))

    leaves = jtu.tree_leaves_with_path(tree, is_leaf=stops)
    return [(path, node) for path, node in leaves if is_meant(node)]


class Location(NamedTuple):
    """A leaf and its location.

    With `is_node`, it is a node instead of a leaf: only a selector that names the node itself
    picks it, not one that names a node above it.

    Among the nodes may be a class: what is below represents an instance of it. A node declares
    this for its children by a method `__token_types__`, which returns a class for each: the values
    of a State represent the tokens that refer to them.
    """

    path: tuple[Any, ...]
    leaf: Any
    nodes: tuple[Any, ...]
    role: str
    is_node: bool = False

    @property
    def holders(self) -> list[Any]:
        """The nodes above, one for each key of the path: without the classes."""
        return [node for node in self.nodes if not isinstance(node, type)]


class InheritedRole(NamedTuple):
    """The role at a path in a tree, with the roles that were given to paths further down.

    The innermost role that was given explicitly wins: a buffer inside a `"lora"` field is a
    buffer, a plain parameter inside it is `"lora"`. A role that an instance was given for a path
    counts as if its class declared it.
    """

    role: str = DEFAULT_ROLE
    given: LeafNotes = ()

    def of_child(self, node: Any, key: Any) -> InheritedRole:
        """Return the role of a child of this node."""
        schema = schema_of(node)
        own = DEFAULT_ROLE if schema is None else schema.role(key.name)
        # A State is no parameter, whatever holds it. This room does not know State.
        own = "buffer" if hasattr(class_of(node), "__token_types__") else own
        role = self.role if own == DEFAULT_ROLE else own
        # An instance gives roles to its own fields and the containers in them, no further.
        given = self.given if schema is None else notes_of(node).roles
        if not given:
            return InheritedRole(role)
        name = step_name(key)
        below = [(steps[1:], given_role) for steps, given_role in given if steps[0] == name]
        role = next((given_role for steps, given_role in below if not steps), role)
        return InheritedRole(role, tuple(item for item in below if item[0]))


def leaves_shown(locs: Sequence[Location]) -> list[str]:
    """Return the leaves of a tree, for an error."""
    return [f"the tree has: {some_of([pattern_text(s.path) for s in locs]) or 'no leaves'}"]


def nearest_path(steps: Iterable[str], locs: Sequence[Location]) -> str:
    """Return a suggestion for a path that matches nothing, as `errors.nearest` does.

    Args:
        steps: its keys.
        locs: the leaves, or nodes, of the tree.
    """
    there = (".".join(step_names(loc.path[: n + 1])) for loc in locs for n in range(len(loc.path)))
    return nearest(".".join(steps), dict.fromkeys(there))


def locations(tree: PyTree, is_leaf: IsLeaf = None, with_empty: bool = False) -> Iterator[Location]:
    """Yield every leaf of `tree` in JAX's order, with its path, the nodes above it and its role.

    Args:
        tree: the tree.
        is_leaf: where to stop descending.
        with_empty: whether a node without children counts as a leaf, too.
    """
    yield from _below(Location((), tree, (), DEFAULT_ROLE), InheritedRole(), is_leaf, with_empty)


def _below(
    loc: Location, here: InheritedRole, is_leaf: IsLeaf, with_empty: bool
) -> Iterator[Location]:
    path, node, above, *_ = loc
    children = None if is_leaf is not None and is_leaf(node) else children_of(node)
    if children is None or (with_empty and not children):
        yield loc
        return
    # Looked up on any node, because this room does not know State.
    kinds = getattr(node, "__token_types__", None)
    marks = [()] * len(children) if kinds is None else [(kind,) for kind in kinds()]
    for (key, child), mark in zip(children, marks, strict=True):
        role = here.of_child(node, key)
        inner = Location((*path, key), child, (*above, node, *mark), role.role)
        yield from _below(inner, role, is_leaf, with_empty)


# Cached, because it walks through a tree: without this line, an eager `filter_grad` of 21 layers
# would take an eighth longer.
@ft.lru_cache(maxsize=512)
def roles_of(treedef: Any) -> tuple[str, ...]:
    """Return the roles of the leaves of a tree that has this structure, whatever they are."""
    # A node of another library may look at the shapes of its children.
    tree = treedef.unflatten([jax.ShapeDtypeStruct((), "float32")] * treedef.num_leaves)
    return tuple([loc.role for loc in locations(tree)])


def tied_paths(tree: PyTree) -> dict[KeyPath, KeyPath]:
    """Return the source of each tied path in a tree."""
    return {(*path, *tie.place): (*path, *tie.source) for path, tie in all_ties(tree)}


def all_ties(node: PyTree, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the ties in a tree, each with the path of the Module that keeps it."""
    if is_module(node):
        yield from ((path, tie) for tie in notes_of(node).ties)
    for key, child in children_of(node) or ():
        yield from all_ties(child, (*path, key))


_T = TypeVar("_T")


def with_new_containers(tree: _T) -> _T:
    """Return a tree with new lists and dicts; nodes that contain none are shared.

    Args:
        tree: any tree.

    Returns:
        An equal tree; the same object if nothing in it can be edited.
    """
    return _renewed(None, tree)


def _renewed(_: Any, node: Any) -> Any:
    # The values of a State cannot be edited. Most nodes are arrays, which JAX knows fastest.
    if not is_node(node) or hasattr(class_of(node), "__token_types__"):
        return node
    return with_children(node, _renewed, class_of(node) in _EDITABLE)


_EDITABLE = frozenset({list, *DICTS})


def with_children(node: Any, visit: Callable[[Any, Any], Any], is_new: bool = False) -> Any:
    """Copy a node with other children.

    Args:
        node: the node. It is returned itself if no child changes: its snapshot stays valid.
        visit: returns the new child for a key and a child.
        is_new: whether to copy the node anyway.
    """
    children = children_of(node) or []
    changes: dict[Any, Any] = {}
    parts: list[Any] = []
    # No comprehension: it would add a frame per level of the tree, and Python allows a thousand.
    for key, child in children:
        parts.append(visit(key, child))
        if parts[-1] is not child:
            changes[key] = parts[-1]
    if not changes and not is_new:
        return node
    schema = schema_of(node)
    if schema is None:
        return node_like(node, children, parts)
    return schema.rebuild(node, {key.name: part for key, part in changes.items()})
