"""`stateful`: a model and its State as one value."""

import copy
import functools as ft

import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, StateError
from tests.helpers.equations import equations
from tests.nn.numbers_to_compare import assert_close

X = jnp.asarray([[1.0, 2.0], [3.0, 5.0], [2.0, 4.0]])
EACH = pm.by({pm.RngStream: 0, ...: None})


class Coder(pm.Module):
    """A model with a method and no `__call__`."""

    norm: nn.BatchNorm

    def encode(self, x, state):
        return self.norm(x, state)


def coder():
    return Coder(nn.BatchNorm(2))


def linear():
    return nn.Linear(2, 2, key=jax.random.key(0))


def dropout():
    return nn.Dropout(0.5, stream=pm.RngStream())


def plain():
    return nn.Sequential([linear(), nn.Lambda(jnp.tanh)])


def normed():
    return nn.Sequential([linear(), nn.BatchNorm(2)])


def noisy():
    return nn.Sequential([nn.BatchNorm(2), dropout(), linear()])


def seeded(model):
    return pm.stateful(model).seed(jax.random.key(1))


def loss(net, x):
    out, net = net(x)
    return jnp.mean(jnp.square(out)), net


def update(net, x):
    """A step of plain gradient descent: nothing in it speaks of State."""
    (value, net), grads = pm.filter_value_and_grad(loss, has_aux=True)(net, x)
    return pm.apply_updates(net, jax.tree.map(lambda g: -0.1 * g, grads)), value


def assert_equal(a, b):
    jax.tree.map(assert_close, jax.tree.leaves(a), jax.tree.leaves(b))


def test_a_call_is_the_models_call_with_its_state():
    """The output, and the State afterwards, are those of the model called by hand."""
    model, state = pm.make_with_state(noisy)()
    state = state.seed(jax.random.key(1))
    expected, after = model(X, state)

    out, net = seeded(noisy())(X)

    assert_equal(out, expected)
    assert_equal(net.state, after)
    assert_equal(pm.stateful(model, state.restored())(X)[0], expected)
    assert_equal(pm.stateful(linear())(X)[0], linear()(X))
    assert pm.tree_equal(net.model, model)


@pytest.mark.parametrize("make", [plain, normed, noisy])
def test_one_training_code_serves_all_models(make):
    """With statistics, with streams, with neither; compiled, with the old net donated."""
    traces = []

    @pm.filter_jit(donate=("net",))
    def step(net, x):
        traces.append(net)
        return update(net, x)

    net = seeded(make())
    values = []
    for _ in range(20):
        net, value = step(net, X)
        values.append(float(value))

    assert pm.inference_mode(net)(X)[0].shape == X.shape
    assert len(traces) == 1
    assert len(set(values)) == 20
    assert make is noisy or values[-1] < values[0]


def test_inference_returns_the_pair_and_the_same_net():
    """Nothing changed, so the net may be called again, and training goes on from it."""
    _, net = pm.stateful(nn.BatchNorm(2))(X)
    ready = pm.inference_mode(net)

    first, again = ready(X)
    second, _ = ready(X)

    assert again is ready
    assert_equal(first, second)
    assert update(net, X)[0].state != net.state


class Compiled(nn.StatefulLayer):
    """Hands back a new State even where nothing in it has changed, as all compiled code does."""

    layer: nn.BatchNorm

    def __call__(self, x, state, *, key=None):
        return pm.filter_jit(self.layer)(x, state)


def test_a_net_in_another_mode_does_not_use_up_this_one():
    """An evaluation leaves the net unchanged, ready for further training."""
    net = pm.stateful(Compiled(nn.BatchNorm(2)))

    out, ready = pm.inference_mode(net)(X)

    assert_equal(out, ready(X)[0])
    update(net, X)


@pytest.mark.parametrize(
    "call",
    [Coder.encode, lambda model, x, state: model.encode(x, state), ft.partial(Coder.encode)],
    ids=["method", "lambda", "partial"],
)
def test_other_methods_are_applied(call):
    model, state = pm.make_with_state(coder)()
    expected, after = model.encode(X, state)

    out, net = pm.stateful(coder()).apply(call, X)

    assert_equal(out, expected)
    assert net.state == after


def test_seed_split_and_join_are_those_of_the_state():
    """Members draw different noise from one net, and afterwards there is one stream again."""
    net = pm.stateful(dropout()).seed(jax.random.key(1))
    state = net.state.substate(net.model)

    call = pm.filter_vmap(lambda net: net(jnp.ones(64)), in_axes=(EACH,), out_axes=(0, EACH))
    out, split = call(net.split(4))
    joined = split.join()

    assert len({*map(tuple, out.tolist())}) == 4
    assert_equal(joined.state, state.split(4).join())


@pytest.mark.usefixtures("optimized")
def test_the_program_is_the_one_with_state_passed_by_hand():
    model, state = pm.make_with_state(noisy)()
    state = state.seed(jax.random.key(1))

    def by_hand(model, state, x):
        def loss_of(model, state):
            out, state = model(x, state)
            return jnp.mean(jnp.square(out)), state

        (value, state), grads = pm.filter_value_and_grad(loss_of, has_aux=True)(model, state)
        return pm.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), state, value

    assert equations(update, seeded(noisy()), X) == equations(by_hand, model, state, X)


def test_an_old_net_is_refused_and_may_be_restored():
    """By calls, methods and transforms: an update would be lost."""
    net = pm.stateful(nn.BatchNorm(2))
    before = copy.deepcopy(net)
    _, after = net(X)

    uses = [
        lambda: net(X),
        lambda: net.seed(jax.random.key(0)),
        lambda: net.split(2),
        net.join,
        lambda: pm.filter_jit(update)(net, X),
    ]
    for use in uses:
        with pytest.raises(StateError, match=r"net|State"):
            use()
    assert net.restored() == before
    assert net.restored()(X)[1] == after


@pytest.mark.parametrize(
    ("use", "error", "word"),
    [
        (lambda: pm.stateful(normed(), pm.State(nn.BatchNorm(2))), StateError, "token"),
        (lambda: pm.stateful(pm.make_with_state(nn.BatchNorm)(2)[0]), StateError, "model"),
        (lambda: pm.stateful(jnp.tanh), ArgumentError, "a model, got the function tanh"),
        (
            lambda: pm.stateful(coder()).apply(lambda model, x, state: (state, x), X),
            StateError,
            "state",
        ),
    ],
)
def test_what_is_refused(use, error, word):
    """The State of another model, two of them; a result in the wrong order."""
    with pytest.raises(error, match=word):
        use()
