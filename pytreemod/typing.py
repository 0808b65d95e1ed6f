"""Names for the types that pytreemod's signatures speak of.

Owns: aliases, and JAX's tree functions under one name. Imports nothing of pytreemod.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax.tree_util

# JAX annotates its tree functions in part only, and a strict checker passes each gap on to every
# caller. What goes through them is any tree anyway.
jtu: Any = jax.tree_util

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

Names: TypeAlias = str | Sequence[str]
"""One name or several."""
