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

from pytreemod.errors import ArgumentError, StructureError, describe
from pytreemod.module.classes import Module
from pytreemod.module.fields import buffer, field
from pytreemod.state.values import State
from pytreemod.tree.comparison import compare, have_one_type
from pytreemod.tree.predicates import is_array, is_inexact_array
from pytreemod.tree.snapshots import is_state
from pytreemod.typing import PyTree, jtu

_T = TypeVar("_T")
# Not `Self`, which runtime type checkers (beartype) refuse in single methods.
_L = TypeVar("_L", bound="LossScale")

# In this range a factor and its inverse are normal numbers of float32: XLA takes others for 0.
_LEAST, _MOST = 2.0**-126, 2.0**126


class LossScale(Module):
    """The factor by which a loss is multiplied before it is differentiated.

    `LossScale()` adapts itself: after `period` finite steps the factor is multiplied by `growth`,
    up to 2**126. At a step that is not finite it is divided by `growth`, down to `minimum`. With
    `period=None` it never changes. It is a value with two arrays: pass it through `filter_jit` and
    files together with the model.

    Differentiate `scale.scale(loss)`; `grads = scale.unscale(grads)`; then
    `finite = pm.all_finite(grads)` decides whether the step is made, by
    [`select_tree`][pytreemod.select_tree], and `scale = scale.adjust(finite)`.

    Fields:
        loss_scale: the factor, a float32
        counter: the number of finite steps since it changed, an int32

    Args:
        initial: the first factor, from 2**-126 to 2**126; not below `minimum` if it adapts.
        period: the number of finite steps after which the factor grows, >= 1; None for never.
        growth: the number to multiply or divide by, > 1.
        minimum: the smallest factor.

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
        adapts = period is None or (period >= 1 and _LEAST <= minimum <= initial)
        if not (_LEAST <= initial <= _MOST and growth > 1 and adapts):
            fact = "initial is from 2**-126 to 2**126, and not below minimum; growth is above 1"
            raise ArgumentError(f"LossScale: {fact}; period is at least 1 step")
        self.period, self.growth, self.minimum = period, float(growth), float(minimum)
        self.loss_scale = jnp.asarray(initial, jnp.float32)
        self.counter = jnp.asarray(0, jnp.int32)

    def scale(self, loss: _T) -> _T:
        """Multiply a loss, or any tree of floating arrays, by the factor; dtypes are unchanged."""
        return jtu.tree_map(ft.partial(_times, factor=self.loss_scale), loss)

    def unscale(self, grads: _T) -> _T:
        """Divide the floating arrays of a tree by the factor, in float32 or wider numbers."""
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
        is_due = self.counter + 1 >= self.period
        grown = self.loss_scale * self.growth
        up = jnp.where(is_due & (grown <= _MOST), grown, self.loss_scale)
        # Otherwise a loss that is never finite would bring the factor, and all gradients, to zero.
        down = jnp.maximum(self.loss_scale / self.growth, self.minimum)
        return self.replace(
            loss_scale=jnp.where(finite, up, down),
            counter=jnp.where(finite & ~is_due, self.counter + 1, 0),
        )


def all_finite(tree: PyTree) -> jax.Array:
    """Whether no floating or complex array in a tree has an infinity or a NaN.

    Args:
        tree: any tree, such as gradients.

    Returns:
        One True or False, as an array; True if there are no such arrays.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> bool(pm.all_finite({"a": jnp.ones(3), "b": None, "c": jnp.asarray(jnp.inf)}))
        False
    """
    answers = [jnp.isfinite(x).all() for x in jtu.tree_leaves(tree) if is_inexact_array(x)]
    return jnp.all(jnp.stack(answers)) if answers else jnp.asarray(True)


def select_tree(pred: Any, on_true: _T, on_false: _T) -> _T:
    """Return one of two trees, depending on a single bool that may be traced.

    Use it to skip a step that is not finite: `select_tree(finite, new, old)`. A State in `old` that
    the step has used up is restored.

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
    on_false = jtu.tree_map(_restored, on_false, is_leaf=is_state)
    found = compare(on_true, on_false, have_one_type)
    if found:
        at = [each.line(form="{} and {}") for each in found]
        raise StructureError("select_tree: the two trees differ", at=at)

    def select(a: Any, b: Any) -> Any:
        # `where`, and no branch: both exist already, and vmap would turn a branch into this.
        return jnp.where(pred, a, b) if is_array(a) else a

    return jtu.tree_map(select, on_true, on_false)


def _times(x: Any, factor: jax.Array) -> Any:
    if not is_inexact_array(x):
        return x
    # In float16 the factor itself, or its inverse, might be out of range.
    wide = x.dtype if x.dtype.itemsize >= factor.dtype.itemsize else factor.dtype
    return (x.astype(wide) * factor.astype(wide)).astype(x.dtype)


def _restored(node: Any) -> Any:
    return node.restored() if isinstance(node, State) else node


def _check_bool(where: str, value: Any) -> Any:
    if jnp.shape(value) != () or jnp.result_type(value) != jnp.bool_:
        raise ArgumentError(where, "a single bool", describe(value), hint="pm.all_finite(grads)")
    return value
