"""`quantize`: matrices as integers of few bits, with scales."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytreemod as pm
from pytreemod import nn
from tests.helpers.comparing import assert_same
from tests.helpers.equations import operations
from tests.labels import label

KEY = jax.random.key(0)
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
X = jnp.asarray([1.0, -2.0, 0.5])


def mlp(**options):
    return nn.MLP(3, 2, 4, 1, jnp.tanh, key=KEY, **options)


def small(model, form="int8"):
    return pm.quantize(model, form)


def parts(leaf):
    leaves = pm.named_leaves(leaf)
    return np.asarray(leaves["numbers"]), np.asarray(leaves["scales"])


def restated(rows, levels):
    """The formula, for groups in NumPy: numbers and scales, in the dtype of the rows."""
    wide = rows.astype(np.float32)
    scales = (np.abs(wide).max(axis=-1, keepdims=True) / np.float32(levels)).astype(rows.dtype)
    steps = scales.astype(np.float32)
    numbers = np.rint(np.divide(wide, steps, where=steps > 0, out=np.zeros_like(wide)))
    return np.clip(numbers, -levels, levels).astype(np.int8), scales[..., 0]


def unpacked(packed, n):
    """Nibbles in two's complement, the lower one first; by Python alone."""
    rows = []
    for row in packed.tolist():
        nibbles = [half for byte in row for half in (byte % 16, byte // 16)]
        rows.append([half - 16 if half > 7 else half for half in nibbles][:n])
    return np.asarray(rows, np.int8).reshape(len(rows), n)


@pytest.mark.parametrize("dtype", DTYPES, ids=label)
@pytest.mark.parametrize("shape", [(5, 6), (4, 9), (3, 2, 3, 2)], ids=label)
@pytest.mark.parametrize(
    ("form", "group"),
    [("int8", None), ("int4", None), ("int8,group_size=3", 3), ("int4, group_size = 3", 3)],
)
@pytest.mark.sampled
def test_it_is_the_formula(form, group, shape, dtype):
    """Against NumPy: numbers, scales and values; packed by row, whatever its size."""
    array = np.asarray(jax.random.normal(KEY, shape).astype(dtype))
    n = array[0].size
    rows = array.reshape(shape[0], -1, group or n)
    levels = 127 if "8" in form else 7
    numbers, scales = restated(rows, levels)

    vector = pm.computed(jnp.negative, jnp.ones(3))  # It is left alone.
    leaf = pm.quantize({"w": jnp.asarray(array), "v": vector}, form)["w"]
    ours, our_scales = parts(leaf)

    assert our_scales.dtype == array.dtype
    np.testing.assert_allclose(our_scales.astype("f4"), scales.astype("f4"), rtol=1e-6)
    assert ours.dtype == (np.int8 if levels == 127 else np.uint8)
    assert ours.shape == (shape[0], n if levels == 127 else -(-n // 2))
    ours = ours if levels == 127 else unpacked(ours, n)
    assert ours.tolist() == numbers.reshape(shape[0], n).tolist()
    value = leaf.value()
    assert value.dtype == array.dtype
    expected = numbers.astype(array.dtype) * scales[..., None].astype(array.dtype)
    np.testing.assert_allclose(
        np.asarray(value, "f4"), expected.reshape(shape).astype("f4"), rtol=1e-6
    )
    error = np.abs(expected.astype("f4") - rows.astype("f4"))
    rounding = 0.3 if dtype != jnp.float32 and levels == 127 else 0.01
    assert bool((error <= (0.5 + rounding) * scales[..., None].astype("f4")).all())


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.sampled
def test_rows_of_zeros_and_rows_without_numbers(form):
    """They are unchanged; and so are rows whose scale would be too small for a number."""
    zero = jnp.zeros((2, 3)).at[1, 2].set(4.0)
    assert small({"w": zero}, form)["w"].value().tolist() == zero.tolist()
    assert small({"w": jnp.zeros((0, 3))}, form)["w"].value().shape == (0, 3)
    tiny = jnp.full((1, 2), 6e-8, jnp.float16)
    value = np.asarray(small({"w": tiny}, form)["w"].value(), "f4")
    assert bool((np.abs(value - np.asarray(tiny, "f4")) <= 3.1e-8).all())


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.sampled
def test_tiny_rows_are_not_zeroed(form):
    """Their scale was a number that compiled code takes for zero."""
    sizes = jnp.asarray([2e-38, 1e-37, 1e-36, 1e-35, 1e-30])
    rows = jnp.broadcast_to(sizes[:, None], (5, 8))
    np.testing.assert_allclose(small({"w": rows}, form)["w"].value(), rows, rtol=0.01)


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.sampled
def test_what_is_tiny_in_half_precision_is_not_clipped(form):
    """Where the nearest scale is too small by far, the next one is taken."""
    rows = jax.random.normal(KEY, (8, 9)).astype(jnp.float16) * jnp.float16(1e-5)
    leaf = small({"w": rows}, form)["w"]
    _, scales = parts(leaf)

    error = np.abs(np.asarray(leaf.value(), "f4") - np.asarray(rows, "f4"))
    assert bool((error <= 0.501 * scales.astype("f4")).all())


# ---- quantized leaves


@pytest.mark.parametrize(
    ("form", "quantized"),
    [
        ("int8", ["0.weight", "1.weight", "2.weight"]),
        (pm.by({...: "int4"}), ["0.weight", "1.weight", "2.weight"]),
        (pm.by({nn.Linear: "int4", ...: None}), ["2.weight"]),
        (pm.by({"2.weight": "int8", nn.LSTMCell: "int4", ...: None}), ["2.weight"]),
        (pm.by({pm.matrices: "int8", ...: None}), ["0.weight", "2.weight"]),
    ],
    ids=label,
)
@pytest.mark.sampled
def test_the_matrices_among_what_is_chosen_are_quantised(form, quantized):
    """By each kind of selector; other leaves are unchanged, and shared."""
    keys = jax.random.split(KEY, 3)
    conv = nn.Conv2d(2, 2, 3, key=keys[1])
    model = [nn.Embedding(5, 4, key=keys[0]), conv, nn.Linear(4, 2, key=keys[2]), nn.LayerNorm(4)]
    model += [jnp.ones((2, 2), int), jnp.ones((2, 2), complex), "text", None]
    made = pm.quantize(model, form)
    found = pm.named_leaves(made)

    assert [name[:-8] for name in found if name.endswith(".numbers")] == quantized
    assert made[3].weight is model[3].weight
    assert made[4] is model[4]
    assert made[2].bias is model[2].bias
    assert_same(pm.quantize(model, form), made)


def test_a_model_reads_as_its_resolved_one():
    model = pm.quantize(mlp(), pm.by({"layers.0": "int8", ...: "int4"}))
    resolved = pm.resolve(model)

    assert jax.tree.structure(resolved) == jax.tree.structure(mlp())
    assert not isinstance(pm.named_leaves(resolved)["layers.0.weight"], pm.Computed)
    assert_same(model(X), resolved(X))
    assert isinstance(model.layers[0].weight, jax.Array)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.sampled
def test_the_program_is_the_hand_written_one(form):
    leaves, treedef = jax.tree.flatten(small(nn.Linear(8, 6, key=KEY), form))

    def ours(leaves, x):
        return treedef.unflatten(leaves)(x)

    def by_hand(leaves, x):
        numbers, scales, bias = leaves
        if form == "int4":
            halves = jnp.stack([numbers & 15, numbers >> 4], -1).reshape(6, 8)
            numbers = (halves ^ 8).astype(jnp.int8) - 8
        return jnp.inner(x, numbers.astype(jnp.float32) * scales) + bias[None]

    x = jnp.ones((3, 8))
    assert operations(ours, leaves, x) == operations(by_hand, leaves, x)


def test_in_a_traced_function_rows_that_are_not_finite_read_as_nan():
    rows = jnp.asarray([[1.0, jnp.inf], [jnp.nan, 2.0], [1.0, 2.0]])
    value = jax.jit(lambda w: small({"w": w})["w"].value())(rows)

    assert jnp.isnan(value).all(axis=1).tolist() == [True, True, False]


def make_stack():
    return nn.Stack(ft.partial(nn.Linear, 3, 3), 2, key=KEY)


def test_a_file_has_its_parts(tmp_path):
    """Two numbers a byte there, too; read alone, or into an abstract model."""
    model = [small(make_stack(), "int4"), pm.lora(small(mlp(), "int4"), "**.weight", 1, key=KEY)]
    pm.save(tmp_path / "model", model)

    assert pm.load(tmp_path / "model", model) == model
    like = small(pm.filter_eval_shape(make_stack), "int4")
    assert like == pm.filter_eval_shape(lambda: small(make_stack(), "int4"))
    pm.save(tmp_path / "stack", model[0])
    assert pm.load(tmp_path / "stack", like) == model[0]
    layers = [*model[0]]
    assert pm.load(tmp_path / "stack", layers) == layers
