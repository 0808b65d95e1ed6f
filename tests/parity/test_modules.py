"""Definitions of Modules, in every style that Equinox's users write them."""

import abc
import copy
import dataclasses
import inspect
import pickle
from collections import namedtuple
from typing import Any, ClassVar, Generic, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest

from tests.parity.helpers import array_paths, caught, module_from, ramp, same_under_both_imports

T = TypeVar("T")
Pair = namedtuple("Pair", ["first", "second"])


def outcome(call: Any) -> Any:
    """What `call` returns, or the name of the built-in error that it raises."""
    try:
        return call()
    except TypeError:
        return "TypeError"


@same_under_both_imports
def test_generated_init_takes_positions_keywords_and_defaults(eqx):
    """A class without `__init__` gets the one that a dataclass would get."""

    class Layer(eqx.Module):
        weight: jax.Array
        scale: float = 2.0
        name: str = eqx.field(default="layer", static=True)

    by_position = Layer(ramp(2), 3.0, "other")
    by_keyword = Layer(name="other", weight=ramp(2), scale=3.0)
    too_few = caught(lambda: Layer(), about="weight")
    too_many = caught(lambda: Layer(ramp(2), 1.0, "a", 1))
    unknown = caught(lambda: Layer(ramp(2), bias=1.0), about="bias")
    parameters = list(inspect.signature(Layer).parameters)
    return by_position, by_keyword, Layer(ramp(2)), too_few, too_many, unknown, parameters


@same_under_both_imports
def test_own_init_assigns_fields_in_any_order(eqx):
    """An own `__init__` may compute, read back what it assigned, assign twice and call methods."""

    class Layer(eqx.Module):
        weight: jax.Array
        bias: jax.Array
        size: int = eqx.field(static=True)

        def __init__(self, size, *, fill=1.0):
            self.size = size
            self.bias = jnp.zeros(self.size)
            self.weight = self.make(fill)
            self.bias = self.bias + self.weight

        def make(self, fill):
            return jnp.full(self.size, fill)

    return Layer(3), Layer(2, fill=0.5), array_paths(Layer(3)), str(inspect.signature(Layer))


@same_under_both_imports
def test_default_factory_makes_a_new_value_for_each_instance(eqx):
    """`default_factory` is called once per construction, and only when nothing is passed."""
    calls = []

    def make():
        calls.append(len(calls))
        return [ramp(2), len(calls)]

    class Layer(eqx.Module):
        parts: list = eqx.field(default_factory=make)

    first, second, given = Layer(), Layer(), Layer([1])
    return first, second, given, calls, first.parts is second.parts


@same_under_both_imports
def test_class_defaults_reach_the_fields_that_init_does_not_set(eqx):
    """An own `__init__` may leave a field alone, and reading it gives the default."""

    class Layer(eqx.Module):
        weight: jax.Array
        scale: float = 2.0
        mode: str = eqx.field(static=True, default="zeros")

        def __init__(self):
            self.weight = ramp(2)

    layer = Layer()
    return layer.weight, layer.scale, layer.mode, Layer.scale


@same_under_both_imports
def test_an_instance_may_be_the_default_of_a_field(eqx):
    """Modules are immutable, so that one may stand as a default, which dataclasses allow."""

    class Inner(eqx.Module):
        size: int = eqx.field(static=True)

    class Outer(eqx.Module):
        inner: Inner = Inner(3)
        weight: float = 1.0

    return Outer(), Outer(Inner(4)), Outer(weight=2.0).inner is Outer.inner


@pytest.mark.parametrize("style", ["generated", "own", "default", "post_init"])
@same_under_both_imports
def test_converters_run_once_after_init(eqx, style):
    """A converter sees what `__init__` left in the field, whoever put it there."""
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
def test_a_converter_is_not_run_by_unflatten(eqx):
    """Transforms put anything in a field; only construction converts."""

    class Layer(eqx.Module):
        value: Any = eqx.field(converter=str)
        count: int = 1

    layer = Layer(3)
    mapped = jtu.tree_map(lambda leaf: (leaf,), layer)
    return layer.value, mapped.count, eqx.tree_at(lambda m: m.count, layer, 5.0).count


