"""`filter_jit`: compile a function of any trees; arrays are traced, all else is static.

A call is split into arrays and a key (`boundary.packing`). The key finds the compiled function in
the store of the user's function (`store`), the arrays go through it, and the result is put together
again. `Jitted.__call__` is that road, written out, and nothing else; whatever is out of the
ordinary, such as a first call, an option that looks at arrays, or an error, leaves it for
`_call_slowly`.
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
    unpack,
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

# By position they would mean our list of arrays; the last five are those of Equinox's `filter_jit`,
# for which there are other names now.
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
        # Then its own arrays are arguments, and come first.
        self.is_tree = is_node(fn)
        # Whether what is done with an array depends on more of it than its place.
        self.asks = options.asks
        # Whether something must be done before a call can be split, or after.
        self.is_slow = self.is_tree or bool(options.static) or self.asks
        self.store = store_for(fn, options)
        # The same dict, one attribute nearer to each call.
        self.entries = self.store.entries

    transform_name = "filter_jit"

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function, compiled."""
        # Every call of every step of every training loop comes through these lines. What can be
        # known per structure is found by its key; what is left is one walk over the arguments,
        # written out here because one function call more is a tenth of the whole
        # (benchmarks/dispatch.py). Whatever is out of the ordinary takes the longer road.
        if self.is_slow or handing:
            return self._call_slowly(args, kwargs)
        if kwargs:
            # As `place_keywords`, but Python has made this dict for us alone.
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
        # TypeError: something static has no hash, which the longer road says with its path.
        except (KeyError, TypeError):
            entry = None
        if entry is None:
            # Not above: an error of the user's function would be shown as one in handling this.
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
        # As `unpack`, without the call of it.
        ((plan, values),) = packed.items()
        if entry.successions is None:
            return plan.build(values)
        result = plan.build(values)
        entry.successions.note(self.fn, args, kwargs, result)
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
        return self._unpacked(entry, args, kwargs, packed)

    def _unpacked(self, entry: Entry, args: Any, kwargs: Any, packed: Any) -> Any:
        result = unpack(packed)
        if entry.successions is not None:
            entry.successions.note(self.fn, args, kwargs, result)
        return result

    def _catch_up(
        self, entry: Entry, arrays: list[Any], args: Any, kwargs: Any, packed: Any
    ) -> None:
        """After a call on the short road that met new shapes: what a first call does before."""
        try:
            # Part of another program: the call of that one looks, and waits.
            if _runs_later(arrays):
                return
            # The trace is in JAX's cache by now: to look costs no second one.
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
        # Of an interrupt, too: nothing may leave this thread marked as making a program.
        entry.end()
        if isinstance(error, (RuntimeError, ValueError)):
            self._explain(arrays, args, kwargs, error)
        elif isinstance(error, TypeError):
            explain_dtypes(self._named(args, kwargs), error)

    def _call_specially(self, entry: Entry, arrays: list[Any], args: Any, kwargs: Any) -> Any:
        """A first call, a quiet one, or one with a check inside: it waits for its results."""
        arguments = entry.arguments(arrays)
        try:
            with entry.making():
                # Part of another program, or no program at all: no call here can wait for it.
                if _runs_later(arrays) or cast("Any", jax.config).jax_disable_jit:
                    packed = entry.jitted(*arguments)
                    return self._unpacked(entry, args, kwargs, packed)
                if entry.unseen:
                    entry.look(arguments)
                else:
                    # Another thread's trace has marked it, and that thread has looked by itself.
                    entry.is_special = entry.has_check
                call = ft.partial(entry.jitted, *arguments)
                if entry.checks:
                    packed = call_checked(entry.checks, call, is_once=entry.is_once)
                else:
                    packed = call()
        except (RuntimeError, ValueError, TypeError) as error:
            self._fail(entry, arrays, args, kwargs, error)
            raise
        return self._unpacked(entry, args, kwargs, packed)

    def placed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments by position, however they were spelled; static ones held as such.

        Raises:
            ArgumentError: there is a JAX array in an argument that was said to be static.
        """
        if kwargs:
            args, kwargs = place_keywords(self.places, args, kwargs)
        static = self.options.static
        return make_constant(static, self.names, args, kwargs) if static else (args, kwargs)

    def split(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], tuple[Any, ...]]:
        """A call's arrays and its key."""
        return self._split((self.fn,) if self.is_tree else (), args, kwargs)

    def _split(
        self, head: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], tuple[Any, ...]]:
        arrays, key = split_call(head, args, kwargs)
        if self.asks:
            key = (*key, self.store.answers(self.names, self.fn, args, kwargs, arrays))
        return arrays, key

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Entry, list[Any]]:
        """The compiled function for a call, made if need be, and the call's arrays.

        Raises:
            ArgumentError: a static value cannot be hashed; its path is named.
        """
        fn = supplied(self.fn)
        # With the values that are supplied, if there are any, it is a tree.
        head = (fn,) if self.is_tree or fn is not self.fn else ()
        try:
            arrays, key = self._split(head, args, kwargs)
            entry = self.entries.get(key)
            if entry is None:
                entry = self.store.add(key, self.names, fn, head, args, kwargs)
        # Some of ours are TypeErrors, too; they say what is wrong already.
        except PytreemodError:
            raise
        except TypeError as error:
            raise unhashable(self._named(args, kwargs), error) from error
        return entry, arrays

    def lower(self, /, *args: Any, **kwargs: Any) -> Lowered:
        """Trace and lower for these arguments, without running; see `jax.jit`'s `lower`.

        Arguments may be arrays or `jax.ShapeDtypeStruct`s.
        """
        return self._lower((), args, kwargs)

    def trace(self, /, *args: Any, **kwargs: Any) -> Traced:
        """Trace for these arguments; see `jax.jit`'s `trace`."""
        traced, entry = self._stage("trace", args, kwargs)
        return Traced(traced, ft.partial(self._lowered, (), args, kwargs, entry))

    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        """The result's tree with `jax.ShapeDtypeStruct`s for arrays."""
        return unpack_structs(self._stage("eval_shape", args, kwargs)[0])

    def stage_bound(self, what: str, instance: Any) -> Callable[..., Any]:
        """`lower`, `trace` or `eval_shape` of the method that is bound to an instance."""
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
        # What is stored must not keep the arrays alive.
        own, instance, given = as_structs((own, bound, (args, kwargs)))
        placed = place_keywords(self.places, (*instance, *given[0]), given[1])
        pairs = list(zip(named_arguments(self.names, *placed), static, strict=True))[len(bound) :]
        named = [held if held.name in self.options.static else n for n, held in pairs]
        call = TracedCall(own, named, given)
        return Lowered("filter_jit", function_name(self.fn), split, lowered, entry, call)

    def _stage(self, what: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Entry]:
        # Structs are no arrays, so NumPy arrays without memory replace them in the split.
        structs: dict[int, Any] = {}

        def stand_in(leaf: Any) -> Any:
            if not isinstance(leaf, jax.ShapeDtypeStruct):
                return leaf
            # A size that has a name, as for `jax.export`, is none to NumPy.
            shape = [size if isinstance(size, int) else 1 for size in leaf.shape]
            made = np.broadcast_to(np.empty((), object), shape)
            # With the stand-in itself: if it died, its id might be another's.
            structs[id(made)] = (leaf, made)
            return made

        args, kwargs = jtu.tree_map(stand_in, self.placed(args, kwargs))
        entry, arrays = self.find(args, kwargs)
        arrays = [structs[id(x)][0] if id(x) in structs else x for x in arrays]
        # JAX keeps what is traced here, so that a first call would not run the function, and not
        # see that it has to look for checks.
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
        """Raise a better error than JAX's own, where there is one."""
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
        """Raise what has failed in an earlier call, or else call the function, compiled."""
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

    The function may take and return Modules, containers, numbers, strings, functions: whatever.
    It is traced again when something static changes (by `==`, type included) or when an array
    changes shape or dtype. A call returns as soon as `jax.jit`'s would: it waits for the
    device only if the function contains a check ([`error_if`][pytreemod.error_if]), and not even
    then with `checks="later"`. `fun` may itself be a pytree (a Module, a bound method): its arrays
    are traced, too.

    **Law.** `filter_jit(f)(*args)` equals `f(*args)`, for every `f` without side effects.

    Args:
        fun: the function; left out, a decorator is returned.
        donate: whose arrays' memory may be used for the results. Names of arguments
            (`"model"`, `("model", "opt_state")`); a selector over the arguments by name
            (`select.path("model.layers")`), which is asked in each call if it looks at the arrays
            (a predicate does); or `"none"`, `"all"`, `"all-except-first"`, and
            `"warn"`, `"warn-except-first"`, which are the same with JAX's warning if a donated
            array was of no use. These, and nothing else, give away the arrays of `fun` itself.
        static: names of arguments whose arrays are part of the program, not data: NumPy's arrays
            and numbers in them are compared by value, and arrive as they were passed, so that they
            can be shapes and indices. An array of JAX in them is an error. (Everything but arrays
            is static in any argument.)
        in_shardings: where the arguments are to lie: one spec for all of them; a tuple with one for
            each positional argument; or a dict by argument name. A spec is a sharding, a
            `PartitionSpec` for the mesh in context (`jax.set_mesh`), a device, None for "as it
            is", a function from an array to one of these, [`by`][pytreemod.by], a Module that
            holds these instead of its data, or a prefix tree of these. What a dict leaves
            out, and the arrays of `fun` itself, lie as they lie.
        out_shardings: where the result is to lie: one such spec.
        max_traces: how often the function may be traced; one trace more raises, and the text says
            what differed (see [`explain_retraces`][pytreemod.debug.explain_retraces]).
        checks: when a check that failed is raised. `"wait"`: by the call, which waits for its
            results. `"later"`: no call waits. A call raises what has failed in the calls before it
            that have finished, instead of running; `pm.debug.raise_errors()` waits for all, and
            raises; what is left is printed at exit. What a donated argument was overwritten with is
            what went on from the failure, and the value before is gone. All checks are in effect,
            whether what `error_if` returned is used or not. They come out of every filtered
            transform, but not out of one of plain JAX, where they are refused; nor out of a rule
            of one's own for derivatives. Called in another function that is traced, the function
            has no say: its checks are that function's. (`on_error="breakpoint"` calls the host, and
            so a call with such a check waits. A program that was compiled by `lower(...).compile()`
            reports, too; one that was exported cannot.)
        **jitkwargs: for `jax.jit` (`inline`, `keep_unused`, `compiler_options`, ...).

    Returns:
        A function of the same signature, with `lower(...).compile()`, `trace` and `eval_shape`.
        `jax.export.export` takes it: what it makes is called with the same trees, which must hold
        arrays alone. (JAX can serialize it if these are dicts, lists and tuples, and no Modules:
        then export a function of their leaves.)

    Raises:
        ArgumentError: `fun` is not callable, an option does not exist, a name in `donate` or
            `static` is no argument; when called: a static value is not hashable, there is a JAX
            array in an argument named in `static`, an argument lies elsewhere than `in_shardings`
            says.
        SpecError: when called: `in_shardings` or `out_shardings` is no prefix of the tree.
        ShapeError: when called: a sharding does not fit its array.
        RetraceError: when called: a trace more than `max_traces` is needed.
        DonatedError: when called: an argument's memory was donated to an earlier call.
        CheckError: when called: a check failed; with `checks="later"`, in an earlier call, which a
            note counts from 1.
        CaptureError: when traced, with `checks="later"`: a check is inside a transform that does
            not hand it out.

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
    # After the options, so that a decorator's mistake is reported where it is written.
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
                    "anything but an array is static; name the arguments:",
                    '@pm.filter_jit(donate=("model", "opt_state"), static="size")',
                ],
            )
    check_options("filter_jit", options, untyped_jax.jit, filter_jit, _REFUSED)


def clear_caches() -> None:
    """Forget everything that transforms have cached, and clear JAX's own caches.

    Examples:
        >>> clear_caches()
    """
    clear_stores()
    forget_steps()
    jax.clear_caches()
