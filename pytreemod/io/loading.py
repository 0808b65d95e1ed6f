"""`load`: a file's values in a tree of yours, or the tree that the file describes.

What goes where is decided first (`fitting`), by names, and nothing is read before all of it fits.
Then the arrays are read in the order of the file, and each becomes what the leaf of `like` is, on
its devices. Without `like`, the tree is rebuilt from its description (`descriptions`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, cast, overload

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import ArgumentError, FileError, describe, short_dtype
from pytreemod.io.access import StrPath, depth_errors, shown_path
from pytreemod.io.configuration import ConfigurationReader, Json
from pytreemod.io.containers import Container
from pytreemod.io.descriptions import describe_tree, rebuild_tree, renew_modes
from pytreemod.io.fitting import (
    HINT_WIDTH,
    LoadOptions,
    LoadPlan,
    LoadReport,
    Move,
    fit,
    is_key,
    is_too_wide,
)
from pytreemod.io.folders import open_arrays
from pytreemod.io.renaming import NameTable
from pytreemod.io.saving import DESCRIPTION, USERS, VERSION
from pytreemod.io.sources import SourceReader
from pytreemod.io.tables import (
    Leaf,
    Name,
    Source,
    Table,
    as_ordered,
    first_name,
    parse,
    read_table,
)
from pytreemod.module.unfinished import refuse_unfinished
from pytreemod.training.quantization import (
    ChosenMatrix,
    choose_matrices,
    quantized_leaf,
    with_quantized,
)
from pytreemod.tree.kinds import PYTHON_SCALARS
from pytreemod.typing import AnyArray, FilterSpec, PyTree, jtu, untyped_jax

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
    rename: NameTable | None = None,
    missing: Any = None,
    only: FilterSpec = True,
    cast: Any = None,
    quantize: Any = None,
    restack: bool = False,
    verify: bool = True,
) -> _T: ...
@overload
def load(
    path: StrPath,
    like: _T,
    *,
    strict: Literal[False],
    rename: NameTable | None = None,
    missing: Any = None,
    only: FilterSpec = True,
    cast: Any = None,
    quantize: Any = None,
    restack: bool = False,
    verify: bool = True,
) -> tuple[_T, LoadReport]: ...
def load(
    path: StrPath,
    like: Any = _NOTHING,
    *,
    strict: bool = True,
    rename: NameTable | None = None,
    missing: Any = None,
    only: FilterSpec = True,
    cast: Any = None,
    quantize: Any = None,
    restack: bool = False,
    verify: bool = True,
) -> Any:
    """Read a tree from a file that [`save`][pytreemod.save] wrote, or any file of safetensors.

    Or from a folder in the layout of Hugging Face: `model.safetensors`, or all files that
    `model.safetensors.index.json` names, as if they were one.

    With `like`, the result is `like` with the file's values, by name. Unless told otherwise, every
    leaf of one must be in the other, with the same shape and dtype, and the configuration that the
    file tells must be that of `like`: all that differs is told at once. Arrays are put where those
    of `like` are, shardings included; where `like` has a NumPy array, there will be one.

    Without `like`, the tree is rebuilt from what the file tells: of classes and functions that are
    registered in this process, and no others (see
    [`register_for_files`][pytreemod.register_for_files]). A file of other tools gives a dict of
    arrays by name.

    Layers that are one `nn.Stack` in `like` may be a list in the file, and the other way round;
    with `restack`, they may be the members of an `nn.Ensemble` as well. With `only`, `like` may
    have fewer layers than the file: the first ones. A file of an older version of a class is
    migrated (see [`migration`][pytreemod.migration]).
    A file may have the constrained value, under the name of the field, of what `like` constrains.

    What was read is the reader's own: the file may change, or go.

    **Laws.** `load(path, like) == tree` after `save(path, tree)`, for every `like` of the structure
    of `tree`; and `load(path) == tree` where all classes are registered.
    `load(path, like, quantize=form) == pm.quantize(load(path, like), form)`.

    Args:
        path: of the file, or of the folder.
        like: a tree of the structure that is wanted; it may be abstract, as
            [`filter_eval_shape`][pytreemod.filter_eval_shape] makes it, with shardings or without.
        strict: whether all must fit; if not, a report of what did comes beside the tree, leaves
            that are not in the file are kept (unless that is all of them), and `like` is right
            about the configuration.
        rename: from names in the file to names in `like`: of leaves (`"head.w"`), or of what they
            are in (`"encoder"`, or `""` for the whole). In a pattern each `*` is a step, or a part
            of one, and `**` any number of steps; the new name has them in the same order. Layers of
            a Stack have numbers, on both sides. The first pattern that fits a name counts. The new
            name may be a [`Relaid`][pytreemod.Relaid] or a [`Packed`][pytreemod.Packed], for arrays
            in another form; or None for what is not wanted.
        missing: what becomes of a leaf that the file lacks, or has in another shape: `"keep"` or
            `"error"`, or a [`by`][pytreemod.by] of these; if None, `"error"` if strict, else
            `"keep"`, and a shape is an error.
        only: a selector: the leaves to be loaded; the others stay as they are in `like`. Nothing
            else is read from the file.
        cast: a dtype, or a `by` of dtypes (None for as it is): what arrays of the same kind,
            such as floating, are cast to.
        quantize: what matrices are stored as, as for [`quantize`][pytreemod.quantize]: `"int8"`, or
            a `by` of such forms, for the matrices of `like`. Each array is quantised as soon as it
            is read, after `cast`, so that there is one at a time in memory in full.
        restack: whether an `nn.Ensemble` of n may come from a list or an `nn.Stack` of n, and the
            other way round.
        verify: whether the checksum of each array is compared. That of the header always is.

    Returns:
        A tree of the structure of `like`, or of `pm.quantize(like, quantize)`; if not strict, a
        pair of it and a [`LoadReport`][pytreemod.LoadReport].

    Raises:
        FileError: the file is damaged, is of another tree, or names what is not registered;
            `FileMissingError`, `FilePermissionError` if it cannot be read.
        ArgumentError: an argument is unusable; or what is to be quantised has numbers that are not
            finite.
        SpecError: a selector does not fit `like`.
        UnfinishedError: `like` lacks sizes.

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> model = pm.nn.MLP(3, 2, 8, 1, key=jax.random.key(0))
        >>> pm.save("model.safetensors", model)
        >>> pm.load("model.safetensors", pm.nn.MLP(3, 2, 8, 1, key=jax.random.key(1))) == model
        True
        >>> pm.load("model.safetensors") == model
        True

        A file of other tools, with names of its own:

        >>> names = {"fc*.w": "layers.*.weight", "fc*.b": "layers.*.bias"}
        >>> pm.save("theirs.safetensors", model, rename=pm.inverted_names(names))
        >>> sorted(pm.load("theirs.safetensors"))
        ['fc0.b', 'fc0.w', 'fc1.b', 'fc1.w']
        >>> again = pm.load("theirs.safetensors", pm.filter_eval_shape(lambda: model), rename=names)
        >>> again == model
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
    where = f"load({shown_path(path)})"
    options = LoadOptions(strict, rename, missing, only, cast, restack, quantize)
    with open_arrays(path, verify=verify) as file, depth_errors(where):
        about = description_of(file, where)
        if like is _NOTHING:
            _check_alone(where, options)
            return _rebuilt(file, about, where)
        # First: JAX's own walk would fail of a tree that is too deep without saying so.
        described = describe_tree(like, where)
        _check_is_tree(like, where)
        matrices = [] if quantize is None else choose_matrices(like, quantize, where)
        read = SourceReader(file.read)
        try:
            plan = fit(table_of(file, about, where), described, like, options, read, where)
        except FileError as error:
            if about is None:
                error.add_note(_FROM_TORCH)
            raise
        made = _carried_out(plan, file, read, like, matrices, where)
    return made if strict else (made, plan.report())


