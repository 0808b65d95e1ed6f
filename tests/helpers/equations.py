"""Count the operations of a traced program, and of a compiled one."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax


def equations(fn: Callable[..., Any], *args: Any) -> Counter[str]:
    """How often each operation occurs in the program of `fn` on arrays, including nested ones."""
    return Counter(_names(jax.make_jaxpr(fn)(*args).jaxpr))


def operations(fn: Callable[..., Any], *args: Any) -> Counter[str]:
    """How often each operation occurs in the compiled program of `fn` on arrays."""
    text = jax.jit(fn).lower(*args).compile().as_text()
    return Counter(re.findall(r"= \S+ ([a-z][\w-]*)\(", text or ""))


def _names(jaxpr: Any) -> Iterator[str]:
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in equation.params.values():
            for part in value if isinstance(value, tuple) else (value,):
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from _names(inner)
