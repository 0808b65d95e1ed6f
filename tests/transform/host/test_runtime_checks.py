"""error_if: where a failing check raises, its message, and the cost without a check."""

import logging
import os
import re
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError, CheckError
from pytreemod.transform.host.runtime_checks import BREAKPOINT_FRAMES, ON_ERROR, checks_in
from tests.goldens import refusals
from tests.helpers.comparing import assert_close
from tests.helpers.trees import Affine, affine, ramp

GOOD, BAD = ramp(6, start=-3.0), ramp(6, start=0.0)
TEXT = "x is too large"


def small(x):
    """The check of these tests."""
    return pm.error_if(x, x > 3, TEXT)


def no_check(x):
    return x


def has_check(jitted, x=GOOD):
    """Whether a call of a function under filter_jit waits for its results."""
    return jitted.find((x,), {})[0].has_check


def failure(call, *args):
    """The error of a failed check."""
    with pytest.raises(CheckError, match=rf"\A{TEXT}") as caught:
        call(*args)
    return caught.value


def squares(check):
    return lambda x: jnp.sum(check(x) ** 2)


def each(check, x):
    """The check on one element after the other, by a scan."""
    return jax.lax.scan(lambda carry, y: (carry, check(y)), 0, x)[1]


def repeated(check, x):
    """The check twice, by a while loop."""
    more, body = lambda c: c[0] < 2, lambda c: (c[0] + 1, check(c[1]))
    return jax.lax.while_loop(more, body, (0, x))[1]


