"""The checks that layers share."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, RngError, ShapeError
from pytreemod.module.classes import Module
from pytreemod.nn.arguments import (
    Title,
    check_dtype,
    check_key,
    own_arrays,
    split_key,
)
from tests.labels import label
from tests.nn.catalogue import CATALOGUE
from tests.nn.numbers_to_compare import assert_close, wave


@pytest.mark.parametrize("dtype", ["nonsense", int, "uint8", bool, 3.5], ids=label)
def test_what_is_no_floating_dtype_is_refused(dtype):
    """A word that names no dtype, integers, a value that is not a dtype."""
    with pytest.raises(ArgumentError, match=r"^f\(dtype\): expected a floating dtype, got "):
        check_dtype("f(dtype)", dtype)
    assert check_dtype("f(dtype)", "complex64") == jnp.complex64
    with pytest.raises(ArgumentError, match=r"^f\(dtype\): expected a floating dtype, got "):
        check_dtype("f(dtype)", "complex64", real=True)


@pytest.mark.parametrize("count", [2, 4])
def test_old_keys_are_words_of_32_bits(count):
    """Old keys have two or four words; other arrays of that shape are not keys."""
    words = jnp.zeros(count, jnp.uint32)

    assert check_key("f(key)", words) is words
    for other in (words.astype(int), words.astype(float), jnp.zeros((3, count), jnp.uint32)):
        with pytest.raises(RngError, match=r"^f\(key\): expected one random key, got "):
            check_key("f(key)", other)


def test_a_layer_is_called_by_its_class_and_the_fields_that_matter():
    """No arrays, one line."""
    layer = nn.Linear(3, 4, key=jax.random.key(0))

    assert str(Title(layer, "in_features")) == "Linear(in_features=3)"


# ---- own arrays

KEYS = jax.random.split(jax.random.key(0), 3)

WITH_ARRAYS = [entry for entry in CATALOGUE if jax.tree.leaves(entry.build()[0])]

every_layer_with_arrays = pytest.mark.parametrize("entry", WITH_ARRAYS, ids=lambda e: e.name)


def test_the_catalogue_has_every_layer():
    """The laws of all entries then apply to a layer that is added tomorrow."""
    layers = [entry.build()[0] for entry in CATALOGUE]
    # A cell needs a hidden state in its call, so the catalogue has it in an RNN.
    layers += [layer.cell for layer in layers if isinstance(layer, nn.RNN)]
    public = [value for value in vars(nn).values() if inspect.isclass(value)]
    named = {c for c in public if issubclass(c, Module) and "__call__" in dir(c)}

    missing = {c for c in named if not any(isinstance(layer, c) for layer in layers)}

    # These are not layers: `Stateful` calls its model, and `Shared` takes no input.
    assert missing == {nn.Stateful, nn.Shared}


MAPPED = r"map over them(, or make an Ensemble)?:\n      pm\.filter_vmap\(lambda "


@every_layer_with_arrays
@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.sampled
def test_several_layers_as_one_are_not_called_as_one(entry, members):
    """Refused eagerly, under jit, and in a map that leaves the layers out; the text maps them."""
    described = jax.eval_shape(pm.filter_vmap(nn.make_with_state(entry.make)), KEYS[:members])
    layers, states = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), described)
    xs = jnp.stack([jnp.asarray(entry.x)] * members)

    def call(layers, x):
        return entry.apply(layers, states, x)[0]

    for calling in (call, jax.jit(call)):
        with pytest.raises(ShapeError, match=MAPPED):
            calling(layers, jnp.asarray(entry.x))
    for mapped in (jax.vmap(call, (None, 0)), pm.filter_vmap(call, in_axes=(None, 0))):
        with pytest.raises(ShapeError, match="filter_vmap"):
            mapped(layers, xs)


@every_layer_with_arrays
@pytest.mark.sampled
def test_an_array_of_another_shape_is_refused(entry):
    """One entry more, or a single one, on any axis of any array, also where it would broadcast."""
    layer, state = entry.build()

    for path, leaf in jax.tree_util.tree_leaves_with_path(layer):
        for axis in range(leaf.ndim):
            for size in {1, leaf.shape[axis] + 1} - {leaf.shape[axis]}:
                shape = (*leaf.shape[:axis], size, *leaf.shape[axis + 1 :])
                other = replaced(layer, path, jnp.ones(shape, leaf.dtype))
                with pytest.raises(ShapeError, match=r"expected .*, got "):
                    shapes_of_a_call(entry, other, state)


@every_layer_with_arrays
@pytest.mark.sampled
def test_an_array_that_is_missing_is_refused(entry):
    """As after `partition`, whose halves are not layers: a missing bias is not ignored."""
    layer, state = entry.build()
    leaves = jax.tree_util.tree_leaves_with_path(layer)
    own = [path for path, _ in leaves if path[-1].name in ("weight", "bias", "negative_slope")]

    assert own
    for path in own:
        other = replaced(layer, path, None)
        with pytest.raises(ShapeError, match=r"expected .*, got None"):
            shapes_of_a_call(entry, other, state)


@pytest.mark.parametrize("label_of", ["a", True], ids=["labels", "mask"])
@every_layer_with_arrays
def test_a_tree_of_labels_that_is_called_says_how_it_is_given(entry, label_of):
    """A Module is callable, so a parameter for a tree or a function would call it."""
    layer, _ = entry.build()
    labels = jax.tree.map(lambda leaf: label_of, layer)

    with pytest.raises(ArgumentError, match=r"wrap it:\n      lambda _: labels"):
        labels(layer)


def test_an_optimizer_is_given_a_model_of_labels():
    """The hint works; the code that it corrects raises the error with this hint."""
    model = nn.MLP(2, 1, 2, 1, key=jax.random.key(0))
    rules = {"a": optax.sgd(1.0), "b": optax.sgd(2.0)}
    labels = pm.by({"layers.0.**": "a", ...: "b"})(model)

    optimizer = optax.multi_transform(rules, lambda _: labels)
    updates, _ = optimizer.update(model, optimizer.init(model), model)
    assert_close(updates.layers[0].weight, -model.layers[0].weight)
    assert_close(updates.layers[1].weight, -2 * model.layers[1].weight)


def shapes_of_a_call(entry, layer, state):
    """The shapes of a layer's output; the State remains new."""
    return jax.eval_shape(lambda layer, state: entry.apply(layer, state)[0], layer, state)