@same_under_both_imports
def test_static_fields_are_structure(eqx):
    """A static field is no leaf, and two structures are equal when their static fields are."""

    class Layer(eqx.Module):
        weight: jax.Array
        sizes: tuple = eqx.field(static=True)

    one, same, other = Layer(ramp(2), (1, 2)), Layer(ramp(3), (1, 2)), Layer(ramp(2), (1, 3))
    structures = [jtu.tree_structure(layer) for layer in (one, same, other)]
    clash = caught(lambda: jtu.tree_map(lambda a, b: a, one, other))
    doubled = jtu.tree_map(lambda leaf: 2 * leaf, one)
    return structures[0] == structures[1], structures[0] == structures[2], clash, doubled


@same_under_both_imports
def test_post_init_fills_fields_that_are_not_arguments(eqx):
    """`field(init=False)` is assigned in `__post_init__`, and `InitVar` reaches it."""

    class Layer(eqx.Module):
        n_in: int
        scale: dataclasses.InitVar[int]
        n_out: int = eqx.field(init=False)

        def __post_init__(self, scale):
            self.n_out = self.n_in * scale

    layer = Layer(3, 4)
    names = [field.name for field in dataclasses.fields(Layer)]
    return layer.n_out, names, list(inspect.signature(Layer).parameters), outcome(lambda: Layer(3))


# Equinox advises against arrays here, for they are easily made once instead of learned.
@same_under_both_imports(equinox_warns=r"[\s\S]*init=False")
def test_arrays_that_post_init_makes_are_leaves(eqx):
    """A `field(init=False)` that holds an array is data like any other."""

    class Layer(eqx.Module):
        size: int = eqx.field(static=True)
        weight: jax.Array = eqx.field(init=False)

        def __post_init__(self):
            self.weight = ramp(self.size)

    return Layer(3), array_paths(Layer(2)), jtu.tree_map(lambda leaf: 2 * leaf, Layer(2))


@same_under_both_imports
def test_post_init_cooperates_with_its_parent(eqx):
    """A subclass calls `super().__post_init__()` and adds its own."""

    class Base(eqx.Module):
        size: int
        area: int = eqx.field(init=False)

        def __post_init__(self):
            self.area = self.size**2

    class Cube(Base):
        volume: int = eqx.field(init=False)

        def __post_init__(self):
            super().__post_init__()
            self.volume = self.area * self.size

    return Base(2), Cube(3)


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
def test_check_init_may_not_assign(eqx):
    """By the time of `__check_init__` the Module is frozen."""

    class Layer(eqx.Module):
        size: int

        def __check_init__(self):
            self.size = 4

    return caught(lambda: Layer(3), about="size")


@same_under_both_imports
def test_keyword_only_fields(eqx):
    """`field(kw_only=True)` and `dataclasses.KW_ONLY` make keywords of what follows."""

    class Layer(eqx.Module):
        first: int = eqx.field(kw_only=True, default=1)
        second: int
        _: dataclasses.KW_ONLY
        third: int = 3

    layer = Layer(2, first=5)
    refused = caught(lambda: Layer(1, 2, 3))
    return layer, refused, [(p.name, p.kind.name) for p in parameters(Layer)]


def parameters(cls: type) -> list[inspect.Parameter]:
    """The arguments of a class's constructor."""
    return list(inspect.signature(cls).parameters.values())


@same_under_both_imports
def test_generic_modules(eqx):
    """A subscripted class constructs, subclasses and flattens as the plain one does."""

    class Box(eqx.Module, Generic[T]):
        content: T

        def open(self) -> T:
            return self.content

    class IntBox(Box[int]):
        label: str = eqx.field(static=True, default="ints")

    class OwnInit(eqx.Module, Generic[T]):
        content: T

        def __init__(self, content: T):
            self.content = content

    boxes = [Box(1), Box[int](2), IntBox(3), OwnInit[int](4)]
    leaves = [jtu.tree_leaves(box) for box in boxes]
    doubled = jtu.tree_map(lambda leaf: 2 * leaf, boxes)
    return boxes, leaves, doubled, Box[int](2).open()


