"""`filter_shard_map`: a function that each device runs on its part of the arrays.

Specs are `PartitionSpec`s by argument, by path or by leaf; JAX gets one for each array. JAX needs
the specs of results before the function runs. So arrays are returned in groups, one for each spec
that `out_specs` can name.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeVar, overload

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pytreemod.errors import ArgumentError, SpecError, describe
from pytreemod.transform import placements
from pytreemod.transform.arguments import Parameters, function_name
from pytreemod.transform.packing import Grouped, pack_groups, unpack
from pytreemod.transform.sowing import WithSown, collecting, split_sown
from pytreemod.transform.wrapping import Transformed, check_callable
from pytreemod.tree.nodes import is_node
from pytreemod.tree.snapshots import divide
from pytreemod.tree.split_arrays import axes_of_type
from pytreemod.typing import AxisName, SpecTree

_F = TypeVar("_F", bound=Callable[..., Any])


class _AsSharded:
    def __repr__(self) -> str:
        return "<as the arguments are sharded>"


AS_SHARDED = _AsSharded()
_IN, _OUT = "filter_shard_map(in_specs)", "filter_shard_map(out_specs)"


class _Options(NamedTuple):
    mesh: Any
    in_specs: Any
    out_specs: Any
    axis_names: frozenset[AxisName]
    check_vma: bool


class _ShardMapped(Transformed):
    __slots__ = ("parameters",)

    options: _Options
    transform_name = "filter_shard_map"

    def __init__(self, fn: Callable[..., Any], options: _Options):
        super().__init__(fn, options)
        self.parameters = Parameters.of(fn)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function on each device."""
        given, in_specs, out_specs, axis_names, check_vma = self.options
        where = f"filter_shard_map of {function_name(self.fn)}"
        args, kwargs = self.parameters.place(args, kwargs)
        # A function that is a tree is an argument, too: its arrays are the same everywhere.
        head = (self.fn,) if is_node(self.fn) else ()
        arrays, structure = divide((head, args, kwargs))
        placed = None
        if in_specs is not AS_SHARDED:
            named, known = self.parameters.named(args, kwargs), self.parameters.every
            found = placements.placements_by_argument(in_specs, named, len(args), known, _IN)
            placed = [each for of_argument in found for each in of_argument]
        results = placements.known_placements(out_specs)
        mesh = _mesh(where, given, [*(each.to for each in placed or ()), *results])
        treatments = [_as_spec(_OUT, to) for to in results]
        # What is sown is different on each device: stacked on a new axis.
        everywhere = PartitionSpec(tuple(axis_names or _free_axes(mesh)))

        def run(values: list[Any]) -> Any:
            head, args, kwargs = structure.assemble(values)
            result, with_sown = split_sown(
                collecting(head[0] if head else self.fn)(*args, **kwargs)
            )
            specs = [
                _as_spec(_OUT, each.to)
                for each in placements.placements_of(out_specs, result, _OUT, "result")
            ]
            result, groups = with_sown(result), [treatments.index(spec) for spec in specs]
            if type(result) is WithSown:
                sown, own = divide(result.values)
                values = own.assemble([jnp.expand_dims(x, 0) for x in sown])
                labels = tuple(label.stack("map") for label in result.labels)
                result = WithSown(result.result, labels, values)
                groups += [len(treatments)] * len(sown)
            return pack_groups(result, groups, len(treatments) + 1)

        run.__name__ = run.__qualname__ = function_name(self.fn)
        options: dict[str, Any] = {}
        if placed is not None:
            own = [PartitionSpec()] * (len(arrays) - len(placed))
            options["in_specs"] = ([*own, *(_as_spec(_IN, each.to) for each in placed)],)
        mapped = jax.shard_map(
            run,
            mesh=None if given is None and placements.context_mesh() is not None else mesh,
            out_specs=Grouped(PartitionSpec(), [*treatments, everywhere]),
            axis_names=axis_names,
            check_vma=check_vma,
            **options,
        )
        try:
            return unpack(mapped(arrays))
        except ValueError:
            # JAX's errors have no paths.
            placements.check_placements(placed or (), _IN, mesh)
            raise


def _mesh(where: str, given: Any, specs: Sequence[Any]) -> Any:
    """Return the mesh: given, in context, or of a NamedSharding in a spec."""
    mesh = placements.context_mesh() if given is None else given
    found = [to.mesh for to in specs if isinstance(to, NamedSharding)]
    if mesh is None and not found:
        raise ArgumentError(f"{where}: there is no mesh", hint="with jax.set_mesh(mesh): ...")
    return found[0] if mesh is None else mesh


def _free_axes(mesh: Any) -> list[Any]:
    """Return the axes of a mesh that no surrounding `shard_map` maps over."""
    manual = axes_of_type(mesh, AxisType.Manual)
    return [name for name in mesh.axis_names if name not in manual]


def _as_spec(where: str, value: Any) -> PartitionSpec:
    spec = PartitionSpec() if value is None else placements.spec_of(value)
    if spec is None:
        fact = f"{where}: {describe(value)} is no PartitionSpec, NamedSharding or None"
        raise SpecError(fact)
    # Nones at the end mean nothing.
    entries = [*spec]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


@overload
def filter_shard_map(f: _F, *, out_specs: SpecTree, **options: Any) -> _F: ...
@overload
def filter_shard_map(*, out_specs: SpecTree, **options: Any) -> Callable[[_F], _F]: ...
def filter_shard_map(  # pyright: ignore[reportInconsistentOverload]  (options are checked below)
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
        out_specs: how the results are assembled: one such spec, without functions.
        axis_names: the mesh axes that the function sees; by default all.
        check_vma: whether to check that values are the same everywhere if their spec says so.
            Without the check, JAX does not know which values are the same. A gradient by such a
            value, if it is taken inside the function, then differs, without an error. In this case,
            take gradients outside.

    Returns:
        A function of the same signature, for unsplit arrays.

    Raises:
        ArgumentError: when called: if there is no mesh, or a name in `in_specs` is not an argument.
        ShapeError: when called: if a spec has more entries than its array has axes, or the mesh
            does not divide an axis evenly; the error names the path.
        SpecError: when called: if a spec is not a prefix, contains a value that is not a spec, or
            names an axis that the mesh does not have.

    Examples:
        >>> import jax, jax.numpy as jnp
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
        given = {"mesh": mesh, "in_specs": in_specs, "out_specs": out_specs}
        return ft.partial(filter_shard_map, **given, axis_names=axis_names, check_vma=check_vma)
    check_callable("filter_shard_map", f, "f")
    # A string is one name; its letters are not names.
    names = frozenset((axis_names,) if isinstance(axis_names, str) else axis_names)
    return _ShardMapped(f, _Options(mesh, in_specs, out_specs, names, check_vma))
