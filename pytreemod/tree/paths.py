"""Paths as strings, `layers[2].weight`; patterns over them, `layers.*.weight`; names of leaves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from pytreemod.errors import ArgumentError, SpecError, describe
from pytreemod.typing import jtu

_NAMED = 10


def step_name(key: Any) -> str:
    """Return one key of a path as a bare word: the attribute's name, the index, the dict's key."""
    if isinstance(key, jtu.GetAttrKey):
        return key.name
    if isinstance(key, jtu.SequenceKey):
        return str(key.idx)
    if isinstance(key, (jtu.DictKey, jtu.FlattenedIndexKey)):
        return str(key.key)
    # Users' nodes may have keys of their own class.
    return str(getattr(key, "name", key))


class PathName(str):
    """A path as a string that serves as a key and remembers its keys: the name of a token."""

    steps: tuple[str, ...]

    @classmethod
    def of(cls, path: tuple[Any, ...]) -> PathName:
        """Return the name of a JAX key path."""
        name = cls(path_text(path))
        name.steps = step_names(path)
        return name


def step_names(path: tuple[Any, ...]) -> tuple[str, ...]:
    """The keys of a path as bare words; a key that is itself a path gives all of its keys."""
    names: list[str] = []
    for key in path:
        # In a State, the key of a value is the path of its token.
        inner = key.key if isinstance(key, jtu.DictKey) else None
        names += inner.steps if isinstance(inner, PathName) else (step_name(key),)
    return tuple(names)


def path_text(path: tuple[Any, ...], root: str = "") -> str:
    """Return a JAX key path as Python code that accesses the leaf.

    Args:
        path: keys, as `jax.tree_util` gives them.
        root: the first part, such as an argument's name.

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
            # Not valid Python: this key cannot be written as an access.
            text += f"[<{step_name(key)}>]"
    return text or "<root>"


def pattern_text(path: tuple[Any, ...]) -> str:
    """Return a JAX key path as the pattern that picks it, with as few quotes as possible.

    Args:
        path: keys, as `jax.tree_util` gives them.

    Returns:
        The string that `parse_pattern` parses into `step_names(path)`; `<root>` for the empty path.

    Examples:
        >>> pattern_text((jtu.DictKey("model"), jtu.SequenceKey(2), jtu.DictKey("mlp/w")))
        "model[2]['mlp/w']"
    """
    text = ""
    for key in path:
        word = key.key if isinstance(key, jtu.DictKey) else None
        # A PathName is written unchanged: it has its own keys.
        if isinstance(word, PathName) or (isinstance(word, str) and word.isidentifier()):
            text += word if not text or word.startswith("[") else f".{word}"
        else:
            text = path_text((key,), text)
    return text or "<root>"


def plain_name(path: tuple[Any, ...], sep: str = ".") -> str:
    """Return a JAX key path as a name: its keys as bare words, with `sep` between them.

    A key is quoted, as Python quotes strings, if it could not be parsed otherwise: if it is empty,
    contains `sep`, begins with a quote, or cannot be printed. So no two sequences of keys have the
    same name.

    Args:
        path: keys, as `jax.tree_util` gives them. In a State, a key is the path of a token, and
            gives its keys.
        sep: the separator between the keys.

    Returns:
        `layers.2.weight`; the empty string for the empty path.

    Raises:
        ArgumentError: if `sep` is empty, not a string, or contains a quote.

    Examples:
        >>> plain_name((jtu.GetAttrKey("layers"), jtu.SequenceKey(2), jtu.GetAttrKey("weight")))
        'layers.2.weight'
        >>> print(plain_name((jtu.DictKey("v1.5"), jtu.GetAttrKey("weight"))))
        'v1.5'.weight
    """
    _check_separator("plain_name(sep)", sep)
    return sep.join(_word(step, sep) for step in step_names(path))


def _word(step: str, sep: str) -> str:
    is_plain = step != "" and step[0] != "'" and step.isprintable()
    # With the separator, part of which may end the key: "a:" before "::".
    if is_plain and (step + sep).index(sep) == len(step):
        return step
    # With a double quote in it, Python always chooses single quotes.
    return "'" + repr('"' + step)[2:]


def _check_separator(where: str, sep: Any) -> None:
    if isinstance(sep, str) and sep != "" and "'" not in sep:
        return
    raise ArgumentError(where, "a nonempty string without quotes", describe(sep))


def some_of(names: Sequence[str]) -> str:
    """Return the first of many names, as a readable list."""
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")


_STEP = re.compile(r"\[\s*(?:'([^']*)'|\"([^\"]*)\"|([^\]]*))\s*\]|([^./\[\]]+)")


def parse_pattern(pattern: str) -> tuple[str, ...]:
    """Split `layers[2].*.weight` (`layers.2.*.weight`, `layers/2/*/weight`) into its keys.

    A key that contains a dot or a slash is quoted: `params['mlp/linear']`, as paths are printed.

    Raises:
        SpecError: if the pattern is empty or has an empty key.
    """
    steps: list[str] = []
    position = 0
    while position < len(pattern):
        found = _STEP.match(pattern, position)
        if found is None:
            break
        steps.append(next(group for group in found.groups() if group is not None).strip())
        position = found.end()
        # At the end it separates nothing, and is reported as a stray character.
        if pattern[position : position + 1] in {".", "/"} and position + 1 < len(pattern):
            position += 1
    if position != len(pattern) or not steps:
        raise SpecError(
            f"select.path({pattern!r})",
            "components separated by dots or slashes",
            f"a stray character at position {position}",
            hint=["for example:", 'select.path("layers.*.weight")'],
        )
    return tuple(steps)


def matches(steps: tuple[str, ...], names: tuple[str, ...], exactly: bool = False) -> bool:
    """Whether a pattern matches a path or, if not `exactly`, a node above it.

    `*` matches one key, `**` any number.
    """
    if not steps:
        return not (exactly and names)
    if steps[0] == "**":
        return any(matches(steps[1:], names[i:], exactly) for i in range(len(names) + 1))
    if not names or not fnmatchcase(names[0], steps[0]):
        return False
    return matches(steps[1:], names[1:], exactly)
