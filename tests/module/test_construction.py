"""Building instances: the generated `__init__`, and the steps after any `__init__`."""

import inspect
import typing
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import FieldError
from tests.helpers import string_annotations
from tests.helpers.trees import (
    Affine,
    Checked,
    Child,
    Converted,
    Defaults,
    DefaultsUnderOwnInit,
    Empty,
    Factories,
    Holder,
    KeywordsOnly,
    OwnInit,
    Parent,
    Prepared,
    affine,
    double,
    ramp,
)


class OneKeyword(pm.Module):
    """One field by keyword only."""

    scale: float = pm.field(kw_only=True, default=3.0)
    weight: jax.Array


def signature(cls):
    """A class's signature as text, without annotations."""
    parameters = inspect.signature(cls).parameters.values()
    return [
        f"{p.name}{'' if p.default is p.empty else '='}{'*' * (p.kind == p.KEYWORD_ONLY)}"
        for p in parameters
    ]


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (Affine, ["weight", "bias"]),
        (Empty, []),
        (Defaults, ["weight", "scale=", "name=", "act=", "bias=", "inner="]),
        (Factories, ["parts=", "table="]),
        (KeywordsOnly, ["scale=*", "weight*"]),
        (OneKeyword, ["weight", "scale=*"]),
        (Prepared, ["scale", "weight"]),
        (OwnInit, ["size", "use_bias=*"]),
        (Parent, ["size", "use_bias=*"]),
        (Child, ["name", "size"]),
        (DefaultsUnderOwnInit, ["size"]),
        (string_annotations.Initialized, ["size="]),
    ],
)
def test_signature(cls, expected):
    """The signature is the own __init__'s, or has one parameter for each field in order."""
    assert signature(cls) == expected
    returned = inspect.signature(cls).return_annotation
    assert returned == inspect.signature(cls.__init__).return_annotation


def test_defaults_are_shared_and_factories_are_called():
    """A default is one object; a factory makes one for each instance, and only if asked."""
    assert Defaults(1.0).inner is Defaults(2.0).inner
    assert Factories().parts is not Factories().parts
    assert Factories([1]).parts == [1]
    assert Defaults(1.0, 5.0).scale == 5.0


def test_converters_are_inherited_and_can_be_overridden():
    """A subclass that declares the field anew has its own converter, or none."""

    class Base(pm.Module):
        x: object = pm.field(converter=str)

    class Same(Base):
        pass

    class Other(Base):
        x: object

    assert Same(1).x == "1"
    assert Other(1).x == 1


def test_a_converters_parameter_is_what_init_takes():
    """The annotation of the parameter is the converter's, because it describes the argument."""

    def convert(value: list[int]) -> jax.Array:
        return jnp.asarray(value)

    class Layer(pm.Module):
        weight: jax.Array = pm.field(converter=convert)
        other: int = pm.field(converter=lambda x: x)
        third: str

    hints = Layer.__init__.__annotations__
    assert hints["weight"] == list[int]
    assert hints["other"] is typing.Any
    assert hints["third"] is str


def test_post_init_sees_fields_and_init_vars():
    """__post_init__ gets the InitVars, may assign fields, and runs before converters."""
    made = Prepared(2.0, ramp(2))

    assert made.scaled.tolist() == [2.0, 4.0]
    assert not hasattr(made, "scale")
    assert string_annotations.Initialized(2).weight.shape == (2,)
    assert string_annotations.Initialized().weight.shape == (3,)


def test_class_level_defaults_fill_in_under_an_own_init():
    """A field with a default that __init__ does not set has it, and stays in the tree."""
    made = DefaultsUnderOwnInit(2)

    assert (made.scale, made.act) == (2.0, double)
    assert len(jax.tree.leaves(made)) == 2
    assert "scale" in vars(made)


class Written(pm.Module):
    """Has an `__init__` that was written for it."""

    weight: object
    scale: object = 1.0


