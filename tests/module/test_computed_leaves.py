"""Computed leaves: values instead of arrays, in classes of every style, and `resolve`."""

import gc
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import FieldError, ShapeError
from tests.helpers.computing import STYLES, Generated, Scaled, scaled
from tests.helpers.equations import operations
from tests.helpers.trees import Affine, Holder, new, ramp

FACTOR = pm.select.role("factor")


def generated(leaf=None):
    return Generated(scaled() if leaf is None else leaf, ramp(2))


def linear_with(weight):
    return pm.nn.Linear(3, 2, key=jax.random.key(0)).replace(weight=weight)


class LowRank(pm.Computed):
    base: jax.Array
    a: jax.Array = pm.field(role="low")
    b: jax.Array = pm.field(role="low")

    def value(self):
        return self.base + self.b @ self.a


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
def test_the_attribute_reads_as_the_array_on_every_journey(style):
    """Surgery puts a leaf for an array and an array for the leaf; tests/laws has the others."""
    made, plain = style(scaled(), ramp(2)), style(ramp(2), ramp(2))
    journeys = [
        made,
        jax.tree.map(lambda x: x, made),
        pm.tree_at(lambda m: m.bias, made, ramp(2)),
        pm.tree_at(lambda m: m.weight, plain, scaled()),
        plain.replace(weight=scaled()),
        made.replace(bias=ramp(2)),
        pm.combine(*pm.partition(made, FACTOR)),
    ]
    np.testing.assert_allclose(made(jnp.ones(2)), [4.0, 8.0])
    # A pending instance may be filled in by the first read of another field.
    journeys.append(pm.filter_jit(lambda m: m)(made))
    assert isinstance(journeys[-1].bias, jax.Array)
    for found in journeys:
        assert isinstance(found.weight, jax.Array)
        np.testing.assert_allclose(found.weight, [3.0, 6.0])
        assert jax.tree.structure(found) == jax.tree.structure(made)
        assert found == made
        for back in (pm.resolve(found), pm.tree_at(lambda m: m.weight, found, ramp(2))):
            assert jax.tree.structure(back) == jax.tree.structure(plain)
        np.testing.assert_allclose(pm.resolve(found).weight, made.weight)


def test_reading_leaves_nothing_behind():
    """A hundred reads keep no array alive."""
    made = generated()
    _ = made.weight
    gc.collect()
    count = len(gc.get_objects())
    for _ in range(100):
        _ = made.weight
    gc.collect()
    assert len(gc.get_objects()) - count < 50


def by_hand(base, a, b, bias, x):
    return jnp.sum((base + b @ a) @ x + bias)


@pytest.mark.usefixtures("optimized")
def test_value_gradient_and_program_are_those_of_the_formula():
    """Inside jit it compiles to the formula, and so does its gradient; `lax` takes it."""
    leaf, x = LowRank(ramp(2, 3), ramp(1, 3), ramp(2, 1)), ramp(3)
    model = linear_with(leaf)
    parts = (leaf.base, leaf.a, leaf.b, model.bias)

    def by_leaf(model, x):
        return jnp.sum(jax.lax.dot_general(model.weight, x, (((1,), (0,)), ((), ()))) + model.bias)

    found = pm.named_leaves(pm.filter_grad(lambda m: jnp.sum(m(x)))(model))
    expected = jax.grad(by_hand, argnums=(0, 1, 2))(*parts, x)
    for name, array in zip(("base", "a", "b"), expected, strict=True):
        np.testing.assert_allclose(found[f"weight.{name}"], array, rtol=1e-6)
    np.testing.assert_allclose(by_leaf(model, x), by_hand(*parts, x), rtol=1e-6)
    split = jax.grad(lambda parts, x: by_hand(*parts, x))
    assert operations(by_leaf, model, x) == operations(by_hand, *parts, x)
    assert operations(jax.grad(by_leaf), model, x) == operations(split, parts, x)


