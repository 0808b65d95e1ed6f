"""Configuration as JSON, and back: everything that a model is, apart from its arrays.

JSON's own values (None, bools, numbers, strings) are written unchanged. Every other value is a dict
with one key, its kind: `{"tuple": [...]}`, `{"dtype": "float32"}`, `{"function": "jax.nn.relu"}`.

Classes and functions are written by name. A name is looked up only in a table of the library: its
layers, the functions of `jax.nn`, the elementwise ones of `jax.numpy`, and Python's own types. So
no file can cause an import. Any other name is written as `"?name"`: it can be compared, but not
rebuilt. The same is true of `{"unknown": [class, text]}`, for values that JSON cannot represent.
"""

from __future__ import annotations

import dataclasses
import enum
import functools as ft
import json
import math
import re
import types
import zlib
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pytreemod import nn
from pytreemod.errors import FileError, describe
from pytreemod.io.headers import can_be_written
from pytreemod.module.classes import Module
from pytreemod.module.computed_leaves import Function
from pytreemod.module.constrained_leaves import Constrained
from pytreemod.module.construction import put_together
from pytreemod.module.partials import Partial
from pytreemod.module.ties import Through, Tied
from pytreemod.nn import functional
from pytreemod.nn.mlp import identity
from pytreemod.nn.recurrent import concatenate
from pytreemod.state.streams import Stream
from pytreemod.state.tokens import Nothing, RngStream, StateIndex, Unnamed
from pytreemod.training.constraints import KINDS
from pytreemod.training.dtype_policies import Precision
from pytreemod.training.loss_scaling import LossScale
from pytreemod.training.low_rank import LowRank
from pytreemod.training.quantization import Quantized
from pytreemod.transform.host.enumerations import EnumerationItem
from pytreemod.tree.kinds import dtype_of
from pytreemod.tree.paths import PathName
from pytreemod.typing import class_of

Json: TypeAlias = Any
"""A value for `json.dumps`: None, bool, int, float, str, list, dict with string keys."""
MEMBERS = "<members>"
"""Next to the fields: how many axes of members the arrays have beside those of one value."""

_FUNCTIONS: tuple[Any, ...] = (
    types.FunctionType,
    types.BuiltinFunctionType,
    np.ufunc,
    jnp.ufunc,
    jax.custom_jvp,
    jax.custom_vjp,
    type(jax.jit(lambda: None)),
)
_SEQUENCES: dict[type, str] = {tuple: "tuple", list: "list", set: "set", frozenset: "frozenset"}
_SHOWN = 8
"""How many items of a list an error shows."""
_LONGEST = 100
"""How many characters an error shows of one value."""
_LARGEST = 2**63
"""JSON has no limit, but readers in other languages have one."""


