"""`filter_shard_map` and `filter_pmap`: one function call for each device."""

import functools as ft
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pytreemod.errors import ArgumentError, ShapeError, SpecError, describe, explain
from pytreemod.transform.agreeing import varying_axes
from pytreemod.transform.boundary import split_call, unhashable, unpack
from pytreemod.transform.donating import without_warning
from pytreemod.transform.grouping import Grouped, group, values_in
from pytreemod.transform.mapping import ON_AXIS_0, Vmapped, axes_of, known_axes
from pytreemod.transform.placing import (
    SPECS,
    Layout,
    as_spec,
    axes_in,
    check_axis_names,
    check_fit,
    context_mesh,
    placement_terms,
    settle,
    spec_text,
    stops,
)
from pytreemod.transform.specifying import Assigned, assign, assign_arguments, named_arguments
from pytreemod.transform.wrapping import (
    Transformed,
    check_callable,
    function_name,
    parameters_of,
    place_keywords,
    positional_names,
)
from pytreemod.tree.nodes import is_node
from pytreemod.tree.predicates import is_array
from pytreemod.tree.snapshots import divide
from pytreemod.typing import AxesSpec, AxisName, PyTree, SpecTree, jtu

_F = TypeVar("_F", bound=Callable[..., Any])


class _AsTheyLie:
    def __repr__(self) -> str:
        return "<as the arguments lie>"


AS_THEY_LIE = _AsTheyLie()
IN = "filter_shard_map(in_specs)"
OUT = "filter_shard_map(out_specs)"


class _Options(NamedTuple):
    mesh: Any
    in_specs: Layout | None
    out_specs: Layout
    axis_names: frozenset[AxisName]
    check_vma: bool


class _ShardMapped(Transformed):
    """A function under `filter_shard_map`."""

    __slots__ = ("names",)

    options: _Options

    def __init__(self, fn: Callable[..., Any], options: _Options):
        super().__init__(fn, options)
        self.names = positional_names(fn)

    @classmethod
    def transform_name(cls) -> str:
        """The transform as the reader knows it."""
        return "filter_shard_map"

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = place_keywords(self.names, args, kwargs)
        # A function that is a tree goes in with the arguments: its arrays are the same everywhere.
        head = (self.fn,) if is_node(self.fn) else ()
        arrays, structure = divide((head, args, kwargs))
        assigned = self._assign(args, kwargs)
        mesh = self._mesh([value for _, _, value in assigned or ()])
        results = _Results(self.options, mesh)

        def run(values: list[Any]) -> Grouped:
            head, args, kwargs = structure.assemble(values)
            return results.group((head[0] if head else self.fn)(*args, **kwargs))

        run.__name__ = run.__qualname__ = function_name(self.fn)
        options: dict[str, Any] = {}
        if assigned is None:
            _check_explicit(mesh)
        else:
            options["in_specs"] = (_in_specs(assigned, len(arrays), mesh),)
        while True:
            mapped = jax.shard_map(
                run,
                mesh=None if self.options.mesh is None and context_mesh() is not None else mesh,
                out_specs=results.prefix,
                axis_names=self.options.axis_names,
                check_vma=self.options.check_vma,
                **options,
            )
            try:
                return unpack(mapped(arrays))
            except _NewSpecs as found:
                results.slots += found.specs

    def _assign(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Assigned] | None:
        if self.options.in_specs is None:
            return None
        return assign_arguments(
            self.options.in_specs.spec,
            named_arguments(self.names, args, kwargs),
            len(args),
            [parameter.name for parameter in parameters_of(self.fn) or ()],
            placement_terms(IN),
        )

    def _mesh(self, values: Sequence[Any]) -> Any:
        mesh = context_mesh() if self.options.mesh is None else self.options.mesh
        if mesh is not None:
            return mesh
        values = [*values, *values_in(self.options.out_specs.spec, stops)]
        found = [value.mesh for value in values if isinstance(value, NamedSharding)]
        if not found:
            raise ArgumentError(
                explain(
                    f"filter_shard_map of {function_name(self.fn)}",
                    "a mesh",
                    "none",
                    cure=[
                        "give one as mesh=..., or have it in context:",
                        f"with jax.set_mesh(mesh): {function_name(self.fn)}(...)",
                    ],
                )
            )
        return found[0]


