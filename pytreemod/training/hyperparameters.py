"""Hyperparameters in the optimizer state, which can be changed between two steps.

`optax.inject_hyperparams` puts them there: somewhere in the transformation's state is a node with a
dict `hyperparams`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import jax.numpy as jnp

from pytreemod.errors import ArgumentError, ShapeError, SpecError, describe
from pytreemod.training.plans import RulePlan
from pytreemod.tree.nodes import locations
from pytreemod.tree.paths import pattern_text, some_of
from pytreemod.tree.predicates import is_array_like
from pytreemod.tree.selecting import as_selector
from pytreemod.typing import FilterSpec, jtu

_HYPERPARAMS, _OF_SCHEDULES = (jtu.GetAttrKey(n) for n in ("hyperparams", "hyperparams_states"))


def chosen_rules(plan: RulePlan, selector: FilterSpec) -> list[int]:
    """Return the rules whose leaves a selector picks."""
    chosen = as_selector(selector)
    # A plan has the paths of leaves, but no arrays for a predicate to look at.
    if not chosen.is_structural():
        raise SpecError(
            "with_hyperparams(selector)",
            "a selector by path, type, role or access",
            f"{chosen!r}, which needs arrays, and the optimizer has no arrays of the model",
        )
    stand_in = plan.stand_in()
    mask = chosen.mask(stand_in)
    locs = list(locations(stand_in))
    found: list[int] = []
    for rule, is_used in enumerate(plan.is_used):
        own = [i for i, label in enumerate(plan.labels) if label == rule]
        picked = [i for i in own if mask[i]]
        if is_used and picked and len(picked) < len(own):
            raise SpecError(
                "with_hyperparams(selector)",
                "all leaves of a rule, because they share one value",
                f"some of them, with {chosen!r}",
                at=[f"{pattern_text(locs[i].path)}: not picked" for i in own if not mask[i]],
                hint=["give them their own rule:", f"pm.by({{{chosen!r}: rule, ...: rule}})"],
            )
        found += [rule] if is_used and picked else []
    if not found:
        trained = [loc for loc, t in zip(locs, plan.is_trained, strict=True) if t]
        raise SpecError(
            "with_hyperparams(selector)",
            "a selector of leaves that are trained",
            f"{chosen!r}, which picks none",
            hint=f"the trained leaves are: {some_of([pattern_text(loc.path) for loc in trained])}",
        )
    return found


def with_value(states: list[Any], name: str, value: Any, others: dict[str, list[Any]]) -> list[Any]:
    """States with another value for a hyperparameter, wherever it is in them.

    `others` are those of rules that were not chosen, by their selectors as strings, for errors.
    """
    pairs, treedef = jtu.tree_flatten_with_path(states)
    ends = (_HYPERPARAMS, jtu.DictKey(name))
    at = [i for i, (path, _) in enumerate(pairs) if path[-2:] == ends]
    if not at:
        elsewhere = [text for text, own in others.items() if _has_hyperparameter(own, name)]
        _refuse_unknown(name, [path for path, _ in pairs], elsewhere)
    for i in at:
        # optax stores the states of schedules beside the values, under the same names.
        scheduled = (*pairs[i][0][:-2], _OF_SCHEDULES, ends[1])
        if any(path[: len(scheduled)] == scheduled for path, _ in pairs):
            raise ArgumentError(
                f"with_hyperparams({name})",
                "a hyperparameter that is set by hand",
                "one that a schedule sets in each step",
                hint=[
                    "start with a number instead of the schedule:",
                    f"optax.inject_hyperparams(optax.adamw)({name}=1e-3)",
                ],
            )
    leaves = [leaf for _, leaf in pairs]
    for i in at:
        leaves[i] = _like(leaves[i], value, name)
    return treedef.unflatten(leaves)


def _has_hyperparameter(states: Any, name: str) -> bool:
    paths = [path for path, _ in jtu.tree_leaves_with_path(states)]
    return any(path[-2:] == (_HYPERPARAMS, jtu.DictKey(name)) for path in paths)


def _like(old: Any, value: Any, name: str) -> Any:
    """Return a value as an array that can replace another in a compiled program."""
    where = f"with_hyperparams({name})"
    if isinstance(value, bool) or not is_array_like(value) or not _is_castable(value, old):
        expected = f"a number, or an array, that fits {describe(old)}"
        raise ArgumentError(where, expected, describe(value))
    if jnp.shape(value) not in ((), jnp.shape(old)):
        raise ShapeError(where, f"a scalar, or an array like {describe(old)}", describe(value))
    # In the old dtype: another one would compile the step again.
    return jnp.full_like(old, value)


# From the widest on: each fits into those before it.
_KINDS = (jnp.complexfloating, jnp.floating, jnp.integer)


def _is_castable(value: Any, old: Any) -> bool:
    """Whether only precision is lost: no fraction, and no imaginary part."""
    kinds = [
        next((i for i, kind in enumerate(_KINDS) if jnp.issubdtype(jnp.result_type(x), kind)), -1)
        for x in (value, old)
    ]
    return kinds[0] >= kinds[1]


# ---- refusals


def _refuse_unknown(name: str, paths: Iterable[tuple[Any, ...]], elsewhere: list[str]) -> NoReturn:
    names = sorted({path[-1].key for path in paths if path[-2:-1] == (_HYPERPARAMS,)})
    hint = [
        "let optax store it in the state:",
        f"optax.inject_hyperparams(optax.adamw)({name}=1e-3)",
    ]
    if elsewhere:
        hint = [f"the rule for {elsewhere[0]} has one; name its leaves:"]
        hint += [f"opt.with_hyperparams({elsewhere[0]}, {name}=1e-3)"]
    raise ArgumentError(
        f"with_hyperparams({name})",
        f"a hyperparameter in the state ({', '.join(names) or 'none'})",
        repr(name),
        hint=hint,
    )
