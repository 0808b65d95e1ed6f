"""`load`: the values of a file in a tree of yours, or a dict of its arrays.

First everything is compared by name, and one error lists all differences; then arrays are read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from typing import Any, Literal, TypedDict, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import FileError, short_dtype
from pytreemod.io.configuration import configuration_of, differences
from pytreemod.io.container import Entry, StrPath, Table, empty, opened
from pytreemod.io.names import Part, Place, TiedNames, nodes_above, parts_of, places_of, ties_of
from pytreemod.io.renaming import NameTable, Renaming, Rule
from pytreemod.io.saving import DESCRIPTION, entry_of, parsed
from pytreemod.tree.predicates import NUMBERS
from pytreemod.tree.prefixes import By
from pytreemod.tree.printing import report_text
from pytreemod.tree.selecting import as_selector
from pytreemod.typing import FilterSpec, PyTree, class_of, is_instance, jtu, untyped_jax

_T = TypeVar("_T")
# The default of `like`, because None is a tree.
_NOTHING: Any = object()


class _Options(TypedDict, total=False):
    only: FilterSpec
    rename: NameTable | None
    cast: Any


@overload
def load(path: StrPath) -> dict[str, np.ndarray]: ...
@overload
def load(
    path: StrPath, like: _T, *, strict: Literal[True] = True, **options: Unpack[_Options]
) -> _T: ...
@overload
def load(
    path: StrPath, like: _T, *, strict: Literal[False], **options: Unpack[_Options]
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
    with opened(path) as (given, texts):
        renaming = Renaming(rename)
        table, origins = renaming.table(given)
        config, ties = description_of(texts, path, renaming)
        renaming.refuse_unused(given)
        if like is _NOTHING:
            return {name: entry.read() for name, entry in table.items()}
        fit = Fit(table, like, ties, only, cast)
        if DESCRIPTION in texts:
            fit.compare(config, None if rename else given)
        # Without one common name, the result would be `like` unchanged.
        if lines := fit.differences(strict or not fit.report.loaded):
            hint = "tree, report = pm.load(path, like, strict=False)"
            hint = hint if strict and fit.report.loaded and not fit.wrong else ()
            count = f"{len(lines)} difference{'s' * (len(lines) > 1)}"
            fact = f"load: {path} does not fit like: {count}"
            raise FileError(fact, at=lines, hint=hint, most=40)
        made, report = fit.tree(), fit.report
        report.renamed.extend(f"{n} <- {origins[n]}" for n in report.loaded if n in origins)
        return made if strict else (made, report)


def description_of(
    texts: Mapping[str, str], path: StrPath, renaming: Renaming
) -> tuple[dict[str, str], list[TiedNames]]:
    """Return the configuration that a file has, and its ties, with other names."""
    about: Any = parsed(texts.get(DESCRIPTION, "{}"), path)
    config, ties = (_texts(about, part, path) for part in ("config", "ties"))
    # As `save` writes them; a longer pattern may take for ever.
    stars = [[x for x in name.split(".") if "*" in x] for pair in ties.items() for name in pair]
    if stars[::2] != stars[1::2] or any(x != "*" for each in stars for x in each):
        raise FileError(f"{path} is damaged: its description has other ties")
    pairs = ((renaming.name(place), renaming.name(source)) for place, source in ties.items())
    tied = [TiedNames(place, source, None) for place, source in pairs if place and source]
    named = ((renaming.name(name), text) for name, text in config.items())
    return {name: text for name, text in named if name is not None}, tied


def _texts(about: Any, part: str, path: StrPath) -> dict[str, str]:
    texts: Any = about.get(part, {}) if is_instance(about, dict) else None
    if not is_instance(texts, dict) or any(not is_instance(x, str) for x in texts.values()):
        raise FileError(f"{path} is damaged: its description has no {part}")
    return texts


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

    loaded: list[str] = field(default_factory=list[str])
    renamed: list[str] = field(default_factory=list[str])
    cast: list[str] = field(default_factory=list[str])
    missing: list[str] = field(default_factory=list[str])
    unexpected: list[str] = field(default_factory=list[str])
    configuration: list[str] = field(default_factory=list[str])

    def __repr__(self) -> str:
        return report_text("LoadReport", vars(self), always="loaded")


# For `cast`: each leaf has the dtype that it has in `like`.
AS_LIKE: Any = object()
# Arrays of fewer bytes are put on devices together.
_SMALL = 1 << 20


class Fit:
    """The leaves of a tree beside a table: what fits, and what does not.

    Args:
        table: arrays by name.
        like: see `load`.
        ties: in the file.
        only: see `load`.
        cast: see `load`; or `AS_LIKE`.
        places: of `like`; by default its own, with its names.
        names: of the leaves to load; None for all.
    """

    def __init__(
        self,
        table: Table,
        like: PyTree,
        ties: Sequence[TiedNames] = (),
        only: FilterSpec = True,
        cast: Any = None,
        places: Iterable[Place] | None = None,
        names: Set[str] | None = None,
    ):
        self.table, self.report = table, LoadReport()
        self.wrong: list[str] = []
        # Leaves that are missing, and have no value in `like`.
        self.abstract: list[str] = []
        self.places = [*(places_of(like) if places is None else places)]
        self.leaves, self.treedef = jtu.tree_flatten(like)
        self.forms = {i: form for i, x in enumerate(self.leaves) if (form := entry_of(x))}
        casts = cast.values(like) if isinstance(cast, By) else [cast] * len(self.leaves)
        self.dtypes = {i: self._wanted(i, casts[i]) for i in self.forms}
        chosen = [True] * len(self.leaves) if only is True else as_selector(only).mask(like)
        self.entries: dict[Part, Entry] = {}
        self.names: list[str] = []
        # Of leaves that are not chosen.
        self.others: list[str] = []
        self.ties = [
            (Rule(tie.place, tie.source), Rule(tie.source, tie.place), tie.through)
            for tie in (*ties_of(self.places), *ties)
        ]
        used: set[str] = set()
        for part in parts_of(self.places):
            if part.leaf not in self.forms or (names is not None and part.name not in names):
                continue
            if not chosen[part.leaf]:
                self.others.append(part.name)
                continue
            self.names.append(part.name)
            name = part.name if part.name in table else self._tied_name(part.name)
            used.add(name)
            self._match(part, table.get(name))
        sources = {part.name: entry for part, entry in self.entries.items()}
        for name in table if only is True else ():
            if name not in used and not self._is_tied(name, sources):
                self.report.unexpected.append(name)

    def _wanted(self, leaf: int, cast: Any) -> Any:
        """Return the dtype that arrays of its kind get; None for that of the file."""
        form = self.forms[leaf]
        # A Python number has no width of its own, and keys are no numbers.
        is_fixed = cast is AS_LIKE or isinstance(self.leaves[leaf], NUMBERS)
        return None if form.key else form.dtype if is_fixed else cast and jnp.dtype(cast)

    def _match(self, part: Part, found: Entry | None) -> None:
        form, dtype = self.forms[part.leaf], self.dtypes[part.leaf]
        if found is None:
            self.report.missing.append(part.name)
            is_abstract = isinstance(self.leaves[part.leaf], jax.ShapeDtypeStruct)
            self.abstract += [part.name] if is_abstract else []
            return
        mine = form._replace(shape=form.shape[len(part.at) :])
        is_cast = dtype and _kind(found.dtype) == _kind(mine.dtype) == _kind(dtype)
        is_same = (found.shape, found.key) == (mine.shape, mine.key)
        if is_same and (is_cast or found.dtype == mine.dtype):
            self.entries[part] = found
            self.report.loaded.append(part.name)
            self.report.cast.extend([part.name] if is_cast and found.dtype != dtype else [])
            return
        hint = " (see cast=)" if is_same and _kind(found.dtype) == _kind(mine.dtype) else ""
        name = part.name or "the tree"
        self.wrong.append(f"{name}: expected {form_text(mine)}, got {form_text(found)}{hint}")

    def _tied_name(self, name: str) -> str:
        """Return the name in the table of an array that is tied to this one, or this name."""
        rules = (rule for *rules, through in self.ties if through is None for rule in rules)
        others = (rule.of(name) or "" for rule in rules)
        return next((other for other in others if other in self.table), name)

    def _is_tied(self, name: str, sources: Mapping[str, Entry]) -> bool:
        """Whether an array is of a tied place; its numbers must be those of the source."""
        for to_source, _, through in self.ties:
            source = sources.get(to_source.of(name) or "")
            if source is not None:
                there = source.read() if through is None else np.asarray(through(source.read()))
                if there.tobytes() != self.table[name].read().tobytes():
                    self.wrong.append(f"{name}: other numbers than {to_source.of(name)}, its tie")
                return True
        return False

    def compare(self, config: Mapping[str, str], table: Table | None) -> None:
        """Note the configuration that differs, in nodes of which all leaves are loaded.

        Args:
            config: that of the file.
            table: the arrays of the file; None if names differ, and what only one side has does
                not count.
        """
        found = differences(configuration_of(self.places), config, self.names, table or ())
        inside, outside = (nodes_above(x if found else ()) for x in (self.names, self.others))
        for name, mine, other in found:
            # A field, or a Module without arrays, is loaded as the next node above that has some.
            node = name
            while node and node not in inside and node not in outside:
                node = node.rpartition(".")[0]
            if node not in outside and (table is not None or None not in (mine, other)):
                text = f"expected {mine or 'nothing'}, got {other or 'nothing'}"
                self.report.configuration.append(f"{name or 'the tree'}: {text}")

    def differences(self, strict: bool = True) -> list[str]:
        """Return what does not fit, a line for each."""
        report = self.report
        lines = [f"{name}: missing" for name in (report.missing if strict else self.abstract)]
        if strict:
            unexpected = (f"{name}: unexpected" for name in report.unexpected)
            lines += [*unexpected, *report.configuration]
        return [*self.wrong, *lines]

    def tree(self) -> PyTree:
        """Return the tree with the values of the table."""
        made = [*self.leaves]
        small = defaultdict[Any, list[tuple[int, Any]]](list)
        for leaf, group in groupby(self.entries, key=lambda part: part.leaf):
            old, array = self.leaves[leaf], self._read(leaf, [*group])
            if not isinstance(old, (jax.Array, jax.ShapeDtypeStruct)):
                made[leaf] = _as_kind_of(old, array)
                continue
            sharding = None if isinstance(old, jax.Array) and not old.committed else old.sharding
            is_weak = getattr(old, "weak_type", False) and array.dtype == old.dtype
            if self.forms[leaf].key is not None or is_weak:
                made[leaf] = jax.device_put(_special(array, self.forms[leaf].key), sharding)
            elif array.nbytes < _SMALL:
                small[sharding].append((leaf, array))
            else:
                made[leaf] = jax.device_put(array, sharding)
        for sharding, rows in small.items():
            put = jax.device_put([array for _, array in rows], sharding)
            for (leaf, _), array in zip(rows, put, strict=True):
                made[leaf] = array
        return self.treedef.unflatten(made)

    def _read(self, leaf: int, parts: Sequence[Part]) -> Any:
        form, dtype, first = self.forms[leaf], self.dtypes[leaf], self.entries[parts[0]]
        is_cast = dtype and _kind(first.dtype) == _kind(dtype)
        dtype = dtype if is_cast and not isinstance(self.leaves[leaf], NUMBERS) else first.dtype
        if parts[0].at == ():
            return _cast(first.read(), dtype, parts[0].name)
        array: Any = empty(form.shape, dtype)
        if len(parts) < prod(form.shape[: len(parts[0].at)]):
            # The layers that the file lacks.
            array[...] = form.read()
        for part in parts:
            array[part.at] = _cast(self.entries[part].read(), dtype, part.name)
        return array


def _cast(array: Any, dtype: Any, name: str) -> Any:
    if array.dtype == dtype:
        return array
    with np.errstate(all="ignore"):
        made = array.astype(dtype)
    # Rounding is what a cast is for.
    is_lost = np.isfinite(array) > np.isfinite(made)
    if jnp.issubdtype(dtype, jnp.integer):
        is_lost = (made.astype(array.dtype) != array) | ((made < 0) != (array < 0))
    if is_lost.any():
        raise FileError(f"{name} has numbers that {dtype} does not have")
    return made


_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


def _kind(dtype: Any) -> Any:
    # Not of None, which NumPy takes for a dtype.
    return next((kind for kind in _KINDS if dtype and jnp.issubdtype(dtype, kind)), None)


def form_text(entry: Entry) -> str:
    """Return the form of an array, in short: `f32[3,4]`."""
    keys = "" if entry.key is None else f" of keys ({entry.key})"
    return f"{short_dtype(entry.dtype)}[{','.join(map(str, entry.shape))}]{keys}"


def _as_kind_of(old: Any, array: Any) -> Any:
    """Return an array as the leaf of NumPy or Python that it replaces."""
    if is_instance(old, NUMBERS):
        return class_of(old)(array.item())
    # In this machine's byte order so far.
    is_same = old.dtype.newbyteorder("=") == array.dtype
    array = array.astype(old.dtype, copy=False) if is_same else array
    return array[()] if is_instance(old, np.generic) else array


def _special(array: Any, key: str | None) -> Any:
    """Return random keys, or an array that is weakly typed, as a Python number is."""
    if key is not None:
        return untyped_jax.random.wrap_key_data(array, impl=key)
    # JAX has no other public way.
    weak = jnp.asarray(array.dtype.type(0).item())
    return jnp.broadcast_to(weak, array.shape).at[...].set(array)
