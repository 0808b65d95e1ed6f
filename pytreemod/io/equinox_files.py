"""Equinox's files: `tree_serialise_leaves` and `tree_deserialise_leaves`.

Such a file has the leaves of a tree one after another, each in the format of NumPy's `save`. It has
no names, so you read it into a tree of the same structure. The files of this library are those of
[`save`][pytreemod.save].

The order is the order in which Equinox flattens the tree: the leaves of a Module are its fields in
the order of the class, as they are here. Two things differ:

- The flags of a layer are leaves there and configuration here. They have the positions of their
  fields (`LEAVES_THERE`). In an optimizer's state Equinox has only arrays.
- `BatchNorm` counts its batches there, and corrects its running statistics by that number; here,
  too, with `mode="batch"`. With `mode="torch"` they need no correction. Then only the file has the
  count, before the statistics (`Meaning.COUNT`).
"""

from __future__ import annotations

import enum
import io
import math
import os
import pathlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import (
    ArgumentError,
    EquinoxFileError,
    SpecError,
    describe,
    explain,
    with_article,
)
from pytreemod.io.access import (
    StrPath,
    checked_path,
    depth_errors,
    open_to_read,
    replacement,
    shown_path,
    system_errors,
)
from pytreemod.io.containers import is_whole_here
from pytreemod.module.methods import BoundMethod
from pytreemod.module.partials import Partial
from pytreemod.nn.batch_normalization import BatchNorm
from pytreemod.nn.dropout import Dropout
from pytreemod.nn.pooling import Pool
from pytreemod.nn.spectral_normalization import SpectralNorm
from pytreemod.state.tokens import tokens_of
from pytreemod.state.values import State
from pytreemod.tree.nodes import AbstractRecord, children_of, record_of
from pytreemod.tree.paths import PathName, pattern_text
from pytreemod.tree.prefixes import spread
from pytreemod.tree.selecting import Rule
from pytreemod.tree.stored_fields import reading_stored, stored
from pytreemod.tree.surgery import replace_at
from pytreemod.typing import IsLeaf, PyTree, Tracer, class_of, jtu

_T = TypeVar("_T")

_NUMBERS = (bool, int, float, complex, np.generic)
_BFLOAT16 = np.dtype(jnp.bfloat16)


@runtime_checkable
class SupportsWrite(Protocol):
    """A binary file to write leaves to."""

    def write(self, data: Any, /) -> Any:
        """Write bytes."""
        ...


@runtime_checkable
class SupportsRead(Protocol):
    """A binary file to read leaves from."""

    def read(self, size: int = ..., /) -> bytes:
        """Read at most `size` bytes; an empty result means the end."""
        ...


def default_serialise_filter_spec(f: SupportsWrite, x: Any) -> None:
    """Write a leaf as Equinox does: arrays and numbers as NumPy's `save`, other leaves not at all.

    For your own functions that you pass to
    [`tree_serialise_leaves`][pytreemod.tree_serialise_leaves].

    Args:
        f: a binary file.
        x: the leaf. Arrays of JAX and NumPy, NumPy's scalars, and bool, int, float and complex are
            written.

    Raises:
        EquinoxFileError: if the format does not support the array: typed random keys, objects, or
            numbers of a kind that only JAX has (bfloat16 is supported); or if its values are not
            on this host.

    Examples:
        >>> import io
        >>> from pytreemod.io.equinox_files import default_serialise_filter_spec
        >>> f = io.BytesIO()
        >>> default_serialise_filter_spec(f, 0.5)
        >>> default_serialise_filter_spec(f, "a string, of which nothing is written")
        >>> len(f.getvalue())
        136
    """
    given: Any = x  # A type checker narrows `x` to arrays of unknown type.
    if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)):
        _check_values(x)
    elif not isinstance(x, (np.ndarray, *_NUMBERS)):
        return
    array = given if hasattr(given, "dtype") else np.asarray(given)
    _check_dtype(array, given)
    # A pickle runs code: no leaf is written or read as one.
    np.save(cast("Any", f), array, allow_pickle=False)


