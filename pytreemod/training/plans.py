"""The rule of each leaf of a model.

Decided once, by the selectors, when an optimizer is initialized: a number for each leaf, which is
configuration from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytreemod.errors import ArgumentError, SpecError, StructureError, describe
from pytreemod.transform.capturing import released
from pytreemod.transform.chosen_leaves import trainable_mask
from pytreemod.tree.differences import compare
from pytreemod.tree.members import holds_of
from pytreemod.tree.nodes import Location, locations
from pytreemod.tree.paths import path_text, pattern_text, some_of
from pytreemod.tree.prefixes import By, decide, refuse_shadowed
from pytreemod.tree.selecting import Locations, Selector, as_selector, refuse_unmatched
from pytreemod.typing import PyTree, jtu

# The label of a leaf that is not trained, whatever its rule.
_UNTRAINED = -1


class RulePlan:
    """The rule of each leaf of a model: decided once, and configuration from then on.

    Transformations always get the structure that the model had when the optimizer was
    initialized: in another mode it has another structure, which would not fit their state.
    """

    __slots__ = ("_hash", "has_layers", "is_trained", "is_used", "labels", "selectors", "structure")

    def __init__(
        self,
        structure: Any,
        labels: tuple[int, ...],
        selectors: tuple[Selector, ...],
        is_used: tuple[bool, ...],
    ):
        self.structure = structure
        self.labels = labels
        self.selectors = selectors
        # Rules with a transformation that apply to some leaf.
        self.is_used = is_used
        self.is_trained = tuple(label != _UNTRAINED and is_used[label] for label in labels)
        # Whether any leaf has layer axes: computed here, so that steps need not look.
        self.has_layers = any(holds_of(loc) for loc in locations(self.stand_in()))
        # Computed once: a plan is part of the key of every jitted step.
        self._hash = hash((structure, labels, selectors))

    def only(self, values: Sequence[Any], rule: int | None = None) -> list[Any]:
        """Values by leaf, with None for leaves that are not trained, or have another rule."""
        if rule is None:
            return [v if t else None for v, t in zip(values, self.is_trained, strict=True)]
        return [v if i == rule else None for v, i in zip(values, self.labels, strict=True)]

    def part(self, values: Sequence[Any], rule: int | None = None) -> PyTree:
        """Return the tree of `only`."""
        return self.structure.unflatten(self.only(values, rule))

    def stand_in(self) -> PyTree:
        """Return a tree of the model's structure, for code that needs nothing else."""
        return self.structure.unflatten(self.labels)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RulePlan):
            return NotImplemented
        mine = (self.structure, self.labels, self.selectors, self.is_used)
        return mine == (other.structure, other.labels, other.selectors, other.is_used)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:
        # JAX cannot pickle a structure with nodes of classes.
        return _plan_of, (self.stand_in(), self.selectors, self.is_used)

    def __repr__(self) -> str:
        numbers = [self.labels.count(i) for i in range(len(self.selectors))]
        return f"<{', '.join(map(str, numbers))} of {len(self.labels)} leaves>"


def _plan_of(
    stand_in: PyTree, selectors: tuple[Selector, ...], is_used: tuple[bool, ...]
) -> RulePlan:
    labels, structure = jtu.tree_flatten(stand_in)
    return RulePlan(structure, tuple(labels), selectors, is_used)


def make_plan(rules: Any, model: PyTree) -> RulePlan:
    """Decide the rule of each leaf of a model.

    Args:
        rules: the rules of an `Optimizer`.
        model: the model.

    Raises:
        SpecError: if a trained leaf has no rule; or a selector picks nothing, or only leaves that
            earlier ones pick.
        ArgumentError: if nothing is to be trained.
    """
    selectors, transformations = _selectors_of(rules), rules_of(rules)
    items = list(zip(selectors, transformations, strict=True))
    locs = Locations(locations(model))
    trained = trainable_mask(model, None, "Optimizer.init")
    picks = _picks(selectors, model, locs)
    entries, shadowed = decide(picks, len(locs))
    refuse_shadowed("Optimizer.init", items, entries, shadowed, locs)
    labels: list[int] = []
    # Trained leaves without a rule, for one error.
    lost: list[Location] = []
    for loc, is_trained, rule in zip(locs, trained, entries, strict=True):
        lost += [loc] if is_trained and rule is None else []
        labels.append(rule if is_trained and rule is not None else _UNTRAINED)
    if lost:
        raise SpecError(
            f"Optimizer.init: {len(lost)} of {sum(trained)} trainable leaves have no rule",
            at=_shown(lost),
            hint="pm.by({..., ...: None})  # freezes the others",
        )
    is_used = tuple(rule is not None and i in labels for i, rule in enumerate(transformations))
    if not any(is_used):
        raise ArgumentError(
            "Optimizer.init",
            "at least one floating array to train",
            "none with a rule, apart from buffers",
            at=_shown(locs),
            hint=[
                "roles decide which leaves are trained; to change them in one model:",
                'model = pm.with_role(model, selector, "param")',
            ],
        )
    # Inside a `capture` the model is wrapped for that one call, but the plan is for all calls.
    structure = jtu.tree_structure(released(model))
    return RulePlan(structure, tuple(labels), selectors, is_used)


