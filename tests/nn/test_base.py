"""What layers share: the shapes of their arrays, their calls, what users build their own from."""

import inspect
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import FieldWarning, ShapeError
from tests.nn.catalogue import CATALOGUE
from tests.nn.numbers_to_compare import assert_close

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

    # `Stateful` calls its model, `Shared` takes no input, and `Lazy` becomes another layer.
    assert missing == {nn.Stateful, nn.Shared, nn.Lazy}


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
def test_an_array_of_another_shape_is_refused(entry):
    """One entry more, or a single one, on any axis."""
    layer, state = entry.build()

    for path, leaf in jax.tree_util.tree_leaves_with_path(layer):
        for axis in range(leaf.ndim):
            for size in {1, leaf.shape[axis] + 1} - {leaf.shape[axis]}:
                other = jnp.ones((*leaf.shape[:axis], size, *leaf.shape[axis + 1 :]))
                changed = jax.tree_util.tree_map_with_path(
                    lambda p, leaf, path=path, other=other: other if p == path else leaf, layer
                )
                with pytest.raises(ShapeError, match=path[-1].name):
                    jax.eval_shape(lambda m, s: entry.apply(m, s)[0], changed, state)


class Dense(pm.Module):
    """A layer of a user's, copied from `Linear` and changed."""

    weight: Float[Array, "n_out *inner 2"]
    bias: Float[Array, " n_out"] | None
    free: Float[Array, " some"] | None
    n_in: int = pm.field(static=True)
    n_out: int = pm.field(static=True)

    @property
    def inner(self):
        return (self.n_in, 1)

    @nn.layer_call(features=("weight", 0, -1))
    def __call__(self, x, *, key=None):
        x = nn.check_shape(self, x, ..., self.n_in)
        y = jnp.inner(x, self.weight[..., 0, 0])
        return y if self.bias is None else y + jnp.broadcast_to(self.bias, y.shape)


def dense(**changes):
    return Dense(jnp.ones((3, 4, 1, 2)), jnp.zeros(3), None, 4, 3).replace(**changes)


def test_a_layer_of_a_user_has_the_contract_of_its_annotations():
    """Fields and properties are sizes, numbers count; arrays without names, and None, are free."""
    assert dense()(jnp.ones((5, 4))).shape == (5, 3)
    assert dense(bias=None, free=jnp.ones((7, 7)))(jnp.ones(4)).shape == (3,)
    for name, other in {"weight": jnp.ones((3, 4, 1, 1)), "bias": jnp.ones(4), "n_out": 5}.items():
        with pytest.raises(ShapeError, match=r"Dense\(n_out=."):
            dense(**{name: other})(jnp.ones(4))


def test_an_error_is_three_frames_below_the_call():
    """Of a layer: one that all layers share, its formula, and the check."""
    with pytest.raises(ShapeError, match="got f32") as caught:
        LINEAR(jnp.ones(5))

    assert len(traceback.extract_tb(caught.tb)) == 1 + 3


def test_operations_are_named_after_the_class():
    """In profiles: those of the library's layers begin with its name."""

    def names(layer, x):
        return jax.jit(lambda x: layer(x)).lower(x).as_text(debug_info=True)

    assert "pm.nn.Linear/" in names(LINEAR, jnp.ones(3))
    assert "pm.nn.Dense" not in names(dense(), jnp.ones(4))
    assert "Dense/" in names(dense(), jnp.ones(4))


def test_an_annotation_that_cannot_be_read_has_no_contract_and_warns_once():
    """Other annotations of the class still count."""

    class Hidden(pm.Module):
        weight: "Missing[Array, ' n']"
        bias: Float[Array, " n"]
        n: int = pm.field(static=True)

        @nn.layer_call()
        def __call__(self, x):
            return x

    layer = Hidden(jnp.ones(5), jnp.ones(3), 3)
    with pytest.warns(FieldWarning, match=r"Hidden\.weight"):
        layer(1.0)
    layer(1.0)  # Warnings are errors here.
    with pytest.raises(ShapeError, match="bias"):
        layer.replace(bias=jnp.ones(2))(1.0)


class Halved(pm.Module):
    """A leaf that becomes an array only in a computation, and has no shape."""

    twice: jax.Array

    def __jax_array__(self):
        return self.twice / 2


@pytest.mark.parametrize(
    "change",
    [
        np.asarray,
        lambda weight: Halved(jnp.asarray(2 * weight)),
        lambda weight: pm.computed(jnp.divide, jnp.asarray(2 * weight), jnp.asarray(2.0)),
    ],
    ids=["NumPy", "of another library", "computed"],
)
def test_a_weight_may_be_computed(change):
    """Once in a call, of which the shape counts."""
    weight, x = np.arange(6, dtype=np.float32).reshape(2, 3), jnp.ones(3)
    layer = LINEAR.replace(weight=change(weight))

    assert layer(x).tolist() == jax.jit(lambda x: layer(x))(x).tolist() == [3, 12]
    assert str(jax.make_jaxpr(layer)(x)).count(" div ") <= 1


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((..., 5), r"\(\.\.\., 5\)"),
        ((3, "width", "height"), r"\(3, width, height\)"),
        ((3,), r"\(3,\)"),
    ],
)
def test_an_input_of_another_shape_is_refused(shape, text):
    with pytest.raises(ShapeError, match=rf"Identity: expected x of shape {text}.*got f32\[3,4\]"):
        nn.check_shape(nn.Identity(), jnp.ones((3, 4)), *shape)


def test_an_input_of_that_shape_is_an_array():
    """Lists are converted; any number of axes may be none."""
    assert nn.check_shape(nn.Identity(), [1, 2], ..., 2).shape == (2,)
    assert nn.check_shape(nn.Identity(), np.ones((5, 2, 3)), 5, ..., "any").shape == (5, 2, 3)


def test_initial_values(key):
    """In the layout of JAX's initializers; complex ones by parts; as many keys as asked for."""
    he = jax.nn.initializers.he_normal()
    weight = nn.initial_weight(he, key, (4, 3, 2), None)
    assert_close(weight, jnp.moveaxis(he(key, (2, 3, 4), jnp.float32), (-1, -2), (0, 1)))
    assert nn.initial_weight(None, key, (4, 3), jnp.complex64).dtype == jnp.complex64
    assert float(jnp.abs(nn.initial_bias(None, key, (100,), None, 4)).max()) <= 0.5
    keys = pm.init_keys(key)
    assert len(nn.split_key(keys, 3)) == 3


def test_names_of_the_room_are_classes_and_functions():
    assert all(callable(getattr(nn, name)) for name in dir(nn))
    assert {"Linear", "layer_call", "State"} <= {*dir(nn)}
