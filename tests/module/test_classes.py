"""Making Module classes."""

import abc
import dataclasses
import functools as ft
import inspect
import pydoc
import typing
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import FieldError, FieldWarning
from tests.helpers import string_annotations
from tests.helpers.comparing import assert_same
from tests.helpers.computing import scaled
from tests.helpers.trees import (
    Affine,
    Child,
    Defaults,
    Empty,
    OwnInit,
    Parent,
    Static,
    affine,
    double,
    ramp,
)


class Posting(pm.Module):
    """Its `__post_init__` runs at the end of the `__init__` that is written."""

    x: Any

    def __post_init__(self):
        self.x = 2 * self.x


def test_a_post_init_that_an_own_init_reaches_is_not_told():
    """By the `__init__` of its base, or by its name; nor is there a warning for subclasses."""

    class ByBase(Posting):
        def __init__(self, x):
            super().__init__(x)

    class ByName(Posting):
        def __init__(self, x):
            self.x = x
            self.__post_init__()

    class Inherits(ByName):
        pass

    assert [cls(1).x for cls in (ByBase, ByName, Inherits)] == [2, 2, 2]
    assert pm.tree_at(lambda m: m.x, Posting(1), scaled()).x.shape == (2,)


@pytest.mark.parametrize("base", [Exception, dict, ft.partial])
def test_a_base_with_content_is_refused(base):
    """It was accepted, and the first transform failed: "object.__new__(Layer) is not safe"."""
    with pytest.raises(TypeError, match="lay-out conflict"):

        class Layer(pm.Module, base):
            x: int


def test_the_signature_is_that_of_a_dataclass():
    """With the return type of `__init__`, generated or custom; a base's docstring is inherited."""

    class Mixin:
        def describe(self):
            """Nothing."""

    class Written(Mixin, pm.Module):
        x: int

    class Own(pm.Module):
        x: int

        def __init__(self, x: int) -> None:
            """Make one."""
            self.x = x

    class Sub(Own):
        y: int = 1

    assert str(inspect.signature(Written)) == str(inspect.signature(Own)) == "(x: int) -> None"
    assert Sub.__init__.__doc__ == "Make one."


def test_a_field_may_be_deleted_while_the_instance_is_built():
    """The assignment is undone; an unset field is refused as usual."""

    class Layer(pm.Module):
        x: int

        def __init__(self, again):
            self.x = 1
            del self.x
            if again:
                self.x = 2

    assert Layer(True).x == 2
    with pytest.raises(FieldError, match="Field 'x' was not initialized"):
        Layer(False)
    with pytest.raises(pm.errors.FrozenError, match=r"Layer\.x"):
        del Layer(True).x


def test_multiple_inheritance():
    """Fields of several bases, with super() in the order of the MRO."""

    class Named(pm.Module):
        name: str = "nobody"

        def describe(self):
            return [self.name]

    class Sized(pm.Module):
        size: int = pm.field(static=True, default=1)

        def describe(self):
            return [self.size, *super().describe()] if hasattr(super(), "describe") else [self.size]

    class Both(Sized, Named):
        weight: float = 0.0

        def describe(self):
            return [self.weight, *super().describe()]

    made = Both(weight=2.0, size=3)
    assert made.describe() == [2.0, 3, "nobody"]
    assert jax.tree.leaves(made) == [2.0]


def test_class_variables_are_no_fields():
    """ClassVar, evaluated or as a string, and attributes without annotation."""

    class Layer(pm.Module):
        x: int
        kind: ClassVar[str] = "layer"
        other: "typing.ClassVar[int]" = 3
        plain = [1]  # noqa: RUF012

    assert [f.name for f in dataclasses.fields(Layer)] == ["x"]
    assert (Layer(1).kind, Layer(1).other, Layer(1).plain) == ("layer", 3, [1])
    assert [f.name for f in dataclasses.fields(string_annotations.Written)] == [
        "weight",
        "act",
        "size",
    ]


def test_string_annotations_mean_the_same():
    """A file whose annotations are strings declares the same fields, roles and abstract names."""
    written = string_annotations.Written(ramp(2), double)

    assert len(jax.tree.leaves(written)) == 1
    assert typing.get_type_hints(string_annotations.Provided)["weight"] is jax.Array
    with pytest.raises(FieldError, match="abstract attributes label, names, weight"):
        string_annotations.Interface()
    assert string_annotations.Provided(1.0).label == "b"


def test_kw_only_is_for_the_classes_own_fields():
    """As for dataclasses: a base's fields stay positional."""

    class Sub(Affine, kw_only=True):
        scale: float = 1.0
        name: str

    made = Sub(1, 2, name="a")
    assert (made.weight, made.bias, made.scale, made.name) == (1, 2, 1.0, "a")
    with pytest.raises(TypeError, match="positional argument"):
        Sub(1, 2, 3.0, "a")


def test_is_abstract_forbids_instances_of_the_class_alone():
    """Its subclasses are concrete unless they say so, too."""

    class Base(pm.Module, is_abstract=True):
        x: int

    class Layer(Base):
        pass

    with pytest.raises(FieldError, match=r"Cannot instantiate.*Base"):
        Base(1)
    assert Layer(1).x == 1


class Counting(type):
    """A metaclass of someone else's."""

    def __new__(mcs, name, bases, namespace, /, tag=None, **kwargs):
        cls = super().__new__(mcs, name, bases, namespace, **kwargs)
        cls.tag = tag
        cls.made = 0
        return cls

    def __call__(cls, *args, **kwargs):
        cls.made += 1
        return super().__call__(*args, **kwargs)


