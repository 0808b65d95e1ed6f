"""Roles that single instances were given, instead of those that their classes declare.

Parameters that training leaves alone get another role: everything that trains selects by role, so
you say it once. A role that a leaf was given is configuration of the innermost Module above it,
stored beside its fields: it goes wherever the Module goes, and other instances have nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, NoReturn, TypeVar

from pytreemod.errors import ArgumentError, SpecError, describe
from pytreemod.module.construction import with_notes
from pytreemod.module.schema import ROLES
from pytreemod.tree.nodes import (
    DECLARED_ROLES,
    GivenRoles,
    Location,
    StandsFor,
    children_of,
    leaves_shown,
    locations,
    record_of,
)
from pytreemod.tree.paths import path_text, step_name
from pytreemod.tree.prefixes import mask_of
from pytreemod.tree.renewing import with_new_containers
from pytreemod.tree.surgery import with_children
from pytreemod.typing import FilterSpec, class_of

_T = TypeVar("_T")
_Steps = tuple[str, ...]

# For each Module that is to change, by its path: what becomes of its leaves, by their steps.
_Changes = dict[tuple[Any, ...], dict[_Steps, str | None]]

_OF_TRAINING = ("param", "buffer")
_SYNONYMS = {
    "param": {"parameter", "trainable", "trained", "learnable"},
    "buffer": {
        *("frozen", "freeze", "fixed", "constant", "untrained", "no_grad"),
        *("non_trainable", "nontrainable", "not_trainable", "untrainable"),
    },
}
"""What people call the two. As roles of their own such words would train what was to be frozen."""


def with_role(model: _T, selector: FilterSpec, role: str | None) -> _T:
    """Give chosen leaves another role: `"buffer"` is left alone by training, `"param"` is trained.

    `filter_grad`, `trainable`, [`Optimizer`][pytreemod.Optimizer] and `select.role` all ask for the
    role of a leaf, so the code that trains all of a model trains a part of it as well.

    The role is given to a *place* of this one model, as `field(role=...)` gives it to a field of
    all instances: surgery that puts another array there leaves it. It is configuration, part of the
    structure: transforms, copies, pickles and files keep it, and a compiled function is compiled
    anew for a model with other roles.

    **Laws.** Afterwards the picked leaves have that role, and all others the one that they had. A
    role that a leaf has anyway is not recorded: `with_role(with_role(m, s, "buffer"), s, "param")`
    equals `m`, where `s` picks parameters, and so does `with_role(with_role(m, s, role), s, None)`
    for every `s`, if `m` was given no roles.

    Args:
        model: a model, or any tree of Modules.
        selector: which leaves.
        role: their role: `"param"` is trained, `"buffer"` is left alone, any other word is yours;
            None for the one that their classes declare.

    Returns:
        A new tree. The arrays in it are the same.

    Raises:
        ArgumentError: `role` is no text; or nearly `"param"` or `"buffer"`, or a word for one of
            them, such as `"frozen"`, that no class declares.
        SpecError: `selector` picks nothing, or leaves that no Module holds.

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
    # First without: only then is it known which of them have that role anyway.
    bare = _given(model, ((loc, None) for loc in picked))
    if role is None:
        return bare
    DECLARED_ROLES.add(role)
    now = zip(locations(bare), mask, strict=True)
    new = _given(bare, ((loc, role) for loc, is_picked in now if is_picked and loc.role != role))
    _check_roles(new, locs, mask, role)
    return new


def _given(model: _T, roles: Iterable[tuple[Location, str | None]]) -> _T:
    """The model with roles given to places, or taken from them."""
    changes: _Changes = {}
    for loc, role in roles:
        depth = _depth_of_holder(loc)
        steps = tuple(map(step_name, loc.path[depth:]))
        changes.setdefault(loc.path[:depth], {})[steps] = role
    above = {path[:i] for path in changes for i in range(len(path) + 1)}
    return _changed(model, (), changes, above)


def _depth_of_holder(loc: Location) -> int:
    """How many steps there are to the innermost Module above a leaf; -1 if there is none."""
    nodes = [node for node in loc.nodes if class_of(node) is not StandsFor]
    return max((i for i, node in enumerate(nodes) if record_of(node) is not None), default=-1)


def _changed(
    node: Any, path: tuple[Any, ...], changes: _Changes, above: set[tuple[Any, ...]]
) -> Any:
    if path not in above:
        return node
    children = children_of(node) or []
    below = [_changed(child, (*path, key), changes, above) for key, child in children]
    node = with_children(node, children, below)
    return _holding(node, changes[path]) if path in changes else node


def _holding(node: Any, changes: dict[_Steps, str | None]) -> Any:
    """A Module with other roles; itself, if nothing changes."""
    old: GivenRoles = class_of(node).__record__.given_roles(node)
    now: dict[_Steps, str | None] = {**dict(old), **changes}
    # In order, so that it is no matter in which one they were given.
    new: GivenRoles = tuple(sorted((s, role) for s, role in now.items() if role is not None))
    return node if new == old else with_notes(node, {ROLES: new})


# ---- refusals


def _check_role(role: Any) -> None:
    if role is None:
        return
    if not isinstance(role, str) or not role:
        raise ArgumentError(
            "with_role(role)",
            '"param", "buffer", another word, or None for what the class declares',
            describe(role),
            hint=["write, for instance", 'pm.with_role(model, "layers.0", "buffer")'],
        )
    if role in DECLARED_ROLES:
        return
    # Any other word is a role that is trained: a slip would train what was to be frozen.
    said = role.lower().replace("-", "_")
    meant = get_close_matches(said, _OF_TRAINING, n=1, cutoff=0.75)
    meant = [name for name, words in _SYNONYMS.items() if said in words] or meant
    if meant:
        raise ArgumentError(
            "with_role(role)",
            f'"{meant[0]}", or a word that does not mean that',
            repr(role),
            hint=["did you mean", f'pm.with_role(model, selector, "{meant[0]}")'],
        )


def _refuse_nothing(selector: Any, locs: list[Location]) -> NoReturn:
    raise SpecError(
        "with_role(selector)",
        "a selector that picks at least one leaf",
        f"none, by {selector!r}",
        hint=leaves_shown(locs),
    )


def _refuse_unheld(picked: list[Location]) -> None:
    lost = [path_text(loc.path) for loc in picked if _depth_of_holder(loc) < 0]
    if lost:
        raise SpecError(
            "with_role(selector)",
            "leaves of Modules, which keep the roles of what is in them",
            "leaves of which no Module is above",
            places=lost,
            hint=[
                "say at each call what is trained, or hold them in a Module:",
                "pm.filter_grad(loss, wrt=selector)",
                "class Params(pm.Module):",
                "    arrays: dict",
            ],
        )


def _check_roles(new: Any, locs: list[Location], mask: list[bool], role: str) -> None:
    """Refuse leaves that their Module cannot tell apart, or one would get the other's role."""
    wanted = [role if m else loc.role for loc, m in zip(locs, mask, strict=True)]
    found = zip(locations(new), wanted, strict=True)
    wrong = [path_text(loc.path) for loc, expected in found if loc.role != expected]
    if wrong:
        raise SpecError(
            "with_role(selector)",
            "leaves with steps of different names",
            "some with the names of others",
            places=wrong,
            hint="name the children of that node by different keys",
        )
