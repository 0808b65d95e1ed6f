"""Ties: one path of a model has its value from another.

A tied place stores None, and the lowest Module above both places knows the tie, as a part of its
structure: a [`Tie`][pytreemod.module.reading.Tie] with both paths. Reading the field follows it. So
there is one leaf: one gradient, which is the sum, one optimizer state, one array in a file. JAX's
flattening preserves the tie; nothing is looked up by identity.

`resolve` puts arrays in the place of ties and computed leaves.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax

from pytreemod.errors import ShapeError, SpecError
from pytreemod.module.constrained_leaves import Constrained
from pytreemod.module.reading import Tie, evaluate_each, follow, is_computed, mapped, pass_through
from pytreemod.tree.instances import (
    is_finished,
    is_module,
    notes_of,
    reading_stored,
    stored,
    with_notes,
)
from pytreemod.tree.locating import locate
from pytreemod.tree.members import count_member_axes
from pytreemod.tree.nodes import all_ties, locations, tied_paths, with_children, with_new_containers
from pytreemod.tree.paths import path_text
from pytreemod.tree.selecting import as_selector
from pytreemod.tree.surgery import refuse_tied, replace_at
from pytreemod.typing import KeyPath, Where, class_of, jtu

_M = TypeVar("_M")
_T = TypeVar("_T")


def tie(
    model: _M, place: str | Where, to: str | Where, *, through: Callable[[Any], Any] | None = None
) -> _M:
    """Tie one path of a model to another, so that both have one value.

    There is one leaf, one gradient (the sum of both uses), one optimizer state, one array in a
    file. Reading `model.head.weight` gives the value at `model.embed.weight`, in every transform. A
    submodule that is taken out of the model has the value, untied. A layer may be tied, with its
    tokens: both paths then use one entry of the State.

    **Form.** At the tied path the tree has None. The lowest Module above both paths knows the tie,
    as a part of its structure. It survives jit, vmap, scan, `tree_at`, `Stack`, copies, pickles and
    files. Tie the finished model, not `self` in `__init__`.

    **Cost.** Each tie makes a new model, which takes time in proportion to the number of its nodes
    and ties: a thousand ties take a thousand times that. Reading a field takes time in proportion
    to the ties inside it. Reading a list of tied layers makes a new list each time, so read it once
    before a loop.

    **Laws.** `untie(tie(m, a, b))` reads as `tie(m, a, b)` does. The gradient at the source is the
    sum of the gradients at all tied paths.

    Args:
        model: a finished Module.
        place: the node to tie: a path (`"head.weight"`; a pattern ties every
            node that it matches), or a function that picks nodes, as for `tree_at`.
        to: the source of its value: one node, chosen in the same way.
        through: a function of the array at the source that returns the array at the tied path
            (`jnp.transpose`); it is computed when that is read, never by unflattening. If both
            are in layers of a `Stack` or `Ensemble`, it gets one layer's array.

    Returns:
        A new model.

    Raises:
        SpecError: if the model is still being built, or a path is tied already.
        SpecError: if a path is not in the model; one path contains the other; there is no Module
            above both; or only one of the two is constrained.
        ShapeError: if the source does not have the shape, or the structure, of the tied node.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import pytreemod as pm
        >>> class Model(pm.Module):
        ...     embed: pm.nn.Embedding
        ...     head: pm.nn.Linear
        >>> k1, k2 = jax.random.split(jax.random.key(0))
        >>> model = Model(pm.nn.Embedding(5, 3, key=k1), pm.nn.Linear(3, 5, key=k2))
        >>> model = pm.tie(model, "head.weight", to="embed.weight")
        >>> model.head.weight is model.embed.weight
        True
        >>> sorted(pm.named_leaves(model))
        ['embed.weight', 'head.bias']
        >>> pm.tree_at("embed.weight", model, jnp.ones((5, 3))).head.weight.sum()
        Array(15., dtype=float32)

    Source:
        Tying the output matrix to the embedding: Press & Wolf 2017, "Using the Output Embedding to
        Improve Language Models".
    """
    if is_module(model) and not is_finished(model):
        hint = f"model = pm.tie({type(model).__name__}(...), {place!r}, to={to!r})"
        raise SpecError("tie returns a new model: `self` is still being built", hint=hint)
    model = with_new_containers(model)
    sources = locate(to, model, None, "tie(to)").targets
    if len(sources) != 1:
        shown = ", ".join(path_text(target.path) for target in sources)
        raise SpecError("tie(to)", "one node", shown or "none")
    for target in locate(place, model, None, "tie(place)").targets:
        model = _tied(model, target.path, sources[0].path, through)
    return model


def _tied(model: Any, place: KeyPath, source: KeyPath, through: Callable[[Any], Any] | None) -> Any:
    where = f"tie of {path_text(place)} to {path_text(source)}"
    shared = _count_shared(place, source)
    if shared in (len(place), len(source)):
        raise SpecError(f"{where}: one contains the other")
    for path, known in all_ties(model):
        if _is_within(path, place):
            continue  # It goes with the node that keeps it.
        there, from_there = (*path, *known.place), (*path, *known.source)
        # Chains of ties, and circles, start with one of these. A tie that lies inside the source of
        # another one as a whole is no chain.
        is_chain = _is_within(source, there) or _is_within(from_there, place)
        is_partly = _is_within(there, source) and not _is_within(from_there, source)
        is_partly |= _is_within(place, from_there) and not _is_within(source, from_there)
        is_tied = _is_within(place, there) or _is_within(there, place)
        if is_tied or is_chain or is_partly:
            refuse_tied(there, from_there)
    above = [i for i in range(shared + 1) if is_module(_node_at(model, place[:i]))]
    if not above:
        fact = f"{where}: a Module above both must keep the tie"
        raise SpecError(fact, hint="class Pair(pm.Module): ...")
    depth = above[-1]
    axes = count_member_axes([_node_at(model, place[:i]) for i in range(depth)], place[:depth])
    inner = [tie for path, tie in all_ties(model) if _is_within((*path, *tie.place), source)]
    origin = _node_at(untie(model) if inner else model, source)
    rank = _check_fit(_node_at(model, place), origin, through, axes, where)
    keeper = replace_at(_node_at(model, place[:depth]), [(place[depth:], None)])
    new = Tie(place[depth:], source[depth:], through, rank)
    keeper = with_notes(keeper, ties=(*notes_of(keeper).ties, new))
    return replace_at(model, [(place[:depth], keeper)])


def _count_shared(one: KeyPath, other: KeyPath) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _is_within(inner: KeyPath, outer: KeyPath) -> bool:
    return inner[: len(outer)] == outer


def _node_at(node: Any, path: KeyPath) -> Any:
    with reading_stored():
        return follow(node, path, is_evaluated=False)


def _check_fit(
    old: Any, new: Any, through: Callable[[Any], Any] | None, axes: int, where: str
) -> int:
    """Refuse a source that does not fit a place; return its rank in one layer, for `through`."""
    forms = [_form_of(untie(old)), _form_of(untie(new))]
    rank = 0
    if through is not None:
        array = jax.eval_shape(lambda: evaluate_each(new, where)) if is_computed(new) else new
        result = jax.eval_shape(mapped(through, axes), array)
        forms = [{"": forms[0].get("", (None,))[:1]}, {"": (tuple(result.shape),)}]
        rank = array.ndim - axes
    if forms[0] != {path: found[: len(forms[0].get(path, ()))] for path, found in forms[1].items()}:
        texts = [", ".join(" ".join(map(str, (n, *x))) for n, x in form.items()) for form in forms]
        raise ShapeError(where, *[x.strip() or "no array" for x in texts], hint=_THROUGH)
    return rank


_THROUGH = "pm.tie(model, place, to=source, through=f)"


def _form_of(node: Any) -> dict[str, tuple[Any, ...]]:
    """Return what is read below a node, by path: shapes, and the constraints of arrays."""
    form: dict[str, tuple[Any, ...]] = {}
    for path, leaf in jtu.tree_leaves_with_path(node, is_leaf=is_computed):
        value: Any = leaf
        if is_computed(leaf):
            value = jax.eval_shape(ft.partial(evaluate_each, where="tie"), leaf)
        bound = (leaf.constraint,) if isinstance(leaf, Constrained) else ()
        shape: tuple[int, ...] = tuple(getattr(value, "shape", ()))
        form[path_text(path) if path else ""] = (shape, *bound)
    return form


def untie(model: _T, place: str | Where | None = None) -> _T:
    """Give tied paths of a model their own values again.

    They read as before; from now on each is a leaf with its own gradient.

    Args:
        model: any tree.
        place: the tied paths, as for [`tie`][pytreemod.tie]; all of them by default.

    Returns:
        A new tree.

    Raises:
        SpecError: if a path is not tied.

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> mlp = pm.nn.MLP(2, 2, 2, 2, key=jax.random.key(0))
        >>> tied = pm.tie(mlp, "layers[1].weight", to="layers[0].weight")
        >>> len(jax.tree.leaves(tied)), len(jax.tree.leaves(pm.untie(tied)))
        (5, 6)
    """
    model = with_new_containers(model)
    known = tied_paths(model)
    if place is None:
        return _untied(model, None, ()) if known else model
    chosen = {target.path for target in locate(place, model, None, "untie(place)").targets}
    if not chosen <= known.keys():
        shown = ", ".join(map(path_text, known)) or "none"
        raise SpecError("untie(place)", f"a tied path, of {shown}", f"{place!r}")
    return _untied(model, chosen, ())


def _untied(node: Any, chosen: set[KeyPath] | None, path: KeyPath) -> Any:
    """A tree without the ties of some paths, from the top, because a tie may reach far down."""
    ties = () if not is_module(node) else notes_of(node).ties
    gone = [tie for tie in ties if chosen is None or (*path, *tie.place) in chosen]
    if gone:
        values = [(tie.place, value) for tie, value in _values_of(node, gone)]
        left = {*ties}.difference(gone)
        node = with_notes(node, ties=tuple(tie for tie in ties if tie in left))
        node = replace_at(node, values)
    return with_children(node, lambda key, child: _untied(child, chosen, (*path, key)))


def _values_of(node: Any, ties: list[Tie]) -> Iterator[tuple[Tie, Any]]:
    """Yield the values at tied paths; a computed leaf is the value itself, without a function."""
    read: dict[str, Any] = {}
    for tie in ties:
        first, *rest = tie.source
        path, within = tie.source, node
        if rest and not is_computed(stored(node, first.name)):
            # Once for all ties, because reading a field follows all of them.
            if first.name not in read:
                read[first.name] = getattr(node, first.name)
            path, within = tuple(rest), read[first.name]
        found = follow(within, path, is_evaluated=tie.through is not None)
        yield tie, with_new_containers(pass_through(tie, found))


def resolve(model: _T, selector: Any = ...) -> _T:
    """Replace computed leaves by arrays.

    Use it before a loop that uses a model many times, or to merge an update into its base for good.

    **Laws.** The result reads as the model does. `resolve(resolve(m))` equals `resolve(m)`.
    `resolve` of models that were made at once (by `filter_vmap`, in a `Stack`) equals the resolved
    models, stacked. With no selector, ties are resolved as well: tied paths get their own leaves.

    Args:
        model: any tree.
        selector: picks the computed leaves, by any part of them; all of them by default.

    Returns:
        A new tree; the model itself if there is nothing to compute.

    Raises:
        SpecError: if the selector matches nothing.
        ShapeError: if a computed leaf cannot be read: see [`Computed`][pytreemod.Computed].

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import pytreemod as pm
        >>> linear = pm.nn.Linear(2, 2, key=jax.random.key(0))
        >>> half = linear.replace(weight=pm.computed(jnp.multiply, linear.weight, 0.5))
        >>> pm.resolve(half)
        Linear(weight=f32[2,2], bias=f32[2], in_features=2, out_features=2)
    """
    model = with_new_containers(model)
    if selector is ...:
        return _resolved(untie(model), None, ())
    locs = list(locations(model))
    picked = as_selector(selector).mask(model)
    return _resolved(model, [loc.path for loc, hit in zip(locs, picked, strict=True) if hit], ())


def _resolved(node: Any, picked: list[KeyPath] | None, path: KeyPath) -> Any:
    if is_computed(node):
        is_meant = picked is None or any(leaf[: len(path)] == path for leaf in picked)
        where = path_text(path) if path else class_of(node).__qualname__
        return evaluate_each(node, where) if is_meant else node
    return with_children(node, lambda key, child: _resolved(child, picked, (*path, key)))
