"""`GRUCell`, `LSTMCell`, `SimpleCell`: their initial arrays, and the inputs that they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod import nn
from pytreemod.errors import ShapeError
from tests.nn.numbers_to_compare import assert_close, wave

KEY = jax.random.key(0)
CELLS = [nn.GRUCell, nn.LSTMCell, nn.SimpleCell]
every_cell = pytest.mark.parametrize("make", CELLS, ids=lambda make: make.__name__)


@every_cell
def test_first_weights_by_initializers_are_drawn_for_each_gate(make):
    """With the sizes of one gate: as one matrix an orthogonal one would be so for none of them."""
    seen = []

    def start(key, shape, dtype):
        seen.append(shape)
        return jax.random.normal(key, shape, dtype)

    options = {"weight_init": start, "bias_init": start}
    orthogonal = jax.nn.initializers.orthogonal()
    cell = make(3, 4, key=KEY, recurrent_weight_init=orthogonal, **options)

    assert set(seen) == {(3, 4), (4,)}
    for matrix in np.split(np.asarray(cell.weight_hh), len(cell.weight_hh) // 4):
        assert_close(matrix @ matrix.T, np.eye(4))
    parts = np.split(np.asarray(cell.weight_ih), len(cell.weight_ih) // 4)
    assert len({part.tobytes() for part in parts}) == len(parts)


def test_a_simple_cell_starts_as_in_flax():
    """LeCun's spread, an orthogonal matrix, and zeros."""
    cell = nn.SimpleCell(100, 50, key=KEY)

    assert abs(float(jnp.std(cell.weight_ih)) - 0.1) < 0.005
    assert_close(cell.weight_hh @ cell.weight_hh.T, np.eye(50), atol=1e-5)
    assert cell.bias.tolist() == [0] * 50
    assert (cell.activation, cell.residual) == (jnp.tanh, False)


@every_cell
@pytest.mark.slow
def test_weights_are_the_same_without_biases(make):
    """And in the dtype that was asked for."""
    with_bias, without = (make(3, 2, flag, jnp.bfloat16, key=KEY) for flag in (True, False))

    assert {leaf.dtype.name for leaf in jax.tree.leaves(with_bias)} == {"bfloat16"}
    assert (with_bias.weight_ih == without.weight_ih).all()
    assert (with_bias.weight_hh == without.weight_hh).all()
    assert len(jax.tree.leaves(without)) == 2


@every_cell
@pytest.mark.sampled
def test_the_first_carry_is_of_zeros_and_keeps_its_dtype(make):
    """With the batch axes of the input, in the dtype that a step gives."""
    cell, x = make(3, 2, key=KEY, dtype=jnp.bfloat16), jnp.ones((5, 3), jnp.float32)

    for dtype in (None, jnp.float32):
        with jax.numpy_dtype_promotion("standard"):
            carry = cell.initialize_carry(x.shape, dtype)
            after = cell(x if dtype else x.astype(jnp.bfloat16), carry)
        assert jax.tree.map(jnp.shape, carry) == jax.tree.map(jnp.shape, after)
        assert jax.tree.map(jnp.result_type, carry) == jax.tree.map(jnp.result_type, after)
        assert not any(leaf.any() for leaf in jax.tree.leaves(carry))


# ---- formulas


def sigmoid(x):
    """By NumPy."""
    return 1 / (1 + np.exp(-x))


def by_hand(cell, x, hidden):
    """A step by the formula of the docstring, in NumPy."""
    w, u, b = (np.asarray(a, "f8") for a in (cell.weight_ih, cell.weight_hh, cell.bias))
    x, hidden = jax.tree.map(lambda a: np.asarray(a, "f8"), (x, hidden))
    if isinstance(cell, nn.SimpleCell):
        return np.tanh(x @ w.T + hidden @ u.T + b)
    if isinstance(cell, nn.LSTMCell):
        h, c = hidden
        i, f, g, o = np.split(x @ w.T + h @ u.T + b, 4, -1)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        return sigmoid(o) * np.tanh(c), c
    (xr, xz, xn), (hr, hz, hn) = np.split(x @ w.T + b, 3, -1), np.split(hidden @ u.T, 3, -1)
    z = sigmoid(xz + hz)
    n = np.tanh(xn + sigmoid(xr + hr) * (hn + np.asarray(cell.bias_n, "f8")))
    return (1 - z) * n + z * hidden


@every_cell
@pytest.mark.parametrize(("dtype", "tolerance"), [("f4", 1e-5), ("bfloat16", 4e-2), ("f2", 5e-3)])
def test_steps_are_the_formulas(make, dtype, tolerance):
    """With biases, for a batch; narrow floats keep their dtype, and lose only their last digits."""
    cell = make(3, 2, dtype=dtype, key=KEY)
    x = jnp.asarray(wave(2, 3, 3), dtype)
    hidden = jax.tree.map(lambda a: a + 0.5, cell.initialize_carry(x.shape))
    out = cell(x, hidden)

    expected = by_hand(cell, x, hidden)
    for mine, other in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
        assert mine.dtype == jnp.dtype(dtype)
        assert_close(mine.astype("f4"), other, rtol=tolerance, atol=tolerance)


def test_a_simple_step_may_have_another_activation_and_add_the_hidden_state():
    """h' = phi(W x + U h + h), where phi may be learnt."""
    options = {"use_bias": False, "residual": True, "key": KEY}
    cell = nn.SimpleCell(3, 2, activation=jnp.sin, **options)
    x, hidden = wave(4, 3), wave(4, 2)

    out = cell(jnp.asarray(x), jnp.asarray(hidden))

    assert_close(out, np.sin(x @ cell.weight_ih.T + hidden @ cell.weight_hh.T + hidden))
    learnt = nn.SimpleCell(3, 2, activation=nn.Linear(2, 2, key=KEY), **options)
    assert len(jax.tree.leaves(learnt)) == 4


@every_cell
def test_a_carry_of_another_shape_is_refused(make):
    """It would broadcast over a batch."""
    cell = make(3, 2, key=KEY)
    carry = cell.initialize_carry((3,))

    with pytest.raises(ShapeError, match=make.__name__):
        cell(jnp.ones((4, 3)), carry)
