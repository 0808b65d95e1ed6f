"""`RNN` runs a cell over time; `Bidirectional` runs two RNNs in opposite directions."""

from __future__ import annotations

import functools as ft
import itertools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pytreemod.errors import ArgumentError, ShapeError, StructureError, describe
from pytreemod.module.classes import Module
from pytreemod.module.field_kinds import check_flag, flag, size
from pytreemod.module.fields import field
from pytreemod.module.resolving import resolve
from pytreemod.nn.arguments import (
    Title,
    check_array,
    check_key,
    check_lengths,
    divide_key,
    function,
    instance,
)
from pytreemod.nn.calling import accepts_key, in_scope, uses_key_if, wants_key
from pytreemod.nn.functional.explicit_meshes import entries, resharded, sharded_like, sharding
from pytreemod.nn.functional.promotion import widen
from pytreemod.nn.functional.recurrent_sequences import flip_sequences
from pytreemod.nn.recurrent_cells import RNNCellBase
from pytreemod.state.key_sources import KeyLike
from pytreemod.transform.scans import filter_scan
from pytreemod.tree.differences import varying_axes
from pytreemod.tree.predicates import is_array, is_array_like, is_inexact_array
from pytreemod.tree.split_arrays import explicit_mesh
from pytreemod.typing import AnyArray, jtu, untyped_jax

_CELL = instance(RNNCellBase, "an RNNCellBase", "such as", "RNN(GRUCell(3, 4, key=key))")


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
    `seq_lengths` (integers, one for each sequence of the batch). It can override `return_carry`,
    `time_major`, `reverse` and `keep_order`.

    State and randomness: no State; a cell that draws random numbers gets its own key in every
        step.

    Raises:
        ArgumentError: if cell is not a cell, or another argument is invalid; seq_lengths are not
            integers, negative, or greater than the size of the time axis.
        ShapeError: if inputs lack an axis, seq_lengths is not one number for each sequence, or the
            cell does not accept the shapes.
        StructureError: if initial_carry has another structure than the cell's, or a step changes
            its dtype.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from pytreemod import nn
        >>> rnn = nn.RNN(nn.LSTMCell(3, 4, key=jax.random.key(0)))
        >>> rnn(jnp.ones((7, 5, 3))).shape
        (7, 5, 4)
        >>> (h, c), outputs = rnn(
        ...     jnp.ones((2, 5, 3)), seq_lengths=jnp.array([5, 2]), return_carry=True
        ... )
        >>> bool(jnp.all(h[1] == outputs[1, 1]))
        True

    Source:
        Names, defaults and the order of results as in `flax.nnx.RNN`.
    """

    cell: RNNCellBase = field(accepts=_CELL)
    # Defaults, although __init__ sets them: a value equal to its default is not printed.
    time_major: bool = flag(default=False)
    return_carry: bool = flag(default=False)
    reverse: bool = flag(default=False)
    keep_order: bool = flag(default=False)
    unroll: int = size(1, default=1)

    def __init__(
        self,
        cell: RNNCellBase,
        *,
        time_major: bool = False,
        return_carry: bool = False,
        reverse: bool = False,
        keep_order: bool = False,
        unroll: int = 1,
    ):
        self.cell, self.time_major, self.return_carry = cell, time_major, return_carry
        self.reverse, self.keep_order, self.unroll = reverse, keep_order, unroll

    @uses_key_if(lambda layer: wants_key(layer.cell))
    @in_scope("pm.nn.RNN")
    def __call__(
        self,
        inputs: AnyArray,
        *,
        initial_carry: Any = None,
        seq_lengths: AnyArray | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
        key: KeyLike | None = None,
    ) -> Any:
        """Run the cell over time; arguments that are None are as in the constructor."""
        return_carry = self._chosen("return_carry", return_carry)
        time_major = self._chosen("time_major", time_major)
        reverse = self._chosen("reverse", reverse)
        keep_order = self._chosen("keep_order", keep_order)
        where = Title(self, "time_major")
        x = _checked_inputs(where, inputs, time_major)
        x = x if time_major else jnp.moveaxis(x, -2, 0)
        batch = x.shape[1:-1]
        lengths = None if seq_lengths is None else jnp.asarray(seq_lengths)
        lengths = check_lengths(where, "seq_lengths", lengths, batch, x.shape[0])
        if initial_carry is None:
            initial_carry = self.cell.initialize_carry(x.shape[1:], x.dtype)

        # Sequences of equal length are reversed by a scan from the end.
        options = {"reverse": reverse and lengths is None, "unroll": self.unroll}
        if reverse and lengths is not None:
            x = flip_sequences(x, lengths)
        carry, outputs = self._scanned(where, x, initial_carry, lengths, key, options)

        def arranged(y: Array) -> Array:
            if reverse and lengths is not None and keep_order:
                y = flip_sequences(y, lengths)
            elif reverse and lengths is None and not keep_order:
                y = jnp.flip(y, 0)
            return y if time_major else jnp.moveaxis(y, 0, len(batch))

        outputs = jtu.tree_map(arranged, outputs)
        return (carry, outputs) if return_carry else outputs

    def _chosen(self, name: str, value: bool | None) -> bool:
        return getattr(self, name) if value is None else check_flag(f"RNN(...)({name})", value)

    def _scanned(
        self, where: Title, x: Array, carry: Any, lengths: Array | None, key: Any, options: Any
    ) -> tuple[Any, Any]:
        """Return the carry of each sequence's last step, and all outputs, time first."""
        keys: Any = None
        # Once, not in every step.
        cell = resolve(self.cell)
        if key is not None and wants_key(cell):
            keys = jax.random.split(check_key(f"{where}(key)", key), x.shape[0])
        takes_key = accepts_key(cell)
        carry = _varying_alike(carry, (x, cell, lengths))
        cell, carry = _with_sharding_of(cell, carry, x)
        cell_of_step = _widened(cell)

        def advance(carry: Any, now: tuple[Any, Any, Any]) -> tuple[Any, Any]:
            x, key, step = now
            running = None if step is None else step < lengths
            # Zeros past the end: the values there are arbitrary, and the gradient of a select
            # multiplies the unselected branch by zero, which is NaN for an infinity.
            x = x if running is None else _where_running(running, x, jnp.zeros_like(x))
            new = cell_of_step()(x, carry, **({"key": key} if takes_key else {}))
            _check_dtypes(where, carry, new)
            # The scan refuses another structure, with a message that has the path.
            if jtu.tree_structure(new) != jtu.tree_structure(carry):
                return new, cell.output_of(new)
            if running is not None:
                new = jtu.tree_map(ft.partial(_where_running, running), new, carry)
            return jtu.tree_map(_resharded_like, new, carry), cell.output_of(new)

        steps = None if lengths is None else jnp.arange(x.shape[0], dtype=lengths.dtype)
        return filter_scan(advance, carry, (x, keys, steps), **options)


