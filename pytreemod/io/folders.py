"""A folder of files of arrays: one table over several files, in the layout of Hugging Face.

Owns: the choice of the files that are read and written in a folder. These are `model.safetensors`,
or the files that the *index*, `model.safetensors.index.json`, names. Its `weight_map` says which
file, a *shard*, has each array. An index is checked against the headers of all shards before it is
used, and no name in it leads out of the folder.

A folder is replaced in one step, too: by renaming its index, or its only file. A new shard never
takes the name of an existing file, and a shard is removed only after its index. A reader opens all
shards, and then checks that the index is still the same file. If anything is wrong, it looks again
under the lock that a writer takes to give files their names.

The next writer removes the files that a killed one left. The files of one writer share a token in
their names. The future index is locked until it is finished, so other processes know that its
writer is alive.
"""

from __future__ import annotations

import io
import json
import ntpath
import os
import re
import secrets
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeGuard, cast

import numpy as np

from pytreemod.errors import FileAccessError, FileError, FileMissingError, describe, warn
from pytreemod.io.access import (
    BESIDE,
    StrPath,
    checked_path,
    is_abandoned,
    locked_folder,
    name_beside,
    new_file,
    open_to_read,
    remove_file,
    shown,
    status_to_replace,
    synchronize_folder,
    system_errors,
)
from pytreemod.io.containers import (
    ArraySource,
    Container,
    FileDraft,
    array_sources,
    check_sources,
    write_all,
)
from pytreemod.io.headers import LONGEST, FileEntry, damaged, parse_json

SINGLE = "model.safetensors"
"""The only file of a folder that has just one."""
INDEX = f"{SINGLE}.index.json"
"""The file that maps arrays to files, if there are several."""


def open_arrays(path: StrPath, verify: bool = True) -> Container:
    """Open a file of arrays, or a folder of such files.

    Args:
        path: the path of the file or folder.
        verify: whether to compare the checksum of each array that is read.

    Returns:
        The file, or all files of the folder as one. Close it, or use it in a `with`.

    Raises:
        FileError: if a file or the index is damaged, or the two disagree; FileMissingError: if
            there is none.
    """
    path = checked_path(path, or_folder=True)
    if not os.path.basename(path):
        with system_errors(path):
            os.stat(path)
    if not os.path.isdir(path):
        return Container.open(path, verify)
    with suppress(FileError):
        return _open_folder(path, verify)
    # It is damaged, or was being replaced. Under the lock no other process replaces it.
    with locked_folder(path):
        return _open_folder(path, verify)