def test_fields_set_before_a_generated_init_stay():
    """In any order: assigned fields are not lost, nor set to their defaults again."""

    class Before(Written):
        size: int = 0

        def __init__(self, size, **kwargs):
            self.size = size
            super().__init__(**kwargs)

    class Below(Before):
        name: str = "unnamed"

        def __init__(self, name, **kwargs):
            self.name = name
            super().__init__(**kwargs)

    assert vars(Before(5, weight=1)) == vars(Before(5, weight=1, scale=1.0))
    assert Before(5, weight=1, scale=2.0) == Before(5, weight=1).replace(scale=2.0)
    made = Below("a", size=5, weight=1)
    assert (made.name, made.size, made.weight, made.scale) == ("a", 5, 1, 1.0)


class Named(pm.Module):
    """Its own `__init__` leaves all to the class."""

    name: str = "a"
    size: int = pm.field(static=True)

    def __init__(self, size=None):
        if size is not None:
            self.size = size


class Mixed:
    """A plain class with attributes instead of fields."""

    name = "mixin"
    size = 7


@pytest.mark.parametrize(
    ("bases", "body", "expected"),
    [
        ((Named,), {"name": "b"}, "b"),
        ((Mixed, Named), {}, "mixin"),
        ((Mixed, Named), {"name": "b"}, "b"),
        ((Named, Mixed), {}, "a"),
        ((Named,), {"name": "b", "__annotations__": {"name": str}}, "b"),
        ((Named,), {"name": None}, None),
    ],
)
def test_what_init_leaves_unset_is_what_the_class_has(bases, body, expected):
    """Looked up as Python looks up an attribute: subclass, mixin, base."""
    made = type(Named)("Sub", bases, body)(3)
    below = type(Named)("Below", (type(made),), {})(3)

    assert (made.name, type(made).name) == (expected, expected)
    assert (below.name, below.size) == (expected, 3)
    assert vars(made)["name"] == expected


def test_a_class_attribute_fills_in_a_field_without_default():
    """A subclass, or a mixin, gives the value that neither `__init__` nor the field gives."""

    class Sub(Named):
        size = 4

    class WithMixin(Named, Mixed):
        pass

    assert (Sub().size, Sub(5).size, WithMixin().size) == (4, 5, 7)


def test_a_class_attribute_that_is_assigned_later_hides_no_field():
    """Instances that a jitted function returned before, or returns after, have their own value."""

    class Base(pm.Module):
        name: str
        size: int

    class Sub(Base):
        pass

    same = pm.filter_jit(lambda m: m)
    before = same(Sub("own", 1))
    Base.name, Base.size = "later", 2
    after = same(Sub("own", 1))
    assert (Base.name, Sub.size) == ("later", 2)
    assert (before.name, before.size, after.name, after.size) == ("own", 1, "own", 1)
    assert pm.tree_at(lambda m: m.size, after, 3).size == 3
    del Base.name
    assert not hasattr(Base, "name")
    assert same(Sub("own", 1)).name == "own"


def test_generated_inits_give_the_defaults_of_the_fields():
    """An attribute without annotation is not a default of a parameter; as for dataclasses."""

    class Sub(Written):
        scale = 5.0

    assert Sub(1).scale == 1.0


def test_replace_converts_checks_and_divides_again():
    """replace is construction with the other fields unchanged, whatever the class's __init__ is."""
    assert Converted([1.0]).replace(weight=[3.0]).weight.tolist() == [3.0]
    layer = Child("a", 2).replace(name="b", offset=1)
    assert (layer.name, layer.size) == ("b", 2)
    assert isinstance(layer.offset, jax.Array)
    assert len(jax.tree.leaves(Holder(affine()).replace(content=double))) == 0
    assert len(jax.tree.leaves(Holder(double).replace(content="text"))) == 0
    assert len(jax.tree.leaves(Holder(double).replace(content=1.0))) == 1


@pytest.mark.skipif(
    not hasattr(__import__("copy"), "replace"), reason="copy.replace came with 3.13"
)
def test_copy_replace():
    """copy.replace is m.replace."""
    import copy

    assert copy.replace(Child("a", 2), name="b").name == "b"


