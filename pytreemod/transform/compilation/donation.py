"""Choose the arrays whose memory a jitted call donates to its results.

`donate=` chooses arguments by name or by selector (`as_donation`). JAX donates whole arguments, so
a call separates the donated arrays from the others (`separation`). JAX warns about each array that
it could not use. If you donate a model as a whole, this is no mistake, so the warning is silenced
in threads that are in such a call. Errors name the path of an array that was donated before, or
that is donated twice.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import jax

from pytreemod.errors import AccessError, ArgumentError, DonatedError, describe
from pytreemod.transform.boundary.signatures import check_names
from pytreemod.transform.boundary.wrapping import argument_name
from pytreemod.transform.compilation.static_arguments import given_back
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_array
from pytreemod.tree.prefixes import By, mask_of
from pytreemod.tree.selecting import Selector, as_selector
from pytreemod.typing import Tracer, jtu

_STRINGS = ("none", "all", "all-except-first", "warn", "warn-except-first")


class Donation:
    """The arguments whose arrays a call donates."""

    __slots__ = ("quiet", "rule")

    def __init__(self, rule: Any, quiet: bool):
        self.rule = rule
        self.quiet = quiet

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Donation) and (self.rule, self.quiet) == (other.rule, other.quiet)

    def __hash__(self) -> int:
        return hash((self.rule, self.quiet))

    @property
    def is_structural(self) -> bool:
        """Whether all calls with one key have the same flags, for any arrays."""
        return not isinstance(self.rule, Selector) or self.rule.is_structural()

    @property
    def gives_own(self) -> bool:
        """Whether the arrays of a callable that is a pytree (a Module, a bound method) are donated.

        They are not an argument: `"all-except-first"` still excepts the first argument.
        """
        return self.rule in ("all", "all-except-first")

    def flags(
        self, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[bool]:
        """Return a bool for each array of the arguments, in order."""
        if isinstance(self.rule, Selector):
            return self._selected(self.rule, names, args, kwargs)
        flags: list[bool] = []
        for i, value in enumerate(args):
            flags += [self._gives(i, argument_name(names, i))] * count_arrays(value)
        for name in sorted(kwargs):
            # The first argument has a name and no position (see `positions_of`).
            index = 0 if not args and names[:1] == (name,) else -1
            flags += [self._gives(index, name)] * count_arrays(kwargs[name])
        return flags

    def _gives(self, index: int, name: str) -> bool:
        if self.rule == "all-except-first":
            return index != 0
        return self.rule == "all" or (isinstance(self.rule, tuple) and name in self.rule)

    def _selected(
        self, rule: Selector, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[bool]:
        # One tree of all arguments by name, in the order of the call. Paths in the selector start
        # with the name of the argument, as in errors.
        named = _Arguments(
            (*(argument_name(names, i) for i in range(len(args))), *sorted(kwargs)),
            (*args, *(kwargs[name] for name in sorted(kwargs))),
        )
        # A static value is not an array here, but the selector sees the values of the caller.
        mask = mask_of(rule, given_back(named), where="filter_jit(donate)")
        leaves = jtu.tree_leaves(named)
        return [m for m, leaf in zip(mask, leaves, strict=True) if is_array(leaf)]


class _Arguments:
    """Arguments by name, as a tree in the order of the call."""

    def __init__(self, names: tuple[str, ...], values: tuple[Any, ...]):
        self.names = names
        self.values = values

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("names", ()):
            return self.values[self.names.index(name)]
        known = ", ".join(self.__dict__.get("names", ()))
        raise AccessError("filter_jit(donate)", f"an argument of the call ({known})", repr(name))


def _flatten_with_keys(node: _Arguments) -> tuple[tuple[Any, ...], Any]:
    keys = map(jtu.GetAttrKey, node.names)
    return tuple(zip(keys, node.values, strict=True)), node.names


def _unflatten(names: Any, values: Any) -> _Arguments:
    return _Arguments(names, tuple(values))


jtu.register_pytree_with_keys(_Arguments, _flatten_with_keys, _unflatten)


def count_arrays(value: Any) -> int:
    """Count the arrays in a tree."""
    return sum(map(is_array, jtu.tree_leaves(value)))


def as_donation(donate: Any, fn: Any) -> Donation | None:
    """Return the meaning of `filter_jit(fn, donate=...)`; None if it donates nothing.

    Raises:
        ArgumentError: if it is of no known form, or names an argument that `fn` does not have.
    """
    if isinstance(donate, str):
        if donate == "none":
            return None
        if donate in _STRINGS:
            # Only JAX's warning differs.
            return Donation(donate.replace("warn", "all"), quiet=donate.startswith("all"))
        donate = (donate,)
    if isinstance(donate, (Selector, type, By)):
        return Donation(as_selector(donate), quiet=False)
    names: Any = donate
    if isinstance(donate, Sequence) and all(isinstance(name, str) for name in names):
        check_names("filter_jit(donate)", tuple(names), fn)
        return Donation(tuple(names), quiet=False) if names else None
    raise ArgumentError(
        "filter_jit(donate)",
        f"names of arguments, a selector, or one of {', '.join(map(repr, _STRINGS))}",
        describe(donate),
        hint=["for example:", '@pm.filter_jit(donate=("model", "opt_state"))'],
    )


# ---- JAX's warning about donated arrays that were not usable

# `warnings.catch_warnings` restores filters that another thread may have changed meanwhile. So one
# filter is added while it is needed, then removed. It applies only to threads that ask for it.

_MESSAGE = "Some donated buffers were not usable"


class _InQuietThreads(type):
    def __subclasscheck__(cls, other: type) -> bool:
        return bool(_quiet[threading.get_ident()])


class _Unwanted(UserWarning, metaclass=_InQuietThreads):
    """The category of the warning, in threads that silence it."""


_quiet: Counter[int] = Counter()
_lock = threading.Lock()
# The lists that got the filter: any `catch_warnings` replaces the list.
_lists: list[Any] = []


def begin_quiet() -> None:
    """Silence the warning in this thread."""
    with _lock:
        _quiet[threading.get_ident()] += 1
        # To the front, wherever it was.
        warnings.filterwarnings("ignore", message=_MESSAGE, category=_Unwanted)
        if not any(warnings.filters is known for known in _lists):
            _lists.append(warnings.filters)


def end_quiet() -> None:
    """Undo one `begin_quiet` of this thread."""
    with _lock:
        _quiet[threading.get_ident()] -= 1
        if not _quiet.total():
            _quiet.clear()
            found: list[Any] = [*_lists, warnings.filters]
            for filters in found:
                for item in [item for item in filters if item[2] is _Unwanted]:
                    filters.remove(item)
            _lists.clear()


@contextmanager
def without_warning(quiet: bool) -> Generator[None]:
    """Silence the warning, if `quiet`."""
    if not quiet:
        yield
        return
    begin_quiet()
    try:
        yield
    finally:
        end_quiet()


def explain_deleted(called: str, named: Iterable[tuple[str, Any]], error: Exception) -> None:
    """Raise a better error if `error` is about an argument whose memory was donated.

    Args:
        called: the name of the function.
        named: the arguments of the call with their names.
        error: the error that the call raised.

    Raises:
        DonatedError: if it is.
    """
    gone = [
        f"{path_text(path, name)}: {describe(leaf)}"
        for name, value in named
        for path, leaf in jtu.tree_leaves_with_path(value)
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted()
    ]
    # If this call failed later, arrays that it donated are deleted, too.
    if gone and "has been deleted" in str(error):
        raise DonatedError(
            f"{called}: an earlier call donated arrays that are used again",
            at=gone,
            hint="model, ... = step(model, ...)",
        ) from error


def explain_twice(
    called: str, named: Iterable[tuple[str, Any]], given: Sequence[bool], error: Exception
) -> None:
    """Raise a better error if `error` is about a buffer that is donated and used a second time.

    Args:
        called: the name of the function.
        named: the arguments of the call with their names.
        given: for each of their arrays, whether it is donated.
        error: the error that the call raised.

    Raises:
        DonatedError: if it is.
    """
    # JAX has no class for this error. Its message has "the same buffer" or "a buffer that was".
    if "donate" not in str(error) or "buffer" not in str(error):
        return
    places: dict[Any, list[tuple[str, str, Any, bool]]] = {}
    flags = iter(given)
    for name, value in named:
        for path, leaf in jtu.tree_leaves_with_path(value):
            if is_array(leaf):
                entry = (path_text(path, name), name, leaf, next(flags))
                places.setdefault(_buffer(leaf), []).append(entry)
    shared = [same for same in places.values() if len(same) > 1 and any(flag for *_, flag in same)]
    if not shared:
        return
    # The name of one that is not donated, if there is one.
    root = next((name for _, name, _, flag in shared[0] if not flag), shared[0][-1][1])
    raise DonatedError(
        called,
        "each donated array at one path",
        f"{len(shared)} at two paths or more",
        at=[
            f"{' and '.join(place for place, *_ in same)}: {describe(same[0][2])}"
            for same in shared
        ],
        hint=[
            "an array can be donated once; copy the other argument:",
            f"{root} = jax.tree.map(jnp.copy, {root})",
        ],
    ) from error


def _buffer(array: Any) -> Any:
    """Return a value that is equal for two arrays in the same memory."""
    try:
        return array.unsafe_buffer_pointer()
    # NumPy's, a tracer, or an array on several devices: the same if the object is the same.
    except (AttributeError, ValueError, RuntimeError):
        return id(array)


def separation(
    flags: list[bool],
) -> tuple[Callable[[list[Any]], tuple[list[Any], list[Any]]], Callable[[Any, Any], list[Any]]]:
    """Functions that divide the arrays of a call into donated ones and others, and join them."""
    given = [i for i, flag in enumerate(flags) if flag]
    rest = [i for i, flag in enumerate(flags) if not flag]
    cut = len(given)
    if given == list(range(cut)):
        # Most donated arguments come first: slices cost nothing per array.
        return (lambda a: (a[:cut], a[cut:])), (lambda d, k: [*d, *k])
    pick_given, pick_others = _picker(given), _picker(rest)

    def join(donated: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        arrays: list[Any] = [None] * len(flags)
        for i, array in zip([*given, *rest], [*donated, *others], strict=True):
            arrays[i] = array
        return arrays

    return (lambda a: (pick_given(a), pick_others(a))), join


def _picker(positions: list[int]) -> Callable[[list[Any]], list[Any]]:
    if len(positions) < 2:
        return lambda a: [a[i] for i in positions]
    pick = itemgetter(*positions)
    return lambda a: list(pick(a))
