"""A folder of steps, written while the loop goes on, and whole whenever the process is killed."""

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import pytreemod as pm
from pytreemod import Checkpoints, load, nn, read_metadata
from pytreemod.errors import (
    ArgumentError,
    DamagedFileWarning,
    DonatedError,
    FileError,
    FileMissingError,
    StateError,
    SurplusStepsWarning,
)
from tests.helpers.comparing import assert_same
from tests.helpers.racing import race


def tree_at_step(step):
    return {
        "step": step,
        "weight": jnp.full((3, 2), float(step)),
        "seen": np.arange(step, step + 3),
    }


LIKE = tree_at_step(0)


@pytest.fixture
def gate(monkeypatch):
    """The background thread waits for it before it writes."""
    opened, real = threading.Event(), os.open

    def open_late(path, *args, **options):
        if ".saving-" in str(path):
            assert opened.wait(20)
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", open_late)
    yield opened
    opened.set()


def files(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def damage(path):
    """Flip a bit in the last array."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


# ---- saved trees are restored


def test_all_that_training_needs_comes_back(tmp_path):
    """restore(like) == tree: a model, its State, the optimizer's state, keys, numbers."""

    def make(seed):
        def layers(key):
            noise = nn.Dropout(0.5, stream=pm.RngStream())
            return nn.Sequential([nn.Linear(2, 2, key=key), nn.BatchNorm(2), noise])

        model, state = pm.make_with_state(layers)(jax.random.key(seed))
        opt_state = optax.adam(1e-3).init(pm.trainable(model)[0])
        keys = jax.random.split(jax.random.key(seed), 2)
        state = state.seed(jax.random.key(seed))
        return {"nets": [model, state], "opt_state": opt_state, "keys": keys, "epoch": seed}

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(7, make(1))

    assert_same(checkpoints.restore(make(0)), make(1))
    assert_same(Checkpoints(tmp_path).restore(make(0), 7), make(1))


def test_files_are_those_of_save(tmp_path):
    """One for each step, and nothing else; load and read_metadata read them."""
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, tree_at_step(1))
        checkpoints.save(20, tree_at_step(20), {"loss": 0.5})

    assert files(tmp_path) == ["step_00000001.safetensors", "step_00000020.safetensors"]
    assert checkpoints.path() == checkpoints.path(20) == tmp_path / "step_00000020.safetensors"
    about = {"step": 20, "metrics": {"loss": 0.5}, "keep": 3, "best": None}
    assert read_metadata(checkpoints.path()) == about
    assert_same(load(checkpoints.path(1)), tree_at_step(1))


def test_what_is_saved_is_what_was_there(tmp_path, gate):
    """Whatever the loop does before it is written: donate, write into NumPy arrays, grow lists."""

    @pm.filter_jit(donate="all")
    def step(tree):
        return {**tree, "weight": tree["weight"] + 1}

    tree = {**tree_at_step(1), "log": [1]}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, tree)
        step(tree)
        assert tree["weight"].is_deleted()
        tree["seen"][:] = 99
        tree["log"].append(2)
        gate.set()

    assert_same(checkpoints.restore({**LIKE, "log": [0]}), {**tree_at_step(1), "log": [1]})


def test_without_copies_a_donation_is_told(tmp_path, gate):
    """At the next call, with the names; and the folder goes on with the next step."""
    checkpoints = Checkpoints(tmp_path, copy=False)
    tree = tree_at_step(1)
    checkpoints.save(1, tree)
    tree["weight"].delete()
    gate.set()

    with pytest.raises(DonatedError, match="weight"):
        checkpoints.save(2, tree_at_step(2))
    checkpoints.save(2, tree_at_step(2))
    assert checkpoints.steps() == [2]


