"""Transformations of gradients that see each layer, and each member, as if it stood alone.

`Stack` and `Ensemble` hold several arrays as one. A transformation that looks at more than single
numbers (the norm of an array, a matrix) would take them for one array. Here it is shown what it
would be shown if layers stood in a list, and members were models of their own:

1. Where the program of the transformation does the same to both, it is called as it is.
2. Where it looks at each array by itself, it is called once, mapped over the layers.
3. Otherwise, and only then, the layers are put into a list, and the program grows with them.

Members are always mapped over. What is kept has the form of the model, whichever it is: an axis of
layers in it is where the model has one.
"""

from __future__ import annotations

import functools as ft
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, NoReturn

import jax
import jax.numpy as jnp

from pytreemod.errors import ArgumentError, explain
from pytreemod.training.rule_programs import (
    SHARED,
    Mark,
    Unfit,
    are_alike,
    flow,
    is_by_number,
    is_by_number_or_whole,
    is_complete,
    is_random,
    joined,
    whole_flow,
)
from pytreemod.tree.members import Hold, axes_left_out, holds_of, without_axes
from pytreemod.tree.nodes import places
from pytreemod.typing import KeyPath, PyTree, jtu


class PerLayer(NamedTuple):
    """A transformation of optax's, as `per_layer` makes one of another.

    Attributes:
        init: makes the state from parameters.
        update: gives updates and the new state.
    """

    init: Callable[[PyTree], Any]
    update: Callable[..., tuple[Any, Any]]


def per_layer(rule: Any) -> PerLayer:
    """A transformation of optax's that sees each layer and each member as if it stood alone.

    [`Optimizer`][pytreemod.Optimizer] does so by itself; this is for plain optax. On a model with a
    [`Stack`][pytreemod.nn.Stack] it gives what `rule` gives on the model with a list in its place;
    on an [`Ensemble`][pytreemod.nn.Ensemble], what it gives on each member alone. What the members
    share, and what stands outside of them, is a model of its own.

    Args:
        rule: has `init` and `update`, such as `optax.lamb(1e-3)`.

    Returns:
        A transformation. It takes the extra arguments that `rule` takes.

    Raises:
        ArgumentError: when it is used: `rule` cannot be mapped over layers or members.

    Examples:
        >>> import jax, optax
        >>> import pytreemod as pm
        >>> from pytreemod import nn
        >>> stack = nn.Stack(lambda key: nn.Linear(3, 3, key=key), 4, key=jax.random.key(0))
        >>> tx = pm.per_layer(optax.lars(1e-3))
        >>> state = tx.init(stack)
        >>> updates, state = tx.update(jax.tree.map(jax.numpy.ones_like, stack), state, stack)
    """

    def init(params: PyTree) -> Any:
        form = _form_of(rule, params)
        return _called(rule, form, lambda: form.init(params))

    @ft.wraps(rule.update)
    def update(updates: PyTree, state: Any, params: PyTree = None, **extra: Any) -> Any:
        form = _form_of(rule, updates if params is None else params)
        return _called(rule, form, lambda: form.update(updates, state, params, extra))

    return PerLayer(init, update)


# ---- what is known of a tree


class _Leaf(NamedTuple):
    """A leaf of parameters: what holds it, and its shape.

    Attributes:
        holds: its leading axes of layers and members.
        members: how many of them lead to the innermost members, and are mapped over.
    """

    holds: tuple[Hold, ...]
    members: int

    @property
    def layers(self) -> tuple[Hold, ...]:
        return self.holds[self.members :]


def _leaves_of(tree: PyTree) -> list[_Leaf]:
    leaves: list[_Leaf] = []
    for spot in places(tree):
        holds = tuple(holds_of(spot))
        last = max((i for i, hold in enumerate(holds) if hold.is_independent), default=-1)
        leaves.append(_Leaf(holds, last + 1))
    return leaves


def _bare(leaf: Any, axes: int) -> Any:
    """What one layer's array is, without some leading axes."""
    return jax.ShapeDtypeStruct(jnp.shape(leaf)[axes:], jnp.result_type(leaf))


def _abstract(tree: PyTree) -> PyTree:
    return jtu.tree_map(lambda leaf: _bare(leaf, 0), tree)


# ---- layers in a list


