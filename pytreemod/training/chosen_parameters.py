"""Parameters that a selector picks, to be replaced by another form.

A parameter is an array, or a computed leaf as a whole. In a Stack or an Ensemble it is the array of
one layer or member: the replacement is made under a map, so that a computed leaf has the shapes of
one layer's arrays, and can be read when a layer is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax

from pytreemod.errors import SpecError, describe
from pytreemod.module.reading import is_computed
from pytreemod.transform.vmap import filter_vmap
from pytreemod.tree.members import count_member_axes
from pytreemod.tree.nodes import DEFAULT_ROLE, Represents, locations, record_of
from pytreemod.tree.paths import path_text
from pytreemod.tree.renewing import with_new_containers
from pytreemod.tree.surgery import replace_at
from pytreemod.typing import KeyPath, jtu, untyped_jax

_M = TypeVar("_M")


class Parameter(NamedTuple):
    """An array, a computed leaf, or another leaf, with its path."""

    path: KeyPath
    node: Any
    first: int
    """The number of its first leaf that is picked."""

    axes: int
    """The number of its layer axes."""

    is_declared: bool
    """Whether its class declares no role for it, whatever role it was given since."""

    def text(self) -> str:
        """Return the path."""
        return path_text(self.path)

    def map(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Call a function with the array of each layer, which may be abstract."""
        for _ in range(self.axes):
            fn = filter_vmap(fn)
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jtu.tree_leaves(self.node)):
            return untyped_jax.eval_shape(fn, self.node, *args)
        return fn(self.node, *args)


def replace_parameters(
    where: str, model: _M, picks: Sequence[bool], make: Callable[[Parameter], Any]
) -> _M:
    """Replace the parameters that are picked; a computed leaf, once, if any part of it is.

    Args:
        where: the name of the function, and what picks them, for the error.
        model: any tree.
        picks: whether each leaf is picked.
        make: returns the new node for a parameter; None leaves it.

    Returns:
        A new model.

    Raises:
        SpecError: if none is replaced.

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> linear = pm.nn.Linear(3, 2, key=jax.random.key(0))
        >>> picks = pm.select.path("bias").mask(linear)
        >>> replace_parameters("halve", linear, picks, lambda one: one.node / 2).bias.shape
        (2,)
    """
    chosen: dict[KeyPath, Parameter] = {}
    for i, (loc, is_picked) in enumerate(zip(locations(model), picks, strict=True)):
        # A node that only says whose child a value is adds no key to the path.
        nodes = [node for node in loc.nodes if type(node) is not Represents]
        length = next((i for i, node in enumerate(nodes) if is_computed(node)), len(nodes))
        path, node = loc.path[:length], (*nodes, loc.leaf)[length]
        records = zip(map(record_of, nodes), path, strict=False)
        roles = (DEFAULT_ROLE if r is None else r.role(key.name) for r, key in records)
        is_declared = len(nodes) == len(loc.nodes) and all(r == DEFAULT_ROLE for r in roles)
        if is_picked:
            axes = count_member_axes(nodes[:length], path)
            chosen.setdefault(path, Parameter(path, node, i, axes, is_declared))
    pairs = [(one.path, make(one)) for one in chosen.values()]
    changes = [(path, made) for path, made in pairs if made is not None]
    if not changes:
        at = [f"{one.text()}: {describe(one.node)}" for one in chosen.values()]
        raise SpecError(f"{where} picks nothing that can be replaced", at=at)
    return replace_at(with_new_containers(model), changes)
