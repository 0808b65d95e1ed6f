"""`load`: the values of a file in a tree of yours, or a dict of its arrays.

First everything is compared by name, and one error lists all differences; then arrays are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any, Literal, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import FileError, short_dtype
from pytreemod.io.configuration import configuration_of, differences, form_of, nodes_above
from pytreemod.io.container import Entry, StrPath, Table, empty, opened
from pytreemod.io.names import Part, TiedNames, generator_of, is_key, parts_of, places_of, ties_of
from pytreemod.io.renaming import NameTable, Rule, renamed, renamed_texts
from pytreemod.io.saving import DESCRIPTION, parsed
from pytreemod.module.unfinished import refuse_unfinished
from pytreemod.tree.predicates import NUMBERS, is_abstract
from pytreemod.tree.prefixes import By
from pytreemod.tree.reports import report_text
from pytreemod.tree.selecting import as_selector
from pytreemod.typing import FilterSpec, PyTree, jtu

_T = TypeVar("_T")
_NOTHING: Any = object()
"""The default of `like`, because None is a tree."""


@overload
def load(path: StrPath) -> dict[str, np.ndarray]: ...
@overload
def load(
    path: StrPath,
    like: _T,
    *,
    strict: Literal[True] = True,
    only: FilterSpec = True,
    rename: NameTable | None = None,
    cast: Any = None,
) -> _T: ...
@overload
def load(
    path: StrPath,
    like: _T,
    *,
    strict: Literal[False],
    only: FilterSpec = True,
    rename: NameTable | None = None,
    cast: Any = None,
) -> tuple[_T, LoadReport]: ...
def load(
    path: StrPath,
    like: Any = _NOTHING,
    *,
    strict: bool = True,
    only: FilterSpec = True,
    rename: NameTable | None = None,
    cast: Any = None,
) -> Any:
    """Load a tree from a file of [`save`][pytreemod.save], or from any safetensors file.

    The path may also lead to a folder in the layout of Hugging Face: `model.safetensors`, or the
    files that `model.safetensors.index.json` names.

    The result is `like` with the values of the file, by name. Both must have the same leaves, with
    the same shapes and dtypes, and the same configuration; one error lists all differences. Arrays
    get the devices and shardings of those in `like`. Without `like`, the result is a dict of NumPy
    arrays.

    The layers of an `nn.Stack`, and the members of an `nn.Ensemble`, are like a list of them: each
    has its own name, `blocks.3.up.weight`. A tied array needs one of its names.

    **Law.** `load(path, like) == tree` after `save(path, tree)`, for every `like` of the structure
    of `tree`.

    Args:
        path: the path of the file or folder.
        like: a tree of the structure of the result; it may be abstract, from
            [`filter_eval_shape`][pytreemod.filter_eval_shape], with shardings or without.
        strict: whether everything must fit. If not, missing leaves keep their values from `like`,
            and the function also returns a report.
        only: a selector of the leaves to load; the others are those of `like`.
        rename: from names in the file to names in `like`. In a pattern, `*` is a component, or a
            part of one, and `**` any number of them; a pattern also stands for everything below it.
            The first that matches a name counts. None drops an array. `(name, fn)` is for an array
            in another form, which `fn` gets in NumPy; `((name, ...), fn)` for one that is several
            of ours, which `fn` returns.
        cast: a dtype, or a [`by`][pytreemod.by] of dtypes (None for no cast), for arrays of the
            same kind, such as floating.

    Returns:
        A tree of the structure of `like`; if not strict, a pair of it and a
        [`LoadReport`][pytreemod.LoadReport].

    Raises:
        FileError: if the file is damaged, or does not fit `like`.
        ArgumentError: if a pattern in `rename` matches nothing.
        OSError: if the file cannot be read.

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> model = pm.nn.MLP(3, 2, 8, 1, key=jax.random.key(0))
        >>> pm.save("theirs.safetensors", model, rename={"layers.*": "fc*"})
        >>> sorted(pm.load("theirs.safetensors"))
        ['fc0.bias', 'fc0.weight', 'fc1.bias', 'fc1.weight']
        >>> pm.load("theirs.safetensors", model, rename={"fc*": "layers.*"}) == model
        True
    """
    with opened(path) as (table, texts):
        if like is _NOTHING:
            return {name: entry.read() for name, entry in table.items()}
        refuse_unfinished("load", like)
        config, ties = description_of(texts, path)
        given, origins = table, dict[str, str]()
        if rename is not None:
            table, origins = renamed(table, rename, "load")
            config = renamed_texts(config, rename)
        fit = Fit(table, like, ties, only, cast)
        fit.compare(config, given if rename is None else None)
        fit.refuse(f"load: {path} does not fit like", strict)
        made = fit.tree()
        if strict:
            return made
        return made, fit.report(origins)


def description_of(
    texts: Mapping[str, str], path: StrPath
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the configuration that a file has, and its ties, from places to their sources."""
    about = parsed(texts.get(DESCRIPTION, "{}"), path)
    found = [about.get(part, {}) if isinstance(about, dict) else None for part in _PARTS]
    for each in found:
        if not isinstance(each, dict) or any(not isinstance(x, str) for x in each.values()):
            raise FileError(f"{path} is damaged: its description has no texts by name")
    config, ties = found
    return config, ties


