import jax
import jax.numpy as jnp
import pytest

import pytreemod as pm
from pytreemod import nn
from pytreemod.errors import ArgumentError, ShapeError, SpecError
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close, wave


@pytest.mark.parametrize(
    "dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64], ids=label
)
@pytest.mark.sampled(2)
def test_at_first_it_is_the_layer(key, dtype):
    """Up to the rounding of a sum in float32: in narrow dtypes to the bit."""
    linear = nn.Linear(5, 4, dtype=dtype, key=key)
    layer, x = nn.WeightNorm(linear), jnp.asarray(wave(5), dtype)

    out, expected = layer(x), linear(x)
    assert out.dtype == layer.weight.dtype == dtype
    if jnp.finfo(dtype).bits < 32:
        assert out.tolist() == expected.tolist()
    assert_close(out.astype(complex), expected.astype(complex), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("axis", [0, 1, -1, None], ids=label)
@pytest.mark.sampled(2)
def test_it_is_the_formula(key, axis):
    """Values and gradients of v and g, by any path to the weight."""
    plain = [nn.Conv1d(3, 4, 2, use_bias=False, key=key)]
    layers, x = nn.WeightNorm(plain, "*.weight", axis), jnp.asarray(wave(3, 5))
    layers = pm.tree_at("0.weight.g", layers, replace_fn=lambda g: 2 * g)
    v, g = jax.tree.leaves(layers)
    others = tuple(i for i in range(3) if axis is None or i != axis % 3)

    def by_hand(v, g):
        weight = g * v / jnp.sqrt((v**2).sum(others, keepdims=True))
        return jnp.sum(jnp.sin(plain[0].replace(weight=weight)(x)))

    grads = jax.grad(lambda layers: jnp.sum(jnp.sin(layers[0](x))))(layers)
    assert_close(layers[0](x), 2 * plain[0](x))
    for own, other in zip(jax.tree.leaves(grads), jax.grad(by_hand, (0, 1))(v, g), strict=True):
        assert_close(own, other)


def test_a_weight_that_is_computed_stays_so(key):
    """The arrays that it is computed from are trained; its v may be tied afterwards."""
    linear, x = nn.Linear(3, 3, key=key), jnp.asarray(wave(3))
    masked = linear.replace(weight=pm.computed(jnp.multiply, linear.weight, jnp.tri(3)))
    layer = nn.WeightNorm(masked)
    assert_close(layer(x), masked(x))
    parts = ["bias", "weight.g", "weight.v.trees.0", "weight.v.trees.1"]
    assert sorted(pm.named_leaves(layer)) == parts

    twice = nn.Sequential([linear, linear])
    normed = nn.WeightNorm(twice, "layers[1].weight")
    tied = pm.tie(normed, "layers[1].weight.v", to="layers[0].weight")
    left = ["layers.0.bias", "layers.0.weight", "layers.1.bias", "layers.1.weight.g"]
    assert sorted(pm.named_leaves(tied)) == left
    assert_close(tied(x), normed(x))
    twice = pm.tie(twice, "layers[1].weight", to="layers[0].weight")
    with pytest.raises(SpecError, match=r"tied to layers\[0\]"):
        nn.WeightNorm(twice, "layers[1].weight")


def test_what_cannot_be_normalized_is_refused(key):
    """A slice of zeros has no direction; several layers as one, or other lengths, broadcast."""
    linear, x = nn.Linear(2, 3, key=key), jnp.ones(2)
    with pytest.raises(ArgumentError, match="slice of zeros"):
        nn.WeightNorm(linear.replace(weight=jnp.eye(3, 2)))
    layers = pm.filter_vmap(lambda key: nn.WeightNorm(nn.Linear(2, 3, key=key)))
    with pytest.raises(ShapeError, match="weight"):
        layers(jax.random.split(key, 4))(x)
    with pytest.raises(ShapeError, match="weight"):
        pm.tree_at("weight.g", nn.WeightNorm(linear), jnp.ones(3))(x)
