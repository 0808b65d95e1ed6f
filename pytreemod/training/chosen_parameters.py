"""Parameters that a selector picks, to be replaced by another form.

A parameter is an array, or a computed leaf as a whole. In a Stack or an Ensemble it is the array of
one layer or member: the replacement is made under a map, so that a computed leaf has the shapes of
one layer's arrays, and can be read when a layer is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from pytreemod.module.reading import is_computed
from pytreemod.transform.vmap import filter_vmap
from pytreemod.tree.members import count_member_axes
from pytreemod.tree.nodes import DEFAULT_ROLE, Represents, locations, record_of
from pytreemod.typing import KeyPath


class Parameter(NamedTuple):
    """An array, a computed leaf, or another leaf, with its path."""

    path: KeyPath
    node: Any
    members: int
    """The number of its layer axes."""

    is_declared: bool
    """Whether its class declares no role for it, whatever role it was given since."""

    def sizes(self) -> tuple[int, ...]:
        """Return the length of each of these axes."""
        return np.shape(jax.tree.leaves(self.node)[0])[: self.members]

    def each(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Map a function over the layers."""
        for _ in range(self.members):
            fn = filter_vmap(fn)
        return fn


def choose_parameters(model: Any, picks: Sequence[bool]) -> list[Parameter]:
    """The parameters that are picked; a computed leaf, once, if any part of it is.

    Args:
        model: any tree.
        picks: whether each leaf is picked.

    Returns:
        The parameters, in the order of the leaves.

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> linear = pm.nn.Linear(3, 2, key=jax.random.key(0))
        >>> [one.path for one in choose_parameters(linear, pm.select.path("bias").mask(linear))]
        [(GetAttrKey(name='bias'),)]
    """
    chosen: dict[KeyPath, Parameter] = {}
    for loc, is_picked in zip(locations(model), picks, strict=True):
        # A node that only says whose child a value is adds no key to the path.
        nodes = [node for node in loc.nodes if type(node) is not Represents]
        length = next((i for i, node in enumerate(nodes) if is_computed(node)), len(nodes))
        path, node = loc.path[:length], (*nodes, loc.leaf)[length]
        records = zip(map(record_of, nodes), path, strict=False)
        roles = (DEFAULT_ROLE if r is None else r.role(key.name) for r, key in records)
        is_declared = len(nodes) == len(loc.nodes) and all(r == DEFAULT_ROLE for r in roles)
        if is_picked:
            members = count_member_axes(nodes[:length], path)
            chosen.setdefault(path, Parameter(path, node, members, is_declared))
    return [*chosen.values()]