def test_instances_of_modules_may_be_defaults():
    """A Module is immutable, and so may be shared."""

    class Outer(pm.Module):
        inner: Affine = Affine(1.0, 2.0)
        made: Affine = pm.field(default=Affine(3.0, 4.0))

    assert jax.tree.leaves(Outer()) == [1.0, 2.0, 3.0, 4.0]
    assert Outer().inner is Outer().inner


def test_an_init_that_fails_leaves_nothing_behind():
    """After an error in __init__ the class works as before."""

    class Fragile(pm.Module):
        x: int

        def __init__(self, x):
            self.x = 1 // x

    with pytest.raises(ZeroDivisionError, match="by zero"):
        Fragile(0)
    assert Fragile(1).x == 1


def test_init_may_read_call_and_assign_twice():
    """While it runs, an instance is an ordinary object, methods and transforms included."""

    class Busy(pm.Module):
        first: jax.Array
        second: jax.Array

        def __init__(self):
            self.first = ramp(2)
            self.second = self.twice()
            self.second = jax.jit(lambda m: m.first * 3)(self)
            self.second += 1

        def twice(self):
            return self.first * 2

    assert Busy().second.tolist() == [4.0, 7.0]


def test_init_subclass_and_new_work_as_ever():
    """__init_subclass__ keywords and an own __new__ are Python's."""
    made = []

    class Registered(pm.Module):
        x: int

        def __init_subclass__(cls, tag=None, **kwargs):
            super().__init_subclass__(**kwargs)
            made.append(tag)

        def __new__(cls, x):
            return super().__new__(cls)

    class Sub(Registered, tag="here"):
        pass

    assert made == ["here"]
    assert Sub(1).x == 1


def test_threads_construct_at_once():
    """Many threads that build instances of one class at once get the right ones."""

    def build(i):
        return Child(f"name {i}", 2).replace(temperature=float(i))

    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(build, range(64)))
    assert [(m.name, m.temperature) for m in made] == [(f"name {i}", float(i)) for i in range(64)]


def test_checks_run_after_converters_and_refuse_instances():
    """From the class up to its bases, when the instance is finished; `replace` checks again."""
    seen = []

    class Base(pm.Module):
        x: int = pm.field(converter=lambda v: seen.append("converter") or v)

        def __check_init__(self):
            seen.append("base check")

    class Layer(Base):
        def __init__(self, x):
            seen.append("init")
            self.x = x

        def __check_init__(self):
            seen.append(f"check of {self.x}")
            assert len(jax.tree.leaves(self)) == 1

    Layer(1)
    assert seen == ["init", "converter", "check of 1", "base check"]
    with pytest.raises(ValueError, match="low 2 is above high 1"):
        Checked(2, 1)
    with pytest.raises(ValueError, match="low 5"):
        Checked(1, 2).replace(low=5)
    assert jax.tree.map(lambda x: -x, Checked(1, 2)).low == -1


def test_values_are_stored_as_they_are():
    """No value is exchanged for another that Python calls equal."""

    class Plain(pm.Module):
        data: object
        config: object = pm.field(static=True)

    for value in (float("nan"), -0.0, 0.0, True, 1, 1.0):
        made = Plain(value, value)
        assert repr((made.data, made.config)) == repr((value, value))


class Forgetful(pm.Module):
    """Leaves a field out."""

    weight: jax.Array
    bias: jax.Array

    def __init__(self):
        self.weight = ramp(1)


class WithoutSuper(Forgetful):
    """Calls no `__init__` of its base."""

    def __init__(self):
        self.bias = ramp(1)


class Unset(pm.Module):
    """Has no `__post_init__`."""

    weight: jax.Array = pm.field(init=False)


@pytest.mark.parametrize(
    ("make", "name"),
    [(Forgetful, "bias"), (WithoutSuper, "weight"), (Unset, "weight"), (Named, "size")],
)
def test_a_field_that_is_not_set_is_an_error(make, name):
    """It would be missing from the tree."""
    with pytest.raises(FieldError, match=f"(?s){make.__name__}.*{name}"):
        make()


def test_replace_of_an_unknown_field_is_an_error():
    """The value would be lost; the nearest name is told."""
    with pytest.raises(FieldError, match=r"(?s)Affine\.replace.*wieght.*weight"):
        affine().replace(wieght=ramp(2))
