"""Which arrays a jitted call gives away, so that their memory can hold the results."""

import inspect
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from pytreemod.errors import ArgumentError, describe, explain
from pytreemod.transform.wrapping import argument_name, function_name, parameters_of
from pytreemod.tree.predicates import is_array
from pytreemod.tree.prefixes import By, mask_of
from pytreemod.tree.selecting import Selector, as_selector
from pytreemod.typing import jtu

_STRINGS = ("none", "all", "all-except-first", "warn", "warn-except-first")


class Donation:
    """Which arguments' arrays a call gives away."""

    __slots__ = ("quiet", "rule")

    def __init__(self, rule: Any, quiet: bool):
        self.rule = rule
        self.quiet = quiet

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Donation) and (self.rule, self.quiet) == (other.rule, other.quiet)

    def __hash__(self) -> int:
        return hash((self.rule, self.quiet))

    def flags(
        self, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[bool]:
        """One bool for each array of the arguments, in order."""
        if isinstance(self.rule, Selector):
            return self._selected(self.rule, names, args, kwargs)
        flags: list[bool] = []
        for i, value in enumerate(args):
            flags += [self._gives(i, argument_name(names, i))] * count_arrays(value)
        for name in sorted(kwargs):
            flags += [self._gives(-1, name)] * count_arrays(kwargs[name])
        return flags

    def _gives(self, index: int, name: str) -> bool:
        if self.rule == "all-except-first":
            return index != 0
        return self.rule == "all" or (isinstance(self.rule, tuple) and name in self.rule)

    def _selected(
        self, rule: Selector, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[bool]:
        # One tree of all arguments by name, in the order of the call: paths in the selector start
        # with the argument's name, as they do in errors.
        named = _Arguments(
            (*(argument_name(names, i) for i in range(len(args))), *sorted(kwargs)),
            (*args, *(kwargs[name] for name in sorted(kwargs))),
        )
        mask = mask_of(rule, named, where="filter_jit(donate)")
        leaves = jtu.tree_leaves(named)
        return [m for m, leaf in zip(mask, leaves, strict=True) if is_array(leaf)]


class _Arguments:
    """Arguments by name, as a tree in the order of the call."""

    def __init__(self, names: tuple[str, ...], values: tuple[Any, ...]):
        self.names = names
        self.values = values


jtu.register_pytree_with_keys(
    _Arguments,
    lambda a: (
        tuple((jtu.GetAttrKey(n), v) for n, v in zip(a.names, a.values, strict=True)),
        a.names,
    ),
    lambda names, values: _Arguments(names, tuple(values)),
)


def count_arrays(value: Any) -> int:
    return sum(map(is_array, jtu.tree_leaves(value)))


def as_donation(donate: Any, fn: Any) -> Donation | None:
    if isinstance(donate, str):
        if donate == "none":
            return None
        if donate in _STRINGS:
            return Donation(donate.replace("warn", "all"), quiet=donate.startswith("all"))
        donate = (donate,)
    if isinstance(donate, (Selector, type, By)):
        return Donation(as_selector(donate), quiet=False)
    if isinstance(donate, Sequence) and all(isinstance(name, str) for name in donate):
        _check_names(tuple(donate), fn)
        return Donation(tuple(donate), quiet=False) if donate else None
    raise ArgumentError(
        explain(
            "filter_jit(donate)",
            f"names of arguments, a selector, or one of {', '.join(map(repr, _STRINGS))}",
            describe(donate),
            cure=["write, for instance", '@pm.filter_jit(donate=("model", "opt_state"))'],
        )
    )


def _check_names(names: tuple[str, ...], fn: Any) -> None:
    parameters = parameters_of(fn)
    if parameters is None or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return
    known = [p.name for p in parameters]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ArgumentError(
            explain(
                "filter_jit(donate)",
                f"names of arguments of {function_name(fn)} ({', '.join(known)})",
                ", ".join(map(repr, unknown)),
            )
        )


def separation(
    flags: list[bool],
) -> tuple[Callable[[list[Any]], tuple[list[Any], list[Any]]], Callable[[Any, Any], list[Any]]]:
    """How to part the arrays of a call into donated and kept ones, and how to join them again."""
    given = [i for i, flag in enumerate(flags) if flag]
    kept = [i for i, flag in enumerate(flags) if not flag]
    cut = len(given)
    if given == list(range(cut)):
        # Arguments are mostly donated from the front: slices, which cost nothing per array.
        return (lambda a: (a[:cut], a[cut:])), (lambda d, k: [*d, *k])
    pick_given, pick_kept = _picker(given), _picker(kept)

    def join(donated: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        arrays: list[Any] = [None] * len(flags)
        for i, array in zip([*given, *kept], [*donated, *others], strict=True):
            arrays[i] = array
        return arrays

    return (lambda a: (pick_given(a), pick_kept(a))), join


def _picker(positions: list[int]) -> Callable[[list[Any]], list[Any]]:
    if len(positions) < 2:
        return lambda a: [a[i] for i in positions]
    pick = itemgetter(*positions)
    return lambda a: list(pick(a))
