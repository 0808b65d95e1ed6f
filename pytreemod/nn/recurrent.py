"""Recurrent layers: cells, which take one step in time, and `RNN`, which runs a cell over time."""

from __future__ import annotations

import functools as ft
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Inexact, PRNGKeyArray, Shaped

from pytreemod.errors import ShapeError, describe
from pytreemod.module.classes import Module
from pytreemod.module.fields import field
from pytreemod.module.ties import resolve
from pytreemod.nn.base import (
    AnyArray,
    Initializer,
    add_shared,
    check_shape,
    divide_key,
    float_dtype,
    key_for_call,
    layer_call,
    split_key,
    takes_key,
    title,
    uniform,
    wide_dtype,
)
from pytreemod.state.key_sources import KeyLike
from pytreemod.transform.scans import filter_scan
from pytreemod.tree.comparison import varying_axes
from pytreemod.tree.predicates import is_array, is_inexact_array
from pytreemod.typing import jtu, untyped_jax

# ---- cells


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


class GatedCell(RNNCellBase, is_abstract=True):
    """Base of the cells below: weights of the input and of the hidden state, and biases."""

    # How many gates have rows in each array; None if it is not made of gates.
    gates: ClassVar[dict[str, int | None]]
    # The initializer of each array; uniform if it has none here.
    inits: ClassVar[dict[str, Initializer]] = {}

    weight_ih: Inexact[Array, "rows input_size"]
    weight_hh: Inexact[Array, "rows hidden_size"]
    bias: Inexact[Array, " rows"] | None
    input_size: int = field(static=True)
    hidden_size: int = field(static=True)
    use_bias: bool = field(static=True)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        use_bias: bool = True,
        dtype: Any = None,
        *,
        key: KeyLike,
        weight_init: Initializer | None = None,
        recurrent_weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
    ):
        self.input_size, self.hidden_size, self.use_bias = input_size, hidden_size, use_bias
        weights = {
            "weight_ih": (weight_init, (hidden_size, input_size)),
            "weight_hh": (recurrent_weight_init, (hidden_size, hidden_size)),
        }
        # A key for each bias even without them, so that the weights do not depend on use_bias.
        for name, own_key in zip(self.gates, split_key(key, len(self.gates)), strict=True):
            given, shape = weights.get(name, (bias_init, (hidden_size,)))
            init = given or self.inits.get(name)
            drawn = _draw(init, own_key, self.gates[name], shape, dtype)
            setattr(self, name, drawn if use_bias or name in weights else None)

    @property
    def rows(self) -> int:
        """The number of rows of the weights: hidden_size for each gate."""
        return (self.gates["weight_ih"] or 1) * self.hidden_size

    def initialize_carry(self, input_shape: Sequence[int], dtype: Any = None) -> Any:
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

    def _check(self, input: Any, *hidden: Any) -> tuple[Any, ...]:
        """Require hidden states with the batch axes of the input; others would broadcast."""
        x = check_shape(self, input, ..., self.input_size)
        shape = (*x.shape[:-1], self.hidden_size)
        for array in hidden:
            if jnp.shape(array) != shape:
                raise ShapeError(title(self), f"a hidden state of shape {shape}", describe(array))
        return x, *(jnp.asarray(array) for array in hidden)


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
        input_size: size of the input's last axis.
        hidden_size: size of the hidden state's last axis.
        use_bias: whether to add biases.
        dtype: of weights and biases; JAX's default float if None.
        key: used once, for the initial weights and biases.
        weight_init: `(key, shape, dtype) -> array`, called for each gate with the shape
            `(input_size, hidden_size)`, which `jax.nn.initializers` expect.
        recurrent_weight_init: the same for weight_hh, called with `(hidden_size, hidden_size)`.
        bias_init: the same for the biases, called for each gate with `(hidden_size,)`.

    State and randomness: none.

    Raises:
        ShapeError: if the last axis of the input does not have input_size entries, or the hidden
            state does not fit it. Also if an array of the cell does not have the shape above.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> cell = nn.GRUCell(3, 4, key=jax.random.key(0))
        >>> cell(jnp.ones(3), jnp.zeros(4)).shape, cell(jnp.ones((7, 3)), jnp.zeros((7, 4))).shape
        ((4,), (7, 4))

    Source:
        Cho et al. 2014, https://arxiv.org/abs/1406.1078, with the reset gate after the product.
        Initial values U[-1/sqrt(hidden_size), 1/sqrt(hidden_size)], as in `torch.nn.GRUCell`.
    """

    gates: ClassVar[Any] = {"weight_ih": 3, "weight_hh": 3, "bias": 3, "bias_n": 1}

    bias_n: Inexact[Array, " hidden_size"] | None

    @layer_call()
    def __call__(
        self, input: AnyArray, hidden: AnyArray, *, key: KeyLike | None = None
    ) -> Shaped[Array, ...]:
        """Take one step; `key` is ignored."""
        x, h = self._check(input, hidden)
        # One product for all gates: one large product is faster than three small ones.
        x_r, x_z, x_n = jnp.split(add_shared(jnp.inner(x, self.weight_ih), self.bias), 3, -1)
        h_r, h_z, h_n = jnp.split(jnp.inner(h, self.weight_hh), 3, -1)
        r, z = jax.nn.sigmoid(x_r + h_r), jax.nn.sigmoid(x_z + h_z)
        n = jnp.tanh(x_n + r * add_shared(h_n, self.bias_n))
        # Equal to (1 - z) n + z h, with one product less.
        return n + z * (h - n)


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
        input_size: size of the input's last axis.
        hidden_size: size of the hidden state's last axis.
        use_bias: whether to add a bias.
        dtype: of weights and bias; JAX's default float if None.
        key: used once, for the initial weights and bias.
        weight_init: `(key, shape, dtype) -> array`, called for each gate with the shape
            `(input_size, hidden_size)`, which `jax.nn.initializers` expect.
        recurrent_weight_init: the same for weight_hh, called with `(hidden_size, hidden_size)`.
        bias_init: the same for the bias, called for each gate with `(hidden_size,)`.

    State and randomness: none.

    Raises:
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
        Hochreiter & Schmidhuber 1997 with the forget gate of Gers et al. 2000. Initial values
        U[-1/sqrt(hidden_size), 1/sqrt(hidden_size)], as in `torch.nn.LSTMCell`.
    """

    gates: ClassVar[Any] = {"weight_ih": 4, "weight_hh": 4, "bias": 4}

    @layer_call()
    def __call__(
        self, input: AnyArray, hidden: tuple[AnyArray, AnyArray], *, key: KeyLike | None = None
    ) -> tuple[Shaped[Array, ...], Shaped[Array, ...]]:
        """Take one step; `key` is ignored."""
        x, h, c = self._check(input, *hidden)
        # One bias for both products: only the sum of PyTorch's two biases has an effect.
        products = jnp.inner(x, self.weight_ih) + jnp.inner(h, self.weight_hh)
        i, f, g, o = jnp.split(add_shared(products, self.bias), 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(c), c

    def initialize_carry(self, input_shape: Sequence[int], dtype: Any = None) -> Any:
        """Return zeros: hidden state and cell state before the first step.

        Args:
            input_shape: the shape of the input of one time step: batch axes, then features.
            dtype: the input's; that of the weights if None.

        Returns:
            A pair (h, c), each (..., hidden_size)
        """
        # Two arrays, so that both can be donated.
        zeros = super().initialize_carry
        return zeros(input_shape, dtype), zeros(input_shape, dtype)

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


_lecun, _zeros = jax.nn.initializers.lecun_normal(), jax.nn.initializers.zeros


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
        input_size: size of the input's last axis.
        hidden_size: size of the hidden state's last axis.
        use_bias: whether to add a bias.
        dtype: of weights and bias; JAX's default float if None.
        residual: whether to add the hidden state before the activation.
        activation: the function $\phi$.
        **options: key, weight_init, recurrent_weight_init and bias_init, as for `GRUCell`.

    State and randomness: none.

    Raises:
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

    gates: ClassVar[Any] = dict.fromkeys(("weight_ih", "weight_hh", "bias"))
    inits: ClassVar[Any] = {"weight_ih": _lecun, "weight_hh": _orthogonal, "bias": _zeros}

    activation: Callable[..., Any]
    residual: bool = field(static=True)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        use_bias: bool = True,
        dtype: Any = None,
        *,
        residual: bool = False,
        activation: Callable[..., Any] = jnp.tanh,
        **options: Any,
    ):
        self.residual, self.activation = residual, activation
        super().__init__(input_size, hidden_size, use_bias, dtype, **options)

    @layer_call()
    def __call__(
        self, input: AnyArray, hidden: AnyArray, *, key: KeyLike | None = None
    ) -> Shaped[Array, ...]:
        """Take one step; `key` is ignored."""
        x, h = self._check(input, hidden)
        total = add_shared(jnp.inner(x, self.weight_ih), self.bias) + jnp.inner(h, self.weight_hh)
        return self.activation(total + h if self.residual else total)


