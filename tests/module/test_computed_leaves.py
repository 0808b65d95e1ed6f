"""`Computed` and `computed`: values instead of arrays."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError, FieldError
from tests.helpers.computing import Generated, Scaled, scaled
from tests.helpers.equations import operations
from tests.helpers.trees import Holder, ramp


def linear_with(weight):
    """A layer of the library's that holds something for its weight."""
    return pm.nn.Linear(3, 2, key=jax.random.key(0)).replace(weight=weight)


class LowRank(pm.Computed):
    """A sum and a product."""

    base: jax.Array
    a: jax.Array = pm.field(role="low")
    b: jax.Array = pm.field(role="low")

    def value(self):
        return self.base + self.b @ self.a


def low_rank():
    """Of shape (2, 3)."""
    return LowRank(ramp(2, 3), ramp(1, 3), ramp(2, 1))


def test_gradients_are_those_of_what_it_is_computed_from():
    """As `jax.grad` gives them of the formula written out."""
    model, x = linear_with(low_rank()), ramp(3)

    def by_hand(base, a, b):
        return jnp.sum((base + b @ a) @ x + model.bias)

    grads = pm.filter_grad(lambda m: jnp.sum(m(x)))(model)
    found = pm.named_leaves(grads)
    leaf = low_rank()
    expected = jax.grad(by_hand, argnums=(0, 1, 2))(leaf.base, leaf.a, leaf.b)
    for name, array in zip(("base", "a", "b"), expected, strict=True):
        np.testing.assert_allclose(found[f"weight.{name}"], array, rtol=1e-6)


def test_roles_and_paths_reach_into_it():
    """Its fields are the tree's."""
    model = linear_with(low_rank())

    grads = pm.filter_grad(lambda m: jnp.sum(m(ramp(3))), wrt=pm.select.role("low"))(model)
    assert sorted(pm.named_leaves(grads)) == ["weight.a", "weight.b"]
    changed = pm.tree_at(lambda m: m.weight.a, model, jnp.zeros((1, 3)))
    np.testing.assert_allclose(changed.weight, model.weight - ramp(2, 1) @ ramp(1, 3))
    picked = pm.select.at(lambda m: m.weight)(model)
    assert jax.tree.leaves(picked) == [True, True, True, False]


def test_optax_trains_it():
    """One slot for each leaf, and an update of each."""
    model, x = linear_with(low_rank()), ramp(3)
    optimizer = optax.sgd(1e-5, momentum=0.9)

    @pm.filter_jit
    def step(model, state):
        loss, grads = pm.filter_value_and_grad(lambda m: jnp.sum(m(x) ** 2))(model)
        updates, state = optimizer.update(grads, state)
        return loss, pm.apply_updates(model, updates), state

    state = optimizer.init(pm.trainable(model)[0])
    losses = []
    for _ in range(3):
        loss, model, state = step(model, state)
        losses.append(float(loss))
    assert losses[0] > losses[1] > losses[2]
    assert len(jax.tree.leaves(state)) == 4


@pytest.mark.usefixtures("optimized")
def test_the_program_is_the_hand_written_one():
    """Inside jit it compiles to the formula, and so does its gradient."""
    model, x = linear_with(low_rank()), ramp(3)
    leaf = low_rank()
    parts = (leaf.base, leaf.a, leaf.b, model.bias)

    def by_hand(parts, x):
        base, a, b, bias = parts
        return jnp.sum((base + b @ a) @ x + bias)

    def by_leaf(model, x):
        return jnp.sum(model(x))

    assert operations(by_leaf, model, x) == operations(by_hand, parts, x)
    assert operations(jax.grad(by_leaf), model, x) == operations(jax.grad(by_hand), parts, x)


def test_lax_takes_the_attribute():
    """It is an array, not something like one."""
    model = linear_with(low_rank())
    contract = (((1,), (0,)), ((), ()))

    out = jax.jit(lambda m, x: jax.lax.dot_general(m.weight, x, contract))(model, ramp(3))

    np.testing.assert_allclose(out, model.weight @ ramp(3), rtol=1e-6)


def test_chains_are_computed_inside_out():
    """A computed leaf may hold another in its own field."""
    outer = Scaled(scaled(), jnp.asarray(2.0))
    made = Generated(outer, ramp(2))

    np.testing.assert_allclose(made.weight, [6.0, 12.0])
    assert "weight.array.factor" in pm.named_leaves(made)


