"""The error of a failed check: its message, and notes on where it failed."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from pytreemod.errors import CheckError


class CheckText(NamedTuple):
    """The messages of a check.

    Attributes:
        messages: the possible messages; the index of a failure chooses one.
        site: the line of the check, for a note; empty if it is not known.
    """

    messages: tuple[str, ...]
    site: str

    def error(
        self, failed: Any, index: Any, *, is_batch: bool, steps: Sequence[int] = (), more: int = 0
    ) -> CheckError:
        """Return the error for a failure, with notes below the message on where it happened.

        Args:
            failed: whether it failed, for each member; at least one did.
            index: the index of the message, or of each member's message.
            is_batch: whether the axes of `failed` belong to maps and loops around the check.
            steps: the axes of loops, counted from the last, which is 0.
            more: the number of failures that `failed` does not show.
        """
        failed, index = np.broadcast_arrays(failed, index)
        places = np.argwhere(failed)
        first = tuple(int(i) for i in places[0])
        error = CheckError(self.message(int(index[first])))
        if first and is_batch:
            more += len(places) - 1
            axes = range(len(first) - 1, -1, -1)
            members = [i for i, axis in zip(first, axes, strict=True) if axis not in steps]
            rounds = [i for i, axis in zip(first, axes, strict=True) if axis in steps]
            where = [f"for the batch index {_in_words(members)}"] * bool(members)
            where += [f"in step {_in_words(rounds)} of a scan"] * bool(rounds)
            error.add_note(", ".join(where) + (f", and {more} more" if more else ""))
        if self.site:
            error.add_note(f"checked at {self.site}")
        return error

    def message(self, index: int) -> str:
        """Return the message with this index, which may be any number if it was traced."""
        count = len(self.messages)
        known = -count <= index < count
        return self.messages[index] if known else f"message {index} of {count} (no such message)"


def _in_words(index: Sequence[int]) -> str:
    return str(index[0]) if len(index) == 1 else f"({', '.join(map(str, index))})"


def print_error(error: CheckError) -> None:
    """Print an error that will not be raised."""
    print("".join(traceback.format_exception_only(error)), end="", file=sys.stderr)


def user_line() -> str:
    """Return the user's line that called this package, as a note; empty if there is none."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  (public in effect)
    # The first frame outside this package is the line that a user looks for.
    here = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    ours = (here, "<generated for ")
    while frame is not None and frame.f_code.co_filename.startswith(ours):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_qualname}"
