"""`RNN`, a cell run over time, and `Bidirectional`, two of them in opposite directions."""

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
from pytreemod.nn.functional.explicit_meshes import (
    entries,
    explicit_mesh,
    laid_like,
    laid_out,
    sharding,
)
from pytreemod.nn.functional.promotion import widen
from pytreemod.nn.functional.recurrent_sequences import flip_sequences
from pytreemod.nn.recurrent_cells import RNNCellBase
from pytreemod.state.key_sources import KeyLike
from pytreemod.transform.control_flow.scans import filter_scan
from pytreemod.tree.differences import varying_axes
from pytreemod.tree.predicates import is_array, is_array_like, is_inexact_array
from pytreemod.typing import AnyArray, jtu, untyped_jax

_CELL = instance(RNNCellBase, "an RNNCellBase", "such as", "RNN(GRUCell(3, 4, key=key))")


class RNN(Module):
    r"""A cell run over time: $h_t = \mathrm{cell}(x_t, h_{t-1})$, by a scan.

    Shapes:
        inputs: (..., time, in); (time, ..., in) if time_major
        return: (..., time, out), or (time, ..., out); with return_carry a pair, of the last carry
            and that

    A sequence that is shorter than others (`seq_lengths`) stops at its end: it keeps the carry of
    its last step, and gives the output of that again. What fills it up is not looked at, be it NaN,
    and no gradient comes from there.

    Fields:
        cell: the cell
        time_major, return_carry, reverse, keep_order, unroll: configuration

    Args:
        cell: `GRUCell`, `LSTMCell`, `SimpleCell`, or a cell of your own: an `RNNCellBase`.
        time_major: whether the axis of time comes first, before batch axes, and not after them.
        return_carry: whether the last carry is returned, too, before the outputs.
        reverse: whether to go from the end to the start of each sequence.
        keep_order: whether outputs are in the order of the inputs, and not in that of the steps;
            they differ with `reverse` alone.
        unroll: as for `jax.lax.scan`.

    A call takes `initial_carry` (zeros if None: `cell.initialize_carry`), `seq_lengths` (integers,
    one for each sequence of the batch), and for itself `return_carry`, `time_major`,
    `reverse` and `keep_order`.

    State and randomness: no State; a cell that draws random numbers gets a key of its own in
    every step.

    Raises:
        ArgumentError: cell is no cell, or another argument is invalid; seq_lengths are no
            integers, or less than zero, or greater than the axis of time.
        ShapeError: inputs lack an axis, seq_lengths are not one for each sequence; or what the cell
            refuses.
        StructureError: initial_carry is not of the cell's kind, or changes its dtype in a step.

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
        Names, defaults and the order of results as `flax.nnx.RNN`.
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
        """Run the cell over time; what is None is as in the constructor."""
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

        # Sequences of one length are all turned around by going through them from the end.
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
        """The carry of each sequence's last step, and all outputs, time first."""
        keys: Any = None
        # Once, not in every step.
        cell = resolve(self.cell)
        if key is not None and wants_key(cell):
            keys = jax.random.split(check_key(f"{where}(key)", key), x.shape[0])
        takes_key = accepts_key(cell)
        carry = _varying_alike(carry, (x, cell, lengths))
        cell, carry = _laid_out(cell, carry, x)
        cell_of_step = _widened(cell)

        def advance(carry: Any, now: tuple[Any, Any, Any]) -> tuple[Any, Any]:
            x, key, step = now
            running = None if step is None else step < lengths
            # Zeros past the end: what fills a sequence up may be anything, and the gradient of a
            # choice asks for that of what was not chosen, too: zero times infinity.
            x = x if running is None else _kept(running, x, jnp.zeros_like(x))
            new = cell_of_step()(x, carry, **({"key": key} if takes_key else {}))
            _check_dtypes(where, carry, new)
            # What is of another structure the scan refuses, which knows where it is.
            if jtu.tree_structure(new) != jtu.tree_structure(carry):
                return new, cell.output_of(new)
            if running is not None:
                new = jtu.tree_map(ft.partial(_kept, running), new, carry)
            return jtu.tree_map(_lying_like, new, carry), cell.output_of(new)

        steps = None if lengths is None else jnp.arange(x.shape[0], dtype=lengths.dtype)
        return filter_scan(advance, carry, (x, keys, steps), **options)


def _varying_alike(carry: Any, others: Any) -> Any:
    """A carry that differs between devices, inside a `shard_map`, where what it meets does."""
    found = [varying_axes(jax.typeof(x)) for x in jtu.tree_leaves(others) if is_array(x)]
    axes = frozenset[Any]().union(*found)

    def vary(array: Any) -> Any:
        missing = tuple(axes - varying_axes(jax.typeof(array))) if is_array(array) else ()
        return untyped_jax.lax.pcast(array, missing, to="varying") if missing else array

    return jtu.tree_map(vary, carry) if axes else carry