class ConfigurationWriter:
    """Writes values; one writer per file, because it numbers the tokens that have no name."""

    def __init__(self) -> None:
        self.unnamed: dict[int, tuple[Unnamed, int]] = {}

    def write(self, value: Any) -> Json:
        """Return a value of configuration as JSON."""
        kind = class_of(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if abs(value) < _LARGEST else {"int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if kind in _SEQUENCES:
            return {_SEQUENCES[kind]: self._items(value, kind)}
        if kind is dict:
            return {"dict": [[self.write(k), self.write(v)] for k, v in value.items()]}
        return self._write_rare(value, kind)

    def _items(self, value: Any, kind: type) -> list[Json]:
        written = [self.write(item) for item in value]
        # A set has no order, but two files of one model should be equal.
        return sorted(written, key=json.dumps) if kind in (set, frozenset) else written

    def _write_rare(self, value: Any, kind: Any) -> Json:
        dtype = dtype_of(value)
        if dtype is not None and _is_found_by_name(dtype):
            # The spelling is needed only to rebuild a model.
            spelling = "numpy" if isinstance(value, np.dtype) else "type"
            return {"dtype": dtype.name, "spelling": spelling}
        if isinstance(value, Unnamed):
            _, number = self.unnamed.setdefault(id(value), (value, len(self.unnamed)))
            return {"unnamed": number}
        if kind is PathName:
            return {"path": [str(value), list(value.steps)]}
        if _is_member(value):
            return {"enum": [name_of(type(value)), value.name]}
        if kind is complex:
            return {"complex": [repr(value.real), repr(value.imag)]}
        if kind is bytes:
            return {"bytes": value.hex()}
        if value is Ellipsis:
            return {"ellipsis": True}
        if kind is slice or kind is range:
            parts = [value.start, value.stop, value.step]
            return {kind.__name__: [self.write(part) for part in parts]}
        if _is_plain_scalar(value):
            return {"scalar": [value.dtype.name, value.tobytes().hex()]}
        if isinstance(value, type):
            return {"class": name_of(value)}
        if kind is ft.partial:
            keywords = {"dict": [[k, self.write(v)] for k, v in value.keywords.items()]}
            return {"partial": [self.write(value.func), self._items(value.args, list), keywords]}
        if isinstance(value, _FUNCTIONS) or registered_name(value) is not None:
            return {"function": name_of(value)}
        if kind is jax.sharding.PartitionSpec:
            return {"spec": self._items(value, list)}
        if dataclasses.is_dataclass(value):
            fields = [f.name for f in dataclasses.fields(cast("Any", value))]
            pairs = [[name, self.write(getattr(value, name, None))] for name in fields]
            return {"dataclass": [name_of(kind), pairs]}
        return {"unknown": [kind.__qualname__, _text_of(value)]}


def _is_member(value: Any) -> bool:
    """Whether it is a member of an enum; a sum of flags has no name of its own."""
    return isinstance(value, enum.Enum) and value.name in type(value).__members__


def _is_plain_scalar(value: Any) -> bool:
    return isinstance(value, np.generic) and _is_found_by_name(value.dtype)


def _is_found_by_name(dtype: Any) -> bool:
    """Whether its name describes the dtype fully: not for strings, dates, or big-endian ones."""
    return can_be_written(dtype) and dtype == dtype.newbyteorder("=")


def name_of(thing: Any) -> str:
    """Return the written form of a class or function: its name in the table, or `"?name"`."""
    name = registered_name(thing)
    if name is not None:
        return name
    # The question mark says that the name serves to compare, not to look up.
    return "?" + str(own_name(thing) or "function")


def _text_of(value: Any) -> str:
    """Return a string that distinguishes a value from others of its class, as its repr does."""
    if isinstance(value, (np.ndarray, jax.Array)):
        # A repr leaves out most of a large array.
        array = cast("Any", value)
        is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
        numbers = np.asarray(jax.random.key_data(array) if is_key else array)
        return f"{describe(array)} {zlib.crc32(numbers.tobytes()):x}"
    # Devices belong to this machine, but the file is for others, too. A value that follows from
    # the rest of the tree adds no information.
    is_local = isinstance(value, (jax.sharding.Sharding, jax.sharding.Mesh))
    is_local = is_local or hasattr(class_of(value), "__follows_from_the_tree__")
    return "" if is_local else re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def describe_json(value: Json) -> str:
    """Return written configuration for an error message: as a program would write it.

    Args:
        value: a part of a file, which may be anything.

    Examples:
        >>> describe_json({"partial": [{"function": "jax.nn.gelu"}, [], {"dict": [["a", 1]]}]})
        'partial(jax.nn.gelu, a=1)'
    """
    if not isinstance(value, dict) or not value:
        return describe(value)
    kind, content = next(iter(cast("dict[str, Any]", value).items()))
    try:
        text = _shown(kind, content)
    # The value is about to be refused; a fault in it is no reason to fail here.
    except Exception:
        return describe(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _shown(kind: str, content: Any) -> str:
    if kind in ("class", "function", "dtype", "float"):
        return str(content).removeprefix("?")
    if kind == "enum":
        return f"{content[0].removeprefix('?')}.{content[1]}"
    if kind == "unknown":
        return content[1] or content[0]
    if kind == "dataclass":
        return f"{content[0].removeprefix('?')}({_shown_names(content[1])})"
    if kind == "partial":
        fn, args, keywords = content
        parts = [describe_json(fn), _shown_items(args), _shown_names(keywords["dict"])]
        return f"partial({', '.join(filter(None, parts))})"
    if kind == "dict":
        pairs = [f"{describe_json(key)}: {describe_json(item)}" for key, item in content[:_SHOWN]]
        return f"{{{_joined(pairs, content)}}}"
    if kind in _BRACKETS:
        left, right = _BRACKETS[kind]
        comma = "," if kind == "tuple" and len(content) == 1 else ""
        return f"{left}{_shown_items(content)}{comma}{right}"
    # The other values are Python's own, and print as they are written.
    return repr(ConfigurationReader("").read({kind: content}, ""))


_BRACKETS = {
    "tuple": "()",
    "list": "[]",
    "set": "{}",
    "frozenset": ("frozenset({", "})"),
    "spec": ("P(", ")"),
    "slice": ("slice(", ")"),
    "range": ("range(", ")"),
}


def _shown_items(items: list[Any]) -> str:
    return _joined([describe_json(item) for item in items[:_SHOWN]], items)


def _shown_names(pairs: list[Any]) -> str:
    return _joined([f"{name}={describe_json(item)}" for name, item in pairs[:_SHOWN]], pairs)


def _joined(texts: list[str], everything: list[Any]) -> str:
    return ", ".join([*texts, "..."] if len(everything) > len(texts) else texts)


def are_same(a: Json, b: Json) -> bool:
    """Whether two written values are equal, as far as the file shows.

    A class or function that only one version of the library has in its table is compared by its
    own name.
    """
    # First, because Python compares 1, 1.0 and True as equal.
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        ours, theirs = cast("dict[str, Any]", a), cast("dict[str, Any]", b)
        if ours.keys() != theirs.keys():
            return False
        kind = next(iter(ours), None)
        if kind in ("class", "function"):
            return are_same_name(ours[kind], theirs[kind])
        if kind == "dtype":
            return ours[kind] == theirs[kind]
        if kind == "unknown" and _are_pairs(ours[kind], theirs[kind]):
            (name, one), (other, another) = ours[kind], theirs[kind]
            return name == other and (one == another or "" in (one, another))
        if kind in ("enum", "dataclass") and _are_pairs(ours[kind], theirs[kind]):
            (name, one), (other, another) = ours[kind], theirs[kind]
            return are_same_name(name, other) and are_same(one, another)
        return all(are_same(ours[key], theirs[key]) for key in ours)
    if isinstance(a, list):
        items, others = cast("list[Any]", a), cast("list[Any]", b)
        return len(items) == len(others) and all(map(are_same, items, others))
    # By their strings, because zeros have signs.
    return repr(a) == repr(b)


def _are_pairs(*values: Json) -> bool:
    # A file may hold anything.
    return all(isinstance(value, list) and len(cast("Any", value)) == 2 for value in values)


def are_same_name(a: Any, b: Any) -> bool:
    """Whether two written names are of the same class or function."""
    if a == b:
        return True
    texts = isinstance(a, str) and isinstance(b, str)
    if not texts or (a[0:1] != "?" and b[0:1] != "?"):
        return False
    return a.rpartition(".")[2].lstrip("?") == b.rpartition(".")[2].lstrip("?")


class ConfigurationReader:
    """Rebuilds values from JSON; one reader per file, to distinguish tokens without a name.

    Args:
        where: the call, for errors.
    """

    def __init__(self, where: str):
        self.where = where
        self.unnamed: dict[int, Unnamed] = {}

    def read(self, value: Json, path: str) -> Any:
        """Return the value that was written.

        Args:
            value: its JSON.
            path: its path in the tree.

        Raises:
            FileError: if it names a class or function of the user, or is malformed.
        """
        if not isinstance(value, dict):
            if isinstance(value, list):
                raise self.malformed(path, value)
            return value
        written = cast("dict[str, Any]", value)
        kind = next(iter(written), "")
        read = _READERS.get(kind)
        if read is None:
            raise self._unknown(path, written)
        try:
            return read(self, written[kind], path, written)
        except (FileError, RecursionError):
            raise
        # Every failure here is a fault of the file.
        except Exception as error:
            raise self.malformed(path, value) from error

    def named(self, name: Any, path: str, what: type | tuple[type, ...] | None = None) -> Any:
        """Return the class or function of a name in the table."""
        found = registered_as(name) if isinstance(name, str) else None
        if found is None:
            raise self.foreign(name, path)
        if what is not None and not (isinstance(found, type) and issubclass(found, what)):
            raise self.malformed(path, name)
        return found

    def malformed(self, path: str, value: Any) -> FileError:
        """Return the error for a part that no writer writes."""
        return FileError(
            self.where, "a description that `pm.save` wrote", f"{describe(value)} at {path}"
        )

    def foreign(self, name: Any, path: str) -> FileError:
        """Return the error for a class or function that is not in the table."""
        own = str(name).lstrip("?")
        fact = f"{self.where}: {own!r} is none of the library's own classes and functions"
        hint = ["pass a model that has it:", "pm.load(path, like)"]
        return FileError(fact, at=[path or "<root>"], hint=hint)

    def _unknown(self, path: str, written: dict[str, Any]) -> FileError:
        return FileError(
            self.where,
            "configuration that a file can hold",
            f"{describe_json(written)}, stored only as this string",
            at=[path or "<root>"],
            hint=["pass a model that has it:", "pm.load(path, like)"],
        )

    def _all(self, items: list[Any], path: str) -> list[Any]:
        return [self.read(item, f"{path}[{i}]") for i, item in enumerate(items)]

    def _dict(self, items: list[Any], path: str, _: Any) -> dict[Any, Any]:
        return {self.read(k, path): self.read(v, f"{path}[{k!r}]") for k, v in items}

    def _dtype(self, name: str, path: str, written: dict[str, Any]) -> Any:
        # Not by `np.dtype`, which accepts other codes, such as "O" for objects.
        scalar: Any = getattr(jnp, "bool_" if name == "bool" else name)
        dtype: Any = scalar.dtype
        if not isinstance(dtype, np.dtype):
            raise self.malformed(path, name)
        return scalar if written.get("spelling") != "numpy" else cast("Any", dtype)

    def _scalar(self, content: list[str], path: str, _: Any) -> Any:
        name, numbers = content
        dtype = self._dtype(name, path, {"spelling": "numpy"})
        return np.frombuffer(bytes.fromhex(numbers), dtype)[0]

    def _class(self, name: str, path: str, _: Any) -> Any:
        return self.named(name, path, object)

    def _function(self, name: str, path: str, _: Any) -> Any:
        return self.named(name, path)

    def _partial(self, content: list[Any], path: str, _: Any) -> Any:
        fn, args, keywords = content
        arguments, named = self._all(args, path), self.read(keywords, path)
        return ft.partial(self.read(fn, path), *arguments, **named)

    def _dataclass(self, content: list[Any], path: str, _: Any) -> Any:
        cls = self.named(content[0], path, object)
        names = {f.name for f in dataclasses.fields(cls)}
        if names != {name for name, _ in content[1]}:
            raise self.malformed(path, content)
        values = {name: self.read(value, f"{path}.{name}") for name, value in content[1]}
        if issubclass(cls, Module):
            config = (*cls.__record__.decide(values).config,)
            return restore_checked(cls, values, config, self.where, path)
        made = object.__new__(cls)
        for name, value in values.items():
            # Past `__init__` and `__setattr__`, because it may be frozen.
            object.__setattr__(made, name, value)
        return made

    def _path(self, content: list[Any], path: str, _: Any) -> PathName:
        text, steps = content
        if not all(isinstance(step, str) for step in (text, *steps)):
            raise self.malformed(path, content)
        name = PathName(text)
        name.steps = tuple(steps)
        return name

    def _unnamed(self, number: int, path: str, _: Any) -> Unnamed:
        return self.unnamed.setdefault(int(number), Unnamed())


def restore_checked(
    cls: Any, values: dict[str, Any], config: tuple[str, ...], where: str, path: str
) -> Any:
    """Build a Module from the values of a file, with the checks of its class.

    Args:
        cls: a class of the table.
        values: the values of all of its fields.
        config: the names of the configuration fields.
        where: the call, for errors.
        path: its path in the tree.

    Raises:
        FileError: if the class has no instances, or refuses these values.
    """
    schema = cls.__record__
    if schema.refusal is not None:
        raise FileError(schema.refusal)
    made = put_together(cls, values, config)
    try:
        accepted = {n: f(values[n], made) for n, f in schema.accepts.items() if n in config}
        if accepted:
            made = put_together(cls, {**values, **accepted}, config)
        for check in schema.checks:
            check(made)
    # A user's check may raise anything.
    except Exception as error:
        text = f"fields that {cls.__qualname__} takes"
        got = f"{path or '<root>'}, which it refuses"
        raise FileError(where, text, got, at=[str(error)]) from error
    return made


_Read: TypeAlias = Callable[[ConfigurationReader, Any, str, dict[str, Any]], Any]

# pyright: reportPrivateUsage=false
# The table is the other half of the reader.
_READERS: dict[str, _Read] = {
    "int": lambda reader, text, path, _: int(text, 16),
    "float": lambda reader, text, path, _: float(text),
    "complex": lambda reader, parts, path, _: complex(*map(float, parts)),
    "bytes": lambda reader, text, path, _: bytes.fromhex(text),
    "ellipsis": lambda reader, _, path, __: ...,
    "tuple": lambda reader, items, path, _: tuple(reader._all(items, path)),
    "list": lambda reader, items, path, _: reader._all(items, path),
    "set": lambda reader, items, path, _: set(reader._all(items, path)),
    "frozenset": lambda reader, items, path, _: frozenset(reader._all(items, path)),
    "slice": lambda reader, items, path, _: slice(*reader._all(items, path)),
    "range": lambda reader, items, path, _: range(*reader._all(items, path)),
    "spec": lambda reader, items, path, _: jax.sharding.PartitionSpec(*reader._all(items, path)),
    "dict": ConfigurationReader._dict,
    "dtype": ConfigurationReader._dtype,
    "scalar": ConfigurationReader._scalar,
    "enum": lambda reader, content, path, _: reader.named(content[0], path, enum.Enum),
    "class": ConfigurationReader._class,
    "function": ConfigurationReader._function,
    "partial": ConfigurationReader._partial,
    "dataclass": ConfigurationReader._dataclass,
    "path": ConfigurationReader._path,
    "unnamed": ConfigurationReader._unnamed,
}


_OWN = "pytreemod"
_ELEMENTWISE = (
    "abs absolute arccos arccosh arcsin arcsinh arctan arctanh cbrt ceil clip cos cosh exp exp2 "
    "expm1 floor log log10 log1p log2 logaddexp maximum mean minimum negative rint round sign sin "
    "sinc sinh sqrt square sum tan tanh add subtract multiply divide power max min prod"
)
# A tie may read an array through these.
_OF_SHAPES = (
    "broadcast_to concatenate expand_dims flip matrix_transpose moveaxis permute_dims ravel repeat "
    "reshape roll squeeze stack swapaxes tile transpose tril triu"
)
_OF_LAX = "abs add cos erf exp integer_pow log logistic max min mul neg rsqrt sin sqrt sub tanh"
_POLICIES = (
    "checkpoint_dots checkpoint_dots_with_no_batch_dims dots_saveable "
    "dots_with_no_batch_dims_saveable everything_saveable nothing_saveable"
)


class _Names:
    """Names of classes and functions, in both directions."""

    def __init__(self) -> None:
        self.things: dict[str, Any] = {}
        # By id, because some cannot be hashed; the other table keeps them alive.
        self.names: dict[int, str] = {}

    def add(self, name: str, thing: Any) -> None:
        """Name something; it keeps an earlier name, too, and both names find it."""
        self.things[name] = thing
        self.names.setdefault(id(thing), name)


def _add_all(table: _Names, prefix: str, room: Any, names: str | list[str]) -> None:
    for name in names.split() if isinstance(names, str) else names:
        # Older versions of JAX do not have all of them.
        if hasattr(room, name):
            table.add(f"{prefix}.{name}", getattr(room, name))


@ft.cache
def _table() -> _Names:
    """Return the tables, which are made when a file is first written or read."""
    table = _Names()
    for builtin in (bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple):
        table.add(builtin.__name__, builtin)
    for kind in (EnumerationItem, Nothing, Partial, RngStream, StateIndex, Stream, Tied):
        table.add(f"{_OWN}.{kind.__name__}", kind)
    table.add(f"{_OWN}.LossScale", LossScale)
    table.add(f"{_OWN}.Precision", Precision)
    table.add(f"{_OWN}.computed", Function)
    table.add(f"{_OWN}.tie", Through)
    table.add(f"{_OWN}.lora", LowRank)
    table.add(f"{_OWN}.quantize", Quantized)
    for name, thing in vars(nn).items():
        if isinstance(thing, type) and issubclass(thing, Module):
            table.add(f"{_OWN}.nn.{name}", thing)
    table.add(f"{_OWN}.Constrained", Constrained)
    for name, thing in KINDS.items():
        table.add(f"{_OWN}.constraints.{name}", thing)
    # A default without a public name.
    table.add(f"{_OWN}.nn.identity", identity)
    table.add(f"{_OWN}.nn.concatenate", concatenate)
    formulas = [n for n, f in vars(functional).items() if n[0] != "_" and callable(f)]
    _add_all(table, f"{_OWN}.nn.functional", functional, formulas)
    activations = [n for n, f in vars(jax.nn).items() if n[0] != "_" and callable(f)]
    _add_all(table, "jax.nn", jax.nn, activations)
    _add_all(table, "jax.numpy", jnp, f"{_ELEMENTWISE} {_OF_SHAPES}")
    _add_all(table, "jax.lax", lax, _OF_LAX)
    _add_all(table, "jax.checkpoint_policies", jax.checkpoint_policies, _POLICIES)
    return table


def registered_name(thing: Any) -> str | None:
    """Return the name of a class or function in the table; None if it is not there."""
    # A variant, made for some instances, is written as the class that it represents.
    return _table().names.get(id(getattr(thing, "__passes_for__", thing)))


def registered_as(name: str) -> Any:
    """Return the class or function of a name in the table; None if it is not there."""
    return _table().things.get(name)


def own_name(thing: Any) -> str | None:
    """Return the Python name of a class or function; None if it has none."""
    name = getattr(thing, "__qualname__", getattr(thing, "__name__", None))
    return name.rpartition("<locals>.")[2] if isinstance(name, str) else None
