"""Ties: one path of a model has its value from another.

A tie is structure. The tied field has a `Tied`, a node without leaves that names the source.
The lowest Module above both has the tie as configuration, and reading its field gives the node with
the value (see [`reading`][pytreemod.module.reading]).
So there is one leaf: one gradient, which is the sum, one optimizer state, one array in a file.
JAX's flattening preserves the tie; nothing is looked up by identity.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NoReturn, TypeVar

import jax

from pytreemod.errors import ArgumentError, ShapeError, SpecError, describe
from pytreemod.module.classes import Module
from pytreemod.module.computed_leaves import Computed
from pytreemod.module.constrained_leaves import Constrained
from pytreemod.module.construction import put_together, with_notes
from pytreemod.module.fields import field
from pytreemod.module.reading import (
    ASKED,
    MADE,
    TIES,
    AbstractAsked,
    Made,
    Tie,
    Ties,
    evaluate_each,
    follow,
    is_computed,
    leaf_shape,
    made_of,
    refuse_tied_place,
    ties_of,
)
from pytreemod.tree.kinds import are_one
from pytreemod.tree.locating import Target, locate
from pytreemod.tree.members import count_member_axes
from pytreemod.tree.nodes import children_of, found_in, record_of
from pytreemod.tree.paths import path_text
from pytreemod.tree.pending import is_being_built
from pytreemod.tree.predicates import is_abstract, is_array
from pytreemod.tree.renewing import with_new_containers
from pytreemod.tree.stored_fields import stored
from pytreemod.tree.surgery import replace_at, with_children
from pytreemod.typing import KeyPath, Where, class_of, jtu

_M = TypeVar("_M", bound=Module)
_T = TypeVar("_T")


def tie(
    model: _M, place: str | Where, to: str | Where, *, through: Callable[[Any], Any] | None = None
) -> _M:
    """Tie one path of a model to another, so that both have one value.

    There is one leaf, one gradient (the sum of both uses), one optimizer state, one array in a
    file. Reading `model.head.weight` gives the value at `model.embed.weight`, in every transform. A
    submodule that is taken out of the model has the value, untied. A layer may be tied, with its
    tokens: both paths then use one entry of the State.

    **Inside a class.** `pm.tie(self, "head.weight", to="embed.weight")` in `__init__` or
    `__post_init__`, where `self` is not finished, notes the tie. It is made when construction ends
    (or, for a model with sizes that follow, by [`materialize`][pytreemod.materialize]).

    **Form.** `model.head` has at `weight` a node without leaves. The lowest Module above both
    paths stores the tie as configuration. It survives jit, vmap, scan, `tree_at`, `Stack`, copies,
    pickles and files.

    **Cost.** Each tie makes a new model, which takes time in proportion to the number of its nodes
    and ties: a thousand ties take a thousand times that. Reading a field takes time in proportion
    to the ties inside it. Reading a list of tied layers makes a new list each time, so read it once
    before a loop.

    **Laws.** `untie(tie(m, a, b))` reads as `tie(m, a, b)` does. The gradient at the source is the
    sum of the gradients at all tied paths. A chain of ties has the value at its end.

    Args:
        model: a Module; in its `__init__`, `self`.
        place: the node to tie: a path (`"head.weight"`; a pattern ties every
            node that it matches), or a function that picks nodes, as for `tree_at`.
        to: the source of its value: one node, chosen in the same way.
        through: a function of the array at the source that returns the array at the tied path
            (`jnp.transpose`); it is computed when that is read, never by unflattening. If both
            are in layers of a `Stack` or `Ensemble`, it gets one layer's array.

    Returns:
        A new model; in `__init__`, `self`.

    Raises:
        SpecError: if it is called in `__check_init__`, where `self` can no longer change.
        SpecError: if a path is not in the model, or is tied already. Or one path contains the
            other; ties form a circle; there is no Module above both; only one of the two is
            constrained; or their layers have different configuration.
        ShapeError: if the source does not have the shape, or the structure, of the tied node.
        ArgumentError: if `through` cannot be called, or is given for a layer.

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
    if through is not None and not callable(through):
        raise ArgumentError("tie(through)", "a function of an array", describe(through))
    if record_of(model) is not None and _notes(model, (place, to, through)):
        return model
    model = with_new_containers(model)
    sources = locate(to, model, None, "tie(to)").targets
    if len(sources) != 1:
        names = ", ".join(path_text(target.path) for target in sources) or "none"
        raise SpecError("tie(to)", "one node", f"{len(sources)}: {names}")
    tied: Any = model
    for target in locate(place, model, None, "tie(place)").targets:
        tied = _tie_one(tied, target, sources[0], through)
    return tied


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
        SpecError: if the ties of the model are not made yet.

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> mlp = pm.nn.MLP(2, 2, 2, 2, key=jax.random.key(0))
        >>> tied = pm.tie(mlp, "layers[1].weight", to="layers[0].weight")
        >>> len(jax.tree.leaves(tied)), len(jax.tree.leaves(pm.untie(tied)))
        (5, 6)
    """
    if record_of(model) is not None and _asked_of(model):
        cls = class_of(model).__qualname__
        raise SpecError(
            f"untie({cls})",
            "a finished model, because ties are made when construction ends",
            "a model under construction",
            hint=["decide where you tie:", "if is_tied:", "    pm.tie(self, ...)"],
        )
    model = with_new_containers(model)
    if place is None:
        return _untied(model, None, ())
    targets = locate(place, model, None, "untie(place)").targets
    for target in targets:
        if not _is_tied(target.node):
            expected = "a tied path"
            text = path_text(target.path)
            tied = [path_text(path) for path, _ in found_in(model, _is_tied)]
            known = ", ".join(tied) or "none"
            hint = f"the tied paths are: {known}"
            raise SpecError("untie(place)", expected, f"{text}, which is not tied", hint=hint)
    return _untied(model, {target.path for target in targets}, ())


class Tied(Module):
    """The node at a tied path: it has no leaves.

    Its fields describe the tie completely.
    """

    to: str = field(static=True)
    through: Callable[[Any], Any] | None = field(static=True)
    # The number of keys between the node that has the tie and this one.
    depth: int = field(static=True)

    __is_hole__: ClassVar[bool] = True

    def __getattr__(self, name: str) -> Any:
        # Python and JAX look up dunder names.
        if name.startswith("__"):
            raise AttributeError(name)
        raise SpecError(
            f"a path that is tied to {self.to}",
            "access at its source",
            f"{name!r} of the tied path",
            hint=["edit the source:", f"pm.tree_at({self.to + '.' + name!r}, model, new)"],
        )


class Through(Computed):
    """The value at a path that is tied through a function."""

    fn: Callable[[Any], Any]
    source: Any

    def value(self) -> Any:
        """Return the result of the function for the value at the source."""
        return self.fn(self.source)


class _Functional(Tie):
    """A tie through a function, with the shapes of its result when it was made."""

    __slots__ = ("made", "through")

    def __init__(self, place: KeyPath, source: KeyPath, through: Callable[[Any], Any], made: Made):
        super().__init__(place, source)
        self.through, self.made = through, made

    def parts(self) -> tuple[Any, ...]:
        return *super().parts(), self.through, self.made

    def stand_in(self, node: Any) -> Any:
        made = self.made
        if is_computed(node):
            # The source may have become computed, or no longer be: it checks its own arrays.
            made = Made(made_of(node).leaves, made.shape)
        # Bypass its construction, which would trace the function each time.
        values = {"fn": self.through, "source": node, MADE: made}
        return put_together(Through, values, ("fn",))


def _tie_of(
    place: KeyPath, source: KeyPath, through: Callable[[Any], Any] | None, made: Made | None
) -> Tie:
    if through is None or made is None:
        return Tie(place, source)
    return _Functional(place, source, through, made)


class _Asked(AbstractAsked):
    def tied(self, node: Any) -> Any:
        for place, to, through in self:
            node = tie(node, place, to, through=through)
        return node


def _notes(model: Any, asked: tuple[Any, Any, Any]) -> bool:
    """Whether the `__init__` of an instance is calling `tie`, which then notes the tie.

    Raises:
        SpecError: if `__check_init__` is calling it, and cannot return the new model.
    """
    caller = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]  (public in effect)
    if not is_being_built(model):
        if _is_method_of(caller, model, ("__check_init__",)):
            cls = class_of(model).__qualname__
            raise SpecError(
                f"{cls}.__check_init__",
                "no tie, because the instance is finished",
                "pm.tie(self, ...), which returns a new instance",
                hint=[
                    "tie it in __init__, or in __post_init__ if the class has no __init__:",
                    "def __post_init__(self):",
                    f"    pm.tie(self, {asked[0]!r}, to={asked[1]!r})",
                ],
            )
        return False
    while caller is not None:
        if _is_method_of(caller, model, ("__init__", "__post_init__")):
            values = model.__stored__
            values[ASKED] = _Asked((*values.get(ASKED, ()), asked))
            return True
        caller = caller.f_back
    # It was built by hand.
    return False


def _asked_of(model: Any) -> Any:
    """Return the ties that the `__init__` of an instance has asked for, while none is made."""
    return model.__stored__.get(ASKED)


def _is_method_of(frame: Any, node: Any, names: tuple[str, ...]) -> bool:
    """Whether a frame runs a method with one of these names, called for this instance."""
    code = frame.f_code
    return code.co_name in names and frame.f_locals.get(code.co_varnames[0]) is node


def _tie_one(
    model: Any, target: Target, source: Target, through: Callable[[Any], Any] | None
) -> Any:
    place, origin = target.path, source.path
    for i in range(len(place)):
        for known in ties_of(node_at(model, place[:i])):
            inside: KeyPath = (*place[:i], *known.place)
            if inside[: len(place)] == place:
                refuse_tied_place(Tie(inside, (*place[:i], *known.source)))
    shared = _common(place, origin)
    if shared in (place, origin):
        _refuse_nested(place, origin)
    count = _keeper_depth(model, shared)
    if count is None:
        raise SpecError(
            "tie",
            "a Module above both paths, to store the tie",
            f"{describe(model)}",
            at=[path_text(place), path_text(origin)],
            hint=["put both into a Module:", "class Pair(pm.Module): ..."],
        )
    new = follow(model, origin)
    axes = _member_axes(model, place[:count])
    made = _check_fit(target.node, new, through, path_text(place), path_text(origin), axes)
    below, from_here = place[count:], origin[count:]
    new_tie = _tie_of(below, from_here, through, made)
    hole = Tied(path_text(from_here), through, len(below))
    node = node_at(model, place[:count])
    keeper = _with_ties(node, [(below, hole)], (*ties_of(node), new_tie))
    tied = replace_at(model, [(place[:count], keeper)])
    # Raises an error if the ties form a circle.
    follow(tied, place)
    return tied


def _common(one: KeyPath, other: KeyPath) -> KeyPath:
    pairs = zip(one, other, strict=False)
    count = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
    return one[:count]


def _keeper_depth(model: Any, shared: KeyPath) -> int | None:
    """Return the length of the path to the lowest Module on a path."""
    above = (i for i in range(len(shared) + 1) if record_of(node_at(model, shared[:i])) is not None)
    return max(above, default=None)


def node_at(node: Any, path: KeyPath) -> Any:
    """Return the stored value at a path."""
    for key in path:
        node = dict(children_of(node) or ())[key]
    return node


def _member_axes(model: Any, keeper: KeyPath) -> int:
    """Return the number of leading layer axes below a keeper.

    There, `through` gets the array of one layer, because the keeper in each layer has the tie.
    """
    nodes = [node_at(model, keeper[:i]) for i in range(len(keeper))]
    return count_member_axes(nodes, keeper)


def _check_fit(
    old: Any, new: Any, through: Callable[[Any], Any] | None, place: str, origin: str, axes: int
) -> Made | None:
    """Refuse a source that does not fit; return the shapes of a tie through a function."""
    if through is not None:
        if not (is_array(new) or is_computed(new)):
            expected = "an array at the source, because through is given"
            raise ArgumentError("tie(through)", expected, f"{origin}: {describe(new)}")
        old, made = _one_of(old, axes), _made_through(through, _one_of(new, axes))
        if _Parts(old).shapes != {"": made.shape}:
            found = f"{made.shape} after {getattr(through, '__name__', 'through')}"
            _refuse_misfit(place, origin, _shown(old), found)
        return made
    mine, others = _Parts(untie(old)), _Parts(untie(new))
    if mine.shapes != others.shapes:
        hint = _hint_of_misfit(place, origin, mine.shapes, others.shapes)
        _refuse_misfit(place, origin, _shown(old), _shown(new), hint)
    for path, constraint in mine.bounds.items():
        found = others.bounds.get(path)
        if found != constraint:
            raise SpecError(
                "tie",
                f"a source that is {constraint!r}, like {_inside(place, path)}",
                f"a source that is {'unconstrained' if found is None else repr(found)}",
                at=[origin],
                hint=[
                    "tie in the other direction, or pass a function into the other's bounds:",
                    f"pm.tie(model, {origin!r}, to={place!r})",
                    f"pm.tie(model, {place!r}, to={origin!r}, through=jnp.exp)",
                ],
            )
    for path, value in mine.config.items():
        other = others.config.get(path, value)
        if not _may_be_one(value, other):
            array = next(iter(mine.shapes), "")
            raise SpecError(
                "tie",
                f"a source with the configuration of {place}",
                f"{describe(value)} at {_inside(place, path)}, and {describe(other)} at "
                f"{_inside(origin, path)}",
                hint=[
                    "tie only the arrays:",
                    f"pm.tie(model, {_inside(place, array)!r}, to={_inside(origin, array)!r})",
                ],
            )
    return None


class _Parts:
    """The values to read below a node, by path: shapes of arrays, their bounds, configuration."""

    def __init__(self, node: Any):
        self.shapes: dict[str, Any] = {}
        self.bounds: dict[str, Any] = {}
        self.config: dict[str, Any] = {}
        self._add(node, ())

    def _add(self, node: Any, path: KeyPath) -> None:
        children = children_of(node)
        if children is None or is_computed(node):
            name = path_text(path) if path else ""
            self.shapes[name] = made_of(node).shape if is_computed(node) else leaf_shape(node)
            if isinstance(node, Constrained):
                self.bounds[name] = node.constraint
            return
        record = record_of(node)
        # A token is identified by its path, which differs between the two.
        if record is not None and not hasattr(class_of(node), "__is_token__"):
            data = {key.name for key, _ in children}
            for name in record.names(node):
                if name not in data:
                    self.config[path_text((*path, jtu.GetAttrKey(name)))] = stored(node, name)
        for key, child in children:
            self._add(child, (*path, key))


def _one_of(node: Any, axes: int) -> Any:
    """Return the shapes of a single layer, from those of arrays with layer axes."""

    def one(leaf: Any) -> Any:
        shape = leaf_shape(leaf)[axes:]
        return jax.ShapeDtypeStruct(shape, leaf.dtype) if hasattr(leaf, "shape") else leaf

    return jtu.tree_map(one, node) if axes else node


def _made_through(through: Callable[[Any], Any], source: Any) -> Made:
    """Return the shapes of a function's result, as a computed leaf with a single array."""
    given: Any = put_together(Through, {"fn": through, "source": source}, ("fn",))
    shape = made_of(source).shape if is_computed(source) else leaf_shape(source)
    return Made(None if shape is None else (shape,), made_of(given).shape)