@jtu.register_pytree_with_keys_class
class _Layers:
    """Layers in a list, in the place of what holds them as one."""

    def __init__(self, items: Sequence[Any]):
        self.items = tuple(items)

    def tree_flatten_with_keys(self) -> Any:
        return [(jtu.SequenceKey(i), item) for i, item in enumerate(self.items)], None

    @classmethod
    def tree_unflatten(cls, aux: None, children: Any) -> _Layers:
        return cls(children)


def _is_layers(node: Any) -> bool:
    return isinstance(node, _Layers)


def _listed(tree: PyTree, axis: int = 0, copies: int | None = None) -> PyTree:
    """A tree with a list of layers wherever they are held as one.

    Args:
        tree: its leaves have no axes of members.
        axis: of the layers.
        copies: instead of how many there are.
    """
    wholes: dict[KeyPath, int] = {}
    for spot, leaf in zip(places(tree), _leaves_of(tree), strict=True):
        if leaf.layers:
            wholes[leaf.layers[0].whole] = copies or jnp.shape(spot.leaf)[axis]

    def visit(path: KeyPath, node: Any) -> Any:
        count = wholes.get(path)
        if count is None:
            return node

        def item(i: int) -> Any:
            return _listed(jtu.tree_map(lambda x: _item(x, i, axis), node), axis, copies)

        return _Layers([item(i) for i in range(count)])

    if not wholes:
        return tree
    return jtu.tree_map_with_path(
        visit, tree, is_leaf=lambda path, _: path in wholes, is_leaf_takes_path=True
    )


def _item(leaf: Any, i: int, axis: int) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape[:axis] + leaf.shape[axis + 1 :], leaf.dtype)
    return leaf[(slice(None),) * axis + (i,)]


def _as_one(tree: PyTree) -> PyTree:
    """The way back."""

    def visit(node: Any) -> Any:
        if not _is_layers(node):
            return node
        return jtu.tree_map(lambda *each: jnp.stack(each), *map(_as_one, node.items))

    return jtu.tree_map(visit, tree, is_leaf=_is_layers)


def _of_one(value: Any) -> Any:
    """An extra argument for a rule that is shown a list: a function is shown the model itself."""
    if not callable(value):
        return value

    @ft.wraps(value)
    def call(*args: Any, **kwargs: Any) -> Any:
        return value(*_as_one(args), **_as_one(kwargs))

    return call


# ---- the ways to call a transformation


class _Plain:
    """A transformation as it is."""

    def __init__(self, rule: Any):
        self.rule = rule

    def init(self, params: PyTree) -> Any:
        return self.rule.init(params)

    def update(self, updates: PyTree, state: Any, params: PyTree, extra: dict[str, Any]) -> Any:
        return self.rule.update(updates, state, params, **extra)


class _Chained:
    """Transformations one after the other, each in its own way."""

    def __init__(self, forms: Sequence[Any]):
        self.forms = forms

    def init(self, params: PyTree) -> Any:
        return tuple(form.init(params) for form in self.forms)

    def update(self, updates: PyTree, state: Any, params: PyTree, extra: dict[str, Any]) -> Any:
        news: list[Any] = []
        for form, own in zip(self.forms, state, strict=True):
            updates, new = form.update(updates, own, params, extra)
            news.append(new)
        return updates, tuple(news)


class _Listed:
    """A transformation that is shown a list of layers."""

    def __init__(self, rule: Any):
        self.rule = rule

    def init(self, params: PyTree) -> Any:
        shown = _listed(params)
        with without_axes("all"):
            state = self.rule.init(shown)
        return _as_one(state)

    def update(self, updates: PyTree, state: Any, params: PyTree, extra: dict[str, Any]) -> Any:
        axis = _extra_axes(updates, params)
        extra = {name: _of_one(value) for name, value in extra.items()}
        shown = None if params is None else _listed(params)
        given, own = _listed(updates, axis), _listed(state)
        with without_axes("all"):
            made, new = self.rule.update(given, own, shown, **extra)
        return _as_one(made), _as_one(new)


def _extra_axes(updates: PyTree, params: PyTree) -> int:
    """How many axes gradients have more than parameters: of examples, which stand first."""
    pairs = zip(jtu.tree_leaves(updates), jtu.tree_leaves(params), strict=False)
    return max((jnp.ndim(one) - jnp.ndim(two) for one, two in pairs), default=0)


