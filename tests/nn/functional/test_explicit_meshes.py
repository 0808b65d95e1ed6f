"""Sums of products of arrays that lie on a mesh of explicit axes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from tests.helpers.counting_collectives import collectives
from tests.helpers.meshes import EXPLICIT, lies, on

X = np.arange(8 * 16, dtype=np.float32).reshape(8, 16) / 64 - 1
WEIGHT = np.cos(np.arange(32 * 16, dtype=np.float32)).reshape(32, 16)
BIAS = np.arange(32, dtype=np.float32)


def put(array: Any, spec: Any) -> jax.Array:
    """On the mesh by a spec; on no mesh if that is None."""
    array = jnp.asarray(array)
    return array if spec is None else jax.device_put(array, on(*spec, mesh=EXPLICIT))


# How x and the weight lie; then the product. A mesh axis that both have is the weight's to give up.
WAYS: list[tuple[Any, Any, Any]] = [
    (("data",), None, ("data",)),
    (("data",), (), ("data",)),
    (("data",), ("model",), ("data", "model")),
    (("data",), (None, "model"), ("data",)),
    (("data",), ("data",), ("data",)),
    (("data",), (None, "data"), ("data",)),
    (("data",), (("data", "model"),), ("data", "model")),
    (("data",), ("model", "data"), ("data", "model")),
    (("data", "model"), (), ("data",)),
    (("data", "model"), (None, "model"), ("data",)),
    (("data", "model"), (None, "data"), ("data",)),
    (("data", "model"), ("model",), ("data",)),
    (("data", "model"), None, ("data",)),
    ((("data", "model"),), ("data", "model"), (("data", "model"),)),
    (None, ("model",), (None, "model")),
    (None, (None, "model"), ()),
]


@pytest.mark.parametrize(("x_at", "weight_at", "y_at"), WAYS, ids=str)
def test_a_product_and_its_gradient_are_those_of_one_device(x_at: Any, weight_at: Any, y_at: Any):
    """However both lie; and gradients lie as the arrays that they are of."""

    def loss(weight: jax.Array, bias: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = nn.functional.linear(x, weight, bias)
        return (y**2).sum(), y

    x, weight = put(X, x_at), put(WEIGHT, weight_at)
    # As FSDP splits it, along the axis of the batch.
    bias = put(BIAS, ("data",))
    step = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))
    gradients, y = step(weight, bias, x)

    expected = X @ WEIGHT.T + BIAS
    assert lies(y) == y_at
    assert lies(nn.functional.linear(x, weight, bias)) == y_at
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    of_all = (2 * expected.T @ X, 2 * expected.sum(0), 2 * expected @ WEIGHT)
    for gradient, right, array in zip(gradients, of_all, (weight, bias, x), strict=True):
        np.testing.assert_allclose(gradient, right, rtol=1e-4, atol=1e-3)
        if isinstance(array.sharding, jax.NamedSharding):
            assert lies(gradient) == lies(array)


@pytest.mark.parametrize("layer", [nn.Linear(16, 32, key=jax.random.key(0)), nn.LayerNorm(16)])
def test_the_gradient_of_a_bias_gathers_no_activations(layer: Any):
    """Each device sums over its own part of the batch; what is added up has the bias's size."""
    layer, x = jax.device_put(layer, on(mesh=EXPLICIT)), put(X, ("data",))
    gradient = jax.jit(jax.grad(lambda layer, x: (layer(x) ** 2).sum()))
    found = collectives(gradient.lower(layer, x).compile().as_text())

    assert {*found.numbers} == {"all-reduce"}
    assert found.size == sum(leaf.size for leaf in jax.tree.leaves(layer))


# Each device has some of the heads.
BY_HEADS = pm.by(
    {
        "output_proj.**": pm.AxisRules({"in_features": "model"}),
        ...: pm.AxisRules({"out_features": "model"}),
    }
)


@pytest.mark.parametrize("of", ["two", "vmap", "lora"])
def test_the_gradient_of_what_is_projected_three_times_is_summed_once(of: str):
    """Over the devices; those of queries, keys and values are added before."""
    layer = nn.MultiheadAttention(2, 8, key=jax.random.key(0))
    layer = pm.lora(layer, pm.matrices, rank=2, key=jax.random.key(1)) if of == "lora" else layer
    x = jnp.cos(jnp.arange(4.0 * 3 * 8)).reshape(4, 3, 8)

    def loss(x: jax.Array, layer: Any) -> Any:
        called = jax.vmap(layer) if of == "vmap" else layer
        # What goes in is no argument, so that its gradient is not what is asked for alone.
        y = called(x, x[:, 1:]) if of == "two" else called(jnp.tanh(x))
        return (y**2).sum()

    gradient = jax.jit(jax.grad(loss))
    split = jax.device_put(layer, pm.shardings(layer, EXPLICIT, BY_HEADS))
    put_x = jax.device_put(x, on(mesh=EXPLICIT) if of == "vmap" else on("data", mesh=EXPLICIT))
    found = gradient(put_x, split)
    program = gradient.lower(put_x, split).compile().as_text()

    expected = jax.grad(loss)(x, layer)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    # Forward the last projection, backward x; with keys of another sequence, those as well.
    rows = {"two": 3 + 3 + 2, "vmap": 4 * 6}.get(of, 6)
    assert collectives(program).elements == {"all-reduce": rows * 8}