PROGRAMS = {
    "call": lambda check: check,
    "filter_jit": pm.filter_jit,
    "jax.jit": jax.jit,
    "vmap": jax.vmap,
    "filter_vmap": pm.filter_vmap,
    "vmap of vmap": lambda check: lambda x: jax.vmap(jax.vmap(check))(x.reshape(2, 3)),
    "jit of vmap of jit": lambda check: jax.vmap(pm.filter_jit(check)),
    "scan": lambda check: lambda x: each(check, x),
    "scan of vmap": lambda check: lambda x: each(jax.vmap(check), x.reshape(2, 3)),
    "vmap of scan": lambda check: lambda x: jax.vmap(lambda y: each(check, y))(x.reshape(2, 3)),
    "while_loop": lambda check: lambda x: repeated(check, x),
    "fori_loop": lambda check: lambda x: jax.lax.fori_loop(0, 2, lambda _, y: check(y), x),
    "cond": lambda check: lambda x: jax.lax.cond(x[0] > -9, check, no_check, x),
    "switch": lambda check: lambda x: jax.lax.switch(1, [no_check, check], x),
    "grad": lambda check: jax.grad(squares(check)),
    "filter_grad": lambda check: pm.filter_grad(squares(check)),
    "value_and_grad": lambda check: pm.filter_value_and_grad(squares(check)),
    "vmap of grad": lambda check: jax.vmap(jax.grad(squares(check))),
    "hessian": lambda check: jax.hessian(lambda x: jnp.sum(check(x) ** 3)),
    "jvp": lambda check: lambda x: jax.jvp(check, (x,), (x,)),
    "vjp": lambda check: lambda x: jax.vjp(lambda y: check(y) ** 2, x)[1](x),
    "linearize": lambda check: lambda x: jax.linearize(lambda y: check(y) ** 2, x)[1](x),
    "checkpoint": lambda check: jax.grad(squares(jax.checkpoint(check))),
    "filter_checkpoint": lambda check: pm.filter_grad(squares(pm.filter_checkpoint(check))),
    "in a Module": lambda check: lambda x: check(Affine(jnp.eye(6), 0 * x)(x)),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
@pytest.mark.sampled
def test_under_every_transform(program):
    """Where the check holds, the result is that without it; where not, each call raises."""
    checked, plain = pm.filter_jit(program(small)), pm.filter_jit(program(no_check))

    assert_close(checked(GOOD), plain(GOOD))
    assert has_check(checked)
    assert not has_check(plain)
    for _ in range(2):
        failure(checked, BAD)
    assert_close(checked(GOOD), plain(GOOD))


EAGER = {
    "call": (small, BAD),
    "vmap": (jax.vmap(small), BAD),
    "vmap of vmap": (jax.vmap(jax.vmap(small)), BAD.reshape(2, 3)),
    "grad": (jax.grad(squares(small)), BAD),
    "jvp": (lambda x: jax.jvp(small, (x,), (x,)), BAD),
    "NumPy": (small, np.asarray(BAD)),
}


@pytest.mark.parametrize(("program", "x"), EAGER.values(), ids=EAGER.keys())
@pytest.mark.sampled
def test_eagerly(program, x):
    """Outside of jit the check itself raises, also under vmap and grad."""
    jax.block_until_ready(program(x - 9))
    failure(program, x)


JITTED = pm.filter_jit(small)
LOSS = pm.filter_jit(squares(small))
COMPILED_INSIDE = {
    "filter_vmap": pm.filter_vmap(JITTED),
    "filter_vmap of jax.jit": pm.filter_vmap(jax.jit(small)),
    "jax.vmap": jax.vmap(JITTED),
    "jax.grad": jax.grad(LOSS),
    "filter_grad": pm.filter_grad(LOSS),
    "filter_value_and_grad": pm.filter_value_and_grad(LOSS),
    "filter_vmap of filter_grad": pm.filter_vmap(pm.filter_grad(LOSS)),
    "filter_jvp": lambda x: pm.filter_jvp(JITTED, (x,), (x,)),
    "filter_vjp": lambda x: pm.filter_vjp(JITTED, x),
    "filter_linearize": lambda x: pm.filter_linearize(JITTED, x),
    "filter_jacfwd": pm.filter_jacfwd(JITTED),
    "filter_jacrev": pm.filter_jacrev(JITTED),
    "filter_hessian": pm.filter_hessian(LOSS),
    "filter_checkpoint": pm.filter_checkpoint(JITTED),
    "filter_scan": lambda x: pm.filter_scan(lambda carry, y: (carry, small(y)), 0, x),
    "filter_map": lambda x: pm.filter_map(small, x),
    "filter_associative_scan": lambda x: pm.filter_associative_scan(lambda a, b: a + JITTED(b), x),
    "filter_while_loop": lambda x: pm.filter_while_loop(
        lambda carry: carry[0] < 2, lambda carry: (carry[0] + 1, small(carry[1])), (0, x)
    ),
    "filter_fori_loop": lambda x: pm.filter_fori_loop(0, 2, lambda i, carry: small(carry), x),
    "filter_cond": lambda x: pm.filter_cond(x[0] > -99, small, no_check, x),
    "filter_switch": lambda x: pm.filter_switch(1, [no_check, small], x),
}


@pytest.mark.slow
@pytest.mark.parametrize("program", COMPILED_INSIDE.values(), ids=COMPILED_INSIDE.keys())
def test_a_filtered_transform_that_nothing_compiles(program):
    """A program that JAX compiles inside raises the check's error at each call, not JAX's."""
    jax.block_until_ready(program(BAD - 9))
    for _ in range(2):
        failure(program, BAD)


def test_other_errors_of_jax_arrive_undisturbed():
    """An error of a user's callback is not taken for the check that failed before."""

    def broken(x):
        raise ZeroDivisionError("not ours")

    call = jax.jit(lambda x: jax.pure_callback(broken, x, x, vmap_method="sequential"))
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=TEXT):
        jax.block_until_ready(jax.jit(small)(BAD))
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="not ours") as caught:
        jax.block_until_ready(pm.filter_vmap(call)(BAD))

    assert not isinstance(caught.value, CheckError)


def test_without_jit():
    """Under `jax.disable_jit` too."""
    with jax.disable_jit():
        assert_close(pm.filter_jit(small)(GOOD), GOOD)
        failure(pm.filter_jit(jax.vmap(small)), BAD)


def test_what_comes_back_is_x():
    """Eagerly, a check that holds gives back the very tree that it was given."""
    tree = {"layer": affine(), "text": "a", "numbers": [np.ones(2), 1.5, None]}

    assert pm.error_if(tree, False, TEXT) is tree
    assert pm.error_if(tree, jnp.zeros(3, bool), TEXT) is tree
    assert pm.error_if(tree, True, TEXT, on_error="off") is tree


def test_trees_go_through_compiled_checks():
    """Modules, keys, integers, strings, NumPy arrays come out of a check as they went in."""
    tree = [affine(), jax.random.key(3), jnp.arange(2), np.ones(2, np.float16), "text", 1.5, None]
    checked = pm.filter_jit(lambda tree, pred: pm.error_if(tree, pred, TEXT))

    assert pm.tree_equal(checked(tree, jnp.array(False)), tree)
    failure(checked, tree, jnp.array(True))