def read_metadata(path: StrPath) -> Json:
    """What [`save`][pytreemod.save] was given as `metadata`; no array is read.

    Args:
        path: of the file, or of the folder.

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
    where = f"read_metadata({shown_path(path)})"
    with open_arrays(path) as file, depth_errors(where):
        if DESCRIPTION not in file.metadata:
            return dict(file.metadata) or None
        text = file.metadata.get(USERS)
        return None if text is None else _parsed(text, where)


_FROM_TORCH = """\
  if it holds the tensors of PyTorch's layers, which have other names and layouts:
      pm.from_torch(model, path)"""

# ---- what a file says


def _parsed(text: str, where: str) -> Json:
    try:
        return json.loads(text)
    except ValueError as error:
        raise _malformed(where) from error


def _malformed(where: str) -> FileError:
    return FileError(where, "a description that `pm.save` wrote", "something else")


def description_of(file: Container, where: str) -> dict[str, Any] | None:
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
            where,
            f"a file of version {VERSION} or lower",
            f"version {version!r}, written by pytreemod {told.get('pytreemod')!r}",
            hint=["a newer pytreemod reads it:", "pip install --upgrade pytreemod"],
        )
    if '"batch"' in text:
        renew_modes(told["tree"])
    return told


def table_of(file: Container, about: dict[str, Any] | None, where: str) -> Table:
    """A file's leaves and configuration, by name."""
    entries = file.entries
    if about is None:
        form = {"is": "jax"}
        return Table({parse(n): Leaf(form, x.shape, x.dtype, n) for n, x in entries.items()})
    try:
        return read_table(about["tree"], entries)
    except RecursionError:
        raise
    # Whatever is wrong with it, it is the file's fault.
    except Exception as error:
        raise _malformed(where) from error


