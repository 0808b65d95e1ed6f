"""Checks that no call waits for: how they are returned, who raises them, and where they may be."""

import contextlib
import gc
import re
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import CaptureError, CheckError
from pytreemod.transform.host.later_checks import Pending, raise_pending, summarize
from pytreemod.transform.host.runtime_checks import checks_in
from tests.helpers.comparing import assert_close
from tests.helpers.trees import ramp

TEXT = "x is negative"
GOOD, BAD = ramp(3, start=0.0), ramp(3, start=-2.0)


@pytest.fixture(autouse=True)
def forgetting():
    """No test leaves failures to another."""
    yield
    with contextlib.suppress(CheckError):
        raise_pending()


def check(x, text=TEXT):
    return pm.error_if(x, x < 0, text)


def later(fn, **options):
    return pm.filter_jit(fn, checks="later", **options)


def failures():
    """The message and the notes of the failure; nothing, if nothing has failed."""
    try:
        raise_pending()
    except CheckError as error:
        return [str(error), *error.__notes__]
    return []


def notes_of(fn, *args):
    """The message and the notes of an error after a call, without the lines of the check."""
    later(fn)(*args)
    return [note for note in failures() if not note.startswith("checked at")]


# ---- who raises


def test_a_call_returns_and_the_next_one_raises():
    """Instead of running; a raised failure is forgotten."""
    f = later(lambda x: jnp.sqrt(check(x)))
    assert_close(f(GOOD), jnp.sqrt(GOOD))
    jax.block_until_ready(f(BAD))

    with pytest.raises(CheckError, match=rf"\A{TEXT}") as caught:
        f(GOOD)
    assert "test_later_checks.py" in caught.value.__notes__[0]
    assert caught.value.__notes__[1] == "in call 2 of <lambda>"
    f(GOOD)
    assert failures() == []


def test_the_first_of_several_is_raised_and_the_others_are_counted():
    """Several checks of one call, several calls, several functions."""
    f = later(lambda x: pm.error_if(check(x), x < -1, "x is small"))
    g = later(lambda x: check(x, "another"))
    f(GOOD)
    f(BAD)
    g(BAD)

    found = failures()
    assert found[0] == TEXT
    assert found[-1] == "in call 2 of <lambda>, and 2 more failures"
    assert failures() == []


def test_what_has_not_finished_is_left_to_a_later_call():
    """No call waits, in whatever order they finish."""

    class Summary:
        def __init__(self, number, is_there):
            self.numbers = np.array([number], np.int32)
            self.is_there = is_there
            self.is_fully_addressable = True

        def is_ready(self):
            return self.is_there

        def __array__(self, *args, **kwargs):
            assert self.is_there, "waited"
            return self.numbers

    f = later(check)
    f(GOOD)
    (_, _, checks), pending = f.pending.queue[0], Pending("f")
    good, bad = Summary(0, is_there=True), Summary(1, is_there=False)
    for summary in (good, bad):
        pending.begin()
        pending.add(summary, checks)
    pending.begin()
    assert len(pending.queue) == 1
    bad.is_there = True

    with pytest.raises(CheckError, match=TEXT) as caught:
        pending.begin()
    assert caught.value.__notes__[-1] == "in call 2 of f"
    pending.begin()


def test_a_failed_call_does_not_end_another_trace():
    """The failure waits for the next call outside."""
    f = later(check)
    f(BAD)
    outer = later(lambda x: f(x) + 1)

    assert_close(outer(GOOD), GOOD + 1)
    with pytest.raises(CheckError, match=TEXT):
        f(GOOD)


def test_a_function_that_is_gone_is_still_heard():
    later(lambda x: check(x))(BAD)
    gc.collect()

    assert failures()[0] == TEXT


def test_ten_thousand_calls_leave_nothing():
    """Each call forgets its passed checks."""
    f = later(check)
    for _ in range(10_000):
        f(GOOD)

    assert len(f.pending.queue) <= 64


