"""`load`: the values of a file in a tree of yours, or a dict of its arrays.

First everything is compared by name, and one error lists all differences; then arrays are read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from types import MappingProxyType
from typing import Any, Literal, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import FileError, short_dtype
from pytreemod.io.configuration import configuration_of, differences, form_of, nodes_above
from pytreemod.io.container import Entry, StrPath, Table, empty, opened
from pytreemod.io.names import Part, TiedNames, generator_of, is_key, parts_of, places_of, ties_of
from pytreemod.io.renaming import NameTable, Rule, renamed, renamed_texts
from pytreemod.io.saving import DESCRIPTION, PARTS, entry_of, parsed
from pytreemod.module.unfinished import refuse_unfinished
from pytreemod.tree.predicates import NUMBERS
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
        made, report = fit.tree(), fit.report
        old_names = ((name, origins.get(name)) for name in report.loaded)
        report.renamed.extend(f"{name} <- {old}" for name, old in old_names if old is not None)
        return made if strict else (made, report)


def description_of(
    texts: Mapping[str, str], path: StrPath
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the configuration that a file has, and its ties, from places to their sources."""
    about = parsed(texts.get(DESCRIPTION, "{}"), path)
    config, ties = (about.get(x, {}) if isinstance(about, dict) else None for x in PARTS)
    for each in (config, ties):
        if not isinstance(each, dict) or any(not isinstance(x, str) for x in each.values()):
            raise FileError(f"{path} is damaged: its description has no texts by name")
    return config, ties


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

    loaded: list[str] = field(default_factory=list)
    renamed: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    configuration: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        return report_text("LoadReport", vars(self), always="loaded")


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
        ties: Mapping[str, str] = MappingProxyType({}),
        only: FilterSpec = True,
        cast: Any = None,
    ):
        self.table, self.report = table, LoadReport()
        self.wrong: list[str] = []
        self.places = [*places_of(like)]
        self.leaves, self.treedef = jtu.tree_flatten(like)
        self.forms = [entry_of(leaf) for leaf in self.leaves]
        self.casts = cast.values(like) if isinstance(cast, By) else [cast] * len(self.leaves)
        if cast is AS_LIKE:
            self.casts = [None if form is None else form.dtype for form in self.forms]
        chosen = [True] * len(self.leaves) if only is True else as_selector(only).mask(like)
        parts = [part for part in parts_of(self.places) if self.forms[part.leaf] is not None]
        self.others = [part.name for part in parts if not chosen[part.leaf]]
        self.ties = [
            (tie, Rule(tie.place, tie.source), Rule(tie.source, tie.place))
            for tie in (*ties_of(self.places), *(TiedNames(*pair, None) for pair in ties.items()))
        ]
        used: set[str] = set()
        self.entries: dict[Part, Entry] = {}
        self.parts = [part for part in parts if chosen[part.leaf]]
        for part in self.parts:
            name = part.name if part.name in table else self._tied_name(part.name)
            used.add(name or "")
            self._match(part, self.table.get(name))
        by_name = {part.name: entry for part, entry in self.entries.items()}
        for name in () if self.others else table:
            if name not in used and not self._is_tied(name, by_name):
                self.report.unexpected.append(name)

    def _match(self, part: Part, found: Entry | None) -> None:
        leaf, form, cast = (each[part.leaf] for each in (self.leaves, self.forms, self.casts))
        if found is None:
            self.report.missing.append(part.name)
            if isinstance(leaf, jax.ShapeDtypeStruct):
                self.wrong.append(f"{part.name}: missing, and like has no value")
            return
        mine = form._replace(shape=form.shape[len(part.at) :])
        is_number = isinstance(leaf, NUMBERS)
        is_cast = found.dtype != mine.dtype and _kind(found.dtype) == _kind(
            form.dtype if is_number else cast
        )
        has_form = (found.shape, found.key) == (mine.shape, mine.key)
        if not (has_form and (is_cast or found.dtype == mine.dtype)):
            is_castable = has_form and _kind(found.dtype) == _kind(mine.dtype)
            mine_text = f"a {type(leaf).__name__}" if is_number else form_text(mine)
            hint = " (see cast=)" if is_castable else ""
            text = f"{part.name}: like has {mine_text}, the file {form_text(found)}{hint}"
            self.wrong.append(text)
            return
        self.entries[part] = found
        self.report.loaded.append(part.name)
        if is_cast and not is_number:
            self.report.cast.append(part.name)

    def _tied_name(self, name: str) -> str | None:
        """Return the name in the table of an array that is tied to this one."""
        rules = (rule for tie, *rules in self.ties if tie.through is None for rule in rules)
        return next((other for rule in rules if (other := rule.of(name)) in self.table), None)

    def _is_tied(self, name: str, entries: Mapping[str, Entry]) -> bool:
        """Whether an array is of a tied place; its numbers must be those of the source."""
        for tie, to_source, _ in self.ties:
            source = to_source.of(name)
            if source in entries:
                there = entries[source].read()
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
            # A Module counts if all of its leaves are loaded; one without leaves is as the one
            # above.
            node = form_of(name)
            while node and node not in chosen and node not in others:
                node = node.rpartition(".")[0]
            if node not in others and (table is not None or None not in (mine, other)):
                line = f"{name}: like has {mine or 'none'}, the file {other or 'none'}"
                self.report.configuration.append(line)

    def refuse(self, fact: str, strict: bool = True) -> None:
        """Raise an error that lists what does not fit.

        Raises:
            FileError: if there is anything.
        """
        lines, report = [*self.wrong], self.report
        # Without one common name, the result would be `like` unchanged.
        if strict or (self.parts and not self.entries):
            lines += [f"{name}: missing" for name in report.missing]
            lines += [f"{name}: unexpected" for name in report.unexpected]
            lines += report.configuration
        if lines:
            hint = "tree, report = pm.load(path, like, strict=False)"
            hint = hint if strict and self.entries and not self.wrong else ()
            count = f"{len(lines)} difference{'s' * (len(lines) > 1)}"
            raise FileError(f"{fact}: {count}", at=lines, hint=hint, most=40)

    def tree(self) -> PyTree:
        """Return the tree with the values of the table."""
        made = [*self.leaves]
        small = defaultdict[Any, list[tuple[int, np.ndarray]]](list)
        for leaf, group in groupby(self.entries, key=lambda part: part.leaf):
            old, array = self.leaves[leaf], self._read(leaf, [*group])
            if not isinstance(old, (jax.Array, jax.ShapeDtypeStruct)):
                made[leaf] = _as_kind_of(old, array)
                continue
            is_bound = isinstance(old, jax.ShapeDtypeStruct) or old.committed
            sharding = old.sharding if is_bound else None
            if is_key(old) or getattr(old, "weak_type", False):
                made[leaf] = jax.device_put(_special(old, array), sharding)
            elif array.nbytes < _SMALL:
                small[sharding].append((leaf, array))
            else:
                made[leaf] = jax.device_put(array, sharding)
        for sharding, rows in small.items():
            put = jax.device_put([array for _, array in rows], sharding)
            for (leaf, _), array in zip(rows, put, strict=True):
                made[leaf] = array
        return self.treedef.unflatten(made)

    def _read(self, leaf: int, parts: Sequence[Part]) -> np.ndarray:
        form, cast, first = self.forms[leaf], self.casts[leaf], self.entries[parts[0]]
        is_cast = cast is not None and _kind(cast) == _kind(first.dtype)
        dtype = np.dtype(cast) if is_cast else first.dtype
        if parts[0].at == ():
            return first.read().astype(dtype, copy=False)
        array = empty(form.shape, dtype)
        if len(parts) < prod(form.shape[: len(parts[0].at)]):
            # The layers that the file lacks.
            array[...] = form.read()
        for part in parts:
            array[part.at] = self.entries[part].read()
        return array


