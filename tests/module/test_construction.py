"""Building instances: the generated `__init__`, and the steps after any `__init__`."""

import dataclasses
import enum
import functools as ft
import gc
import inspect
import itertools
import sys
import typing
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import FieldWarning
from pytreemod.module.construction import compile_functions, quoted
from pytreemod.module.schema import Schema
from tests.goldens import refusals
from tests.helpers import string_annotations
from tests.helpers.comparing import assert_same
from tests.helpers.computing import scaled
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
    OneKeyword,
    OwnInit,
    Parent,
    Prepared,
    Static,
    affine,
    double,
    ramp,
)


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
    assert cls.__record__.custom_init or returned is None


def test_defaults_are_shared_and_factories_are_called():
    """A default is one object; a factory makes one for each instance, and only if asked."""
    assert Defaults(1.0).inner is Defaults(2.0).inner
    assert Factories().parts is not Factories().parts
    assert Factories([1]).parts == [1]
    assert Defaults(1.0, 5.0).scale == 5.0


def test_converters_run_after_any_init():
    """On arguments, on defaults, and on assignments of a custom __init__; once each."""
    calls = []

    def convert(value):
        calls.append(value)
        return value + 1

    class Generated(pm.Module):
        x: int = pm.field(converter=convert)
        y: int = pm.field(converter=convert, default=10)

    class Own(pm.Module):
        x: int = pm.field(converter=convert)

        def __init__(self):
            self.x = 1
            self.x = self.x + 1

    made = Generated(1)
    assert (made.x, made.y, calls) == (2, 11, [1, 10])
    calls.clear()
    assert Own().x == 3
    assert calls == [2]
    assert Converted([1.0]).sizes == (1, 2)


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


def test_order_after_init():
    """Defaults, then converters, then freezing, then checks from the class up to its bases."""
    seen = []

    class Base(pm.Module):
        x: int = pm.field(converter=lambda v: seen.append("converter") or v)

        def __check_init__(self):
            seen.append("base check")
            with pytest.raises(pm.PytreemodError, match="immutable"):
                self.x = 2

    class Layer(Base):
        def __init__(self, x):
            seen.append("init")
            self.x = x

        def __check_init__(self):
            seen.append(f"check of {self.x}")
            assert len(jax.tree.leaves(self)) == 1

    Layer(1)
    assert seen[:3] == ["init", "converter", "check of 1"]
    assert seen[3:] == ["base check"]


def test_check_init_refuses_instances():
    """An error in __check_init__ is the caller's; replace checks again, unflatten does not."""

    assert jax.tree.map(lambda x: -x, Checked(1, 2)).low == -1


def test_post_init_sees_fields_and_init_vars():
    """__post_init__ gets the InitVars, may assign fields, and runs before converters."""
    made = Prepared(2.0, ramp(2))

    assert made.scaled.tolist() == [2.0, 4.0]
    assert not hasattr(made, "scale")
    assert string_annotations.Initialized(2).weight.shape == (2,)
    assert string_annotations.Initialized().weight.shape == (3,)


def test_inherited_post_init_runs():
    """A subclass without __init__ keeps its base's __post_init__, new fields included."""

    class More(Prepared):
        extra: int = 0

    made = More(3.0, ramp(1), 5)
    assert (made.scaled.tolist(), made.extra) == ([3.0], 5)


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


def test_two_generated_inits_are_called_one_after_the_other():
    """Each sets its own fields and leaves the other's alone."""

    class Other(pm.Module):
        bias: object = 2

    class Both(Written, Other):
        def __init__(self, first):
            inits = [lambda: Written.__init__(self, 10), lambda: Other.__init__(self, 20)]
            for init in inits if first else reversed(inits):
                init()

    for first in (True, False):
        assert (Both(first).weight, Both(first).scale, Both(first).bias) == (10, 1.0, 20)


def test_a_generated_init_sets_its_own_fields_as_any_other_would():
    """Its argument, or its default, wins if it is called last; as for dataclasses."""

    class Twice(Written):
        def __init__(self, *args):
            self.weight, self.scale = "before", "before"
            super().__init__(*args)

    assert (Twice("given").weight, Twice("given").scale) == ("given", 1.0)
    assert Twice("given", "too").scale == "too"


def test_a_default_that_is_no_parameter_does_not_come_after_what_was_set():
    """A field with `init=False` keeps the value of a subclass; a factory makes a new one."""

    class Counted(pm.Module):
        weight: object
        count: int = pm.field(init=False, default=3)
        parts: list[int] = pm.field(init=False, default_factory=list)

    class Own(Counted):
        def __init__(self):
            self.count, self.parts = 7, [1]
            super().__init__(1)

    assert (Counted(1).count, Own().count, Own().parts) == (3, 7, [])