def _draw(init: Any, key: Any, gates: int | None, shape: tuple[int, ...], dtype: Any) -> Array:
    """Draw the rows of some gates, with an initializer that expects (in, out).

    Each gate is drawn separately. For a matrix of all gates, an initializer would count several
    times as many outputs, and an orthogonal one would make no single gate orthogonal.
    """
    size, *rest = shape
    if init is None:
        # Drawn as one array, so that a key gives the same numbers as in Equinox.
        return uniform(key, ((gates or 1) * size, *rest), dtype, size)
    keys = [key] if gates is None else jax.random.split(key, gates)
    return jnp.concatenate(
        [jnp.asarray(init(one, shape[::-1], float_dtype(dtype))).T for one in keys]
    )


# ---- over time


class RNN(Module):
    r"""Runs a cell over time, by a scan: $h_t = \mathrm{cell}(x_t, h_{t-1})$.

    Shapes:
        inputs: (..., time, in); (time, ..., in) if time_major
        return: (..., time, out), or (time, ..., out); with return_carry a pair, of the last carry
            and the outputs

    A sequence that is shorter than others (`seq_lengths`) stops at its end: its carry stays that of
    its last step, and the remaining outputs repeat the last one. Values after the end are ignored,
    even NaN, and get no gradient.

    Fields:
        cell: the cell
        time_major, return_carry, reverse, keep_order, unroll: configuration

    Args:
        cell: `GRUCell`, `LSTMCell`, `SimpleCell`, or a cell of your own: an `RNNCellBase`.
        time_major: whether the time axis comes before the batch axes, instead of after them.
        return_carry: whether to also return the last carry, before the outputs.
        reverse: whether to go from the end to the start of each sequence.
        keep_order: whether outputs are in the order of the inputs, instead of the order of the
            steps, which differs only with `reverse`.
        unroll: as for `jax.lax.scan`.

    A call takes `initial_carry` (from `cell.initialize_carry`, usually zeros, if None) and
    `seq_lengths`: integers, one for each sequence of the batch. Negative lengths count as zero, and
    lengths beyond the end of the inputs as all of them.

    State and randomness: no State; a cell that draws random numbers gets its own key in every
        step.

    Raises:
        ShapeError: if inputs lack an axis, seq_lengths is not one integer for each sequence, or the
            cell does not accept the shapes.
        StructureError: if initial_carry has another structure than the cell's, or a step changes
            its dtype.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> rnn = nn.RNN(nn.LSTMCell(3, 4, key=jax.random.key(0)))
        >>> rnn(jnp.ones((7, 5, 3))).shape
        (7, 5, 4)
        >>> rnn = rnn.replace(return_carry=True)
        >>> (h, c), outputs = rnn(jnp.ones((2, 5, 3)), seq_lengths=jnp.array([5, 2]))
        >>> bool(jnp.all(h[1] == outputs[1, 1]))
        True

    Source:
        Names, defaults and the order of results as in `flax.nnx.RNN`.
    """

    cell: RNNCellBase
    time_major: bool = field(static=True, default=False, kw_only=True)
    return_carry: bool = field(static=True, default=False, kw_only=True)
    reverse: bool = field(static=True, default=False, kw_only=True)
    keep_order: bool = field(static=True, default=False, kw_only=True)
    unroll: int = field(static=True, default=1, kw_only=True)

    @layer_call()
    def __call__(
        self,
        inputs: AnyArray,
        *,
        initial_carry: Any = None,
        seq_lengths: AnyArray | None = None,
        key: KeyLike | None = None,
    ) -> Any:
        """Run the cell over time."""
        axes = ("time", ..., "in") if self.time_major else (..., "time", "in")
        x = check_shape(self, inputs, *axes)
        x = x if self.time_major else jnp.moveaxis(x, -2, 0)
        steps, *batch, _ = x.shape
        # Before the scan: computed weights are computed once.
        cell, keys, lengths, running = resolve(self.cell), None, None, None
        if key is not None and takes_key(cell):
            keys = jax.random.split(key_for_call(self, None, key, None)[0], steps)
        if seq_lengths is not None:
            lengths = jnp.asarray(seq_lengths)
            # Others would broadcast; a mask is no length.
            if lengths.dtype.kind not in "iu" or lengths.shape != tuple(batch):
                expected = f"seq_lengths of integers, of shape {tuple(batch)}"
                raise ShapeError(title(self), expected, describe(lengths))
            # Not in a narrow dtype, in which the number of steps may overflow.
            lengths = lengths.astype(int)
            running = lax.broadcasted_iota(int, (steps, *batch), 0) < lengths[None]
            x = _flip(x, lengths) if self.reverse else x
            # Zeros past the end: the gradient of a select multiplies the branch that it did not
            # take by zero, which is NaN for an infinity.
            x = _where(running, x, jnp.zeros_like(x))
        if initial_carry is None:
            initial_carry = cell.initialize_carry(x.shape[1:], x.dtype)
        # The gradient of the cell is a sum over all steps, in the dtype that it has out here.
        wide = jtu.tree_map(_widened, cell)

        def step(carry: Any, now: tuple[Any, Any, Any]) -> tuple[Any, Any]:
            x, key, running = now
            own = jtu.tree_map(_narrowed, wide, cell)
            new = own(x, carry) if key is None else own(x, carry, key=key)
            if running is not None:
                new = jtu.tree_map(ft.partial(_where, running), new, carry)
            return new, own.output_of(new)

        # Sequences of equal length are reversed by a scan from the end.
        options: Any = {"reverse": self.reverse and lengths is None, "unroll": self.unroll}
        carry = _varying_as(initial_carry, (x, cell, lengths))
        carry, outputs = filter_scan(step, carry, (x, keys, running), **options)

        def arranged(y: Array) -> Array:
            if self.reverse and self.keep_order and lengths is not None:
                y = _flip(y, lengths)
            elif self.reverse and not self.keep_order and lengths is None:
                y = jnp.flip(y, 0)
            return y if self.time_major else jnp.moveaxis(y, 0, len(batch))

        outputs = jtu.tree_map(arranged, outputs)
        return (carry, outputs) if self.return_carry else outputs


