"""A tree as a flat table: its leaves and its configuration by name.

A file is such a table, and so is `like`. Loading joins the two. Every other feature of a load
(other names, layers in another form, constrained values) is a function from the file's
table to another one. These functions are applied before anything is compared or read. A
[`Source`][pytreemod.io.tables.Source] describes how the numbers of a leaf are made; `read_source`
reads them.

In a table, a name is a tuple of words, one for each component of the path, as a file writes them:
with quotes where needed. It is joined to a string, with dots between the words, only for files,
users and errors. [`named_leaves`][pytreemod.named_leaves] and [`from_named`][pytreemod.from_named]
are tables of leaves for users.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import ArgumentError, StructureError, describe, short_dtype
from pytreemod.io.configuration import MEMBERS, Json, describe_json
from pytreemod.training.precision_rules import PRECISION
from pytreemod.tree.paths import parse_name, pattern_text, plain_name, step_names
from pytreemod.tree.predicates import is_array
from pytreemod.typing import PyTree, Tracer, class_of, jtu

_T = TypeVar("_T")

ROOT_NAME = "<root>"
"""The name in errors of a tree that is a leaf itself."""
TABLE = 40
"""The maximal number of lines in a table of names."""


def named_leaves(tree: PyTree, sep: str = ".") -> dict[str, Any]:
    """Return every leaf of a tree by its name: `layers.2.weight`.

    A name is the leaf's path with bare components: names of fields, indices, keys of dicts. Values
    in a State have the path of their token. A component is quoted if it is empty, contains `sep`,
    begins with a quote, or cannot be printed: `'v1.5'.weight`. A tree that is a leaf itself has the
    empty name.

    **Laws.** `from_named(tree, named_leaves(tree)) == tree`. No two leaves have one name. The name
    of a leaf does not depend on the rest of the tree.

    Args:
        tree: any tree.
        sep: the separator of the components.

    Returns:
        The leaves, unchanged, in the order of the tree.

    Raises:
        ArgumentError: if `sep` is empty, no string, or contains a quote.
        StructureError: if two keys of one node have one string, as the number 0 and the string "0"
            do.

    Examples:
        >>> import jax
        >>> from pytreemod import nn
        >>> net = nn.Sequential([nn.Identity(), nn.Linear(3, 4, key=jax.random.key(0))])
        >>> {name: leaf.shape for name, leaf in named_leaves(net).items()}
        {'layers.1.weight': (4, 3), 'layers.1.bias': (4,)}

        >>> norm, state = nn.make_with_state(nn.BatchNorm)(3)
        >>> list(named_leaves((norm, state), sep="/"))
        ['0/weight', '0/bias', '1/state_index/0', '1/state_index/1']
    """
    pairs = jtu.tree_leaves_with_path(tree)
    names = _distinct_names("named_leaves(tree)", [path for path, _ in pairs], sep)
    return dict(zip(names, (leaf for _, leaf in pairs), strict=True))


def from_named(like: _T, named: Mapping[str, Any], sep: str = ".", strict: bool = True) -> _T:
    """Return a tree like another one, with leaves given by name; the inverse of `named_leaves`.

    Nothing is cast or reshaped: an array must have the shape and dtype of the one that it replaces,
    and another leaf must have the class. Where `like` has JAX arrays (or abstract ones), NumPy
    arrays are converted to JAX arrays, and vice versa.

    Args:
        like: a tree, which may be abstract (`pm.filter_eval_shape`).
        named: leaves by the names of `named_leaves`.
        sep: the separator of the components of a name.
        strict: whether every leaf must be given, and every name must be that of a leaf. If not,
            missing leaves are those of `like`, and other names are ignored.

    Returns:
        A tree of the structure of `like`.

    Raises:
        ArgumentError: if `named` is no mapping, or `sep` is no valid separator.
        StructureError: if names are missing or unknown, or leaves do not fit: all in one table.

    Examples:
        >>> import jax.numpy as jnp
        >>> from_named({"a": [jnp.zeros(2), 1]}, {"a.0": jnp.ones(2), "a.1": 5})
        {'a': [Array([1., 1.], dtype=float32), 5]}
    """
    where = "from_named(like, named)"
    if not isinstance(named, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  (callers may be unchecked)
        raise ArgumentError(where, "leaves by name", describe(named))
    pairs, treedef = jtu.tree_flatten_with_path(like)
    names = _distinct_names(where, [path for path, _ in pairs], sep)
    wrong: list[str] = []
    leaves: list[Any] = []
    for name, (_, old) in zip(names, pairs, strict=True):
        new = named.get(name, old)
        if not fits(old, new):
            wrong.append(f"{name}: expected {describe(old)}, got {describe(new)}")
        else:
            leaves.append(new if new is old else as_kind_of(old, new))
    if strict:
        wrong += mismatches(names, named)
    if wrong:
        wanted = "the leaves of like, by their names"
        got = f"{len(wrong)} that differ{'s' * (len(wrong) == 1)}"
        raise StructureError(where, wanted, got, at=wrong, most=TABLE)
    return treedef.unflatten(leaves)


def fits(old: Any, new: Any) -> bool:
    """Whether a leaf may replace another one.

    Args:
        old: a leaf, or a `ShapeDtypeStruct`.
        new: any value.

    Returns:
        Whether both are arrays of one shape and dtype, or other values of one class.

    Examples:
        >>> fits(jnp.ones(2), np.ones(2, np.float32)), fits(jnp.ones(2), jnp.ones(3)), fits(1, 1.0)
        (True, False, False)
    """
    if new is old:
        return True
    if is_array(old) or isinstance(old, jax.ShapeDtypeStruct):
        return (
            is_array(new) and old.shape == new.shape and in_order(old.dtype) == in_order(new.dtype)
        )
    return class_of(old) is class_of(new)


def in_order(dtype: Any) -> Any:
    """Return a dtype of numbers in this machine's byte order; return any other dtype unchanged.

    Args:
        dtype: the dtype of an array of NumPy or JAX.

    Examples:
        >>> in_order(np.dtype(">f4")) == np.dtype("float32")
        True
    """
    is_numpys = isinstance(dtype, np.dtype)
    return cast("np.dtype[Any]", dtype).newbyteorder("=") if is_numpys else dtype


def as_ordered(array: Any, dtype: Any) -> Any:
    """Return an array in the byte order of a dtype, if they differ in nothing else.

    Args:
        array: a NumPy array.
        dtype: a NumPy dtype.

    Examples:
        >>> as_ordered(np.ones(2, np.float32), np.dtype(">f4")).dtype
        dtype('>f4')
    """
    is_other = array.dtype != dtype and in_order(array.dtype) == in_order(dtype)
    return array.astype(dtype) if is_other else array


def as_kind_of(old: Any, new: Any) -> Any:
    """Return a leaf that fits as an array of JAX or of NumPy, as the old leaf is.

    Args:
        old: a leaf, or a `ShapeDtypeStruct`.
        new: a leaf that may replace it.

    Returns:
        The new leaf; if a NumPy array becomes a JAX array, on the devices of the old leaf.

    Examples:
        >>> as_kind_of(jnp.zeros(2), np.ones(2, np.float32))
        Array([1., 1.], dtype=float32)
    """
    if isinstance(old, (np.ndarray, np.generic)):
        is_known = isinstance(new, jax.Array) and not isinstance(new, Tracer)
        new = np.asarray(new) if is_known else new
        return new if new is old or not is_array(new) else as_ordered(new, old.dtype)
    if not isinstance(new, (np.ndarray, np.generic)):
        return new
    # A copy: otherwise JAX might share memory into which the caller still writes.
    made = jnp.array(new, in_order(new.dtype))
    is_placed = isinstance(old, jax.ShapeDtypeStruct) or getattr(old, "committed", False)
    return jax.device_put(made, old.sharding) if is_placed else made


def joined(*names: str) -> str:
    """Join parts of a name with dots, without empty parts.

    Args:
        names: the names of a node, and of its contents.

    Returns:
        The name of the innermost.

    Examples:
        >>> joined("layers", "2", "weight"), joined("", "weight")
        ('layers.2.weight', 'weight')
    """
    return ".".join(name for name in names if name)


def words_of(name: str) -> list[str]:
    """Return the components of a name as written, with their quotes.

    Examples:
        >>> words_of("layers.'v1.5'.weight"), words_of("")
        (['layers', "'v1.5'", 'weight'], [])
    """
    return [plain_name((jtu.GetAttrKey(step),)) for step in parse_name(name)]


def mismatches(wanted: Sequence[str], given: Iterable[str]) -> list[str]:
    """Return lines of a table for missing and unknown names.

    Args:
        wanted: the names that must be given.
        given: the names that are given.

    Returns:
        A line for each.

    Examples:
        >>> mismatches(["weight", "bias"], ["wieght", "bias"])
        ['weight: missing', 'wieght: unexpected']
    """
    known, there = {*wanted}, {*given}
    lines = [f"{name or ROOT_NAME}: missing" for name in wanted if name not in there]
    return lines + [f"{name or ROOT_NAME}: unexpected" for name in given if name not in known]


def _distinct_names(where: str, paths: Sequence[tuple[Any, ...]], sep: str) -> list[str]:
    """Return the name of each path; raise an error if two have one name."""
    names = [plain_name(path, sep) for path in paths]
    if len({*names}) == len(names):
        return names
    twice = [
        f"{name}: {pattern_text(path)}"
        for name, path in zip(names, paths, strict=True)
        if names.count(name) > 1
    ]
    hint = "Give the keys of each node different strings; 0 and '0' have the same."
    expected, got = "leaves with different names", "two with one name"
    raise StructureError(where, expected, got, at=twice, hint=hint)


Name: TypeAlias = tuple[str, ...]
"""A path in a table. As a string, it is `".".join(name)`."""


def parse(text: str) -> Name:
    """Parse a name; `".".join` is its inverse for every string.

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
    """Return a name as errors show it."""
    return ".".join(name) or ROOT_NAME


