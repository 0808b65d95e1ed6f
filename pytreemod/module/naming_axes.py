"""Names of the axes of a model's arrays, read from the annotations of their fields.

`weight: Float[Array, "heads embed"]` names two axes. Nothing is stored for that: the names are read
from the class on request, and the last of them belongs to the last axis of the array, so that an
axis that a map has added in front has no name instead of a wrong one. Names that depend on
configuration come from a method `__axis_names__`. A node with layer axes (`Stack`, `Ensemble`)
names its own axis. `with_axis_names` names axes of single leaves of one model.
"""

from __future__ import annotations

import functools as ft
import inspect
import sys
import types
import typing
from typing import Any, TypeAlias, TypeVar

from jaxtyping import AbstractArray

from pytreemod.errors import ArgumentError, SpecError, describe
from pytreemod.module.reading import is_computed, shape_of_one
from pytreemod.module.roles import depth_of_holder, with_leaf_notes
from pytreemod.tree.instances import is_module, notes_of
from pytreemod.tree.members import layer_axes_of
from pytreemod.tree.nodes import Location, locations, with_new_containers
from pytreemod.tree.paths import path_text, step_name
from pytreemod.tree.prefixes import By
from pytreemod.typing import PyTree, class_of, is_instance, jtu

_T = TypeVar("_T")

AxisNames: TypeAlias = tuple[str | None, ...]
"""A name, or None, for each axis of an array."""


def axis_names(tree: PyTree) -> PyTree:
    """Return the names of the axes of each leaf, from the annotations of the fields.

    `weight: Float[Array, "out_features in_features"]` has the names `("out_features",
    "in_features")`. An axis without a name has None: one of fixed size (`"3"`), `_`, `...`, an
    expression, an axis of a variadic part (`*shape`), or one that a map has added in front. So do
    all axes of a leaf that its annotation does not fit, or that has none. Of a union, the first
    alternative that fits counts; for a list, tuple or dict, the annotation of its elements. If a
    name appears twice in one leaf, the first axis has it.

    Names from elsewhere:

    - a class whose axes depend on its configuration has a method `__axis_names__(self)`, which
      returns a dict from the name of a field to a tuple of names;
    - [`nn.Stack`][pytreemod.nn.Stack] and [`nn.Ensemble`][pytreemod.nn.Ensemble] name their own
      axis: `"layers"`, `"members"`, or the value of `axis_name=`;
    - [`with_axis_names`][pytreemod.with_axis_names] names axes of single leaves.

    Arrays of a computed leaf that have its shape have the names of the field. Each factor of a
    [`lora`][pytreemod.lora] update has the name of the axis that it shares.
    Gradients, an [`Optimizer`][pytreemod.Optimizer] and moving averages of a model have the model's
    names, because they have its classes.

    Args:
        tree: a model, or a tree of its structure; its arrays may be abstract.

    Returns:
        A tree of the structure of `tree`, in which each leaf is a tuple as long as its rank.

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> from pytreemod import nn
        >>> linear = nn.Linear(3, 2, key=jax.random.key(0))
        >>> names = pm.axis_names(linear)
        >>> names.weight, names.bias
        (('out_features', 'in_features'), ('out_features',))
        >>> stack = nn.Stack(lambda key: nn.Linear(3, 3, key=key), 4, key=jax.random.key(0))
        >>> pm.axis_names(stack).layer.weight
        ('layers', 'out_features', 'in_features')
    """
    return jtu.tree_structure(tree).unflatten(list(map(names_of, locations(tree))))


