"""`LinearGeneral`, `Einsum` and `Scale`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod import nn
from pytreemod.errors import ShapeError
from tests.helpers.meshes import EXPLICIT, lies, on
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close, wave


@pytest.mark.parametrize("axis", [(-2, -1), (1, 2), (-1, 1)], ids=label)
@pytest.mark.sampled
def test_linear_general_is_flaxs(key, axis):
    """The same sums in NumPy and in Flax, with Flax's names; the new axes are last."""
    nnx = pytest.importorskip(
        "flax.nnx", reason="compares numbers with Flax: tasks.py install peers"
    )
    x = wave(5, 2, 3)
    sizes = tuple(x.shape[i] for i in axis)
    layer = nn.LinearGeneral(sizes, (4, 2), axis=axis, key=key)

    out = layer(jnp.asarray(x))

    letters = [("a", "b", "c")[i] for i in axis]
    by_hand = np.einsum(f"abc,{''.join(letters)}yz->ayz", x, layer.weight) + np.asarray(layer.bias)
    assert_close(out, by_hand)
    # It sorts the axes, but not the sizes that belong to them.
    if axis != (-1, 1):
        theirs = nnx.LinearGeneral(sizes, (4, 2), axis=axis, rngs=nnx.Rngs(0))
        theirs.kernel[...], theirs.bias[...] = layer.weight, layer.bias
        assert_close(out, theirs(jnp.asarray(x)))


@pytest.mark.parametrize("make", ["LinearGeneral", "Einsum"])
@pytest.mark.sampled
def test_fan_in_is_all_that_is_summed_over(key, make):
    """lecun_normal() gives variance 1 / fan_in, for several axes, and for matrices side by side."""
    init = jax.nn.initializers.lecun_normal()
    if make == "LinearGeneral":
        layer = nn.LinearGeneral((16, 8), (4, 8), (-2, -1), key=key, weight_init=init)
    else:
        layer = nn.Einsum("...hij,jhoi->...ho", (8, 6, 16, 16), key=key, weight_init=init)

    assert abs(float(jnp.var(layer.weight)) * 128 - 1) < 0.1


def test_einsum_keeps_the_axes_apart(key):
    """An initializer that expects (in, out) is applied to these axes of the equation."""

    def numbered(key, shape, dtype):
        return jnp.arange(np.prod(shape), dtype=dtype).reshape(shape)

    layer = nn.Einsum("...hi,ohi->...ho", (4, 2, 3), key=key, weight_init=numbered)

    assert_close(layer.weight, np.stack([np.arange(12).reshape(3, 4).T] * 2, 1))


@pytest.mark.parametrize(
    ("equation", "weight", "bias", "x"),
    [
        ("...i,io->...o", (3, 2), (2,), (5, 4, 3)),
        ("bi, io -> ob", (3, 2), None, (5, 3)),
        ("b...i,ij->b...j", (3, 2), (1,), (5, 2, 2, 3)),
        ("i,o->io", (2,), (3, 1), (3,)),
    ],
)
def test_einsum_is_numpys(key, equation, weight, bias, x):
    """With the bias on the last axes."""
    ones = jax.nn.initializers.ones
    layer = nn.Einsum(equation, weight, bias, key=key, bias_init=ones)
    x = wave(*x)

    expected = np.einsum(equation, x, layer.weight) + (0 if bias is None else 1)
    assert_close(layer(jnp.asarray(x)), expected)
    assert (layer.bias is None) == (bias is None)


@pytest.mark.parametrize(
    ("equation", "x", "weight"),
    [
        ("bij,k->bk", (2, 30, 40), (3,)),
        ("...ij, ki -> ...i", (2, 5, 3, 700), (600, 3)),
        ("j...i,i->...", (900, 2, 3), (3,)),
    ],
)
def test_axes_of_one_array_alone_are_added_up_in_single(key, equation, x, weight):
    """Without a product, a sum of narrow floats would stop growing."""
    arrays = [jnp.asarray(1 + wave(*shape) / 4, jnp.bfloat16) for shape in (x, weight)]
    layer = nn.Einsum(equation, weight, key=key).replace(weight=arrays[1])
    expected = np.einsum(equation, *(np.asarray(array, "f8") for array in arrays))

    found = layer(arrays[0])

    assert found.dtype == jnp.bfloat16
    assert_close(found.astype("f4"), expected, rtol=1e-2, atol=0)


@pytest.mark.parametrize(
    ("x_at", "weight_at", "y_at"),
    [
        (("data",), (None, None, "model"), ("data", None, "model")),
        (("data", None, "model"), (None, None, "model"), ("data", "model")),
    ],
)
def test_a_general_product_on_a_mesh_is_split_as_its_operands(key, x_at, weight_at, y_at):
    """The axes that are not summed keep their shardings, wherever the summed ones are."""
    x = jnp.asarray(wave(4, 2, 2, 3))
    layer = nn.LinearGeneral((2, 3), 4, axis=(1, 3), use_bias=False, key=key)
    split = layer.replace(weight=jax.device_put(layer.weight, on(*weight_at, mesh=EXPLICIT)))
    call = jax.jit(lambda layer, x: layer(x))
    found = call(split, jax.device_put(x, on(*x_at, mesh=EXPLICIT)))

    assert lies(found) == y_at
    assert_close(found, layer(x))


def test_scale_begins_with_one_or_as_it_is_told(key):
    """A factor for each entry of the last axes; 1 broadcasts to any size."""
    normal, x = jax.nn.initializers.normal(), jnp.asarray(wave(2, 3, 4))
    layer = nn.Scale((3, 1), weight_init=normal, key=key)

    assert_close(nn.Scale()(x), x)
    assert_close(layer.weight, normal(key, (3, 1), jnp.float32))
    assert_close(layer(x), x * layer.weight[None])


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda key: nn.LinearGeneral((2, 3), 2, (-2, -1), key=key), (3, 2)),
        (lambda key: nn.Einsum("bi,io->bo", (3, 2), None, key=key), (7, 4, 3)),
        (lambda key: nn.Einsum("...i,io->...o", (3, 2), (1, 2), key=key), (3,)),
    ],
)
def test_axes_that_do_not_fit_are_refused(key, layer, shape):
    """Of the input, or of a bias that would broadcast."""
    with pytest.raises(ShapeError, match=r"LinearGeneral|Einsum"):
        layer(key)(jnp.ones(shape))
