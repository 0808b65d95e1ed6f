"""Fields that are read in another form than they are stored in: computed leaves, and ties.

A field may contain the inputs of its array (a `Computed`), or take its value from another path
of the model (a tie). The tree contains the stored form, so flattening, transforms, files and
surgery need not know of it, and unflattening never computes it. Reading the attribute gives the
value: in any layer, under any transform, for a function that insists on a `jax.Array`.

    class Linear(pm.Module):            made = Linear(LowRank(base, a, b), bias)
        weight: jax.Array               in the tree              LowRank(...)
        bias: jax.Array                 made.weight              base + a @ b

Python looks for a data descriptor in the class before it looks into the instance. So an instance
with such a field is of a variant of its class (see [`variants`][pytreemod.module.variants]) that
has a [`Read`][pytreemod.module.reading.Read] for each of these fields. An instance without any
is of the class itself, and reading it has no extra cost.
"""

from __future__ import annotations

import functools as ft
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import jax

from pytreemod.errors import FieldError, ShapeError, SpecError, describe
from pytreemod.module.flattening import note_of
from pytreemod.module.variants import Trait, Variant, Varying
from pytreemod.tree.nodes import children_of, record_of
from pytreemod.tree.paths import path_text
from pytreemod.tree.pending import PRIVATE, Waiting, private_of
from pytreemod.tree.predicates import is_abstract, is_array
from pytreemod.tree.stored_fields import is_reading_stored, stored
from pytreemod.tree.surgery import replace_at
from pytreemod.typing import KeyPath, class_of, jtu

# The notes of a Module's ties, and of the shapes of a computed leaf's arrays when it was made.
TIES = "<ties>"
MADE = "<made>"
# And of the ties that its `__init__` has asked for, until they can be made.
ASKED = "<asked>"


# ---- computed leaves


class Made:
    """The shapes of a computed leaf when it was made.

    Args:
        leaves: of its leaves; None if some had no shape.
        shape: of its value.
    """

    __slots__ = ("leaves", "shape")

    def __init__(self, leaves: tuple[tuple[int, ...], ...] | None, shape: tuple[int, ...] | None):
        self.leaves, self.shape = leaves, shape

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Made):
            return NotImplemented
        return (self.leaves, self.shape) == (other.leaves, other.shape)

    def __hash__(self) -> int:
        return hash((self.leaves, self.shape))

    def __repr__(self) -> str:
        return f"<made of {self.leaves}>"


UNKNOWN = Made(None, None)


def made_of(node: Any) -> Made:
    """Return the shapes of a computed leaf when it was made."""
    return note_of(node, MADE, UNKNOWN)


def is_computed(value: object) -> bool:
    """Whether a value is a computed leaf: an instance of `Computed`."""
    record = record_of(value)
    return record is not None and record.computes


def observe(node: Any) -> Made:
    """The shapes of a computed leaf that has just been built; its value is not computed for that.

    Raises:
        FieldError: if `value()` does not return an array.
    """
    leaves, treedef = jtu.tree_flatten(node)
    if not all(map(_has_shape, leaves)):
        # A tree of specs, or of labels, of the same structure.
        return UNKNOWN
    # Tracing takes a thousand times as long as most constructions.
    shape = node.__value_shape__()
    if shape is not None:
        return Made(_shapes(leaves), shape)

    def value(leaves: Any) -> Any:
        return _value(treedef.unflatten(leaves), class_of(node).__qualname__)

    return Made(_shapes(leaves), jax.eval_shape(value, leaves).shape)


