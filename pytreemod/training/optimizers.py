"""The optimizer of a model: transformations of gradients, one for each selector.

With plain optax, trees of labels say which rule applies to each leaf, and every step passes
state, model and transformation side by side. Here they are one value. Selectors are resolved once,
when the optimizer is initialized, to a number for each leaf, which is configuration: a step calls
each transformation with its part of the model, and a compiled step contains nothing else.

A transformation gets the model itself, with None for every leaf that has another rule. So masks,
paths and global norms mean the same as in optax.
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar, NoReturn, TypeVar

import jax.numpy as jnp

from pytreemod.errors import ArgumentError, ShapeError, StructureError, describe, with_article
from pytreemod.module.classes import Module
from pytreemod.module.fields import field
from pytreemod.module.reading import are_derivatives
from pytreemod.training.hyperparameters import chosen_rules, with_value
from pytreemod.training.layered.rules import per_layer
from pytreemod.training.plans import (
    RulePlan,
    check_model,
    check_planned,
    check_transformation,
    fits_always,
    make_plan,
    rules_of,
)
from pytreemod.training.rules_on_meshes import init_on_mesh, update_on_mesh
from pytreemod.transform.chosen_leaves import warn_of_shared
from pytreemod.tree.differences import compare
from pytreemod.tree.nodes import locations
from pytreemod.tree.paths import path_text
from pytreemod.tree.predicates import is_array_like
from pytreemod.tree.split_arrays import sharded_as
from pytreemod.tree.updating import apply_updates, refuse_complex
from pytreemod.typing import FilterSpec, PyTree, class_of, jtu

_STACKED = ("per layer", "as one")

_T = TypeVar("_T")
# Not `Self`, which runtime type checkers (beartype) refuse in single methods.
_O = TypeVar("_O", bound="Optimizer")


class Optimizer(Module):
    """optax for a model: a rule for each part of it, and their state, in one value.

    **Form.** `rules` is one optax transformation, or any other object with `init` and `update`. Or
    it is a [`by`][pytreemod.by] with one for each selector: the first that picks a leaf decides,
    and None freezes leaves. As with `filter_grad`, floating arrays that are not buffers are
    trained. All other leaves are frozen, whatever their rule: they have no state, and a gradient,
    if there is one, is ignored.

    **Make.** `Optimizer(rules).init(model)` decides for each leaf, and returns the optimizer with
    its state. A trained leaf without a rule is an error, and so is a selector that picks nothing.

    **Use.** `model, opt = opt.update(model, grads)` in each step. Both are values: pass them
    through `filter_jit` (donated), `filter_scan`, files and pickles.

    **Layers and members.** A [`Stack`][pytreemod.nn.Stack] trains like the list of its layers,
    whatever a rule looks at: the norm of each layer's array, or of all arrays; the matrix in each
    layer. In an [`Ensemble`][pytreemod.nn.Ensemble] each member trains as if it were alone,
    including `before`; shared arrays, and arrays outside of it, are one more group. A rule
    for single numbers is called on the stacked arrays, one for single arrays is mapped over the
    layers. A rule that mixes both, and is not an `optax.chain`, gets a list of layers: its program
    grows with them.

    **Laws.** With one rule it does the same as optax on the model, with several the same as
    `optax.multi_transform`, if no layers are stacked. The returned optimizer has the
    same structure, and the model's arrays keep shape and dtype, as with
    `apply_updates`.

    Fields:
        rules: as given
        before: as given
        stacked: as given
        plan: the rule of each leaf; None before `init`
        states: the state of each rule's transformation, in order, with a tree of the model's
            structure wherever it has something for each parameter
        before_state: the state of `before`

    Args:
        rules: a transformation, or `by` with transformations and None.
        before: a transformation of all trained gradients, applied before the rules, such
            as `optax.clip_by_global_norm(1.0)`.
        stacked: `"per layer"`; or `"as one"`: rules get the stacked arrays of a Stack or an
            Ensemble as single arrays, as with plain optax.

    Raises:
        ArgumentError: if a rule is not a transformation, or `stacked` is another word.

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
        ...     model, opt = opt.update(model, grads)
        ...     return model, opt, loss
        >>> model, opt, loss = step(model, opt, jnp.ones((4, 2)))
    """

    # Its state has trees of the model's structure that are never called: `capture` skips them.
    __holds_values__: ClassVar[bool] = True

    rules: Any = field(static=True)
    before: Any = field(static=True)
    plan: Any = field(static=True, repr=False)
    states: tuple[Any, ...] | None
    before_state: Any
    # A default, although __init__ sets it, for files and pickles from before it existed.
    stacked: str = field(static=True, default="per layer")

    def __init__(self, rules: Any, *, before: Any = None, stacked: str = "per layer"):
        self.rules = rules
        self.before = before
        self.stacked = stacked
        self.plan = None
        self.states = None
        self.before_state = None

    def __check_init__(self) -> None:
        for rule in rules_of(self.rules):
            check_transformation("Optimizer(rules)", rule)
        check_transformation("Optimizer(before)", self.before)
        if self.stacked not in _STACKED:
            raise ArgumentError(
                "Optimizer(stacked)",
                " or ".join(map(repr, _STACKED)),
                describe(self.stacked),
                hint=[
                    "to apply a rule to the stacked arrays of several layers:",
                    'pm.Optimizer(rules, stacked="as one")',
                ],
            )
        if self.plan is not None:
            check_planned(self.plan, self.rules)

    def init(self: _O, model: PyTree) -> _O:
        """Decide for each leaf of a model, and make the state.

        Args:
            model: the model to train.

        Returns:
            The optimizer with its state.

        Raises:
            SpecError: if a trained leaf has no rule; or a selector picks nothing, or only leaves
                that earlier ones pick.
            ArgumentError: if nothing is to be trained, or a rule cannot be mapped over layers or
                members.

        Warns:
            SharedParameterWarning: if one parameter has two paths in the model.
        """
        plan = make_plan(self.rules, model)
        before, *rules = self._transformations(plan)
        leaves = jtu.tree_leaves(model)
        warn_of_shared("Optimizer.init", "model", model, plan.is_trained)
        states = [
            init_on_mesh(rule, plan.part(leaves, i))
            if rule is not None and plan.is_used[i]
            else None
            for i, rule in enumerate(rules)
        ]
        own = None if before is None else init_on_mesh(before, plan.part(leaves))
        return self.replace(plan=plan, states=tuple(states), before_state=own)

    def update(self: _O, model: _T, grads: PyTree, **extra: Any) -> tuple[_T, _O]:
        """Make one training step.

        Args:
            model: the present model.
            grads: its gradients, as `filter_grad` returns them.
            **extra: for transformations that take more than gradients, state and
                parameters (optax's extra arguments), such as `value=loss`.

        Returns:
            The new model and the new optimizer.

        Raises:
            ArgumentError: if the optimizer was not initialized, or none of its transformations
                takes an argument of that name. Or a gradient is complex and its parameter is not;
                or the model and its gradients were swapped. Gradients that `filter_grad` returned
                in the same trace are recognized, and those of another structure. Those of
                `jax.grad`, of another compiled call, or of `jax.tree.map` are not.
            StructureError: if the model is not the one that the optimizer was initialized with, or
                a trained leaf has no gradient of numbers.
            ShapeError: if a gradient, also one that `before` returns, would be broadcast to its
                parameter, or a transformation returned an update, or a state, of another shape. A
                gradient with more axes is passed on, for transformations that take one for each
                example.
        """
        plan, states = self._initialized("update")
        leaves, treedef = jtu.tree_flatten(model)
        if are_derivatives(model) or (
            treedef != plan.structure and jtu.tree_structure(grads) == plan.structure
        ):
            raise ArgumentError(
                "Optimizer.update(model, grads)",
                "the model, then its gradients",
                f"gradients ({with_article(class_of(model).__qualname__)}) first",
                hint=["pass the model first:", "model, opt = opt.update(model, grads)"],
            )
        check_model(plan, model, treedef)
        steps = [_Step(rule, extra) for rule in self._transformations(plan)]
        unknown = [name for name in extra if all(name not in step.extra for step in steps)]
        if unknown:
            raise ArgumentError(
                "Optimizer.update",
                "extra arguments that a transformation accepts",
                f"{', '.join(unknown)}, which none accepts",
            )
        given = _gradients(plan, model, leaves, treedef, grads)
        before, *own = steps
        before_state = self.before_state
        if self.before is not None:
            given, before_state = before.take(plan, None, given, before_state, leaves)
            # A rule would broadcast it, together with its state.
            _check_fit(plan, "before", leaves, given)
        updates: list[Any] = [None] * len(leaves)
        news = list(states)
        for i, step in enumerate(own):
            if plan.is_used[i]:
                made, news[i] = step.take(plan, i, given, states[i], leaves)
                # No leaf has two rules, so that the first update is the only one.
                updates = [
                    new if old is None else old for old, new in zip(updates, made, strict=True)
                ]
        new = sharded_as(apply_updates(model, treedef.unflatten(updates)), model)
        return new, self.replace(states=tuple(news), before_state=before_state)

    def with_hyperparams(self: _O, selector: FilterSpec = ..., /, **values: Any) -> _O:
        """Change hyperparameters by hand, such as the learning rate.

        You can change those that `optax.inject_hyperparams` has put into the state, where they are
        arrays. Nothing is compiled again: the new value has shape, dtype and weak type of the old.

        Args:
            selector: picks leaves of the model: all leaves of a rule, or none.
            **values: new values by name.

        Returns:
            A new optimizer.

        Raises:
            ArgumentError: if no rule has a hyperparameter of that name, a schedule decides it, or
                the optimizer was not initialized.
            SpecError: if `selector` picks some leaves of a rule and not the others, or none that is
                trained.
            ShapeError: if a value is neither a scalar nor of the old one's shape.

        Examples:
            >>> import jax.numpy as jnp, optax
            >>> import pytreemod as pm
            >>> rule = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
            >>> opt = pm.Optimizer(rule).init({"w": jnp.ones(2)})
            >>> opt = opt.with_hyperparams(learning_rate=0.25)
            >>> model, opt = opt.update({"w": jnp.ones(2)}, {"w": jnp.ones(2)})
            >>> model
            {'w': Array([0.75, 0.75], dtype=float32)}
        """
        plan, states = self._initialized("with_hyperparams")
        chosen = chosen_rules(plan, selector)
        trees: list[Any] = [states[i] for i in chosen]
        # A rule for all leaves is included if all leaves are picked.
        is_all = chosen == [i for i, is_used in enumerate(plan.is_used) if is_used]
        trees += [self.before_state] if is_all else []
        others = {repr(rule): states[i] for i, rule in enumerate(plan.selectors) if i not in chosen}
        for name, value in values.items():
            trees = with_value(trees, name, value, others)
        news = dict(zip(chosen, trees, strict=False))
        return self.replace(
            states=tuple(news.get(i, state) for i, state in enumerate(states)),
            before_state=trees[-1] if is_all else self.before_state,
        )

    def _transformations(self, plan: RulePlan) -> list[Any]:
        """`before`, then the rules, as they are called."""
        every = (self.before, *rules_of(self.rules))
        if self.stacked == "as one" or not plan.has_layers:
            return [*every]
        return [None if rule is None else per_layer(rule) for rule in every]

    def _initialized(self, method: str) -> tuple[RulePlan, tuple[Any, ...]]:
        if self.plan is None or self.states is None:
            raise ArgumentError(
                f"Optimizer.{method}: the optimizer was not initialized",
                hint="opt = pm.Optimizer(rules).init(model)",
            )
        return self.plan, self.states


class _Step:
    """A transformation in one step, with its extra arguments."""

    def __init__(self, rule: Any, extra: dict[str, Any]):
        self.rule = rule
        names = _extra_names(rule) if extra and rule is not None else ()
        self.extra = {k: v for k, v in extra.items() if names is None or k in names}

    def take(
        self, plan: RulePlan, rule: int | None, given: list[Any], state: Any, leaves: list[Any]
    ) -> tuple[list[Any], Any]:
        """Return the updates, one for each leaf of the model, and the new state."""
        mine, params = plan.part(given, rule), plan.part(leaves, rule)
        made, new = update_on_mesh(self.rule, mine, state, params, self.extra)
        try:
            updates = plan.structure.flatten_up_to(made)
        except (ValueError, TypeError) as error:
            raise StructureError(
                "Optimizer.update",
                "a transformation that returns an update for each gradient",
                "a tree of another structure",
                hint=f"JAX says: {str(error).splitlines()[0]}",
            ) from error
        _check_state(plan, rule, state, new)
        return plan.only(updates, rule), new


def _extra_names(rule: Any) -> tuple[str, ...] | None:
    """Return the extra arguments that a transformation accepts; None if it takes any."""
    parameters = list(inspect.signature(rule.update).parameters.values())
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    # After the updates, the state and the parameters, as in optax.
    return tuple(p.name for p in parameters[3:])


def _gradients(
    plan: RulePlan, model: PyTree, leaves: list[Any], treedef: Any, grads: PyTree
) -> list[Any]:
    """Return the gradient of each leaf; None for frozen leaves."""
    try:
        found = treedef.flatten_up_to(grads)
    except (ValueError, TypeError):
        found = None
    if found is None:
        _refuse_gradients(model, grads)
    # A gradient of a frozen leaf is dropped here.
    given = plan.only(found)
    _check_fit(plan, "grads", leaves, given)
    return given


def _check_fit(plan: RulePlan, source: str, leaves: list[Any], given: list[Any]) -> None:
    """Check the gradients that rules get, be they the caller's or those of `before`."""
    rows = list(zip(leaves, given, plan.is_trained, strict=True))
    if not all(_fits(leaf, gradient) for leaf, gradient, is_trained in rows if is_trained):
        _refuse_unfit(plan, source, rows)


def _fits(leaf: Any, gradient: Any) -> bool:
    return _is_numeric(gradient) and _has_shape(leaf, gradient) and _has_parts(leaf, gradient)


def _is_numeric(gradient: Any) -> bool:
    """Whether it is one array of numbers: no None, random key, text, or zero of `float0`."""
    dtype = getattr(gradient, "dtype", jnp.floating)
    is_number = jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)
    return is_array_like(gradient) and is_number