# ---- into `like`


def _check_is_tree(like: Any, where: str) -> None:
    """A class is a leaf, and what was meant is one of its instances."""
    refuse_unfinished(where, like)
    if isinstance(like, type):
        expected = "`like`, a tree to put the values into"
        hint = ["make one:", f"pm.load(path, {like.__name__}(...))"]
        raise ArgumentError(where, expected, describe(like), hint=hint)


def _carried_out(
    plan: LoadPlan,
    file: Container,
    read: SourceReader,
    like: PyTree,
    matrices: Sequence[ChosenMatrix],
    where: str,
) -> Any:
    """`like` with the leaves that were planned."""
    leaves, treedef = jtu.tree_flatten(like)
    entries = file.entries
    read.expect([move.leaf.source for move in plan.moves])
    # In the order of the file, and all parts of one array after another.
    order: list[tuple[int, int, Move]] = []
    for i, move in enumerate(plan.moves):
        source = move.leaf.source
        first = source if isinstance(source, str) or source is None else first_name(source)
        order.append((entries[first].start if first in entries else -1, i, move))
    with DeviceTransfers(leaves, where, matrices) as transfers:
        for _, _, move in sorted(order):
            _carry_out(move, plan, read, transfers, where)
    made = treedef.unflatten(leaves)
    return with_quantized(made, transfers.quantized) if matrices else made


def _carry_out(
    move: Move,
    plan: LoadPlan,
    read: Callable[[Source], AnyArray],
    transfers: DeviceTransfers,
    where: str,
) -> None:
    old, name, leaf = transfers.leaves[move.place], move.name, move.leaf
    if leaf.dtype is None:
        if type(old) in PYTHON_SCALARS:
            value = ConfigurationReader(where).read(leaf.form["value"], ".".join(name))
            transfers.leaves[move.place] = value
        return
    array: Any = read(cast("Source", leaf.source))
    impl = leaf.form.get("impl")
    if name in plan.reshaped and impl is None:
        array = array.reshape(old.shape)
    # What was made of a constrained value may be wider than what the file has.
    dtype = leaf.dtype if move.cast is None else move.cast
    if array.dtype != dtype:
        array = as_dtype(array, dtype, where, name)
    transfers.put(move.place, array, impl, name)


# ---- without `like`