def _widened(leaf: Any) -> Any:
    return leaf.astype(wide_dtype(leaf.dtype)) if is_inexact_array(leaf) else leaf


def _narrowed(leaf: Any, like: Any) -> Any:
    return leaf.astype(like.dtype) if is_inexact_array(leaf) else leaf


def _where(running: Array, new: Any, old: Any) -> Any:
    """Return the new value for sequences that run, and the old one past their end."""
    mask = lax.broadcast_in_dim(running, old.shape, range(running.ndim))
    return lax.select(mask, new, old)


def _flip(x: Array, lengths: Any) -> Array:
    """Reverse each sequence of (time, *batch, ...), and leave entries after its end unchanged."""
    now = lax.broadcasted_iota(lengths.dtype, (x.shape[0], *lengths.shape), 0)
    ends = jnp.clip(lengths, 0, x.shape[0])[None]
    source = jnp.where(now < ends, ends - 1 - now, now)
    # With size 1 on the remaining axes, along which all entries of a time step stay together.
    return jnp.take_along_axis(x, lax.expand_dims(source, range(source.ndim, x.ndim)), axis=0)


def _varying_as(carry: Any, others: Any) -> Any:
    """Inside a `shard_map`, make the carry vary over the mesh axes of what it is combined with."""
    axes = frozenset[Any]().union(*map(_varying, jtu.tree_leaves(others)))

    def vary(array: Any) -> Any:
        missing = tuple(axes - _varying(array))
        return untyped_jax.lax.pcast(array, missing, to="varying") if missing else array

    return jtu.tree_map(vary, carry)


