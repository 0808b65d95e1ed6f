"""Names for the types that pytreemod's signatures speak of.

Owns: aliases, and names under which JAX's functions pass a strict type checker. Imports nothing of
pytreemod.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

# JAX annotates its functions in part only, and a strict checker passes each gap on to every
# caller. What goes through these functions is any tree anyway.
jtu: Any = jax.tree_util
untyped_jax: Any = jax
Tracer: type[Any] = untyped_jax.core.Tracer

PyTree: TypeAlias = Any
"""Any tree of containers, Modules and leaves."""

IsLeaf: TypeAlias = Callable[[Any], bool] | None
"""A predicate that says where to stop descending, or None."""

Where: TypeAlias = Callable[[Any], Any]
"""A function from a tree to the node, or the sequence of nodes, that is meant."""

AxisName: TypeAlias = Any
"""The name of a mapped axis: any hashable."""

FilterSpec: TypeAlias = Any
"""A selector, a predicate on leaves, a bool, `...`, or a prefix tree of these."""

AxesSpec: TypeAlias = Any
"""An int, None, a function from leaf to axis, `by(...)`, or a prefix tree of these."""

class_of: Callable[[object], Any] = type
"""`type` of one argument, where a strict checker would complain that it cannot tell the class."""

Names: TypeAlias = str | Sequence[str]
"""One name or several."""
