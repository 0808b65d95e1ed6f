"""Parameters that a selector picks, to be replaced by another form.

A parameter is an array, or a computed leaf as a whole. In a Stack or an Ensemble it is the array of
one layer or member: the replacement is made under a map, so that a computed leaf has the shapes of
one layer's arrays, and can be read when a layer is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from pytreemod.module.reading import is_computed
from pytreemod.transform.vmap import filter_vmap
from pytreemod.tree.members import count_member_axes
from pytreemod.tree.nodes import Location, Represents, locations
from pytreemod.tree.selecting import Selector
from pytreemod.typing import KeyPath


class Parameter(NamedTuple):
    """An array, a computed leaf, or another leaf, with its path."""

    path: KeyPath
    node: Any
    members: int
    """The number of its layer axes."""

    def sizes(self) -> tuple[int, ...]:
        """Return the length of each of these axes."""
        return np.shape(jax.tree.leaves(self.node)[0])[: self.members]

    def each(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Map a function over the layers."""
        for _ in range(self.members):
            fn = filter_vmap(fn)
        return fn


def choose_parameters(model: Any, selector: Selector) -> list[Parameter]:
    """The parameters that a selector picks; a computed leaf, once, if it picks any part of it.

    Args:
        model: any tree.
        selector: picks the leaves.

    Returns:
        The parameters, in the order of the leaves.

    Raises:
        SpecError: if the selector names something that is not in the tree.

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> linear = pm.nn.Linear(3, 2, key=jax.random.key(0))
        >>> [one.path for one in choose_parameters(linear, pm.select.path("bias"))]
        [(GetAttrKey(name='bias'),)]
    """
    chosen: dict[KeyPath, Parameter] = {}
    for loc, hit in zip(locations(model), selector.mask(model), strict=True):
        if hit:
            parameter = _parameter(loc)
            chosen.setdefault(parameter.path, parameter)
    return [*chosen.values()]


def _parameter(loc: Location) -> Parameter:
    # A node that only says whose child a value is adds no key to the path.
    nodes = [node for node in loc.nodes if type(node) is not Represents]
    length = next((i for i, node in enumerate(nodes) if is_computed(node)), len(nodes))
    path, node = loc.path[:length], (*nodes, loc.leaf)[length]
    return Parameter(path, node, count_member_axes(nodes[:length], path))
