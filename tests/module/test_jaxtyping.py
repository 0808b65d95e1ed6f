"""Modules annotated with jaxtyping: checked field by field when they are built, and never later."""

import copy
import dataclasses
import importlib
import inspect
import sys
import textwrap

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from beartype import beartype
from jaxtyping import Array, Float, Int, PyTree, TypeCheckError, jaxtyped

import pytreemod as pm
from tests.helpers.trees import Holder, ramp

SOURCE = """
    import dataclasses

    import jax.numpy as jnp
    from jaxtyping import Array, Float, Int

    import pytreemod as pm


    class Generated(pm.Module):
        weight: Float[Array, "out in"]
        bias: Float[Array, "out"]
        size: int = pm.field(static=True, default=3)

        def __call__(self, x: Float[Array, "in"]) -> Float[Array, "out"]:
            return self.weight @ x + self.bias


    class Own(pm.Module):
        weight: Float[Array, "out in"]
        bias: Float[Array, "out"]

        def __init__(self, weight, bias):
            self.weight = weight
            self.bias = bias


    class Converted(pm.Module):
        weight: Float[Array, "n"] = pm.field(converter=jnp.asarray)
        ints: Int[Array, "n"] = pm.field(converter=lambda x: jnp.asarray(x))


    class ConvertedOwn(pm.Module):
        weight: Float[Array, "n"] = pm.field(converter=jnp.asarray)

        def __init__(self, values: list):
            self.weight = values


    class Prepared(pm.Module):
        weight: Float[Array, "n"]
        total: Float[Array, ""] = pm.field(init=False)

        def __post_init__(self):
            self.total = self.weight.sum()[None] if self.weight.shape == (5,) else self.weight.sum()


    class Sub(Generated):
        extra: Int[Array, "out"] = dataclasses.field(default=None, kw_only=True)


    class SubOfOwn(Own):
        scale: Float[Array, "in"] | None = None


    class Holding(pm.Module):
        inner: Generated
        name: str = "a"


    class Bounded(pm.Module):
        scale: Float[Array, ""] = pm.field(constraint=pm.constraints.positive)
        shares: Float[Array, "n"] | None = pm.field(
            constraint=pm.constraints.simplex, default=None
        )
"""
"""One file for both ways, with classes of every style."""


@pytest.fixture(scope="module", params=["import hook", "import hook with strings", "decorator"])
def classes(request, tmp_path_factory):
    """A module of annotated classes, checked in one of the ways that jaxtyping offers."""
    folder = tmp_path_factory.mktemp("annotated")
    name = f"annotated_{request.param.replace(' ', '_')}"
    source = textwrap.dedent(SOURCE)
    if "strings" in request.param:
        source = "from __future__ import annotations\n" + source
    if request.param == "decorator":
        imports = "from beartype import beartype\nfrom jaxtyping import jaxtyped\n"
        source = imports + source.replace("\nclass ", "\n@jaxtyped(typechecker=beartype)\nclass ")
    (folder / f"{name}.py").write_text(source)
    sys.path.insert(0, str(folder))
    try:
        if request.param == "decorator":
            yield importlib.import_module(name)
        else:
            with jaxtyping.install_import_hook(name, "beartype.beartype"):
                yield importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop(name, None)


def test_fitting_values_are_accepted(classes):
    """A value that fits its annotation is built as without any checking."""
    layer = classes.Generated(ramp(2, 3), ramp(2))

    assert layer(ramp(3)).shape == (2,)
    assert classes.Own(ramp(2, 3), ramp(2)).bias.shape == (2,)
    assert classes.Converted([1.0, 2.0], [1, 2]).ints.dtype == jnp.int32
    assert classes.ConvertedOwn([1.0]).weight.shape == (1,)
    assert classes.Prepared(ramp(2)).total == 3.0
    assert classes.Holding(layer).inner is layer
    assert classes.SubOfOwn(ramp(2, 3), ramp(2)).scale is None
    bounded = classes.Bounded(2.0, jnp.asarray([0.5, 0.5]))
    assert bounded.scale == bounded.replace(shares=None).scale == 2
    assert bounded.replace(scale=3.0).shares.shape == (2,)