def test_arrays_of_every_kind_are_what_they_were(tmp_path, gate):
    """Keys, weak types, four bits, no elements, half precision, a State that is used up."""

    def make():
        model, state = pm.make_with_state(nn.BatchNorm)(2)
        arrays = [jnp.asarray(2.0) * 1, jnp.zeros((0, 2))]
        arrays += [jnp.ones(3, dtype) for dtype in ("int4", "bfloat16", "float8_e4m3fn")]
        keys = jax.random.split(jax.random.key(0), 3)
        return model, {"arrays": arrays, "keys": keys, "state": state}

    model, tree = make()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, tree)
        leaves = jax.tree.leaves(tree)
        model(jnp.ones((4, 2)), tree["state"])
        for leaf in leaves:
            leaf.delete()
        with pytest.raises(StateError, match="State"):
            Checkpoints(tmp_path / "other").save(1, tree["state"])
        gate.set()

    restored = checkpoints.restore(make()[1])
    assert_same(restored, make()[1])
    assert restored["arrays"][0].weak_type


def mesh(count, kind=AxisType.Auto):
    return jax.make_mesh((count,), ("d",), devices=jax.devices()[:count], axis_types=(kind,))


@pytest.mark.parametrize("around", [None, mesh(8), mesh(2), mesh(8, AxisType.Explicit)])
def test_arrays_may_be_on_any_devices(tmp_path, gate, around):
    """And in other memories, whatever mesh the loop is in; and then they are given away."""
    auto, explicit, few = mesh(8), mesh(8, AxisType.Explicit), mesh(2)
    x = jnp.arange(8.0)
    everywhere = [
        jax.sharding.SingleDeviceSharding(jax.devices()[3]),
        x.sharding.with_memory_kind("pinned_host"),
        *[NamedSharding(m, PartitionSpec("d")) for m in (auto, explicit, few)],
        NamedSharding(auto, PartitionSpec()),
        NamedSharding(auto, PartitionSpec("d"), memory_kind="pinned_host"),
    ]
    arrays = [jax.device_put(x, sharding) for sharding in everywhere]
    with Checkpoints(tmp_path) as checkpoints:
        with jax.set_mesh(around) if around else nullcontext():
            checkpoints.save(1, arrays)
        for array in arrays:
            array.delete()
        gate.set()

    for found in load(checkpoints.path()):
        np.testing.assert_array_equal(found, np.arange(8.0))


def test_large_arrays_are_copied_before_they_are_given_away(tmp_path):
    """Although no call waits for the copies: the arrays are overwritten later."""
    overwrite = jax.jit(lambda xs: [x * 2 + 1 for x in xs], donate_argnums=0)
    arrays = [jnp.full(300_000, float(i)) for i in range(4)]
    with Checkpoints(tmp_path, keep=None) as checkpoints:
        for step in range(5):
            checkpoints.save(step, arrays)
            arrays = overwrite(arrays)

    for step in range(5):
        for i, found in enumerate(load(checkpoints.path(step))):
            np.testing.assert_array_equal(found, np.full(300_000, (i + 1.0) * 2**step - 1))


def test_other_files_of_the_folder_are_no_steps(tmp_path):
    """No two files are of one step; and the steps are in order, by number."""
    with Checkpoints(tmp_path, keep=None) as checkpoints:
        for step in (20, 100, 3 * 10**9):
            checkpoints.save(step, LIKE)
    for name in ("1", "000000001", "-0000001", "0000000\N{ARABIC-INDIC DIGIT ONE}"):
        (tmp_path / f"step_{name}.safetensors").touch()
    (tmp_path / "step_00000007.safetensors").mkdir()
    (tmp_path / "step_00000008.safetensors").symlink_to(tmp_path / "nowhere")

    assert checkpoints.steps() == [20, 100, 3 * 10**9]


# ---- the loop's thread


