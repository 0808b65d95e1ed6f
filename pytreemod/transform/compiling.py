"""The compiled functions behind `filter_jit`, found by key.

For each function, and each set of options, there is one `Store`. It holds an `Entry` for each key
(see `boundary`): one `jax.jit`ted function of a flat list of arrays, which JAX in turn specializes
by shape and dtype.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax

from pytreemod.transform.boundary import pack, structure_of_call
from pytreemod.transform.checking import finding_checks, note_check
from pytreemod.transform.donating import Donation, count_arrays, separation
from pytreemod.transform.retracing import Trace, TraceLog
from pytreemod.transform.wrapping import function_name
from pytreemod.tree.nodes import is_node
from pytreemod.tree.predicates import is_array
from pytreemod.tree.snapshots import Structure

MAX_ENTRIES = 4096
"""With as many static variants a program does nothing but compile; the oldest goes."""


class Entry:
    """One compiled function: one key, any shapes."""

    __slots__ = ("has_check", "is_special", "jitted", "key", "quiet", "separate")

    def __init__(self, key: tuple[Any, ...], quiet: bool):
        self.key = key
        self.quiet = quiet
        self.jitted: Any = None
        self.separate: Callable[[list[Any]], tuple[list[Any], list[Any]]] | None = None
        self.has_check = False
        # Whether a call must do more than call: not traced yet, or one of the other two.
        self.is_special = True

    def arguments(self, arrays: list[Any]) -> tuple[list[Any], ...]:
        """What the jitted function takes: all arrays, or the donated ones and the others."""
        return (arrays,) if self.separate is None else self.separate(arrays)

    def traced(self, has_check: bool) -> None:
        """Note what a trace has shown."""
        self.has_check = self.has_check or has_check
        self.is_special = self.has_check or self.quiet


class Store:
    """The compiled functions of one function under one set of options."""

    __slots__ = (
        "__weakref__",
        "donation",
        "entries",
        "jit_options",
        "logs",
        "max_traces",
        "reference",
    )

    def __init__(
        self,
        reference: Callable[[], Any] | None,
        donation: Donation | None,
        max_traces: int | None,
        jit_options: dict[str, Any],
    ):
        self.reference = reference
        self.donation = donation
        self.max_traces = max_traces
        self.jit_options = jit_options
        self.entries: dict[tuple[Any, ...], Entry] = {}
        # By name: callables that are pytrees share a store.
        self.logs: dict[str, TraceLog] = {}

    def log_of(self, fn: Any) -> TraceLog:
        """The traces of a function."""
        return self.logs.setdefault(_full_name(fn), TraceLog())

    def add(
        self,
        key: tuple[Any, ...],
        names: tuple[str, ...],
        fn: Any,
        head: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Entry:
        """Make the compiled function for a key that was not met before.

        Raises:
            TypeError: a static value cannot be hashed.
        """
        arrays, structure = structure_of_call(head, args, kwargs)
        donation = self.donation
        entry = Entry(key, quiet=donation is not None and donation.quiet)
        run = self._runner(structure, entry, names, function_name(fn), self.log_of(fn))
        if donation is None:
            entry.jitted = jax.jit(run, **self.jit_options)
        else:
            # The function's own arrays come first, and are never donated.
            flags = [False] * (len(arrays) - count_arrays((args, kwargs)))
            flags += donation.flags(names, args, kwargs)
            entry.separate, join = separation(flags)

            def run_donated(donated: list[Any], kept: list[Any]) -> Any:
                return run(join(donated, kept))

            run_donated.__name__ = run_donated.__qualname__ = run.__name__
            entry.jitted = jax.jit(run_donated, donate_argnums=0, **self.jit_options)
        if len(self.entries) >= MAX_ENTRIES:
            self.entries.pop(next(iter(self.entries)), None)
        return self.entries.setdefault(key, entry)

    def _runner(
        self, structure: Structure, entry: Entry, names: tuple[str, ...], name: str, log: TraceLog
    ) -> Callable[[list[Any]], Any]:
        """The function that JAX traces."""
        reference, max_traces = self.reference, self.max_traces

        def run(values: list[Any]) -> Any:
            log.add(Trace.of(names, structure, values), name, max_traces)
            head, args, kwargs = structure.assemble(values)
            fn = head[0] if reference is None else reference()
            with finding_checks() as found:
                packed = pack(fn(*args, **kwargs))
            entry.traced(found())
            return packed

        run.__name__ = run.__qualname__ = name
        return run


def _full_name(fn: Any) -> str:
    return f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', type(fn).__qualname__)}"


# Keyed weakly by the function, so that `filter_jit(f)` written inside a loop finds what the last
# one compiled, and nothing outlives f.
_stores: "weakref.WeakKeyDictionary[Any, dict[Any, Store]]" = weakref.WeakKeyDictionary()
# For callables that are pytrees: they come in with the arguments, and the key tells them apart.
_shared_stores: dict[Any, Store] = {}
_lock = threading.Lock()
_FUNCTIONS = (type(is_array), type(len), type)


def store_for(
    fn: Any, donation: Donation | None, max_traces: int | None, jit_options: dict[str, Any]
) -> Store:
    """The store of a function under these options; a function of its own for odd callables."""
    try:
        options = (donation, max_traces, tuple(sorted(jit_options.items())))
        hash(options)
    except TypeError:
        options = None
    if is_node(fn):
        made = Store(None, donation, max_traces, jit_options)
        return made if options is None else _shared_stores.setdefault(options, made)
    if options is None or not isinstance(fn, _FUNCTIONS):
        return Store(lambda: fn, donation, max_traces, jit_options)
    with _lock:
        by_options = _stores.setdefault(fn, {})
    return by_options.setdefault(options, Store(weakref.ref(fn), donation, max_traces, jit_options))


def propagate(entry: Entry) -> None:
    """Tell an outer trace that a function called in it contains a check."""
    if entry.has_check:
        note_check()


def clear_stores() -> None:
    """Forget all compiled functions."""
    for by_options in list(_stores.values()):
        for store in by_options.values():
            store.entries.clear()
    for store in _shared_stores.values():
        store.entries.clear()
