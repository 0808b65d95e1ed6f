"""Specs of a transform, one for each argument of a call.

Users give one spec for all arguments, a tuple with one for each, or a dict by argument name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from pytreemod.errors import ArgumentError, SpecError, describe, meant, nearest
from pytreemod.transform.boundary.wrapping import argument_name
from pytreemod.tree.nodes import children_of
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_array
from pytreemod.tree.prefixes import By, spread
from pytreemod.typing import PyTree, class_of, jtu


class Assigned(NamedTuple):
    """An array of a tree, where it is, and what a spec says of it."""

    place: str
    array: Any
    value: Any


class Named(NamedTuple):
    """An argument of a call, under the name that errors call it terms."""

    name: str
    tree: PyTree


def named_arguments(
    names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Named]:
    """The arguments of a call in the order of its arrays: keywords last, and sorted."""
    positional = [Named(argument_name(names, i), x) for i, x in enumerate(args)]
    return [*positional, *(Named(name, kwargs[name]) for name in sorted(kwargs))]


class Terms(NamedTuple):
    """What the specs of a transform are made of, and what to say of them in errors.

    Attributes:
        where: what to call the spec: `filter_jit(in_shardings)`.
        stops: which nodes of a spec are its leaves.
        default: the spec of an argument that a dict by name leaves out.
        option: the name of the transform's option.
        example: a value, as it is written.
        rest: what becomes of an argument that is left out.
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
    """One spec for each argument.

    Args:
        spec: one for all, a tuple with one for each positional argument, or a dict by name.
        every: the names of the arguments of the call, the positional ones first.
        positional: how many of them are positional.
        known: names of parameters that need not be given in every call.
        terms: what specs are made of.
        trees: the arguments.

    Returns:
        A list as long as `every`.

    Raises:
        ArgumentError: a name in the dict is no argument.
        SpecError: the tuple has another length, or several arguments have one tree of specs.
    """
    if issubclass(class_of(spec), dict) and all(isinstance(name, str) for name in spec):
        unknown = [name for name in spec if name not in every and name not in known]
        if not unknown:
            return [spec.get(name, terms.default) for name in every]
        # A dict that is the only argument may have a dict for its spec, with keys of its own.
        if len(every) != 1 or not issubclass(class_of(trees[0]), dict):
            expected = f"names of arguments of this call ({', '.join(every)})"
            got = ", ".join(f"{name!r}{nearest(name, every)}" for name in unknown)
            hint = meant(unknown, every, f'{terms.option}={{"{{}}": {terms.example}}}')
            raise ArgumentError(terms.where, expected, got, hint=hint)
        return [spec]
    is_sequence = class_of(spec) in (tuple, list)
    if is_sequence and len(spec) == positional:
        return [*spec, *[terms.default] * (len(every) - positional)]
    is_one = children_of(spec) is None or terms.stops(spec)
    # A tuple could be one spec for all of several arguments, or one for each: it is never guessed.
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
                "write, for instance",
                f"{terms.option}=(spec{', None' * (len(every) - 1)})",
            ],
        )
    example = f"{{{every[0]!r}: {terms.example}}}" if every else terms.example
    raise SpecError(
        terms.where,
        f"one spec for each of the {positional} positional arguments",
        str(len(spec)),
        hint=[f"by name, what is left out {terms.rest}:", f"{terms.option}={example}"],
    )


def assign(spec: Any, tree: PyTree, root: str, terms: Terms, strict: bool = True) -> list[Assigned]:
    """What a spec says of each array of a tree; functions in it are not asked yet.

    Args:
        spec: a prefix of the tree.
        tree: the tree.
        root: what to call the tree in errors.
        terms: what the spec is made of.
        strict: whether a path in a rule that matches nothing is a mistake.

    Raises:
        SpecError: the spec is no prefix of the tree.
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
    """What a spec says of each array of a call, in order; see `specs_by_argument`."""
    every = [argument.name for argument in arguments]
    trees = [argument.tree for argument in arguments]
    specs = specs_by_argument(spec, every, positional, known, terms, trees)
    # One rule for several arguments need not find each of its paths in each of them.
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
    """The leaves of a spec, what its rules give included; each once."""
    values: list[Any] = []
    for leaf in jtu.tree_leaves(spec, is_leaf=stops):
        for value in [value for _, value in leaf.items] if isinstance(leaf, By) else [leaf]:
            if value not in values:
                values.append(value)
    return values
