"""The plan of a load: which leaf of a file becomes which leaf of `like`, before anything is read.

The file's table is converted to the names and forms of `like`, and the two are joined by
name. All mismatches are collected, and one error, or one [`LoadReport`][pytreemod.LoadReport],
names them all.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import ArgumentError, FileError, describe, short_dtype
from pytreemod.io.configuration import Json, are_same, describe_json
from pytreemod.io.descriptions import Description
from pytreemod.io.forms import based, constrained, numbered, other_forms, restacked
from pytreemod.io.headers import can_be_written
from pytreemod.io.renaming import NameTable, parse_rules, renamed_table
from pytreemod.io.tables import (
    TABLE,
    Leaf,
    Name,
    Table,
    first_name,
    in_order,
    mismatches,
    parse,
    read_table,
    shown_name,
)
from pytreemod.tree.kinds import PYTHON_SCALARS
from pytreemod.tree.paths import some_of
from pytreemod.tree.prefixes import By
from pytreemod.tree.reports import report_text
from pytreemod.tree.selecting import as_selector
from pytreemod.typing import FilterSpec, PyTree, Tracer, class_of, jtu, untyped_jax


class LoadOptions(NamedTuple):
    """The options of a load, see `load`."""

    strict: bool
    rename: NameTable | None
    missing: Any
    only: FilterSpec
    cast: Any
    restack: bool
    quantize: Any = None


class Move(NamedTuple):
    """One leaf that is read from the file."""

    place: int
    """The index of its leaf in `like`."""

    name: Name
    leaf: Leaf
    cast: Any
    """The dtype to cast to; None for its own."""


class _Target(NamedTuple):
    """One leaf of `like`, and the options for it."""

    place: int
    name: Name
    old: Any
    form: dict[str, Json]
    missing: str | None
    cast: Any


@dataclass(slots=True)
class LoadPlan:
    """The leaves to read from the file, and the report on the others."""

    moves: list[Move] = field(default_factory=list[Move])
    missing: list[Name] = field(default_factory=list[Name])
    unexpected: list[Name] = field(default_factory=list[Name])
    renamed: dict[Name, Name] = field(default_factory=dict[Name, Name])
    reshaped: set[Name] = field(default_factory=set[Name])
    configuration: list[str] = field(default_factory=list[str])
    castable: set[str] = field(default_factory=set[str])
    """Dtypes in `like` to which a cast could convert leaves of the file."""

    is_unlike: bool = False
    """Whether `strict=False` alone would not accept some leaf."""

    problems: list[str] = field(default_factory=list[str])

    def report(self) -> LoadReport:
        """Return the report of the finished load."""
        text, names = ".".join, [move.name for move in self.moves]
        old = self.renamed
        return LoadReport(
            loaded=(*map(text, names),),
            missing=(*map(text, self.missing),),
            unexpected=(*map(text, self.unexpected),),
            renamed=tuple((text(name), text(old[name])) for name in names if name in old),
            reshaped=tuple(text(name) for name in names if name in self.reshaped),
            cast=tuple(text(move.name) for move in self.moves if move.cast is not None),
            configuration=tuple(self.configuration),
        )


def fit(
    theirs: Table,
    described: Description,
    like: PyTree,
    options: LoadOptions,
    where: str,
) -> LoadPlan:
    """Decide the source of each leaf of `like`.

    Args:
        theirs: the file's table.
        described: the description of `like`.
        like: a tree.
        options: the options of the load.
        where: the call, for errors.

    Raises:
        FileError: if something does not fit.
        ArgumentError: if an option is unusable.
    """
    # Both sides in the form of files: names and JSON are compared, and never objects.
    _check_not_traced(described.leaves, where)
    ours = read_table(described.tree, described.leaves)
    plan = LoadPlan()
    if options.rename:
        rules = parse_rules(options.rename, where)
        theirs, plan.renamed = renamed_table(numbered(theirs, rules.are_about_layers), rules)
    is_all = options.only is True or options.only is ...
    chosen = _targets(described, ours, like, options, where)
    wanted = [target.name for target in chosen]
    before = theirs
    theirs, plan.reshaped = restacked(
        theirs, ours, where, ensembles=options.restack, chosen=None if is_all else wanted
    )
    theirs = constrained(theirs, ours, described.nodes, described.states, plan.renamed, where)
    theirs = based(theirs, described.nodes, plan.renamed)
    if plan.renamed and plan.reshaped:
        _add_old_names(plan, theirs)
    for target in chosen:
        _fit_leaf(plan, target, theirs, options.strict)
    given = [*theirs.leaves]
    _fit_names(plan, theirs, {*wanted}, is_all, options.strict)
    concerned = None if is_all else _above(wanted)
    _fit_configuration(plan, theirs, ours, concerned, options.strict)
    is_other = bool(wanted and given) and theirs.leaves.keys().isdisjoint(wanted)
    if plan.problems:
        moved = _moved(wanted, given) if is_other else None
        # A part of the file says nothing about the rest.
        rest = ', only="**"' if len(given) > len(wanted) else ""
        hint = moved and f'pm.load(..., rename={{"{moved[0]}": "{moved[1]}"}}{rest})'
        states = _hint_of_states(plan.problems, theirs, ours) or _hint_of_quantized(theirs, ours)
        _refuse(
            plan, other_forms(before, ours, options.restack), hint, states, options.strict, where
        )
    if is_other and options.missing is None:
        raise _nothing_fits(where, wanted, given)
    return plan


def _add_old_names(plan: LoadPlan, theirs: Table) -> None:
    """Report layers that are stacked here under the old name of the first."""
    old_names = {*plan.renamed.values()}
    for name in plan.reshaped:
        source = theirs.leaves[name].source if name in theirs.leaves else None
        old = None if source is None else parse(first_name(source))
        if old in old_names:
            plan.renamed[name] = old


def _check_not_traced(leaves: Mapping[str, Any], where: str) -> None:
    """Refuse a traced `like`: a value that is read during a trace would become a constant."""
    traced = [name for name, leaf in leaves.items() if isinstance(leaf, Tracer)]
    if traced:
        hint = "load outside of filter_jit, and pass the loaded tree to the function"
        expected = "arrays in like, or only shapes"
        raise ArgumentError(where, expected, "traced arrays", at=traced, hint=hint)


def _targets(
    described: Description, ours: Table, like: PyTree, options: LoadOptions, where: str
) -> list[_Target]:
    """Return the leaves of `like` to load."""
    n = len(ours.leaves)
    mask = [True] * n if options.only is True else as_selector(options.only).mask(like)
    missing, casts = _missing(options.missing, like, where), _casts(options.cast, like, where)
    pairs = zip(described.names, described.leaves.values(), strict=True)
    rows = zip(pairs, mask, missing, casts, strict=True)
    return [
        _Target(i, name, old, ours.leaves[name].form, rule, cast)
        for i, ((name, old), is_chosen, rule, cast) in enumerate(rows)
        if is_chosen
    ]


# ---- leaves


def _fit_leaf(plan: LoadPlan, target: _Target, theirs: Table, strict: bool) -> None:
    leaf = theirs.leaves.get(target.name)
    if leaf is None:
        # `_fit_names` reports errors, because it knows what else is in the file.
        if (target.missing or ("error" if strict else "keep")) == "keep":
            _keep(plan, target)
        return
    is_array = leaf.dtype is not None or "value" not in target.form
    if not is_array and type(target.old) not in PYTHON_SCALARS:
        # A string on both sides, or a function: configuration in the position of a leaf.
        _fit_value(plan, target, leaf, strict)
        return
    wrong = _misfit(plan, target, leaf, strict)
    if wrong is None:
        is_cast = target.cast is not None and leaf.dtype is not None and leaf.dtype != target.cast
        is_cast = is_cast and not is_key(target.old) and _are_of_one_kind(leaf.dtype, target.cast)
        plan.moves.append(Move(target.place, target.name, leaf, target.cast if is_cast else None))
    elif target.missing == "keep":
        _keep(plan, target)
    else:
        plan.problems.append(f"{shown_name(target.name)}: {wrong}")
        accepted = _misfit(plan, target, leaf, strict=False)
        plan.is_unlike |= accepted is not None and not accepted.endswith(_SEE_CAST)


def _fit_value(plan: LoadPlan, target: _Target, leaf: Leaf, strict: bool) -> None:
    if are_same(target.form["value"], leaf.form["value"]):
        plan.moves.append(Move(target.place, target.name, leaf, None))
    elif strict and target.missing != "keep":
        plan.problems.append(f"{shown_name(target.name)}: {_differ(target.old, leaf)}")
    else:
        plan.configuration.append(f"{shown_name(target.name)}: {_differ(target.old, leaf)}")


def _keep(plan: LoadPlan, target: _Target) -> None:
    if isinstance(target.old, jax.ShapeDtypeStruct):
        plan.problems.append(f"{shown_name(target.name)}: missing, and like has no value to keep")
    plan.missing.append(target.name)


def _misfit(plan: LoadPlan, target: _Target, leaf: Leaf, strict: bool) -> str | None:
    """Return the mismatch between a leaf of the file and one of `like`; None if they fit."""
    old = target.old
    if leaf.dtype is None or "value" in target.form:
        return None if _is_same_number(old, leaf) else _differ(old, leaf)
    # A file of other tools has no keys, only their numbers.
    if is_key(old) or leaf.form.get("is") == "key":
        return None if _are_same_keys(old, leaf) else _differ(old, leaf)
    if leaf.shape != tuple(old.shape):
        is_same = [n for n in leaf.shape if n != 1] == [n for n in old.shape if n != 1]
        if strict or not is_same:
            return _differ(old, leaf)
        plan.reshaped.add(target.name)
    if leaf.dtype == in_order(old.dtype):
        return None
    # No cast turns weights into counts.
    if not _are_of_one_kind(leaf.dtype, old.dtype):
        return _differ(old, leaf)
    if target.cast is not None and _are_of_one_kind(leaf.dtype, target.cast):
        return None
    plan.castable.add(str(old.dtype))
    return f"{_differ(old, leaf)}{_SEE_CAST}"


_SEE_CAST = " (see cast=)"


def _are_same_keys(old: Any, leaf: Leaf) -> bool:
    if not is_key(old) or leaf.dtype != np.uint32:
        return False
    form = keys_form(leaf.shape, leaf.form.get("impl"))
    return form is not None and form.shape == tuple(old.shape) and form.dtype == old.dtype


def _is_same_number(old: Any, leaf: Leaf) -> bool:
    """Whether a Python number may be replaced by the value of the file."""
    if type(old) not in PYTHON_SCALARS:
        return False
    if leaf.dtype is not None:
        return leaf.shape == () and _kind_of(leaf.dtype) == _kind_of(class_of(old))
    return _class_of_json(leaf.form["value"]) is type(old)


def _differ(old: Any, leaf: Leaf) -> str:
    if leaf.dtype is None:
        text = describe_json(leaf.form["value"])
    elif leaf.form.get("is") == "key":
        text = f"keys of {leaf.form.get('impl')}"
    else:
        text = f"{short_dtype(leaf.dtype)}[{','.join(map(str, leaf.shape))}]"
    return f"like has {describe(old)}, the file {text}"


def _kind_of(dtype: Any) -> str:
    """Return NumPy's letter for the kind of a dtype; `f` also for dtypes that NumPy lacks."""
    for letter, kind in (("f", jnp.floating), ("c", jnp.complexfloating), ("b", jnp.bool_)):
        if jnp.issubdtype(dtype, kind):
            return letter
    return "i"


