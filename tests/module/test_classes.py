"""Making Module classes."""

import abc
import contextlib
import dataclasses
import functools as ft
import inspect
import pydoc
import typing
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Generic, TypeVar

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod.errors import FieldError, FieldWarning
from tests.goldens import refusals
from tests.helpers import string_annotations
from tests.helpers.comparing import assert_same
from tests.helpers.computing import scaled
from tests.helpers.trees import (
    Affine,
    Boxed,
    Child,
    Defaults,
    Empty,
    NamedBox,
    OwnInit,
    Parent,
    Static,
    affine,
    double,
    every_module,
    ramp,
)

T = TypeVar("T")


def test_both_inits_are_told():
    """Beside an own __init__ a __post_init__ does not run by itself: the hints are shown."""
    with pytest.warns(
        FieldWarning,
        match=r"Both: expected either __init__ or __post_init__, got a class that has both an "
        r"`__init__` method \([^)]*Both\.__init__\) and a `__post_init__`[^\n]*\n"
        r"  move its lines to the end of __init__, "
        r"or turn them into checks:\n      def __check_init__\(self\): \.\.\.$",
    ):

        class Both(pm.Module):
            x: int

            def __init__(self):
                self.x = 1

            def __post_init__(self):
                self.x = 2

    assert Both().x == 1


def test_a_post_init_under_an_inherited_init_is_told():
    """The class whose __init__ is in the way is named."""
    with pytest.warns(FieldWarning, match=r"Sub: expected either [^\n]* \(OwnInit\.__init__\)"):

        class Sub(OwnInit):
            def __post_init__(self):
                """Never runs."""


class Posting(pm.Module):
    """Its `__post_init__` runs at the end of the `__init__` that is written."""

    x: Any

    def __post_init__(self):
        self.x = 2 * self.x


def test_an_inherited_post_init_that_does_not_run_is_told():
    """A custom `__init__` overrides the one that would run it, and a mixin adds one."""
    with pytest.warns(FieldWarning, match=r"Sub: expected either [^\n]* \([^)]*Sub\.__init__\)"):

        class Sub(Posting):
            def __init__(self):
                self.x = 1

    class Mixin:
        def __post_init__(self):
            """Never runs."""

    with pytest.warns(FieldWarning, match=r"Mixed: expected either [^\n]* \(OwnInit\.__init__\)"):

        class Mixed(Mixin, OwnInit):
            pass

    assert Sub().x == 1


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


def test_a_required_field_may_be_added_under_an_inherited_init():
    """That `__init__` may set it: by a method of the subclass, or whatever it is given."""

    class Base(pm.Module):
        def __init__(self, *args, **kwargs):
            for name, value in kwargs.items():
                setattr(self, name, value)
            self.build(*args)

        def build(self, *args):
            """Nothing, unless a subclass does."""

    class Built(Base):
        weight: jax.Array
        size: int = pm.field(static=True)

        def build(self, size):
            self.size = size
            self.weight = ramp(size)

    class Given(Base):
        weight: jax.Array
        size: int = pm.field(static=True)

    assert Built(3).weight.shape == (3,)
    given = Given(size=2, weight=1)
    assert (given.size, jax.tree.leaves(given)) == (2, [1])


@pytest.mark.parametrize("base", [Exception, KeyError, dict, list, tuple, ft.partial])
def test_a_base_with_content_is_refused(base):
    """It was accepted, and the first transform failed: "object.__new__(Layer) is not safe"."""
    with pytest.raises(FieldError, match=rf"Layer: expected bases whose.*got {base.__name__}, "):

        class Layer(pm.Module, base):
            x: int


@pytest.mark.parametrize("base", [abc.ABC, Generic[T], contextlib.ContextDecorator])
def test_a_base_without_content_is_taken(base):
    """Any class written in Python, and a class written in C without data."""

    class Layer(pm.Module, base):
        x: jax.Array

    assert float(jax.tree.map(lambda x: 2 * x, Layer(jnp.ones(()))).x) == 2