@pytest.mark.parametrize(
    "pred",
    [
        True,
        np.bool_(True),
        np.array([False, True]),
        jnp.array([[True, False]]),
        2,
        np.int64(-1),
        jnp.array([0, 3], jnp.uint8),
    ],
    ids=repr,
)
@pytest.mark.sampled
def test_any_true_is_a_failure(pred):
    """A predicate is a bool or an array of any shape, or a count; one True in it is enough."""
    failure(pm.error_if, ramp(2), pred, TEXT)
    failure(pm.filter_jit(lambda x: pm.error_if(x, pred, TEXT)), ramp(2))
    failure(pm.filter_jit(lambda x, p: pm.error_if(x, p, TEXT)), ramp(2), jnp.asarray(pred))


# ---- the message of the error


def notes(call, *args):
    return failure(call, *args).__notes__


PLACES = {
    "not mapped": (small, BAD, None),
    "mapped": (jax.vmap(small), BAD, "4, and 1 more"),
    "one failure": (jax.vmap(small), BAD[:5], "4"),
    "mapped twice": (jax.vmap(jax.vmap(small)), BAD.reshape(2, 3), "(1, 1), and 1 more"),
    "other axis": (jax.vmap(jax.vmap(small), in_axes=1), BAD.reshape(2, 3), "(1, 1), and 1 more"),
    "arrays in a batch": (jax.vmap(small), BAD.reshape(2, 3), "1"),
    "in a scan": (lambda x: each(jax.vmap(small), x.reshape(3, 2)), BAD, "0, and 1 more"),
    "around a scan": (jax.vmap(lambda x: each(small, x)), BAD.reshape(2, 3), "1"),
    "of the gradient": (jax.vmap(jax.grad(squares(small))), BAD, "4, and 1 more"),
    "of another argument": (
        jax.vmap(lambda x, y: pm.error_if(x, y > 3, TEXT) + y, in_axes=(None, 0)),
        (GOOD, BAD),
        "4, and 1 more",
    ),
}


def batch_notes(error):
    return [note for note in error.__notes__ if "batch" in note]


@pytest.mark.parametrize(("program", "x", "place"), PLACES.values(), ids=PLACES.keys())
@pytest.mark.sampled
def test_the_index_in_the_batch_is_named(program, x, place):
    """Under vmap a note says which member failed first, and how many others did."""
    error = failure(pm.filter_jit(program), *(x if type(x) is tuple else (x,)))

    assert batch_notes(error) == ([] if place is None else [f"for the batch index {place}"])


@pytest.mark.parametrize("name", ["not mapped", "mapped", "mapped twice", "of another argument"])
def test_the_index_in_the_batch_is_named_eagerly(name):
    """Outside of jit too."""
    program, x, place = PLACES[name]
    error = failure(program, *(x if type(x) is tuple else (x,)))

    assert batch_notes(error) == ([] if place is None else [f"for the batch index {place}"])


def test_the_line_of_the_check_is_named():
    """A note names the file, the line and the function of the check."""
    line = small.__code__.co_firstlineno + 2

    for call in (small, pm.filter_jit(small), pm.filter_jit(jax.vmap(small))):
        assert f"checked at {__file__}:{line}, in small" in notes(call, BAD)


def test_the_error_is_raised_from_the_users_line():
    """The traceback leads from the call to this library, and not through JAX."""
    jitted = pm.filter_jit(small)
    traceback = failure(jitted, BAD).__traceback__
    files = []
    while traceback is not None:
        files.append(traceback.tb_frame.f_code.co_filename)
        traceback = traceback.tb_next

    assert files[0] == __file__
    assert not any(os.sep + "jax" + os.sep in file for file in files)


def test_the_error_is_a_runtime_error():
    """`except RuntimeError` catches it, and so does Equinox's name for it."""
    error = failure(pm.filter_jit(small), BAD)

    assert isinstance(error, RuntimeError)
    assert isinstance(error, pm.EquinoxRuntimeError)


def test_the_first_of_several_checks_is_named():
    """Of two checks one after the other the first that fails is raised."""

    @pm.filter_jit
    def f(x):
        x = pm.error_if(x, x > 9, "never")
        x = pm.error_if(x, x > 3, TEXT)
        return each(lambda y: pm.error_if(y, y > 4, "later"), x)

    failure(f, BAD)