MISFITS = {
    "shape": lambda c: c.Generated(ramp(2), ramp(2)),
    "dtype": lambda c: c.Generated(jnp.ones((2, 3), jnp.int32), ramp(2)),
    "no array": lambda c: c.Generated("weight", ramp(2)),
    "sizes that disagree": lambda c: c.Generated(ramp(2, 3), ramp(4)),
    "a static field": lambda c: c.Generated(ramp(2, 3), ramp(2), "three"),
    "own init, shape": lambda c: c.Own(ramp(2), ramp(2)),
    "own init, sizes that disagree": lambda c: c.Own(ramp(2, 3), ramp(4)),
    "own init, no array": lambda c: c.Own(ramp(2, 3), [1.0]),
    "after the converter, dtype": lambda c: c.Converted([1, 2], [1, 2]),
    "after the converter, other dtype": lambda c: c.Converted([1.0], [1.0]),
    "after the converter, sizes": lambda c: c.Converted([1.0, 2.0], [1]),
    "after the converter, own init": lambda c: c.ConvertedOwn([1]),
    "after the converter, shape": lambda c: c.ConvertedOwn([[1.0]]),
    "set by __post_init__": lambda c: c.Prepared(ramp(5)),
    "a field of a subclass": lambda c: c.Sub(ramp(2, 3), ramp(2), extra=ramp(2)),
    "a subclass and its base disagree": lambda c: c.Sub(
        ramp(2, 3), ramp(2), extra=jnp.ones(4, jnp.int32)
    ),
    "a field of a subclass with an inherited init": lambda c: c.SubOfOwn(ramp(2), ramp(2)),
    "a constrained field, shape": lambda c: c.Bounded(ramp(2)),
    "a constrained field, by its value": lambda c: c.Bounded(1.0, jnp.ones((2, 2)) / 2),
    "a constrained field, replaced": lambda c: c.Bounded(1.0).replace(scale=ramp(2)),
    "another class": lambda c: c.Holding(c.Own(ramp(2, 3), ramp(2))),
}


@pytest.mark.parametrize("build", MISFITS.values(), ids=MISFITS.keys())
def test_misfits_are_refused(classes, build):
    """Each field is checked, after converters, whatever __init__ the class has."""
    with pytest.raises(TypeCheckError, match=r"(?s)Type-check error.*(parameter|Called with)"):
        build(classes)


@pytest.mark.parametrize("leaf", [None, object(), "text", 0, jax.ShapeDtypeStruct((), jnp.int32)])
@pytest.mark.parametrize("name", ["Generated", "Own"])
@pytest.mark.sampled
def test_unflatten_never_checks(classes, name, leaf):
    """Transforms may put anything in a field: tree_map, tree_at, vmap, specs and gradients."""
    layer = getattr(classes, name)(ramp(2, 3), ramp(2))
    mapped = jax.tree.map(lambda _: leaf, layer)
    assert mapped.weight is leaf
    assert pm.tree_at(lambda m: m.weight, layer, leaf, is_leaf=lambda x: x is None).weight is leaf

    _, rest = pm.partition(layer, pm.is_array)
    assert rest.weight is None
    assert pm.filter_grad(lambda m: jnp.sum(m.bias))(layer).weight.shape == (2, 3)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), layer)
    assert pm.filter_vmap(lambda m: m)(stacked).weight.shape == (2, 2, 3)
    assert pm.filter_jit(lambda m: jax.tree.map(lambda x: x[0], m))(layer).bias.shape == ()


def test_replace_checks_again(classes):
    """replace is construction: it refuses a misfit."""
    layer = classes.Own(ramp(2, 3), ramp(2))
    with pytest.raises(TypeCheckError, match="bias"):
        layer.replace(bias=ramp(5))

    assert layer.replace(bias=-ramp(2)).bias.shape == (2,)
    with pytest.raises(TypeCheckError, match="weight"):
        classes.ConvertedOwn([1.0]).replace(weight=[1])


