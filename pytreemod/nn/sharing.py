"""`Shared`: ties with Equinox's interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from pytreemod.errors import ShapeError, SpecError, describe, explain
from pytreemod.module.classes import Module
from pytreemod.module.fields import field
from pytreemod.nn.arguments import function, named
from pytreemod.nn.calling import in_scope
from pytreemod.transform.abstract_calls import filter_eval_shape
from pytreemod.tree.locating import locate
from pytreemod.tree.paths import path_text
from pytreemod.tree.surgery import tree_at
from pytreemod.typing import PyTree, class_of, jtu


class Shared(Module):
    """Ties nodes of a tree; a call returns the whole tree.

    Removes the nodes that `where` picks, so that each shared array exists once. Its gradient is
    the sum over all uses. `shared()` returns the tree with the nodes that `get` returns.

    [`pm.tie`][pytreemod.tie] does the same to a model directly, without a call: the attribute reads
    as the value, and files record which paths are tied.

    Shapes:
        return: the tree

    Fields:
        pytree: the tree, without the nodes that `where` picks
        where: configuration
        get: configuration

    Args:
        pytree: any tree.
        where: picks the nodes to take out, one or a sequence, as for `tree_at`.
        get: from the tree to the replacements: as many nodes, computed or not.

    Raises:
        ArgumentError: if `where` or `get` is not callable.
        ShapeError: if a replacement has another structure, shape or dtype than the node.
        SpecError: if `where` picks a node that is not in the tree; or `get` uses a removed node.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> k1, k2 = jax.random.split(jax.random.key(0))
        >>> pair = nn.Embedding(5, 3, key=k1), nn.Linear(3, 5, key=k2)
        >>> shared = nn.Shared(pair, lambda pair: pair[1].weight, lambda pair: pair[0].weight)
        >>> [leaf.shape for leaf in jax.tree.leaves(shared)]
        [(5, 3), (5,)]
        >>> embedding, linear = shared()
        >>> linear.weight is embedding.weight
        True
    """

    pytree: PyTree
    where: Callable[[Any], Any] = field(accepts=function("a function of the tree"))
    get: Callable[[Any], Any] = field(accepts=function("a function of the tree"))

    def __init__(
        self, pytree: PyTree, where: Callable[[Any], Any], get: Callable[[Any], Any]
    ) -> None:
        self.where, self.get = where, get
        targets = locate(where, pytree, None, named(self, "where")).targets
        places = [path_text(target.path) for target in targets]
        picked = where(pytree)
        # By shapes alone: `get` may compute, and its current result is not stored.
        _check_alike(places, picked, filter_eval_shape(get, pytree))
        self.pytree = tree_at(where, pytree, replace_fn=_take_out)
        _check_apart(places, self.pytree, get)

    @in_scope("pm.nn.Shared")
    def __call__(self) -> PyTree:
        """Return the tree, with all its nodes."""
        return tree_at(self.where, self.pytree, self.get(self.pytree))


class SharedNode(Module):
    """Marks the path of a removed node; it has no leaves."""


def _take_out(node: Any) -> SharedNode:
    del node
    return SharedNode()


def _is_taken_out(node: Any) -> bool:
    return isinstance(node, SharedNode)


def _check_alike(places: Sequence[str], picked: Any, given: Any) -> None:
    """Refuse replacements that do not fit the removed nodes."""
    wanted, found = _outline(picked), _outline(given)
    if wanted == found:
        return
    if len(places) > 1 and jtu.tree_structure(picked) != jtu.tree_structure(given):
        hint = [
            "return a node for each, in the same kind of sequence:",
            "lambda tree: (tree.a, tree.b)",
        ]
    else:
        hint = ["change the shape in the function:", "lambda pair: jnp.transpose(pair[0].weight)"]
    raise ShapeError(
        "Shared(get)", f"a value that fits {_shown(picked)}", _shown(given), at=places, hint=hint
    )


def _outline(tree: Any) -> tuple[Any, ...]:
    leaves, structure = jtu.tree_flatten(tree)
    return structure, [
        (leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else ((), class_of(leaf))
        for leaf in leaves
    ]


def _shown(tree: Any) -> str:
    leaves = jtu.tree_leaves_with_path(tree)
    named_leaves = [(path_text(path) if path else "", describe(leaf)) for path, leaf in leaves]
    return ", ".join(f"{name} {shape}".strip() for name, shape in named_leaves) or "no array"


def _check_apart(places: Sequence[str], rest: Any, get: Callable[[Any], Any]) -> None:
    """Refuse replacements that use removed nodes."""
    try:
        given = filter_eval_shape(get, rest)
    except (AttributeError, TypeError) as error:
        # It worked with these nodes, so it computes with one of them.
        raise SpecError(_circle(places)) from error
    if any(map(_is_taken_out, jax.tree.leaves(given, is_leaf=_is_taken_out))):
        raise SpecError(_circle(places))


def _circle(places: Sequence[str]) -> str:
    found = "a node that `where` removes"
    return explain("Shared(get)", "nodes that stay in the tree", found, at=places)
