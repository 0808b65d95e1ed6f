"""`Checkpoints`: a folder with the steps of a training run, saved in the background.

A save has two halves. The first takes a snapshot of the tree before the loop continues: it waits
for nothing, and nothing leaves the device. The second takes as long as the disk does, and runs in a
thread. It fetches each array, writes the file under another name, renames it in one step, and only
then removes older files. So a process can be killed at any moment, and all files in the folder are
complete. The folder has only files of steps, each with its own metrics: there is no list of them
that could be wrong.
"""

from __future__ import annotations

import math
import os
import re
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import (
    ArgumentError,
    DamagedFileWarning,
    DonatedError,
    FileAccessError,
    FileError,
    FileMissingError,
    SurplusStepsWarning,
    describe,
    explain,
    warn,
)
from pytreemod.io.access import HINT_SHELL, StrPath, is_of_shell, remove_leftovers, system_errors
from pytreemod.io.containers import Container
from pytreemod.io.descriptions import describe_tree
from pytreemod.io.loading import load, read_metadata
from pytreemod.io.saving import save, snapshot
from pytreemod.typing import PyTree, jtu

_T = TypeVar("_T")
_Which = int | Literal["best"] | None


class Checkpoints:
    """Save the steps of a training run into a folder, in the background.

    Each step is one file, which [`save`][pytreemod.save] writes, and [`load`][pytreemod.load]
    reads, too. The folder has no other files: you can copy it, and remove files.

    The file has the tree as it was when you called `save`, whatever the loop does next: it may
    donate the arrays, write into NumPy arrays, use a State up. For this, arrays are copied on their
    devices, and need their memory twice until the file is written. One save runs at a time. If the
    disk is slower than the loop, the next save waits for it.

    A save removes only steps that were saved under the same `keep` and `best`. The first save warns
    about others, and `prune` removes those that `keep` and `best` exclude.

    An error in the background is raised by the next call of any method. When the program ends, a
    save in progress is finished, and an error that no call has raised is printed.

    **Laws.** `restore(like) == tree` after `save(step, tree)`. Whenever the process is killed,
    every file in the folder is complete. Of the steps whose save had ended, the newest `keep`
    exist.

    Args:
        folder: the path of the folder, which is created if missing. Use one folder for each run.
        keep: how many of the newest steps stay, at least 1; None for all.
        best: a metric; the step in which it was lowest stays in addition. With a minus, as in
            `"-accuracy"`, it is the step in which it was highest. A step whose metric is NaN is
            never the best.
        copy: whether to copy arrays on their devices. If not, a loop must not donate them before
            they are written; if it does, the next call raises an error.

    Raises:
        ArgumentError: if an argument is unusable.
        FileAccessError: if the folder cannot be created or read.

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

    folder: Path
    """The path of the folder."""
    keep: int | None
    """How many of the newest steps stay."""
    best: str | None
    """The metric of the additional step."""

    def __init__(
        self,
        folder: StrPath,
        keep: int | None = 3,
        best: str | None = None,
        *,
        copy: bool = True,
    ) -> None:
        self.folder = _checked_folder(folder)
        self.keep, self.best = _checked_keep(keep), _checked_best(best)
        self._goal = None if self.best is None else Goal.parse(self.best)
        self._copy = copy
        with system_errors(str(self.folder)):
            self.folder.mkdir(parents=True, exist_ok=True)
        self._newest = max(steps_in(self.folder), default=-1)
        self._damaged: set[int] = set()
        # The steps that this object has saved; other files say under which options they were.
        self._own: set[int] = set()
        self._has_warned = False
        self._structure: Any = None
        # By step, with an identification of the file, which another may have replaced.
        self._ranks: dict[int, tuple[Any, float | None]] = {}
        # One: two saves at once would end in either order.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="Checkpoints")
        self._jobs: deque[Future[None]] = deque()
        # A signal handler may save, too, in the middle of a save.
        self._lock = threading.RLock()
        weakref.finalize(self, _raise_unreported, self._jobs)

    def save(self, step: int, tree: PyTree, metrics: Mapping[str, Any] | None = None) -> None:
        """Save a step in the background.

        The call waits for the previous save, if that is still running, but for no computation.

        Args:
            step: the number of the step, at least that of the newest step in the folder; otherwise
                `restore` would continue another run. The newest step itself is replaced.
            tree: everything that you need to resume: the model, the State, the optimizer state,
                random keys, the step.
            metrics: numbers by name; they may be arrays that are still being computed.

        Raises:
            ArgumentError: if the step or the metrics are unusable.
            FileError: if an array is traced, was donated, or has parts only on other hosts; or if
                the previous save failed.
            DonatedError: if the loop donated arrays before the previous save had written them.
        """
        step = _checked_step(self, step)
        where = f"{self!r}.save({step})"
        metrics = _checked_metrics({} if metrics is None else metrics, self._goal, where)
        with self._lock:
            self.wait()
            if step < self._newest:
                # The folder is read only then: a loop does not wait for disks.
                self._newest = max(self._whole(), default=-1)
                if step < self._newest:
                    raise _older_step(self, step, self._newest)
            self._check_can_be_described(tree, where)
            self._warn_of_others()
            taken = snapshot(tree, where, copy=self._copy), snapshot(metrics, where)
            self._newest = step
            try:
                self._jobs.append(self._worker.submit(self._write, step, *taken))
            except RuntimeError:
                # The program is ending, and cannot start a thread.
                self._write(step, *taken)

    def restore(self, like: _T, step: _Which = None) -> _T:
        """Load a step.

        Args:
            like: a tree of the structure that was saved, as for [`load`][pytreemod.load].
            step: a number; `"best"`; or None for the newest complete step. With None, a damaged
                file, which no kill can cause, is skipped with a `DamagedFileWarning`.

        Returns:
            `like` with the values of the file. To know its step, store that in the tree.

        Raises:
            FileMissingError: if there is no such step.
            FileError: if the file is of another tree; if it is damaged, and you asked for its step;
                or if no file is complete.
        """
        if step is not None:
            return load(self.path(step), like)
        self.wait()
        passed: list[str] = []
        while True:
            chosen = max(self._whole(), default=None)
            if chosen is None:
                raise _no_step(self, "complete file to restore", "", passed)
            try:
                return load(self._file(chosen), like)
            except FileMissingError:
                continue  # another process has saved newer ones meanwhile
            except FileAccessError:
                raise
            except FileError as error:
                # A complete file that does not fit is a mistake of the caller, which an older one
                # would hide.
                if _is_whole(self._file(chosen)):
                    raise
                passed.append(str(error).splitlines()[0])
                self._damaged.add(chosen)
                warn(DamagedFileWarning, _damage(self, chosen, passed[-1]))

    def steps(self) -> list[int]:
        """Return the steps in the folder, newest last, after the save in progress has ended.

        Raises:
            FileError: if the last save failed.
        """
        self.wait()
        return self._present()

    def path(self, step: _Which = None) -> Path:
        """Return the path of a step's file, for other functions (`load`, `read_metadata`, ...).

        Args:
            step: a number; `"best"`; or None for the newest one.

        Returns:
            The path.

        Raises:
            FileMissingError: if there is no such step.
            ArgumentError: if `step` is `"best"`, but the folder was opened without `best`.
        """
        self.wait()
        steps = self._present()
        expected = "step" if step is None else f"step {step}"
        if step is None:
            chosen = steps[-1] if steps else None
        elif step == "best":
            goal = _checked_goal(self, self._goal)
            chosen = self._best_of(self._whole(), goal)
            expected = f"step whose file has its {goal.metric!r}"
        else:
            chosen = _checked_step(self, step)
        if chosen not in steps:
            raise _no_step(self, expected, f", but {steps}" if steps else "")
        return self._file(chosen)

    def prune(self) -> list[int]:
        """Remove the steps that `keep` and `best` exclude, whatever options they were saved under.

        Returns:
            The steps that were removed.

        Raises:
            FileError: if the last save failed.
            FileAccessError: if a file cannot be removed.

        Examples:
            >>> import tempfile
            >>> import pytreemod as pm
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     with pm.Checkpoints(folder, keep=None) as checkpoints:
            ...         for step in range(4):
            ...             checkpoints.save(step, {"step": step})
            ...     again = pm.Checkpoints(folder, keep=1)
            ...     again.steps(), again.prune(), again.steps()
            ([0, 1, 2, 3], [0, 1, 2], [3])
        """
        with self._lock:
            self.wait()
            removed = self._surplus()
            self._remove(removed)
        return removed

    def wait(self) -> None:
        """Wait until the last save is on the disk.

        Raises:
            FileError: if the last save failed; or another error.
        """
        with self._lock:
            while self._jobs:
                job = self._jobs[0]
                error = job.exception()
                # A signal handler may have waited for it meanwhile.
                with suppress(ValueError):
                    self._jobs.remove(job)
                if error is not None:
                    try:
                        raise error
                    finally:
                        # Its traceback refers to the arrays, and includes this frame.
                        del job, error

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.wait()
        except Exception as lost:
            if error is None:
                raise
            error.add_note(f"The last save is lost, too: {lost}")

    def __repr__(self) -> str:
        best = "" if self.best is None else f", best={self.best!r}"
        return f"Checkpoints({str(self.folder)!r}, keep={self.keep}{best})"

    def _check_can_be_described(self, tree: PyTree, where: str) -> None:
        """Raise an error of the tree now, not one save later; check each structure once."""
        structure = jtu.tree_structure(tree)
        if self._structure is None or structure != self._structure:
            describe_tree(tree, where)
            self._structure = structure

    def _warn_of_others(self) -> None:
        """Warn, once, about the steps that stay because they were saved under other options."""
        if self._has_warned or self.keep is None:
            return
        self._has_warned = True
        others = [step for step in self._present() if not self._is_ours(step)]
        if others:
            warn(SurplusStepsWarning, _surplus(self, others))

    # ---- in the background

    def _write(self, step: int, tree: PyTree, metrics: dict[str, Any]) -> None:
        try:
            remove_leftovers(self.folder, lambda name: step_of_file(name) is not None)
            numbers = {name: _number(value) for name, value in metrics.items()}
            # In the file itself: so its best step is known in a folder that was copied, or from
            # which a user removed files.
            about = {"step": step, "metrics": metrics_as_json(numbers), **self._options()}
            save(self._file(step), tree, about, durable=True)
        except Exception as error:
            error.add_note(f"It was in the background: step {step} of {self!r} is not saved.")
            _check_not_donated(self, step, tree, error)
            raise
        self._damaged.discard(step)
        self._own.add(step)
        # Last: a kill in between leaves one file too many, and never one too few.
        # Steps of other options may be the best, or wanted for another reason.
        self._remove(old for old in self._surplus() if self._is_ours(old))

    def _surplus(self) -> list[int]:
        """Return the existing steps that are neither new enough nor the best."""
        if self.keep is None:
            return []
        best = None if self._goal is None else self._best_of(self._whole(), self._goal)
        return steps_to_remove(self._present(), self.keep, best, self._damaged)

    def _options(self) -> dict[str, Any]:
        """Return the options that determine which steps stay, as stored in each file."""
        return {"keep": self.keep, "best": self.best}

    def _is_ours(self, step: int) -> bool:
        """Whether a step was saved under the options of this object."""
        if step in self._own:
            return True
        try:
            return self._options().items() <= about_file(self._file(step)).items()
        except FileMissingError:
            return True  # it was removed

    def _remove(self, steps: Iterable[int]) -> None:
        for step in steps:
            path = self._file(step)
            with system_errors(str(path)):
                path.unlink(missing_ok=True)

    # ---- what there is

    def _file(self, step: int) -> Path:
        return self.folder / file_of_step(step)

    def _present(self) -> list[int]:
        return steps_in(self.folder)

    def _whole(self) -> list[int]:
        """Return all steps except those that are known to be damaged."""
        return [step for step in self._present() if step not in self._damaged]

    def _best_of(self, steps: list[int], goal: Goal) -> int | None:
        # Computed from the existing files: removed ones are forgotten.
        self._ranks = {step: self._rank(step, goal) for step in steps}
        return best_step({step: rank for step, (_, rank) in self._ranks.items()})

    def _rank(self, step: int, goal: Goal) -> tuple[Any, float | None]:
        """Return the rank of a step, which is read from its file once."""
        path = self._file(step)
        try:
            status = os.stat(path)
            file = (status.st_ino, status.st_mtime_ns, status.st_size)
            known = self._ranks.get(step)
            if known is not None and known[0] == file:
                return known
            return file, goal.rank(metrics_in(path))
        except FileNotFoundError:
            return None, None


def _raise_unreported(jobs: deque[Future[None]]) -> None:
    """Finish the saves of a folder at the end; an error here is printed."""
    for job in jobs:
        if job.done():
            job.result()


def _is_whole(path: Path) -> bool:
    """Whether all of a file can be read, whatever its tree."""
    try:
        with Container.open(path) as file:
            for name in file.entries:
                file.read(name)
    except FileAccessError:
        raise
    except FileError:
        return False
    return True


def _surplus(checkpoints: Checkpoints, steps: list[int]) -> str:
    shown = ", ".join(map(str, steps[:8])) + (", ..." if len(steps) > 8 else "")
    return explain(
        repr(checkpoints),
        "steps that were saved with these options",
        f"{len(steps)} steps of other options: {shown}",
        hint=[
            "no save removes them; to remove those that these options exclude:",
            "checkpoints.prune()",
        ],
    )


# ---- metrics


def _checked_metrics(metrics: Any, goal: Goal | None, where: str) -> dict[str, Any]:
    if not isinstance(metrics, Mapping):
        raise _no_numbers(where, metrics)
    named = dict(cast("Mapping[Any, Any]", metrics))
    for name, value in named.items():
        if not isinstance(name, str) or not _is_number(value):
            raise _no_numbers(where, {name: value})
    # With a misspelled metric no step would ever be the best.
    if named and goal is not None and goal.metric not in named:
        got = ", ".join(map(repr, named))
        hint = ["give the metric of the best step:", f"metrics={{{goal.metric!r}: ...}}"]
        raise ArgumentError(f"{where}, metrics", f"{goal.metric!r} among them", got, hint=hint)
    return named


def _is_number(value: Any) -> bool:
    """Whether it is one real number, which may have to be waited for."""
    if isinstance(value, (int, float)):
        return True
    if not isinstance(value, (np.generic, np.ndarray, jax.Array)) or value.shape != ():
        return False
    kinds = (jnp.floating, jnp.integer, jnp.bool_)
    return any(jnp.issubdtype(cast("Any", value).dtype, kind) for kind in kinds)


def _number(value: Any) -> int | float:
    return value if isinstance(value, (int, float)) else np.asarray(value).item()


# ---- refusals


def _no_numbers(where: str, got: Any) -> ArgumentError:
    hint = ["give each a name:", '{"loss": loss}']
    return ArgumentError(f"{where}, metrics", "a dict of numbers", describe(got), hint=hint)


def _checked_folder(folder: Any) -> Path:
    try:
        text = cast("object", os.fspath(folder))
    except TypeError:
        text = None
    if not isinstance(text, str) or not text or "\0" in text:
        raise ArgumentError("Checkpoints(folder)", "a folder's path", describe(folder))
    # Otherwise it would be the name of a folder here.
    if is_of_shell(text):
        got = describe(folder)
        raise ArgumentError("Checkpoints(folder)", "a folder's path", got, hint=HINT_SHELL)
    if "://" in text:
        raise ArgumentError(
            "Checkpoints(folder)",
            "a folder of this machine's file system",
            describe(folder),
            hint="mount it; or save with orbax, which writes to object stores",
        )
    # The program may change its working directory while a thread writes into this one.
    return Path(text).absolute()


def _checked_keep(keep: Any) -> int | None:
    if keep is None or (isinstance(keep, int) and not isinstance(keep, bool) and keep >= 1):
        return keep
    expected = "a number from 1 on, or None for all"
    raise ArgumentError("Checkpoints(keep)", expected, describe(keep))


def _checked_best(best: Any) -> str | None:
    if best is None or (isinstance(best, str) and best.removeprefix("-")):
        return best
    raise ArgumentError(
        "Checkpoints(best)",
        "the name of a metric",
        describe(best),
        hint=[
            "the lowest value is the best, or, with a minus, the highest:",
            '"loss"',
            '"-accuracy"',
        ],
    )


def _checked_goal(checkpoints: Checkpoints, goal: Goal | None) -> Goal:
    if goal is None:
        raise ArgumentError(
            f"{checkpoints!r}, step",
            "the number of a step",
            "'best', but the folder was opened without best=",
            hint=["name a metric:", 'pm.Checkpoints(folder, best="loss")'],
        )
    return goal


def _checked_step(checkpoints: Checkpoints, step: Any) -> int:
    if isinstance(step, (int, np.integer)) and not isinstance(step, bool) and step >= 0:
        return int(cast("Any", step))
    # Waiting for a JAX array would defeat the purpose of this class.
    raise ArgumentError(f"{checkpoints!r}, step", "a Python int, 0 or more", describe(step))


def _older_step(checkpoints: Checkpoints, step: int, newest: int) -> ArgumentError:
    return ArgumentError(
        f"{checkpoints!r}.save({step})",
        f"step {newest} or later, because that step is in the folder",
        f"{step}",
        hint=[
            "use another folder for another run; or go back, by removing the later steps:",
            "for later in checkpoints.steps():",
            f"    if later > {step}: checkpoints.path(later).unlink()",
        ],
    )


def _no_step(
    checkpoints: Checkpoints, expected: str, got: str, places: Iterable[str] = ()
) -> FileMissingError:
    return FileMissingError(f"{checkpoints!r} has no {expected}{got}", at=places)


def _damage(checkpoints: Checkpoints, step: int, message: str) -> str:
    return explain(
        f"{checkpoints!r}.restore(like)",
        f"step {step}, the newest one, in a complete file",
        "a damaged file; the step before it is loaded",
        at=[message],
        hint="check the disk, or the tool that copied the file: a kill leaves no damaged file",
    )


def _check_not_donated(checkpoints: Checkpoints, step: int, tree: PyTree, error: Exception) -> None:
    """Raise an error that names the donated arrays, if the loop has donated some."""
    if not any(isinstance(x, jax.Array) and x.is_deleted() for x in jtu.tree_leaves(tree)):
        return
    where = f"{checkpoints!r}.save({step})"
    leaves = describe_tree(tree, where).leaves
    raise DonatedError(
        where,
        "arrays that exist until they are written",
        "arrays that the loop has donated in the meantime",
        at=[
            f"{name}: {describe(leaf)}"
            for name, leaf in leaves.items()
            if isinstance(leaf, jax.Array) and leaf.is_deleted()
        ],
        hint=["let each save copy them first:", "pm.Checkpoints(folder, copy=True)"],
    ) from error


_NAME = re.compile(r"step_(\d{8,})\.safetensors")


def file_of_step(step: int) -> str:
    """Return the file name of a step, so that names sort like their steps.

    Examples:
        >>> file_of_step(1200)
        'step_00001200.safetensors'
    """
    return f"step_{step:08d}.safetensors"


def step_of_file(name: str) -> int | None:
    """Return the step of a file name; None for other files."""
    found = _NAME.fullmatch(name)
    step = None if found is None else int(found[1])
    return step if step is not None and file_of_step(step) == name else None


def steps_in(folder: StrPath) -> list[int]:
    """Return the steps in a folder.

    Args:
        folder: the path of the folder, which need not exist.

    Returns:
        Its steps, newest last.

    Raises:
        FileAccessError: if the folder cannot be read.
    """
    with system_errors(os.fspath(folder)):
        if not os.path.lexists(folder):
            return []
        with os.scandir(folder) as entries:
            found = [step_of_file(entry.name) for entry in entries if entry.is_file()]
    return sorted(step for step in found if step is not None)


class Goal(NamedTuple):
    """The criterion for the best step."""

    metric: str
    sign: int
    """-1 if the highest is the best."""

    @classmethod
    def parse(cls, text: str) -> Goal:
        """Parse `"loss"` or `"-accuracy"`: the best step has the lowest value of this."""
        return cls(text.removeprefix("-"), -1 if text.startswith("-") else 1)

    def rank(self, metrics: Mapping[str, Any]) -> float | None:
        """Return the rank of a step, lowest for the best; None if it is never the best."""
        try:
            value = float(metrics[self.metric])
        except (KeyError, TypeError, ValueError, OverflowError):
            return None
        return None if math.isnan(value) else self.sign * value


def metrics_as_json(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics as JSON, which has neither NaN nor infinity."""
    return {
        name: value if isinstance(value, int) or math.isfinite(value) else repr(value)
        for name, value in metrics.items()
    }


