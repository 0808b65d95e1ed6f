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


def test_what_nobody_writes_is_removed(tmp_path):
    """It was not modified for a while, and no process has it open."""
    make(tmp_path)

    assert remaining(tmp_path) == []


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors.saving-0123456789abcdef",
        "step_9.safetensors.saving-0123456789abcdef",
        NAME + ".txt",
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
