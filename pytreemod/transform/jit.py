"""`filter_jit`: compile a function of any trees; arrays are traced, everything else is static.

A call is split into a list of arrays for each argument, and a key (`packing`). The key finds an
`_Entry`: a function under `jax.jit` of these lists, which JAX specializes by shape and dtype. Its
result is built by the plan that comes back with it. `Jitted.__call__` is this path alone, written
out; a first call, an error, a check go to `_call_slowly`.

The entries belong to the user's function, weakly: `filter_jit(f)` in a loop finds the programs of
the last one, and they are forgotten with `f`.
"""

from __future__ import annotations

import functools as ft
import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar, overload

import jax

from pytreemod.errors import ArgumentError, StateError, describe, nearest
from pytreemod.transform import packing
from pytreemod.transform.arguments import Parameters, function_name
from pytreemod.transform.packing import handlers, split_other, unpack
from pytreemod.transform.retraces import TraceLog
from pytreemod.transform.runtime_checks import call_checked, checks_in
from pytreemod.transform.shardings import ArgumentShardings, ResultShardings
from pytreemod.transform.sowing import collecting, unseen
from pytreemod.transform.steps import forget_steps
from pytreemod.transform.tracebacks import shortened
from pytreemod.transform.wrapping import Transformed, check_callable
from pytreemod.tree.nodes import is_node
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_abstract, is_carried
from pytreemod.tree.snapshots import divide
from pytreemod.tree.traces import current_trace
from pytreemod.typing import Names, ShardingSpec, Tracer, jtu, untyped_jax

_F = TypeVar("_F", bound=Callable[..., Any])

_DONATE = ("none", "all", "all-except-first", "warn", "warn-except-first")
# By position they would refer to our lists of arrays.
_REFUSED = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")
_MOST = 4096
"""A program with so many static variants only compiles; the oldest is removed."""


@ft.cache
def _no_trace() -> Any:
    # In a thread of its own, because the first call may be inside a trace.
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(current_trace()))
    thread.start()
    thread.join()
    return found[0]


def _is_tracing() -> bool:
    """Whether computations become part of a trace: then no check of an earlier call may raise."""
    return current_trace() != _no_trace()


class _Options(NamedTuple):
    donate: str | tuple[str, ...]
    in_shardings: ArgumentShardings | None
    out_shardings: ResultShardings | None
    max_traces: int | None
    jit: tuple[tuple[str, Any], ...]


class _Entry:
    """One compiled function: one key, any shapes."""

    __slots__ = ("checks", "is_slow", "jitted")

    jitted: Any

    def __init__(self) -> None:
        # Whether a call needs more than the fast path: it is the first, or has a check inside.
        self.is_slow = True
        self.checks: frozenset[str] = frozenset()


class _NewShapes(Exception):
    """A call needs another program, in which nobody has looked for checks."""


# The one that may be traced: any other has met new shapes, and would run unchecked.
_traced: ContextVar[_Entry | None] = ContextVar("_traced", default=None)


@contextmanager
def _tracing(entry: _Entry) -> Generator[None]:
    token = _traced.set(entry)
    try:
        yield
    finally:
        _traced.reset(token)


