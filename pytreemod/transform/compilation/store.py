"""The compiled functions of `filter_jit`, found by key.

There is one `Store` for each function and each set of options. It has an `Entry` for each key (see
`boundary`): one `jax.jit`ted function of a flat list of arrays. JAX then specializes this function
by shape and dtype.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import jax

from pytreemod.transform.boundary.packing import pack
from pytreemod.transform.boundary.shared_parameters import Aliases, aliases_among, knowing
from pytreemod.transform.boundary.signatures import parameters_of
from pytreemod.transform.boundary.sowing import (
    Collected,
    WithCollected,
    collect_checks,
    collecting,
    collects_checks,
    is_collecting,
)
from pytreemod.transform.boundary.supplying import as_values
from pytreemod.transform.boundary.wrapping import function_name, in_words_of
from pytreemod.transform.compilation.donation import (
    Donation,
    begin_quiet,
    count_arrays,
    end_quiet,
    separation,
    without_warning,
)
from pytreemod.transform.compilation.later_calls import prefix_with_checks, with_checks
from pytreemod.transform.compilation.retraces import Trace, TraceLog
from pytreemod.transform.compilation.shardings import (
    ArgumentPlacements,
    Asking,
    ResultPlacements,
    argument_shardings,
    has_functions,
)
from pytreemod.transform.compilation.static_arguments import give_back
from pytreemod.transform.compilation.successors import successions_in
from pytreemod.transform.compilation.weak_functions import WeakTable
from pytreemod.transform.host.later_checks import Pending
from pytreemod.transform.host.runtime_checks import begin_making, checks_in, end_making
from pytreemod.transform.interception.argument_specs import Assigned
from pytreemod.tree.effects import Effects
from pytreemod.tree.nodes import is_node
from pytreemod.tree.predicates import is_array, is_carried
from pytreemod.tree.snapshots import Structure, divide

MAX_ENTRIES = 4096
"""A program with so many static variants only compiles; the oldest is removed."""


# The identifier of no thread.
_NO_THREAD = 0


class Options(NamedTuple):
    """The options of `filter_jit`."""

    donation: Donation | None = None
    max_traces: int | None = None
    in_shardings: ArgumentPlacements | None = None
    out_shardings: ResultPlacements | None = None
    static: tuple[str, ...] = ()
    checks: str = "wait"
    jit: tuple[tuple[str, Any], ...] = ()

    @property
    def asks(self) -> bool:
        """Whether a rule in them looks at more of an array than its path.

        The dispatch key has nothing of the arrays, so it must have the result of such a rule.
        """
        rules = (self.donation, self.in_shardings)
        return not all(rule is None or rule.is_structural for rule in rules)


class Entry:
    """One compiled function: one key, any shapes."""

    __slots__ = (
        "begun",
        "checks",
        "is_once",
        "is_special",
        "jitted",
        "key",
        "pending",
        "quiet",
        "separate",
        "unseen",
    )

    def __init__(self, key: tuple[Any, ...], quiet: bool):
        self.key = key
        self.quiet = quiet
        self.jitted: Any = None
        self.separate: Callable[[list[Any]], tuple[list[Any], list[Any]]] | None = None
        self.checks: frozenset[str] = frozenset()
        # The checks that no call waits for.
        self.pending: Pending | None = None
        # Whether a call cannot be repeated: it donates arrays, or has side effects.
        self.is_once = False
        # The threads that have traced it, but not looked for checks since. (`_NO_THREAD` marks a
        # new entry.) Each thread looks by itself, because another may look before its trace is
        # there.
        self.unseen = {_NO_THREAD}
        # Whether a call needs more than the fast path: new, quiet, or with a check inside.
        self.is_special = True
        # The threads that have begun to make a program.
        self.begun: set[int] = set()

    def begin(self) -> None:
        """Mark this thread as lowering this entry, quietly if asked; until `end`."""
        if threading.get_ident() not in self.begun:
            self.begun.add(threading.get_ident())
            begin_making()
            if self.quiet:
                begin_quiet()

    def end(self) -> None:
        """Undo `begin`, if this thread called it."""
        if threading.get_ident() in self.begun:
            self.begun.remove(threading.get_ident())
            end_making()
            if self.quiet:
                end_quiet()

    @contextmanager
    def making(self) -> Generator[None]:
        """`begin` and `end`, also when nested."""
        begin_making()
        try:
            with without_warning(self.quiet):
                yield
        finally:
            end_making()
            self.end()

    def arguments(self, arrays: list[Any]) -> tuple[list[Any], ...]:
        """The arguments of the jitted function: all arrays, or the donated ones and the others."""
        return (arrays,) if self.separate is None else self.separate(arrays)

    @property
    def has_check(self) -> bool:
        """Whether a call has to wait, in order to see if a check failed."""
        return bool(self.checks)

    def look(self, arguments: tuple[list[Any], ...]) -> None:
        """Find the checks in the program for these arguments.

        JAX traces here if necessary. The call that follows takes the trace from JAX's cache.
        """
        jaxpr = self.jitted.trace(*arguments).jaxpr
        self.checks |= checks_in(jaxpr)
        self.is_once = self.is_once or bool(jaxpr.effects) or self.separate is not None
        self.unseen -= {threading.get_ident(), _NO_THREAD}
        # JAX warns about useless donations while it compiles, not in later calls.
        self.is_special = self.has_check


class Store:
    """The compiled functions of one function with one set of options."""

    __slots__ = ("__weakref__", "entries", "logs", "options", "pending", "reference")

    def __init__(self, reference: Callable[[], Any] | None, options: Any):
        self.reference = reference
        self.options: Options = options
        self.entries: dict[tuple[Any, ...], Entry] = {}
        # By name: callables that are pytrees share a store.
        self.logs: dict[str, TraceLog] = {}
        # By name, too: the checks that no call waits for.
        self.pending: dict[str, Pending] = {}

    def clear(self) -> None:
        """Forget the compiled functions and the counts of traces."""
        self.entries.clear()
        for log in self.logs.values():
            log.clear()

    def log_of(self, fn: Any) -> TraceLog:
        """Return the traces of a function."""
        return self.logs.setdefault(_full_name(fn), TraceLog())

    def pending_of(self, fn: Any) -> Pending | None:
        """The queue of checks that no call has looked at; None if calls wait for their checks."""
        if self.options.checks != "later":
            return None
        name = _full_name(fn)
        found = self.pending.get(name)
        # If two threads arrive together, the second takes the object of the first.
        return found or self.pending.setdefault(name, Pending(function_name(fn)))

    def add(
        self,
        key: tuple[Any, ...],
        names: tuple[str, ...],
        fn: Any,
        head: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Entry:
        """Make the compiled function for a new key.

        Raises:
            TypeError: if a static value cannot be hashed.
        """
        arrays, structure = divide((head, args, kwargs), is_carried)
        hash(structure.statics)
        donation = self.options.donation
        entry = Entry(key, quiet=donation is not None and donation.quiet)
        aliases = aliases_among((head, args, kwargs))
        entry.pending = self.pending_of(fn)
        run = self._runner(structure, aliases, entry, names, function_name(fn), self.log_of(fn))
        labels = [f"values[{i}]" for i in range(len(arrays))]
        options: dict[str, Any] = {}
        if donation is not None:
            # The arrays of the function come first.
            more = len(as_values(fn))
            own = len(arrays) - more - count_arrays((args, kwargs))
            # Supplied values follow; the caller still uses them, so they are not donated.
            flags = [donation.gives_own] * own + [False] * more
            flags += donation.flags(names, args, kwargs)
            entry.separate, join = separation(flags)
            run = _taking_two(run, join)
            given = flags.count(True)
            others = [f"other[{i}]" for i in range(len(flags) - given)]
            labels = join([f"donated[{i}]" for i in range(given)], others)
            options["donate_argnums"] = 0
        run = in_words_of(fn, run, labels, names, structure)
        assigned = self.assign(names, fn, args, kwargs, arrays)
        if assigned is None:
            entry.jitted = self._jit(run, options)
        else:
            entry.jitted = self._jit_with_shardings(run, options, entry, assigned)
        return self.keep(entry)

    def keep(self, entry: Entry) -> Entry:
        """Return the entry, or the one that another thread made for the same key."""
        if len(self.entries) >= MAX_ENTRIES:
            # A list, because another thread may add one meanwhile.
            self.entries.pop(next(iter(list(self.entries)), entry.key), None)
        return self.entries.setdefault(entry.key, entry)

    def answers(
        self,
        names: tuple[str, ...],
        fn: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        arrays: list[Any],
    ) -> tuple[Any, ...]:
        """The values of the options for a call's arrays, which distinguish calls with one key."""
        donation = self.options.donation
        flags = [] if donation is None else donation.flags(names, args, kwargs)
        assigned = self.assign(names, fn, args, kwargs, arrays)
        # By identity, because they are parts of the options.
        return (*flags, *(id(a.value) for a in assigned or ()))

    def assign(
        self,
        names: tuple[str, ...],
        fn: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        arrays: list[Any],
    ) -> list[Assigned] | None:
        """Return the value of `in_shardings` for each array of a call; None without this option.

        Raises:
            SpecError, ArgumentError: if it does not fit the arguments.
        """
        layout = self.options.in_shardings
        if layout is None:
            return None
        known = [parameter.name for parameter in parameters_of(fn) or ()]
        assigned = layout.assign(names, known, args, kwargs)
        # The arrays of the function come first, and keep their shardings.
        own = [Assigned("function", None, None)] * (len(arrays) - len(assigned))
        return [a._replace(array=array) for a, array in zip(own + assigned, arrays, strict=True)]

    def _jit(self, run: Callable[..., Any], options: dict[str, Any]) -> Any:
        out = self.options.out_shardings
        if out is not None:
            is_later = self.options.checks == "later"
            prefix = prefix_with_checks(out.prefix) if is_later else out.prefix
            options = {**options, "out_shardings": prefix}
        return jax.jit(run, **options, **dict(self.options.jit))

    def _jit_with_shardings(
        self,
        run: Callable[..., Any],
        options: dict[str, Any],
        entry: Entry,
        assigned: list[Assigned],
    ) -> Any:
        # The stored options must not keep the arrays of the first call alive.
        parts = entry.arguments([a._replace(array=None) for a in assigned])

        def jit(shardings: tuple[list[Any], ...]) -> Any:
            return self._jit(run, {**options, "in_shardings": shardings})

        def shardings_of(arguments: tuple[list[Any], ...]) -> tuple[list[Any], ...]:
            return tuple(map(argument_shardings, parts, arguments))

        if has_functions(assigned):
            return Asking(jit, shardings_of)
        return jit(shardings_of(entry.arguments([a.array for a in assigned])))

    def _runner(
        self,
        structure: Structure,
        aliases: Aliases,
        entry: Entry,
        names: tuple[str, ...],
        name: str,
        log: TraceLog,
    ) -> Callable[[list[Any]], Any]:
        """Return the function for JAX to trace."""
        reference = self.reference
        max_traces, out = self.options.max_traces, self.options.out_shardings
        static = self.options.static

        def run(values: list[Any]) -> Any:
            # A fast call may have met new shapes; it catches up afterwards. An error raised here
            # would keep JAX off its own fast path for these shapes from then on.
            entry.is_special = True
            # On any path, because another thread may have changed it meanwhile; all paths end it.
            entry.begin()
            entry.unseen.add(threading.get_ident())
            # With jit disabled, calls are not traces; a trace for a capture is not a retrace.
            is_inside = is_collecting() or collects_checks()
            if not (cast("Any", jax.config).jax_disable_jit or is_inside):
                log.add(Trace.of(names, structure, values), name, max_traces)
            head, args, kwargs = structure.assemble(values)
            if static:
                args, kwargs = give_back(static, names, args, kwargs)
            fn = head[0] if head or reference is None else reference()
            # A surrounding program already returns them, like all collected values.
            pending = None if collects_checks() else entry.pending
            found = Collected((), ())
            with knowing(aliases, values), Effects() as effects:
                if pending is None:
                    result = collecting(fn)(*args, **kwargs)
                else:
                    result, found = collect_checks(fn, args, kwargs)
            effects.pass_on()
            given, returned = (
                (head, args, kwargs),
                result.result if type(result) is WithCollected else result,
            )
            packed = pack(result) if out is None else out.pack(result)
            ((plan, _),) = packed.items()
            plan.successions = successions_in(name, names, given, returned, effects)
            if entry.pending is None:
                return packed
            return with_checks(packed, found, entry.pending, is_grouped=out is not None)

        run.__name__ = run.__qualname__ = name
        return run


