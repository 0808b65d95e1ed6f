"""Paths as text: `layers[2].weight`, patterns over them: `layers.*.weight`; and leaves' names."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from pytreemod.errors import ArgumentError, SpecError, describe
from pytreemod.typing import jtu

_NAMED = 10


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


def pattern_text(path: tuple[Any, ...]) -> str:
    """A JAX key path as the pattern that picks it, written with as few quotes as can be.

    Args:
        path: keys, as `jax.tree_util` gives them.

    Returns:
        What `parse_pattern` takes apart into `step_names(path)`; `<root>` for the empty path.

    Examples:
        >>> pattern_text((jtu.DictKey("model"), jtu.SequenceKey(2), jtu.DictKey("mlp/w")))
        "model[2]['mlp/w']"
    """
    text = ""
    for key in path:
        word = key.key if isinstance(key, jtu.DictKey) else None
        # A PathName is written as it is: it has its own steps.
        if isinstance(word, PathName) or (isinstance(word, str) and word.isidentifier()):
            text += word if not text or word.startswith("[") else f".{word}"
        else:
            text = path_text((key,), text)
    return text or "<root>"


def plain_name(path: tuple[Any, ...], sep: str = ".") -> str:
    """A JAX key path as a name: its steps as bare words, with `sep` between them.

    A step that would not be read as it is written is quoted, in the way of Python's strings:
    one in which `sep` is found, that is empty, begins with a quote, or cannot be printed. So no two
    sequences of steps have one name; [`parse_name`][pytreemod.tree.paths.parse_name] has the steps.

    Args:
        path: keys, as `jax.tree_util` gives them. In a State, a key is the path of a token, and
            gives its steps.
        sep: what is between the steps.

    Returns:
        `layers.2.weight`; the empty text for the empty path.

    Raises:
        ArgumentError: `sep` is empty, no text, or has a quote in it.

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
    # Of the separator, too, some of which may be at the step's end: "a:" before "::".
    if is_plain and (step + sep).index(sep) == len(step):
        return step
    # Python quotes what has a double quote in it with single ones, whatever else it has.
    return "'" + repr('"' + step)[2:]


# With the escapes that `repr` writes, and no other.
_ESCAPE = r"\\(?:['\\nrt]|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})"
_QUOTED = re.compile(rf"'(?:[^'\\]|{_ESCAPE})*'")


def parse_name(name: str, sep: str = ".") -> tuple[str, ...]:
    """The steps of a name that [`plain_name`][pytreemod.tree.paths.plain_name] has written.

    Args:
        name: such a name.
        sep: what is between the steps.

    Returns:
        The steps, without quotes.

    Raises:
        ArgumentError: this is no such name; or `sep` is empty, no text, or has a quote in it.

    Examples:
        >>> parse_name("layers.2.weight"), parse_name("'v1.5'.weight"), parse_name("")
        (('layers', '2', 'weight'), ('v1.5', 'weight'), ())
    """
    _check_separator("parse_name(sep)", sep)
    steps: list[str] = []
    rest = name
    while rest:
        quoted = _QUOTED.match(rest)
        word = rest.split(sep, 1)[0] if quoted is None else quoted[0]
        rest = rest[len(word) :]
        step = word if quoted is None else _unquoted(word)
        # A name has one form: what has quotes without need would be a second name of one leaf.
        is_whole = rest == "" or (rest.startswith(sep) and rest != sep)
        if not is_whole or step is None or _word(step, sep) != word:
            hint = ["Put a step that contains it in quotes:", "'v1.5'.weight"]
            expected = f"steps with {sep!r} between them"
            raise ArgumentError("parse_name(name)", expected, describe(name), hint=hint)
        steps.append(step)
        rest = rest[len(sep) :]
    return tuple(steps)


def _unquoted(word: str) -> str | None:
    try:
        return ast.literal_eval(word)
    except SyntaxError:  # A character's number that is none, or a line break.
        return None


def _check_separator(where: str, sep: Any) -> None:
    if isinstance(sep, str) and sep != "" and "'" not in sep:
        return
    raise ArgumentError(where, "some text without quotes", describe(sep))


def some_of(names: Sequence[str]) -> str:
    """The first of many names, for a text that is to be read."""
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")


_STEP = re.compile(r"\[\s*(?:'([^']*)'|\"([^\"]*)\"|([^\]]*))\s*\]|([^./\[\]]+)")


def parse_pattern(pattern: str) -> tuple[str, ...]:
    """Split `layers[2].*.weight` (`layers.2.*.weight`, `layers/2/*/weight`) into its steps.

    A key that has a dot or a slash itself is quoted: `params['mlp/linear']`, as paths are printed.

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
        # At the end it joins nothing, and is reported as a stray character.
        if pattern[position : position + 1] in {".", "/"} and position + 1 < len(pattern):
            position += 1
    if position != len(pattern) or not steps:
        raise SpecError(
            f"select.path({pattern!r})",
            "steps joined by dots or slashes",
            f"a stray character at position {position}",
            hint=["write, for instance", 'select.path("layers.*.weight")'],
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
