"""`filter_pmap`: map a function over an axis, one member for each device."""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import jax
import numpy as np

from pytreemod.errors import ArgumentError, ShapeError, describe
from pytreemod.transform.boundary.packing import Grouped, split_call, unhashable, unpack
from pytreemod.transform.boundary.signatures import check_options, place_keywords
from pytreemod.transform.boundary.sowing import collecting
from pytreemod.transform.boundary.supplying import refuse_values
from pytreemod.transform.boundary.wrapping import (
    check_axis_name,
    check_callable,
    check_count,
    function_name,
)
from pytreemod.transform.compilation.donation import without_warning
from pytreemod.transform.compilation.stages import Lowered, TracedCall, as_structs
from pytreemod.transform.compilation.store import Entry, store_for
from pytreemod.transform.interception.argument_specs import named_arguments
from pytreemod.transform.maps.shared_streams import warn_of_shared_streams
from pytreemod.transform.maps.vmap import (
    ON_AXIS_0,
    MapOptions,
    Vmapped,
    group_by_axis,
)
from pytreemod.tree.effects import Effects, TraceEffects
from pytreemod.tree.nodes import is_node
from pytreemod.tree.predicates import is_array
from pytreemod.tree.snapshots import divide
from pytreemod.typing import AxesSpec, AxisName, untyped_jax

_F = TypeVar("_F", bound=Callable[..., Any])

_DONATE = ("all", "warn", "none")
_REFUSED = ("static_broadcasted_argnums", "donate_argnums")


class _Pmapped(Vmapped):
    """A function under `filter_pmap`."""

    __slots__ = ("store",)

    def __init__(self, fn: Callable[..., Any], options: MapOptions):
        super().__init__(fn, options)
        # By function, like that of `filter_jit`: a new one in a loop finds the compiled program.
        self.store = store_for(fn, ("filter_pmap", options))

    transform_name = "filter_pmap"

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        entry, arrays = self._prepare(args, kwargs)
        with without_warning(entry.quiet):
            return unpack(entry.jitted(*entry.arguments(arrays)))

    def lower(self, /, *args: Any, **kwargs: Any) -> Lowered:
        """Trace and lower for these arguments, without running; see `lower` of `jax.jit`."""

        def split(*args: Any, **kwargs: Any) -> tuple[list[Any], tuple[Any, ...]]:
            entry, arrays = self._prepare(args, kwargs)
            return arrays, entry.key

        entry, arrays = self._prepare(args, kwargs)
        with without_warning(entry.quiet):
            lowered = entry.jitted.lower(*entry.arguments(arrays))
        own = [("function", self.fn)] if is_node(self.fn) else []
        own, args, kwargs = as_structs((own, args, kwargs))
        call = TracedCall(own, named_arguments(self.names, args, kwargs), (args, kwargs))
        return Lowered("filter_pmap", function_name(self.fn), split, lowered, entry, call)

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Entry, list[Any]]:
        """Return the pmapped function for a call, and the arrays of the call."""
        refuse_values("filter_pmap", self.fn)
        args, kwargs = place_keywords(self.places, args, kwargs)
        axes, leaves, _ = self.inputs(args, kwargs)
        mapped = [
            None if axis is None else axis % leaf.ndim
            for axis, leaf in zip(axes, leaves, strict=True)
            if is_array(leaf)
        ]
        arrays = [leaf for leaf in leaves if is_array(leaf)]
        # With an axis_size, JAX 0.12 warns about an integer that it made itself.
        counted = all(axis is None for axis in mapped)
        if counted:
            size: Any = self.options.axis_size
            arrays.append(np.zeros((size, 0), bool))
            mapped.append(0)
        self._check_devices(arrays, mapped)
        own = divide(self.fn)[0] if is_node(self.fn) else []
        entry = self._find(args, kwargs, tuple(mapped), counted)
        return entry, own + arrays

    def _find(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        axes: tuple[int | None, ...],
        counted: bool,
    ) -> Entry:
        """Return the pmapped function for a call; JAX compiles a function once."""
        head = (self.fn,) if is_node(self.fn) else ()
        try:
            # With the axes: a spec may read the shapes of arrays, which are not in the key.
            key = (split_call(head, args, kwargs)[1], axes)
            entry = self.store.entries.get(key)
            if entry is None:
                entry = Entry(key, quiet=self.options.donate == "all")
                entry.jitted = self._pmap(head, args, kwargs, axes, counted)
                # In a separate list: the same for all members.
                own = len(divide(head)[0])
                entry.separate = lambda arrays: (arrays[:own], arrays[own:])
                entry = self.store.keep(entry)
        except TypeError as error:
            named = named_arguments(self.names, args, kwargs)
            raise unhashable([*(("function", fn) for fn in head), *named], error) from error
        return entry

    def _pmap(
        self,
        head: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        axes: tuple[int | None, ...],
        counted: bool,
    ) -> Any:
        in_axes, out_axes, terms = self.options.in_axes, self.options.out_axes, self.terms
        structure = divide((head, args, kwargs))[1]
        treatments = [axis for axis in self.treatments if axis is None or axis >= 0]
        # Not the function itself, because its compiled programs must not keep it alive.
        reference: Any = self.store.reference

        def run(own: list[Any], values: list[Any]) -> Grouped:
            head, args, kwargs = structure.assemble(own + values[: len(values) - counted])
            fn, drawn = head[0] if head else reference(), dict[Any, bool]()
            with Effects() as effects:
                result = collecting(fn, drawn)(*args, **kwargs)
            effects.pass_on()
            grouped = group_by_axis("filter_pmap(out_axes)", result, out_axes, treatments)
            ((plan, _),) = grouped.items()
            plan.effects = TraceEffects.of(effects)
            if drawn:
                # Assembled again, because the function may have used up its States.
                _, args, kwargs = structure.assemble(own + values[: len(values) - counted])
                are_mapped = [axis is not None for axis in axes[: len(axes) - counted]]
                warn_of_shared_streams(fn, drawn, args, kwargs, are_mapped, in_axes, terms)
            return grouped

        run.__name__ = run.__qualname__ = function_name(self.fn)
        # The function's arrays, too, as in `filter_jit`. They are donated if they are on every
        # device already; a result that is the same for all members reuses their memory.
        options = {} if self.options.donate == "none" else {"donate_argnums": (0, 1)}
        return jax.pmap(
            run,
            self.options.axis_name,
            in_axes=(None, list(axes)),
            out_axes=Grouped(None, treatments),
            **options,
            **dict(self.options.jaxkwargs),
        )

    def _check_devices(self, arrays: list[Any], axes: list[int | None]) -> None:
        pmapkwargs = dict(self.options.jaxkwargs)
        devices = pmapkwargs.get("devices")
        count = len(devices) if devices else jax.local_device_count(pmapkwargs.get("backend"))
        sizes = [x.shape[a] for x, a in zip(arrays, axes, strict=True) if a is not None]
        if sizes and sizes[0] > count:
            raise ShapeError(
                f"filter_pmap of {function_name(self.fn)}",
                f"at most {count} members, one for each device",
                str(sizes[0]),
                hint=[
                    "to map over any number of members, on one device:",
                    "pm.filter_vmap(f)",
                ],
            )


