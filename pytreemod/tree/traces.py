"""JAX's traces: which one is running, and operations on the program that one has recorded.

They use names of JAX that are not stable (`jax.extend.core`). So do the primitives of
`transform.runtime_checks` and `debug.probing`, and no other file. Each function says what would
have to change if JAX dropped the names.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import jax

from pytreemod.typing import untyped_jax

# The imports are in the functions, because JAX loads Pallas with `jax.extend.core`: a third of the
# time of importing pytreemod.


# Part of the key of JAX's caches: names and values. Made here, once: JAX does not allow it while
# other threads use JAX.
_context: Any = jax.make_user_context(frozenset())


def trace_context(name: str, value: Hashable = True) -> Any:
    """Return a context whose traces are separate: JAX does not share them with the code outside.

    Args:
        name: names the context, which combines with those around it; the inner one of a name wins.
        value: the value that `context_value` reads.

    Examples:
        >>> f = jax.jit(lambda x: print("traced") or x)
        >>> with trace_context("a flag"):
        ...     y = f(1.0), f(1.0)
        traced
        >>> y = f(1.0)
        traced
    """
    others = {pair for pair in _context.value if pair[0] != name}
    return _context(frozenset({*others, (name, value)}))


def context_value(name: str) -> Any:
    """Return the value of the innermost context of a name in this thread; None if there is none.

    Args:
        name: as for `trace_context`.

    Examples:
        >>> with trace_context("size", 3):
        ...     context_value("size")
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
