"""SameCode: functions made again by the same code are equal, and no others."""

import jax.numpy as jnp
import pytest

from pytreemod.debug.same_code import SameCode


def adding(number, step=1):
    """A function that has taken a number, with a default."""

    def add(x, step=step):
        return x + number + step

    return add


def test_the_same_code_with_the_same_values_is_equal():
    """Made twice; and a function that has taken another function."""
    one, two = SameCode(adding(1)), SameCode(adding(1))

    assert (one, hash(one)) == (two, hash(two))
    assert one(1) == 3

    def around(fn):
        return lambda x: fn(x)

    assert SameCode(around(adding(1))) == SameCode(around(adding(1)))
    assert SameCode(around(adding(1))) != SameCode(around(adding(2)))


@pytest.mark.parametrize(
    "other", [adding(2), adding(1.0), adding(True), adding(1, step=2), adding(1, step=1.0), adding]
)
def test_what_differs_is_another(other):
    """By kind, too: 1, 1.0 and True are equal to Python, and no programs are."""
    assert SameCode(adding(1)) != SameCode(other)


@pytest.mark.parametrize("value", [[1], {"a": 1}, jnp.ones(2)])
def test_what_may_change_is_compared_by_identity(value):
    """Lists, dicts and arrays have no hash: then the function is equal to itself alone."""
    fn = adding(value)

    assert SameCode(fn) == SameCode(fn)
    assert SameCode(fn) != SameCode(adding(value))


def test_a_function_that_calls_itself():
    """It has taken itself from around: by identity, and without end."""

    def make():
        def down(n):
            return 0 if n == 0 else down(n - 1)

        return down

    fn = make()
    assert SameCode(fn) == SameCode(fn)
    assert SameCode(fn) != SameCode(make())


def test_other_callables_are_compared_as_they_are():
    """A class, a builtin, a bound method; a value without a hash is refused."""
    assert SameCode(len) == SameCode(len)
    assert SameCode("a".join) == SameCode("a".join)

    class Unhashable:
        __hash__ = None

        def __call__(self):
            """Never called."""

    with pytest.raises(TypeError, match="unhashable"):
        SameCode(Unhashable())
