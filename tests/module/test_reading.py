"""Fields that are not read as stored: the classes that read them."""

import copy
import dataclasses
import gc
import inspect
import pickle
import sys

import beartype
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import FieldError, FrozenError, ShapeError
from pytreemod.tree.nodes import own_class
from pytreemod.tree.stored_fields import stored
from tests.goldens import refusals
from tests.helpers.comparing import assert_same
from tests.helpers.computing import (
    STYLES,
    Converting,
    Defaults,
    Generated,
    Own,
    Scaled,
    Typed,
    scaled,
)
from tests.helpers.trees import ramp

in_every_style = pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)


def assert_reads(made, weight=(3.0, 6.0)):
    """The attribute is the array, and the tree has its source fields."""
    assert isinstance(made.weight, jax.Array)
    np.testing.assert_allclose(made.weight, weight)
    assert isinstance(stored(made, "weight"), Scaled)
    assert "weight.factor" in pm.named_leaves(made)


@in_every_style
def test_the_attribute_reads_as_the_array(style):
    """In a class of every style, as its methods and its checks read it."""
    made = style(scaled(), ramp(2))

    assert_reads(made)
    np.testing.assert_allclose(made(jnp.ones(2)), [4.0, 8.0])


@in_every_style
def test_it_reads_the_same_after_every_journey(style):
    """Flattening, jit, surgery, `replace`, copies and pickles keep it."""
    made = style(scaled(), ramp(2))
    journeys = [
        jax.tree.map(lambda x: x, made),
        jax.jit(lambda m: m)(made),
        pm.filter_jit(lambda m: m)(made),
        pm.tree_at(lambda m: m.bias, made, ramp(2)),
        made.replace(bias=ramp(2)),
        copy.copy(made),
        copy.deepcopy(made),
        pickle.loads(pickle.dumps(made)),
        pm.combine(*pm.partition(made, pm.select.role("factor"))),
    ]

    for found in journeys:
        assert_reads(found)
        assert type(found) is type(made)
        assert jax.tree.structure(found) == jax.tree.structure(made)


@in_every_style
def test_surgery_comes_and_goes(style):
    """A computed leaf may replace an array, and an array the leaf."""
    plain = style(ramp(2), ramp(2))
    adapted = pm.tree_at(lambda m: m.weight, plain, scaled())
    again = pm.tree_at(lambda m: m.weight, adapted, ramp(2))

    assert_reads(adapted)
    assert type(again) is type(plain)
    assert jax.tree.structure(again) == jax.tree.structure(plain)
    assert adapted == style(scaled(), ramp(2))


@in_every_style
def test_an_instance_without_any_is_of_the_class_itself(style):
    """So reading it takes the same time as in Python."""
    made = style(ramp(2), ramp(2))

    assert type(made) is own_class(made)


def test_it_passes_for_an_instance_of_its_class():
    """`isinstance`, names, source and help are the class's own."""
    made = Generated(scaled(), ramp(2))
    cls = type(made)

    assert isinstance(made, Generated)
    assert (cls.__name__, cls.__qualname__, cls.__module__) == (
        Generated.__name__,
        Generated.__qualname__,
        Generated.__module__,
    )
    assert inspect.signature(cls) == inspect.signature(Generated)
    assert [f.name for f in dataclasses.fields(made)] == ["weight", "bias"]
    assert repr(made).startswith("Generated(weight=Scaled(array=f32[2]")


@in_every_style
def test_vars_shows_what_is_read(style):
    """Of a computed leaf its value, of a tied field its source; nothing else."""
    computed = style(scaled(), ramp(2))
    tied = pm.tie(style(ramp(2), 2 * ramp(2)), "weight", to="bias")

    for made in (
        computed,
        tied,
        jax.tree.map(lambda x: x, computed),
        pm.filter_jit(tied.replace)(),
    ):
        names = [field.name for field in dataclasses.fields(made)]
        assert [*vars(made)] == names
        for name in names:
            assert_same(vars(made)[name], getattr(made, name))
        with pytest.raises(FrozenError, match="no assignment, because a Module is immutable"):
            vars(made)["weight"] = ramp(2)