def test_computed_is_the_functions_value():
    """Of arrays, of Modules, of a Module that computes."""
    made = linear_with(pm.computed(jnp.multiply, ramp(2, 3), jnp.asarray(2.0)))
    np.testing.assert_allclose(made.weight, 2 * ramp(2, 3))

    class Outer(pm.Module):
        rows: jax.Array

        def __call__(self, columns):
            return jnp.outer(self.rows, columns)

    made = linear_with(pm.computed(Outer(ramp(2)), ramp(3)))
    np.testing.assert_allclose(made.weight, jnp.outer(ramp(2), ramp(3)))
    assert sorted(pm.named_leaves(made)) == ["bias", "weight.fn.rows", "weight.trees.0"]


def test_files_hold_what_it_is_computed_from(tmp_path):
    """A computed leaf is written as its own arrays, and is computed again after a load."""
    model = linear_with(low_rank())
    pm.save(tmp_path / "model", model)

    found = pm.load(tmp_path / "model", model)
    assert found == model
    assert type(found) is type(model)
    np.testing.assert_allclose(found.weight, model.weight)


def test_it_goes_through_scan_and_stack():
    """As a carry, and as one of many layers."""
    leaf = low_rank()
    square = LowRank(ramp(3, 3), leaf.a, ramp(3, 1))

    def make(*, key):
        return pm.nn.Linear(3, 3, key=key).replace(weight=square)

    stack = pm.nn.Stack(make, 2, key=jax.random.key(0))
    x = ramp(3)
    np.testing.assert_allclose(stack(x), stack[1](stack[0](x)), rtol=1e-6)
    _, out = pm.filter_scan(lambda m, x: (m, m(x)), linear_with(leaf), ramp(4, 3))
    assert out.shape == (4, 2)


def test_an_rnn_computes_it_once():
    """Not in every step of its loop."""
    cell = pm.nn.GRUCell(2, 3, key=jax.random.key(0))
    base = cell.weight_hh
    low = LowRank(base, jnp.ones((1, base.shape[1])), jnp.ones((base.shape[0], 1)))
    rnn = pm.nn.RNN(cell.replace(weight_hh=low))

    jaxpr = jax.make_jaxpr(lambda m, x: m(x))(rnn, ramp(5, 2))

    (loop,) = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "scan"]
    inside = [e for e in loop.params["jaxpr"].jaxpr.eqns if e.primitive.name == "dot_general"]
    assert not [e for e in inside if e.outvars[0].aval.ndim == 2]
    np.testing.assert_allclose(
        rnn(ramp(5, 2)), pm.nn.RNN(cell.replace(weight_hh=low.value()))(ramp(5, 2)), rtol=1e-5
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: pm.computed(jnp.multiply, ramp(2), 0.5),
        lambda: pm.filter_vmap(lambda x: pm.computed(jnp.multiply, x, 0.5))(ramp(3, 2)),
    ],
    ids=["one", "several as one"],
)
def test_a_leaf_of_shapes_alone_reads_as_its_shape(make):
    """It was a TypeError of JAX's, from inside of the function."""
    model = {"x": Holder(make())}
    abstract = pm.filter_eval_shape(lambda: model)

    found = pm.resolve(abstract)["x"].content

    assert found == jax.eval_shape(lambda: pm.resolve(model)["x"].content)
    assert isinstance(found, jax.ShapeDtypeStruct)


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

    np.testing.assert_allclose(-leaf, [-3, -6])
    np.testing.assert_allclose(+leaf, [3, 6])
    np.testing.assert_allclose(abs(leaf), [3, 6])
    np.testing.assert_allclose(leaf[1], 6)
    # Python asks the leaf, because a number does not know it.
    np.testing.assert_allclose(2.0 - leaf, [-1, -4])


def test_what_computes_nothing_is_refused():
    """An array as the function; a class without `value`."""

    class Nothing(pm.Computed):
        array: jax.Array

    with pytest.raises(ArgumentError, match=r"f32\[2\]"):
        pm.computed(ramp(2), ramp(2))
    with pytest.raises(FieldError, match="Nothing"):
        Nothing(ramp(2))
