"""`load`: the values of a file in your tree, or the tree that the file describes.

The plan comes first (`fitting`), by names, and nothing is read before everything fits. Then the
arrays are read in the order of the file, and each gets the form and the devices of its leaf in
`like`. Without `like`, the tree is rebuilt from its description (`descriptions`).
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
from pytreemod.io.descriptions import describe_tree, rebuild_tree
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
    """The default of `like`, because None is a tree."""


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
    """Load a tree from a file of [`save`][pytreemod.save], or from any safetensors file.

    The path may also lead to a folder in the layout of Hugging Face: `model.safetensors`, or all
    files that `model.safetensors.index.json` names, which are loaded as one.

    With `like`, the result is `like` with the values of the file, by name. By default, both must
    have the same leaves, with the same shapes and dtypes, and the same configuration. One error
    lists all differences. Arrays get the devices and shardings of those in `like`; a NumPy array in
    `like` gets a NumPy array.

    Without `like`, the tree is rebuilt from the description in the file. This works for the
    library's layers, the functions of `jax.nn` and Python's containers, but not for classes and
    functions of your own. A file of another tool gives a dict of arrays by name.

    `like` and the file may differ in form:

    - Layers of an `nn.Stack` may be a list on the other side. With `restack`, they may be the
      members of an `nn.Ensemble` as well.
    - With `only`, `like` may have fewer layers than the file: the first ones.
    - For a constrained field of `like`, the file may have the value itself, under the field's name.

    The loaded arrays are independent of the file, which may change or be removed.

    **Laws.** `load(path, like) == tree` after `save(path, tree)`, for every `like` of the structure
    of `tree`; and `load(path) == tree` where all classes are the library's.
    `load(path, like, quantize=form) == pm.quantize(load(path, like), form)`.

    Args:
        path: the path of the file or folder.
        like: a tree of the structure of the result; it may be abstract, from
            [`filter_eval_shape`][pytreemod.filter_eval_shape], with shardings or without.
        strict: whether everything must fit. If not, the function also returns a report. Leaves that
            are missing in the file keep their values from `like` (but not all of them may), and
            the configuration is that of `like`.
        rename: a dict from names in the file to names in `like`. A name is that of a leaf
            (`"head.w"`), or of a node (`"encoder"`, or `""` for the root). In a pattern, `*`
            matches a component or a part of one, and `**` any number of components; the new name
            has the same wildcards in the same order. Layers of a Stack have numbers, on both sides.
            The first pattern that matches a name is used. The new name may be a
            [`Relaid`][pytreemod.Relaid] or a [`Packed`][pytreemod.Packed], for arrays in another
            form; or None, to skip the array.
        missing: the treatment of a leaf that the file lacks, or has in another shape: `"keep"` or
            `"error"`, or a [`by`][pytreemod.by] of these. None means `"error"` if strict. If not
            strict, it means `"keep"`, but another shape is an error.
        only: a selector of the leaves to load; the others are those of `like`. Nothing else is
            read from the file.
        cast: a dtype, or a `by` of dtypes (None for no cast), for arrays of the same kind, such
            as floating.
        quantize: the form in which matrices of `like` are stored, as for
            [`quantize`][pytreemod.quantize]: `"int8"`, or a `by` of such forms. Each array is
            quantized as soon as it is read, after `cast`, so that only one at a time is in memory
            in full.
        restack: whether an `nn.Ensemble` of n may be loaded from a list or an `nn.Stack` of n, and
            vice versa.
        verify: whether to compare the checksum of each array. The checksum of the header is always
            compared.

    Returns:
        A tree of the structure of `like`, or of `pm.quantize(like, quantize)`; if not strict, a
        pair of it and a [`LoadReport`][pytreemod.LoadReport].

    Raises:
        FileError: if the file is damaged or of another tree, or without `like` names a class or
            function of your own; `FileMissingError` or `FilePermissionError` if it cannot be read.
        ArgumentError: if an argument is unusable; or if an array to quantize has numbers that are
            not finite.
        SpecError: if a selector does not fit `like`.
        UnfinishedError: if `like` lacks sizes.

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> model = pm.nn.MLP(3, 2, 8, 1, key=jax.random.key(0))
        >>> pm.save("model.safetensors", model)
        >>> pm.load("model.safetensors", pm.nn.MLP(3, 2, 8, 1, key=jax.random.key(1))) == model
        True
        >>> pm.load("model.safetensors") == model
        True

        A file of another tool, with other names:

        >>> names = {"fc*.w": "layers.*.weight", "fc*.b": "layers.*.bias"}
        >>> back = {"layers.*.weight": "fc*.w", "layers.*.bias": "fc*.b"}
        >>> pm.save("theirs.safetensors", model, rename=back)
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
        # First: JAX's own walk would fail without explanation for a tree that is too deep.
        described = describe_tree(like, where)
        _check_is_tree(like, where)
        matrices = [] if quantize is None else choose_matrices(like, quantize, where)
        read = SourceReader(file.read)
        try:
            plan = fit(table_of(file, about, where), described, like, options, where)
        except FileError as error:
            if about is None:
                error.add_note(_FROM_TORCH)
            raise
        made = _carried_out(plan, file, read, like, matrices, where)
    return made if strict else (made, plan.report())


