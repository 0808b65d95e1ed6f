"""Attributes of a subclass that override a field."""

import dataclasses
import functools as ft
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest

import pytreemod as pm
from pytreemod.errors import FieldError
from tests.goldens import refusals
from tests.helpers.trees import ramp

STYLES = ["generated", "init=False", "own"]


def base(style, default=dataclasses.MISSING):
    """A class with a field `f` beside `x`, of which the instance gets `x` only."""
    options = {} if default is dataclasses.MISSING else {"default": default}
    if style == "own":

        class Own(pm.Module):
            x: Any
            f: Any = pm.field(**options)

            def __init__(self, x):
                self.x = x

        return Own

    class Generated(pm.Module):
        x: Any
        f: Any = pm.field(init=style != "init=False", **options)

    return Generated


def as_property(cls):
    """A subclass with a property."""

    class Sub(cls):
        @property
        def f(self):
            return 2 * self.x

    return Sub


def as_mixin(cls):
    """A subclass whose property comes from a plain mixin."""

    class Mixin:
        @property
        def f(self):
            return 2 * self.x

    class Sub(Mixin, cls):
        pass

    return Sub


def as_cached_property(cls):
    """A subclass with a property that remembers."""

    class Sub(cls):
        @ft.cached_property
        def f(self):
            return 2 * self.x

    return Sub


def as_grandchild(cls):
    """A subclass of a class with a property, with a new field."""

    class Sub(as_property(cls)):
        y: ClassVar[int] = 0
        z: Any = None

    return Sub


@pytest.mark.parametrize("default", [dataclasses.MISSING, 7.0])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("derive", [as_property, as_mixin, as_cached_property, as_grandchild])
def test_a_property_takes_the_place_of_a_field(derive, style, default):
    """The field leaves the parameters and the tree, through every way of making instances."""
    kind = derive(base(style, default))
    made = kind(ramp(2))

    doubled = jtu.tree_map(lambda x: 2 * x, made)
    assert "f" not in inspect.signature(kind).parameters
    assert jtu.tree_structure(made).num_leaves == 1
    for other in (made, made.replace(), pm.filter_jit(lambda m: m)(made), doubled):
        assert jnp.array_equal(other.f, 2 * other.x)
    assert jnp.array_equal(doubled.x, 2 * made.x)
    assert "f" not in made.__record__.names(made)


@pytest.mark.parametrize("style", STYLES)
def test_a_method_takes_the_place_of_a_field(style):
    """It is bound as a tree, as every method is."""

    class Sub(base(style)):
        def f(self, y):
            return self.x + y

    made = Sub(1.0)

    assert made.f(2.0) == 3.0
    assert jtu.tree_leaves(made.f) == [1.0]


@pytest.mark.parametrize("kind", [classmethod, staticmethod])
def test_a_class_method_takes_the_place_of_a_field(kind):
    """And so does a static one."""

    class Sub(base("init=False")):
        f = kind(lambda *args: len(args))

    assert Sub(1.0).f() == (1 if kind is classmethod else 0)


def test_a_plain_value_is_a_default():
    """The field stays in the tree."""

    class Sub(base("own")):
        f = 7.0

    assert jtu.tree_leaves(Sub(1.0)) == [1.0, 7.0]


def test_a_field_declared_anew_is_one():
    """The first attribute in the order of Python's look-up decides."""

    class Sub(as_property(base("generated"))):
        def g(self):
            """Nothing."""

    class Field(base("generated")):
        def f(self):
            """Nothing."""

    class Again(Field):
        f: Any

    assert jtu.tree_leaves(Again(1.0, 2.0)) == [1.0, 2.0]
    assert jtu.tree_leaves(Sub(1.0)) == [1.0]


def test_dataclasses_read_what_is_in_the_place():
    """`fields`, `asdict` and `replace` see the name, and never set it."""
    made = as_property(base("generated"))(1.0)

    assert [f.name for f in dataclasses.fields(made)] == ["x", "f"]
    assert dataclasses.asdict(made) == {"x": 1.0, "f": 2.0}
    assert dataclasses.replace(made, x=2.0).f == 4.0
    assert base("generated").__dataclass_fields__["f"].init


def test_a_property_with_a_setter_is_assigned_through_it():
    """A base's `__init__` assigns to the field; the subclass keeps it elsewhere."""

    class Base(pm.Module):
        f: Any

        def __init__(self, f):
            self.f = f

    class Sub(Base):
        kept: Any

        @property
        def f(self):
            return self.kept

        @f.setter
        def f(self, value):
            self.kept = value

    made = Sub(ramp(2))

    assert made.f is made.kept
    assert len(jtu.tree_leaves(made)) == 1


def test_the_default_of_a_base_gives_way():
    """A base's written `__init__` sets it, unasked."""

    class Base(pm.Module):
        x: float
        f: Callable = jnp.tanh

    class Sub(Base):
        def __init__(self):
            super().__init__(1.0)

        def f(self, y):
            return self.x + y

    made = Sub()

    assert made.f(2.0) == 3.0
    assert set(vars(jtu.tree_map(lambda x: x, made))) == set(vars(made))


@pytest.mark.parametrize("style", ["assigned", "passed"])
def test_a_value_that_would_be_hidden_is_refused(style):
    """It is ambiguous which of the two is meant."""

    class Base(pm.Module):
        f: Callable = jnp.tanh

    class Assigns(Base):
        def __init__(self):
            if style == "assigned":
                self.f = jnp.sin
            else:
                super().__init__(jnp.sin)

    class Sub(Assigns):
        def f(self, y):
            """Hidden, or hides."""

    with pytest.raises(
        FieldError,
        match=r"Sub\.f: expected no value, because a method of [^\n]*Sub "
        r"replaces the field, got [^\n]*sin[^\n]*\n  set it only in classes where it is a "
        r"field, or "
        r"rename the method:\n      if not isinstance\(self, Sub\):\n          self\.f = f$",
    ):
        Sub()


def test_a_class_variable_and_an_abstract_one_may_be_properties():
    """They are not fields."""

    class Base(pm.Module):
        size: pm.AbstractVar[int]

    class Config(Base):
        name: ClassVar[property]

        @property
        def size(self):
            return 1

        @property
        def name(self):
            return "name"

    assert (Config().size, Config().name, jax.tree.leaves(Config())) == (1, "name", [])


test_refusals = refusals(globals())
