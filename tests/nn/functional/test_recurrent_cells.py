"""`gru_cell`, `lstm_cell` and `simple_cell`: one step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pytreemod.nn.functional import gru_cell, lstm_cell, simple_cell
from tests.labels import label
from tests.nn.numbers_to_compare import assert_close, wave

GATES = {"GRU": 3, "LSTM": 4, "RNN": 1}


def arrays_for(kind, batch=(), use_bias=True):
    """x, the hidden state, and the arrays of a cell of PyTorch, by their names."""
    gates, biases = GATES[kind] * 2, ("bias_ih", "bias_hh") if use_bias else ()
    weights = {"weight_ih": wave(gates, 3, phase=1), "weight_hh": wave(gates, 2, phase=2)}
    weights |= {name: wave(gates, phase=3 + i) for i, name in enumerate(biases)}
    hidden = wave(2, *batch, 2, phase=5)
    return wave(*batch, 3), tuple(hidden) if kind == "LSTM" else hidden[0], weights


def ours(kind, x, hidden, weights):
    """Our step, with our biases."""
    one, two = (weights.get(name) for name in ("bias_ih", "bias_hh"))
    pair = weights["weight_ih"], weights["weight_hh"]
    if kind != "GRU":
        bias = None if one is None else one + two
        return {"LSTM": lstm_cell, "RNN": simple_cell}[kind](x, hidden, *pair, bias)
    if one is None:
        return gru_cell(x, hidden, *pair)
    return gru_cell(x, hidden, *pair, one + two.at[4:].set(0), two[4:])


@pytest.mark.parametrize("use_bias", [True, False], ids=["biases", "no biases"])
@pytest.mark.parametrize("batch", [(), (5,)], ids=label)
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.sampled
def test_steps_and_their_gradients_are_pytorchs(torch, kind, batch, use_bias):
    """In float64: the gates are in its order, and the second bias of n is within the reset gate."""
    x, hidden, weights = jax.tree.map(
        lambda array: array.astype("f8"), arrays_for(kind, batch, use_bias)
    )
    cell = getattr(torch.nn, f"{kind}Cell")(3, 2, use_bias, dtype=torch.float64)
    cell.load_state_dict({name: torch.tensor(array) for name, array in weights.items()})
    start = jax.tree.map(lambda array: torch.tensor(array, requires_grad=True), hidden)
    theirs_x = torch.tensor(x, requires_grad=True)
    expected = cell(theirs_x, start)
    sum((out**3).sum() for out in jax.tree.leaves(expected)).backward()

    with jax.enable_x64(True):

        def loss(*arrays):
            out = ours(kind, *arrays)
            return sum(jnp.sum(leaf**3) for leaf in jax.tree.leaves(out)), out

        given = jax.tree.map(jnp.asarray, (x, hidden, weights))
        grads, out = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(*given)

    of_weights = {name: parameter.grad for name, parameter in cell.named_parameters()}
    theirs = (theirs_x.grad, jax.tree.map(lambda tensor: tensor.grad, start), of_weights)
    for mine, other in zip(
        jax.tree.leaves((out, grads)), jax.tree.leaves((expected, theirs)), strict=True
    ):
        assert_close(mine, other, rtol=1e-11, atol=1e-12)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def restated(kind, x, hidden, weights):
    """The formulas of the docstrings, in NumPy, with the biases left out."""
    w, u = weights["weight_ih"], weights["weight_hh"]
    if kind == "RNN":
        return np.tanh(x @ w.T + hidden @ u.T)
    if kind == "LSTM":
        h, c = hidden
        i, f, g, o = np.split(x @ w.T + h @ u.T, 4, -1)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        return sigmoid(o) * np.tanh(c), c
    (xr, xz, xn), (hr, hz, hn) = np.split(x @ w.T, 3, -1), np.split(hidden @ u.T, 3, -1)
    z = sigmoid(xz + hz)
    return (1 - z) * np.tanh(xn + sigmoid(xr + hr) * hn) + z * hidden


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("f4", 1e-5), ("bfloat16", 4e-2), ("f2", 5e-3)], ids=label
)
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.sampled
def test_steps_are_the_formulas(kind, dtype, tolerance):
    """Repeated in NumPy; narrow floats keep their dtype, and lose only their last digits."""
    given = arrays_for(kind, (2, 3), use_bias=False)
    narrow = jax.tree.map(lambda array: jnp.asarray(array / 2).astype(dtype), given)
    out = ours(kind, *narrow)

    expected = restated(kind, *jax.tree.map(lambda array: np.asarray(array, "f8"), narrow))
    for mine, other in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
        assert mine.dtype == jnp.dtype(dtype)
        assert_close(mine.astype("f4"), other, rtol=tolerance, atol=tolerance)


def test_a_simple_step_may_have_another_activation_and_add_the_hidden_state():
    """h' = phi(W x + U h + h)."""
    x, hidden, weights = arrays_for("RNN", (4,), use_bias=False)
    w, u = weights["weight_ih"], weights["weight_hh"]

    out = simple_cell(x, hidden, w, u, activation=jnp.sin, residual=True)

    assert_close(out, np.sin(x @ w.T + hidden @ u.T + hidden))