class Shards(Container):
    """Several open files of arrays, as one."""

    def __init__(self, shards: list[Container]) -> None:
        self.entries, self.metadata = {}, {}
        self._shards = shards
        self._shard_of: dict[str, Container] = {}
        end = 0
        for shard in shards:
            begin = end
            # The offset of an array, as if the files were joined: arrays are read in that order.
            for name, entry in shard.entries.items():
                start, stop = begin + entry.start, begin + entry.stop
                self.entries[name] = entry._replace(start=start, stop=stop)
                self._shard_of[name] = shard
                end = max(end, stop)
            # The first one has the metadata that applies to all of them.
            self.metadata = shard.metadata | self.metadata

    def read(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        """Read one array from the shard that has it."""
        return self._shard_of[name].read(name)

    def close(self) -> None:
        """Close all shards; arrays that were read remain valid."""
        for shard in self._shards:
            shard.close()


def _open_folder(folder: str, verify: bool) -> Container:
    """Open the files of a folder; raise an error if it is replaced meanwhile, too."""
    single, index = os.path.join(folder, SINGLE), os.path.join(folder, INDEX)
    try:
        opened = Container.open(single, verify)
    except FileMissingError:
        if os.path.islink(single):
            raise
    else:
        if os.path.lexists(index):
            hint = ["remove the one that you do not want:", f"os.remove({shown(index)!r})"]
            got = f"both; {SINGLE} is read"
            warn(UserWarning, shown(folder), f"either {SINGLE} or {INDEX}", got, hint=hint)
        return opened
    try:
        file = open_to_read(index)
    except FileMissingError:
        if os.path.islink(index):
            raise
        raise _nothing_in(folder) from None
    with file:
        opened = _open_shards(index, _read_index(index, file), verify)
        if _is_at(file, index):
            return opened
        opened.close()
        expected = "a folder that does not change while it is opened"
        raise FileError(shown(folder), expected, "a folder that was replaced")


def _is_at(file: io.FileIO, path: str) -> bool:
    """Whether a path still leads to an open file, whose inode is unique while it is open."""
    return _is_status_of(path, os.fstat(file.fileno()))


def _is_status_of(path: str, status: os.stat_result) -> bool:
    with suppress(OSError):
        return os.path.samestat(os.stat(path), status)
    return False


def _nothing_in(folder: str) -> FileMissingError:
    """Return the error for a folder without arrays; it lists the files of the folder."""
    with system_errors(folder):
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
    expected = f"{SINGLE}, or {INDEX} and the files that it names"
    return FileMissingError(shown(folder), expected, got + more, hint=hint)


_SHOWN = 8
"""How many names of a folder an error lists."""


# ---- the index


def _read_index(path: str, file: io.FileIO) -> dict[str, str]:
    """Return the shard of each array, by name; all shards are inside the folder."""
    size = os.fstat(file.fileno()).st_size
    if size > LONGEST:
        raise damaged(path, f"at most {LONGEST:,} bytes", f"{size:,}")
    with system_errors(path):
        text = file.read(size) or b""
    shard_of = parse_json(path, text, "an index in JSON").get("weight_map")
    if not _are_texts(shard_of):
        raise damaged(
            path, "a weight_map from names of arrays to names of files", describe(shard_of)
        )
    if not shard_of:
        raise damaged(path, "arrays in its weight_map", "none")
    outside = [shard for shard in dict.fromkeys(shard_of.values()) if not _is_inside(shard)]
    if outside:
        raise damaged(
            path,
            "names of files in its folder",
            "paths to elsewhere",
            [repr(shard) for shard in outside],
        )
    return shard_of


def _are_texts(value: Any) -> TypeGuard[dict[str, str]]:
    return type(value) is dict and {*map(type, cast("dict[Any, Any]", value).values())} <= {str}


def _is_inside(name: str) -> bool:
    """Whether a name leads into the folder, on every system; the file may be a link."""
    steps = name.split("/")
    is_plain = "\\" not in name and "\0" not in name and not ntpath.splitdrive(name)[0]
    return is_plain and not {"", ".", ".."} & {*steps}


def _open_shards(index: str, shard_of: dict[str, str], verify: bool) -> Shards:
    """Open all shards, after checking that they have the arrays that the index says."""
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
            expected, got = "the files that it names", f"{len(missing)} missing"
            raise FileMissingError(shown(index), expected, got, at=missing)
        _check_index(index, shard_of, {name: shard.entries for name, shard in shards.items()})
        stack.pop_all()
        return Shards([*shards.values()])


def _check_index(
    index: str, shard_of: dict[str, str], entries: dict[str, dict[str, FileEntry]]
) -> None:
    """Check that each array is in one shard, and that the index names that shard."""
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
        (twice, "arrays in two files"),
        (unnamed, "arrays that it does not name"),
        (lacking, "arrays that are in other files"),
    ):
        if wrong:
            expected = "each array in one file, and its name in the index"
            raise FileError(shown(index), expected, got, at=wrong)


# ---- writing


