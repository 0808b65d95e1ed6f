"""Roles of single instances, instead of those that their classes declare.

To freeze parameters, give them another role: everything that trains selects by role, so
you say it once. The role of a leaf is configuration of the innermost Module above it,
stored beside its fields. It goes wherever the Module goes, and other instances do not have it.
"""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

from pytreemod.errors import ArgumentError, SpecError, describe
from pytreemod.module.leaf_notes import depth_of_holder, with_leaf_notes
from pytreemod.module.schema import ROLES
from pytreemod.tree.nodes import DECLARED_ROLES, Location, leaves_shown, locations
from pytreemod.tree.partitioning import mask_of
from pytreemod.tree.paths import path_text
from pytreemod.tree.renewing import with_new_containers
from pytreemod.typing import FilterSpec

_T = TypeVar("_T")

_SYNONYMS = {
    "param": {"parameter", "trainable", "trained", "learnable"},
    "buffer": {
        *("frozen", "freeze", "fixed", "constant", "untrained", "no_grad"),
        *("non_trainable", "nontrainable", "not_trainable", "untrainable"),
    },
}
"""Common words for the two. As roles they would train parameters that should be frozen."""


def with_role(model: _T, selector: FilterSpec, role: str | None) -> _T:
    """Give chosen leaves another role: training ignores `"buffer"` and changes `"param"`.

    `filter_grad`, `trainable`, [`Optimizer`][pytreemod.Optimizer] and `select.role` all look at the
    role of a leaf, so the code that trains all of a model can train a part of it.

    The role is given to a *path* of this one model, as `field(role=...)` gives it to a field of
    all instances: surgery that puts another array there preserves it. It is configuration, part of
    the structure: transforms, copies, pickles and files preserve it, and a compiled function is
    compiled again for a model with other roles.

    **Laws.** The picked leaves have that role afterwards, and all others the one that they had. A
    role that a leaf has anyway is not recorded: `with_role(with_role(m, s, "buffer"), s, "param")`
    equals `m`, where `s` picks parameters, and so does `with_role(with_role(m, s, role), s, None)`
    for every `s`, if `m` was given no roles.

    Args:
        model: a model, or any tree of Modules.
        selector: picks the leaves.
        role: `"param"` is trained, `"buffer"` is not, any other word is yours;
            None for the role that the class declares.

    Returns:
        A new tree with the same arrays.

    Raises:
        ArgumentError: if `role` is not a string; or it resembles `"param"` or `"buffer"`, or is a
            word for one of them, such as `"frozen"`, that no class declares.
        SpecError: if `selector` picks nothing, or leaves outside Modules.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> class Line(pm.Module):
        ...     slope: jnp.ndarray
        ...     offset: jnp.ndarray
        ...     def __call__(self, x):
        ...         return self.slope * x + self.offset
        >>> line = pm.with_role(Line(jnp.asarray(2.0), jnp.asarray(1.0)), "offset", "buffer")
        >>> pm.filter_grad(lambda m, x: m(x))(line, 4.0)
        Line(slope=weak_f32[], offset=None)
    """
    _check_role(role)
    model = with_new_containers(model)
    locs = list(locations(model))
    mask = mask_of(selector, model, where="with_role(selector)", root="model")
    picked = [loc for loc, is_picked in zip(locs, mask, strict=True) if is_picked]
    if not picked:
        _refuse_nothing(selector, locs)
    _refuse_unheld(picked)
    # First remove all: only then is it known which of them have that role anyway.
    bare = with_leaf_notes(model, ROLES, ((loc, None) for loc in picked))
    if role is None:
        return bare
    DECLARED_ROLES.add(role)
    now = zip(locations(bare), mask, strict=True)
    given = ((loc, role) for loc, is_picked in now if is_picked and loc.role != role)
    new = with_leaf_notes(bare, ROLES, given)
    _check_roles(new, locs, mask, role)
    return new


# ---- refusals


def _check_role(role: Any) -> None:
    if role is None:
        return
    if not isinstance(role, str) or not role:
        raise ArgumentError(
            "with_role(role)",
            '"param", "buffer", another word, or None for the role that the class declares',
            describe(role),
            hint=["for example:", 'pm.with_role(model, "layers.0", "buffer")'],
        )
    if role in DECLARED_ROLES:
        return
    # Any other word is a role that is trained: this one would train what should be frozen.
    said = role.lower().replace("-", "_")
    known = next((name for name, words in _SYNONYMS.items() if said in words), None)
    if known is not None:
        raise ArgumentError(
            f"with_role: the role {role!r} would be trained; the one that is meant is {known!r}",
            hint=f'model = pm.with_role(model, selector, "{known}")',
        )


def _refuse_nothing(selector: Any, locs: list[Location]) -> NoReturn:
    raise SpecError(f"with_role: {selector!r} picks no leaf", hint=leaves_shown(locs))


def _refuse_unheld(picked: list[Location]) -> None:
    lost = [path_text(loc.path) for loc in picked if depth_of_holder(loc) < 0]
    if lost:
        raise SpecError(
            "with_role(selector)",
            "leaves of Modules, which store the roles of their leaves",
            "leaves outside Modules",
            at=lost,
            hint=[
                "choose the trained leaves in each call, or put them into a Module:",
                "pm.filter_grad(loss, wrt=selector)",
                "class Params(pm.Module):",
                "    arrays: dict",
            ],
        )


def _check_roles(new: Any, locs: list[Location], mask: list[bool], role: str) -> None:
    """Refuse leaves that their Module cannot distinguish, or one would get the other's role."""
    wanted = [role if m else loc.role for loc, m in zip(locs, mask, strict=True)]
    found = zip(locations(new), wanted, strict=True)
    wrong = [path_text(loc.path) for loc, expected in found if loc.role != expected]
    if wrong:
        raise SpecError(
            "with_role(selector)",
            "leaves with different names",
            "leaves with the same name",
            at=wrong,
            hint="give the children of that node different keys",
        )
