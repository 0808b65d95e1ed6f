"""A folder of files of arrays: one table over several files, as Hugging Face lays it out.

Owns: which files of a folder are read. It is `model.safetensors`, or the files that
`model.safetensors.index.json` names: its `weight_map` says for each array in which file, a *shard*,
it is. Nothing of an index is believed before it was checked, against the headers of all shards, and
no name in it leads out of the folder.

A folder may be replaced while it is read: what an index names is there until another index has
taken its place. So all shards are opened at once, and then the index must still be the same file.
"""

from __future__ import annotations

import io
import ntpath
import os
from contextlib import ExitStack
from typing import Any, TypeGuard, cast

import numpy as np

from pytreemod.errors import FileError, FileMissingError, describe, warn
from pytreemod.io.access import StrPath, checked_path, open_to_read, shown, system_errors
from pytreemod.io.containers import Container
from pytreemod.io.headers import LONGEST, FileEntry, damaged, parse_json

SINGLE = "model.safetensors"
"""The file of a folder that has one only."""
INDEX = f"{SINGLE}.index.json"
"""What says which array is in which file, where there are several."""


def open_arrays(path: StrPath, verify: bool = True) -> Container:
    """Open a file of arrays, or a folder of such files.

    Args:
        path: of the file or folder.
        verify: whether to compare the checksum of each array that is read.

    Returns:
        The file, or all files of the folder as if they were one; to be closed, or used in a `with`.

    Raises:
        FileError: a file is damaged, or the index is, or the two do not agree; FileMissingError:
            there is none.
    """
    path = checked_path(path, or_folder=True)
    if not os.path.basename(path):
        with system_errors(path, "a folder to read"):
            os.stat(path)
    if not os.path.isdir(path):
        return Container.open(path, verify)
    for _ in range(_ATTEMPTS):
        opened = _open_folder(path, verify)
        if opened is not None:
            return opened
    raise FileError(shown(path), "a folder that is there while it is opened", "one that changes")


_ATTEMPTS = 100
"""How often a folder may be replaced while it is being opened."""