def _in_specs(assigned: list[Assigned], count: int, mesh: Any) -> list[PartitionSpec]:
    settled = settle(assigned, as_spec, IN, SPECS)
    check_fit(settled, IN, mesh)
    return [PartitionSpec()] * (count - len(settled)) + [value for _, _, value in settled]


def _check_explicit(mesh: Any) -> None:
    if any(kind == AxisType.Auto for kind in mesh.axis_types):
        raise ArgumentError(
            explain(
                IN,
                "a spec for each argument",
                "none",
                cure="only for a mesh whose axes are of type Explicit they can be left out",
            )
        )


class _NewSpecs(Exception):
    """A function in out_specs gave specs that JAX was not told of before the function ran."""

    def __init__(self, specs: list[PartitionSpec]):
        super().__init__(specs)
        self.specs = specs


class _Results:
    """Groups the results of a mapped function by their specs."""

    def __init__(self, options: _Options, mesh: Any):
        self.spec = options.out_specs.spec
        self.check_vma = options.check_vma
        self.mesh = mesh
        known = values_in(self.spec, stops)
        self.slots: list[PartitionSpec] = [
            as_spec(value) for value in known if isinstance(value, (NamedSharding, PartitionSpec))
        ]
        if None in known:
            self.slots.append(PartitionSpec())
        for spec in self.slots:
            check_axis_names(spec, mesh.axis_names, OUT, spec_text(spec))
        self.manual = options.axis_names or {
            name
            for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
            if kind != AxisType.Manual
        }

    @property
    def prefix(self) -> Grouped:
        """`out_specs` as JAX takes them. (There are no arrays in the plan.)"""
        plan: Any = PartitionSpec()
        return Grouped(plan, list(self.slots))

    def group(self, result: PyTree) -> Grouped:
        """Pack a result in groups.

        Raises:
            ShapeError, SpecError: the specs do not fit the result.
        """
        assigned = assign(self.spec, result, "result", placement_terms(OUT))
        settled = settle(assigned, as_spec, OUT, SPECS)
        check_fit(settled, OUT, self.mesh, is_whole=False)
        specs = [value for _, _, value in settled]
        new = [spec for spec in specs if spec not in self.slots]
        if new:
            raise _NewSpecs(list(dict.fromkeys(new)))
        if self.check_vma:
            self.check_sameness(settled)
        return group(result, [self.slots.index(spec) for spec in specs], len(self.slots))

    def check_sameness(self, settled: list[Assigned]) -> None:
        """Refuse results that differ from device to device along an axis that no spec names.

        Raises:
            SpecError: there are some.
        """
        places: list[str] = []
        for place, array, spec in settled:
            lost = (varying_axes(jax.typeof(array)) & self.manual) - set(axes_in(spec))
            if lost:
                varies = f"varies over {', '.join(sorted(map(repr, lost)))}"
                places.append(f"{place}: {describe(array)} with {spec_text(spec)}, {varies}")
        if places:
            raise SpecError(
                explain(
                    OUT,
                    "results that are the same along the mesh axes that their specs do not name",
                    "results that may differ from device to device",
                    places=places,
                    cure=[
                        "name the axis in the spec; or make them the same, for instance",
                        "loss = jax.lax.pmean(loss, 'data')",
                        "(check_vma=False turns this check off)",
                    ],
                )
            )


