"""The configuration of a tree as text, by name: what a file has beside the arrays.

`{"layers.3": "class Dropout", "layers.3.p": "0.5"}`. It is compared when the file is loaded, and
never executed. Classes and functions are their names, so that a module may move; a value that has
no text that lasts is left out. Each layer of a Stack has its text, as in a list. What follows
from the rest is no configuration: the name of a token, the class and the fields of a Stack or
Ensemble.
"""

from __future__ import annotations

import dataclasses
import enum
import functools as ft
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from pytreemod.io.names import Place, nodes_above
from pytreemod.nn.stacked_layers import Stacked
from pytreemod.state.tokens import is_token
from pytreemod.training.precision_rules import precisions_of
from pytreemod.tree.instances import is_module, notes_of, split_of, stored
from pytreemod.tree.nodes import own_class
from pytreemod.tree.paths import step_names
from pytreemod.tree.predicates import NUMBERS, is_abstract
from pytreemod.typing import class_of, is_instance

_CLASS = "class "


def configuration_of(places: Iterable[Place]) -> dict[str, str]:
    """Return the class of each Module, and the text of each configuration field, by name."""
    found: dict[str, str] = {}
    for place in places:
        texts = _texts_of(place)
        for at in place.parts() if texts else ():
            name = place.name(at)
            found |= {".".join(filter(None, (name, each))): text for each, text in texts.items()}
    return found


def _texts_of(place: Place) -> dict[str, str]:
    """Return the texts of one node, by field; that of the node itself has no name."""
    node = place.node
    values: dict[str, Any] = {}
    if place.children is None and not is_abstract(node) and not is_instance(node, NUMBERS):
        # A string, or a function, in the place of an array.
        values = {"": text_of(node)}
    elif is_module(node) and not is_token(node) and not is_instance(node, Stacked):
        # What follows from the rest is compared with it.
        data = {*split_of(node).data, *getattr(node, "__derived__", ())}
        fields = (each for each in split_of(node).names if each not in data)
        values = {"": f"{_CLASS}{own_class(node).__name__}"}
        values |= {each: text_of(stored(node, each)) for each in fields}
        ties = notes_of(node).ties
        values |= {
            ".".join(step_names(t.place)): f"tied through {text_of(t.through)}" for t in ties
        }
        values |= {f"{at} precision": f"{_CLASS}{p!r}" for at, p in precisions_of(node).items()}
    return {each: text for each, text in values.items() if text is not None}


def text_of(value: Any) -> str | None:
    """Return a value as text, the same in every process; None if there is none.

    Examples:
        >>> import jax
        >>> text_of((1, jax.nn.relu, {"p": 0.5}))
        "(1, relu, {'p': 0.5})"
    """
    if is_instance(value, np.generic):
        return repr(value.item())
    if value is None or is_instance(value, (*NUMBERS, str, bytes, range, slice, PartitionSpec)):
        return repr(value)
    if is_instance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    is_dtype = is_instance(value, np.dtype) or class_of(value) is class_of(jnp.float32)
    if is_dtype or (is_instance(value, type) and np.generic in value.__mro__):
        return str(np.dtype(value))  # However it is spelled.
    if is_instance(value, ft.partial):
        return f"partial{text_of((value.func, value.args, value.keywords))}"
    if is_instance(value, (list, tuple)):
        return f"({', '.join(str(text_of(item)) for item in value)})"
    if is_instance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(str(text_of(item)) for item in value))}}}"
    if is_instance(value, dict):
        items = (f"{key!r}: {text_of(item)}" for key, item in sorted(value.items(), key=repr))
        return f"{{{', '.join(items)}}}"
    if dataclasses.is_dataclass(value) and not is_instance(value, type):
        compared = [each.name for each in dataclasses.fields(value) if each.compare]
        fields = tuple(getattr(value, name, None) for name in compared)
        return f"{type(value).__name__}{text_of(fields)}"
    # Classes, functions, ufuncs, jitted functions.
    return getattr(value, "__name__", None)


def differences(
    mine: Mapping[str, str],
    others: Mapping[str, str],
    my_arrays: Iterable[str],
    other_arrays: Iterable[str],
) -> list[tuple[str, str | None, str | None]]:
    """Return the configuration that differs: its name, and the text of each side.

    A Module that only one side has is told by its arrays; one without arrays is told here. A field
    that only one side has is new in its class, or old.

    Args:
        mine: the configuration of a tree.
        others: that of another tree, or of a file.
        my_arrays: names of all arrays of the first.
        other_arrays: names of all arrays of the second.
    """
    both = ((name, mine[name], others.get(name, text)) for name, text in mine.items())
    ours = ((name, mine[name], None) for name in _without_arrays(mine, others, my_arrays))
    theirs = ((name, None, others[name]) for name in _without_arrays(others, mine, other_arrays))
    return [*(each for each in both if each[1] != each[2]), *ours, *theirs]


def _without_arrays(
    texts: Mapping[str, str], others: Mapping[str, str], arrays: Iterable[str]
) -> list[str]:
    """Return the Modules that only one side has, and that have no arrays."""
    alone = [n for n, text in texts.items() if n not in others and text.startswith(_CLASS)]
    above = nodes_above(arrays) if alone else ()
    return [name for name in alone if name not in above]