class Jitted(Transformed, is_fast=True):
    """A function under `filter_jit`."""

    __slots__ = ("entries", "head", "is_plain", "log", "parameters")

    options: _Options
    transform_name = "filter_jit"

    def __init__(self, fn: Callable[..., Any], options: _Options):
        super().__init__(fn, options)
        self.parameters = Parameters.of(fn)
        # The arrays of a callable tree are arguments, and come first.
        self.head = (fn,) if is_node(_layers(fn)[0]) else ()
        self.is_plain = not self.head
        self.entries, self.log = _programs_of(fn, options)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function, compiled."""
        # Every step of every training loop runs these lines (benchmarks/dispatch.py).
        if kwargs or not self.is_plain:
            args, kwargs = self._placed(args, kwargs)
        # `split_call`, written out.
        lists: list[Any] = []
        entry: _Entry | None = None
        if not kwargs:
            key: list[Any] = []
            get: Any = handlers.get
            try:
                for value in args:
                    lists.append(get(type(value), split_other)(value, key))
                entry = self.entries[tuple(key)]
            # TypeError: a static value has no hash; `_call_slowly` reports its path.
            except (KeyError, TypeError):
                pass
        try:
            try:
                packed = None if entry is None or entry.is_slow else entry.jitted(*lists)
            except _NewShapes:
                packed = None
            if packed is None:
                return self._call_slowly(args, kwargs)
        except Exception as error:
            raise shortened(self._explained(args, kwargs, error))  # noqa: B904  (the same error)
        ((plan, arrays),) = packed.items()
        return plan.build(arrays)

    def _placed(self, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = self.parameters.place(args, kwargs)
        return (*self.head, *args), kwargs

    def _call_slowly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        entry, lists = self._find(args, kwargs)
        call = ft.partial(self._run, entry, lists)
        if _is_tracing():
            # Whoever runs the whole program looks for checks.
            with _tracing(entry):
                return unpack(call())
        if entry.checks or not entry.is_slow:
            with suppress(_NewShapes):
                return unpack(call_checked(entry.checks, call))
        with _tracing(entry):
            if not untyped_jax.config.jax_disable_jit:
                # JAX keeps this trace for the call.
                entry.checks |= checks_in(entry.jitted.trace(*lists).jaxpr)
                entry.is_slow = bool(entry.checks)
            return unpack(call_checked(entry.checks, call))

    def _run(self, entry: _Entry, lists: Any) -> Any:
        with warnings.catch_warnings():
            if self.options.donate in ("all", "all-except-first"):
                # JAX warns while it compiles.
                warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            return entry.jitted(*lists)

    def _find(self, args: Any, kwargs: Any) -> tuple[_Entry, list[list[Any]]]:
        try:
            lists, key = packing.split_call(args, kwargs)
            entry = self.entries.get(key)
        except TypeError as error:
            raise packing.unhashable(self._named(args, kwargs), error) from error
        if entry is None:
            for old in [*self.entries][: max(len(self.entries) - _MOST + 1, 0)]:
                self.entries.pop(old, None)
            # If two threads arrive together, the second takes the entry of the first.
            entry = self.entries.setdefault(key, self._make(args, kwargs, is_carried))
        return entry, lists

    def _make(self, args: Any, kwargs: Any, counts: Callable[[Any], bool]) -> _Entry:
        """Make the compiled function for a new key."""
        entry, log, options = _Entry(), self.log, self.options
        named = self._named(args, kwargs)
        names, count = [name for name, _ in named], len(args)
        structures = [divide(tree, counts)[1] for _, tree in named]
        # Weakly: JAX keeps `run` as long as its programs.
        has_head, fn_of, out = bool(self.head), _weakly(self.fn), options.out_shardings

        def run(*lists: list[Any]) -> Any:
            # JAX also calls it without a trace, to look for the operation that made a NaN.
            if _is_tracing() and _traced.get() is not entry:
                raise _NewShapes
            trees = [s.assemble(arrays) for s, arrays in zip(structures, lists, strict=True)]
            log.add(list(zip(names, trees, strict=True)))
            fn, *args = trees[:count] if has_head else (fn_of(), *trees[:count])
            result = collecting(fn)(*args, **dict(zip(names[count:], trees[count:], strict=True)))
            return packing.pack(result) if out is None else out.pack(result)

        # So that JAX's errors say `model[3]`, of the user's function.
        run.__name__ = run.__qualname__ = function_name(self.fn)
        run.__signature__ = _signature(names)  # pyright: ignore[reportFunctionMemberAccess]
        shardings: dict[str, Any] = {}
        if options.in_shardings is not None:
            own, known = len(self.head), self.parameters.every
            found = options.in_shardings.resolve(named[own:], count - own, known)
            heads = [[None] * structure.count for structure in structures[:own]]
            shardings["in_shardings"] = (*heads, *found)
        if out is not None:
            shardings["out_shardings"] = out.prefix
        donated = tuple(i for i, name in enumerate(names) if self._donates(i, name))
        entry.jitted = jax.jit(run, donate_argnums=donated, **shardings, **dict(options.jit))
        return entry

    def _named(self, args: Any, kwargs: Any) -> list[tuple[str, Any]]:
        own = len(self.head)
        pairs = [("function", tree) for tree in args[:own]]
        return [*pairs, *self.parameters.named(args[own:], kwargs)]

    def _donates(self, index: int, name: str) -> bool:
        donate = self.options.donate
        if isinstance(donate, tuple):
            return name in donate
        return donate in ("all", "warn") or ("except" in donate and index != len(self.head))

    def _explained(self, args: Any, kwargs: Any, error: Exception) -> Exception:
        """Return a better error than JAX's about arrays that were donated, if there is one."""
        text = str(error)
        if "deleted" not in text and "donate" not in text:
            return error
        leaves = [
            (f"{path_text(path, name)}: {describe(leaf)}", leaf)
            for name, tree in self._named(args, kwargs)
            for path, leaf in jtu.tree_leaves_with_path(tree)
            if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
        ]
        name = function_name(self.fn)
        at = [place for place, leaf in leaves if leaf.is_deleted()]
        fact = f"{name}: an earlier call has donated the memory of this array"
        if not at:
            ids = [id(leaf) for _, leaf in leaves]
            at = [place for place, leaf in leaves if ids.count(id(leaf)) > 1]
            fact = f"{name}: an array that is donated is passed twice"
        better = StateError(fact, at=at)
        better.__cause__ = error
        return better if at else error

    # ---- stages

    def lower(self, /, *args: Any, **kwargs: Any) -> Lowered:
        """Trace and lower the function for these arguments, without running it.

        See `lower` of `jax.jit`. Arguments may be arrays or `jax.ShapeDtypeStruct`s.
        """
        return self._stage("lower", (), args, kwargs)

    def trace(self, /, *args: Any, **kwargs: Any) -> Lowered:
        """Trace the function for these arguments; see `trace` of `jax.jit`."""
        return self._stage("trace", (), args, kwargs)

    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        """Return the tree of the result, with a `jax.ShapeDtypeStruct` for each array."""
        return self._stage("eval_shape", (), args, kwargs)

    def stage_bound(self, what: str, instance: Any) -> Callable[..., Any]:
        """`lower`, `trace` or `eval_shape` of the method bound to an instance."""
        return lambda *args, **kwargs: self._stage(what, (instance,), args, kwargs)

    def _stage(self, what: str, bound: tuple[Any, ...], args: Any, kwargs: Any) -> Any:
        def split(args: Any, kwargs: Any) -> tuple[list[Any], list[Any]]:
            named = self._named(*self._placed((*bound, *args), kwargs))
            pairs = [divide(tree, is_abstract) for _, tree in named]
            return [arrays for arrays, _ in pairs], [structure for _, structure in pairs]

        lists, structures = split(args, kwargs)
        entry = self._make(*self._placed((*bound, *args), kwargs), is_abstract)
        try:
            if what == "eval_shape":
                with unseen(), _tracing(entry):
                    return packing.unpack_structs(entry.jitted.eval_shape(*lists))
            with _tracing(entry):
                traced = entry.jitted.trace(*lists)
            made = traced if what == "trace" else traced.lower()
            of = function_name(self.fn), split, structures, checks_in(traced.jaxpr)
            return Lowered(made, of)
        except Exception as error:
            raise shortened(error)  # noqa: B904  (the same error)


