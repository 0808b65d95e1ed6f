"""Bound methods."""

import copy
import functools as ft
import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.module.methods import bind
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.trees import Affine, Child, Holder, OwnInit, affine, ramp


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


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "jitted",
        "filter_jitted",
        "mapped",
        "__call__",
        "__getitem__",
        "wrapped",
        "gradient",
    ],
)
def test_bound_methods_are_trees_of_their_instance(name):
    """Dunder methods included: the children are the instance's, the function is structure."""
    m = many()
    method = getattr(m, name)

    assert type(method) is pm.BoundMethod
    assert [x is m.x for x in jax.tree.leaves(method)] == [True]
    moved = jax.tree.map(lambda x: x + 1, method)
    assert type(moved) is pm.BoundMethod
    assert_close(moved.__self__.x, ramp(2) + 1)
    assert jax.tree.structure(method) == jax.tree.structure(moved)
    assert jax.tree.structure(method) != jax.tree.structure(many().replace)


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


def test_read_from_the_class_it_is_the_function():
    """Class.method is the function that was written, source and all."""
    assert inspect.isfunction(Many.plain)
    assert "A plain method" in inspect.getsource(Many.plain)
    assert_close(Many.plain(many(), 2.0), ramp(2) * 2)


def test_equality_is_that_of_pythons_methods():
    """The same function of the same object."""
    m = many()

    assert m.plain == m.plain
    assert hash(m.plain) == hash(m.plain)
    assert m.plain != m.jitted
    assert m.plain != many().plain
    assert m.plain != Many.plain


def test_copies_and_pickles():
    """A bound method is copied and pickled with its instance."""
    method = affine().scaled
    for made in (copy.copy(method), copy.deepcopy(method), pickle.loads(pickle.dumps(method))):
        assert type(made) is pm.BoundMethod
        assert_same(made.__self__, affine())
        assert_close(made(ramp(3)), affine()(ramp(3)))


def test_inherited_and_super_methods_are_bound_to_the_instance():
    """What super() finds is bound to the same instance, as a tree."""
    child = Child("a", 2)

    assert child.hot.__self__ is child
    assert type(super(Child, child).__call__) is pm.BoundMethod
    assert super(Child, child).__call__.__self__ is child
    assert_close(child(ramp(2)), OwnInit(2)(ramp(2)) + 0.25)


def test_any_pytree_can_be_bound():
    """BoundMethod knows no Module: a list will do."""
    method = bind(lambda tree, x: sum(tree) + x, [1, 2])
    assert method(3) == 6
    assert jax.tree.leaves(method) == [1, 2]


def test_a_method_stored_in_another_module():
    """A bound method in a field is data: its arrays are trained."""
    holder = Holder(affine().scaled)
    gradient = pm.filter_grad(lambda h: jnp.sum(h.content(ramp(3))))(holder)

    assert_close(gradient.content.__self__.bias, jnp.ones(2))


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


def test_methods_do_not_keep_the_function_of_the_class_from_being_replaced():
    """A method that is patched on the class is seen by every instance."""

    class Layer(pm.Module):
        x: int

        def get(self):
            return self.x

    layer = Layer(1)
    Layer.get = lambda self: self.x + 1
    assert layer.get() == 2
    assert Affine.scaled.__name__ == "scaled"
