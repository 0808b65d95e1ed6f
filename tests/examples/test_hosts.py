"""Several processes train one model: stopped and resumed on another number, the losses agree."""

import os
import random
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.helpers.examples import FOLDER

pytest.importorskip("orbax.checkpoint", reason="the extra `orbax` is not installed")

# Each process imports JAX and orbax, and traces and compiles two programs: ten seconds.
pytestmark = pytest.mark.slow

SMALL = ["--size", "16", "--depth", "2"]
LIMIT = 300


@pytest.fixture(scope="module", autouse=True)
def _compiled_fast(tmp_path_factory):
    """Programs that are compiled without optimizations, once for all processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("programs")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        yield


def command(folder, *options):
    """The program, for a small model."""
    return [sys.executable, str(FOLDER / "hosts.py"), str(folder), *SMALL, *map(str, options)]


def losses(folder, processes, steps, every=2):
    """The losses that a run prints, by step."""
    options = ("--processes", processes, "--steps", steps, "--every", every)
    done = subprocess.run(
        command(folder, *options), capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {int(n): float(loss) for n, loss in re.findall(r"step +(\d+) +loss (\S+)", done.stdout)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The losses of a run on one process, never stopped."""
    return losses(tmp_path_factory.mktemp("whole"), processes=1, steps=6)


def test_two_processes_are_stopped_and_resumed_on_one_and_on_four(whole, tmp_path):
    """Each part has the losses of the whole run, up to rounding."""
    parts = [losses(tmp_path, n, steps) for n, steps in ((2, 2), (1, 4), (4, 6))]
    assert [sorted(part) for part in parts] == [[1, 2], [3, 4], [5, 6]]
    for part in parts:
        expected = [whole[step] for step in part]
        np.testing.assert_allclose([*part.values()], expected, rtol=1e-5)


def test_a_run_that_is_killed_while_it_saves_resumes_from_a_whole_checkpoint(whole, tmp_path):
    """At any moment: the steps that follow have the losses of the whole run."""
    draw, seen = random.Random(0), dict[int, float]()
    for _ in range(3):
        options = ("--processes", 1, "--steps", 6, "--every", 1)
        with subprocess.Popen(
            command(tmp_path, *options), stdout=subprocess.PIPE, text=True, start_new_session=True
        ) as process:
            for line in process.stdout:
                found = re.search(r"step +(\d+) +loss (\S+)", line)
                if found:
                    seen[int(found[1])] = float(found[2])
                    time.sleep(draw.random() * 0.2)
                    os.killpg(process.pid, signal.SIGKILL)
                    break
        if not found:
            break
    last = losses(tmp_path, processes=1, steps=7, every=1)
    assert max(last) == 7
    for step in seen.keys() & whole.keys():
        np.testing.assert_allclose(seen[step], whole[step], rtol=1e-5)


def both(folders, **options):
    """Two processes started by hand, each with its own folder; their statuses and errors."""
    more = [text for name, value in options.items() for text in (f"--{name}", value)]
    port = random.Random().randrange(20_000, 60_000)
    shared = ["--coordinator", f"localhost:{port}", "--count", 2, "--devices", 2, *more]
    every = [
        subprocess.Popen(
            command(folder, *shared, "--process", i), stderr=subprocess.PIPE, text=True
        )
        for i, folder in enumerate(folders)
    ]
    return [(each.communicate(timeout=LIMIT)[1], each.returncode) for each in every]


def test_a_folder_that_is_not_shared_is_refused(tmp_path):
    """Nothing is trained: each process names the one that does not see the folder."""
    for text, status in both([tmp_path / "one", tmp_path / "two"]):
        assert status == 1
        assert re.search("is not shared: process 1 does not see it", text)
    assert [*tmp_path.rglob("*")] == [tmp_path / "one", tmp_path / "one" / "shared"]


def test_a_process_that_waits_for_another_in_vain_ends(tmp_path):
    """After the time that it was given, by JAX's own error; nothing is written."""
    ((text, status),) = both([tmp_path], timeout=3)
    assert status != 0
    assert re.search("DEADLINE_EXCEEDED", text), text[-3000:]
    assert [*tmp_path.iterdir()] == []


def test_the_launcher_names_the_process_that_failed(tmp_path):
    """A file stands where the folder should be."""
    (tmp_path / "file").touch()
    options = command(tmp_path / "file", "--processes", 2)
    done = subprocess.run(options, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode != 0
    assert re.search("process 0 ended with status", done.stderr)
