"""Paths as strings, `layers[2].weight`, and patterns over them, `layers.*.weight`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from pytreemod.errors import SpecError
from pytreemod.typing import KeyPath, jtu

_NAMED = 10


def step_name(key: Any) -> str:
    """Return one key of a path as a bare word: the attribute's name, the index, the dict's key."""
    return jtu.keystr((key,), simple=True)


class PathName(str):
    """A path as a string that serves as a key and remembers its keys: the name of a token."""

    steps: tuple[str, ...]

    @classmethod
    def of(cls, path: KeyPath) -> PathName:
        """Return the name of a JAX key path."""
        name = cls(path_text(path))
        name.steps = step_names(path)
        return name


def step_names(path: KeyPath) -> tuple[str, ...]:
    """The keys of a path as bare words; a key that is itself a path gives all of its keys."""
    names: list[str] = []
    for key in path:
        # In a State, the key of a value is the path of its token.
        inner = key.key if isinstance(key, jtu.DictKey) else None
        names += inner.steps if isinstance(inner, PathName) else (step_name(key),)
    return tuple(names)


def path_text(path: KeyPath, root: str = "") -> str:
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
    return (root + jtu.keystr(path)).removeprefix(".") or "<root>"


def pattern_text(path: KeyPath) -> str:
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
        word: Any = key.key if isinstance(key, jtu.DictKey) else None
        # A PathName is written unchanged: it has its own keys.
        is_bare = isinstance(word, PathName) or (isinstance(word, str) and word.isidentifier())
        text += f"{'.' * (word[:1] != '[')}{word}" if is_bare else jtu.keystr((key,))
    return text.removeprefix(".") or "<root>"


def some_of(names: Sequence[str]) -> str:
    """Return the first of many names, as a readable list."""
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")


# A key in brackets, with quotes or without, or a bare word; before it, perhaps a separator.
_STEP = r"""[./]?(?:\[\s*+(?:'([^']*)'|"([^"]*)"|([^\]'"]*))\s*\]|([^./\[\]]++))"""


def parse_pattern(pattern: str) -> tuple[str, ...]:
    """Split `layers[2].*.weight` (`layers.2.*.weight`, `layers/2/*/weight`) into its keys.

    A key in quotes is one key, whatever it contains: `params['a/b'].weight`.

    Raises:
        SpecError: if the pattern is empty or has an empty key.
    """
    if not re.fullmatch(f"(?![./])(?:{_STEP})+", pattern):
        raise SpecError(
            f"select.path({pattern!r}): no keys with dots or slashes between them",
            hint='pm.select.path("layers.*.weight")',
        )
    return tuple("".join(groups).strip() for groups in re.findall(_STEP, pattern))


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
