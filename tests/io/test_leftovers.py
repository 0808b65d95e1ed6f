"""Leftovers of killed processes in a folder of steps, and files that others are writing."""

import fcntl
import os
import time

import jax.numpy as jnp
import pytest

import pytreemod as pm

NAME = "step_00000009.safetensors.saving-0123456789abcdef"
SAVED = "step_00000001.safetensors"


def make(folder, name=NAME, age=3600.0):
    """A part of a file, which was left alone for so many seconds."""
    path = folder / name
    path.write_bytes(b"a part")
    os.utime(path, (time.time() - age,) * 2)
    return path


def remaining(folder):
    """The files after a save, beside the saved step."""
    with pm.Checkpoints(folder) as checkpoints:
        checkpoints.save(1, {"x": jnp.ones(2)})
    assert (folder / SAVED).exists()
    return sorted({path.name for path in folder.iterdir()} - {SAVED})


def no_locks(*args):
    """Not every disk has them."""
    raise OSError("no locks available")


def test_what_nobody_writes_is_removed(tmp_path):
    """It was not modified for a while, and no process has it open."""
    make(tmp_path)

    assert remaining(tmp_path) == []


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors.saving-0123456789abcdef",
        "step_00000009.safetensors.saving-",
        "step_00000009.safetensors.saving-0123",
        "step_9.safetensors.saving-0123456789abcdef",
        NAME + ".txt",
        NAME + "0",
    ],
)
def test_other_files_stay(tmp_path, name):
    """Those of other programs, and names that only look similar."""
    make(tmp_path, name)

    assert remaining(tmp_path) == [name]


def test_a_file_that_was_just_made_stays(tmp_path):
    """The process may not have locked it yet."""
    make(tmp_path, age=1)

    assert remaining(tmp_path) == [NAME]


def test_a_file_that_somebody_holds_stays(tmp_path):
    """As long as it is open, until the process ends."""
    descriptor = os.open(make(tmp_path), os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert remaining(tmp_path) == [NAME]

    os.close(descriptor)
    assert remaining(tmp_path) == []


def test_who_writes_a_file_holds_it(tmp_path, monkeypatch):
    """Another save finds the lock, and keeps the file."""
    real, seen = os.posix_fallocate, []

    def reserve(*args):
        if not seen:
            seen.extend(tmp_path.iterdir())
            os.utime(seen[0], (0, 0))
            assert remaining(tmp_path) == [seen[0].name]
        real(*args)

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    with pm.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, {"x": jnp.ones(2)})

    assert len(seen) == 1


def test_without_locks_age_decides(tmp_path, monkeypatch):
    """A file older than a day is a leftover; without locks a save writes the same."""
    make(tmp_path)
    make(tmp_path, NAME.replace("9.", "8."), age=2 * 24 * 3600)
    monkeypatch.setattr(fcntl, "flock", no_locks)

    assert remaining(tmp_path) == [NAME]


def test_what_another_process_removes_first_is_not_missed(tmp_path, monkeypatch):
    """Nor is a file that cannot be removed: the others are."""
    first, second = make(tmp_path), make(tmp_path, NAME.replace("9.", "8."))
    unlink = os.unlink

    def late(path, *args, **options):
        if path == str(first):
            raise FileNotFoundError(path)
        unlink(path, *args, **options)

    monkeypatch.setattr(os, "unlink", late)

    assert remaining(tmp_path) == [first.name]
    assert not second.exists()


def test_what_was_looked_at_is_closed(tmp_path):
    """A run looks with each save, for days."""
    descriptor = os.open(make(tmp_path), os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    remaining(tmp_path)
    before = len(os.listdir("/dev/fd"))
    for _ in range(5):
        remaining(tmp_path)

    assert len(os.listdir("/dev/fd")) <= before
    os.close(descriptor)
