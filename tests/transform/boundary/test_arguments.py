"""Arguments of a transformed function reach the parameters that Python chooses."""

import functools as ft
import itertools

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.trees import ramp


def subtract(x, y=2.0):
    return x - y


def defaulting(x=1.0, /, **kwargs):
    return x, kwargs


def only_by_position(x, y, /):
    return x - y


def half_by_position(x, /, y, *, z=0.0):
    return x, y, z


@jax.custom_jvp
def customized(x, y):
    return x - y


customized.defjvp(lambda primals, tangents: (customized(*primals), tangents[0]))


class Subtraction:
    """A plain object with methods of all kinds."""

    def __call__(self, x, y=3.0, *, z=0.0):
        return x, y, z

    def method(self, y, x=1.0):
        return y, x

    @classmethod
    def of_class(cls, x, /, y=1.0):
        return x, y

    @staticmethod
    def static(x, y=1.0):
        return x, y


class Called(pm.Module):
    w: jax.Array

    def __call__(self, x, /, y=2.0):
        return self.w * x, y

    @pm.filter_jit
    def jitted(self, x, y=1.0):
        return self.w * x, y


CALLABLES = {
    "function": subtract,
    "defaulting": defaulting,
    "only by position": only_by_position,
    "half by position": half_by_position,
    "jax.jit": jax.jit(subtract),
    "filter_checkpoint": pm.filter_checkpoint(half_by_position),
    "partial": ft.partial(half_by_position, z=5.0),
    "Partial": pm.Partial(subtract, 1.0),
    "object": Subtraction(),
    "method": Subtraction().method,
    "static method": Subtraction().static,
    "module": Called(jnp.float32(3)),
    "module's method": Called(jnp.float32(3)).jitted,
}
STYLES = list(itertools.product(range(3), ["", "x", "y", "yx", "xz", "xyz"]))
WITH_KEYWORDS = {
    "filter_jit": pm.filter_jit,
    "filter_vmap": pm.filter_vmap,
}


# A transform that compiles is tested with fewer signatures.
STRIDE = 5


def outcome(fn, count, names):
    """The result of a call with this number of positional arguments, and these keywords."""
    arrays = iter([ramp(2, start=jnp.float32(10 * i)) for i in range(1, 8)])
    args = [next(arrays) for _ in range(count)]
    try:
        return fn(*args, **{name: next(arrays) for name in names})
    except TypeError:
        return TypeError


@pytest.mark.parametrize("transform", WITH_KEYWORDS)
@pytest.mark.parametrize("name", CALLABLES)
@pytest.mark.sampled
def test_arguments_go_where_python_sends_them(name, transform):
    """However you write a call, the function gets the arguments of plain Python, or both refuse."""
    fn = CALLABLES[name]
    made = WITH_KEYWORDS[transform](fn)
    styles = STYLES if transform == "filter_vmap" else STYLES[::STRIDE]
    for style in styles:
        expected = outcome(fn, *style)
        if transform == "filter_vmap" and style == (0, ""):
            continue  # There is nothing to map.
        found = outcome(made, *style)
        assert (found is TypeError) == (expected is TypeError), style
        if expected is not TypeError:
            assert jax.tree.structure(found) == jax.tree.structure(expected), style
            assert_close(found, expected)


def test_options_by_name_mean_the_argument_that_is_there():
    """However the call is written, by position or by name."""
    x, y = ramp(2), ramp(2) * 10

    for options in ({"x": None}, (None, 0)):
        made = pm.filter_vmap(subtract, in_axes=options)
        for found in (made(x, y), made(y=y, x=x), made(x, y=y)):
            assert_close(found, x[None] - y[:, None])
    for call in (lambda f, x, y: f(x, y), lambda f, x, y: f(y=y, x=x)):
        kept, given = jnp.copy(x), jnp.copy(y)
        call(pm.filter_jit(subtract, donate="y"), kept, given)
        assert given.is_deleted()
        assert not kept.is_deleted()


def test_two_things_of_one_name_have_each_their_own_axes():
    """A positional-only parameter, and a keyword that is caught."""
    x = ramp(2)

    found = pm.filter_vmap(defaulting)((x, 1.0), x=(x, x, x))
    assert_same(found, ((x, 1.0), {"x": (x, x, x)}))


def test_the_first_argument_is_kept_however_it_is_given():
    """`all-except-first` counts positions; by keyword, the first is the first of the signature."""
    for call in (lambda f, a, b: f(a, b), lambda f, a, b: f(y=b, x=a)):
        first, second = ramp(2), ramp(2)
        call(pm.filter_jit(lambda x, y: (x, y), donate="all-except-first"), first, second)
        assert not first.is_deleted()
        assert second.is_deleted()


def test_positional_only_parameters_and_catch_all_keywords():
    """A keyword that bears the name of a positional-only parameter goes where Python sends it."""

    def catch(x, /, **kwargs):
        return x, kwargs

    for transform in (pm.filter_jit, pm.filter_vmap):
        found = transform(catch)(ramp(2), x=ramp(2))
        assert_same(found, (ramp(2), {"x": ramp(2)}))
