"""Functions on trees and State: the type of the tree that goes in comes out."""

from typing import Any, assert_type

import jax

import pytreemod as pm


class Layer(pm.Module):
    """A layer with a token."""

    weight: jax.Array
    count: pm.StateIndex[jax.Array]

    def __init__(self, size: int, *, key: jax.Array):
        self.weight = jax.random.normal(key, (size,))
        self.count = pm.StateIndex(key)

    def __call__(self, x: jax.Array, state: pm.State) -> tuple[jax.Array, pm.State]:
        """Count."""
        count = state.get(self.count)
        assert_type(count, jax.Array)
        return x, state.set(self.count, count + 1)


def split(layer: Layer, updates: Any) -> None:
    """Splitting, combining and changing keep the type."""
    arrays, rest = pm.partition(layer, pm.is_array)
    assert_type(arrays, Layer)
    assert_type(pm.combine(arrays, rest), Layer)
    assert_type(pm.filter(layer, pm.is_inexact_array, inverse=True), Layer)
    assert_type(pm.filter(layer, pm.by({"weight": True, ...: False})), Layer)
    assert_type(pm.apply_updates(layer, updates), Layer)
    assert_type(pm.inference_mode(layer), Layer)
    assert_type(pm.tree_inference(layer, value=False), Layer)
    assert_type(pm.with_mode(layer, p=0.1, inference=True), Layer)
    assert_type(pm.with_role(layer, "weight", "buffer"), Layer)
    assert_type(pm.tree_at(lambda t: t.weight, layer, layer.weight), Layer)
    assert_type(pm.tree_at(lambda t: (t.weight, t.count), layer, (1, 2)), Layer)
    assert_type(pm.tree_at("weight", layer, replace_fn=jax.numpy.sin), Layer)
    assert_type(pm.combine({"a": 1}, {"a": 2}), dict[str, int])
    assert_type(pm.error_if(layer, False, "never"), Layer)
    assert_type(pm.stack([layer, layer]), Layer)
    assert_type(pm.unstack(layer), list[Layer])
    assert_type(pm.filter_shard(layer, None), Layer)


def train(layer: Layer, gradients: Layer, rule: Any) -> None:
    """An optimizer is another of its kind after each step, and gives the model's own type."""
    opt = pm.Optimizer(pm.by({"weight": rule, ...: None}), before=rule).init(layer)
    assert_type(opt, pm.Optimizer)
    assert_type(opt.update(layer, grads=gradients, value=1.0), tuple[Layer, pm.Optimizer])


def ask(layer: Layer) -> None:
    """Questions about trees."""
    assert_type(pm.tree_equal(layer, layer), bool | jax.Array)
    assert_type(pm.tree_pformat(layer), str)
    assert_type(pm.is_array(layer), bool)
    assert_type(pm.select.path("weight") | pm.select.role("buffer"), pm.Selector)
    assert_type(~pm.select.type(Layer) & pm.select.at(lambda m: m.weight), pm.Selector)


def keep_state(key: jax.Array, x: jax.Array, pair: tuple[int, str]) -> None:
    """Models with State keep the signature of their class, and tokens the type of their values."""
    layer, state = pm.make_with_state(Layer)(3, key=key)
    assert_type(layer, Layer)
    assert_type(state, pm.State)
    assert_type(layer(x, state), tuple[jax.Array, pm.State])
    assert_type(state.substate(layer), pm.State)
    net = pm.stateful(layer, state).seed(key)
    assert_type(net, pm.nn.Stateful[Layer])
    assert_type(pm.stateful(layer), pm.nn.Stateful[Layer])
    assert_type(net.model, Layer)
    assert_type(net(x), tuple[Any, pm.nn.Stateful[Layer]])
    assert_type(net.apply(Layer.__call__, x)[1].split(2).join(), pm.nn.Stateful[Layer])
    assert_type(pm.StateIndex(pair), pm.StateIndex[tuple[int, str]])
    assert_type(state.get(pm.StateIndex(pair)), tuple[int, str])


def layers(key: jax.Array, x: jax.Array, state: pm.State) -> None:
    """Layers of `nn`."""
    linear = pm.nn.Linear(2, 3, key=key)
    assert_type(linear, pm.nn.Linear)
    model = pm.nn.Sequential([linear, pm.nn.Lambda(jax.nn.relu), pm.nn.Dropout(0.5)])
    assert_type(model, pm.nn.Sequential)
    assert_type(model[1:], pm.nn.Sequential)
    assert_type(len(model), int)
    assert_type(model(x, key=key), Any)
    assert_type(model(x, state), tuple[Any, pm.State])
    mlp = pm.nn.MLP(2, 3, 4, 1, key=key)
    assert_type(pm.filter_jit(mlp), pm.nn.MLP)
    assert_type(pm.filter_eval_shape(pm.nn.MLP, 2, 3, 4, 1, key=key), pm.nn.MLP)
