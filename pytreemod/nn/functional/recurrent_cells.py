"""`gru_cell`, `lstm_cell`, `simple_cell`: one step of a recurrent network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Shaped

from pytreemod.nn.functional.inlining import as_arrays, traced_once
from pytreemod.nn.functional.linear_functions import linear
from pytreemod.nn.functional.promotion import promote, with_shared


@traced_once()
def gru_cell(
    x: Shaped[ArrayLike, "*batch in"],
    hidden: Shaped[ArrayLike, "*batch hidden"],
    weight_ih: Shaped[ArrayLike, "gates in"],
    weight_hh: Shaped[ArrayLike, "gates hidden"],
    bias: Shaped[ArrayLike, " gates"] | None = None,
    bias_n: Shaped[ArrayLike, " hidden"] | None = None,
) -> Shaped[Array, "*batch hidden"]:
    r"""Compute one step of a gated recurrent unit.

    With the rows of the matrices, and the bias, in three parts for $r$, $z$ and $n$:

    $$
    \begin{aligned}
    r &= \sigma(W_{ir} x + b_r + W_{hr} h) \\
    z &= \sigma(W_{iz} x + b_z + W_{hz} h)
    \end{aligned}
    $$

    $$
    \begin{aligned}
    n &= \tanh(W_{in} x + b_n + r \, (W_{hn} h + b'_n)) \\
    h' &= n + z \, (h - n)
    \end{aligned}
    $$

    Shapes:
        x: (..., in)
        hidden: (..., hidden)
        weight_ih: (3 * hidden, in)
        weight_hh: (3 * hidden, hidden)
        bias: (3 * hidden,) or None
        bias_n: (hidden,) or None
        return: (..., hidden)

    Args:
        x: input; every leading axis is a batch axis.
        hidden: the hidden state of the previous step.
        weight_ih: from the input to the gates.
        weight_hh: from the hidden state to the gates.
        bias: added to the gates.
        bias_n: $b'_n$, added inside the reset gate.

    Returns:
        The hidden state after the step.

    Raises:
        TypeError: if the sizes disagree (raised by JAX).

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> x, hidden = jnp.ones((7, 3)), jnp.zeros((7, 2))
        >>> nn.functional.gru_cell(x, hidden, jnp.ones((6, 3)), jnp.ones((6, 2))).shape
        (7, 2)

    Source:
        Cho et al. 2014, https://arxiv.org/abs/1406.1078, with the reset gate after the product,
        and the parts in the order of `torch.nn.GRUCell`.
    """
    # One product for all gates: one large product is faster than three small ones.
    from_x = _parts(linear(x, weight_ih, bias), 3)
    from_hidden = _parts(linear(hidden, weight_hh), 3)
    reset = jax.nn.sigmoid(from_x[0] + from_hidden[0])
    update = jax.nn.sigmoid(from_x[1] + from_hidden[1])
    recurrent = from_hidden[2]
    if bias_n is not None:
        # Inside the reset gate, where no part of the common bias could replace it.
        recurrent = _plus(recurrent, bias_n)
    new = jnp.tanh(from_x[2] + reset * recurrent)
    # Equal to (1 - z) n + z h, with one product less.
    return new + update * (hidden - new)


@traced_once()
def lstm_cell(
    x: Shaped[ArrayLike, "*batch in"],
    hidden: tuple[Shaped[ArrayLike, "*batch hidden"], Shaped[ArrayLike, "*batch hidden"]],
    weight_ih: Shaped[ArrayLike, "gates in"],
    weight_hh: Shaped[ArrayLike, "gates hidden"],
    bias: Shaped[ArrayLike, " gates"] | None = None,
) -> tuple[Shaped[Array, "*batch hidden"], Shaped[Array, "*batch hidden"]]:
    r"""Compute one step of a long short-term memory.

    With the rows of the matrices, and the bias, in four parts for $i$, $f$, $g$ and $o$:

    $$
    \begin{aligned}
    i &= \sigma(W_{ii} x + W_{hi} h + b_i), \quad
    f = \sigma(W_{if} x + W_{hf} h + b_f)
    \end{aligned}
    $$

    $$
    \begin{aligned}
    g &= \tanh(W_{ig} x + W_{hg} h + b_g), \quad
    o = \sigma(W_{io} x + W_{ho} h + b_o) \\
    c' &= f c + i g, \quad h' = o \tanh(c')
    \end{aligned}
    $$

    Shapes:
        x: (..., in)
        hidden: a pair (h, c), each (..., hidden)
        weight_ih: (4 * hidden, in)
        weight_hh: (4 * hidden, hidden)
        bias: (4 * hidden,) or None
        return: a pair (h, c), each (..., hidden)

    Args:
        x: input; every leading axis is a batch axis.
        hidden: hidden state and cell state of the previous step.
        weight_ih: from the input to the gates.
        weight_hh: from the hidden state to the gates.
        bias: added to the gates.

    Returns:
        Hidden state and cell state after the step.

    Raises:
        TypeError: if the sizes disagree (raised by JAX).

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> x, hidden = jnp.ones((7, 3)), (jnp.zeros((7, 2)), jnp.zeros((7, 2)))
        >>> h, c = nn.functional.lstm_cell(x, hidden, jnp.ones((8, 3)), jnp.ones((8, 2)))
        >>> h.shape, c.shape
        ((7, 2), (7, 2))

    Source:
        Hochreiter & Schmidhuber 1997 with the forget gate of Gers et al. 2000; the parts in the
        order of `torch.nn.LSTMCell`.
    """
    h, c = hidden
    # One bias for both products: only the sum of PyTorch's two biases has an effect.
    gates = linear(x, weight_ih) + linear(h, weight_hh)
    if bias is not None:
        gates = _plus(gates, bias)
    i, f, g, o = _parts(gates, 4)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def simple_cell(
    x: Shaped[ArrayLike, "*batch in"],
    hidden: Shaped[ArrayLike, "*batch hidden"],
    weight_ih: Shaped[ArrayLike, "hidden in"],
    weight_hh: Shaped[ArrayLike, "hidden hidden"],
    bias: Shaped[ArrayLike, " hidden"] | None = None,
    *,
    activation: Callable[[Array], Array] = jnp.tanh,
    residual: bool = False,
) -> Shaped[Array, "*batch hidden"]:
    r"""Compute one step of Elman's network: $h' = \phi(W_i x + b + W_h h)$.

    With `residual`, $h' = \phi(W_i x + b + W_h h + h)$.

    Shapes:
        x: (..., in)
        hidden: (..., hidden)
        weight_ih: (hidden, in)
        weight_hh: (hidden, hidden)
        bias: (hidden,) or None
        return: (..., hidden)

    Args:
        x: input; every leading axis is a batch axis.
        hidden: the hidden state of the previous step.
        weight_ih: from the input.
        weight_hh: from the hidden state.
        bias: added before the activation.
        activation: the function $\phi$, of whole arrays.
        residual: whether to add the hidden state, too.

    Returns:
        The hidden state after the step.

    Raises:
        TypeError: if the sizes disagree (raised by JAX).

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> x, hidden = jnp.ones((7, 3)), jnp.zeros((7, 2))
        >>> nn.functional.simple_cell(x, hidden, jnp.ones((2, 3)), jnp.ones((2, 2))).shape
        (7, 2)

    Source:
        Elman 1990, as in `torch.nn.RNNCell` and `flax.nnx.SimpleCell`.
    """
    x, hidden, weight_ih, weight_hh, bias = as_arrays(x, hidden, weight_ih, weight_hh, bias)
    total = linear(x, weight_ih, bias) + linear(hidden, weight_hh)
    return activation(total + hidden if residual else total)


def _plus(total: Array, bias: Any) -> Array:
    total, bias = promote(total, bias)
    return with_shared(lax.add, total, bias, total.ndim - 1)


def _parts(gates: Array, count: int) -> Sequence[Array]:
    """Split the last axis into parts of equal size."""
    return lax.split(gates, (gates.shape[-1] // count,) * count, gates.ndim - 1)