@overload
def filter_shard_map(
    f: _F,
    *,
    mesh: Any = ...,
    in_specs: SpecTree = ...,
    out_specs: SpecTree,
    axis_names: Collection[AxisName] = ...,
    check_vma: bool = ...,
) -> _F: ...
@overload
def filter_shard_map(
    *,
    mesh: Any = ...,
    in_specs: SpecTree = ...,
    out_specs: SpecTree,
    axis_names: Collection[AxisName] = ...,
    check_vma: bool = ...,
) -> Callable[[_F], _F]: ...
def filter_shard_map(
    f: Any = None,
    *,
    mesh: Any = None,
    in_specs: SpecTree = AS_THEY_LIE,
    out_specs: SpecTree,
    axis_names: Collection[AxisName] = frozenset(),
    check_vma: bool = True,
) -> Any:
    """`jax.shard_map` for functions of any trees: each device runs the function on its part.

    Inside, arrays have the shape of a part, and devices talk to each other by collectives
    (`jax.lax.psum`, ...). What is no array is the same everywhere, and so are the arrays of `f`
    itself, if it is a Module or a bound method. Call it inside `filter_jit`: outside, JAX runs it
    one operation at a time.

    **Law.** `filter_shard_map(f, mesh=m, in_specs=None, out_specs=None)(*args)` equals `f(*args)`.

    Args:
        f: the function; left out, a decorator is returned.
        mesh: the mesh of devices; left out, the one in context (`jax.set_mesh`).
        in_specs: how the arguments are split: one spec for all of them; a tuple with one for each
            positional argument; or a dict by argument name. A spec is a `PartitionSpec`, a
            `NamedSharding` (for its spec), None for "the same everywhere", a function from an
            array to one of these, [`by`][pytreemod.by], a Module that holds these in the place of
            its data, or a prefix tree of these. What a dict leaves out is the same everywhere.
            Without `in_specs` at all, arguments are split as they lie; the mesh's axes must be of
            type Explicit.
        out_specs: how the results are put together: one such spec.
        axis_names: which axes of the mesh the function sees; left out, all of them.
        check_vma: whether to check that what a spec says to be the same everywhere is.

    Returns:
        A function of the same signature, for whole arrays.

    Raises:
        ArgumentError: when called: there is no mesh; a name in `in_specs` is no argument.
        ShapeError: when called: a spec has more entries than its array has axes, or the mesh does
            not divide an axis evenly; all paths are named.
        SpecError: when called: a spec is no prefix, holds something else than specs, names an axis
            that the mesh does not have, or promises that a result is the same everywhere that may
            not be.

    Examples:
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> from jax.sharding import Mesh, PartitionSpec as P
        >>> mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
        >>> @filter_shard_map(mesh=mesh, in_specs={"batch": P("data")}, out_specs=None)
        ... def total(batch, how):
        ...     part = jnp.sum(batch["x"]) if how == "sum" else jnp.max(batch["x"])
        ...     return jax.lax.psum(part, "data"), how
        >>> total({"x": jnp.arange(4.0), "name": "train"}, how="sum")
        (Array(6., dtype=float32), 'sum')
    """
    if f is None:
        return ft.partial(
            filter_shard_map,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=axis_names,
            check_vma=check_vma,
        )
    check_callable("filter_shard_map", f)
    options = _Options(
        mesh,
        None if in_specs is AS_THEY_LIE else Layout(in_specs),
        Layout(out_specs),
        frozenset(axis_names),
        check_vma,
    )
    return _ShardMapped(f, options)


_DONATE = ("all", "warn", "none")


class _Pmapped(Vmapped):
    """A function under `filter_pmap`."""

    __slots__ = ("pmapped",)

    def __init__(self, fn: Callable[..., Any], options: Any):
        super().__init__(fn, options)
        self.pmapped: dict[Any, Any] = {}

    @classmethod
    def transform_name(cls) -> str:
        """The transform as the reader knows it."""
        return "filter_pmap"

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        in_axes, out_axes, _, axis_size, donate, pmapkwargs = self.options
        args, kwargs = place_keywords(self.names, args, kwargs)
        axes, leaves, _ = self.inputs(in_axes, args, kwargs, axis_size, out_axes)
        mapped = [
            None if axis is None else axis % leaf.ndim
            for axis, leaf in zip(axes, leaves, strict=True)
            if is_array(leaf)
        ]
        arrays = [leaf for leaf in leaves if is_array(leaf)]
        # An axis_size handed to JAX makes 0.12 warn about an integer of its own.
        counted = all(axis is None for axis in mapped) and axis_size is not None
        if counted:
            arrays.append(np.zeros((axis_size, 0), bool))
            mapped.append(0)
        self._check_devices(arrays, mapped, dict(pmapkwargs))
        own = divide(self.fn)[0] if is_node(self.fn) else []
        pmapped = self._find(args, kwargs, tuple(mapped), counted)
        with without_warning(donate == "all"):
            return unpack(pmapped(own, arrays))

    def _find(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        axes: tuple[int | None, ...],
        counted: bool,
    ) -> Any:
        """The pmapped function for a call; JAX compiles it once as long as it is the same."""
        head = (self.fn,) if is_node(self.fn) else ()
        try:
            key = (split_call(head, args, kwargs)[1], axes)
            if key not in self.pmapped:
                self.pmapped[key] = self._pmap(head, args, kwargs, axes, counted)
        except TypeError as error:
            named = named_arguments(self.names, args, kwargs)
            raise unhashable([*(("function", fn) for fn in head), *named], error) from error
        return self.pmapped[key]

    def _pmap(
        self,
        head: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        axes: tuple[int | None, ...],
        counted: bool,
    ) -> Any:
        _, out_axes, axis_name, _, donate, pmapkwargs = self.options
        structure = divide((head, args, kwargs))[1]
        slots = [None, 0, *sorted(x for x in known_axes(out_axes) - {None, 0} if x > 0)]
        plain: Any = self.fn

        def run(own: list[Any], values: list[Any]) -> Grouped:
            head, args, kwargs = structure.assemble(own + values[: len(values) - counted])
            return _group_by_axis((head[0] if head else plain)(*args, **kwargs), out_axes, slots)

        run.__name__ = run.__qualname__ = function_name(self.fn)
        options = {} if donate == "none" else {"donate_argnums": 1}
        return jax.pmap(
            run,
            axis_name,
            in_axes=(None, list(axes)),
            out_axes=Grouped(None, slots),
            **options,
            **dict(pmapkwargs),
        )

    def _check_devices(
        self, arrays: list[Any], axes: list[int | None], pmapkwargs: dict[str, Any]
    ) -> None:
        devices = pmapkwargs.get("devices")
        count = len(devices) if devices else jax.local_device_count(pmapkwargs.get("backend"))
        sizes = [x.shape[a] for x, a in zip(arrays, axes, strict=True) if a is not None]
        if sizes and sizes[0] > count:
            raise ShapeError(
                explain(
                    f"filter_pmap of {function_name(self.fn)}",
                    f"at most {count} members, one for each device",
                    str(sizes[0]),
                    cure="filter_vmap maps over any number of members, on one device",
                )
            )