class Lowered:
    """A stage of a jitted function: traced, lowered or compiled; otherwise as JAX's own.

    A compiled one is called with arguments like those that it was made for.
    """

    def __init__(self, made: Any, of: tuple[Any, ...]):
        self.made, self.of = made, of

    def lower(self, **options: Any) -> Lowered:
        """Lower the traced function."""
        return Lowered(self.made.lower(**options), self.of)

    def compile(self, compiler_options: dict[str, Any] | None = None) -> Lowered:
        """Compile the lowered function: the result is a function."""
        return Lowered(self.made.compile(compiler_options=compiler_options), self.of)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled function.

        Raises:
            ArgumentError: if the arguments have another structure, or other static values.
            CheckError: if a check failed.
        """
        name, split, expected, checks = self.of
        lists, structures = split(args, kwargs)
        pairs = zip(structures, expected, strict=False)
        if len(structures) != len(expected) or not all(a.matches(b) for a, b in pairs):
            raise ArgumentError(f"{name} was compiled for another structure or static values")
        return unpack(call_checked(checks, lambda: self.made(*lists)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["made"], name)


# ---- the user's function, and its programs


def _layers(fn: Any) -> tuple[Any, list[tuple[type[Transformed], Any]]]:
    """Return the function inside all transforms, and these, the outermost first."""
    layers: list[tuple[type[Transformed], Any]] = []
    while isinstance(fn, Transformed):
        layers.append((type(fn), fn.options))
        fn = fn.fn
    return fn, layers


def _weakly(fn: Any) -> Callable[[], Any]:
    """A function that returns the user's function, under its transforms, and keeps it weakly."""
    inner, layers = _layers(fn)
    try:
        reference = weakref.ref(inner)
    except TypeError:
        return lambda: fn

    def make() -> Any:
        made: Any = reference()
        for cls, options in reversed(layers):
            made = cls(made, options)
        return made

    return make


