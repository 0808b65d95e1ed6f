"""Conversion of a tree to JSON and back: its nodes, configuration, and the name of each leaf.

    None                                   None
    {"list": [...]}, {"tuple": [...]}      containers; the items are nodes
    {"dict": [[key, node], ...]}           keys are configuration; likewise "ordered", "default"
    {"module": [class, {field: node}, {field: configuration}]}

Configuration includes the roles and precisions of an instance, and its number of member axes.

    {"struct": [...]}                      the same for other dataclasses that are nodes
    {"named": [class, [[field, node], ...]]}
    {"state": [[marker, class, name, node], ...]}

A row of a State ends with the ranks that its value was made with, if they differ from its ranks
now, for example for members.

    {"node": [class, [[step, node], ...]]} any other: can be compared, but not rebuilt
    {"leaf": name, "is": kind, ...}        see `leaf_form`

Shapes and dtypes are stored with the arrays. To rebuild a tree, classes and functions are looked up
by name in a table of the library. Of a class only its checks run, after all of its fields are set.
Neither `__init__`, which may draw random numbers, nor converters run: these ran before the save.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import (
    FileError,
    PytreemodError,
    SpecError,
    describe,
    explain_depth,
)
from pytreemod.io.configuration import (
    MEMBERS,
    ConfigurationReader,
    ConfigurationWriter,
    Json,
    name_of,
    restore_checked,
)
from pytreemod.io.containers import is_whole_here
from pytreemod.io.tables import Name, Words
from pytreemod.module.classes import Module
from pytreemod.module.flattening import note_of
from pytreemod.module.reading import MADE, count_made_as_one, is_computed
from pytreemod.module.schema import AXES, ROLES
from pytreemod.module.ties import members_of_ties, observe_one, retie
from pytreemod.state.forms import ranks_of
from pytreemod.state.rows import Row
from pytreemod.state.tokens import AbstractToken, RngStream
from pytreemod.state.values import State, assemble_state, other_ranks
from pytreemod.training.dtype_policies import Precision
from pytreemod.training.precision_rules import PRECISION, precisions_of, with_precisions
from pytreemod.tree.nodes import (
    DECLARED_ROLES,
    AbstractRecord,
    children_of,
    is_plain_tuple,
    own_class,
    record_of,
)
from pytreemod.tree.paths import PathName, pattern_text
from pytreemod.typing import KeyPath, PyTree, Tracer, class_of, jtu


class Description(NamedTuple):
    """A tree as a file has it."""

    tree: Json
    """Its nodes."""

    leaves: dict[str, Any]
    """Its leaves by name, in JAX's order."""

    names: list[Name]
    """The names of these leaves, as tuples of components."""

    nodes: dict[Name, Any]
    """Its Modules by name."""

    states: list[Name]
    """The nodes that may have Modules of moments: those of other libraries, and `Optimizer`."""


def describe_tree(tree: PyTree, where: str) -> Description:
    """Describe a tree.

    Args:
        tree: any tree; its leaves may be abstract.
        where: the call, for errors.

    Raises:
        FileError: if two leaves have one name, or the tree is deeper than Python's stack.
    """
    writer = _Writer(where)
    try:
        described = writer.node(tree, (), ())
        return Description(described, writer.leaves, writer.names, writer.nodes, writer.states)
    except RecursionError as error:
        text = f"{pattern_text(writer.path[:6])}..., {len(writer.path)} steps and more"
        raise FileError(explain_depth(where, [text])) from error


