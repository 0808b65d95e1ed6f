"""Formulas for arrays on one device, computed on a mesh with explicit axes.

A transformation of optax that multiplies a matrix by itself (Muon), or reduces one axis
(Adafactor), would have to say how each result is split, and so would the product of LoRA's factors.
Here the axes are automatic inside of such a computation, and its results are split like known
arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax
from jax.sharding import AxisType

from pytreemod.tree.snapshots import divide
from pytreemod.tree.split_arrays import axes_of_type, explicit_mesh, spec_of_split, split_axes
from pytreemod.typing import PyTree, jtu, untyped_jax


def with_automatic_axes(fn: Callable[..., Any], *trees: PyTree, like: Callable[[], PyTree]) -> Any:
    """Call a function, for which explicit axes of a mesh are automatic.

    Args:
        fn: the function.
        trees: its arguments.
        like: returns a tree of the structure of the result, which is split like its arrays.
    """
    mesh = explicit_mesh(*jtu.tree_leaves(trees))
    if mesh is None:
        return fn(*trees)
    arrays, structure = divide(trees)
    known, form = jtu.tree_flatten(like())

    def run(arrays: Any) -> list[Any]:
        return jtu.tree_leaves(fn(*structure.assemble(arrays)))

    names = axes_of_type(mesh, AxisType.Explicit)
    specs = [spec_of_split(split_axes(x)) for x in known]
    on_mesh = untyped_jax.sharding.auto_axes(run, axes=names, out_sharding=specs)
    with _context(mesh):
        return form.unflatten(on_mesh(arrays))


def mirrored(init: Callable[[PyTree], Any], params: PyTree) -> PyTree:
    """Return a tree like the state of a transformation: what mirrors a parameter is that parameter.

    It is at the path of the parameter, in a tree of the model's structure.
    """
    known = dict(jtu.tree_leaves_with_path(params))

    def found(path: Any, new: Any) -> Any:
        ends = (known[path[i:]] for i in range(len(path)) if path[i:] in known)
        return next((x for x in ends if x.shape == new.shape), new)

    arrays, structure = divide(params)
    bare = structure.assemble([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays])
    return jtu.tree_map_with_path(found, jax.eval_shape(init, bare))


def _context(mesh: Any) -> Any:
    with suppress(ValueError, TypeError):
        return jax.set_mesh(mesh)
    # In a trace: of tracers, or of arrays that are constants there.
    return jax.sharding.use_abstract_mesh(getattr(mesh, "abstract_mesh", mesh))