def replaced(tree, path, new):
    """The tree with one leaf exchanged."""
    return jax.tree_util.tree_map_with_path(lambda p, leaf: new if p == path else leaf, tree)


@given(shape=st.lists(st.integers(1, 3), max_size=4).map(tuple))
def test_every_shape_but_that_of_the_configuration_is_refused(shape):
    """Of a weight of (2, 3); where an axis is too many or lacks, the text says how to map."""
    layer = LINEAR.replace(weight=np.ones(shape, np.float32))

    if shape == (2, 3):
        assert layer(jnp.ones(3)).tolist() == [3, 3]
    else:
        hint = "filter_vmap" if len(shape) > 2 or shape == (3,) else "replace"
        text = rf"^Linear\(.*\): expected weight of shape \(2, 3\), got f32\[(.|\n)*{hint}"
        with pytest.raises(ShapeError, match=text):
            layer(jnp.ones(3))


LINEAR = nn.Linear(3, 2, use_bias=False, key=jax.random.key(0))


def test_the_text_shows_both_ways_out():
    """A map for layers made as one; a layer of the right sizes for an array that was put in."""
    layers = pm.filter_vmap(lambda key: nn.Linear(4, 4, key=key))(KEYS)

    xs = jnp.asarray(wave(3, 4))
    out = pm.filter_vmap(lambda m, x: m(x))(layers, xs)
    assert_close(out, [layer(x) for layer, x in zip(pm.unstack(layers), xs, strict=True)])
    assert_close(nn.Ensemble.from_members(pm.unstack(layers))(xs, in_axes=0), out)


class Halved(Module):
    """A leaf that becomes an array only in a computation, and has no shape."""

    twice: jax.Array

    def __jax_array__(self):
        return self.twice / 2