def _are_of_one_kind(dtype: Any, other: Any) -> bool:
    return _kind_of(dtype) == _kind_of(other)


def _class_of_json(value: Json) -> Any:
    if not isinstance(value, dict):
        return class_of(value)
    # A dict represents a value that JSON does not have.
    kind = next(iter(cast("dict[str, Any]", value)), "")
    return {"int": int, "float": float, "complex": complex}.get(kind)


# ---- names, configuration


def _fit_names(
    plan: LoadPlan, theirs: Table, wanted: set[Name], is_all: bool, strict: bool
) -> None:
    unread = {*plan.missing}
    lacking = [name for name in wanted if name not in theirs.leaves and name not in unread]
    # If only some leaves were requested, nothing is said about others.
    plan.unexpected = [name for name in theirs.leaves if name not in wanted] if is_all else []
    if lacking or plan.unexpected:
        lines = mismatches(sorted(map(_text, lacking)), [*map(_text, plan.unexpected)])
        plan.problems += [line for line in lines if strict or not line.endswith(": unexpected")]


_text = ".".join


def _fit_configuration(
    plan: LoadPlan, theirs: Table, ours: Table, concerned: set[Name] | None, strict: bool
) -> None:
    """Compare the configuration, only that of the nodes in `concerned` if these are given.

    Configuration that only `like` has is newer than the file, or was not requested. A node that
    only the file has is reported once.
    """
    found: list[str] = []
    # For a Module that only the file has, its class is reported, and not each field, too.
    gone = theirs.classes.keys() - ours.classes.keys() - ours.leaves.keys()
    gone -= _above([*ours.classes, *ours.leaves]) if gone else set()

    def compare(name: Name, node: Name, mine: Json, value: Json) -> None:
        if concerned is not None and (node not in concerned or node not in ours.classes):
            return
        if gone and ((name != node and node in gone) or not _above([node]).isdisjoint(gone)):
            return
        if mine is _ABSENT:
            found.append(f"{shown_name(name)}: only the file has it, {describe_json(value)}")
        elif not are_same(mine, value):
            texts = describe_json(mine), describe_json(value)
            found.append(f"{shown_name(name)}: like has {texts[0]}, the file {texts[1]}")

    for name, cls in theirs.classes.items():
        mine = {"class": ours.classes[name]} if name in ours.classes else _ABSENT
        compare(name, name, mine, {"class": cls})
    for name, value in theirs.config.items():
        compare(name, name[:-1], ours.config.get(name, _ABSENT), value)
    (plan.problems if strict else plan.configuration).extend(found)