def read_metadata(path: StrPath) -> Json:
    """Return the `metadata` that [`save`][pytreemod.save] got; no array is read.

    Args:
        path: the path of the file or folder.

    Returns:
        The value; None if there is none. For a file of another tool, the strings in its header.

    Raises:
        FileError: if the file is damaged or missing (`FileMissingError`).

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
  if it has the tensors of PyTorch's layers, with other names and layouts:
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
    """Return the description of the tree in the file; None if `save` did not write it."""
    text = file.metadata.get(DESCRIPTION)
    if text is None:
        return None
    about = _parsed(text, where)
    if not isinstance(about, dict) or "tree" not in about:
        raise _malformed(where)
    about = cast("dict[str, Any]", about)
    version = about.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise FileError(
            where,
            f"a file of version {VERSION} or lower",
            f"version {version!r}, written by pytreemod {about.get('pytreemod')!r}",
            hint=["a newer pytreemod reads it:", "pip install --upgrade pytreemod"],
        )
    return about


def table_of(file: Container, about: dict[str, Any] | None, where: str) -> Table:
    """Return a file's leaves and configuration, by name."""
    entries = file.entries
    if about is None:
        form = {"is": "jax"}
        return Table({parse(n): Leaf(form, x.shape, x.dtype, n) for n, x in entries.items()})
    try:
        return read_table(about["tree"], entries)
    except RecursionError:
        raise
    # Every failure here is a fault of the file.
    except Exception as error:
        raise _malformed(where) from error


# ---- into `like`


def _check_is_tree(like: Any, where: str) -> None:
    """Refuse a class as `like`: the user meant one of its instances."""
    refuse_unfinished(where, like)
    if isinstance(like, type):
        expected = "`like`, a tree to load the values into"
        hint = ["make an instance:", f"pm.load(path, {like.__name__}(...))"]
        raise ArgumentError(where, expected, describe(like), hint=hint)


def _carried_out(
    plan: LoadPlan,
    file: Container,
    read: SourceReader,
    like: PyTree,
    matrices: Sequence[ChosenMatrix],
    where: str,
) -> Any:
    """Return `like` with the planned leaves."""
    leaves, treedef = jtu.tree_flatten(like)
    entries = file.entries
    read.expect([move.leaf.source for move in plan.moves])
    # In the order of the file, and all parts of one array in sequence.
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
    # The array of a constrained value may be wider than the array in the file.
    dtype = leaf.dtype if move.cast is None else move.cast
    if array.dtype != dtype:
        array = as_dtype(array, dtype, where, name)
    transfers.put(move.place, array, impl, name)


# ---- without `like`


def _check_alone(where: str, options: LoadOptions) -> None:
    if options != LoadOptions(True, None, None, True, None, False):
        raise ArgumentError(
            where,
            "`like`, a tree to load the values into",
            "none, with options that need it",
            hint=["give one:", "pm.load(path, like, ...)"],
        )


def _rebuilt(file: Container, about: dict[str, Any] | None, where: str) -> Any:
    check_widths(table_of(file, about, where).leaves, where)

    def read_leaf(name: str, form: dict[str, Json]) -> Any:
        return in_form(file.read(name), form, where, name)

    if about is None:
        return {name: read_leaf(name, {"is": "jax"}) for name in file.entries}
    return rebuild_tree(about["tree"], read_leaf, where)


def check_widths(leaves: Mapping[Name, Leaf], where: str) -> None:
    """Refuse arrays of 64 bits if JAX has only 32.

    Raises:
        FileError: if one of them would become an array of JAX.
    """
    for name, leaf in leaves.items():
        if leaf.form.get("is") == "jax" and is_too_wide(leaf.dtype):
            text = f"{short_dtype(leaf.dtype)} at {'.'.join(name)}"
            raise FileError(where, "dtypes that JAX supports", text, hint=HINT_WIDTH)


