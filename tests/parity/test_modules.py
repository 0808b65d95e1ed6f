"""Definitions of Modules, in every style that Equinox's users write them."""

import dataclasses

import jax
import jax.numpy as jnp

from tests.parity.helpers import caught, same_under_both_imports


@same_under_both_imports
def test_converters_run_once_after_init(eqx):
    """A converter gets the value that `__init__` or `__post_init__` assigned, or a default."""
    seen = []

    def convert(value):
        seen.append(value)
        return jnp.asarray(value, jnp.float32)

    class Generated(eqx.Module):
        value: jax.Array = eqx.field(converter=convert)
        other: jax.Array = eqx.field(converter=convert, default=5)

    class Own(eqx.Module):
        value: jax.Array = eqx.field(converter=convert)

        def __init__(self):
            self.value = 7
            self.value = (1, 2)

    class Prepared(eqx.Module):
        value: jax.Array = eqx.field(converter=convert)

        def __post_init__(self):
            seen.append(("post_init", self.value))
            self.value = self.value + 1

    return Generated([1, 2]), Own(), Prepared(4), seen


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