_ABSENT: Any = object()


def _above(names: Iterable[Name]) -> set[Name]:
    """Return the names of all nodes that contain leaves."""
    return {name[:i] for name in names for i in range(len(name))}


def _moved(wanted: Sequence[Name], given: Sequence[Name]) -> tuple[str, str] | None:
    """Return the rename to suggest if `like` is a part of the tree in the file, or vice versa."""
    # By the first leaf: if the other tree has it, it has the neighbors, too.
    ours, theirs = wanted[0], given[0]
    pairs = [(_text(n[: -len(ours)]), "") for n in given if ours and n[-len(ours) :] == ours != n]
    pairs += [
        ("", _text(n[: -len(theirs)]))
        for n in wanted
        if theirs and n[-len(theirs) :] == theirs != n
    ]
    if len(wanted) == len(given) == 1 and () in (*wanted, *given):
        pairs.append((_text(given[0]), _text(wanted[0])))
    return pairs[0] if pairs else None


def _nothing_fits(where: str, wanted: Sequence[Name], given: Sequence[Name]) -> FileError:
    """Return the error for a load that would return `like` unchanged."""
    old, new = _moved(wanted, given) or ("name in the file", "name in like")
    both = (("like", wanted), ("the file", given))
    return FileError(
        where,
        "the name of at least one leaf of like",
        "only other names",
        at=[f"{of}: {some_of([*map(shown_name, names)])}" for of, names in both],
        hint=["map them to the names in `like`:", f'pm.load(..., rename={{"{old}": "{new}"}})'],
    )