@pytest.mark.parametrize(
    "change",
    [
        np.asarray,
        np.ndarray.tolist,
        lambda weight: Halved(jnp.asarray(2 * weight)),
        lambda weight: jnp.asarray(weight, jnp.bfloat16),
    ],
    ids=["NumPy", "list", "computed", "bfloat16"],
)
def test_what_can_be_computed_with_counts_by_its_shape(change):
    """An array of NumPy, lists, a wrapper, another dtype; each refused if there are several."""
    weight, x = np.arange(6, dtype=np.float32).reshape(2, 3), jnp.ones(3)
    layer = LINEAR.replace(weight=change(weight))

    with jax.numpy_dtype_promotion("standard"):
        assert layer(x).tolist() == jax.jit(lambda x: layer(x))(x).tolist() == [3, 12]


def test_a_wrapper_is_computed_once_in_a_program():
    """Its shape is found out without an operation in the program."""
    program = jax.make_jaxpr(LINEAR.replace(weight=Halved(jnp.ones((2, 3)))))(jnp.ones(3))

    assert str(program).count(" div ") == 1


@every_layer_with_arrays
def test_shapes_alone_are_enough(entry):
    """Under eval_shape, where the arrays are only described."""
    layer, state = entry.build()

    described = jax.eval_shape(lambda: entry.build())

    assert shapes_of_a_call(entry, *described) == shapes_of_a_call(entry, layer, state)


def test_arrays_come_in_the_order_asked_for():
    """None means that an array is absent."""
    layer = nn.Linear(3, 2, key=jax.random.key(0))

    bias, weight = own_arrays(Title(layer), "bias", "weight")

    assert bias is layer.bias
    assert weight is layer.weight
    assert own_arrays(Title(LINEAR), "bias") == (None,)


def general():
    """A layer over several axes."""
    return nn.LinearGeneral(3, (2, 2), key=KEYS[0])


def products():
    """A layer with an equation or axes for its sum."""
    return nn.Einsum("...i,io->...o", (3, 2), key=KEYS[0])


def adaptive():
    """A layer with the size of its output as an argument."""
    return nn.AdaptiveAvgPool1d(2)


def transposed():
    """A layer whose arguments must go together."""
    return nn.ConvTranspose1d(3, 2, 3, 2, key=KEYS[0])


@pytest.mark.parametrize("n", [0, 1, 2, 16, 17])
@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey], ids=["typed", "words"])
@pytest.mark.sampled
def test_the_parts_of_a_key_are_jaxs(make, n):
    """However many are taken out at once: the first numbers of layers are Equinox's."""
    key = make(3)
    parts = split_key("here", key, n)

    assert len(parts) == n
    for part, expected in zip(parts, jax.random.split(key, n), strict=True):
        np.testing.assert_array_equal(jax.random.bits(part, (2,)), jax.random.bits(expected, (2,)))


def test_splitting_a_key_leaves_no_call_in_a_program():
    """Outside of `jit` the split is a separate program; inside, it is lowered as by JAX alone."""
    key = jax.random.key(0)

    def lowered(split):
        return jax.jit(split).lower(key).as_text()

    ours = lowered(lambda key: tuple(split_key("here", key, 2)))
    assert ours.count("call @") == lowered(lambda k: tuple(jax.random.split(k, 2))).count("call @")


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (nn.Stack(lambda key: nn.Linear(2, 2, key=key), 3, key=jax.random.key(0)), "depth"),
        (nn.Ensemble(lambda key: nn.Linear(2, 2, key=key), 3, key=jax.random.key(0)), "n"),
    ],
)
def test_the_number_of_layers_changes_with_the_layers_alone(layer, name):
    """By `replace` and `with_mode`; the call would find it much later."""

    assert nn.with_mode(layer, **{name: 3}) == layer
    holder = {"depth": "layer", "n": "member"}[name]
    two = jax.tree.map(lambda array: array[:2], getattr(layer, holder))
    shorter = layer.replace(**{name: 2, holder: two})
    assert [*map(len, jax.tree.leaves(shorter))] == [2, 2]
