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
from pytreemod.errors import ArgumentError, ShapeError, SpecError, StateError
from tests.helpers.equations import equations, operations
from tests.helpers.laws import law
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close, wave

N = 3
X = jnp.asarray(wave(5, 2))
XS = jnp.asarray(wave(N, 5, 2))
KEY = jax.random.key(0)
make_mlp = ft.partial(nn.MLP, 2, 2, 4, 1)


@ft.cache
def nets(shared=None):
    """Small networks, made once for each way of sharing."""
    return nn.Ensemble(make_mlp, N, key=KEY, shared=shared)


class Noisy(pm.Module):
    """A member with statistics, a stream, and a layer that uses a key."""

    linear: nn.Linear
    norm: nn.BatchNorm
    dropout: nn.Dropout
    noise: pm.RngStream

    def __init__(self, axis_name=None, *, key):
        self.linear = nn.Linear(2, 2, key=key)
        self.norm = nn.BatchNorm(2, axis_name)
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


class Tied(pm.Module):
    """An embedding whose weight is the head's, too."""

    embed: nn.Embedding
    head: nn.Linear

    def __init__(self, *, key):
        one, two = jax.random.split(key)
        self.embed = nn.Embedding(4, 2, key=one)
        self.head = nn.Linear(2, 4, key=two)

    def __call__(self, i):
        return self.head(self.embed(i))


def make_tied(key):
    """A tied member."""
    return pm.tie(Tied(key=key), "head.weight", to="embed.weight")


class LowRank(pm.Computed):
    """A matrix and a product."""

    base: jax.Array
    a: jax.Array
    b: jax.Array

    def value(self):
        return self.base + self.a @ self.b


def make_low_rank(key):
    """A member whose weight is computed."""
    one, two = jax.random.split(key)
    linear = nn.Linear(2, 2, key=one)
    a, b = jax.random.normal(two, (2, 2, 1))
    return linear.replace(weight=LowRank(linear.weight, a, b.T))


# ---- results


@settings(law, max_examples=12)
@given(
    st.sampled_from([1, 3]),
    st.sampled_from([None, "weight", "bias"]),
    st.sampled_from([None, 0, 1, -1]),
    st.integers(0, 2**31 - 1),
)
def test_law_of_the_members(n, shared, axis, seed):
    """`nets(xs, in_axes=a)[i] == nets[i](take(xs, i, a))`, and without an axis all get `xs`."""
    ensemble = nn.Ensemble(ft.partial(nn.Linear, 2, 3), n, key=jax.random.key(seed), shared=shared)
    xs = jnp.asarray(wave(n, 2)) if axis is not None else X
    xs = xs if axis is None else jnp.moveaxis(xs, 0, axis)
    ys = ensemble(xs, in_axes=axis)

    assert len(ys) == n
    for i, y in enumerate(ys):
        assert_close(y, ensemble[i](xs if axis is None else jnp.take(xs, i, axis)))


def test_members_are_made_with_keys_of_their_own():
    """As `filter_vmap` over the constructor makes them; shared leaves are the first member's."""
    keys = jax.random.split(KEY, N)
    alone = [make_mlp(key=key) for key in keys]
    mapped = pm.filter_vmap(lambda key: make_mlp(key=key))(keys)

    assert nets().member == mapped
    assert_close(nets()[1].layers[0].weight, alone[1].layers[0].weight)
    for member in nets("layers[0]"):
        assert_close(member.layers[0].weight, alone[0].layers[0].weight)
    assert nn.Ensemble(make_mlp, N, key=pm.init_keys(KEY)).n == N


