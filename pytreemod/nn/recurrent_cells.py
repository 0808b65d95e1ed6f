"""The recurrent cells: one step in time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, PRNGKeyArray, Shaped

from pytreemod.errors import ArgumentError, ShapeError, describe
from pytreemod.module.classes import Module
from pytreemod.module.field_kinds import array, flag, size
from pytreemod.module.fields import field
from pytreemod.module.unfinished import sizes_follow
from pytreemod.nn.arguments import Title, check_array, check_last_axis, function, named, own_arrays
from pytreemod.nn.calling import ignores_key, in_scope
from pytreemod.nn.functional.promotion import wide_dtype
from pytreemod.nn.functional.recurrent_cells import gru_cell, lstm_cell, simple_cell
from pytreemod.nn.initializing import Initializer, begin, initialize, uniform_by_fan_in
from pytreemod.nn.layer import Layer
from pytreemod.state.key_sources import KeyLike
from pytreemod.typing import AnyArray


class RNNCellBase(Module):
    """Base of the cells that `RNN` runs over time.

    Call a cell as `carry = cell(input, carry)`, as in Equinox. Your own cell defines
    `initialize_carry`, its carry before the first step. If the output is not the whole carry, it
    also defines `output_of`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pytreemod import nn
        >>> class Total(nn.RNNCellBase):
        ...     def __call__(self, input, hidden, *, key=None):
        ...         return input + hidden
        ...     def initialize_carry(self, input_shape, dtype=None):
        ...         return jnp.zeros(input_shape, dtype)
        >>> nn.RNN(Total())(jnp.array([[1.0], [2.0], [3.0]])).ravel().tolist()
        [1.0, 3.0, 6.0]
    """

    @abstractmethod
    def __call__(self, input: AnyArray, hidden: Any, *, key: KeyLike | None = None) -> Any:
        """Take one step.

        Args:
            input: the input of one time step, (..., in).
            hidden: the carry of the previous step.
            key: for cells that draw random numbers.

        Returns:
            The carry for the next step, with the same structure, shapes and dtypes.
        """

    @abstractmethod
    def initialize_carry(self, input_shape: Sequence[int], dtype: Any = None) -> Any:
        """Return the carry before the first step.

        Args:
            input_shape: the shape of the input of one time step: batch axes, then features.
            dtype: the input's; the cell's own if None.

        Returns:
            A tree of arrays, each with the batch axes first.
        """

    def output_of(self, carry: Any) -> Any:
        """Return the output of a step: the carry, or a part of it.

        Args:
            carry: the result of a call.

        Returns:
            The whole carry, unless overridden.
        """
        return carry


_ARGUMENTS = ("weight_init", "recurrent_weight_init", "bias_init")
_WEIGHTS = {"weight_ih": 0, "weight_hh": 1}


class GatedCell(RNNCellBase, Layer, is_abstract=True):
    """Base of the cells below: gates of an input and of a hidden state, stacked by rows.

    A subclass defines in `rows` the number of gates in each of its arrays, None for no array.
    """

    rows: ClassVar[Mapping[str, int | None]]
    # Uniform, scaled by the size of the hidden state, unless a cell overrides it.
    starts: ClassVar[Sequence[Initializer | None]] = (None, None, None)

    weight_ih: Inexact[Array, "gates input_size"]
    weight_hh: Inexact[Array, "gates hidden_size"]
    bias: Inexact[Array, " gates"] | None = array(given="use_bias")
    input_size: int = size()
    hidden_size: int = size(1)
    use_bias: bool = flag()

    @property
    def gates(self: Any) -> int:
        """The number of rows of the weights: hidden_size for each gate."""
        return (self.rows["weight_ih"] or 1) * self.hidden_size

    def initialize_carry(self: Any, input_shape: Sequence[int], dtype: Any = None) -> Any:
        """Return zeros: the hidden state before the first step.

        Args:
            input_shape: the shape of the input of one time step: batch axes, then features.
            dtype: the input's; that of the weights if None.

        Returns:
            (..., hidden_size)
        """
        # The dtype that a step returns: a carry must not change its dtype.
        own = jnp.result_type(self.weight_hh)
        dtype = own if dtype is None else jnp.promote_types(own, dtype)
        return jnp.zeros((*input_shape[:-1], self.hidden_size), dtype)

    def _start(self: Any, configuration: tuple[Any, ...], drawn_with: tuple[Any, ...]) -> None:
        """Set the configuration, then the arrays."""
        self.input_size, self.hidden_size, self.use_bias = configuration
        dtype, key, *inits = drawn_with
        # Split for the biases even without them, so that the weights do not depend on use_bias.
        dtype, *keys = begin(self, dtype, key, len(self.rows))
        for name, own_key in zip(self.rows, keys, strict=True):
            i = _WEIGHTS.get(name, 2)
            where, init = named(self, _ARGUMENTS[i]), inits[i]
            init, values = self.starts[i] if init is None else init, None
            if self.use_bias or name in _WEIGHTS:
                values = initial_gates(self, init, own_key, dtype, where, name=name)
            setattr(self, name, values)

    def _read(self: Any, input: Any) -> tuple[Title, Array, Sequence[Any]]:
        """Return the layer's title for errors, the input as an array, and the layer's arrays."""
        where = Title(self, "input_size", "hidden_size")
        arrays = own_arrays(where, *self.rows)
        x = check_array(where, input)
        check_last_axis(where, x, self.input_size, "input_size")
        return where, x, arrays


class GRUCell(GatedCell):
    r"""One step of a gated recurrent unit; `RNN` runs it over time.

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
        input: (..., input_size)
        hidden: (..., hidden_size), with the same leading axes
        return: (..., hidden_size)

    Fields:
        weight_ih: (3 * hidden_size, input_size), for the gates reset, update and new, in this order
        weight_hh: (3 * hidden_size, hidden_size)
        bias: (3 * hidden_size,), or None if use_bias=False
        bias_n: (hidden_size,), inside the reset gate; or None if use_bias=False

    Args:
        input_size: size of the input's last axis, >= 0; None if it follows from the input
            ([`materialize`][pytreemod.materialize]).
        hidden_size: size of the hidden state's last axis, >= 1.
        use_bias: whether to add biases.
        dtype: of weights and biases; JAX's default float if None.
        key: used once, for the initial weights and biases.
        weight_init: `(key, shape, dtype) -> array`, called for each gate with the shape
            `(input_size, hidden_size)`, which `jax.nn.initializers` expect.
        recurrent_weight_init: the same for weight_hh, called with `(hidden_size, hidden_size)`.
        bias_init: the same for the biases, called for each gate with `(hidden_size,)`.

    State and randomness: none.

    Raises:
        ArgumentError: if a size is too small or not an integer, or another argument is invalid.
        RngError: if key is not a random key.
        ShapeError: if the last axis of the input does not have input_size entries, or the hidden
            state does not fit it. Also if an array of the cell does not have the shape above.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> cell = nn.GRUCell(3, 4, key=jax.random.key(0))
        >>> cell(jnp.ones(3), jnp.zeros(4)).shape, cell(jnp.ones((7, 3)), jnp.zeros((7, 4))).shape
        ((4,), (7, 4))

    Source:
        Initial values U[-1/sqrt(hidden_size), 1/sqrt(hidden_size)], as in `torch.nn.GRUCell`.
    """

    rows: ClassVar[Any] = {"weight_ih": 3, "weight_hh": 3, "bias": 3, "bias_n": 1}

    bias_n: Inexact[Array, " hidden_size"] | None = array(given="use_bias")

    @sizes_follow(input_size=lambda input: input.shape[-1])
    def __init__(
        self,
        input_size: int | None,
        hidden_size: int,
        use_bias: bool = True,
        dtype: Any = None,
        *,
        key: KeyLike,
        weight_init: Initializer | None = None,
        recurrent_weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
    ):
        self._start(
            (input_size, hidden_size, use_bias),
            (dtype, key, weight_init, recurrent_weight_init, bias_init),
        )

    @ignores_key
    @in_scope("pm.nn.GRUCell")
    def __call__(
        self, input: AnyArray, hidden: AnyArray, *, key: KeyLike | None = None
    ) -> Shaped[Array, ...]:
        """Take one step; `key` is ignored."""
        del key
        where, x, arrays = self._read(input)
        h = _checked_hidden(where, "hidden", hidden, x, self.hidden_size)
        return gru_cell(x, h, *arrays)


class LSTMCell(GatedCell):
    r"""One step of a long short-term memory; `RNN` runs it over time.

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

    The output is the hidden state `h`, the first of the pair.

    Shapes:
        input: (..., input_size)
        hidden: a pair (h, c), each (..., hidden_size), with the same leading axes
        return: a pair (h, c), each (..., hidden_size)

    Fields:
        weight_ih: (4 * hidden_size, input_size), for the gates input, forget, cell and output, in
            this order
        weight_hh: (4 * hidden_size, hidden_size)
        bias: (4 * hidden_size,), or None if use_bias=False

    Args:
        input_size: size of the input's last axis, >= 0; None if it follows from the input
            ([`materialize`][pytreemod.materialize]).
        hidden_size: size of the hidden state's last axis, >= 1.
        use_bias: whether to add a bias.
        dtype: of weights and bias; JAX's default float if None.
        key: used once, for the initial weights and bias.
        weight_init: `(key, shape, dtype) -> array`, called for each gate with the shape
            `(input_size, hidden_size)`, which `jax.nn.initializers` expect.
        recurrent_weight_init: the same for weight_hh, called with `(hidden_size, hidden_size)`.
        bias_init: the same for the bias, called for each gate with `(hidden_size,)`.

    State and randomness: none.

    Raises:
        ArgumentError: if a size is too small or not an integer, another argument is invalid, or
            hidden is not a pair.
        RngError: if key is not a random key.
        ShapeError: if the last axis of the input does not have input_size entries, or the hidden
            state does not fit it. Also if an array of the cell does not have the shape above.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> cell = nn.LSTMCell(3, 4, key=jax.random.key(0))
        >>> h, c = cell(jnp.ones(3), (jnp.zeros(4), jnp.zeros(4)))
        >>> h.shape, c.shape
        ((4,), (4,))

    Source:
        Initial values U[-1/sqrt(hidden_size), 1/sqrt(hidden_size)], as in `torch.nn.LSTMCell`.
    """

    rows: ClassVar[Any] = {"weight_ih": 4, "weight_hh": 4, "bias": 4}

    @sizes_follow(input_size=lambda input: input.shape[-1])
    def __init__(
        self,
        input_size: int | None,
        hidden_size: int,
        use_bias: bool = True,
        dtype: Any = None,
        *,
        key: KeyLike,
        weight_init: Initializer | None = None,
        recurrent_weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
    ):
        self._start(
            (input_size, hidden_size, use_bias),
            (dtype, key, weight_init, recurrent_weight_init, bias_init),
        )

    @ignores_key
    @in_scope("pm.nn.LSTMCell")
    def __call__(
        self, input: AnyArray, hidden: tuple[AnyArray, AnyArray], *, key: KeyLike | None = None
    ) -> tuple[Shaped[Array, ...], Shaped[Array, ...]]:
        """Take one step; `key` is ignored."""
        del key
        where, x, arrays = self._read(input)
        # An array of two rows would unpack, too, along an axis that may be a batch axis.
        if not isinstance(hidden, (tuple, list)) or len(hidden) != 2:  # pyright: ignore[reportUnnecessaryIsInstance]  (callers may be unchecked)
            hint = ("Start with zeros:", "cell(x, cell.initialize_carry(x.shape))")
            got = describe(hidden)
            raise ArgumentError(where, "hidden to be a pair (h, c)", got, hint=hint)
        h = _checked_hidden(where, "h", hidden[0], x, self.hidden_size)
        c = _checked_hidden(where, "c", hidden[1], x, self.hidden_size)
        return lstm_cell(x, (h, c), *arrays)

    def initialize_carry(
        self, input_shape: Sequence[int], dtype: Any = None
    ) -> tuple[Shaped[Array, ...], Shaped[Array, ...]]:
        """Return zeros: hidden state and cell state before the first step.

        Args:
            input_shape: the shape of the input of one time step: batch axes, then features.
            dtype: the input's; that of the weights if None.

        Returns:
            A pair (h, c), each (..., hidden_size)
        """
        # Two arrays, so that both can be donated.
        h, c = (super(LSTMCell, self).initialize_carry(input_shape, dtype) for _ in "hc")
        return h, c

    def output_of(self, carry: Any) -> Any:
        """Return the hidden state, without the cell state.

        Args:
            carry: the result of a call.

        Returns:
            The first of the pair.
        """
        return carry[0]


def _orthogonal(key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any) -> Array:
    """Draw an orthogonal matrix, also in narrow dtypes, for which JAX has no decomposition."""
    return jax.nn.initializers.orthogonal()(key, shape, wide_dtype(dtype)).astype(dtype)


_ACTIVATION = function("a function or a Module", "Pass the function itself:", "activation=jnp.tanh")


class SimpleCell(GatedCell):
    r"""One step of Elman's network: $h' = \phi(W_i x + b + W_h h)$; `RNN` runs it over time.

    Shapes:
        input: (..., input_size)
        hidden: (..., hidden_size), with the same leading axes
        return: (..., hidden_size)

    Fields:
        weight_ih: (hidden_size, input_size)
        weight_hh: (hidden_size, hidden_size)
        bias: (hidden_size,), or None if use_bias=False
        activation: configuration if a function; a Module is called with the whole array

    Args:
        input_size: size of the input's last axis, >= 0; None if it follows from the input
            ([`materialize`][pytreemod.materialize]).
        hidden_size: size of the hidden state's last axis, >= 1.
        use_bias: whether to add a bias.
        dtype: of weights and bias; JAX's default float if None.
        residual: whether to add the hidden state before the activation.
        activation: the function $\phi$.
        key: used once, for the initial weights and bias.
        weight_init: `(key, shape, dtype) -> array`, called with the shape
            `(input_size, hidden_size)`, which `jax.nn.initializers` expect; the result is
            transposed.
        recurrent_weight_init: the same for weight_hh, called with `(hidden_size, hidden_size)`.
        bias_init: the same for the bias, called with `(hidden_size,)`.

    State and randomness: none.

    Raises:
        ArgumentError: if a size is too small or not an integer, or another argument is invalid.
        RngError: if key is not a random key.
        ShapeError: if the last axis of the input does not have input_size entries, or the hidden
            state does not fit it. Also if an array of the cell does not have the shape above.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> cell = nn.SimpleCell(3, 4, key=jax.random.key(0))
        >>> cell(jnp.ones(3), jnp.zeros(4)).shape
        (4,)

    Source:
        `flax.nnx.SimpleCell`, called like the other cells. Initial values as in Flax: LeCun's
        normal distribution, an orthogonal matrix for the hidden state, zeros for the bias.
    """

    rows: ClassVar[Any] = dict.fromkeys(("weight_ih", "weight_hh", "bias"))
    starts: ClassVar[Any] = (
        jax.nn.initializers.lecun_normal(),
        _orthogonal,
        jax.nn.initializers.zeros,
    )

    activation: Callable[..., Any] = field(accepts=_ACTIVATION)
    residual: bool = flag()

    @sizes_follow(input_size=lambda input: input.shape[-1])
    def __init__(
        self,
        input_size: int | None,
        hidden_size: int,
        use_bias: bool = True,
        dtype: Any = None,
        *,
        residual: bool = False,
        activation: Callable[..., Any] = jnp.tanh,
        key: KeyLike,
        weight_init: Initializer | None = None,
        recurrent_weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
    ):
        self.residual, self.activation = residual, activation
        self._start(
            (input_size, hidden_size, use_bias),
            (dtype, key, weight_init, recurrent_weight_init, bias_init),
        )

    @ignores_key
    @in_scope("pm.nn.SimpleCell")
    def __call__(
        self, input: AnyArray, hidden: AnyArray, *, key: KeyLike | None = None
    ) -> Shaped[Array, ...]:
        """Take one step; `key` is ignored."""
        del key
        where, x, arrays = self._read(input)
        h = _checked_hidden(where, "hidden", hidden, x, self.hidden_size)
        options: dict[str, Any] = {"activation": self.activation, "residual": self.residual}
        return simple_cell(x, h, *arrays, **options)


def initial_gates(
    cell: Any, init: Initializer | None, key: PRNGKeyArray, dtype: Any, where: str, *, name: str
) -> Array:
    """Draw a field of a cell, with an initializer that expects (in, out).

    Each gate is drawn separately. For a matrix of all gates, an initializer would count several
    times as many outputs, and an orthogonal one would make no single gate orthogonal.

    Args:
        cell: the cell, for its class and sizes.
        init: the initializer; uniform, scaled by the size of the hidden state, if None.
        key: used once.
        dtype: of the values.
        where: the call, for errors.
        name: of the field.
    """
    size, count = cell.hidden_size, cell.rows[name]
    lead = {"weight_ih": (cell.input_size,), "weight_hh": (size,)}.get(name, ())
    if init is None:
        # Drawn as one array, so that a seed gives the same numbers as in Equinox.
        whole = ((count or 1) * size, *lead)
        return initialize(where, uniform_by_fan_in(size), key, whole, dtype)
    if count is None:
        return _turned(initialize(where, init, key, (*lead, size), dtype))
    keys = jax.random.split(key, count)
    gates = [_turned(initialize(where, init, one, (*lead, size), dtype)) for one in keys]
    return jnp.concatenate(gates)


def _turned(values: Array) -> Array:
    """Transpose (in, out), which JAX's initializers expect, to (out, in); a bias is unchanged."""
    return values.T if values.ndim == 2 else values


def _checked_hidden(where: Title, name: str, hidden: Any, x: Array, size: int) -> Array:
    """Require a hidden state with the batch axes of x: each example has its own."""
    shape = (*x.shape[:-1], size)
    if not isinstance(hidden, jax.Array) or hidden.shape != shape:
        hidden = _converted(where, name, hidden, shape)
    return hidden


def _converted(where: Title, name: str, hidden: Any, shape: tuple[int, ...]) -> Array:
    expected = f"{name} of shape {shape}"
    hint = ("Start with zeros:", "cell(x, cell.initialize_carry(x.shape))")
    if not hasattr(hidden, "shape"):
        raise ArgumentError(where, expected, describe(hidden), hint=hint)
    if hidden.shape != shape:
        if hidden.shape == shape[-1:]:
            hint = (
                "x is a batch; broadcast the hidden state to its examples:",
                f"jnp.broadcast_to({name}, {shape})",
            )
        raise ShapeError(where, expected, describe(hidden), hint=hint)
    return jnp.asarray(hidden)