def _inside(node: str, path: str) -> str:
    return f"{node}{'' if path.startswith('[') else '.'}{path}" if path else node


def _may_be_one(a: Any, b: Any) -> bool:
    """Whether two values may be equal; for those that compare by identity, nearly always.

    A layer may make a function in its `__init__`: that of another layer is another object.
    """
    kind = class_of(a)
    if are_one(a, b):
        return True
    if kind is not class_of(b) or kind.__eq__ is not object.__eq__ or isinstance(a, type):
        return False
    names = ("__module__", "__qualname__", "__code__", "func", "args", "keywords")
    return all(_may_be_one(getattr(a, name, None), getattr(b, name, None)) for name in names)


def _shown(node: Any) -> str:
    if is_abstract(node):
        return describe(node)
    return ", ".join(f"{name} {shape}" for name, shape in _Parts(node).shapes.items())


def _hint_of_misfit(place: str, origin: str, mine: dict[str, Any], others: dict[str, Any]) -> str:
    """Return the tie that was meant where one of the two is a layer: that of its arrays."""
    for one, shape in mine.items():
        for other, found in others.items():
            if shape == found and (one == other or not one or not other):
                return f"pm.tie(model, {_inside(place, one)!r}, to={_inside(origin, other)!r})"
    return f"pm.tie(model, {place!r}, to={origin!r}, through=f)"


