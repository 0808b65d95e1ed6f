"""A file of arrays with names, and texts about them; it knows nothing of trees.

Owns: how such a file is written and read. It is one of safetensors, which other tools read, with a
checksum of each array in it. Neither way takes more memory than the largest array needs, and what
was read is the reader's own: the file may change or go.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import numpy as np

from pytreemod.errors import ArgumentError, FileError, describe, explain
from pytreemod.io.access import StrPath, file_name, opened, system_errors
from pytreemod.io.encodings import can_be_written
from pytreemod.io.fetching import ArraySource, host_bytes
from pytreemod.io.headers import (
    ALIGNMENT,
    LENGTH,
    LONGEST,
    METADATA,
    OWN,
    FileEntry,
    FileHeader,
    new_header,
    parse_header,
    seal_header,
)
from pytreemod.io.replacing import replacement

_CHUNK = 1 << 20
"""What is read at once: it is still in the processor's cache when its checksum is computed."""
_WORTH_A_THREAD = 1 << 18


def write_container(
    path: StrPath,
    arrays: Mapping[str, Any] | Iterable[ArraySource],
    metadata: Mapping[str, str] | None = None,
    *,
    durable: bool = True,
) -> None:
    """Write arrays into a file that takes the place of the one at `path` in one step.

    Args:
        path: of the file.
        arrays: by name, or what is made when its turn comes.
        metadata: texts by name.
        durable: whether to wait until the disk has everything.

    Raises:
        ArgumentError: something is given that no file can hold.
        FileAccessError: the system refuses.

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
    if isinstance(arrays, Mapping):
        sources = [ArraySource.of(name, value) for name, value in arrays.items()]
    else:
        sources = [*arrays]
    metadata = {} if metadata is None else metadata
    where = file_name(path)
    _check_sources(where, sources)
    _check_metadata(where, metadata)
    header, starts = new_header([source[:3] for source in sources], metadata)
    if len(header) - LENGTH > LONGEST:
        got = f"names and metadata that take {len(header):,}"
        raise ArgumentError(explain(where, f"at most {LONGEST:,} bytes", got))
    order = sorted(range(len(sources)), key=lambda i: (starts[i], sources[i].nbytes))
    checksums = [0] * len(sources)
    with replacement(path, durable=durable) as file, ThreadPoolExecutor(1) as pool:
        # The header comes last, when the checksums are known: a part of a file is none.
        file.seek(len(header))
        for i, data in zip(order, host_bytes(where, [sources[i] for i in order])):
            if len(data) < _WORTH_A_THREAD:
                checksums[i] = zlib.crc32(data)
                _write_all(file, data)
            else:
                checksum = pool.submit(zlib.crc32, data)
                _write_all(file, data)
                checksums[i] = checksum.result()
            del data
        seal_header(header, checksums)
        file.seek(0)
        _write_all(file, memoryview(header))


def _write_all(file: Any, data: memoryview) -> None:
    while len(data):
        data = data[file.write(data) :]


class Container:
    """A file of arrays, open for reading.

    Examples:
        See [`write_container`][pytreemod.io.containers.write_container].
    """

    entries: dict[str, FileEntry]
    """What arrays there are, by name."""
    metadata: dict[str, str]
    """Texts by name."""

    def __init__(self, path: str, file: Any, header: FileHeader, verify: bool) -> None:
        self.entries, self.metadata = header
        self._path, self._file, self._verify = path, file, verify

    @classmethod
    def open(cls, path: StrPath, *, verify: bool = True) -> Self:
        """Open a file and read its header.

        Args:
            path: of the file.
            verify: whether to compare the checksum of each array that is read.

        Returns:
            The file, to be closed; or used in a `with`.

        Raises:
            FileError: it is no file of arrays, or damaged; FileMissingError: there is none.
        """
        where = file_name(path)
        file = opened(path)
        try:
            with system_errors(path, "a file to read"):
                header = _read_header(where, file)
            return cls(where, file, header, verify)
        except BaseException:
            file.close()
            raise

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """Read one array, and nothing else of the file.

        Args:
            name: of the array; one of `entries`.

        Returns:
            A new array in memory of its own, which begins at a multiple of 64: `jax.device_put`
            takes it as it is.

        Raises:
            FileError: the file is damaged.
        """
        entry = self.entries[name]
        data = _aligned(entry.stop - entry.start)
        with system_errors(self._path, "a file to read"):
            checksum = _read_into(self._path, self._file, entry.start, memoryview(data))
        if self._verify and entry.checksum is not None and checksum != entry.checksum:
            raise FileError(
                explain(
                    self._path,
                    "arrays that fit their checksums",
                    "one that was changed or damaged",
                    places=[describe(name)],
                )
            )
        return data.view(entry.dtype).reshape(entry.shape)

    def close(self) -> None:
        """Close the file; arrays that were read stay."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _aligned(size: int) -> np.ndarray[Any, Any]:
    data = np.empty(size + ALIGNMENT, np.uint8)
    begin = -data.ctypes.data % ALIGNMENT
    return data[begin : begin + size]


def _read_header(path: str, file: Any) -> FileHeader:
    size = file.seek(0, 2)
    file.seek(0)
    length = int.from_bytes(file.read(LENGTH), "little")
    if size < LENGTH or length > min(LONGEST, size - LENGTH):
        expected = f"a header of at most {min(LONGEST, max(size - LENGTH, 0)):,} bytes"
        raise FileError(explain(path, expected, f"{length:,}"))
    header = bytearray(LENGTH + length)
    _read_into(path, file, 0, memoryview(header))
    return parse_header(path, bytes(header), size)


def _read_into(path: str, file: Any, start: int, data: memoryview) -> int:
    """Fill `data` with what is in the file from `start` on; returns its checksum."""
    file.seek(start)
    checksum = 0
    while len(data):
        count = file.readinto(data[:_CHUNK])
        if not count:
            raise FileError(explain(path, f"{len(data):,} more bytes", "the end of the file"))
        checksum = zlib.crc32(data[:count], checksum)
        data = data[count:]
    return checksum


def _check_sources(path: str, sources: Iterable[ArraySource]) -> None:
    names: set[str] = set()
    for source in sources:
        if source.name in names or source.name == METADATA:
            got = f"{describe(source.name)} twice" if source.name in names else METADATA
            raise ArgumentError(explain(path, "each name once", got))
        names.add(source.name)
        _check_text(path, source.name)
        if not can_be_written(source.dtype):
            raise ArgumentError(
                explain(
                    path,
                    "arrays of numbers",
                    f"dtype {source.dtype}",
                    places=[describe(source.name)],
                )
            )


def _check_metadata(path: str, metadata: Mapping[str, str]) -> None:
    for key, value in metadata.items():
        _check_text(path, key)
        _check_text(path, value)
        if key.startswith(OWN):
            raise ArgumentError(explain(path, "keys of your own in the metadata", describe(key)))


def _check_text(path: str, text: Any) -> None:
    try:
        text.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise ArgumentError(explain(path, "a text", describe(text))) from error