_tables: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
_of_trees: dict[Any, Any] = {}


def _programs_of(fn: Any, options: _Options) -> tuple[dict[Any, _Entry], TraceLog]:
    """The programs of a function, so that `filter_jit(f)` in a loop finds those of the last one."""
    new: Any = {}, TraceLog(function_name(fn), options.max_traces)
    inner, layers = _layers(fn)
    try:
        if not is_node(inner):
            return _tables.setdefault(inner, {}).setdefault((options, *layers), new)
        # The arrays of a callable tree are arguments; its structure is in the key of a call, too.
        leaves, treedef = jtu.tree_flatten(fn)
        key = (options, treedef, *(getattr(leaf, "shape", None) for leaf in leaves))
        for old in [*_of_trees][: max(len(_of_trees) - _MOST + 1, 0)]:
            _of_trees.pop(old, None)
        return _of_trees.setdefault(key, new)
    except TypeError:
        return new


def _signature(names: list[str]) -> inspect.Signature:
    kind = inspect.Parameter.POSITIONAL_ONLY
    # The name of a parameter that is positional alone may be that of a keyword, too.
    counts = {name: names.count(name) for name in names}
    known = [
        name if name.isidentifier() and counts[name] == 1 else f"arg{i}"
        for i, name in enumerate(names)
    ]
    return inspect.Signature([inspect.Parameter(name, kind) for name in known])