def test_a_mixin_with_a_slot_is_taken():
    """Its slot is not a field, and not copied; the fields are."""

    class Noting:
        __slots__ = ("note",)

    class Layer(pm.Module, Noting):
        x: jax.Array

    assert float(jax.tree.map(lambda x: 2 * x, Layer(jnp.ones(()))).x) == 2


class Sub(OwnInit):
    """Has fields that the inherited `__init__` leaves unset."""

    extra: int
    more: str = pm.field(static=True)

    def __check_init__(self):
        """Not reached."""


class SetsOne(Sub):
    """Its own sets one of them."""

    def __init__(self):
        super().__init__(2)
        self.more = "more"


def test_the_init_of_a_plain_mixin_may_set_fields():
    """It is inherited as any other."""

    class Sets:
        def __init__(self, weight):
            self.weight = weight

    class Layer(Sets, pm.Module):
        weight: jax.Array
        scale: float = 2.0

    assert (Layer(1.0).weight, Layer(1.0).scale) == (1.0, 2.0)


def test_fields_with_defaults_may_be_added_under_an_inherited_init():
    """They are filled in; so is a field that is declared anew."""

    class Sub(OwnInit):
        bias: jax.Array | None
        extra: int = 5
        parts: list = pm.field(default_factory=list)

    made = Sub(2)
    assert (made.extra, made.parts, made.size) == (5, [], 2)


def test_an_abstract_class_may_add_fields_under_an_inherited_init():
    """The concrete subclass defines the __init__."""

    class Sub(OwnInit, is_abstract=True):
        extra: int

    class Concrete(Sub):
        def __init__(self, extra):
            super().__init__(2)
            self.extra = extra

    assert Concrete(7).extra == 7


@pytest.mark.parametrize("slots", [("x",), "x", ["x", "y"], ("y",), ()])
def test_slots_say_nothing(slots):
    """An instance has a dict whatever they say; fields are found there, and in the tree."""

    class Slotted(pm.Module):
        __slots__ = slots
        x: int

    assert Slotted(1).x == 1
    assert jax.tree.leaves(Slotted(1)) == [1]
    assert jax.tree.map(lambda x: x + 1, Slotted(1)).x == 2


def test_type_hints_are_those_of_the_fields():
    """Nothing of the machinery's own."""

    class Base(pm.Module):
        x: int

    class Sub(Base):
        y: float

    assert typing.get_type_hints(Sub) == {"x": int, "y": float}
    assert typing.get_type_hints(pm.Module) == {}


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
    assert Written.__init__.__doc__ == object.__init__.__doc__


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
    with pytest.raises(pm.errors.FrozenError, match="no deletion"):
        del Layer(True).x


def test_inheritance_collects_fields_in_order():
    """Bases first, as for dataclasses; a redeclared field keeps the base's position."""
    names = [f.name for f in dataclasses.fields(Child)]

    assert names == ["weight", "bias", "size", "temperature", "name", "offset"]
    layer = Child("a", 2)
    assert (layer.size, layer.temperature, layer.name) == (2, 0.5, "a")
    assert layer.hot() == 0.5
    assert isinstance(layer, Parent)


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


def test_annotations_are_those_that_were_written():
    """The class keeps its annotations, and those of its bases are its bases'."""
    assert inspect.get_annotations(Affine) == {"weight": jax.Array, "bias": jax.Array}
    assert "weight" not in inspect.get_annotations(Parent)
    assert typing.get_type_hints(Child)["name"] is str


def test_kw_only_is_for_the_classes_own_fields():
    """As for dataclasses: a base's fields stay positional."""

    class Sub(Affine, kw_only=True):
        scale: float = 1.0
        name: str

    made = Sub(1, 2, name="a")
    assert (made.weight, made.bias, made.scale, made.name) == (1, 2, 1.0, "a")
    with pytest.raises(TypeError, match="positional argument"):
        Sub(1, 2, 3.0, "a")


def test_generics():
    """Classes with type parameters, and subclasses of one at a type, are Modules."""

    class Named(Boxed[T], Generic[T]):
        name: str = "a"

    assert jax.tree.leaves(Named[int](5)) == [5]
    assert NamedBox(1.0).name == "box"
    assert isinstance(Boxed[int](1), Boxed)