def about_file(path: StrPath) -> Mapping[str, Any]:
    """Return the metadata of a step's file; empty if it is damaged.

    Raises:
        FileAccessError: if the system refuses, or the file does not exist any more.
    """
    try:
        about = read_metadata(path)
    except FileAccessError:
        raise
    except FileError:
        return {}
    return cast("dict[str, Any]", about) if isinstance(about, dict) else {}


def metrics_in(path: StrPath) -> Mapping[str, Any]:
    """Return the metrics of a step's file; empty if it is damaged, or has none.

    Raises:
        FileAccessError: if the system refuses, or the file does not exist any more; then the
            rank of the step is unknown.
    """
    metrics = about_file(path).get("metrics")
    return cast("dict[str, Any]", metrics) if isinstance(metrics, dict) else {}


def best_step(ranks: Mapping[int, float | None]) -> int | None:
    """Return the best of several steps; of equal ones the last, which trained the longest."""
    ranked = [(rank, -step) for step, rank in ranks.items() if rank is not None]
    return -min(ranked)[1] if ranked else None


def steps_to_remove(
    steps: Iterable[int], keep: int, best: int | None, damaged: Iterable[int] = ()
) -> list[int]:
    """Return the steps to remove.

    Args:
        steps: all existing steps.
        keep: how many of the newest ones stay.
        best: one more that stays.
        damaged: the steps that cannot be read; they do not count.

    Returns:
        Steps that are older than all of the newest ones that stay.

    Examples:
        >>> steps_to_remove([100, 200, 300, 400], 2, best=100)
        [200]
    """
    steps = sorted(steps)
    whole = sorted(set(steps).difference(damaged))
    newest = whole[-keep:]
    return [step for step in steps if newest and step < newest[0] and step != best]
