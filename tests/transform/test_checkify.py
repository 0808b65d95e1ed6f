"""`filter_checkify`: checks as a value, which nothing waits for."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import pytreemod as pm
from pytreemod.errors import ArgumentError, CheckError
from tests.helpers.checked_programs import PROGRAMS, TRACED_BEFORE, unchanged
from tests.helpers.comparing import assert_close
from tests.helpers.trees import ramp

GOOD, BAD = ramp(8, start=-6.0), ramp(8, start=0.0)
TEXT = "x is {too} large"
BOTH = checkify.nan_checks | checkify.user_checks


def small(x):
    """The check of these tests; its message has braces, which mean something to checkify."""
    return pm.error_if(x, x > 3, TEXT)


def positive(x, name):
    """A check of JAX's, and a result that is no array."""
    checkify.check(jnp.all(x > 0), "must be positive, is {x}", x=jnp.min(x))
    return jnp.log(x), name


def checked(fn, **options):
    """The function under test."""
    return pm.filter_jit(pm.filter_checkify(fn, **options))


def message(error):
    """The message of an error, without its end; empty if there is none."""
    return (error.get() or "").split(" (")[0]


@pytest.mark.parametrize("through", [unchanged, pm.filter_jit], ids=["eager", "jitted"])
def test_checks_come_out_as_a_value(through):
    """A pair: the error, which has methods, and the result of the function."""
    fn = through(pm.filter_checkify(positive))

    error, out = fn(ramp(2), "x")
    assert (error.throw(), message(error), out[1]) == (None, "", "x")
    assert_close(out[0], jnp.log(ramp(2)))
    with pytest.raises(checkify.JaxRuntimeError, match=r"must be positive, is -1\.0"):
        fn(ramp(2) - 2, "x")[0].throw()


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.sampled
def test_error_if_becomes_a_value_under_every_transform(program):
    """The error has the message; the result is that without a check; outside, it raises again."""
    fn, plain = checked(program(small)), pm.filter_jit(program(unchanged))

    for x, text in ((GOOD, ""), (BAD, TEXT)):
        error, out = fn(x)
        assert text in message(error)
        assert bool(text) == bool(message(error))
        assert_close(out, plain(x))
    with pytest.raises(checkify.JaxRuntimeError, match="too"):
        error.throw()
    with pytest.raises(CheckError, match="too"):
        pm.filter_jit(program(small))(BAD)


@pytest.mark.parametrize("inner", ["filter_jit", *TRACED_BEFORE])
@pytest.mark.parametrize("before", [True, False], ids=["outside first", "inside first"])
@pytest.mark.sampled
def test_functions_that_were_traced_elsewhere(inner, before):
    """A trace from outside has no value for the error, and one from inside raises nothing."""
    jitted = pm.filter_jit(lambda x: small(x))
    over = TRACED_BEFORE.get(inner)
    fn = over(lambda x: small(x)) if over else lambda x, scale: jitted(x) * scale

    def outside():
        with pytest.raises((CheckError, ValueError, jax.errors.JaxRuntimeError), match="too"):
            jax.block_until_ready(fn(BAD, 2.0))
        for call in (pm.filter_jit(fn), pm.filter_jit(lambda *args: fn(*args))):
            with pytest.raises(CheckError, match="too"):
                call(BAD, 2.0)
            assert_close(call(GOOD, 2.0), 2 * GOOD)

    if before:
        outside()
    for x, text in ((BAD, TEXT), (GOOD, "")):
        error, out = checked(fn)(x, 2.0)
        assert message(error) == text
        assert_close(out, 2 * x)
    outside()


def test_an_index_chooses_the_message():
    """As outside: from the end, too; and no failure is lost because of its index."""
    choose = lambda x, i: pm.branched_error_if(x, x > 3, i, ["a", "b", "c"])  # noqa: E731
    first = jnp.array([0, 0, 0, 0, 1, 2, 2, 2])

    for index, text in ((2, "c"), (-1, "c"), (7, "there is"), (first, "b")):
        assert message(checked(choose)(BAD, jnp.asarray(index))[0]).startswith(text)
    assert message(checked(jax.vmap(choose))(BAD, first)[0]) == "b"
    assert message(checked(choose)(GOOD, first)[0]) == ""


ERRORS = {"nan": checkify.nan_checks, "index": checkify.index_checks, "none": frozenset()}


@pytest.mark.parametrize("errors", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("name", ["call", "jax.vmap", "scan", "jax.grad"])
@pytest.mark.sampled
def test_without_user_checks_a_check_is_as_outside(errors, name):
    """`error_if` is never dropped: JAX would drop its check."""
    fn = checked(PROGRAMS[name](small), errors=errors)

    error, out = fn(GOOD)
    assert message(error) == ""
    assert_close(out, pm.filter_jit(PROGRAMS[name](unchanged))(GOOD))
    with pytest.raises(CheckError, match="too"):
        fn(BAD)


def test_only_the_checks_that_were_asked_for():
    """By default it does not look for NaNs; both kinds can be asked for; other modes stay."""
    log = lambda x: jnp.log(small(x))  # noqa: E731

    error, out = checked(log)(-ramp(1))
    assert (message(error), bool(jnp.isnan(out[0]))) == ("", True)
    assert "nan" in message(checked(log, errors=BOTH)(-ramp(1))[0])
    assert message(checked(log, errors=BOTH)(BAD + 1)[0]) == TEXT
    for mode in ("nan", "off"):
        fn = lambda x, mode=mode: pm.error_if(x, x > 3, "no", on_error=mode)  # noqa: E731
        error, out = checked(fn)(BAD)
        assert message(error) == ""
        np.testing.assert_array_equal(out, pm.filter_jit(fn)(BAD))


def test_what_is_no_set_of_checks_is_refused():
    """A name is no set."""
    with pytest.raises(ArgumentError, match="set of checks"):
        pm.filter_checkify(small, errors="nan")


# ---- time


def waiting(call, x):
    """The share of a call's time until it returns; the smaller one of two."""
    jax.block_until_ready(call(x))
    found = []
    for _ in range(2):
        start = time.perf_counter()
        out = call(x)
        returned = time.perf_counter() - start
        jax.block_until_ready(out)
        found.append(returned / (time.perf_counter() - start))
    return min(found)


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
def test_nothing_waits():
    """A call returns at once, as a call under jax.jit does; with `error_if` alone it waits."""

    def long(check):
        return lambda x: jax.lax.fori_loop(0, 40, lambda i, x: check(jnp.tanh(x @ x)), x)

    x, ok = jnp.eye(600) * 0.5, lambda x: pm.error_if(x, jnp.isnan(x), "NaN")
    assert waiting(jax.jit(long(unchanged)), x) < 0.25, "JAX itself waits on this machine"
    assert waiting(pm.filter_jit(long(unchanged)), x) < 0.25
    assert waiting(checked(long(ok)), x) < 0.25
    assert waiting(pm.filter_jit(long(ok)), x) > 0.5


def test_one_member_of_a_map_may_fail():
    """The outputs are those of all members."""
    error, out = pm.filter_vmap(pm.filter_checkify(lambda x: pm.error_if(x, x > 2, "too large")))(
        jnp.arange(4.0)
    )

    assert out.tolist() == [0, 1, 2, 3]
    with pytest.raises(Exception, match="too large"):
        error.throw()
