"""Transformations of gradients that treat each layer, and each member, separately.

`Stack` and `Ensemble` store several arrays as one. A transformation that looks at more than single
numbers (the norm of an array, a matrix) would take them for one array. Here it gets the arrays of
layers in a list, and of members as separate models:

1. Where the program of the transformation does the same to both, it is called directly.
2. Where it looks at each array by itself, it is called once, mapped over the layers.
3. Otherwise, and only then, the layers are put into a list, and the program grows with them.

Members are always mapped over. The state has the structure of the model in each case: a layer
axis is where the model has one.
"""

from __future__ import annotations

import functools as ft
import gc
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp

from pytreemod.errors import ArgumentError
from pytreemod.training.layered.forms import (
    ChainedRule,
    GroupedRule,
    ListedRule,
    MappedRule,
    RulePart,
)
from pytreemod.training.layered.lists import HeldLeaf, abstract, as_one, leaves_of, only, without
from pytreemod.training.layered.programs import is_by_number
from pytreemod.training.layered.recording import (
    RuleProgram,
    UndecidedError,
    axes_of_state,
    have_same_literals,
    is_leafwise,
    is_whole,
    record,
    record_same,
    record_two,
)
from pytreemod.training.plans import check_transformation
from pytreemod.tree.members import axes_left_out, without_axes
from pytreemod.typing import KeyPath, PyTree, Tracer, jtu

_config: Any = jax.config

_forms: dict[Any, Any] = {}
"""How each transformation is called on models of one structure."""

_MOST_FORMS = 128


class PerLayer(NamedTuple):
    """An optax transformation that `per_layer` has made from another.

    Attributes:
        init: makes the state from parameters.
        update: gives updates and the new state.
    """

    init: Callable[[PyTree], Any]
    update: Callable[..., tuple[Any, Any]]


def per_layer(rule: Any) -> PerLayer:
    """Make an optax transformation treat each layer and each member separately.

    [`Optimizer`][pytreemod.Optimizer] does this already; use `per_layer` with plain optax. On a
    model with a [`Stack`][pytreemod.nn.Stack] the updates are those of `rule` for the same model
    with a list of layers. On an [`Ensemble`][pytreemod.nn.Ensemble], they are those of `rule` for
    each member alone. Arrays that members share, and arrays outside of them, count as one more
    model.

    Args:
        rule: has `init` and `update`, such as `optax.lamb(1e-3)`.

    Returns:
        A transformation. It takes the extra arguments that `rule` takes.

    Raises:
        ArgumentError: if `rule` is not a transformation. On use: if it cannot be mapped over layers
            or members.

    Examples:
        >>> import jax, optax
        >>> import pytreemod as pm
        >>> from pytreemod import nn
        >>> stack = nn.Stack(lambda key: nn.Linear(3, 3, key=key), 4, key=jax.random.key(0))
        >>> tx = pm.per_layer(optax.lars(1e-3))
        >>> state = tx.init(stack)
        >>> updates, state = tx.update(jax.tree.map(jax.numpy.ones_like, stack), state, stack)
    """
    check_transformation("per_layer(rule)", rule, or_none=False)

    def init(params: PyTree) -> Any:
        form = _form_of(rule, params)
        return _called(rule, form, ft.partial(form.init, params), None)

    @ft.wraps(rule.update)
    def update(updates: PyTree, state: Any, params: PyTree = None, **extra: Any) -> Any:
        shown = updates if params is None else params
        form = _form_of(rule, shown)
        call = ft.partial(form.update, updates, state, params, **extra)
        return _called(rule, form, call, (shown, state))

    return PerLayer(init, update)


# ---- the form


def _form_of(rule: Any, params: PyTree) -> Any:
    leaves, structure = jtu.tree_flatten(params)
    # Programs are recorded under the present settings.
    settings = _config.jax_numpy_dtype_promotion, _config.jax_enable_x64, axes_left_out()
    shapes: Any = tuple((leaf.shape, leaf.dtype) for leaf in map(_typed, leaves))
    key = rule, structure, shapes, settings
    try:
        found = _forms.get(key)
    except TypeError:
        # A transformation without a hash is analyzed each time.
        return _choose(rule, abstract(params))
    if found is None:
        try:
            found = _choose(rule, abstract(params))
        except UndecidedError as error:
            _refuse_unmapped(rule, error.__cause__ or error)
        # The table would keep the trace alive in which a rule with a traced learning rate was made.
        if not _holds_tracer(rule):
            _forms[key] = found
            if len(_forms) > _MOST_FORMS:
                # A list, because another thread may add something in between.
                _forms.pop(next(iter([*_forms])), None)
    return found


