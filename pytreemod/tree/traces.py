"""JAX's traces: which one is running, and operations on the program that one has recorded.

All uses of JAX beyond its stable names (`jax.extend.core` and `jax.interpreters`) are in this file
and nowhere else. Each function says what would have to change if JAX dropped the names that it
uses.
"""

from __future__ import annotations

import functools as ft
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias, cast

import jax

from pytreemod.typing import untyped_jax

# The imports are in the functions, because JAX loads Pallas with `jax.extend.core`: a third of the
# time of importing pytreemod.


# Part of the key of JAX's caches: names and values. Made here, once: JAX does not allow it while
# other threads use JAX.
_context: Any = jax.make_user_context(frozenset())


def traced_apart(name: str, value: Hashable = True) -> Any:
    """Return a context whose traces are separate: JAX does not share them with the code outside.

    Args:
        name: names the context, which combines with those around it; the inner one of a name wins.
        value: the value that `value_apart` reads.

    Examples:
        >>> f = jax.jit(lambda x: print("traced") or x)
        >>> with traced_apart("a flag"):
        ...     y = f(1.0), f(1.0)
        traced
        >>> y = f(1.0)
        traced
    """
    others = {pair for pair in _context.value if pair[0] != name}
    return _context(frozenset({*others, (name, value)}))


def value_apart(name: str) -> Any:
    """Return the value of the innermost context of a name in this thread; None if there is none.

    Args:
        name: as for `traced_apart`.

    Examples:
        >>> with traced_apart("size", 3):
        ...     value_apart("size")
        3
    """
    return next((value for own, value in _context.value if own == name), None)


def current_trace() -> Any:
    """An identity of the running trace; equal at two moments exactly if the trace is the same.

    Without it, `sow` could not refuse values that cannot leave a plain transform, and keys could
    not refuse to be used in two traces: JAX would report the leaked tracer, without a name.

    Examples:
        >>> import jax
        >>> outside = current_trace()
        >>> jax.jit(lambda: print(current_trace() == outside))()
        False
    """
    import jax.extend.core as extended

    find: Any = getattr(extended, "get_opaque_trace_state", None)
    # Before JAX 0.9 it had another name.
    return (untyped_jax.core.get_opaque_trace_state if find is None else find)()


@ft.cache
def _no_trace() -> Any:
    # In a thread of its own, because the first call may be inside a trace.
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(current_trace()))
    thread.start()
    thread.join()
    return found[0]


def is_tracing() -> bool:
    """Whether computations become part of a trace at the moment.

    Without it, a check that has failed in an earlier call would raise in a trace that has nothing
    to do with it.

    Examples:
        >>> import jax
        >>> is_tracing()
        False
        >>> jax.jit(lambda: print(is_tracing()))()
        True
    """
    return current_trace() != _no_trace()


