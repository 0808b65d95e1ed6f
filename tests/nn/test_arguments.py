"""A layer and its own arrays: their shapes are the layer's, and several layers are not one."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, ShapeError
from tests.nn.catalogue import CATALOGUE
from tests.nn.numbers_to_compare import assert_close, wave

KEYS = jax.random.split(jax.random.key(0), 3)
LINEAR = nn.Linear(3, 2, use_bias=False, key=jax.random.key(0))
NAMES = ("Linear", "Conv2d", "LayerNorm", "BatchNorm", "LSTMCell over time", "MultiheadAttention")
some_layers = pytest.mark.parametrize(
    "entry", [entry for entry in CATALOGUE if entry.name in NAMES], ids=lambda entry: entry.name
)


def test_the_catalogue_has_every_layer():
    """The laws of all entries then apply to a layer that is added tomorrow."""
    layers = [entry.build()[0] for entry in CATALOGUE]
    # A cell needs a hidden state in its call, so the catalogue has it in an RNN.
    layers += [layer.cell for layer in layers if isinstance(layer, nn.RNN)]
    public = [value for value in vars(nn).values() if inspect.isclass(value)]
    named = {c for c in public if issubclass(c, pm.Module) and "__call__" in dir(c)}

    missing = {c for c in named if not any(isinstance(layer, c) for layer in layers)}

    # These are not layers: `Stateful` calls its model, and `Shared` takes no input.
    assert missing == {nn.Stateful, nn.Shared}


@some_layers
def test_several_layers_as_one_are_not_called_as_one(entry):
    """Their arrays would broadcast: refused eagerly, under jit, and in a map that skips them."""
    described = jax.eval_shape(pm.filter_vmap(nn.make_with_state(entry.make)), KEYS)
    layers, states = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), described)
    xs = jnp.stack([jnp.asarray(entry.x)] * 3)

    def call(layers, x):
        return entry.apply(layers, states, x)[0]

    for calling in (call, jax.jit(call)):
        with pytest.raises(ShapeError, match="filter_vmap"):
            calling(layers, xs[0])
    with pytest.raises(ShapeError, match="filter_vmap"):
        jax.vmap(call, (None, 0))(layers, xs)


@some_layers
def test_an_array_of_another_shape_or_none_is_refused(entry):
    """One entry more, or a single one, on any axis; and none, as after `partition`."""
    layer, state = entry.build()

    for path, leaf in jax.tree_util.tree_leaves_with_path(layer):
        others = [None] if path[-1].name in ("weight", "bias") else []
        for axis in range(leaf.ndim):
            for size in {1, leaf.shape[axis] + 1} - {leaf.shape[axis]}:
                others.append(jnp.ones((*leaf.shape[:axis], size, *leaf.shape[axis + 1 :])))
        for other in others:
            changed = jax.tree_util.tree_map_with_path(
                lambda p, leaf, path=path, other=other: other if p == path else leaf, layer
            )
            with pytest.raises(ShapeError, match=path[-1].name):
                jax.eval_shape(lambda m, s: entry.apply(m, s)[0], changed, state)


def test_the_ways_to_call_several_layers():
    """By a map, or as an Ensemble."""
    layers, xs = pm.filter_vmap(lambda key: nn.Linear(4, 4, key=key))(KEYS), jnp.asarray(wave(3, 4))

    out = pm.filter_vmap(lambda m, x: m(x))(layers, xs)

    assert_close(out, [layer(x) for layer, x in zip(pm.unstack(layers), xs, strict=True)])
    assert_close(nn.Ensemble.from_members(pm.unstack(layers))(xs, in_axes=0), out)


class Halved(pm.Module):
    """A leaf that becomes an array only in a computation, and has no shape."""

    twice: jax.Array

    def __jax_array__(self):
        return self.twice / 2


@pytest.mark.parametrize(
    "change",
    [np.asarray, np.ndarray.tolist, lambda weight: Halved(jnp.asarray(2 * weight))],
    ids=["NumPy", "list", "computed"],
)
def test_what_can_be_computed_with_counts_by_its_shape(change):
    """An array of NumPy, lists, a wrapper, which is computed once."""
    weight, x = np.arange(6, dtype=np.float32).reshape(2, 3), jnp.ones(3)
    layer = LINEAR.replace(weight=change(weight))

    with jax.numpy_dtype_promotion("standard"):
        assert layer(x).tolist() == jax.jit(lambda x: layer(x))(x).tolist() == [3, 12]
        assert str(jax.make_jaxpr(layer)(x)).count(" div ") <= 1


def test_a_tree_of_labels_is_wrapped_for_an_optimizer():
    """A Module is callable, so a parameter for a tree or a function would call it."""
    model = nn.MLP(2, 1, 2, 1, key=jax.random.key(0))
    rules = {"a": optax.sgd(1.0), "b": optax.sgd(2.0)}
    labels = pm.by({"layers.0.**": "a", ...: "b"})(model)

    with pytest.raises(ArgumentError, match="label"):
        labels(model)
    optimizer = optax.multi_transform(rules, lambda _: labels)
    updates, _ = optimizer.update(model, optimizer.init(model), model)
    assert_close(updates.layers[0].weight, -model.layers[0].weight)
    assert_close(updates.layers[1].weight, -2 * model.layers[1].weight)
