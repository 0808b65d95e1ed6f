"""A folder of steps, written while the loop goes on, and whole whenever the process is killed."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pytreemod as pm
from pytreemod import Checkpoints, load, nn, read_metadata
from pytreemod.errors import ArgumentError, FileError
from tests.helpers.comparing import assert_same


def tree_of(step):
    return {"step": step, "weight": jnp.full(3, float(step)), "seen": np.arange(step, step + 3)}


LIKE = tree_of(0)


@pytest.fixture
def gate(monkeypatch):
    """Other threads wait for it before they open a file."""
    gate, real = threading.Event(), open

    def open_late(*args, **options):
        assert threading.current_thread() is threading.main_thread() or gate.wait(60)
        return real(*args, **options)

    monkeypatch.setattr("builtins.open", open_late)
    yield gate
    gate.set()


def test_a_whole_run_comes_back(tmp_path):
    """A model, its State, the optimizer's state, keys and numbers, as `load` reads them."""

    def make(seed):
        def layers(key):
            noise = nn.Dropout(0.5, stream=pm.RngStream())
            return nn.Sequential([nn.Linear(2, 2, key=key), nn.BatchNorm(2), noise])

        model, state = pm.make_with_state(layers)(jax.random.key(seed))
        opt_state = optax.adam(1e-3).init(pm.trainable(model)[0])
        keys = jax.random.split(jax.random.key(seed), 2)
        state = state.seed(jax.random.key(seed))
        arrays = [jnp.asarray(2.0 + seed) * 1, jnp.ones(3, "int4"), jnp.ones(3, "bfloat16")]
        return {"nets": [model, state], "opt": opt_state, "keys": keys, "arrays": arrays}

    with Checkpoints(tmp_path / "new" / "folder") as checkpoints:
        checkpoints.save(7, make(1))

    assert_same(checkpoints.restore(make(0)), make(1))
    assert_same(Checkpoints(tmp_path / "new" / "folder").restore(make(0), 7), make(1))
    assert_same(load(tmp_path / "new" / "folder" / "step_00000007.safetensors", make(0)), make(1))


def test_the_tree_is_saved_as_it_was(tmp_path, gate):
    """Whatever the loop does before it is written: donate, write into arrays, use the State."""

    @pm.filter_jit(donate="all")
    def step(weight):
        return weight + 1

    layer, state = pm.make_with_state(nn.BatchNorm)(2)
    tree, log = {**tree_of(1), "state": state}, [np.zeros(1)]
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, tree, {"loss": jnp.float32(0.5), "log": log})
        assert not list(tmp_path.iterdir())
        step(tree["weight"])
        assert tree["weight"].is_deleted()
        layer(jnp.ones((4, 2)), state)
        tree["seen"][:] = 99
        log[0][:] = 99
        log.append(2)
        gate.set()

    new = pm.make_with_state(nn.BatchNorm)(2)[1]
    assert_same(checkpoints.restore({**LIKE, "state": new}), {**tree_of(1), "state": new})
    assert read_metadata(checkpoints.path()) == {"loss": 0.5, "log": [[0.0]]}