def run_again(jaxpr: Any, consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Run a recorded program with other constants.

    Without it, `filter_closure_convert` would have to trace the function again, with its captured
    arrays as arguments, by `jax.closure_convert`.

    Args:
        jaxpr: the program.
        consts: the arrays that it captured, or their replacements.
        values: its inputs.

    Examples:
        >>> y = jax.numpy.asarray([2.0])
        >>> closed = jax.make_jaxpr(lambda x: x * y)(y)
        >>> run_again(closed.jaxpr, [3 * y], [y])
        [Array([12.], dtype=float32)]
    """
    from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

    # JAX's annotations do not say that the result is a list.
    run = cast("Callable[..., list[Any]]", jaxpr_as_fun(ClosedJaxpr(jaxpr, list(consts))))
    return run(*values)


def decided_late(
    name: str, unlowered: Any, decide: Callable[[bool], Any]
) -> Callable[[], jax.Array]:
    """Return a value that is decided when a program is lowered.

    Without primitives, checks would have to know whether there are several devices, and who
    listens, while they are traced: each combination would be traced again.

    Args:
        name: the name of the primitive in programs.
        unlowered: the value where nothing is lowered: a NumPy scalar.
        decide: returns a value of the same type, given whether the program runs on several devices.

    Returns:
        A function that inserts the value into the program.

    Examples:
        >>> import numpy as np
        >>> late = decided_late("late", np.int32(0), lambda is_several: np.int32(1))
        >>> int(late()), int(jax.jit(late)())
        (0, 1)
    """
    from jax.extend.core import Primitive
    from jax.interpreters import mlir

    def lower(context: Any) -> Any:
        axes = getattr(context.module_context, "axis_context", None)
        mesh_size = getattr(getattr(axes, "mesh", None), "size", 1)
        answer = decide(getattr(axes, "num_devices", mesh_size) != 1)
        return cast("Any", mlir).lower_fun(lambda: answer, multiple_results=False)(context)

    primitive: Any = Primitive(name)
    primitive.def_impl(lambda: unlowered)
    primitive.def_abstract_eval(lambda: jax.typeof(unlowered))
    mlir.register_lowering(primitive, lower)
    return primitive.bind


@ft.cache
def _watched() -> Any:
    """Return a primitive that returns its inputs, and reports what JAX does with it."""
    from jax.extend.core import Primitive
    from jax.interpreters import ad, batching, mlir

    zero: Any = ad.Zero

    def bind(values: Any, steps: tuple[str, ...], report: Report) -> list[Any]:
        return primitive.bind(*values, steps=steps, report=report) if values else []

    def give_back(*values: Any, steps: tuple[str, ...], report: Report) -> list[Any]:
        report((*steps, "impl"), True)
        return [*values]

    def give_types(*avals: Any, steps: tuple[str, ...], report: Report) -> list[Any]:
        report((*steps, "abstract"), True)
        return [*avals]

    def map_over(values: Any, axes: Any, *, steps: tuple[str, ...], report: Report) -> Any:
        report((*steps, "vmap"), False)
        return bind(values, (*steps, "vmap"), report), axes

    def differentiate(primals: Any, tangents: Any, *, steps: Any, report: Report) -> Any:
        report((*steps, "jvp"), False)
        out = bind(primals, (*steps, "jvp_p"), report)
        moving = [t for t in tangents if type(t) is not zero]
        moved = iter(bind(moving, (*steps, "jvp_t"), report))
        return out, [t if type(t) is zero else next(moved) for t in tangents]

    def transpose(cotangents: Any, *values: Any, steps: Any, report: Report) -> Any:
        report((*steps, "transpose"), False)
        moving = [ct for ct in cotangents if type(ct) is not zero]
        moved = iter(bind(moving, (*steps, "transpose"), report))
        return [None if type(ct) is zero else next(moved) for ct in cotangents]

    def lower(context: Any, *values: Any, steps: tuple[str, ...], report: Report) -> Any:
        report((*steps, "mlir"), True)
        return values

    primitive: Any = Primitive("watched")
    primitive.multiple_results = True
    primitive.def_impl(give_back)
    primitive.def_abstract_eval(give_types)
    cast("Any", batching).primitive_batchers[primitive] = map_over
    cast("Any", ad).primitive_jvps[primitive] = differentiate
    cast("Any", ad).primitive_transposes[primitive] = transpose
    mlir.register_lowering(primitive, cast("Any", lower))
    return primitive


Report: TypeAlias = Callable[[tuple[str, ...], bool], object]
"""Called with the transforms that JAX applies, outermost first, and whether they end here: in
`impl` or `abstract` evaluation, or in `mlir`, the lowering into a program."""


def watched(values: Sequence[Any], report: Report) -> list[Any]:
    """Return the values themselves, through a primitive that reports each transform of it.

    Without primitives, `custom_jvp` and `custom_vmap` would report two of them. Lowering, and so
    dead code, could not be seen.

    Args:
        values: arrays.
        report: called for each transform, evaluation and lowering.

    Examples:
        >>> import jax.numpy as jnp
        >>> y = jax.vmap(lambda x: watched([x], lambda steps, is_end: print(steps))[0])(jnp.ones(2))
        ('vmap',)
        ('vmap', 'impl')
    """
    return _watched().bind(*values, steps=(), report=report)