@pytest.mark.parametrize("strict", [True, False])
def test_strict_is_accepted(strict):
    """Equinox's option changes nothing here."""

    class Layer(pm.Module, strict=strict):
        x: int

    assert Layer(1).x == 1


def test_is_abstract_forbids_instances_of_the_class_alone():
    """Its subclasses are concrete unless they say so, too."""

    class Base(pm.Module, is_abstract=True):
        x: int

    class Layer(Base):
        pass

    with pytest.raises(FieldError, match="Base: expected a concrete class"):
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


def test_a_metaclass_may_change_what_call_returns():
    """A `__call__` that returns other instances is unchanged."""

    class Caching(type(pm.Module)):
        def __call__(cls, x):
            if x not in cls.cache:
                cls.cache[x] = super().__call__(x)
            return cls.cache[x]

    class Layer(pm.Module, metaclass=Caching):
        x: int
        cache: ClassVar[dict] = {}

    assert Layer(1) is Layer(1)
    assert Layer(2).x == 2


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


def test_docstrings_are_left_alone():
    """A class without a docstring gets none."""

    class Silent(pm.Module):
        x: int

    class Speaking(pm.Module):
        """Says something."""

        x: int

    assert Silent.__doc__ is None or "Silent(" not in Silent.__doc__
    assert Speaking.__doc__ == "Says something."


@every_module
def test_type_of_an_instance_is_its_class(make):
    """No class is exchanged behind the caller's back."""
    module = make()

    assert type(module) is module.__class__
    assert isinstance(module, pm.Module)
    assert type(jax.tree.map(lambda x: x, module)) is type(module)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (Static(1, 2), Static(1, 3)),
        (Static(1, 2), Static(2, 2)),
        (affine(), affine(start=2.0)),
        (Empty(), Static(1, 2)),
        (OwnInit(2), Parent(2)),
        (Defaults(1.0, act=double), Defaults(1.0, act=max)),
    ],
)
def test_inequality(a, b):
    """Class, configuration and leaves count; the answer is one bool."""
    assert (a == b) is False
    assert (a != b) is True
    assert (a == 1) is False
    assert a != jax.tree.leaves(a)


def test_hash_agrees_with_equality():
    """Where all leaves hash, equal Modules have equal hashes and are one key."""
    assert hash(Static(1, 2)) == hash(Static(1, 2))
    assert len({Static(1, 2), Static(1, 2), Static(1, 3), Empty(), Empty()}) == 3


class Callable(pm.Module):
    """Arrays, beside a number."""

    weight: jax.Array
    rate: float = 1.0

    def __call__(self, x, _=None):
        return self.weight * x


def test_a_function_of_the_model_takes_its_place():
    """JAX hashes a function, but a Module with arrays has no hash: the hint works."""
    model = Callable(jnp.ones(()))
    hints = [
        jax.jit(lambda model, x: model(x))(model, 2.0),
        pm.filter_jit(model)(2.0),
        pm.filter_checkpoint(model)(2.0),
        pm.filter_cond(True, model, model, 2.0),
        pm.filter_switch(1, [model, model], 2.0),
    ]
    assert [float(y) for y in hints] == [2.0] * 5


def test_own_eq_and_hash_are_respected():
    """A class that defines its own comparison keeps it."""

    class Same(pm.Module):
        x: int

        def __eq__(self, other):
            return "perhaps"

        def __hash__(self):
            return 7

    assert (Same(1) == 2) == "perhaps"
    assert hash(Same(1)) == 7


def test_threads_make_classes_at_once():
    """Class creation has no shared state that threads could disturb."""

    def make(i):
        cls = type(pm.Module)(f"Made{i}", (pm.Module,), {"__annotations__": {"x": int, "y": int}})
        return jax.tree.leaves(cls(i, jnp.ones(())))[0]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(make, range(32))) == list(range(32))


test_refusals = refusals(globals())