def form_text(entry: Entry) -> str:
    """Return the form of an array, in short: `f32[3,4]`."""
    return _text(entry.shape, entry.dtype, entry.key)


@dataclass(frozen=True, repr=False)
class LoadReport:
    """What `load(strict=False)` did, by names.

    Fields:
        loaded: leaves that have the values of the file.
        renamed: of these, those with another name in the file: `new <- old`.
        cast: of these, those of another dtype in the file.
        missing: leaves that keep the values of `like`, because the file has none.
        unexpected: arrays of the file that are not in `like`.
        configuration: differences; the result has the configuration of `like`.
    """

    loaded: Sequence[str]
    renamed: Sequence[str]
    cast: Sequence[str]
    missing: Sequence[str]
    unexpected: Sequence[str]
    configuration: Sequence[str]

    def __repr__(self) -> str:
        return report_text("LoadReport", vars(self), always="loaded")


_PARTS = ("config", "ties")
AS_LIKE: Any = object()
"""For `cast`: each leaf has the dtype that it has in `like`."""
_SMALL = 1 << 20
"""Arrays of fewer bytes are put on devices together."""


class Fit:
    """The leaves of a tree beside a table: what fits, and what does not.

    Args:
        table: arrays by name.
        like: see `load`.
        ties: in the file, from places to their sources.
        only: see `load`.
        cast: see `load`; or `AS_LIKE`.
    """

    def __init__(
        self,
        table: Table,
        like: PyTree,
        ties: Mapping[str, str] | None = None,
        only: FilterSpec = True,
        cast: Any = None,
    ):
        self.table, self.places = table, [*places_of(like)]
        self.leaves, self.treedef = jtu.tree_flatten(like)
        self.casts = cast.values(like) if isinstance(cast, By) else [cast] * len(self.leaves)
        if cast is AS_LIKE:
            self.casts = [getattr(leaf, "dtype", None) for leaf in self.leaves]
        chosen = [True] * len(self.leaves) if only is True else as_selector(only).mask(like)
        parts = [p for p in parts_of(self.places) if is_value(self.leaves[p.leaf])]
        self.parts = [part for part in parts if chosen[part.leaf]]
        self.others = [part.name for part in parts if not chosen[part.leaf]]
        tied = [TiedNames(place, source, None) for place, source in (ties or {}).items()]
        self.ties = [
            (tie, Rule(tie.place, tie.source), Rule(tie.source, tie.place))
            for tie in (*ties_of(self.places), *tied)
        ]
        self.wrong: list[str] = []
        self.missing: list[str] = []
        self.changed: list[str] = []
        """Those with another dtype in the table."""
        self.configuration: list[str] = []
        self.used: set[str] = set()
        self.entries: dict[str, Entry] = {}
        """For each part, by its name."""
        for leaf, group in groupby(self.parts, key=lambda part: part.leaf):
            self._match(self.leaves[leaf], self.casts[leaf], [*group])
        unused = [] if self.others else [name for name in table if name not in self.used]
        self.unexpected = [name for name in unused if not self._is_tied(name)]

    def _match(self, old: Any, cast: Any, parts: Sequence[Part]) -> None:
        shape, dtype, key = _form_of(old)
        shape = shape[len(parts[0].at) :]
        for part in parts:
            name = part.name if part.name in self.table else self._tied_name(part.name)
            if name is None:
                self.missing.append(part.name)
                if isinstance(old, jax.ShapeDtypeStruct):
                    self.wrong.append(f"{part.name}: missing, and like has no value")
                continue
            self.used.add(name)
            entry = self.table[name]
            is_cast = entry.dtype != dtype and _kind(entry.dtype) == _kind(cast or type(old))
            if entry.shape != shape or entry.key != key or not (entry.dtype == dtype or is_cast):
                mine = _text(shape, dtype, key) if dtype else f"a {type(old).__name__}"
                hint = " (see cast=)" if _kind(entry.dtype) == _kind(dtype) else ""
                hint = hint if entry.shape == shape and key is None else ""
                found = _text(entry.shape, entry.dtype, entry.key)
                self.wrong.append(f"{part.name}: like has {mine}, the file {found}{hint}")
                continue
            self.entries[part.name] = entry
            self.changed += [part.name] if is_cast and dtype else []

    def _tied_name(self, name: str) -> str | None:
        """Return the name in the table of an array with the same numbers."""
        for tie, to_source, to_place in self.ties:
            for rule in (to_source, to_place) if tie.through is None else ():
                other = rule.of(name)
                if other in self.table:
                    return other
        return None

    def _is_tied(self, name: str) -> bool:
        """Whether an array has the numbers that a tie of `like` gives; not if they differ."""
        for tie, to_source, _ in self.ties:
            source = to_source.of(name)
            if source in self.entries:
                there = self.entries[source].read()
                there = there if tie.through is None else np.asarray(tie.through(there))
                if there.tobytes() != self.table[name].read().tobytes():
                    self.wrong.append(f"{name}: other numbers than {source}, the source of its tie")
                return True
        return False

    def compare(self, config: Mapping[str, str], table: Table | None) -> None:
        """Note the configuration that differs.

        Args:
            config: that of the file.
            table: the arrays of the file; None if names differ, and what only one side has does
                not count.
        """
        names = [part.name for part in self.parts]
        found = [*differences(configuration_of(self.places), config, names, table or ())]
        chosen, others = (nodes_above(each) if found else () for each in (names, self.others))
        for name, mine, other in found:
            if table is None and None in (mine, other):
                continue
            # A Module counts if all of its leaves are loaded; one without leaves is as the one
            # above.
            node = form_of(name)
            while node and node not in chosen and node not in others:
                node = node.rpartition(".")[0]
            if node not in others:
                line = f"{name}: like has {mine or 'none'}, the file {other or 'none'}"
                self.configuration.append(line)

    def refuse(self, fact: str, strict: bool) -> None:
        """Raise an error that lists what does not fit.

        Raises:
            FileError: if there is anything.
        """
        lines = [*self.wrong]
        # Without one common name, the result would be `like` unchanged.
        if strict or (self.parts and not self.entries):
            lines += [f"{name}: missing" for name in self.missing]
            lines += [f"{name}: unexpected" for name in self.unexpected]
            lines += self.configuration
        if lines:
            hint = "tree, report = pm.load(path, like, strict=False)"
            hint = hint if strict and self.entries and not self.wrong else ()
            count = f"{len(lines)} difference{'s' * (len(lines) > 1)}"
            raise FileError(f"{fact}: {count}", at=lines, hint=hint, most=40)

    def tree(self) -> PyTree:
        """Return the tree with the values of the table."""
        made = [*self.leaves]
        # Small arrays by whether they are bound to devices: (leaf, array, sharding).
        small: dict[bool, list[tuple[int, np.ndarray, Any]]] = {False: [], True: []}
        for leaf, group in groupby(self.parts, key=lambda part: part.leaf):
            old, cast = self.leaves[leaf], self.casts[leaf]
            array = self._read(old, cast, [part for part in group if part.name in self.entries])
            if array is None:
                continue
            if not isinstance(old, (jax.Array, jax.ShapeDtypeStruct)):
                made[leaf] = _as_kind_of(old, array)
                continue
            is_bound = isinstance(old, jax.ShapeDtypeStruct) or old.committed
            sharding = old.sharding if is_bound else None
            if is_key(old) or getattr(old, "weak_type", False):
                made[leaf] = jax.device_put(_special(old, array), sharding)
            elif array.nbytes >= _SMALL:
                made[leaf] = jax.device_put(array, sharding)
            else:
                small[sharding is not None].append((leaf, array, sharding))
        for is_bound, rows in small.items():
            numbers, arrays, shardings = zip(*rows, strict=True) if rows else ((), (), ())
            put = jax.device_put(arrays, shardings if is_bound else None)
            for leaf, array in zip(numbers, put, strict=True):
                made[leaf] = array
        return self.treedef.unflatten(made)

    def _read(self, old: Any, cast: Any, parts: Sequence[Part]) -> np.ndarray | None:
        if not parts:
            return None
        entries = [self.entries[part.name] for part in parts]
        dtype = entries[0].dtype
        if cast is not None and _kind(cast) == _kind(dtype):
            dtype = np.dtype(cast)
        if parts[0].at == ():
            return entries[0].read().astype(dtype, copy=False)
        shape = _form_of(old)[0]
        array = empty(shape, dtype)
        if len(parts) < prod(shape[: len(parts[0].at)]):
            array[...] = old
        for part, entry in zip(parts, entries, strict=True):
            array[part.at] = entry.read()
        return array

    def report(self, origins: Mapping[str, str]) -> LoadReport:
        """Return what was done."""
        pairs = [f"{name} <- {origins[name]}" for name in self.entries if name in origins]
        return LoadReport(
            loaded=[*self.entries],
            renamed=pairs,
            cast=self.changed,
            missing=self.missing,
            unexpected=self.unexpected,
            configuration=self.configuration,
        )


