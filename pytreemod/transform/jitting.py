"""`filter_jit`: compile a function of any trees; arrays are traced, all else is static."""

import functools as ft
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, TypeVar, overload

import jax
import numpy as np

from pytreemod.errors import ArgumentError, DonatedError, describe, explain
from pytreemod.transform.boundary import (
    handlers,
    pack,
    split_call,
    split_other,
    structure_of_call,
    unhashable,
    unpack,
)
from pytreemod.transform.wrapping import (
    Transformed,
    argument_name,
    check_callable,
    function_name,
    parameters_of,
    place_keywords,
    positional_names,
)
from pytreemod.tree.nodes import is_node
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_array
from pytreemod.tree.prefixes import By, mask_of
from pytreemod.tree.selecting import Selector, as_selector
from pytreemod.typing import jtu

_F = TypeVar("_F", bound=Callable[..., Any])

# A program with as many compiled variants does nothing else; the oldest goes.
MAX_ENTRIES = 4096

_STRINGS = ("none", "all", "all-except-first", "warn", "warn-except-first")
_REFUSED = (
    "static_argnums",
    "static_argnames",
    "donate_argnums",
    "donate_argnames",
)
_RENAMED = ("default", "fn", "args", "kwargs", "out")


class _Donation:
    """Which arguments' arrays a call gives away."""

    __slots__ = ("quiet", "rule")

    def __init__(self, rule: Any, quiet: bool):
        self.rule = rule
        self.quiet = quiet

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Donation) and (self.rule, self.quiet) == (other.rule, other.quiet)

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
            flags += [self._gives(i, argument_name(names, i))] * _count(value)
        for name in sorted(kwargs):
            flags += [self._gives(-1, name)] * _count(kwargs[name])
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


def _count(value: Any) -> int:
    return sum(map(is_array, jtu.tree_leaves(value)))


def _as_donation(donate: Any, fn: Any) -> _Donation | None:
    if isinstance(donate, str):
        if donate == "none":
            return None
        if donate in _STRINGS:
            return _Donation(donate.replace("warn", "all"), quiet=donate.startswith("all"))
        donate = (donate,)
    if isinstance(donate, (Selector, type, By)):
        return _Donation(as_selector(donate), quiet=False)
    if isinstance(donate, Sequence) and all(isinstance(name, str) for name in donate):
        _check_names(tuple(donate), fn)
        return _Donation(tuple(donate), quiet=False) if donate else None
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


class _Entry:
    """One compiled function: one key, any shapes."""

    __slots__ = ("jitted", "quiet", "separate", "tracing")

    def __init__(
        self,
        jitted: Any,
        separate: Callable[[list[Any]], tuple[list[Any], list[Any]]] | None,
        quiet: bool,
    ):
        self.jitted = jitted
        self.separate = separate
        self.quiet = quiet

    def call(self, arrays: list[Any]) -> Any:
        if self.separate is None:
            return self.jitted(arrays)
        donated, kept = self.separate(arrays)
        return self.jitted(donated, kept)

    def arguments(self, arrays: list[Any]) -> tuple[Any, ...]:
        return (arrays,) if self.separate is None else self.separate(arrays)


