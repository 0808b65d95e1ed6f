"""`LossScale`: a factor that lifts gradients into the range of float16, as a value.

float16 has no numbers below 6e-8, where many gradients are. So the loss is multiplied by a factor
before it is differentiated, and the gradients are divided by it afterwards, in wider numbers.
Training finds the largest factor: it grows until a gradient overflows; that step is skipped, and
the factor shrinks.
"""

from __future__ import annotations

import functools as ft
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import ArgumentError, StructureError, describe
from pytreemod.module.classes import Module
from pytreemod.module.fields import buffer, field
from pytreemod.state.values import State
from pytreemod.tree.differences import compare
from pytreemod.tree.predicates import as_number, is_array, is_inexact_array
from pytreemod.tree.snapshots import is_state
from pytreemod.typing import PyTree, jtu

_T = TypeVar("_T")
# Not `Self`, which runtime type checkers (beartype) refuse in single methods.
_L = TypeVar("_L", bound="LossScale")


_LEAST, _MOST = 2.0**-126, 2.0**126
"""In this range a factor and its inverse are normal numbers of float32: XLA takes others for 0."""


def _check_factor(where: str, value: Any, above: float = 0.0) -> float:
    given = as_number(value)
    # As the computation will round it: 1 + 1e-9 is 1.
    factor = 0.0 if given is None else float(np.float32(min(max(given, -1.0), _MOST * 2)))
    if given is None or not max(_LEAST, above) <= factor <= _MOST or factor == above:
        least = f"more than {above:g}" if above else "from 2**-126"
        expected = f"a number of float32, {least} and up to 2**126"
        raise ArgumentError(where, expected, describe(value))
    return float(given)


class LossScale(Module):
    """The factor by which a loss is multiplied before it is differentiated.

    **Form.** A value with two arrays: pass it through `filter_jit`, `filter_scan`, files and
    pickles together with the model.

    **Make.** `LossScale()`, which adapts itself: after `period` finite steps the factor is
    multiplied by `growth`, up to 2**126. At a step that is not finite it is divided by `growth`,
    down to `minimum`. With `period=None` it never changes.

    **Use.** Differentiate `scale.scale(loss)`; `grads = scale.unscale(grads)`; then
    `finite = pm.all_finite(grads)` decides whether the step is made, by
    [`select_tree`][pytreemod.select_tree], and `scale = scale.adjust(finite)`.

    **Laws.** `scale.unscale(scale.scale(x))` equals `x`, where neither overflows nor underflows: to
    the last bit if the factor is a power of two.

    Fields:
        loss_scale: the factor, a float32
        counter: the number of finite steps since it changed, an int32

    Args:
        initial: the first factor, from 2**-126 to 2**126; not below `minimum` if it
            adapts.
        period: the number of finite steps after which the factor grows, >= 1; None for never.
        growth: the number to multiply or divide by, > 1 as a float32, up to 2**126.
        minimum: the smallest factor, from 2**-126 to 2**126.

    Raises:
        ArgumentError: if an argument is unusable.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import pytreemod as pm
        >>> scale = pm.LossScale(1024.0, period=2)
        >>> grads = pm.filter_grad(lambda w: scale.scale(jnp.sum(w**2)))(jnp.ones(2))
        >>> grads, scale.unscale(grads)
        (Array([2048., 2048.], dtype=float32), Array([2., 2.], dtype=float32))
        >>> finite = pm.all_finite(grads)
        >>> float(scale.adjust(finite).adjust(finite).loss_scale)
        2048.0
        >>> float(scale.adjust(~finite).loss_scale)
        512.0

    Source:
        Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740, section 3.2, and `jmp`.
    """

    loss_scale: jax.Array = buffer()
    counter: jax.Array = buffer()
    period: int | None = field(static=True)
    growth: float = field(static=True)
    minimum: float = field(static=True)

    def __init__(
        self,
        initial: float = 2.0**15,
        *,
        period: int | None = 2000,
        growth: float = 2.0,
        minimum: float = 1.0,
    ):
        first = _check_factor("LossScale(initial)", initial)
        if period is not None and period < 1:
            raise ArgumentError("LossScale(period)", "at least 1 step, or None", str(period))
        self.period = period
        self.growth = _check_factor("LossScale(growth)", growth, 1.0)
        self.minimum = _check_factor("LossScale(minimum)", minimum)
        # At an overflow, `minimum` would raise the factor.
        if period is not None and first < self.minimum:
            raise ArgumentError(
                "LossScale(initial)",
                f"an initial scale of at least minimum, {self.minimum:g}",
                f"{first:g}",
                hint=("lower the minimum:", f"LossScale({first!r}, minimum={first!r})"),
            )
        self.loss_scale = jnp.asarray(first, jnp.float32)
        self.counter = jnp.asarray(0, jnp.int32)

    def scale(self, loss: _T) -> _T:
        """Multiply a loss by the factor.

        Args:
            loss: a floating array, or any tree of them.

        Returns:
            The same, in the same dtypes.
        """
        return jtu.tree_map(ft.partial(_times, factor=self.loss_scale), loss)

    def unscale(self, grads: _T) -> _T:
        """Divide gradients by the factor.

        Args:
            grads: any tree of arrays; only floating and complex arrays are changed.

        Returns:
            The same, in the same dtypes. The division itself is done in float32 or wider.
        """
        return jtu.tree_map(ft.partial(_times, factor=1 / self.loss_scale), grads)

    def adjust(self: _L, grads_finite: Any) -> _L:
        """Return the factor for the next step.

        Args:
            grads_finite: whether the gradients were finite, as `all_finite` says; may be traced.

        Returns:
            A `LossScale` of the same structure; this one, if it never changes.

        Raises:
            ArgumentError: if `grads_finite` is not a single bool.
        """
        finite = _check_bool("LossScale.adjust(grads_finite)", grads_finite)
        if self.period is None:
            return self
        counter = self.counter + 1
        is_due = counter >= self.period
        grown = self.loss_scale * self.growth
        # A larger factor would have an inverse of 0, and all finite gradients would become 0.
        up = jnp.where(is_due & (grown <= _MOST), grown, self.loss_scale)
        # Otherwise a loss that is never finite would bring the factor, and all gradients, to zero.
        down = jnp.maximum(self.loss_scale / self.growth, self.minimum)
        return self.replace(
            loss_scale=jnp.where(finite, up, down),
            counter=jnp.where(finite & ~is_due, counter, jnp.zeros_like(counter)),
        )