def _hint_of_states(problems: Sequence[str], theirs: Table, ours: Table) -> list[str]:
    """Return a hint if the file has optimizer states of stacked arrays, and `like` one for each."""
    for name, cls in ours.classes.items():
        if cls != "?Optimizer" or theirs.classes.get(name) != cls:
            continue
        kinds = [table.config.get((*name, "stacked"), "as one") for table in (theirs, ours)]
        starts = tuple(_text((*name, own)) for own in ("states", "before_state"))
        if kinds == ["as one", "per layer"] and any(each.startswith(starts) for each in problems):
            return [
                "to continue states that were made for stacked arrays:",
                'opt = pm.Optimizer(rules, stacked="as one").init(model)',
            ]
    return []


def _hint_of_quantized(theirs: Table, ours: Table) -> list[str]:
    """Return a hint if matrices are quantized in the file and not in `like`, or vice versa."""
    mine, other = (
        {name for name, cls in table.classes.items() if cls == "pytreemod.quantize"}
        for table in (ours, theirs)
    )
    if other - mine:
        hint = "the file has quantized matrices; quantize `like` with the same rule:"
        return [hint, "pm.load(path, pm.quantize(like, rule))"]
    if mine - other:
        hint = "the file has no quantized matrices; give `like` unquantized, and the rule:"
        return [hint, "pm.load(path, like, quantize=rule)"]
    return []


