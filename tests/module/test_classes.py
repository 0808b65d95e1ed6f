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
from tests.helpers.trees import affine, double, new, ramp

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
    """Each argument of it, and metadata, which has ours under the expected keys."""
    options = {"default": 3, "init": False, "repr": False, "hash": True, "compare": False}
    declared = pm.field(**options, kw_only=True, metadata={"mine": 1})
    assert isinstance(declared, dataclasses.Field)
    assert {name: getattr(declared, name) for name in options} == options
    assert (declared.kw_only, dict(declared.metadata)) == (True, {"mine": 1})
    assert pm.field(default_factory=list).default_factory is list
    assert pm.field(constraint=None).metadata == pm.field().metadata == {}
    for name, value in (("static", True), ("converter", tuple), ("role", "lora")):
        assert pm.field(**{name: value}).metadata == {name: value}
    for name, value in (("converter", tuple), ("constraint", positive)):
        assert pm.buffer(**{name: value}).metadata == {name: value, "role": "buffer"}
    with pytest.warns(DeprecationWarning, match="static_field"):
        assert pm.static_field(default=1).metadata == {"static": True}


def test_buffer_is_left_alone_by_filter_grad():
    """A buffer is data that goes through transforms, but no gradient and no trainable leaf."""
    model = trees.Buffered(ramp(2), ramp(2), ramp(2))
    gradient = pm.filter_grad(lambda m: jnp.sum(m.weight * m.mean * m.low_rank))(model)
    assert len(jax.tree.leaves(model)) == 3
    assert gradient.mean is None
    assert gradient.weight.shape == (2,)
    assert pm.trainable(model)[0].mean is None


def test_class_variables_are_no_fields():
    """ClassVar, evaluated or as a string, and attributes without annotation."""
    fields = {"x": int, "kind": ClassVar[str], "other": "typing.ClassVar[int]"}
    Layer = new(fields=fields, kind="layer", other=3, plain=[1], __module__=__name__)
    assert [f.name for f in dataclasses.fields(Layer)] == ["x"]
    assert (Layer(1).kind, Layer(1).other, Layer(1).plain) == ("layer", 3, [1])
    fields = dataclasses.fields(string_annotations.Written)
    assert [f.name for f in fields] == ["weight", "act", "size"]
    assert len(jax.tree.leaves(string_annotations.Written(ramp(2), double))) == 1


def test_a_field_a_property_or_a_class_attribute_provides():
    """Each of the three makes the class concrete, and none is a field because it is abstract."""
    body = {"weight": 3.0, "label": "class", "__call__": lambda self, x: self.weight * x}
    by_attribute = new(trees.AbstractLayer, **body)()
    assert trees.ConcreteLayer(ramp(2)).weight.shape == (2,)
    assert trees.PropertyLayer(ramp(2)).weight.tolist() == [1.0, 4.0]
    assert (by_attribute(2.0), jax.tree.leaves(by_attribute)) == (6.0, [])
    assert string_annotations.Provided(1.0).names == ["a"]
    late = new(new(fields={"x": AbstractVar[int], "y": int}), fields={"x": int})
    assert [f.name for f in dataclasses.fields(late)] == ["y", "x"]
    assert late(y=5, x=6) == late(5, 6)
    assert late(5, 6).y == 5


def test_several_abstract_bases():
    """An attribute that one base lacks is missing unless another provides it."""
    one, two = (new(fields={name: AbstractVar[int]}) for name in "xy")
    lacking = new(new(fields={"x": int}), one, two)
    with pytest.raises(FieldError, match="abstract attributes x, y"):
        new(one, two)()
    with pytest.raises(FieldError, match="abstract attributes y"):
        lacking(1)
    complete = new(lacking, fields={"y": int}, y=2)
    assert jax.tree.leaves(complete(1)) == [1, 2]
    again = new(complete, fields={"y": AbstractVar[int]})
    with pytest.raises(FieldError, match="abstract attributes y"):
        again(1)


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
    """__init_subclass__ keywords and an own __new__ are Python's."""
    tags = []

    hook, make = lambda cls, tag=None: tags.append(tag), lambda cls, x: object.__new__(cls)
    registered = new(fields={"x": int}, __init_subclass__=hook, __new__=make)

    class Sub(registered, tag="here"): ...

    assert (tags, Sub(1).x) == (["here"], 1)


def test_a_post_init_that_does_not_run_is_told():
    """Beside an own `__init__`, unless that reaches it; a class that inherits both is not told."""

    class Posting(pm.Module):
        x: Any

        def __post_init__(self):
            self.x = 2 * self.x

    def by_name(self, x):
        self.x = x
        self.__post_init__()

    reaching = new(Posting, __init__=by_name)
    calling = new(Posting, __init__=lambda self, x: Posting.__init__(self, x))
    assert [cls(1).x for cls in (Posting, reaching, calling, new(reaching))] == [2, 2, 2, 2]
    assert pm.tree_at(lambda m: m.x, Posting(1), scaled()).x.shape == (2,)
    assign = {"__init__": lambda self, x: setattr(self, "x", x)}
    for bases, body in (((Posting,), {}), ((), {"__post_init__": Posting.__post_init__})):
        with pytest.warns(FieldWarning, match="Made has both"):
            cls = new(*bases, fields={"x": Any}, **assign, **body)
        assert cls(1).x == 1


