"""Traces are distinguished; recorded operations run again, are inspected, and decided late."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod.tree.traces import current_trace, decided_late, run_again, watched, zero_tangents


def test_a_trace_is_itself_and_no_other():
    """Equal twice in the same trace; different inside jit, vmap and scan, and in two of them."""
    outside = current_trace()
    seen = []

    def note(x):
        seen.append(current_trace())
        assert seen[-1] == current_trace()
        return x

    jax.jit(note)(1.0)
    jax.vmap(note)(jnp.ones(2))
    jax.lax.scan(lambda carry, x: (note(carry), x), 1.0, jnp.ones(2))

    assert current_trace() == outside
    assert all(a != b for i, a in enumerate(seen) for b in [outside, *seen[:i]])


def test_a_program_is_run_again_with_other_constants():
    """Inputs and constants are those of the call, not those of the trace."""
    captured = jnp.asarray([2.0, 3.0])
    closed = jax.make_jaxpr(lambda x: (x * captured, x + 1))(jnp.ones(2))

    first, second = run_again(closed.jaxpr, [10 * captured], [jnp.asarray([1.0, 2.0])])

    np.testing.assert_array_equal(first, [20.0, 60.0])
    np.testing.assert_array_equal(second, [2.0, 3.0])


def under_jvp(run, x):
    """Forward mode, by `jax.jvp`."""
    jax.jvp(run, (1.0, x), (1.0, x))


def under_linearize(run, x):
    """Forward mode, by `jax.linearize`."""
    jax.linearize(run, 1.0, x)


@pytest.mark.parametrize("differentiate", [under_jvp, under_linearize])
@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.vmap, jax.grad])
def test_zero_tangents_are_those_of_the_innermost_derivative(differentiate, around):
    """Values that depend only on an outer transform have zero tangents here."""
    found = []

    def run_with(outer):
        def run(marker, x):
            values = [2 * x, outer * 2, jax.lax.stop_gradient(x), jnp.ones(2)]
            found.append(zero_tangents(marker, values))
            return x

        differentiate(run, jnp.ones(3))
        return jnp.sum(outer)

    around(run_with)(jnp.ones(()) if around is not jax.vmap else jnp.ones(2))

    assert set(map(tuple, found)) == {(False, True, True, True)}


def test_what_is_decided_late_is_decided_for_each_program():
    """Not by the first program that is traced."""
    answers = iter([np.int32(1), np.int32(2)])
    told = []

    def decide(is_several):
        told.append(is_several)
        return next(answers)

    late = decided_late("late", np.int32(0), decide)
    inner = jax.jit(lambda x: x + late())

    assert int(inner(jnp.int32(10))) == 11
    assert int(jax.jit(lambda x: 10 * inner(x))(jnp.int32(10))) == 120
    assert int(jax.eval_shape(inner, jnp.int32(1)).size) == 1
    assert told == [False, False]
    assert late() == 0


@pytest.mark.parametrize(
    ("around", "expected"),
    [
        (lambda f: f, ["impl"]),
        (jax.jit, ["abstract", "mlir"]),
        (jax.vmap, ["vmap", "vmap impl"]),
        (lambda f: jax.vmap(jax.jit(f)), ["abstract", "vmap", "vmap abstract", "vmap mlir"]),
    ],
)
def test_watched_values_are_themselves_and_each_transform_is_reported(around, expected):
    """In the order of the transforms; evaluation and lowering are ends."""
    reported = []

    def report(steps, is_end):
        reported.append(" ".join(steps))
        assert is_end is (steps[-1] in ("impl", "abstract", "mlir"))

    x, y = jnp.ones(2), jnp.arange(2)
    first, second = around(lambda *values: watched(values, report))(x, y)

    np.testing.assert_array_equal(first, x)
    np.testing.assert_array_equal(second, y)
    assert reported == expected