def _refuse(
    plan: LoadPlan,
    forms: Mapping[Name, str],
    moved: str | None,
    states: list[str],
    strict: bool,
    where: str,
) -> None:
    # Report the cause, and not each leaf that is missing or unexpected because of it.
    tops = tuple(
        text for n in forms for text in (f"{shown_name(n)}: ", f"{_text(n)}." if n else "")
    )
    problems = [*forms.values(), *(p for p in plan.problems if not (tops and p.startswith(tops)))]
    rename = 'pm.load(..., rename={"name in the file": "name in like"})'
    if strict and moved is not None:
        hint = ["the names differ by a prefix; rename it:", moved]
    elif strict:
        keep = ', missing="keep"' if plan.is_unlike else ""
        hint = [f"tree, report = pm.load(path, like, strict=False{keep})"]
    else:
        hint = ["choose for each:"]
        place = _around(problems[0])
        hint += [f'pm.load(..., missing=pm.by({{"{place}": "keep", ...: "error"}}))', rename]
    hint = states or hint
    if any("(see restack=)" in text for text in forms.values()):
        hint = [
            "to convert between single and stacked layers or members:",
            "pm.load(..., restack=True)",
        ]
    if any("(see only=)" in text for text in forms.values()):
        hint = ["to load only the first layers of the file:", 'pm.load(..., only="**")']
    if any(problem.endswith(_SEE_CAST) for problem in problems):
        one, *others = sorted(plan.castable)
        rule = f'pm.by({{"head.**": "{one}", ...: None}})' if others else f'"{one}"'
        hint += [f"pm.load(..., cast={rule})"]
    count = f"{len(problems)} difference{'s' * (len(problems) > 1)}"
    fact = f"{where}: the file does not match `like`: {count}"
    raise FileError(fact, at=problems, hint=hint, most=TABLE)


def _around(problem: str) -> str:
    """Return the pattern of the Module of the leaf that a problem is about."""
    name = problem.partition(": ")[0]
    owner = name.rpartition(".")[0]
    return f"{owner}.**" if owner else name


# ---- options


def _missing(missing: Any, like: PyTree, where: str) -> list[str | None]:
    values = _for_each(missing, like)
    for value in values:
        if value not in (None, "keep", "error"):
            expected = '"keep", "error", or a pm.by of these'
            hint = _HINT_BY if isinstance(value, Mapping) else ()
            raise ArgumentError(f"{where}, missing", expected, describe(value), hint=hint)
    return values


_HINT_BY = ("put a dict of rules into a `by`:", "pm.by({...})")


