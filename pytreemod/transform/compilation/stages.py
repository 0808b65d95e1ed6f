"""The stages of a compiled function: the results of `filter_jit(f).lower(...)` and `compile()`."""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax

from pytreemod.errors import ArgumentError, describe
from pytreemod.transform.boundary.packing import unpack
from pytreemod.transform.compilation.retraces import changes_between
from pytreemod.transform.compilation.static_arguments import constant_as
from pytreemod.transform.compilation.store import Entry
from pytreemod.transform.host.failures import call_checked
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_array
from pytreemod.typing import PyTree, jtu

Split = Callable[..., tuple[list[Any], tuple[Any, ...]]]
"""Returns the arrays and the key of a call."""


class Traced:
    """A function traced for particular arguments: the result of `filter_jit(f).trace`.

    Has `lower`, and everything else of `jax.stages.Traced` (`jaxpr`, ...).
    """

    def __init__(self, traced: Any, wrap: Callable[[Any], Lowered]):
        self.traced = traced
        self._wrap = wrap

    def lower(self, **options: Any) -> Lowered:
        """Lower the function.

        Args:
            **options: as for `jax.stages.Traced.lower`.

        Returns:
            The same as `filter_jit(f).lower`.
        """
        return self._wrap(self.traced.lower(**options))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.traced, name)


class TracedCall(NamedTuple):
    """A call that was traced.

    Attributes:
        own: the function and the instance it is bound to, if they are trees; by name.
        named: the arguments by name; those in `static` have constants instead of arrays.
        arguments: `(args, kwargs)`.
    """

    own: Sequence[tuple[str, Any]]
    named: Sequence[tuple[str, Any]]
    arguments: Any