def _varying_alike(carry: Any, others: Any) -> Any:
    """Inside a `shard_map`, make the carry vary over the mesh axes of what it is combined with."""
    found = [varying_axes(jax.typeof(x)) for x in jtu.tree_leaves(others) if is_array(x)]
    axes = frozenset[Any]().union(*found)

    def vary(array: Any) -> Any:
        missing = tuple(axes - varying_axes(jax.typeof(array))) if is_array(array) else ()
        return untyped_jax.lax.pcast(array, missing, to="varying") if missing else array

    return jtu.tree_map(vary, carry) if axes else carry


def _with_sharding_of(cell: RNNCellBase, carry: Any, x: Array) -> tuple[RNNCellBase, Any]:
    """Shard the carry like x, and gather the cell where needed, on a mesh with explicit axes.

    Each step would gather the weights that are split like the batch; this gathers them once.
    """
    leaves, treedef = jtu.tree_flatten(cell)
    mesh = explicit_mesh(x, *filter(is_array, leaves))
    if mesh is None:
        return cell, carry
    sizes, batch = x.shape[1:-1], entries(x)[1:-1]
    taken = {name for names in batch for name in names}

    def gathered(leaf: Any) -> Any:
        if not is_array(leaf):
            return leaf
        return resharded(leaf, mesh, [taken.isdisjoint(at) * at for at in entries(leaf)])

    def begun(leaf: Any) -> Any:
        # A carry that the caller has sharded is unchanged.
        if not is_array(leaf) or explicit_mesh(leaf) is not None:
            return leaf
        is_of_batch = leaf.shape[: len(sizes)] == sizes
        rest = ((),) * (leaf.ndim - len(sizes))
        return resharded(leaf, mesh, (*batch, *rest) if is_of_batch else ((),) * leaf.ndim)

    return treedef.unflatten(map(gathered, leaves)), jtu.tree_map(begun, carry)


def _resharded_like(new: Any, old: Any) -> Any:
    """Shard a result of a step like the value before the step."""
    fits = is_array(new) and is_array(old) and new.shape == old.shape
    return sharded_like(new, old, 0) if fits else new


def _widened(cell: RNNCellBase) -> Callable[[], RNNCellBase]:
    """Return a function that makes the cell in each step, from arrays in wide dtypes.

    The gradient of shared arrays is a sum over all steps, which JAX adds up in the dtype outside
    the loop. In bfloat16 such a sum stops growing: 256 + 1 is 256.
    """
    leaves, treedef = jtu.tree_flatten(cell)
    wide = [widen(leaf) if is_inexact_array(leaf) else leaf for leaf in leaves]
    pairs = list(zip(wide, leaves, strict=True))

    def narrowed(wide: Any, leaf: Any) -> Any:
        leaf = wide if wide is leaf else wide.astype(leaf.dtype)
        # In the gradient of a scan without a mesh in context, JAX 0.12 loses the sharding of an
        # array from outside. It knows that of an array made in the step.
        mesh = explicit_mesh(leaf) if is_inexact_array(leaf) else None
        if mesh is None:
            return leaf
        return untyped_jax.sharding.reshard(leaf, sharding(mesh, entries(leaf)))

    return lambda: treedef.unflatten(itertools.starmap(narrowed, pairs))