def test_roles_and_paths_reach_into_it():
    """Its fields are the tree's."""
    model = linear_with(LowRank(ramp(2, 3), ramp(1, 3), ramp(2, 1)))
    grads = pm.filter_grad(lambda m: jnp.sum(m(ramp(3))), wrt=pm.select.role("low"))(model)
    assert sorted(pm.named_leaves(grads)) == ["weight.a", "weight.b"]
    changed = pm.tree_at(lambda m: m.weight.a, model, jnp.zeros((1, 3)))
    np.testing.assert_allclose(changed.weight, model.weight - ramp(2, 1) @ ramp(1, 3))
    picked = pm.select.at(lambda m: m.weight)(model)
    assert jax.tree.leaves(picked) == [True, True, True, False]


BINARY = [
    *(operator.add, operator.sub, operator.mul, operator.matmul, operator.truediv),
    *(operator.floordiv, operator.mod, operator.pow),
    *(operator.lt, operator.le, operator.gt, operator.ge),
]


def test_operators_take_one_that_is_in_a_list():
    """Where no attribute is read: on the left, on the right, on both sides, and of one."""
    leaf, other = scaled(), ramp(2) + 1
    value = leaf.value()
    for apply in BINARY:
        np.testing.assert_allclose(apply(leaf, other), apply(value, other))
        np.testing.assert_allclose(apply(other, leaf), apply(other, value))
        np.testing.assert_allclose(apply(leaf, leaf), apply(value, value))
    # Python asks the leaf, because a number does not know it.
    expected = [[-3, -6], [3, 6], [3, 6], 6, [-1, -4]]
    for found, numbers in zip((-leaf, +leaf, abs(leaf), leaf[1], 2.0 - leaf), expected):
        np.testing.assert_allclose(found, numbers)


def test_computed_is_the_functions_value():
    """Of arrays, of Modules, of a Module that computes, of another computed leaf."""
    made = linear_with(pm.computed(jnp.multiply, ramp(2, 3), jnp.asarray(2.0)))
    np.testing.assert_allclose(made.weight, 2 * ramp(2, 3))
    outer = new(fields={"x": object}, __call__=lambda self, y: jnp.outer(self.x, y))
    made = linear_with(pm.computed(outer(ramp(2)), ramp(3)))
    np.testing.assert_allclose(made.weight, jnp.outer(ramp(2), ramp(3)))
    assert sorted(pm.named_leaves(made)) == ["bias", "weight.fn.x", "weight.trees.0"]
    made = generated(Scaled(scaled(), jnp.asarray(2.0)))
    np.testing.assert_allclose(made.weight, [6.0, 12.0])
    assert "weight.array.factor" in pm.named_leaves(made)


def test_prefix_trees_name_the_parts():
    """In an axes tree of the same class, a number may apply to the leaf, or to a part."""
    made = generated()
    many = pm.stack([made, made])

    def call(axes, models):
        return pm.filter_vmap(lambda m, x: m(x), in_axes=(axes, None))(models, jnp.ones(2))

    for axes in (Generated(0, 0), jax.tree.map(lambda _: 0, many), pm.by({"weight": 0, "bias": 0})):
        assert call(axes, many).shape == (2, 2)
    factors = pm.tree_at("weight.factor", made, jnp.ones(4))
    assert call(pm.by({"weight.factor": 0, ...: None}), factors).shape == (4, 2)


def test_an_rnn_computes_it_once():
    """Not in every step of its loop."""
    cell = pm.nn.GRUCell(2, 3, key=jax.random.key(0))
    base = cell.weight_hh
    low = LowRank(base, jnp.ones((1, base.shape[1])), jnp.ones((base.shape[0], 1)))
    rnn, plain = (pm.nn.RNN(cell.replace(weight_hh=w)) for w in (low, low.value()))
    jaxpr = jax.make_jaxpr(lambda m, x: m(x))(rnn, ramp(5, 2))
    (loop,) = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "scan"]
    inside = [e for e in loop.params["jaxpr"].jaxpr.eqns if e.primitive.name == "dot_general"]
    assert not [e for e in inside if e.outvars[0].aval.ndim == 2]
    np.testing.assert_allclose(rnn(ramp(5, 2)), plain(ramp(5, 2)), rtol=1e-5)