def evaluate(node: Any, where: str) -> Any:
    """Return the value of a computed leaf; for abstract arrays, its shape and dtype.

    Args:
        node: the leaf.
        where: the attribute that is read, for errors.

    Raises:
        ShapeError: if its arrays have other shapes than when it was made (they are of several
            models, or gradients), or its value has another shape.
        FieldError: if `value()` does not return an array.
    """
    if is_derivative(node):
        _refuse_derivatives(where, "derivatives with respect to its parts")
    made = made_of(node)
    leaves = jtu.tree_leaves(node)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        return _evaluate_mapped(node, where, 0)
    shapes = _shapes(leaves)
    if made.leaves is not None and [*map(len, shapes)] != [*map(len, made.leaves)]:
        _refuse_leaves(where, made.leaves, shapes)
    value = _value(node, where)
    # On a mesh, parts of a model may have any shape, but the same number of axes.
    is_same = value.shape == made.shape if shapes == made.leaves else True
    if made.shape is not None and not (is_same and value.ndim == len(made.shape)):
        raise ShapeError(
            where,
            f"its original shape, {made.shape}",
            f"{describe(value)} from {class_of(node).__qualname__}.value()",
            hint=[
                "replace the computed leaf:",
                f"pm.tree_at(lambda m: m.path.to.{_last(where)}, m, new)",
            ],
        )
    return value


def evaluate_each(node: Any, where: str) -> Any:
    """The value of a computed leaf, as by `evaluate`; with layer axes, one value for each layer."""
    return _evaluate_mapped(node, where, count_made_as_one(node))


def _evaluate_mapped(node: Any, where: str, axes: int) -> Any:
    """The value of a computed leaf whose arrays have more axes; for abstract ones, its shape."""
    leaves, treedef = jtu.tree_flatten(node)

    def value(arrays: list[Any]) -> Any:
        # A Python number is the same for all.
        pairs = zip(arrays, leaves, strict=True)
        members = [leaf if array is None else array for array, leaf in pairs]
        return evaluate(treedef.unflatten(members), where)

    for _ in range(axes):
        value = jax.vmap(value)
    arrays = [leaf if is_abstract(leaf) else None for leaf in leaves]
    is_of_shapes = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    return jax.eval_shape(value, arrays) if is_of_shapes else value(arrays)


def count_made_as_one(node: Any) -> int:
    """Return the number of axes that every array of a computed leaf has gained since it was made.

    That is how often the leaf was mapped or stacked. 0 if only some arrays have gained axes.

    Args:
        node: the leaf; its arrays may be abstract.
    """
    made = made_of(node)
    leaves = jtu.tree_leaves(node)
    if made.leaves is None or len(leaves) != len(made.leaves):
        return 0
    pairs = zip(leaves, made.leaves, strict=True)
    more = {leaf.ndim - len(then) for leaf, then in pairs if is_abstract(leaf)}
    return max(more.pop(), 0) if len(more) == 1 else 0


def _last(where: str) -> str:
    return where.rpartition(".")[2]


def _has_shape(leaf: Any) -> bool:
    return is_abstract(leaf) or isinstance(leaf, (float, int, complex))


def leaf_shape(leaf: Any) -> tuple[int, ...]:
    """Return the shape of an array, or of a value instead of one; a number has none."""
    return tuple(getattr(leaf, "shape", ()))


def _shapes(leaves: Iterable[Any]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(leaf_shape, leaves))


def _value(node: Any, where: str) -> Any:
    try:
        value: Any = node.value()
    except AttributeError as error:
        # Python would take it for an error of the field itself, and call `__getattr__`.
        expected = f"{class_of(node).__qualname__}.value() to run"
        hint = f"the error is: {error}"
        raise FieldError(where, expected, "an AttributeError", hint=hint) from error
    if not is_array(value):
        raise FieldError(
            where,
            f"an array from {class_of(node).__qualname__}.value()",
            describe(value),
            hint=["return the array:", "def value(self) -> jax.Array: ..."],
        )
    return value


