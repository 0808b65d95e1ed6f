"""Definitions of Modules, in every style that Equinox's users write them."""

import dataclasses
import inspect
from collections import namedtuple
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest

from tests.parity.helpers import caught, same_under_both_imports

T = TypeVar("T")
Pair = namedtuple("Pair", ["first", "second"])


@pytest.mark.parametrize("style", ["generated", "own", "default", "post_init"])
@same_under_both_imports
def test_converters_run_once_after_init(eqx, style):
    """A converter gets the value that `__init__` assigned, or a default."""
    seen = []

    def convert(value):
        seen.append(value)
        return jnp.asarray(value, jnp.float32)

    if style == "generated":

        class Layer(eqx.Module):
            value: jax.Array = eqx.field(converter=convert)

        layer = Layer([1, 2])
    elif style == "own":

        class Layer(eqx.Module):
            value: jax.Array = eqx.field(converter=convert)

            def __init__(self):
                self.value = 7
                self.value = (1, 2)

        layer = Layer()
    elif style == "default":

        class Layer(eqx.Module):
            value: jax.Array = eqx.field(converter=convert, default=5)

        layer = Layer()
    else:

        class Layer(eqx.Module):
            value: jax.Array = eqx.field(converter=convert)

            def __post_init__(self):
                seen.append(("post_init", self.value))
                self.value = self.value + 1

        layer = Layer(4)
    return layer.value, seen


@same_under_both_imports
def test_check_init_runs_for_every_class_after_the_converters(eqx):
    """Each class's `__check_init__` runs without `super()`, its own first, and may refuse."""
    order = []

    class Base(eqx.Module):
        size: int = eqx.field(converter=int)

        def __check_init__(self):
            order.append(("base", self.size))
            if self.size < 0:
                raise ValueError("size must not be negative")

    class Middle(Base):
        pass

    class Derived(Middle):
        name: str = eqx.field(static=True, default="")

        def __check_init__(self):
            order.append(("derived", self.size))

    Derived("3")
    refused = caught(lambda: Derived(-1), about="must not be negative")
    return order, refused


@same_under_both_imports
def test_abstract_var_may_become_a_field_or_a_property(eqx):
    """`AbstractVar` declares an attribute; it is not a field, and any attribute satisfies it."""

    class Base(eqx.Module):
        size: eqx.AbstractVar[int]

        def double(self):
            return 2 * self.size

    class AsField(Base):
        name: str = eqx.field(static=True)
        size: int

    class AsProperty(Base):
        half: int

        @property
        def size(self):
            return 2 * self.half

    class StillAbstract(Base):
        other: int

    return [
        caught(lambda: Base(), about="size"),
        caught(lambda: StillAbstract(1), about="size"),
        AsField("a", 3).double(),
        AsProperty(3).double(),
        [field.name for field in dataclasses.fields(Base)],
        [field.name for field in dataclasses.fields(AsField)],
    ]


@same_under_both_imports
def test_module_update_wrapper_takes_over_name_and_docstring(eqx):
    """A Module that wraps a function can show the function's name, text and signature."""

    class Timed(eqx.Module):
        function: Any

        @property
        def __wrapped__(self):
            return self.function

        def __call__(self, *args):
            return self.function(*args)

    def double(x: float) -> float:
        """Twice x."""
        return 2 * x

    timed = eqx.module_update_wrapper(Timed(double))
    mapped = jtu.tree_map(lambda leaf: leaf, timed)
    return [
        [(f.__name__, f.__doc__, f.__qualname__, f(3.0)) for f in (timed, mapped)],
        str(inspect.signature(timed)),
        isinstance(timed, Timed),
    ]
