"""The example that can be killed ends with the same numbers, bit for bit, wherever it is killed."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.helpers.examples import FOLDER

# Run with the slow ones: each of these programs takes seconds to compile.
pytestmark = pytest.mark.slow

pytest.importorskip("sklearn", reason="examples/checkpoint.py reads scikit-learn's digits")


def last_file(folder):
    """The content of the last checkpoint, to the last bit."""
    return max(folder.glob("step_*.safetensors")).read_bytes()


def test_a_run_that_fails_goes_on(program, tmp_path, monkeypatch, capsys):
    """In the middle of an epoch, and between two saves."""
    advance = program.advance

    def fail_once(run, data):
        if run.step == 33:
            monkeypatch.setattr(program, "advance", advance)
            raise KeyboardInterrupt("as by a user")
        return advance(run, data)

    options = ["--epochs", "4", "--every", "5"]
    accuracy = program.main([str(tmp_path / "whole"), *options])
    assert accuracy >= 0.85
    monkeypatch.setattr(program, "advance", fail_once)
    with pytest.raises(KeyboardInterrupt, match="as by a user"):
        program.main([str(tmp_path / "broken"), *options])
    assert program.main([str(tmp_path / "broken"), *options]) == accuracy

    assert "goes on from step 30" in capsys.readouterr().out
    assert last_file(tmp_path / "broken") == last_file(tmp_path / "whole")


@pytest.mark.slow
def test_a_run_that_is_killed_during_a_save_goes_on(tmp_path):
    """The same command goes on, from the last checkpoint that was whole."""

    def start(folder):
        command = [sys.executable, FOLDER / "checkpoint.py", tmp_path / folder]
        return subprocess.Popen(
            [*command, "--epochs", "10", "--every", "1"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(FOLDER.parent)},
        )

    def parts():
        return set((tmp_path / "killed").glob("step_*.tmp"))

    def newest():
        return max([int(path.name[5:13]) for path in (tmp_path / "killed").glob("step_*s")] or [0])

    kills = 0
    while kills < 2:
        running, first, before = start("killed"), newest(), parts()
        while newest() < first + 20 or not parts() - before:
            assert running.poll() is None, "it has ended before it was killed in a save"
            time.sleep(0.0002)
        running.send_signal(signal.SIGKILL)
        running.communicate()
        kills += bool(parts() - before)
    told, _ = start("killed").communicate()
    start("whole").communicate()

    assert re.search(r"goes on from step \d\d+\ntest accuracy \d\d\.\d\d% after 220 steps", told)
    assert last_file(tmp_path / "killed") == last_file(tmp_path / "whole")