class Words(dict[str, str]):
    """The words of the components of paths; each is quoted once, if necessary."""

    def __missing__(self, step: str) -> str:
        word = step if step.isidentifier() else plain_name((jtu.GetAttrKey(step),))
        self[step] = word
        return word

    def of_key(self, key: Any) -> Name:
        """Return the words of one key of a path; a token, a key in a State, has several."""
        kind = cast("Any", type(key))
        if kind is jtu.GetAttrKey:
            return (self[key.name],)
        if kind is jtu.SequenceKey:
            return (str(key.idx),)
        return tuple(self[step] for step in step_names((key,)))


class Stacked(NamedTuple):
    """Arrays that are stacked along a new axis."""

    parts: tuple[Source, ...]
    axis: int


class Unstacked(NamedTuple):
    """One index of an axis, which is removed."""

    whole: Source
    axis: int
    at: int
    size: int
    """The size of the axis."""


class Joined(NamedTuple):
    """Arrays that are concatenated along an axis."""

    parts: tuple[Source, ...]
    axis: int


class Sliced(NamedTuple):
    """A part of an array along an axis, which stays."""

    whole: Source
    axis: int
    start: int
    stop: int


class Converted(NamedTuple):
    """The result of a function of numbers: of a constrained value, or of a transposed matrix."""

    value: Source | None
    """None if the function needs no array."""

    make: Callable[[Any], Any]


