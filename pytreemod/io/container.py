"""A file of named arrays, in the format of safetensors; this file knows nothing of trees.

The format is eight bytes with the length of the header, the header in JSON, and the arrays one
after another. A dtype without a code in the format is written as bytes, random keys as their
numbers, and both are named in the metadata. A folder in the layout of Hugging Face is read as one
table.

The `safetensors` package is not used: it writes arrays in Fortran's order as garbage, reads no
8-bit floats into NumPy, and needs all arrays in memory at once.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from math import prod
from typing import IO, Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

from pytreemod.errors import FileError
from pytreemod.typing import is_instance

StrPath: TypeAlias = str | os.PathLike[str]

_CODES = (
    {"bool": "BOOL", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64"}
    | {"int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "complex64": "C64"}
    | {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"}
    | {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0"}
    | {"float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ"}
)
_NAMES = {code: name for name, code in _CODES.items()}
_WITHOUT_CODE = (
    *("int2", "int4", "uint2", "uint4", "float4_e2m1fn", "complex128"),
    *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz"),
)
# The dtypes that a file may have; an older JAX lacks some of them.
KNOWN = {n: np.dtype(getattr(jnp, n)) for n in (*_CODES, *_WITHOUT_CODE) if hasattr(jnp, n)}
KNOWN["bool"] = np.dtype(bool)
# In the metadata: the form of arrays whose dtype has no code, and the generators of keys.
_DTYPES, _KEYS = "pytreemod.dtypes", "pytreemod.keys"
_LONGEST_HEADER, _MOST_AXES, _ALIGNMENT = 100_000_000, 64, 64


class Entry(NamedTuple):
    """One array of a table: its form, and how to get its numbers."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[], Any]
    # The generator, if these are the numbers of random keys.
    key: str | None = None


Table: TypeAlias = Mapping[str, Entry]


# ---- writing


