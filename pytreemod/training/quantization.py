"""Quantized matrices: `quantize` stores each chosen matrix as small integers with scales.

The matrix becomes a *computed leaf*, as with an update of low rank: reading the attribute gives
floating numbers, so no layer has to know of it. The stored arrays are buffers, which training
ignores.
"""

from __future__ import annotations

import functools as ft
import math
import re
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from pytreemod.errors import ArgumentError, SpecError, describe
from pytreemod.module.computed_leaves import Computed
from pytreemod.module.fields import buffer, field
from pytreemod.module.reading import is_computed, shape_of_one
from pytreemod.training.chosen_parameters import Parameter, choose_parameters
from pytreemod.training.low_rank import LowRank
from pytreemod.tree.instances import stored
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_abstract
from pytreemod.tree.prefixes import By, by
from pytreemod.tree.renewing import with_new_containers
from pytreemod.tree.surgery import replace_at
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

    def __value_shape__(self) -> tuple[int, ...] | None:
        return self.shape

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
    which their class gives a role. The base of [`lora`][pytreemod.lora] is quantized. If a path is
    tied to a matrix, both read the quantized one.

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
    model = with_new_containers(model)
    forms = (form if isinstance(form, By) else by({...: form})).values(model)
    changes: list[tuple[Any, Any]] = []
    others: list[str] = []
    for text in dict.fromkeys(each for each in forms if each is not None):
        bits, group = _parsed(text)
        chosen = choose_parameters(model, [each == text for each in forms])
        changes += [(x.path, _quantized(x, bits, group)) for x in chosen if _is_matrix(x)]
        others += [path_text(x.path) for x in chosen]
    if not changes:
        raise SpecError("quantize: no matrix is picked", at=others)
    return replace_at(model, changes)


def _parsed(text: Any) -> tuple[int, int | None]:
    """Return the bits, and the size of the groups."""
    form = r"\s*int(4|8)\s*(?:,\s*group_size\s*=\s*([1-9][0-9]*)\s*)?"
    found = re.fullmatch(form, text) if isinstance(text, str) else None
    if found is None:
        fact = f"quantize: no form of a matrix is {describe(text)}"
        raise ArgumentError(fact, hint='pm.by({"**.weight": "int4,group_size=64", ...: None})')
    return int(found[1]), int(found[2]) if found[2] else None


def _is_matrix(parameter: Parameter) -> bool:
    """Whether it is a floating array, or the base of an update, with rows of several numbers.

    Raises:
        SpecError: if it is computed, and reads as a matrix.
    """
    node, members = parameter.node, parameter.members
    array = stored(node, "base") if isinstance(node, LowRank) else node
    if is_computed(array):
        is_matrix = len(shape_of_one(node) or ()) > 1
        if is_matrix and parameter.is_declared:
            path = path_text(parameter.path)
            hint = f"model = pm.resolve(model, {path!r})"
            raise SpecError(f"quantize: {path} is a computed leaf already", hint=hint)
        return False
    is_floating = is_abstract(array) and jnp.issubdtype(array.dtype, jnp.floating)
    if not is_floating or array.dtype.itemsize == 1 or not parameter.is_declared:
        return False
    return array.ndim >= 2 + members and math.prod(array.shape[members + 1 :]) > 1


def _quantized(parameter: Parameter, bits: int, group: int | None) -> Any:
    where = path_text(parameter.path)

    def encode(node: Any) -> tuple[Any, Any]:
        if isinstance(node, LowRank):
            base, is_finite = encode(node.base)
            return LowRank(base, node.a, node.b, node.scale), is_finite
        n = math.prod(node.shape[1:])
        if n % (group or n):
            raise ArgumentError(f"quantize: group_size {group} does not divide {n}", at=[where])
        numbers, scales, is_finite = cast("Any", _encoded(node, bits, group or n))
        return Quantized(numbers, scales, bits, tuple(node.shape)), is_finite

    fn = parameter.each(encode)
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(parameter.node)):
        return untyped_jax.eval_shape(fn, parameter.node)[0]
    made, is_finite = fn(parameter.node)
    if not isinstance(is_finite, Tracer) and not is_finite.all():
        raise ArgumentError("quantize: an array with numbers that are not finite", at=[where])
    return made


@ft.partial(jax.jit, static_argnums=(1, 2))
def _encoded(matrix: Any, bits: int, group: int) -> tuple[Any, Any, Any]:
    """Return numbers, scales, and whether all numbers are finite.

    Compiled, so that only the numbers, and no other array of the size of the matrix, are made.
    """
    (m, *inner), levels = matrix.shape, 2 ** (bits - 1) - 1
    # The dtype of the computation.
    wide = jnp.float32 if matrix.dtype.itemsize < 4 else matrix.dtype
    rows = matrix.reshape(m, math.prod(inner) // group if group else 1, group).astype(wide)
    largest = jnp.max(jnp.abs(rows), axis=2, initial=0.0)
    finfo = untyped_jax.numpy.finfo
    # Compiled code takes smaller scales for zero: a tiny row has fewer levels.
    least = max(float(finfo(matrix.dtype).smallest_subnormal), float(finfo(wide).tiny))
    scales = (largest / jnp.clip(jnp.floor(largest / least), 1, levels)).astype(matrix.dtype)
    # For tiny values in float16, the nearest scale may be too small by half.
    up = jnp.nextafter(scales, jnp.full_like(scales, jnp.inf))
    scales = jnp.where(scales.astype(wide) * (levels + 0.5) < largest, up, scales)
    steps = scales.astype(wide)[:, :, None]
    is_usable = jnp.isfinite(steps) & (steps > 0)
    numbers = jnp.where(is_usable, jnp.round(rows / jnp.where(is_usable, steps, 1)), 0)
    numbers = jnp.clip(numbers, -levels, levels).astype(jnp.int8).reshape(m, math.prod(inner))
    if bits == 4:
        pairs = jnp.pad(numbers, ((0, 0), (0, numbers.shape[1] % 2))).astype(jnp.uint8)
        pairs = pairs.reshape(m, -1, 2) if m else pairs.reshape(0, pairs.shape[1] // 2, 2)
        numbers = (pairs[:, :, 0] & 15) | (pairs[:, :, 1] << 4)
    return numbers, scales, jnp.isfinite(largest).all()