def default_deserialise_filter_spec(f: SupportsRead, x: Any) -> Any:
    """Read the value of a leaf from the file, as Equinox does.

    For your own functions that you pass to
    [`tree_deserialise_leaves`][pytreemod.tree_deserialise_leaves]. The shape and dtype of an array
    are not compared here, so that your function may convert the value.

    Args:
        f: a binary file.
        x: the leaf of `like`. If it is neither an array nor a number, nothing is read.

    Returns:
        A value of the kind of `x`; or `x` itself.

    Raises:
        EquinoxFileError: if the file ends, or has something else at its position.

    Examples:
        >>> import io
        >>> from pytreemod.io import equinox_files
        >>> f = io.BytesIO()
        >>> equinox_files.default_serialise_filter_spec(f, 0.5)
        >>> _ = f.seek(0)
        >>> equinox_files.default_deserialise_filter_spec(f, 0.0)
        0.5
    """
    if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)):
        _check_dtype(x)
        array = _in_bfloat16(_read_array(f, x))
        if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
            raise _Misfit("a dtype that JAX supports here", describe(array), _HINT_WIDTH)
        return jnp.asarray(array)
    if isinstance(x, np.ndarray):
        _check_dtype(x)
        array = _read_array(f, x)
        return _in_bfloat16(array) if x.dtype == _BFLOAT16 else array
    if isinstance(x, _NUMBERS):
        return _as_number(_read_array(f, np.asarray(x)), x)
    return x


def tree_serialise_leaves(
    path_or_file: StrPath | SupportsWrite,
    pytree: PyTree,
    filter_spec: Any = default_serialise_filter_spec,
    is_leaf: IsLeaf = None,
) -> None:
    """Write the leaves of a tree into a file that Equinox reads.

    The file has the leaves in order, without names, structure or checksums. To read it, you need a
    tree of the same structure. If you do not need Equinox, use [`save`][pytreemod.save] instead.

    Some leaves in Equinox are configuration here: the `p` of [`Dropout`][pytreemod.nn.Dropout],
    the `inference` of a layer. They are written where Equinox has them. Functions, classes and
    strings are not written.

    Args:
        path_or_file: the name of a file, which gets the ending `.eqx` if it has none, and is
            written completely or not at all; or a binary file, open for writing.
        pytree: any tree.
        filter_spec: how to write a leaf: a function of the file and the leaf, or a prefix tree of
            such functions. A function that does nothing, such as `lambda f, x: None`, omits the
            leaf.
        is_leaf: which nodes are leaves.

    Raises:
        EquinoxFileError: if a leaf cannot be written, such as a typed random key; it names the
            path.
        FileAccessError: if the system refuses.
        SpecError: if `filter_spec` is no prefix of the tree, or has other values than functions.
        StateError: if a State in the tree was used up.
        ArgumentError: if `path_or_file` is neither the name of a file nor a binary file.

    Examples:
        >>> import pathlib, tempfile
        >>> import jax
        >>> import pytreemod as pm
        >>> from pytreemod.io.equinox_files import tree_deserialise_leaves, tree_serialise_leaves
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.eqx"
        >>> model = pm.nn.Linear(3, 4, key=jax.random.key(0))
        >>> tree_serialise_leaves(path, model)
        >>> like = pm.nn.Linear(3, 4, key=jax.random.key(1))
        >>> tree_deserialise_leaves(path, like) == model
        True
    """
    where = _title("tree_serialise_leaves", path_or_file)
    with depth_errors(where):
        leaves = file_order(pytree, is_leaf)
    functions = _functions(filter_spec, pytree, leaves, where)
    with _written(path_or_file, where) as file:
        for leaf, function in zip(leaves, functions, strict=True):
            _call(function, file, leaf, where, "written")