BRANCHED = {
    "traced": (lambda x, i: (x, x > 3, i), (BAD, jnp.int32(2)), "c"),
    "known": (lambda x: (x, x > 3, 1), (BAD,), "b"),
    "NumPy": (lambda x: (x, x > 3, np.int8(1)), (BAD,), "b"),
    "from the end": (lambda x, i: (x, x > 3, i), (BAD, jnp.int32(-1)), "c"),
    "one for each": (lambda x, i: (x, x > 3, i), (BAD, jnp.array([0, 0, 0, 0, 1, 2])), "b"),
    "too large": (lambda x, i: (x, x > 3, i), (BAD, jnp.int32(7)), "message 7 of 3"),
}


@pytest.mark.parametrize(("inputs", "args", "text"), BRANCHED.values(), ids=BRANCHED.keys())
def test_an_index_chooses_the_message(inputs, args, text):
    """The message is the one with the traced index; of several, that of the first failure."""

    def check(*args):
        return pm.branched_error_if(*inputs(*args), ["a", "b", "c"])

    with pytest.raises(CheckError, match=rf"\A{text}"):
        pm.filter_jit(check)(*args)
    if text != "message 7 of 3":
        with pytest.raises(CheckError, match=rf"\A{text}"):
            check(*args)


def test_each_member_of_a_batch_has_its_message():
    """Under vmap the message is that of the first member that fails."""

    def check(x, index):
        return pm.branched_error_if(x, x > 3, index, ["a", "b", "c"])

    indices = jnp.array([0, 0, 0, 0, 2, 1])
    for call in (jax.vmap(check), pm.filter_jit(jax.vmap(check))):
        with pytest.raises(CheckError, match=r"\Ac"):
            call(BAD, indices)


# ---- where a check takes effect, and its cost


def test_an_unused_check_is_dropped():
    """A check whose result is not used does nothing, and the program has no callback."""
    unused = pm.filter_jit(lambda x: (small(x), x)[1])

    assert_close(unused(BAD), BAD)
    assert "callback" not in unused.lower(BAD).compile().as_text()
    assert "callback" in pm.filter_jit(small).lower(BAD).compile().as_text()


def test_a_used_part_of_the_result_is_enough():
    """The check stays as long as one array of its result is used."""
    part = pm.filter_jit(lambda x, y: pm.error_if((x, y), x > 3, TEXT)[1])

    failure(part, BAD, ramp(1))


def test_only_a_function_with_a_check_waits():
    """Calls of other functions take the short road, also if their checks are off."""
    plain = pm.filter_jit(jnp.sin)
    off = pm.filter_jit(lambda x: pm.error_if(x, x > 3, TEXT, on_error="off"))
    nan = pm.filter_jit(lambda x: pm.error_if(x, x > 3, TEXT, on_error="nan"))
    checked = pm.filter_jit(small)
    for f in (plain, off, nan, checked):
        f(GOOD)

    assert [has_check(f) for f in (plain, off, nan, checked)] == [False, False, False, True]
    assert not any(f.find((GOOD,), {})[0].is_special for f in (plain, off, nan))


def test_a_check_that_can_not_fail_costs_nothing():
    """A predicate that is False when the function is traced leaves no trace of the check."""
    known = pm.filter_jit(lambda x: pm.error_if(x, x.ndim != 1, TEXT))
    known(GOOD)

    assert not has_check(known)
    assert jax.make_jaxpr(lambda x: pm.error_if(x, False, TEXT))(GOOD).eqns == []


def test_a_branch_that_is_not_taken_does_not_fail():
    """A check that always fails marks a branch that must not be reached: by an array."""

    @pm.filter_jit
    def f(reached, x):
        always = jnp.array(True)
        return jax.lax.cond(reached, lambda x: pm.error_if(x, always, TEXT), no_check, x)

    assert_close(f(jnp.array(False), BAD), BAD)
    failure(f, jnp.array(True), BAD)


