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
from tests.helpers.equations import equations
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

    error, (y, name) = fn(ramp(2), "x")
    error.throw()
    assert (message(error), name) == ("", "x")
    assert_close(y, jnp.log(ramp(2)))
    error, _ = fn(ramp(2) - 2, "x")
    with pytest.raises(checkify.JaxRuntimeError, match=r"must be positive, is -1\.0"):
        error.throw()


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
def test_functions_that_were_traced_elsewhere(inner, before):
    """A trace from outside has no value for the error, and one from inside raises nothing."""
    jitted = pm.filter_jit(lambda x: small(x))
    over = TRACED_BEFORE.get(inner)
    fn = over(lambda x: small(x)) if over else lambda x, scale: jitted(x) * scale
    if before:
        with pytest.raises((CheckError, ValueError, jax.errors.JaxRuntimeError), match="too"):
            jax.block_until_ready(fn(BAD, 2.0))
    for x, text in ((BAD, TEXT), (GOOD, "")):
        error, out = checked(fn)(x, 2.0)
        assert message(error) == text
        assert_close(out, 2 * x)
    with pytest.raises(CheckError, match="too"):
        pm.filter_jit(fn)(BAD, 2.0)


def test_only_the_branch_that_is_taken():
    """A check in the other branch says nothing."""
    fn = checked(lambda flag, x: pm.filter_cond(flag, small, unchanged, x))
    found = [message(fn(jnp.array(flag), BAD)[0]) for flag in (False, True)]
    assert found == ["", TEXT]


def test_an_index_chooses_the_message():
    """As outside: from the end, too; and no failure is lost because of its index."""
    choose = lambda x, i: pm.branched_error_if(x, x > 3, i, ["a", "b", "c"])  # noqa: E731
    fn, each = checked(choose), jnp.array([0, 0, 0, 0, 1, 2, 2, 2])

    found = [message(fn(BAD, jnp.int32(index))[0])[:8] for index in (0, 2, -1, -3, 7)]
    assert found == ["a", "c", "c", "a", "there is"]
    assert message(fn(GOOD, jnp.int32(0))[0]) == ""
    assert message(fn(BAD, each)[0]) == "b"
    assert message(checked(jax.vmap(choose))(BAD, each)[0]) == "b"


def test_a_known_predicate_raises_at_once():
    """There is nothing to wait for."""
    with pytest.raises(CheckError, match="known"):
        checked(lambda x: pm.error_if(x, True, "known"))(BAD)


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


def test_under_vmap():
    """The error of a mapped function knows the index of the member."""
    for fn, x, first in ((small, BAD, 4), (lambda x: positive(x, "")[0], ramp(3) - 2, 0)):
        error, _ = pm.filter_vmap(pm.filter_checkify(fn))(x)
        assert f"at mapped index {first}" in error.get()
        assert "at mapped index 2" not in error.get()


def test_a_training_step():
    """The model is donated and returned; of two checks the first is reported."""

    def step(model, x):
        checkify.check(jnp.all(x < 999), "functional")
        loss, grads = pm.filter_value_and_grad(lambda m, x: jnp.sum(small(m["w"] * x)))(model, x)
        return {**model, "w": model["w"] - np.float32(0.1) * grads["w"]}, loss

    run, model = pm.filter_jit(pm.filter_checkify(step), donate="model"), {"w": ramp(2), "n": "n"}
    for size, expected in ((0.1, ""), (0.1, ""), (99, TEXT), (999, "functional")):
        error, (model, _) = run(model, np.float32(size) * ramp(2))
        assert (message(error), model["n"]) == (expected, "n")


def test_no_equation_is_added():
    """The program has the equations of JAX's checkify on the arrays."""
    ours = equations(lambda x: pm.filter_checkify(positive)(x, "x")[0], ramp(2))

    assert ours == equations(lambda x: checkify.checkify(lambda x: positive(x, "")[0])(x), ramp(2))
    assert sum(ours.values()) > 3


def test_what_is_no_set_of_checks_is_refused():
    """A name is no set."""
    with pytest.raises(ArgumentError, match="set of checks"):
        pm.filter_checkify(small, errors="nan")


# ---- time


def times(call, x):
    """Seconds until a call returns, and until its result is there; the best of two."""
    found = []
    for _ in range(3):
        start = time.perf_counter()
        out = call(x)
        returned = time.perf_counter() - start
        jax.block_until_ready(out)
        found.append((returned, time.perf_counter() - start))
    return min(found[1:])


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
def test_nothing_waits():
    """A call returns at once, as a call under jax.jit does; with `error_if` alone it waits."""

    def long(check):
        return lambda x: jax.lax.fori_loop(0, 40, lambda i, x: check(jnp.tanh(x @ x)), x)

    x, ok = jnp.eye(600) * 0.5, lambda x: pm.error_if(x, jnp.isnan(x), "NaN")
    returned, done = times(jax.jit(long(unchanged)), x)
    assert returned < done / 4, "JAX itself waits on this machine"
    for call in (checked(long(ok)), pm.filter_jit(long(unchanged))):
        returned, done = times(call, x)
        assert returned < done / 4
    returned, done = times(pm.filter_jit(long(ok)), x)
    assert returned > done / 2