def with_axis_names(model: _T, names: By) -> _T:
    """Name the axes of chosen leaves of one model.

    Use it where no annotation does, above all for the axis that a vmapped construction adds. Like
    roles, the names are configuration: transforms, surgery, copies, pickles and files preserve
    them. Where a leaf has another rank, as inside a map over that axis, the annotation counts.

    Args:
        model: a model, or any tree of Modules.
        names: a [`by`][pytreemod.by] with a string for each selector: one name for each axis of the
            leaf, `_` for none, and at most one `...` for the names that the axes already have, as
            in `"layers ..."`. None leaves a leaf unchanged.

    Returns:
        A new tree with the same arrays.

    Raises:
        ArgumentError: if `names` is not a `by`.
        SpecError: if a string has another number of names, or a leaf is in no Module; or `by`
            refuses the tree.

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> from pytreemod import nn
        >>> keys = jax.random.split(jax.random.key(0), 5)
        >>> nets = pm.filter_vmap(lambda key: nn.Linear(3, 2, key=key))(keys)
        >>> nets = pm.with_axis_names(nets, pm.by({"**": "nets ..."}))
        >>> pm.axis_names(nets).weight
        ('nets', 'out_features', 'in_features')
    """
    if not isinstance(names, By):  # pyright: ignore[reportUnnecessaryIsInstance]  (callers may be unchecked)
        raise ArgumentError("with_axis_names(names)", "pm.by({...})", describe(names))
    model = with_new_containers(model)
    texts = names.values(model, root="model")
    pairs = [(loc, text) for loc, text in zip(locations(model), texts) if text is not None]
    wrong = [f"{path_text(loc.path)}: {describe(loc.leaf)}, {text!r}" for loc, text in pairs]
    wrong = [line for line, pair in zip(wrong, pairs) if _said(*pair) is None]
    if wrong:
        fact = "with_axis_names: a leaf is in no Module, or has another number of axes than names"
        raise SpecError(fact, at=wrong)
    return with_leaf_notes(model, "axes", pairs)


# ---- one leaf


def names_of(loc: Location) -> AxisNames:
    """Return the names of the axes of a leaf of any tree.

    Args:
        loc: the leaf and its location.
    """
    shape, depth = _shape(loc.leaf), depth_of_holder(loc)
    if not shape or depth < 0:
        return (None,) * len(shape)
    notes = dict(notes_of(loc.holders[depth]).axes)
    text = notes.get(tuple(map(step_name, loc.path[depth:])))
    names = (text and _said(loc, text)) or _annotated(loc, shape) or (None,) * len(shape)
    return tuple(None if name in names[:i] else name for i, name in enumerate(names))


def _said(loc: Location, text: str) -> AxisNames | None:
    """The names in a text of `with_axis_names`; None if they do not fit the leaf."""
    shape, words = _shape(loc.leaf), text.split()
    names = tuple(None if word == "_" else word for word in words)
    if depth_of_holder(loc) < 0 or words.count("...") > 1:
        return None
    if "..." in words:
        at, count = words.index("..."), len(shape) - len(words) + 1
        rest = None if count < 0 else _annotated(loc, shape[at : at + count])
        return None if rest is None else (*names[:at], *rest, *names[at + 1 :])
    # A text for one layer leaves out the layer axes.
    return next((n for n in (names, (*_front(loc), *names)) if len(n) == len(shape)), None)


def _annotated(loc: Location, shape: tuple[int, ...]) -> AxisNames | None:
    """The names that classes give to a leaf of this shape; None if they do not fit it."""
    depth, nodes = depth_of_holder(loc), loc.holders
    holder, front = nodes[depth], _front(loc)
    above = max((i for i in range(depth) if is_module(nodes[i])), default=-1)
    value = shape_of_one(holder) if is_computed(holder) and above >= 0 else None
    if value is not None:
        own = _of_class(nodes[above], loc.path[above:depth], value, ()) or ()
        of_parts = getattr(class_of(holder), "__part_axis_names__", None)
        parts: Any = of_parts(holder, own) if of_parts is not None and any(own) else {}
        is_like = shape[len(shape) - len(value) :] == value
        part = parts.get(step_name(loc.path[depth]), own if is_like else ())
        if any(part):
            return _aligned(front, part, shape)
    return _of_class(holder, loc.path[depth:], shape, front)