def _refuse_leaves(
    where: str, made: tuple[tuple[int, ...], ...], shapes: tuple[tuple[int, ...], ...]
) -> NoReturn:
    if len(shapes) < len(made):
        _refuse_derivatives(where, f"{len(shapes)} of its {len(made)} arrays")
    hint = [
        "map over several models:",
        "pm.filter_vmap(lambda m, x: m(x), in_axes=(0, None))(models, x)",
    ]
    # A part of the value of several layers, such as one layer of a Stack.
    if any(len(shape) < len(own) for own, shape in zip(made, shapes, strict=False)):
        hint = [
            "resolve computed values before you split several models:",
            "model = pm.resolve(model)",
        ]
    raise ShapeError(
        where,
        f"a value computed from arrays of the shapes {', '.join(map(str, made))}",
        f"arrays of the shapes {', '.join(map(str, shapes))}",
        hint=hint,
    )


def _refuse_derivatives(where: str, found: str) -> NoReturn:
    raise ShapeError(
        where,
        "a value computed from a model's arrays",
        found,
        hint=[
            "gradients and partitions of a model have no computed values; read the leaves:",
            "pm.named_leaves(grads)",
        ],
    )


def mark_derivatives(tree: Any, has_computed: bool) -> None:
    """Let computed leaves in a new tree of derivatives refuse to be read.

    The outermost Modules are marked, too.
    """
    for is_marked in (is_computed, _is_record) if has_computed else (_is_record,):
        for node in jtu.tree_leaves(tree, is_leaf=is_marked):
            if is_marked(node):
                private_of(node).is_derivative = True


def is_derivative(node: Any) -> bool:
    """Whether a record was marked as derivatives; its copies are not."""
    own = node.__stored__.get(PRIVATE)
    return own is not None and own.is_derivative


def _is_record(node: Any) -> bool:
    return record_of(node) is not None


# ---- ties


class Tie:
    """One path of a model that has its value from another.

    Args:
        place: the tied path, from the node that has the tie.
        source: the path of the value, from the same node.
    """

    __slots__ = ("place", "source")

    def __init__(self, place: KeyPath, source: KeyPath):
        self.place, self.source = place, source

    def stand_in(self, node: Any) -> Any:
        """Return the value to read at the tied path, given the `node` at the source."""
        return node

    def parts(self) -> tuple[Any, ...]:
        """Return all parts of the tie."""
        return self.place, self.source

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tie) or class_of(self) is not class_of(other):
            return NotImplemented
        return self.parts() == other.parts()

    def __hash__(self) -> int:
        return hash(self.parts())


class Ties(Varying, tuple[Tie, ...]):
    """The ties of a node. A class, so that JAX does not look for arrays in the tuple."""

    def traits(self) -> Iterator[Trait]:
        """Return the fields in which something is tied are read differently."""
        return ((Reading, tie.place[0].name) for tie in self)

    @ft.cached_property
    def at(self) -> dict[KeyPath, Tie]:
        """The ties by tied path."""
        return {tie.place: tie for tie in self}

    @ft.cached_property
    def below(self) -> dict[KeyPath, list[Tie]]:
        """By a path, the ties whose tied paths are below it."""
        found: dict[KeyPath, list[Tie]] = {}
        for tie in self:
            for count in range(len(tie.place)):
                found.setdefault(tie.place[:count], []).append(tie)
        return found

    def __reduce__(self) -> Any:
        # Without the cached properties.
        return Ties, (tuple(self),)


_NO_TIES = Ties()


class AbstractAsked(tuple[tuple[Any, Any, Any], ...], ABC):
    """Calls of `tie` in an `__init__`: tied paths, sources, and the functions between them."""

    @abstractmethod
    def tied(self, node: Any) -> Any:
        """Return the finished instance, tied; one that lacks a size stores the calls."""


def ties_of(node: Any) -> Ties:
    """Return the ties of a node, outermost tied paths first."""
    return _NO_TIES if record_of(node) is None else note_of(node, TIES, _NO_TIES)