def write_table(path: StrPath, table: Table, metadata: Mapping[str, str]) -> None:
    """Write a table into a file, which replaces the one at `path` in one step.

    Args:
        path: the path of the file.
        table: arrays by name; one at a time is read.
        metadata: strings by name.

    Raises:
        FileError: if a name is one that the format needs.
    """
    if "__metadata__" in table:
        raise FileError("save: the format has no array of the name __metadata__")
    header, own_forms, keys, end = dict[str, Any](), dict[str, Any](), dict[str, str](), 0
    # Arrays of large elements first, so that each is aligned.
    order = sorted(table.items(), key=lambda item: -item[1].dtype.itemsize)
    for name, (shape, dtype, _, key) in order:
        begin, end = end, end + prod(shape) * dtype.itemsize
        if dtype.name not in _CODES:
            own_forms[name] = [dtype.name, shape]
            shape = (end - begin,)
        if key is not None:
            keys[name] = key
        code = _CODES.get(dtype.name, "U8")
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
    notes = {n: json.dumps(x) for n, x in ((_DTYPES, own_forms), (_KEYS, keys)) if x}
    text = json.dumps({"__metadata__": {**metadata, **notes}, **header}).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > _LONGEST_HEADER:
        raise FileError(f"save: names and metadata have at most {_LONGEST_HEADER} bytes in a file")
    with replacement(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, entry in order:
            array = entry.read()
            plain = np.asarray(array, array.dtype.newbyteorder("<"), order="C")
            file.write(plain.reshape(-1).view(np.uint8).data)


@contextmanager
def replacement(path: StrPath) -> Generator[IO[bytes]]:
    """Write a file next to `path`, and rename it if the block succeeds."""
    # The file that a link leads to is replaced, not the link.
    target = os.path.realpath(path)
    if os.path.exists(target) and not os.path.isfile(target):
        raise FileError(f"{target} is no file")
    beside = f"{target}.{secrets.token_hex(4)}.tmp"
    try:
        with open(beside, "xb", buffering=1 << 20) as file:
            yield file
            file.flush()
            # Otherwise the new name may reach the disk before the data.
            os.fsync(file.fileno())
        os.replace(beside, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(beside)
        raise


# ---- reading


@contextmanager
def opened(path: StrPath) -> Generator[tuple[dict[str, Entry], dict[str, str]]]:
    """Open a file or a folder: its table and its metadata; arrays can be read in the block.

    Raises:
        FileError: if a header is malformed, or does not fit the size of its file.
    """
    table, metadata = dict[str, Entry](), dict[str, str]()
    with ExitStack() as files:
        for each in _files_of(os.fspath(path)):
            more, about = _read_header(files.enter_context(_open(each)), each)
            if twice := table.keys() & more.keys():
                raise FileError(f"{each} and an earlier file both have {twice.pop()}")
            table |= more
            metadata = about | metadata
        yield table, metadata


def _files_of(path: str) -> list[str]:
    if not os.path.isdir(path):
        return [path]
    single = os.path.join(path, "model.safetensors")
    if os.path.exists(single):
        return [single]
    index = f"{single}.index.json"
    with _open(index) as file:
        try:
            names = sorted({*json.load(file)["weight_map"].values()})
            are_here = all(os.path.basename(name) == name != ".." for name in names)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise FileError(f"{index} is no index of a model's files") from error
    if not are_here or not all(name.isprintable() for name in ("x", *names)):
        raise FileError(f"{index} names files that are not in the folder")
    return [os.path.join(path, name) for name in names]


def _open(path: str) -> IO[bytes]:
    # Opening a pipe would wait for its writer.
    if os.path.exists(path) and not os.path.isfile(path):
        raise FileError(f"{path} is no file")
    return open(path, "rb")


def _read_header(file: IO[bytes], path: str) -> tuple[dict[str, Entry], dict[str, str]]:
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    start = length + 8
    if size < 8 or start > size or length > _LONGEST_HEADER:
        raise FileError(f"{path} is no safetensors file, or is cut")
    try:
        header = json.loads(file.read(length), object_pairs_hook=_distinct)
        metadata = header.pop("__metadata__", {})
        forms, keys = (json.loads(metadata.pop(note, "{}")) for note in (_DTYPES, _KEYS))
        table, end = dict[str, Entry](), 0
        for name, about in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            entry, begin, past = _entry(file, path, start, about, forms.get(name), keys.get(name))
            if begin != end:
                raise ValueError(f"{name} begins at {begin}, not at {end}")
            table[name], end = entry, past
        if end != size - start:
            raise ValueError(f"the arrays end at {end}, the file at {size - start}")
        if any(not isinstance(text, str) for text in metadata.values()):
            raise TypeError("the metadata are not strings")
    except (ValueError, TypeError, AttributeError, KeyError, IndexError, RecursionError) as error:
        raise FileError(f"{path} is damaged: {str(error)[:200]}") from error
    return table, metadata


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name is there twice")
    return made


def _entry(
    file: Any, path: str, start: int, about: dict[str, Any], form: Any, key: Any
) -> tuple[Entry, int, int]:
    """Return one array of a header, and where it begins and ends; nothing in it is trusted."""
    begin, end = about["data_offsets"]
    name, shape = form or (_NAMES.get(about["dtype"]), about["shape"])
    if name not in KNOWN:
        raise ValueError(f"unknown dtype {name or about['dtype']}")
    dtype, numbers = KNOWN[name], (begin, end, *shape)
    is_form = is_instance(shape, list) and all(type(n) is int and n >= 0 for n in numbers)
    if not is_form or len(shape) > _MOST_AXES or prod(shape) * dtype.itemsize != end - begin:
        raise ValueError(f"{name}{shape} from {begin} to {end}")
    if 0 in shape:
        # Otherwise, NumPy may have no such array.
        np.empty(shape, dtype)
    if key is not None and not (is_instance(key, str) and name == "uint32"):
        raise ValueError(f"random keys of {key}")

    def read() -> Any:
        data: Any = empty((end - begin,), np.dtype(np.uint8))
        file.seek(start + begin)
        if file.readinto(data) != end - begin:
            raise FileError(f"{path} was cut while it was read")
        # A byte of a bool may be neither 0 nor 1.
        return (data != 0 if name == "bool" else data.view(dtype)).reshape(shape)

    return Entry(tuple(shape), dtype, read, key), begin, end


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Return memory for an array, aligned so that JAX need not copy it."""
    size = prod(shape) * dtype.itemsize
    if size < _ALIGNMENT**2:
        return np.empty(shape, dtype)
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    offset = -memory.ctypes.data % _ALIGNMENT
    return memory[offset : offset + size].view(dtype).reshape(shape)