def as_structs(tree: PyTree) -> Any:
    """Return the tree with structs instead of arrays."""

    def struct(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array(leaf) else leaf

    return jtu.tree_map(struct, tree)


class _Place:
    """The number of the array at a path of a result."""

    def __init__(self, index: int):
        self.index = index


def _leaves(named: Sequence[tuple[str, Any]]) -> list[tuple[Any, str]]:
    """Return the leaves of named trees with their paths."""
    return [
        (leaf, f"{path_text(path, name)}: {describe(leaf)}")
        for name, tree in named
        for path, leaf in jtu.tree_leaves_with_path(tree)
    ]


def _is_data(leaf: Any) -> bool:
    return is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


class _Stage:
    """The stage that JAX made of a function for particular arguments, with its attributes."""

    def __init__(
        self, transform: str, name: str, split: Split, made: Any, entry: Entry, call: TracedCall
    ):
        self._made = made
        self._call = call
        self._transform = transform
        self._name = name
        self._split = split
        self._entry = entry

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_made"], name)


class Lowered(_Stage):
    """A function lowered for particular arguments: the result of `filter_jit(f).lower`.

    Has `compile`, and everything else of `jax.stages.Lowered` (`as_text`, `cost_analysis`, ...).
    `in_tree` and `out_tree` describe the function's arguments and result, so `jax.export` makes a
    program that you call with models.
    """

    @property
    def in_tree(self) -> Any:
        """The structure of `(args, kwargs)`.

        Raises:
            ArgumentError: if they contain more than arrays, or if JAX has them in another order:
                then this program takes other arguments.
        """
        own, named, arguments = self._call
        others = [place for _, place in _leaves(own)]
        given = _leaves(named)
        others += [place for leaf, place in given if not _is_data(leaf)]
        if others:
            called = "model" if own else self._name
            self._refuse(
                "only arrays as arguments",
                f"{len(others)} other{'s' * (len(others) > 1)}",
                others,
                ["close over the other values:", f"pm.filter_jit(lambda x: {called}(x, ...))"],
            )
        leaves, tree = jtu.tree_flatten(arguments)
        expected = "arguments in the order of the program"
        # A keyword has a position in `named`; in a call, keywords are sorted.
        if any(leaf is not other for leaf, (other, _) in zip(leaves, given, strict=True)):
            hint = ["pass them by position:", f"export(pm.filter_jit({self._name}))(x, ...)"]
            self._refuse(expected, "keywords in another order", (), hint)
        # JAX puts the donated ones first.
        places = list(range(len(leaves)))
        if jtu.tree_leaves(self._entry.arguments(places)) != places:
            hint = ["donate none of them, or the first:", f"pm.filter_jit({self._name})"]
            self._refuse(expected, "donated arguments after others", (), hint)
        return tree

    @property
    def out_tree(self) -> Any:
        """The structure of the result.

        Raises:
            ArgumentError: if it contains more than arrays.
        """
        tree = self._made.out_tree
        # Numbers replace the arrays. The numbers must be in order, with no other leaves.
        result = unpack(tree.unflatten(list(map(_Place, range(tree.num_leaves)))))
        found = _leaves([("result", result)])
        if len(found) < tree.num_leaves:
            # Their failures would not be read.
            hint = ["without it, checks call the host:", f"export(pm.filter_jit({self._name}))"]
            self._refuse("checks in the program", 'checks="later"', (), hint)
        others = [place for leaf, place in found if type(leaf) is not _Place]
        if [leaf.index for leaf, _ in found if type(leaf) is _Place] != list(range(len(found))):
            others = others or [place for _, place in found]
            got = f"{len(others)} other{'s' * (len(others) > 1)}"
            self._refuse("a result of only arrays, in order", got, others, ())
        return jtu.tree_structure(result)

    def _refuse(
        self, expected: str, got: str, places: Sequence[str], hint: Sequence[str]
    ) -> NoReturn:
        where = f"{self._transform}({self._name}), exported"
        raise ArgumentError(where, expected, got, at=places, hint=hint)

    def compile(self, compiler_options: dict[str, Any] | None = None) -> Compiled:
        """Compile the function.

        Args:
            compiler_options: as for `jax.stages.Lowered.compile`.

        Returns:
            A function of the same arguments.
        """
        compiled = self._made.compile(compiler_options=compiler_options)
        return Compiled(self._transform, self._name, self._split, compiled, self._entry, self._call)


class Compiled(_Stage):
    """A compiled function: the result of `filter_jit(f).lower(...).compile()`.

    Call it with arguments like those of `lower`. Has everything else of `jax.stages.Compiled`
    (`cost_analysis`, `memory_analysis`, ...).
    """

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the function.

        Raises:
            ArgumentError: if the arguments differ from those of `lower` in more than the values of
                arrays.
        """
        # As `filter_jit` does it, so that a call that would need another program is refused.
        arrays, key = self._split(*args, **kwargs)
        if not _same_key(key, self._entry.key):
            places = self._changes(args, kwargs)
            self._refuse("arguments with the structure and static values", places)
        entry = self._entry
        if entry.pending is not None:
            entry.pending.begin()
        call = ft.partial(self._made, *entry.arguments(arrays))
        try:
            if not entry.checks:
                return unpack(call())
            return unpack(call_checked(entry.checks, call, is_once=entry.is_once))
        except TypeError as error:
            self._explain(arrays, error)
            raise

    def _changes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """The differences between these arguments and those of `lower`, a line for each path."""
        before = self._call.named
        names = [name for name, _ in before]
        more = (f"args[{i}]" for i in range(len(names), len(args)))
        given = [*zip([*names, *more], args), *kwargs.items()]
        after = [(name, constant_as(tree, dict(before).get(name))) for name, tree in given]
        return changes_between(before, after)

    def _explain(self, arrays: Sequence[Any], error: TypeError) -> None:
        """Raise a better error if arrays have other types than those that JAX compiled for."""
        before = [
            leaf for leaf in _leaves([*self._call.own, *self._call.named]) if _is_data(leaf[0])
        ]
        changed = [
            f"{place} before, now {describe(array)}"
            for (struct, place), array in zip(before, arrays)
            if (struct.shape, struct.dtype) != (array.shape, array.dtype)
        ]
        if changed:
            self._refuse("arrays of the shapes and dtypes", changed, error)

    def _refuse(
        self, expected: str, places: Sequence[str], cause: Exception | None = None
    ) -> NoReturn:
        raise ArgumentError(
            f"compiled {self._name}",
            f"{expected} that it was compiled for",
            "other arguments",
            at=places,
            hint=[
                "compile for these as well:",
                f"pm.{self._transform}({self._name}).lower(...).compile()",
            ],
        ) from cause


def _same_key(key: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    # The hash first, as in a dict, because comparing a PyTreeDef with anything else raises.
    return hash(key) == hash(other) and key == other
