"""The shardings of a jitted function: `in_shardings` and `out_shardings`.

They are JAX's own options, so that programs seen through `lower` have them, and nothing is added to
a program. The structure of a call gives the tree for its arguments. The structure of the result is
unknown before the trace: its arrays are returned in groups, one for each sharding in the spec.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytreemod.errors import ArgumentError, describe
from pytreemod.transform import placements
from pytreemod.transform.arguments import Named
from pytreemod.transform.packing import Grouped, pack, pack_groups
from pytreemod.transform.sowing import split_sown
from pytreemod.tree.snapshots import divide
from pytreemod.typing import PyTree, jtu


class _Shardings:
    """A spec as an option: compared by value if possible, or else by identity."""

    __slots__ = ("identity", "spec")

    where: str

    def __init__(self, spec: Any):
        self.spec = spec
        leaves, treedef = jtu.tree_flatten(spec, is_leaf=placements.is_placement_spec)
        asking = [value for value in placements.known_placements(spec) if callable(value)]
        if asking:
            # One program serves arrays of many shapes.
            fact = f"{self.where}: {describe(asking[0])} looks at arrays"
            raise ArgumentError(fact, hint="pm.by({path: sharding, ...: None})")
        self.identity: Any = (tuple(leaves), treedef)
        try:
            hash(self.identity)
        except TypeError:
            # Equal to itself alone: a wrong comparison would find the program of another spec.
            self.identity = object()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Shardings) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)

    def __repr__(self) -> str:
        return repr(self.spec)


class ArgumentShardings(_Shardings):
    """The shardings of the arguments."""

    __slots__ = ()

    where = "filter_jit(in_shardings)"

    def resolve(self, named: Named, positional: int, known: Sequence[str]) -> list[list[Any]]:
        """Return the sharding of each array of each argument."""
        found = placements.placements_by_argument(self.spec, named, positional, known, self.where)
        for placed in found:
            placements.check_placements(placed, self.where)
        return [[placements.as_sharding(each.to) for each in placed] for placed in found]


class ResultShardings(_Shardings):
    """The shardings of the result."""

    __slots__ = ()

    where = "filter_jit(out_shardings)"

    @property
    def prefix(self) -> Any:
        """`out_shardings` for JAX: one for all, or one for each group of `pack`."""
        if placements.is_placement(self.spec):
            return placements.as_sharding(self.spec)
        return Grouped(
            None, [None, *map(placements.as_sharding, placements.known_placements(self.spec))]
        )

    def pack(self, result: PyTree) -> Any:
        """Pack a traced result as `prefix` needs it."""
        if placements.is_placement(self.spec):
            return pack(result)
        own, _ = split_sown(result)
        placed = placements.placements_of(self.spec, own, self.where, "result")
        placements.check_placements(placed, self.where)
        treatments = [None, *placements.known_placements(self.spec)]
        groups = [treatments.index(each.to) for each in placed]
        # What is sown stays where it is.
        groups += [0] * (len(divide(result)[0]) - len(groups))
        return pack_groups(result, groups, len(treatments))