def tree_deserialise_leaves(
    path_or_file: StrPath | SupportsRead,
    like: _T,
    filter_spec: Any = default_deserialise_filter_spec,
    is_leaf: IsLeaf = None,
) -> _T:
    """Read the leaves of a tree from a file of Equinox or `tree_serialise_leaves`.

    Leaves of Equinox that are configuration here are read, too: the result has a `Dropout` with the
    `p` of the file, whatever the `p` of `like`.

    The running statistics of a [`BatchNorm`][pytreemod.nn.BatchNorm] with `mode="batch"` are
    returned as Equinox's inference uses them, corrected for their start.

    **Laws.** `tree_deserialise_leaves(path, like) == tree` after
    `tree_serialise_leaves(path, tree)`, for every `like` of the structure of `tree`.

    Args:
        path_or_file: the name of a file, which gets the ending `.eqx` if it has none; or a binary
            file, open for reading. No more than the leaves is read from it.
        like: a tree of the structure of the file, with leaves of the same types, shapes and dtypes;
            it may be abstract, from [`filter_eval_shape`][pytreemod.filter_eval_shape].
        filter_spec: how to read a leaf: a function of the file and the leaf of `like`, which
            returns the new leaf; or a prefix tree of such functions. `lambda f, x: x` reads
            nothing.
        is_leaf: which nodes are leaves.

    Returns:
        A tree of the structure of `like`.

    Raises:
        EquinoxFileError: if the file has another format, ends early, has more than `like`, or does
            not fit; it names the paths. It is a `RuntimeError`, as Equinox's error is.
        FileMissingError: if the file does not exist; FileAccessError: if the system refuses.
        SpecError: if `filter_spec` is no prefix of `like`, or has other values than functions.
        ArgumentError: if `path_or_file` is neither the name of a file nor a binary file; or if a
            layer refuses the configuration of the file.

    Examples:
        >>> import pathlib, tempfile
        >>> import jax
        >>> import pytreemod as pm
        >>> from pytreemod.io.equinox_files import tree_deserialise_leaves, tree_serialise_leaves
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.eqx"
        >>> def make(key, p):
        ...     return pm.nn.Sequential([pm.nn.Linear(3, 4, key=key), pm.nn.Dropout(p)])
        >>> tree_serialise_leaves(path, make(jax.random.key(0), 0.3))
        >>> like = pm.filter_eval_shape(make, jax.random.key(1), 0.5)
        >>> tree_deserialise_leaves(path, like).layers[1]
        Dropout(p=0.3)
    """
    where = _title("tree_deserialise_leaves", path_or_file)
    with depth_errors(where):
        leaves = file_order(like, is_leaf)
    functions = _functions(filter_spec, like, leaves, where)
    values: list[Any] = []
    with _read(path_or_file, where) as file:
        for leaf, function in zip(leaves, functions, strict=True):
            values.append(_call(function, file, leaf, where, "read"))
        # After all were read: if one is missing, the list shows where the trees begin to differ.
        misfits = [*_misfits(leaves, values)]
        # The rest of an open file may belong to the caller, and a user's own function may leave the
        # rest out on purpose.
        is_whole = all(function is default_deserialise_filter_spec for function in functions)
        if not misfits and is_whole and _is_path(path_or_file) and file.read(1):
            _refuse_rest(where)
    if misfits:
        _refuse_misfits(misfits, where)
    return put_back(like, leaves, values, where)


# ---- files


def _is_path(path_or_file: Any) -> bool:
    return isinstance(path_or_file, (str, os.PathLike))


def _title(function: str, path_or_file: Any) -> str:
    if _is_path(path_or_file):
        return f"{function}({shown_path(_with_ending(path_or_file))})"
    name = getattr(path_or_file, "name", None)
    return f"{function}({name!r})" if isinstance(name, str) else f"{function}(file)"


def _with_ending(path: Any) -> str:
    named = pathlib.Path(checked_path(path))
    return str(named if named.suffix else named.with_suffix(".eqx"))


@contextmanager
def _written(path_or_file: Any, where: str) -> Generator[Any]:
    if not _is_path(path_or_file):
        _check_file(path_or_file, "write", where)
        yield path_or_file
        return
    with replacement(_with_ending(path_or_file), 0, durable=False) as raw:
        file = io.BufferedWriter(raw)
        try:
            yield file
            file.flush()
        finally:
            # Closing `file` would close `raw` before `replacement` is done with it.
            with suppress(OSError):
                file.detach()


@contextmanager
def _read(path_or_file: Any, where: str) -> Generator[Any]:
    if not _is_path(path_or_file):
        _check_file(path_or_file, "read", where)
        yield path_or_file
        return
    path = _with_ending(path_or_file)
    with system_errors(path), io.BufferedReader(open_to_read(path)) as file:
        yield file


def _check_file(file: Any, method: str, where: str) -> None:
    is_text = isinstance(file, io.TextIOBase)
    if hasattr(file, method) and not is_text:
        return
    mode = "wb" if method == "write" else "rb"
    raise ArgumentError(
        where,
        f"the name of a file, or a binary file with a method {method}",
        "a text file" if is_text else describe(file),
        hint=["open it as", f'with open(path, "{mode}") as f: ...'],
    )


