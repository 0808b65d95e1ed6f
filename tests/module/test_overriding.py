"""Attributes of a subclass that override a field."""

import dataclasses
import functools as ft
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import FieldError, FrozenError
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


@pytest.mark.parametrize("default", [dataclasses.MISSING, 7.0])
@pytest.mark.parametrize("style", STYLES)
def test_a_property_takes_the_place_of_a_field(style, default):
    """The field leaves the parameters and the tree, through every way of making instances."""
    for derive in (as_property, as_mixin, as_cached_property):
        kind = derive(base(style, default))
        made = kind(ramp(2))
        doubled = jax.tree.map(lambda x: 2 * x, made)

        assert "f" not in inspect.signature(kind).parameters
        assert len(jax.tree.leaves(made)) == 1
        for other in (made, made.replace(), pm.filter_jit(lambda m: m)(made), doubled):
            assert jnp.array_equal(other.f, 2 * other.x)
        assert jnp.array_equal(doubled.x, 2 * made.x)


def test_a_method_takes_the_place_of_a_field():
    """It is bound as a tree, as every method is."""

    class Sub(base("generated")):
        def f(self, y):
            return self.x + y

    made = Sub(1.0)

    assert made.f(2.0) == 3.0
    assert jax.tree.leaves(made.f) == [1.0]


def test_a_value_that_would_be_hidden_is_refused():
    """It is ambiguous which of the two is meant."""

    class Sub(base("own")):
        def __init__(self):
            self.x = 1.0
            self.f = jnp.sin

        def f(self, y):
            """Hidden, or hides."""

    with pytest.raises(FrozenError, match=r"Sub\.f"):
        Sub()


def test_a_field_and_a_property_in_one_class_are_refused():
    """As a field it could never be read; nor could one in the place of a base's property."""
    with pytest.raises(FieldError, match=r"Config\.size"):

        class Config(pm.Module):
            size: int

            @property
            def size(self):
                return 1

    class Base(pm.Module):
        @property
        def size(self):
            return 1

    with pytest.raises(FieldError, match=r"Field\.size"):

        class Field(Base):
            size: int
