"""`inference_mode` and `with_mode`: set flags of all layers in a model."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from pytreemod.errors import ArgumentError, describe, nearest
from pytreemod.state.tokens import AbstractToken
from pytreemod.state.values import State
from pytreemod.tree.instances import is_module, split_of
from pytreemod.tree.nodes import children_of, with_new_containers
from pytreemod.tree.paths import path_text
from pytreemod.tree.surgery import replace_at
from pytreemod.typing import KeyPath, jtu

Tree = TypeVar("Tree")


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
        ArgumentError: if a field of that name has data that is neither True nor False.

    Examples:
        >>> from pytreemod import nn
        >>> nn.inference_mode([nn.Dropout(0.5)])
        [Dropout(inference=True)]
    """
    return _set(with_new_containers(pytree), {"inference": value}, set(), ())


# Equinox's older name.
tree_inference = inference_mode


def with_mode(model: Tree, /, **flags: Any) -> Tree:
    """Set fields by name, wherever they occur in a tree of Modules.

    Sets configuration, and data that is True or False. Other data (arrays, numbers, Modules) is
    never changed; use [`tree_at`][pytreemod.tree_at] for that.

    **Law.** `with_mode(m, inference=b) == inference_mode(m, b)`.

    Args:
        model: a model, or any tree that has some.
        **flags: new values by field name.

    Returns:
        A new tree. The arrays in it are the same.

    Raises:
        ArgumentError: if no Module in the tree has a field of that name, or one has other data in
            it.
        FieldError: if an array was given.

    Examples:
        >>> from pytreemod import nn
        >>> nn.with_mode([nn.Dropout(0.5), nn.Identity()], p=0.1, inference=True)
        [Dropout(p=0.1, inference=True), Identity()]
    """
    seen: set[str] = set()
    new = _set(with_new_containers(model), flags, seen, ())
    for name in flags.keys() - seen:
        fact = f"with_mode: no layer has a field {name!r}{nearest(name, sorted(seen))}"
        raise ArgumentError(fact)
    return new


def _set(node: Any, flags: dict[str, Any], seen: set[str], path: KeyPath) -> Any:
    """Set fields in a tree, inner nodes first, and note the names of those that can be set."""
    children = children_of(node)
    # An instance check of an array takes as long as everything else, so it comes last.
    if children is None or isinstance(node, (AbstractToken, State)):
        return node
    parts = [(key, old, _set(old, flags, seen, (*path, key))) for key, old in children]
    changed = [((key,), new) for key, old, new in parts if new is not old]
    if changed:
        # The model of the new mode gets its own State, because calls may use it up.
        changed += [((key,), _copy(old)) for key, old in children if isinstance(old, State)]
        node = replace_at(node, changed)
    if not is_module(node):
        return node
    data, values = split_of(node).data, dict[str, Any]()
    for name in split_of(node).names:
        old = getattr(node, name) if name in flags or name not in data else None
        if name not in data or _is_flag(old):
            seen.add(name)
        if name not in flags:
            continue
        if name in data and not (_is_flag(old) and isinstance(flags[name], (bool, np.bool_))):
            place = path_text((*path, jtu.GetAttrKey(name)))
            got = describe(flags[name] if _is_flag(old) else old)
            raise ArgumentError(f"with_mode({name})", "True or False", got, at=[place])
        values[name] = flags[name]
    return node.replace(**values) if values else node


def _is_flag(value: Any) -> bool:
    """Whether a value is True or False, or such an array, which transforms make from data."""
    dtype = getattr(value, "dtype", None)
    return isinstance(value, bool) or (dtype == np.dtype(bool) and value.shape == ())


def _copy(state: State) -> State:
    # Another object with the same values: using up one does not affect the other.
    leaves, treedef = jtu.tree_flatten(state)
    return treedef.unflatten(leaves) if state.__usable__() else state