class _Writer:
    def __init__(self, where: str):
        self.where = where
        self.path: KeyPath = ()
        """The current path of the walk."""
        self.leaves: dict[str, Any] = {}
        self.names: list[Name] = []
        self.nodes: dict[Name, Any] = {}
        self.states: list[Name] = []
        self.words = Words()
        self.members: dict[KeyPath, int] = {}
        self.configuration = ConfigurationWriter()

    def node(self, node: Any, path: KeyPath, name: Name) -> Json:
        self.path = path
        if node is None:
            return None
        children = children_of(node)
        if children is None:
            self.names.append(name)
            return self._leaf(node, path, ".".join(name))
        members = members_of_ties(node)
        if members:
            self.members |= {(*path, *at): n for at, n in members.items()}
        # In JAX's order, which is the order of the leaves.
        of_key = self.words.of_key
        written = [self.node(x, (*path, key), name + of_key(key)) for key, x in children]
        keys = [key for key, _ in children]
        kind = class_of(node)
        if kind is list or kind is tuple:
            return {kind.__name__: written}
        record = record_of(node)
        if record is not None:
            self.nodes[name] = node
            self.states += [name] * hasattr(own_class(node), "__holds_values__")
            return {"module": self._module(record, node, keys, written, path)}
        if kind in (dict, OrderedDict, defaultdict):
            return self._dict(node, kind, keys, written)
        if isinstance(node, State):
            return {"state": self._rows(node, keys, written)}
        self.states.append(name)
        if is_plain_tuple(node):
            cls = name_of(kind)
            return {"named": [cls, [list(p) for p in zip(kind._fields, written, strict=True)]]}
        if dataclasses.is_dataclass(node) and all(isinstance(k, jtu.GetAttrKey) for k in keys):
            names = [f.name for f in dataclasses.fields(node)]
            return {"struct": self._fields(node, keys, written, names)}
        steps = [".".join(of_key(key)) for key in keys]
        pairs = [list(pair) for pair in zip(steps, written, strict=True)]
        return {"node": [name_of(kind), pairs]}

    def _module(
        self,
        record: AbstractRecord,
        node: Any,
        keys: list[Any],
        written: list[Json],
        path: KeyPath,
    ) -> Json:
        fields = self._fields(node, keys, written, record.names(node))
        for note in (ROLES, AXES):
            if said := note_of(node, note):
                fields[2][note] = self.configuration.write(said)
        precisions = precisions_of(node)
        if precisions:
            pairs = [
                [name, precision and _names(precision)] for name, precision in precisions.items()
            ]
            fields[2][PRECISION] = self.configuration.write(pairs)
        members = count_made_as_one(node) if is_computed(node) else self.members.get(path)
        if members:
            fields[2][MEMBERS] = members
        return fields

    def _fields(self, node: Any, keys: list[Any], written: list[Json], names: Any) -> Json:
        data = {key.name: json for key, json in zip(keys, written, strict=True)}
        others = [name for name in names if name not in data]
        config = {name: self.configuration.write(getattr(node, name)) for name in others}
        return [name_of(class_of(node)), data, config]

    def _dict(self, node: Any, kind: type, keys: list[Any], written: list[Json]) -> Json:
        by_key = {key.key: json for key, json in zip(keys, written, strict=True)}
        # In the dict's own order, which JAX ignores, but a user may rely on.
        pairs = [[self.configuration.write(key), by_key[key]] for key in node]
        if kind is defaultdict:
            return {"default": [self.configuration.write(node.default_factory), pairs]}
        return {"ordered" if kind is OrderedDict else "dict": pairs}

    def _rows(self, state: State, keys: list[Any], written: list[Json]) -> list[Json]:
        write = self.configuration.write
        ranks = [[[*made]] if made else [] for made in other_ranks(state)]
        rows = zip(state.__values__(), state.__child_kinds__(), keys, written, ranks, strict=True)
        return [
            [write(mark), name_of(kind), write(key.key), json, *made]
            for mark, kind, key, json, made in rows
        ]

    def _leaf(self, leaf: Any, path: KeyPath, name: str) -> Json:
        if name in self.leaves:
            raise FileError(
                self.where,
                "leaves with different names",
                f"two that are named {name!r}",
                at=[pattern_text(path)],
                hint="rename one of the two keys, such as 0 and '0'",
            )
        self.leaves[name] = leaf
        form = leaf_form(leaf)
        return {"leaf": name, **(form or {"value": self.configuration.write(leaf)})}


def _names(precision: Precision) -> list[str]:
    return [precision.params, precision.compute, precision.output]


