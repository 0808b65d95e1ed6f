"""`lora`: low-rank updates of chosen matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from tests.helpers.equations import operations
from tests.helpers.meshes import EXPLICIT, lies, on
from tests.labels import label

KEY = jax.random.key(0)
ROLE = pm.select.role("lora")


def mlp(depth=1):
    return nn.MLP(3, 2, 4, depth, jnp.tanh, key=KEY)


def test_it_is_the_formula_of_the_paper():
    """W0 + alpha / r * B A, and its gradients to A and B."""
    linear = nn.Linear(3, 4, key=KEY)
    adapted = pm.lora(linear, "weight", 2, key=KEY, alpha=6)
    adapted = pm.tree_at("weight.b", adapted, jnp.asarray(np.arange(8.0, dtype="f4").reshape(4, 2)))
    leaves = pm.named_leaves(adapted)
    base, a, b = (leaves[f"weight.{name}"] for name in ("base", "a", "b"))
    x, c = jnp.asarray([1.0, -2.0, 0.5]), jnp.asarray([1.0, 2.0, -1.0, 0.5])

    assert [v.shape for v in (base, a, b)] == [(4, 3), (2, 3), (4, 2)]
    np.testing.assert_allclose(adapted.weight, base + 3 * (b @ a), rtol=1e-6)
    grads = pm.named_leaves(pm.filter_grad(lambda m: c @ m(x), wrt=ROLE)(adapted))
    upstream = jnp.outer(c, x)
    assert [*grads] == ["weight.a", "weight.b"]
    np.testing.assert_allclose(grads["weight.a"], 3 * b.T @ upstream, rtol=1e-5)
    np.testing.assert_allclose(grads["weight.b"], 3 * upstream @ a.T, rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=label)
@pytest.mark.sampled
def test_at_first_the_model_reads_as_it_did(dtype):
    """Number for number, under jit as well, whatever alpha; in the dtype of the matrix."""
    linear = nn.Linear(3, 4, dtype=dtype, key=KEY)
    adapted = pm.lora(linear, "weight", 2, key=KEY, alpha=100.0)
    call = jax.jit(lambda layer, x: layer(x))
    x = jnp.asarray([1.0, -2.0, 0.5], dtype)

    assert adapted.weight.tolist() == linear.weight.tolist()
    assert adapted(x).tolist() == linear(x).tolist()
    assert call(adapted, x).tolist() == call(linear, x).tolist()
    assert {leaf.dtype for leaf in jax.tree.leaves(adapted)} == {jnp.dtype(dtype)}
    assert bool(jnp.any(pm.named_leaves(adapted)["weight.a"]))
    assert adapted.bias is linear.bias
    assert isinstance(adapted, nn.Linear)


def test_a_begins_at_the_scale_of_its_inputs():
    """As a layer's own weight does: a normal distribution with variance 1 / n."""
    for n, rank, atol in ((400, 50, 1e-3), (1, 20_000, 1e-2)):
        a = pm.lora(nn.Linear(n, 3, key=KEY), "weight", rank, key=KEY)
        a = pm.named_leaves(a)["weight.a"]
        np.testing.assert_allclose([jnp.mean(a), jnp.std(a)], [0, n**-0.5], atol=atol)


def test_the_program_is_the_hand_written_one():
    adapted = pm.lora(nn.Linear(8, 8, key=KEY), "weight", 2, key=KEY, alpha=4)
    leaves, treedef = jax.tree.flatten(adapted)

    def ours(leaves, x):
        return treedef.unflatten(leaves)(x)

    def by_hand(leaves, x):
        base, a, b, bias = leaves
        return jnp.inner(x, base + 2.0 * (b @ a)) + bias[None]

    x = jnp.ones((3, 8))
    assert operations(ours, leaves, x) == operations(by_hand, leaves, x)


def test_the_matrices_among_what_is_chosen_are_adapted():
    """Convolutions and integers are left alone; the model may be any tree."""
    net = [nn.Conv2d(1, 2, 3, key=KEY), nn.Linear(2, 2, key=KEY)]
    model = {"net": net, "w": jnp.ones((2, 2)), "n": jnp.ones((2, 2), int)}
    found = pm.named_leaves(pm.lora(model, ..., 1, key=KEY))

    assert [name[:-2] for name in found if name.endswith(".a")] == ["net.1.weight", "w"]


def test_a_computed_leaf_becomes_the_base():
    """As a whole: a mask keeps to the base."""
    linear = nn.Linear(3, 3, key=KEY)
    masked = linear.replace(weight=pm.computed(jnp.multiply, linear.weight, jnp.tri(3)))
    adapted = pm.lora(masked, "weight", 1, key=KEY)

    assert adapted.weight.tolist() == masked.weight.tolist()
    assert [*pm.named_leaves(adapted)][:4] == [
        "weight.base.trees.0",
        "weight.base.trees.1",
        "weight.a",
        "weight.b",
    ]
    moved = pm.tree_at("weight.b", adapted, jnp.ones((3, 1)))
    assert bool(jnp.all((moved.weight - masked.weight)[0] != 0))


def test_numbers_depend_on_the_path_alone():
    """More layers, or more that is chosen, change none; another key changes all."""

    def first(model, selector, key):
        return pm.named_leaves(pm.lora(model, selector, 2, key=key))["layers.0.weight.a"]

    one = first(mlp(), "layers[0].weight", KEY)

    assert first(mlp(2), "**.weight", KEY).tolist() == one.tolist()
    assert first(mlp(), "**.weight", jax.random.key(1)).tolist() != one.tolist()
    both = pm.named_leaves(pm.lora(nn.MLP(4, 4, 4, 1, key=KEY), "**.weight", 2, key=KEY))
    assert both["layers.0.weight.a"].tolist() != both["layers.1.weight.a"].tolist()
    assert first(mlp(), "**.weight", pm.init_keys(KEY)).tolist() != one.tolist()


@pytest.mark.parametrize("base", [("model",), ("data", "model"), ()], ids=str)
@pytest.mark.sampled
def test_on_a_mesh_the_update_lies_as_the_matrix(base):
    """However its factors are split: with explicit axes JAX would refuse to multiply them."""
    low = pm.lora(nn.Linear(16, 8, key=KEY), "weight", 4, key=KEY)
    low = pm.tree_at("weight.b", low, jnp.cos(jnp.arange(32.0)).reshape(8, 4))
    specs = {"weight.base": base, "weight.a": ("model", "data"), "weight.b": ("data", "model")}
    split = {
        name: jax.device_put(leaf, on(*specs.get(name, ()), mesh=EXPLICIT))
        for name, leaf in pm.named_leaves(low).items()
    }
    moved = low
    for name, leaf in split.items():
        moved = pm.tree_at(name, moved, leaf)
    gradient = jax.jit(jax.grad(lambda m, x: (m(x) ** 2).sum()))
    x = jnp.cos(jnp.arange(64.0)).reshape(4, 16)

    np.testing.assert_allclose(moved.weight, low.weight, rtol=1e-5)
    assert lies(moved.weight) == base
    found = pm.named_leaves(gradient(moved, jax.device_put(x, on("data", mesh=EXPLICIT))))
    for name, expected in pm.named_leaves(gradient(low, x)).items():
        np.testing.assert_allclose(found[name], expected, rtol=1e-3, atol=1e-4)
        assert lies(found[name]) == lies(split[name])
