"""The annotation is the contract."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, FieldWarning, ShapeError


class Dense(nn.Layer):
    """A layer of a user's."""

    weight: Float[Array, "n_out *inner 2"]
    bias: Float[Array, " n_out"] | None = pm.field(given="use_bias")
    free: Float[Array, " some"] | None
    n_in: int = pm.field(static=True)
    n_out: int = pm.field(static=True)
    use_bias: bool = pm.field(static=True, default=True)

    @property
    def inner(self):
        return (self.n_in, 1)

    def __call__(self, x):
        weight, bias, _ = self.own_arrays("weight", "bias", "free")
        return weight[..., 0, 0] @ x + bias


def dense():
    return Dense(jnp.ones((3, 4, 1, 2)), jnp.zeros(3), None, 4, 3)


def test_own_arrays_have_the_shapes_of_their_annotations():
    """Fields and properties are sizes, numbers count, arrays without names are skipped."""
    layer = dense()
    assert layer(jnp.ones(4)).shape == (3,)
    assert layer.replace(free=jnp.ones((7, 7))).own_arrays("free")[0].shape == (7, 7)
    for change in ({"weight": jnp.ones((3, 4, 1, 1))}, {"bias": jnp.ones(4)}, {"bias": None}):
        (name,) = change
        with pytest.raises(ShapeError, match=rf"Dense.*{name}"):
            layer.replace(**change)(jnp.ones(4))
    with pytest.raises(ArgumentError, match="label"):
        jax.tree.map(lambda _: "label", layer)(jnp.ones(4))
    layers = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), layer)
    with pytest.raises(ShapeError, match="filter_vmap"):
        layers(jnp.ones(4))


def test_sizes_change_with_the_arrays_alone():
    """By `replace` and `with_mode`; several layers as one keep their own sizes."""
    layer = dense()
    for change in ({"n_out": 5}, {"n_in": 5}, {"use_bias": False}):
        (name,) = change
        with pytest.raises(ShapeError, match=name):
            layer.replace(**change)
        with pytest.raises(ShapeError, match=name):
            pm.with_mode([layer], **change)
    without = layer.replace(use_bias=False, bias=None)
    assert without.own_arrays("bias") == (None,)
    layers = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), layer)
    assert layers.replace(weight=2 * layers.weight).weight.shape == (2, 3, 4, 1, 2)


def test_an_array_that_may_lack_and_does_is_taken():
    """None, or an array of the right shape."""

    class Optional(nn.Layer):
        weight: Float[Array, " n"] | None
        n: int = pm.field(static=True)

    assert Optional(None, 3).own_arrays("weight") == (None,)
    with pytest.raises(ShapeError, match="weight"):
        Optional(jnp.ones(2), 3).own_arrays("weight")


def test_the_annotation_of_a_subclass_counts():
    """It stands in place of the inherited one."""

    class Across(Dense):
        weight: Float[Array, "2 n_out"]

    layer = Across(jnp.ones((2, 3)), jnp.zeros(3), None, 4, 3)
    assert layer.own_arrays("weight")[0].shape == (2, 3)


def test_an_annotation_that_cannot_be_read_has_no_contract_and_warns_once():
    """Other annotations of the class still count."""

    class Hidden(nn.Layer):
        weight: Missing[Array, " n"]
        bias: Float[Array, " n"]
        n: int = pm.field(static=True)

    layer = Hidden(jnp.ones(5), jnp.ones(3), 3)
    with pytest.warns(FieldWarning, match=r"Hidden\.weight"):
        assert layer.own_arrays("weight")[0].shape == (5,)
    layer.own_arrays("bias")  # Warnings are errors here.
    with pytest.raises(ShapeError, match="bias"):
        layer.replace(bias=jnp.ones(2)).own_arrays("bias")


def test_tied_and_computed_arrays_count_by_what_is_read():
    """The value that is read must have the shape."""
    layer = Dense(jnp.ones((3, 4, 1, 2)), jnp.zeros(3), jnp.ones(3), 4, 3)
    tied = pm.tie(layer, "bias", "free")
    assert [value.shape for value in tied.own_arrays("bias", "free")] == [(3,), (3,)]
    with pytest.raises(ShapeError, match="n_out"):
        tied.replace(n_out=4)


@pytest.mark.parametrize(
    ("layer", "change", "stored"),
    [
        (nn.Scale(2), {"shape": 2}, (2,)),
        (nn.LinearGeneral(3, 2, key=jax.random.key(0)), {"in_features": [3]}, (3,)),
        (nn.Dropout(), {"broadcast_dims": 1}, (1,)),
        (nn.BatchNorm(2), {"axis_name": ["a", "b"]}, ("a", "b")),
    ],
)
def test_replace_and_with_mode_take_what_the_constructor_takes(layer, change, stored):
    """One number becomes a tuple, and a list, too."""
    (name,) = change
    assert getattr(layer.replace(**change), name) == stored
    assert getattr(pm.with_mode(layer, **change), name) == stored


def test_a_word_counts_as_many_entries_as_its_field_says():
    """ "scalar" counts as one."""
    layer = nn.Linear("scalar", 2, key=jax.random.key(0))
    assert layer.own_arrays("weight")[0].shape == (2, 1)
    assert str(layer.__array_shapes__()) == "{'weight': (2, 1), 'bias': (2,)}"