def leaf_form(leaf: Any) -> dict[str, Json]:
    """Return the kind of a leaf: `{"is": "jax"}`, `"numpy"`, `"scalar"`, `"key"`.

    Empty for a leaf that is not an array: a Python number, a string.
    """
    if isinstance(leaf, np.ndarray):
        return {"is": "numpy"}
    if isinstance(leaf, np.generic):
        return {"is": "scalar"}
    if not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        return {}
    is_key = not isinstance(leaf.dtype, np.dtype)
    if is_key and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        is_known = isinstance(leaf, jax.Array)
        return {"is": "key", **({"impl": str(jax.random.key_impl(leaf))} if is_known else {})}
    return {"is": "jax", "weak": True} if getattr(leaf, "weak_type", False) else {"is": "jax"}


def check_has_values(name: str, leaf: Any, where: str) -> None:
    """Refuse a leaf whose values cannot be written.

    Raises:
    FileError: if an array is traced, was donated, or has parts only on other hosts; or if a leaf
        is an object of which a file could store only the repr.
    """
    if not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        if not leaf_form(leaf) and _is_opaque(ConfigurationWriter().write(leaf)):
            raise _opaque(name, leaf, where)
        return
    hint: list[str] | str
    if isinstance(leaf, jax.ShapeDtypeStruct):
        got, hint = "only shapes", "save the tree that has the values"
    elif isinstance(leaf, Tracer):
        got = "a traced array"
        hint = "pm.save(path, step(model))  # outside of the compiled function"
    elif leaf.is_deleted():
        got, hint = "a donated array", "save what the step returned, not what it was given"
    elif not is_whole_here(leaf):
        got = "an array with parts on other hosts only"
        hint = "save with orbax, see how-to/checkpoint-with-orbax"
    else:
        return
    place = f"{name}: {describe(leaf)}"
    raise FileError(f"{where}: {got} has no values to save", at=[place], hint=hint)


def _is_opaque(written: Json) -> bool:
    """Whether a value, or a part of it, was written as a string without a value."""
    if isinstance(written, dict):
        parts = cast("dict[str, Json]", written)
        # Values that belong to the devices of this machine have no string.
        return bool(parts.get("unknown", ("", ""))[1]) or any(map(_is_opaque, parts.values()))
    return isinstance(written, list) and any(map(_is_opaque, cast("list[Json]", written)))


def _opaque(name: str, leaf: Any, where: str) -> FileError:
    field = name.rpartition(".")[2]
    if hasattr(jax, "Ref") and isinstance(leaf, jax.Ref):
        hint = ["save the array that it holds:", f"model.replace({field}=jax.freeze(ref))"]
    else:
        hint = ["hold its arrays in fields of a Module; or, if it is configuration, write"]
        hint += [f"{field}: ... = pm.field(static=True)"]
    place = f"{name}: {describe(leaf)}"
    expected, got = "arrays, and values that a file can hold", "another object"
    return FileError(where, expected, got, at=[place], hint=hint)


ReadLeaf: TypeAlias = Callable[[str, dict[str, Json]], Any]
"""Return the leaf of a name, given the form in its node."""


