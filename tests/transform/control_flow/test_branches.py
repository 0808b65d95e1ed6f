"""filter_cond and filter_switch: branches over any trees."""

import dataclasses
import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import StructureError
from tests.helpers.comparing import assert_close, assert_same
from tests.helpers.equations import equations
from tests.helpers.trees import Holder, ramp


class Net(pm.Module):
    """Arrays, a number, a function and a string, with methods to choose between."""

    weight: jax.Array
    bias: jax.Array
    rate: float = 0.5
    act: object = jnp.tanh
    name: str = "net"

    def __call__(self, x):
        return self.act(self.weight @ x)

    def shifted(self, x):
        return self(x) + self.bias


def net():
    """A small `Net`."""
    return Net(ramp(2, 2, start=np.float32(0.1)), ramp(2))


def scale_weight(net):
    return net.replace(weight=2 * net.weight)


def shift_bias(net):
    return net.replace(bias=net.bias + 1)


both_ways = pytest.mark.parametrize("pred", [True, False])
jitted_or_not = pytest.mark.parametrize("transform", [lambda f: f, pm.filter_jit, jax.jit])


# ---- the law


@both_ways
@jitted_or_not
def test_cond_is_the_conditional(pred, transform):
    """filter_cond(p, f, g, *args) == (f if p else g)(*args), for a Module in and out."""
    model = net()
    choose = transform(lambda pred: pm.filter_cond(pred, scale_weight, shift_bias, model).bias)

    assert_same(choose(jnp.asarray(pred)), (scale_weight if pred else shift_bias)(model).bias)


@pytest.mark.parametrize("index", [-1, 0, 1, 2, 7, np.int8(1), jnp.asarray(2)])
def test_switch_is_indexing(index):
    """filter_switch(i, fs, *args) == fs[clamped i](*args), for functions, Modules and methods."""
    branches, x = [net(), net().shifted, lambda x: -x], ramp(2)

    found = pm.filter_switch(index, branches, x)
    assert_close(found, branches[min(max(int(index), 0), 2)](x))


# ---- results of branches


def number(value):
    """A branch that returns a number, array or whatever."""
    return lambda: value


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (1, 1, 1),
        (True, True, True),
        (0.0, 0.0, 0.0),
        ("a", "a", "a"),
        (None, None, None),
        (np.float32(1), np.float32(2), jnp.float32(1)),
    ],
)
def test_equal_leaves_stay_what_they_are(first, second, expected):
    """Numbers and strings on which all branches agree are returned themselves."""
    found = pm.filter_cond(True, number(first), number(second))

    assert_same(found, expected)


# ---- other transforms


def test_cond_under_vmap():
    """With a condition for each member, each member gets its branch; State-like dicts included."""
    model = net()
    found = pm.filter_vmap(
        lambda p, x: pm.filter_cond(p, lambda m, x: (m(x), "a"), lambda m, x: (x, "a"), model, x)
    )(jnp.asarray([True, False]), ramp(2, 2))

    assert_close(found[0], jnp.stack([model(ramp(2, 2)[0]), ramp(2, 2)[1]]))
    assert found[1] == "a"


@both_ways
def test_gradient_of_cond(pred):
    """The gradient is that of the branch that was taken, for Modules that are branches, too."""

    def loss(model, x):
        return jnp.sum(pm.filter_cond(pred, model, model.shifted, x) ** 2)

    found = pm.filter_jit(pm.filter_grad(loss))(net(), ramp(2))
    branch = Net.__call__ if pred else Net.shifted
    expected = pm.filter_grad(lambda m, x: jnp.sum(branch(m, x) ** 2))(net(), ramp(2))
    assert_close(found, expected)


def test_state_through_branches():
    """A State goes in and comes out, changed or not."""
    norm, state = pm.make_with_state(nn.BatchNorm)(2)
    x = ramp(4, 2)

    def train(x, state):
        return norm(x, state)

    out, after = pm.filter_cond(True, train, lambda x, state: (x, state), x, state)
    expected, expected_state = norm(x, pm.make_with_state(nn.BatchNorm)(2)[1])
    assert_close(out, expected)
    assert_close(jax.tree.leaves(after), jax.tree.leaves(expected_state))