def _varying(array: Any) -> frozenset[Any]:
    return varying_axes(jax.typeof(array)) if is_array(array) else frozenset()


def concatenate(forward: Array, backward: Array) -> Array:
    """Concatenate two arrays on the last axis: the default `merge_fn` of `Bidirectional`."""
    return jnp.concatenate([forward, backward], axis=-1)


class Bidirectional(Module):
    """Runs two RNNs over the same inputs in opposite directions, and merges their outputs.

    Shapes:
        inputs: (..., time, in); (time, ..., in) if time_major
        return: the result of merge_fn, by default (..., time, out + out); with return_carry a
            pair, of the pair of last carries and that result

    Fields:
        forward_rnn: from start to end
        backward_rnn: from end to start
        merge_fn: configuration if a function; a Module is called with both outputs
        time_major, return_carry: configuration

    Args:
        forward_rnn: an `RNN`.
        backward_rnn: an `RNN`; this layer reverses it, so leave its `reverse` False.
        merge_fn: from both outputs, each in the order of the inputs, to one.
        time_major: whether the time axis comes first; the RNNs' own settings are ignored.
        return_carry: whether to also return the last carries, before the outputs; the RNNs' own
            settings are ignored.

    A call takes `initial_carry` (a pair, or None) and `seq_lengths`, as `RNN` does.

    State and randomness: no State; random numbers if the cells draw them.

    Raises:
        ShapeError: as `RNN`.
        StructureError: as `RNN`.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> one, two = jax.random.split(jax.random.key(0))
        >>> rnn = nn.Bidirectional(
        ...     nn.RNN(nn.GRUCell(3, 4, key=one)), nn.RNN(nn.GRUCell(3, 4, key=two))
        ... )
        >>> rnn(jnp.ones((7, 5, 3))).shape
        (7, 5, 8)

    Source:
        Schuster & Paliwal 1997. Names, defaults and the order of results as in
        `flax.nnx.Bidirectional`.
    """

    forward_rnn: RNN
    backward_rnn: RNN
    merge_fn: Callable[..., Any] = field(default=concatenate, kw_only=True)
    time_major: bool = field(static=True, default=False, kw_only=True)
    return_carry: bool = field(static=True, default=False, kw_only=True)

    @layer_call()
    def __call__(
        self,
        inputs: AnyArray,
        *,
        initial_carry: Any = None,
        seq_lengths: AnyArray | None = None,
        key: KeyLike | None = None,
    ) -> Any:
        """Run both, and merge their outputs."""
        # Outputs of both in the order of time, so that they can be merged.
        shared = {"time_major": self.time_major, "return_carry": True, "keep_order": True}
        there = self.forward_rnn.replace(reverse=False, **shared)
        back = self.backward_rnn.replace(reverse=True, **shared)
        starts = (None, None) if initial_carry is None else initial_carry
        keys = (None, None) if key is None else divide_key(key, 2)
        first = there(inputs, initial_carry=starts[0], seq_lengths=seq_lengths, key=keys[0])
        second = back(inputs, initial_carry=starts[1], seq_lengths=seq_lengths, key=keys[1])
        outputs = self.merge_fn(first[1], second[1])
        return ((first[0], second[0]), outputs) if self.return_carry else outputs
