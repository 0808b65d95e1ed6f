"""A file of named arrays, with strings about them; this file knows nothing of trees.

Owns: the writing and reading of such a file. It is a safetensors file, which other tools can read,
with a checksum for each array. An array in the host's memory is written from there. Of any other
array there is one copy at a time. Meanwhile the next arrays are fetched, up to the bytes of the
largest one. Arrays that were read are independent of the file, which may change or be removed.
"""

from __future__ import annotations

import io
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from types import TracebackType
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jax.core import Tracer

from pytreemod.errors import ArgumentError, DonatedError, describe
from pytreemod.io.access import (
    StrPath,
    checked_path,
    open_to_read,
    replacement,
    shown,
    system_errors,
)
from pytreemod.io.headers import (
    ALIGNMENT,
    BLOCK_BYTES,
    LENGTH,
    LONGEST,
    METADATA,
    OWN,
    FileEntry,
    FileHeader,
    can_be_written,
    check_length,
    checksum_after,
    damaged,
    has_code,
    new_header,
    parse_header,
    seal_header,
)


def write_container(
    path: StrPath,
    arrays: Mapping[str, Any] | Iterable[ArraySource],
    metadata: Mapping[str, str] | None = None,
    *,
    durable: bool = False,
) -> None:
    """Write arrays into a file that replaces the one at `path` in one step.

    If the process is killed, the old file is unchanged. The same is true of a power cut if
    `durable`; otherwise both files may be damaged, which the checksums show.

    Args:
        path: the path of the file.
        arrays: JAX or NumPy arrays by name; or sources that make them one at a time.
        metadata: strings by name.
        durable: whether to wait until the disk has everything; the time depends on the disk.

    Raises:
        ArgumentError: if an argument cannot be written to a file.
        DonatedError: if the memory of an array was donated.
        FileAccessError: if the system refuses; the old file is unchanged.

    Examples:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = f"{folder.name}/numbers.safetensors"
        >>> write_container(path, {"weight": np.ones((2, 3), np.float32)}, {"author": "me"})
        >>> with Container.open(path) as container:
        ...     print(container.metadata, container.read("weight").shape)
        {'author': 'me'} (2, 3)
        >>> folder.cleanup()
    """
    path = checked_path(path)
    draft = FileDraft(path, array_sources(arrays), {} if metadata is None else metadata)
    with replacement(path, draft.size, durable=durable) as file:
        draft.write(file)


class FileDraft:
    """A file that is not written yet, but whose layout is known.

    Args:
        path: the path of the file, for errors.
        sources: the arrays.
        metadata: strings by name.

    Raises:
        ArgumentError: if an argument cannot be written to a file.
    """

    size: int
    """In bytes."""

    def __init__(self, path: str, sources: Sequence[ArraySource], metadata: Mapping[str, str]):
        check_sources(path, sources)
        _check_metadata(path, metadata)
        self._path, self._sources = path, sources
        self._header, self._places = new_header([source[:3] for source in sources], metadata)
        if len(self._header) - LENGTH > LONGEST:
            got = f"names and metadata that take {len(self._header):,}"
            raise ArgumentError(shown(path), f"at most {LONGEST:,} bytes", got)
        self.size = max((stop for _, stop in self._places), default=len(self._header))

    def write(self, file: io.FileIO) -> None:
        """Write all of it into an empty file."""
        order = sorted(range(len(self._sources)), key=lambda i: self._places[i])
        # The header comes last, when the checksums are known. A partial file has none.
        file.seek(len(self._header))
        checksums = _write_arrays(file, self._path, [self._sources[i] for i in order])
        seal_header(self._header, [checksum for _, checksum in sorted(zip(order, checksums))])
        file.seek(0)
        write_all(file, memoryview(self._header))


def array_sources(arrays: Mapping[str, Any] | Iterable[ArraySource]) -> list[ArraySource]:
    """Return the sources of the arrays to write; the arrays themselves may be given, by name."""
    if not isinstance(arrays, Mapping):
        return [*arrays]
    by_name = cast(Mapping[str, Any], arrays)
    return [ArraySource.of(name, value) for name, value in by_name.items()]