@same_under_both_imports
def test_abstract_methods_have_to_be_overridden(eqx):
    """`abc.abstractmethod` works without naming `abc.ABC`, for methods and properties."""

    class Shape(eqx.Module):
        @abc.abstractmethod
        def area(self): ...

        @property
        @abc.abstractmethod
        def name(self): ...

    class Half(Shape):
        def area(self):
            return 1.0

    class Square(Half):
        side: float

        @property
        def name(self):
            return f"square of {self.side}"

    return [
        caught(Shape, about="area"),
        caught(Half, about="name"),
        Square(2.0).area(),
        Square(2.0).name,
        inspect.isabstract(Shape),
        inspect.isabstract(Square),
        isinstance(Square(2.0), Shape),
    ]


@same_under_both_imports
def test_is_abstract_forbids_instances_of_that_class_alone(eqx):
    """`is_abstract=True` marks one class, not its subclasses."""

    class Base(eqx.Module, is_abstract=True):
        size: int

    class Final(Base):
        pass

    return caught(lambda: Base(3), about="abstract"), Final(3)


@same_under_both_imports
def test_abstract_var_may_become_a_field_or_a_property(eqx):
    """`AbstractVar` announces an attribute; it is no field, and any attribute satisfies it."""

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
def test_abstract_class_var_has_to_become_a_class_attribute(eqx):
    """`AbstractClassVar` is satisfied by a class attribute, which is then no field."""

    class Base(eqx.Module):
        order: eqx.AbstractClassVar[int]

    class Second(Base):
        order: ClassVar[int] = 2

    class Unfinished(Base):
        size: int

    return caught(lambda: Unfinished(1), about="order"), Second().order, Second.order


@same_under_both_imports
def test_subclass_fields_follow_those_of_the_parent(eqx):
    """A field that is declared again keeps its place, and its new default."""

    class Base(eqx.Module):
        first: int
        second: int = 2

    class Derived(Base):
        third: int = 3
        first: int = 10

    return Derived(), Derived(1, third=7), [field.name for field in dataclasses.fields(Derived)]


@same_under_both_imports
def test_an_own_init_is_inherited(eqx):
    """A subclass without `__init__` uses its parent's, or calls it from its own."""

    class Base(eqx.Module):
        weight: jax.Array

        def __init__(self, size):
            self.weight = jnp.ones(size)

    class Plain(Base):
        def __call__(self, x):
            return self.weight * x

    class WithDefault(Base):
        scale: float = 3.0

    class Extended(Base):
        bias: jax.Array

        def __init__(self, size, bias):
            super().__init__(size)
            self.bias = jnp.full(size, bias)

    return [
        Plain(2)(ramp(2)),
        WithDefault(2).scale,
        Extended(2, 5.0),
        list(inspect.signature(Plain).parameters),
    ]


@same_under_both_imports
def test_several_parents_follow_the_resolution_order(eqx):
    """Fields, methods and mixins that are no Modules combine as in Python."""

    class Mixin:
        def describe(self):
            return f"{type(self).__name__} of size {self.size}"

    class Left(eqx.Module):
        size: int

        def kind(self):
            return ["left"]

    class Right(eqx.Module):
        width: int

        def kind(self):
            return ["right"]

    class Both(Mixin, Left, Right):
        def kind(self):
            return [*super().kind(), "both"]

    return Both(1, 2), Both(1, 2).describe(), Both(1, 2).kind()