def _has_shape(leaf: Any, gradient: Any) -> bool:
    # One with more axes is never broadcast: the transformation's result must fit, and is
    # checked then. Some take a gradient for each example.
    return jnp.shape(gradient) == jnp.shape(leaf) or jnp.ndim(gradient) > jnp.ndim(leaf)


def _has_parts(leaf: Any, gradient: Any) -> bool:
    return jnp.iscomplexobj(leaf) or not jnp.iscomplexobj(gradient)


# ---- refusals


def _refuse_unfit(plan: RulePlan, source: str, rows: list[tuple[Any, Any, bool]]) -> NoReturn:
    where = f"Optimizer.update({source})"
    wrong = [
        (path_text(loc.path, source), leaf, gradient)
        for loc, (leaf, gradient, is_trained) in zip(locations(plan.stand_in()), rows, strict=True)
        if is_trained and not _fits(leaf, gradient)
    ]
    lost = [row for row in wrong if not _is_numeric(row[2])]
    if lost:
        raise StructureError(
            f"{where}: {len(lost)} of {sum(plan.is_trained)} trained leaves have no gradient",
            at=[path if g is None else f"{path}: {describe(g)}" for path, _, g in lost],
            hint='pm.Optimizer(pm.by({"backbone": None, ...: rule})).init(model)',
        )
    shapes = [row for row in wrong if not _has_shape(row[1], row[2])]
    if shapes:
        raise ShapeError(
            f"{where}: gradients have other shapes than their parameters",
            at=[f"{p}: {describe(g)} for {describe(x)}" for p, x, g in shapes],
        )
    path, _, gradient = wrong[0]
    refuse_complex(where, path, "a gradient", gradient)


