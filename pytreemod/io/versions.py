"""Versions of a class: conversion of a file of an older version to the current one.

Owns: [`migration`][pytreemod.migration], and the application of migrations: to the file's table,
after the renaming and before the restacking of layers. A migration sees the part of the file that
belongs to one Module, with names relative to it. Arrays are read when the function accesses them.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import ArgumentError, FileError, describe
from pytreemod.io.configuration import (
    ConfigurationReader,
    ConfigurationWriter,
    Json,
    are_same_name,
    is_redefined,
    name_of,
)
from pytreemod.io.headers import can_be_written
from pytreemod.io.tables import Converted, Leaf, Name, Source, Table, parse, shown_name
from pytreemod.module.classes import Module, file_version_of
from pytreemod.tree.kinds import PYTHON_SCALARS
from pytreemod.tree.nodes import own_class
from pytreemod.tree.predicates import is_array

Migration: TypeAlias = Callable[[Any, dict[str, Any]], Any]
"""From the arrays and the configuration of one version, by name, to those of the next."""
_F = TypeVar("_F", bound=Migration)


def migration(cls: type[Module], version: int) -> Callable[[_F], _F]:
    """Register a function that converts files of an older version of a class to the next one.

    A class declares its version: `class Net(pm.Module, file_version=2)`. Without a declaration the
    version is 1. [`load`][pytreemod.load] applies all migrations from the file's version to that of
    the class, in order, to each Module of that class in the file, and reports them.

    The function gets two dicts, and returns two. The first has the Module's leaves by name
    (`"layers.0.weight"`), as NumPy arrays, which are read when you access them. The second has its
    configuration, and that of everything below it. `load` compares the returned dicts with `like`,
    so a lost or invented name is an error. In a `Stack` or an `Ensemble` the function is called
    once, with stacked arrays. A class that inherits from `cls` has its own version and migrations.
    Values in a State have their own names: see the argument `rename` of `load`.

    Args:
        cls: a class with a version above `version`.
        version: the version that the function starts from.

    Returns:
        A decorator, which returns the function unchanged.

    Raises:
        ArgumentError: if the class is no Module class, has no such version, or already has a
            migration from it.

    Examples:
        A layer has another name now, and one matrix became two:

        >>> import jax, jax.numpy as jnp, numpy as np
        >>> import pytreemod as pm
        >>> class Net(pm.Module):
        ...     both: jax.Array
        >>> pm.save("net.safetensors", Net(jnp.arange(4.0)))

        >>> class Net(pm.Module, file_version=2):
        ...     key: jax.Array
        ...     value: jax.Array
        >>> @pm.migration(Net, 1)
        ... def split(arrays, config):
        ...     arrays["key"], arrays["value"] = np.split(arrays.pop("both"), 2)
        ...     return arrays, config
        >>> like = Net(jnp.zeros(2), jnp.zeros(2))
        >>> net, report = pm.load("net.safetensors", like, strict=False)
        >>> net.key.tolist(), net.value.tolist(), report.migrated
        ([0.0, 1.0], [2.0, 3.0], ('<root>: Net, from version 1 to 2',))
    """
    where = "migration(cls, version)"
    if not (isinstance(cls, type) and issubclass(cls, Module)):  # pyright: ignore[reportUnnecessaryIsInstance]  (callers may be unchecked)
        raise ArgumentError(where, "a Module class", describe(cls))
    newest = file_version_of(cls)
    if type(version) is not int or not 1 <= version < newest:
        hint = ["declare the version of the files in the class:"]
        hint += [f"class {cls.__name__}(pm.Module, file_version=2): ..."]
        expected = f"a version before that of {cls.__name__}, which is {newest}"
        raise ArgumentError(where, expected, describe(version), hint=hint)

    def add(function: _F) -> _F:
        found = _migrations_of(cls)
        if version in found and not is_redefined(found[version], function):
            got = f"a second migration of {cls.__name__}"
            raise ArgumentError(where, f"one migration from version {version}", got)
        # A new dict, because other threads may be loading.
        type.__setattr__(cls, _MIGRATIONS, {**found, version: function})
        return function

    return add


_MIGRATIONS = "__migrations__"


def _migrations_of(cls: type) -> Mapping[int, Migration]:
    return vars(cls).get(_MIGRATIONS, {})


def migrated(
    theirs: Table, nodes: Iterable[Any], read: Callable[[Source], Any], where: str
) -> tuple[Table, list[str]]:
    """Migrate a file's table to the current versions of its classes, and list the migrations.

    Args:
        theirs: the file's table.
        nodes: the Modules of `like`, which determine the known classes.
        read: reads an array of the file.
        where: the call, for errors.

    Raises:
        FileError: if a version is newer than the class, or there is no migration from it.
        ArgumentError: if a migration returns an invalid result.
    """
    classes = {name_of(cls): cls for cls in dict.fromkeys(map(own_class, nodes))}
    if not theirs.versions and all(file_version_of(cls) == 1 for cls in classes.values()):
        return theirs, []
    table = theirs.copy()
    lines: list[str] = []
    # From the inside to the outside: the nodes below a Module are migrated before it.
    for name in sorted(theirs.classes, key=len, reverse=True):
        written = theirs.classes[name]
        cls = next((own for known, own in classes.items() if are_same_name(known, written)), None)
        old, new = theirs.versions.get(name, 1), 1 if cls is None else file_version_of(cls)
        if cls is None or old == new:
            continue
        steps = _steps(cls, old, new, name, where)
        for step in steps:
            _migrate(table, name, step, read, f"{where}, {shown_name(name)}")
        lines.append(f"{shown_name(name)}: {cls.__name__}, from version {old} to {new}")
    return table, lines


def check_version(cls: type, version: Json, name: str, where: str) -> None:
    """Refuse another version of a class than the current one, in a load without `like`.

    Raises:
        FileError: if the file has another one.
    """
    newest = file_version_of(cls)
    if version == newest:
        return
    if type(version) is not int or version > newest:
        raise _newer(cls, version, newest, name, where)
    raise FileError(
        where,
        f"version {newest} of {cls.__name__}",
        f"version {version}",
        at=[name or "<root>"],
        hint=["pass a model of the current version, to migrate older ones:", "pm.load(path, like)"],
    )


def _steps(cls: type, old: int, new: int, name: Name, where: str) -> list[Migration]:
    if old > new:
        raise _newer(cls, old, new, shown_name(name), where)
    found = _migrations_of(cls)
    for version in range(old, new):
        if version not in found:
            raise FileError(
                where,
                f"version {new} of {cls.__name__}",
                f"version {old}, and no migration from version {version}",
                at=[shown_name(name)],
                hint=[
                    "register a migration:",
                    f"@pm.migration({cls.__name__}, {version})",
                    "def migrate(arrays, config): ...",
                ],
            )
    return [found[version] for version in range(old, new)]


def _newer(cls: type, old: Any, new: int, name: str, where: str) -> FileError:
    return FileError(
        where,
        f"version {new} of {cls.__name__}, or an older one",
        f"version {describe(old)}",
        at=[name],
        hint="a newer program wrote the file: load it with that one",
    )


# ---- one migration of one Module


class _Arrays(MutableMapping[str, Any]):
    """Leaves by name; those of the file are read when they are accessed."""

    def __init__(self, entries: dict[str, Any], read: Callable[[Leaf], Any]):
        self.entries, self._read = entries, read

    def __getitem__(self, name: str) -> Any:
        found = self.entries[name]
        return self._read(found) if isinstance(found, Leaf) else found

    def __setitem__(self, name: str, value: Any) -> None:
        self.entries[name] = value

    def __delitem__(self, name: str) -> None:
        del self.entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


class _Unread:
    """A value of configuration that this process cannot rebuild; it can be moved."""

    def __init__(self, written: Json):
        self.written = written

    def __repr__(self) -> str:
        return f"<{describe(self.written)}>"


def _migrate(
    table: Table, name: Name, step: Migration, read: Callable[[Source], Any], where: str
) -> None:
    n = len(name)
    leaves = {k[n:]: leaf for k, leaf in table.leaves.items() if k[:n] == name}
    config = {k[n:]: value for k, value in table.config.items() if k[:n] == name}
    reader = ConfigurationReader(where)
    taken: dict[int, tuple[Any, Leaf]] = {}

    def read_leaf(leaf: Leaf) -> Any:
        if leaf.dtype is None:
            return reader.read(leaf.form["value"], shown_name(name))
        value = read(cast("Source", leaf.source)).view()
        # An array that was changed in place would be mistaken for that of the file.
        value.setflags(write=False)
        # If the function returns it, under any name, it is still an array of the file.
        taken[id(value)] = value, leaf
        return value

    arrays = _Arrays({".".join(k): leaf for k, leaf in leaves.items()}, read_leaf)
    values = {".".join(k): _value_of(value, reader) for k, value in config.items()}
    try:
        made = step(arrays, values)
    except Exception as error:
        error.add_note(f"The migration failed, in {where}.")
        raise
    new_leaves, new_config = _checked(made, where)
    # Below the Module, the function determines the classes.
    for old in [k for k in table.classes if k[:n] == name and k != name]:
        del table.classes[old]
    for k in leaves:
        del table.leaves[name + k]
    for k in config:
        del table.config[name + k]
    entries = new_leaves.entries if isinstance(new_leaves, _Arrays) else new_leaves
    for text, value in entries.items():
        table.leaves[name + parse(text)] = _leaf_of(value, taken, text, where)
    writer = ConfigurationWriter()
    for text, value in new_config.items():
        written = value.written if isinstance(value, _Unread) else writer.write(value)
        table.config[name + parse(text)] = written


def _value_of(written: Json, reader: ConfigurationReader) -> Any:
    try:
        return reader.read(written, "")
    except FileError:
        return _Unread(written)


def _checked(made: Any, where: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    is_pair = isinstance(made, tuple) and len(cast("Any", made)) == 2
    if is_pair and all(isinstance(part, Mapping) for part in cast("Any", made)):
        leaves, config = cast("tuple[Mapping[Any, Any], Mapping[Any, Any]]", made)
        if all(isinstance(name, str) for name in (*leaves, *config)):
            return leaves, config
    raise ArgumentError(
        f"{where}, migration",
        "two dicts by name: of arrays, and of configuration",
        describe(made),
        hint=["end the function with:", "return arrays, config"],
    )


def _leaf_of(value: Any, taken: Mapping[int, tuple[Any, Leaf]], text: str, where: str) -> Leaf:
    if isinstance(value, Leaf):
        return value
    if id(value) in taken:
        return taken[id(value)][1]
    if type(value) in PYTHON_SCALARS or isinstance(value, str):
        return Leaf({"value": ConfigurationWriter().write(value)})
    form: dict[str, Json] = {"is": "jax"}
    if is_array(value) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        form = {"is": "key", "impl": str(jax.random.key_impl(value))}
        value = jax.random.key_data(value)
    if not is_array(value) and not isinstance(value, np.generic):
        expected = "arrays and Python numbers"
        raise ArgumentError(f"{where}, migration", expected, f"{describe(value)} at {text}")
    array: Any = np.asarray(cast("Any", value))
    if not can_be_written(array.dtype):
        expected = "arrays that a file can hold"
        raise ArgumentError(f"{where}, migration", expected, f"{array.dtype} at {text}")
    return Leaf(form, array.shape, array.dtype, Converted(None, ft.partial(_given, array)))


def _given(array: Any, _: Any) -> Any:
    return array