def write_folder(
    path: StrPath,
    arrays: Mapping[str, Any] | Iterable[ArraySource],
    metadata: Mapping[str, str],
    *,
    shared: Mapping[str, str],
    shard_bytes: float,
    durable: bool = False,
) -> None:
    """Write arrays into the files of a folder, which replace the existing ones in one step.

    Args:
        path: the path of the folder, which is created if missing; its parent is not.
        arrays: arrays by name; or sources that make them one at a time.
        metadata: strings by name, for the first file.
        shared: strings by name, for each of the other files.
        shard_bytes: the maximal bytes of arrays in a file; a larger array gets its own file.
        durable: whether to wait until the disk has everything.

    Raises:
        ArgumentError: if an argument cannot be written to a file.
        DonatedError: if the memory of an array was donated.
        FileAccessError: if the system refuses; the contents of the folder are unchanged.
    """
    folder = checked_path(path, or_folder=True)
    sources = array_sources(arrays)
    check_sources(folder, sources)
    parts = _divided(sources, shard_bytes)
    drafts = [FileDraft(folder, part, shared if i else metadata) for i, part in enumerate(parts)]
    with system_errors(folder, is_new=True), _made_folder(folder), ExitStack() as stack:
        with locked_folder(folder):
            olds = [status_to_replace(os.path.join(folder, name)) for name in (SINGLE, INDEX)]
            old = olds[0] or olds[1]
            _remove_leftovers(folder)
        new = _NewFolder(folder, secrets.token_hex(8), parts, durable)
        # Locked while it is open: this shows other processes that the shards are being written.
        index = stack.enter_context(new_file(new.beside(INDEX), 0, old=old, durable=False))
        for name, draft in zip(new.names, drafts, strict=True):
            with new_file(new.beside(name), draft.size, old=old, durable=durable) as file:
                draft.write(file)
            stack.callback(remove_file, new.beside(name))
        with locked_folder(folder):
            new.commit(index)


def _divided(sources: Sequence[ArraySource], shard_bytes: float) -> list[list[ArraySource]]:
    """Return the arrays of each shard, in order; without arrays, one empty shard."""
    parts: list[list[ArraySource]] = [[]]
    size = 0
    for source in sources:
        if parts[-1] and size + source.nbytes > shard_bytes:
            parts.append([])
            size = 0
        parts[-1].append(source)
        size += source.nbytes
    return parts


@contextmanager
def _made_folder(folder: str) -> Generator[None]:
    """Create a folder if it does not exist; remove it again if the block fails."""
    is_new = not os.path.isdir(folder)
    if is_new:
        try:
            os.mkdir(folder)
        except FileExistsError:
            # Another process may have created it.
            if not os.path.isdir(folder):
                expected, got = "the path of a folder", "one of a file"
                raise FileAccessError(shown(folder), expected, got) from None
    try:
        yield
    except BaseException:
        if is_new:
            with suppress(OSError):
                os.rmdir(folder)
        raise


class _NewFolder:
    """The files that are being written into a folder, and the replacement of the old ones."""

    def __init__(self, folder: str, token: str, parts: list[list[ArraySource]], durable: bool):
        count = len(parts)
        self._folder, self._token, self._durable = folder, token, durable
        self._parts = parts
        self.names = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
        if count == 1:
            self.names = [SINGLE]

    def path(self, name: str) -> str:
        """Return the path of a file of the folder."""
        return os.path.join(self._folder, name)

    def beside(self, name: str) -> str:
        """Return the path that a file has until all files are complete."""
        return name_beside(self.path(name), self._token)

    def commit(self, index: io.FileIO) -> None:
        """Make the new files those of the folder, and remove the old ones."""
        old = [name for name in _named_in(self.path(INDEX)) or () if _IS_SHARD.fullmatch(name)]
        names = list[str]()
        if self.names == [SINGLE]:
            os.replace(self.beside(SINGLE), self.path(SINGLE))
            self._synchronize()
            index.close()  # it served only as the lock
            remove_file(self.beside(INDEX))
        else:
            names = self._commit_shards(index, old)
            self._synchronize()
            remove_file(self.path(SINGLE))
        # A new file may have the name of an old one that was already gone.
        for name in {*old} - {*names}:
            remove_file(self.path(name))
        # Last: each of the two names the shards that a killed process would leave behind.
        remove_file(self.beside(_REPLACED) if len(self.names) > 1 else self.path(INDEX))

    def _commit_shards(self, index: io.FileIO, old: list[str]) -> list[str]:
        """Give the shards their names, and the folder its index; return the names."""
        status = os.fstat(index.fileno())
        try:
            if old:
                with new_file(self.beside(_REPLACED), 0, old=None, durable=self._durable) as file:
                    write_all(file, _as_index({f"{i}": name for i, name in enumerate(old)}))
            names = [self._named(name) for name in self.names]
            named = zip(names, self._parts, strict=True)
            shard_of = {source.name: name for name, part in named for source in part}
            size = sum(source.nbytes for part in self._parts for source in part)
            write_all(index, _as_index(shard_of, {"total_size": size}))
            if self._durable:
                os.fsync(index.fileno())
            self._synchronize()
            index.close()  # not every system renames a file that is open
            os.replace(self.beside(INDEX), self.path(INDEX))
            return names
        except BaseException:
            # An interrupt may come when the index already exists.
            if not _is_status_of(self.path(INDEX), status):
                self._remove_named()
            raise

    def _remove_named(self) -> None:
        remove_file(self.beside(_REPLACED))
        for name in self.names:
            remove_file(self.path(self._tagged(name)))
            with suppress(OSError):
                if os.path.samefile(self.beside(name), self.path(name)):
                    os.unlink(self.path(name))

    def _named(self, name: str) -> str:
        """Give a shard its name; another name if that file exists."""
        for final in (name, self._tagged(name)):
            try:
                # Until the index exists, it also has its old name, which identifies it after a
                # kill.
                os.link(self.beside(name), self.path(final))
                return final
            except FileExistsError:
                continue
            except OSError:  # not every disk supports files with two names
                break
        os.replace(self.beside(name), self.path(self._tagged(name)))
        return self._tagged(name)

    def _tagged(self, name: str) -> str:
        return name.replace("model-", f"model-{self._token}-", 1)

    def _synchronize(self) -> None:
        if self._durable:
            synchronize_folder(self._folder)