def _separation(
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


class _Store:
    """The compiled functions of one function under one set of options."""

    __slots__ = ("__weakref__", "donation", "entries", "jit_options", "reference")

    def __init__(
        self,
        reference: Callable[[], Any] | None,
        donation: _Donation | None,
        jit_options: dict[str, Any],
    ):
        self.reference = reference
        self.donation = donation
        self.jit_options = jit_options
        self.entries: dict[Any, _Entry] = {}

    def add(
        self,
        key: Any,
        names: tuple[str, ...],
        head: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str,
    ) -> _Entry:
        """Make the compiled function for a key that was not met before."""
        arrays, structure = structure_of_call(head, args, kwargs)
        reference = self.reference

        def run(values: list[Any]) -> Any:
            head, args, kwargs = structure.assemble(values)
            fn = head[0] if reference is None else reference()
            return pack(fn(*args, **kwargs))

        donation = self.donation
        if donation is None:
            run.__name__ = run.__qualname__ = name
            entry = _Entry(jax.jit(run, **self.jit_options), None, quiet=False)
        else:
            flags = [False] * (len(arrays) - sum(map(_count, (args, kwargs))))
            flags += donation.flags(names, args, kwargs)
            separate, join = _separation(flags)

            def run_donated(donated: list[Any], kept: list[Any]) -> Any:
                return run(join(donated, kept))

            run_donated.__name__ = run_donated.__qualname__ = name
            jitted = jax.jit(run_donated, donate_argnums=0, **self.jit_options)
            entry = _Entry(jitted, separate, donation.quiet)
        if len(self.entries) >= MAX_ENTRIES:
            self.entries.pop(next(iter(self.entries)), None)
        return self.entries.setdefault(key, entry)


# Keyed weakly by the function, so that `filter_jit(f)` written inside a loop finds what the last
# one compiled, and nothing outlives f.
_stores: "weakref.WeakKeyDictionary[Any, dict[Any, _Store]]" = weakref.WeakKeyDictionary()
# For callables that are pytrees: they come in with the arguments, and the key tells them apart.
_shared_stores: dict[Any, _Store] = {}
_FUNCTIONS = (type(is_array), type(len), type)


def _store_for(fn: Any, donation: _Donation | None, jit_options: dict[str, Any]) -> _Store:
    try:
        options = (donation, tuple(sorted(jit_options.items())))
        hash(options)
    except TypeError:
        options = None
    if is_node(fn):
        if options is None:
            return _Store(None, donation, jit_options)
        return _shared_stores.setdefault(options, _Store(None, donation, jit_options))
    if options is None or not isinstance(fn, _FUNCTIONS):
        return _Store(lambda: fn, donation, jit_options)
    by_options = _stores.setdefault(fn, {})
    return by_options.setdefault(options, _Store(weakref.ref(fn), donation, jit_options))


class _Jitted(Transformed):
    """A function under `filter_jit`."""

    __slots__ = ("entries", "is_tree", "names", "store")

    def __init__(self, fn: Callable[..., Any], options: Any):
        super().__init__(fn, options)
        donation, jit_options = options
        self.names = positional_names(fn)
        self.is_tree = is_node(fn)
        self.store = _store_for(fn, donation, dict(jit_options))
        self.entries = self.store.entries

    @classmethod
    def transform_name(cls) -> str:
        return "filter_jit"

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        # Every call of every step of every training loop comes through these lines. What can be
        # known per structure is found by `key`; what is left is one walk over the arguments,
        # written out here because a function call more is a tenth of the whole.
        if kwargs or self.is_tree:
            return self._call_slowly(args, kwargs)
        arrays: list[Any] = []
        parts: list[Any] = []
        get = handlers.get
        try:
            for value in args:
                get(type(value), split_other)(value, arrays, parts)
            entry = self.entries[tuple(parts)]
        except (KeyError, TypeError):
            return self._call_slowly(args, kwargs)
        if entry.quiet:
            return self._run(entry, arrays, args, kwargs)
        try:
            packed = entry.jitted(arrays) if entry.separate is None else entry.call(arrays)
        except RuntimeError as error:
            _explain_deleted(self, args, kwargs, error)
            raise
        ((plan, values),) = packed.items()
        return plan.build(values)

    def _call_slowly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        entry, arrays, args, kwargs = self.prepare(args, kwargs)
        return self._run(entry, arrays, args, kwargs)

    def _run(self, entry: _Entry, arrays: list[Any], args: Any, kwargs: Any) -> Any:
        try:
            if not entry.quiet:
                return unpack(entry.call(arrays))
            with _without_donation_warning():
                return unpack(entry.call(arrays))
        except RuntimeError as error:
            _explain_deleted(self, args, kwargs, error)
            raise

    def prepare(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[_Entry, list[Any], tuple[Any, ...], dict[str, Any]]:
        """The compiled function for a call, its arrays, and its arguments in their places."""
        if kwargs:
            args, kwargs = place_keywords(self.names, args, kwargs)
        head = (self.fn,) if self.is_tree else ()
        try:
            arrays, key = split_call(head, args, kwargs)
            entry = self.entries.get(key)
        except TypeError as error:
            raise unhashable(head, args, kwargs, error) from error
        if entry is None:
            entry = self.store.add(key, self.names, head, args, kwargs, function_name(self.fn))
        return entry, arrays, args, kwargs

    def lower(self, /, *args: Any, **kwargs: Any) -> "Lowered":
        """Trace and lower for these arguments, without running; see `jax.jit`'s `lower`.

        Arguments may be arrays or `jax.ShapeDtypeStruct`s.
        """
        return Lowered(self, (), *self._stage("lower", args, kwargs))

    def trace(self, /, *args: Any, **kwargs: Any) -> Any:
        """Trace for these arguments; see `jax.jit`'s `trace`."""
        return self._stage("trace", args, kwargs)[0]

    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        """The result's tree with `jax.ShapeDtypeStruct`s for arrays."""
        return unpack(self._stage("eval_shape", args, kwargs)[0])

    def stage_bound(self, what: str, instance: Any) -> Callable[..., Any]:
        """`lower`, `trace` or `eval_shape` of the method that is bound to an instance."""
        if what != "lower":
            return ft.partial(getattr(self, what), instance)

        def lower(*args: Any, **kwargs: Any) -> Lowered:
            staged = self._stage("lower", (instance, *args), kwargs)
            return Lowered(self, (instance,), *staged)

        return lower

    def _stage(self, what: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        # Structs are no arrays, so NumPy arrays without memory stand for them in the split.
        structs: dict[int, Any] = {}

        def stand_in(leaf: Any) -> Any:
            if not isinstance(leaf, jax.ShapeDtypeStruct):
                return leaf
            made = np.broadcast_to(np.empty((), object), leaf.shape)
            structs[id(made)] = (leaf, made)
            return made

        args, kwargs = jtu.tree_map(stand_in, (args, kwargs))
        entry, arrays, _, _ = self.prepare(args, kwargs)
        arrays = [structs[id(x)][0] if id(x) in structs else x for x in arrays]
        return getattr(entry.jitted, what)(*entry.arguments(arrays)), entry


class Lowered:
    """A function that was lowered for particular arguments: what `filter_jit(f).lower` returns.

    Has `compile`, and whatever else `jax.stages.Lowered` has (`as_text`, `cost_analysis`, ...).
    """

    def __init__(self, wrapper: _Jitted, bound: tuple[Any, ...], lowered: Any, entry: _Entry):
        self.lowered = lowered
        self._bound = bound
        self._wrapper = wrapper
        self._entry = entry

    def compile(self, compiler_options: dict[str, Any] | None = None) -> "Compiled":
        """Compile.

        Args:
            compiler_options: as for `jax.stages.Lowered.compile`.

        Returns:
            A function of the same arguments.
        """
        compiled = self.lowered.compile(compiler_options=compiler_options)
        return Compiled(self._wrapper, self._bound, compiled, self._entry)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lowered, name)


class Compiled:
    """A compiled function: what `filter_jit(f).lower(...).compile()` returns.

    Call it with arguments like those it was compiled for. Has whatever else
    `jax.stages.Compiled` has (`cost_analysis`, `memory_analysis`, ...).
    """

    def __init__(self, wrapper: _Jitted, bound: tuple[Any, ...], compiled: Any, entry: _Entry):
        self.compiled = compiled
        self._bound = bound
        self._wrapper = wrapper
        self._entry = entry

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run.

        Raises:
            ArgumentError: something other than the values of arrays differs from what the
                function was compiled for.
        """
        entry, arrays, _, _ = self._wrapper.prepare((*self._bound, *args), kwargs)
        if entry is not self._entry:
            name = function_name(self._wrapper.fn)
            raise ArgumentError(
                explain(
                    f"compiled {name}",
                    "arguments with the structure and static values that it was compiled for",
                    "others",
                    cure=["compile for these, too:", f"filter_jit({name}).lower(...).compile()"],
                )
            )
        return unpack(self.compiled(*entry.arguments(arrays)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compiled, name)


@contextmanager
def _without_donation_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        yield


def _explain_deleted(wrapper: _Jitted, args: Any, kwargs: dict[str, Any], error: Exception) -> None:
    """Raise a better error if `error` came from an argument whose memory was given away."""
    named = [*((argument_name(wrapper.names, i), x) for i, x in enumerate(args)), *kwargs.items()]
    gone = [
        f"{path_text(path, name)}: {describe(leaf)}"
        for name, value in named
        for path, leaf in jtu.tree_leaves_with_path(value)
        if isinstance(leaf, jax.Array)
        and not isinstance(leaf, jax.core.Tracer)
        and leaf.is_deleted()
    ]
    if gone:
        raise DonatedError(
            explain(
                f"{function_name(wrapper.fn)}",
                "arrays that are still there",
                f"{len(gone)} whose memory was given away by an earlier call (donate=...)",
                places=gone,
                cure=["go on with what that call returned:", "model, ... = step(model, ...)"],
            )
        ) from error


@overload
def filter_jit(fun: _F, *, donate: Any = "none", **jitkwargs: Any) -> _F: ...
@overload
def filter_jit(*, donate: Any = "none", **jitkwargs: Any) -> Callable[[_F], _F]: ...
def filter_jit(fun: Any = None, *, donate: Any = "none", **jitkwargs: Any) -> Any:
    """`jax.jit` for functions of any trees: arrays are traced, everything else is static.

    The function may take and return Modules, containers, numbers, strings, functions: whatever.
    It is traced again when something static changes (by `==`, type included) or when an array
    changes shape or dtype. A call returns as soon as `jax.jit`'s would: it never waits for the
    device. `fun` may itself be a pytree (a Module, a bound method): its arrays are traced, too.

    **Law.** `filter_jit(f)(*args)` equals `f(*args)`, for every `f` without side effects.

    Args:
        fun: the function; left out, a decorator is returned.
        donate: whose arrays' memory may be used for the results. Names of arguments
            (`"model"`, `("model", "opt_state")`); a selector over the arguments by name
            (`select.path("model.layers")`); or `"none"`, `"all"`, `"all-except-first"`, and
            `"warn"`, `"warn-except-first"`, which are the same with JAX's warning if a donated
            array was of no use.
        **jitkwargs: for `jax.jit` (`inline`, `keep_unused`, `compiler_options`, ...).

    Returns:
        A function of the same signature, with `lower(...).compile()`, `trace` and `eval_shape`.

    Raises:
        ArgumentError: `fun` is not callable, an option does not exist, a name in `donate` is no
            argument; when called: a static value is not hashable.
        DonatedError: when called: an argument's memory was donated to an earlier call.

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
    if fun is None:
        return ft.partial(filter_jit, donate=donate, **jitkwargs)
    check_callable("filter_jit", fun)
    return _Jitted(fun, (_as_donation(donate, fun), tuple(sorted(jitkwargs.items()))))


def _check_options(options: dict[str, Any]) -> None:
    for name in options:
        if name in _REFUSED or name in _RENAMED:
            raise ArgumentError(
                explain(
                    "filter_jit",
                    "donate=... and jax.jit's other options",
                    f"{name}=",
                    cure=[
                        "what is no array is static by itself; donate by name:",
                        '@pm.filter_jit(donate=("model", "opt_state"))',
                    ],
                )
            )


def clear_caches() -> None:
    """Forget everything that `filter_jit` has compiled, and clear JAX's own caches.

    Examples:
        >>> clear_caches()
    """
    for by_options in list(_stores.values()):
        for store in by_options.values():
            store.entries.clear()
    for store in _shared_stores.values():
        store.entries.clear()
    jax.clear_caches()
