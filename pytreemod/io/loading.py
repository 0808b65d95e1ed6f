"""`load`: a file's values in a tree of one's own, or the tree that the file describes.

The file's table of leaves and that of `like` are brought together by name. What does not fit is
collected, and told at once, before anything is read; then each array is read, on its own, and put
where the leaf of `like` is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, cast, overload

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import ArgumentError, FileError, describe, explain, short_dtype
from pytreemod.io.access import StrPath, file_name
from pytreemod.io.configuration import ConfigurationReader, Json, are_same, describe_json
from pytreemod.io.containers import Container
from pytreemod.io.descriptions import describe_tree
from pytreemod.io.leaf_names import TABLE, mismatches
from pytreemod.io.rebuilding import rebuild_tree
from pytreemod.io.reports import LoadReport
from pytreemod.io.saving import DESCRIPTION, USERS, VERSION
from pytreemod.io.tables import Leaf, Source, Table, read_table, renamed, restacked
from pytreemod.tree.kinds import PYTHON_SCALARS
from pytreemod.tree.selecting import Rule, as_selector
from pytreemod.typing import FilterSpec, PyTree, jtu

_T = TypeVar("_T")


class _Nothing:
    """What `like` is where none is given; None is a tree."""


_NOTHING: Any = _Nothing()


@overload
def load(path: StrPath, *, verify: bool = True) -> Any: ...
@overload
def load(
    path: StrPath,
    like: _T,
    *,
    strict: Literal[True] = True,
    rename: Mapping[str, str] | None = None,
    missing: Any = None,
    only: FilterSpec = True,
    cast: Any = None,
    verify: bool = True,
) -> _T: ...
@overload
def load(
    path: StrPath,
    like: _T,
    *,
    strict: Literal[False],
    rename: Mapping[str, str] | None = None,
    missing: Any = None,
    only: FilterSpec = True,
    cast: Any = None,
    verify: bool = True,
) -> tuple[_T, LoadReport]: ...
def load(
    path: StrPath,
    like: Any = _NOTHING,
    *,
    strict: bool = True,
    rename: Mapping[str, str] | None = None,
    missing: Any = None,
    only: FilterSpec = True,
    cast: Any = None,
    verify: bool = True,
) -> Any:
    """Read a tree from a file that [`save`][pytreemod.save] wrote, or any file of safetensors.

    With `like`, the result is `like` with the file's values, by name. Unless told otherwise, every
    leaf of one must be in the other, with the same shape and dtype, and the configuration that the
    file tells must be that of `like`: all that differs is told at once. Arrays are put where those
    of `like` are, shardings included; where `like` has a NumPy array, there will be one.

    Without `like`, the tree is rebuilt from what the file tells: of classes and functions that are
    registered in this process, and no others (see
    [`register_for_files`][pytreemod.register_for_files]). A file of other tools gives a dict of
    arrays by name.

    Layers that are one `nn.Stack` in `like` may be a list in the file, and the other way round.

    What was read is the reader's own: the file may change, or go.

    **Laws.** `load(path, like) == tree` after `save(path, tree)`, for every `like` of the structure
    of `tree`; and `load(path) == tree` where all classes are registered.

    Args:
        path: of the file.
        like: a tree of the structure that is wanted; it may be abstract, as
            [`filter_eval_shape`][pytreemod.filter_eval_shape] makes it, with shardings or without.
        strict: whether all must fit; if not, a report of what did comes beside the tree, leaves
            that are not in the file are kept, and `like` is right about the configuration.
        rename: from names in the file to names in `like`: of leaves (`"head.w"`), or of what they
            are in (`"encoder"`, or `""` for the whole).
        missing: what becomes of a leaf that the file lacks, or has in another shape: `"keep"` or
            `"error"`, or a [`by`][pytreemod.by] of these; if None, `"error"` if strict, else
            `"keep"`, and a shape is an error.
        only: a selector: the leaves to be loaded; the others stay as they are in `like`. Nothing
            else is read from the file.
        cast: a dtype, or a `by` of dtypes (None for as it is): what arrays of the same kind,
            such as floating, are cast to.
        verify: whether the checksum of each array is compared. That of the header always is.

    Returns:
        A tree of the structure of `like`; if not strict, and a [`LoadReport`][pytreemod.LoadReport].

    Raises:
        FileError: the file is damaged, is of another tree, or names what is not registered;
            `FileMissingError`, `FilePermissionError` if it cannot be read.
        ArgumentError: an argument is unusable.
        SpecError: a selector does not fit `like`.

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> model = pm.nn.MLP(3, 2, 8, 1, key=jax.random.key(0))
        >>> pm.save("model.safetensors", model)
        >>> pm.load("model.safetensors", pm.nn.MLP(3, 2, 8, 1, key=jax.random.key(1))) == model
        True
        >>> pm.load("model.safetensors") == model
        True

        Another head, in half precision:

        >>> like = pm.nn.MLP(3, 5, 8, 1, key=jax.random.key(1))
        >>> tuned, report = pm.load(
        ...     "model.safetensors",
        ...     like,
        ...     strict=False,
        ...     missing=pm.by({"layers.1": "keep", ...: "error"}),
        ...     cast="bfloat16",
        ... )
        >>> report.missing
        ('layers.1.weight', 'layers.1.bias')
    """
    where = f"load({file_name(path)!r})"
    with Container.open(path, verify=verify) as file:
        about = _description(file, where)
        if like is _NOTHING:
            _check_alone(where, strict, rename, missing, only, cast)
            return _rebuilt(file, about, where)
        plan = _Plan(file, about, like, where, strict)
        plan.choose(rename, only, missing, cast)
        made = plan.carry_out()
    return made if strict else (made, plan.report())


def read_metadata(path: StrPath) -> Json:
    """What [`save`][pytreemod.save] was given as `metadata`; no array is read.

    Args:
        path: of the file.

    Returns:
        The value; None if there is none. Of a file of other tools, the texts in its header.

    Raises:
        FileError: the file is damaged, or there is none (`FileMissingError`).

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> pm.save("model.safetensors", jnp.zeros(3), {"step": 100, "loss": 0.5})
        >>> pm.read_metadata("model.safetensors")
        {'step': 100, 'loss': 0.5}
    """
    where = f"read_metadata({file_name(path)!r})"
    with Container.open(path) as file:
        if DESCRIPTION not in file.metadata:
            return dict(file.metadata) or None
        text = file.metadata.get(USERS)
    return None if text is None else _parsed(text, where)


# ---- what a file says


def _parsed(text: str, where: str) -> Json:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _malformed(where) from error


def _malformed(where: str) -> FileError:
    return FileError(explain(where, "a description that `pm.save` wrote", "something else"))


def _description(file: Container, where: str) -> dict[str, Any] | None:
    """What the file tells of its tree; None if it was not written by `save`."""
    text = file.metadata.get(DESCRIPTION)
    if text is None:
        return None
    about = _parsed(text, where)
    if not isinstance(about, dict) or "tree" not in about:
        raise _malformed(where)
    told = cast("dict[str, Any]", about)
    version = told.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise FileError(
            explain(
                where,
                f"a file of version {VERSION} or lower",
                f"version {version!r}, written by pytreemod {told.get('pytreemod')!r}",
                cure=["a newer pytreemod reads it:", "pip install --upgrade pytreemod"],
            )
        )
    return told


def _table_of(file: Container, about: dict[str, Any] | None, where: str) -> Table:
    arrays = {
        name: Leaf({"is": "jax"}, entry.shape, entry.dtype, Source((name,)))
        for name, entry in file.entries.items()
    }
    if about is None:
        return Table(leaves=arrays, is_described=False)
    try:
        return read_table(about["tree"], arrays)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise _malformed(where) from error


# ---- without `like`


def _check_alone(where: str, strict: bool, *others: Any) -> None:
    if not strict or any(other is not None and other is not True for other in others):
        raise ArgumentError(
            explain(
                where,
                "`like`, a tree to put the values into",
                "none, with options that are about it",
                cure=["give one:", "pm.load(path, like, ...)"],
            )
        )


def _rebuilt(file: Container, about: dict[str, Any] | None, where: str) -> Any:
    if about is None:
        leaves = {name: Leaf({"is": "jax"}, e.shape, e.dtype) for name, e in file.entries.items()}
        _check_widths(leaves, where)
        return {name: _as_jax(file.read(name)) for name in leaves}
    table = _table_of(file, about, where)
    _check_widths({n: leaf for n, leaf in table.leaves.items() if leaf.is_array}, where)

    def read_leaf(name: str, form: dict[str, Json]) -> Any:
        return _made(file.read(name), form, where, name)

    return rebuild_tree(about["tree"], read_leaf, where)


def _check_widths(leaves: Mapping[str, Leaf], where: str) -> None:
    for name, leaf in leaves.items():
        if leaf.form.get("is") == "jax" and _is_too_wide(leaf.dtype):
            text = f"{short_dtype(leaf.dtype)} at {name}"
            raise FileError(explain(where, "dtypes that JAX has", text, cure=_CURE_WIDTH))


_CURE_WIDTH = [
    "JAX has 64 bits only if told so; or cast what goes into `like`:",
    'jax.config.update("jax_enable_x64", True)',
    'pm.load(path, like, cast="float32")',
]


def _is_too_wide(dtype: Any) -> bool:
    return jax.dtypes.canonicalize_dtype(dtype) != dtype


def _made(array: np.ndarray[Any, Any], form: Mapping[str, Json], where: str, name: str) -> Any:
    """A leaf of the form that the file tells."""
    kind = form.get("is")
    if kind == "numpy":
        return array
    if kind == "scalar" and array.ndim == 0:
        return array[()]
    if kind == "key":
        return _as_key(array, form.get("impl"), where, name)
    if kind != "jax":
        raise _malformed(where)
    return _weakly(_as_jax(array)) if form.get("weak") else _as_jax(array)


def _as_jax(array: np.ndarray[Any, Any], sharding: Any = None) -> Any:
    # A reading makes memory of its own for each array, and nobody else writes into it: JAX may
    # have it as it is, where it can.
    return jnp.asarray(array) if sharding is None else jax.device_put(array, sharding)


def _weakly(array: Any) -> Any:
    """An array whose dtype gives way to others, as that of a Python number does."""
    if array.ndim == 0:
        weak = jnp.asarray(array.item())
    else:
        weak = jnp.broadcast_to(jnp.asarray(array.dtype.type(0).item()), array.shape)
        weak = weak.at[...].set(array)
    return weak if weak.dtype == array.dtype else array


def _as_key(array: Any, impl: Json, where: str, name: str, sharding: Any = None) -> Any:
    try:
        keys = jax.random.wrap_key_data(jnp.asarray(array), impl=cast("Any", impl))
    except (ValueError, TypeError) as error:
        expected = "random keys of a generator that JAX has here"
        got = f"{describe(array)} of {describe(impl)}"
        raise FileError(explain(where, expected, got, places=[name])) from error
    return keys if sharding is None else jax.device_put(keys, sharding)


# ---- into `like`


class _Move(NamedTuple):
    """One leaf that comes from the file."""

    place: int
    """Which leaf of `like` it becomes."""

    name: str
    leaf: Leaf
    dtype: Any
    """What it is cast to; None for as it is."""


class _Plan:
    """What will be read, and where it goes; nothing is, before all of it was found to fit."""

    def __init__(
        self, file: Container, about: dict[str, Any] | None, like: PyTree, where: str, strict: bool
    ):
        self.file, self.where, self.strict = file, where, strict
        self.theirs = _table_of(file, about, where)
        described = describe_tree(like, where)
        self.like, self.names = like, list(described.leaves)
        self.leaves = list(described.leaves.values())
        self.treedef = jtu.tree_structure(like)
        arrays = {
            name: Leaf({}, tuple(jnp.shape(leaf)), getattr(leaf, "dtype", None))
            for name, leaf in described.leaves.items()
        }
        self.ours = read_table(described.tree, arrays)
        self.problems: list[str] = []
        self.moves: list[_Move] = []
        self.kept: list[str] = []
        self.unexpected: list[str] = []
        self.changed_config: list[str] = []
        self.renamed: dict[str, str] = {}
        self.reshaped: set[str] = set()

    def choose(self, rename: Any, only: Any, missing: Any, cast: Any) -> None:
        """Decide for each leaf.

        Raises:
            FileError: something does not fit.
        """
        theirs = self.theirs
        if rename:
            theirs, self.renamed = renamed(theirs, _checked_names(rename, self.where), self.where)
        theirs, self.reshaped = restacked(theirs, self.ours, self.where)
        chosen = as_selector(only).mask(self.like)
        rules = _choices(missing, self.like, self.where)
        dtypes = _dtypes(cast, self.like, self.where)
        lacking: list[str] = []
        for i, name in enumerate(self.names):
            if not chosen[i]:
                continue
            leaf = theirs.leaves.get(name)
            rule = rules[i] or ("error" if self.strict else "keep")
            if leaf is None:
                (self._keep(i) if rule == "keep" else lacking.append(name))
            else:
                self._fit(i, leaf, dtypes[i], rules[i])
        known = {name for name, pick in zip(self.names, chosen, strict=True) if pick}
        others = [name for name in theirs.leaves if name not in known]
        # Of what was not asked for, nothing is said.
        self.unexpected = others if all(chosen) else []
        if self.strict:
            told = {name for name in theirs.leaves if name in known}
            self.problems += mismatches([*told, *lacking], [*told, *self.unexpected])
        else:
            self.problems += mismatches(lacking, [])
        self._compare_configuration(theirs, chosen)
        if self.problems:
            self._refuse()

    def _keep(self, i: int) -> None:
        if isinstance(self.leaves[i], jax.ShapeDtypeStruct):
            self.problems.append(f"{self.names[i]}: missing, and like has no value to keep")
        self.kept.append(self.names[i])

    def _fit(self, i: int, leaf: Leaf, dtype: Any, rule: str | None) -> None:
        name, old = self.names[i], self.leaves[i]
        wrong = self._misfit(old, leaf, dtype, name)
        if wrong is None:
            is_cast = dtype is not None and leaf.is_array and _is_same_kind(leaf.dtype, dtype)
            to = dtype if is_cast and leaf.dtype != dtype else None
            self.moves.append(_Move(i, name, leaf, to))
        elif rule == "keep":
            self._keep(i)
        else:
            self.problems.append(f"{name}: {wrong}")

    def _misfit(self, old: Any, leaf: Leaf, dtype: Any, name: str) -> str | None:
        """What is wrong with a leaf of the file for the place of `old`."""
        mine = self.ours.leaves[name]
        if not leaf.is_array or not mine.is_array:
            return self._misfit_of_value(old, mine, leaf)
        shape, own = leaf.shape, tuple(old.shape)
        kind, is_key = mine.form.get("is"), leaf.form.get("is") == "key"
        # A file of other tools knows no keys, but their numbers.
        if (kind == "key") != is_key and self.theirs.is_described:
            return f"like has {describe(old)}, the file {'random keys' if is_key else 'none'}"
        if kind == "key":
            return self._misfit_of_key(old, leaf)
        if shape != own:
            same = [n for n in shape if n != 1] == [n for n in own if n != 1]
            if self.strict or not same:
                return f"like has {describe(old)}, the file {_text(leaf)}"
            self.reshaped.add(name)
        if dtype is not None and _is_same_kind(leaf.dtype, dtype):
            return None
        if leaf.dtype != old.dtype:
            return f"like has {describe(old)}, the file {_text(leaf)} (see cast=)"
        return None

    def _misfit_of_key(self, old: Any, leaf: Leaf) -> str | None:
        size = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), old.dtype)).shape
        if leaf.shape != (*old.shape, *size) or leaf.dtype != np.uint32:
            return f"like has {describe(old)}, the file other keys, of {leaf.form.get('impl')}"
        impl = leaf.form.get("impl")
        # Only a generator's name tells two of one size apart.
        if isinstance(old, jax.Array) and impl not in (None, str(jax.random.key_impl(old))):
            return f"like has {describe(old)}, the file keys of {impl}"
        return None

    def _misfit_of_value(self, old: Any, mine: Leaf, leaf: Leaf) -> str | None:
        if type(old) in PYTHON_SCALARS:
            if leaf.is_array:
                is_same = leaf.shape == () and np.dtype(type(old)).kind == _kind(leaf.dtype)
                return None if is_same else f"like has {describe(old)}, the file {_text(leaf)}"
            value = leaf.form["value"]
            is_same = _class_of_json(value) is type(old)
            return None if is_same else f"like has {describe(old)}, the file {describe(value)}"
        if mine.is_array or leaf.is_array:
            return f"like has {describe(old)}, the file {_text(leaf)}"
        # A text, or a function: it is configuration in all but its place.
        if not are_same(mine.form["value"], leaf.form["value"]):
            got = describe_json(leaf.form["value"])
            return f"like has {describe(old)}, the file {got}" if self.strict else None
        return None

    def _compare_configuration(self, theirs: Table, chosen: Sequence[bool]) -> None:
        if not theirs.is_described:
            return
        concerned = _above([n for n, pick in zip(self.names, chosen, strict=True) if pick])
        everything = all(chosen)
        for name, value in theirs.config.items():
            if not everything and name.rpartition(".")[0] not in concerned:
                continue
            mine = self.ours.config.get(name, _NOTHING)
            if mine is _NOTHING:
                self._differs(name, "only in the file", describe_json(value))
            elif not are_same(mine, value):
                self._differs(name, f"like has {describe_json(mine)}", describe_json(value))
        if not self.strict:
            new = [n for n in self.ours.config if n not in theirs.config and "." not in n]
            self.changed_config += [f"{name}: only in like" for name in new]

    def _differs(self, name: str, mine: str, value: str) -> None:
        text = f"{name or '<root>'}: {mine}, the file {value}"
        text = f"{name or '<root>'}: {mine}" if mine == "only in the file" else text
        (self.problems if self.strict else self.changed_config).append(text)

    def _refuse(self) -> None:
        cure = ["what may differ can be said; a report says what did:"]
        if self.strict:
            cure += ["model, report = pm.load(path, like, strict=False)"]
        else:
            cure += ['missing=pm.by({"head.**": "keep", ...: "error"}), rename={"old": "new"}']
        if any("see cast=" in problem for problem in self.problems):
            cure += ['pm.load(path, like, cast="float32")']
        one = len(self.problems) == 1
        raise FileError(
            explain(
                self.where,
                "the leaves and the configuration of like",
                f"{len(self.problems)} difference{'' if one else 's'}",
                places=self.problems,
                cure=cure,
                most=TABLE,
            )
        )

    def carry_out(self) -> Any:
        """Read what was planned; returns the tree."""
        leaves = list(self.leaves)
        read = _read_each(self.file)
        first = {name: entry.start for name, entry in self.file.entries.items()}
        # In the order of the file, and all parts of one array after another.
        for move in sorted(self.moves, key=lambda m: first.get((*m.leaf.source.names, "")[0], -1)):
            old = leaves[move.place]
            if move.leaf.is_array:
                leaves[move.place] = self._placed(old, read(move.leaf), move)
            elif type(old) in PYTHON_SCALARS:
                reader = ConfigurationReader(self.where)
                leaves[move.place] = reader.read(move.leaf.form["value"], move.name)
        return self.treedef.unflatten(leaves)

    def _placed(self, old: Any, array: np.ndarray[Any, Any], move: _Move) -> Any:
        """What was read, as the leaf of `like` is: where that is, and in its shape."""
        if type(old) in PYTHON_SCALARS:
            return array.item()
        sharding = _sharding_of(old)
        if self.ours.leaves[move.name].form.get("is") == "key":
            impl = move.leaf.form.get("impl") or jax.random.key_impl(old)
            return _as_key(array, impl, self.where, move.name, sharding)
        array = array.reshape(old.shape)
        if move.dtype is not None:
            array = array.astype(move.dtype)
        if isinstance(old, np.generic):
            return array[()]
        if isinstance(old, np.ndarray):
            return array
        made = _as_jax(array, sharding)
        return _weakly(made) if getattr(old, "weak_type", False) and sharding is None else made

    def report(self) -> LoadReport:
        """What was done."""
        loaded = sorted((move.place, move.name) for move in self.moves)
        names = [name for _, name in loaded]
        return LoadReport(
            loaded=tuple(names),
            missing=tuple(self.kept),
            unexpected=tuple(self.unexpected),
            renamed=tuple((n, self.renamed[n]) for n in names if n in self.renamed),
            reshaped=tuple(name for name in names if name in self.reshaped),
            cast=tuple(move.name for move in self.moves if move.dtype is not None),
            configuration=tuple(self.changed_config),
        )


def _read_each(file: Container) -> Callable[[Leaf], np.ndarray[Any, Any]]:
    """What reads the array of a leaf; of which the parts come one after another."""
    kept: dict[str, np.ndarray[Any, Any]] = {}

    def read(leaf: Leaf) -> np.ndarray[Any, Any]:
        names, row = leaf.source
        if row is not None:
            if names[0] not in kept:
                kept.clear()
                kept[names[0]] = file.read(names[0])
            return kept[names[0]][row].copy()
        kept.clear()
        if len(names) == 1:
            return file.read(names[0])
        stacked = np.empty(leaf.shape, leaf.dtype)
        for i, name in enumerate(names):
            stacked[i] = file.read(name)
        return stacked

    return read


def _sharding_of(old: Any) -> Any:
    """Where an array of `like` was put; None for wherever JAX puts arrays."""
    if isinstance(old, jax.ShapeDtypeStruct):
        return old.sharding
    return old.sharding if isinstance(old, jax.Array) and old.committed else None


def _above(names: Sequence[str]) -> set[str]:
    """The names of all nodes that leaves are in."""
    steps = [name.split(".") for name in names]
    return {".".join(parts[:i]) for parts in steps for i in range(len(parts))}


def _text(leaf: Leaf) -> str:
    if not leaf.is_array:
        return describe_json(leaf.form["value"])
    return f"{short_dtype(leaf.dtype)}[{','.join(map(str, leaf.shape))}]"


def _kind(dtype: Any) -> str:
    """`f` for all that is floating, the extended dtypes too, which NumPy does not know as such."""
    for letter, kind in (("f", jnp.floating), ("c", jnp.complexfloating), ("b", jnp.bool_)):
        if jnp.issubdtype(dtype, kind):
            return letter
    return "i"


def _is_same_kind(dtype: Any, other: Any) -> bool:
    return _kind(dtype) == _kind(other)


def _class_of_json(value: Json) -> type:
    if not isinstance(value, dict):
        return type(value)
    return {"int": int, "float": float, "complex": complex}.get(
        next(iter(cast("Any", value))), dict
    )


# ---- arguments


def _checked_names(rename: Any, where: str) -> Mapping[str, str]:
    if isinstance(rename, Mapping):
        names = cast("Mapping[Any, Any]", rename)
        if all(isinstance(name, str) for name in (*names, *names.values())):
            return names
    raise ArgumentError(
        explain(
            f"{where}, rename",
            "a dict of names",
            describe(rename),
            cure=["from names in the file to names in like:", 'rename={"conv1": "input"}'],
        )
    )


def _choices(missing: Any, like: PyTree, where: str) -> list[str | None]:
    count = jtu.tree_structure(like).num_leaves
    values = _values(missing, like) if isinstance(missing, Rule) else [missing] * count
    for value in values:
        if value not in (None, "keep", "error"):
            expected = '"keep", "error", or a pm.by of these'
            raise ArgumentError(explain(f"{where}, missing", expected, describe(value)))
    return values


def _values(rule: Any, like: PyTree) -> list[Any]:
    values = getattr(rule, "values", None)
    if values is None:
        expected = 'a pm.by: pm.by({"head.**": ..., ...: ...})'
        raise ArgumentError(explain("load", expected, describe(rule)))
    return values(like)


def _dtypes(cast: Any, like: PyTree, where: str) -> list[Any]:
    count = jtu.tree_structure(like).num_leaves
    values = _values(cast, like) if isinstance(cast, Rule) else [cast] * count
    return [None if value is None else _dtype(value, where) for value in values]


def _dtype(value: Any, where: str) -> Any:
    try:
        dtype = jnp.dtype(value)
    except TypeError as error:
        expected = "a dtype, or a pm.by of dtypes"
        raise ArgumentError(explain(f"{where}, cast", expected, describe(value))) from error
    if _is_too_wide(dtype):
        raise ArgumentError(
            explain(f"{where}, cast", "a dtype that JAX has", str(dtype), cure=_CURE_WIDTH[:2])
        )
    return dtype
