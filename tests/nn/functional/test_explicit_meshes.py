"""Formulas of arrays on a mesh with explicit axes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from tests.helpers.counting_collectives import collectives
from tests.helpers.meshes import EXPLICIT, MESH, lies, on

X = np.arange(8 * 16, dtype=np.float32).reshape(8, 16) / 64 - 1
WEIGHT = np.cos(np.arange(32 * 16, dtype=np.float32)).reshape(32, 16)
BIAS = np.arange(32, dtype=np.float32)


def put(array: Any, spec: Any) -> jax.Array:
    """An array on the mesh with a spec; without a mesh if the spec is None."""
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
    """Whatever their shardings; gradients are sharded as their arrays."""

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
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    of_all = (2 * expected.T @ X, 2 * expected.sum(0), 2 * expected @ WEIGHT)
    for gradient, right, array in zip(gradients, of_all, (weight, bias, x), strict=True):
        np.testing.assert_allclose(gradient, right, rtol=1e-4, atol=1e-3)
        if isinstance(array.sharding, jax.NamedSharding):
            assert lies(gradient) == lies(array)


@pytest.mark.parametrize("layer", [nn.Linear(16, 32, key=jax.random.key(0)), nn.LayerNorm(16)])
def test_the_gradient_of_a_bias_gathers_no_activations(layer: Any):
    """Each device sums over its part of the batch; devices add arrays of the bias's size."""
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
        # The inputs are not arguments, so that other gradients are needed, too.
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


def test_outside_of_compiled_code_it_is_the_same():
    """Also where the weight is on no mesh, and where numbers are read from a table."""
    x, weight = put(X, ("data",)), put(WEIGHT, ("data",))
    np.testing.assert_allclose(nn.functional.linear(x, weight), X @ WEIGHT.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        nn.functional.linear(x, jnp.asarray(WEIGHT)), X @ WEIGHT.T, rtol=1e-5, atol=1e-5
    )
    rows = put([3, 1] * 4, ("data",))
    read = nn.functional.embedding(rows, jnp.asarray(WEIGHT))
    assert lies(read) == ("data",)
    np.testing.assert_array_equal(read, WEIGHT[[3, 1] * 4])


def agrees(formula: Any, arrays: list[Any], specs: list[Any], y_at: Any, atol: float = 1e-4):
    """The formula, and its gradient, equal those on one device."""

    def loss(inexact: list[Any], others: list[Any]) -> Any:
        y = formula(*others, *inexact).astype(jnp.float32)
        return jnp.sin(y).sum(), y

    step = jax.jit(jax.grad(loss, has_aux=True))
    n = sum(not np.issubdtype(array.dtype, np.floating) for array in arrays)
    put_in = [put(array, spec) for array, spec in zip(arrays, specs, strict=True)]
    gradients, y = step(put_in[n:], put_in[:n])
    whole = [jnp.asarray(array) for array in arrays]
    expected, right = step(whole[n:], whole[:n])
    assert lies(y) == y_at
    np.testing.assert_allclose(y, right, atol=atol)
    for gradient, other, array in zip(gradients, expected, put_in[n:], strict=True):
        np.testing.assert_allclose(gradient, other, atol=atol)
        assert isinstance(array.sharding, jax.sharding.SingleDeviceSharding) or (
            lies(gradient) == lies(array)
        )


EQUATIONS: list[tuple[str, Any, Any, Any]] = [
    ("...i,io->...o", ("data",), ("data", "model"), ("data", None, "model")),
    # Experts: an axis that only the weight splits is split in the result, and x in parts.
    ("bei,eio->beo", ("data",), ("model", "data"), ("data", "model")),
    ("bei,eio->beo", ("data", "model"), (None, "model"), ("data", "model")),
    ("bei,eio", ("data",), (None, None, "model"), ("data", "model")),
    # An axis that the weight has for itself.
    ("...i,iok->...o", ("data",), (None, None, "model"), ("data",)),
]


