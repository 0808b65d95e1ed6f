"""The configuration of a tree as text, by name: what a file has beside the arrays.

`{"layers.3": "class Dropout", "layers.3.p": "0.5"}`. It is compared when the file is loaded, and
never executed. Classes and functions are their names, so that a module may move; a value that has
no text that lasts is left out. The layers of a Stack are alike, and have one text, with `*` for
their number. What follows from the rest is not configuration: the name of a token, the class and
the fields of a Stack or Ensemble.
"""

from __future__ import annotations

import dataclasses
import enum
import functools as ft
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from pytreemod.io.names import Place
from pytreemod.state.tokens import is_token
from pytreemod.training.precision_rules import precisions_of
from pytreemod.tree.kinds import dtype_of
from pytreemod.tree.nodes import own_class, record_of
from pytreemod.tree.predicates import NUMBERS, is_array
from pytreemod.tree.stored_fields import stored
from pytreemod.typing import class_of

_CLASS = "class "


def configuration_of(places: Iterable[Place]) -> dict[str, str]:
    """Return the class of each Module, and the text of each configuration field, by name."""
    found: dict[str, str] = {}
    for place in places:
        name, node = place.name("*" * len(place.layers)), place.node
        if place.is_leaf:
            # A string, or a function, in the place of an array.
            is_value = is_array(node) or hasattr(node, "dtype") or isinstance(node, NUMBERS)
            text = None if is_value else text_of(node)
            found |= {} if text is None else {name: text}
            continue
        record = record_of(node)
        is_stack = hasattr(class_of(node), "__stacked__")
        if record is not None and record.is_hole and node.through is not None:
            found[name] = f"tied through {text_of(node.through)}"
        if record is None or record.is_hole or is_token(node) or is_stack:
            continue
        found[name] = f"{_CLASS}{own_class(node).__name__}"
        values = {each: stored(node, each) for each in record.names(node)}
        for each in record.data_names(node):
            del values[each]
        values |= {f"{at} precision": repr(p) for at, p in precisions_of(node).items()}
        for each, value in values.items():
            text = text_of(value)
            found |= {} if text is None else {f"{name}.{each}".lstrip("."): text}
    return found


def text_of(value: Any) -> str | None:
    """Return a value as text, the same in every process; None if there is none.

    Examples:
        >>> import jax
        >>> text_of((1, jax.nn.relu, {"p": 0.5}))
        "(1, relu, {'p': 0.5})"
    """
    if value is None or isinstance(value, (*NUMBERS, str, bytes, range, slice)):
        return repr(value)
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if dtype_of(value) is not None:
        return str(dtype_of(value))
    if isinstance(value, np.generic):
        return repr(value.item())
    if isinstance(value, ft.partial):
        return f"partial{text_of((value.func, value.args, value.keywords))}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(str(text_of(item)) for item in value)})"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(str(text_of(item)) for item in value))}}}"
    if isinstance(value, dict):
        items = (f"{key!r}: {text_of(item)}" for key, item in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, jax.sharding.PartitionSpec):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = tuple(getattr(value, field.name, None) for field in dataclasses.fields(value))
        return f"{type(value).__name__}{text_of(fields)}"
    # Classes, functions, ufuncs, jitted functions.
    name = getattr(value, "__name__", None)
    return name if isinstance(name, str) else None


class Difference(NamedTuple):
    """Text that differs; one side is None if it has no such Module."""

    name: str
    mine: str | None
    other: str | None


def differences(
    mine: Mapping[str, str],
    others: Mapping[str, str],
    my_arrays: Iterable[str] = (),
    other_arrays: Iterable[str] = (),
) -> Iterator[Difference]:
    """Yield the configuration that differs.

    A Module that only one side has is told by its arrays; one without arrays is told here. A field
    that only one side has is new in its class, or old.

    Args:
        mine: the configuration of a tree.
        others: that of another tree, or of a file.
        my_arrays: names of all arrays of the first.
        other_arrays: names of all arrays of the second.
    """
    # One name has a star where others have the number of a layer.
    by_form = defaultdict[str, list[str]](list)
    has_stars = any("*" in name for name in mine)
    for name in others:
        if has_stars or "*" in name:
            by_form[form_of(name)].append(name)
    left, only_mine = set(others), list[str]()
    for name, text in mine.items():
        options = [name] if name in others else by_form[form_of(name)]
        found = [other for other in options if _is_one_place(name, other)]
        left -= {*found}
        only_mine += [] if found else [name]
        for other in found:
            if others[other] != text:
                yield Difference(other if "*" in name else name, text, others[other])
    for name in _without_arrays(only_mine, mine, my_arrays):
        yield Difference(name, mine[name], None)
    for name in _without_arrays(sorted(left), others, other_arrays):
        yield Difference(name, None, others[name])


def form_of(name: str) -> str:
    """Return a name with stars for its numbers."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def nodes_above(names: Iterable[str]) -> set[str]:
    """Return the form of every node above, or at, one of these names."""
    found: set[str] = set()
    for name in names:
        steps = form_of(name).split(".")
        found |= {".".join(steps[:i]) for i in range(len(steps) + 1)}
    return found


def _is_one_place(name: str, other: str) -> bool:
    pairs = zip(name.split("."), other.split("."), strict=True)
    return all(a == b or "*" in (a, b) for a, b in pairs)


def _without_arrays(
    names: Iterable[str], texts: Mapping[str, str], arrays: Iterable[str]
) -> list[str]:
    modules = [name for name in names if texts[name].startswith(_CLASS)]
    above = nodes_above(arrays) if modules else ()
    return [name for name in modules if form_of(name) not in above]