@pytest.mark.parametrize("derivative", [False, True], ids=["value", "gradient"])
def test_no_operation_is_added(derivative):
    """The program has the operations of the one written by hand, and so has its derivative."""

    def ours(w, b, x, p, i):
        model = Net(w, b)
        y = pm.filter_cond(p, model, model.shifted, x)
        return pm.filter_switch(i, [lambda m: (m.weight, m), lambda m: (m.weight * 2, m)], model)[
            0
        ] @ y  # fmt: skip

    def by_hand(w, b, x, p, i):
        y = jax.lax.cond(
            p, lambda w, b, x: jnp.tanh(w @ x), lambda w, b, x: jnp.tanh(w @ x) + b, w, b, x
        )
        return jax.lax.switch(i, [lambda w, b: (w, w, b), lambda w, b: (w * 2, w, b)], w, b)[0] @ y

    args = (ramp(2, 2), ramp(2), ramp(2), jnp.asarray(True), jnp.asarray(1))
    if derivative:
        ours, by_hand = (
            lambda w, *args, fn=fn: jax.jvp(lambda w: fn(w, *args), (w,), (w,))
            for fn in (ours, by_hand)
        )
    assert equations(ours, *args) == equations(by_hand, *args)


# ---- threads


def test_branches_are_traced_for_more_than_their_operands():
    """For the size of a mapped axis, too: a result for two was joined with another's for three."""

    def zeros(x):
        return {"x": x * jnp.zeros(jax.lax.axis_size("i")), "n": jax.lax.axis_size("i")}

    def ones(x):
        return {"x": x + jnp.ones(jax.lax.axis_size("i")), "n": jax.lax.axis_size("i")}

    def choose(x):
        found = pm.filter_cond(x > 0, ones, zeros, x)
        return found["x"] * found["n"]

    for n in (2, 3, 2, 4):
        found = jax.vmap(choose, axis_name="i")(jnp.ones(n))
        assert_close(found, jnp.full((n, n), 2.0 * n))


@ft.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=[])
@dataclasses.dataclass
class Strict:
    """A node of another library's that takes arrays of two numbers alone."""

    w: jax.Array

    def __post_init__(self):
        if self.w.ndim != 1 or self.w.shape != (2,) or self.w.dtype != jnp.float32:
            raise ValueError("two numbers")


@pytest.mark.parametrize("wrap", [lambda x: x, Holder], ids=["bare", "in a Module"])
def test_nodes_that_look_at_their_children(wrap):
    """They were built with stand-ins of ours, which they refused."""
    tree = wrap(Strict(ramp(2)))

    def total(tree):
        return jnp.sum(jax.tree.leaves(tree)[0])

    for found in (
        pm.filter_cond(True, lambda t: t, lambda t: t, tree),
        pm.filter_jit(lambda t: t)(tree),
    ):
        assert jax.tree.structure(found) == jax.tree.structure(tree)
        assert_close(jax.tree.leaves(found)[0], ramp(2))
    assert_close(jax.tree.leaves(pm.filter_grad(total)(tree))[0], jnp.ones(2))
    assert_close(pm.filter_jvp(total, (tree,), (tree,))[1], total(tree))


@dataclasses.dataclass(frozen=True)
class Setting:
    """A static value that is compared by its fields."""

    value: object


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.dtype("float64"), "mean"),
        (np.dtype("float64"), None),
        (Setting(1), Setting(1.0)),
        (Setting(0.0), Setting(-0.0)),
        ({(1,): 0}, {(1.0,): 0}),
        ({0.0: 0}, {-0.0: 0}),
    ],
    ids=str,
)
def test_what_python_calls_equal_is_not_one_result(one, other):
    """The branch that was not taken must not decide the result; nor the step of a loop."""
    x = jnp.ones(2)
    for first, second in ((one, other), (other, one)):
        with pytest.raises(StructureError, match=r"filter_cond"):
            pm.filter_cond(
                jnp.asarray(True), lambda x, a=first: (x, a), lambda x, b=second: (x, b), x
            )
        with pytest.raises(StructureError, match=r"filter_scan"):
            pm.filter_scan(lambda c, _, b=second: ((c[0], b), None), (x, first), None, length=2)


DIFFERENT = {
    "shape": (lambda m: m.replace(weight=m.weight[:1]), "weight"),
    "dtype": (lambda m: m.replace(bias=m.bias.astype(int)), "bias"),
    "function": (lambda m: m.replace(act=jnp.sin), "act"),
    "string": (lambda m: m.replace(name="other"), "name"),
    "None": (lambda m: m.replace(bias=None), "bias"),
}


@pytest.mark.parametrize(("change", "where"), DIFFERENT.values(), ids=DIFFERENT)
def test_branches_return_one_structure(change, where):
    """The branch that was not taken must not decide the result; paths are named."""
    for _ in range(2):  # The trace of the first call does not hide the mistake.
        with pytest.raises(StructureError, match=rf"filter_cond[\s\S]*{where}"):
            pm.filter_cond(True, change, lambda m: m, net())


def test_a_number_that_differs_is_an_array():
    """As JAX promotes numbers."""
    for pred, value in ((True, 1), (False, 2.5)):
        found = pm.filter_cond(pred, number(1), number(2.5))
        assert (float(found), found.dtype) == (value, jnp.float32)