def test_source_help_and_module_are_those_of_the_file():
    """inspect and pydoc find the class where it was written."""
    assert inspect.getsource(trees.Affine).startswith("class Affine(pm.Module):")
    assert inspect.getsourcefile(trees.Affine).endswith("trees.py")
    assert trees.Affine.__module__ == "tests.helpers.trees"
    text = pydoc.render_doc(trees.Affine, renderer=pydoc.plaintext)
    assert "class Affine" in text
    assert "scaled(self, x" in text
    assert trees.Affine.__init__.__qualname__ == "Affine.__init__"
    # Annotations are those that were written; a base's are its own.
    assert inspect.get_annotations(trees.Affine) == {"weight": jax.Array, "bias": jax.Array}
    assert "weight" not in inspect.get_annotations(trees.Parent)
    assert typing.get_type_hints(trees.Child)["name"] is str
    assert typing.get_type_hints(pm.Module) == {}
    assert typing.get_type_hints(string_annotations.Provided)["weight"] is jax.Array


def test_equality_is_one_bool_and_hashes_agree():
    """Class, configuration and leaves count; where all leaves hash, instances may be keys."""
    for a, b in (
        (trees.Static(1, 2), trees.Static(1, 3)),
        (affine(), affine(start=2.0)),
        (trees.OwnInit(2), trees.Parent(2)),
        (trees.Defaults(1.0, act=double), trees.Defaults(1.0, act=max)),
    ):
        assert [a == b, a != b, a == 1] == [False, True, False]
    assert hash(trees.Static(1, 2)) == hash(trees.Static(1, 2))
    assert (
        len(
            {
                trees.Static(1, 2),
                trees.Static(1, 2),
                trees.Static(1, 3),
                trees.Empty(),
                trees.Empty(),
            }
        )
        == 3
    )
    # JAX would take a model for a function by its hash, and compile once for all models.
    for use in (hash, lambda model: jax.jit(model)(1.0)):
        with pytest.raises(TypeError, match="hash"):
            use(affine())


def declared(**body):
    (name,) = body
    return lambda: new(fields={name: object}, **body)


FORBIDDEN = type(pm.Module)("Cls", (pm.Module,), {"__annotations__": {"x": int}}, is_abstract=True)
FORCED = type(pm.Module)("Forced", (pm.Module,), {}, strict=pm.StrictConfig(force_abstract=True))
SIZE = property(lambda self: 1)
REFUSED = [
    # One of the two would be lost.
    (lambda: pm.field(static=True, metadata={"static": True}), FieldError, "static"),
    (lambda: pm.field(static=True, role="lora"), FieldError, "role|lora"),
    (lambda: pm.field(static=True, constraint=positive), FieldError, "constraint|positive"),
    (lambda: pm.field(constraint=jnp.exp), FieldError, "exp"),
    (lambda: pm.field(statik=True), TypeError, "statik"),
    # A field that is trained, with a function of ours as its default.
    (declared(mean=pm.buffer), FieldError, r"Made\.mean"),
    # It was accepted, and the first transform failed: "object.__new__(Layer) is not safe".
    (lambda: new(pm.Module, Exception), TypeError, "lay-out conflict"),
    (lambda: new(pm.Module, dict), TypeError, "lay-out conflict"),
    (lambda: new(pm.Module, ft.partial), TypeError, "lay-out conflict"),
    # It cannot be both; a subclass provides it.
    (lambda: new(fields={"x": AbstractVar[bool]}, x=True), FieldError, r"Made.*\bx\b"),
    (lambda: new(fields={"x": AbstractClassVar[int]}, x=SIZE), FieldError, r"Made.*\bx\b"),
    (lambda: FORBIDDEN(1), FieldError, "Cannot instantiate.*Cls"),
    (FORCED, FieldError, "Cannot instantiate.*Forced"),
    (trees.AbstractLayer, TypeError, r"(?s)label.*weight.*__call__"),
    (string_annotations.Interface, FieldError, "abstract attributes label, names, weight"),
    # As a field it could never be read; nor could one in the place of a base's property.
    (declared(size=SIZE), FieldError, r"Made\.size"),
    (lambda: new(new(size=SIZE), fields={"size": int}), FieldError, r"Made\.size"),
    # It is ambiguous which of the two is meant.
    (
        lambda: new(
            new(fields={"f": Any}),
            f=lambda self: 1,
            __init__=lambda self: setattr(self, "f", jnp.sin),
        )(),
        FrozenError,
        r"Made\.f",
    ),
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
