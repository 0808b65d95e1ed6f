"""The statistics of the benchmarks."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.measuring import UNROLLED, compare, race, unrolled
from benchmarks.tables import Row, raced, ratio_row, with_unit

pytest.importorskip("optax", reason="the benchmarks train with optax")

from benchmarks import memory, programs

# It waits for measurements: in the slow run.
pytestmark = pytest.mark.slow

JAX, OURS = "jax.jit", "pytreemod"


def taking(seconds):
    """A contender that claims to take so long for a call, and takes no time."""
    return lambda number: number * seconds


def test_ratio_is_to_the_first_contender():
    """One that takes half as long again has a ratio of 1.5 in every round."""
    times = race({JAX: taking(1e-3), OURS: taking(1.5e-3)}, rounds=4)
    result = compare(times, JAX)[OURS]

    assert len(times[OURS]) == 4
    assert result.seconds.median == pytest.approx(1.5e-3)
    assert result.ratio.lower_quartile == pytest.approx(1.5)
    assert result.ratio.best == pytest.approx(1.5)


@pytest.mark.parametrize(("limit", "met"), [(1.5, True), (1.45, True), (1.4, False), (None, None)])
def test_limit_is_met_within_what_runs_differ_by(limit, met):
    """The median decides; 5 % more is the same; no limit, no verdict."""
    row = raced("label", {JAX: taking(1e-3), OURS: taking(1.5e-3)}, rounds=2, limit=limit)

    assert row.met is met


def test_row_reads_as_a_line():
    """Time of the baseline, median, quartiles and best ratio, a dash for who is absent, verdict."""
    row = ratio_row("label", {JAX: [2e-3, 2e-3], OURS: [3e-3, 5e-3]}, share=0.5, limit=1)
    words = row.as_text(["Equinox", OURS]).split()

    assert words == ["label", "1", "ms", "-", "2.00", "(1.75-2.25)", "1.50", "≤", "1", "MISSED"]


def test_note_comes_on_a_line_of_its_own():
    """A note is printed below its row."""
    row = Row("label", "3 ops", {OURS: "different"}, {}, "equal", met=False, note="add +1")

    assert row.as_text([OURS]).splitlines()[1] == "    add +1"
    assert row.as_dict()["note"] == "add +1"


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.5, "1.5 s"), (2e-2, "20 ms"), (3.25e-6, "3.25 µs"), (4e-9, "4 ns")]
)
def test_seconds_get_a_fitting_unit(seconds, text):
    """From seconds to nanoseconds."""
    assert with_unit(seconds) == text


def test_unrolled_statement_runs_as_often_as_promised():
    """A hundred times for each call, with the given names."""
    seen = []

    unrolled("add(x)", add=seen.append, x=1)(3)

    assert seen == [1] * 3 * UNROLLED


def program(function):
    """Of a function of three numbers."""
    return programs.Program.of(jax.jit(function).lower(jnp.ones(3)).compile())


def test_one_operation_more_is_noticed():
    """By its name, with its cost."""
    found = programs.differences(program(lambda x: jnp.sin(x) + 1), program(lambda x: x + 1))

    assert "sine +1" in found
    assert "transcendentals +3" in found


def test_same_program_has_no_differences():
    """However its function is spelled."""

    def spelled_out(x):
        y = jnp.sin(x)
        return jnp.add(y, 1)

    assert programs.differences(program(spelled_out), program(lambda x: jnp.sin(x) + 1)) == []


def test_programs_that_compute_other_numbers_are_not_compared():
    """The hand-written program must be one of the same function."""
    with pytest.raises(AssertionError, match="Linear"):
        programs.require_same_numbers("Linear", jnp.ones(2), jnp.zeros(2))


def test_array_that_is_kept_counts_as_left():
    """A step that holds on to its loss is found out; an honest one leaves nothing."""
    honest, kept = memory.flat(10), []

    def leaking(*args):
        out = honest.step(*args)
        kept.append(out[2])
        return out

    leaky = memory.Setting(leaking, honest.make, honest.compiled)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        used = [memory.usage(setting, 10, 2) for setting in (honest, leaky)]

    assert used[0].left == 0
    assert used[1].left == 2 * kept[0].nbytes