def test_the_next_save_waits_for_the_one_before(tmp_path, gate):
    """So no more than one copy of the arrays is in memory."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, tree_of(1))
    second = threading.Thread(target=checkpoints.save, args=(2, tree_of(2)))
    second.start()
    second.join(0.1)
    assert second.is_alive()
    gate.set()
    second.join()

    assert checkpoints.steps() == [1, 2]


BEST = {
    "lowest": ("loss", [3, 0.5, 0.75, 2, 1], 1),
    "highest": ("-loss", [0, 3, 0.5, 0.75, 2], 1),
    "NaN": ("loss", [float("nan"), float("inf"), float("nan"), float("nan"), 1e9], 4),
    "ties": ("loss", [1, 1, 2, 2, 2], 1),
    "kinds": ("loss", [True, jnp.float32(3), np.float32(2), jnp.bfloat16(0.5), 1], 3),
    "text": ("loss", ["a", None, 5, [1], {}], 2),
}


@pytest.mark.parametrize(("best", "losses", "expected"), BEST.values(), ids=BEST)
def test_the_newest_stay_and_the_best(tmp_path, best, losses, expected):
    """A step without the number is never the best; of equal ones the newest is."""
    with Checkpoints(tmp_path, keep=2, best=best) as checkpoints:
        for step, loss in enumerate(losses):
            checkpoints.save(step, tree_of(step), {"loss": loss, "other": -step})
            checkpoints.save(step, tree_of(step), {"loss": loss})

    assert checkpoints.steps() == sorted({expected, 3, 4})
    again = Checkpoints(tmp_path, best=best)
    assert_same(again.restore(LIKE, "best"), tree_of(expected))
    assert_same(again.restore(LIKE), tree_of(4))
    assert_same(again.restore(LIKE, 3), tree_of(3))
    assert again.path("best") == tmp_path / f"step_{expected:08d}.safetensors"


def test_a_run_goes_on_from_the_newest_step(tmp_path):
    """It is replaced; an older one would be mixed with it, and is refused."""
    with Checkpoints(tmp_path, keep=None) as checkpoints:
        for step in (3, 20, 3 * 10**9, 3 * 10**9):
            checkpoints.save(step, tree_of(step % 7))
    for name in (
        "step_99999999.txt",
        "step_-0000001.safetensors",
        "step_4000000000.safetensors.tmp",
    ):
        (tmp_path / name).touch()
    (tmp_path / "step_0004000000000.safetensors").touch()

    again = Checkpoints(tmp_path)
    with pytest.raises(ArgumentError, match=r"step 4 is below( step)? 3000000000"):
        again.save(4, LIKE)
    assert again.steps() == [3, 20, 3 * 10**9]
    assert_same(again.restore(LIKE), tree_of(3 * 10**9 % 7))


@pytest.mark.parametrize("which", [3, 0, "best", "worst"])
def test_a_step_that_is_not_there_is_told(tmp_path, which):
    """Nothing else is restored in its place."""
    with Checkpoints(tmp_path, best="loss") as checkpoints:
        checkpoints.save(1, LIKE)
    with pytest.raises(FileNotFoundError, match=rf"has the steps \[1\]; asked for {which}"):
        checkpoints.path(which)


def test_what_would_lose_every_step_is_refused(tmp_path):
    """No step would stay, or have a file that is found."""
    with pytest.raises(ArgumentError, match="keep"):
        Checkpoints(tmp_path, keep=0)
    with pytest.raises(ArgumentError, match="-1"):
        Checkpoints(tmp_path).save(-1, LIKE)


@pytest.mark.parametrize("name", ["save", "wait", "steps", "restore", "__exit__"])
def test_an_error_of_the_thread_comes_out_at_the_next_call(tmp_path, name):
    """Once; the folder goes on with the next step."""
    arguments = {"save": (3, LIKE), "restore": (LIKE,), "__exit__": (None, None, None)}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(2, {"a": object()})

    with pytest.raises(FileError, match="at a: "):
        getattr(checkpoints, name)(*arguments.get(name, ()))
    checkpoints.save(1, tree_of(1))
    assert_same(checkpoints.restore(LIKE), tree_of(1))


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    """With Python's own errors: it is a file, or is gone."""
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="file"):
        Checkpoints(tmp_path / "file")
    checkpoints = Checkpoints(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    checkpoints.save(1, tree_of(1))
    with pytest.raises(FileNotFoundError, match="gone"):
        checkpoints.wait()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into a read-only folder")
def test_a_read_only_folder_can_be_read(tmp_path):
    """A save is an error of Python's own."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, tree_of(1))
    checkpoints.wait()
    tmp_path.chmod(0o500)
    checkpoints.save(2, LIKE)
    with pytest.raises(PermissionError, match="step_00000002"):
        checkpoints.wait()
    assert_same(Checkpoints(tmp_path).restore(LIKE), tree_of(1))


PROGRAM = """
import os, random, signal, sys, time
import numpy as np
from pytreemod import Checkpoints
from pytreemod.errors import ArgumentError

folder, kills = sys.argv[1], int(sys.argv[2])

def tree(step):
    return {f"w{i}": np.full(100_000, step) for i in range(5)}

def child(first, stride, last):
    # It starts faster than a new process.
    number = os.fork()
    if number == 0:
        with Checkpoints(folder, keep=2, best="loss") as checkpoints:
            for step in range(first, last, stride):
                try:
                    checkpoints.save(step, tree(step), {"loss": step % 7})
                except ArgumentError:
                    pass  # the other process is further
        os._exit(0)
    return number

def newest():
    checkpoints = Checkpoints(folder)
    for step in checkpoints.steps():
        found = checkpoints.restore(tree(0), step)
        assert all((x == step).all() for x in found.values()), step
    return max(checkpoints.steps(), default=0)

for _ in range(kills):
    before = newest()
    running = child(before + 1, 1, 10**6)
    while max(Checkpoints(folder).steps(), default=0) == before:
        assert os.waitpid(running, os.WNOHANG) == (0, 0)
    time.sleep(random.random() / 10)
    os.kill(running, signal.SIGKILL)
    os.waitpid(running, 0)
    assert newest() > before
last = newest() + 40
for running in [child(last - 40 + i, 2, last + 1) for i in (1, 2)]:
    assert os.waitpid(running, 0)[1] == 0
assert newest() == last
Checkpoints(folder).save(last + 1, tree(last + 1))
print(last + 1)
"""


@pytest.mark.parametrize("kills", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_processes_may_be_killed_and_several_may_write(tmp_path, kills):
    """Every file is complete, runs go on, and what is left of killed ones is removed later."""
    environment = {**os.environ, "PYTHONPATH": str(Path(pm.__file__).parents[1])}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(kills)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr

    # The last save ended with the program.
    assert max(Checkpoints(tmp_path).steps()) == int(ended.stdout)
    parts = [path for path in tmp_path.iterdir() if path.suffix != ".safetensors"]
    assert parts or kills < 60
    (tmp_path / "step_00000001.safetensors.0.tmp").touch()
    for path in (*parts, tmp_path / "step_00000001.safetensors.0.tmp"):
        Checkpoints(tmp_path)
        assert path.exists()
        os.utime(path, (0, 0))
    Checkpoints(tmp_path)
    assert all(path.suffix == ".safetensors" for path in tmp_path.iterdir())
