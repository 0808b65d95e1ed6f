"""What a differentiated function returns: a pair with has_aux, and any tree in any case."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pytreemod.errors import ArgumentError, PytreemodError, describe, explain
from pytreemod.transform.derivatives.chosen_leaves import fill
from pytreemod.typing import PyTree, class_of, jtu


def pair_of(
    result: Any,
    where: str,
    pair: str,
    *,
    reason: str = "",
    error: type[PytreemodError] = ArgumentError,
) -> tuple[Any, Any]:
    """The two values that a function or a rule has to return.

    Args:
        result: what it returned.
        where: what to call it in errors.
        pair: what the two are: `loss, aux`.
        reason: why there have to be two.
        error: the class of error to raise.

    Returns:
        The pair.

    Raises:
        ArgumentError: it is no pair, unless `error` says otherwise.
    """
    kind: Any = class_of(result)
    values: list[Any] = list(result) if issubclass(kind, (tuple, list)) else []
    if len(values) != 2:
        got = f"{len(values)} values" if issubclass(kind, (tuple, list)) else describe(result)
        cure = ["return both:", f"return {pair}"]
        raise error(explain(where, f"a pair ({pair}){reason}", got, cure=cure))
    return values[0], values[1]


class Parted:
    """A result without the leaves that are differentiated, and what came with it."""

    __slots__ = ("aux", "mask", "others", "treedef")

    def __init__(self, treedef: Any, mask: tuple[bool, ...], others: list[Any], aux: Any):
        self.treedef = treedef
        self.mask = mask
        self.others = others
        self.aux = aux

    def join(self, chosen: Iterable[Any]) -> PyTree:
        """The result."""
        return self.treedef.unflatten(fill(self.mask, chosen, self.others))

    def place(self, derivatives: Iterable[Any]) -> PyTree:
        """A tree like the result, with something for each differentiated leaf, else None."""
        return self.treedef.unflatten(fill(self.mask, derivatives, [None] * len(self.mask)))


def _flatten(node: Parted) -> tuple[tuple[Any, Any], Any]:
    return (node.others, node.aux), (node.treedef, node.mask)


def _unflatten(config: Any, children: Any) -> Parted:
    return Parted(*config, *children)


# It goes through JAX beside what is differentiated, as any result does.
jtu.register_pytree_node(Parted, _flatten, _unflatten)


def part(result: PyTree, mask: Sequence[bool], aux: Any = None) -> tuple[list[Any], Parted]:
    """Part a result: the leaves that are differentiated, and the rest.

    Args:
        result: any tree.
        mask: which of its leaves are differentiated.
        aux: what comes with the result.

    Returns:
        The leaves, and the rest, which knows how to join them.
    """
    leaves, treedef = jtu.tree_flatten(result)
    others = [None if m else x for x, m in zip(leaves, mask, strict=True)]
    chosen = [x for x, m in zip(leaves, mask, strict=True) if m]
    return chosen, Parted(treedef, tuple(mask), others, aux)