KNOWN = {
    "eagerly": lambda check: check(BAD),
    "filter_jit": lambda check: pm.filter_jit(check)(BAD),
    "filter_jit, unused": lambda check: pm.filter_jit(lambda x: (check(x), x)[1])(BAD),
    "jax.jit, unused": lambda check: jax.jit(lambda x: (check(x), x)[1])(BAD),
    "filter_eval_shape": lambda check: pm.filter_eval_shape(check, BAD),
    "filter_vmap": lambda check: pm.filter_vmap(check)(BAD),
    "filter_grad": lambda check: pm.filter_grad(squares(check))(BAD),
    "filter_scan": lambda check: pm.filter_scan(lambda c, x: (c, check(x)), 0, BAD),
    "a branch": lambda check: pm.filter_cond(False, check, no_check, BAD),
    "without arrays": lambda check: check(0.5),
    "without arrays, in a program": lambda check: pm.filter_jit(check)("text"),
}


@pytest.mark.parametrize("run", KNOWN.values(), ids=KNOWN.keys())
@pytest.mark.sampled
def test_a_bool_is_decided_at_once(run):
    """True raises while tracing, wherever the result goes; False asks for no array."""
    failure(run, lambda x: pm.error_if(x, True, TEXT))
    failure(run, lambda x: pm.branched_error_if(x, True, 1, ["first", TEXT]))
    failure(run, lambda x: pm.error_if(x, True, TEXT, on_error="breakpoint"))
    run(lambda x: pm.error_if(x, False, TEXT))
    run(lambda x: pm.error_if(x, np.array(False), TEXT))
    run(lambda x: pm.error_if(x, True, TEXT, on_error="off"))


def test_what_is_known_needs_no_array():
    """Eagerly, an array of bools is known as well."""
    assert pm.error_if(0.5, jnp.array([False, False]), TEXT) == 0.5
    failure(lambda: pm.error_if("text", jnp.array([False, True]), TEXT))


def over_jit(check):
    inner = jax.jit(check)
    return lambda x, scale: inner(x) * scale


def over_scan(check):
    body = lambda carry, y: (carry, check(y))  # noqa: E731
    return lambda x, scale: jax.lax.scan(body, 0, x)[1] * scale


def over_while(check):
    more, body = lambda c: c[0] < 1, lambda c: (c[0] + 1, check(c[1]))
    return lambda x, scale: jax.lax.while_loop(more, body, (0, x))[1] * scale


def over_cond(check):
    return lambda x, scale: jax.lax.cond(x[0] > -9, check, no_check, x) * scale


def over_checkpoint(check):
    inner = jax.checkpoint(check)
    return lambda x, scale: inner(x) * scale


@pytest.mark.parametrize("over", [over_jit, over_scan, over_while, over_cond, over_checkpoint])
@pytest.mark.sampled
def test_a_check_in_code_that_jax_had_traced_before(over):
    """JAX keeps traces of inner functions; a check in one is found by every function around it."""
    program = over(lambda x: pm.error_if(x, x > 3, TEXT))
    for scale in (1.0, 2.0):
        jitted = pm.filter_jit(lambda x, scale=scale: program(x, scale))
        assert_close(jitted(GOOD), GOOD * scale)
        assert has_check(jitted)
        failure(jitted, BAD)


def test_a_check_in_an_inner_filter_jit_is_found_by_the_outer():
    """Whichever of the two is called first."""
    inner = pm.filter_jit(lambda x: small(x) + 1)
    for scale in (1.0, 2.0):
        outer = pm.filter_jit(lambda x, scale=scale: inner(x) * scale)
        outer(GOOD)
        assert has_check(outer)
        failure(outer, BAD)
        failure(inner, BAD)


def test_new_shapes_with_a_check():
    """A check that is there for some shapes only raises from the first call with one of them."""
    jitted = pm.filter_jit(lambda x: small(x) if x.ndim else x)

    assert jitted(jnp.float32(9.0)) == 9.0
    assert not has_check(jitted)
    failure(jitted, BAD)
    failure(jitted, BAD)
    assert has_check(jitted)
    assert jitted(jnp.float32(8.0)) == 8.0


def test_a_compiled_function_raises():
    """The result of `lower(...).compile()` raises as the jitted function does."""
    compiled = pm.filter_jit(small).lower(GOOD).compile()

    assert_close(compiled(GOOD), GOOD)
    failure(compiled, BAD)


def test_a_compiled_function_that_jax_had_compiled_before():
    """For another call, eagerly inside a transform without a listener: it raises as well."""

    def fresh(x):
        return small(x)

    inside = pm.filter_checkpoint(pm.filter_jit(fresh))
    jax.block_until_ready(inside(GOOD))
    failure(inside, BAD)

    failure(pm.filter_jit(fresh).lower(GOOD).compile(), BAD)


