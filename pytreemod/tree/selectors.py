"""The selectors that users write; `pytreemod.select` is this file.

**Laws.** For selectors `a`, `b` and every tree: `(a & b)`, `(a | b)` and `~a` pick leaves as
*and*, *or* and *not* do, so that De Morgan's laws, distributivity and double negation are true.
"""

from __future__ import annotations

import builtins

from pytreemod.tree import selecting
from pytreemod.tree.selecting import Selector
from pytreemod.typing import Where

__all__ = ["Selector", "at", "path", "role", "type"]

matrices: Selector = selecting.LeafSelector("matrices", selecting.is_matrix)
"""Floating arrays with two axes in each layer of a `Stack` and each member of an `Ensemble`.

An optimizer for matrices, such as Muon, trains these:
`pm.by({"embed": adamw, "head": adamw, pm.matrices: muon, ...: adamw})`. Embeddings and heads are
matrices, too: another selector has to pick them first. Kernels of convolutions have more than two
axes and are not picked. The how-to "An optimizer per group" shows how to flatten them for Muon.
"""


def path(pattern: str) -> Selector:
    """Select leaves by path: `select.path("blocks.*.attention")`.

    A key is an attribute's name, an index or a dict key. `*` matches one key, `**` any number;
    within a key, `*` and `?` work as in file names. `layers[2].weight`,
    `layers.2.weight` and `layers/2/weight` mean the same. A dict key that contains a dot or a slash
    is quoted: `params['mlp/linear']`. A pattern that matches a node picks all leaves below it.

    Args:
        pattern: keys and wildcards.

    Returns:
        A selector. It raises an error for a tree in which it matches nothing.

    Raises:
        SpecError: if the pattern is malformed.

    Examples:
        >>> import pytreemod as pm
        >>> pm.filter({"a": [1, 2], "b": 3}, pm.select.path("a.*"))
        {'a': [1, 2], 'b': None}
    """
    return selecting.PathSelector(pattern)


def type(*types: builtins.type) -> Selector:
    """Select every leaf below a node of one of the given types, and leaves of these types.

    Args:
        *types: classes.

    Returns:
        A selector.

    Examples:
        >>> import pytreemod as pm
        >>> pm.filter([(1, 2), 3], pm.select.type(tuple))
        [(1, 2), None]
    """
    return selecting.type_selector(types)


def role(*roles: str) -> Selector:
    """Select leaves by the role given in `field(role=...)`; `"param"` is the default role.

    Args:
        *roles: names of roles.

    Returns:
        A selector.

    Examples:
        >>> import pytreemod as pm
        >>> class Scaled(pm.Module):
        ...     weight: float
        ...     mean: float = pm.buffer()
        >>> pm.filter(Scaled(1.0, 2.0), pm.select.role("buffer"))
        Scaled(weight=None, mean=2.0 (buffer))
    """
    return selecting.role_selector(roles)


def at(where: Where) -> Selector:
    """Select leaves by access, as in [`tree_at`][pytreemod.tree_at]: `select.at(lambda m: m.head)`.

    Args:
        where: a function from the tree to a node, or to a sequence of nodes.

    Returns:
        A selector of everything at or below these nodes. It refuses a tree in which `where`
        returns part of a leaf, as `lambda m: m.blocks[0].weight` does if `m.blocks` is a
        `Stack`.

    Examples:
        >>> import pytreemod as pm
        >>> pm.filter({"a": [1, 2], "b": 3}, pm.select.at(lambda t: t["a"][0]))
        {'a': [1, None], 'b': None}
    """
    return selecting.AccessSelector(where)
