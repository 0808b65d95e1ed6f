"""Names of the axes of a model's arrays, read from the annotations of their fields.

`weight: Float[Array, "heads embed"]` names two axes. Nothing is stored for that: the names are read
from the class on request, so that they cannot disagree with the arrays after a
transform. Names that depend on configuration come from a method `__axis_names__`. A node with
layer axes (`Stack`, `Ensemble`) names its own axis. `with_axis_names` names axes of single leaves
of one model.
"""

from __future__ import annotations

import functools as ft
import types
import typing
from collections import abc
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

from jaxtyping import AbstractArray

from pytreemod.errors import ArgumentError, ShapeError, SpecError, describe
from pytreemod.module.array_shapes import evaluated, options_of
from pytreemod.module.reading import is_computed, shape_of_one
from pytreemod.module.roles import depth_of_holder, with_leaf_notes
from pytreemod.tree.instances import notes_of, record_of
from pytreemod.tree.members import holds_of
from pytreemod.tree.nodes import Location, Represents, locations
from pytreemod.tree.paths import path_text, step_name
from pytreemod.tree.prefixes import By
from pytreemod.tree.renewing import with_new_containers
from pytreemod.typing import PyTree, class_of, jtu

_T = TypeVar("_T")

AxisNames: TypeAlias = tuple[str | None, ...]
"""A name, or None, for each axis of an array."""


def axis_names(tree: PyTree) -> PyTree:
    """Return the names of the axes of each leaf, from the annotations of the fields.

    `weight: Float[Array, "out_features in_features"]` has the names `("out_features",
    "in_features")`. An axis without a name has None: one of fixed size (`"3"`), `_`, `...`, an
    expression, or an axis of a variadic part (`*shape`). So do all axes of a field whose annotation
    has no names, and of a leaf outside Modules. For a union, the first alternative that fits the
    leaf's rank and fixed sizes counts. For a list, tuple or dict, the annotation of its elements
    counts. If a name appears twice in one leaf, the first axis has it.

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

    Raises:
        ShapeError: if the annotation of a leaf names axes, but does not fit its rank or its fixed
            sizes; the error lists the paths.

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
    found = fitting_names("axis_names", list(locations(tree)))
    return jtu.tree_structure(tree).unflatten([each.names for each in found])


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
        ArgumentError: if `names` is not a `by`, or a value is not such a string.
        SpecError: if a leaf has another rank, or is in no Module; or `by` refuses the tree.

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
        hint = ["name the leaves by selectors:", 'pm.by({"**": "layers ..."})']
        raise ArgumentError("with_axis_names(names)", "pm.by({...})", describe(names), hint=hint)
    model = with_new_containers(model)
    locs = list(locations(model))
    said = [text and _checked(text) for text in names.values(model, root="model")]
    pairs = [(loc, each) for loc, each in zip(locs, said, strict=True) if each is not None]
    _refuse_unheld([loc for loc, _ in pairs])
    made = with_leaf_notes(model, "axes", pairs)
    _refuse_unfit(made, [each is not None for each in said])
    return made


# ---- one leaf


class LeafNames(NamedTuple):
    """The names of a leaf's axes.

    Attributes:
        names: as many as the leaf has axes.
        reason: why there are none, or why they do not fit; empty if neither.
        is_unfit: whether the annotation does not fit the leaf.
    """

    names: AxisNames
    reason: str = ""
    is_unfit: bool = False


def fitting_names(where: str, locs: Sequence[Location]) -> list[LeafNames]:
    """Return the names of the axes of leaves.

    Args:
        where: the call, for errors.
        locs: the leaves.

    Raises:
        ShapeError: as for `axis_names`.
    """
    found = [names_of(loc) for loc in locs]
    _refuse_unnamed(where, locs, found)
    return found


def names_of(loc: Location) -> LeafNames:
    """Return the names of the axes of a leaf of any tree.

    Args:
        loc: the leaf and its location.
    """
    leaf = _Leaf(loc)
    if not leaf.shape or leaf.depth < 0:
        return LeafNames((None,) * len(leaf.shape), "no Module holds it" if leaf.shape else "")
    names = leaf.said()
    found = leaf.annotated(leaf.shape) if names is None else LeafNames(names)
    # An optimizer may have its own arrays, such as factored moments, under a model's classes.
    is_own = found.is_unfit and any(map(_mirrors, leaf.nodes))
    return found._replace(names=_once(found.names), is_unfit=found.is_unfit and not is_own)


class _Leaf:
    """A leaf of a tree, and the nodes above it.

    Attributes:
        nodes: the nodes above it, the root first: one for each key of its path.
        depth: the number of keys to the innermost Module above it.
        steps: the keys from there to the leaf.
        front: the names of the layer axes.
    """

    def __init__(self, loc: Location):
        self.path = loc.path
        self.shape: tuple[int, ...] = tuple(getattr(loc.leaf, "shape", ()))
        self.nodes = [node for node in loc.nodes if class_of(node) is not Represents]
        self.depth = depth_of_holder(loc)
        self.steps = tuple(map(step_name, loc.path[self.depth :]))
        self.front = tuple(_axis_name(self.nodes[len(hold.path)]) for hold in holds_of(loc))

    def said(self) -> AxisNames | None:
        """The names from `with_axis_names`; None if there are none, or they do not fit the rank."""
        text: str | None = dict(notes_of(self.nodes[self.depth]).axes).get(self.steps)
        if text is None:
            return None
        said: tuple[Any, ...] = tuple(_WORDS.get(word, word) for word in text.split())
        if ... not in said:
            # Of one layer, if the leaf has layer axes.
            return next(
                (n for n in (said, (*self.front, *said)) if len(n) == len(self.shape)), None
            )
        at, count = said.index(...), len(self.shape) - len(said) + 1
        rest = None if count < 0 else self.annotated(self.shape[at : at + count])
        if rest is None or rest.is_unfit:
            return None
        return (*said[:at], *rest.names, *said[at + 1 :])

    def annotated(self, shape: tuple[int, ...]) -> LeafNames:
        """Return the names that classes give to a leaf of this shape at this path."""
        refused = LeafNames((None,) * len(shape))
        # With the layer axes that are present: inside a map they are not, though the nodes remain.
        for count in range(min(len(self.front), len(shape)), -1, -1):
            own = self._of_class_or_part(shape[count:])
            if not own.is_unfit:
                return own._replace(names=(*self.front[len(self.front) - count :], *own.names))
            refused = refused._replace(reason=refused.reason or own.reason, is_unfit=True)
        return refused

    def _of_class_or_part(self, shape: tuple[int, ...]) -> LeafNames:
        holder = self.nodes[self.depth]
        part = self._of_part(holder, shape) if is_computed(holder) else None
        return _of_class(holder, self.steps, shape) if part is None else LeafNames(part)

    def _of_part(self, holder: Any, shape: tuple[int, ...]) -> AxisNames | None:
        """Return the names of the field that reads as the array of which the leaf is a part."""
        above = max((i for i in range(self.depth) if record_of(self.nodes[i])), default=-1)
        value = shape_of_one(holder)
        if above < 0 or value is None:
            return None
        steps = tuple(map(step_name, self.path[above : self.depth]))
        names = _of_class(self.nodes[above], steps, value).names
        of_parts = getattr(class_of(holder), "__part_axis_names__", None)
        part = None if of_parts is None else of_parts(holder, names).get(self.steps[0])
        if part is None and shape == value:
            part = names
        return part if part is not None and any(part) and len(part) == len(shape) else None


def _of_class(holder: Any, steps: tuple[str, ...], shape: tuple[int, ...]) -> LeafNames:
    """The names that a Module's class gives to an array of this shape, at this path below it."""
    name, nothing = steps[0], (None,) * len(shape)
    of_instance = getattr(class_of(holder), "__axis_names__", None)
    names = None if of_instance is None else of_instance(holder).get(name)
    if names is not None:
        shown = f"{class_of(holder).__qualname__}.__axis_names__ returns {tuple(names)}"
        fits = len(names) == len(shape)
        return LeafNames(tuple(names)) if fits else LeafNames(nothing, shown, is_unfit=True)
    reason, options = _options(class_of(holder).__record__.original.cls, steps)
    for tokens in options:
        names = _fitting(holder, tokens, shape)
        if names is not None:
            return LeafNames(names)
    return LeafNames(nothing, reason, is_unfit=bool(options))


