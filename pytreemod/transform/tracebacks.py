"""Errors as they leave a transform: without the frames of this library's machinery.

An error in a user's function under three transforms would show a dozen of our frames. They are
taken out where an error leaves a transform. Frames of layers stay, because they say which layer,
but not those of what all layers share; the environment variable `PYTREEMOD_TRACEBACK=full` keeps
all.
"""

from __future__ import annotations

import functools as ft
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from pytreemod.transform.runtime_checks import as_check_error

_F = TypeVar("_F", bound=Callable[..., Any])

_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_MACHINERY = ("transform/", "tree/", "module/", "nn/base.py", "nn/meshes.py")
_OURS = tuple(os.path.join(_PACKAGE, *part.split("/")) for part in _MACHINERY)


def shortened(error: Exception) -> Exception:
    """Return an error with a traceback that shows no frame of the library's machinery.

    An error of JAX about a failed check becomes that of the check.
    """
    error = as_check_error(error)
    if os.environ.get("PYTREEMOD_TRACEBACK") == "full":
        return error
    kept: list[TracebackType] = []
    frame = error.__traceback__
    while frame is not None:
        if not frame.tb_frame.f_code.co_filename.startswith(_OURS):
            kept.append(frame)
        frame = frame.tb_next
    rest: TracebackType | None = None
    for frame in reversed(kept):
        rest = TracebackType(rest, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return error.with_traceback(rest)


def with_short_errors(fn: _F) -> _F:
    """Return a function whose errors show none of our frames but its own."""

    @ft.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            raise shortened(error)  # noqa: B904  (the same error)

    return run  # pyright: ignore[reportReturnType]  (of the same type)