class _Part(NamedTuple):
    """Leaves with the same axes, over which a transformation is mapped at once.

    Attributes:
        own: the numbers of the leaves.
        axes: how many axes are mapped over.
        axes_of_state: for each leaf of the state of these leaves, the same.
        paths: of the leaves of the state.
        structure: of the state.
        form: how the transformation is called under the map.
        left_out: what the map takes away: the axes of `"members"`, or `"all"`.
    """

    own: tuple[int, ...]
    axes: int
    axes_of_state: tuple[int, ...]
    paths: tuple[Any, ...]
    structure: Any
    form: Any
    left_out: Any

    def only(self, tree: PyTree) -> PyTree:
        leaves, structure = jtu.tree_flatten(tree)
        return structure.unflatten([x if i in self.own else None for i, x in enumerate(leaves)])

    def init(self, params: PyTree) -> list[Any]:
        leaves, structure = jtu.tree_flatten(self.only(params))

        def make(*leaves: Any) -> Any:
            with without_axes(self.left_out):
                return tuple(jtu.tree_leaves(self.form.init(structure.unflatten(leaves))))

        return self._mapped(make, [self.axes] * len(leaves), self.axes_of_state)(*leaves)

    def update(self, updates: Any, state: Any, params: Any, extra: dict[str, Any]) -> Any:
        """The updates of its leaves, and the leaves of its state."""
        given, structure = jtu.tree_flatten(self.only(updates))
        shown, whole = jtu.tree_flatten(None if params is None else self.only(params))
        size, n = len(given), len(state)

        # Of gradients for each example, theirs is the first axis.
        more = _extra_axes(given, shown)

        def run(*values: Any) -> Any:
            with without_axes(self.left_out):
                made, new = self.form.update(
                    structure.unflatten(values[:size]),
                    self.structure.unflatten(values[size : size + n]),
                    whole.unflatten(values[size + n :]),
                    extra,
                )
            return (*structure.flatten_up_to(made), *jtu.tree_leaves(new))

        axes = [self.axes] * size + [*self.axes_of_state] + [self.axes] * len(shown)
        outs = [self.axes] * size + [*self.axes_of_state]
        made = self._mapped(run, axes, outs, [more] * size)(*given, *state, *shown)
        return made[:size], made[size:]

    def _mapped(
        self, fn: Any, ins: Sequence[int], outs: Sequence[int], places: Sequence[int] = ()
    ) -> Any:
        where = [*places, *[0] * (len(ins) - len(places))]
        for _ in range(self.axes):
            fn = jax.vmap(
                fn,
                in_axes=tuple(at if n else None for n, at in zip(ins, where, strict=True)),
                out_axes=tuple(0 if n else None for n in outs),
            )
        return fn


class _Mapped:
    """A transformation that is mapped over layers: once for all leaves with the same axes."""

    def __init__(self, parts: Sequence[_Part], structure: Any, paths: Sequence[Any]):
        self.parts = parts
        self.structure = structure
        self.paths = paths

    def init(self, params: PyTree) -> Any:
        return self._together([part.init(params) for part in self.parts])

    def update(self, updates: PyTree, state: Any, params: PyTree, extra: dict[str, Any]) -> Any:
        leaves, structure = jtu.tree_flatten(updates)
        kept = dict(zip(self.paths, jtu.tree_leaves(state), strict=True))
        news: list[Any] = []
        for part in self.parts:
            own = [kept[path] for path in part.paths]
            made, new = part.update(updates, own, params, extra)
            news.append(new)
            for i, update in zip(part.own, made, strict=True):
                leaves[i] = update
        return structure.unflatten(leaves), self._together(news)

    def _together(self, news: list[Any]) -> Any:
        found: dict[Any, Any] = {}
        for part, new in zip(self.parts, news, strict=True):
            # What is the same for all leaves, such as a count, is what the first part says.
            found = dict(zip(part.paths, new, strict=True)) | found
        return self.structure.unflatten([found[path] for path in self.paths])