def _axis_name(node: Any) -> str | None:
    """Return the name that a node gives to its layer axis."""
    name = getattr(node, "axis_name", None)
    if isinstance(name, str):
        return name
    return "members" if getattr(class_of(node), "__has_independent_members__", False) else "layers"


def _mirrors(node: Any) -> bool:
    """Whether the nodes below one mirror a model, as an optimizer's state does."""
    is_plain = record_of(node) is not None or class_of(node) in (list, tuple, dict)
    return hasattr(class_of(node), "__holds_values__") or not is_plain


def _once(names: AxisNames) -> AxisNames:
    return tuple(None if name in names[:i] else name for i, name in enumerate(names))


# ---- annotations


# Cached for the process, because JAX never frees the classes of its pytrees.
@ft.cache
def _annotations(cls: Any) -> dict[str, Any]:
    """Return the annotations of a class's fields; for one that cannot be evaluated, the error."""
    found: dict[str, Any] = {}
    for name, field in cls.__record__.fields.items():
        try:
            found[name] = evaluated(cls, field)
        except Exception as error:
            # Without its frames, which keep the caller's objects alive.
            found[name] = error.with_traceback(None)
    return found


# Each layer of a model asks the same.
@ft.lru_cache(maxsize=4096)
def _options(cls: Any, steps: tuple[str, ...]) -> tuple[str, list[list[str]]]:
    """Return the axes that annotations give the arrays at these steps below an instance of a class.

    Returns:
        A reason why none fits, and the tokens of each alternative.
    """
    annotation = _annotations(cls).get(steps[0])
    if isinstance(annotation, Exception):
        return f"its annotation cannot be evaluated: {annotation}", []
    for step in steps[1:]:
        annotation = _element(annotation, step)
    options = [kind.dim_str for kind in options_of(_plain(annotation)) if _is_array(kind)]
    if not options:
        return "its annotation names no axes", []
    shown = " or ".join(repr(option.strip()) for option in options)
    return f"its annotation says {shown}", [option.split() for option in options]