STRING_ANNOTATIONS = """
    from __future__ import annotations
    import dataclasses
    from typing import ClassVar
    import jax

    class Layer(eqx.Module):
        weight: jax.Array
        size: int = eqx.field(static=True, default=3)
        count: ClassVar[int] = 7
        parent: Layer | None = None
        scale: float = eqx.field(converter=float, default=1)
"""


@same_under_both_imports
def test_string_annotations_mean_the_same(eqx):
    """Under `from __future__ import annotations` fields, class variables and defaults stay so."""
    module = module_from(STRING_ANNOTATIONS, eqx, "string_annotations")
    inner = module.Layer(ramp(2), scale=2)
    outer = module.Layer(ramp(3), parent=inner)
    names = [field.name for field in dataclasses.fields(module.Layer)]
    return outer, names, module.Layer.count, len(jtu.tree_leaves(outer))


@same_under_both_imports
def test_properties_class_methods_and_static_methods(eqx):
    """Python's own descriptors work on Modules as on any class."""

    class Layer(eqx.Module):
        weight: jax.Array
        registry: ClassVar[list] = ["a"]

        @property
        def size(self):
            return self.weight.shape[0]

        @classmethod
        def zeros(cls, size):
            return cls(jnp.zeros(size))

        @staticmethod
        def halve(value):
            return value / 2

    layer = Layer.zeros(3)
    return layer.size, layer.zeros(2), Layer.halve(3.0), layer.halve(5.0), layer.registry


@same_under_both_imports
def test_operators_and_containers(eqx):
    """Special methods make a Module callable, indexable, iterable and addable."""

    class Vector(eqx.Module):
        parts: tuple

        def __call__(self, x):
            return x * self.parts[0]

        def __getitem__(self, index):
            return self.parts[index]

        def __len__(self):
            return len(self.parts)

        def __iter__(self):
            return iter(self.parts)

        def __add__(self, other):
            return Vector(tuple(a + b for a, b in zip(self, other, strict=True)))

        def __contains__(self, part):
            return part in self.parts

    vector = Vector((1, 2, 3))
    return vector(4), vector[1:], len(vector), list(vector), vector + vector, 2 in vector


@same_under_both_imports
def test_modules_nest_in_every_container(eqx):
    """Leaves are found, and named, through lists, tuples, named tuples, dicts and None."""

    class Leafy(eqx.Module):
        value: Any

    class Tree(eqx.Module):
        items: Any
        more: dict

    tree = Tree(
        items=[Leafy(ramp(2)), (Leafy(ramp(1)), None), Pair(Leafy(ramp(3)), 4.0)],
        more={"b": Leafy({"x": jnp.int32(3)}), "a": Leafy(None)},
    )
    leaves, structure = jtu.tree_flatten_with_path(tree)
    rebuilt = jtu.tree_unflatten(structure, [leaf for _, leaf in leaves])
    return [jtu.keystr(path) for path, _ in leaves], rebuilt, array_paths(tree)


@same_under_both_imports
def test_odd_leaves_survive_unflatten(eqx):
    """Unflatten asks nothing of the leaves: strings, None, objects and shapes may come."""

    class Layer(eqx.Module):
        weight: jax.Array = eqx.field(converter=jnp.asarray)
        bias: jax.Array
        size: int = eqx.field(static=True)

        def __check_init__(self):
            if self.weight.shape != (self.size,):
                raise ValueError("wrong size")

    structure = jtu.tree_structure(Layer([1.0, 2.0], ramp(2), 2))
    odd = [["text", None], [None, object], [jax.ShapeDtypeStruct((1,), jnp.float32), 3]]
    return [jtu.tree_unflatten(structure, leaves) for leaves in odd]


@same_under_both_imports
def test_bound_methods_are_trees(eqx):
    """`m.method` carries the arrays of `m` through a map, and its class says what it calls."""

    class Layer(eqx.Module):
        weight: jax.Array

        def apply(self, x, *, scale=1.0):
            """Apply it."""
            return self.weight * x * scale

    layer = Layer(ramp(2))
    method = layer.apply
    doubled = jtu.tree_map(lambda leaf: 2 * leaf, method)
    return [
        method(3.0),
        doubled(3.0, scale=2.0),
        len(jtu.tree_leaves(method)),
        method.__name__,
        method.__doc__,
        method.__self__,
        jtu.tree_structure(method) == jtu.tree_structure(layer.apply),
        jax.jit(lambda f, x: f(x))(method, 3.0),
    ]


