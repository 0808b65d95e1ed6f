"""Several processes train one model: stopped, killed, and resumed on another number of them."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.helpers.examples import FOLDER

pytest.importorskip("orbax.checkpoint", reason="the extra `orbax` is not installed")

# Each process imports JAX and orbax, and traces and compiles two programs: five to nine seconds.
pytestmark = pytest.mark.slow

SMALL = ["--size", "16", "--depth", "2"]
LIMIT = 300
LAST = 80


@pytest.fixture(scope="module", autouse=True)
def _compiled_fast():
    """Without optimizations. (Processes find programs in the cache that conftest.py has made.)"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        yield


def start(folder, *options):
    """The program, for a small model, in a group of processes of its own."""
    command = [sys.executable, str(FOLDER / "hosts.py"), str(folder), *SMALL, *map(str, options)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, start_new_session=True, **pipes)


def by_hand(folders, *options, devices):
    """A process for each folder, started without the launcher."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        where = ["--coordinator", f"localhost:{free.getsockname()[1]}", "--devices", devices]
    return [start(each, *where, "--process", i, *options) for i, each in enumerate(folders)]


def alone(folder, *options):
    """One process with all devices."""
    (process,) = by_hand([folder], "--count", 1, "--every", 1, *options, devices=4)
    return process


def ended(process):
    """The status of a process, its losses by step, and its errors; a late one is killed."""
    try:
        out, errors = process.communicate(timeout=LIMIT)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    found = re.findall(r"step +(\d+) +loss (\S+)", out)
    return process.returncode, {int(n): float(loss) for n, loss in found}, errors


def test_a_run_is_killed_while_it_saves_and_resumed_on_any_number_of_processes(tmp_path):
    """Every loss is that of a run on one process that was never stopped, up to rounding."""
    status, whole, errors = ended(alone(tmp_path / "whole", "--steps", LAST))
    assert status == 0, errors

    parts = [ended(start(tmp_path / "run", "--processes", 2, "--steps", 2, "--every", 2))]
    draw = random.Random(0)
    for _ in range(10):
        killed = alone(tmp_path / "run", "--steps", LAST - 1)
        line = next((line for line in killed.stdout if line.startswith("step")), "")
        time.sleep(draw.random() * 0.2)
        os.killpg(killed.pid, signal.SIGKILL)
        _, more, errors = ended(killed)
        assert line, errors
        parts.append((0, {int(line.split()[1]): float(line.split()[3]), **more}, errors))
    parts.append(ended(start(tmp_path / "run", "--processes", 4, "--steps", LAST)))

    assert [*parts[0][1]] == [1, 2]
    assert [*parts[-1][1]][-1] == LAST
    for status, losses, errors in parts:
        assert status == 0, errors
        expected = [whole[step] for step in losses]
        np.testing.assert_allclose([*losses.values()], expected, rtol=1e-5)


def test_a_folder_that_is_not_shared_is_refused(tmp_path):
    """Nothing is trained: each process names the one that does not see the folder."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for process in by_hand(folders, "--count", 2, devices=2):
        status, losses, errors = ended(process)
        assert (status, losses) == (1, {})
        assert re.search("is not shared: process 1 does not see it", errors)
    assert [*tmp_path.rglob("*")] == [tmp_path / "one", tmp_path / "one" / "shared"]


def test_a_process_that_waits_for_another_in_vain_ends(tmp_path):
    """After the time that it was given, by JAX's own error; nothing is written."""
    (process,) = by_hand([tmp_path], "--count", 2, "--timeout", 3, devices=2)
    status, _, errors = ended(process)
    assert status != 0
    assert re.search("DEADLINE_EXCEEDED", errors), errors
    assert [*tmp_path.iterdir()] == []


def test_the_launcher_names_the_process_that_failed(tmp_path):
    """A file stands where the folder should be."""
    (tmp_path / "file").touch()
    status, _, errors = ended(start(tmp_path / "file", "--processes", 2))
    assert status != 0
    assert re.search("process [01] ended with status", errors)
