"""New configuration has to fit a Module's arrays."""

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ShapeError

KEY = jax.random.key(0)
LINEAR = nn.Linear(4, 4, key=KEY)
CONV = nn.Conv2d(4, 4, 1, key=KEY)
ATTENTION = nn.MultiheadAttention(
    2, 4, num_kv_heads=1, qk_norm="rms", is_causal=True, cache_size=8, key=KEY
)

# Arguments for how a layer computes, which do not affect the shapes of its arrays.


def test_the_parts_of_attention_change_with_its_sizes():
    """Sizes that fit the projections are refused by other parts, or by nothing."""
    plain = nn.MultiheadAttention(2, 4, key=KEY)
    assert plain.replace(num_heads=4, qk_size=1, vo_size=1)(jnp.ones((3, 4))).shape == (3, 4)
    wide = nn.Linear(4, 6, use_bias=False, key=KEY)
    changes = {f"{name}_proj": wide for name in ("query", "key", "value")}
    changes |= {"output_proj": nn.Linear(6, 4, use_bias=False, key=KEY)}
    assert plain.replace(num_heads=3, **changes)(jnp.ones((3, 4))).shape == (3, 4)


CHANGES = [
    (LINEAR, {"out_features": 9}),
    (LINEAR, {"use_bias": False}),
    (CONV, {"groups": 2}),
    (nn.LayerNorm(4), {"shape": (5,)}),
    (nn.BatchNorm(3), {"input_size": 5}),
    (nn.LSTMCell(3, 2, key=KEY), {"input_size": 2}),
    (ATTENTION, {"num_heads": 4}),
    (nn.MLP(2, 2, 2, 2, key=KEY, scan=True), {"use_final_bias": False}),
]


@pytest.mark.parametrize(("layer", "changes"), CHANGES)
def test_configuration_that_the_arrays_do_not_fit_is_refused(layer, changes):
    """By `replace` and `with_mode`, in a layer of a map as well; as the call would refuse it."""
    (name,) = changes
    several = jax.tree.map(lambda array: jnp.stack([array, array]), layer)
    for one in (layer, several):
        with pytest.raises(ShapeError, match=name):
            one.replace(**changes)
        with pytest.raises(ShapeError, match=name):
            nn.with_mode([one], **changes)


def test_what_changes_in_one_step_or_decides_no_shape_is_taken():
    """A size with its arrays; a stride; labels instead of arrays; a class without a contract."""
    w, b = jnp.ones((9, 4)), jnp.ones(9)
    wide = LINEAR.replace(out_features=9, weight=w, bias=b)
    assert wide(jnp.ones(4)).shape == (9,)
    models = jax.tree.map(lambda array: jnp.stack([array, array]), LINEAR)
    assert models.replace(weight=models.weight * 2).weight.shape == (2, 4, 4)
    one = LINEAR.replace(use_bias=False, bias=None)
    assert one(jnp.ones(4)).shape == (4,)
    assert CONV.replace(stride=(2, 2)).stride == (2, 2)
    labels = jax.tree.map(lambda _: "label", LINEAR)
    assert labels.replace(out_features=9).weight == "label"

    class Plain(pm.Module):
        size: int = pm.field(static=True)
        weight: jax.Array

    assert Plain(2, jnp.ones(2)).replace(size=3).size == 3


def test_a_layers_arrays_are_compared_with_its_annotations():
    """When they are used: the names in an annotation are the layer's sizes."""

    class Own(nn.Layer):
        weight: Float[Array, "size"]
        size: int = pm.field(static=True)

        def __call__(self, x):
            (weight,) = self.own_arrays("weight")
            return weight * x

    assert Own(jnp.ones(3), 3)(2.0).shape == (3,)
    with pytest.raises(ShapeError, match=r"(?s)Own.*weight.*\(3,\)"):
        Own(jnp.ones(4), 3)(2.0)