def follow(node: Any, path: KeyPath, followed: dict[Any, Any] | None = None) -> Any:
    """The value at a path below a node, with ties followed; computed leaves are not evaluated.

    The time depends on the path and the nodes to rebuild, not on the number of ties: each is
    followed once, and found by its path.

    Args:
        node: any node.
        path: keys below it.
        followed: the values of ties that were followed, by the nodes that have them and their
            paths; with the nodes, so that they stay alive.

    Raises:
        SpecError: if ties form a circle.
    """
    if not path:
        return node
    followed = {} if followed is None else followed
    ties = ties_of(node)
    if not ties:
        return follow(_child(node, path[0]), path[1:], followed)
    for count in range(1, len(path) + 1):
        tie = ties.at.get(path[:count])
        if tie is not None:
            return follow(_source(node, tie, followed), path[count:], followed)
    found = follow(_child(node, path[0]), path[1:], followed)
    inside = ties.below.get(path, ())
    changes = [(tie.place[len(path) :], _source(node, tie, followed)) for tie in inside]
    return replace_at(found, changes) if changes else found


_OPEN: Any = object()


def _source(node: Any, tie: Tie, followed: dict[Any, Any]) -> Any:
    name = (id(node), tie.place)
    known = followed.get(name)
    if known is None:
        followed[name] = node, tie, _OPEN
        followed[name] = known = node, tie, tie.stand_in(follow(node, tie.source, followed))
    if known[2] is _OPEN:
        circle = [tie for _, tie, found in followed.values() if found is _OPEN]
        places = [f"{path_text(t.place)} to {path_text(t.source)}" for t in circle]
        raise SpecError(
            "tie",
            "a path with its own value at the end of every chain of ties",
            "ties in a circle",
            at=dict.fromkeys(places),
            hint=["remove one of them:", f"pm.untie(model, {path_text(tie.place)!r})"],
        )
    return known[2]


def _child(node: Any, key: Any) -> Any:
    if record_of(node) is not None:
        return stored(node, key.name)
    kind = class_of(node)
    if kind is list or kind is tuple:
        return node[key.idx]
    return node[key.key] if kind is dict else dict(children_of(node) or ())[key]


# ---- reading


class Read(Waiting):
    """The attribute of a variant for a field: reading it gives the value.

    It has a `__set__`, so that Python calls it although the instance's dict has the name.
    """

    __slots__ = ()

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        name = self.name
        value = super().__get__(instance, owner)
        if instance is None or is_reading_stored():
            return value
        if ties_of(instance):
            value = follow(instance, (jtu.GetAttrKey(name),))
        if is_computed(value):
            return evaluate(value, f"{class_of(instance).__qualname__}.{name}")
        return value

    def __set__(self, instance: Any, value: Any) -> None:
        # Reached only by code that bypasses `__setattr__`, which refuses.
        instance.__stored__[self.name] = value


class Reading(Variant):
    """The trait of an instance with a field that is read in another form."""

    __slots__ = ()

    @staticmethod
    def __vary__(original: Any, name: str) -> dict[str, Any]:
        return {name: Read(name)}


def traits_of(values: dict[str, Any]) -> Iterator[Trait]:
    """Yield the traits of an instance with these values."""
    for name, value in values.items():
        if is_computed(value):
            yield Reading, name
        elif isinstance(value, Varying):
            yield from value.traits()


def refuse_untied(node: Any, changes: dict[str, Any]) -> None:
    """Refuse new values for fields that lack a tie that the instance has.

    Raises:
        SpecError: if there is one.
    """
    for tie in ties_of(node):
        name = tie.place[0].name
        if name in changes and not _is_hole(changes[name], tie.place[1:]):
            refuse_tied_place(tie)


def refuse_tied_place(tie: Tie) -> NoReturn:
    """Raise the error for an edit of a tied path."""
    place, source = path_text(tie.place), path_text(tie.source)
    raise SpecError(
        place,
        f"no edit, because the path is tied to {source}",
        "a new value",
        hint=[
            "edit the source, or remove the tie first:",
            f"pm.tree_at({source!r}, model, new)",
            f"pm.untie(model, {place!r})",
        ],
    )


def _is_hole(node: Any, path: KeyPath) -> bool:
    for key in path:
        try:
            node = _child(node, key)
        except (AttributeError, LookupError):
            return False
    record = record_of(node)
    return record is not None and record.is_hole
