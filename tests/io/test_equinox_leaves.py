"""Flags and counts among Equinox's leaves, and values that are put back."""

import dataclasses
import io
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod.errors import ArgumentError, EquinoxFileError
from tests.helpers.comparing import assert_same

KEY = jax.random.key(0)


def values(tree, **options):
    """The values in the order of the file."""
    seen = []
    pm.tree_serialise_leaves(io.BytesIO(), tree, filter_spec=lambda f, x: seen.append(x), **options)
    return seen


def written(tree):
    """The content of the file of a tree."""
    file = io.BytesIO()
    pm.tree_serialise_leaves(file, tree)
    return file.getvalue()


def read(data, like, lib=pm):
    """A tree from the content of a file."""
    return lib.tree_deserialise_leaves(io.BytesIO(data), like)


def norm(lib=pm, mode="batch", **options):
    """A BatchNorm and its State."""
    return lib.nn.make_with_state(lib.nn.BatchNorm)(2, "batch", mode=mode, **options)


def test_flags_stand_where_their_fields_are_declared():
    """In layers, in their subclasses, and in their containers."""

    class Noisy(pm.nn.Dropout):
        gain: jax.Array = dataclasses.field(default_factory=lambda: jnp.full(1, 7.0))

    dropped = Noisy(0.25, inference=True)
    assert values([dropped, pm.nn.MaxPool1d(2)]) == [0.25, True, dropped.gain, -jnp.inf]
    spectral = pm.nn.SpectralNorm(pm.nn.Linear(2, 2, key=KEY), "weight", key=KEY)
    assert [jnp.shape(value) for value in values(spectral)] == [(2, 2), (2,), (2,), (2,), ()]
    tree = [pm.nn.Dropout(0.5), {"x": None}]
    is_dropout = lambda node: isinstance(node, pm.nn.Dropout)  # noqa: E731
    assert values(tree, is_leaf=is_dropout) == [tree[0]]


def test_a_count_stands_before_running_statistics():
    """And is one with which Equinox corrects nothing: zero where nothing was learnt yet, and large
    from then on; a user's token of the same name has none."""

    class Own(pm.Module):
        state_index: Any

        def __init__(self):
            self.state_index = pm.StateIndex((jnp.zeros(2), jnp.ones(2)))

    assert [jnp.shape(value) for value in values(pm.make_with_state(Own)())[-2:]] == [(2,), (2,)]
    assert len(values(pm.make_with_state(Own)())) == 2
    layer, learnt = norm(mode="torch")
    learnt = learnt.set(layer.state_index, (jnp.ones(2), jnp.ones(2)))
    state = norm(mode="torch")[1]
    theirs, like = norm(eqx)

    for given, is_new in ((state, True), (learnt, False)):
        found = read(written((layer, given)), (theirs, like), eqx)[1].get(theirs.batch_counter)
        assert bool(found == 0) is is_new
        assert is_new or found > 10_000


STATISTICS = np.array([[0.75, -1.0], [1.5, 0.5]], np.float32)


@pytest.mark.parametrize("count", [1, 2])
def test_statistics_are_corrected_by_their_count(count):
    """By the layer's momentum, which a State alone does not have."""
    theirs, state = norm(eqx, momentum=0.5)
    state = state.set(theirs.batch_counter, jnp.asarray(count))
    state = state.set(theirs.batch_state_index, tuple(jnp.asarray(x) for x in STATISTICS))
    file, alone = io.BytesIO(), io.BytesIO()
    eqx.tree_serialise_leaves(file, (theirs, state))
    eqx.tree_serialise_leaves(alone, state)
    model, like = norm(mode="torch", momentum=0.5)

    mean, var = read(file.getvalue(), (model, like))[1].get(model.state_index)
    np.testing.assert_allclose((mean, var), STATISTICS / (1 - 0.5**count))
    with pytest.raises(EquinoxFileError, match="State"):
        read(alone.getvalue(), like)


def test_a_state_of_shapes_alone_has_counts_too():
    """It has no values that Equinox could correct."""
    pair = norm(mode="torch")
    like = jax.eval_shape(lambda: norm(mode="torch"))

    assert_same(read(written(pair), like), pair)


def test_what_a_layer_refuses_is_refused():
    """Its checks run, though nothing is built by its `__init__`; the rest stays the very object."""
    with pytest.raises(ArgumentError, match="p"):
        read(written((1.5, False)), pm.nn.Dropout(0.5))
    linear = pm.nn.Linear(2, 2, key=KEY)
    spec = (lambda f, x: x, pm.default_deserialise_filter_spec)
    data = io.BytesIO(written((0.25, True)))
    kept, dropout = pm.tree_deserialise_leaves(data, (linear, pm.nn.Dropout()), filter_spec=spec)
    assert_same((kept, dropout), (linear, pm.nn.Dropout(0.25, inference=True)))