def _typed(leaf: Any) -> Any:
    # JAX must be asked about numbers, which takes longer than the rest of a step.
    return leaf if isinstance(leaf, jax.Array) else abstract(leaf)


def _holds_tracer(rule: Any) -> bool:
    """Whether a transformation has closed over a traced value."""
    seen: set[int] = set()
    left: list[Any] = [rule]
    while left:
        value = left.pop()
        if isinstance(value, Tracer):
            return True
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, FunctionType):
            # Not everything that it refers to: that includes the globals of its file.
            left += [value.__closure__, value.__defaults__, value.__kwdefaults__]
        elif isinstance(value, (CellType, MethodType, tuple, list, dict, ft.partial)):
            left += gc.get_referents(value)
    return False


def _choose(rule: Any, params: PyTree) -> Any:
    """Return how a transformation is called on parameters that still have the axes of members."""
    leaves = leaves_of(params)
    shapes = [jnp.shape(x)[: len(leaf.holds)] for x, leaf in _paired(params, leaves)]
    if not any(shapes):
        return rule
    one = without(params, [len(leaf.holds) for leaf in leaves])
    groups: dict[KeyPath | None, list[int]] = {}
    for i, leaf in enumerate(leaves):
        owner = leaf.holds[leaf.members - 1].path if leaf.members else None
        groups.setdefault(owner, []).append(i)
    bares = [_bare(params, leaves, own) for own in groups.values()]
    same = record_same(rule, params, one, is_by_number)
    if same is not None and all(_is_same_in_lists(rule, same, one, bare) for bare in bares):
        return rule
    full = tuple(i for i, shape in enumerate(shapes) if 0 not in shape)
    if len(full) < len(shapes):
        # Stacks of zero layers are left out, as an empty list would be.
        form = _choose(rule, only(params, full))
        return GroupedRule([_outside(full, form, only(params, full))])
    rules = _links(rule)
    if rules:
        return ChainedRule([_choose(each, params) for each in rules])
    if list(groups) == [None]:
        return _choose_for_layers(rule, params)
    parts: list[RulePart] = []
    for own, bare in zip(groups.values(), bares, strict=True):
        members = leaves[own[0]].members
        with without_axes("members"):
            form = _choose_for_layers(rule, bare)
            program = record(form, bare)
        of_state = axes_of_state(program, members, "members")
        parts.append(RulePart(tuple(own), members, *of_state, form, "members"))
    return GroupedRule(parts)


def _bare(params: PyTree, leaves: Sequence[HeldLeaf], own: Sequence[int]) -> PyTree:
    """Return the leaves of a group, without the axes of members."""
    return without(only(params, own), [leaves[i].members for i in own])


def _is_same_in_lists(rule: Any, same: Any, one: PyTree, bare: PyTree) -> bool:
    """Whether what a step does to each number is independent of how many arrays there are."""
    try:
        with without_axes("members"):
            program, two, _ = record_two(rule, bare)
    except UndecidedError:
        # There is no list to compare with.
        return True
    return is_leafwise(program) and have_same_literals(same, one, program, two)


def _outside(own: tuple[int, ...], form: Any, params: PyTree) -> RulePart:
    """Return the leaves over which nothing is mapped."""
    structure = jtu.tree_structure(jax.eval_shape(form.init, params))
    return RulePart(own, 0, (0,) * structure.num_leaves, (), structure, form, axes_left_out())


def _paired(params: PyTree, leaves: Sequence[HeldLeaf]) -> Any:
    return zip(jtu.tree_leaves(params), leaves, strict=True)


def _choose_for_layers(rule: Any, params: PyTree) -> Any:
    """Return the same, for leaves of a group, which have no axes of members."""
    leaves = leaves_of(params)
    if not any(leaf.layers for leaf in leaves):
        return rule
    one = without(params, [len(leaf.layers) for leaf in leaves])
    # Under a map, equations that treat each number separately are good, too.
    if is_whole(rule, params, one):
        return rule
    try:
        program, two, by_leaf = record_two(rule, params)
    except UndecidedError:
        return ListedRule(rule)
    try:
        if is_leafwise(program):
            return _mapped(rule, params, one, leaves, program, two)
    except UndecidedError:
        pass
    return ListedRule(rule, by_leaf)