Source: TypeAlias = str | Stacked | Unstacked | Joined | Sliced | Converted
"""The origin of a leaf's numbers in the file: the name of an array, or an operation on some."""


def first_name(source: Source) -> str:
    """Return the first array in the file of a source; "" if it has none.

    Examples:
        >>> first_name(Stacked(("layers.0.weight", "layers.1.weight"), 0))
        'layers.0.weight'
    """
    while not isinstance(source, str):
        if isinstance(source, Converted):
            source = source.value or ""
        elif isinstance(source, (Stacked, Joined)):
            source = source.parts[0]
        else:
            source = source.whole
    return source


class Leaf(NamedTuple):
    """A leaf without its numbers."""

    form: dict[str, Json]
    """See `descriptions.leaf_form`; with "value" for a leaf that is not an array."""

    shape: tuple[int, ...] = ()
    dtype: np.dtype[Any] | None = None
    """None for a leaf that is not an array."""

    source: Source | None = None
    """None for a leaf that is not an array."""

    @property
    def is_array(self) -> bool:
        """Whether it is an array: of JAX, of NumPy, of keys."""
        return self.dtype is not None


def form_text(leaf: Leaf) -> str:
    """Return the form of a leaf, in short.

    Examples:
        >>> form_text(Leaf({"is": "jax"}, (3, 4), np.dtype("float32")))
        'f32[3,4]'
    """
    if not leaf.is_array:
        return describe_json(leaf.form["value"])
    text = f"{short_dtype(leaf.dtype)}[{','.join(map(str, leaf.shape))}]"
    kind = leaf.form.get("is")
    if kind == "key":
        return f"keys of {leaf.form.get('impl')}, {text}"
    weak = " weak" if leaf.form.get("weak") else ""
    return f"{text}{weak}" if kind == "jax" else f"{text} {kind}"


@dataclass(slots=True)
class Table:
    """A tree by names."""

    leaves: dict[Name, Leaf] = field(default_factory=dict[Name, Leaf])
    config: dict[Name, Json] = field(default_factory=dict[Name, Json])
    """All configuration, by name."""

    classes: dict[Name, str] = field(default_factory=dict[Name, str])
    """The written class of each node that is not a Python container."""

    states: list[Name] = field(default_factory=list[Name])
    """The names of States."""

    precisions: dict[Name, Json] = field(default_factory=dict[Name, Json])
    """The precision that each node was given; a load uses that of `like`."""

    def copy(self) -> Table:
        """Return a copy, which may be changed."""
        return Table(
            {**self.leaves},
            {**self.config},
            {**self.classes},
            [*self.states],
            {**self.precisions},
        )


def read_table(tree: Json, arrays: Mapping[str, Any]) -> Table:
    """Return the table of a described tree.

    Args:
        tree: the result of `descriptions.describe_tree`.
        arrays: by name, objects with the shape and dtype of each array.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: if the description is malformed.
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
                if key == PRECISION:
                    self.table.precisions[(*name, key)] = value
                    continue
                # A token's mark is its path in the model that its State was made with. As with
                # the path, the mark of `like` counts, and so does its number of members.
                if cls not in _TOKENS and key != MEMBERS:
                    self.table.config[(*name, words[key])] = value
            return [((words[key],), child) for key, child in content[1].items()]
        if kind not in ("named", "node"):
            raise ValueError(kind)
        return [((words[_step(key)],), child) for key, child in content[1]]


def _step(key: Json) -> str:
    return key if isinstance(key, str) else repr(key)