class _Grouped:
    """A transformation for each group of leaves: for members, mapped; for what has none, once."""

    def __init__(self, parts: Sequence[_Part]):
        self.parts = parts

    def init(self, params: PyTree) -> Any:
        made = [part.structure.unflatten(part.init(params)) for part in self.parts]
        return made[0] if len(made) == 1 else tuple(made)

    def update(self, updates: PyTree, state: Any, params: PyTree, extra: dict[str, Any]) -> Any:
        leaves, structure = jtu.tree_flatten(updates)
        states = (state,) if len(self.parts) == 1 else state
        news: list[Any] = []
        for part, own in zip(self.parts, states, strict=True):
            made, new = part.update(updates, jtu.tree_leaves(own), params, extra)
            news.append(part.structure.unflatten(new))
            for i, update in zip(part.own, made, strict=True):
                leaves[i] = update
        return structure.unflatten(leaves), news[0] if len(news) == 1 else tuple(news)


# ---- which way


def _form_of(rule: Any, params: PyTree) -> Any:
    shown = _abstract(params)
    leaves, structure = jtu.tree_flatten(shown)
    config = (jax.config.jax_numpy_dtype_promotion, jax.config.jax_enable_x64, axes_left_out())
    key = (structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves), config)
    try:
        return _found(rule, key)
    except _Undecided as error:
        _refuse_unmapped(rule, error.__cause__ or error)
    except TypeError:
        # A transformation without a hash is looked at each time.
        return _choose(rule, shown)


@ft.lru_cache(maxsize=128)
def _found(rule: Any, key: Any) -> Any:
    structure, shapes, _ = key
    return _choose(rule, structure.unflatten([jax.ShapeDtypeStruct(*each) for each in shapes]))


def _choose(rule: Any, params: PyTree) -> Any:
    """How a transformation is called on parameters, whose members have their axes still."""
    leaves = _leaves_of(params)
    shapes = [jnp.shape(x)[: len(leaf.holds)] for x, leaf in _paired(params, leaves)]
    # Of no layers, none stands alone.
    if not any(shapes) or any(0 in shape for shape in shapes):
        return _Plain(rule)
    one = _without(params, [len(leaf.holds) for leaf in leaves])
    if _is_same(rule, params, one, is_by_number):
        return _Plain(rule)
    if not any(leaf.members for leaf in leaves) and _is_whole(rule, params, one):
        return _Plain(rule)
    rules = _links(rule)
    if rules:
        return _Chained([_choose(each, params) for each in rules])
    groups: dict[KeyPath | None, list[int]] = {}
    for i, leaf in enumerate(leaves):
        owner = leaf.holds[leaf.members - 1].path if leaf.members else None
        groups.setdefault(owner, []).append(i)
    if list(groups) == [None]:
        return _choose_for_layers(rule, params)
    parts: list[_Part] = []
    for own in groups.values():
        members = leaves[own[0]].members
        bare = _without(_kept(params, own), [members] * len(own))
        with without_axes("members"):
            form = _choose_for_layers(rule, bare)
        of_state = _axes_of_state(form, bare, members, "members")
        parts.append(_Part(tuple(own), members, *of_state, form, "members"))
    return _Grouped(parts)


def _paired(params: PyTree, leaves: Sequence[_Leaf]) -> Any:
    return zip(jtu.tree_leaves(params), leaves, strict=True)


def _choose_for_layers(rule: Any, params: PyTree) -> Any:
    """The same, for leaves of a group, which have no axes of members."""
    leaves = _leaves_of(params)
    if not any(leaf.layers for leaf in leaves):
        return _Plain(rule)
    one = _without(params, [len(leaf.layers) for leaf in leaves])
    # Under a map, an equation for each number is as good as itself.
    if _is_whole(rule, params, one):
        return _Plain(rule)
    try:
        return _mapped(rule, params, one, leaves) if _is_leafwise(rule, params) else _Listed(rule)
    except _Undecided:
        return _Listed(rule)


def _without(params: PyTree, axes: Sequence[int]) -> PyTree:
    leaves, structure = jtu.tree_flatten(params)
    return structure.unflatten([_bare(x, n) for x, n in zip(leaves, axes, strict=True)])


def _kept(params: PyTree, own: Sequence[int]) -> PyTree:
    leaves, structure = jtu.tree_flatten(params)
    return structure.unflatten([x if i in own else None for i, x in enumerate(leaves)])


def _links(rule: Any) -> list[Any]:
    """The transformations that optax has chained, if it did; else none."""
    found: list[Any] = []
    for name in ("init", "update"):
        fn = getattr(rule, name)
        if getattr(fn, "__qualname__", "") != f"chain.<locals>.{name}_fn":
            return []
        found.append(inspect.getclosurevars(fn).nonlocals.get(f"{name}_fns"))
    if not all(isinstance(fns, tuple) for fns in found):
        return []
    return [PerLayer(*each) for each in zip(*found, strict=True)]