def _check_alone(where: str, options: LoadOptions) -> None:
    if options != LoadOptions(True, None, None, True, None, False):
        raise ArgumentError(
            where,
            "`like`, a tree to put the values into",
            "none, with options that are about it",
            hint=["give one:", "pm.load(path, like, ...)"],
        )


def _rebuilt(file: Container, about: dict[str, Any] | None, where: str) -> Any:
    check_widths(table_of(file, about, where).leaves, where)

    def read_leaf(name: str, form: dict[str, Json]) -> Any:
        return as_told(file.read(name), form, where, name)

    if about is None:
        return {name: read_leaf(name, {"is": "jax"}) for name in file.entries}
    return rebuild_tree(about["tree"], read_leaf, where)


def check_widths(leaves: Mapping[Name, Leaf], where: str) -> None:
    """Refuse arrays of 64 bits where JAX has 32.

    Raises:
        FileError: there is one that is to be an array of JAX.
    """
    for name, leaf in leaves.items():
        if leaf.form.get("is") == "jax" and is_too_wide(leaf.dtype):
            text = f"{short_dtype(leaf.dtype)} at {'.'.join(name)}"
            raise FileError(where, "dtypes that JAX has", text, hint=HINT_WIDTH)


def as_told(array: Any, form: Mapping[str, Json], where: str, name: str) -> Any:
    """A leaf of the form that the file tells.

    Raises:
        FileError: there is no such form, or no such generator of keys.
    """
    kind = form.get("is")
    if kind == "numpy":
        return array
    if kind == "scalar" and array.ndim == 0:
        return array[()]
    if kind == "key":
        return _as_keys(array, form.get("impl"), None, where, (name,))
    if kind != "jax":
        expected, got = "a kind of leaf that `pm.save` writes", describe(kind)
        raise FileError(where, expected, got, places=[name])
    return _weakly(_as_jax(array)) if form.get("weak") else _as_jax(array)


class DeviceTransfers:
    """Puts arrays into the leaves of `like`, as what these are and where they are.

    Arrays of JAX wait for others: to put 10,000 small ones in one call takes a third of the time of
    as many calls. `_WAITING = 0` switches that off. What is to be quantised does not wait.

    Args:
        leaves: of `like`; they are replaced, but for those that are to be quantised.
        where: the call, for errors.
        matrices: what is to be quantised.

    Attributes:
        quantized: these, and what became of them; of those that were not put, the old ones.
    """

    def __init__(self, leaves: list[Any], where: str, matrices: Sequence[ChosenMatrix] = ()):
        self.leaves, self.where = leaves, where
        self.quantized: list[tuple[ChosenMatrix, Any]] = []
        self._matrices = {one.place: one for one in matrices}
        self._waiting: list[tuple[int, Any, Any, Name]] = []
        self._bytes = 0

    def put(self, place: int, array: Any, impl: Json, name: Name) -> None:
        """Replace a leaf.

        Args:
            place: which leaf.
            array: what was read, in the shape of the old leaf; for keys, their numbers.
            impl: the generator of keys that the file tells, if it does.
            name: of the leaf, for errors.

        Raises:
            FileError: there is no such generator of keys.
            ArgumentError: an abstract leaf has a sharding that no array of its shape has; or what
                is to be quantised is not finite.
        """
        old = self.leaves[place]
        if place in self._matrices:
            self._quantize(place, self._put_one(place, array, _sharding_of(old), name))
        elif type(old) in PYTHON_SCALARS:
            self.leaves[place] = array.item()
        elif is_key(old):
            self.leaves[place] = _as_keys(array, impl, _sharding_of(old), self.where, name)
        elif isinstance(old, np.generic):
            self.leaves[place] = array[()]
        elif isinstance(old, np.ndarray):
            self.leaves[place] = as_ordered(array, cast("Any", old).dtype)
        else:
            if getattr(old, "weak_type", False):
                array = _weakly(_as_jax(array))
            self._waiting.append((place, array, _sharding_of(old), name))
            self._bytes += array.nbytes
            if self._bytes > _WAITING:
                self._put_all()

    def _quantize(self, place: int, array: Any) -> None:
        one = self._matrices.pop(place)
        self.quantized.append((one, quantized_leaf(one, array, self.where)))

    def _put_all(self) -> None:
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        # JAX takes no None among shardings.
        for is_placed in (False, True):
            group = [each for each in waiting if (each[2] is not None) is is_placed]
            if group:
                places, arrays, shardings, _ = zip(*group, strict=True)
                try:
                    made = _as_jax([*arrays], [*shardings] if is_placed else None)
                except ValueError:
                    made = [self._put_one(*each) for each in group]
                for place, array in zip(places, made, strict=True):
                    self.leaves[place] = array

    def _put_one(self, place: int, array: Any, sharding: Any, name: Name) -> Any:
        try:
            return _as_jax(array, sharding)
        except ValueError as error:
            # JAX says why, but not of what.
            expected = "shardings in like that its arrays can have"
            got = f"{describe(array)} with {getattr(sharding, 'spec', sharding)}"
            places = [".".join(name)]
            raise ArgumentError(self.where, expected, got, places=places) from error

    def __enter__(self) -> DeviceTransfers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._put_all()
            for place in [*self._matrices]:
                self._quantize(place, self.leaves[place])