def test_several_arguments_have_an_axis_or_none():
    """One for each by position, or any by name; State and key have no say in it."""
    pair = nn.Ensemble(Pair, N, key=KEY)
    a, b, mask = {"x": XS}, X, jnp.arange(N) > 0
    expected = jnp.stack([m({"x": XS[i]}, X, mask=mask[i]) for i, m in enumerate(pair)])

    ys = pair(a, b, mask=mask, in_axes={"a": 0, "mask": 0})
    assert_close(ys, expected)
    ys = pair(a, b, in_axes=(pm.by({"x": 0}), None))
    assert_close(ys[1:], expected[1:])
    # Keyword arguments are for all members, unless in_axes names them.
    ys = pair(a, XS, mask=jnp.asarray(True), in_axes=0)
    assert_close(ys[2], pair[2]({"x": XS[2]}, XS[2]))


def test_a_key_is_split_between_the_members():
    """Each as if it were called with its own; without one, or where none is used, none is split."""
    dropouts = nn.Ensemble(lambda: nn.Dropout(0.5), N)
    ys = dropouts(X, key=KEY)

    for y, key in zip(ys, jax.random.split(KEY, N), strict=True):
        assert_close(y, nn.Dropout(0.5)(X, key=key))
    assert "random_split" not in equations(lambda x: nets()(x, key=KEY), X)


def test_the_gradient_of_what_is_shared_is_the_sum():
    """And that of each member is its own."""
    ensemble = nets("layers[0]")

    def loss(net):
        return jnp.sum(net(X) ** 2)

    grads = pm.filter_jit(pm.filter_grad(loss))(ensemble)
    alone = [pm.filter_grad(loss)(member) for member in ensemble]

    assert_close(grads.member.layers[0].weight, sum(g.layers[0].weight for g in alone), rtol=1e-4)
    for i, grad in enumerate(alone):
        assert_close(grads.member.layers[1].weight[i], grad.layers[1].weight, rtol=1e-4)
        assert_close(grads[i].layers[1].weight, grad.layers[1].weight, rtol=1e-4)


@pytest.mark.parametrize(
    ("make", "shared", "i"),
    [
        (make_tied, None, jnp.arange(3)),
        (make_tied, "embed", jnp.arange(3)),
        (make_low_rank, None, X),
        (make_low_rank, "weight.base", X),
    ],
    ids=label,
)
@pytest.mark.slow
def test_ties_and_computed_leaves_work_inside(make, shared, i):
    """Also if a part of the fields of a computed leaf is shared."""
    ensemble = nn.Ensemble(make, N, key=KEY, shared=shared)
    ys = pm.filter_jit(ensemble)(i)

    for y, member in zip(ys, ensemble, strict=True):
        assert_close(y, member(i))
    assert nn.Ensemble.from_members(list(ensemble), shared=shared) == ensemble
    grads = pm.filter_grad(lambda net: jnp.sum(net(i)))(ensemble)
    assert [g.shape for g in jax.tree.leaves(grads)] == [x.shape for x in jax.tree.leaves(ensemble)]


# ---- as a sequence


def test_members_are_taken_by_number_and_by_slice():
    """One member is a plain Module; several are an Ensemble with the same shared leaves."""
    ensemble = nets("layers[0]")

    assert (len(ensemble), ensemble.n) == (N, N)
    assert isinstance(ensemble[0], nn.MLP)
    assert ensemble[-1] == ensemble[2] == ensemble.unstack()[2] == list(ensemble)[2]
    assert ensemble[np.int64(1)] == ensemble[1]
    part = ensemble[1:]
    assert (type(part), part.n, part.shared) == (nn.Ensemble, 2, ("layers[0]",))
    assert part.member.layers[0].weight.shape == (4, 2)
    assert_close(part(X), ensemble(X)[1:])


@pytest.mark.parametrize("shared", [None, "layers[0]"], ids=label)
def test_members_and_ensemble_become_one_another(shared):
    """Under jit, too, where shared leaves are recognized as the same array."""
    ensemble = nets(shared)

    assert nn.Ensemble.from_members(ensemble.unstack(), shared=shared) == ensemble

    @pm.filter_jit
    def again(ensemble):
        return nn.Ensemble.from_members(iter(ensemble), shared=shared)

    assert again(ensemble) == ensemble


