"""Laws of ties and computed leaves: the values of a model, and the leaves of its gradient."""

from contextlib import suppress

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import SpecError
from tests.helpers.comparing import assert_close
from tests.helpers.laws import law

SIZE = 2
NAMES = ("a", "b", "c", "d")


class Net(pm.Module):
    """Four matrices, at several depths."""

    a: jax.Array
    b: nn.Linear
    c: list
    d: dict

    def __call__(self, x):
        for name in NAMES:
            x = jnp.sin(matrix(self, name) @ x)
        return x

    def loss(self, x):
        """A number that depends on every matrix."""
        return jnp.sum(self(x) ** 2)


PLACES = {"a": "a", "b": "b.weight", "c": "c[0].weight", "d": "d.inner.a"}


class Inner(pm.Module):
    """One matrix."""

    a: jax.Array


def matrix(net, name):
    """One of the four, as it reads."""
    return {
        "a": lambda: net.a,
        "b": lambda: net.b.weight,
        "c": lambda: net.c[0].weight,
        "d": lambda: net.d["inner"].a,
    }[name]()


def plain(seed):
    """A net without ties."""
    keys = jax.random.split(jax.random.key(seed), 4)
    linears = [nn.Linear(SIZE, SIZE, key=key) for key in keys]
    return Net(linears[0].weight, linears[1], [linears[2]], {"inner": Inner(linears[3].weight)})


def twice(x):
    """A function to go through."""
    return 2.0 * x


THROUGH = [None, None, jnp.transpose, twice]


@st.composite
def tied_nets(draw):
    """A net, and one with some ties, each of a later path to an earlier one."""
    net = tied = plain(draw(st.integers(0, 1)))
    if draw(st.booleans()):
        name = draw(st.sampled_from(["a", "b.weight"]))
        tied = net = pm.lora(net, name, 1, key=jax.random.key(5))
        tied = net = pm.tree_at(f"{name}.b", net, jnp.ones((SIZE, 1)))
    for i, name in enumerate(NAMES):
        source = draw(st.sampled_from([None, *NAMES[:i]]))
        if source is not None and (name != "b" or is_array(net.b)):
            through = draw(st.sampled_from(THROUGH))
            # A source that is tied itself is refused.
            with suppress(SpecError):
                tied = pm.tie(tied, PLACES[name], to=PLACES[source], through=through)
    return net, tied


def is_array(linear):
    """Whether its weight is stored as it reads."""
    return "weight" in vars(linear)


X = jnp.asarray([1.0, -0.5])


def values(net):
    """All matrices as they read."""
    return [np.asarray(matrix(net, name)) for name in NAMES]


def assert_reads_alike(one, other):
    """Every matrix, number for number."""
    for found, expected in zip(values(one), values(other), strict=True):
        np.testing.assert_array_equal(found, expected)


@law
@given(tied_nets())
def test_untied_it_reads_as_tied(nets):
    """untie(tie(m)) reads as tie(m), has a leaf for each path, and no tie is left."""
    net, tied = nets
    free = pm.untie(tied)

    assert_reads_alike(free, tied)
    assert pm.untie(free) == free
    assert len(jax.tree.leaves(pm.resolve(free))) == len(jax.tree.leaves(pm.resolve(net)))


@law
@given(tied_nets())
def test_resolved_it_reads_as_it_did(nets):
    """resolve is idempotent, reads as the model does, and leaves only the values."""
    _, tied = nets
    resolved = pm.resolve(tied)

    assert_reads_alike(resolved, tied)
    assert pm.tree_equal(pm.resolve(resolved), resolved)
    np.testing.assert_allclose(resolved(X), tied(X), rtol=1e-6)


@law
@given(tied_nets())
def test_the_gradient_through_ties_is_the_sum(nets):
    """The leaves of the tied model: the gradient of the loss as a function of stored arrays."""
    _, tied = nets
    leaves, treedef = jax.tree.flatten(tied)

    def by_leaves(leaves):
        # Without any tie or computed leaf in the differentiated model.
        free = pm.resolve(treedef.unflatten(leaves))
        return free.loss(X)

    expected = jax.grad(by_leaves)(leaves)
    found = jax.tree.leaves(pm.filter_grad(lambda net: net.loss(X))(tied))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_a_source_may_become_a_computed_leaf_and_be_one_no_longer():
    """Of a tie through a function, too: the source may be made of other leaves."""
    net = pm.tie(plain(0), "b.weight", to="a", through=jnp.transpose)
    half = pm.tree_at("a", net, pm.computed(jnp.multiply, net.a, jnp.full((SIZE, SIZE), 0.5)))

    np.testing.assert_array_equal(half.b.weight, half.a.T)
    np.testing.assert_array_equal(half.b.weight, net.a.T / 2)
    back = pm.resolve(half, "a")
    np.testing.assert_array_equal(back.b.weight, half.a.T)
    several = pm.stack([half, half])
    mapped = pm.filter_vmap(lambda net: net.b.weight)(several)
    np.testing.assert_array_equal(mapped[1], half.a.T)
    assert pm.resolve(several).b.weight.shape == (2, SIZE, SIZE)


class Block(pm.Module):
    """One linear layer, and features of the block."""

    linear: nn.Linear
    bias: jax.Array

    def __call__(self, x):
        return jnp.tanh(self.linear(x)) + self.bias


class OneField(pm.Module):
    """Two blocks with one linear layer, in one field, which is called twice."""

    shared: nn.Linear
    biases: list

    def __call__(self, x):
        for bias in self.biases:
            x = Block(self.shared, bias)(x)
        return x


@jax.jit
def train_step(model, x):
    """One step of gradient descent."""
    grads = jax.grad(lambda model: jnp.mean((model(x) - 0.5) ** 2))(model)
    return jax.tree.map(lambda leaf, grad: leaf - 0.5 * grad, model, grads)


def test_x12_two_blocks_that_share_one_layer_train_in_step():
    """Tied, the layer has one weight, one gradient; number for number as with one field.

    A tree that a transform returns, and takes again, has the same ties (G20).
    """
    shared, biases = nn.Linear(2, 2, key=jax.random.key(0)), [jnp.zeros(2), jnp.ones(2)]
    free, one = nn.Sequential([Block(shared, bias) for bias in biases]), OneField(shared, biases)
    tied = pm.tie(free, "layers[1].linear", to="layers[0].linear")
    x = jnp.asarray([1.0, -2.0])

    for _ in range(3):
        tied, one = train_step(tied, x), train_step(one, x)
        first, second = tied.layers
        assert second.linear is first.linear
        found = first.linear, [first.bias, second.bias], tied(x)
        assert_close(found, (one.shared, one.biases, one(x)), rtol=1e-6)
    assert len(jax.tree.leaves(tied)) == 4
    apart = train_step(free, x)
    assert not np.allclose(apart.layers[0].linear.weight, apart.layers[1].linear.weight)
