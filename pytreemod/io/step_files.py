"""One file for each step in a folder: their names, and which of them stay.

Owns: what a folder of checkpoints tells by itself. There is nothing in it but the files of steps,
each with its own metrics, so that no list of them can be wrong.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

from pytreemod.errors import FileAccessError, FileError
from pytreemod.io.access import StrPath, system_errors
from pytreemod.io.loading import read_metadata

_NAME = re.compile(r"step_(\d{8,})\.safetensors")


def file_of_step(step: int) -> str:
    """The name of the file of a step, so that names are in order when steps are.

    Examples:
        >>> file_of_step(1200)
        'step_00001200.safetensors'
    """
    return f"step_{step:08d}.safetensors"


def step_of_file(name: str) -> int | None:
    """Which step a file is of; None if it is another file."""
    found = _NAME.fullmatch(name)
    step = None if found is None else int(found[1])
    return step if step is not None and file_of_step(step) == name else None


def steps_in(folder: StrPath) -> list[int]:
    """The steps that are in a folder.

    Args:
        folder: which may not be there.

    Returns:
        Its steps, the newest last.

    Raises:
        FileAccessError: the folder cannot be read.
    """
    with system_errors(os.fspath(folder), "a folder to read"):
        if not os.path.lexists(folder):
            return []
        with os.scandir(folder) as entries:
            found = [step_of_file(entry.name) for entry in entries if entry.is_file()]
    return sorted(step for step in found if step is not None)


class Goal(NamedTuple):
    """Which step is the best one."""

    metric: str
    sign: int
    """-1 where the highest is the best."""

    @classmethod
    def parse(cls, text: str) -> Goal:
        """Read `"loss"` or `"-accuracy"`: the best step is the one where this is lowest."""
        return cls(text.removeprefix("-"), -1 if text.startswith("-") else 1)

    def rank(self, metrics: Mapping[str, Any]) -> float | None:
        """How far from the best a step is; None for one that never is it."""
        try:
            value = float(metrics[self.metric])
        except (KeyError, TypeError, ValueError, OverflowError):
            return None
        return None if math.isnan(value) else self.sign * value


def metrics_as_json(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics as a file holds them: JSON has numbers, and neither NaN nor infinity."""
    return {
        name: value if isinstance(value, int) or math.isfinite(value) else repr(value)
        for name, value in metrics.items()
    }


def about_file(path: StrPath) -> Mapping[str, Any]:
    """What a file says of its step; nothing if it is damaged.

    Raises:
        FileAccessError: the system refuses, or there is no such file any more.
    """
    try:
        about = read_metadata(path)
    except FileAccessError:
        raise
    except FileError:
        return {}
    return cast("dict[str, Any]", about) if isinstance(about, dict) else {}


def metrics_in(path: StrPath) -> Mapping[str, Any]:
    """The metrics of a file's step; none if it is damaged, or has none.

    Raises:
        FileAccessError: the system refuses, or there is no such file any more; then nobody knows
            how good the step is.
    """
    metrics = about_file(path).get("metrics")
    return cast("dict[str, Any]", metrics) if isinstance(metrics, dict) else {}


def best_step(ranks: Mapping[int, float | None]) -> int | None:
    """The best of some steps; of two that are alike the later one, which has learnt for longer."""
    ranked = [(rank, -step) for step, rank in ranks.items() if rank is not None]
    return -min(ranked)[1] if ranked else None


def steps_to_remove(
    steps: Iterable[int], keep: int, best: int | None, damaged: Iterable[int] = ()
) -> list[int]:
    """Which steps may go.

    Args:
        steps: all there are.
        keep: how many of the newest ones stay.
        best: one that stays beside them.
        damaged: those that nobody can read; they count for nothing.

    Returns:
        Steps that are older than all that stay as the newest ones.

    Examples:
        >>> steps_to_remove([100, 200, 300, 400], 2, best=100)
        [200]
    """
    steps = sorted(steps)
    whole = sorted(set(steps).difference(damaged))
    newest = whole[-keep:]
    return [step for step in steps if newest and step < newest[0] and step != best]
