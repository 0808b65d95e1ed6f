"""Abstract attributes."""

import abc
import dataclasses
from typing import ClassVar, Generic, TypeVar

import jax
import pytest

import pytreemod as other_name
import pytreemod as pm
from pytreemod import AbstractClassVar, AbstractVar
from pytreemod.errors import FieldError
from tests.goldens import refusals
from tests.helpers import string_annotations
from tests.helpers.trees import AbstractLayer, ConcreteLayer, PropertyLayer, ramp

Renamed = AbstractVar
T = TypeVar("T")


def test_a_field_a_property_or_a_class_attribute_provides():
    """Each of the three makes the class concrete."""

    class ByClassAttribute(AbstractLayer):
        weight = 3.0
        label = "class"

        def __call__(self, x):
            return self.weight * x

    assert ConcreteLayer(ramp(2)).weight.shape == (2,)
    assert PropertyLayer(ramp(2)).weight.tolist() == [1.0, 4.0]
    assert ByClassAttribute()(2.0) == 6.0
    assert jax.tree.leaves(ByClassAttribute()) == []


def test_abstract_attributes_are_no_fields():
    """They are neither parameters nor leaves."""
    assert [name for name in ConcreteLayer.__dataclass_fields__ if name != "label"] == ["weight"]

    class Base(pm.Module):
        x: AbstractVar[int]
        y: int

    class Layer(Base):
        x: int

    assert jax.tree.leaves(Layer(5, 6)) == [5, 6]
    assert Layer(y=5, x=6).y == 5
    assert [f.name for f in dataclasses.fields(Layer)] == ["y", "x"]


@pytest.mark.parametrize(
    "annotation",
    [
        AbstractVar[int],
        pm.AbstractVar[jax.Array | None],
        other_name.AbstractVar["int"],
        Renamed[list[int]],
        AbstractClassVar[str],
        "AbstractVar[int]",
        "pm.AbstractVar[jax.Array]",
        "other_name.AbstractVar[int]",
        "Renamed[int]",
        "AbstractClassVar['str']",
        "AbstractVar[not_defined.Anywhere]",
        "not_imported.AbstractVar[int]",
    ],
    ids=str,
)
def test_every_spelling(annotation):
    """Evaluated or a string, under any name: the value of the name counts."""

    class Base(pm.Module):
        x: annotation

    with pytest.raises(FieldError, match=r"with abstract attributes x\."):
        Base()

    class Layer(Base):
        x = 1

    assert Layer().x == 1


@pytest.mark.parametrize("annotation", ["int", int, "list[AbstractVar]", "ClassVar[int]", "T", T])
def test_other_annotations_are_not_abstract(annotation):
    """A name that only looks similar declares a field, or a class variable."""

    class Layer(pm.Module):
        x: annotation = 1

    assert Layer().x == 1


def test_abstract_again():
    """A subclass may declare an attribute of its base abstract."""

    class Layer(ConcreteLayer):
        weight: AbstractVar[jax.Array]

    class Back(Layer):
        weight: jax.Array

    with pytest.raises(FieldError, match="abstract attributes weight"):
        Layer(ramp(1))
    assert Back(ramp(1)).label == "concrete"


def test_several_abstract_bases():
    """An attribute that one base lacks is missing unless another provides it."""

    class First(pm.Module):
        x: AbstractVar[int]

    class Second(pm.Module):
        y: AbstractVar[int]

    class WithX(pm.Module):
        x: int

    class Lacking(First, Second):
        pass

    class LackingY(WithX, First, Second):
        pass

    class Complete(LackingY):
        y: int = 2

    with pytest.raises(FieldError, match="abstract attributes x, y"):
        Lacking()
    with pytest.raises(FieldError, match="abstract attributes y"):
        LackingY(1)
    assert jax.tree.leaves(Complete(1)) == [1, 2]


def test_abstract_generic():
    """Abstract attributes of generic classes."""

    class Base(pm.Module, Generic[T]):
        value: AbstractVar[T]

        @abc.abstractmethod
        def get(self) -> T: ...

    class Layer(Base[int]):
        value: int

        def get(self):
            return self.value

    assert Layer(3).get() == 3


def test_string_annotated_interfaces():
    """The classes of a file with string annotations behave the same."""
    assert string_annotations.Provided(1.0).names == ["a"]
    assert isinstance(string_annotations.Provided(1.0), string_annotations.Interface)


def test_class_variables_provide():
    """An annotated class variable provides an AbstractClassVar."""

    class Base(pm.Module):
        n: AbstractClassVar[int]

    class Layer(Base):
        n: ClassVar[int] = 3

    assert Layer().n == 3
    assert jax.tree.leaves(Layer()) == []


def test_both_kinds_are_listed():
    """Under the names that Equinox gives the lists; the latest declaration decides the kind."""

    class Base(pm.Module):
        x: AbstractVar[int]
        n: AbstractClassVar[int]

    class Sub(Base):
        x: int

    class Again(Base):
        n: AbstractVar[int]

    class Done(Sub):
        n = 3

    assert (Base.__abstractvars__, Base.__abstractclassvars__) == ({"x"}, {"n"})
    assert (Sub.__abstractvars__, Sub.__abstractclassvars__) == (set(), {"n"})
    assert (Again.__abstractvars__, Again.__abstractclassvars__) == ({"x", "n"}, set())
    assert (Done.__abstractvars__, Done.__abstractclassvars__) == (set(), set())
    assert Done(1).n == 3


def test_strict_config_is_an_older_spelling():
    """Of `is_abstract`; other options say nothing."""

    class Base(pm.Module, strict=pm.StrictConfig(force_abstract=True)):
        pass

    class Sub(Base, strict=pm.StrictConfig(allow_abstract_name=True)):
        pass

    assert type(Sub()) is Sub
    with pytest.raises(FieldError, match="declared with is_abstract=True"):
        Base()


test_refusals = refusals(globals())