def _laid_out(cell: RNNCellBase, carry: Any, x: Array) -> tuple[RNNCellBase, Any]:
    """Where axes of a mesh are explicit: a carry that lies as x does, and a cell that fits to both.

    Each step would gather the weights that are split as the batch is; so that is done before.
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
        return laid_out(leaf, mesh, [taken.isdisjoint(at) * at for at in entries(leaf)])

    def begun(leaf: Any) -> Any:
        # What was passed may lie otherwise, and stays there.
        if not is_array(leaf) or explicit_mesh(leaf) is not None:
            return leaf
        is_of_batch = leaf.shape[: len(sizes)] == sizes
        rest = ((),) * (leaf.ndim - len(sizes))
        return laid_out(leaf, mesh, (*batch, *rest) if is_of_batch else ((),) * leaf.ndim)

    return treedef.unflatten(map(gathered, leaves)), jtu.tree_map(begun, carry)


def _lying_like(new: Any, old: Any) -> Any:
    """What a step has made, on a mesh as it was before."""
    fits = is_array(new) and is_array(old) and new.shape == old.shape
    return laid_like(new, old, 0) if fits else new


def _widened(cell: RNNCellBase) -> Callable[[], RNNCellBase]:
    """What gives a cell in each step, of arrays that are in wide dtypes outside of the loop.

    The gradient of what all steps share is a sum over all of them, and is added up in the dtype
    that it has outside: in bfloat16, 256 + 1 is 256.
    """
    leaves, treedef = jtu.tree_flatten(cell)
    wide = [widen(leaf) if is_inexact_array(leaf) else leaf for leaf in leaves]
    pairs = list(zip(wide, leaves, strict=True))

    def narrowed(wide: Any, leaf: Any) -> Any:
        leaf = wide if wide is leaf else wide.astype(leaf.dtype)
        # JAX 0.12 forgets how an array of outside lies, in the gradient of a scan without a mesh
        # in context; and knows it of what was made in the step.
        mesh = explicit_mesh(leaf) if is_inexact_array(leaf) else None
        if mesh is None:
            return leaf
        return untyped_jax.sharding.reshard(leaf, sharding(mesh, entries(leaf)))

    return lambda: treedef.unflatten(itertools.starmap(narrowed, pairs))


def _kept(running: Array, new: Any, old: Any) -> Any:
    """What a sequence that runs has now, and one past its end had before."""
    # What is of another kind, or no array, is for the scan to refuse or to keep as well.
    if not is_array_like(new) or not is_array_like(old) or _kind(new) != _kind(old):
        return new
    new = _lying_like(new, old)
    mask = lax.broadcast_in_dim(running, jnp.shape(new), range(running.ndim))
    return lax.select(_lying_like(mask, new), new, old)


def _kind(array: Any) -> Any:
    return jnp.shape(array), jnp.result_type(array)


def concatenate(forward: Array, backward: Array) -> Array:
    """Put two arrays together on the last axis: the default `merge_fn` of `Bidirectional`."""
    return jnp.concatenate([forward, backward], axis=-1)


_RNN = instance(RNN, "an RNN", "Cells are run over time by an RNN:", "RNN(cell)")


class Bidirectional(Module):
    """Two RNNs in opposite directions over the same inputs, their outputs put together.

    Shapes:
        inputs: (..., time, in); (time, ..., in) if time_major
        return: what merge_fn makes of the outputs, by default (..., time, out + out); with
            return_carry a pair, of the pair of last carries and that

    Fields:
        forward_rnn: from start to end
        backward_rnn: from end to start
        merge_fn: configuration if a function; a Module is called with both outputs
        time_major, return_carry: configuration

    Args:
        forward_rnn: an `RNN`.
        backward_rnn: an `RNN`; not one that goes backwards by itself, which it is made to do.
        merge_fn: from both outputs, each in the order of the inputs, to one.
        time_major: whether the axis of time comes first; what the RNNs say does not count.
        return_carry: whether last carries are returned, too, before the outputs; the same.

    A call takes `initial_carry` (a pair, or None), `seq_lengths` as `RNN`, and for itself
    `return_carry` and `time_major`.

    State and randomness: no State; random numbers if the cells draw them.

    Raises:
        ArgumentError: an argument is invalid; or what `RNN` refuses.

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
        Schuster & Paliwal 1997. Names, defaults and the order of results as
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
        """Run both; what is None is as in the constructor."""
        where = Title(self)
        if return_carry is None:
            return_carry = self.return_carry
        starts: Any = (None, None) if initial_carry is None else initial_carry
        if not isinstance(starts, tuple) or len(cast("tuple[Any, ...]", starts)) != 2:
            expected = "initial_carry to be a pair: forward, backward"
            raise ArgumentError(where, expected, describe(initial_carry))
        keys = (None, None) if key is None else divide_key(f"{where}(key)", key, 2)
        # Outputs of both in the order of time, or they could not be put together.
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
    """Require a carry to come out of a step in the dtype in which it went in.

    Raises:
        StructureError: it has another one, of floating numbers.
    """
    for old, array in zip(jtu.tree_leaves(carry), jtu.tree_leaves(new), strict=False):
        if not (is_inexact_array(old) and is_inexact_array(array)):
            continue
        if old.dtype == array.dtype or jax.typeof(old).weak_type:
            continue
        hint = (
            "Let the cell's precision say what it gives back, or start from what it gives:",
            f'pm.with_precision(cell, "params=float32,compute=bfloat16,output={old.dtype.name}")',
            f"rnn(x, initial_carry=carry)   # of {array.dtype.name}",
        )
        expected = f"a carry that stays in the dtype in which it starts, {old.dtype.name}"
        got = f"{array.dtype.name} out of a step of the cell"
        raise StructureError(where, expected, got, hint=hint)


def _checked_inputs(where: Title, inputs: Any, time_major: bool) -> Array:
    x = check_array(where, inputs)
    if x.ndim < 2:
        shape = "(time, ..., in)" if time_major else "(..., time, in)"
        hint = ("For a single step call the cell:", "carry = rnn.cell(x, carry)")
        raise ShapeError(where, f"inputs of shape {shape}", describe(x), hint=hint)
    return x