def test_post_init_and_init_vars_meet_what_was_set_before():
    """A parent's `__post_init__` sees fields of the subclass that are there already."""

    class Post(pm.Module):
        weight: object
        start: dataclasses.InitVar[int]
        seen: tuple[str, ...] = pm.field(init=False)

        def __post_init__(self, start):
            self.seen = (*vars(self), start)

    class Own(Post):
        size: int

        def __init__(self, size):
            self.size = size
            super().__init__(1, 2)

    assert (Own(5).seen, Own(5).size) == (("size", "weight", 2), 5)


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


def test_a_class_attribute_that_is_assigned_later_counts_from_then_on():
    """For the class and its subclasses; existing instances are unchanged."""

    class Base(Named):
        pass

    class Sub(Base):
        pass

    before = Sub(1)
    Base.name = "later"
    assert (before.name, Sub(1).name, Base(1).name, Named(1).name) == ("a", "later", "later", "a")


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


def test_the_nearest_of_factories_and_attributes_fills_in():
    """A factory has the position of its field's declaration."""

    class Base(pm.Module):
        parts: object = 1

        def __init__(self):
            pass

    class Makes(Base):
        parts: object = pm.field(default_factory=list)

    class Has(Makes):
        parts = (2,)

    assert (Base().parts, Makes().parts, Has().parts) == (1, [], (2,))
    assert Makes().parts is not Makes().parts


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


def test_dataclasses_functions_work():
    """fields, is_dataclass, replace and asdict see a Module as the dataclass that it is."""
    layer = affine()

    assert [f.name for f in dataclasses.fields(Affine)] == ["weight", "bias"]
    assert dataclasses.is_dataclass(layer)
    assert dataclasses.replace(Checked(1, 2), low=0).low == 0
    assert dataclasses.asdict(Checked(1, 2)) == {"low": 1, "high": 2}


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


def test_new_may_return_something_else():
    """The result of __new__ is returned, finished only if it is a new instance of the class."""

    class Choosing(pm.Module):
        x: int

        def __new__(cls, x):
            return x if x > 1 else super().__new__(cls)

    assert Choosing(5) == 5
    assert Choosing(1).x == 1


def test_threads_construct_at_once():
    """Many threads that build instances of one class at once get the right ones."""

    def build(i):
        return Child(f"name {i}", 2).replace(temperature=float(i))

    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(build, range(64)))
    assert [(m.name, m.temperature) for m in made] == [(f"name {i}", float(i)) for i in range(64)]


@pytest.mark.parametrize("value", [float("nan"), -0.0, 0.0, True, 1, 1.0])
def test_values_are_stored_as_they_are(value):
    """No value is exchanged for another that Python calls equal."""

    class Plain(pm.Module):
        data: object
        config: object = pm.field(static=True)

    for other in (1, True, 1.0, 0.0, -0.0):
        Plain(other, other)
    made = Plain(value, value)
    assert repr((made.data, made.config)) == repr((value, value))
    assert type(made.config) is type(value)


def _counted(make):
    """How many Python functions run while `make()` does."""
    calls = []
    sys.setprofile(lambda frame, event, arg: calls.append(frame) if event == "call" else None)
    try:
        make()
    finally:
        sys.setprofile(None)
    return len(calls)


