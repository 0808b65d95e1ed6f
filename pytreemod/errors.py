"""The errors that pytreemod raises, and the form of their messages.

Owns: one class for each group of mistakes that a program would catch apart, fourteen with the
warnings, and [`explain`][pytreemod.errors.explain], which formats a message as one sentence that
states the fact, the paths, and a line of code where the cure is obvious. Imports nothing of
pytreemod.

Every class also derives from the built-ins that a user of Python, or of Equinox, would catch, and
all of them from `PytreemodError`.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import FrozenInstanceError
from difflib import get_close_matches
from typing import Any


class PytreemodError(Exception):
    """Base of every error that pytreemod itself raises.

    Args:
        fact: what is wrong, in one sentence; or, if two values of one kind are compared, where.
        expected: what would have been correct.
        got: the given value, in short form (`f32[7,3]`, never a complete array).
        **options: `at=`, one line for each path; `hint=`, a line of code, or a sentence and then
            lines of code; `most=`, the maximal number of paths shown.

    Examples:
        >>> raise PytreemodError("no such layer: Dense", hint="use Linear")
        Traceback (most recent call last):
            ...
        pytreemod.errors.PytreemodError: no such layer: Dense
          use Linear
    """

    def __init__(
        self, fact: object, expected: str | None = None, got: str | None = None, **options: Any
    ):
        super().__init__(explain(fact, expected, got, **options))


class ShapeError(PytreemodError, ValueError, TypeError):
    """An array has the wrong shape for the layer or function that received it."""


class ArgumentError(PytreemodError, ValueError, TypeError, RuntimeError):
    """An argument is missing, misspelled, of the wrong type or out of range."""


class FieldError(PytreemodError, TypeError, ValueError):
    """A Module class is declared incorrectly, or an instance was built incorrectly."""


class FrozenError(PytreemodError, FrozenInstanceError):
    """Code assigned to a finished Module, or deleted from it."""


class SpecError(PytreemodError, ValueError, TypeError, AttributeError):
    """A selector, `where`, filter spec, axes spec or `by` does not fit the tree."""


class StructureError(PytreemodError, ValueError, TypeError):
    """Two trees that must agree in structure, shape or type do not."""


class StateError(PytreemodError, RuntimeError, ValueError, KeyError):
    """A State, an array, a layer or a function was used when or where it cannot be used."""

    # KeyError would show the message as a repr, with its line breaks escaped.
    __str__ = Exception.__str__


class CheckError(PytreemodError, RuntimeError):
    """A check failed: an [`error_if`][pytreemod.error_if], or `max_traces`."""


class FileError(PytreemodError, ValueError, RuntimeError):
    """A file is damaged, is of another kind or tree than expected, or cannot store a value."""


class LostUpdateWarning(UserWarning):
    """A function under a `filter_*` transform used up a State, and does not return the new one.

    Given while the function is traced. Plain JAX transforms, and a loop that drops what a jitted
    call returns, lose an update without it.
    """


class SharedStreamWarning(UserWarning):
    """Every member of a map, or every device, drew the same random numbers from one stream."""


class SharedParameterWarning(UserWarning):
    """A model enters training with one parameter at two paths: it becomes two parameters."""


class FieldWarning(UserWarning):
    """A Module class, or an instance, is made in a way that is rarely meant."""


def warn(category: type[Warning], fact: object, *rest: str, **options: Any) -> None:
    """Warn, at the innermost line of the user's own code.

    Args:
        category: the class of the warning.
        fact: as for [`explain`][pytreemod.errors.explain].
        *rest: the expected and the given value.
        **options: `at=`, `hint=` and `most=`.
    """
    text = explain(fact, *rest, **options)
    level, frame = 1, sys._getframe()  # pyright: ignore[reportPrivateUsage]  (public in effect)
    while frame.f_back is not None and _is_machinery(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


def _is_machinery(file: str) -> bool:
    """Whether a file is of this package, of a package that calls users' functions, or Python's."""
    packages = [sys.modules.get(name) for name in ("pytreemod", "jax", "jaxtyping")]
    ours = [os.path.dirname(package.__file__ or "") for package in packages if package is not None]
    is_python = file.startswith(os.path.dirname(os.__file__)) and "site-packages" not in file
    return is_python or file.startswith(("<@beartype", "<generated for ", *ours))


def explain(
    fact: object,
    expected: str | None = None,
    got: str | None = None,
    *,
    at: Iterable[str] = (),
    hint: str | Sequence[str] = (),
    most: int = 5,
) -> str:
    """Format an error message: the fact, a line for each path, then the hint.

    Args:
        fact: what is wrong, in one sentence. If two values of one kind are compared (shapes,
            dtypes, counts), only where: the sentence is then `{fact}: expected {expected}, got
            {got}.`
        expected: what would have been correct.
        got: the given value, in short form (`f32[7,3]`, never a complete array).
        at: one line for each path; after `most`, "and N more".
        hint: a line of code that the reader can paste; or a sentence, then lines of code.
        most: the maximal number of paths shown: more than five in a table to work through.

    Returns:
        The message, with several lines.

    Examples:
        >>> print(explain("no array at two paths may be donated", at=["x[0]", "x[1]"], hint="copy"))
        no array at two paths may be donated
          at x[0]
          at x[1]
          copy
    """
    lines = [str(fact) if expected is None else f"{fact}: expected {expected}, got {got}."]
    at = list(at)
    lines += [f"  at {path}" for path in at[:most]]
    if len(at) > most:
        lines.append(f"  and {len(at) - most} more")
    hint = [hint] if isinstance(hint, str) else list(hint)
    lines += [f"  {hint[0]}", *(f"      {line}" for line in hint[1:])] if any(hint) else []
    return "\n".join(lines)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a suggestion for an unknown name, if a known one is similar.

    Args:
        name: the unknown name.
        known: the known names.

    Returns:
        A string to append to the name; empty if no name is similar.

    Examples:
        >>> nearest("modle", ["model", "x"]), nearest("y", ["model", "x"])
        (" (is it 'model'?)", '')
    """
    close = get_close_matches(name, [*known], n=1)
    return f" (is it {close[0]!r}?)" if close else ""


_SHORT_DTYPES = (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c"))


def describe(value: Any) -> str:
    """Return a value in short form for a message: `f32[7,3]` for arrays, a clipped repr otherwise.

    Args:
        value: anything.

    Returns:
        At most about sixty characters.

    Examples:
        >>> import numpy as np
        >>> describe(np.zeros((7, 3), np.float32)), describe("relu")
        ('f32[7,3]', "'relu'")
    """
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(shape, tuple) and dtype is not None:
        return f"{short_dtype(dtype)}[{','.join(map(str, value.shape))}]"
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"the function {value.__qualname__}"
    try:
        text = repr(value)
    except Exception:
        text = f"a value of type {type(value).__qualname__}"
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def short_dtype(dtype: Any) -> str:
    """Return `float32` as `f32`, `bfloat16` as `bf16`, and so on.

    Args:
        dtype: a NumPy or JAX dtype.

    Returns:
        The short name.

    Examples:
        >>> import numpy as np
        >>> short_dtype(np.dtype("float32"))
        'f32'
    """
    name = str(getattr(dtype, "name", dtype))
    for long, short in _SHORT_DTYPES:
        if name.startswith(long):
            return short + name[len(long) :]
    return name
