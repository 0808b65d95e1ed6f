"""`filter_jit`: compile a function of any trees; arrays are traced, everything else is static.

A call is split into arrays and a key (`boundary.packing`). The key finds the compiled function in
the store of the user's function (`store`). That function gets the arrays, and its result is
assembled again. `Jitted.__call__` is this path alone, written out. Everything unusual goes to
`_call_slowly`: a first call, an option that looks at arrays, an error.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable
from typing import Any, TypeVar, cast, overload

import jax
import numpy as np

from pytreemod.errors import ArgumentError, PytreemodError, describe, nearest
from pytreemod.transform.boundary.packing import (
    handlers,
    split_call,
    split_other,
    unhashable,
    unpack_structs,
)
from pytreemod.transform.boundary.signatures import check_options, place_keywords, positions_of
from pytreemod.transform.boundary.supplying import handing, supplied
from pytreemod.transform.boundary.wrapping import (
    Transformed,
    check_callable,
    explain_dtypes,
    function_name,
)
from pytreemod.transform.compilation.donation import as_donation, explain_deleted, explain_twice
from pytreemod.transform.compilation.shardings import ArgumentPlacements, ResultPlacements
from pytreemod.transform.compilation.stages import Lowered, Traced, TracedCall, as_structs
from pytreemod.transform.compilation.static_arguments import as_static, make_constant
from pytreemod.transform.compilation.store import (
    Entry,
    Options,
    clear_stores,
    store_for,
)
from pytreemod.transform.compilation.weak_functions import forget_steps
from pytreemod.transform.host.failures import call_checked, raise_recorded
from pytreemod.transform.interception.argument_specs import named_arguments
from pytreemod.tree.nodes import is_node
from pytreemod.typing import Names, ShardingSpec, Tracer, jtu, untyped_jax

_F = TypeVar("_F", bound=Callable[..., Any])

# By position they would refer to our list of arrays. The last five are options of Equinox's
# `filter_jit`, which have other names here.
_REFUSED = (
    "static_argnums",
    "static_argnames",
    "donate_argnums",
    "donate_argnames",
    "default",
    "fn",
    "args",
    "kwargs",
    "out",
)


_CHECKS = ("wait", "later")


class Jitted(Transformed):
    """A function under `filter_jit`."""

    __slots__ = ("asks", "entries", "is_slow", "is_tree", "names", "places", "store")

    options: Options

    def __init__(self, fn: Callable[..., Any], options: Options):
        super().__init__(fn, options)
        self.names, self.places = positions_of(fn)
        # The arrays of a callable tree are arguments, and come first.
        self.is_tree = is_node(fn)
        # Whether the treatment of an array depends on more than its position.
        self.asks = options.asks
        # Whether a call needs work before it is split, or after it.
        self.is_slow = self.is_tree or bool(options.static) or self.asks
        self.store = store_for(fn, options)
        # The same dict, one attribute nearer to each call.
        self.entries = self.store.entries

    transform_name = "filter_jit"

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function, compiled."""
        # Every call of every training step runs these lines. The key finds everything that depends
        # on the structure alone. One walk over the arguments remains. It is written out here
        # because one more function call costs a tenth of the total (benchmarks/dispatch.py).
        if self.is_slow or handing:
            return self._call_slowly(args, kwargs)
        if kwargs:
            # As `place_keywords`, but Python made this dict for this call alone.
            placed: list[Any] = [*args]
            for name in self.places[len(args) :]:
                if name not in kwargs:
                    break
                placed.append(kwargs.pop(name))
            args = tuple(placed)
            if kwargs:
                return self._call_slowly(args, kwargs)
        arrays: list[Any] = []
        parts: list[Any] = []
        get: Any = handlers.get
        try:
            for value in args:
                get(type(value), split_other)(value, arrays, parts)
            entry = self.entries[tuple(parts)]
        # TypeError: a static value has no hash; `_call_slowly` reports its path.
        except (KeyError, TypeError):
            entry = None
        if entry is None:
            # Outside the `except`, so that a user's error does not show this one as its context.
            return self._call_slowly(args, kwargs)
        if entry.is_special:
            return self._call_specially(entry, arrays, args, kwargs)
        try:
            if entry.separate is None:
                packed = entry.jitted(arrays)
            else:
                packed = entry.jitted(*entry.separate(arrays))
        except BaseException as error:
            self._fail(entry, arrays, args, kwargs, error)
            raise
        if entry.unseen:
            self._catch_up(entry, arrays, args, kwargs, packed)
        # `unpack`, written out.
        ((plan, values),) = packed.items()
        if plan.successions is None:
            return plan.build(values)
        result = plan.build(values)
        plan.successions.note(self.fn, args, kwargs, result)
        return result

    def _call_slowly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = self.placed(args, kwargs)
        entry, arrays = self.find(args, kwargs)
        if entry.is_special:
            return self._call_specially(entry, arrays, args, kwargs)
        try:
            packed = entry.jitted(*entry.arguments(arrays))
        except BaseException as error:
            self._fail(entry, arrays, args, kwargs, error)
            raise
        if entry.unseen:
            self._catch_up(entry, arrays, args, kwargs, packed)
        return self._unpacked(args, kwargs, packed)

    def _unpacked(self, args: Any, kwargs: Any, packed: Any) -> Any:
        ((plan, values),) = packed.items()
        result = plan.build(values)
        if plan.successions is not None:
            plan.successions.note(self.fn, args, kwargs, result)
        return result

    def _catch_up(
        self, entry: Entry, arrays: list[Any], args: Any, kwargs: Any, packed: Any
    ) -> None:
        """Do the work of a first call after a fast call that met new shapes."""
        try:
            # Part of another program, whose own call looks for checks and waits.
            if _runs_later(arrays):
                return
            # The trace is in JAX's cache by now, so looking does not trace again.
            entry.look(entry.arguments(arrays))
            if entry.checks:
                jax.block_until_ready(packed)
        except (RuntimeError, ValueError) as error:
            self._explain(arrays, args, kwargs, error)
            raise
        finally:
            entry.end()

    def _fail(
        self, entry: Entry, arrays: list[Any], args: Any, kwargs: Any, error: BaseException
    ) -> None:
        # On an interrupt, too: this thread must not stay marked as making a program.
        entry.end()
        if isinstance(error, (RuntimeError, ValueError)):
            self._explain(arrays, args, kwargs, error)
        elif isinstance(error, TypeError):
            explain_dtypes(self._named(args, kwargs), error)

    def _call_specially(self, entry: Entry, arrays: list[Any], args: Any, kwargs: Any) -> Any:
        """Make a first call, a quiet one, or one with a check inside; wait for its results."""
        arguments = entry.arguments(arrays)
        try:
            with entry.making():
                # Part of another program, or not compiled: no call here can wait for it.
                if _runs_later(arrays) or cast("Any", jax.config).jax_disable_jit:
                    packed = entry.jitted(*arguments)
                    return self._unpacked(args, kwargs, packed)
                if entry.unseen:
                    entry.look(arguments)
                else:
                    # Another thread's trace marked it, and that thread has looked.
                    entry.is_special = entry.has_check
                call = ft.partial(entry.jitted, *arguments)
                if entry.checks:
                    packed = call_checked(entry.checks, call, is_once=entry.is_once)
                else:
                    packed = call()
        except (RuntimeError, ValueError, TypeError) as error:
            self._fail(entry, arrays, args, kwargs, error)
            raise
        return self._unpacked(args, kwargs, packed)

    def placed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments by position where they can be, with static ones wrapped as constants.

        Raises:
            ArgumentError: if an argument in `static` contains a JAX array.
        """
        if kwargs:
            args, kwargs = place_keywords(self.places, args, kwargs)
        static = self.options.static
        return make_constant(static, self.names, args, kwargs) if static else (args, kwargs)

    def split(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], tuple[Any, ...]]:
        """Return the arrays and the key of a call."""
        return self._split((self.fn,) if self.is_tree else (), args, kwargs)

    def _split(
        self, head: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], tuple[Any, ...]]:
        arrays, key = split_call(head, args, kwargs)
        if self.asks:
            key = (*key, self.store.answers(self.names, self.fn, args, kwargs, arrays))
        return arrays, key

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Entry, list[Any]]:
        """The compiled function for a call, which is made if necessary, and the call's arrays.

        Raises:
            ArgumentError: if a static value cannot be hashed; the error names its path.
        """
        fn = supplied(self.fn)
        # With supplied values, a function is a tree.
        head = (fn,) if self.is_tree or fn is not self.fn else ()
        try:
            arrays, key = self._split(head, args, kwargs)
            entry = self.entries.get(key)
            if entry is None:
                entry = self.store.add(key, self.names, fn, head, args, kwargs)
        # Some of our errors are TypeErrors, too, and need no explanation.
        except PytreemodError:
            raise
        except TypeError as error:
            raise unhashable(self._named(args, kwargs), error) from error
        return entry, arrays

    def lower(self, /, *args: Any, **kwargs: Any) -> Lowered:
        """Trace and lower the function for these arguments, without running it.

        See `lower` of `jax.jit`. Arguments may be arrays or `jax.ShapeDtypeStruct`s.
        """
        return self._lower((), args, kwargs)

    def trace(self, /, *args: Any, **kwargs: Any) -> Traced:
        """Trace the function for these arguments; see `trace` of `jax.jit`."""
        traced, entry = self._stage("trace", args, kwargs)
        return Traced(traced, ft.partial(self._lowered, (), args, kwargs, entry))

    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        """Return the tree of the result, with a `jax.ShapeDtypeStruct` for each array."""
        return unpack_structs(self._stage("eval_shape", args, kwargs)[0])

    def stage_bound(self, what: str, instance: Any) -> Callable[..., Any]:
        """`lower`, `trace` or `eval_shape` of the method bound to an instance."""
        if what != "lower":
            return ft.partial(getattr(self, what), instance)

        return lambda *args, **kwargs: self._lower((instance,), args, kwargs)

    def _lower(
        self, bound: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Lowered:
        lowered, entry = self._stage("lower", (*bound, *args), kwargs)
        return self._lowered(bound, args, kwargs, entry, lowered)

    def _lowered(
        self,
        bound: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        entry: Entry,
        lowered: Any,
    ) -> Lowered:
        def split(*args: Any, **kwargs: Any) -> tuple[list[Any], tuple[Any, ...]]:
            return self.split(*self.placed((*bound, *args), kwargs))

        own = [("function", self.fn)] if self.is_tree else []
        own += [("self", instance) for instance in bound]
        static = named_arguments(self.names, *self.placed((*bound, *args), kwargs))
        # The stored call must not keep arrays alive.
        own, instance, given = as_structs((own, bound, (args, kwargs)))
        placed = place_keywords(self.places, (*instance, *given[0]), given[1])
        pairs = list(zip(named_arguments(self.names, *placed), static, strict=True))[len(bound) :]
        named = [held if held.name in self.options.static else n for n, held in pairs]
        call = TracedCall(own, named, given)
        return Lowered("filter_jit", function_name(self.fn), split, lowered, entry, call)

    def _stage(self, what: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Entry]:
        # Structs are not arrays, so NumPy arrays without memory replace them for the split.
        structs: dict[int, Any] = {}

        def stand_in(leaf: Any) -> Any:
            if not isinstance(leaf, jax.ShapeDtypeStruct):
                return leaf
            # NumPy has no named sizes, which `jax.export` allows.
            shape = [size if isinstance(size, int) else 1 for size in leaf.shape]
            made = np.broadcast_to(np.empty((), object), shape)
            # Store the array, too: if it were deleted, another object could get its id.
            structs[id(made)] = (leaf, made)
            return made

        args, kwargs = jtu.tree_map(stand_in, self.placed(args, kwargs))
        entry, arrays = self.find(args, kwargs)
        arrays = [structs[id(x)][0] if id(x) in structs else x for x in arrays]
        # JAX caches this trace, so a first call would not run the function and would not look for
        # checks.
        entry.is_special = True
        arguments = entry.arguments(arrays)
        try:
            with entry.making():
                staged = getattr(entry.jitted, what)(*arguments)
                if what == "lower":
                    entry.look(arguments)
            return staged, entry
        except (RuntimeError, ValueError) as error:
            self._explain(arrays, args, kwargs, error)
            raise

    def _named(self, args: Any, kwargs: Any) -> list[tuple[str, Any]]:
        own = [("function", self.fn)] if self.is_tree else []
        return [*own, *named_arguments(self.names, args, kwargs)]

    def _explain(self, arrays: list[Any], args: Any, kwargs: Any, error: Exception) -> None:
        """Raise a better error than JAX's, if there is one."""
        raise_recorded(error)
        named = self._named(args, kwargs)
        explain_deleted(function_name(self.fn), named, error)
        donation = self.options.donation
        if donation is not None:
            flags = donation.flags(self.names, args, kwargs)
            given = [donation.gives_own] * (len(arrays) - len(flags)) + flags
            explain_twice(function_name(self.fn), named, given, error)
        layout = self.options.in_shardings
        assigned = self.store.assign(self.names, self.fn, args, kwargs, arrays)
        if layout is not None and assigned is not None:
            layout.explain(assigned, error)