def test_a_save_returns_before_anything_is_written(tmp_path, gate):
    """And the next one waits for it: no more than one copy of the arrays is there."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, tree_at_step(1))
    assert files(tmp_path) == []
    second = threading.Thread(target=checkpoints.save, args=(2, tree_at_step(2)))
    second.start()
    second.join(0.1)
    assert second.is_alive()
    gate.set()
    second.join(20)

    assert checkpoints.steps() == [1, 2]


# ---- errors


@pytest.mark.parametrize(
    "call",
    [
        lambda checkpoints: checkpoints.save(3, LIKE),
        lambda checkpoints: checkpoints.wait(),
        lambda checkpoints: checkpoints.__exit__(None, None, None),
    ],
)
def test_an_error_of_the_background_comes_out_at_the_next_call(tmp_path, call):
    """Whatever that is; once."""
    folder = tmp_path / "run"
    checkpoints = Checkpoints(folder)
    shutil.rmtree(folder)
    checkpoints.save(2, LIKE)

    with pytest.raises(FileMissingError, match="run") as caught:
        call(checkpoints)
    assert "step 2" in caught.value.__notes__[0]
    folder.mkdir()
    checkpoints.save(1, LIKE)
    assert checkpoints.steps() == [1]


def test_what_cannot_be_saved_is_told_at_once(tmp_path):
    """Donated and traced arrays, by name; nothing is written."""
    checkpoints = Checkpoints(tmp_path)
    tree = tree_at_step(1)

    tree["weight"].delete()
    with pytest.raises(FileError, match="weight"):
        checkpoints.save(1, tree)
    assert checkpoints.steps() == []


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda folder: Checkpoints(folder).save(-1, LIKE), "-1"),
        (lambda folder: Checkpoints(folder).save(True, LIKE), "True"),
        (lambda folder: Checkpoints(folder, keep=0), "keep"),
        (lambda folder: Checkpoints(folder, best="-"), "best"),
        (lambda folder: Checkpoints(folder, best="loss").save(1, LIKE, {"los": 0.5}), "loss"),
        (lambda folder: Checkpoints(folder, best="loss").save(1, LIKE, {"loss": None}), "loss"),
        (lambda folder: Checkpoints(folder, best="loss").save(1, LIKE, 0.5), "metrics"),
        (lambda folder: Checkpoints(folder).restore(LIKE, "best"), "best"),
        (lambda folder: Checkpoints("gs://bucket/run"), "bucket"),
    ],
)
def test_steps_and_metrics_that_would_be_lost_are_refused(tmp_path, call, word):
    """A misspelled metric has no best, and of no step there is a newest."""
    with pytest.raises((ArgumentError, FileError), match=word):
        call(tmp_path)
    assert files(tmp_path) == []


@pytest.mark.parametrize("which", [None, 3, "best"])
def test_a_step_that_is_not_there_is_told(tmp_path, which):
    """Nothing else is restored in its place."""
    with pytest.raises(FileMissingError, match="step"):
        Checkpoints(tmp_path, best="loss").restore(LIKE, *([] if which is None else [which]))


# ---- which steps there are


def test_the_newest_stay_and_the_best(tmp_path):
    """Three of the newest, and the one with the lowest loss, for any type of number."""
    losses = [3, np.float32(2.5), jnp.bfloat16(0.5), True, float("nan"), float("inf"), 0.75, 2]
    with Checkpoints(tmp_path, best="loss") as checkpoints:
        for step, loss in enumerate(losses):
            checkpoints.save(step, tree_at_step(step), {"loss": loss})

    assert checkpoints.steps() == [2, 5, 6, 7]
    assert_same(checkpoints.restore(LIKE, "best"), tree_at_step(2))
    # The files have the metrics for later runs.
    assert Checkpoints(tmp_path, best="loss").path("best") == checkpoints.path(2)
    assert Checkpoints(tmp_path, best="-loss").path("best") == checkpoints.path(5)


OPENED_OTHERWISE = {
    "fewer": ({"keep": 10}, {"keep": 3}, [*range(10)], [11, 12, 13]),
    "without its best": ({"keep": 1, "best": "loss"}, {"keep": 1}, [1, 3], [7]),
    # The best is among the newest at first, and only a later save would displace it.
    "without its best, and more": ({"keep": 1, "best": "loss"}, {"keep": 3}, [1, 3], [5, 6, 7]),
    "by another metric": (
        {"keep": 1, "best": "loss"},
        {"keep": 2, "best": "-accuracy"},
        [1, 3],
        [6, 7],
    ),
    "all": ({"keep": 2}, {"keep": None}, [2, 3], [2, 3, 4, 5, 6, 7]),
}


@pytest.mark.parametrize(
    ("first", "later", "before", "pruned"), OPENED_OTHERWISE.values(), ids=OPENED_OTHERWISE
)
def test_a_save_removes_only_steps_of_the_same_options(tmp_path, first, later, before, pruned):
    """A script that resumes with other options loses none of the earlier checkpoints."""
    last = before[-1]
    with Checkpoints(tmp_path, **first) as checkpoints:
        for step in range(last + 1):
            checkpoints.save(step, LIKE, {"loss": (step - 1.0) ** 2, "accuracy": float(step)})
    assert checkpoints.steps() == before

    again, metrics = Checkpoints(tmp_path, **later), {"loss": 99.0, "accuracy": 99.0}
    is_told = again.keep is not None
    with pytest.warns(SurplusStepsWarning, match="step") if is_told else nullcontext():
        again.save(last + 1, LIKE, metrics)
    for step in range(last + 2, last + 5):  # without a warning, which was already given
        again.save(step, LIKE, metrics)
    own = [step for step in range(last + 1, last + 5) if step in pruned or again.keep is None]
    assert again.steps() == [*before, *own]
    assert again.prune() == sorted({*again.steps(), *before} - {*own, *pruned})
    assert again.steps() == pruned


def test_a_step_without_metrics_is_never_the_best(tmp_path):
    """Not every save comes with an evaluation."""
    with Checkpoints(tmp_path, keep=1, best="-accuracy") as checkpoints:
        checkpoints.save(1, LIKE, {"accuracy": 0.5})
        checkpoints.save(2, LIKE)
        checkpoints.save(3, LIKE, {"accuracy": 0.4, "loss": 1.0})

    assert checkpoints.steps() == [1, 3]


def test_an_older_step_is_refused(tmp_path):
    """Another run would be mixed with this one; the newest one itself is replaced."""
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, tree_at_step(1))
        checkpoints.save(5, tree_at_step(5))
        checkpoints.save(5, tree_at_step(6))
    assert_same(checkpoints.restore(LIKE), tree_at_step(6))
    again = Checkpoints(tmp_path)

    with pytest.raises(ArgumentError, match="5"):
        again.save(2, LIKE)
    assert again.steps() == [1, 5]


# ---- damage


@pytest.mark.parametrize("how", [damage, lambda path: path.write_bytes(path.read_bytes()[:99])])
def test_a_damaged_newest_file_is_passed_over(tmp_path, how):
    """With a warning; it is an error if it was asked for, and it counts for nothing."""
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, tree_at_step(step))
    how(checkpoints.path(30))

    with pytest.raises(FileError, match=r"step_00000030"):
        checkpoints.restore(LIKE, 30)
    with pytest.warns(DamagedFileWarning, match="30"):
        assert_same(checkpoints.restore(LIKE), tree_at_step(20))
    with checkpoints:
        checkpoints.save(25, tree_at_step(25))
        assert checkpoints.steps() == [20, 25, 30]
        assert_same(checkpoints.restore(LIKE), tree_at_step(25))
        checkpoints.save(35, tree_at_step(35))
        checkpoints.save(45, tree_at_step(45))
    assert checkpoints.steps() == [35, 45]


def test_a_file_of_another_model_is_not_passed_over(tmp_path):
    """An older one might fit, and would be the wrong one."""
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, LIKE)
        checkpoints.save(2, {"other": jnp.ones(2)})

    with pytest.raises(FileError, match="00002"):
        checkpoints.restore(LIKE)


# ---- several at once


def test_several_threads_and_folders_opened_twice(tmp_path):
    """They write and remove beside each other: all files are complete, and the newest exists."""
    opened = [Checkpoints(tmp_path, keep=2, best="loss") for _ in range(4)]

    def run(i):
        with opened[i] as checkpoints:
            for step in range(i, 24, 4):
                checkpoints.save(step, tree_at_step(step), {"loss": -step})
                restored = checkpoints.restore(LIKE)
                assert_same(restored, tree_at_step(restored["step"]))

    race(run, 4)

    assert files(tmp_path) == ["step_00000022.safetensors", "step_00000023.safetensors"]
    assert_same(Checkpoints(tmp_path).restore(LIKE), tree_at_step(23))


# ---- the end of a program

ENDING = """
import atexit, shutil, sys
import numpy as np
from pytreemod import Checkpoints