@same_under_both_imports
def test_partial_stores_arguments_as_children(eqx):
    """Stored arguments come first, stored keywords beside the call's, and arrays are leaves."""

    def show(*args, **kwargs):
        return args, dict(sorted(kwargs.items()))

    partial = eqx.Partial(show, 1, ramp(2), b=2.0)
    clash = caught(lambda: partial(b=3.0))
    doubled = jtu.tree_map(lambda leaf: leaf if callable(leaf) else 2 * leaf, partial)
    return partial(4, c=5), doubled(), clash, partial.func, partial.args, partial.keywords


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


@same_under_both_imports
def test_assignment_is_refused_after_construction(eqx):
    """Neither a field, nor a new attribute, nor a method can be assigned."""

    class Layer(eqx.Module):
        size: int

        def double(self):
            return 2 * self.size

    layer = Layer(3)
    return [
        caught(lambda: setattr(layer, "size", 4), about="size"),
        caught(lambda: setattr(layer, "other", 4), about="other"),
        caught(lambda: setattr(layer, "double", 4), about="double"),
        layer.size,
    ]


@same_under_both_imports
def test_dataclass_tools_work(eqx):
    """`fields`, `replace`, `asdict` and pattern matching see an ordinary dataclass."""

    class Layer(eqx.Module):
        size: int
        name: str = eqx.field(default="a", metadata={"unit": "m"}, static=True)

    layer = Layer(3)
    match layer:
        case Layer(size, name="a"):
            matched = size
        case _:
            matched = None
    named = {field.name: field for field in dataclasses.fields(Layer)}
    return [
        dataclasses.is_dataclass(Layer),
        dataclasses.replace(layer, size=4),
        matched,
        Layer.__match_args__,
        dict(named["name"].metadata)["unit"],
        dict(named["name"].metadata)["static"],
        named["size"].type,
    ]


@same_under_both_imports
def test_equality_and_hash_without_arrays(eqx):
    """Modules of plain values compare by value, hash alike and serve as keys."""

    class Point(eqx.Module):
        x: int
        y: int = eqx.field(static=True)

    class Other(eqx.Module):
        x: int
        y: int = eqx.field(static=True)

    one, same, different = Point(1, 2), Point(1, 2), Point(1, 3)
    return [
        one == same,
        one == different,
        one != different,
        one == Other(1, 2),
        one == 1,
        hash(one) == hash(same),
        {one: "found"}[same],
    ]


@same_under_both_imports
def test_equality_with_arrays_is_true_or_false_in_an_if(eqx):
    """`==` looks at the numbers; hashing a Module with arrays is refused."""

    class Layer(eqx.Module):
        weight: jax.Array

    one = Layer(ramp(2))
    unequal = [Layer(ramp(2) + 1), Layer(ramp(3)), Layer(ramp(2).astype(jnp.float16)), 3]
    answers = [bool(one == other) for other in [Layer(ramp(2)), *unequal]]
    return answers, outcome(lambda: hash(one))


@same_under_both_imports
def test_copying_and_pickling(eqx):
    """Shallow and deep copies and a pickle's round trip give the same Module."""
    module = module_from(
        """
        import typing
        class Pickled(eqx.Module):
            weight: typing.Any
            size: int = eqx.field(static=True)
        """,
        eqx,
        "pickled",
    )
    original = module.Pickled([ramp(2), {"a": 1}], 3)
    deep = copy.deepcopy(original)
    return [
        deep,
        deep.weight is original.weight,
        copy.copy(original).weight is original.weight,
        pickle.loads(pickle.dumps(original)),
    ]