def test_donated_arguments():
    """A function that donates its argument raises from the call, too."""
    jitted = pm.filter_jit(lambda x: small(x) + 1, donate="x")

    assert_close(jitted(GOOD + 0), GOOD + 1)
    failure(jitted, BAD + 0)


def test_names_of_checks_in_a_program():
    """Each line with a check has one name, the same in every trace."""

    def names(f, x=GOOD):
        return checks_in(jax.make_jaxpr(f)(x))

    assert names(jnp.sin) == frozenset()
    assert len(names(small)) == 1
    assert names(small) == names(jax.vmap(small)) == names(jax.grad(squares(small)))
    assert len(names(lambda x: pm.error_if(small(x), x < -9, "other"))) == 2


def test_nothing_is_said_elsewhere(capfd, caplog):
    """A failure is the error alone: nothing printed or logged, no filter touched."""

    def fresh(x):
        # JAX logs it for programs that it has compiled without a listener.
        return small(x)

    logger = logging.getLogger("jax")
    before = (list(warnings.filters), logger.level, list(logger.handlers), list(logger.filters))
    with caplog.at_level(logging.WARNING):
        for call in (pm.filter_jit(fresh), pm.filter_jit(jax.vmap(fresh)), fresh):
            failure(call, BAD)

    assert capfd.readouterr() == ("", "")
    assert caplog.records == []
    assert before == (
        list(warnings.filters),
        logger.level,
        list(logger.handlers),
        list(logger.filters),
    )


# ---- other reactions to a failure


def test_off():
    """`off` leaves nothing of the check."""

    def off(x):
        return pm.error_if(x, x > 3, TEXT, on_error="off")

    assert_close(off(BAD), BAD)
    assert "cond" not in str(jax.make_jaxpr(off)(BAD))


def poisoned(x, pred):
    return pm.error_if((x, jnp.arange(2), jax.lax.complex(x, x)), pred, TEXT, on_error="nan")


@pytest.mark.parametrize("jit", [pm.filter_jit, jax.jit], ids=["filtered", "jax"])
def test_nan(jit):
    """`nan` replaces floating arrays, in the members that fail, and changes no derivative."""
    mapped = jit(jax.vmap(poisoned, in_axes=(None, 0)))
    floats, integers, numbers = mapped(ramp(2), jnp.array([False, True]))
    gradient = jit(jax.grad(lambda x: jnp.sum(poisoned(x, x > 1)[0])))(ramp(2))

    assert_close(floats[0], ramp(2))
    assert_close(integers, jnp.array([[0, 1], [0, 1]]))
    assert np.isnan([floats[1], numbers[1]]).all()
    assert_close(gradient, jnp.ones(2))


def test_nan_eagerly():
    """`nan` raises nothing outside of jit either."""
    floats, integers, numbers = poisoned(ramp(2), True)

    assert np.isnan([floats, numbers]).all()
    assert_close(integers, jnp.arange(2))


def test_the_environment_names_the_default(monkeypatch):
    """PYTREEMOD_ON_ERROR sets `default`; an argument wins over it."""
    monkeypatch.setenv(ON_ERROR, "off")
    assert_close(small(BAD), BAD)
    assert_close(pm.filter_jit(lambda x: small(x))(BAD), BAD)
    with pytest.raises(CheckError, match=TEXT):
        pm.error_if(BAD, BAD > 3, TEXT, on_error="raise")
    monkeypatch.setenv(ON_ERROR, "nan")
    assert np.isnan(small(BAD)).all()
    monkeypatch.delenv(ON_ERROR)
    failure(small, BAD)


def test_the_environment_is_read_when_a_function_is_traced(monkeypatch):
    """A trace keeps the setting from the time of tracing."""
    jitted = pm.filter_jit(lambda x: small(x))
    jitted(GOOD)
    monkeypatch.setenv(ON_ERROR, "off")

    failure(jitted, BAD)


@pytest.fixture
def debugger(monkeypatch):
    """A fake debugger instead of JAX's; a list of `(num_frames, x, pred)`."""
    opened = []

    def breakpoint(*, num_frames, token):
        shown = sys._getframe(1).f_locals
        opened.append((num_frames, shown["x"], shown["pred"]))
        return token

    monkeypatch.setattr(jax.debug, "breakpoint", breakpoint)
    return opened