_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


def _kind(dtype: Any) -> Any:
    kinds = () if dtype is None else _KINDS
    return next((kind for kind in kinds if jnp.issubdtype(dtype, kind)), None)


def form_text(entry: Entry) -> str:
    """Return the form of an array, in short: `f32[3,4]`."""
    keys = "" if entry.key is None else f" of keys ({entry.key})"
    return f"{short_dtype(entry.dtype)}[{','.join(map(str, entry.shape))}]{keys}"


def _as_kind_of(old: Any, array: np.ndarray) -> Any:
    """Return an array as the leaf of NumPy or Python that it replaces."""
    if isinstance(old, NUMBERS):
        return type(old)(array.item())
    # In this machine's byte order so far.
    is_same = old.dtype.newbyteorder("=") == array.dtype
    array = array.astype(old.dtype, copy=False) if is_same else array
    return array[()] if isinstance(old, np.generic) else array


def _special(old: Any, array: np.ndarray) -> Any:
    """Return random keys, or an array that is weakly typed, as a Python number is."""
    key = generator_of(old)
    if key is not None:
        return jax.random.wrap_key_data(array, impl=key)
    # JAX has no other public way.
    weak = jnp.asarray(array.dtype.type(0).item())
    return jnp.broadcast_to(weak, array.shape).at[...].set(array)
