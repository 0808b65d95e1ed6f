"""A tree as two flat tables: its leaves by name, and its configuration by name.

Loading is to bring two such tables together, that of a file and that of `like`. What does not
depend on the values in them, such as names that have changed, is done with the file's table before
anything is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from pytreemod.errors import ArgumentError
from pytreemod.io.configuration import MEMBERS, Json
from pytreemod.io.leaf_names import joined, near_name, words_of
from pytreemod.training.precision_rules import PRECISION
from pytreemod.tree.paths import plain_name
from pytreemod.typing import jtu


class Stacked(NamedTuple):
    """Arrays that become one, along a new axis."""

    parts: tuple[Source, ...]
    axis: int


class Unstacked(NamedTuple):
    """One index of an axis, which goes."""

    whole: Source
    axis: int
    at: int


class Clear(NamedTuple):
    """A constrained value, from which the numbers of a constrained field are made."""

    value: Source | None
    """None for a number that the file has beside the arrays."""

    make: Callable[[Any], Any]


Source: TypeAlias = str | Stacked | Unstacked | Clear
"""Where in the file the numbers of a leaf are: the name of an array; or what is made of some."""


def first_name(source: Source) -> str:
    """The array of the file that a source begins with; "" if it has none.

    Examples:
        >>> first_name(Stacked(("layers.0.weight", "layers.1.weight"), 0))
        'layers.0.weight'
    """
    while not isinstance(source, str):
        if isinstance(source, Clear):
            source = source.value or ""
        else:
            source = source.parts[0] if isinstance(source, Stacked) else source.whole
    return source


@dataclass(frozen=True, slots=True)
class Leaf:
    """What is told of a leaf without its numbers."""

    form: dict[str, Json]
    """See `descriptions.leaf_form`; with "value" for what is no array."""

    shape: tuple[int, ...] = ()
    dtype: np.dtype[Any] | None = None
    source: Source | None = None
    """None for what is no array, and for a leaf of `like`."""

    @property
    def is_array(self) -> bool:
        """Whether it is one: of JAX, of NumPy, of keys."""
        return "value" not in self.form


@dataclass(slots=True)
class Table:
    """A tree by names."""

    leaves: dict[str, Leaf] = field(default_factory=dict[str, Leaf])
    config: dict[str, Json] = field(default_factory=dict[str, Json])
    """Each configuration by its name."""

    classes: dict[str, Json] = field(default_factory=dict[str, Json])
    """The class of each node that is no container of Python's, as it is written."""

    states: list[str] = field(default_factory=list[str])
    """Where States stand."""


def read_table(tree: Json, arrays: Mapping[str, Leaf]) -> Table:
    """The table of a described tree.

    Args:
        tree: what `descriptions.describe_tree` wrote.
        arrays: shape and dtype of each array by name.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: the description is malformed.
    """
    table = Table()
    _read(table, tree, (), arrays)
    return table


_TOKENS = ("pytreemod.StateIndex", "pytreemod.RngStream")


def _word(step: Any) -> str:
    return plain_name((jtu.GetAttrKey(step if isinstance(step, str) else repr(step)),))


def _read(table: Table, node: Json, name: tuple[str, ...], arrays: Mapping[str, Leaf]) -> None:
    if node is None:
        return
    kind, content = next(iter(node.items()))
    if kind == "leaf":
        if not isinstance(content, str) or content in table.leaves:
            raise ValueError(content)
        form = {key: value for key, value in node.items() if key != "leaf"}
        told = Leaf(form) if "value" in form else replace(arrays[content], form=form)
        table.leaves[content] = told
        return
    if kind in ("list", "tuple"):
        children = [(str(i), child) for i, child in enumerate(content)]
    elif kind in ("dict", "ordered", "default"):
        pairs = content[1] if kind == "default" else content
        children = [(_word(key), child) for key, child in pairs]
    elif kind == "state":
        table.states.append(joined(*name))
        children = [(joined(*map(_word, row[2]["path"][1])), row[3]) for row in content]
    else:
        children = _read_class(table, kind, content, joined(*name))
    for step, child in children:
        _read(table, child, (*name, step), arrays)


def _read_class(table: Table, kind: str, content: Any, name: str) -> list[tuple[str, Json]]:
    if not isinstance(content[0], str):
        raise ValueError(content[0])
    table.classes[name] = content[0]
    if kind in ("module", "struct"):
        for key, value in content[2].items():
            # A token's mark is its place in the model that its State was made with, and as much
            # the business of `like` as the place is.
            # So is in which dtypes is computed, and what several are made as one.
            if content[0] not in _TOKENS and key not in (PRECISION, MEMBERS):
                table.config[joined(name, _word(key))] = value
        return [(_word(key), child) for key, child in content[1].items()]
    if kind not in ("named", "node"):
        raise ValueError(kind)
    return [(_word(key), child) for key, child in content[1]]


# ---- names that have changed


def renamed_table(
    table: Table, rename: Mapping[str, str], where: str
) -> tuple[Table, dict[str, str]]:
    """A table under other names.

    Args:
        table: the file's.
        rename: from names in the file, of leaves or of nodes above them, to names in `like`.
        where: the call, for errors.

    Returns:
        The table, and the old name of each leaf that has another now.

    Raises:
        ArgumentError: an old name is not in the file, or two leaves get one name.
    """
    used: set[str] = set()

    def new_name(name: str) -> str:
        # What it is in, from the inside to the outside: the longest name that is given counts.
        old = name
        while old not in rename:
            if not old:
                return name
            old = old.rpartition(".")[0]
        used.add(old)
        return joined(rename[old], name[len(old) :].lstrip("."))

    leaves: dict[str, Leaf] = {}
    changed: dict[str, str] = {}
    for name, leaf in table.leaves.items():
        new = new_name(name)
        if new in leaves:
            got = f"{new!r} for two: {changed.get(new, new)!r} and {name!r}"
            raise ArgumentError(f"{where}, rename", "a name for each leaf", got)
        leaves[new] = leaf
        if new != name:
            changed[new] = name
    config = {new_name(name): value for name, value in table.config.items()}
    classes = {new_name(name): value for name, value in table.classes.items()}
    states = [new_name(name) for name in table.states]
    lost = [name for name in rename if name not in used]
    if lost:
        raise _not_there(lost, rename, table, where)
    return Table(leaves, config, classes, states), changed


def _not_there(
    lost: Sequence[str], rename: Mapping[str, str], table: Table, where: str
) -> ArgumentError:
    known = _all_names(table)
    near = {name: near_name(name, known) for name in lost}
    places = [f"{name!r}{text}" for name, text in near.items()]
    hint: list[str] = []
    back = {rename[name]: name for name in lost if not near[name] and rename[name] in known}
    if back:
        pairs = ", ".join(f'"{old}": "{new}"' for old, new in back.items())
        hint = ["from names in the file to names in like, and not back:"]
        hint += [f"pm.load(..., rename={{{pairs}}})"]
    elif not all(near.values()):
        hint = ["it has, for instance:", *list(table.leaves)[:3]]
    got = f"{len(lost)} that {'is' if len(lost) == 1 else 'are'} not in it"
    expected = "names in the file"
    return ArgumentError(f"{where}, rename", expected, got, places=places, hint=hint)


def _all_names(table: Table) -> list[str]:
    """Those of leaves, and of all that leaves are in."""
    steps = [words_of(name) for name in (*table.leaves, *table.classes)]
    return [*dict.fromkeys(joined(*words[:i]) for words in steps for i in range(1, len(words) + 1))]
