"""A tree from its description alone: classes and functions by their registered names.

Nothing of a class runs but its checks, when all of its fields are there: no `__init__`, which may
draw random numbers, and no converter, for the values were converted when they were written.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, TypeAlias, cast

from pytreemod.errors import FieldError, FileError, PytreemodError, SpecError, describe
from pytreemod.io.configuration import MEMBERS, VERSION, ConfigurationReader, Json, restore_checked
from pytreemod.io.versions import check_version
from pytreemod.module.classes import Module
from pytreemod.module.constraining import take_in_change
from pytreemod.module.construction import fill_defaults
from pytreemod.module.reading import MADE
from pytreemod.module.schema import ROLES
from pytreemod.module.ties import observe_one, retie
from pytreemod.state.forms import ranks_of
from pytreemod.state.rows import Row
from pytreemod.state.tokens import AbstractToken, RngStream
from pytreemod.state.values import State, assemble_state
from pytreemod.training.dtype_policies import Precision
from pytreemod.training.precision_rules import PRECISION, with_precisions
from pytreemod.tree.nodes import DECLARED_ROLES, GivenRoles
from pytreemod.tree.paths import PathName

ReadLeaf: TypeAlias = Callable[[str, dict[str, Json]], Any]
"""Gives the leaf of a name, by the form that its node tells."""


def rebuild_tree(tree: Json, read_leaf: ReadLeaf, where: str) -> Any:
    """The tree that was described.

    Args:
        tree: what `describe_tree` wrote.
        read_leaf: gives the arrays.
        where: the call, for errors.

    Raises:
        FileError: the description names what is not registered, or is malformed.
    """
    rebuilder = _Rebuilder(read_leaf, where)
    made = rebuilder.node(tree, "")
    try:
        # The places say all that the ties are.
        return retie(made, rebuilder.members) if rebuilder.has_ties else made
    except RecursionError:
        raise
    # Paths that lead nowhere are the file's fault.
    except Exception as error:
        raise rebuilder.reader.malformed("<root>", tree) from error


class _Rebuilder:
    def __init__(self, read_leaf: ReadLeaf, where: str):
        self.read_leaf = read_leaf
        self.where = where
        self.reader = ConfigurationReader(where)
        self.has_ties = False
        self.members: dict[int, int] = {}

    def node(self, node: Json, path: str) -> Any:
        if node is None:
            return None
        if not isinstance(node, dict):
            raise self.reader.malformed(path or "<root>", node)
        written = cast("dict[str, Any]", node)
        kind = next(iter(written), "")
        try:
            if kind == "leaf":
                return self._leaf(written, path)
            # By a table: a word of the file must reach nothing else.
            return _NODES[kind](self, written[kind], path)
        except (PytreemodError, RecursionError):
            raise
        # Whatever is wrong with it, it is the file's fault.
        except Exception as error:
            raise self.reader.malformed(path or "<root>", node) from error

    def _leaf(self, written: dict[str, Any], path: str) -> Any:
        if "value" in written:
            return self.reader.read(written["value"], path)
        return self.read_leaf(written["leaf"], written)

    def _list(self, items: list[Any], path: str) -> list[Any]:
        return [self.node(item, _join(path, i)) for i, item in enumerate(items)]

    def _tuple(self, items: list[Any], path: str) -> tuple[Any, ...]:
        return tuple(self._list(items, path))

    def _dict(self, pairs: list[Any], path: str) -> dict[Any, Any]:
        found = ((self.reader.read(key, path), node) for key, node in pairs)
        return {key: self.node(node, _join(path, key)) for key, node in found}

    def _ordered(self, pairs: list[Any], path: str) -> Any:
        return OrderedDict(self._dict(pairs, path))

    def _default(self, content: list[Any], path: str) -> Any:
        return defaultdict(self.reader.read(content[0], path), self._dict(content[1], path))

    def _named(self, content: list[Any], path: str) -> Any:
        name, pairs = content
        cls: Any = self.reader.named(name, path, tuple)
        if tuple(field for field, _ in pairs) != cls._fields:
            raise self._other_fields(path, cls, [f for f, _ in pairs], cls._fields)
        return cls._make(self.node(node, _join(path, field)) for field, node in pairs)

    def _state(self, rows: list[Any], path: str) -> State:
        read = self.reader.read
        found: list[Row] = []
        values: list[Any] = []
        for marker, kind, name, node, *told in rows:
            cls = self.reader.named(kind, path, AbstractToken)
            token = read(name, path)
            if not isinstance(token, PathName):
                raise self.reader.malformed(path, name)
            value = self.node(node, _join(path, token))
            # A stream checks its own.
            ranks = () if issubclass(cls, RngStream) else ranks_of(value)
            if told:
                (made,) = told
                ranks = tuple(map(operator.index, made))
            found.append(Row(read(marker, path), token, cls, ranks))
            values.append(value)
        return assemble_state(found, values)

    def _module(self, content: list[Any], path: str) -> Any:
        name, data, config = content
        cls: Any = self.reader.named(name, path, Module)
        schema = cls.__record__
        if schema.refusal is not None:
            raise FileError(schema.refusal)
        self.has_ties = self.has_ties or schema.is_hole
        check_version(cls, config.get(VERSION, 1), path, self.where)
        roles = self._given_roles(config, path)
        precisions = self._precisions(config, path)
        members = self._members(config, path)
        notes = (ROLES, PRECISION, MEMBERS, VERSION)
        config = {f: value for f, value in config.items() if f not in notes}
        values = self._values(cls, data, config, path, schema.fields)
        told = set(values)
        try:
            # Fields that the class has got since, with defaults for what knows nothing of them.
            fill_defaults(schema, values)
        except FieldError as error:
            raise self._other_fields(path, cls, [*data, *config], list(schema.fields)) from error
        self._constrain(cls, values, told, path)
        later = set(schema.decide(values).config) - told
        config = (*config, *later)
        if schema.computes and members:
            values[MADE] = observe_one(cls, values, config, members)
        made = restore_checked(cls, {**values, **roles}, config, self.where, path)
        if schema.is_hole and members:
            self.members[id(made)] = members
        try:
            return with_precisions(made, precisions)
        except SpecError as error:
            raise FileError(str(error)) from error

    def _members(self, config: dict[str, Any], path: str) -> int:
        """How many axes are of members that were made as one."""
        members = config.get(MEMBERS, 0)
        if type(members) is not int or members < 0:
            raise self.reader.malformed(path or "<root>", members)
        return members

    def _precisions(self, config: dict[str, Any], path: str) -> dict[str, Precision | None]:
        """The precisions that the node was given, by method; empty if there are none."""
        if PRECISION not in config:
            return {}
        pairs = self.reader.read(config[PRECISION], path)
        try:
            return {name: given and Precision(*given) for name, given in pairs}
        except PytreemodError as error:
            raise FileError(str(error)) from error

    def _given_roles(self, config: dict[str, Any], path: str) -> dict[str, GivenRoles]:
        """The roles that the node was given, as it keeps them; empty if there are none."""
        if ROLES not in config:
            return {}
        given = self.reader.read(config[ROLES], path)
        # Whoever asks for a role relies on the form.
        if not all(role and isinstance(role, str) and _are_steps(steps) for steps, role in given):
            raise self.reader.malformed(path or "<root>", given)
        DECLARED_ROLES.update(role for _, role in given)
        return {ROLES: given}

    def _constrain(self, cls: Any, values: dict[str, Any], told: set[str], path: str) -> None:
        """Bring in a file's constrained value: the field was not constrained yet, or resolved."""
        for field, constraint in cls.__record__.constraints.items():
            where, value = f"{cls.__qualname__}.{field}", values[field]
            is_built = field not in told
            try:
                values[field] = take_in_change(constraint, None, value, where, is_built=is_built)
            except PytreemodError as error:
                text = f"values that {where} takes"
                got = f"{_join(path, field)}, which it refuses"
                raise FileError(self.where, text, got, places=[str(error)]) from error

    def _struct(self, content: list[Any], path: str) -> Any:
        name, data, config = content
        cls: Any = self.reader.named(name, path, object)
        # It would be made past its checks.
        if issubclass(cls, Module):
            raise self.reader.malformed(path or "<root>", name)
        fields = {field.name: field for field in dataclasses.fields(cls)}
        values = self._values(cls, data, config, path, fields)
        if values.keys() != fields.keys():
            raise self._other_fields(path, cls, list(values), list(fields))
        made = object.__new__(cls)
        for field, value in values.items():
            # Past its `__setattr__`, for it may be frozen.
            object.__setattr__(made, field, value)
        return made

    def _values(
        self, cls: Any, data: dict[str, Any], config: dict[str, Any], path: str, fields: Any
    ) -> dict[str, Any]:
        unknown = [field for field in (*data, *config) if field not in fields]
        if unknown:
            raise self._other_fields(path, cls, [*data, *config], list(fields))
        values = {field: self.node(node, _join(path, field)) for field, node in data.items()}
        read = self.reader.read
        return values | {field: read(v, _join(path, field)) for field, v in config.items()}

    def _node(self, content: list[Any], path: str) -> Any:
        own = str(content[0]).lstrip("?")
        raise FileError(
            self.where,
            "nodes that a file can rebuild: Modules, dataclasses, containers, State",
            f"one of class {own}",
            places=[path or "<root>"],
            hint=["give a tree that has one:", "pm.load(path, like)"],
        )

    def _other_fields(self, path: str, cls: Any, got: list[str], fields: Any) -> FileError:
        return FileError(
            self.where,
            f"the fields of {cls.__qualname__}: {', '.join(fields) or 'none'}",
            ", ".join(got) or "none",
            places=[path or "<root>"],
            hint=[
                "the class was another one when the file was written; build it, then:",
                "pm.load(path, like, strict=False)",
            ],
        )


# pyright: reportPrivateUsage=false
# The table is the rebuilder's own other half.
_NODES: dict[str, Callable[[_Rebuilder, Any, str], Any]] = {
    "list": _Rebuilder._list,
    "tuple": _Rebuilder._tuple,
    "dict": _Rebuilder._dict,
    "ordered": _Rebuilder._ordered,
    "default": _Rebuilder._default,
    "named": _Rebuilder._named,
    "state": _Rebuilder._state,
    "module": _Rebuilder._module,
    "struct": _Rebuilder._struct,
    "node": _Rebuilder._node,
}


def _are_steps(steps: Any) -> bool:
    is_path = isinstance(steps, tuple) and steps != ()
    return is_path and all(isinstance(step, str) for step in cast("tuple[Any, ...]", steps))


def _join(path: str, step: Any) -> str:
    text = describe(step) if not isinstance(step, (str, int)) else str(step)
    return f"{path}.{text}" if path else text
