"""Definitions of Modules, in every style that Equinox's users write them."""

import dataclasses
import inspect
from collections import namedtuple
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest

from tests.parity.helpers import array_paths, caught, ramp, same_under_both_imports

T = TypeVar("T")
Pair = namedtuple("Pair", ["first", "second"])


def outcome(call: Any) -> Any:
    """The result of `call`, or the name of the built-in error that it raises."""
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
    """A custom `__init__` may compute, read its assignments, assign twice and call methods."""

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


@pytest.mark.parametrize("style", ["generated", "own", "default", "post_init"])
@same_under_both_imports
def test_converters_run_once_after_init(eqx, style):
    """A converter gets the value that `__init__` assigned, or a default."""
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


# Equinox advises against arrays here, because they are easily made once instead of learned.
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
    """`m.method` passes the arrays of `m` through a map, and its class shows its function."""

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
    """Modules of plain values compare by value, have equal hashes and work as keys."""

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
    """`==` compares the numbers; hashing a Module with arrays is refused."""

    class Layer(eqx.Module):
        weight: jax.Array

    one = Layer(ramp(2))
    unequal = [Layer(ramp(2) + 1), Layer(ramp(3)), Layer(ramp(2).astype(jnp.float16)), 3]
    answers = [bool(one == other) for other in [Layer(ramp(2)), *unequal]]
    return answers, outcome(lambda: hash(one))


@same_under_both_imports
def test_the_printed_tree(eqx):
    """Fields with arrays by shape and dtype; `field(repr=False)` hides one."""

    class Layer(eqx.Module):
        weight: jax.Array
        size: int = eqx.field(static=True)
        hidden: int = eqx.field(repr=False, default=1)
        children: tuple = ()

    inner = Layer(ramp(2, 3), 3)
    outer = Layer(jnp.int32(1), 2, children=(inner, {"a": None}))
    return eqx.tree_pformat(inner), eqx.tree_pformat(outer)
