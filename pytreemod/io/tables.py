"""A tree as a flat table: its leaves by name, and its configuration by name.

A file is such a table, and so is `like`. Loading is to bring the two together. All else that a load
can do (other names, layers in another form, constrained values, migrations) is a function from the
file's table to another one, which is done before anything is compared or read.

A name is a tuple of words, one for each step of the path, written as a file writes them: quoted
where they must be. It becomes text, with dots between the words, only for files, users and errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from pytreemod.errors import ArgumentError
from pytreemod.io.configuration import MEMBERS, VERSION, Json
from pytreemod.io.leaf_names import ROOT_NAME, near_name, words_of
from pytreemod.training.precision_rules import PRECISION
from pytreemod.tree.paths import plain_name, step_names
from pytreemod.typing import jtu

Name: TypeAlias = tuple[str, ...]
"""A path in a table. Its text is `".".join(name)`."""


def parse(text: str) -> Name:
    """The name that is written so; `".".join` undoes it for every text.

    Examples:
        >>> parse("layers.'v1.5'.weight"), parse("")
        (('layers', "'v1.5'", 'weight'), ())
    """
    words = text.split(".") if text else []
    if "'" in text or "" in words or not text.isprintable():
        try:
            words = words_of(text)
        except ArgumentError:
            # A file of other tools may have any names.
            words = [text]
    return (*words,)


def shown_name(name: Name) -> str:
    """A name in an error."""
    return ".".join(name) or ROOT_NAME


class Words(dict[str, str]):
    """Steps of paths as words; each is quoted once, if it must be."""

    def __missing__(self, step: str) -> str:
        word = step if step.isidentifier() else plain_name((jtu.GetAttrKey(step),))
        self[step] = word
        return word

    def of_key(self, key: Any) -> Name:
        """The words of one key of a path; a token, which is a key in a State, has several."""
        kind = type(key)
        if kind is jtu.GetAttrKey:
            return (self[key.name],)
        if kind is jtu.SequenceKey:
            return (str(key.idx),)
        return tuple(self[step] for step in step_names((key,)))


class Stacked(NamedTuple):
    """Arrays that become one, along a new axis."""

    parts: tuple[Source, ...]
    axis: int


class Unstacked(NamedTuple):
    """One index of an axis, which goes."""

    whole: Source
    axis: int
    at: int


class Made(NamedTuple):
    """What a function makes of numbers: of a constrained value, or of what an older file has."""

    value: Source | None
    """None where the function has all that it needs."""

    make: Callable[[Any], Any]


Source: TypeAlias = str | Stacked | Unstacked | Made
"""Where in the file the numbers of a leaf are: the name of an array; or what is made of some."""


def first_name(source: Source) -> str:
    """The array of the file that a source begins with; "" if it has none.

    Examples:
        >>> first_name(Stacked(("layers.0.weight", "layers.1.weight"), 0))
        'layers.0.weight'
    """
    while not isinstance(source, str):
        if isinstance(source, Made):
            source = source.value or ""
        else:
            source = source.parts[0] if isinstance(source, Stacked) else source.whole
    return source


class Leaf(NamedTuple):
    """A leaf without its numbers."""

    form: dict[str, Json]
    """See `descriptions.leaf_form`; with "value" for what is not an array."""

    shape: tuple[int, ...] = ()
    dtype: np.dtype[Any] | None = None
    """None for what is not an array."""

    source: Source | None = None
    """None for what is not an array."""

    @property
    def is_array(self) -> bool:
        """Whether it is one: of JAX, of NumPy, of keys."""
        return self.dtype is not None


@dataclass(slots=True)
class Table:
    """A tree by names."""

    leaves: dict[Name, Leaf] = field(default_factory=dict[Name, Leaf])
    config: dict[Name, Json] = field(default_factory=dict[Name, Json])
    """Each configuration by its name."""

    classes: dict[Name, str] = field(default_factory=dict[Name, str])
    """The class of each node that is no container of Python's, as it is written."""

    states: list[Name] = field(default_factory=list[Name])
    """Where States are."""

    versions: dict[Name, int] = field(default_factory=dict[Name, int])
    """The version of each node's class, where that is not 1."""

    def copy(self) -> Table:
        """The same table, to be changed."""
        return Table(
            {**self.leaves}, {**self.config}, {**self.classes}, [*self.states], {**self.versions}
        )


