"""`Shared`: ties with Equinox's interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytreemod.errors import ShapeError
from pytreemod.module.classes import Module
from pytreemod.module.fields import field
from pytreemod.transform.abstract_calls import filter_eval_shape
from pytreemod.tree.surgery import tree_at
from pytreemod.typing import PyTree


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
        ShapeError: if a replacement has another structure, shape or dtype than the node.
        SpecError: if `where` picks a node that is not in the tree.

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
    where: Callable[[Any], Any] = field(static=True)
    get: Callable[[Any], Any] = field(static=True)

    def __init__(
        self, pytree: PyTree, where: Callable[[Any], Any], get: Callable[[Any], Any]
    ) -> None:
        self.where, self.get = where, get
        # By shapes alone: `get` may compute, and its current result is not stored.
        wanted, found = (str(filter_eval_shape(pick, pytree)) for pick in (where, get))
        if wanted != found:
            raise ShapeError("Shared(get)", f"a value that fits {wanted}", found)
        self.pytree = tree_at(where, pytree, replace_fn=lambda _: SharedNode())

    def __call__(self) -> PyTree:
        """Return the tree, with all its nodes."""
        return tree_at(self.where, self.pytree, self.get(self.pytree))


class SharedNode(Module):
    """Marks the path of a removed node; it has no leaves."""
