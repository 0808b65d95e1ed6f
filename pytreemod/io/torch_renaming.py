"""From the names in a state dict to those that a model asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeAlias, cast

from pytreemod.errors import ArgumentError, StructureError, describe
from pytreemod.io.leaf_names import joined
from pytreemod.io.torch_places import TensorPlaces
from pytreemod.tree.paths import some_of

Renaming: TypeAlias = Mapping[str, str | None] | Callable[[str], str | None] | None
"""From names in a state dict, or their beginnings, to those in a model; None for what is unused."""

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


def sources_of(
    where: str, places: TensorPlaces, given: Sequence[str], mapping: Renaming
) -> dict[str, str]:
    """For each name that a state dict has, renamed: what it is called there.

    Args:
        where: whose errors they are.
        places: what the model asks for.
        given: the names in the state dict.
        mapping: how to rename them.

    Returns:
        Names in the state dict by their new names, without those that nothing is needed of.

    Raises:
        ArgumentError: `mapping` is none, or renames what is not there.
        StructureError: two names become one.
    """
    rename = _renamer(given, mapping)
    wanted = {name for place in places.arrays for name in place.names}
    sources: dict[str, str] = {}
    twice: list[str] = []
    for source in given:
        renamed = rename(source)
        name = None if renamed is None else _as_pytorch_has_it(renamed, places, wanted)
        if name is None or (name in places.unused and name not in wanted):
            continue
        if name in sources:
            twice.append(f"{name}: {sources[name]!r} and {source!r}")
        sources[name] = source
    if twice:
        hint = "Take what is not to be used to None in mapping."
        expected = "a name of its own for each tensor"
        raise StructureError(where, expected, "one for two", places=twice, hint=hint)
    return sources


def _as_pytorch_has_it(name: str, places: TensorPlaces, wanted: set[str]) -> str:
    """A name in the model as PyTorch has it, if it is not yet: `layers.0.weight` as `0.weight`."""
    if name in wanted or name in places.unused:
        return name
    words = name.split(".")
    for count in range(len(words), 0, -1):
        start = ".".join(words[:count])
        if start in places.prefixes:
            return joined(places.prefixes[start], ".".join(words[count:]))
    return name


def _renamer(given: Sequence[str], mapping: Any) -> Callable[[str], str | None]:
    if mapping is None:
        return lambda name: name
    if isinstance(mapping, Mapping):
        starts = cast("Mapping[Any, Any]", mapping)
        _check_starts(given, starts)
        return lambda name: with_other_start(name, starts)
    if callable(mapping):
        return lambda name: _checked(mapping, mapping(name))
    expected = "names, or their beginnings, by those in the state dict; or a function"
    raise ArgumentError("from_torch(mapping)", expected, describe(mapping))


def with_other_start(name: str, starts: Mapping[str, str | None]) -> str | None:
    """A name with another beginning: that for the longest one of its beginnings that is there.

    Args:
        name: words with dots between them.
        starts: from beginnings to others; None for what has no name any more.

    Returns:
        The new name.

    Examples:
        >>> starts = {"features": "trunk", "features.0": "stem", "head": None}
        >>> names = ["features.1.bias", "features.0.bias", "head.bias"]
        >>> [with_other_start(name, starts) for name in names]
        ['trunk.1.bias', 'stem.bias', None]
    """
    words = name.split(".")
    for count in range(len(words), -1, -1):
        start = ".".join(words[:count])
        if start in starts:
            target = starts[start]
            return None if target is None else joined(target, ".".join(words[count:]))
    return name


def mapping_by_order(places: TensorPlaces, given: Shapes, wanted: Shapes) -> dict[str, str] | None:
    """The mapping by which a state dict fits, if its layers fit one after the other.

    Args:
        places: what the model asks for.
        given: the shapes in the state dict, by name.
        wanted: the shapes that the model asks for, by name.

    Returns:
        Beginnings of names by those in the state dict, as few as will do; None if there is none.
    """
    last_words = {name.rpartition(".")[2] for name in places.unused}
    used = {
        name: shape for name, shape in given.items() if name.rpartition(".")[2] not in last_words
    }
    ours = _layers(wanted)
    # A file may have its names in the order of the alphabet, with 10 before 2.
    for names in ([*used], sorted(used, key=_by_numbers)):
        theirs = _layers({name: used[name] for name in names})
        if [*theirs.values()] != [*ours.values()]:
            continue
        pairs = dict(zip(theirs, ours, strict=True))
        goals = {joined(a, last): joined(b, last) for a, b in pairs.items() for last in theirs[a]}
        for starts in _simplest_first(pairs):
            if all(with_other_start(name, starts) == goal for name, goal in goals.items()):
                return starts
    return None


def _layers(shapes: Shapes) -> dict[str, dict[str, tuple[int, ...]]]:
    """What is in each layer: shapes by the last words of names."""
    layers: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        layer, _, last = name.rpartition(".")
        layers.setdefault(layer, {})[last] = shape
    return layers


def _by_numbers(name: str) -> list[tuple[bool, int, str]]:
    return [
        (not word.isdecimal(), int(word) if word.isdecimal() else 0, word)
        for word in name.split(".")
    ]


def _simplest_first(pairs: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Mappings that may do what all these pairs together do."""
    for starts in (_shortened(pairs), dict(pairs)):
        # What stays as it is need be told only where another beginning of it does not.
        yield {start: target for start, target in starts.items() if start != target}
        yield starts


def _shortened(pairs: Mapping[str, str]) -> dict[str, str]:
    """The same without the words at the end that are the same."""
    starts: dict[str, str] = {}
    for theirs, ours in pairs.items():
        a, b = theirs.split("."), ours.split(".")
        while a and b and a[-1] == b[-1]:
            a, b = a[:-1], b[:-1]
        starts[".".join(a)] = ".".join(b)
    return starts


# ---- refusals


def _check_starts(given: Sequence[str], starts: Mapping[Any, Any]) -> None:
    """Require that each beginning is one of a name that there is, and goes to text or None."""
    words = [name.split(".") for name in given]
    there = {".".join(each[:count]) for each in words for count in range(len(each) + 1)}
    wrong = [
        f"{describe(start)}: {describe(target)}"
        for start, target in starts.items()
        if not (isinstance(start, str) and (target is None or isinstance(target, str)))
    ]
    if wrong:
        expected = "text, or None for what is not to be used"
        raise ArgumentError("from_torch(mapping)", expected, "something else", places=wrong)
    absent = [start for start in starts if start not in there]
    if absent:
        close: list[list[str]] = [get_close_matches(start, there, n=1) for start in absent]
        lines = [
            repr(start) + (f" (is it {near[0]!r}?)" if near else "")
            for start, near in zip(absent, close, strict=True)
        ]
        expected = f"beginnings of names in the state dict ({some_of(given)})"
        got = f"{len(absent)} that no name has"
        raise ArgumentError("from_torch(mapping)", expected, got, places=lines)


def _checked(mapping: Any, result: Any) -> str | None:
    if result is None or isinstance(result, str):
        return result
    got = f"{describe(result)} of {describe(mapping)}"
    raise ArgumentError("from_torch(mapping)", "a name, or None", got)