@overload
def filter_jit(fun: _F, **options: Any) -> _F: ...
@overload
def filter_jit(**options: Any) -> Callable[[_F], _F]: ...
def filter_jit(
    fun: Any = None,
    *,
    donate: str | Names = "none",
    in_shardings: ShardingSpec = None,
    out_shardings: ShardingSpec = None,
    max_traces: int | None = None,
    **jitkwargs: Any,
) -> Any:
    """`jax.jit` for functions of any trees: arrays are traced, everything else is static.

    The function may take and return Modules, containers, numbers, strings and functions. It is
    traced again when a static value changes (by `==` and type) or when an array changes shape or
    dtype. `fun` may be a pytree itself (a Module, a bound method); its arrays are traced, too.

    A call returns as soon as one of `jax.jit` would. It waits for the device only if the function
    contains a check ([`error_if`][pytreemod.error_if]);
    [`filter_checkify`][pytreemod.filter_checkify] makes its error a value, and nothing waits.

    **Law.** `filter_jit(f)(*args)` equals `f(*args)`, for every `f` without side effects.

    Args:
        fun: the function; without it, `filter_jit` returns a decorator.
        donate: the arguments whose memory the results may reuse: their names (`"model"`,
            `("model", "opt_state")`), or `"none"`, `"all"`, `"all-except-first"`. `"warn"` and
            `"warn-except-first"` are the same, with JAX's warning about donated arrays that were
            not usable. Only these strings donate the arrays of `fun` itself.
        in_shardings: the shardings of the arguments: one spec for all of them; a tuple with one for
            each positional argument; or a dict by argument name. A placement is a sharding, a
            `PartitionSpec` for the mesh in context (`jax.set_mesh`), a device, or None for
            "unchanged". A spec is a placement, [`by`][pytreemod.by] with selectors that do not
            look at arrays, a Module with placements instead of its data, or a prefix tree of these.
        out_shardings: the sharding of the result: one such spec.
        max_traces: how often the function may be traced. One trace more raises an error that
            reports what differed (see [`explain_retraces`][pytreemod.debug.explain_retraces]).
        **jitkwargs: options of `jax.jit` (`inline`, `keep_unused`, `compiler_options`, ...).

    Returns:
        A function of the same signature, with `lower(...).compile()`, `trace` and `eval_shape`.

    Raises:
        ArgumentError: if `fun` is not callable, or a name in `donate` is not an argument. When
            called: if a static value is not hashable.
        SpecError: when called: if `in_shardings` or `out_shardings` is not a prefix of the tree.
        StateError: when called: if the memory of an argument was donated to an earlier call.
        CheckError: when called: if a check failed, or it needs more than `max_traces` traces.

    Examples:
        >>> import jax.numpy as jnp
        >>> @filter_jit
        ... def scale(x, how):
        ...     return x * 2 if how == "double" else x
        >>> scale(jnp.asarray(3.0), "double")
        Array(6., dtype=float32, weak_type=True)

    Source:
        The idea of filtered transforms: Kidger & Garcia 2021 (see `Module`).
    """
    for name in _REFUSED:
        if name in jitkwargs:
            fact = f"filter_jit has no {name}: values that are not arrays are static already"
            raise ArgumentError(fact, hint='@pm.filter_jit(donate=("model", "opt_state"))')
    if fun is None:
        given = {"donate": donate, "in_shardings": in_shardings, "out_shardings": out_shardings}
        return ft.partial(filter_jit, **given, max_traces=max_traces, **jitkwargs)
    check_callable("filter_jit", fun)
    if donate not in _DONATE:
        donate = (donate,) if isinstance(donate, str) else tuple(donate)
        known = Parameters.of(fun)
        for name in () if known.is_open else donate:
            if name not in known.every:
                fact = f"filter_jit(donate): {function_name(fun)} has no argument {name!r}"
                raise ArgumentError(fact + nearest(name, known.every))
    options = _Options(
        donate,
        None if in_shardings is None else ArgumentShardings(in_shardings),
        None if out_shardings is None else ResultShardings(out_shardings),
        max_traces,
        tuple(sorted(jitkwargs.items())),
    )
    return Jitted(fun, options)


def clear_caches() -> None:
    """Forget everything that transforms have cached, and clear JAX's caches.

    Examples:
        >>> clear_caches()
    """
    for table in [_of_trees, *_tables.values()]:
        for entries, _ in [*table.values()]:
            entries.clear()
    forget_steps()
    jax.clear_caches()