def all_finite(tree: PyTree) -> jax.Array:
    """Whether no array in a tree has an infinity or a NaN.

    Args:
        tree: any tree, such as gradients; only floating and complex arrays are read.

    Returns:
        One True or False, as an array; True if there are no such arrays.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> bool(pm.all_finite({"a": jnp.ones(3), "b": None, "c": jnp.asarray(jnp.inf)}))
        False
    """
    arrays = [leaf for leaf in jtu.tree_leaves(tree) if is_inexact_array(leaf)]
    answers = [jnp.all(jnp.isfinite(array)) for array in arrays]
    return jnp.all(jnp.stack(answers)) if answers else jnp.asarray(True)


def select_tree(pred: Any, on_true: _T, on_false: _T) -> _T:
    """Return one of two trees, depending on a single bool that may be traced.

    Use it to skip a step that is not finite: `select_tree(finite, new, old)`. If the step has used
        up
    a State in `old`, that is restored, as by `State.restored`.

    Args:
        pred: True or False.
        on_true: a tree.
        on_false: a tree of the same structure. Its arrays have the same shapes and dtypes, and all
            other leaves are equal.

    Returns:
        A tree of the same structure.

    Raises:
        ArgumentError: if `pred` is not a single bool.
        StructureError: if the trees differ; the paths are named.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> float(pm.select_tree(jnp.asarray(False), [jnp.asarray(1.0)], [jnp.asarray(2.0)])[0])
        2.0
    """
    pred = _check_bool("select_tree(pred)", pred)
    # Skipping a step means going back to a State that the step has used up.
    on_true, on_false = _restored(on_true), _restored(on_false)
    leaves, treedef = jtu.tree_flatten(on_true)
    others = jtu.tree_leaves(on_false)
    found = compare(on_true, on_false, _fits)
    if found:
        raise StructureError(
            "select_tree",
            "two trees of one structure, with arrays of the same shapes and dtypes",
            "trees that differ",
            at=[each.line(form="{} and {}") for each in found],
        )
    pairs = zip(leaves, others, strict=True)
    # `where`, and no branch: both trees exist already, and vmap would turn a branch into this.
    return treedef.unflatten([jnp.where(pred, a, b) if is_array(a) else a for a, b in pairs])


def _times(x: Any, factor: jax.Array) -> Any:
    if not is_inexact_array(x):
        return x
    # In float16 the factor itself, or its inverse, might be out of range.
    wide = x.dtype if x.dtype.itemsize >= factor.dtype.itemsize else factor.dtype
    return (x.astype(wide) * factor.astype(wide)).astype(x.dtype)


def _restored(tree: Any) -> Any:
    def restore(node: Any) -> Any:
        return node.restored() if isinstance(node, State) else node

    return jtu.tree_map(restore, tree, is_leaf=is_state)


def _fits(a: Any, b: Any) -> bool:
    # A number beside an array does not fit: which of the two the result should be is unclear.
    if is_array(a) and is_array(b):
        return a.shape == b.shape and a.dtype == b.dtype
    return not is_array(a) and not is_array(b) and a == b


def _check_bool(where: str, value: Any) -> Any:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(value, bool) or (shape == () and dtype == np.dtype(bool)):
        return value
    hint = ["for a tree of gradients, write:", "pm.all_finite(grads)"]
    raise ArgumentError(where, "a single bool", describe(value), hint=hint)
