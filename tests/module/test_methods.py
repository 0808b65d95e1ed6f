"""Bound methods."""

import copy
import doctest
import functools as ft
import inspect
import pickle
import pydoc
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.trees import Child, OwnInit, affine, ramp


class Many(pm.Module):
    """Methods of every kind."""

    x: jax.Array

    def plain(self, y: float, *, by: float = 1.0) -> jax.Array:
        """A plain method."""
        return self.x * y * by

    @jax.jit
    def jitted(self, y):
        """A jitted method."""
        return self.x + y

    @pm.filter_jit
    def filter_jitted(self, y, how="plus"):
        """A method under filter_jit."""
        return self.x + y if how == "plus" else self.x * y

    @pm.filter_vmap(in_axes=(None, 0))
    def mapped(self, y):
        """A method under filter_vmap."""
        return self.x * y

    @pm.filter_grad
    def gradient(self, y):
        """A method under filter_grad."""
        return jnp.sum(self.x**2) * y

    @classmethod
    def make(cls, n):
        """A class method."""
        return cls(ramp(n))

    @staticmethod
    def free(y):
        """A static method."""
        return y + 1

    @property
    def doubled(self):
        """A property."""
        return self.x * 2

    @ft.cached_property
    def cached(self):
        """A cached property."""
        return float(self.x[0])

    @ft.singledispatchmethod
    def dispatch(self, y):
        """By the type of the argument."""
        return "other"

    @dispatch.register
    def _(self, y: int):
        return "int"

    @ft.wraps(plain)
    def wrapped(self, *args, **kwargs):
        """Not shown."""
        return self.plain(*args, **kwargs)

    def __call__(self, y):
        return self.x - y

    def __getitem__(self, i):
        return self.x[i]

    def __len__(self):
        return len(self.x)

    def __add__(self, other):
        return Many(self.x + other.x)

    def __iter__(self):
        return iter([1, 2])

    def __enter__(self):
        return "inside"

    def __exit__(self, *args):
        return None


def many():
    """An instance."""
    return Many(ramp(2))


def test_methods_of_every_kind_work():
    """Plain, jitted, transformed, class, static, cached, dispatched and wrapped methods."""
    m = many()

    assert_close(m.plain(2.0, by=3.0), ramp(2) * 6)
    assert_close(m.jitted(1.0), ramp(2) + 1)
    assert_close(m.filter_jitted(2.0, how="times"), ramp(2) * 2)
    assert_close(m.mapped(ramp(3)), ramp(2)[None] * ramp(3)[:, None])
    assert_close(m.gradient(2.0).x, ramp(2) * 4)
    assert_same((Many.make(2), m.make(2)), (m, m))
    assert (Many.free(1), m.free(1)) == (2, 2)
    assert_close(m.doubled, ramp(2) * 2)
    assert (m.cached, m.cached) == (1.0, 1.0)
    assert (m.dispatch(1), m.dispatch("a")) == ("int", "other")
    assert_close(m.wrapped(2.0), ramp(2) * 2)


def test_dunder_methods_work():
    """Operators, calls, items, iteration and contexts are Python's."""
    m = many()

    assert_close(m(1.0), ramp(2) - 1)
    assert m[0] == 1.0
    assert (len(m), list(m), bool(m)) == (2, [1, 2], True)
    assert_close((m + m).x, ramp(2) * 2)
    with m as inside:
        assert inside == "inside"


def test_through_transforms():
    """jit, grad, vmap and plain JAX take a bound method as they take a Module."""
    method = affine().scaled

    assert_close(pm.filter_jit(method)(ramp(3), by=2.0), 2 * affine()(ramp(3)))
    gradient = pm.filter_grad(lambda f: jnp.sum(f(ramp(3))))(method)
    assert type(gradient) is pm.BoundMethod
    assert_close(gradient.__self__.bias, jnp.ones(2))
    assert_close(jax.jit(lambda f, x: f(x))(method, ramp(3)), affine()(ramp(3)))
    assert_close(jax.vmap(method)(ramp(4, 3)), jax.vmap(affine())(ramp(4, 3)))


def test_a_jitted_method_compiles_once_for_all_instances():
    """Instances are arguments: another instance finds the compiled function."""
    traces = []

    class Layer(pm.Module):
        x: jax.Array

        @pm.filter_jit
        def __call__(self, y):
            traces.append(None)
            return self.x + y

    assert [float(Layer(jnp.asarray(x))(1.0)) for x in (1.0, 2.0, 3.0)] == [2.0, 3.0, 4.0]
    assert len(traces) == 1


def test_looks_like_a_method():
    """Name, docstring, signature, annotations and repr are those of the function."""
    method = many().plain

    assert (method.__name__, method.__qualname__) == ("plain", "Many.plain")
    assert method.__doc__ == "A plain method."
    assert inspect.getdoc(method) == "A plain method."
    assert list(inspect.signature(method).parameters) == ["y", "by"]
    assert method.__annotations__["by"] is float
    assert method.__func__ is Many.plain
    assert repr(method) == "<bound method Many.plain of Many(x=f32[2])>"
    assert callable(method)
    with pytest.raises(AttributeError, match="nothing"):
        method.nothing


def test_equality_is_that_of_function_and_instance():
    """The same function of the same value."""
    m = many()

    assert m.plain == m.plain
    assert hash(m.plain) == hash(m.plain)
    assert m.plain != m.jitted
    assert m.plain == many().plain
    assert m.plain != m.replace(x=2 * m.x).plain
    assert m.plain != Many.plain


def test_copies_and_pickles():
    """A bound method is copied and pickled with its instance."""
    method = affine().scaled
    for made in (copy.copy(method), copy.deepcopy(method), pickle.loads(pickle.dumps(method))):
        assert type(made) is pm.BoundMethod
        assert_same(made.__self__, affine())
        assert_close(made(ramp(3)), affine()(ramp(3)))