# ---- leaves


class _Misfit(EquinoxFileError):
    """An error of a leaf; a caller that knows the path adds it."""

    def __init__(self, expected: str, got: str, hint: Sequence[str] = ()):
        super().__init__(explain("a leaf", expected, got, hint=hint))
        self.said = expected, got, hint


def _call(function: Any, file: Any, leaf: FileLeaf, where: str, done: str) -> Any:
    """Call a function of the filter spec on a leaf; errors name its path."""
    place = f"{where}, {pattern_text(leaf.path)}"
    try:
        return function(file, leaf.value)
    except _Misfit as error:
        expected, got, hint = error.said
        raise EquinoxFileError(place, expected, got, hint=hint) from error
    # An error of the system is reported with the name of the file.
    except OSError:
        raise
    except Exception as error:
        expected, got = f"a leaf that can be {done}", describe(leaf.value)
        hint = f"{type(error).__name__}: {error}"
        raise EquinoxFileError(place, expected, got, hint=hint) from error


def _check_values(x: Any) -> None:
    if isinstance(x, Tracer):
        got, hint = "a traced array", "write outside filter_jit, or in a filter_io_callback"
    elif isinstance(x, jax.ShapeDtypeStruct):
        got, hint = f"{describe(x)}, which is abstract", "write the model that has the values"
    elif x.is_deleted():
        got, hint = "a donated array", "write what the step returned, not what it was given"
    elif not is_whole_here(x):
        got = "an array with parts on other hosts only"
        hint = "write with orbax: docs/how-to/checkpoint-with-orbax.md"
    else:
        return
    raise _Misfit("an array with its values on this host", got, [hint])


def _check_dtype(array: Any, given: Any = None) -> None:
    """Refuse dtypes that the format does not support, or that it would confuse with another."""
    if not _has_form(array.dtype):
        got = describe(array if given is None else given)
        raise _Misfit("a leaf that Equinox's files support", got, _HINT_FORM)


def _has_form(dtype: Any) -> bool:
    if jnp.issubdtype(dtype, jax.dtypes.extended) or dtype.hasobject:
        return False
    if dtype == _BFLOAT16:
        return True
    try:
        return np.lib.format.descr_to_dtype(np.lib.format.dtype_to_descr(dtype)) == dtype
    except (TypeError, ValueError):
        return False


_HINT_FORM = [
    "pm.save supports typed random keys, and arrays of every dtype of JAX:",
    "pm.save(path, tree)",
    "or leave it out, in writing and reading:",
    "filter_spec=lambda f, x: None if is_such(x) else pm.default_serialise_filter_spec(f, x)",
]

_HINT_WIDTH = [
    "enable 64 bits in JAX:",
    'jax.config.update("jax_enable_x64", True)',
]


def _in_bfloat16(array: Any) -> Any:
    """Return an array with the dtype that NumPy writes as two opaque bytes."""
    return array.view(_BFLOAT16) if array.dtype == "V2" else array


def _as_number(array: Any, x: Any) -> Any:
    dtype = np.asarray(x).dtype
    array = _in_bfloat16(array) if dtype == _BFLOAT16 else array
    # A count instead of a flag means that the file has another tree.
    is_safe = (array.dtype.kind == "b") == (dtype.kind == "b") and (
        array.dtype == dtype or np.can_cast(array.dtype, dtype, "safe")
    )
    if array.shape or not is_safe:
        raise _Misfit(f"{with_article(type(x).__name__)}", describe(array), _HINT_ORDER)
    return array.astype(dtype)[()] if isinstance(x, np.generic) else type(x)(array.item())


def _misfits(leaves: Sequence[FileLeaf], values: Sequence[Any]) -> Generator[str]:
    """Yield the differences between the file and `like`, by path."""
    for leaf, new in zip(leaves, values, strict=True):
        old = leaf.value
        # All arrays of JAX are of one kind, and an abstract leaf represents one.
        kind = jax.Array if isinstance(old, (jax.Array, jax.ShapeDtypeStruct)) else class_of(old)
        is_misfit = not isinstance(new, kind) or (
            isinstance(new, (jax.Array, np.ndarray))
            and (new.shape, new.dtype) != (old.shape, old.dtype)
        )
        if is_misfit:
            mine = describe(old) if hasattr(old, "dtype") else f"of type {type(old).__name__}"
            yield f"{pattern_text(leaf.path)}: {mine} in like, {describe(new)} in the file"


