"""Bound methods, Partial and module_update_wrapper: callables that are trees."""

import copy
import doctest
import functools as ft
import inspect
import pydoc
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.trees import Child, OwnInit, Wrapping, affine, double, new, ramp


class Mixin:
    make = classmethod(lambda cls, n: cls(ramp(n)))
    doubled = property(lambda self: self.x * 2)

    def mixed(self, y):
        return self.x * y


class Many(Mixin, pm.Module):
    x: jax.Array
    jitted = jax.jit(lambda self, y: self.x + y)
    filter_jitted = pm.filter_jit(lambda self, y, by=1.0, how="+": (self.x + y) * by)
    mapped = pm.filter_vmap(lambda self, y: self.x * y, in_axes=(None, 0))
    free = staticmethod(lambda y: y + 1)
    dispatch = ft.singledispatchmethod(lambda self, y: "other")
    dispatch.register(int)(lambda self, y: "int")
    __len__ = lambda self: len(self.x)  # noqa: E731
    __add__ = lambda self, other: Many(self.x + other.x)  # noqa: E731
    __enter__, __exit__ = (lambda self: "inside"), (lambda self, *args: None)

    def __call__(self, y):
        return self.x - y

    def plain(self, y: float, *, by: float = 1.0) -> jax.Array:
        """A plain method."""
        return self.x * y * by

    @ft.wraps(plain)
    def wrapped(self, *args, **kwargs):
        return self.plain(*args, **kwargs)


def many():
    return Many(ramp(2))


def test_methods_of_every_kind_work():
    """Plain, jitted, transformed, wrapped, of a base that is no Module; and Python's own."""
    m, x = many(), ramp(2)
    assert_close(m.plain(2.0, by=3.0), 6 * x)
    assert_close((m.jitted(1.0), m.wrapped(2.0), m(1.0)), (x + 1, x * 2, x - 1))
    assert_close(m.filter_jitted(2.0, by=3.0, how="times"), 3 * (x + 2))
    assert_close(m.filter_jitted.lower(1.0).compile()(1.0), x + 1)
    assert m.filter_jitted.eval_shape(jnp.ones(2)).shape == (2,)
    assert_close(m.mapped(ramp(3)), x[None] * ramp(3)[:, None])
    assert_close((m.doubled, pm.filter_jit(lambda m: m.mixed(3.0))(m)), (2 * x, 3 * x))
    assert_same((Many.make(2), m.make(2), (m + m).x), (m, m, 2 * x))
    assert (Many.free(1), m.free(1), m.dispatch(1), m.dispatch("a")) == (2, 2, "int", "other")
    with m as inside:
        assert (inside, len(m)) == ("inside", 2)


def test_bound_methods_are_trees_of_their_instance():
    """`__call__` and `super()` too: the children are the instance's, the function is structure."""
    m = many()
    for name in ("plain", "jitted", "filter_jitted", "mapped", "__call__", "wrapped"):
        method = getattr(m, name)
        moved = jax.tree.map(lambda x: x + 1, method)
        assert type(method) is type(moved) is pm.BoundMethod
        assert [x is m.x for x in jax.tree.leaves(method)] == [True]
        assert_close(moved.__self__.x, ramp(2) + 1)
        assert jax.tree.structure(method) == jax.tree.structure(moved)
        assert jax.tree.structure(method) != jax.tree.structure(many().replace)
    child = Child("a", 2)
    assert type(super(Child, child).__call__) is pm.BoundMethod
    assert super(Child, child).__call__.__self__ is child
    assert_close(child(ramp(2)), OwnInit(2)(ramp(2)) + 0.25)
    assert_close(jax.jit(lambda f, x: f(x))(affine().scaled, ramp(3)), affine()(ramp(3)))


def test_looks_like_a_method():
    """Name, docstring, signature, annotations, repr, source and help are those of the function."""
    method = many().plain
    assert (method.__name__, method.__qualname__) == ("plain", "Many.plain")
    assert method.__doc__ == inspect.getdoc(method) == "A plain method."
    assert list(inspect.signature(method).parameters) == ["y", "by"]
    assert (method.__annotations__["by"], method.__func__) == (float, Many.plain)
    assert repr(method) == "<bound method Many.plain of Many(x=f32[2])>"
    with pytest.raises(AttributeError, match="nothing"):
        method.nothing
    # Read from the class, a method is the function.
    assert inspect.isfunction(Many.plain)
    assert "A plain method" in inspect.getsource(Many.plain)
    found = doctest.DocTestFinder(exclude_empty=False).find(Many, module=sys.modules[__name__])
    assert "Many.plain" in [test.name for test in found]
    assert "A plain method." in pydoc.render_doc(Many)


def test_methods_of_equal_instances_are_equal():
    """And have one hash; methods with different programs differ: `1`, `1.0` and `True`."""
    owner = new(fields={"x": object}, f=lambda self: 1, g=lambda self: 2)
    values = [1, 1.0, True, None, 0.5, "a", (1, 2), ramp(2), ramp(3), np.ones(2), 2 * ramp(2)]
    for i, value in enumerate(values):
        for j, other in enumerate(values):
            one, two = owner(value).f, owner(copy.copy(other)).f
            assert (one == two) is (i == j), (value, other)
            assert i != j or hash(one) == hash(two)
    assert all(owner(1).f != other for other in (owner(1).g, owner.f, 1))


def collect(*args, **kwargs):
    return args, kwargs


def test_partial_is_functools_partial_and_a_tree():
    """Stored arguments come first, under any name; a function is structure, all else children."""
    partial = pm.Partial(collect, 1, 2, a=3)
    assert partial(4, b=5) == ((1, 2, 4), {"a": 3, "b": 5})
    assert (partial.func, partial.args, partial.keywords) == (collect, (1, 2), {"a": 3})
    for name in ("func", "self", "args", "keywords"):
        assert pm.Partial(collect, **{name: 1})() == ((), {name: 1})
        assert pm.Partial(collect)(**{name: 1}) == ((), {name: 1})
    assert jax.tree.leaves(pm.Partial(double, 1, a=[2])) == [1, 2]
    assert len(jax.tree.leaves(pm.Partial(affine(), ramp(3)))) == 3
    gradient = pm.filter_grad(lambda p: jnp.sum(p()))(pm.Partial(affine(), ramp(3)))
    assert_close(gradient.func.bias, jnp.ones(2))
    assert gradient.args[0].shape == (3,)


def test_update_wrapper_copies_what_names_a_function():
    """Name, docstring, module, annotations and signature; the Module has the same leaves."""

    def annotated(x: int, y: str = "a") -> float:
        """Its docstring."""

    wrapped = pm.module_update_wrapper(Wrapping(annotated))
    assert (wrapped.__name__, wrapped.__doc__) == ("annotated", "Its docstring.")
    assert (wrapped.__module__, wrapped.fn) == (__name__, annotated)
    assert wrapped.__qualname__.endswith("annotated")
    assert list(inspect.signature(wrapped).parameters) == ["x", "y"]
    wrapped = pm.module_update_wrapper(Wrapping(affine()))
    assert_same(pm.filter_jit(lambda m: m)(jax.tree.map(lambda x: x, wrapped)).fn, affine())