def _links(rule: Any) -> list[Any]:
    """Return the transformations that optax has chained; otherwise none."""
    found: list[Any] = []
    for name in ("init", "update"):
        fn = getattr(rule, name)
        if getattr(fn, "__qualname__", "") != f"chain.<locals>.{name}_fn":
            return []
        found.append(inspect.getclosurevars(fn).nonlocals.get(f"{name}_fns"))
    if not all(isinstance(fns, tuple) for fns in found):
        return []
    return [PerLayer(*each) for each in zip(*found, strict=True)]


def _mapped(
    rule: Any,
    params: PyTree,
    one: PyTree,
    leaves: Sequence[HeldLeaf],
    program: RuleProgram,
    two: PyTree,
) -> Any:
    with without_axes("all"):
        state = jax.eval_shape(rule.init, one)
    locs, structure = jtu.tree_flatten_with_path(state)
    paths = [path for path, _ in locs]
    if jtu.tree_structure(jax.eval_shape(as_one, program.state)) != structure:
        # Its state has something for each array outside any tree of the model's structure.
        raise UndecidedError
    sizes: dict[tuple[int, ...], list[int]] = {}
    shapes = [jnp.shape(x) for x in jtu.tree_leaves(params)]
    for i, leaf in enumerate(leaves):
        sizes.setdefault(shapes[i][: len(leaf.layers)], []).append(i)
    parts: list[RulePart] = []
    for size, own in sizes.items():
        part = only(one, own)
        with without_axes("all"):
            of_part = record(rule, part)
        if not have_same_literals(of_part, part, program, two):
            # It depends on how many arrays there are.
            raise UndecidedError
        of_state = axes_of_state(of_part, len(size), "all")
        parts.append(RulePart(tuple(own), len(size), *of_state, rule, "all"))
    return MappedRule(parts, structure, paths)


def _called(rule: Any, form: Any, call: Callable[[], Any], step: Any) -> Any:
    if form is rule:
        return call()
    try:
        return call()
    except Exception as error:
        if _is_of_promotion(error):
            raise
        # Any error: the inputs that the transformation gets here may cause it.
        if step is not None:
            params, state = step
            _check_state(rule, form, params, state, error)
        _refuse_unmapped(rule, error)


def _is_of_promotion(error: BaseException) -> bool:
    """Whether the settings of JAX cause the error, and not layers."""
    # By its name: up to JAX 0.10.0, `jax.dtypes` does not have the class.
    return type(error).__name__ == "TypePromotionError"


def _check_state(rule: Any, form: Any, params: PyTree, state: Any, error: Exception) -> None:
    """Refuse a state that was made without regard to layers: by plain optax, or an old version."""
    states = jax.eval_shape(form.init, params), state
    expected, given = (
        (jtu.tree_structure(s), [*map(jnp.shape, jtu.tree_leaves(s))]) for s in states
    )
    if expected != given:
        raise ArgumentError(
            f"Optimizer, {_name(rule)} over stacked layers or members",
            "a state for each of them",
            "another state",
            hint=["to use a state for the stacked arrays:", 'pm.Optimizer(rule, stacked="as one")'],
        ) from error


def _refuse_unmapped(rule: Any, error: BaseException) -> NoReturn:
    """Refuse a transformation that fails on layers or members."""
    if _is_of_promotion(error):
        raise error
    reason, kind = str(error).partition("\n")[0], type(error).__name__
    reason = reason if isinstance(error, UndecidedError) else f"{kind}: {reason}"
    raise ArgumentError(
        f"Optimizer, {_name(rule)} over stacked layers or members",
        "a transformation that can be mapped over their axis",
        "an error",
        hint=[reason, "to apply it to the stacked arrays:", 'pm.Optimizer(rule, stacked="as one")'],
    ) from error


def _name(rule: Any) -> str:
    """Return the name of the function that has made a transformation."""
    name = getattr(rule.update, "__qualname__", type(rule).__qualname__).split(".")[0]
    wrapped: Mapping[str, Any] = (
        inspect.getclosurevars(rule.update).nonlocals if name.startswith("with_") else {}
    )
    if "tx" in wrapped:
        return _name(wrapped["tx"])
    return f"chain({', '.join(map(_name, _links(rule)))})" if name == "chain" else name
