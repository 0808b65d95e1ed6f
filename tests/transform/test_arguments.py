"""Arguments of a transformed function reach the parameters that Python chooses."""

import functools as ft
import itertools

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import SpecError
from tests.helpers.comparing import assert_close
from tests.helpers.trees import ramp


def subtract(x, y=2.0):
    return x - y


def half_by_position(x, /, y, *, z=0.0):
    return x, y, z


class Called(pm.Module):
    w: jax.Array

    def __call__(self, x, /, y=2.0):
        return self.w * x, y

    @staticmethod
    def static(x, y=1.0, *, z=0.0):
        return x, y, z

    @pm.filter_jit
    def jitted(self, y, x=1.0):
        return self.w * x, y


CALLABLES = {
    "function": subtract,
    "defaulting": lambda x=1.0, /, **kwargs: (x, kwargs),
    "only by position": lambda x, y, /: x - y,
    "half by position": half_by_position,
    "filter_checkpoint": pm.filter_checkpoint(half_by_position),
    "partial": ft.partial(half_by_position, z=5.0),
    "Partial": pm.Partial(subtract, 1.0),
    "Module": Called(jnp.float32(3)),
    "static method": Called.static,
    "jitted method": Called(jnp.float32(3)).jitted,
}
STYLES = list(itertools.product(range(3), ["", "x", "y", "yx", "xz", "xyz"]))
# What compiles is tried with fewer styles; with no argument there is nothing to map.
TRANSFORMS = {
    "filter_jit": (pm.filter_jit, STYLES[::5]),
    "filter_vmap": (pm.filter_vmap, STYLES[1:]),
}


def outcome(fn, count, names):
    """The result of a call with this number of positional arguments, and these keywords."""
    arrays = iter([ramp(2, start=jnp.float32(10 * i)) for i in range(1, 8)])
    args = [next(arrays) for _ in range(count)]
    try:
        return fn(*args, **{name: next(arrays) for name in names})
    except TypeError:
        return TypeError


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", CALLABLES)
@pytest.mark.sampled
def test_arguments_go_where_python_sends_them(name, transform):
    """However you write a call, the function gets the arguments of plain Python, or both refuse."""
    fn, (wrap, styles) = CALLABLES[name], TRANSFORMS[transform]
    made = wrap(fn)
    for style in styles:
        found, expected = outcome(made, *style), outcome(fn, *style)
        assert (found is TypeError) == (expected is TypeError), style
        if expected is not TypeError:
            assert_close(found, expected)


def test_options_by_name_mean_the_argument_that_is_there():
    """However the options are written, and the call: by position or by name."""
    x, y = ramp(2), ramp(2) * 10
    for options in ({"x": None}, (None, 0)):
        made = pm.filter_vmap(subtract, in_axes=options)
        for found in (made(x, y), made(y=y, x=x)):
            assert_close(found, x[None] - y[:, None])


def test_the_options_of_an_only_argument_may_be_a_tree():
    """Of several arguments it would be a guess."""
    x, y = ramp(2), ramp(2) * 10
    for axes, tree in (({"a": 0, "b": None}, {"a": x, "b": y}), ([0, None], [x, y])):
        found = pm.filter_vmap(lambda t: subtract(*jax.tree.leaves(t)), in_axes=axes)(tree)
        assert_close(found, x[:, None] - y[None])
    for axes, args, match in [
        ([0, 0, 0], (x, y), "2 positional arguments, got 3"),
        ((0, None), (x,), "1 positional arguments, got 2"),
        (Called(0), (Called(x), y), "is for one argument, and the call has 2"),
    ]:
        with pytest.raises(SpecError, match=match):
            pm.filter_vmap(subtract, in_axes=axes)(*args)
