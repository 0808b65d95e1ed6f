"""Transformations of gradients on a mesh with explicit axes.

Transformations are written for arrays on one device. Most are elementwise and work on a mesh
unchanged. One that multiplies a matrix by itself (Muon), or reduces one axis (Adafactor), may use
an operation without a type if its array is split. JAX asks for the sharding of the result, and
optax does not give one. Such a step is traced again with automatic mesh axes, so that the compiler
decides. Its results get the shardings of its arguments.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from pytreemod.tree.predicates import is_array
from pytreemod.tree.snapshots import divide
from pytreemod.tree.split_arrays import explicit_mesh, on_mesh_of, split_axes
from pytreemod.typing import PyTree, jtu, untyped_jax


def init_on_mesh(rule: Any, params: PyTree) -> Any:
    """The state that a transformation makes: on the mesh of the parameters, if they are on one.

    Counts, too: a step that returns them is traced once.

    Args:
        rule: has `init`.
        params: the parameters.
    """
    mesh = explicit_mesh(*jtu.tree_leaves(params))
    if mesh is None:
        return rule.init(params)
    # In its context: under a map, arrays that are made like others know no devices.
    with _in_context(mesh):
        try:
            return on_mesh_of(rule.init(params), params)
        except Exception:
            with suppress(Exception):
                return _init_automatically(rule, params)
            raise


def _init_automatically(rule: Any, params: PyTree) -> Any:
    """The same where layers are split otherwise in one array than in another, as no map takes."""
    arrays, structure = divide(params)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    state = jax.eval_shape(rule.init, structure.assemble(shapes))
    paths, form = jtu.tree_flatten_with_path(state)
    known = dict(jtu.tree_leaves_with_path(params))
    wanted: list[PartitionSpec] = []
    for path, shape in paths:
        # What mirrors a parameter is at its path, in a tree of the model's structure.
        ends = (known[path[i:]] for i in range(len(path)) if path[i:] in known)
        like = next((x for x in ends if x.shape == shape.shape), None)
        wanted.append(PartitionSpec() if like is None else _spec_of(like))

    def run(arrays: Any) -> list[Any]:
        return jtu.tree_leaves(rule.init(structure.assemble(arrays)))

    return form.unflatten(_automatic(run, wanted, explicit_mesh(*arrays))(arrays))


def update_on_mesh(
    rule: Any, updates: PyTree, state: Any, params: PyTree, extra: dict[str, Any]
) -> tuple[Any, Any]:
    """Return the updates of a transformation in a step, whatever the shardings.

    Args:
        rule: has `update`.
        updates: the gradients.
        state: its state.
        params: the parameters.
        extra: its extra arguments.

    Returns:
        The updates, and the new state.
    """
    try:
        return rule.update(updates, state, params, **extra)
    except Exception:
        if not any(split_axes(x) for x in jtu.tree_leaves((updates, params)) if is_array(x)):
            raise
        # If it fails there, too, the first error is the one to see.
        with suppress(Exception):
            return _update_automatically(rule, updates, state, params, extra)
        raise


def _update_automatically(
    rule: Any, updates: PyTree, state: Any, params: PyTree, extra: dict[str, Any]
) -> tuple[Any, Any]:
    arrays, structure = divide((updates, state, params, extra))
    # Updates and states get the shardings of their parameters.
    wanted, form = jtu.tree_flatten((params, state))

    def run(arrays: Any) -> list[Any]:
        updates, state, params, extra = structure.assemble(arrays)
        made = rule.update(updates, state, params, **extra)
        leaves, found = jtu.tree_flatten(made)
        pairs = zip(leaves, wanted, strict=True)
        if found != form or any(x.shape != y.shape for x, y in pairs):
            raise _OtherForm
        return leaves

    mesh = explicit_mesh(*arrays)
    with _in_context(mesh):
        return form.unflatten(_automatic(run, [*map(_spec_of, wanted)], mesh)(arrays))


def _automatic(run: Any, out: list[PartitionSpec], mesh: Any) -> Any:
    """Make the axes of the mesh automatic inside a function; `out` are the specs of its results."""
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = tuple(name for name, kind in types if kind == AxisType.Explicit)
    return untyped_jax.sharding.auto_axes(run, axes=explicit, out_sharding=out)


def _in_context(mesh: Any) -> Any:
    sharding = untyped_jax.sharding
    if isinstance(mesh, AbstractMesh):
        return sharding.use_abstract_mesh(mesh)
    try:
        return untyped_jax.set_mesh(mesh)
    except ValueError:
        # In a trace, of arrays that are constants there.
        return sharding.use_abstract_mesh(mesh.abstract_mesh)


class _OtherForm(Exception):
    """A transformation returns another structure than it takes; the caller reports it."""


def _spec_of(x: Any) -> PartitionSpec:
    return PartitionSpec(*(at or None for at in split_axes(x)))
