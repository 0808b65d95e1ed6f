"""`filter_shard_map`: a function that each device runs on its part of the arrays.

Specs are `PartitionSpec`s by argument, by path or by leaf; JAX gets one for each array. JAX needs
the specs of results before the function runs. So the arrays are returned in groups, one for each
known spec (`_Results`). If a function in `out_specs` returns another spec, the trace is dropped and
repeated with that spec as well.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeVar, overload

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from pytreemod.errors import ArgumentError, SpecError, describe
from pytreemod.transform.boundary.packing import Grouped, group, unpack
from pytreemod.transform.boundary.signatures import parameters_of, place_keywords, positions_of
from pytreemod.transform.boundary.sowing import Collected, WithCollected, collecting
from pytreemod.transform.boundary.supplying import refuse_values
from pytreemod.transform.boundary.wrapping import Transformed, check_callable, function_name
from pytreemod.transform.compilation.placements import (
    SPECS,
    SpecOption,
    as_spec,
    axes_in,
    check_axis_names,
    context_mesh,
    convert_values,
    explain_placements,
    placement_terms,
    spec_text,
    stops,
)
from pytreemod.transform.host.failures import raises_checks
from pytreemod.transform.interception.argument_specs import (
    Assigned,
    Terms,
    assign,
    assign_arguments,
    named_arguments,
    values_in,
)
from pytreemod.transform.maps.shared_streams import warn_of_shared_streams
from pytreemod.tree.differences import aval_of, varying_axes
from pytreemod.tree.nodes import is_node
from pytreemod.tree.snapshots import divide
from pytreemod.typing import AxisName, PyTree, SpecTree

_F = TypeVar("_F", bound=Callable[..., Any])


class _AsSharded:
    def __repr__(self) -> str:
        return "<as the arguments are sharded>"


AS_SHARDED = _AsSharded()
_IN = "filter_shard_map(in_specs)"
_OUT = "filter_shard_map(out_specs)"
_TERMS = Terms(_IN, stops, None, "in_specs", "P('data')", "is the same on all devices")


class _Options(NamedTuple):
    mesh: Any
    in_specs: SpecOption | None
    out_specs: SpecOption
    axis_names: frozenset[AxisName]
    check_vma: bool


class _ShardMapped(Transformed):
    """A function under `filter_shard_map`."""

    __slots__ = ("names", "places")

    options: _Options

    def __init__(self, fn: Callable[..., Any], options: _Options):
        super().__init__(fn, options)
        self.names, self.places = positions_of(fn)

    transform_name = "filter_shard_map"

    @raises_checks
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        refuse_values("filter_shard_map", self.fn)
        args, kwargs = place_keywords(self.places, args, kwargs)
        # A function that is a tree is an argument, too: its arrays are the same everywhere.
        head = (self.fn,) if is_node(self.fn) else ()
        arrays, structure = divide((head, args, kwargs))
        assigned = self._assign(args, kwargs)
        mesh = self._mesh([value for _, _, value in assigned or ()])
        results = _Results(self.options, mesh)
        drawn: dict[Any, bool] = {}

        def run(values: list[Any]) -> Grouped:
            head, args, kwargs = structure.assemble(values)
            return results.group(collecting(head[0] if head else self.fn, drawn)(*args, **kwargs))

        run.__name__ = run.__qualname__ = function_name(self.fn)
        options: dict[str, Any] = {}
        if assigned is None:
            _check_explicit(mesh)
        else:
            # Without them, JAX uses the shardings of the arguments.
            assigned = convert_values(assigned, as_spec, _IN, SPECS)
            own = [PartitionSpec()] * (len(arrays) - len(assigned))
            options["in_specs"] = ([*own, *(value for _, _, value in assigned)],)
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
                result = unpack(mapped(arrays))
                break
            # Repeat with these specs, too. Each round adds some, so this ends.
            except _NewSpecs as found:
                results.treatments += found.specs
            except ValueError as error:
                # JAX has no class for this error.
                self._check_axis_names(mesh, error)
                if assigned is not None:
                    explain_placements(assigned, _IN, error, mesh)
                if "in_specs" in str(error) and assigned is not None:
                    _explain_explicit(assigned, mesh, error)
                results.explain(error)
                raise
        if drawn:
            # Assembled again, because the function may have used up its States.
            _, args, kwargs = structure.assemble(arrays)
            specs = [_spec_of(x) for x in arrays] if assigned is None else options["in_specs"][0]
            # The arrays of the function come first, and are never divided.
            are_divided = [bool(axes_in(spec)) for spec in specs[len(divide(head)[0]) :]]
            spec = self.options.in_specs and self.options.in_specs.spec
            warn_of_shared_streams(self.fn, drawn, args, kwargs, are_divided, spec, _TERMS)
        return result

    def _assign(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Assigned] | None:
        if self.options.in_specs is None:
            return None
        return assign_arguments(
            self.options.in_specs.spec,
            named_arguments(self.names, args, kwargs),
            len(args),
            [parameter.name for parameter in parameters_of(self.fn) or ()],
            _TERMS,
        )

    def _mesh(self, values: Sequence[Any]) -> Any:
        mesh = context_mesh() if self.options.mesh is None else self.options.mesh
        if mesh is not None:
            return mesh
        # A NamedSharding in either spec has a mesh.
        values = [*values, *values_in(self.options.out_specs.spec, stops)]
        found = [value.mesh for value in values if isinstance(value, NamedSharding)]
        if not found:
            raise ArgumentError(
                f"filter_shard_map of {function_name(self.fn)}",
                "a mesh",
                "none",
                hint=[
                    "pass mesh=..., or set a mesh in the context:",
                    f"with jax.set_mesh(mesh): {function_name(self.fn)}(...)",
                ],
            )
        return found[0]

    def _check_axis_names(self, mesh: Any, error: Exception) -> None:
        unknown = [name for name in self.options.axis_names if name not in mesh.axis_names]
        if unknown:
            raise ArgumentError(
                "filter_shard_map(axis_names)",
                f"axes of the mesh ({', '.join(map(repr, mesh.axis_names))})",
                ", ".join(map(repr, unknown)),
            ) from error


def _explain_explicit(assigned: Sequence[Assigned], mesh: Any, error: ValueError) -> None:
    """Raise a better error if arguments on an Explicit mesh are not sharded as `in_specs` says.

    Raises:
        ArgumentError: if some are not; the error names their paths.
    """
    if AxisType.Explicit not in mesh.axis_types:
        return
    wrong = [
        (entry, spec)
        for entry in assigned
        if _entries(spec := _spec_of(entry.array)) != _entries(entry.value)
    ]
    if wrong:
        entry, _ = wrong[0]
        raise ArgumentError(
            _IN,
            "arguments that are split accordingly, because the mesh has Explicit axes",
            f"{len(wrong)} with another split",
            at=[
                f"{e.place}: {describe(e.array)} is {spec_text(own)}, not {spec_text(e.value)}"
                for e, own in wrong
            ],
            hint=[
                "shard them first (a mesh of AxisType.Auto does it by itself):",
                f"pm.filter_shard({entry.place}, NamedSharding(mesh, {spec_text(entry.value)}))",
            ],
        ) from error


def _spec_of(array: Any) -> PartitionSpec:
    """Return the sharding of an array, as far as its type has it."""
    return getattr(getattr(aval_of(array), "sharding", None), "spec", None) or PartitionSpec()


def _entries(spec: PartitionSpec) -> tuple[Any, ...]:
    """Return the entries of a spec without the Nones at its end, which mean nothing."""
    entries = tuple(spec)
    while entries and entries[-1] is None:
        entries = entries[:-1]
    return entries


def _as_names(axis_names: Any) -> frozenset[AxisName]:
    # A string is one name; its letters are not names.
    if isinstance(axis_names, str):
        return frozenset((axis_names,))
    try:
        return frozenset(axis_names)
    except TypeError:
        got = describe(axis_names)
        raise ArgumentError(
            "filter_shard_map(axis_names)", "names of axes of the mesh", got
        ) from None


def _check_explicit(mesh: Any) -> None:
    if any(kind == AxisType.Auto for kind in mesh.axis_types):
        raise ArgumentError(
            _IN,
            "a spec for each argument",
            "none",
            hint="specs can be omitted only for a mesh of Explicit axes",
        )


class _NewSpecs(Exception):
    """Raised if a function in out_specs returns specs that JAX did not get before the run."""

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
        self.treatments: list[PartitionSpec] = [
            as_spec(value) for value in known if isinstance(value, (NamedSharding, PartitionSpec))
        ]
        if None in known:
            self.treatments.append(PartitionSpec())
        self.converted: list[Assigned] = []
        # Axes that are manual already belong to a surrounding `shard_map`.
        self.manual = options.axis_names or {
            name
            for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
            if kind != AxisType.Manual
        }

    @property
    def prefix(self) -> Grouped:
        """`out_specs` as JAX takes them."""
        # The plan has no array, but JAX does not accept None as a spec.
        plan: Any = PartitionSpec()
        return Grouped(plan, list(self.treatments))

    def group(self, result: PyTree) -> Grouped:
        """Pack a result in groups.

        Raises:
            ShapeError, SpecError: if the specs do not fit the result.
        """
        own = result.result if type(result) is WithCollected else result
        assigned = assign(self.spec, own, "result", placement_terms(_OUT))
        converted = convert_values(assigned, as_spec, _OUT, SPECS)
        # For an error. Only the types of arrays, because JAX looks for tracers that outlive a
        # trace.
        self.converted = [each._replace(array=jax.typeof(each.array)) for each in converted]
        specs = [value for _, _, value in converted]
        if type(result) is WithCollected:
            collected, whole = self.stack(result.collected)
            result, specs = WithCollected(own, collected), specs + whole
        new = [spec for spec in specs if spec not in self.treatments]
        if new:
            # Leaves the trace: JAX got other groups, so it cannot use this one.
            raise _NewSpecs(list(dict.fromkeys(new)))
        return group(result, [self.treatments.index(spec) for spec in specs], len(self.treatments))

    def stack(self, collected: Collected) -> tuple[Collected, list[PartitionSpec]]:
        """The values captured on each device, to be stacked along a new first axis; their specs."""
        spec = PartitionSpec(tuple(name for name in self.mesh.axis_names if name in self.manual))
        arrays, structure = divide(collected)
        # Even values that are equal everywhere: there is one for each device, as in a vmap.
        stacked = [jnp.expand_dims(array, 0) for array in arrays]
        return structure.assemble(stacked), [spec] * len(stacked)

    def explain(self, error: ValueError) -> None:
        """Raise a better error if a spec does not fit the mesh or its array, or promises too much.

        Raises:
            ShapeError, SpecError: if one does not fit.
        """
        explain_placements(self.converted, _OUT, error, self.mesh, are_parts=True)
        # Specs that JAX refused before the function ran.
        for spec in self.treatments:
            check_axis_names(spec, self.mesh.axis_names, _OUT, spec_text(spec), error)
        if self.check_vma:
            self._explain_differences(error)

    def _explain_differences(self, error: ValueError) -> None:
        # Results that differ between devices along an axis that no spec names.
        places: list[str] = []
        for place, array, spec in self.converted:
            lost = (varying_axes(array) & self.manual) - set(axes_in(spec))
            if lost:
                varies = f"varies over {', '.join(sorted(map(repr, lost)))}"
                places.append(f"{place}: {describe(array)} with {spec_text(spec)}, {varies}")
        if places:
            raise SpecError(
                _OUT,
                "equal results along the mesh axes that their specs do not name",
                "results that may differ from device to device",
                at=places,
                hint=[
                    "name the axis in the spec; or make the results equal, for example:",
                    "loss = jax.lax.pmean(loss, 'data')",
                    "norm = nn.BatchNorm(size, 'data', channel_axis=1)  # its statistics",
                ],
            ) from error


@overload
def filter_shard_map(
    f: _F,
    *,
    mesh: Any = ...,
    in_specs: SpecTree = ...,
    out_specs: SpecTree,
    axis_names: AxisName | Collection[AxisName] = ...,
    check_vma: bool = ...,
) -> _F: ...
@overload
def filter_shard_map(
    *,
    mesh: Any = ...,
    in_specs: SpecTree = ...,
    out_specs: SpecTree,
    axis_names: AxisName | Collection[AxisName] = ...,
    check_vma: bool = ...,
) -> Callable[[_F], _F]: ...
def filter_shard_map(
    f: Any = None,
    *,
    mesh: Any = None,
    in_specs: SpecTree = AS_SHARDED,
    out_specs: SpecTree,
    axis_names: AxisName | Collection[AxisName] = frozenset(),
    check_vma: bool = True,
) -> Any:
    """`jax.shard_map` for functions of any trees: each device runs the function on its part.

    Inside, arrays have the shape of a part, and devices communicate by collectives
    (`jax.lax.psum`, ...). Everything else is the same everywhere, and so are the arrays of `f`
    itself, if it is a Module or a bound method. Call it inside `filter_jit`: outside, JAX runs it
    one operation at a time.

    **Law.** `filter_shard_map(f, mesh=m, in_specs=None, out_specs=None)(*args)` equals `f(*args)`.

    Args:
        f: the function; without it, the result is a decorator.
        mesh: the mesh of devices; by default the one in context (`jax.set_mesh`).
        in_specs: how the arguments are split: one spec for all of them; a tuple with one for each
            positional argument; or a dict by argument name. The spec of an array is a
            `PartitionSpec`, a `NamedSharding` (for its spec), or None for "the same everywhere". A
            spec is one of these, a function from an array to one, [`by`][pytreemod.by], a Module
            with these instead of its data, or a prefix tree of these. Arguments that a dict leaves
            out are the same everywhere. Without `in_specs`, arguments keep their shardings; then
            the axes of the mesh must be Explicit.
        out_specs: how the results are assembled: one such spec.
        axis_names: the mesh axes that the function sees; by default all.
        check_vma: whether to check that values are the same everywhere if their spec says so.
            Without the check, JAX does not know which values are the same. A gradient by such a
            value, if it is taken inside the function, then differs, without an error. In this case,
            take gradients outside.

    Returns:
        A function of the same signature, for unsplit arrays.

    Raises:
        ArgumentError: if `mesh` is not a mesh. When called: if there is no mesh, or an argument on
            Explicit axes of the mesh is not sharded as `in_specs` says. Also if a name in
            `in_specs` is not an argument, or one in `axis_names` is not an axis of the mesh.
        ShapeError: when called: if a spec has more entries than its array has axes, or the mesh
            does not divide an axis evenly; the error names all paths.
        SpecError: when called: if a spec is not a prefix, contains a value that is not a spec, or
            names an axis that the mesh does not have. Also if it promises that a result is the
            same everywhere, and the result may not be.

    Warns:
        SharedStreamWarning: if all devices draw from one random stream, because it is not divided.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))

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
    check_callable("filter_shard_map", f, "f")
    if mesh is not None and not isinstance(mesh, (Mesh, AbstractMesh)):
        raise ArgumentError("filter_shard_map(mesh)", "a mesh", describe(mesh))
    options = _Options(
        mesh,
        None if in_specs is AS_SHARDED else SpecOption(in_specs),
        SpecOption(out_specs),
        _as_names(axis_names),
        check_vma,
    )
    return _ShardMapped(f, options)
