"""Names for the types in pytreemod's signatures.

Owns: aliases, and the parts of JAX and Python that a strict type checker rejects, under names that
it accepts. Imports nothing of pytreemod.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.core

# JAX annotates its functions only in part, and a strict checker passes each gap on to every caller.
# The arguments of its tree functions are any trees anyway; `untyped_jax` is for functions whose
# results would have no type at all.
jtu: Any = jax.tree_util
untyped_jax: Any = jax

# A generic class in JAX's annotations, but not in its code.
Tracer: type[Any] = jax.core.Tracer

PyTree: TypeAlias = Any
"""Any tree of containers, Modules and leaves."""

IsLeaf: TypeAlias = Callable[[Any], bool] | None
"""A predicate that says where to stop descending, or None."""

Where: TypeAlias = Callable[[Any], Any]
"""A function from a tree to a node, or to a sequence of nodes."""

KeyPath: TypeAlias = tuple[Any, ...]
"""The keys from the root to a node, as in `jax.tree_util`."""

AxisName: TypeAlias = Any
"""The name of a mapped axis: any hashable."""

FilterSpec: TypeAlias = Any
"""A selector, a predicate on leaves, a bool, `...`, or a prefix tree of these."""

AxesSpec: TypeAlias = Any
"""An int, None, a function from leaf to axis, `by(...)`, or a prefix tree of these."""

class_of: Callable[[object], Any] = type
"""`type` of one argument, where a strict checker would complain that it cannot infer the class."""

is_instance: Callable[[Any, Any], bool] = isinstance
"""`isinstance`, after which a strict checker does not narrow `Any` to a class of unknown parts."""

ShardingSpec: TypeAlias = Any
"""A sharding, a PartitionSpec, a device, None, a function from an array to one of these,
`by(...)`, or a prefix tree of these."""

SpecTree: TypeAlias = Any
"""A PartitionSpec, a NamedSharding, None, a function from an array to one of these, `by(...)`, or a
prefix tree of these."""

Names: TypeAlias = str | Sequence[str]
"""One name or several."""