def _where_running(running: Array, new: Any, old: Any) -> Any:
    """Return the new value for sequences that run, and the old one past their end."""
    # The scan refuses or passes on values of another type, and values that are not arrays.
    if not is_array_like(new) or not is_array_like(old) or _kind(new) != _kind(old):
        return new
    new = _resharded_like(new, old)
    mask = lax.broadcast_in_dim(running, jnp.shape(new), range(running.ndim))
    return lax.select(_resharded_like(mask, new), new, old)


def _kind(array: Any) -> Any:
    return jnp.shape(array), jnp.result_type(array)


def concatenate(forward: Array, backward: Array) -> Array:
    """Concatenate two arrays on the last axis: the default `merge_fn` of `Bidirectional`."""
    return jnp.concatenate([forward, backward], axis=-1)


_RNN = instance(RNN, "an RNN", "To run a cell over time, use an RNN:", "RNN(cell)")


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

    A call takes `initial_carry` (a pair, or None) and `seq_lengths`, as `RNN` does. It can override
    `return_carry` and `time_major`.

    State and randomness: no State; random numbers if the cells draw them.

    Raises:
        ArgumentError: if an argument is invalid, or `RNN` refuses it.

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

    forward_rnn: RNN = field(accepts=_RNN)
    backward_rnn: RNN = field(accepts=_RNN)
    merge_fn: Callable[..., Any] = field(accepts=function("a function of both outputs"))
    time_major: bool = flag(default=False)
    return_carry: bool = flag(default=False)

    def __init__(
        self,
        forward_rnn: RNN,
        backward_rnn: RNN,
        *,
        merge_fn: Callable[..., Any] = concatenate,
        time_major: bool = False,
        return_carry: bool = False,
    ):
        self.forward_rnn, self.backward_rnn, self.merge_fn = forward_rnn, backward_rnn, merge_fn
        self.time_major, self.return_carry = time_major, return_carry

    @uses_key_if(lambda layer: wants_key(layer.forward_rnn) or wants_key(layer.backward_rnn))
    @in_scope("pm.nn.Bidirectional")
    def __call__(
        self,
        inputs: AnyArray,
        *,
        initial_carry: Any = None,
        seq_lengths: AnyArray | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        key: KeyLike | None = None,
    ) -> Any:
        """Run both; arguments that are None are as in the constructor."""
        where = Title(self)
        if return_carry is None:
            return_carry = self.return_carry
        starts: Any = (None, None) if initial_carry is None else initial_carry
        if not isinstance(starts, tuple) or len(cast("tuple[Any, ...]", starts)) != 2:
            expected = "initial_carry to be a pair: forward, backward"
            raise ArgumentError(where, expected, describe(initial_carry))
        keys = (None, None) if key is None else divide_key(f"{where}(key)", key, 2)
        # Outputs of both in the order of time, so that they can be merged.
        shared: dict[str, Any] = {
            "seq_lengths": seq_lengths,
            "time_major": self.time_major if time_major is None else time_major,
            "return_carry": True,
            "keep_order": True,
        }
        forward_carry, forward = self.forward_rnn(
            inputs, initial_carry=starts[0], reverse=False, key=keys[0], **shared
        )
        backward_carry, backward = self.backward_rnn(
            inputs, initial_carry=starts[1], reverse=True, key=keys[1], **shared
        )
        outputs = self.merge_fn(forward, backward)
        return ((forward_carry, backward_carry), outputs) if return_carry else outputs


# ---- refusals


def _check_dtypes(where: Title, carry: Any, new: Any) -> None:
    """Require that a step does not change the dtypes of the carry.

    Raises:
        StructureError: if a step changes a floating dtype.
    """
    for old, array in zip(jtu.tree_leaves(carry), jtu.tree_leaves(new), strict=False):
        if not (is_inexact_array(old) and is_inexact_array(array)):
            continue
        if old.dtype == array.dtype or jax.typeof(old).weak_type:
            continue
        hint = (
            "Set the output dtype of the cell, or start from the dtype that it returns:",
            f'pm.with_precision(cell, "params=float32,compute=bfloat16,output={old.dtype.name}")',
            f"rnn(x, initial_carry=carry)   # of {array.dtype.name}",
        )
        expected = f"a carry that keeps its first dtype, {old.dtype.name}"
        got = f"{array.dtype.name} from a step of the cell"
        raise StructureError(where, expected, got, hint=hint)


def _checked_inputs(where: Title, inputs: Any, time_major: bool) -> Array:
    x = check_array(where, inputs)
    if x.ndim < 2:
        shape = "(time, ..., in)" if time_major else "(..., time, in)"
        hint = ("For a single step, call the cell:", "carry = rnn.cell(x, carry)")
        raise ShapeError(where, f"inputs of shape {shape}", describe(x), hint=hint)
    return x