def test_resolve_takes_a_tree_and_a_selector():
    """In containers, in chains, at the root; those of which the selector picks any part."""
    chain = generated(Scaled(scaled(), jnp.asarray(2.0)))
    found = pm.resolve({"a": [scaled(), chain], "b": 1})
    np.testing.assert_allclose(found["a"][0], [3, 6])
    np.testing.assert_allclose(found["a"][1].weight, [6, 12])
    assert found["b"] == 1
    assert pm.resolve(found["a"][1]) is found["a"][1]
    np.testing.assert_allclose(pm.resolve(scaled()), [3, 6])
    names = sorted(pm.named_leaves(pm.resolve([generated(), generated()], "0.weight.factor")))
    assert names == ["0.bias", "0.weight", "1.bias", "1.weight.array", "1.weight.factor"]
    # Without a selector, ties are resolved as well.
    model = pm.tie(Affine(generated(), generated(ramp(2))), "bias.weight", to="weight.weight")
    for found, leaves in ((pm.resolve(model), 4), (pm.resolve(model, "weight.weight"), 3)):
        assert len(jax.tree.leaves(found)) == leaves
        np.testing.assert_allclose(found.bias.weight, [3, 6])


def test_resolve_of_several_models_as_one():
    """The result is the resolved models as one."""
    models = [generated(Scaled(ramp(2), jnp.asarray(float(i)))) for i in range(3)]
    many = pm.stack(models)
    assert pm.tree_equal(pm.resolve(many), pm.stack([pm.resolve(m) for m in models]))
    assert pm.resolve(pm.stack([many, many])).weight.shape == (2, 3, 2)
    assert pm.filter_vmap(lambda m: m.weight)(many).shape == (3, 2)
    # A number of Python's is the same for all.
    halves = pm.filter_vmap(lambda x: pm.computed(jnp.multiply, x, 0.5))(ramp(3, 2))
    np.testing.assert_allclose(pm.resolve(halves), ramp(3, 2) / 2)


def test_a_leaf_of_shapes_alone_reads_as_its_shape():
    """Also of several as one. It was a TypeError of JAX's, from inside of the function."""
    half = lambda x: pm.computed(jnp.multiply, x, 0.5)  # noqa: E731
    for leaf in (half(ramp(2)), pm.filter_vmap(half)(ramp(3, 2))):
        model = {"x": Holder(leaf)}
        shapes = pm.filter_eval_shape(lambda: model)  # noqa: B023
        found = pm.resolve(shapes)["x"].content
        assert shapes["x"].content == found
        assert found == jax.eval_shape(lambda: pm.resolve(model)["x"].content)  # noqa: B023
        assert isinstance(found, jax.ShapeDtypeStruct)


def broken(answer):
    return generated(new(pm.Computed, fields={"array": object}, value=answer)(ramp(2)))


WEIGHT = r"Generated\.weight"
REFUSED = [
    # It would be another broadcast; and no map can be told from the shapes alone.
    (lambda m: pm.stack([m] * 3).weight, ShapeError, f"(?s){WEIGHT}.*several models"),
    (
        lambda m: pm.resolve(pm.tree_at("weight.factor", m, jnp.ones(3))),
        ShapeError,
        "(?s)weight.*ranks",
    ),
    # What it would be computed of is not there.
    (lambda m: pm.partition(m, FACTOR)[0].weight, ShapeError, WEIGHT),
    # Derivatives have the form of the model; values computed from them have no meaning.
    (lambda m: pm.filter_grad(lambda m: m(1.0).sum())(m).weight, ShapeError, WEIGHT),
    # An error of the user's is told as it is.
    (lambda _: broken(lambda self: [self.array]).weight, FieldError, f"{WEIGHT}.*Made"),
    (lambda _: broken(lambda self: self.nothing).weight, FieldError, "nothing"),
]


@pytest.mark.parametrize(("use", "error", "text"), REFUSED)
def test_what_has_no_value_is_not_read(use, error, text):
    """Several models as one, a part of a model, derivatives, what computes no array."""
    with pytest.raises(error, match=text):
        use(generated())