class _Undecided(Exception):
    """What a transformation does could not be recorded without its extra arguments."""


class _Program(NamedTuple):
    """What was recorded of a transformation.

    Attributes:
        start: how the state is made.
        jaxpr: a step.
        state: its shapes.
        outs: how many updates there are.
    """

    start: Any
    jaxpr: Any
    state: Any
    outs: int

    def followed(
        self, flow: Any, each: Sequence[Any], none: Any, join: Any, held: Sequence[bool] = ()
    ) -> tuple[list[Any], list[Any]]:
        """Marks of the updates and of the state, after as many steps as change them.

        Args:
            flow: follows marks through a program.
            each: the marks of gradients, and of parameters.
            none: that of what is the same for all.
            join: two marks of one value.
            held: what of the state has the mark of the parameters from the start.
        """
        state = flow(self.start, each)
        state = [join(none, mark) for mark in state]
        state = [each[0] if h else m for h, m in zip(held, state, strict=True)] if held else state
        more = [none] * (len(self.jaxpr.invars) - 2 * len(each) - len(state))
        while True:
            outs = flow(self.jaxpr, [*each, *each, *state, *more])
            after = [join(a, b) for a, b in zip(state, outs[self.outs :], strict=True)]
            if after == state:
                return outs[: self.outs], state
            state = after


def _record(rule: Any, params: PyTree) -> _Program:
    """A step of a transformation, recorded.

    Raises:
        _Undecided: it cannot be, for it lacks something, or refuses the shapes.
    """
    leaves, structure = jtu.tree_flatten(params)
    count = len(leaves)
    first: Exception | None = None
    for extra in ({}, {"value": jax.ShapeDtypeStruct((), jnp.float32)}):
        try:
            state = jax.eval_shape(rule.init, params)
            kept, form = jtu.tree_flatten(state)

            def run(*values: Any, form: Any = form, extra: Any = extra) -> Any:
                made, new = rule.update(
                    structure.unflatten(values[:count]),
                    form.unflatten(values[2 * count : len(values) - len(extra)]),
                    structure.unflatten(values[count : 2 * count]),
                    **dict(zip(extra, values[len(values) - len(extra) :], strict=True)),
                )
                news, after = jtu.tree_flatten(new)
                if after != form:
                    raise _Undecided
                return (*structure.flatten_up_to(made), *news)

            closed = jax.make_jaxpr(run)(*leaves, *leaves, *kept, *extra.values())
            start = jax.make_jaxpr(lambda *x: jtu.tree_leaves(rule.init(structure.unflatten(x))))
            return _Program(start(*leaves).jaxpr, closed.jaxpr, state, count)
        except Exception as error:
            # Whatever a transformation of others raises: it is called in earnest later on.
            first = first or error
    raise _Undecided from first


def _is_same(rule: Any, params: PyTree, one: PyTree, is_fit: Any) -> bool:
    """Whether a step does to all layers, equation by equation, what it does to one."""
    try:
        first = _record(rule, params)
        with without_axes("all"):
            second = _record(rule, one)
    except _Undecided:
        return False
    structures = [jtu.tree_structure(program.state) for program in (first, second)]
    return (
        structures[0] == structures[1]
        and are_alike(first.start, second.start, is_by_number)
        and are_alike(first.jaxpr, second.jaxpr, is_fit)
    )


def _owners(two: PyTree) -> list[tuple[Any, tuple[int, ...]]]:
    """For each leaf of a tree in which layers are listed: which it is, and of which layer."""
    found: list[tuple[Any, tuple[int, ...]]] = []
    for spot in places(two):
        steps = list(zip((type(node) is _Layers for node in spot.nodes), spot.path, strict=True))
        leaf = tuple(key for is_number, key in steps if not is_number)
        found.append((leaf, tuple(key.idx for is_number, key in steps if is_number)))
    return found