def _group_by_axis(result: PyTree, out_axes: AxesSpec, slots: list[int | None]) -> Grouped:
    leaves = jtu.tree_leaves(result)
    axes = axes_of(out_axes, result, "filter_pmap(out_axes)", "result")
    axes = [axis for axis, leaf in zip(axes, leaves, strict=True) if is_array(leaf)]
    # What pmap was not told of, or does not take (negative axes), is moved afterwards.
    late = [axis not in slots for axis in axes]

    def move(arrays: list[Any]) -> list[Any]:
        rows = zip(arrays, axes, late, strict=True)
        return [jnp.moveaxis(x, 0, axis) if is_late else x for x, axis, is_late in rows]

    positions = [slots.index(0 if n else axis) for axis, n in zip(axes, late, strict=True)]
    return group(result, positions, len(slots), move if any(late) else None)


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

    For programs that have it already. New ones use [`filter_jit`][pytreemod.filter_jit] with
    shardings, or [`filter_shard_map`][pytreemod.filter_shard_map].

    **Law.** `filter_pmap(f)(*args)` equals `filter_vmap(f)(*args)`.

    Args:
        fun: the function; left out, a decorator is returned. If it is a Module or a bound method,
            its own arrays are the same for all members.
        in_axes: as for [`filter_vmap`][pytreemod.filter_vmap].
        out_axes: the same for the result; None takes the result of the first device.
        axis_name: a name for collectives (`jax.lax.pmean`).
        axis_size: how many members, if no argument is mapped.
        donate: whether the memory of the arguments' arrays may be used for the results: `"none"`,
            `"all"`, or `"warn"`, which is the same with JAX's warning if a donated array was of
            no use.
        **pmapkwargs: for `jax.pmap` (`devices`, `backend`).

    Returns:
        A function of the same signature.

    Raises:
        ShapeError: there are more members than devices, mapped arrays disagree in size, or lack
            the axis; all paths are named.
        SpecError: a spec does not fit the tree.
        ArgumentError: an option does not exist; a name in `in_axes` is no argument; nothing is
            mapped and `axis_size` is missing; a static value is not hashable.

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
    options = (in_axes, out_axes, axis_name, axis_size, donate, tuple(sorted(pmapkwargs.items())))
    return _Pmapped(fun, options)


def _check_pmap_options(donate: str, pmapkwargs: dict[str, Any]) -> None:
    if donate not in _DONATE:
        expected = f"one of {', '.join(map(repr, _DONATE))}"
        raise ArgumentError(explain("filter_pmap(donate)", expected, describe(donate)))
    for name in ("static_broadcasted_argnums", "donate_argnums"):
        if name in pmapkwargs:
            raise ArgumentError(
                explain(
                    "filter_pmap",
                    "donate=... and jax.pmap's other options",
                    f"{name}=",
                    cure="what is no array is static by itself; donate='all' donates",
                )
            )
