"""Module classes: fields, abstract attributes, what overrides a field, bases and metaclasses."""

import abc
import dataclasses
import functools as ft
import inspect
import pydoc
import typing
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod import AbstractClassVar, AbstractVar
from pytreemod.errors import FieldError, FieldWarning, FrozenError
from tests.helpers import string_annotations, trees
from tests.helpers.comparing import assert_same
from tests.helpers.computing import scaled
from tests.helpers.trees import double, new, ramp

positive = pm.constraints.positive


class Counting(type):
    def __new__(mcs, name, bases, namespace, /, tag=None, **kwargs):
        cls = super().__new__(mcs, name, bases, namespace, **kwargs)
        cls.tag, cls.made = tag, 0
        return cls

    def __call__(cls, *args, **kwargs):
        cls.made += 1
        return super().__call__(*args, **kwargs)


def test_field_takes_what_dataclasses_field_takes():
    """And keeps what is ours in the metadata, beside that of other libraries."""
    options = {"default": 3, "init": False, "repr": False, "hash": True, "kw_only": True}
    declared = pm.field(**options, metadata={"mine": 1})
    assert {name: getattr(declared, name) for name in options} == options
    assert dict(declared.metadata) == {"mine": 1}
    assert pm.field(constraint=None).metadata == pm.field().metadata == {}
    for name, value in (("static", True), ("converter", tuple), ("role", "lora")):
        assert pm.field(**{name: value}).metadata == {name: value}
    for name, value in (("converter", tuple), ("constraint", positive)):
        assert pm.buffer(**{name: value}).metadata == {name: value, "role": "buffer"}
    with pytest.warns(DeprecationWarning, match="static_field"):
        assert pm.static_field(default=1).metadata == {"static": True}


def test_class_variables_are_no_fields():
    """ClassVar, evaluated or as a string, and attributes without annotation."""
    fields = {"x": int, "kind": ClassVar[str], "other": "typing.ClassVar[int]"}
    Layer = new(fields=fields, kind="layer", other=3, plain=[1], __module__=__name__)
    assert [f.name for f in dataclasses.fields(Layer)] == ["x"]
    assert (Layer(1).kind, Layer(1).other, Layer(1).plain) == ("layer", 3, [1])
    fields = dataclasses.fields(string_annotations.Written)
    assert [f.name for f in fields] == ["weight", "act", "size"]
    assert len(jax.tree.leaves(string_annotations.Written(ramp(2), double))) == 1


def test_what_provides_an_abstract_attribute():
    """A field, a property or a class attribute, of any base; then the attribute is no field."""
    body = {"weight": 3.0, "label": "class", "__call__": lambda self, x: self.weight * x}
    by_attribute = new(trees.AbstractLayer, **body)()
    assert trees.PropertyLayer(ramp(2)).weight.tolist() == [1.0, 4.0]
    assert (by_attribute(2.0), jax.tree.leaves(by_attribute)) == (6.0, [])
    late = new(new(fields={"x": AbstractVar[int], "y": int}), fields={"x": int})
    assert [f.name for f in dataclasses.fields(late)] == ["y", "x"]
    one, two = (new(fields={name: AbstractVar[int]}) for name in "xy")
    lacking = new(new(fields={"x": int}), one, two)
    complete = new(lacking, fields={"y": int}, y=2)
    assert jax.tree.leaves(complete(1)) == [1, 2]
    again = new(complete, fields={"y": AbstractVar[int]})
    for make, names in ((new(one, two), "x, y"), (lacking, "y"), (again, "y")):
        with pytest.raises(FieldError, match=f"abstract attributes {names}"):
            make()


ABSTRACT = [AbstractVar[int], pm.AbstractVar[jax.Array | None], AbstractClassVar[str]]
ABSTRACT += ["AbstractVar[int]", "pm.AbstractVar[jax.Array]", "AbstractClassVar['str']"]
ABSTRACT += ["AbstractVar[not_defined.Anywhere]"]


