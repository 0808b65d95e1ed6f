"""`LinearGeneral` and `Einsum`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod import nn
from pytreemod.errors import ArgumentError, ShapeError
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close, wave


@pytest.mark.parametrize("axis", [(-2, -1), (1, 2), (-1, 1)], ids=label)
def test_linear_general_is_flaxs(key, axis):
    """The same sums, by NumPy and by Flax, with its names; the new axes stand last."""
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


def test_over_the_last_axis_it_is_linear(key):
    """The same initial numbers, but for the layout, and so the same range."""
    general, plain = nn.LinearGeneral(64, 32, key=key), nn.Linear(64, 32, key=key)

    assert_close(general.bias, plain.bias)
    assert general.weight.shape == (64, 32)
    assert 0.1 < float(jnp.abs(general.weight).max()) <= 1 / 8


@pytest.mark.parametrize("make", ["LinearGeneral", "Einsum"])
def test_fan_in_is_all_that_is_summed_over(key, make):
    """lecun_normal() gives variance 1 / fan_in, for several axes, and for matrices side by side."""
    init = jax.nn.initializers.lecun_normal()
    if make == "LinearGeneral":
        layer = nn.LinearGeneral((16, 8), (4, 8), (-2, -1), key=key, weight_init=init)
    else:
        layer = nn.Einsum("...hij,jhoi->...ho", (8, 6, 16, 16), key=key, weight_init=init)

    assert abs(float(jnp.var(layer.weight)) * 128 - 1) < 0.1


def test_einsum_keeps_the_axes_apart(key):
    """What is called with (in, out) is put where the equation has these."""

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
    ("equation", "bias", "x", "text"),
    [
        ("...i,io->...o", None, (4,), r"x with axes '\.\.\.i', where i=3, o=2, got f32\[4\]"),
        ("...i,io->...o", None, (), r"x with axes '\.\.\.i', where i=3, o=2, got f32\[\]"),
        ("bi,io->bo", None, (7, 4, 3), r"x with axes 'bi', where i=3, o=2, got f32\[7,4,3\]"),
        ("...i,io->...o", (3,), (3,), r"bias_shape to fit the last axes of '\.\.\.o', got \(3,\)"),
        ("...i,io->...o", (1, 2), (3,), r"bias_shape to fit the last axes .*, got \(1, 2\)"),
    ],
    ids=label,
)
def test_einsum_refuses_what_is_not_as_the_equation_says(key, equation, bias, x, text):
    """Sizes, axes, and a bias that would broadcast over the batch."""
    with pytest.raises(ShapeError, match=rf"^Einsum\(equation=.*\): expected {text}"):
        nn.Einsum(equation, (3, 2), bias, key=key)(jnp.ones(x))


@pytest.mark.parametrize(
    "equation",
    ["i,io", "i->i", "...i,...io->...o", "...i,io->o", "ii,io->o", "i,io->oz", "i,i1->1", None],
    ids=label,
)
def test_what_is_no_equation_is_refused(key, equation):
    """The weight has no batch axes; what x has stays."""
    with pytest.raises(ArgumentError, match=r"^Einsum\(equation\): expected an equation of x and"):
        nn.Einsum(equation, (3, 2), key=key)
    with pytest.raises(ArgumentError, match=r"^Einsum\(equation\): expected 1 letters for .*'io'"):
        nn.Einsum("i,io->o", (3,), key=key)


@pytest.mark.parametrize(
    ("sizes", "axis", "x", "text"),
    [
        ((2, 3), (-2, -1), (3, 2), r"x with axes \(-2, -1\) of sizes \(2, 3\), got f32\[3,2\]"),
        ((2, 3), (-2, -1), (3,), r"x with axes \(-2, -1\) of sizes \(2, 3\), got f32\[3\]"),
        ((3, 3), (0, -1), (3,), r"x with axes \(0, -1\) of sizes \(3, 3\), got f32\[3\]"),
    ],
    ids=label,
)
def test_linear_general_refuses_other_axes(key, sizes, axis, x, text):
    """Of other sizes, too few, the same one twice."""
    with pytest.raises(ShapeError, match=rf"^LinearGeneral\(.*\): expected {text}"):
        nn.LinearGeneral(sizes, 2, axis, key=key)(jnp.ones(x))


@pytest.mark.parametrize("axis", [(-1,), (-1, -1), (0.5, 1), "ab", None], ids=label)
def test_linear_general_takes_an_axis_for_each_size(key, axis):
    """Different ones, as many as in_features."""
    with pytest.raises(ArgumentError, match=r"^LinearGeneral\(axis\): expected 2 different axes"):
        nn.LinearGeneral((2, 3), 4, axis, key=key)