def test_replace_takes_what_a_transform_made(classes):
    """The layers of an ensemble fit no annotation; the new value is not to blame."""
    ensemble = jax.vmap(classes.Generated)(ramp(4, 2, 3), ramp(4, 2))

    assert ensemble.replace(size=5).size == 5
    assert ensemble.replace(bias=-ramp(4, 2)).bias.shape == (4, 2)
    assert pm.with_mode({"ensemble": ensemble}, size=5)["ensemble"].size == 5


def test_methods_are_checked_by_jaxtyping(classes):
    """The import hook changes methods, and they work."""
    layer = classes.Generated(ramp(2, 3), ramp(2))

    assert type(layer.__call__) is pm.BoundMethod
    assert pm.filter_jit(layer)(ramp(3)).shape == (2,)


def test_methods_under_the_hook_refuse_misfits():
    """A decorated function around a Module sees the argument's shape."""

    class Layer(pm.Module):
        weight: jax.Array

        @jaxtyped(typechecker=beartype)
        def __call__(self, x: Float[Array, "n"]) -> Float[Array, "n"]:
            return self.weight * x

    assert Layer(ramp(2))(ramp(2)).shape == (2,)
    with pytest.raises(TypeCheckError, match=r"parameter: x|x"):
        Layer(ramp(2))(ramp(1, 2))


def test_checks_under_a_trace(classes):
    """Traced arrays have shapes and dtypes, and are checked by them."""
    make = pm.filter_jit(classes.Generated)

    assert make(ramp(2, 3), ramp(2)).bias.shape == (2,)
    with pytest.raises(TypeCheckError, match="bias"):
        make(ramp(2, 3), ramp(3))
    assert pm.filter_eval_shape(classes.Own, ramp(2, 3), ramp(2)).weight.shape == (2, 3)


def test_other_copies_are_not_checked(classes):
    """Pickling and copying restore the same values."""
    hollow = jax.tree.map(lambda _: None, classes.Own(ramp(2, 3), ramp(2)))

    assert copy.copy(hollow).weight is None
    assert copy.deepcopy(hollow).bias is None


def test_without_jaxtyping_taking_hold_nothing_is_checked():
    """Annotations alone do nothing, as in Python."""

    class Plain(pm.Module):
        weight: Float[Array, "2 3"]
        count: Int[Array, ""]

    assert Plain("anything", None).weight == "anything"


def test_local_names_in_annotations():
    """A decorated class inside a function may use names of that function."""
    Vector = Float[Array, "n"]

    @jaxtyped(typechecker=beartype)
    class Layer(pm.Module):
        a: Vector
        b: "Float[Array, 'n']"

        def __init__(self, a, b):
            self.a = a
            self.b = b

    assert Layer(ramp(2), ramp(2)).b.shape == (2,)
    with pytest.raises(TypeCheckError, match=r"Layer|b"):
        Layer(ramp(2), ramp(3))


def test_numpy_and_unions():
    """Everything that jaxtyping and beartype understand is checked."""

    @jaxtyped(typechecker=beartype)
    class Layer(pm.Module):
        a: Float[np.ndarray, "n"] | None
        b: list[int] = pm.field(static=True)

    assert Layer(np.ones(2), [1]).b == [1]
    assert Layer(None, []).a is None
    with pytest.raises(TypeCheckError, match="b"):
        Layer(None, ["x"])
    with pytest.raises(TypeCheckError, match="a"):
        Layer(ramp(2), [1])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Wrapped:
    """A node instead of an array."""

    value: jax.Array


@jaxtyped(typechecker=beartype)
class Typed(pm.Module):
    """Arrays, checked after an own `__init__`."""

    weight: Float[Array, "n"]
    bias: Float[Array, "n"] | None
    plain: "jax.Array"

    def __init__(self, weight, bias=None, plain=None):
        self.weight, self.bias = weight, bias
        self.plain = ramp(1) if plain is None else plain


@jaxtyped(typechecker=beartype)
class TypedFields(pm.Module):
    """The same, without an `__init__`: jaxtyping checks the parameters of the one it gets."""

    weight: Float[Array, "n"]
    bias: Float[Array, "n"] | None = None
    plain: "jax.Array" = pm.field(default_factory=lambda: ramp(1))
    count: int = pm.field(static=True, default=1)


