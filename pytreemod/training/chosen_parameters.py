"""Parameters that a selector chooses, to be replaced by another form.

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
from pytreemod.transform.maps.vmap import filter_vmap
from pytreemod.tree.members import count_member_axes
from pytreemod.tree.nodes import Location, StandsFor, locations
from pytreemod.tree.selecting import Selector
from pytreemod.typing import KeyPath


class Parameter(NamedTuple):
    """An array, a computed leaf, or another leaf, with its path."""

    path: KeyPath
    node: Any
    members: int
    """How many axes are of layers that are held as one."""

    def sizes(self) -> tuple[int, ...]:
        """How many layers are held as one, for each of these axes."""
        return np.shape(jax.tree.leaves(self.node)[0])[: self.members]

    def each(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A function for each of the layers."""
        for _ in range(self.members):
            fn = filter_vmap(fn)
        return fn


def choose_parameters(model: Any, selector: Selector) -> list[Parameter]:
    """What a selector chooses; a computed leaf if it chooses any part of it, and once.

    Args:
        model: any tree.
        selector: which leaves.

    Returns:
        In the order of the leaves.

    Raises:
        SpecError: the selector names what is not in the tree.

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
    # What only says whose child something is has no step in the path.
    nodes = [node for node in loc.nodes if type(node) is not StandsFor]
    length = next((i for i, node in enumerate(nodes) if is_computed(node)), len(nodes))
    path, node = loc.path[:length], (*nodes, loc.leaf)[length]
    return Parameter(path, node, count_member_axes(nodes[:length], path))