def _write_arrays(file: io.FileIO, path: str, sources: list[ArraySource]) -> list[int]:
    """Write the arrays one after another, and return their checksums."""
    checksums: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        for data in host_bytes(path, sources):
            checksums.append(_write_summed(file, data, pool))
            del data  # else it would stay alive while the next one is fetched
    return checksums


def _write_summed(file: io.FileIO, data: memoryview, pool: ThreadPoolExecutor) -> int:
    """Write the bytes of an array, and return their checksum.

    Another thread computes it while the system copies the bytes. With it, 1 GB takes 0.82 of the
    time, as long as without checksums. `_SUMMED_BESIDE = math.inf` switches it off.
    """
    summing = _started(pool, data) if len(data) >= _SUMMED_BESIDE else None
    if summing is None:
        checksum = 0
        for start in range(0, len(data), BLOCK_BYTES):
            block = data[start : start + BLOCK_BYTES]
            checksum = checksum_after(checksum, block)
            write_all(file, block)
        return checksum
    write_all(file, data)
    return summing.result()


# Bytes. Handing over fewer takes as long as summing them; on one core nothing runs in parallel.
_SUMMED_BESIDE = BLOCK_BYTES if (os.cpu_count() or 1) > 1 else math.inf


def _started(pool: ThreadPoolExecutor, data: memoryview) -> Future[int] | None:
    """Start to compute the checksum; None if the interpreter is exiting and starts no thread."""
    try:
        return pool.submit(_summed, data)
    except RuntimeError:
        return None


def _summed(data: memoryview) -> int:
    checksum = 0
    for start in range(0, len(data), BLOCK_BYTES):
        checksum = checksum_after(checksum, data[start : start + BLOCK_BYTES])
    return checksum


def write_all(file: io.FileIO, data: memoryview) -> None:
    """Write all of the bytes at the position of a file."""
    # The system may write less than it is given.
    while len(data):
        data = data[file.write(data) :]


class Container:
    """A file of arrays, open for reading. Several threads may read from it.

    Examples:
        See [`write_container`][pytreemod.io.containers.write_container].
    """

    entries: dict[str, FileEntry]
    """The arrays, by name."""
    metadata: dict[str, str]
    """Strings by name."""

    def __init__(self, path: str, file: io.FileIO, header: FileHeader, verify: bool) -> None:
        self.entries, self.metadata = header
        self._path, self._file, self._verify = path, file, verify

    @classmethod
    def open(cls, path: StrPath, verify: bool = True) -> Container:
        """Open a file and read its header.

        Args:
            path: the path of the file.
            verify: whether to compare the checksum of each array that is read. The checksum of the
                header is always compared.

        Returns:
            The open file. Close it, or use it in a `with`.

        Raises:
            FileError: if it is not a file of arrays, or is damaged; FileMissingError: if there is
                none.
        """
        path = checked_path(path)
        file = open_to_read(path)
        try:
            with system_errors(path):
                header = _read_header(path, file)
            return cls(path, file, header, verify)
        # Also for an interrupt: no other code has the file yet.
        except BaseException:
            file.close()
            raise

    def read(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        """Read one array, and nothing else of the file.

        Args:
            name: the name of the array; one of `entries`.

        Returns:
            A new array in its own memory, at an address that is a multiple of 64. If the device is
            the CPU, `jax.device_put` uses that memory without a copy.

        Raises:
            FileError: if the file is damaged, or has changed since it was opened.
        """
        entry = self.entries[name]
        data = _aligned(entry.stop - entry.start)
        verify = self._verify and entry.checksum is not None
        with system_errors(self._path):
            checksum = _read_into(self._path, self._file, entry.start, bytes_of(data), verify)
        if verify and checksum != entry.checksum:
            got = "one that was changed or damaged"
            raise damaged(self._path, "arrays that fit their checksums", got, [name])
        if entry.dtype == np.bool_ and np.max(data, initial=0) > 1:
            # NumPy and XLA compute nonsense with such booleans.
            raise damaged(self._path, "booleans of 0 and 1", f"{np.max(data)}", [name])
        return data.view(entry.dtype).reshape(entry.shape)

    def close(self) -> None:
        """Close the file; arrays that were read remain valid."""
        self._file.close()

    def __enter__(self) -> Container:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class FileArrays(Mapping[str, Any]):
    """The arrays of an open file by name; each is read when it is accessed."""

    def __init__(self, file: Container):
        self._file = file

    def __getitem__(self, name: str) -> Any:
        if name not in self._file.entries:
            raise KeyError(name)
        return self._file.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.entries)

    def __len__(self) -> int:
        return len(self._file.entries)


