"""Return the checks of a program, and add them to the queue of its function.

The summary of the checks is one more array of the packed result. The caller that unpacks the
result (a call, or a compiled program) removes it again: the plan of the result does this.
"""

from __future__ import annotations

from typing import Any, cast

import jax

from pytreemod.transform.boundary.packing import Grouped
from pytreemod.transform.boundary.sowing import Collected
from pytreemod.transform.host.later_checks import Checks, Pending, Recorded, summarize
from pytreemod.transform.host.runtime_checks import check_again
from pytreemod.typing import Tracer, jtu


def prefix_with_checks(prefix: Any) -> Grouped:
    """`out_shardings` for the result of `with_checks`; the summary may be on any device.

    Args:
        prefix: a sharding, or one for each group.
    """
    groups = prefix.groups if type(prefix) is Grouped else [prefix]
    return Grouped(None, [*groups, None])


def with_checks(packed: Any, found: Collected, pending: Pending, *, is_grouped: bool) -> Any:
    """Return a packed result with the summary of its checks.

    Args:
        packed: the result of `pack` or `group`.
        found: the recorded checks.
        pending: the queue of the function.
        is_grouped: whether JAX expects the groups of `prefix_with_checks`.
    """
    ((plan, arrays),) = packed.items()
    if found.values:
        pairs = zip(found.labels, found.values, strict=True)
        recorded = [Recorded(cast("Any", label.source), code.shape) for label, code in pairs]
        checks, summary = Checks(recorded), summarize(found.values)
    elif not is_grouped:
        return packed
    else:
        checks, summary = Checks(()), list[Any]()
    is_one = is_grouped and type(packed) is not Grouped
    plan.regroup(_Taking(pending, checks, is_one=is_one))
    groups = [arrays] if is_one else arrays
    return Grouped({plan: []}, [*groups, summary]) if is_grouped else {plan: [*arrays, summary]}


class _Taking:
    """Removes the summary from the arrays of a result."""

    def __init__(self, pending: Pending, checks: Checks, *, is_one: bool):
        self.pending = pending
        self.checks = checks
        # The class of JAX's arrays, set when one is met.
        self.kind: Any = None
        # Whether the result is one group, not a list of groups.
        self.is_one = is_one

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Taking):
            return NotImplemented
        mine, others = (self.checks, self.is_one), (other.checks, other.is_one)
        return self.pending is other.pending and mine == others

    def __hash__(self) -> int:
        return hash(self.checks)

    def __call__(self, arrays: list[Any]) -> list[Any]:
        # JAX made the list for this call alone.
        summary = arrays.pop()
        if type(summary) is self.kind:
            self.pending.add(summary, self.checks)
        elif isinstance(summary, Tracer):
            arrays = self.hand_on(arrays, summary)
        # Without a run, the summary is a type, not an array.
        elif isinstance(summary, jax.Array):
            # Once, because `isinstance` takes longer.
            self.kind = type(summary)
            self.pending.add(summary, self.checks)
        return arrays[0] if self.is_one else arrays

    def hand_on(self, arrays: list[Any], summary: Any) -> list[Any]:
        """Hand the checks to the program around, which reports failures in its own way."""
        leaves, treedef = jtu.tree_flatten(arrays)
        for each, part in self.checks.parts(summary):
            leaves = check_again(leaves, each.source, each.shape, part)
        return treedef.unflatten(leaves)
