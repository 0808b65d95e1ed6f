"""Roles of single instances, instead of those that their classes declare.

To freeze parameters, give them another role: everything that trains selects by role, so
you say it once. The role of a leaf is a note of the innermost Module above it, beside its fields.
It goes wherever the Module goes, and other instances do not have it. Names of axes are such notes,
too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from pytreemod.errors import ArgumentError, SpecError, describe
from pytreemod.tree.instances import is_module, notes_of, with_notes
from pytreemod.tree.nodes import Location, leaves_shown, locations, with_new_containers
from pytreemod.tree.paths import path_text, step_name
from pytreemod.tree.prefixes import mask_of
from pytreemod.tree.surgery import replace_at
from pytreemod.typing import FilterSpec, KeyPath

_T = TypeVar("_T")


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
        ArgumentError: if `role` is not a string, or is a word such as `"frozen"`.
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
    if role is not None and not (isinstance(role, str) and role):  # pyright: ignore[reportUnnecessaryIsInstance]  (callers may be unchecked)
        raise ArgumentError("with_role(role)", '"param", "buffer" or another word', describe(role))
    if role in _FROZEN:
        fact = f"with_role: the role {role!r} would be trained, as every one but 'buffer'"
        raise ArgumentError(fact, hint='model = pm.with_role(model, selector, "buffer")')
    model = with_new_containers(model)
    locs = list(locations(model))
    mask = mask_of(selector, model, where="with_role(selector)", root="model")
    picked = [loc for loc, is_picked in zip(locs, mask, strict=True) if is_picked]
    if not picked:
        raise SpecError(f"with_role: {selector!r} picks no leaf", hint=leaves_shown(locs))
    # First remove all: only then is it known which of them have that role anyway.
    bare = with_leaf_notes(model, "roles", ((loc, None) for loc in picked))
    now = zip(locations(bare), mask, strict=True)
    given = ((loc, role) for loc, hit in now if hit and role is not None and loc.role != role)
    return with_leaf_notes(bare, "roles", given)


_FROZEN = frozenset({"frozen", "freeze", "fixed", "constant", "non_trainable"})


def with_leaf_notes(model: _T, kind: str, values: Iterable[tuple[Location, Any]]) -> _T:
    """Set notes of one kind for some leaves, beside those of others.

    Args:
        model: any tree of Modules.
        kind: `"roles"` or `"axes"`.
        values: leaves, each with its value; None removes one.

    Raises:
        SpecError: if a leaf is in no Module.
    """
    holders: dict[KeyPath, Any] = {}
    changes: dict[KeyPath, dict[tuple[str, ...], Any]] = {}
    for loc, value in values:
        depth = depth_of_holder(loc)
        if depth < 0:
            raise SpecError(f"{path_text(loc.path)} is in no Module, which would store its {kind}")
        steps = tuple(map(step_name, loc.path[depth:]))
        holders[loc.path[:depth]] = loc.holders[depth]
        changes.setdefault(loc.path[:depth], {})[steps] = value
    edits: dict[int, list[tuple[KeyPath, Any]]] = {}
    for path, change in changes.items():
        old = getattr(notes_of(holders[path]), kind)
        now = {**dict(old), **change}
        # Sorted, so that the order in which values were set does not matter.
        new = tuple(sorted((steps, value) for steps, value in now.items() if value is not None))
        if new != old:
            edits.setdefault(len(path), []).append((path, with_notes(holders[path], **{kind: new})))
    # The outer ones first: those further down are still the same when their turn comes.
    for depth in sorted(edits):
        model = replace_at(model, edits[depth])
    return model


def depth_of_holder(loc: Location) -> int:
    """Return the number of keys to the innermost Module above a leaf; -1 if there is none."""
    return max((i for i, node in enumerate(loc.holders) if is_module(node)), default=-1)