def _aligned(size: int) -> np.ndarray[Any, np.dtype[Any]]:
    """Allocate a number of bytes."""
    # At an address whose memory JAX uses on a CPU without a copy; NumPy aligns less strictly.
    data = np.empty(size + ALIGNMENT, np.uint8)
    begin = -data.ctypes.data % ALIGNMENT
    return data[begin : begin + size]


def _read_header(path: str, file: io.FileIO) -> FileHeader:
    size = os.fstat(file.fileno()).st_size
    head = bytearray(min(size, LENGTH + 1))
    _read_into(path, file, 0, memoryview(head))
    # Before memory is allocated: a header is at most as long as its file.
    header = bytearray(check_length(path, bytes(head), size))
    _read_into(path, file, 0, memoryview(header))
    return parse_header(path, bytes(header), size)


def _read_into(
    path: str, file: io.FileIO, start: int, data: memoryview, verify: bool = False
) -> int:
    """Fill `data` from the file, beginning at `start`; return its checksum if `verify`."""
    if not verify:
        _read_block(path, file, start, data)
        return 0
    checksum = 0
    for offset in range(0, len(data), BLOCK_BYTES):
        block = data[offset : offset + BLOCK_BYTES]
        _read_block(path, file, start + offset, block)
        checksum = checksum_after(checksum, block)
    return checksum


def _read_block(path: str, file: io.FileIO, start: int, block: memoryview) -> None:
    # The system may read less than it was asked for.
    while len(block):
        count = _read_at(file, start, block)
        if not count:
            raise damaged(path, f"{len(block):,} more bytes", "the end of the file")
        start, block = start + count, block[count:]


_SEEKING = threading.Lock()


def _seek_and_read(file: io.FileIO, start: int, data: memoryview) -> int:
    with _SEEKING:
        file.seek(start)
        return file.readinto(data)


def _read_from(file: io.FileIO, start: int, data: memoryview) -> int:
    return os.preadv(file.fileno(), [data], start)


# Some systems can read at an offset only by moving the file's position, which threads share.
_read_at = _read_from if hasattr(os, "preadv") else _seek_and_read


def check_sources(path: str, sources: Iterable[ArraySource]) -> None:
    """Check that everything can be written, before the first write.

    Args:
        path: the path of the file or folder, for errors.
        sources: the arrays.

    Raises:
        ArgumentError: if a name is invalid or repeated, or an array is not numeric.
    """
    names: set[str] = set()
    for source in sources:
        _check_text(path, source.name)
        if source.name in names or source.name == METADATA:
            got = "a reserved name" if source.name == METADATA else "the same name twice"
            raise _refused(path, "a different name for each array", got, source.name)
        names.add(source.name)
        if not can_be_written(source.dtype):
            got = f"{source.dtype}"
            raise _refused(path, "arrays of numbers and booleans", got, source.name)


def _check_metadata(path: str, metadata: Mapping[str, str]) -> None:
    for key, value in metadata.items():
        _check_text(path, key)
        _check_text(path, value)
        if key.startswith(OWN):
            raise _refused(path, "other keys in the metadata", "a reserved key", key)


def _check_text(path: str, text: Any) -> None:
    # A lone surrogate can be in a str, but no file can contain it.
    try:
        str.encode(text)
    except (TypeError, UnicodeEncodeError) as error:
        raise ArgumentError(shown(path), "a string", describe(text)) from error


def _refused(path: str, expected: str, got: str, name: str) -> ArgumentError:
    return ArgumentError(shown(path), expected, got, at=[shown(name)])


