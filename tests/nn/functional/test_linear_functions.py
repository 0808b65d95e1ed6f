"""`linear`, `linear_general`, `einsum` and `scale`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod.nn.functional import einsum, linear, linear_general, scale
from tests.helpers.meshes import EXPLICIT, lies, on
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close, wave


@pytest.mark.parametrize("batch", [(), (5,), (2, 3)], ids=label)
@pytest.mark.parametrize("with_bias", [True, False])
def test_linear_is_pytorchs(torch, batch, with_bias):
    """The same numbers as torch.nn.functional.linear, for any leading axes."""
    x, weight, bias = wave(*batch, 3), wave(4, 3, phase=1), wave(4, phase=2)
    given = [x, weight, bias][: 3 if with_bias else 2]

    assert_close(
        linear(*map(jnp.asarray, given)),
        torch.nn.functional.linear(*map(torch.tensor, given)),
    )


def test_linear_is_a_product_with_the_transposed_matrix():
    """linear(x, W, b) = x W^T + b, restated in NumPy."""
    x, weight, bias = wave(2, 5, 3), wave(4, 3), wave(4)

    assert_close(linear(*map(jnp.asarray, (x, weight, bias))), x @ weight.T + bias)


@pytest.mark.parametrize(
    ("weight", "bias"), [((3, 4), (3,)), ((4, 3), (3,)), ((4, 3), (4, 1))], ids=label
)
def test_linear_never_broadcasts_a_misfit(weight, bias):
    """Sizes that do not fit raise, where NumPy's rules would find some way to broadcast."""
    with pytest.raises((TypeError, ValueError), match=r"shape|size"):
        linear(jnp.ones((4, 3)), jnp.ones(weight), jnp.ones(bias))


def test_linear_accepts_numpy_arrays():
    """NumPy arrays are arrays; float64 ones become JAX's default float."""
    assert linear(np.ones((2, 3)), jnp.ones((4, 3))).dtype == jnp.float32


def test_sums_over_several_axes_are_numpys():
    """In any order, with the new axes last; `einsum` says the same with letters."""
    x, weight, bias = (jnp.asarray(wave(*shape)) for shape in ((2, 3, 4), (4, 2, 5), (5,)))
    expected = np.einsum("abc,cad->bd", x, weight) + np.asarray(bias)

    assert_close(linear_general(x, weight, bias, axis=(-1, 0)), expected)
    assert_close(einsum(x, weight, bias, equation="abc,cad->bd"), expected)
    assert_close(linear_general(x, weight[:, 0]), np.asarray(x) @ np.asarray(weight[:, 0]))


def test_scale_belongs_to_the_last_axes():
    """Elementwise, where 1 broadcasts to any size."""
    x, weight = wave(2, 3, 4), wave(3, 1)

    assert_close(scale(jnp.asarray(x), jnp.asarray(weight)), x * weight)


@pytest.mark.parametrize(
    ("equation", "x", "weight"),
    [
        ("bij,k->bk", (2, 30, 40), (3,)),
        ("...ij, ki -> ...i", (2, 5, 3, 700), (600, 3)),
        ("j...i,i->...", (900, 2, 3), (3,)),
    ],
)
@pytest.mark.sampled
def test_axes_of_one_array_alone_are_added_up_in_single_precision(equation, x, weight):
    """Without a product, a sum of narrow floats would stop growing."""
    arrays = [jnp.asarray(1 + wave(*shape) / 4, jnp.bfloat16) for shape in (x, weight)]
    expected = np.einsum(equation, *(np.asarray(array, "f8") for array in arrays))

    found = einsum(*arrays, equation=equation)

    assert found.dtype == jnp.bfloat16
    assert_close(found.astype("f4"), expected, rtol=1e-2, atol=0)
    wide = [array.astype("f4") for array in arrays]
    assert_close(einsum(*wide, equation=equation), expected, rtol=1e-5)


@pytest.mark.parametrize("equation", ["ij,jk", "ii,ij->j", "ij,jk->ikl"])
def test_equations_are_jaxs(equation):
    """Without an arrow, with a diagonal, with a letter too many: as `jnp.einsum` has it."""
    x, weight = jnp.asarray(wave(3, 3)), jnp.asarray(wave(3, 2))
    if "l" in equation:
        with pytest.raises((TypeError, ValueError), match="l"):
            einsum(x, weight, equation=equation)
    else:
        assert_close(einsum(x, weight, equation=equation), jnp.einsum(equation, x, weight))


@pytest.mark.parametrize(
    ("x_at", "weight_at", "y_at"),
    [
        (("data",), (), ("data",)),
        (("data",), (None, None, "model"), ("data", None, "model")),
        (("data", None, "model"), (None, None, "model"), ("data", "model")),
    ],
)
def test_a_general_product_is_split_as_its_operands(x_at, weight_at, y_at):
    """The axes that are not summed keep their shardings, wherever the summed ones are."""
    x, weight = jnp.asarray(wave(4, 2, 2, 3)), jnp.asarray(wave(2, 3, 4))
    call = jax.jit(lambda x, weight: linear_general(x, weight, axis=(1, 3)))
    x_split = jax.device_put(x, on(*x_at, mesh=EXPLICIT))
    weight_split = jax.device_put(weight, on(*weight_at, mesh=EXPLICIT))
    found = call(x_split, weight_split)

    assert lies(found) == y_at
    assert_close(found, call(x, weight))
