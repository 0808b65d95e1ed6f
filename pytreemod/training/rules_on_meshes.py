"""Transformations of gradients on a mesh with explicit axes.

They are written for arrays on one device: one that multiplies a matrix by itself (Muon), or reduces
one axis (Adafactor), would have to say how the result is split. So the axes are automatic inside of
a step, and the results are split as the parameters and the state.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

from pytreemod.tree.snapshots import divide
from pytreemod.tree.split_arrays import explicit_mesh, split_axes
from pytreemod.typing import PyTree, jtu, untyped_jax


def init_on_mesh(rule: Any, params: PyTree) -> Any:
    """Return the state of a transformation: what mirrors a parameter is split as it is."""
    mesh = explicit_mesh(*jtu.tree_leaves(params))
    if mesh is None:
        return rule.init(params)
    arrays, structure = divide(params)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    state = jax.eval_shape(rule.init, structure.assemble(shapes))
    pairs, form = jtu.tree_flatten_with_path(state)
    known = dict(jtu.tree_leaves_with_path(params))

    def mirrored(path: Any, shape: Any) -> Any:
        # At the path of the parameter, in a tree of the model's structure.
        ends = (known[path[i:]] for i in range(len(path)) if path[i:] in known)
        return next((x for x in ends if x.shape == shape.shape), shape)

    def run(arrays: Any) -> list[Any]:
        return jtu.tree_leaves(rule.init(structure.assemble(arrays)))

    return form.unflatten(_automatic(run, arrays, mesh, [mirrored(*pair) for pair in pairs]))


def update_on_mesh(
    rule: Any, updates: PyTree, state: Any, params: PyTree, extra: dict[str, Any]
) -> tuple[Any, Any]:
    """Return the updates of a transformation, and the new state, whatever the shardings."""
    mesh = explicit_mesh(*jtu.tree_leaves((updates, params)))
    if mesh is None:
        return rule.update(updates, state, params, **extra)
    arrays, structure = divide((updates, state, params, extra))
    like, form = jtu.tree_flatten((params, state))

    def run(arrays: Any) -> list[Any]:
        updates, state, params, extra = structure.assemble(arrays)
        return jtu.tree_leaves(rule.update(updates, state, params, **extra))

    return form.unflatten(_automatic(run, arrays, mesh, like))


def _automatic(run: Any, arrays: Any, mesh: Any, like: list[Any]) -> Any:
    """Call a function where the axes of the mesh are automatic; its results are split as `like`."""
    axes = zip(mesh.axis_names, mesh.axis_types, strict=True)
    names = tuple(name for name, kind in axes if kind == AxisType.Explicit)
    specs = [PartitionSpec(*(at or None for at in split_axes(x))) for x in like]
    on_mesh = untyped_jax.sharding.auto_axes(run, axes=names, out_sharding=specs)
    with _context(mesh):
        return on_mesh(arrays)


def _context(mesh: Any) -> Any:
    with suppress(ValueError, TypeError):
        return jax.set_mesh(mesh)
    # In a trace: of tracers, or of arrays that are constants there.
    return jax.sharding.use_abstract_mesh(getattr(mesh, "abstract_mesh", mesh))