both_styles = pytest.mark.parametrize("Typed", [Typed, TypedFields])


@both_styles
@pytest.mark.parametrize("wrap", [Wrapped, Holder, lambda x: pm.Partial(jnp.add, x)])
def test_a_node_in_an_arrays_place_is_let_pass(wrap, Typed):
    """It wraps the array, or computes it; the other fields are checked with each other."""
    x = ramp(2)
    made = [Typed(wrap(x), x), Typed(x, wrap(x)), Typed(x, x, wrap(x)), Typed(wrap(x), wrap(x))]

    assert [type(m) for m in made] == [Typed] * 4
    assert type(Typed(x).replace(weight=wrap(x))) is Typed
    with pytest.raises(TypeCheckError, match="bias"):
        Typed(x, ramp(3), wrap(x))


def test_what_a_class_takes_is_still_said():
    """In the signature; a non-array is checked in the constructor."""
    said = inspect.signature(TypedFields).parameters["weight"].annotation
    assert str(said) == str(Float[Array, "n"])
    with pytest.raises(TypeCheckError, match=r"__init__(?s:.)*'count'"):
        TypedFields(ramp(2), count="one")


@both_styles
@pytest.mark.parametrize("value", [[1.0], (1.0,), {"a": 1.0}, "text", None, 1])
def test_what_is_no_node_in_an_arrays_place_is_refused(value, Typed):
    """Python's own containers are mistakes, as numbers are."""
    with pytest.raises(TypeCheckError, match="weight"):
        Typed(value)


@jaxtyped(typechecker=beartype)
class Interpolation(pm.Module):
    """Containers whose arrays have the axes of an array in another field."""

    ts: Float[Array, "t"]
    table: dict[str, Float[Array, "t-1"]]
    parts: tuple[Float[Array, "2*t"], ...] = ()
    tree: PyTree[Float[Array, "t"]] = None
    extra: dataclasses.InitVar[Float[Array, "t"] | None] = None

    def __post_init__(self, extra):
        pass


@jaxtyped(typechecker=beartype)
class OwnInterpolation(pm.Module):
    """The same, with its own `__init__`."""

    ts: Float[Array, "t"]
    table: dict[str, Float[Array, "t-1"]]

    def __init__(self, ts, table):
        self.ts, self.table = ts, table


class Doubled(pm.Computed):
    """An array, computed."""

    half: jax.Array

    def value(self):
        """Twice."""
        return 2 * self.half


@pytest.mark.parametrize("Typed", [Interpolation, OwnInterpolation])
@pytest.mark.parametrize("wrap", [lambda x: x, Doubled], ids=["array", "computed"])
def test_axes_of_an_array_are_known_in_containers(Typed, wrap):
    """They are bound by the array, or by the fields that compute it."""
    x = wrap(ramp(3))
    made = Typed(x, {"a": ramp(2)})

    assert type(made.replace(ts=wrap(ramp(3) + 1))).__name__ == Typed.__name__
    with pytest.raises(TypeCheckError, match="table"):
        Typed(x, {"a": ramp(3)})
    with pytest.raises(TypeCheckError, match="table"):
        made.replace(table={"a": ramp(3)})


def test_axes_of_an_array_are_known_in_every_parameter():
    """In tuples, trees, and arguments that are not fields."""
    x, table = ramp(3), {"a": ramp(2)}
    Interpolation(x, table, (ramp(6),), [x, {"a": x}], extra=x)

    for name, value in {"parts": (x,), "tree": [x, ramp(2)], "extra": ramp(2)}.items():
        with pytest.raises(TypeCheckError, match=f"'{name}'"):
            Interpolation(x, table, **{name: value})


@pytest.mark.parametrize("Typed", [Interpolation, OwnInterpolation])
def test_an_axis_that_only_a_node_knows_is_not_checked(Typed):
    """Its length is not known."""
    assert Typed(Wrapped(ramp(3)), {"a": ramp(2)}).ts.value.shape == (3,)
