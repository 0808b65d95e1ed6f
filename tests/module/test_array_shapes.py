"""New configuration has to fit a Module's arrays."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, FieldWarning, ShapeError
from pytreemod.module.array_shapes import check_array_shapes
from tests.goldens import refusals
from tests.nn.catalogue import CATALOGUE

KEY = jax.random.key(0)
LINEAR = nn.Linear(4, 4, key=KEY)
CONV = nn.Conv2d(4, 4, 1, key=KEY)
ATTENTION = nn.MultiheadAttention(
    2, 4, num_kv_heads=1, qk_norm="rms", is_causal=True, cache_size=8, key=KEY
)
CHANGES = [
    (LINEAR, {"out_features": 9}),
    (LINEAR, {"in_features": 9}),
    (LINEAR, {"use_bias": False}),
    (nn.Linear(4, 4, use_bias=False, key=KEY), {"use_bias": True}),
    (CONV, {"groups": 2}),
    (CONV, {"kernel_size": (3, 3)}),
    (nn.ConvTranspose2d(4, 4, 1, key=KEY), {"groups": 2}),
    (nn.LayerNorm(4), {"shape": (5,)}),
    (nn.RMSNorm(4), {"use_weight": False}),
    (nn.InstanceNorm(4, channelwise_affine=True), {"channels": 8}),
    (nn.BatchNorm(3), {"input_size": 5}),
    (nn.BatchNorm(3), {"channelwise_affine": False}),
    (nn.Embedding(3, 2, key=KEY), {"num_embeddings": 9}),
    (nn.GRUCell(3, 2, key=KEY), {"hidden_size": 3}),
    (nn.LSTMCell(3, 2, key=KEY), {"input_size": 2}),
    (nn.SimpleCell(3, 2, key=KEY), {"use_bias": False}),
    (nn.PReLU(), {"shape": (3,)}),
    (nn.LinearGeneral(3, 2, key=KEY), {"out_features": (5,)}),
    (ATTENTION, {"num_heads": 4}),
    (ATTENTION, {"num_kv_heads": 2}),
    (ATTENTION, {"output_size": 5}),
    (ATTENTION, {"qk_size": 4}),
    (ATTENTION, {"use_query_bias": True}),
    (nn.MLP(2, 2, 2, 2, key=KEY, scan=True), {"use_final_bias": False}),
]

# Arguments for how a layer computes, which do not affect the shapes of its arrays.
FREE = {
    "use_ceil", "init", "channel_axis", "num_power_iterations", "axis", "unroll", "remat",
    "time_major", "return_carry", "reverse", "keep_order", "interleaved", "window", "is_causal",
    "inference", "num_spatial_dims",
}  # fmt: skip


@pytest.mark.parametrize(("layer", "changes"), CHANGES)
def test_configuration_that_the_arrays_do_not_fit_is_refused(layer, changes):
    """By `replace` and `with_mode`, in a layer of a map as well; as the call would refuse it."""
    (name,) = changes
    kind = type(layer).__name__
    text = rf"(?s){kind}\({name}\).*, expected .*layer.replace\({name}=.*=(\.\.\.|None)"
    several = jax.tree.map(lambda array: jnp.stack([array, array]), layer)
    for one in (layer, several):
        with pytest.raises(ShapeError, match=text):
            one.replace(**changes)
        with pytest.raises(ShapeError, match=text):
            nn.with_mode([one], **changes)


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.name)
def test_no_size_or_flag_of_a_layer_contradicts_its_arrays(entry):
    """Each number, and each flag, that determines the arrays."""
    layer, _ = entry.build()
    # InstanceNorm without a weight has none to contradict.
    free = FREE if jax.tree.leaves(layer) else FREE | {"channels"}
    for name in {field.name for field in dataclasses.fields(layer)} - free:
        value = getattr(layer, name)
        if isinstance(value, int):
            new = not value if isinstance(value, bool) else value + 1
            with pytest.raises((ShapeError, ArgumentError), match=name):
                layer.replace(**{name: new})


def test_the_parts_of_attention_change_with_its_sizes():
    """Sizes that fit the projections are refused by other parts, or by nothing."""
    plain = nn.MultiheadAttention(2, 4, key=KEY)
    assert plain.replace(num_heads=4, qk_size=1, vo_size=1)(jnp.ones((3, 4))).shape == (3, 4)
    wide = nn.Linear(4, 6, use_bias=False, key=KEY)
    changes = {f"{name}_proj": wide for name in ("query", "key", "value")}
    changes |= {"output_proj": nn.Linear(6, 4, use_bias=False, key=KEY)}
    assert plain.replace(num_heads=3, **changes)(jnp.ones((3, 4))).shape == (3, 4)


def test_what_changes_in_one_step_or_decides_no_shape_is_taken():
    w, b = jnp.ones((9, 4)), jnp.ones(9)
    wide = LINEAR.replace(out_features=9, weight=w, bias=b)
    assert wide(jnp.ones(4)).shape == (9,)
    models = jax.tree.map(lambda array: jnp.stack([array, array]), LINEAR)
    assert models.replace(weight=models.weight * 2).weight.shape == (2, 4, 4)
    one = LINEAR.replace(use_bias=False, bias=None)
    assert one(jnp.ones(4)).shape == (4,)
    assert CONV.replace(stride=(2, 2)).stride == (2, 2)
    assert nn.with_mode(LINEAR, use_bias=True) == LINEAR


def test_what_is_no_array_stays_what_it_is():
    """Labels instead of arrays, a half of partition, and a layout of a subclass."""
    labels = jax.tree.map(lambda _: "label", LINEAR)
    assert labels.replace(out_features=9).weight == "label"
    without, _ = pm.partition(LINEAR, lambda _: False)
    assert without.replace(out_features=9).weight is None

    class Across(nn.Linear):
        def __init__(self):
            super().__init__(2, 3, use_bias=False, key=KEY)
            self.weight = self.weight.T

    assert Across().replace(out_features=4).out_features == 4


def test_a_class_that_says_nothing_of_shapes_is_not_asked():
    class Plain(pm.Module):
        size: int = pm.field(static=True)
        weight: jax.Array

    plain = Plain(2, jnp.ones(2))
    assert plain.replace(size=3).size == 3
    check_array_shapes(plain.replace(size=3), plain, {"size"})


test_refusals = refusals(globals())


def test_an_annotation_that_cannot_be_read_is_no_contract_and_warns_once():
    """Of a class that asks for one; the arrays beside it have theirs."""

    class Odd(nn.Layer):
        weight: Float[Array, "size"]
        other: "Unknown[Array, 'size']"
        size: int = pm.field(static=True)

    odd = Odd(jnp.ones(3), jnp.ones(5), 3)
    with pytest.warns(FieldWarning, match=r"Odd\.other: expected an annotation .*its shape is"):
        assert len(odd.own_arrays("weight", "other")) == 2
    assert odd.__array_shapes__() == {"weight": (3,)}
    with pytest.raises(
        ShapeError, match=r"Odd\(size=3\): expected weight of shape \(3,\), got f32\[4\]"
    ):
        Odd(jnp.ones(4), jnp.ones(5), 3).own_arrays("weight")