@pytest.mark.parametrize(("equation", "x_at", "weight_at", "y_at"), EQUATIONS)
def test_sums_by_an_equation(equation: str, x_at: Any, weight_at: Any, y_at: Any):
    """Letters lead as axes do."""
    x = X.reshape(4, 4, 8)
    shapes = {"io": (8, 8), "eio": (4, 8, 8), "iok": (8, 8, 8)}
    weight = np.resize(WEIGHT, shapes[equation.split(",")[1].split("->")[0]])

    def formula(x: Any, weight: Any) -> Any:
        return nn.functional.einsum(x, weight, equation=equation)

    agrees(formula, [x, weight], [x_at, weight_at], y_at)


TABLES: list[tuple[Any, Any, Any]] = [
    (("data",), None, ("data",)),
    (("data",), ("model",), ("data",)),
    (("data",), (None, "model"), ("data", None, "model")),
    (("data",), ("data",), ("data",)),
    (("data", "model"), ("data", "model"), ("data", "model")),
]


@pytest.mark.parametrize(("x_at", "weight_at", "y_at"), TABLES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_a_table(x_at: Any, weight_at: Any, y_at: Any, dtype: str):
    """Of one that is split by rows, too; a number out of range is nan, as everywhere."""
    rows = np.arange(16, dtype=np.int32).reshape(4, 4) % 5
    table = np.asarray(jnp.asarray(WEIGHT[:8, :8], dtype))
    agrees(nn.functional.embedding, [rows, table], [x_at, weight_at], y_at, 1e-2)
    beyond = nn.functional.embedding(put(rows + 4, x_at), put(table, weight_at))
    np.testing.assert_array_equal(np.isnan(beyond)[..., 0], rows + 4 >= 8)


def test_a_cache_that_is_on_the_mesh_stays_as_it_lies():
    """So a loop can carry it; a cache without a mesh is sharded as the first keys."""
    key = put(np.cos(np.arange(4 * 3 * 2 * 4)).reshape(4, 3, 2, 4), ("data", None, "model"))
    empty = nn.functional.empty_cache((4,), 6, heads=2, size=4, v_size=4)
    first = nn.functional.extend_cache(empty, key, key)
    assert [lies(array) for array in first.cache] == [("data", "model")] * 2 + [("data",)]
    whole = tuple(put(array, ()) for array in empty)
    second = nn.functional.extend_cache(whole, key, key)  # pyright: ignore[reportArgumentType]
    assert [lies(array) for array in second.cache] == [()] * 3
    for one, other in zip(first.cache, second.cache, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.usefixtures("optimized")
def test_what_is_sent_is_the_weight():
    """One sum over devices by row, and nothing by column; along the batch's axis one gathering."""

    def sent(x_at: Any, weight_at: Any) -> Any:
        lowered = jax.jit(nn.functional.linear).lower(put(X, x_at), put(WEIGHT, weight_at))
        return collectives(lowered.compile().as_text())

    assert sent(("data",), ("model",)).numbers == {}
    assert sent(("data", "model"), (None, "model")).numbers == {"all-reduce": 1}
    along = sent(("data",), ("data",))
    assert (along.numbers, along.size) == ({"all-gather": 1}, WEIGHT.size)


def test_a_weight_that_was_gathered_is_not_kept_for_the_backward_pass():
    """Each device stores its part; a loop over layers would store all gathered weights."""
    x, weight = put(X, ("data",)), put(WEIGHT, ("data",))
    _, back = jax.vjp(nn.functional.linear, x, weight)
    kept = [leaf for leaf in jax.tree.leaves(back) if leaf.shape == weight.shape]
    assert [lies(leaf) for leaf in kept] == [("data",)]


def test_elsewhere_no_operation_is_added():
    """On one device, and on a mesh whose axes are not explicit."""
    for mesh in (None, MESH):

        def here(array: Any, mesh: Any = mesh) -> jax.Array:
            return jnp.asarray(array) if mesh is None else jax.device_put(array, on("data"))

        x, weight, bias = here(X), here(WEIGHT), here(BIAS)
        found = jax.make_jaxpr(nn.functional.linear)(x, weight, bias)
        names = [eqn.primitive.name for eqn in found.eqns]
        assert names == ["dot_general", "broadcast_in_dim", "add"]
        assert found.eqns[0].params["out_sharding"] is None
        read = jax.make_jaxpr(nn.functional.embedding)(here(np.arange(8)), weight)
        assert "reshard" not in str(read)
