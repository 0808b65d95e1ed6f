"""Quantized matrices: `quantize` stores each chosen matrix as small integers with scales.

The matrix becomes a *computed leaf*, as with an update of low rank: reading the attribute gives
floating numbers, so no layer has to know of it. The stored arrays are buffers, which training
ignores. `choose_matrices` decides by paths, before there are arrays, and `quantized_leaf` makes the
leaf of one array.
"""

from __future__ import annotations

import functools as ft
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Integer

from pytreemod.errors import ArgumentError, SpecError, StructureError, describe
from pytreemod.module.computed_leaves import Computed
from pytreemod.module.construction import with_notes
from pytreemod.module.fields import buffer, field
from pytreemod.module.reading import MADE, evaluate_each, is_computed, made_of
from pytreemod.module.ties import observe_one
from pytreemod.training.low_rank import LowRank
from pytreemod.transform.vmap import filter_vmap
from pytreemod.tree.members import count_member_axes
from pytreemod.tree.nodes import (
    DEFAULT_ROLE,
    Location,
    Represents,
    children_of,
    found_in,
    locations,
    record_of,
)
from pytreemod.tree.paths import path_text, pattern_text, plain_name, step_names
from pytreemod.tree.predicates import is_abstract, is_array
from pytreemod.tree.prefixes import By, by, decide
from pytreemod.tree.renewing import with_new_containers
from pytreemod.tree.selecting import Locations, PathSelector, as_selector
from pytreemod.tree.stored_fields import stored
from pytreemod.tree.surgery import replace_at
from pytreemod.typing import KeyPath, PyTree, Tracer, jtu, untyped_jax

_M = TypeVar("_M")

_BITS = {"int8": 8, "int4": 4}