@same_under_both_imports
def test_metaclasses_can_be_combined(eqx):
    """`type(Module)` may be subclassed, taking class keywords and wrapping construction."""
    built = []

    class Counting(type(eqx.Module)):
        def __new__(mcs, name, bases, namespace, /, tag=None, **kwargs):
            cls = super().__new__(mcs, name, bases, namespace, **kwargs)
            cls.tag = tag
            return cls

        def __call__(cls, *args, **kwargs):
            self = super().__call__(*args, **kwargs)
            built.append(cls.__name__)
            return self

    class Base(eqx.Module, metaclass=Counting, tag="base"):
        size: int

    class Derived(Base, tag="derived"):
        pass

    return Base(1), Derived(2), built, Base.tag, Derived.tag, jtu.tree_leaves(Derived(2))


@same_under_both_imports
def test_init_subclass_and_strict_keywords(eqx):
    """Class keywords reach `__init_subclass__`, except `strict`, which is accepted and dropped."""

    class Base(eqx.Module):
        label: ClassVar[str] = ""

        def __init_subclass__(cls, label="none", **kwargs):
            super().__init_subclass__(**kwargs)
            cls.label = label

    class Derived(Base, label="derived"):
        size: int

    class Strict(eqx.Module, strict=True):
        size: int

    return Derived(1).label, Strict(2)


@same_under_both_imports
def test_an_instance_made_by_hand_flattens(eqx):
    """`object.__new__` with `object.__setattr__` makes a Module, as libraries rely on."""

    class Layer(eqx.Module):
        weight: jax.Array
        size: int = eqx.field(static=True)

        def __init__(self):
            raise RuntimeError("never called")

    layer = object.__new__(Layer)
    object.__setattr__(layer, "weight", ramp(2))
    object.__setattr__(layer, "size", 2)
    return jtu.tree_map(lambda leaf: leaf + 1, layer)


@same_under_both_imports
def test_own_attribute_access(eqx):
    """A class may define `__getattr__` and `__getattribute__` of its own."""

    class Layer(eqx.Module):
        inner: dict

        def __getattr__(self, name):
            if name.startswith("get_"):
                return self.inner[name.removeprefix("get_")]
            raise AttributeError(name)

    class Watched(eqx.Module):
        size: int

        def __getattribute__(self, name):
            value = super().__getattribute__(name)
            return value + 1 if name == "size" else value

    layer = Layer({"a": 1})
    return layer.get_a, hasattr(layer, "other"), Watched(3).size


@same_under_both_imports
def test_wrapped_methods(eqx):
    """Methods under `functools.wraps`-like decorators and closures over `self` still bind."""

    def logged(function):
        def wrapper(self, *args):
            return type(self).__name__, function(self, *args)

        return wrapper

    class Layer(eqx.Module):
        weight: jax.Array

        @logged
        def apply(self, x):
            return self.weight * x

        def curried(self, x):
            return lambda y: self.apply(x + y)

    return Layer(ramp(2)).apply(2.0), Layer(ramp(2)).curried(1.0)(2.0)


@same_under_both_imports
def test_modules_without_fields(eqx):
    """An empty Module is an empty tree, equal to any other instance."""

    class Empty(eqx.Module):
        def __call__(self, x):
            return x

    structure = jtu.tree_structure(Empty())
    return Empty()(3), jtu.tree_leaves(Empty()), structure == jtu.tree_structure(Empty()), Empty()


@same_under_both_imports
def test_repr_is_the_printed_tree(eqx):
    """`repr` shows fields with arrays by shape and dtype; `field(repr=False)` hides one."""

    class Layer(eqx.Module):
        weight: jax.Array
        size: int = eqx.field(static=True)
        hidden: int = eqx.field(repr=False, default=1)
        children: tuple = ()

    inner = Layer(ramp(2, 3), 3)
    return repr(inner), str(inner), repr(Layer(jnp.int32(1), 2, children=(inner, {"a": None})))