@overload
def filter_pmap(
    fun: _F,
    *,
    in_axes: AxesSpec = ...,
    out_axes: AxesSpec = ...,
    axis_name: AxisName | None = ...,
    axis_size: int | None = ...,
    donate: str = ...,
    **pmapkwargs: Any,
) -> _F: ...
@overload
def filter_pmap(
    *,
    in_axes: AxesSpec = ...,
    out_axes: AxesSpec = ...,
    axis_name: AxisName | None = ...,
    axis_size: int | None = ...,
    donate: str = ...,
    **pmapkwargs: Any,
) -> Callable[[_F], _F]: ...
def filter_pmap(
    fun: Any = None,
    *,
    in_axes: AxesSpec = ON_AXIS_0,
    out_axes: AxesSpec = ON_AXIS_0,
    axis_name: AxisName | None = None,
    axis_size: int | None = None,
    donate: str = "none",
    **pmapkwargs: Any,
) -> Any:
    """`jax.pmap` for functions of any trees: one member for each device.

    For programs that use it already. In new ones, use [`filter_jit`][pytreemod.filter_jit] with
    shardings, or [`filter_shard_map`][pytreemod.filter_shard_map].

    **Law.** `filter_pmap(f)(*args)` equals `filter_vmap(f)(*args)`.

    Args:
        fun: the function; without it, the result is a decorator. If it is a Module or a bound
            method, its arrays are the same for all members.
        in_axes: as for [`filter_vmap`][pytreemod.filter_vmap].
        out_axes: the same for the result; None takes the result of the first device.
        axis_name: a name for collectives (`jax.lax.pmean`).
        axis_size: the number of members, if no argument is mapped.
        donate: whether the results may reuse the memory of the arrays in the arguments and in the
            function: `"none"`, `"all"`, or `"warn"`, which is `"all"` with JAX's warning about
            donated arrays that were not usable.
        **pmapkwargs: options of `jax.pmap` (`devices`, `backend`).

    Returns:
        A function of the same signature, with `lower(...).compile()`.

    Raises:
        ShapeError: if there are more members than devices, or mapped arrays disagree in size or
            lack the axis; the error names all paths.
        SpecError: if a spec does not fit the tree.
        ArgumentError: if an option does not exist, a name in `in_axes` is not an argument, nothing
            is mapped and `axis_size` is missing, or a static value is not hashable.

    Warns:
        SharedStreamWarning: as for `filter_vmap`.

    Examples:
        >>> import jax.numpy as jnp
        >>> f = filter_pmap(lambda x, how: x + 1 if how == "inc" else x, in_axes=(0, None))
        >>> f(jnp.arange(1), "inc")
        Array([1], dtype=int32)
    """
    if fun is None:
        return ft.partial(
            filter_pmap,
            in_axes=in_axes,
            out_axes=out_axes,
            axis_name=axis_name,
            axis_size=axis_size,
            donate=donate,
            **pmapkwargs,
        )
    check_callable("filter_pmap", fun)
    _check_pmap_options(donate, pmapkwargs)
    check_axis_name("filter_pmap", axis_name)
    if axis_size is not None:
        check_count("filter_pmap(axis_size)", axis_size)
    jaxkwargs = tuple(sorted(pmapkwargs.items()))
    return _Pmapped(fun, MapOptions(in_axes, out_axes, axis_name, axis_size, jaxkwargs, donate))


def _check_pmap_options(donate: str, pmapkwargs: dict[str, Any]) -> None:
    if donate not in _DONATE:
        expected = f"one of {', '.join(map(repr, _DONATE))}"
        raise ArgumentError("filter_pmap(donate)", expected, describe(donate))
    for name in _REFUSED:
        if name in pmapkwargs:
            raise ArgumentError(
                "filter_pmap",
                "donate=... and jax.pmap's other options",
                f"{name}=",
                hint="non-array arguments are static; donate='all' donates",
            )
    check_options("filter_pmap", pmapkwargs, untyped_jax.pmap, filter_pmap, _REFUSED)
    devices = pmapkwargs.get("devices")
    if devices is not None and not isinstance(devices, Sequence):
        raise ArgumentError("filter_pmap(devices)", "a list", describe(devices))
