"""Names of steps, and which of them stay."""

import math

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytreemod.errors import FileMissingError
from pytreemod.io.saving import save
from pytreemod.io.step_files import (
    Goal,
    best_step,
    file_of_step,
    metrics_as_json,
    metrics_in,
    step_of_file,
    steps_in,
    steps_to_remove,
)
from tests.helpers.laws import law

numbers = st.integers(0, 12)


@given(st.integers(0, 10**20))
@law
def test_a_name_tells_its_step(step):
    """step_of_file(file_of_step(step)) == step."""
    assert step_of_file(file_of_step(step)) == step


@pytest.mark.parametrize(
    "name",
    [
        "step_1.safetensors",
        "step_000000001.safetensors",
        "step_00000001.safetensors.saving-0123456789abcdef",
        "step_-0000001.safetensors",
        "step_0000000\N{ARABIC-INDIC DIGIT ONE}.safetensors",
        "model.safetensors",
    ],
)
def test_other_names_are_of_no_step(name):
    """No two files are of one step."""
    assert step_of_file(name) is None


def test_steps_of_a_folder_are_in_order(tmp_path):
    """By number; other files, and folders, are none."""
    for step in (100, 20, 3 * 10**9):
        (tmp_path / file_of_step(step)).touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / file_of_step(7)).mkdir()
    (tmp_path / file_of_step(8)).symlink_to(tmp_path / "nowhere")

    assert steps_in(tmp_path) == [20, 100, 3 * 10**9]
    assert steps_in(tmp_path / "missing") == []


@given(st.sets(numbers), st.integers(1, 4), numbers | st.none(), st.sets(numbers))
@law
def test_which_steps_stay(steps, keep, best, damaged):
    """The newest that are whole, and the best; what goes is older than these."""
    gone = set(steps_to_remove(steps, keep, best, damaged))
    newest = sorted(steps - damaged)[-keep:]

    assert gone <= steps
    assert not gone & {*newest, best}
    assert not steps - gone - {*newest, best} - damaged
    assert all(step < newest[0] for step in gone)


def test_the_best_is_the_lowest():
    """Or the highest, where that was said; NaN and what is no number never are."""
    metrics = {0: {"a": "nan"}, 1: {"a": 3}, 2: {"a": 1.5}, 3: {"a": "nan"}, 4: {"b": 0}}
    metrics |= {5: {"a": "x"}, 6: {}, 7: {"a": None}, 8: {"a": [1]}}

    def best(goal):
        return best_step({step: Goal.parse(goal).rank(told) for step, told in metrics.items()})

    assert [best("a"), best("-a"), best("c")] == [2, 1, None]


def test_infinity_is_a_number():
    """The worst there is, or the best."""
    ranks = {1: Goal.parse("a").rank({"a": "inf"}), 2: Goal.parse("a").rank({"a": 10**400})}

    assert best_step(ranks) == 1


def test_of_two_that_are_alike_the_later_is_best():
    """It has learnt for longer."""
    assert best_step({1: 0.5, 2: 0.5, 3: 0.6}) == 2


@given(st.dictionaries(st.text(max_size=2), st.floats() | st.integers()))
@law
def test_metrics_there_and_back(metrics):
    """Each number comes back from the words that JSON has for it."""
    told = metrics_as_json(metrics)

    assert not any(isinstance(v, float) and not math.isfinite(v) for v in told.values())
    assert all(repr(type(metrics[name])(v)) == repr(metrics[name]) for name, v in told.items())


def test_metrics_may_be_too_large_for_floating_numbers():
    assert metrics_as_json({"n": 10**400}) == {"n": 10**400}


def test_metrics_of_a_file(tmp_path):
    """What the file tells; nothing if it tells something else, or is damaged."""
    path = tmp_path / "a.safetensors"
    for metadata in (None, "metrics", {"metrics": 3}, {"step": 1}):
        save(path, jnp.ones(2), metadata)
        assert metrics_in(path) == {}
    save(path, jnp.ones(2), {"metrics": {"loss": 0.5}})
    assert metrics_in(path) == {"loss": 0.5}
    path.write_bytes(path.read_bytes()[:50])
    assert metrics_in(path) == {}


def test_a_file_that_cannot_be_read_is_not_called_bad(tmp_path):
    """Nobody knows how good it is: it must not be removed for that."""
    with pytest.raises(FileMissingError, match=r"a\.safetensors"):
        metrics_in(tmp_path / "a.safetensors")