def test_every_spelling():
    """Evaluated or a string; a name that only looks similar declares a field or a ClassVar."""
    for annotation in ABSTRACT:
        base = new(fields={"x": annotation})
        with pytest.raises(FieldError, match=r"(?s)Made.*\bx\b"):
            base()
        assert new(base, x=1)().x == 1
    for annotation in ("int", int, "list[AbstractVar]", "ClassVar[int]"):
        assert new(fields={"x": annotation}, x=1)().x == 1


def test_abstract_base_classes_work():
    """isinstance with registered classes, abstract methods and properties are ABC's."""
    abstract = new(size=property(abc.abstractmethod(lambda self: 1)))
    abstract.register(Counting)
    assert isinstance(Counting("Stranger", (), {}), abstract)
    assert new(abstract, fields={"x": int}, size=property(lambda self: self.x))(3).size == 3
    with pytest.raises(FieldError, match=r"with abstract attributes size\(\)"):
        abstract()


@pytest.mark.parametrize("options", [{}, {"default": 7.0}, {"constraint": positive}])
@pytest.mark.parametrize("style", ["generated", "init=False", "own"])
def test_a_property_takes_the_place_of_a_field(style, options):
    """The field leaves the parameters and the tree, through every way of making instances."""
    init = {"__init__": lambda self, x: setattr(self, "x", x)} if style == "own" else {}
    field = pm.field(init=style != "init=False", **options)
    base = new(fields={"x": Any, "f": Any}, f=field, **init)
    twice = property(lambda self: 2 * self.x)
    for kind in (
        new(base, f=twice),
        new(type("Mixin", (), {"f": twice}), base),
        new(base, f=ft.cached_property(lambda self: 2 * self.x)),
    ):
        made = kind(ramp(2))
        doubled = jax.tree.map(lambda x: 2 * x, made)
        assert "f" not in inspect.signature(kind).parameters
        assert len(jax.tree.leaves(made)) == 1
        for other in (made, made.replace(), pm.filter_jit(lambda m: m)(made), doubled):
            assert jnp.array_equal(other.f, 2 * other.x)
        assert jnp.array_equal(doubled.x, 2 * made.x)
        computed = made.replace(x=scaled())
        assert jnp.array_equal(computed.f, 2 * computed.x)
    method = new(base, f=lambda self, y: self.x + y)(1.0).f
    assert (method(2.0), jax.tree.leaves(method)) == (3.0, [1.0])


@pytest.mark.parametrize("order", [1, -1])
def test_the_metaclass_can_be_combined_with_another(order):
    """`__new__` with keywords and `__call__`, both through super(), in either order."""
    combined = type("Combined", (Counting, type(pm.Module))[::order], {})

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


def test_init_subclass_and_new_work_as_ever():
    """`__init_subclass__` gets its keywords; an own `__new__` makes the instance."""
    tags = []
    hook, make = lambda cls, tag=None: tags.append(tag), lambda cls, x: object.__new__(cls)
    registered = new(fields={"x": int}, __init_subclass__=hook, __new__=make)

    class Sub(registered, tag="here"): ...

    assert (tags, Sub(1).x) == (["here"], 1)
    # An instance from before, perhaps of a transform, is returned as it is.
    known = []
    init = lambda self: None if known else setattr(self, "x", 1)  # noqa: E731
    give = lambda cls: known[0] if known else object.__new__(cls)  # noqa: E731
    single = new(fields={"x": int}, __init__=init, __new__=give)
    known.append(pm.filter_jit(lambda m: m)(single()))
    assert (single() is known[0], single().x) == (True, 1)
    # Python's own rule: what is no instance of the class is returned as it is.
    assert new(fields={"x": int}, __new__=lambda cls, x: [x])(3) == [3]


def test_the_class_of_an_instance_with_rules_makes_plain_instances():
    """A method may call it, and the rules are those of one instance."""
    doubled = lambda self: type(self)(2 * self.weight, self.bias)  # noqa: E731
    cls = new(trees.Affine, doubled=doubled)
    made = pm.with_precision(cls(ramp(2), 0), "float32").doubled()
    assert (type(made), made.weight.tolist()) == (cls, [2.0, 4.0])


