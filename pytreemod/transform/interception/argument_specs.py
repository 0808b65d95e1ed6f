"""Specs of a transform, one for each argument of a call.

Users give one spec for all arguments, a tuple with one for each, or a dict by argument name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from pytreemod.errors import ArgumentError, SpecError, describe, nearest
from pytreemod.transform.boundary.wrapping import argument_name
from pytreemod.tree.nodes import children_of
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_array
from pytreemod.tree.prefixes import By, spread
from pytreemod.typing import PyTree, class_of, jtu


class Assigned(NamedTuple):
    """An array of a tree, with its path and its value in a spec."""

    place: str
    array: Any
    value: Any


class Named(NamedTuple):
    """An argument of a call, with its name in errors."""

    name: str
    tree: PyTree


def named_arguments(
    names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Named]:
    """Return the arguments of a call in the order of its arrays: keywords last, and sorted."""
    positional = [Named(argument_name(names, i), x) for i, x in enumerate(args)]
    return [*positional, *(Named(name, kwargs[name]) for name in sorted(kwargs))]


class Terms(NamedTuple):
    """The values of which a transform's specs are made, and the words for them in errors.

    Attributes:
        where: the name of the spec: `filter_jit(in_shardings)`.
        stops: whether a node of a spec is a leaf.
        default: the spec of an argument that a dict by name leaves out.
        option: the name of the transform's option.
        example: a value, as code.
        rest: how an argument that is left out is treated.
    """

    where: str
    stops: Callable[[Any], bool]
    default: Any = None
    option: str = ""
    example: str = ""
    rest: str = ""


def specs_by_argument(
    spec: Any,
    every: Sequence[str],
    positional: int,
    known: Collection[str],
    terms: Terms,
    trees: Sequence[PyTree],
) -> list[Any]:
    """Return one spec for each argument.

    Args:
        spec: one for all, a tuple with one for each positional argument, or a dict by name.
        every: the names of the arguments of the call, the positional ones first.
        positional: the number of positional arguments.
        known: names of parameters that a call may omit.
        terms: the values of which specs are made.
        trees: the arguments.

    Returns:
        A list as long as `every`.

    Raises:
        ArgumentError: if a name in the dict is not an argument.
        SpecError: if the tuple has another length, or several arguments have one tree of specs.
    """
    if issubclass(class_of(spec), dict) and all(isinstance(name, str) for name in spec):
        unknown = [name for name in spec if name not in every and name not in known]
        if not unknown:
            return [spec.get(name, terms.default) for name in every]
        # If the only argument is a dict, its spec may be a dict with the argument's keys.
        if len(every) != 1 or not issubclass(class_of(trees[0]), dict):
            got = ", ".join(f"{name!r}{nearest(name, every)}" for name in unknown)
            raise ArgumentError(f"{terms.where}: the call has no argument {got}")
        return [spec]
    is_sequence = class_of(spec) in (tuple, list)
    if is_sequence and len(spec) == positional:
        return [*spec, *[terms.default] * (len(every) - positional)]
    is_one = children_of(spec) is None or terms.stops(spec)
    # A tuple could be one spec for several arguments, or one for each: this is never guessed.
    is_array = len(every) == 1 and is_sequence and not is_one and children_of(trees[0]) is None
    if (len(every) == 1 and not is_array) or (is_one and not is_sequence):
        return [spec] * len(every)
    _refuse(spec, is_sequence, every, positional, terms)
    return []


def _refuse(
    spec: Any, is_sequence: bool, every: Sequence[str], positional: int, terms: Terms
) -> None:
    if not is_sequence:
        raise SpecError(
            terms.where,
            f"a tuple of specs for {len(every)} arguments",
            describe(spec),
            hint=[
                "for example:",
                f"{terms.option}=(spec{', None' * (len(every) - 1)})",
            ],
        )
    raise SpecError(
        terms.where, f"one spec for each of {positional} positional arguments", str(len(spec))
    )


def assign(spec: Any, tree: PyTree, root: str, terms: Terms, strict: bool = True) -> list[Assigned]:
    """Return the value of a spec for each array of a tree; functions in it are not called yet.

    Args:
        spec: a prefix of the tree.
        tree: the tree.
        root: the name of the tree in errors.
        terms: the values of which the spec is made.
        strict: whether a path in a rule that matches nothing is an error.

    Raises:
        SpecError: if the spec is not a prefix of the tree.
    """

    def resolve(value: Any, subtree: PyTree, path: tuple[Any, ...]) -> list[Any]:
        if isinstance(value, By):
            return value.values(subtree, root=path_text(path, root), strict=strict)
        return [value] * len(jtu.tree_leaves(subtree))

    values = spread(spec, tree, resolve=resolve, stops=terms.stops, where=terms.where, root=root)
    leaves = jtu.tree_leaves_with_path(tree)
    return [
        Assigned(path_text(path, root), leaf, value)
        for (path, leaf), value in zip(leaves, values, strict=True)
        if is_array(leaf)
    ]


def assign_arguments(
    spec: Any, arguments: Sequence[Named], positional: int, known: Collection[str], terms: Terms
) -> list[Assigned]:
    """Return the value of a spec for each array of a call, in order; see `specs_by_argument`."""
    every = [argument.name for argument in arguments]
    trees = [argument.tree for argument in arguments]
    specs = specs_by_argument(spec, every, positional, known, terms, trees)
    # With one rule for several arguments, each path need not match in each argument.
    strict = not (isinstance(spec, By) and len(arguments) > 1)
    if not strict:
        spec.check(trees)
    return [
        assigned
        for own, argument in zip(specs, arguments, strict=True)
        for assigned in assign(
            own,
            argument.tree,
            argument.name,
            terms._replace(where=f"{terms.where} for {argument.name}"),
            strict,
        )
    ]


def values_in(spec: Any, stops: Callable[[Any], bool]) -> list[Any]:
    """Return the leaves of a spec, including the values of its rules; each once."""
    values: list[Any] = []
    for leaf in jtu.tree_leaves(spec, is_leaf=stops):
        for value in [value for _, value in leaf.items] if isinstance(leaf, By) else [leaf]:
            if value not in values:
                values.append(value)
    return values