def _picks(selectors: Sequence[Selector], model: PyTree, locs: list[Location]) -> list[list[bool]]:
    """Return which leaves each selector picks."""
    refuse_unmatched(selectors, [model])
    picks = [selector.pick(locs, model, None) for selector in selectors]
    for selector, picked in zip(selectors, picks, strict=True):
        if not any(picked):
            shown = some_of([pattern_text(loc.path) for loc in locs])
            raise SpecError(
                f"Optimizer.init, rule for {selector!r}",
                "a selector that picks at least one leaf",
                "none",
                hint=f"the model has: {shown or 'no leaves'}",
            )
    return picks


def rules_of(rules: Any) -> tuple[Any, ...]:
    """Return the transformation of each rule, in order; None for a rule without one."""
    return tuple(rule for _, rule in rules.items) if isinstance(rules, By) else (rules,)


def _selectors_of(rules: Any) -> tuple[Selector, ...]:
    return tuple(rules.selectors) if isinstance(rules, By) else (as_selector(...),)


# ---- refusals


def check_transformation(where: str, rule: Any, *, or_none: bool = True) -> None:
    """Refuse a rule that is neither a transformation nor None.

    Args:
        where: the function, and its parameter.
        rule: what the caller has passed.
        or_none: whether None is accepted.
    """
    methods = [getattr(rule, name, None) for name in ("init", "update")]
    is_none = rule is None and or_none
    if is_none or (all(map(callable, methods)) and not isinstance(rule, type)):
        return
    call = f"pm.{where.partition('(')[0]}"
    hint = ["for example:", f"{call}(optax.adam(1e-3))"]
    if isinstance(rule, (dict, By)):
        hint = ["combine rules for parts of a model with pm.by:"]
        hint += ['pm.Optimizer(pm.by({"head": optax.adam(1e-3), ...: None}))']
    elif callable(rule):
        name = getattr(rule, "__name__", "adam")
        hint = ["call it to create a transformation:", f"{call}(optax.{name}(1e-3))"]
    expected = "an optax transformation, with `init` and `update`" + ", or None" * or_none
    raise ArgumentError(where, expected, describe(rule), hint=hint)


def check_planned(plan: RulePlan, rules: Any) -> None:
    """Refuse other rules for an optimizer that has its state."""
    pairs = zip(plan.is_used, rules_of(rules), strict=False)
    fits = plan.selectors == _selectors_of(rules)
    if fits and all((rule is not None) or not is_used for is_used, rule in pairs):
        return
    raise ArgumentError(
        "Optimizer.replace(rules)",
        "rules with the selectors that the optimizer was initialized with",
        "other selectors",
        hint=["create another optimizer:", "opt = pm.Optimizer(rules).init(model)"],
    )


def _shown(locs: list[Location]) -> list[str]:
    return [f"{path_text(loc.path, 'model')}: {describe(loc.leaf)}" for loc in locs]


def check_model(plan: RulePlan, model: PyTree, treedef: Any) -> None:
    """Refuse a model whose leaves differ from those that the optimizer was initialized with.

    Its configuration may differ: in another mode it has the same leaves.
    """
    if treedef == plan.structure:
        return
    hint = ["an optimizer is for one model; create another for this one:"]
    hint += ["opt = pm.Optimizer(rules).init(model)"]
    found = [d for d in compare(plan.stand_in(), model, fits_always) if d.of_structure]
    if found:
        raise StructureError(
            "Optimizer.update(model)",
            "the model that the optimizer was initialized with",
            "a model of another structure",
            # In the stored structure every leaf is its label.
            at=[
                d.line("model", "a leaf -> {1}" if type(d.old) is int else "{} -> {}")
                for d in found
            ],
            hint=hint,
        )
    now = trainable_mask(model, None, "Optimizer.update")
    changed = [
        f"{path_text(loc.path, 'model')}: now {'trained' if is_trained else 'frozen'}"
        for loc, is_trained, label in zip(locations(model), now, plan.labels, strict=True)
        if is_trained != (label != _UNTRAINED)
    ]
    if changed:
        raise StructureError(
            "Optimizer.update(model)",
            "leaves with the roles that they had when the optimizer was initialized",
            f"other roles for {len(changed)}",
            at=changed,
            hint=hint,
        )


def fits_always(first: Any, second: Any) -> bool:
    """Return True for any two arrays, so that `compare` looks only at structure."""
    return True