class Quantized(Computed):
    r"""A matrix as integers with a scale for each group of a row: $w_{ij} = q_{ij} s_{i,g(j)}$.

    [`quantize`][pytreemod.quantize] replaces an array with this. Rows are along the first axis; all
    other axes, of a convolution's kernel for instance, are one row together.

    Fields:
        numbers: (m, n) of int8; or (m, ceil(n / 2)) of uint8, in which each byte has two numbers in
            two's complement, the first one in its lower four bits. A row of odd length ends in 0.
        scales: (m, groups), in the dtype of the original array.
        form: `"int8"` or `"int4"`.
        shape: of the array.
    """

    numbers: Integer[Array, "m k"] = buffer()
    scales: Float[Array, "m g"] = buffer()
    form: str = field(static=True)
    shape: tuple[int, ...] = field(static=True)

    def value(self) -> Array:
        """Return the array, in floating numbers."""
        inner = self.shape[1:]
        numbers = self.numbers
        if self.form == "int4":
            numbers = _unpacked(numbers, math.prod(inner))
        # On a part of a mesh, only its rows.
        m, groups = self.scales.shape
        if groups == 1:
            # XLA compiles this form best.
            return (numbers.astype(self.scales.dtype) * self.scales).reshape(m, *inner)
        rows = numbers.reshape(m, groups, math.prod(inner) // groups).astype(self.scales.dtype)
        return (rows * self.scales[:, :, None]).reshape(m, *inner)

    def __value_shape__(self) -> tuple[int, ...] | None:
        return self.shape

    def __part_axis_names__(self, names: Any) -> dict[str, Any]:
        # Along a row, bytes and groups are not the entries that the name refers to.
        return {"numbers": (names[0], None), "scales": (names[0], None)}


class IntegerForm(NamedTuple):
    """The form in which a matrix is stored."""

    name: str
    group_size: int | None
    """The number of entries of a row that share a scale; None for all."""


def quantize(model: _M, form: Any) -> _M:
    r"""Store chosen matrices as integers of 8 or 4 bits, with scales.

    Each matrix becomes a computed leaf with its parts at `"weight.numbers"` and `"weight.scales"`;
    the attribute reads as floating numbers, of the original dtype. Both parts are buffers:
    `filter_grad`, `trainable` and [`Optimizer`][pytreemod.Optimizer] ignore them.
    [`pm.resolve`][pytreemod.resolve] returns arrays again; the rounding cannot be undone.

    **Algorithm**: symmetric, by the largest absolute value (absmax), rounded to the nearest. With
    $L = 127$ for `"int8"` and $L = 7$ for `"int4"`, each row, or each group of a row, has a scale
    $s$ and integers $q_j$:

    $$s = \max_j |w_j| / L$$

    $$q_j = \mathrm{clip}(\mathrm{round}(w_j / s), -L, L)$$

    It reads as $q_j s$, rounded to the dtype of the array; before that, no number is off by more
    than $s / 2$. $s$ is rounded to that dtype before it is used. Ties round to even. A row of zeros
    stays one. -128 and -8 are not used.

    **Rows** are along the first axis: the outputs of `Linear` and `Conv`, the entries of an
    `Embedding`. All other axes are one row together. In a `Stack`, an `Ensemble`, or an `MLP` that
    scans, each layer has its own scales.

    **Quantized leaves** are, among the chosen ones, the floating arrays of at least 16 bits that
    have two axes or more and rows of several numbers. Vectors and integers are unchanged. So are
    buffers, and arrays with another role by their class, such as the factors of
    [`lora`][pytreemod.lora]; the base of `lora` is quantized. If a path names a single leaf, this
    leaf is quantized even if it is a buffer, and refused if it is a vector. If a path is tied to a
    matrix, both read the quantized one.

    **Cost.** A read computes the whole matrix: memory is saved between calls, not during them. A
    compiled call of `Linear(1024, 1024)` in float32 needs 4,198,400 bytes while it runs: the matrix
    and 4,096 more. Without quantization it needs 4,096. The stored arrays take 1,052,672 bytes
    instead of 4,194,304, or 528,384 with `"int4"`. A `Stack` computes one layer's matrix at a time.
    A compiled lookup in an `Embedding` computes only the rows that it returns, and needs no more
    bytes. (Measured on the CPU, by JAX's `memory_analysis`.)

    Args:
        model: any tree; its arrays may be abstract, as
            [`filter_eval_shape`][pytreemod.filter_eval_shape] makes them.
        form: `"int8"` or `"int4"`, with a scale for each row; or `"int4,group_size=64"`, with one
            for each 64 numbers of a row. It applies to all matrices. Or a [`by`][pytreemod.by] of
            such forms, with None for leaves that are not quantized.

    Returns:
        A new model; all other leaves are shared with the old one.

    Raises:
        ArgumentError: if `form` is invalid; a group does not divide a row; or an array has numbers
            that are not finite. Traced numbers are not checked: such a row reads as nan.
        SpecError: if a rule picks no matrix, or names another leaf; or some are already computed.

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
        >>> print(pm.quantization_report(mlp, small))
        QuantizationReport: 3 leaves, 13864 bytes before, 3480 after
          layers.0.weight: f32[32,64] as int8, 8192 bytes before, 2176 after, error 0.0038
          layers.1.weight: f32[32,32] as int4, 4096 bytes before, 768 after, error 0.067
          layers.2.weight: f32[10,32] as int4, 1280 bytes before, 240 after, error 0.067

    Source:
        Dettmers et al. 2022, "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale".
        https://arxiv.org/abs/2208.07339, sections 2.1 (absmax) and 3.1 (a scale for each row).
        Groups as in Frantar et al. 2022, "GPTQ", https://arxiv.org/abs/2210.17323, section 4, but
        rounded to the nearest, as that paper's baseline is. Two numbers in a byte as in ONNX's
        INT4.
    """
    where = "quantize"
    model = with_new_containers(model)
    chosen = choose_matrices(model, form, where)
    leaves = jtu.tree_leaves(model)
    return with_quantized(
        model, [(one, quantized_leaf(one, leaves[one.place], where)) for one in chosen]
    )


# ---- which leaves


class ChosenMatrix(NamedTuple):
    """An array that is to be quantized."""

    place: int
    """The index of the leaf in the model."""

    path: KeyPath
    form: IntegerForm
    members: int
    """The number of its layer axes."""

    adapted: bool
    """Whether it is the base of an update of low rank."""


def choose_matrices(model: PyTree, form: Any, where: str) -> list[ChosenMatrix]:
    """Return the arrays to quantize, in the order of the leaves.

    Args:
        model: any tree.
        form: as for `quantize`.
        where: the call, for errors.

    Raises:
        ArgumentError: if `form` is invalid, or a group does not divide a row.
        SpecError: if a rule picks no matrix, or names another leaf; or some are already computed.
    """
    rule = form if isinstance(form, By) else by({...: form})
    forms = [parse_form(value, where) for _, value in rule.items]
    # Called for its errors.
    rule.values(model)
    locs = Locations(locations(model))
    entries, _ = decide(
        [selector.pick(locs, model, None) for selector in rule.selectors], len(locs)
    )
    chosen: list[ChosenMatrix] = []
    refused = _Refused([], [], [])
    used: dict[int, list[Location]] = {}
    for place, (loc, entry) in enumerate(zip(locs, entries, strict=True)):
        wanted = None if entry is None else forms[entry]
        if entry is None or wanted is None:
            continue
        selector = rule.selectors[entry]
        is_named = isinstance(selector, PathSelector) and selector.steps == step_names(loc.path)
        found = _matrix_at(loc, place, wanted, is_named, refused)
        if found is not None:
            chosen.append(found)
        elif selector != _DEFAULT:
            used.setdefault(entry, []).append(loc)
    refused.check(where)
    decided = {entries[one.place] for one in chosen}
    for entry, picked in used.items():
        if entry not in decided:
            _refuse_none(f"{where}, rule for {rule.selectors[entry]!r}", picked)
    if not chosen:
        _refuse_none(where, locs)
    leaves = [loc.leaf for loc in locs]
    _check_groups(chosen, leaves, where)
    return chosen


_DEFAULT = as_selector(...)
_BASE = jtu.GetAttrKey("base")
_MATRIX = "floating arrays of two axes or more, with rows of several numbers"
_FORM = re.compile(r"(int8|int4)(?:\s*,\s*group_size\s*=\s*([1-9][0-9]*))?")


def parse_form(text: Any, where: str) -> IntegerForm | None:
    """Return the form of a stored matrix; None if it is not quantized.

    Args:
        text: as for `quantize`.
        where: the call, for errors.

    Raises:
        ArgumentError: if it is not valid.

    Examples:
        >>> parse_form("int4, group_size=64", "quantize")
        IntegerForm(name='int4', group_size=64)
    """
    if text is None:
        return None
    found = _FORM.fullmatch(text.strip()) if isinstance(text, str) else None
    if found is None:
        raise ArgumentError(
            f"{where}(form)" if where == "quantize" else f"{where}, quantize",
            '"int8", "int4", "int4,group_size=64", None, or a pm.by of these',
            describe(text),
            hint=["for example:", 'pm.by({"**.weight": "int8", ...: None})'],
        )
    return IntegerForm(found[1], int(found[2]) if found[2] else None)


class _Refused(NamedTuple):
    """Leaves that cannot be quantized, although a rule names them."""

    computed: list[KeyPath]
    quantized: list[KeyPath]
    others: list[Location]

    def check(self, where: str) -> None:
        """Raise the error for them, if there are any."""
        if self.quantized:
            path = pattern_text(self.quantized[0])
            raise SpecError(
                where,
                "matrices that are not quantized",
                "quantized matrices",
                at=dict.fromkeys(map(path_text, self.quantized)),
                hint=[
                    "exclude them, or resolve them to arrays first:",
                    _rule(self.quantized[0], "None"),
                    f'model = pm.resolve(model, "{path}")',
                ],
            )
        if self.computed:
            path = pattern_text(self.computed[0])
            raise SpecError(
                where,
                "arrays",
                "computed leaves",
                at=dict.fromkeys(map(path_text, self.computed)),
                hint=[
                    "exclude it, or resolve it to an array first:",
                    _rule(self.computed[0], "None"),
                    f'model = pm.resolve(model, "{path}")',
                ],
            )
        if self.others:
            raise SpecError(
                where,
                f"the paths of matrices: {_MATRIX}",
                "paths of other leaves",
                at=[f"{path_text(loc.path)}: {_shown(loc)}" for loc in self.others],
                hint="exclude them; a pattern, such as '**.weight', skips such leaves",
            )


def _matrix_at(
    loc: Location, place: int, form: IntegerForm, is_named: bool, refused: _Refused
) -> ChosenMatrix | None:
    """Return the matrix that a leaf is; None if it is left alone, or refused."""
    # A node that only says whose child a value is adds no key to the path.
    nodes = [node for node in loc.nodes if type(node) is not Represents]
    computed = [i for i, node in enumerate(nodes) if is_computed(node)]
    top = computed[0] if computed else len(nodes)
    members = count_member_axes(nodes[:top], loc.path)
    is_update = bool(computed) and isinstance(nodes[top], LowRank)
    is_base = is_update and loc.path[top] == _BASE
    if is_base and len(computed) == 1:
        if _is_matrix(loc.leaf, members):
            return ChosenMatrix(place, loc.path, form, members, True)
    elif computed:
        inner = nodes[computed[-1]]
        shape = made_of(nodes[top]).shape
        if isinstance(inner, Quantized):
            refused.quantized.append(loc.path[: computed[-1]])
        elif is_base or not is_update:
            if is_named or shape is None or len(shape) > 1:
                refused.computed.append(loc.path[:top])
            return None
        elif is_named:
            refused.others.append(loc)
        return None
    elif _is_matrix(loc.leaf, members) and len(nodes) == len(loc.nodes):
        # Nothing in a State is quantized.
        if is_named or _is_of_training(loc, nodes):
            return ChosenMatrix(place, loc.path, form, members, False)
        return None
    if is_named:
        refused.others.append(loc)
    return None


def _is_matrix(leaf: Any, members: int) -> bool:
    """Whether a leaf is a floating array of two axes or more, in each layer.

    Rows of one number, as in the bias of a convolution, do not count: scales would save nothing.
    """
    if not is_abstract(leaf) or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return False
    is_wide = leaf.dtype.itemsize > 1
    return is_wide and leaf.ndim >= 2 + members and math.prod(leaf.shape[members + 1 :]) > 1


def _is_of_training(loc: Location, nodes: Sequence[Any]) -> bool:
    """Whether a leaf was declared a parameter, even if it is frozen by a role."""
    declared = DEFAULT_ROLE
    for node, key in zip(nodes, loc.path, strict=True):
        record = record_of(node)
        own = DEFAULT_ROLE if record is None else record.role(key.name)
        declared = declared if own == DEFAULT_ROLE else own
    return declared == DEFAULT_ROLE and loc.role in (DEFAULT_ROLE, "buffer")


def _rule(path: KeyPath, form: str) -> str:
    """Return a rule for a path, as code."""
    return f'pm.by({{"{pattern_text(path)}": {form}, ...: ...}})'


def _shown(loc: Location) -> str:
    role = "" if loc.role == DEFAULT_ROLE else f", of the role {loc.role!r}"
    return f"{describe(loc.leaf)}{role}"


def _refuse_none(where: str, picked: Sequence[Location]) -> NoReturn:
    raise SpecError(
        where,
        f"some matrices: {_MATRIX}",
        "none among the chosen leaves",
        at=[f"{path_text(loc.path)}: {_shown(loc)}" for loc in picked],
    )


def _check_groups(chosen: Sequence[ChosenMatrix], leaves: Sequence[Any], where: str) -> None:
    wrong: dict[KeyPath, str] = {}
    for one in chosen:
        shape = leaves[one.place].shape[one.members :]
        size, group = math.prod(shape[1:]), one.form.group_size
        if group is not None and size % group:
            text = f"{describe(leaves[one.place])}, rows of {size}, groups of {group}"
            wrong[one.path] = f"{path_text(one.path)}: {text}"
    if wrong:
        raise ArgumentError(
            where,
            "rows whose size is a multiple of group_size",
            "other rows",
            at=wrong.values(),
            hint=["give them their own form:", _rule(next(iter(wrong)), '"int8"')],
        )


# ---- numbers and scales


@ft.partial(jax.jit, static_argnums=(1, 2))
def _encoded(matrix: Any, bits: int, group_size: int | None) -> tuple[Any, Any, Any]:
    """Numbers, scales, and whether each row is finite.

    Compiled, so that only the numbers, and no other array of the size of the matrix, are made.
    """
    m, n = matrix.shape[0], math.prod(matrix.shape[1:])
    size = n if group_size is None else group_size
    wide = _wide(matrix.dtype)
    rows = matrix.reshape(m, n // size if size else 1, size).astype(wide)
    levels = 2 ** (bits - 1) - 1
    largest = jnp.max(jnp.abs(rows), axis=2, initial=0.0)
    scales = (largest / levels).astype(matrix.dtype)
    # For tiny values in float16, the nearest scale may be too small by half.
    up = jnp.nextafter(scales, jnp.full_like(scales, jnp.inf))
    scales = jnp.where(scales.astype(wide) * (levels + 0.5) < largest, up, scales)
    steps = scales.astype(wide)[:, :, None]
    is_usable = jnp.isfinite(steps) & (steps > 0)
    numbers = jnp.where(is_usable, jnp.round(rows / jnp.where(is_usable, steps, 1)), 0)
    numbers = jnp.clip(numbers, -levels, levels).astype(jnp.int8).reshape(m, n)
    numbers = _packed(numbers) if bits == 4 else numbers
    return numbers, scales, jnp.isfinite(largest).all(axis=1)


def _wide(dtype: Any) -> Any:
    """Return the dtype of the computation."""
    return jnp.float32 if dtype.itemsize < 4 else dtype


def _packed(numbers: Any) -> Any:
    """Pack numbers of four bits, two in each byte."""
    m, n = numbers.shape
    pairs = jnp.pad(numbers, ((0, 0), (0, n % 2))).astype(jnp.uint8).reshape(m, (n + 1) // 2, 2)
    return (pairs[:, :, 0] & 15) | (pairs[:, :, 1] << 4)


def _unpacked(packed: Any, n: int) -> Any:
    """Return the first `n` numbers of each row."""
    halves = jnp.stack([packed & 15, packed >> 4], axis=-1)
    numbers = halves.reshape(packed.shape[0], 2 * packed.shape[1])[:, :n]
    # In two's complement: 8 to 15 are -8 to -1.
    return (numbers ^ 8).astype(jnp.int8) - 8


def quantized_leaf(one: ChosenMatrix, array: Any, where: str) -> Any:
    """Return the computed leaf that replaces an array; for an abstract array, its shapes.

    Args:
        one: the description of the matrix.
        array: the array, with layer axes.
        where: the call, for errors.

    Raises:
        ArgumentError: if there are numbers in it that are not finite.
    """
    name, group_size = one.form

    def encode(matrix: Any) -> tuple[Any, Any]:
        numbers, scales, is_finite = cast("Any", _encoded(matrix, _BITS[name], group_size))
        return Quantized(numbers, scales, name, tuple(matrix.shape)), is_finite

    fn: Any = encode
    for _ in range(one.members):
        fn = filter_vmap(fn)
    if isinstance(array, jax.ShapeDtypeStruct):
        return _with_shardings(untyped_jax.eval_shape(fn, array)[0], array, one)
    made, is_finite = fn(jnp.asarray(array))
    # The check waits for the result, so that no second array is made meanwhile.
    if not isinstance(is_finite, Tracer) and not is_finite.all():
        rows = [*zip(*np.nonzero(~np.asarray(is_finite)), strict=True)]
        shown = ", ".join("[" + ", ".join(map(str, row)) + "]" for row in rows[:3])
        more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
        raise ArgumentError(
            where,
            "finite numbers in quantized arrays",
            "inf or nan",
            at=[f"{path_text(one.path)}: {describe(array)}, row {shown}{more}"],
            hint=["exclude it:", _rule(one.path, "None")],
        )
    return made


def _with_shardings(made: Any, array: jax.ShapeDtypeStruct, one: ChosenMatrix) -> Any:
    """Shapes on the devices of an array: rows where its rows are; columns if they are the same."""
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding):
        return made
    axes = [*sharding.spec, *[None] * (array.ndim - len(sharding.spec))]
    upto = one.members + 1
    is_same = one.form.name == "int8" and array.ndim == upto + 1
    (numbers, scales), treedef = jtu.tree_flatten(made)
    specs = [(numbers, axes if is_same else [*axes[:upto], None]), (scales, [*axes[:upto], None])]
    return treedef.unflatten(
        jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(sharding.mesh, PartitionSpec(*spec))
        )
        for leaf, spec in specs
    )


def with_quantized(model: _M, made: Iterable[tuple[ChosenMatrix, Any]]) -> _M:
    """Return the model with quantized leaves.

    Args:
        model: the tree from which the leaves were chosen.
        made: the chosen leaves, each with its replacement.
    """
    changes: list[tuple[KeyPath, Any]] = []
    for one, leaf in made:
        if one.adapted:
            update: Any = _at(model, one.path[:-1])
            record = update.__record__
            values = {name: stored(update, name) for name in record.names(update)}
            config = values.keys() - {*record.data_names(update)}
            # The update stores the shapes of its arrays in one layer, which have changed.
            note = observe_one(LowRank, {**values, "base": leaf}, config, one.members)
            changes.append((one.path[:-1], with_notes(update, {MADE: note}, {"base": leaf})))
        else:
            changes.append((one.path, leaf))
    return replace_at(model, changes)


def _at(tree: Any, path: KeyPath) -> Any:
    for key in path:
        tree = dict(children_of(tree) or ())[key]
    return tree


# ---- the error


class QuantizedRow(NamedTuple):
    """One leaf of a [`quantization_report`][pytreemod.quantization_report]."""

    name: str
    array: str
    """Dtype and shape of the original array, such as `f32[32,64]`."""

    form: str
    bytes_before: int
    bytes_after: int
    error: float
    """The norm of the difference, divided by that of the array; 0 if that is."""


@dataclass(frozen=True, repr=False)
class QuantizationReport:
    """The result of [`quantization_report`][pytreemod.quantization_report]."""

    rows: tuple[QuantizedRow, ...]
    bytes_before: int
    bytes_after: int

    def __repr__(self) -> str:
        lines = [
            f"QuantizationReport: {len(self.rows)} lea{'f' if len(self.rows) == 1 else 'ves'}, "
            f"{self.bytes_before} bytes before, {self.bytes_after} after"
        ]
        lines += [
            f"  {row.name}: {row.array} as {row.form}, {row.bytes_before} bytes before, "
            f"{row.bytes_after} after, error {row.error:.2g}"
            for row in self.rows
        ]
        return "\n".join(lines)

    __str__ = __repr__


def quantization_report(model: PyTree, quantized: PyTree) -> QuantizationReport:
    r"""Return how far each quantized leaf is from the original array, and how many bytes it takes.

    Args:
        model: the original model.
        quantized: the result of [`quantize`][pytreemod.quantize]. It may have got updates of low
            rank since.

    Returns:
        A value that prints as a table. `rows` has for each quantized leaf its `name`, `array`,
        `form`, `bytes_before`, `bytes_after`, and `error`: the norm of the difference divided by
        that of the array (Frobenius, over all layers). `bytes_before` and
        `bytes_after` of the report itself are those of all leaves of both models.

    Raises:
        ArgumentError: if there is no quantized leaf in `quantized`, or arrays are abstract.
        StructureError: if `model` has no such array at the path of one.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> model = {"w": jnp.asarray([[1.0, 0.5], [0.0, 0.0]])}
        >>> report = pm.quantization_report(model, pm.quantize(model, "int8"))
        >>> report
        QuantizationReport: 1 leaf, 16 bytes before, 12 after
          w: f32[2,2] as int8, 16 bytes before, 12 after, error 0.0035
        >>> report.rows[0].error < 0.004
        True
    """
    where = "quantization_report"
    found = found_in(quantized, lambda node: isinstance(node, Quantized))
    if not found:
        hint = ["quantize it first:", 'quantized = pm.quantize(model, "int8")']
        expected = "a model with quantized leaves"
        raise ArgumentError(f"{where}(quantized)", expected, "a model without any", hint=hint)
    rows: list[QuantizedRow] = []
    for path, node in found:
        was = _was(model, path, where)
        parts = jtu.tree_leaves([was, node])
        if not all(map(is_array, parts)):
            expected, places = "arrays with values", [path_text(path)]
            raise ArgumentError(where, expected, "abstract arrays", at=places)
        value = evaluate_each(node, path_text(path))
        if was.shape != value.shape:
            _refuse_other(where, path, f"{describe(was)} is quantized as {describe(value)}")
        error = float(cast("Any", _relative_error(was, value)))
        after = _count_bytes(node)
        row = plain_name(path), describe(was), node.form, _count_bytes(was), after, error
        rows.append(QuantizedRow(*row))
    return QuantizationReport((*rows,), _count_bytes(model), _count_bytes(quantized))


def _was(model: Any, path: KeyPath, where: str) -> Any:
    """Return the original array of a quantized leaf."""
    node = model
    for i, key in enumerate(path):
        children = dict(children_of(node) or ())
        if key in children:
            node = children[key]
        elif i < len(path) - 1 or key != _BASE or not is_array(node):
            # The base of an update that the model did not have then.
            _refuse_other(where, path, "not in the model")
    node = evaluate_each(node, path_text(path)) if is_computed(node) else node
    if not is_abstract(node):
        _refuse_other(where, path, f"{describe(node)} in the model")
    return node


def _refuse_other(where: str, path: KeyPath, what: str) -> NoReturn:
    expected = "the model that was quantized"
    raise StructureError(where, expected, "another model", at=[f"{path_text(path)}: {what}"])


def _count_bytes(tree: PyTree) -> int:
    arrays = [leaf for leaf in jtu.tree_leaves(tree) if is_abstract(leaf)]
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in arrays)


@jax.jit
def _relative_error(was: Any, value: Any) -> Any:
    wide = _wide(was.dtype)
    was, value = was.astype(wide), value.astype(wide)
    # Relative to the largest number, whose square might underflow.
    unit = jnp.max(jnp.abs(was), initial=0.0)
    unit = jnp.where(unit > 0, unit, 1)
    before = jnp.sum((was / unit) ** 2)
    lost = jnp.sum(((value - was) / unit) ** 2)
    return jnp.sqrt(lost / jnp.where(before > 0, before, 1))
