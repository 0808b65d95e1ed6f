"""Paths as text: `layers[2].weight`, and patterns over them: `layers.*.weight`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from pytreemod.errors import SpecError, explain
from pytreemod.typing import jtu

_NAMED = 8


def step_name(key: Any) -> str:
    """One step of a path as a bare word: the attribute's name, the index, the dict's key."""
    if isinstance(key, jtu.GetAttrKey):
        return key.name
    if isinstance(key, jtu.SequenceKey):
        return str(key.idx)
    if isinstance(key, (jtu.DictKey, jtu.FlattenedIndexKey)):
        return str(key.key)
    # Nodes of the user's may have keys of a class of their own.
    return str(getattr(key, "name", key))


class PathName(str):
    """A path as text that serves as a key, and still knows its steps: the name of a token."""

    steps: tuple[str, ...]

    @classmethod
    def of(cls, path: tuple[Any, ...]) -> PathName:
        """The name of a JAX key path."""
        name = cls(path_text(path))
        name.steps = step_names(path)
        return name

    @classmethod
    def parse(cls, text: str) -> PathName:
        """The name that is written so."""
        name = cls(text)
        name.steps = parse_pattern(text)
        return name


def step_names(path: tuple[Any, ...]) -> tuple[str, ...]:
    """The steps of a path as bare words; a key that is itself a path gives all of its steps."""
    names: list[str] = []
    for key in path:
        # In a State, the key of a value is the path of its token.
        inner = key.key if isinstance(key, jtu.DictKey) else None
        names += inner.steps if isinstance(inner, PathName) else (step_name(key),)
    return tuple(names)


def path_text(path: tuple[Any, ...], root: str = "") -> str:
    """A JAX key path as the reader would write the access.

    Args:
        path: keys, as `jax.tree_util` gives them.
        root: what the path starts from, such as an argument's name.

    Returns:
        `layers[2].weight`, `batch['x']`; `root` itself (or `<root>`) for the empty path.

    Examples:
        >>> path_text((jtu.GetAttrKey("layers"), jtu.SequenceKey(2), jtu.GetAttrKey("weight")))
        'layers[2].weight'
    """
    text = root
    for key in path:
        if isinstance(key, jtu.GetAttrKey):
            text += f".{key.name}" if text else key.name
        elif isinstance(key, jtu.SequenceKey):
            text += f"[{key.idx}]"
        elif isinstance(key, jtu.DictKey):
            text += f"[{key.key!r}]"
        else:
            # In a way that nobody takes for something to be written.
            text += f"[<{step_name(key)}>]"
    return text or "<root>"


def some_of(names: Sequence[str]) -> str:
    """The first of many names, for a text that is to be read."""
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")


_STEP = re.compile(r"\[\s*(?:'([^']*)'|\"([^\"]*)\"|([^\]]*))\s*\]|([^.\[\]]+)")


def parse_pattern(pattern: str) -> tuple[str, ...]:
    """Split `layers[2].*.weight` (or `layers.2.*.weight`) into its steps.

    Raises:
        SpecError: the pattern is empty or has an empty step.
    """
    steps: list[str] = []
    position = 0
    while position < len(pattern):
        found = _STEP.match(pattern, position)
        if found is None:
            break
        steps.append(next(group for group in found.groups() if group is not None).strip())
        position = found.end()
        # At the end it joins nothing, and is told of as a stray character.
        if pattern[position : position + 1] == "." and position + 1 < len(pattern):
            position += 1
    if position != len(pattern) or not steps:
        raise SpecError(
            explain(
                f"select.path({pattern!r})",
                "steps joined by dots",
                f"a stray character at position {position}",
                cure=["write, for instance", 'select.path("layers.*.weight")'],
            )
        )
    return tuple(steps)


def matches(steps: tuple[str, ...], names: tuple[str, ...], exactly: bool = False) -> bool:
    """Whether a pattern matches a path or, if not `exactly`, a node above it.

    `*` stands for one step, `**` for any number.
    """
    if not steps:
        return not (exactly and names)
    if steps[0] == "**":
        return any(matches(steps[1:], names[i:], exactly) for i in range(len(names) + 1))
    if not names or not fnmatchcase(names[0], steps[0]):
        return False
    return matches(steps[1:], names[1:], exactly)
