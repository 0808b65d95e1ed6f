"""Partial and module_update_wrapper."""

import inspect

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import FieldError
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.trees import Holder, Wrapping, affine, double, ramp


def collect(*args, **kwargs):
    """The arguments of a call."""
    return args, kwargs


def test_partial_is_functools_partial():
    """Stored arguments come first, stored keywords join those of the call."""
    partial = pm.Partial(collect, 1, 2, a=3)

    assert partial(4, b=5) == ((1, 2, 4), {"a": 3, "b": 5})
    assert (partial.func, partial.args, partial.keywords) == (collect, (1, 2), {"a": 3})


def test_partial_is_a_tree():
    """A function is structure, a Module and the arguments are children."""
    assert jax.tree.leaves(pm.Partial(double, 1, a=[2])) == [1, 2]
    assert len(jax.tree.leaves(pm.Partial(affine(), ramp(3)))) == 3
    gradient = pm.filter_grad(lambda p: jnp.sum(p()))(pm.Partial(affine(), ramp(3)))
    assert_close(gradient.func.bias, jnp.ones(2))
    assert gradient.args[0].shape == (3,)


@pytest.mark.parametrize("name", ["func", "self", "args", "keywords"])
def test_keywords_may_bear_any_name(name):
    """A stored keyword does not collide with Partial's own."""
    assert pm.Partial(collect, **{name: 1})() == ((), {name: 1})
    assert pm.Partial(collect)(**{name: 1}) == ((), {name: 1})


def test_update_wrapper_copies_what_names_a_function():
    """Name, qualified name, docstring, module and annotations; the signature follows."""

    def annotated(x: int, y: str = "a") -> float:
        """Its docstring."""

    wrapped = pm.module_update_wrapper(Wrapping(annotated))
    assert (wrapped.__name__, wrapped.__doc__) == ("annotated", "Its docstring.")
    assert wrapped.__qualname__.endswith("annotated")
    assert wrapped.__module__ == __name__
    assert list(inspect.signature(wrapped).parameters) == ["x", "y"]
    assert wrapped.fn is annotated


def test_update_wrapper_keeps_the_module_a_module():
    """The tree has the same leaves."""
    wrapped = pm.module_update_wrapper(Wrapping(affine()))
    again = pm.filter_jit(lambda m: m)(jax.tree.map(lambda x: x, wrapped))

    assert len(jax.tree.leaves(wrapped)) == 2
    assert_same(again.fn, affine())
    assert pm.module_update_wrapper(Wrapping(max)).__name__ == "max"
    assert pm.filter_jit(lambda m: m)(pm.module_update_wrapper(Wrapping(double)))(2) == 4


def test_update_wrapper_needs_the_property():
    """A class without a property `__wrapped__` could not keep the names."""
    with pytest.raises(FieldError, match="Holder"):
        pm.module_update_wrapper(Holder(double))
