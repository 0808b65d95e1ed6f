"""The order of Equinox's leaves, and what becomes of values that are put back."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError, EquinoxFileError
from pytreemod.io.equinox_leaves import ESTABLISHED, LEAVES_THERE, Meaning, file_order, put_back
from pytreemod.tree.paths import path_text
from tests.helpers.comparing import assert_same

KEY = jax.random.key(0)


def texts(tree, is_leaf=None):
    """The paths in the order of the file."""
    return [path_text(leaf.path) for leaf in file_order(tree, is_leaf)]


def norm(**options):
    """A BatchNorm and its State."""
    return pm.make_with_state(pm.nn.BatchNorm)(2, "batch", **options)


@pytest.mark.parametrize("layer", LEAVES_THERE, ids=lambda cls: cls.__name__)
def test_the_flags_that_are_leaves_are_those_of_equinox(layer):
    """What is no static field there, but a function, and is configuration here."""
    fields = {f.name: f.metadata.get("static", False) for f in dataclasses.fields(layer)}
    theirs = dataclasses.fields(getattr(eqx.nn, layer.__name__))
    flags = {f.name for f in theirs if not f.metadata.get("static") and fields.get(f.name)}

    assert flags - {"operation"} == LEAVES_THERE[layer]


def test_flags_stand_where_their_fields_are_declared():
    """In layers, in classes that derive from them, and in what holds them."""

    class Noisy(pm.nn.Dropout):
        gain: jax.Array = dataclasses.field(default_factory=lambda: jnp.ones(1))

    spectral = pm.nn.SpectralNorm(pm.nn.Linear(2, 2, key=KEY), "weight", key=KEY)
    assert texts([Noisy(), pm.nn.MaxPool1d(2)]) == [
        "[0].p",
        "[0].inference",
        "[0].gain",
        "[1].init",
    ]
    assert texts(spectral) == [
        "layer.weight",
        "layer.bias",
        "uv_index.init[0]",
        "uv_index.init[1]",
        "inference",
    ]


def test_a_count_stands_before_running_statistics():
    """In the model and in its State; the other mode has none, nor has a user's token."""

    class Own(pm.Module):
        state_index: Any

        def __init__(self):
            self.state_index = pm.StateIndex((jnp.zeros(2), jnp.ones(2)))

    assert texts(pm.nn.BatchNorm(2, channelwise_affine=False)) == [
        "batch_counter",
        "state_index.init[0]",
        "state_index.init[1]",
        "inference",
    ]
    alone = ["['batch_counter']", "['state_index'][0]", "['state_index'][1]"]
    assert texts(norm()[1]) == alone
    ema = norm(mode="ema")
    assert texts(ema[1]) == ["['ema_first_time_index']", *alone[1:]]
    # With its model, it is known whose values they are.
    assert texts(pm.make_with_state(Own)()) == ["[1]['state_index'][0]", "[1]['state_index'][1]"]


def test_a_state_of_optax_has_no_flags():
    """For Equinox's users filter out what is no array before they give it to optax."""
    opt_state = optax.trace(0.9).init([pm.nn.Dropout(0.5), jnp.ones(1)])

    assert texts(opt_state) == ["trace[1]"]
    assert texts([pm.nn.Dropout(0.5)]) == ["[0].p", "[0].inference"]


def test_is_leaf_says_where_the_order_ends():
    """A node that is taken for a leaf is not opened."""
    tree = [pm.nn.Dropout(0.5), {"x": None}]

    assert texts(tree, lambda node: isinstance(node, pm.nn.Dropout)) == ["[0]"]
    assert texts(tree[1:], lambda node: node is None) == ["[0]['x']"]
    assert texts(tree) == ["[0].p", "[0].inference"]


def test_a_count_is_one_with_which_equinox_corrects_nothing():
    """Zero where nothing was learnt yet, and large from then on; one for each member."""

    def counts(tree):
        return [leaf.value for leaf in file_order(tree) if leaf.meaning is Meaning.COUNT]

    layer, state = norm()
    learnt = state.set(layer.state_index, (jnp.ones(2), jnp.ones(2)))
    assert counts(learnt) == [ESTABLISHED]
    still, new = norm(momentum=1.0)
    assert counts([still, new.set(still.state_index, (jnp.ones(2), jnp.ones(2)))]) == [0]
    abstract = jax.eval_shape(lambda: norm()[1])
    assert_same(counts(abstract), [jax.ShapeDtypeStruct((), jnp.int32)])
    members = jax.tree.map(lambda *leaves: jnp.stack(leaves), norm()[1], learnt)
    assert_same(counts(members), [jnp.asarray([0, ESTABLISHED])])


def test_values_are_put_back():
    """Leaves and configuration; what a file had nothing for stays the very object."""
    model, state = norm()
    tree = {"model": model, "state": state, "drop": pm.nn.Dropout(0.5), "x": 1.0}
    leaves = file_order(tree)
    values = [leaf.value for leaf in leaves]
    assert put_back(tree, leaves, values, "file")["model"] is model

    changed = {"drop.p": 0.25, "model.inference": True, "x": 2.0, "model.weight": jnp.zeros(2)}
    by_text = {
        path.replace("['", "", 1).replace("']", "", 1): i for i, path in enumerate(texts(tree))
    }
    for text, value in changed.items():
        values[by_text[text]] = value
    made = put_back(tree, leaves, values, "file")

    assert made["drop"] == pm.nn.Dropout(0.25)
    assert made["model"].inference is True
    assert made["x"] == 2.0
    assert_same(made["model"].weight, jnp.zeros(2))
    assert made["model"].bias is model.bias


def test_what_a_layer_refuses_is_refused():
    """Its checks run, though nothing is built by its `__init__`."""
    leaves = file_order(pm.nn.Dropout(0.5))

    with pytest.raises(ArgumentError, match=r"p.*expected a number from 0"):
        put_back(pm.nn.Dropout(0.5), leaves, [1.5, False], "file")


def test_statistics_are_corrected_by_their_count():
    """By the layer's momentum, which a State alone does not have; a count that was left out says
    nothing."""
    model, state = norm(momentum=0.5)
    values = [jnp.asarray(2), jnp.asarray([0.75, 0.0]), jnp.asarray([1.5, 3.0])]

    leaves = file_order((model, state))
    kept = [leaf.value for leaf in leaves[:-3]]
    _, corrected = put_back((model, state), leaves, [*kept, *values], "file")
    assert_same(
        corrected.get(model.state_index), (jnp.asarray([1.0, 0.0]), jnp.asarray([2.0, 4.0]))
    )
    _, plain = put_back((model, state), leaves, [*kept, leaves[-3].value, *values[1:]], "file")
    assert_same(plain.get(model.state_index), tuple(values[1:]))
    with pytest.raises(EquinoxFileError, match="file: expected the model beside its State"):
        put_back(state, file_order(state), values, "file")
    established = [jnp.asarray(ESTABLISHED), *values[1:]]
    assert_same(
        put_back(state, file_order(state), established, "file").get(model.state_index),
        tuple(values[1:]),
    )