@pytest.mark.parametrize(
    "again",
    [
        lambda made: type(made)(made.weight, made.bias),
        lambda made: type(made)(**vars(made)),
        lambda made: dataclasses.replace(made, bias=ramp(2)),
    ],
)
def test_the_values_of_its_attributes_make_no_such_instance(again):
    """They have neither ties nor source fields: `replace` keeps both."""
    tied = pm.tie(Generated(ramp(2), ramp(2)), "weight", to="bias")
    for made in (Generated(scaled(), ramp(2)), tied):
        with pytest.raises(
            FieldError, match=r"(?s)computed leaves \(weight\).*model.replace\(field"
        ):
            again(made)
    if sys.version_info >= (3, 13):
        assert_reads(copy.replace(Generated(scaled(), ramp(2)), bias=ramp(2)))


def test_the_class_asks_nothing_of_the_users():
    """`__init_subclass__` does not run: it may add to a list, or need arguments."""
    known = list(Typed.known)
    Typed(scaled(), ramp(2))

    assert Typed.known == known


def test_a_default_is_found_in_the_class():
    """An attribute of the class is not hidden by the descriptor of the field."""
    cls = type(Defaults(ramp(2), scaled()))

    assert cls.weight == 1.0
    with pytest.raises(AttributeError, match="type object 'Generated' has no attribute 'weight'"):
        _ = type(Generated(scaled(), ramp(2))).weight


def test_a_converter_leaves_it_alone():
    """It would compute the value, and drop its source fields."""
    made = Converting(scaled(), [1.0, 2.0])

    assert_reads(made)
    assert_reads(made.replace(weight=scaled()))
    assert isinstance(made.bias, jax.Array)


def test_one_that_is_put_together_by_hand_reads_too():
    """`object.__new__` and `object.__setattr__`, as libraries build instances."""
    cls = type(Generated(scaled(), ramp(2)))
    made = object.__new__(cls)
    object.__setattr__(made, "weight", scaled())
    object.__setattr__(made, "bias", ramp(2))

    assert_reads(jax.tree.map(lambda x: x, made))
    with pytest.raises(AttributeError, match="'Generated' object has no attribute 'weight'"):
        _ = object.__new__(cls).weight


def test_a_pending_instance_is_filled_in():
    """By the first read, of that field or of another."""
    made = pm.filter_jit(lambda m: m)(Generated(scaled(), ramp(2)))
    assert_reads(made)
    made = pm.filter_jit(lambda m: m)(Own(scaled(), ramp(2)))
    assert made.name == "own"
    assert_reads(made)


def test_annotations_are_checked_against_the_array():
    """jaxtyping sees the value, and its error names the field."""

    @jaxtyping.jaxtyped(typechecker=beartype.beartype)
    class Annotated(pm.Module):
        weight: jaxtyping.Float[jax.Array, "2"]

    made = Annotated(ramp(2))
    assert_reads(made.replace(weight=scaled()))
    assert_reads(Annotated(scaled()))
    wrong = Scaled(ramp(3), jnp.asarray(1.0))
    with pytest.raises(jaxtyping.TypeCheckError, match="weight"):
        made.replace(weight=wrong)
    with pytest.raises(jaxtyping.TypeCheckError, match="weight"):
        Annotated(wrong)


def test_prefix_trees_name_the_parts():
    """In an axes tree of the same class, a number may apply to the leaf, or to a part."""
    made = Generated(scaled(), ramp(2))
    many = pm.stack([made, made])

    def call(m, x):
        return m(x)

    for axes in (Generated(0, 0), jax.tree.map(lambda _: 0, many), pm.by({"weight": 0, "bias": 0})):
        out = pm.filter_vmap(call, in_axes=(axes, None))(many, jnp.ones(2))
        assert out.shape == (2, 2)
    factors = pm.tree_at("weight.factor", made, jnp.ones(4))
    out = pm.filter_vmap(call, in_axes=(pm.by({"weight.factor": 0, ...: None}), None))(
        factors, jnp.ones(2)
    )
    assert out.shape == (4, 2)


