"""What a tree is, as JSON: its nodes, its configuration, and where each leaf is to be found.

    None                                   None
    {"list": [...]}, {"tuple": [...]}      containers; the items are nodes
    {"dict": [[key, node], ...]}           keys are configuration; "ordered", "default" likewise
    {"module": [class, {field: node}, {field: configuration}]}
                                           roles and precisions that were given, and how many
                                           were made as one, are configuration of theirs
    {"struct": [...]}                      the same for other dataclasses that are nodes
    {"named": [class, [[field, node], ...]]}
    {"state": [[marker, class, name, node], ...]}
                                           and a list of the ranks that the value was made with,
                                           if it has others: such as for members
    {"node": [class, [[step, node], ...]]} any other: can be compared, and not rebuilt
    {"leaf": name, "is": kind, ...}        see `leaf_form`

Arrays are told by name only; shapes and dtypes stand with the arrays themselves.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import FileError, describe, explain_depth
from pytreemod.io.configuration import MEMBERS, VERSION, ConfigurationWriter, Json, name_of
from pytreemod.io.fetching import is_whole_here
from pytreemod.io.tables import Name, Words
from pytreemod.module.classes import file_version_of
from pytreemod.module.reading import count_made_as_one, is_computed
from pytreemod.module.schema import ROLES
from pytreemod.module.ties import members_of_ties
from pytreemod.state.values import State, other_ranks
from pytreemod.training.dtype_policies import Precision
from pytreemod.training.precision_rules import PRECISION, precisions_of
from pytreemod.tree.nodes import (
    AbstractRecord,
    children_of,
    is_plain_tuple,
    own_class,
    record_of,
)
from pytreemod.tree.paths import path_text
from pytreemod.typing import KeyPath, PyTree, Tracer, class_of, jtu


class Description(NamedTuple):
    """A tree as a file has it."""

    tree: Json
    """Its nodes."""

    leaves: dict[str, Any]
    """Its leaves by name, in JAX's order."""

    names: list[Name]
    """The names of these leaves, not as text."""

    nodes: dict[Name, Any]
    """Its Modules by name."""


def describe_tree(tree: PyTree, where: str) -> Description:
    """Describe a tree.

    Args:
        tree: any tree; its leaves may be abstract.
        where: the call, for errors.

    Raises:
        FileError: two leaves have one name, or the tree is deeper than Python's stack.
    """
    writer = _Writer(where)
    try:
        return Description(writer.node(tree, (), ()), writer.leaves, writer.names, writer.nodes)
    except RecursionError as error:
        text = f"{path_text(writer.path[:6])}..., {len(writer.path)} steps and more"
        raise FileError(explain_depth(where, [text])) from error


class _Writer:
    def __init__(self, where: str):
        self.where = where
        self.path: KeyPath = ()
        """Where the walk is."""
        self.leaves: dict[str, Any] = {}
        self.names: list[Name] = []
        self.nodes: dict[Name, Any] = {}
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
        # In JAX's order, which is that of the leaves.
        of_key = self.words.of_key
        written = [self.node(x, (*path, key), name + of_key(key)) for key, x in children]
        keys = [key for key, _ in children]
        kind = class_of(node)
        if kind is list or kind is tuple:
            return {kind.__name__: written}
        record = record_of(node)
        if record is not None:
            self.nodes[name] = node
            return {"module": self._module(record, node, keys, written, path)}
        if kind in (dict, OrderedDict, defaultdict):
            return self._dict(node, kind, keys, written)
        if isinstance(node, State):
            return {"state": self._rows(node, keys, written)}
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
        given = record.given_roles(node)
        if given:
            fields[2][ROLES] = self.configuration.write(given)
        precisions = precisions_of(node)
        if precisions:
            pairs = [
                [name, precision and _names(precision)] for name, precision in precisions.items()
            ]
            fields[2][PRECISION] = self.configuration.write(pairs)
        members = count_made_as_one(node) if is_computed(node) else self.members.get(path)
        if members:
            fields[2][MEMBERS] = members
        version = file_version_of(own_class(node))
        if version != 1:
            fields[2][VERSION] = version
        return fields

    def _fields(self, node: Any, keys: list[Any], written: list[Json], names: Any) -> Json:
        data = {key.name: json for key, json in zip(keys, written, strict=True)}
        others = [name for name in names if name not in data]
        config = {name: self.configuration.write(getattr(node, name)) for name in others}
        return [name_of(class_of(node)), data, config]

    def _dict(self, node: Any, kind: type, keys: list[Any], written: list[Json]) -> Json:
        by_key = {key.key: json for key, json in zip(keys, written, strict=True)}
        # In the dict's own order, which is no part of a pytree, but the reader's.
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
                places=[path_text(path)],
                hint="rename one of the two keys, such as 0 and '0'",
            )
        self.leaves[name] = leaf
        form = leaf_form(leaf)
        return {"leaf": name, **(form or {"value": self.configuration.write(leaf)})}


_OLD_BATCH_NORM = {"ema_first_time_index", "state_index", "channelwise_affine", "momentum"}
"""Beside `mode`, by which fields one is known that was written before it counted its batches."""


def renew_modes(tree: Json) -> None:
    """Call the mode of each `BatchNorm` as it is called now, in a description as it was read.

    Without a counter of batches there was one mode with PyTorch's running statistics, "batch". It
    is called "torch" now, and "batch" is Equinox's.

    Args:
        tree: what `describe_tree` wrote, now or then; it is changed.
    """
    # By a list, for a description may be deeper than Python's recursion.
    left = [tree]
    while left:
        node = left.pop()
        if isinstance(node, list):
            left += cast("list[Json]", node)
        elif isinstance(node, dict):
            match cast("dict[str, Json]", node):
                case {"module": [_, {**data}, {"mode": "batch", **others} as config]}:
                    if "batch_counter" not in data and data.keys() | others >= _OLD_BATCH_NORM:
                        config["mode"] = "torch"
                case _:
                    pass
            left += node.values()


def _names(precision: Precision) -> list[str]:
    return [precision.params, precision.compute, precision.output]


def leaf_form(leaf: Any) -> dict[str, Json]:
    """What a leaf is, beside its numbers: `{"is": "jax"}`, `"numpy"`, `"scalar"`, `"key"`.

    Empty for what is no array: a Python number, a text.
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
        FileError: an array is traced, was donated, or other hosts alone have parts of it; or a leaf
            is an object of which a file could hold the text alone.
    """
    if not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        if not leaf_form(leaf) and _is_opaque(ConfigurationWriter().write(leaf)):
            raise _opaque(name, leaf, where)
        return
    if isinstance(leaf, jax.ShapeDtypeStruct):
        got, hint = "shapes alone", "save the tree that has them"
    elif isinstance(leaf, Tracer):
        got, hint = "one that is traced", "save outside of filter_jit, or in a filter_io_callback"
    elif leaf.is_deleted():
        got, hint = "one that was donated", "save what the step returned, not what it was given"
    elif not is_whole_here(leaf):
        got = "one of which parts are on other hosts alone"
        hint = "save with orbax, see how-to/checkpoint-with-orbax"
    else:
        return
    place = f"{name}: {describe(leaf)}"
    raise FileError(where, "arrays whose values are here", got, places=[place], hint=hint)


def _is_opaque(written: Json) -> bool:
    """Whether a value, or a part of it, was written as a text that is no value."""
    if isinstance(written, dict):
        parts = cast("dict[str, Json]", written)
        # What lies on devices of this machine has no text at all.
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
    expected, got = "arrays, and values that a file can hold", "an object that it cannot"
    return FileError(where, expected, got, places=[place], hint=hint)