@pytest.mark.parametrize("transform", [no_check, jax.vmap], ids=["one", "mapped"])
@pytest.mark.parametrize("jit", [no_check, pm.filter_jit], ids=["eager", "jitted"])
def test_breakpoint(transform, jit, debugger, capsys):
    """`breakpoint` prints the failure, opens a debugger that shows x and pred, then raises."""

    def stop(x):
        return pm.error_if({"x": x}, x > 3, TEXT, on_error="breakpoint")["x"]

    error = failure(jit(transform(stop)), BAD)

    num_frames, x, pred = debugger[-1]
    assert num_frames == 1
    assert x["x"].shape == BAD.shape
    assert pred.dtype == bool
    assert TEXT in capsys.readouterr().err
    assert ("batch index 4" in str(error.__notes__)) == (transform is jax.vmap)


def test_breakpoint_shows_more_frames_on_demand(debugger, monkeypatch):
    """PYTREEMOD_ON_ERROR_BREAKPOINT_FRAMES is how many frames the debugger shows."""
    monkeypatch.setenv(BREAKPOINT_FRAMES, "3")
    monkeypatch.setenv(ON_ERROR, "breakpoint")
    failure(pm.filter_jit(lambda x: small(x)), BAD)

    assert debugger[-1][0] == 3


def test_settings_of_equinox_are_heard(monkeypatch, debugger):
    """A script that sets EQX_ON_ERROR works unchanged; where both are set, ours decides."""
    theirs = [name.replace("PYTREEMOD", "EQX") for name in (ON_ERROR, BREAKPOINT_FRAMES)]
    for name, value in zip(theirs, ("breakpoint", "4"), strict=True):
        monkeypatch.setenv(name, value)

    failure(pm.filter_jit(lambda x: small(x)), BAD)
    assert debugger[-1][0] == 4

    monkeypatch.setenv(BREAKPOINT_FRAMES, "3")
    failure(pm.filter_jit(lambda x: small(x)), BAD)
    assert debugger[-1][0] == 3

    monkeypatch.setenv(ON_ERROR, "off")
    assert_close(small(BAD), BAD)

    monkeypatch.delenv(ON_ERROR)
    monkeypatch.setenv(theirs[0], "on")
    with pytest.raises(ArgumentError, match=r"^EQX_ON_ERROR: expected one of raise, .*got 'on'"):
        small(BAD)


# ---- mistakes


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        (
            ON_ERROR,
            "on",
            "PYTREEMOD_ON_ERROR: expected one of raise, breakpoint, nan, off, got 'on'.",
        ),
        (
            "PYTREEMOD_ON_ERROR_BREAKPOINT_FRAMES",
            "all",
            "PYTREEMOD_ON_ERROR_BREAKPOINT_FRAMES: expected a count of frames, got 'all'.",
        ),
    ],
)
def test_mistakes_in_the_environment(monkeypatch, name, value, text):
    """A variable with a value that means nothing is named."""
    monkeypatch.setenv(ON_ERROR, "breakpoint")
    monkeypatch.setenv(name, value)

    with pytest.raises(ArgumentError, match=rf"\A{re.escape(text)}"):
        pm.filter_jit(lambda x: small(x))(GOOD)


# ---- in a separate process: checks that might hang, or read from the terminal

SEVERAL_DEVICES = """
import faulthandler, jax, jax.numpy as jnp, pytreemod as pm
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
faulthandler.dump_traceback_later(100, exit=True)

def small(x): return pm.error_if(x, x > 3, "too large")

def mapped(f, out=P("d")): return jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=out)

def scanned(x): return jax.lax.scan(lambda c, y: (small(c + y), c), 0 * x, jnp.stack([x, x]))[0]

for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    sharded, whole = (NamedSharding(mesh, spec) for spec in (P("d"), P()))
    x, y = (jax.device_put(jnp.arange(16.0), sharding) for sharding in (sharded, whole))
    cases = {"sharded": (small, x), "grad": (jax.grad(lambda x: (small(x) ** 2).sum()), x)}
    if kind is AxisType.Auto:
        cases |= {
            "whole": (small, y),
            "vmap": (jax.vmap(small), x),
            "scan": (scanned, x),
            "shard_map": (mapped(small), x),
            "collective": (mapped(lambda x: jax.lax.psum(small(x), "d"), P()), x),
        }
    with jax.set_mesh(mesh):
        for name, (f, x) in cases.items():
            good = 0.1 * x
            filtered, plain = pm.filter_jit(f), jax.jit(f)
            assert jnp.isfinite(filtered(good)).all() and jnp.isfinite(plain(good)).all()
            try: raised = filtered(x) is None
            except pm.CheckError as error: raised = str(error) == "too large"
            poisoned = bool(jnp.isnan(plain(x)).any())
            print(kind.name, name, raised, poisoned, flush=True)
"""