def _of_class(
    holder: Any, path: tuple[Any, ...], shape: tuple[int, ...], front: AxisNames
) -> AxisNames | None:
    """The names that a Module's class gives to an array of this shape, at this path below it."""
    cls, steps = class_of(holder), tuple(map(step_name, path))
    if hasattr(cls, "__axis_names__") and steps[0] in cls.__axis_names__(holder):
        return _aligned(front, cls.__axis_names__(holder)[steps[0]], shape)
    options = _options(cls, steps)
    if not options:
        return (*front, *[None] * len(shape))[: len(shape)]
    rows = [_spread(holder, tokens, len(shape) - len(front)) for tokens in options]
    rows = [row for row in rows if _fits(row, shape)]
    # Inside a map over layers their axes are not there, though their nodes are.
    rows.sort(key=lambda row: len(shape) - len(row) not in (0, len(front)))
    return _aligned(front, [*map(_name, rows[0])], shape) if rows else None


def _aligned(front: AxisNames, names: Any, shape: tuple[int, ...]) -> AxisNames | None:
    """Names for all axes: those of the layer axes come before the array's own, which come last."""
    whole = (*[None] * len(shape), *front, *names)
    return whole[len(whole) - len(shape) :] if len(names) <= len(shape) else None


def _front(loc: Location) -> AxisNames:
    """The names of the layer axes of a leaf."""
    nodes, axes = loc.holders, layer_axes_of(loc)
    return tuple(getattr(nodes[len(axis.path)], "axis_name", "layers") for axis in axes)


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(getattr(leaf, "shape", ()))


# ---- annotations


def evaluated(cls: type, field: Any) -> Any:
    """A field's annotation; a string is evaluated in the module of the class that declares it."""
    if not isinstance(field.type, str):
        return field.type
    owner = next(base for base in cls.__mro__ if field.name in inspect.get_annotations(base))
    return eval(field.type, dict(vars(sys.modules[owner.__module__])))


def options_of(annotation: Any) -> tuple[Any, ...]:
    """Return the alternatives of a union; for any other annotation, only that."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def array_texts(annotation: Any) -> list[str]:
    """Return what the array types of an annotation say of their axes."""
    kinds = [kind for kind in options_of(annotation) if isinstance(kind, type)]
    return [kind.dim_str for kind in kinds if issubclass(kind, AbstractArray)]


# Each layer of a model asks the same.
@ft.lru_cache(maxsize=4096)
def _options(cls: Any, steps: tuple[str, ...]) -> list[list[str]]:
    """The axes in the annotation of the arrays at these steps below a Module, by alternative."""
    try:
        annotation = evaluated(cls, cls.__module_schema__.fields[steps[0]])
    except Exception:
        return []
    for step in steps[1:]:
        annotation = _element(annotation, step)
    return [text.split() for text in array_texts(annotation)]


def _element(annotation: Any, step: str) -> Any:
    """The annotation of an element of a container; None if there is none."""
    for option in options_of(annotation):
        kinds = typing.get_args(option)
        if typing.get_origin(option) is tuple and ... not in kinds:
            return kinds[int(step)] if int(step) < len(kinds) else None
        if kinds:
            return kinds[0] if ... in kinds else kinds[-1]
    return None


def _spread(holder: Any, tokens: list[str], rank: int) -> list[str]:
    """Tokens for each axis: `_` for those of a variadic part, of which a tuple of sizes has one."""
    for i, token in enumerate(tokens):
        if token == "..." or token.lstrip("#?")[:1] == "*":
            sizes: Any = getattr(holder, token.lstrip("#?*"), None)
            count = len(sizes) if is_instance(sizes, tuple) else rank - len(tokens) + 1
            return [*tokens[:i], *["_"] * count, *tokens[i + 1 :]]
    return tokens


def _fits(tokens: list[str], shape: tuple[int, ...]) -> bool:
    fixed = [token.rpartition("=")[2] for token in tokens]
    pairs = zip(reversed(fixed), reversed(shape))
    return len(tokens) <= len(shape) and all(not f.isdigit() or int(f) == n for f, n in pairs)


def _name(token: str) -> str | None:
    """The name of one axis: none for a fixed size, an anonymous one, or an expression."""
    name = token.lstrip("#?")
    return name if name.isidentifier() and not name.startswith("_") else None