def is_value(leaf: Any) -> bool:
    """Whether a file has numbers for a leaf; otherwise it is configuration."""
    return is_abstract(leaf) or isinstance(leaf, NUMBERS)


def _form_of(leaf: Any) -> tuple[tuple[int, ...], Any, str | None]:
    """Return the shape, the dtype (None for a number), and the generator of keys."""
    key = generator_of(leaf)
    if key is not None:
        data = jax.eval_shape(jax.random.key_data, leaf)
        return data.shape, data.dtype, key
    dtype = getattr(leaf, "dtype", None)
    # In a file, numbers have the byte order of this machine.
    return np.shape(leaf), dtype.newbyteorder("=") if isinstance(leaf, np.ndarray) else dtype, None


_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


def _kind(dtype: Any) -> Any:
    return next(
        (kind for kind in _KINDS if dtype is not None and jnp.issubdtype(dtype, kind)), None
    )


def _text(shape: tuple[int, ...], dtype: Any, key: str | None) -> str:
    keys = f" of keys ({key})" if key is not None else ""
    return f"{short_dtype(dtype)}[{','.join(map(str, shape))}]{keys}"


def _as_kind_of(old: Any, array: np.ndarray) -> Any:
    """Return an array as the leaf of NumPy or Python that it replaces."""
    if isinstance(old, NUMBERS):
        return type(old)(array.item())
    return array[()] if isinstance(old, np.generic) else array.astype(old.dtype, copy=False)


def _special(old: Any, array: np.ndarray) -> Any:
    key = generator_of(old)
    if key is not None:
        return jax.random.wrap_key_data(array, impl=key)
    # Weakly typed, as a Python number is: JAX has no other public way.
    weak = jnp.asarray(array.dtype.type(0).item())
    return jnp.broadcast_to(weak, array.shape).at[...].set(array)
