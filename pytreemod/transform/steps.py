"""The function that JAX gets for a step, or a branch, of a user's function.

JAX finds the program of a loop by the identity of the function that it gets. A new function in each
call would be compiled in each call outside `jit`: 10 ms instead of 0.3. So it is made once for the
user's functions and the structure of the call, and forgotten with the first of these functions.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from pytreemod.tree.nodes import is_node
from pytreemod.tree.snapshots import Structure, divide

_made: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
_LIMIT = 512


class Functions:
    """The user's functions of one transform: arrays that are data, and the rest.

    Attributes:
        arrays: the arrays of those that are trees (Modules, bound methods).
    """

    def __init__(self, fns: Sequence[Callable[..., Any]]):
        self.arrays: list[Any] = []
        self._makers: list[tuple[int, Callable[[list[Any]], Any]]] = []
        self._weak: list[Any] = []
        self._key: list[Any] = []
        for fn in fns:
            if is_node(fn):
                arrays, structure = divide(fn)
                self.arrays += arrays
                self._makers.append((len(arrays), structure.assemble))
                self._key.append(structure)
            else:
                self._add(fn)

    def _add(self, fn: Any) -> None:
        try:
            # Equal to another one of the same function; of a deleted function, only to itself.
            reference = weakref.ref(fn)
        except TypeError:
            self._makers.append((0, lambda _: fn))
            self._key.append(fn)
        else:
            self._makers.append((0, lambda _: reference()))
            self._weak.append(fn)
            self._key.append(reference)

    def assembler(self) -> Callable[[Sequence[Any]], list[Any]]:
        """A function from arrays to the user's functions; it keeps those weakly."""
        makers = self._makers

        def fns_of(arrays: Sequence[Any]) -> list[Any]:
            rest = iter(arrays)
            return [make([next(rest) for _ in range(count)]) for count, make in makers]

        return fns_of

    def cached(self, parts: Sequence[Any], make: Callable[[], Any]) -> Any:
        """Return the result of `make`, or its earlier result for these functions and parts.

        Args:
            parts: everything else it depends on; a `Structure` counts by value.
            make: makes the result, which must not refer to the functions.
        """
        try:
            key = tuple([x.key if type(x) is Structure else x for x in (*parts, *self._key)])
            hash(key)
        except TypeError:
            return make()
        table = _made.setdefault(self._weak[0] if self._weak else Functions, {})
        if key not in table:
            # A list, because another thread may add something meanwhile.
            for old in [*table][: max(len(table) - _LIMIT + 1, 0)]:
                table.pop(old, None)
            return table.setdefault(key, make())
        return table[key]


def forget_steps() -> None:
    """Forget the cache of steps and branches."""
    _made.clear()
