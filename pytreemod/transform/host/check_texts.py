"""What a check says when it has failed: its message, and notes on where it happened."""

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
    """What a check says.

    Attributes:
        messages: the texts that it may have, one of which the index of a failure chooses.
        site: the line of the check, in words; empty if it is not known.
    """

    messages: tuple[str, ...]
    site: str

    def error(
        self, failed: Any, index: Any, *, is_batch: bool, steps: Sequence[int] = (), more: int = 0
    ) -> CheckError:
        """The error for a failure, with where it happened as notes below the message.

        Args:
            failed: whether it failed, for each member; at least one did.
            index: that of the message, or of each member's.
            is_batch: whether the axes of `failed` are those of maps and loops around the check.
            steps: which axes are those of loops, counted from the last, which is 0.
            more: how many others failed that `failed` does not show.
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
        """The message with this index, which may be anything where it was traced."""
        count = len(self.messages)
        known = -count <= index < count
        return self.messages[index] if known else f"message {index} of {count} (no such message)"


def _in_words(index: Sequence[int]) -> str:
    return str(index[0]) if len(index) == 1 else f"({', '.join(map(str, index))})"


def print_error(error: CheckError) -> None:
    """Print an error that nothing raises."""
    print("".join(traceback.format_exception_only(error)), end="", file=sys.stderr)


def user_line() -> str:
    """The line of the user's that called this package, in words; empty if there is none."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  (public in effect)
    # The first frame that is not of this package: that is where a user looks.
    here = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    ours = (here, "<generated for ")
    while frame is not None and frame.f_code.co_filename.startswith(ours):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_qualname}"
