"""Sets flags of all layers in a model, such as from training to inference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np

from pytreemod.errors import ArgumentError, describe, nearest, with_article
from pytreemod.module.field_kinds import check_flag
from pytreemod.module.unfinished import refuse_unfinished
from pytreemod.state.tokens import AbstractToken
from pytreemod.state.values import State
from pytreemod.tree.nodes import AbstractRecord, children_of, record_of
from pytreemod.tree.paths import path_text, some_of
from pytreemod.tree.renewing import with_new_containers
from pytreemod.tree.surgery import replace_at
from pytreemod.typing import Tracer, jtu

Tree = TypeVar("Tree")
_Path = tuple[Any, ...]


def with_mode(model: Tree, /, **flags: Any) -> Tree:
    """Set fields by name, wherever they occur in a tree of Modules.

    Sets configuration, and data that is True or False. Other data (arrays, numbers, Modules) is
    never changed; use [`tree_at`][pytreemod.tree_at] for that. The Modules convert and check the
    new values.

    **Law.** `with_mode(m, inference=b) == inference_mode(m, b)`.

    The new value of a flag must be True or False; for configuration, a function is allowed, too
    (`Stack.remat` may be one).

    Args:
        model: a model, or any tree that has some.
        **flags: new values by field name.

    Returns:
        A new tree. The arrays in it are the same.

    Raises:
        ArgumentError: if no Module in the tree has a field of that name, or one has other data in
            it. Also if the new value of a flag is not one.
        FieldError: if an array was given.
        UnfinishedError: if the model lacks sizes.

    Examples:
        >>> from pytreemod import nn
        >>> nn.with_mode([nn.Dropout(0.5), nn.Identity()], p=0.1, inference=True)
        [Dropout(p=0.1, inference=True), Identity()]
    """
    refuse_unfinished("with_mode", model)
    model = with_new_containers(model)
    setting = _Setting("with_mode({name})", flags)
    new = setting.visit(model, ())
    for name in flags:
        if name not in setting.seen:
            _refuse_unknown(name, setting.seen)
    return new


def inference_mode(pytree: Tree, value: bool = True) -> Tree:
    """Set every field named `inference`, anywhere in a tree of Modules.

    `Dropout` and `BatchNorm` have such a field; Modules of your own may have one too, as
    configuration or as data. Other fields are set by [`with_mode`][pytreemod.nn.with_mode].

    Args:
        pytree: a model, or any tree that has some.
        value: True for inference, False for training.

    Returns:
        A new tree. The arrays in it are the same.

    Raises:
        ArgumentError: if value is neither True nor False, or a field of that name has other data.
        UnfinishedError: if the model lacks sizes.

    Examples:
        >>> from pytreemod import nn
        >>> nn.inference_mode([nn.Dropout(0.5)])
        [Dropout(inference=True)]
    """
    value = check_flag("inference_mode(value)", value)
    refuse_unfinished("inference_mode", pytree)
    return _Setting("inference_mode", {"inference": value}).visit(with_new_containers(pytree), ())


class _Setting:
    """One walk over a tree that sets fields, and notes which it could have set."""

    def __init__(self, where: str, flags: dict[str, Any]):
        self.where, self.flags = where, flags
        self.seen: set[str] = set()

    def visit(self, node: Any, path: _Path) -> Any:
        """Return the tree with new values; contents of a Module change before its checks run."""
        children = children_of(node)
        # Tokens and States have no flags. (Checked last: an instance check of an array against an
        # abstract class takes as long as everything else.)
        if children is None or isinstance(node, (AbstractToken, State)):
            return node
        parts = [(key, old, self.visit(old, (*path, key))) for key, old in children]
        changed = [((key,), new) for key, old, new in parts if new is not old]
        if changed:
            # The model of the new mode gets its own State, because calls may use it up.
            beside = [(key, old) for key, old in children if isinstance(old, State)]
            changed += [((key,), _copy(state)) for key, state in beside]
        node = replace_at(node, changed) if changed else node
        record = record_of(node)
        if record is None:
            return node
        values = dict(self._values(node, path, record))
        return node.replace(**values) if values else node

    def _values(self, node: Any, path: _Path, record: AbstractRecord) -> Iterator[tuple[str, Any]]:
        data = record.data_names(node)
        for name in record.names(node):
            old = getattr(node, name)
            settable = name not in data or _is_flag(old)
            if settable:
                self.seen.add(name)
            if name in self.flags:
                place = path_text((*path, jtu.GetAttrKey(name)))
                where = self.where.format(name=name)
                if not settable:
                    _refuse_data(where, place, old)
                new = self.flags[name]
                yield name, _check_flag(where, place, new, name in data) if _is_flag(old) else new


def _copy(state: State) -> State:
    if not state.__usable__():
        return state
    # Another object with the same values: using up one does not affect the other.
    leaves, treedef = jtu.tree_flatten(state)
    return treedef.unflatten(leaves)


def _is_flag(value: Any) -> bool:
    """Whether a value is True or False, or such an array, which transforms make from data."""
    if isinstance(value, bool):
        return True
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    return dtype == np.dtype(bool) and shape == ()


def _check_flag(where: str, place: str, value: Any, is_data: bool) -> Any:
    """Require True or False; configuration may also be a function."""
    if type(value) in (bool, np.bool_):
        return bool(value)
    if not is_data and callable(value):
        return value
    traced = isinstance(value, Tracer)
    hint = [
        "a flag is static; to choose with a traced value, choose between two calls:",
        "y = pm.filter_cond(flag, model_on, model_off, x)",
    ]
    got = "a traced array" if traced else describe(value)
    raise ArgumentError(where, "True or False", got, at=[place], hint=hint if traced else ())


def _refuse_data(where: str, place: str, old: Any) -> None:
    raise ArgumentError(
        where,
        "a field that is configuration or a bool",
        f"data: {_kind(old)}",
        at=[place],
        hint=[
            "set this field by its path, or declare it with pm.field(static=True):",
            f"model = pm.tree_at({place!r}, model, new)",
        ],
    )


def _kind(value: Any) -> str:
    is_node = record_of(value) is not None
    return with_article(type(value).__name__) if is_node else describe(value)


def _refuse_unknown(name: str, seen: set[str]) -> None:
    names = sorted(seen)
    raise ArgumentError(
        f"with_mode: no layer has a field {name!r}{nearest(name, names)}, "
        f"but {some_of(names) or 'none that can be set'}"
    )
