"""Temporary tools for finding bugs.

Put them into a program as a `print`: they say what JAX does with a value, or stop.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Hashable
from typing import Any, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from pytreemod.transform.runtime_checks import error_if
from pytreemod.tree.predicates import is_inexact_array
from pytreemod.tree.prefixes import combine, partition
from pytreemod.tree.printing import tree_pformat
from pytreemod.tree.snapshots import Structure, divide
from pytreemod.typing import jtu

_T = TypeVar("_T")


def announce_transform(
    x: _T,
    name: str | None = None,
    intermediates: bool = False,
    announce: Callable[[str], Any] = print,
) -> _T:
    """Return a tree, and announce each JAX transform that is applied to it.

    A line has the transforms, outermost first, and the final operation: `vmap:impl` for an
    eager call under `jax.vmap`; `jvp_p` is the primal and `jvp_t` the tangent part of a derivative;
    `abstract` is tracing, and `mlir` lowering into a compiled program.

    Args:
        x: any tree; its arrays are watched.
        name: a prefix for the lines.
        intermediates: whether to announce transforms before the final operation as well.
        announce: the function that prints.

    Returns:
        `x`.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import pytreemod as pm
        >>> y = jax.jit(jax.vmap(pm.debug.announce_transform))(jnp.ones(3))
        vmap:abstract
        vmap:mlir
    """
    arrays, structure = divide(x)
    start = "" if name is None else f"({name}) "

    def report(steps: tuple[str, ...], is_end: bool) -> None:
        if is_end or intermediates:
            announce(start + ":".join(steps))

    return structure.assemble(_watch().bind(*arrays, steps=(), report=report))


def backward_nan(x: _T, name: str | None = None, terminate: bool = True) -> _T:
    """Return a tree; print it and its cotangent in the backward pass, and stop at a NaN.

    Args:
        x: any tree; its floating arrays are checked.
        name: a title for the output.
        terminate: whether a NaN in the cotangent is an error, as
            [`error_if`][pytreemod.error_if] raises it.

    Returns:
        `x`.

    Raises:
        CheckError: in the backward pass: if a cotangent has a NaN.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import pytreemod as pm
        >>> def f(x):
        ...     return jnp.sqrt(pm.debug.backward_nan(x, name="here"))
        >>> y = jax.grad(f)(4.0)
        here:
           primals=Array(4., dtype=float32, weak_type=True)
        cotangents=Array(0.25, dtype=float32, weak_type=True)
    """

    def show(*trees: Any) -> None:
        x, cotangents = (tree_pformat(tree, short_arrays=False) for tree in trees)
        title = "" if name is None else f"{name}:\n"
        print(f"{title}   primals={x}\ncotangents={cotangents}")

    def same(x: Any) -> Any:
        return x

    def forward(x: Any) -> Any:
        return x, x

    def backward(x: Any, cotangents: Any) -> tuple[Any]:
        jax.debug.callback(show, x, cotangents)
        if terminate:
            bad = jnp.stack([jnp.isnan(leaf).any() for leaf in jtu.tree_leaves(cotangents)]).any()
            cotangents = error_if(cotangents, bad, "backward_nan: a cotangent has a NaN")
        return (cotangents,)

    checked = jax.custom_vjp[Any](same)
    checked.defvjp(forward, backward)
    floating, rest = partition(x, is_inexact_array)
    return combine(checked(floating), rest)


def breakpoint_if(pred: Any, **kwargs: Any) -> None:
    """`jax.debug.breakpoint` if a condition is true; in compiled code, too.

    Under JAX 0.8.0, `jax.jit` drops it. Newer releases reach it.

    Args:
        pred: a boolean array; any true element counts.
        **kwargs: for `jax.debug.breakpoint`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> pm.debug.breakpoint_if(jnp.isnan(jnp.ones(3)))
    """

    # Under a map the condition is that of the whole batch: it must not become a selection.
    @custom_vmap
    def stop_if(pred: Any) -> Any:
        jax.lax.cond(jnp.any(pred), lambda: jax.debug.breakpoint(**kwargs), lambda: None)
        return jnp.zeros(())

    @stop_if.def_vmap
    def _(axis_size: int, in_batched: Any, pred: Any) -> tuple[Any, bool]:
        return stop_if(pred), False

    stop_if(jax.lax.stop_gradient(pred))


# ---- dead code


class _Dead:
    def __repr__(self) -> str:
        return "<DCE'd>"


# For each call of `store_dce`: its name, what is known of its arrays, and the tree without them.
_stored: list[tuple[Hashable, list[Any], Structure]] = []


def store_dce(x: _T, name: Hashable = None) -> _T:
    """Return a tree, and record which of its arrays a compiled program needs.

    XLA removes computations that nothing depends on (dead code elimination, "DCE"). Put this into a
    jitted function, call that, and call [`inspect_dce`][pytreemod.debug.inspect_dce].

    Args:
        x: any tree; its arrays are watched.
        name: what distinguishes this call from others.

    Returns:
        `x`.

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> @jax.jit
        ... def f(x):
        ...     a, _ = pm.debug.store_dce((x**2, x + 1), name="example")
        ...     return a
        >>> y = f(1)
        >>> pm.debug.inspect_dce("example")
        Found 1 call to `store_dce`.
        Entry 0:
        (i32[], <DCE'd>)
    """
    arrays, structure = divide(x)
    found: list[Any] = [_Dead() for _ in arrays]
    _stored.append((name, found, structure))

    def record(i: int, struct: Any, steps: tuple[str, ...], is_end: bool) -> None:
        if steps[-1] in ("mlir", "impl"):
            found[i] = struct

    # Each by itself: if one result of a primitive is needed, all of its inputs are.
    for i, array in enumerate(arrays):
        struct = jax.ShapeDtypeStruct(array.shape, array.dtype)
        (arrays[i],) = _watch().bind(array, steps=(), report=ft.partial(record, i, struct))
    return structure.assemble(arrays)


def inspect_dce(name: Hashable = None) -> None:
    """Print the records of [`store_dce`][pytreemod.debug.store_dce].

    Args:
        name: the name of the calls; None for those without a name.

    Examples:
        See [`store_dce`][pytreemod.debug.store_dce].
    """
    own = [entry[1:] for entry in _stored if entry[0] == name]
    print(f"Found {len(own)} call{'s' * (len(own) != 1)} to `store_dce`.")
    for number, (found, structure) in enumerate(own):
        print(f"Entry {number}:\n{tree_pformat(structure.assemble(found), struct_as_array=True)}")


# ---- what JAX does with a value


Report: TypeAlias = Callable[[tuple[str, ...], bool], object]
"""Called with the transforms that JAX applies, outermost first, and whether they end here: in
`impl` or `abstract` evaluation, or in `mlir`, the lowering into a program."""


@ft.cache
def _watch() -> Any:
    """Return a primitive that returns its inputs, and reports what JAX does with it.

    Without a primitive, `custom_jvp` and `custom_vmap` would report two of the transforms.
    Lowering, and so dead code, could not be seen.
    """
    # Here, because JAX loads Pallas with `jax.extend.core`.
    from jax.extend.core import Primitive
    from jax.interpreters import ad, batching, mlir

    zero: Any = ad.Zero

    def through(values: Any, steps: tuple[str, ...], report: Report) -> list[Any]:
        moving = [value for value in values if type(value) is not zero]
        moved = iter(primitive.bind(*moving, steps=steps, report=report) if moving else ())
        return [value if type(value) is zero else next(moved) for value in values]

    def ending(name: str, *values: Any, steps: tuple[str, ...], report: Report) -> list[Any]:
        report((*steps, name), True)
        return [*values]

    def lower(context: Any, *values: Any, **options: Any) -> list[Any]:
        return ending("mlir", *values, **options)

    def map_over(values: Any, axes: Any, *, steps: tuple[str, ...], report: Report) -> Any:
        report((*steps, "vmap"), False)
        return through(values, (*steps, "vmap"), report), axes

    def differentiate(primals: Any, tangents: Any, *, steps: Any, report: Report) -> Any:
        report((*steps, "jvp"), False)
        out = through(primals, (*steps, "jvp_p"), report)
        return out, through(tangents, (*steps, "jvp_t"), report)

    def transpose(cotangents: Any, *values: Any, steps: Any, report: Report) -> Any:
        report((*steps, "transpose"), False)
        return through(cotangents, (*steps, "transpose"), report)

    primitive: Any = Primitive("watched")
    primitive.multiple_results = True
    primitive.def_impl(ft.partial(ending, "impl"))
    primitive.def_abstract_eval(ft.partial(ending, "abstract"))
    cast("Any", batching).primitive_batchers[primitive] = map_over
    cast("Any", ad).primitive_jvps[primitive] = differentiate
    cast("Any", ad).primitive_transposes[primitive] = transpose
    mlir.register_lowering(primitive, lower)
    return primitive
