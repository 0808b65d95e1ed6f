"""Who raises a check that failed: the call that waits for it, and no other."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import CheckError
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
    "donated": (pm.filter_jit(lambda x: small(x), donate="x"),) * 2,
    "with an effect": (pm.filter_jit(printing),) * 2,
    "compiled": (pm.filter_jit(small).lower(GOOD).compile(),) * 2,
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


def test_calls_inside_of_calls_of_one_thread():
    """A thread does not wait for itself."""
    inner = pm.filter_jit(small, donate="x")
    call = pm.filter_jit(lambda x: small(inner(x)), donate="x")

    assert_close(call(jnp.copy(GOOD)), GOOD)
    failure(call, jnp.copy(BAD))


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


def test_an_old_failure_is_not_taken_for_a_later_error():
    """The text of a check that failed under plain JAX may be in any other error's."""

    def raising(x):
        raise ValueError("this is nan, or x")

    compiled = jax.jit(lambda x: pm.error_if(x, x > 3, "x"))
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="CheckError"):
        jax.block_until_ready(compiled(BAD))

    with pytest.raises(ValueError, match="this is nan, or x") as caught:
        pm.filter_vmap(raising)(BAD)
    assert type(caught.value) is ValueError
