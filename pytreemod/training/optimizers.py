"""The optimizer of a model: transformations of optax by selector, and their state, in one value.

Selectors are resolved once, by `init`, to the number of a rule for each leaf, which is
configuration: a compiled step contains nothing else. A transformation gets the model itself, with
None for every leaf that has another rule, so masks, paths and global norms mean the same as in
optax.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import jax.numpy as jnp

from pytreemod.errors import ArgumentError, ShapeError, SpecError, StructureError, describe
from pytreemod.module.classes import Module
from pytreemod.module.fields import field
from pytreemod.training.automatic_axes import mirrored, with_automatic_axes
from pytreemod.training.per_layer import accepted, is_same_stacked, per_layer, per_member
from pytreemod.transform.capturing import released
from pytreemod.transform.chosen_leaves import trainable_mask, warn_of_shared
from pytreemod.tree.members import layer_axes_of
from pytreemod.tree.nodes import locations
from pytreemod.tree.paths import path_text
from pytreemod.tree.prefixes import By, by, first_of
from pytreemod.tree.selecting import Locations, refuse_unmatched
from pytreemod.tree.split_arrays import sharded_as
from pytreemod.tree.tangents import apply_updates
from pytreemod.typing import PyTree, jtu

_T = TypeVar("_T")
# Not `Self`, which runtime type checkers (beartype) refuse in single methods.
_O = TypeVar("_O", bound="Optimizer")

_INIT = "opt = pm.Optimizer(rules).init(model)"


def _as_by(rules: Any) -> By:
    return rules if isinstance(rules, By) else by({...: rules})


class Optimizer(Module):
    """An optax optimizer together with its state; each part of a model may have its own rule.

    `opt = Optimizer(rules).init(model)` decides for each leaf, and
    `model, opt = opt.update(model, grads=grads)` makes a step. As with `filter_grad`, floating
    arrays that are not buffers are trained. All other leaves are frozen, whatever their rule: they
    have no state, and a gradient, if there is one, is ignored. Both results are values: pass them
    through `filter_jit` (donated), `filter_scan`, files and pickles.

    **Layers and members.** A [`Stack`][pytreemod.nn.Stack] trains like the list of its layers, and
    in an [`Ensemble`][pytreemod.nn.Ensemble] each member as if it were alone, or `init` refuses the
    rule: it tries each rule on the model's own tree, cut small. Adam and a clipped norm are the
    same for a Stack; Muon is written `pm.per_layer(muon)`, and a clipped norm of an Ensemble
    `pm.per_member(clip)`.

    **Laws.** With one rule it does the same as optax on the model, with several the same as
    `optax.multi_transform`. The returned optimizer has the same structure, and the model's arrays
    keep shape and dtype.

    Fields:
        states: the state of each rule, in order, with a tree of the model's structure wherever it
            has something for each parameter; a learning rate of `optax.inject_hyperparams` is
            changed there by `tree_at`
        before_state: the state of `before`

    Args:
        rules: a transformation, or any object with `init` and `update`; or [`by`][pytreemod.by]
            with one for each selector, where None freezes.
        before: a transformation of all trained gradients, applied before the rules, such as
            `optax.clip_by_global_norm(1.0)`.
        stacked: `"per layer"`; or `"as one"`: rules are not tried, and get the stacked arrays of a
            Stack or an Ensemble as single arrays, as with plain optax.

    Examples:
        >>> import jax, jax.numpy as jnp, optax
        >>> import pytreemod as pm
        >>> from pytreemod import nn
        >>> model = nn.MLP(2, 1, width_size=8, depth=1, key=jax.random.key(0))
        >>> rules = pm.by({"layers.0": None, "**.bias": optax.sgd(0.1), ...: optax.lion(1e-4)})
        >>> opt = pm.Optimizer(rules).init(model)
        >>> @pm.filter_jit(donate=("model", "opt"))
        ... def step(model, opt, x):
        ...     loss, grads = pm.filter_value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
        ...     model, opt = opt.update(model, grads=grads)
        ...     return model, opt, loss
        >>> model, opt, loss = step(model, opt, jnp.ones((4, 2)))
    """

    # Its state has trees of the model's structure that are never called: `capture` skips them.
    __holds_values__: ClassVar[bool] = True
    # It follows from the model and the rules: no configuration in a file.
    __derived__: ClassVar[tuple[str, ...]] = ("labels",)

    rules: By = field(static=True, converter=_as_by)
    before: Any = field(static=True)
    stacked: str = field(static=True)
    labels: tuple[int | None, ...] = field(static=True, repr=False)
    """The rule of each leaf, None for a frozen one; empty before `init`."""
    states: tuple[Any, ...]
    before_state: Any

    def __init__(self, rules: Any, *, before: Any = None, stacked: str = "per layer"):
        self.rules, self.before, self.stacked = rules, before, stacked
        self.labels, self.states, self.before_state = (), (), None

    def init(self: _O, model: PyTree) -> _O:
        """Decide for each leaf of a model, and make the state.

        Args:
            model: the model to train.

        Returns:
            The optimizer with its state.

        Raises:
            SpecError: if a trained leaf has no rule, or a selector picks nothing.
            ArgumentError: if nothing is to be trained, or a rule does not do the same to stacked
                arrays as to layers and members by themselves.

        Warns:
            SharedParameterWarning: if one parameter has two paths in the model.
        """
        # Inside a `capture` the model is wrapped for that one call, but the state is for all.
        model = released(model)
        selectors, rules = self.rules.selectors, [rule for _, rule in self.rules.items]
        refuse_unmatched(selectors, [model])
        locs = Locations(locations(model))
        picks = [selector.pick(locs, model, None) for selector in selectors]
        entries = first_of(picks, len(locs))
        trained = trainable_mask(model, None, "Optimizer.init")
        rows = list(zip(locs, entries, trained, strict=True))
        lost = [
            f"{path_text(x.path, 'model')}: {describe(x.leaf)}"
            for x, i, t in rows
            if t and i is None
        ]
        if lost:
            fact = f"Optimizer.init: {len(lost)} of {sum(trained)} trainable leaves have no rule"
            raise SpecError(fact, at=lost, hint="pm.by({..., ...: None})  # freezes the others")
        labels = tuple([None if i is None or not t or rules[i] is None else i for _, i, t in rows])
        if not any(label is not None for label in labels):
            raise ArgumentError("Optimizer.init: no floating array is to be trained")
        warn_of_shared("Optimizer.init", "model", model, [label is not None for label in labels])
        leaves, treedef = jtu.tree_flatten(model)

        def start(what: str, rule: Any, number: int | None) -> Any:
            params = treedef.unflatten(_only(leaves, labels, number))
            if self.stacked != "as one":
                _refuse_whole(what, rule, params)
            return with_automatic_axes(rule.init, params, like=lambda: mirrored(rule.init, params))

        states = tuple(
            start(f"the rule for {selector!r}", rule, i) if i in labels else None
            for i, (selector, rule) in enumerate(self.rules.items)
        )
        own = None if self.before is None else start("`before`", self.before, None)
        return self.replace(labels=labels, states=states, before_state=own)

    def update(self: _O, model: _T, *, grads: PyTree, **extra: Any) -> tuple[_T, _O]:
        """Make one training step.

        Args:
            model: the present model.
            grads: its gradients, as `filter_grad` returns them.
            **extra: optax's extra arguments, such as `value=loss`, for the rules that take them.

        Returns:
            The new model and the new optimizer.

        Raises:
            ArgumentError: if no rule takes an extra argument.
            StructureError: if the model is not the one that the optimizer was initialized with, a
                trained leaf has no gradient or one of another shape, or that of a real parameter is
                complex.
            ShapeError: if what a rule returns has another shape.
        """
        rules = [rule for _, rule in self.rules.items]
        names = {name for rule in (self.before, *rules) if rule for name in accepted(rule, extra)}
        if extra.keys() - names:
            raise ArgumentError(f"Optimizer.update: no rule takes {min(extra.keys() - names)!r}")
        leaves, treedef = jtu.tree_flatten(model)
        if len(self.labels) != len(leaves):
            known = f"initialized with {len(self.labels)} leaves, and the model has {len(leaves)}"
            raise StructureError(f"Optimizer.update: the optimizer was {known}", hint=_INIT)
        given = _only(treedef.flatten_up_to(grads), self.labels)
        rows = zip(locations(model), self.labels, given, strict=True)
        wrong = [
            f"{path_text(loc.path, 'grads')}: {describe(grad)} for {describe(loc.leaf)}"
            for loc, label, grad in rows
            if label is not None and (grad is None or jnp.shape(grad) != jnp.shape(loc.leaf))
        ]
        if wrong:
            raise StructureError("Optimizer.update: gradients do not fit the model", at=wrong)

        def step(rule: Any, state: Any, given: list[Any], number: int | None) -> Any:
            mine, params = (_only(each, self.labels, number) for each in (given, leaves))
            trees = treedef.unflatten(mine), state, treedef.unflatten(params)
            update = ft.partial(rule.update, **accepted(rule, extra))
            made, new = with_automatic_axes(update, *trees, like=lambda: (trees[2], state))
            shapes, others = ([*map(jnp.shape, jtu.tree_leaves(x))] for x in (state, new))
            if shapes != others:
                # It was broadcast with a model of other shapes.
                raise ShapeError("Optimizer.update: a state got another shape", hint=_INIT)
            return treedef.flatten_up_to(made), new

        before_state = self.before_state
        if self.before is not None:
            given, before_state = step(self.before, before_state, given, None)
        states, updates = list(self.states), [None] * len(leaves)
        for i, rule in enumerate(rules):
            if i in self.labels:
                made, states[i] = step(rule, states[i], given, i)
                # No leaf has two rules.
                pairs = zip(updates, made, strict=True)
                updates = [new if old is None else old for old, new in pairs]
        new = sharded_as(apply_updates(model, treedef.unflatten(updates)), model)
        return new, self.replace(states=tuple(states), before_state=before_state)


def _only(
    values: Sequence[Any], labels: Sequence[int | None], rule: int | None = None
) -> list[Any]:
    """Return values by leaf, with None for those that have another rule, or are frozen."""
    pairs = zip(values, labels, strict=True)
    return [x if i is not None and rule in (None, i) else None for x, i in pairs]


def _refuse_whole(what: str, rule: Any, params: PyTree) -> None:
    """Refuse a rule that looks at whole arrays, where an array is several layers or members.

    Raises:
        ArgumentError: if it does; what would be right is tried, too.
    """
    if not any(map(layer_axes_of, locations(params))) or is_same_stacked(rule, params):
        return
    fact = (
        f"Optimizer.init: {what} does not do the same to stacked layers, or members, as to each by "
        "itself, or could not be tried"
    )
    for cure in (per_member, per_layer):
        if is_same_stacked(cure(rule), params):
            raise ArgumentError(fact, hint=f"pm.{cure.__name__}(rule)")
    hint = [
        "optax.chain(optax.clip_by_global_norm(1.0), pm.per_layer(rule))  # of the part that does",
        'pm.Optimizer(rules, stacked="as one")  # if all of it is elementwise',
    ]
    raise ArgumentError(fact, hint=hint)