def test_a_post_init_that_does_not_run_is_told():
    """Beside an own `__init__`, unless that calls it; a class that inherits both is not told."""

    class Posting(pm.Module):
        x: Any

        def __post_init__(self):
            self.x = 2 * self.x

    def by_name(self, x):
        self.x = x
        self.__post_init__()

    calling = new(Posting, __init__=lambda self, x: Posting.__init__(self, x))
    assert [cls(1).x for cls in (Posting, new(Posting, __init__=by_name), calling)] == [2] * 3
    assert pm.tree_at(lambda m: m.x, Posting(1), scaled()).x.shape == (2,)
    with pytest.warns(FieldWarning, match="Made has both"):
        new(Posting, __init__=lambda self, x: setattr(self, "x", x))


def test_what_python_finds_of_a_class_is_what_was_written():
    """Its source, its file, its help; annotations are its own, without those of a base."""
    assert inspect.getsource(trees.Affine).startswith("class Affine(pm.Module):")
    assert inspect.getsourcefile(trees.Affine).endswith("trees.py")
    assert "scaled(self, x" in pydoc.render_doc(trees.Affine, renderer=pydoc.plaintext)
    assert trees.Affine.__init__.__qualname__ == "Affine.__init__"
    assert inspect.get_annotations(trees.Parent) == {"temperature": float}
    assert typing.get_type_hints(trees.Child)["name"] is str
    assert typing.get_type_hints(string_annotations.Provided)["weight"] is jax.Array


FORBIDDEN = type(pm.Module)("Cls", (pm.Module,), {"__annotations__": {"x": int}}, is_abstract=True)
FORCED = type(pm.Module)("Forced", (pm.Module,), {}, strict=pm.StrictConfig(force_abstract=True))
SIZE = property(lambda self: 1)
FUNCTION = new(new(fields={"f": Any}), f=double, __init__=lambda self: setattr(self, "f", jnp.sin))
REFUSED = [
    # One of the two would be lost.
    (lambda: pm.field(static=True, metadata={"static": True}), FieldError, "static"),
    (lambda: pm.field(static=True, role="lora"), FieldError, "role|lora"),
    (lambda: pm.field(static=True, constraint=positive), FieldError, "constraint|positive"),
    (lambda: pm.field(constraint=jnp.exp), FieldError, "exp"),
    # A field that is trained, with a function of ours as its default.
    (lambda: new(fields={"mean": object}, mean=pm.buffer), FieldError, r"Made\.mean"),
    # It was accepted, and the first transform failed: "object.__new__(Layer) is not safe".
    (lambda: new(pm.Module, dict), TypeError, "lay-out conflict"),
    # It cannot be both; a subclass provides it.
    (lambda: new(fields={"x": AbstractVar[bool]}, x=True), FieldError, r"Made.*\bx\b"),
    (lambda: FORBIDDEN(1), FieldError, "Cannot instantiate.*Cls"),
    (FORCED, FieldError, "Cannot instantiate.*Forced"),
    # As a field it could never be read; nor could one in the place of a base's property.
    (lambda: new(fields={"size": int}, size=SIZE), FieldError, r"Made\.size"),
    (lambda: new(new(size=SIZE), fields={"size": int}), FieldError, r"Made\.size"),
    # It is ambiguous which of the two is meant.
    (FUNCTION, FrozenError, r"Made\.f"),
]


@pytest.mark.parametrize(("declare", "error", "text"), REFUSED)
def test_classes_that_cannot_be_are_refused(declare, error, text):
    """A contradiction, a base with content, an abstract class, a hidden field."""
    with pytest.raises(error, match=text):
        declare()
    assert new(FORBIDDEN)(1).x == 1  # Its subclasses are concrete unless they say so, too.


def test_a_frozen_dataclass_beside_the_module_has_fields_without_values():
    """They are looked up in no class, and are children like others."""

    @dataclasses.dataclass(frozen=True)
    class Sized:
        size: float

    class Layer(pm.Module, Sized):
        weight: float = 1.0

        def __init__(self, size):
            self.size, self.weight = size, 2.0

    assert jax.tree.leaves(Layer(3.0)) == [3.0, 2.0]
