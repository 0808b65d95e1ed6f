"""Abstract attributes."""

import dataclasses

import jax
import pytest

import pytreemod as pm
from pytreemod import AbstractClassVar, AbstractVar
from pytreemod.errors import FieldError
from tests.helpers import string_annotations
from tests.helpers.trees import AbstractLayer, ConcreteLayer, PropertyLayer, ramp


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


@pytest.mark.parametrize(
    "annotation",
    [
        AbstractVar[int],
        pm.AbstractVar[jax.Array | None],
        AbstractClassVar[str],
        "AbstractVar[int]",
        "pm.AbstractVar[jax.Array]",
        "AbstractClassVar['str']",
        "AbstractVar[not_defined.Anywhere]",
    ],
    ids=str,
)
def test_every_spelling(annotation):
    """Evaluated or a string."""

    class Base(pm.Module):
        x: annotation

    with pytest.raises(FieldError, match=r"(?s)Base.*\bx\b"):
        Base()

    class Layer(Base):
        x = 1

    assert Layer().x == 1


@pytest.mark.parametrize("annotation", ["int", int, "list[AbstractVar]", "ClassVar[int]"])
def test_other_annotations_are_not_abstract(annotation):
    """A name that only looks similar declares a field, or a class variable."""

    class Layer(pm.Module):
        x: annotation = 1

    assert Layer().x == 1


def test_what_is_missing_is_listed():
    """Attributes and methods; a subclass may declare one abstract again, or all of a class."""
    with pytest.raises(TypeError, match=r"(?s)label.*weight.*__call__"):
        AbstractLayer()
    with pytest.raises(FieldError, match=r"(?s)label.*names.*weight"):
        string_annotations.Interface()
    assert string_annotations.Provided(1.0).names == ["a"]

    class Layer(ConcreteLayer):
        weight: AbstractVar[jax.Array]

    class Forced(pm.Module, strict=pm.StrictConfig(force_abstract=True)):
        pass

    with pytest.raises(FieldError, match="weight"):
        Layer(ramp(1))
    with pytest.raises(FieldError, match="Forced"):
        Forced()


@pytest.mark.parametrize(
    "body",
    [
        {"__annotations__": {"x": AbstractVar[bool]}, "x": True},
        {"__annotations__": {"x": AbstractClassVar[bool]}, "x": property(lambda self: 1)},
    ],
)
def test_an_abstract_attribute_has_no_value(body):
    """It cannot be both; a subclass provides it."""
    with pytest.raises(FieldError, match=r"Wrong.*\bx\b"):
        type(pm.Module)("Wrong", (pm.Module,), body)
