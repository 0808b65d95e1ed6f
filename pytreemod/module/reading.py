"""Fields that read as something else than they store: computed leaves, and ties.

A field may hold the inputs of its array (a `Computed`), or have its value from another path of the
model (a `Tie`). The tree contains the stored form, so flattening, transforms, files and surgery
need not know of it, and unflattening computes nothing. Reading the attribute gives the value:

    class Linear(pm.Module):            made = Linear(LowRank(base, a, b), bias)
        weight: jax.Array               in the tree              LowRank(...)
        bias: jax.Array                 made.weight              base + a @ b

Such a field is never in an instance's dict, so Python asks its `LazyField`, which asks `read`. An
instance without any pays nothing.

Several computed leaves that a map has made as one have more axes than one, and their value would be
wrong. So a computed leaf remembers the *ranks* of its arrays when it was made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

from pytreemod.errors import FieldError, ShapeError, describe
from pytreemod.tree.instances import all_stored, flat_of, is_derivative, notes_of, schema_of, stored
from pytreemod.tree.nodes import children_of, is_module
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_abstract, is_array
from pytreemod.tree.surgery import replace_at
from pytreemod.typing import KeyPath, class_of, is_instance, jtu


def is_computed(value: object) -> bool:
    """Whether a value is a computed leaf: an instance of `Computed`."""
    return getattr(type(value), "__computes__", False)


class Tie(NamedTuple):
    """One path below a Module that has its value from another path below the same Module.

    Args:
        place: the tied path, where None is stored.
        source: the path of the value.
        through: a function of the array at the source; None for that itself.
        rank: of that array in one layer, if there is a function of it.
    """

    place: KeyPath
    source: KeyPath
    through: Callable[[Any], Any] | None = None
    rank: int = 0


# ---- reading a field


def read(node: Any, name: str) -> Any:
    """Return the value of a field that reads as something else than it stores."""
    value = stored(node, name)
    ties = [tie for tie in notes_of(node).ties if tie.place[0].name == name]
    while ties:
        # A source with a tied path inside it waits for that one.
        tied = {tie.place[:i] for tie in ties for i in range(1, len(tie.place) + 1)}
        changes: list[tuple[KeyPath, Any]] = []
        for tie in [tie for tie in ties if tie.source not in tied]:
            first, *rest = tie.source
            # Where both paths start with the same field, it is the one which is being read.
            found = follow(value, rest) if first.name == name else follow(node, tie.source)
            changes.append((tie.place[1:], pass_through(tie, found)))
        value = replace_at(value, changes)
        ties = [tie for tie in ties if tie.source in tied]
    where = f"{class_of(node).__qualname__}.{name}"
    return evaluate(value, where) if is_computed(value) else value


def follow(node: Any, path: Iterable[Any], is_evaluated: bool = True) -> Any:
    """Return what reading along a path gives.

    Args:
        node: where it starts.
        path: the keys; they may lead into a computed leaf.
        is_evaluated: whether a computed leaf at the end is computed, one for each layer.
    """
    keys = [*path]
    for i, key in enumerate(keys):
        held = stored(node, key.name) if is_module(node) else None
        if is_computed(held):
            is_end = i + 1 == len(keys) and is_evaluated
            node = evaluate_each(held, path_text(tuple(keys))) if is_end else held
        elif isinstance(key, jtu.GetAttrKey):
            node = getattr(node, key.name)
        elif is_instance(node, (list, tuple, dict)):
            node = node[key.idx if isinstance(key, jtu.SequenceKey) else key.key]
        else:
            node = dict(children_of(node) or ())[key]
    return node


def pass_through(tie: Tie, found: Any) -> Any:
    """Return the value at a tied path, from that at the source."""
    # A part of a model has None there.
    if tie.through is None or found is None:
        return found
    return mapped(tie.through, found.ndim - tie.rank)(found)


def computed_once(node: Any, values: dict[str, Any]) -> Any:
    """Return an instance with the values of fields that were read, so that none is read again."""
    _, (split, notes, *_) = flat_of(node)
    rest = [tie for tie in notes.ties if tie.place[1:] or tie.place[0].name not in values]
    stored_now = {**all_stored(node), **values}
    return schema_of(node).make(stored_now, split.config, notes._replace(ties=tuple(rest)))


# ---- computed leaves


def evaluate(node: Any, where: str) -> Any:
    """Return the value of a computed leaf; for abstract arrays, its shape and dtype.

    Args:
        node: the leaf.
        where: the attribute that is read, for errors.

    Raises:
        ShapeError: if its arrays have other ranks than when it was made: they are of several
            models, or it is a part of a model, or of derivatives.
        FieldError: if `value()` does not return an array.
    """
    kind, leaves = class_of(node).__qualname__, jtu.tree_leaves(node)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        return evaluate_each(node, where)
    ranks, now = notes_of(node).ranks, ranks_of(leaves)
    if is_derivative(node) or (ranks is not None and len(now) != len(ranks)):
        fact = f"{where}: gradients and parts of a model have no computed values ({kind})"
        raise ShapeError(fact, hint='pm.named_leaves(grads)["weight.a"]')
    if ranks is not None and now != ranks:
        expected = f"arrays of ranks {ranks}, as when {kind} was made"
        hint = "pm.filter_vmap(lambda m, x: m(x), in_axes=(0, None))(models, x)"
        raise ShapeError(where, expected, f"ranks {now}: of several models at once", hint=hint)
    try:
        value: Any = node.value()
    except AttributeError as error:
        # Python would take it for an error of the field itself, and ask `__getattr__`.
        raise FieldError(f"{where}: {kind}.value() raised: {error}") from error
    if not is_array(value):
        raise FieldError(f"{where}: {kind}.value() returned no array, but {describe(value)}")
    return value


def evaluate_each(node: Any, where: str) -> Any:
    """The value of a computed leaf; with leading axes of several at once, one value for each."""
    leaves, treedef = jtu.tree_flatten(node)

    def value(arrays: list[Any]) -> Any:
        # A Python number is the same for all.
        pairs = zip(arrays, leaves, strict=True)
        return evaluate(treedef.unflatten([x if a is None else a for a, x in pairs]), where)

    each = mapped(value, stacked_axes(node))
    arrays = [leaf if is_abstract(leaf) else None for leaf in leaves]
    is_of_shapes = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    return jax.eval_shape(each, arrays) if is_of_shapes else each(arrays)


def ranks_of(tree: Any) -> tuple[int, ...]:
    """Return the number of axes of each leaf; 0 for a number."""
    return tuple([getattr(leaf, "ndim", 0) for leaf in jtu.tree_leaves(tree)])


def stacked_axes(node: Any) -> int:
    """Return the number of axes that every array of a computed leaf has gained since it was made.

    That is how often it was mapped or stacked; 0 if only some arrays have gained axes.
    """
    ranks, leaves = notes_of(node).ranks, jtu.tree_leaves(node)
    if ranks is None or len(ranks) != len(leaves):
        return 0
    pairs = zip(leaves, ranks, strict=True)
    more = {leaf.ndim - rank for leaf, rank in pairs if is_abstract(leaf)}
    return max(more.pop(), 0) if len(more) == 1 else 0


def shape_of_one(node: Any) -> tuple[int, ...] | None:
    """Return the shape of a computed leaf's value in one layer; None if it has none (a mask)."""
    try:
        shape = jax.eval_shape(lambda: evaluate_each(node, "value")).shape
    except (TypeError, ValueError, AttributeError):
        return None
    return tuple(shape[stacked_axes(node) :])


def mapped(fn: Callable[..., Any], axes: int) -> Callable[..., Any]:
    """Map a function over so many leading axes of its arguments."""
    for _ in range(axes):
        fn = jax.vmap(fn)
    return fn