def _refuse_misfit(place: str, origin: str, old: str, new: str, hint: str = "") -> NoReturn:
    raise ShapeError(
        f"tie of {place} to {origin}", old or "no array", new or "no array", hint=hint or ()
    )


def _refuse_nested(place: KeyPath, origin: KeyPath) -> NoReturn:
    what = "itself" if place == origin else "a node inside the other"
    raise SpecError(
        "tie",
        "two paths, neither of which contains the other",
        f"a tie of {path_text(place)} to {what}",
        at=dict.fromkeys([path_text(place), path_text(origin)]),
    )


# ---- Modules with ties


def _with_ties(node: Any, changes: Iterable[tuple[KeyPath, Any]], ties: Iterable[Tie]) -> Any:
    """Return a record with changes at tied paths, and with these ties."""
    fields: dict[str, Any] = {}
    for path, new in changes:
        name = path[0].name
        fields[name] = replace_at(fields.get(name, stored(node, name)), [(path[1:], new)])
    return with_notes(node, {TIES: Ties(ties)}, fields)


def _without_ties(node: Any, ties: tuple[Tie, ...]) -> Any:
    """Return a record with values at the tied paths of some of its ties."""
    found = [(tie.place, _value_at(node, tie.place)) for tie in ties]
    gone = {tie.place for tie in ties}
    return _with_ties(node, found, (tie for tie in ties_of(node) if tie.place not in gone))


def _value_at(node: Any, place: KeyPath) -> Any:
    """Return the value read at a tied path; for a tie through a function, its array."""
    found = follow(node, place)
    return evaluate_each(found, path_text(place)) if isinstance(found, Through) else found


def _untied(node: Any, chosen: set[KeyPath] | None, path: KeyPath) -> Any:
    """A tree without the ties of some paths, from the top, because a tie may reach far down."""
    ties = tuple(t for t in ties_of(node) if chosen is None or (*path, *t.place) in chosen)
    if ties:
        node = _without_ties(node, ties)
    children = children_of(node) or []
    parts = [_untied(child, chosen, (*path, key)) for key, child in children]
    return with_children(node, children, parts)


def _is_tied(node: Any) -> bool:
    return isinstance(node, Tied)