FUNCTIONS = {
    "def": double,
    "lambda": lambda x: x,
    "built-in": abs,
    "custom_jvp": jax.nn.relu,
    "jitted": jnp.tanh,
    "jnp ufunc": jnp.add,
    "NumPy ufunc": np.exp,
    "class": dict,
    "string": "relu",
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_a_function_in_a_field_costs_no_more_than_an_array(function, static, own):
    """The second instance takes the short road, whatever types of value it has."""

    class Written(pm.Module):
        weight: object
        function: object = pm.field(static=static)

    class Own(Written):
        def __init__(self, weight, function):
            self.weight = weight
            self.function = function

    cls = Own if own else Written
    x = ramp(2)
    first = cls(x, function)
    # The burst, the metaclass, the __init__, the last step; an assignment for each field. A
    # function without a module is inspected each time.
    looked_into = function in (FUNCTIONS["lambda"], jnp.add)
    assert _counted(lambda: cls(x, function)) <= (6 if own else 4) + looked_into
    second = cls(x, function)
    assert jax.tree.structure(first) == jax.tree.structure(second)
    assert jax.tree.leaves(second)[0] is x
    assert second.function is function


def test_a_function_of_a_known_type_is_looked_through():
    """That one function hides no array says nothing of the next, of the same type."""
    for known in (jnp.tanh, jax.jit(double), jax.vmap(double), double):
        for make in (Holder, lambda f: Static(1, f), lambda f: OwnHolder(f)):
            for _ in range(3):
                make(known)
            for hides in (jax.jit(affine().scaled), jax.vmap(affine())):
                with pytest.warns(FieldWarning, match="which hides f32"):
                    make(hides)
            make(known)


class OwnHolder(pm.Module):
    """Assigns its argument."""

    content: object

    def __init__(self, content):
        self.content = content


class Color(enum.Enum):
    """Items of a static field."""

    RED, GREEN = 1, 2


STATIC = [
    *((1, 2), (1.0, 2), (True, 2), (2, 1), (0.0,), (-0.0,), ((1,), (2,)), ((1.0,), (2,)), ()),
    *(frozenset({1}), frozenset({True}), slice(1), slice(1.0), Color.RED, Color.GREEN),
    *(np.dtype("float32"), np.dtype("int32"), ft.partial(double, 1), ft.partial(jnp.sum, axis=0)),
]


@pytest.mark.parametrize("own", [False, True])
def test_static_values_that_were_met_take_the_short_road(own, monkeypatch):
    """Nothing is decided again, and their parts are stored unchanged."""

    class Written(pm.Module):
        weight: object
        value: object = pm.field(static=True)

    class Own(Written):
        def __init__(self, weight, value):
            self.weight = weight
            self.value = value

    cls, x = Own if own else Written, ramp(2)
    made = [cls(x, value) for value in STATIC]
    monkeypatch.setattr(Schema, "decide", None)
    for value, first in zip(STATIC, made, strict=True):
        again = cls(x, value)
        assert again.value is value
        assert jax.tree.structure(again) == jax.tree.structure(first)


def test_enumerations_are_not_kept_alive():
    """A class remembers only types that are there for good."""
    local = enum.Enum("Local", ["A"])
    watched = weakref.ref(local)
    for _ in range(3):
        Static(1, local.A)
    for value in range(8):
        # The last few layouts are cached, with the kinds of their values.
        Static(1, (1,) * value)
    del local
    gc.collect()
    assert watched() is None


def test_functions_are_not_kept_alive():
    """A class remembers of which functions it has looked through only those of modules."""

    class Acting(pm.Module):
        weight: object
        function: object

    def made(module):
        function = jax.jit(lambda x: x)
        function.__module__ = module
        Acting(1, function)
        Acting(1, function)
        return weakref.ref(function)

    watched = [made(module) for module in (__name__, "no.such.module", None)]
    gc.collect()
    assert [ref() for ref in watched] == [None] * 3


def test_many_combinations_of_types_are_not_kept():
    """The number of cached types of a class is bounded."""

    class Wide(pm.Module):
        a: object
        b: object
        c: object

    values = [1, 1.0, "a", None, True, [1], (), {}, max]
    for _ in range(2):
        for a, b, c in itertools.product(values, repeat=3):
            made = Wide(a, b, c)
            assert [made.a, made.b, made.c] == [a, b, c]
            is_data = [not (isinstance(v, str) or callable(v)) for v in (a, b, c)]
            assert len(Wide.__record__.data_names(made)) == sum(is_data)
    assert len(Wide.__record__.layouts_by_type) <= 64


def test_writing_functions_leaves_nothing_for_the_garbage_collector():
    """Nor do the functions that write them: each imported class would leave its share."""
    source = f"def read(d):\n    return d[{quoted(0)}], d.get({quoted(1)})\n"
    gc.collect()

    scope = compile_functions(source, {}, "Some", ("weight", "bias"))
    found = gc.collect()

    assert scope["read"]({"weight": 1, "bias": 2}) == (1, 2)
    assert found == 0


class Counts(pm.Module):
    """Sets fields past `__setattr__`, once it is finished and flattened."""

    weight: jax.Array
    note: Any
    n: int = pm.field(static=True, default=0)

    def __check_init__(self):
        pm.filter_jit(lambda m: m.n)(self)
        object.__setattr__(self, "n", len(jax.tree.leaves(self)))
        object.__setattr__(self, "note", self.new_note())

    def new_note(self):
        return 7.0


class CountsFunction(Counts):
    """It assigns configuration to a field that had data."""

    def new_note(self):
        return jnp.tanh


class CountsComputed(Counts):
    """It assigns a value that is not read as stored."""

    def new_note(self):
        return scaled()


@pytest.mark.parametrize("cls", [Counts, CountsFunction, CountsComputed])
@pytest.mark.parametrize("change", [lambda m: m, lambda m: m.replace(weight=ramp(2))])
def test_what_checks_change_is_in_the_tree(cls, change):
    """Nothing that was cached while they ran outlives them."""
    made = change(cls(ramp(2), 1.0))

    assert made.n == pm.filter_jit(lambda m: m.n)(made) > 0
    for seen in (jax.tree.map(lambda x: x, made), pm.filter_jit(lambda m: m)(made)):
        assert type(seen) is type(made)
        assert_same(seen.note, made.note)
        assert_same(jax.tree.structure(seen), jax.tree.structure(made))
    if cls is Counts:
        assert jax.tree.leaves(made)[1:] == [7.0]
        assert jax.tree.structure(made) == jax.tree.structure(cls(ramp(2), 1.0).replace(note=7.0))
    if cls is CountsFunction:
        assert len(jax.tree.leaves(made)) == 1


test_refusals = refusals(globals())
