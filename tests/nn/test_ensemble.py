"""`Ensemble`: its results, as a sequence and as a value, with State and with keys."""

import functools as ft

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import pytreemod as pm
from pytreemod import nn
from tests.helpers.equations import operations
from tests.helpers.laws import law
from tests.nn.numbers_to_compare import assert_close, wave

N = 3
X = jnp.asarray(wave(5, 2))
XS = jnp.asarray(wave(N, 5, 2))
KEY = jax.random.key(0)
NETS = nn.Ensemble(ft.partial(nn.Linear, 2, 2), N, key=KEY)


class Noisy(pm.Module):
    """A member with statistics, a stream, and a layer that uses a key."""

    linear: nn.Linear
    norm: nn.BatchNorm
    dropout: nn.Dropout
    noise: pm.RngStream

    def __init__(self, *, key):
        self.linear = nn.Linear(2, 2, key=key)
        self.norm = nn.BatchNorm(2)
        self.dropout = nn.Dropout(0.5)
        self.noise = pm.RngStream()

    def __call__(self, x, state, *, key=None, scale=1.0):
        drawn, state = state.next_key(self.noise)
        x, state = self.norm(self.linear(x), state)
        x = x if key is None else self.dropout(x, key=key)
        return scale * x + jax.random.normal(drawn), state


class Pair(pm.Module):
    """Takes two inputs by position, and one by name."""

    weight: jax.Array

    def __init__(self, *, key):
        self.weight = jax.random.normal(key, (1, 2))

    def __call__(self, a, b, *, mask=None):
        out = self.weight * a["x"] + b
        return out if mask is None else jnp.where(mask, out, 0)


@settings(law, max_examples=12)
@given(st.sampled_from([1, 3]), st.sampled_from([None, 0, 1, -1]), st.integers(0, 2**31 - 1))
def test_law_of_the_members(n, axis, seed):
    """`nets(xs, in_axes=a)[i] == nets[i](take(xs, i, a))`, and without an axis all get `xs`."""
    ensemble = nn.Ensemble(ft.partial(nn.Linear, 2, 3), n, key=jax.random.key(seed))
    xs = jnp.asarray(wave(n, 2)) if axis is not None else X
    xs = xs if axis is None else jnp.moveaxis(xs, 0, axis)
    ys = ensemble(xs, in_axes=axis)

    assert len(ys) == n
    for i, y in enumerate(ys):
        assert_close(y, ensemble[i](xs if axis is None else jnp.take(xs, i, axis)))


def test_several_arguments_have_an_axis_or_none():
    """One for each by position; State and key have no say in it. By name, all get the same."""
    pair = nn.Ensemble(Pair, N, key=KEY)
    a, mask = {"x": XS}, jnp.asarray([True, False])
    expected = jnp.stack([m({"x": XS[i]}, X, mask=mask) for i, m in enumerate(pair)])

    assert_close(pair(a, X, mask=mask, in_axes=(0, None)), expected)
    assert_close(pair(a, X, mask=mask, in_axes=({"x": 0}, None)), expected)
    ys = pair(a, XS, in_axes=0)
    assert_close(ys[2], pair[2]({"x": XS[2]}, XS[2]))


def test_what_members_share_is_beside_them():
    """Its gradient is the sum over the members; `filter_vmap` with `by` says it without a class."""
    trunk, heads = nn.Linear(2, 2, key=KEY), NETS

    def loss(net):
        return jnp.sum(net(X) ** 2)

    def one(pair):
        trunk, head = pair
        return jnp.sum(head(jax.nn.relu(trunk(X))) ** 2)

    grads = pm.filter_jit(pm.filter_grad(loss))(
        nn.Sequential([trunk, nn.Lambda(jax.nn.relu), heads])
    )
    alone = [pm.filter_grad(one)((trunk, head)) for head in heads]
    mapped = pm.filter_vmap(one, in_axes=(pm.by({"[0]": None, "[1]": 0}),))

    assert_close(grads[0].weight, sum(g[0].weight for g in alone), rtol=1e-4)
    for i, (_, grad) in enumerate(alone):
        assert_close(grads[2].member.weight[i], grad.weight, rtol=1e-4)
    by_map = pm.filter_grad(lambda pair: jnp.sum(mapped(pair)))((trunk, heads.member))
    assert_close(by_map[0].weight, grads[0].weight, rtol=1e-4)


def test_each_member_has_state_and_streams_of_its_own():
    """As each has that is filled with its part, and called alone."""
    ensemble, state = pm.make_with_state(nn.Ensemble)(Noisy, N, key=KEY)
    state = state.seed(jax.random.key(1))
    members = state.restored().fill(ensemble).unstack()
    keys = jax.random.split(KEY, N)
    ys, after = pm.filter_jit(ensemble)(X, state, key=KEY, scale=2.0)
    mean, _ = after.get(ensemble.member.norm.state_index)

    assert len({float(y[0, 0]) for y in ys}) == N
    for i, member in enumerate(members):
        alone, own = pm.make_with_state(lambda member=member: member)()
        y, own = alone(X, own, key=keys[i], scale=2.0)
        assert_close(ys[i], y)
        assert_close(mean[i], own.get(alone.norm.state_index)[0])
    # The next call draws anew.
    again, _ = ensemble(X, after, key=KEY, scale=2.0)
    assert not np.allclose(again, ys)


def by_hand(arrays, x):
    def linear(w, b):
        product = jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))
        return product + jnp.broadcast_to(b, product.shape)

    return jax.vmap(linear)(*arrays)


def by_ensemble(arrays, x):
    return jax.tree.unflatten(jax.tree.structure(NETS), arrays)(x)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("of", ["forward", "gradient"])
def test_the_program_is_that_of_a_map_by_hand(of):
    def program(f):
        return f if of == "forward" else jax.grad(lambda a, x: jnp.mean(f(a, x) ** 2))

    arrays = jax.tree.leaves(NETS)
    assert operations(program(by_ensemble), arrays, X) == operations(program(by_hand), arrays, X)