class ArraySource(NamedTuple):
    """An array that will be written: its form, and how to get it."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    make: Callable[[], Any]
    """Return a JAX or NumPy array; called once, when it is written."""

    @property
    def nbytes(self) -> int:
        """The bytes of the array, in memory and in the file."""
        return prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, name: str, value: Any) -> ArraySource:
        """Return the source of an existing array."""
        if not hasattr(value, "dtype") or not hasattr(value, "shape"):
            value = np.asarray(value)
        return cls(name, value.dtype, tuple(value.shape), lambda: value)


def host_bytes(path: str, sources: Sequence[ArraySource]) -> Iterator[memoryview]:
    """Yield the bytes of each array as a file has them: little-endian, in C order.

    Args:
        path: the path of the file, for errors.
        sources: the arrays.

    Yields:
        The bytes of one array. Read them before you ask for the next ones.

    Raises:
        ArgumentError: if a source makes an array of another form than announced.
        DonatedError: if the memory of an array was donated.
    """
    limit = max((source.nbytes for source in sources), default=0)
    waiting = deque(sources)
    coming: deque[tuple[ArraySource, Any]] = deque()
    under_way = 0
    while waiting or coming:
        # The next ones are transferred while this one is written.
        while waiting and (not coming or under_way + waiting[0].nbytes <= limit):
            source = waiting.popleft()
            coming.append((source, _start(path, source)))
            under_way += source.nbytes
        source, started = coming.popleft()
        array = _on_host(started)
        # From here on only the yielded view keeps a copy alive.
        del started
        yield bytes_of(array)
        del array
        under_way -= source.nbytes


def _start(path: str, source: ArraySource) -> Any:
    """Return the array, after starting its transfer to the host if it is elsewhere."""
    value = source.make()
    _check_made(path, source, value)
    if not isinstance(value, jax.Array) or not value.is_fully_replicated:
        return value
    value = _fleeting(value.addressable_data(0))
    with _wanted():
        value.copy_to_host_async()
    return value


def _wanted() -> Any:
    """Allow a transfer to the host that the user asked for, despite a transfer guard."""
    return jax.transfer_guard_device_to_host("allow")


def _fleeting(value: jax.Array) -> jax.Array:
    """Return a private alias of an array, unless the host has its bytes as a file needs them.

    An array caches its copy on the host for as long as it lives, so a whole model would pile up
    there. The alias has the same memory on the device, and is deleted at once.
    """
    (device,) = value.devices()
    if device.platform != "cpu":
        return jax.device_put(value, device)
    # On the CPU only packed dtypes are copied. If they shared memory, JAX 0.10 would free the
    # copies only at Python's next garbage collection.
    return value if has_code(value.dtype) else jax.device_put(value, device, may_alias=False)


def _on_host(value: Any) -> np.ndarray[Any, np.dtype[Any]]:
    with _wanted():
        if not isinstance(value, jax.Array) or value.is_fully_replicated:
            return np.asarray(value)
        whole = np.empty(value.shape, value.dtype)
        for shard in value.addressable_shards:
            if shard.replica_id == 0:
                whole[shard.index] = np.asarray(_fleeting(shard.data))
        return whole


def bytes_of(array: np.ndarray[Any, np.dtype[Any]]) -> memoryview:
    """Return the bytes of an array, little-endian and in C order.

    Args:
        array: an array of any dtype and order.

    Returns:
        The bytes of the array itself, or of a copy if their order differs.
    """
    plain = np.asarray(array, array.dtype.newbyteorder("<"), order="C")
    # (pyright takes arrays for buffers from Python 3.12 on only.)
    return memoryview(cast(Any, plain.reshape(-1).view(np.uint8)))


def is_whole_here(array: jax.Array) -> bool:
    """Whether this process has all numbers of an array, which other hosts may have as well."""
    return array.is_fully_addressable or array.is_fully_replicated


def _check_made(path: str, source: ArraySource, value: Any) -> None:
    """Check that an array has the form that the header says, and values that are on this host."""
    kind, expected, got = ArgumentError, "", ""
    if isinstance(value, Tracer):
        expected, got = "an array with values", f"{describe(value)}, traced"
    elif value.dtype != source.dtype or tuple(value.shape) != source.shape:
        expected, got = describe(source), describe(value)
    elif isinstance(value, np.ma.MaskedArray):
        expected, got = "an array", "a masked array, whose mask would be lost"
    elif isinstance(value, jax.Array) and value.is_deleted():
        kind, expected = DonatedError, "an array with its data"
        got = "an array that an earlier call donated"
    elif isinstance(value, jax.Array) and not is_whole_here(value):
        expected, got = (
            "an array that this process has in full",
            "one with parts on other processes",
        )
    if got:
        raise kind(f"{shown(path)}, {shown(source.name or '<root>')}", expected, got)