def read_table(tree: Json, arrays: Mapping[str, Any]) -> Table:
    """The table of a described tree.

    Args:
        tree: what `descriptions.describe_tree` wrote.
        arrays: what has the shape and the dtype of each array, by name.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: the description is malformed.
    """
    table = Table()
    _Reading(table, arrays, Words()).read(tree, ())
    return table


_TOKENS = ("pytreemod.StateIndex", "pytreemod.RngStream")


class _Reading(NamedTuple):
    table: Table
    arrays: Mapping[str, Any]
    words: Words

    def read(self, node: Json, name: Name) -> None:
        if node is None:
            return
        kind, content = next(iter(node.items()))
        if kind == "leaf":
            self.read_leaf(node, content)
            return
        words = self.words
        children: Iterable[tuple[Name, Json]]
        if kind in ("list", "tuple"):
            children = (((str(i),), child) for i, child in enumerate(content))
        elif kind in ("dict", "ordered", "default"):
            pairs = content[1] if kind == "default" else content
            children = (((words[_step(key)],), child) for key, child in pairs)
        elif kind == "state":
            self.table.states.append(name)
            children = ((tuple(words[s] for s in row[2]["path"][1]), row[3]) for row in content)
        else:
            children = self.read_class(kind, content, name)
        for step, child in children:
            self.read(child, name + step)

    def read_leaf(self, node: dict[str, Json], text: Json) -> None:
        if not isinstance(text, str) or (name := parse(text)) in self.table.leaves:
            raise ValueError(text)
        form = {**node}
        del form["leaf"]
        if "value" in form:
            self.table.leaves[name] = Leaf(form)
        else:
            array = self.arrays[text]
            self.table.leaves[name] = Leaf(form, tuple(array.shape), array.dtype, text)

    def read_class(self, kind: str, content: Any, name: Name) -> Iterable[tuple[Name, Json]]:
        cls, words = content[0], self.words
        if not isinstance(cls, str):
            raise ValueError(cls)
        self.table.classes[name] = cls
        if kind in ("module", "struct"):
            for key, value in content[2].items():
                if key == VERSION:
                    self.table.versions[name] = index(value)
                    continue
                # A token's mark is its place in the model that its State was made with, and as much
                # the business of `like` as the place is.
                # So is in which dtypes is computed, and what several are made as one.
                if cls not in _TOKENS and key not in (PRECISION, MEMBERS):
                    self.table.config[(*name, words[key])] = value
            return [((words[key],), child) for key, child in content[1].items()]
        if kind not in ("named", "node"):
            raise ValueError(kind)
        return [((words[_step(key)],), child) for key, child in content[1]]


def _step(key: Json) -> str:
    return key if isinstance(key, str) else repr(key)


# ---- names that have changed


def renamed_table(
    table: Table, rename: Mapping[str, str], where: str
) -> tuple[Table, dict[Name, Name]]:
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
    rules = {parse(old): (old, parse(new)) for old, new in rename.items()}
    used: set[str] = set()

    def new_name(name: Name) -> Name:
        # The longest name that is given wins.
        for i in range(len(name), -1, -1):
            if name[:i] in rules:
                old, new = rules[name[:i]]
                used.add(old)
                return new + name[i:]
        return name

    leaves: dict[Name, Leaf] = {}
    changed: dict[Name, Name] = {}
    for name, leaf in table.leaves.items():
        new = new_name(name)
        if new in leaves:
            both = shown_name(changed.get(new, new)), shown_name(name)
            got = f"{shown_name(new)!r} for two: {both[0]!r} and {both[1]!r}"
            raise ArgumentError(f"{where}, rename", "a name for each leaf", got)
        leaves[new] = leaf
        if new != name:
            changed[new] = name
    made = Table(
        leaves,
        {new_name(name): value for name, value in table.config.items()},
        {new_name(name): value for name, value in table.classes.items()},
        [new_name(name) for name in table.states],
        {new_name(name): version for name, version in table.versions.items()},
    )
    lost = [name for name in rename if name not in used]
    if lost:
        raise _not_there(lost, rename, table, where)
    return made, changed


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
        hint = ["it has, for instance:", *[".".join(name) for name in table.leaves][:3]]
    got = f"{len(lost)} that {'is' if len(lost) == 1 else 'are'} not in it"
    expected = "names in the file"
    return ArgumentError(f"{where}, rename", expected, got, places=places, hint=hint)


def _all_names(table: Table) -> list[str]:
    """Those of leaves, and of all that leaves are in."""
    names = (*table.leaves, *table.classes)
    return [*dict.fromkeys(".".join(n[:i]) for n in names for i in range(1, len(n) + 1))]