class Shards(Container):
    """Several files of arrays as if they were one; all of them are open."""

    def __init__(self, shards: list[Container]) -> None:
        self.entries, self.metadata = {}, {}
        self._shards = shards
        self._shard_of: dict[str, Container] = {}
        end = 0
        for shard in shards:
            begin = end
            # Where an array is, as if the files came one after the other: it is read in that order.
            for name, entry in shard.entries.items():
                start, stop = begin + entry.start, begin + entry.stop
                self.entries[name] = entry._replace(start=start, stop=stop)
                self._shard_of[name] = shard
                end = max(end, stop)
            # The first one has what is said of all of them.
            self.metadata = shard.metadata | self.metadata

    def read(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        """Read one array, from the shard that has it."""
        return self._shard_of[name].read(name)

    def close(self) -> None:
        """Close all shards; arrays that were read stay."""
        for shard in self._shards:
            shard.close()


def _open_folder(folder: str, verify: bool) -> Container | None:
    """What is in a folder; None if it was replaced meanwhile."""
    single, index = os.path.join(folder, SINGLE), os.path.join(folder, INDEX)
    try:
        opened = Container.open(single, verify)
    except FileMissingError:
        if os.path.islink(single):
            raise
    else:
        if os.path.lexists(index):
            hint = ["remove the one that is not meant:", f"os.remove({shown(index)!r})"]
            got = f"both; {SINGLE} is read"
            warn(UserWarning, shown(folder), f"either {SINGLE} or {INDEX}", got, hint=hint)
        return opened
    try:
        file = open_to_read(index)
    except FileMissingError:
        if os.path.islink(index):
            raise
        if os.path.lexists(single):
            return None
        raise _nothing_in(folder) from None
    with file:
        try:
            opened = _open_shards(index, _read_index(index, file), verify)
        except FileError:
            # An index that is gone is right about nothing.
            if _is_at(file, index):
                raise
            return None
        if _is_at(file, index):
            return opened
        opened.close()
        return None


def _is_at(file: io.FileIO, path: str) -> bool:
    """Whether a path still leads to an open file: no other has its number as long as it is open."""
    try:
        now = os.stat(path)
    except OSError:
        return False
    then = os.fstat(file.fileno())
    return os.path.samestat(then, now) and then.st_mtime_ns == now.st_mtime_ns


def _nothing_in(folder: str) -> FileMissingError:
    """The error for a folder without arrays; it says what is there instead."""
    with system_errors(folder, "a folder to read"):
        names = sorted(os.listdir(folder))
    others = [name for name in names if name.endswith(".safetensors")]
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    hint = list[str]()
    if others:
        path = os.path.join(folder, others[0])
        hint = ["give the path of the file:", f"pm.load({shown(path)!r}, like)"]
    elif pickles:
        path = os.path.join(folder, pickles[0])
        loaded = f"torch.load({shown(path)!r}, weights_only=True)"
        hint = ["a state dict of PyTorch's:", f"pm.from_torch(model, {loaded})"]
    got = ", ".join(map(shown, names[:_SHOWN])) or "an empty folder"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    expected = f"{SINGLE}, or {INDEX} and what it names"
    return FileMissingError(shown(folder), expected, got + more, hint=hint)


_SHOWN = 8
"""How many names of a folder an error lists."""


# ---- the index


def _read_index(path: str, file: io.FileIO) -> dict[str, str]:
    """The shard of each array, by name; each shard's name leads into the folder."""
    size = os.fstat(file.fileno()).st_size
    if size > LONGEST:
        raise damaged(path, f"at most {LONGEST:,} bytes", f"{size:,}")
    with system_errors(path, "a file to read"):
        text = file.read(size) or b""
    shard_of = parse_json(path, text, "an index in JSON").get("weight_map")
    if not _are_texts(shard_of):
        raise damaged(
            path, "the names of arrays with those of files as weight_map", describe(shard_of)
        )
    if not shard_of:
        raise damaged(path, "arrays in its weight_map", "none")
    outside = [shard for shard in dict.fromkeys(shard_of.values()) if not _is_inside(shard)]
    if outside:
        raise damaged(
            path, "names of files in its folder", "others", [repr(shard) for shard in outside]
        )
    return shard_of


def _are_texts(value: Any) -> TypeGuard[dict[str, str]]:
    return type(value) is dict and {*map(type, cast("dict[Any, Any]", value).values())} <= {str}


def _is_inside(name: str) -> bool:
    """Whether a name leads into the folder, on every system; what is there may be a link."""
    steps = name.split("/")
    is_plain = "\\" not in name and "\0" not in name and not ntpath.splitdrive(name)[0]
    return is_plain and not {"", ".", ".."} & {*steps}


def _open_shards(index: str, shard_of: dict[str, str], verify: bool) -> Shards:
    """All shards, which have what the index says."""
    folder = os.path.dirname(index)
    names = sorted({*shard_of.values()})
    missing = list[str]()
    with ExitStack() as stack:
        shards = dict[str, Container]()
        for name in names:
            try:
                shard = Container.open(os.path.join(folder, name), verify)
            except FileMissingError:
                missing.append(shown(name))
                continue
            shards[name] = stack.enter_context(shard)
        if missing:
            expected, got = "the files that it names", f"{len(missing)} that are not there"
            raise FileMissingError(shown(index), expected, got, places=missing)
        _check_index(index, shard_of, {name: shard.entries for name, shard in shards.items()})
        stack.pop_all()
        return Shards([*shards.values()])


def _check_index(
    index: str, shard_of: dict[str, str], entries: dict[str, dict[str, FileEntry]]
) -> None:
    """Each array is in one shard, and the index says in which."""
    found = dict[str, str]()
    twice, unnamed = list[str](), list[str]()
    for shard, names in entries.items():
        for name in names:
            if name in found:
                twice.append(f"{shown(name)}: in {shown(found[name])} and in {shown(shard)}")
            elif name not in shard_of:
                unnamed.append(f"{shown(name)}: in {shown(shard)}")
            found[name] = shard
    lacking = [
        f"{shown(name)}: not in {shown(shard)}"
        for name, shard in shard_of.items()
        if name not in entries[shard]
    ]
    for wrong, got in (
        (twice, "some that are in two"),
        (unnamed, "some that it does not name"),
        (lacking, "some that are not where it says"),
    ):
        if wrong:
            expected = "each array in one file, and its name in the index"
            raise FileError(shown(index), expected, got, places=wrong)