folder = sys.argv[1]
checkpoints = Checkpoints(folder + "/run")
lost = Checkpoints(folder + "/lost")
shutil.rmtree(folder + "/lost")
lost.save(3, {})
checkpoints.save(1, {"x": np.ones(5_000_000, np.float32)})
atexit.register(lambda: checkpoints.save(2, {"x": np.ones(500_000, np.float32)}))
"""


@pytest.mark.slow
def test_a_program_that_ends_loses_nothing(tmp_path):
    """A save under way is finished, one can begin at the very end, and errors are printed."""
    ended = run_python(ENDING, tmp_path)
    _, told = ended.communicate()

    assert ended.returncode == 0
    assert "step 3 of Checkpoints" in told
    for step, size in ((1, 5_000_000), (2, 500_000)):
        saved = load(tmp_path / f"run/step_0000000{step}.safetensors")
        np.testing.assert_array_equal(saved["x"], np.ones(size, np.float32))


def run_python(code, *args):
    root = Path(pm.__file__).parents[1]
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )


FOR_EVER = """
import itertools, sys
import jax, jax.numpy as jnp, numpy as np
import pytreemod as pm
from pytreemod import Checkpoints

step = pm.filter_jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate="all")
tree = {f"w{i}": jnp.zeros(100_000) for i in range(10)}
checkpoints = Checkpoints(sys.argv[1], best="loss")
first = 0
if checkpoints.steps():
    tree = checkpoints.restore(tree)
    first = int(tree["w0"][0])