def test_inherited_and_super_methods_are_bound_to_the_instance():
    """The method of super() is bound to the same instance, as a tree."""
    child = Child("a", 2)

    assert child.hot.__self__ is child
    assert type(super(Child, child).__call__) is pm.BoundMethod
    assert super(Child, child).__call__.__self__ is child
    assert_close(child(ramp(2)), OwnInit(2)(ramp(2)) + 0.25)


def test_functions_in_a_class_body_that_are_fields_are_no_methods():
    """A default of a field is a value, also if it is a function."""

    class Layer(pm.Module):
        act: object = np.negative
        fn: object = lambda x: x + 1

    layer = Layer()
    assert layer.fn(1) == 2
    assert layer.act(1) == -1
    assert jax.tree.leaves(layer) == []


def test_staging_a_jitted_method():
    """lower, trace and eval_shape of a method under filter_jit are for its instance."""
    m = many()

    assert_close(m.filter_jitted.lower(1.0).compile()(1.0), ramp(2) + 1)
    assert m.filter_jitted.eval_shape(jnp.ones(2)).shape == (2,)
    assert "lambda" in str(m.filter_jitted.trace(1.0).jaxpr)


def test_inherited_methods_keep_the_order_of_the_bases():
    """As in plain Python, for every arrangement of a diamond; `super()` follows it, too."""

    class Root:
        def who(self):
            return ["Root"]

    class Other(Root):
        def who(self):
            return ["Other", *super().who()]

    class Third(Root):
        def who(self):
            return ["Third", *super().who()]

    def arranged(top):
        """Classes that differ in their topmost base only."""
        first = type(top)("First", (Root, top), {})
        second = type(top)("Second", (first, Other), {})
        third = type(top)("ThirdOfAll", (Third, second), {})

        class Own(second):
            def who(self):
                return ["Own", *super().who()]

        return [first, second, third, Own]

    class Plain:
        pass

    for plain, module in zip(arranged(Plain), arranged(pm.Module), strict=True):
        assert module().who() == plain().who()
        assert module.who(module()) == plain().who()
        assert super(module, module()).who() == super(plain, plain()).who() or module is plain


def owned(x, how="sum"):
    """A method of an instance with this in its field."""

    class Owner(pm.Module):
        x: object
        how: str = pm.field(static=True)

        def f(self):
            return 1

        def g(self):
            return 1

    return Owner, Owner(x, how)


def test_methods_of_equal_instances_are_equal():
    """And have one hash; methods with different programs differ: `1`, `1.0` and `True`."""
    cls, made = owned(1)
    values = [1, 1.0, True, None, 0.5, "a", (1, 2), ramp(2), ramp(3), np.ones(2), 2 * ramp(2)]
    for i, value in enumerate(values):
        for j, other in enumerate(values):
            one, two = cls(value, "sum").f, cls(copy.copy(other), "sum").f
            assert (one == two) is (i == j), (value, other)
            assert i != j or hash(one) == hash(two)

    assert made.f != made.g
    assert made.f != cls(1, "mean").f
    assert made.f != 1


def test_a_method_in_a_static_field_does_not_retrace():
    """It is made anew with each instance, and is the same."""
    cls, _ = owned(1)
    traces = []

    class Holds(pm.Module):
        x: jax.Array
        f: object = pm.field(static=True)

    @pm.filter_jit
    def call(holder):
        traces.append(holder)
        return holder.x * holder.f()

    for _ in range(3):
        call(Holds(ramp(2), cls(1, "sum").f))
    assert len(traces) == 1


def test_bound_methods_are_trees_of_their_instance():
    """`__call__` included: the children are the instance's, the function is structure."""
    m = many()
    for name in ("plain", "jitted", "filter_jitted", "mapped", "__call__", "wrapped"):
        method = getattr(m, name)

        assert type(method) is pm.BoundMethod
        assert [x is m.x for x in jax.tree.leaves(method)] == [True]
        moved = jax.tree.map(lambda x: x + 1, method)
        assert type(moved) is pm.BoundMethod
        assert_close(moved.__self__.x, ramp(2) + 1)
        assert jax.tree.structure(method) == jax.tree.structure(moved)
        assert jax.tree.structure(method) != jax.tree.structure(many().replace)


class Mixin:
    """A plain mixin."""

    def scale(self, y):
        """Scale it."""
        return self.x * y

    @classmethod
    def make(cls):
        """A class method."""
        return cls(ramp(2))

    @property
    def doubled(self):
        """A property."""
        return 2 * self.x


class OfMixin(Mixin, pm.Module):
    """Methods of a base that is no Module."""

    x: jax.Array


def test_methods_of_a_plain_mixin():
    """They are called, differentiated and jitted as if written in the class."""
    made = OfMixin.make()

    assert type(made) is OfMixin
    assert_same(made.doubled, 2 * ramp(2))
    assert_close(pm.filter_jit(lambda m: m.scale(3.0))(made), 3.0 * ramp(2))
    gradient = pm.filter_grad(lambda m: m.scale(3.0).sum())(made)
    assert_close(gradient.x, jnp.full(2, 3.0))


def test_source_and_help_find_methods():
    """They read the dict of the class; read from the class, a method is the function."""
    assert inspect.isfunction(Many.plain)
    assert "A plain method" in inspect.getsource(Many.plain)
    assert_close(Many.plain(many(), 2.0), ramp(2) * 2)
    found = doctest.DocTestFinder(exclude_empty=False).find(Many, module=sys.modules[__name__])
    assert f"{Many.__name__}.plain" in [test.name for test in found]
    assert "A plain method." in pydoc.render_doc(Many)