# ---- as a value


def test_what_is_put_in_the_place_of_a_shared_part_is_shared():
    """Whatever it is made of."""
    ensemble = nets("layers[0]")
    low_rank = LowRank(jnp.ones((4, 2)), jnp.ones((4, 1)), jnp.ones((1, 2)))
    new = pm.tree_at("member.layers[0].weight", ensemble, low_rank)

    assert ensemble.shared == ("layers[0]",)
    for y, member in zip(new(X), new, strict=True):
        assert_close(y, member(X))
    member = ensemble.replace(member=pm.inference_mode(ensemble.member))
    assert_close(member(X), ensemble(X))


@pytest.mark.slow
def test_it_stands_inside_of_other_models():
    """In a Sequential, in an Ensemble, mapped, scanned and in a Stack."""
    ensemble = nets()
    net = nn.Sequential([ensemble, nn.Lambda(lambda ys: ys.mean(0))])
    assert_close(net(X, key=KEY), ensemble(X).mean(0))

    nested = nn.Ensemble(lambda key: nn.Ensemble(make_mlp, 2, key=key), N, key=KEY)
    assert_close(nested(X)[1, 0], nested[1][0](X))
    several = pm.stack([ensemble, nn.Ensemble(make_mlp, N, key=jax.random.key(1))])
    mapped = pm.filter_vmap(lambda nets, x: nets(x), in_axes=(0, None))(several, X)
    assert_close(mapped[0], ensemble(X))
    with pytest.raises(ShapeError, match="leading axis"):
        several(X)
    _, ys = pm.filter_scan(lambda carry, x: (carry, ensemble(x)), None, XS)
    assert_close(ys[1], ensemble(XS[1]))
    stack = nn.Stack(lambda key: nn.Ensemble(make_mlp, N, key=key), 2, key=KEY)
    assert_close(stack(XS, in_axes=0)[2], stack[1][2](stack[0][2](XS[2])))
    stacks = nn.Ensemble(lambda key: nn.Stack(make_mlp, 2, key=key), N, key=KEY)
    assert_close(stacks(X)[2], stacks[2](X))


# ---- State and random streams


def make_noisy(axis_name=None, **options):
    """Members with State, seeded."""
    make = pm.make_with_state(nn.Ensemble)
    ensemble, state = make(ft.partial(Noisy, axis_name), N, key=KEY, **options)
    return ensemble, state.seed(jax.random.key(1))


@pytest.mark.slow
def test_each_member_has_state_and_streams_of_its_own():
    """As each has that is filled with its part, and called alone."""
    ensemble, state = make_noisy()
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


def test_statistics_come_over_a_mapped_batch():
    """By `axis_name`, each member's over the batch that it gets."""
    ensemble, state = make_noisy("batch")
    call = jax.vmap(ensemble, in_axes=(0, None), out_axes=(1, None), axis_name="batch")
    ys, after = pm.filter_jit(call)(X, state)
    mean, _ = after.get(ensemble.member.norm.state_index)
    hidden = jnp.stack([member.linear(X) for member in ensemble])

    assert ys.shape == (N, 5, 2)
    assert_close(mean, 0.01 * hidden.mean(1), rtol=1e-4)


class Reading(pm.Module):
    """Reads a token that it is given, and may write to it."""

    writes: bool = pm.field(static=True)

    def __call__(self, x, state, *, count):
        n = state.get(count)
        return x + n, state.set(count, n + 1) if self.writes else state


def test_a_token_from_elsewhere_is_read_and_not_written():
    """Members have no order, in which one could count on from the other."""
    count = pm.StateIndex(jnp.asarray(2.0))
    reading = nn.Ensemble(lambda: Reading(False), N)
    ys, after = reading(X, pm.State(count), count=count)
    assert_close(ys[1], X + 2)
    assert float(after.get(count)) == 2

    with pytest.raises(StateError, match="count"):
        nn.Ensemble(lambda: Reading(True), N)(X, pm.State(count), count=count)


