"""`Checkpoints`: a folder with a file for each step of a training run, saved in the background.

The folder has only such files, each complete, and with its own metadata: there is no list of them
that could be wrong. For several hosts, and for object stores, use orbax, which takes Modules as
they are.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax
import numpy as np

from pytreemod.errors import ArgumentError
from pytreemod.io.container import StrPath
from pytreemod.io.loading import load
from pytreemod.io.saving import read_metadata, save
from pytreemod.typing import PyTree, is_instance, jtu

_T = TypeVar("_T")


class Checkpoints(AbstractContextManager["Checkpoints"]):
    """Save the steps of a training run into a folder, in the background.

    Each step is one file, as [`save`][pytreemod.save] writes it. It has the tree as it was when you
    called `save`: arrays are copied on their devices, so the loop may donate them. One save runs at
    a time; the next call waits for it, and raises its error. Leave the `with` block, or call
    `wait`, to know that the last one is written.

    **Law.** Whenever the process is killed, every file `step_*.safetensors` is complete.

    Args:
        folder: the path of the folder, which is created if missing; one for each run.
        keep: how many of the newest steps stay; None for all.
        best: a number in the metadata; the step with the lowest one stays, too. With a minus, as in
            `"-accuracy"`, the one with the highest. NaN is never the best.

    Raises:
        ArgumentError: if `keep` is less than 1.

    Examples:
        >>> import tempfile
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> folder = tempfile.TemporaryDirectory()
        >>> with pm.Checkpoints(folder.name, keep=2, best="loss") as checkpoints:
        ...     for step in range(5):
        ...         tree = {"step": step, "weight": jnp.full(3, float(step))}
        ...         checkpoints.save(step, tree, {"loss": abs(step - 1.0)})
        >>> checkpoints.steps()
        [1, 3, 4]
        >>> checkpoints.restore(tree)["step"], checkpoints.restore(tree, "best")["step"]
        (4, 1)
        >>> folder.cleanup()
    """

    def __init__(self, folder: StrPath, keep: int | None = 3, best: str | None = None) -> None:
        if keep is not None and keep < 1:
            raise ArgumentError(f"Checkpoints(keep) is at least 1, not {keep}")
        self.folder, self.keep, self.best = Path(folder).absolute(), keep, best
        self.folder.mkdir(parents=True, exist_ok=True)
        # What a killed process has left; a process that lives goes on writing.
        for path in self.folder.glob("step_*.safetensors.*.tmp"):
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < time.time() - 600:
                    path.unlink()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="Checkpoints")
        self._jobs: list[Future[None]] = []

    def save(self, step: int, tree: PyTree, metadata: Any = None) -> None:
        """Save a step in the background.

        Args:
            step: its number, not below those in the folder. The newest step itself is replaced.
            tree: everything that you need to resume.
            metadata: see [`save`][pytreemod.save]; it may have arrays that are still computed.

        Raises:
            ArgumentError: if a newer step is in the folder: `restore` would return that.
        """
        newest = max(self.steps(), default=0)
        if step < newest:
            raise ArgumentError(f"step {step} is below {newest}, the newest of {self.folder}")
        taken = jtu.tree_map(_copied, (tree, metadata))
        self._jobs.append(self._worker.submit(self._write, step, *taken))

    def restore(self, like: _T, step: int | Literal["best"] | None = None) -> _T:
        """Load a step.

        Args:
            like: a tree of the structure that was saved, as for [`load`][pytreemod.load].
            step: a number; `"best"`; or None for the newest one.

        Returns:
            `like` with the values of the file.

        Raises:
            FileNotFoundError: if there is no such step.
        """
        return load(self.path(step), like)

    def steps(self) -> list[int]:
        """Return the steps in the folder, newest last, after the save in progress has ended."""
        self.wait()
        return self._present()

    def path(self, step: int | Literal["best"] | None = None) -> Path:
        """Return the path of a step's file, for `load` and `read_metadata`.

        Args:
            step: as for `restore`.

        Raises:
            FileNotFoundError: if there is no such step.
        """
        steps = self.steps()
        chosen = self._best_of(steps) if step == "best" else max(steps, default=None)
        chosen = chosen if step in ("best", None) else step
        if chosen is None or chosen not in steps:
            raise FileNotFoundError(f"{self.folder} has the steps {steps}; asked for {step}")
        return self._file(chosen)

    def wait(self) -> None:
        """Wait until the last save is in its file; raise the error of one that failed."""
        while self._jobs:
            self._jobs.pop(0).result()

    def __exit__(self, *_: object) -> None:
        self.wait()

    def _write(self, step: int, tree: PyTree, metadata: Any) -> None:
        save(self._file(step), tree, metadata)
        if self.keep is None:
            return
        steps = self._present()
        best = self._best_of(steps)
        for old in steps[: -self.keep]:
            if old != best:
                self._file(old).unlink(missing_ok=True)

    def _best_of(self, steps: list[int]) -> int | None:
        """Return the newest step with the best number; None if no step has one."""
        if self.best is None:
            return None
        sign, name = (-1, self.best[1:]) if self.best.startswith("-") else (1, self.best)
        ranks: dict[int, float] = {}
        for step in steps:
            # Another process may have removed it.
            with suppress(FileNotFoundError):
                metadata: Any = read_metadata(self._file(step))
                number: Any = metadata.get(name) if is_instance(metadata, dict) else None
                if isinstance(number, (int, float)) and not math.isnan(number):
                    ranks[step] = sign * number
        return min(ranks, key=lambda step: (ranks[step], -step), default=None)

    def _present(self) -> list[int]:
        found = (path.stem[len("step_") :] for path in self.folder.glob("step_*.safetensors"))
        steps = sorted(int(number) for number in found if number.isdecimal())
        return [step for step in steps if self._file(step).is_file()]

    def _file(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}.safetensors"


def _copied(leaf: Any) -> Any:
    return leaf.copy() if is_instance(leaf, (jax.Array, np.ndarray)) else leaf