_WAITING = 1 << 24
"""Bytes that wait at most. A large array goes at once, so that no second model is in memory."""


def as_dtype(array: Any, dtype: Any, where: str, name: Name) -> Any:
    """An array in another dtype of its kind.

    Args:
        array: what was read.
        dtype: what it is cast to.
        where: the call, for errors.
        name: of the leaf, for errors.

    Raises:
        FileError: there are numbers in it that the dtype does not have.
    """
    is_whole = jnp.issubdtype(dtype, jnp.integer)
    # Those of four bits can neither be compared nor cast into one another.
    plain = array.astype(np.int8) if is_whole and array.dtype.kind not in "iu" else array
    # NumPy would make infinities of what is too large, with a warning, and wrap whole numbers
    # around without one.
    with np.errstate(over="ignore"):
        made = plain.astype(dtype)
    if is_whole:
        lost = (plain < int(jnp.iinfo(dtype).min)) | (plain > int(jnp.iinfo(dtype).max))
    else:
        lost = ~np.isfinite(made) & np.isfinite(plain)
    if lost.any():
        raise FileError(
            where,
            f"numbers that {dtype} has",
            f"{plain[lost][0]}",
            places=[".".join(name)],
            hint=["leave it as it is, and cast others:", _HINT_CAST],
        )
    return made


_HINT_CAST = 'pm.load(..., cast=pm.by({"head.**": None, ...: "bfloat16"}))'


def _as_jax(array: Any, sharding: Any = None) -> Any:
    # Each reading makes memory of its own, and nobody else writes into it: on the CPU `device_put`
    # takes that as it is, where `jnp.asarray` would copy it.
    return untyped_jax.device_put(array, sharding)


def _weakly(array: Any) -> Any:
    """An array whose dtype gives way to others, as that of a Python number does."""
    weak = jnp.asarray(array.dtype.type(0).item())
    # Of a dtype that no Python number has, JAX offers no way to make one.
    if weak.dtype != array.dtype:
        return array
    if array.ndim == 0:
        return jnp.asarray(array.item())
    return jnp.broadcast_to(weak, array.shape).at[...].set(array)


def _as_keys(array: Any, impl: Json, sharding: Any, where: str, name: Name) -> Any:
    try:
        keys = untyped_jax.random.wrap_key_data(jnp.asarray(array), impl=impl)
    except (ValueError, TypeError) as error:
        expected = "random keys of a generator that JAX has here"
        got = f"{describe(array)} of {describe(impl)}"
        raise FileError(where, expected, got, places=[".".join(name)]) from error
    return keys if sharding is None else untyped_jax.device_put(keys, sharding)


def _sharding_of(old: Any) -> Any:
    """Where an array of `like` was put; None for wherever JAX puts arrays."""
    if isinstance(old, jax.ShapeDtypeStruct):
        return old.sharding
    return old.sharding if isinstance(old, jax.Array) and old.committed else None