def _refuse_misfits(misfits: Sequence[str], where: str) -> NoReturn:
    count = f"{len(misfits)} that differ{'s' * (len(misfits) == 1)}"
    raise EquinoxFileError(
        where,
        "leaves with the types, shapes and dtypes of like",
        count,
        at=misfits,
        hint=_HINT_ORDER,
    )


def _refuse_rest(where: str) -> NoReturn:
    raise EquinoxFileError(
        where,
        "a file that ends with the last leaf of like",
        "a file with more leaves",
        hint=[
            "another tree was written; if it begins with this one, read from an open file:",
            'with open(path, "rb") as f:',
            "    tree = pm.tree_deserialise_leaves(f, like)",
        ],
    )


_HINT_ORDER = "the file has no names: like must have the structure of the tree that was written"


# ---- arrays


_MAGIC = b"\x93NUMPY"
_HEADERS: dict[tuple[int, int], Callable[[Any], Any]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
# A header may claim any size: memory is allocated only as bytes arrive.
_CHUNK = 1 << 24


def _read_array(file: Any, like: Any) -> Any:
    """Read the next array of a file, in the format of NumPy's `save`; read no more bytes."""
    shape, fortran_order, dtype = _read_header(file)
    size = math.prod(shape) * dtype.itemsize
    # An array of an unexpected size gets no memory in advance.
    is_expected = size == like.size * like.dtype.itemsize
    data = _read_all(file, size) if is_expected else _read_grown(file, size)
    try:
        array = data.view(dtype).reshape(shape, order="F" if fortran_order else "C")
    except (ValueError, TypeError, OverflowError) as error:
        raise _Misfit("an array", f"one of dtype {dtype} and shape {shape}") from error
    return array if dtype.isnative else array.astype(dtype.newbyteorder("="))


def _read_header(file: Any) -> tuple[tuple[int, ...], bool, Any]:
    magic = _read_bytes(file, len(_MAGIC) + 2)
    if not magic:
        raise _Misfit("an array", "the end of the file", [_HINT_ORDER])
    read_header = _HEADERS.get((magic[-2], magic[-1])) if magic.startswith(_MAGIC) else None
    if read_header is None:
        hint = ["in files of this format, each leaf is a NumPy array", "numpy.save(f, x)"]
        raise _Misfit("an array", "something else", hint)
    try:
        shape, fortran_order, dtype = read_header(file)
    except Exception as error:
        raise _Misfit("an array", "a damaged array") from error
    if dtype.hasobject or dtype.itemsize == 0 or min(shape, default=0) < 0:
        raise _Misfit("an array of numbers", f"one of dtype {dtype} and shape {shape}")
    return shape, fortran_order, dtype


def _read_bytes(file: Any, size: int) -> bytearray:
    """Read a number of bytes, or those that are left."""
    data = bytearray()
    while len(data) < size:
        part = file.read(min(size - len(data), _CHUNK))
        if not part:
            break
        data += part
    return data


def _read_grown(file: Any, size: int) -> Any:
    data = _read_bytes(file, size)
    if len(data) < size:
        _refuse_short(len(data), size)
    return np.frombuffer(data, np.uint8) if size else np.empty(0, np.uint8)


def _read_all(file: Any, size: int) -> Any:
    """Read into the final memory."""
    if not hasattr(file, "readinto"):
        return _read_grown(file, size)
    data = np.empty(size, np.uint8)
    view, done = memoryview(cast("Any", data)), 0
    while done < size:
        count = file.readinto(view[done:])
        if not count:
            _refuse_short(done, size)
        done += count
    return data


def _refuse_short(done: int, size: int) -> NoReturn:
    raise _Misfit("a complete array", f"the end of the file after {done} of {size} bytes")


# ---- functions of the filter spec


def _functions(
    filter_spec: Any, tree: PyTree, leaves: Sequence[FileLeaf], where: str
) -> list[Callable[[Any, Any], Any]]:
    """Return the function for each leaf.

    Raises:
        SpecError: if `filter_spec` is no prefix of the tree, or has other values than functions.
    """
    where = f"{where}, filter_spec"
    if isinstance(filter_spec, Rule):
        filter_spec = filter_spec(tree)
    given: dict[tuple[Any, ...], Any] = {}

    def note(spec: Any, subtree: PyTree, path: tuple[Any, ...]) -> list[Any]:
        del subtree
        if not callable(spec):
            _refuse_spec(spec, path, where)
        given[path] = spec
        return []

    spread(filter_spec, tree, resolve=note, stops=_is_function, where=where)
    # Below the path of a layer, a spec says nothing about leaves that are configuration here.
    known = _Given(
        given, filter_spec, {leaf.path for leaf in leaves if leaf.meaning is Meaning.DATA}
    )
    return [known.function_for(leaf, where) for leaf in leaves]


def _is_function(spec: Any) -> bool:
    """Whether a callable tree in a spec is a function, and not a prefix."""
    return isinstance(spec, (BoundMethod, Partial, jtu.Partial))


class _Given:
    """The functions of a spec, by the paths of their nodes."""

    def __init__(self, given: dict[tuple[Any, ...], Any], spec: Any, data: set[tuple[Any, ...]]):
        self.given, self.spec = given, spec
        # For each node above a function, all functions below the node.
        self.below: dict[tuple[Any, ...], list[Any]] = {}
        for path, function in given.items():
            for length in range(len(path)):
                _add(function, self.below.setdefault(path[:length], []))
        self.of_leaves = list[Any]()
        for path in given.keys() & data:
            _add(given[path], self.of_leaves)

    def function_for(self, leaf: FileLeaf, where: str) -> Any:
        path = leaf.path
        # A function at a node applies to everything below the node.
        for length in range(len(path) + 1):
            if path[:length] in self.given:
                return self.given[path[:length]]
        found = _value_at(self.spec, path)
        if callable(found):
            return found
        # Otherwise: the function of all leaves nearby; or the function of all leaves, for a spec
        # from a tree map in which complete nodes were replaced.
        above = (self.below.get(path[:length], []) for length in reversed(range(len(path))))
        near = next((functions for functions in above if functions), list[Any]())
        for functions in (near, self.of_leaves):
            if len(functions) == 1:
                return functions[0]
        raise SpecError(_explain_missing(path, where))


def _add(function: Any, functions: list[Any]) -> None:
    if not any(function is known for known in functions):
        functions.append(function)


def _value_at(spec: Any, path: tuple[Any, ...]) -> Any:
    """Return the value of a spec at a path that is no leaf of the tree."""
    for key in path:
        if isinstance(key, jtu.GetAttrKey):
            with reading_stored():
                spec = getattr(spec, key.name, None)
        else:
            spec = next((child for own, child in children_of(spec) or () if own == key), None)
    return spec


def _refuse_spec(spec: Any, path: tuple[Any, ...], where: str) -> NoReturn:
    raise SpecError(
        where,
        "functions of a file and a leaf",
        describe(spec),
        at=[pattern_text(path)] if path else [],
        hint=[
            "to leave out a leaf, use:",
            "lambda f, x: None  # in writing",
            "lambda f, x: x  # in reading",
        ],
    )


def _explain_missing(path: tuple[Any, ...], where: str) -> str:
    return explain(
        where,
        "a function for each leaf that Equinox has",
        f"none for {pattern_text(path)}, which is configuration here",
        hint=[
            "pass one function for the whole layer:",
            f"filter_spec = pm.tree_at({pattern_text(path[:-1])!r}, filter_spec, "
            "replace_fn=lambda _: function)",
        ],
    )


LEAVES_THERE: dict[type, frozenset[str]] = {
    BatchNorm: frozenset({"axis_name", "inference"}),
    Dropout: frozenset({"p", "inference"}),
    Pool: frozenset({"init"}),
    SpectralNorm: frozenset({"inference"}),
}
"""The configuration of each layer that is a leaf in Equinox, without functions, which no file
has."""

ESTABLISHED = 2**30
"""The count for statistics that need no correction: any momentum below one to that power is zero.
Equinox can add as many again."""


class Meaning(enum.Enum):
    """The meaning of a value of the file in the tree."""

    DATA = "a leaf"
    CONFIGURATION = "a part of the structure"
    COUNT = "none: the number that the next two leaves, running statistics, are corrected by"


class FileLeaf(NamedTuple):
    """A leaf in Equinox, and so a position in its file."""

    path: tuple[Any, ...]
    value: Any
    meaning: Meaning
    layer: Any = None
    """The layer of the configuration, or of the count if that is known."""


def file_order(tree: PyTree, is_leaf: IsLeaf = None) -> list[FileLeaf]:
    """Return the leaves that Equinox has for a tree, in its order.

    Args:
        tree: any tree.
        is_leaf: where to stop descending.

    Returns:
        The leaves, with their paths here.

    Raises:
        StateError: if a State in the tree was used up.
    """
    return list(_Walk(tree, is_leaf).below(tree, (), FileLeaf((), tree, Meaning.DATA)))


def put_back(tree: PyTree, leaves: Sequence[FileLeaf], values: Sequence[Any], where: str) -> PyTree:
    """Return a tree with its leaves replaced by values.

    Args:
        tree: any tree.
        leaves: the result of `file_order` for it.
        values: the values of the file, one for each leaf; the value of the leaf itself if the file
            has none.
        where: the name of the file in errors.

    Returns:
        A tree of the structure of `tree`, with the configuration of the file.

    Raises:
        EquinoxFileError: if running statistics need a correction, but the momentum is unknown.
        ArgumentError: if a layer refuses the configuration of the file.
    """
    changes: list[tuple[Any, Any]] = []
    # By layer, because its flags may depend on each other.
    flags: dict[int, tuple[Any, dict[str, Any]]] = {}
    for leaf, value in zip(leaves, _corrected(leaves, values, where), strict=True):
        if leaf.meaning is Meaning.COUNT or value is leaf.value:
            continue
        changes.append((leaf.path, value))
        if leaf.meaning is Meaning.CONFIGURATION and isinstance(leaf.path[-1], jtu.GetAttrKey):
            flags.setdefault(id(leaf.layer), (leaf.layer, {}))[1][leaf.path[-1].name] = value
    for layer, changed in flags.values():
        # Only for its checks: the returned layer is built without any.
        layer.replace(**changed)
    return replace_at(tree, changes)


# ---- the order


class _Walk:
    def __init__(self, tree: PyTree, is_leaf: IsLeaf):
        self.is_leaf = is_leaf
        norms = {getattr(norm.state_index, "marker", None): norm for norm in _norms_in(tree)}
        # None for other Modules: a user's field may have the name of one of ours.
        self.owners = {token.marker: norms.get(token.marker) for _, token in tokens_of(tree)}

    def below(
        self, node: Any, path: tuple[Any, ...], leaf: FileLeaf, has_flags: bool = True
    ) -> Iterator[FileLeaf]:
        """Yield the leaves at and below a node; each is `leaf` with its own value and path."""
        is_end = self.is_leaf is not None and self.is_leaf(node)
        children = None if is_end else children_of(node)
        record = record_of(node)
        if children is None:
            yield leaf._replace(path=path, value=node)
        elif isinstance(node, State):
            yield from self._state(node, children, path)
        elif record is not None:
            yield from self._record(node, record, path, leaf, has_flags)
        else:
            # Equinox's users pass only arrays to optax, so its states have only arrays.
            has_flags = has_flags and class_of(node).__module__.partition(".")[0] != "optax"
            for key, child in children:
                yield from self.below(child, (*path, key), leaf, has_flags)

    def _record(
        self,
        node: Any,
        record: AbstractRecord,
        path: tuple[Any, ...],
        leaf: FileLeaf,
        has_flags: bool,
    ) -> Iterator[FileLeaf]:
        data = {*record.data_names(node)}
        flags = _flags_of(class_of(node)) if has_flags else ()
        for name in record.names(node):
            place, value = (*path, jtu.GetAttrKey(name)), stored(node, name)
            if name in data:
                if name == _COUNTED and isinstance(node, BatchNorm):
                    key = jtu.GetAttrKey(_COUNT)
                    yield from _count(node, getattr(value, "init", None), (*path, key))
                yield from self.below(value, place, leaf, has_flags)
            elif name in flags:
                flag = FileLeaf(place, value, Meaning.CONFIGURATION, node)
                yield from self.below(value, place, flag, has_flags)

    def _state(
        self, state: State, children: list[tuple[Any, Any]], path: tuple[Any, ...]
    ) -> Iterator[FileLeaf]:
        names = {key.key.steps for key, _ in children}
        for marker, (key, value) in zip(state.__values__(), children, strict=True):
            owner = self.owners.get(marker)
            # In a State on its own, only the names show the owners of its values.
            is_alone = marker not in self.owners
            if owner is not None or (is_alone and _is_counted(key.key, names)):
                count = jtu.DictKey(key.key.removesuffix(_COUNTED) + _COUNT)
                yield from _count(owner, value, (*path, count))
            yield from self.below(value, (*path, key), FileLeaf((), None, Meaning.DATA))


def _norms_in(node: Any) -> Iterator[BatchNorm]:
    if isinstance(node, BatchNorm):
        yield node
    for _, child in children_of(node) or ():
        yield from _norms_in(child)


def _flags_of(kind: type) -> frozenset[str]:
    return frozenset[str]().union(*(LEAVES_THERE.get(cls, ()) for cls in kind.__mro__))


# ---- counts of batches


_COUNTED, _COUNT, _FIRST = "state_index", "batch_counter", "ema_first_time_index"
# With any of these, statistics need no count.
_DECIDING = (_COUNT, _FIRST)


def _count(layer: BatchNorm | None, statistics: Any, path: tuple[Any, ...]) -> Iterator[FileLeaf]:
    """Yield the count that precedes running statistics, if there is one."""
    if (layer is None or layer.mode == "torch") and _are_statistics(statistics):
        momentum = 0.0 if layer is None else layer.momentum
        mean, var = statistics
        yield FileLeaf(path, _count_of(mean, var, momentum), Meaning.COUNT, layer)


def _is_counted(name: PathName, names: set[tuple[str, ...]]) -> bool:
    *above, last = name.steps
    return last == _COUNTED and not any((*above, other) in names for other in _DECIDING)


def _are_statistics(value: Any) -> bool:
    if class_of(value) is not tuple or len(value) != 2:
        return False
    mean, var = value
    kinds = (jax.Array, jax.ShapeDtypeStruct)
    are_arrays = isinstance(mean, kinds) and isinstance(var, kinds)
    # With an axis, so that neither can be mistaken for a count.
    return are_arrays and mean.ndim > 0 and (mean.shape, mean.dtype) == (var.shape, var.dtype)


def _count_of(mean: Any, var: Any, momentum: float) -> Any:
    """Return a count with which Equinox uses statistics unchanged, one for each member."""
    dtype = jnp.asarray(0).dtype
    if not (_has_values(mean) and _has_values(var)):
        return jax.ShapeDtypeStruct(mean.shape[:-1], dtype)
    # With a count of zero Equinox corrects nothing, and begins as this library does. But later it
    # would take the next batch for the only one.
    is_new = (np.asarray(mean) == 0).all(-1) & (np.asarray(var) == 1).all(-1)
    return jnp.asarray(np.where(is_new | (momentum == 1), 0, ESTABLISHED), dtype)


def _has_values(array: Any) -> bool:
    return isinstance(array, jax.Array) and not isinstance(array, Tracer) and not array.is_deleted()


def _corrected(leaves: Sequence[FileLeaf], values: Sequence[Any], where: str) -> list[Any]:
    """Return the values, with Equinox's correction applied to running statistics."""
    result = list(values)
    for i, leaf in enumerate(leaves):
        if leaf.meaning is not Meaning.COUNT or values[i] is leaf.value:
            continue
        count = np.asarray(values[i], np.float64)
        is_corrected = (count > 0) & (count < ESTABLISHED)
        if not is_corrected.any():
            continue
        if leaf.layer is None:
            raise _momentum_missing(leaf, where)
        scale = np.where(is_corrected, 1 - leaf.layer.momentum**count, 1)
        for j in (i + 1, i + 2):
            # A value that was not read is unchanged. With a momentum of one, nothing was ever
            # learned.
            if values[j] is not leaves[j].value and scale.all():
                exact = np.asarray(values[j], np.float64) / scale[..., None]
                result[j] = jnp.asarray(exact, values[j].dtype)
    return result


def _momentum_missing(leaf: FileLeaf, where: str) -> EquinoxFileError:
    return EquinoxFileError(
        where,
        "the model beside its State, for running statistics that Equinox corrects by the "
        "layer's momentum",
        "only a State",
        at=[pattern_text(leaf.path)],
        hint=[
            "read nothing for the model:",
            "filter_spec = (lambda f, x: x, pm.default_deserialise_filter_spec)",
            "_, state = pm.tree_deserialise_leaves(path, (model, state), filter_spec)",
        ],
    )