def _plain(annotation: Any) -> Any:
    """Return an annotation without wrappers around it: an alias, `Annotated`."""
    while True:
        if typing.get_origin(annotation) is typing.Annotated:
            annotation = typing.get_args(annotation)[0]
        elif hasattr(annotation, "__value__"):
            annotation = annotation.__value__
        else:
            return annotation


def _is_array(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, AbstractArray)


def _element(annotation: Any, step: str) -> Any:
    """Return the annotation of an element of a container; None if there is none."""
    for option in options_of(_plain(annotation)):
        origin, args = typing.get_origin(option), typing.get_args(option)
        if origin is tuple and args[1:] != (...,):
            return args[int(step)] if step.isdigit() and int(step) < len(args) else None
        if origin in (list, tuple, *_SEQUENCES) and args:
            return args[0]
        if origin in (dict, *_MAPPINGS) and len(args) == 2:
            return args[1]
    return None


_SEQUENCES = (abc.Sequence, abc.Iterable)
_MAPPINGS = (abc.Mapping, types.MappingProxyType)


def _fitting(holder: Any, tokens: Sequence[str], shape: tuple[int, ...]) -> AxisNames | None:
    """The names that the tokens of an annotation give to a shape; None if they do not fit it."""
    many = next((i for i, token in enumerate(tokens) if _is_variadic(token)), None)
    if many is not None:
        covered = len(shape) - len(tokens) + 1
        # A part that is named after sizes covers as many axes, and none of a map.
        sizes = cast("object", getattr(holder, tokens[many].lstrip("#?*_"), None))
        if isinstance(sizes, tuple):
            covered = len(cast("tuple[Any, ...]", sizes))
        tokens = [*tokens[:many], *["_"] * covered, *tokens[many + 1 :]]
    if len(tokens) != len(shape):
        return None
    fixed = [token.rpartition("=")[2] for token in tokens]
    if any(f.isdigit() and int(f) != size for f, size in zip(fixed, shape, strict=True)):
        return None
    return tuple(map(_name, tokens))


def _is_variadic(token: str) -> bool:
    return token == "..." or "*" in token[: len(token) - len(token.lstrip("#?*_"))]


def _name(token: str) -> str | None:
    """Return the name of one axis: none for a fixed size, an anonymous one, or an expression."""
    name = token.lstrip("#?")
    return name if name.isidentifier() and not name.startswith("_") else None


# ---- names of single leaves


# Words that are not names.
_WORDS = {"...": ..., "_": None}


def _checked(text: Any) -> str:
    """Return a string that names axes, with one blank between names."""
    names = text.split() if isinstance(text, str) else []
    is_word = [name == "..." or name.isidentifier() for name in names]
    if not names or not all(is_word) or names.count("...") > 1:
        raise ArgumentError(
            "with_axis_names(names)",
            "one name for each axis, `_` for none, and at most one `...`",
            describe(text),
            hint=["for example:", 'pm.by({"blocks.*.up.weight": "mlp embed", ...: None})'],
        )
    return " ".join(names)


# ---- refusals


def _refuse_unnamed(where: str, locs: Sequence[Location], found: Sequence[LeafNames]) -> None:
    unfit = [
        f"{path_text(loc.path)}: {describe(loc.leaf)}, and {each.reason}"
        for loc, each in zip(locs, found, strict=True)
        if each.is_unfit
    ]
    if unfit:
        raise ShapeError(
            where,
            "arrays that fit the annotations of their fields",
            f"{len(unfit)} that do{'es' * (len(unfit) == 1)} not",
            at=unfit,
            hint=[
                "name the axis that a map has added:",
                'pm.with_axis_names(model, pm.by({"**": "layers ..."}))',
            ],
        )


def _refuse_unheld(locs: Sequence[Location]) -> None:
    lost = [path_text(loc.path) for loc in locs if depth_of_holder(loc) < 0]
    if lost:
        raise SpecError(
            "with_axis_names(names)",
            "leaves of Modules, which store the names of axes",
            "leaves outside Modules",
            at=lost,
        )


def _refuse_unfit(made: Any, is_said: Sequence[bool]) -> None:
    unfit = [
        f"{path_text(loc.path)}: {describe(loc.leaf)}"
        for loc, said in zip(locations(made), is_said, strict=True)
        if said and _Leaf(loc).said() is None
    ]
    if unfit:
        raise SpecError(
            "with_axis_names(names)",
            "a name for each axis of a leaf",
            f"another number of names for {len(unfit)}",
            at=unfit,
            hint=[
                "leave out the leaves with other axes:",
                'pm.by({path: None, "**": "layers ..."})',
            ],
        )
