"""Who raises a check that failed: the call that waits for it, and no other."""

import contextlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError, CheckError
from pytreemod.transform.host.failures import (
    call_checked,
    raise_into_jax,
    raise_recorded,
    raises_checks,
    record_failure,
)
from tests.helpers.comparing import assert_close
from tests.helpers.trees import ramp

GOOD, BAD = ramp(6, start=-3.0), ramp(6, start=0.0)
TEXT = "x is too large"


def small(x):
    """The check of these tests."""
    return pm.error_if(x, x > 3, TEXT)


def failure(call, *args):
    """The error of a failed check."""
    with pytest.raises(CheckError, match=rf"\A{TEXT}") as caught:
        call(*args)
    return caught.value


def each(check, x):
    """The check on one element after the other, by a scan."""
    return jax.lax.scan(lambda carry, y: (carry, check(y)), 0, x)[1]


# ---- the parts, without a program


def fails(check):
    """A call in which a check fails; the result says how many failures its call has."""
    return lambda: record_failure(check, lambda: CheckError(TEXT))


@pytest.mark.parametrize("is_once", [False, True])
def test_a_call_raises_the_failure_of_its_own_check(is_once):
    """Once it is done."""
    done = []

    def call():
        done.append(fails("mine")())

    with pytest.raises(CheckError, match=TEXT):
        call_checked({"mine"}, call, is_once=is_once)

    assert done == [True]


def test_a_call_knows_nothing_of_other_checks():
    """No call waits for them, and none raises."""
    assert call_checked({"mine"}, fails("other"), is_once=False) == 0
    assert fails("mine")() == 0


def test_an_error_of_the_call_is_replaced_by_the_failure_that_it_has_from():
    """The failure has the error as its cause; without a failure the error is unchanged."""
    broken = ZeroDivisionError("broken")

    def call(check):
        fails(check)()
        raise broken

    with pytest.raises(CheckError, match=TEXT) as caught:
        call_checked({"mine"}, lambda: call("mine"), is_once=False)
    assert caught.value.__cause__ is broken
    with pytest.raises(ZeroDivisionError, match="broken"):
        call_checked({"mine"}, lambda: call("other"), is_once=False)


def raised_into_jax(error):
    """A failure as JAX raises it: an error of JAX, with the traceback as its message."""
    with pytest.raises(CheckError, match=TEXT) as caught:
        raise_into_jax(error)
    names = [entry.name for entry in caught.traceback]
    return RuntimeError(f"CheckError: {TEXT}, in {names[-1]}")


def test_a_failure_that_no_call_waits_for_is_raised_once():
    """By the function in which it was raised; its text alone says nothing."""
    first, second = CheckError(TEXT), CheckError(TEXT)
    of_first, of_second = raised_into_jax(first), raised_into_jax(second)

    @raises_checks
    def call(error):
        raise error

    with pytest.raises(CheckError, match=TEXT) as caught:
        call(of_second)
    assert caught.value is second
    with pytest.raises(RuntimeError, match="CheckError: x is too large, in failure_"):
        call(of_second)
    with pytest.raises(CheckError, match=TEXT) as caught:
        call(of_first)
    assert caught.value is first


# ---- programs


def other_check(x):
    return pm.error_if(x, x > 99, "never") + 1


def printing(x):
    """With an effect, so that no call may be made twice."""
    jax.debug.callback(lambda x: None, x)
    return small(x)


# Functions that run in two threads: with a passing and with a failing check.
AT_ONCE = {
    "two programs": (pm.filter_jit(other_check), pm.filter_jit(small)),
    "one program": (pm.filter_jit(small),) * 2,
    "one line in two programs": (pm.filter_jit(lambda x: small(x) + 1), pm.filter_jit(small)),
    "donated": (pm.filter_jit(lambda x: small(x), donate="x"),) * 2,
    "donated in one": (pm.filter_jit(small), pm.filter_jit(small, donate="x")),
    "with an effect": (pm.filter_jit(printing),) * 2,
    "compiled": (pm.filter_jit(small).lower(GOOD).compile(),) * 2,
    "scanned": (pm.filter_jit(lambda x: each(small, x)),) * 2,
}


