"""Fields that are not read as stored: the classes that read them."""

import copy
import gc
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import FieldError, ShapeError
from tests.helpers.computing import STYLES, Converting, Generated, Own, Scaled, scaled
from tests.helpers.trees import ramp


def test_a_converter_leaves_it_alone():
    """It would compute the value, and drop its source fields."""
    made = Converting(scaled(), [1.0, 2.0])

    assert_reads(made)
    assert_reads(made.replace(weight=scaled()))
    assert isinstance(made.bias, jax.Array)


def test_a_pending_instance_is_filled_in():
    """By the first read, of that field or of another."""
    made = pm.filter_jit(lambda m: m)(Generated(scaled(), ramp(2)))
    assert_reads(made)
    made = pm.filter_jit(lambda m: m)(Own(scaled(), ramp(2)))
    assert made.name == "own"
    assert_reads(made)


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


def test_on_a_mesh_the_parts_have_other_shapes():
    """As long as the axes are the same."""
    made = Generated(Scaled(ramp(4), jnp.asarray(2.0)), ramp(2))
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = pm.by({"weight.array": jax.P("d"), ...: jax.P()})

    read = pm.filter_shard_map(
        lambda m: m.weight, mesh=mesh, in_specs=(specs,), out_specs=jax.P("d")
    )
    np.testing.assert_allclose(read(made), made.weight)


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


def assert_reads(made, weight=(3.0, 6.0)):
    """The attribute is the array, and the tree has its source fields."""
    assert isinstance(made.weight, jax.Array)
    np.testing.assert_allclose(made.weight, weight)
    assert "weight.factor" in pm.named_leaves(made)


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
def test_the_attribute_reads_as_the_array_on_every_journey(style):
    """In a class of every style: flattening, jit, surgery, `replace`, copies and pickles."""
    made = style(scaled(), ramp(2))
    journeys = [
        made,
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

    np.testing.assert_allclose(made(jnp.ones(2)), [4.0, 8.0])
    assert isinstance(made, type(style(ramp(2), ramp(2))))
    for found in journeys:
        assert_reads(found)
        assert jax.tree.structure(found) == jax.tree.structure(made)


def test_surgery_comes_and_goes():
    """A computed leaf may replace an array, and an array the leaf; in a class of every style."""
    for style in STYLES.values():
        plain = style(ramp(2), ramp(2))
        adapted = pm.tree_at(lambda m: m.weight, plain, scaled())
        again = pm.tree_at(lambda m: m.weight, adapted, ramp(2))

        assert_reads(adapted)
        assert jax.tree.structure(again) == jax.tree.structure(plain)
        assert adapted == style(scaled(), ramp(2)) == plain.replace(weight=scaled())


def test_several_models_as_one_are_not_read_as_one():
    """It would be another broadcast."""
    many = pm.stack([Generated(scaled(), ramp(2))] * 3)

    with pytest.raises(ShapeError, match=r"(?s)Generated\.weight.*several models"):
        _ = many.weight
    assert pm.filter_vmap(lambda m: m.weight)(many).shape == (3, 2)


def test_a_part_of_a_model_is_not_read():
    """What it would be computed of is not there."""
    some, _ = pm.partition(Generated(scaled(), ramp(2)), pm.select.role("factor"))
    with pytest.raises(ShapeError, match=r"Generated\.weight"):
        _ = some.weight


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

    with pytest.raises(ShapeError, match=r"Generated\.weight"):
        (pm.filter_jit(look) if compiled else look)(made)
    tangent = pm.filter_jvp(lambda m: m, (made,), (jax.tree.map(jnp.ones_like, made),))[1]
    (cotangent,) = pm.filter_vjp(loss, made)[1](jnp.asarray(1.0))
    for derivative in (tangent, cotangent):
        with pytest.raises(ShapeError, match=r"Generated\.weight"):
            _ = derivative.weight
    # The updated model is a model.
    assert_reads(pm.apply_updates(made, jax.tree.map(jnp.zeros_like, pm.filter_grad(loss)(made))))


class Broken(pm.Computed):
    """Its value is the result of `answer`."""

    array: jax.Array
    answer: object = pm.field(static=True)

    def value(self):
        return self.answer(self)


def test_a_value_is_an_array():
    """An error of the user's is told as it is."""
    with pytest.raises(FieldError, match=r"Generated\.weight.*Broken"):
        _ = Generated(Broken(ramp(2), lambda self: [self.array]), ramp(2)).weight
    with pytest.raises(FieldError, match="nothing"):
        _ = Generated(Broken(ramp(2), lambda self: self.nothing), ramp(2)).weight
