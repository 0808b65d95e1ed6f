"""Tests that run while beartype checks pytreemod's annotations: layers in many combinations.

tests/typing starts them in a separate process, with jaxtyping's option for pytest, together with
all examples in docstrings. The tests cover what examples leave out: every layer under the
transforms, ensembles, State, Stack, and their combinations.
"""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

import pytreemod as pm
from pytreemod import nn
from tests.nn.catalogue import CATALOGUE, Entry

KEY = jax.random.key(0)


class Block(nn.StatefulLayer):
    """A block with statistics, a stream, a counter, a buffer, and a sown value."""

    norm: nn.BatchNorm
    linear: nn.Linear
    dropout: nn.Dropout
    count: nn.StateIndex
    scale: jax.Array = pm.buffer()

    def __init__(self, size: int, *, key: Any):
        keys = pm.init_keys(key)
        self.norm = nn.BatchNorm(size)
        self.linear = nn.Linear(size, size, key=keys)
        self.dropout = nn.Dropout(0.5, stream=nn.RngStream())
        self.count = nn.StateIndex(jnp.zeros((), jnp.int32))
        self.scale = jnp.ones(())

    def __call__(self, x: Any, state: Any, *, key: Any = None) -> Any:
        """Normalize, mix, drop, count."""
        x, state = self.norm(x, state)
        x, state = self.dropout(x + self.linear(x), state, key=key)
        return pm.sow("mixed", self.scale * x), state.set(self.count, state.get(self.count) + 1)


def total(out: Any) -> Any:
    """A scalar of an output, for gradients."""
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(pm.filter(out, pm.is_inexact_array)))


@pytest.fixture(scope="module")
def made() -> Any:
    """Two blocks and a linear layer, with State."""

    def make(key: Any) -> nn.Sequential:
        keys = pm.init_keys(key)
        stack = nn.Stack(ft.partial(Block, 3), 2, key=keys)
        return nn.Sequential([stack, Block(3, key=keys), nn.Linear(3, 2, key=keys)])

    model, state = pm.make_with_state(make)(KEY)
    return model, state.seed(KEY)


@pytest.fixture
def model(made: Any) -> Any:
    """The model."""
    return made[0]


@pytest.fixture
def state(made: Any) -> Any:
    """Its State, a copy for each test."""
    return jax.tree.map(jnp.copy, made[1])


X = jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)


def test_annotations_are_checked() -> None:
    """Without the checks, the other tests would prove nothing."""
    bad: Any = 0
    with pytest.raises(TypeCheckError, match="out_features"):
        nn.Linear(3, "many", key=KEY)
    with pytest.raises(TypeCheckError, match="weight"):
        nn.functional.linear(X, bad)


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.name)
def test_layers_under_transforms(entry: Entry) -> None:
    """Called, compiled, differentiated, in an ensemble, and in inference mode."""
    layer, state = entry.build()
    out, _ = entry.apply(layer, state)

    @pm.filter_value_and_grad(has_aux=True)
    def loss(given: Any, state: Any) -> Any:
        layer, scale = given
        out, state = entry.apply(layer, state)
        return scale * total(out), state

    layer, state = entry.build()
    (_, state), (gradient, _) = pm.filter_jit(loss)((layer, jnp.ones(())), state)
    layer = pm.apply_updates(layer, gradient)
    pm.filter_jit(entry.apply)(pm.inference_mode(layer), state)

    keys = jax.random.split(KEY, 2)
    layers, states = pm.filter_vmap(nn.make_with_state(entry.make))(keys)
    states = pm.filter_vmap(lambda state, key: state.seed(key))(states, keys)
    outs, states = pm.filter_vmap(entry.apply, axis_size=2)(layers, states)
    pm.filter_vmap(entry.apply, axis_size=2)(pm.inference_mode(layers), states)

    assert jax.tree.leaves(outs)[0].shape == (2, *jax.tree.leaves(out)[0].shape)


def test_inputs_that_are_no_jax_arrays(model: Any, state: Any) -> None:
    """NumPy arrays and numbers."""
    assert model(np.ones((4, 3), np.float32), state)[0].shape == (4, 2)
    assert nn.Linear("scalar", 2, key=KEY)(2.0).shape == (2,)
    assert nn.Embedding(3, 2, key=KEY)(np.array([1])).shape == (1, 2)


def test_a_training_step(model: Any, state: Any) -> None:
    """Donated State, selected leaves, an unchanged buffer."""

    @pm.filter_jit(donate="state")
    def step(model: Any, state: Any, x: Any) -> Any:
        @pm.filter_value_and_grad(has_aux=True, wrt=~pm.select.type(nn.BatchNorm))
        def loss(model: Any) -> Any:
            out, new = model(x, state)
            return total(out), new

        (_, new), gradient = loss(model)
        return pm.apply_updates(model, gradient), new

    for _ in range(2):
        model, state = step(model, state, X)
    assert state.get(model[1].count) == 2


