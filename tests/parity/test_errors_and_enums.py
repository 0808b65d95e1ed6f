"""`error_if`, `branched_error_if` and `Enumeration`."""

import jax
import jax.numpy as jnp
import pytest

from tests.parity.helpers import caught, ramp, same_under_both_imports

# Everything here compiles twice, so it is slow. The features have their own tests.
pytestmark = pytest.mark.slow

GOOD, BAD = ramp(4, start=-2.0, stop=1.0), ramp(4, start=0.0, stop=6.0)
TEXT = "x is too large"


def fails(call, *args, about=TEXT):
    """Whether the call raises a RuntimeError with the message in its text."""
    return isinstance(caught(lambda: call(*args), about=about), RuntimeError)


def checked(eqx):
    return lambda x: eqx.error_if(x, x > 3, TEXT)


def squares(eqx):
    return lambda x: jnp.sum(checked(eqx)(x) ** 2)


PROGRAMS = {
    "call": checked,
    "grad": lambda eqx: jax.grad(squares(eqx)),
    "checkpoint": lambda eqx: eqx.filter_grad(eqx.filter_checkpoint(squares(eqx))),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
@same_under_both_imports
def test_checks_in_compiled_code(eqx, program):
    """A passing check returns its argument, a failing one raises, under every transform."""
    jitted = eqx.filter_jit(program(eqx))
    return jitted(GOOD), fails(jitted, BAD), jitted(GOOD / 2)


@same_under_both_imports
def test_nan_and_off(eqx):
    """`nan` replaces floats where the check fails, `off` nothing; derivatives are those of x."""

    def result(mode):
        check = eqx.filter_jit(lambda x: eqx.error_if(x, x > 3, TEXT, on_error=mode))
        return check(BAD), jax.grad(lambda x: jnp.sum(check(x)))(BAD), check(GOOD)

    return result("nan"), result("off")


def results(eqx):
    class Base(eqx.Enumeration):
        success = "All is well."
        failure = "It did not work."

    class Derived(Base):
        late = "It took too long."

    return Base, Derived


@same_under_both_imports
def test_messages_and_comparisons(eqx):
    """Items have messages, lengths count them, and items of one class can be compared."""
    base, derived = results(eqx)
    return (
        [base[base.success], base[base.failure], derived[derived.failure], derived[derived.late]],
        (len(base), len(derived)),
        [bool(base.success == base.success), bool(base.success == base.failure)],
        [bool(base.success != base.success), bool(base.success != base.failure)],
    )


@same_under_both_imports
def test_errors_of_items(eqx):
    """item.error_if raises with the message of the item."""
    base, _ = results(eqx)

    @eqx.filter_jit
    def f(item, x):
        return item.error_if(x, item != base.success)

    return (
        f(base.success, GOOD),
        fails(f, base.failure, GOOD, about="It did not work."),
        fails(base.success.error_if, GOOD, True, about="All is well."),
    )