class JittedLater(Jitted):
    """A function under `filter_jit(checks="later")`."""

    __slots__ = ("pending",)

    def __init__(self, fn: Callable[..., Any], options: Options):
        super().__init__(fn, options)
        self.pending: Any = self.store.pending_of(fn)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Raise a failure of an earlier call, or else call the compiled function."""
        self.pending.begin()
        return Jitted.__call__(self, *args, **kwargs)


def _runs_later(arrays: list[Any]) -> bool:
    """Whether a call is part of another trace."""
    return any(isinstance(array, Tracer) for array in arrays)


@overload
def filter_jit(
    fun: _F,
    *,
    donate: Any = "none",
    static: Names = (),
    in_shardings: ShardingSpec = None,
    out_shardings: ShardingSpec = None,
    max_traces: int | None = None,
    checks: str = "wait",
    **jitkwargs: Any,
) -> _F: ...
@overload
def filter_jit(
    *,
    donate: Any = "none",
    static: Names = (),
    in_shardings: ShardingSpec = None,
    out_shardings: ShardingSpec = None,
    max_traces: int | None = None,
    checks: str = "wait",
    **jitkwargs: Any,
) -> Callable[[_F], _F]: ...
def filter_jit(
    fun: Any = None,
    *,
    donate: Any = "none",
    static: Names = (),
    in_shardings: ShardingSpec = None,
    out_shardings: ShardingSpec = None,
    max_traces: int | None = None,
    checks: str = "wait",
    **jitkwargs: Any,
) -> Any:
    """`jax.jit` for functions of any trees: arrays are traced, everything else is static.

    The function may take and return Modules, containers, numbers, strings and functions. It is
    traced again when a static value changes (by `==` and type) or when an array changes shape or
    dtype. `fun` may be a pytree itself (a Module, a bound method); its arrays are traced, too.

    A call returns as soon as one of `jax.jit` would. It waits for the device only if the function
    contains a check ([`error_if`][pytreemod.error_if]) and `checks` is `"wait"`.

    With `checks="later"` no call waits. A call raises the failures of earlier calls that have
    finished, instead of running. `pm.debug.raise_errors()` waits for all calls, and raises.
    Failures that remain are printed at exit. A failed call still returns its results. If they
    replaced a donated argument, the value before the failure is lost.

    All checks are in effect then, whether or not the function uses the result of `error_if`. They
    pass through every filtered transform. Plain JAX transforms and your own rules for derivatives
    refuse them. If another traced function calls the function, its checks belong to that function,
    and `checks` has no effect. A check with `on_error="breakpoint"` calls the host, so its call
    waits. A program from `lower(...).compile()` reports failures, too; an exported program cannot.

    **Law.** `filter_jit(f)(*args)` equals `f(*args)`, for every `f` without side effects.

    Args:
        fun: the function; without it, `filter_jit` returns a decorator.
        donate: the arguments whose memory the results may reuse. One of: names of arguments
            (`"model"`, `("model", "opt_state")`); a selector over the arguments by name
            (`select.path("model.layers")`); or `"none"`, `"all"`, `"all-except-first"`. `"warn"`
            and `"warn-except-first"` are the same, with JAX's warning about donated arrays that
            were not usable. Only these strings donate the arrays of `fun` itself. A selector that
            looks at arrays, such as a predicate, is evaluated in each call.
        static: names of arguments whose arrays are part of the program. NumPy arrays and numbers in
            them are compared by value. The function gets them unchanged, so they can be shapes and
            indices. A JAX array in them is an error. (In any argument, values other than arrays are
            static.)
        in_shardings: the shardings of the arguments: one spec for all of them; a tuple with one for
            each positional argument; or a dict by argument name. A placement is a sharding, a
            `PartitionSpec` for the mesh in context (`jax.set_mesh`), a device, or None for
            "unchanged". A spec is a placement, a function from an array to one,
            [`by`][pytreemod.by], a Module with placements instead of its data, or a prefix tree of
            these. Arguments that a dict leaves out, and the arrays of `fun` itself, keep their
            shardings.
        out_shardings: the sharding of the result: one such spec.
        max_traces: how often the function may be traced. One trace more raises an error that
            reports what differed (see [`explain_retraces`][pytreemod.debug.explain_retraces]).
        checks: when a failed check raises. `"wait"`: in the call, which waits for its results.
            `"later"`: no call waits; see above.
        **jitkwargs: options of `jax.jit` (`inline`, `keep_unused`, `compiler_options`, ...).

    Returns:
        A function of the same signature, with `lower(...).compile()`, `trace` and `eval_shape`.
        `jax.export.export` accepts it. You call the exported program with the same trees, which
        must contain only arrays. (JAX can serialize it if these are dicts, lists and tuples. With
        Modules, export a function of their leaves.)

    Raises:
        ArgumentError: if `fun` is not callable, an option does not exist, or a name in `donate` or
            `static` is not an argument. When called: if a static value is not hashable, an argument
            in `static` contains a JAX array, or an argument has another sharding than
            `in_shardings` says.
        SpecError: when called: if `in_shardings` or `out_shardings` is not a prefix of the tree.
        ShapeError: when called: if a sharding does not fit its array.
        RetraceError: when called: if it needs one trace more than `max_traces`.
        DonatedError: when called: if the memory of an argument was donated to an earlier call.
        CheckError: when called: if a check failed. With `checks="later"`, a check of an earlier
            call; a note says which call, counted from 1.
        CaptureError: when traced with `checks="later"`: if a check is inside a transform that does
            not return it.

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
    _check_options(jitkwargs)
    if checks not in _CHECKS:
        near = nearest(checks, _CHECKS) if isinstance(checks, str) else ""  # pyright: ignore[reportUnnecessaryIsInstance]  (callers may be unchecked)
        raise ArgumentError("filter_jit(checks)", '"wait" or "later"', describe(checks) + near)
    if fun is None:
        return ft.partial(
            filter_jit,
            donate=donate,
            static=static,
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            max_traces=max_traces,
            checks=checks,
            **jitkwargs,
        )
    # After the options, so that a mistake in a decorator is reported at its line.
    check_callable("filter_jit", fun)
    if max_traces is not None and (type(max_traces) is not int or max_traces < 0):
        raise ArgumentError("filter_jit(max_traces)", "a count", describe(max_traces))
    options = Options(
        as_donation(donate, fun),
        max_traces,
        None if in_shardings is None else ArgumentPlacements(in_shardings),
        None if out_shardings is None else ResultPlacements(out_shardings),
        as_static(static, fun),
        checks,
        tuple(sorted(jitkwargs.items())),
    )
    return (JittedLater if checks == "later" else Jitted)(fun, options)


def _check_options(options: dict[str, Any]) -> None:
    for name in options:
        if name in _REFUSED:
            raise ArgumentError(
                "filter_jit",
                "static=..., donate=... and jax.jit's other options",
                f"{name}=",
                hint=[
                    "non-array arguments are static already; to name static arguments:",
                    '@pm.filter_jit(donate=("model", "opt_state"), static="size")',
                ],
            )
    check_options("filter_jit", options, untyped_jax.jit, filter_jit, _REFUSED)


def clear_caches() -> None:
    """Forget everything that transforms have cached, and clear JAX's caches.

    Examples:
        >>> clear_caches()
    """
    clear_stores()
    forget_steps()
    jax.clear_caches()