def test_an_ensemble_with_rules_for_its_state(model: Any, state: Any) -> None:
    """Members with their own streams, and everything else shared."""
    rule = pm.by({pm.RngStream: 0, ...: None})

    @pm.filter_vmap(in_axes=(None, rule, None), out_axes=0, axis_size=2)
    def run(model: Any, state: Any, x: Any) -> Any:
        return model(x, state)

    assert state.substate(model[1]).get(model[1].count) == 0
    assert run(model, state.split(2, pm.RngStream), X)[0].shape == (2, 4, 2)


def test_a_bundle_of_model_and_state(model: Any, state: Any) -> None:
    """Called, compiled, differentiated, scanned, split."""
    net = pm.stateful(model, state)
    y, net = pm.filter_jit(lambda net, x: net(x))(net, X)
    net, _ = pm.filter_scan(lambda net, x: net(x)[::-1], net, jnp.stack([X, X]))
    (_, net), gradient = pm.filter_value_and_grad(
        lambda net: (lambda out, net: (total(out), net))(*net(X)), has_aux=True
    )(net)
    net = pm.with_mode(pm.apply_updates(net, gradient), inference=True).seed(KEY)

    assert net.state.get(net.model[1].count) == 4
    assert net.split(2, pm.RngStream).join().apply(nn.Sequential.__call__, X)[0].shape == y.shape


def test_intermediate_values(model: Any, state: Any) -> None:
    """Sown and selected, through a Stack, a jit and a gradient."""
    chosen = pm.select.type(nn.BatchNorm) | pm.select.path("layers[1]")
    (_, _), seen = pm.capture(pm.filter_jit(model), chosen)(X, state)

    def loss(model: Any, state: Any) -> Any:
        out, state = model(X, state)
        return total(out), state

    (gradient, _), sown = pm.capture(pm.filter_grad(loss, has_aux=True))(model, state)

    assert "layers[1]" in seen
    assert sown
    assert isinstance(gradient, nn.Sequential)


def test_control_flow_over_models(model: Any, state: Any) -> None:
    """Loops carry models and State, and branches return them."""
    one = model[2]
    out = pm.filter_cond(X[0, 0] > 0, lambda m: m, lambda m: pm.apply_updates(m, m), one)
    out = pm.filter_switch(jnp.array(1), [lambda m: m, lambda m: m], out)
    out = pm.filter_fori_loop(0, 2, lambda _, m: pm.tree_at("bias", m, replace_fn=jnp.sin), out)
    out = pm.filter_while_loop(lambda m: jnp.any(m.bias > 9), lambda m: m, out)
    doubled = pm.filter_map(lambda x: one(x), X, batch_size=2)
    summed = pm.filter_associative_scan(pm.apply_updates, pm.stack([one, one]))

    assert isinstance(out, nn.Linear)
    assert doubled.shape == (4, 2)
    assert len(pm.unstack(summed)) == 2


def test_derivatives_of_models(model: Any) -> None:
    """Tangents, pullbacks, Jacobian matrices, custom rules."""
    one = model[2]
    call = pm.filter_checkpoint(lambda m, x: total(m(x)))
    tangent = jax.tree.map(jnp.ones_like, one)
    out, out_tangent = pm.filter_jvp(call, (one, X), (tangent, X))
    _, pull = pm.filter_vjp(call, one, X)
    _, push = pm.filter_linearize(call, one, X)

    @pm.filter_custom_vjp
    def doubled(m: Any, x: Any) -> Any:
        return total(m(x))

    doubled.def_fwd(lambda perturbed, m, x: (total(m(x)), None))
    doubled.def_bwd(
        lambda residuals, g, perturbed, m, x: jax.tree.map(lambda leaf: g + jnp.zeros_like(leaf), m)
    )

    assert out_tangent.shape == out.shape == push(tangent, X).shape
    assert isinstance(pull(out)[0], nn.Linear)
    assert isinstance(pm.filter_jacrev(lambda m: m(X[0]))(one), nn.Linear)
    assert isinstance(pm.filter_jacfwd(lambda m: m(X[0]))(one), nn.Linear)
    assert isinstance(pm.filter_hessian(lambda m: call(m, X))(one), nn.Linear)
    assert pm.filter_grad(doubled)(one, X).bias.tolist() == [1.0, 1.0]


def test_surgery_on_a_stack(model: Any, state: Any) -> None:
    """Slices, members, conversion, replacement, comparison, printing."""
    stack = model[0]
    again = nn.Stack.from_layers(stack.unstack())
    model = pm.with_mode(model, p=0.25, unroll=True)
    model = pm.tree_at("layers[2]", model, nn.Identity())

    assert len(stack[:1]) == 1
    assert isinstance(stack[1], Block)
    assert model(X, state)[0].shape == X.shape
    assert pm.tree_equal(again, again, rtol=0)
    assert "BatchNorm" in pm.tree_pformat(model)
    assert pm.tree_check(model) is None
    assert pm.filter_eval_shape(Block, 3, key=KEY).scale.shape == ()