@pytest.fixture
def switching():
    """Threads that take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize(("fine", "failing"), AT_ONCE.values(), ids=AT_ONCE.keys())
@pytest.mark.sampled
def test_a_failure_is_raised_in_its_own_thread(fine, failing):
    """Of calls at once, of one program or of two, only that raises whose check failed."""
    start = threading.Barrier(4)

    def run(call, x):
        start.wait()
        return [caught(call, jnp.copy(x)) for _ in range(20)]

    def caught(call, x):
        try:
            jax.block_until_ready(call(x))
        except CheckError:
            return True
        return False

    with ThreadPoolExecutor(4) as pool:
        jobs = [(fine, GOOD), (failing, BAD), (fine, GOOD), (failing, BAD)]
        results = [pool.submit(run, *job) for job in jobs]

    assert [set(result.result()) for result in results] == [{False}, {True}] * 2


class Meeting:
    """A function for a program to call back, which lets calls of it meet."""

    def __init__(self, count=1, patience=20):
        self.barrier = threading.Barrier(count)
        self.patience = patience
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        with contextlib.suppress(threading.BrokenBarrierError):
            self.barrier.wait(self.patience)
        return x


@pytest.mark.parametrize("donate", ["none", "x"])
@pytest.mark.slow
def test_calls_that_share_a_failure_are_made_again(donate):
    """With a failure between them, calls are repeated, each alone; never one that donates."""
    # A single thread waits until the timeout.
    meeting = Meeting(patience=1)

    def meet(x):
        return jax.pure_callback(meeting, x, x)

    # Before the check and after it, so that both wait when it fails.
    call = pm.filter_jit(lambda x: meet(small(meet(x))), donate=donate)
    failure(call, jnp.copy(BAD))
    first, meeting.barrier = meeting.calls, threading.Barrier(2)

    def run(x):
        try:
            return call(jnp.copy(x))
        except CheckError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        passed, failed = pool.map(run, [GOOD, BAD])

    assert_close(passed, GOOD)
    assert isinstance(failed, CheckError)
    assert first == 2
    assert meeting.calls - first == (8 if donate == "none" else 4)


@pytest.mark.parametrize(
    "elsewhere",
    [jax.jit(small), pm.filter_vmap(jax.jit(small))],
    ids=["jax.jit", "filter_vmap"],
)
def test_a_waiting_call_knows_nothing_of_other_programs(elsewhere):
    """The same check, in a program that no call waits for, raises there and nowhere else."""
    meeting = Meeting(2)

    def meet(x):
        return jax.pure_callback(meeting, x, x)

    call = pm.filter_jit(lambda x: meet(small(meet(x))))
    with ThreadPoolExecutor(1) as pool:
        passed = pool.submit(call, GOOD)
        meeting(None)
        # Now the other thread waits, until it is met again.
        with pytest.raises((RuntimeError, ValueError), match=TEXT):
            jax.block_until_ready(elsewhere(BAD))
        meeting(None)
        assert_close(passed.result(), GOOD)


def test_calls_inside_of_calls_of_one_thread():
    """A thread does not wait for itself."""
    inner = pm.filter_jit(small, donate="x")
    call = pm.filter_jit(lambda x: small(inner(x)), donate="x")

    assert_close(call(jnp.copy(GOOD)), GOOD)
    failure(call, jnp.copy(BAD))


@pytest.mark.parametrize("text", ["hi", "", "nan", "x"])
def test_an_old_failure_is_not_taken_for_a_later_error(text):
    """The text of a check that failed under plain JAX may be in any other error's."""
    compiled = jax.jit(lambda x: pm.error_if(x, x > 3, text))
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="CheckError"):
        jax.block_until_ready(compiled(BAD))

    with pytest.raises(ArgumentError, match=r"filter_vmap\(in_axes\): expected names of arguments"):
        pm.filter_vmap(lambda x, hi=1: x, in_axes={"hi": 0})(BAD)
    with pytest.raises(ValueError, match="this is nan, or x") as caught:
        pm.filter_vmap(raising)(BAD)
    assert type(caught.value) is ValueError


def raising(x):
    raise ValueError("this is nan, or x")


def test_failures_of_one_text_are_told_apart():
    """Each error of JAX's becomes the failure that it was made of, once."""
    compiled = [jax.jit(lambda x, i=i: pm.error_if(x, x > i, TEXT)) for i in range(3)]
    errors = []
    for call in compiled:
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=TEXT) as caught:
            jax.block_until_ready(call(BAD + 99))
        errors.append(caught.value)

    for error in errors[::-1]:
        with pytest.raises(CheckError, match=TEXT) as caught:
            raise_recorded(error)
        assert caught.value.__cause__ is error
        # No call owns it any more.
        raise_recorded(error)


@pytest.mark.slow
def test_a_callback_in_a_thread_of_jaxs_may_call_what_has_the_same_check():
    """Programs that take long run in another thread: it must not wait for the call around it.

    If it does, this test waits for ever.
    """
    inner = pm.filter_jit(small)
    inner(GOOD)

    def host(x):
        del x
        threads.append(threading.get_ident())
        return inner(GOOD)

    @pm.filter_jit
    def outer(matrix):
        for _ in range(5):
            matrix = small(matrix @ matrix / len(matrix))
        return jax.pure_callback(host, GOOD, matrix[0, 0])

    threads = []
    assert_close(outer(jnp.full((1500, 1500), GOOD[0]) * 1e-3), GOOD)
    assert threads != [threading.get_ident()]