def rebuild_tree(tree: Json, read_leaf: ReadLeaf, where: str) -> Any:
    """Rebuild a tree from its description.

    Args:
        tree: the result of `describe_tree`.
        read_leaf: returns the array of a leaf.
        where: the call, for errors.

    Raises:
        FileError: if the description names a class or function of the user, or is malformed.
    """
    rebuilder = _Rebuilder(read_leaf, where)
    made = rebuilder.node(tree, "")
    try:
        # The paths determine the ties.
        return retie(made, rebuilder.members) if rebuilder.has_ties else made
    except RecursionError:
        raise
    # Paths that do not exist are a fault of the file.
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
        # Every failure here is a fault of the file.
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

    def _state(self, rows: list[Any], path: str) -> State:
        read = self.reader.read
        found: list[Row] = []
        values: list[Any] = []
        for marker, kind, name, node, *saved_ranks in rows:
            cls = self.reader.named(kind, path, AbstractToken)
            token = read(name, path)
            if not isinstance(token, PathName):
                raise self.reader.malformed(path, name)
            value = self.node(node, _join(path, token))
            # A stream checks its own ranks.
            ranks = () if issubclass(cls, RngStream) else ranks_of(value)
            if saved_ranks:
                (made,) = saved_ranks
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
        said = {note: self._said(config, note, path) for note in (ROLES, AXES) if note in config}
        DECLARED_ROLES.update(role for _, role in said.get(ROLES, ()))
        precisions = self._precisions(config, path)
        members = self._members(config, path)
        notes = (ROLES, AXES, PRECISION, MEMBERS)
        config = {f: value for f, value in config.items() if f not in notes}
        values = self._values(cls, data, config, path, schema.fields)
        if values.keys() != schema.fields.keys():
            raise self._other_fields(path, cls, [*data, *config], list(schema.fields))
        config = (*config,)
        if schema.computes and members:
            values[MADE] = observe_one(cls, values, config, members)
        made = restore_checked(cls, {**values, **said}, config, self.where, path)
        if schema.is_hole and members:
            self.members[id(made)] = members
        try:
            return with_precisions(made, precisions)
        except SpecError as error:
            raise FileError(str(error)) from error

    def _members(self, config: dict[str, Any], path: str) -> int:
        """Return how many axes belong to members that were made as one."""
        members = config.get(MEMBERS, 0)
        if type(members) is not int or members < 0:
            raise self.reader.malformed(path or "<root>", members)
        return members

    def _precisions(self, config: dict[str, Any], path: str) -> dict[str, Precision | None]:
        """Return the precisions that the node was given, by method; empty if there are none."""
        if PRECISION not in config:
            return {}
        pairs = self.reader.read(config[PRECISION], path)
        try:
            return {name: given and Precision(*given) for name, given in pairs}
        except PytreemodError as error:
            raise FileError(str(error)) from error

    def _said(self, config: dict[str, Any], note: str, path: str) -> tuple[Any, ...]:
        """Return the notes of a node about its leaves, in their stored form."""
        said = self.reader.read(config[note], path)
        # Its readers rely on the form.
        if not all(text and isinstance(text, str) and _are_steps(steps) for steps, text in said):
            raise self.reader.malformed(path or "<root>", said)
        return said

    def _values(
        self, cls: Any, data: dict[str, Any], config: dict[str, Any], path: str, fields: Any
    ) -> dict[str, Any]:
        unknown = [field for field in (*data, *config) if field not in fields]
        if unknown:
            raise self._other_fields(path, cls, [*data, *config], list(fields))
        values = {field: self.node(node, _join(path, field)) for field, node in data.items()}
        read = self.reader.read
        return values | {field: read(v, _join(path, field)) for field, v in config.items()}

    def _named(self, content: list[Any], path: str) -> Any:
        name, pairs = content
        cls: Any = self.reader.named(name, path, tuple)
        if tuple(field for field, _ in pairs) != cls._fields:
            raise self._other_fields(path, cls, [f for f, _ in pairs], cls._fields)
        return cls._make(self.node(node, _join(path, field)) for field, node in pairs)

    def _foreign(self, content: list[Any], path: str) -> Any:
        raise self.reader.foreign(content[0], path or "<root>")

    def _other_fields(self, path: str, cls: Any, got: list[str], fields: Any) -> FileError:
        return FileError(
            self.where,
            f"the fields of {cls.__qualname__}: {', '.join(fields) or 'none'}",
            ", ".join(got) or "none",
            at=[path or "<root>"],
            hint=[
                "the class has changed since the file was written; build it, then:",
                "pm.load(path, like, strict=False)",
            ],
        )


# pyright: reportPrivateUsage=false
# The table is the other half of the rebuilder.
_NODES: dict[str, Callable[[_Rebuilder, Any, str], Any]] = {
    "list": _Rebuilder._list,
    "tuple": _Rebuilder._tuple,
    "dict": _Rebuilder._dict,
    "ordered": _Rebuilder._ordered,
    "default": _Rebuilder._default,
    "named": _Rebuilder._named,
    "state": _Rebuilder._state,
    "module": _Rebuilder._module,
    "struct": _Rebuilder._foreign,
    "node": _Rebuilder._foreign,
}


def _are_steps(steps: Any) -> bool:
    is_path = isinstance(steps, tuple) and steps != ()
    return is_path and all(isinstance(step, str) for step in cast("tuple[Any, ...]", steps))


def _join(path: str, step: Any) -> str:
    text = describe(step) if not isinstance(step, (str, int)) else str(step)
    return f"{path}.{text}" if path else text
