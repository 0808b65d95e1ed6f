"""Quantized matrices: `quantize` stores each chosen matrix as small integers with scales.

The matrix becomes a *computed leaf*, as with an update of low rank: reading the attribute gives
floating numbers, so no layer has to know of it. The stored arrays are buffers, which training
ignores.
"""

from __future__ import annotations

import functools as ft
import math
import re
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from pytreemod.errors import ArgumentError, SpecError, describe
from pytreemod.module.computed_leaves import Computed
from pytreemod.module.fields import buffer, field
from pytreemod.module.reading import is_computed, shape_of_one
from pytreemod.training.mapped_parameters import Parameter, replace_parameters
from pytreemod.tree.predicates import is_abstract, is_array
from pytreemod.tree.prefixes import By, by
from pytreemod.typing import Tracer, untyped_jax

_M = TypeVar("_M")


class Quantized(Computed):
    r"""A matrix as integers with a scale for each group of a row: $w_{ij} = q_{ij} s_{i,g(j)}$.

    [`quantize`][pytreemod.quantize] replaces an array with this. Rows are along the first axis; all
    other axes, of a convolution's kernel for instance, are one row together.

    Fields:
        numbers: (m, n) of int8; or (m, ceil(n / 2)) of uint8, in which each byte has two numbers in
            two's complement, the first one in its lower four bits. A row of odd length ends in 0.
        scales: (m, groups), in the dtype of the original array.
        bits: 8 or 4.
        shape: of the array.
    """

    numbers: Integer[Array, "m k"] = buffer()
    scales: Float[Array, "m g"] = buffer()
    bits: int = field(static=True)
    shape: tuple[int, ...] = field(static=True)

    def value(self) -> Array:
        """Return the array, in floating numbers."""
        # On a part of a mesh, only its rows.
        (m, groups), inner = self.scales.shape, self.shape[1:]
        n, numbers = math.prod(inner), self.numbers
        if self.bits == 4:
            halves = jnp.stack([numbers & 15, numbers >> 4], axis=-1)
            # In two's complement: 8 to 15 are -8 to -1.
            numbers = (halves.reshape(m, 2 * numbers.shape[1])[:, :n] ^ 8).astype(jnp.int8) - 8
        if groups == 1:
            # XLA compiles this form best.
            return (numbers.astype(self.scales.dtype) * self.scales).reshape(m, *inner)
        rows = numbers.reshape(m, groups, n // groups).astype(self.scales.dtype)
        return (rows * self.scales[:, :, None]).reshape(m, *inner)

    def __part_axis_names__(self, names: Any) -> dict[str, Any]:
        # Along a row, bytes and groups are not the entries that the name refers to.
        return {"numbers": (names[0], None), "scales": (names[0], None)}


def quantize(model: _M, form: Any) -> _M:
    r"""Store chosen matrices as integers of 8 or 4 bits, with scales.

    Each matrix becomes a computed leaf with its parts at `"weight.numbers"` and `"weight.scales"`;
    the attribute reads as floating numbers, of the original dtype. Both parts are buffers:
    `filter_grad`, `trainable` and [`Optimizer`][pytreemod.Optimizer] ignore them.
    [`pm.resolve`][pytreemod.resolve] returns arrays again; the rounding cannot be undone.

    **Algorithm**: symmetric, by the largest absolute value (absmax), rounded to the nearest. With
    $L = 127$ for `"int8"` and $L = 7$ for `"int4"`, each row, or each group of a row, has a scale
    $s = \max_j |w_j| / L$ and integers $q_j = \mathrm{clip}(\mathrm{round}(w_j / s), -L, L)$. It
    reads as $q_j s$: no number is off by more than $s / 2$, before it is rounded to the dtype. A
    row too small for such a scale has fewer levels, and is not zeroed.

    **Rows** are along the first axis: the outputs of `Linear` and `Conv`, the entries of an
    `Embedding`. All other axes are one row together. In a `Stack` or an `Ensemble`, each layer has
    its own scales.

    **Quantized leaves** are, among the chosen ones, the floating arrays of at least 16 bits that
    have two axes or more and rows of several numbers. Others are unchanged, and so are arrays to
    which their class gives a role. Quantize first, then add the updates of
    [`lora`][pytreemod.lora]. If a path is tied to a matrix, both read the quantized one.

    **Cost.** A read computes the whole matrix: memory is saved between calls, not during them. A
    `Stack` computes one layer's matrix at a time, a compiled lookup in an `Embedding` only the rows
    that it returns.

    Args:
        model: any tree; its arrays may be abstract, as
            [`filter_eval_shape`][pytreemod.filter_eval_shape] makes them.
        form: `"int8"` or `"int4"`, with a scale for each row; or `"int4,group_size=64"`, with one
            for each 64 numbers of a row. Or a [`by`][pytreemod.by] of such forms, with None for
            leaves that are not quantized.

    Returns:
        A new model; all other leaves are shared with the old one.

    Raises:
        ArgumentError: if `form` is invalid; a group does not divide a row; or an array has numbers
            that are not finite. Traced numbers are not checked: such a row reads as nan.
        SpecError: if no matrix is chosen; or some are already computed.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import pytreemod as pm
        >>> mlp = pm.nn.MLP(64, 10, 32, 2, key=jax.random.key(0))
        >>> rule = pm.by({"layers.0.weight": "int8", "**.weight": "int4,group_size=16", ...: None})
        >>> small = pm.quantize(mlp, rule)
        >>> [(name, x.dtype.name) for name, x in pm.named_leaves(small).items()][:2]
        [('layers.0.weight.numbers', 'int8'), ('layers.0.weight.scales', 'float32')]
        >>> small.layers[0].weight.dtype, small(jnp.ones(64)).shape
        (dtype('float32'), (10,))

    Source:
        Dettmers et al. 2022, "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale".
        https://arxiv.org/abs/2208.07339, sections 2.1 (absmax) and 3.1 (a scale for each row).
        Groups as in Frantar et al. 2022, "GPTQ", https://arxiv.org/abs/2210.17323, section 4, but
        rounded to the nearest, as that paper's baseline is. Two numbers in a byte as in ONNX's
        INT4.
    """
    forms = (form if isinstance(form, By) else by({...: form})).values(model)

    def make(one: Parameter) -> Any:
        bits, group = _parsed(forms[one.first])
        if not _is_matrix(one):
            return None
        n = math.prod(one.node.shape[one.axes + 1 :])
        if n % (group or n):
            fact = f"quantize: group_size {group} does not divide {n}"
            raise ArgumentError(fact, at=[one.text()])
        is_known = is_array(one.node) and not isinstance(one.node, Tracer)
        if is_known and not jnp.isfinite(one.node).all():
            fact = "quantize: an array with numbers that are not finite"
            raise ArgumentError(fact, at=[one.text()])
        encode: Any = _encoded
        return one.map(ft.partial(encode, bits=bits, group=group or n))

    return replace_parameters(
        f"quantize: {form!r}", model, [each is not None for each in forms], make
    )


def _parsed(text: Any) -> tuple[int, int | None]:
    """Return the bits, and the size of the groups."""
    form = r"\s*int(4|8)\s*(?:,\s*group_size\s*=\s*([1-9][0-9]*)\s*)?"
    found = re.fullmatch(form, text) if isinstance(text, str) else None
    if found is None:
        fact = f"quantize: no form of a matrix is {describe(text)}"
        raise ArgumentError(fact, hint='pm.by({"**.weight": "int4,group_size=64", ...: None})')
    return int(found[1]), int(found[2]) if found[2] else None


def _is_matrix(parameter: Parameter) -> bool:
    """Whether it is a floating array with rows of several numbers.

    Raises:
        SpecError: if it is computed, and reads as a matrix.
    """
    node, axes = parameter.node, parameter.axes
    if not parameter.is_declared:
        return False
    if is_computed(node):
        if len(shape_of_one(node) or ()) > 1:
            path = parameter.text()
            hint = f"model = pm.resolve(model, {path!r})"
            raise SpecError(f"quantize: {path} is a computed leaf already", hint=hint)
        return False
    is_floating = is_abstract(node) and jnp.issubdtype(node.dtype, jnp.floating)
    return is_floating and node.dtype.itemsize > 1 and math.prod(node.shape[axes + 1 :]) > 1


@ft.partial(jax.jit, static_argnames=("bits", "group"))
def _encoded(matrix: Any, bits: int, group: int) -> Quantized:
    """Quantize a matrix: compiled, so that no other array of its size is made."""
    (m, *inner), levels = matrix.shape, 2 ** (bits - 1) - 1
    # The dtype of the computation.
    wide = jnp.float32 if matrix.dtype.itemsize < 4 else matrix.dtype
    n = math.prod(inner)
    rows = matrix.reshape(m, n // group, group).astype(wide)
    largest = jnp.abs(rows).max(axis=2)
    finfo = untyped_jax.numpy.finfo
    # Compiled code takes smaller scales for zero: a tiny row has fewer levels.
    least = max(float(finfo(matrix.dtype).smallest_subnormal), float(finfo(wide).tiny))
    scales = (largest / jnp.clip(jnp.floor(largest / least), 1, levels)).astype(matrix.dtype)
    # For tiny values in float16, the nearest scale may be too small by half.
    up = jnp.nextafter(scales, jnp.full_like(scales, jnp.inf))
    scales = jnp.where(scales.astype(wide) * (levels + 0.5) < largest, up, scales)
    # Of a row of zeros, and of one with a number that is not finite, all are 0.
    steps = jnp.nan_to_num(rows / scales.astype(wide)[:, :, None], posinf=0, neginf=0)
    numbers = jnp.clip(jnp.round(steps), -levels, levels).astype(jnp.int8).reshape(m, n)
    if bits == 4:
        halves = jnp.pad(numbers, ((0, 0), (0, n % 2))).astype(jnp.uint8)
        numbers = (halves[:, ::2] & 15) | (halves[:, 1::2] << 4)
    return Quantized(numbers, scales, bits, tuple(matrix.shape))
