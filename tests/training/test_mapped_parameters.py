"""`map_parameters`: the parameters, and their values."""

import jax
import jax.numpy as jnp
import numpy as np

import pytreemod as pm
from pytreemod import nn

KEY = jax.random.key(0)


def test_an_auto_encoder_is_tied_by_transposition():
    """L9, by a tie through a function and by a mapped parameter that is tied: one matrix.

    Its gradient is the sum of both uses, as in a model that is written with one matrix.
    """
    x = jnp.asarray([0.3, -1.0, 0.5, 2.0])
    one, two = jax.random.split(KEY)
    encoder, decoder = nn.Linear(4, 2, key=one), nn.Linear(2, 4, key=two)
    model = nn.Sequential([encoder, nn.Lambda(jnp.tanh), decoder])
    first, second = "layers[0].weight", "layers[2].weight"
    tied = pm.tie(model, second, to=first, through=jnp.transpose)
    mapped = pm.map_parameters(jnp.transpose, model, second, inverse=jnp.transpose)
    mapped = pm.tie(mapped, f"{second}.trees[0]", to=first)

    def by_hand(weight):
        hidden = jnp.tanh(weight @ x + encoder.bias)
        return jnp.sum((weight.T @ hidden + decoder.bias - x) ** 2)

    expected = jax.grad(by_hand)(encoder.weight)
    for one in (tied, mapped):
        assert [*pm.named_leaves(one)] == ["layers.0.weight", "layers.0.bias", "layers.2.bias"]
        assert one[2].weight.tolist() == encoder.weight.T.tolist()
        grads = pm.filter_jit(pm.filter_grad(lambda m: jnp.sum((m(x) - x) ** 2)))(one)
        np.testing.assert_allclose(grads[0].weight, expected, rtol=1e-5)
        moved = pm.tree_at(first, one, jnp.ones((2, 4)))
        assert moved[2].weight.tolist() == np.ones((4, 2)).tolist()


def test_with_an_inverse_the_model_reads_as_it_did():
    norm = nn.LayerNorm(3).replace(weight=jnp.asarray([0.5, 1.0, 2.0]))
    mapped = pm.map_parameters(jnp.exp, norm, "weight", inverse=jnp.log)
    x = jnp.asarray([1.0, 2.0, 4.0])

    np.testing.assert_allclose(mapped.weight, norm.weight, rtol=1e-6)
    np.testing.assert_allclose(mapped(x), norm(x), rtol=1e-6)
    leaves = pm.named_leaves(mapped)
    np.testing.assert_allclose(leaves["weight.trees.0"], jnp.log(norm.weight))
    grads = pm.named_leaves(pm.filter_grad(lambda m: m.weight.sum())(mapped))
    np.testing.assert_allclose(grads["weight.trees.0"], norm.weight, rtol=1e-6)
    assert mapped.bias is norm.bias


def test_without_one_the_leaf_is_what_is_trained():
    """And the model reads as the function of it, from now on."""
    norm = nn.LayerNorm(3)
    mapped = pm.map_parameters(jnp.exp, norm, "bias")

    assert pm.named_leaves(mapped)["bias.trees.0"] is norm.bias
    assert mapped.bias.tolist() == [1.0, 1.0, 1.0]


def test_the_parts_of_a_matrix_have_the_names_of_its_axes():
    """Rows and columns, where a part has them."""
    linear, rows, columns = nn.Linear(3, 4, key=jax.random.key(0)), "out_features", "in_features"
    low = pm.lora(linear, "weight", 2, key=jax.random.key(1))
    for made, expected in [
        (low, {"a": (None, columns), "b": (rows, None)}),
        (pm.quantize(linear, "int8"), {"numbers": (rows, None), "scales": (rows, None)}),
    ]:
        found = jax.tree.leaves(pm.axis_names(made), is_leaf=lambda x: type(x) is tuple)
        named = dict(zip(pm.named_leaves(made), found, strict=True))
        assert {name: named[f"weight.{name}"] for name in expected} == expected