def test_threads_call_one_function():
    """Each failure is raised once, in one of them, or at the end."""
    f, raised = later(check), []
    f(GOOD)

    def work():
        for i in range(40):
            try:
                f(BAD if i % 10 == 3 else GOOD)
            except CheckError as error:
                raised.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    left = failures()

    numbers = [error.__notes__[-1] for error in raised] + left[-1:]
    assert len(set(numbers)) == len(numbers)
    assert 1 <= len(numbers) <= 16


def test_what_is_left_is_printed_at_exit():
    """By a separate Python."""
    code = (
        "import jax.numpy as jnp, pytreemod as pm\n"
        "f = pm.filter_jit(lambda x: pm.error_if(x, x < 0, 'negative'), checks='later')\n"
        "f(jnp.asarray(-1.0))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "CheckError: negative\nchecked at <string>:2, in <lambda>\nin call 1" in run.stderr


# ---- results


def test_the_program_calls_nothing_and_has_one_array_more():
    """However many checks there are."""
    f = later(lambda x: pm.filter_vmap(check)(check(x)))
    jaxpr = f.trace(GOOD).jaxpr

    assert checks_in(jaxpr) == frozenset()
    assert [aval.shape for aval in jaxpr.out_avals] == [(3,), (4,)]
    assert "callback" not in str(jaxpr)


def test_a_function_without_checks_has_the_same_program():
    plain, other = (f.lower(GOOD).as_text() for f in (pm.filter_jit(jnp.sin), later(jnp.sin)))

    assert plain == other


def test_a_summary_has_the_first_failure_its_position_and_how_many():
    codes = [jnp.int32(0), jnp.array([[0, 0], [2, 1]], jnp.int32), jnp.zeros((0, 2), jnp.int32)]

    assert summarize(codes).tolist() == [0, 2, 2, 2, 0, 0, 0]


@pytest.mark.parametrize(
    ("index", "text"), [(1, "b"), (-1, "c"), (7, "message 7 of 3 (no such message)")]
)
def test_a_message_that_is_chosen_while_it_runs(index, text):
    def f(x, index):
        return pm.branched_error_if(x, x < 0, index, ["a", "b", "c"])

    assert notes_of(f, BAD, jnp.asarray(index))[0] == text


def test_each_element_may_have_a_message_of_its_own():
    def f(x):
        return pm.branched_error_if(x, x > 0, jnp.arange(3), ["a", "b", "c"])

    assert notes_of(f, GOOD)[0] == "b"


def step_of_scan(carry, x):
    return carry, check(x)


def in_branch(pred, x):
    return pm.filter_cond(pred, lambda x: check(x), lambda x: -x, x)


# Functions of an array of three numbers, and the note of where they fail.
INSIDE = {
    "vmap": (pm.filter_vmap(check), "for the batch index 0, and 1 more"),
    "vmap of vmap": (
        lambda x: pm.filter_vmap(pm.filter_vmap(check, out_axes=-1), out_axes=1)(x[:, None] + 1),
        "for the batch index (0, 0)",
    ),
    "scan": (lambda x: pm.filter_scan(step_of_scan, 0, x), "in step 0 of a scan, and 1 more"),
    "scan of vmap": (
        lambda x: pm.filter_scan(
            lambda c, y: (c, pm.filter_vmap(check)(y)), 0, jnp.stack([x + 3, x + 2, x])
        ),
        "for the batch index 0, in step 2 of a scan, and 1 more",
    ),
    "map": (lambda x: pm.filter_map(check, x), "for the batch index 0, and 1 more"),
    "map in batches": (
        lambda x: pm.filter_map(check, x, batch_size=2),
        "for the batch index 0, and 1 more",
    ),
    "grad": (pm.filter_grad(lambda x: check(x).sum()), None),
    "checkpoint": (pm.filter_grad(lambda x: pm.filter_checkpoint(check)(x).sum()), None),
    "vjp": (lambda x: pm.filter_vjp(check, x)[1](x), None),
    "jvp": (lambda x: pm.filter_jvp(check, (x,), (x,)), None),
    "linearize": (lambda x: pm.filter_linearize(check, x)[1](x), None),
    "jacfwd": (pm.filter_jacfwd(check), None),
    "jacrev": (pm.filter_jacrev(check), None),
    "jit": (pm.filter_jit(check), None),
    "jit of later": (later(check), None),
    "checkify": (lambda x: pm.filter_checkify(check)(x)[1], None),
    "while": (
        lambda x: pm.filter_while_loop(
            lambda s: s[0] < 3, lambda s: (s[0] + 1, check(s[1]) + 2), (0, x)
        ),
        None,
    ),
    "condition of a while": (
        lambda x: pm.filter_while_loop(
            lambda s: check(s[1])[0] < 1, lambda s: (s[0] + 1, s[1] + 1), (0, x)
        ),
        None,
    ),
    "fori": (lambda x: pm.filter_fori_loop(0, 3, lambda i, x: check(x) + 1, x), None),
    "fori to what is traced": (
        lambda x: pm.filter_fori_loop(0, 5 + jnp.int32(x[0]), lambda i, x: check(x) + 1, x),
        None,
    ),
    "vmap in a loop": (
        lambda x: pm.filter_fori_loop(0, 3, lambda i, x: pm.filter_vmap(check)(x) + 1, x),
        "for the batch index 0, and 1 more",
    ),
    "loop in a vmap": (
        pm.filter_vmap(lambda x: pm.filter_fori_loop(0, 3, lambda i, x: check(x) + 1, x)),
        "for the batch index 0, and 1 more",
    ),
    "cond": (lambda x: in_branch(x[0] < 0, x), None),
    "cond in a vmap": (
        pm.filter_vmap(lambda x: in_branch(x < -1, x)),
        "for the batch index 0",
    ),
    "switch": (lambda x: pm.filter_switch(1, [lambda x: x, pm.filter_vmap(check)], x), "for the"),
    "capture": (lambda x: pm.capture(lambda x: pm.sow("x", check(x)))(x), None),
}


@pytest.mark.parametrize("name", INSIDE)
def test_checks_come_out_of_each_filtered_transform(name):
    """With the index of the member, and the number of the step."""
    fn, note = INSIDE[name]
    text, *notes = notes_of(fn, BAD)

    assert text == TEXT
    assert re.match(r"in call \d+ of ", notes[-1])
    assert notes[0].startswith(note) if note else len(notes) == 1
    assert notes_of(fn, GOOD + 1) == []


def test_the_branch_that_is_not_taken_does_not_fail():
    """Each branch has its own checks, with their own shapes."""

    def f(pred, x):
        return pm.filter_cond(
            pred, lambda x: check(x, "one"), pm.filter_vmap(lambda x: check(x, "other")), x
        )

    assert notes_of(f, jnp.asarray(True), BAD)[0] == "one"
    assert notes_of(f, jnp.asarray(False), BAD)[:2] == [
        "other",
        "for the batch index 0, and 1 more",
    ]
    assert notes_of(in_branch, jnp.asarray(False), BAD) == []


def test_branches_with_checks_may_differ_in_numbers():
    """They are cast to one dtype, as without."""
    f = later(lambda p, x: pm.filter_cond(p, check, lambda x: 1, x))
    y = f(jnp.asarray(False), jnp.float32(-1))

    assert (y.dtype, failures()) == (jnp.float32, [])


def test_members_and_layers(key):
    """Of an Ensemble and a Stack."""

    class Layer(pm.Module):
        bound: jax.Array

        def __call__(self, x):
            return pm.error_if(x, x.sum() > self.bound, TEXT)

    layers = [Layer(jnp.asarray(float(bound))) for bound in (9, 2, 9)]
    stack, ensemble = nn.Stack.from_layers(layers), nn.Ensemble.from_members(layers)

    assert notes_of(lambda f, x: f(x), stack, GOOD)[1] == "in step 1 of a scan"
    assert notes_of(lambda f, x: f(x), ensemble, GOOD)[1] == "for the batch index 1"


def test_a_capture_around_sees_what_is_sown_beside_checks():
    f = later(lambda x: pm.sow("x", check(x)) + 1)
    out, seen = pm.capture(f)(BAD)

    assert_close((out, seen), (BAD + 1, {"x": BAD}))
    assert failures()[0] == TEXT


def test_what_is_sown_without_a_capture_may_be_anywhere():
    """Checks alone are collected."""
    f = later(lambda x: jax.vmap(lambda x: pm.sow("x", x))(check(x)))

    assert_close(f(GOOD), GOOD)


# ---- where nothing comes out


def with_rule(f):
    """A function with a custom rule for derivatives."""
    custom = jax.custom_jvp(lambda x: f(x))
    custom.defjvp(lambda primals, tangents: (f(*primals), *tangents))
    return custom


PLAIN = {
    "jax.vmap": jax.vmap,
    "jax.jit": jax.jit,
    "jax.lax.scan": lambda f: lambda x: jax.lax.scan(lambda c, y: (c, f(y)), 0, x)[1],
    "jax.lax.while_loop": lambda f: (
        lambda x: jax.lax.while_loop(lambda x: x[0] < 3, lambda x: f(x) + 1, x)
    ),
    "a function with a custom_jvp": with_rule,
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_check_inside_of_plain_jax_is_refused(name):
    """By the name of the transform; a program without checks is of no use there."""
    f = PLAIN[name](check)
    pm.filter_jit(f)(GOOD)

    with pytest.raises(CaptureError, match=f"got one inside {name}") as caught:
        later(f)(GOOD)
    assert "test_later_checks.py" in str(caught.value)


def test_a_filtered_transform_inside_of_a_plain_one_is_refused():
    """The checks of one cannot be returned by the other."""
    f = later(jax.vmap(lambda x: pm.filter_scan(step_of_scan, 0, x)[1]))

    with pytest.raises(CaptureError, match=r"got one inside jax\.vmap"):
        f(GOOD[None])


def test_a_rule_for_derivatives_hands_nothing_out():
    """Ours are named, too; a backward pass in a loop has no name."""
    custom = pm.filter_custom_jvp(check)
    custom.def_jvp(lambda primals, tangents: (*primals, *tangents))
    with pytest.raises(CaptureError, match="got one inside a function with a custom_jvp"):
        later(lambda x: custom(x))(GOOD)

    @pm.filter_grad
    def loss(x):
        step = lambda x, _: (pm.debug.backward_nan(x) ** 2, None)  # noqa: E731
        return pm.filter_scan(step, x, None, length=2)[0].sum()

    with pytest.raises(CaptureError, match="got one inside a transform that returns none"):
        later(loss)(GOOD)


def test_nothing_else_comes_out_of_a_loop():
    """A capture is refused there, with checks and without."""
    f = later(lambda x: pm.filter_fori_loop(0, 2, lambda i, x: pm.sow("x", check(x)), x))

    with pytest.raises(CaptureError, match="sow"):
        pm.capture(f)(GOOD)


# ---- other features


def test_other_modes_mean_what_they_mean():
    def f(x, mode):
        return pm.error_if(x, x < 0, TEXT, on_error=mode)

    assert jnp.isnan(later(f)(BAD, "nan")).all()
    assert_close(later(f)(BAD, "off"), BAD)
    # A debugger has to be opened while the program runs.
    assert later(f).find((BAD, "breakpoint"), {})[0].pending is not None
    assert len(checks_in(later(f).trace(BAD, "breakpoint").jaxpr)) == 1
    assert failures() == []


def test_with_jit_disabled_the_line_itself_raises():
    with jax.disable_jit():
        assert_close(later(check)(GOOD), GOOD)
        for fn in (check, pm.filter_vmap(check), INSIDE["while"][0], INSIDE["scan"][0]):
            with pytest.raises(CheckError, match=TEXT):
                later(fn)(BAD)