def _casts(cast_to: Any, like: PyTree, where: str) -> list[Any]:
    values = _for_each(cast_to, like)
    return [None if value is None else _dtype(value, where) for value in values]


def _for_each(value: Any, like: PyTree) -> list[Any]:
    if isinstance(value, By):
        return value.values(like)
    return [value] * jtu.tree_structure(like).num_leaves


def _dtype(value: Any, where: str) -> Any:
    expected = "a dtype of numbers, or a pm.by of dtypes"
    try:
        dtype = jnp.dtype(value)
    except (TypeError, ValueError) as error:
        hint = _HINT_BY if isinstance(value, Mapping) else ()
        raise ArgumentError(f"{where}, cast", expected, describe(value), hint=hint) from error
    if not can_be_written(dtype):
        raise ArgumentError(f"{where}, cast", expected, str(dtype))
    if is_too_wide(dtype):
        expected = "a dtype that JAX supports"
        raise ArgumentError(f"{where}, cast", expected, str(dtype), hint=HINT_WIDTH[:2])
    return dtype


@dataclass(frozen=True, repr=False)
class LoadReport:
    """What [`load`][pytreemod.load] did; the second value of `load(..., strict=False)`.

    Names are those of `like`, such as `layers.2.weight`. Printed, it begins with the count of each
    kind, and lists the first few; the fields have all of them.

    Fields:
        loaded: leaves that got the values of the file.
        missing: leaves that have the values of `like`, because the file has none for them.
        unexpected: leaves of the file that are not in `like`.
        renamed: pairs of a leaf's name and its name in the file, where these differ.
        reshaped: leaves whose shape in the file is another: by axes of size 1, or because
            layers are one `Stack` here, and a list there.
        cast: leaves that `cast` converted to another dtype.
        configuration: differences in configuration between the file and the model; the result has
            that of `like`.

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> model = pm.nn.Linear(3, 4, key=jax.random.key(0))
        >>> pm.save("model.safetensors", model)
        >>> like = {"old": model, "new": model}
        >>> like, report = pm.load("model.safetensors", like, strict=False, rename={"": "old"})
        >>> print(report)
        LoadReport: 2 loaded, 2 missing, 2 renamed
          loaded
            old.weight
            old.bias
          missing
            new.weight
            new.bias
          renamed
            old.weight, from weight
            old.bias, from bias
    """

    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    reshaped: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    configuration: tuple[str, ...] = ()

    def __repr__(self) -> str:
        rows = {
            field.name: [_line(item) for item in getattr(self, field.name)]
            for field in fields(self)
        }
        # The count of loaded leaves is shown even if it is zero.
        return report_text("LoadReport", rows, always="loaded")

    __str__ = __repr__


def _line(item: str | tuple[str, str]) -> str:
    return item if isinstance(item, str) else f"{item[0]}, from {item[1]}"


# ---- what JAX can have

HINT_WIDTH = [
    "enable 64 bits in JAX, or cast the arrays of the file:",
    'jax.config.update("jax_enable_x64", True)',
    'pm.load(path, like, cast="float32")',
]


def is_too_wide(dtype: Any) -> bool:
    """Whether JAX would silently convert a dtype to another."""
    return jax.dtypes.canonicalize_dtype(dtype) != dtype


def keys_form(shape: tuple[int, ...], impl: Json) -> Any:
    """Return shape and dtype of the keys with numbers of a shape; None if no keys have it."""
    numbers = jax.ShapeDtypeStruct(shape, np.uint32)
    try:
        wrap = ft.partial(untyped_jax.random.wrap_key_data, impl=impl)
        return jax.eval_shape(wrap, numbers)
    except (ValueError, TypeError):
        return None


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of random keys, or the abstract form of one."""
    dtype: Any = getattr(leaf, "dtype", None)
    # JAX needs microseconds to decide that float32 is not a key type.
    is_numpys = dtype is None or isinstance(dtype, np.dtype)
    return not is_numpys and jnp.issubdtype(cast("Any", dtype), jax.dtypes.prng_key)