def run(script, **options):
    """Run a script in a separate process."""
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    return subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        **options,
    )


@pytest.mark.slow
def test_several_devices():
    """On eight devices nothing hangs: filter_jit raises; jax.jit prints and gives NaN."""
    done = run(SEVERAL_DEVICES)

    assert done.returncode == 0, done.stderr
    assert [line.split()[2:] for line in done.stdout.splitlines()] == [["True", "True"]] * 9
    assert "CheckError: too large" in done.stderr
    assert "on several devices cannot raise it; filter_jit can" in done.stderr


DEBUGGER = """
import faulthandler, jax, jax.numpy as jnp, pytreemod as pm
faulthandler.dump_traceback_later(100, exit=True)

def stop(x): return pm.error_if(x, x > 3, "too large", on_error="breakpoint")

filtered = pm.filter_jit(stop)
for call in (filtered, pm.filter_jit(jax.vmap(stop)), stop):
    try: call(jnp.arange(6.0))
    except pm.CheckError as error: print("raised", error)
for clear in (jax.clear_caches, pm.clear_caches):
    clear()
    try: filtered(jnp.arange(6.0))
    except pm.CheckError as error: print("raised", error)
"""


@pytest.mark.slow
def test_a_debugger_without_a_terminal():
    """With standard input closed the debugger is left at once, and the check raises.

    So it does after all caches were cleared, which other tests in this process would feel.
    """
    done = run(DEBUGGER)

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Entering jdb") == 5
    assert done.stdout.count("raised too large") == 5


@pytest.mark.parametrize("end", [10, 2**30], ids=["that ends", "that ends by the check alone"])
def test_a_loop_with_a_failing_check_ends(end, caplog):
    """The counter was set to zero in each round: the call never returned."""

    def body(s):
        return pm.error_if(s, s >= 5, TEXT) + 1

    def run():
        return pm.filter_while_loop(lambda s: s < end, body, jnp.array(0))

    with caplog.at_level(logging.CRITICAL, "jax"):
        for call in (pm.filter_jit(run), run, pm.filter_jit(run)):
            with pytest.raises(CheckError, match=TEXT):
                call()


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
def test_what_is_no_float_goes_on_as_it_is(dtype):
    """The error is raised later, and until then the program computes with the old value."""
    seen = []

    @pm.filter_jit
    def run(x):
        x = pm.error_if(x, x.any(), TEXT)
        jax.debug.callback(lambda x: seen.append(np.asarray(x).tolist()), x)
        return x

    for values in ([0, 0], [1, 0]):
        x = jnp.array(values, dtype)
        try:
            run(x)
        except CheckError:
            assert values == [1, 0]
        jax.effects_barrier()
        assert seen.pop() == x.tolist()


@pytest.mark.parametrize("value", [1, 1.5, 1j, True, np.int8(3), np.uint8(250), np.float16(1)])
@pytest.mark.parametrize("on_error", ["raise", "nan"])
def test_a_weak_type_stays_weak(value, on_error):
    """`x` is returned unchanged, so that it promotes as it would without the check."""

    def check(x, pred):
        return pm.error_if(x, pred, "no", on_error=on_error)

    x, fine = jnp.asarray(value), jnp.asarray(False)
    for checked in (jax.jit(check)(x, fine), jax.vmap(check, (None, 0))(x, fine[None])):
        assert (checked.dtype, checked.weak_type) == (x.dtype, x.weak_type)


def test_plain_jit_passes_on_where_a_check_failed():
    """Index and line: JAX has the message of an error, and none of its notes."""

    def check(x):
        return pm.error_if(x, x < 0, "x must be non-negative")

    with pytest.raises(Exception, match=r"CheckError: x must be non-negative\n") as error:
        jax.block_until_ready(jax.jit(jax.vmap(check))(jnp.asarray([1.0, -1.0])))
    assert "for the batch index 1\n" in str(error.value)
    assert "test_runtime_checks.py" in str(error.value).split("checked at ")[1]


test_refusals = refusals(globals())