def test_several_models_as_one_are_not_read_as_one():
    """It would be another broadcast."""
    many = pm.stack([Generated(scaled(), ramp(2))] * 3)

    with pytest.raises(
        ShapeError,
        match=r"^Generated\.weight: expected a value computed from arrays of the shapes "
        r"\(2,\), \(\), "
        r"got arrays of the shapes \(3, 2\), \(3,\)\.\n  map over several "
        r"models:\n      pm\.filter_vmap\(",
    ):
        _ = many.weight
    assert pm.filter_vmap(lambda m: m.weight)(many).shape == (3, 2)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_not_read(compiled):
    """They have the form of the model; values computed from them have no meaning."""
    made = Generated(scaled(), ramp(2))

    def loss(m):
        return m(1.0).sum()

    def look(m):
        grads = pm.filter_grad(loss)(m)
        assert len(jax.tree.leaves(grads)) == 3
        return grads.weight

    text = (
        r"^Generated\.weight: .* got derivatives with respect to its parts\.\n.*\n      "
        r"pm\.named_leaves\("
    )
    with pytest.raises(ShapeError, match=text):
        (pm.filter_jit(look) if compiled else look)(made)
    tangent = pm.filter_jvp(lambda m: m, (made,), (jax.tree.map(jnp.ones_like, made),))[1]
    with pytest.raises(ShapeError, match=text):
        _ = tangent.weight
    (cotangent,) = pm.filter_vjp(loss, made)[1](jnp.asarray(1.0))
    with pytest.raises(ShapeError, match=text):
        _ = cotangent.weight
    # The updated model is a model.
    assert_reads(pm.apply_updates(made, jax.tree.map(jnp.zeros_like, pm.filter_grad(loss)(made))))


class Broken(pm.Computed):
    """Its value is the result of `answer`."""

    array: jax.Array
    answer: object = pm.field(static=True)

    def value(self):
        return self.answer(self)


def test_a_value_keeps_its_shape():
    """The one that it had when it was made."""
    shapes = [(2,)]
    made = Generated(Broken(ramp(2), lambda self: jnp.zeros(shapes[0])), ramp(2))
    assert made.weight.shape == (2,)
    for other in ((3,), (2, 1)):
        shapes[0] = other
        with pytest.raises(ShapeError, match=r"^Generated\.weight: expected its original shape"):
            _ = made.weight


def test_on_a_mesh_the_parts_have_other_shapes():
    """As long as the axes are the same."""
    made = Generated(Scaled(ramp(4), jnp.asarray(2.0)), ramp(2))
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = pm.by({"weight.array": jax.P("d"), ...: jax.P()})

    read = pm.filter_shard_map(
        lambda m: m.weight, mesh=mesh, in_specs=(specs,), out_specs=jax.P("d")
    )
    np.testing.assert_allclose(read(made), made.weight)


def test_several_fields_are_replaced_at_once():
    """Whatever else is among them."""
    made = Own(ramp(2), ramp(2)).replace(name="other", weight=scaled())

    assert made.name == "other"
    assert_reads(made)
    assert_reads(Own(ramp(2), ramp(2)).replace(weight=scaled(), name="other"))


def test_what_holds_no_array_has_no_shape_to_keep():
    """Specs and markers in the form of a computed leaf; reading them is the mistake."""
    marked = Generated(Scaled(object(), object()), ramp(2))

    assert len(jax.tree.leaves(marked)) == 3
    with pytest.raises(TypeError, match="unsupported operand"):
        _ = marked.weight


def test_a_tree_of_labels_has_the_form():
    """No leaf of it is an array, and nothing is computed."""
    labels = jax.tree.map(lambda _: "label", Generated(scaled(), ramp(2)))

    assert jax.tree.leaves(labels) == ["label"] * 3


def test_reading_leaves_nothing_behind():
    """Ten thousand reads keep no array alive."""
    made = Generated(scaled(), ramp(2))
    _ = made.weight
    gc.collect()
    count = len(gc.get_objects())
    with jax.ensure_compile_time_eval():
        for _ in range(10_000):
            pm.tree_at(lambda m: m.bias, made, 0).bias
    for _ in range(100):
        _ = made.weight
    gc.collect()
    assert len(gc.get_objects()) - count < 100


test_refusals = refusals(globals())