def _refuse_gradients(model: PyTree, grads: PyTree) -> NoReturn:
    # None for a leaf was not differentiated; for a node it says too little.
    found = [
        d
        for d in compare(model, grads, fits_always)
        if d.new is not None or jtu.tree_leaves(d.old) != [d.old]
    ]
    hint = ["use the result of filter_grad:", "grads = pm.filter_grad(loss)(model)"]
    if any(d.new is None for d in found):
        hint = ["freeze leaves in the rules:"]
        hint += ['pm.Optimizer(pm.by({"backbone": None, ...: rule})).init(model)']
    raise StructureError(
        "Optimizer.update(grads)",
        "gradients of the model",
        "a tree of another structure",
        at=[d.line("grads", "{1} where the model has {0}") for d in found],
        hint=hint,
    )


def _check_state(plan: RulePlan, rule: int | None, old: Any, new: Any) -> None:
    """Refuse a state that has grown because it was broadcast with a model of other shapes."""
    pairs, structure = jtu.tree_flatten_with_path(old)
    if jtu.tree_structure(new) != structure:
        return
    root = "before_state" if rule is None else f"states[{rule}]"
    news = zip(pairs, jtu.tree_leaves(new), strict=True)
    wrong = [
        f"{path_text(path, root)}: {describe(leaf)} -> {describe(other)}"
        for (path, leaf), other in news
        if jnp.shape(leaf) != jnp.shape(other)
    ]
    if wrong:
        raise ShapeError(
            "Optimizer.update: the optimizer was initialized with a model of other shapes",
            at=wrong,
            hint="opt = pm.Optimizer(rules).init(model)",
        )