for i in itertools.count(first + 1):
    tree = step(tree)
    checkpoints.save(i, tree, {"loss": i % 7})
"""


@pytest.mark.slow
def test_a_process_can_be_killed_at_any_moment(tmp_path):
    """Ten times: every file is complete, the newest is correct, and the next run continues."""
    moments = random.Random(0)
    newest, parts = 0, 0
    like = {f"w{i}": jax.ShapeDtypeStruct((100_000,), jnp.float32) for i in range(10)}
    for _ in range(10):
        running = run_python(FOR_EVER, tmp_path)
        checkpoints = Checkpoints(tmp_path)
        while max(checkpoints.steps(), default=0) < newest + 3:
            assert running.poll() is None, running.communicate()
            time.sleep(0.01)
        time.sleep(moments.random() / 2)
        running.send_signal(signal.SIGKILL)
        running.communicate()

        for step in checkpoints.steps():
            for leaf in checkpoints.restore(like, step).values():
                np.testing.assert_array_equal(leaf, np.full(100_000, step, np.float32))
        newest = max(checkpoints.steps())
        left = [name for name in files(tmp_path) if "saving" in name]
        parts += len(left)
        for name in left:
            os.utime(tmp_path / name, (0, 0))

    assert parts > 0
    with Checkpoints(tmp_path, best="loss") as checkpoints:
        checkpoints.save(newest + 1, {})
    assert not [name for name in files(tmp_path) if "saving" in name]