def _taking_two(run: Callable[[list[Any]], Any], join: Callable[..., list[Any]]) -> Any:
    """`run` with its arrays in two lists: donated ones, and others."""

    def run_donated(donated: list[Any], others: list[Any]) -> Any:
        return run(join(donated, others))

    run_donated.__name__ = run_donated.__qualname__ = run.__name__
    return run_donated


def _full_name(fn: Any) -> str:
    return f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', type(fn).__qualname__)}"


# By function, so that `filter_jit(f)` in a loop finds the compiled program of the last one.
_stores = WeakTable()
_FUNCTIONS = (type(is_array), type(len), type)


def store_for(fn: Any, options: Any) -> Store:
    """Return the store of a function with these options; a new one for callables of other types.

    Args:
        fn: the function.
        options: how it is compiled: `Options`, or those of another transform.
    """
    # The arrays of a callable pytree are arguments, and it is part of the dispatch key.
    if is_node(fn):
        key, objects, reference = (None, options), [], None
    elif isinstance(fn, _FUNCTIONS):
        reference = weakref.ref(fn)
        key, objects = (reference, options), [fn]
    else:
        return Store(lambda: fn, options)
    try:
        return _stores.find(key, objects, lambda: Store(reference, options))
    # The options have no hash.
    except TypeError:
        return Store(reference and (lambda: fn), options)


def clear_stores() -> None:
    """Forget all compiled functions."""
    for store, _ in [*_stores.entries.values()]:
        store.clear()
