"""The stages of a compiled function: what `filter_jit(f).lower(...)` and its `compile()` return."""

from __future__ import annotations

import functools as ft
from collections.abc import Callable
from typing import Any

from pytreemod.errors import ArgumentError, explain
from pytreemod.transform.boundary.packing import unpack
from pytreemod.transform.compilation.store import Entry
from pytreemod.transform.host.failures import call_listening

Split = Callable[..., tuple[list[Any], tuple[Any, ...]]]
"""Gives the arrays of a call, and its key."""


class Lowered:
    """A function that was lowered for particular arguments: what `filter_jit(f).lower` returns.

    Has `compile`, and whatever else `jax.stages.Lowered` has (`as_text`, `cost_analysis`, ...).
    """

    def __init__(self, transform: str, name: str, split: Split, lowered: Any, entry: Entry):
        self.lowered = lowered
        self._transform = transform
        self._name = name
        self._split = split
        self._entry = entry

    def compile(self, compiler_options: dict[str, Any] | None = None) -> Compiled:
        """Compile.

        Args:
            compiler_options: as for `jax.stages.Lowered.compile`.

        Returns:
            A function of the same arguments.
        """
        compiled = self.lowered.compile(compiler_options=compiler_options)
        return Compiled(self._transform, self._name, self._split, compiled, self._entry)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lowered, name)


class Compiled:
    """A compiled function: what `filter_jit(f).lower(...).compile()` returns.

    Call it with arguments like those it was compiled for. Has whatever else
    `jax.stages.Compiled` has (`cost_analysis`, `memory_analysis`, ...).
    """

    def __init__(self, transform: str, name: str, split: Split, compiled: Any, entry: Entry):
        self.compiled = compiled
        self._transform = transform
        self._name = name
        self._split = split
        self._entry = entry

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run.

        Raises:
            ArgumentError: something other than the values of arrays differs from what the
                function was compiled for.
        """
        # As `filter_jit` would, so that a call that it would take for another is refused here.
        arrays, key = self._split(*args, **kwargs)
        if not _same_key(key, self._entry.key):
            raise ArgumentError(
                explain(
                    f"compiled {self._name}",
                    "arguments with the structure and static values that it was compiled for",
                    "others",
                    cure=[
                        "compile for these, too:",
                        f"pm.{self._transform}({self._name}).lower(...).compile()",
                    ],
                )
            )
        entry = self._entry
        call = ft.partial(self.compiled, *entry.arguments(arrays))
        if not entry.checks:
            return unpack(call())
        return unpack(call_listening(entry.checks, call, is_once=entry.is_once))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compiled, name)


def _same_key(key: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    # A hash first, as a dict would: a PyTreeDef raises when it is compared with something else.
    return hash(key) == hash(other) and key == other