@pytest.mark.parametrize("first", ["theirs", "ours"])
def test_the_metaclass_can_be_combined_with_another(first):
    """`__new__` with keywords and `__call__`, both through super(), in either order."""
    bases = (Counting, type(pm.Module)) if first == "theirs" else (type(pm.Module), Counting)
    combined = type("Combined", bases, {})

    class Layer(pm.Module, metaclass=combined, tag="here", kw_only=True):
        x: jax.Array

        def __call__(self, y):
            return self.x * y

    class Own(Layer, tag="there"):
        def __init__(self):
            self.x = ramp(2)

    assert (Layer.tag, Own.tag) == ("here", "there")
    assert_same(pm.filter_jit(Layer(x=ramp(2)))(2.0), ramp(2) * 2)
    assert_same(jax.tree.map(lambda x: x, Own()), Own())
    assert (Layer.made, Own.made) == (1, 2)


def test_abstract_base_classes_work():
    """isinstance with registered classes, abstract methods and properties are ABC's."""

    class Base(pm.Module):
        @property
        @abc.abstractmethod
        def size(self):
            """How large."""

    class Layer(Base):
        x: int

        @property
        def size(self):
            return self.x

    class Stranger:
        """Not a Module."""

    Base.register(Stranger)
    assert isinstance(Stranger(), Base)
    assert Layer(3).size == 3
    with pytest.raises(FieldError, match=r"with abstract attributes size\(\)"):
        Base()


def test_methods_may_be_assigned_to_the_class():
    """A function put into a class later is a method, bound as others are."""

    class Layer(pm.Module):
        x: jax.Array

    Layer.double = lambda self: self.x * 2
    method = Layer(ramp(2)).double

    assert type(method) is pm.BoundMethod
    assert_same(method(), ramp(2) * 2)


def test_source_help_and_module_are_those_of_the_file():
    """inspect and pydoc find the class where it was written."""
    assert "What most layers" not in inspect.getsource(Affine)
    assert inspect.getsource(Affine).startswith("class Affine(pm.Module):")
    assert inspect.getsourcefile(Affine).endswith("trees.py")
    assert Affine.__module__ == "tests.helpers.trees"
    text = pydoc.render_doc(Affine, renderer=pydoc.plaintext)
    assert "class Affine" in text
    assert "scaled(self, x" in text
    assert Affine.__init__.__qualname__ == "Affine.__init__"


def test_hash_agrees_with_equality():
    """Where all leaves hash, equal Modules have equal hashes and are one key."""
    assert hash(Static(1, 2)) == hash(Static(1, 2))
    assert len({Static(1, 2), Static(1, 2), Static(1, 3), Empty(), Empty()}) == 3


def test_threads_make_classes_at_once():
    """Class creation has no shared state that threads could disturb."""

    def make(i):
        cls = type(pm.Module)(f"Made{i}", (pm.Module,), {"__annotations__": {"x": int, "y": int}})
        return jax.tree.leaves(cls(i, jnp.ones(())))[0]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(make, range(32))) == list(range(32))


def test_both_inits_are_told():
    """Beside an own __init__ a __post_init__ does not run by itself."""
    with pytest.warns(FieldWarning, match="Both"):

        class Both(pm.Module):
            x: int

            def __init__(self):
                self.x = 1

            def __post_init__(self):
                self.x = 2

    with pytest.warns(FieldWarning, match=r"Sub\b"):

        class Sub(Posting):
            def __init__(self):
                self.x = 1

    assert (Both().x, Sub().x) == (1, 1)


class Sub(OwnInit):
    """Has fields that the inherited `__init__` leaves unset."""

    extra: int
    more: str = pm.field(static=True)


def test_a_field_that_an_inherited_init_leaves_unset_is_an_error():
    """It may have a default, or be set by an abstract class's subclass."""
    with pytest.raises(FieldError, match=r"(?s)Sub.*extra"):
        Sub(2)

    class Defaults(OwnInit):
        extra: int = 5

    class Abstract(OwnInit, is_abstract=True):
        extra: int

    class Concrete(Abstract):
        def __init__(self, extra):
            super().__init__(2)
            self.extra = extra

    assert (Defaults(2).extra, Concrete(7).extra) == (5, 7)


def test_annotations_are_those_that_were_written():
    """Nothing of the machinery's own; a base's are its own."""
    assert inspect.get_annotations(Affine) == {"weight": jax.Array, "bias": jax.Array}
    assert "weight" not in inspect.get_annotations(Parent)
    assert typing.get_type_hints(Child)["name"] is str
    assert typing.get_type_hints(pm.Module) == {}


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (Static(1, 2), Static(1, 3)),
        (affine(), affine(start=2.0)),
        (OwnInit(2), Parent(2)),
        (Defaults(1.0, act=double), Defaults(1.0, act=max)),
    ],
)
def test_inequality(a, b):
    """Class, configuration and leaves count; the answer is one bool."""
    assert (a == b) is False
    assert (a != b) is True
    assert (a == 1) is False


def test_a_model_with_arrays_has_no_hash():
    """JAX would take it for a function by its hash, and compile once for all models."""
    for use in (hash, lambda model: jax.jit(model)(1.0)):
        with pytest.raises(TypeError, match="hash"):
            use(affine())