def _as_index(shard_of: Mapping[str, str], metadata: Mapping[str, int] | None = None) -> memoryview:
    content = {"metadata": metadata or {}, "weight_map": shard_of}
    return memoryview((json.dumps(content, indent=2, sort_keys=True) + "\n").encode())


_REPLACED = f"{INDEX}.replaced"
"""An index of shards that a new index has replaced, until they are removed."""
_IS_SHARD = re.compile(r"[^/]+-\d{5,}-of-\d{5,}\.safetensors")
"""The name of a shard; no other file is removed because an index names it."""
_OURS = re.compile(r"model-(?:([0-9a-f]{16})-)?\d{5,}-of-\d{5,}\.safetensors")


def _named_in(index: str) -> set[str] | None:
    """Return the shards that an index names; None if it is damaged."""
    try:
        with open_to_read(index) as file:
            return {*_read_index(index, file).values()}
    except FileMissingError:
        return set()
    except FileError:
        return None


def _remove_leftovers(folder: str) -> None:
    """Remove files that were being written when a process was killed."""
    with suppress(OSError):
        names = os.listdir(folder)
        beside = {name: found for name in names if (found := BESIDE.fullmatch(name)) is not None}
        alive = {
            found[2]
            for name, found in beside.items()
            if found[1] == INDEX and not _is_dead(folder, name)
        }
        left = [
            name
            for name, found in beside.items()
            if (found[1] in (SINGLE, INDEX, _REPLACED) or _OURS.fullmatch(found[1]))
            and found[2] not in alive
            and _is_dead(folder, name)
        ]
        named = _named_in(os.path.join(folder, INDEX))
        if named is not None:
            twins = [os.stat(os.path.join(folder, name)) for name in left]
            _remove_unnamed(folder, {*names} - named, {(x.st_dev, x.st_ino) for x in twins}, alive)
            for name in left:
                if beside[name][1] == _REPLACED:
                    for old in (_named_in(os.path.join(folder, name)) or set()) - named:
                        if _IS_SHARD.fullmatch(old):
                            remove_file(os.path.join(folder, old))
        for name in left:
            remove_file(os.path.join(folder, name))


def _remove_unnamed(
    folder: str, names: set[str], twins: set[tuple[int, int]], alive: set[str]
) -> None:
    """Remove shards that got their names before a process was killed, but after no index."""
    for name in names:
        found = _OURS.fullmatch(name)
        path = os.path.join(folder, name)
        if found is not None and found[1] not in alive:
            status = os.stat(path)
            is_tagged = found[1] is not None and _is_dead(folder, name)
            if is_tagged or (status.st_dev, status.st_ino) in twins:
                remove_file(path)


def _is_dead(folder: str, name: str) -> bool:
    try:
        return is_abandoned(os.path.join(folder, name))
    except OSError:
        return False