def test_members_share_arrays_and_keep_their_state():
    """A selector leaves the tokens out: of a BatchNorm the scale is shared, not its statistics."""
    chosen = nn_without_tokens("norm")
    ensemble, state = make_noisy(shared=chosen)
    _, after = ensemble(X, state)

    assert ensemble.shared == ("norm.weight", "norm.bias")
    assert after.get(ensemble.member.norm.state_index)[0].shape == (N, 2)


def nn_without_tokens(path):
    """The arrays of a part, except those in tokens."""
    return pm.select.path(path) & ~pm.select.type(pm.StateIndex, pm.RngStream)


# ---- the program


def by_hand(arrays, x):
    """The map that one would write without the library; the first layer is one for all."""
    (w1, b1), (w2, b2) = arrays

    def linear(x, w, b):
        product = jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))
        return product + jnp.broadcast_to(b, product.shape)

    def member(w2, b2):
        return linear(jax.nn.relu(linear(x, w1, b1)), w2, b2)

    return jax.vmap(member)(w2, b2)


def by_ensemble(arrays, x):
    """The same by an Ensemble of these arrays."""
    structure = jax.tree.structure(nets("layers[0]"))
    return jax.tree.unflatten(structure, jax.tree.leaves(arrays))(x)


def as_pairs(ensemble):
    """The arrays of the two layers."""
    leaves = jax.tree.leaves(ensemble)
    return (leaves[0], leaves[1]), (leaves[2], leaves[3])


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("of", ["forward", "gradient"])
def test_the_program_is_that_of_a_map_by_hand(of):
    """The same operations once compiled, forward and backward."""

    def program(f):
        return f if of == "forward" else jax.grad(lambda a, x: jnp.mean(f(a, x) ** 2))

    arrays = as_pairs(nets("layers[0]"))
    assert operations(program(by_ensemble), arrays, X) == operations(program(by_hand), arrays, X)


# ---- refusals


class Forgetting(pm.Module):
    """Gives back its output alone."""

    count: pm.StateIndex

    def __call__(self, x, state):
        return x


def forgetting():
    """Members with State, called with it."""
    make = pm.make_with_state(nn.Ensemble)
    ensemble, state = make(lambda: Forgetting(pm.StateIndex(jnp.asarray(0))), 2)
    return ensemble(X, state)


@pytest.mark.parametrize(
    ("use", "error", "word"),
    [
        (forgetting, StateError, "State"),
        (lambda: nets()(XS.T, in_axes=0), ShapeError, "x"),
        (lambda: nets()(XS, in_axes=(0, 0)), SpecError, "in_axes"),
        (lambda: nets()(XS, in_axes={"z": 0}), ArgumentError, "z"),
        (lambda: nn.Ensemble(make_mlp, 0, key=KEY), ArgumentError, "n"),
        (lambda: nets().replace(n=4), ArgumentError, "n"),
        (
            lambda: nn.Ensemble.from_members(list(nets()), shared="layers[0]"),
            ArgumentError,
            r"members\[1\]",
        ),
        (lambda: nn.Ensemble(make_mlp, 2, key=KEY, shared="layres"), SpecError, "layres"),
        (lambda: nn.Ensemble(make_mlp, 2, key=KEY, shared=...), SpecError, "shared"),
        (lambda: nn.Ensemble(lambda: nn.BatchNorm(2), 2, shared=...), StateError, "state_index"),
        (lambda: nn.Ensemble(lambda: pm.stateful(nn.BatchNorm(2)), 2), StateError, "State"),
        (lambda: nets()[N], IndexError, "3"),
    ],
)
def test_what_is_refused(use, error, word):
    """Lost State, axes that do not fit, shared arrays that differ or are none or all."""
    with pytest.raises(error, match=word):
        use()