def _is_whole(rule: Any, params: PyTree, one: PyTree) -> bool:
    """Whether a step reduces layers as a list of them would be, and else goes number by number."""
    if not _is_same(rule, params, one, is_by_number_or_whole):
        return False
    two = _listed(params, copies=2)
    try:
        with without_axes("all"):
            program = _record(rule, two)
        each = [Mark(frozenset([owner])) for owner in _owners(two)]
        made, _ = program.followed(whole_flow, each, SHARED, lambda a, b: joined(a, _settled(b)))
        return all(_settled(m) in (own, SHARED) for m, own in zip(made, each, strict=True))
    except (_Undecided, Unfit):
        return False


def _settled(mark: Mark) -> Mark:
    """Of what comes out: a number for all is shared, and one for some is none."""
    if mark.op is None:
        return mark
    if is_complete(mark):
        return SHARED
    raise Unfit


def _is_leafwise(rule: Any, params: PyTree) -> bool:
    """Whether the update of each layer's array follows from that array alone.

    Raises:
        _Undecided: a step cannot be recorded.
    """
    two = _listed(params, copies=2)
    with without_axes("all"):
        program = _record(rule, two)
    if is_random(program.jaxpr):
        return False
    each = [frozenset([i]) for i in range(program.outs)]
    made, _ = program.followed(flow, each, frozenset(), operator.or_)
    return all(marks <= own for marks, own in zip(made, each, strict=True))


def _mapped(rule: Any, params: PyTree, one: PyTree, leaves: Sequence[_Leaf]) -> Any:
    with without_axes("all"):
        state = jax.eval_shape(rule.init, one)
    spots, structure = jtu.tree_flatten_with_path(state)
    paths = [path for path, _ in spots]
    sizes: dict[tuple[int, ...], list[int]] = {}
    shapes = [jnp.shape(x) for x in jtu.tree_leaves(params)]
    for i, leaf in enumerate(leaves):
        sizes.setdefault(shapes[i][: len(leaf.layers)], []).append(i)
    parts: list[_Part] = []
    for size, own in sizes.items():
        part = _kept(one, own)
        form = _Plain(rule)
        of_state = _axes_of_state(form, part, len(size), "all")
        parts.append(_Part(tuple(own), len(size), *of_state, form, "all"))
    if {path for part in parts for path in part.paths} != {*paths}:
        raise _Undecided
    return _Mapped(parts, structure, paths)


def _axes_of_state(form: Any, one: PyTree, axes: int, left_out: Literal["members", "all"]) -> Any:
    """Which leaves of a state have an axis for each layer, or member.

    Those that are in a tree of the model's structure; and those that follow from what differs.

    Raises:
        _Undecided: what has no place for layers differs from layer to layer.
    """
    with without_axes(left_out):
        program = _record(_Called(form), one)
    of_layers = left_out == "all"
    held = [bool(leaf.layers if of_layers else leaf.members) for leaf in _leaves_of(program.state)]
    mine, none = frozenset(["own"]), frozenset[str]()
    _, state = program.followed(flow, [mine] * program.outs, none, operator.or_, held)
    if of_layers and axes and any(m and not h for m, h in zip(state, held, strict=True)):
        raise _Undecided
    spots, whole = jtu.tree_flatten_with_path(program.state)
    return tuple(axes if m else 0 for m in state), tuple(path for path, _ in spots), whole


class _Called:
    """A form as a transformation, to be recorded."""

    def __init__(self, form: Any):
        self.init = form.init
        self.form = form

    def update(self, updates: Any, state: Any, params: Any, **extra: Any) -> Any:
        return self.form.update(updates, state, params, extra)


def _called(rule: Any, form: Any, call: Callable[[], Any]) -> Any:
    if isinstance(form, _Plain):
        return call()
    try:
        return call()
    except jax.dtypes.TypePromotionError:
        # Of how JAX is set, and of no layers.
        raise
    except Exception as error:
        # Whatever it is: it may come of what the transformation is shown here.
        _refuse_unmapped(rule, error)


def _refuse_unmapped(rule: Any, error: BaseException) -> NoReturn:
    """Refuse a transformation that fails where layers or members are held as one."""
    name = getattr(rule.update, "__qualname__", type(rule).__qualname__).split(".")[0]
    raise ArgumentError(
        explain(
            f"Optimizer, {name} over layers or members that are held as one",
            "a transformation that can be mapped over their axis",
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            cure=[
                "to show it their arrays as one array each:",
                'pm.Optimizer(rule, stacked="as one")',
            ],
        )
    ) from error
