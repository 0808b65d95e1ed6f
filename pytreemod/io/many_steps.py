"""`Checkpoints`: a folder with the steps of a training run, written while it goes on.

A save has two halves. Before the loop goes on, a snapshot of the tree is taken, for which nothing
is waited for and nothing leaves the device. The rest, which takes as long as the disk does, is done
by a thread: it fetches each array, writes the file under another name, renames it in one step, and
only then removes what is too old. So a process can be killed at any moment, and the folder has
whole files. It has nothing else but files of steps, each with its own metrics: no list of them can
be wrong.
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
    """The steps of a training run in a folder, saved in the background.

    Each step is one file, which [`save`][pytreemod.save] writes, and [`load`][pytreemod.load]
    reads, too. There is nothing else in the folder: it can be copied, and files can be removed.

    What is saved is what the tree was when `save` was called, whatever the loop does next: it may
    donate the arrays, write into arrays of NumPy, use a State up. For this, arrays are copied on
    their devices; until the file is written, they take their memory twice. One save is under way
    at a time: the next one waits for it, where the disk is slower than the loop.

    A save removes what it displaces, and no more. Steps that `keep` and `best` would not keep, but
    that were saved under other ones, stay, and the first save warns of them; `prune` removes them.

    An error in the background is raised by the next call of whatever method. At the end of the
    program a save under way is finished, and an error that nobody has asked for is printed.

    **Laws.** `restore(like) == tree` after `save(step, tree)`. Whenever the process is killed,
    every file in the folder is whole, and of the steps whose save had ended the newest `keep` are
    there.

    Args:
        folder: it is made if it is not there. One run, one folder.
        keep: how many of the newest steps stay, at least 1; None for all.
        best: a metric; the step in which it was lowest stays beside the newest. `"-accuracy"` is
            for the highest. A step whose metric is NaN is never the best.
        copy: whether arrays are copied on their devices. If not, a loop may not donate them before
            they are written; if it does, that is an error at the next call.

    Raises:
        ArgumentError: an argument is unusable.
        FileAccessError: the folder cannot be made or read.

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
    """Where the files are."""
    keep: int | None
    """How many of the newest steps stay."""
    best: str | None
    """The metric by which one more stays."""

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
        with system_errors(str(self.folder), "a folder"):
            self.folder.mkdir(parents=True, exist_ok=True)
        self._newest = max(steps_in(self.folder), default=-1)
        self._damaged: set[int] = set()
        self._has_warned = False
        self._structure: Any = None
        # By step, with what tells one file from another that has taken its place.
        self._ranks: dict[int, tuple[Any, float | None]] = {}
        # One: two saves at once would end in either order.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="Checkpoints")
        self._jobs: deque[Future[None]] = deque()
        # A handler of signals may save, too, and in the middle of a save.
        self._lock = threading.RLock()
        weakref.finalize(self, _raise_what_nobody_heard, self._jobs)

    def save(self, step: int, tree: PyTree, metrics: Mapping[str, Any] | None = None) -> None:
        """Save a step in the background.

        The call waits for the save before it, if that is still under way, and for no computation.

        Args:
            step: a number; none that is older than the newest one in the folder, for then `restore`
                would go on from another run. The newest one itself is replaced.
            tree: all that is needed to go on, such as the model, the State, the optimizer's state,
                random keys, the step.
            metrics: numbers by name; they may be arrays that are still being computed.

        Raises:
            ArgumentError: the step or the metrics are unusable.
            FileError: an array is traced, was donated, or other hosts alone have parts of it; or
                the save before has failed.
            DonatedError: the loop has donated what the save before had not written yet.
        """
        step = _checked_step(self, step)
        where = f"{self!r}.save({step})"
        metrics = _checked_metrics({} if metrics is None else metrics, self._goal, where)
        with self._lock:
            self.wait()
            if step < self._newest:
                # It is asked of the folder only then: a loop does not wait for disks.
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
                # The program is ending, and no thread begins any more.
                self._write(step, *taken)

    def restore(self, like: _T, step: _Which = None) -> _T:
        """Load a step.

        Args:
            like: a tree of the structure that was saved, as [`load`][pytreemod.load] takes it.
            step: a number; `"best"`; or None for the newest whole one. A file that is damaged,
                which a kill cannot bring about, is passed over with a `DamagedFileWarning` then.

        Returns:
            `like` with the values of the file. Which step it is of, the tree should tell.

        Raises:
            FileMissingError: there is no such step.
            FileError: the file is of another tree; it is damaged, and was asked for; or none is
                whole.
        """
        if step is not None:
            return load(self.path(step), like)
        self.wait()
        passed: list[str] = []
        while True:
            chosen = max(self._whole(), default=None)
            if chosen is None:
                raise _no_step(self, "a step to restore", "none that is whole", passed)
            try:
                return load(self._file(chosen), like)
            except FileMissingError:
                continue  # another process has saved newer ones meanwhile
            except FileAccessError:
                raise
            except FileError as error:
                # A whole file that does not fit is a mistake of the caller's: an older one would
                # hide it.
                if _is_whole(self._file(chosen)):
                    raise
                passed.append(str(error).splitlines()[0])
                self._damaged.add(chosen)
                warn(DamagedFileWarning, _damage(self, chosen, passed[-1]))

    def steps(self) -> list[int]:
        """The steps that are in the folder, the newest last, once the save under way has ended.

        Raises:
            FileError: the last save has failed.
        """
        self.wait()
        return self._present()

    def path(self, step: _Which = None) -> Path:
        """The file of a step, for what else can be done with it (`load`, `read_metadata`, ...).

        Args:
            step: a number; `"best"`; or None for the newest one.

        Returns:
            Its path.

        Raises:
            FileMissingError: there is no such step.
            ArgumentError: which step is the best was not said when the folder was opened.
        """
        self.wait()
        steps = self._present()
        expected = "a step" if step is None else f"step {step}"
        if step is None:
            chosen = steps[-1] if steps else None
        elif step == "best":
            goal = _checked_goal(self, self._goal)
            chosen = self._best_of(self._whole(), goal)
            expected = f"a step whose file tells its {goal.metric!r}"
        else:
            chosen = _checked_step(self, step)
        if chosen not in steps:
            raise _no_step(self, expected, f"the steps {steps}" if steps else "none")
        return self._file(chosen)

    def prune(self) -> list[int]:
        """Remove the steps that `keep` and `best` do not keep, whatever they were saved under.

        Returns:
            The steps that were removed.

        Raises:
            FileError: the last save has failed.
            FileAccessError: a file cannot be removed.

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
        """Wait until what was saved is on the disk.

        Raises:
            FileError: or whatever else was wrong with the last save.
        """
        with self._lock:
            while self._jobs:
                job = self._jobs[0]
                error = job.exception()
                # A handler of signals may have waited for it meanwhile.
                with suppress(ValueError):
                    self._jobs.remove(job)
                if error is not None:
                    try:
                        raise error
                    finally:
                        # Its traceback has the arrays, and this frame is part of it.
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
            error.add_note(f"What was saved last is lost, too: {lost}")

    def __repr__(self) -> str:
        best = "" if self.best is None else f", best={self.best!r}"
        return f"Checkpoints({str(self.folder)!r}, keep={self.keep}{best})"

    def _check_can_be_described(self, tree: PyTree, where: str) -> None:
        """Tell a mistake where it is made, and not one save later; once for each structure."""
        structure = jtu.tree_structure(tree)
        if self._structure is None or structure != self._structure:
            describe_tree(tree, where)
            self._structure = structure

    def _warn_of_others(self) -> None:
        """Name, once, the steps that stay because they were saved under other options."""
        if self._has_warned:
            return
        self._has_warned = True
        others = [step for step in self._surplus() if not self._is_ours(step)]
        if others:
            warn(SurplusStepsWarning, _surplus(self, others))

    # ---- in the background

    def _write(self, step: int, tree: PyTree, metrics: dict[str, Any]) -> None:
        try:
            remove_leftovers(self.folder, lambda name: step_of_file(name) is not None)
            numbers = {name: _number(value) for name, value in metrics.items()}
            # In the file itself: a folder that was copied, or thinned by hand, still tells its
            # best.
            about = {"step": step, "metrics": metrics_as_json(numbers), **self._options()}
            kept = {*self._present()}.difference(self._surplus())
            save(self._file(step), tree, about, durable=True)
        except Exception as error:
            error.add_note(f"It was in the background: step {step} of {self!r} is not saved.")
            _check_not_donated(self, step, tree, error)
            raise
        self._damaged.discard(step)
        # Last: a kill in between leaves a file too many, and never one too few.
        # What this save displaces; and what a killed process of the same run has left.
        self._remove(old for old in self._surplus() if old in kept or self._is_ours(old))

    def _surplus(self) -> list[int]:
        """The steps that are there and are neither new enough nor the best."""
        if self.keep is None:
            return []
        best = None if self._goal is None else self._best_of(self._whole(), self._goal)
        return steps_to_remove(self._present(), self.keep, best, self._damaged)

    def _options(self) -> dict[str, Any]:
        """What says which steps stay, as each file has it."""
        return {"keep": self.keep, "best": self.best}

    def _is_ours(self, step: int) -> bool:
        """Whether a step was saved under the options of this object."""
        try:
            return self._options().items() <= about_file(self._file(step)).items()
        except FileMissingError:
            return True  # it is gone

    def _remove(self, steps: Iterable[int]) -> None:
        for step in steps:
            path = self._file(step)
            with system_errors(str(path), "a file that can be removed"):
                path.unlink(missing_ok=True)

    # ---- what there is

    def _file(self, step: int) -> Path:
        return self.folder / file_of_step(step)

    def _present(self) -> list[int]:
        return steps_in(self.folder)

    def _whole(self) -> list[int]:
        """All but those that are known to be damaged."""
        return [step for step in self._present() if step not in self._damaged]

    def _best_of(self, steps: list[int], goal: Goal) -> int | None:
        # Anew from what is there: what was removed is forgotten.
        self._ranks = {step: self._rank(step, goal) for step in steps}
        return best_step({step: rank for step, (_, rank) in self._ranks.items()})

    def _rank(self, step: int, goal: Goal) -> tuple[Any, float | None]:
        """The rank of a step, which is read from its file once."""
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


def _raise_what_nobody_heard(jobs: deque[Future[None]]) -> None:
    """The last thing to be done for a folder; an error that comes out of it is printed."""
    for job in jobs:
        if job.done():
            job.result()


def _is_whole(path: Path) -> bool:
    """Whether all of a file can be read; what it is of is another question."""
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
        f"{len(steps)} that they would not keep: {shown}",
        hint=["they stay; to remove them:", "checkpoints.prune()"],
    )


# ---- metrics


def _checked_metrics(metrics: Any, goal: Goal | None, where: str) -> dict[str, Any]:
    if not isinstance(metrics, Mapping):
        raise _no_numbers(where, metrics)
    named = dict(cast("Mapping[Any, Any]", metrics))
    for name, value in named.items():
        if not isinstance(name, str) or not _is_number(value):
            raise _no_numbers(where, {name: value})
    # One that is misspelt would let no step ever be the best.
    if named and goal is not None and goal.metric not in named:
        got = ", ".join(map(repr, named))
        hint = ["by which the best step is known:", f"metrics={{{goal.metric!r}: ...}}"]
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
    # Else it would be the name of a folder, here.
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
    # The program may go to another folder while a thread writes into this one.
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
        hint=["of which the lowest is the best, or the highest:", '"loss"', '"-accuracy"'],
    )


def _checked_goal(checkpoints: Checkpoints, goal: Goal | None) -> Goal:
    if goal is None:
        raise ArgumentError(
            f"{checkpoints!r}, step",
            "the number of a step",
            "'best', where nothing says which one that is",
            hint=["name a metric:", 'pm.Checkpoints(folder, best="loss")'],
        )
    return goal


def _checked_step(checkpoints: Checkpoints, step: Any) -> int:
    if isinstance(step, (int, np.integer)) and not isinstance(step, bool) and step >= 0:
        return int(cast("Any", step))
    # An array of JAX would have to be waited for, which is what all this is to avoid.
    raise ArgumentError(f"{checkpoints!r}, step", "an int of Python's, 0 or more", describe(step))


def _older_step(checkpoints: Checkpoints, step: int, newest: int) -> ArgumentError:
    return ArgumentError(
        f"{checkpoints!r}.save({step})",
        f"step {newest} or later, for that one is in the folder",
        f"{step}",
        hint=[
            "take another folder for another run; or go back by removing what came later:",
            "for later in checkpoints.steps():",
            f"    if later > {step}: checkpoints.path(later).unlink()",
        ],
    )


def _no_step(
    checkpoints: Checkpoints, expected: str, got: str, places: Iterable[str] = ()
) -> FileMissingError:
    hint = ["if there need not be one, ask first:", "if checkpoints.steps(): ..."]
    return FileMissingError(repr(checkpoints), expected, got, places=places, hint=hint)


def _damage(checkpoints: Checkpoints, step: int, told: str) -> str:
    return explain(
        f"{checkpoints!r}.restore(like)",
        f"step {step}, the newest one, whole",
        "one that is damaged; the one before is taken",
        places=[told],
        hint="look after the disk, or what copied the file: a killed save leaves none like it",
    )


def _check_not_donated(checkpoints: Checkpoints, step: int, tree: PyTree, error: Exception) -> None:
    """Say of an error that the loop has brought it about, if it has."""
    if not any(isinstance(x, jax.Array) and x.is_deleted() for x in jtu.tree_leaves(tree)):
        return
    where = f"{checkpoints!r}.save({step})"
    leaves = describe_tree(tree, where).leaves
    raise DonatedError(
        where,
        "arrays that are there until they are written",
        "some that the loop has donated meanwhile",
        places=[
            f"{name}: {describe(leaf)}"
            for name, leaf in leaves.items()
            if isinstance(leaf, jax.Array) and leaf.is_deleted()
        ],
        hint=["let each save copy them first:", "pm.Checkpoints(folder, copy=True)"],
    ) from error


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