def in_form(array: Any, form: Mapping[str, Json], where: str, name: str) -> Any:
    """Return a leaf in the form that the file describes.

    Raises:
        FileError: if there is no such form, or no such generator of keys.
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
        raise FileError(where, expected, got, at=[name])
    return _weakly(_as_jax(array)) if form.get("weak") else _as_jax(array)


class DeviceTransfers:
    """Puts arrays into the leaves of `like`, with their forms and devices.

    Arrays of JAX wait for others: putting 10,000 small ones in one call takes a third of the time
    of separate calls. `_WAITING = 0` disables that. Matrices to quantize do not wait.

    Args:
        leaves: the leaves of `like`; they are replaced, except for the matrices to quantize.
        where: the call, for errors.
        matrices: the matrices to quantize.

    Attributes:
        quantized: the quantized matrices; the old ones where none was put.
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
            place: the index of the leaf.
            array: the array of the file, in the shape of the old leaf; for keys, their numbers.
            impl: the generator of keys that the file names, if any.
            name: the name of the leaf, for errors.

        Raises:
            FileError: if there is no such generator of keys.
            ArgumentError: if an abstract leaf has a sharding that does not fit its shape; or if a
                matrix to quantize is not finite.
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
        # JAX accepts no None among shardings.
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
            # JAX gives the reason, but not the leaf.
            expected = "shardings in like that fit its arrays"
            got = f"{describe(array)} with {getattr(sharding, 'spec', sharding)}"
            places = [".".join(name)]
            raise ArgumentError(self.where, expected, got, at=places) from error

    def __enter__(self) -> DeviceTransfers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._put_all()
            for place in [*self._matrices]:
                self._quantize(place, self.leaves[place])


_WAITING = 1 << 24
"""Maximal bytes that wait. A large array is put at once, so that no second model is in memory."""


def as_dtype(array: Any, dtype: Any, where: str, name: Name) -> Any:
    """Cast an array to another dtype of its kind.

    Args:
        array: the array of the file.
        dtype: the new dtype.
        where: the call, for errors.
        name: the name of the leaf, for errors.

    Raises:
        FileError: if the dtype cannot represent some of the numbers.
    """
    is_whole = jnp.issubdtype(dtype, jnp.integer)
    # Dtypes of four bits can neither be compared nor cast into one another.
    plain = array.astype(np.int8) if is_whole and array.dtype.kind not in "iu" else array
    # NumPy would turn numbers that are too large into infinities, with a warning, and wrap integers
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
            f"numbers that {dtype} can represent",
            f"{plain[lost][0]}",
            at=[".".join(name)],
            hint=["cast only the other arrays:", _HINT_CAST],
        )
    return made


_HINT_CAST = 'pm.load(..., cast=pm.by({"head.**": None, ...: "bfloat16"}))'


def _as_jax(array: Any, sharding: Any = None) -> Any:
    # Each read allocates new memory, and no other code writes into it: on the CPU, `device_put`
    # uses that memory, but `jnp.asarray` would copy it.
    return untyped_jax.device_put(array, sharding)


def _weakly(array: Any) -> Any:
    """Return an array with a weak dtype, like that of a Python number."""
    weak = jnp.asarray(array.dtype.type(0).item())
    # JAX cannot make a weak array of a dtype that no Python number has.
    if weak.dtype != array.dtype:
        return array
    if array.ndim == 0:
        return jnp.asarray(array.item())
    return jnp.broadcast_to(weak, array.shape).at[...].set(array)


def _as_keys(array: Any, impl: Json, sharding: Any, where: str, name: Name) -> Any:
    try:
        keys = untyped_jax.random.wrap_key_data(jnp.asarray(array), impl=impl)
    except (ValueError, TypeError) as error:
        expected = "random keys of a generator that JAX supports here"
        got = f"{describe(array)} of {describe(impl)}"
        raise FileError(where, expected, got, at=[".".join(name)]) from error
    return keys if sharding is None else untyped_jax.device_put(keys, sharding)


def _sharding_of(old: Any) -> Any:
    """Return the sharding of an array of `like`; None to let JAX choose."""
    if isinstance(old, jax.ShapeDtypeStruct):
        return old.sharding
    return old.sharding if isinstance(old, jax.Array) and old.committed else None
