"""`save`: write a tree into a file or a folder, atomically; and snapshots, to be saved later.

A training loop changes its values: it donates arrays to the next step, writes into NumPy arrays,
appends to lists, and uses States up. A [`snapshot`][pytreemod.io.saving.snapshot] has its own copy
of each. Arrays of JAX are copied on their devices, asynchronously: nothing moves to the host.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import ArgumentError, FileAccessError, FileError, describe
from pytreemod.io.access import StrPath, depth_errors, shown, shown_path
from pytreemod.io.configuration import Json
from pytreemod.io.containers import ArraySource, write_container
from pytreemod.io.descriptions import Description, check_has_values, describe_tree, leaf_form
from pytreemod.io.exporting import renamed_sources, texts_for_tools
from pytreemod.io.folders import write_folder
from pytreemod.io.renaming import NameTable
from pytreemod.module.unfinished import refuse_unfinished
from pytreemod.typing import PyTree, jtu
from pytreemod.version import __version__

DESCRIPTION = "pytreemod.tree"
"""The key of the description of the tree, in the file's metadata."""
USERS = "pytreemod.metadata"
"""The key of the user's metadata."""
VERSION = 1
"""The version of the description; a reader refuses a file with a higher one."""


def save(
    path: StrPath,
    tree: PyTree,
    metadata: Json = None,
    *,
    rename: NameTable | None = None,
    shard_bytes: float | None = None,
    durable: bool = False,
) -> None:
    """Save a tree to a file: its arrays by name, and a description of the tree.

    The file is a safetensors file, which other tools can read. The name of each array is its path
    with dots, such as `layers.2.weight`. Beside the arrays, the file has the structure and the
    configuration as JSON (functions and classes by name), and checksums. It is written next to the
    old file, and replaces it in one step. Whatever happens meanwhile, either the old or the new
    file is intact.

    You can save JAX and NumPy arrays of any dtype, typed random keys, Python's numbers, Modules,
    [`State`][pytreemod.State], optimizer states, and containers. For other configuration, such as
    your own functions, the file has only the name. Then [`load`][pytreemod.load] takes the value
    from `like`.

    **Laws.** `load(path, like) == tree` for every `like` of the structure of `tree`, after
    `save(path, tree)`. A file is written completely or not at all.

    Args:
        path: the path of the file, by convention with the ending `.safetensors`; with
            `shard_bytes`, the path of a folder.
        tree: any tree.
        metadata: additional data for the file: None, strings, finite numbers, lists, dicts with
            string keys. [`read_metadata`][pytreemod.read_metadata] returns it.
        rename: a dict from names in the tree to names in the file, for a file for other tools. The
            patterns are those of [`load`][pytreemod.load]; None skips an array. Arrays that match
            no pattern have their own names. The file does not describe the tree, and `metadata` is
            a dict of strings.
        shard_bytes: the maximal bytes of arrays in a file, for a folder in the layout of Hugging
            Face: `model-00001-of-00008.safetensors` and so on, and
            `model.safetensors.index.json`; or only `model.safetensors` if one file is enough. A
            larger array gets its own file. The folder is created if missing. A model in the folder
            is replaced in one step; other files are not touched.
        durable: whether to wait until the disk has everything. If not, the system writes later, as
            for any file. If the process is killed, one of the two files is still intact. After a
            power cut the new one may be damaged, which its checksums detect.

    Raises:
        FileError: if two leaves have one name; if an array is traced, was donated, or has parts
            only on other hosts; or if the system refuses (`FileAccessError`).
        ArgumentError: if the metadata cannot be written as JSON, `shard_bytes` is no size, or names
            in `rename` do not fit the tree.
        UnfinishedError: if the model lacks sizes.

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> model = pm.nn.Linear(3, 4, key=jax.random.key(0))
        >>> pm.save("model.safetensors", model, {"step": 100})
        >>> like = pm.nn.Linear(3, 4, key=jax.random.key(1))
        >>> pm.load("model.safetensors", like) == model
        True

        For other tools, with their names:

        >>> pm.save("theirs.safetensors", model, rename={"weight": "fc.weight", "bias": None})
        >>> [*pm.load("theirs.safetensors")]
        ['fc.weight']

        With the optimizer state, to resume training:

        >>> import optax
        >>> opt_state = optax.adam(1e-3).init(pm.trainable(model))
        >>> pm.save("run.safetensors", {"model": model, "opt_state": opt_state})

        A folder of files of 5 GB at most:

        >>> pm.save("model", model, shard_bytes=5e9)
        >>> pm.load("model", like) == model
        True
    """
    where = f"save({shown_path(path)})"
    _check_shard_bytes(shard_bytes, path, where)
    # First: JAX's own walk would fail without explanation for a tree that is too deep.
    described = describe_tree(tree, where)
    refuse_unfinished(where, tree)
    arrays = dict[str, Any]()
    for name, leaf in described.leaves.items():
        # `rename` may exclude any other leaf.
        if rename is None or leaf_form(leaf):
            check_has_values(name, leaf, where)
        if leaf_form(leaf):
            arrays[name] = _stored(leaf)
    sources: Mapping[str, Any] | list[ArraySource] = arrays
    if rename is None:
        texts = metadata_of(described, metadata, where)
    else:
        texts = texts_for_tools(metadata, where)
        sources = renamed_sources(described, arrays, rename, where)
    if shard_bytes is None:
        write_container(path, sources, texts, durable=durable)
        return
    # The tree is described once; metadata for other tools is in each file.
    shared = {key: text for key, text in texts.items() if key not in (DESCRIPTION, USERS)}
    write_folder(path, sources, texts, shared=shared, shard_bytes=shard_bytes, durable=durable)


def _check_shard_bytes(shard_bytes: Any, path: StrPath, where: str) -> None:
    """Check that it is a size, or that there is neither a size nor a folder."""
    hint = ["for a folder of files of 5 GB at most:", "pm.save(folder, tree, shard_bytes=5e9)"]
    if shard_bytes is None:
        if os.path.isdir(path):
            expected = "the path of a file"
            raise FileAccessError(shown(os.fspath(path)), expected, "a folder", hint=hint)
        return
    is_number = isinstance(shard_bytes, int | float | np.number) and shard_bytes is not True
    if not is_number or not cast("Any", shard_bytes) >= 1:
        expected = "shard_bytes, a number of bytes, 1 or more"
        raise ArgumentError(where, expected, describe(shard_bytes), hint=hint)


def _stored(leaf: Any) -> Any:
    """Return a leaf as an array that a file can store."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return leaf


def metadata_of(described: Description, metadata: Json, where: str) -> dict[str, str]:
    """Return the metadata of a file."""
    about = {
        "version": VERSION,
        "pytreemod": __version__,
        "jax": jax.__version__,
        "tree": described.tree,
    }
    with depth_errors(where):
        texts = {DESCRIPTION: json.dumps(about, separators=(",", ":"))}
    if metadata is not None:
        texts[USERS] = _as_json(metadata, where)
    return texts


def _as_json(metadata: Json, where: str) -> str:
    try:
        text = json.dumps(metadata, allow_nan=False)
        if json.loads(text) == metadata:
            return text
    except (TypeError, ValueError, RecursionError):
        pass
    raise ArgumentError(
        f"{where}, metadata",
        "JSON values: None, strings, finite numbers, lists, dicts with string keys",
        describe(metadata),
        hint=[
            "convert it, for example; JSON has neither NaN nor infinity:",
            "{'name': str(name), 'loss': float(loss) if jnp.isfinite(loss) else str(loss)}",
        ],
    )


_T = TypeVar("_T")

_LARGE = 1 << 18
"""Bytes; on the CPU, copying this many takes as long as dispatching one more copy."""


def snapshot(tree: _T, where: str, *, copy: bool = True) -> _T:
    """Take a snapshot of a tree.

    Args:
        tree: any tree.
        where: the call, for errors.
        copy: whether to copy arrays of JAX, too, because they may be donated; this needs as much
            memory on their devices as the arrays.

    Returns:
        A tree of the same values, which shares nothing mutable with the original.

    Raises:
        FileError: if an array has no values on this host: it is traced, was donated, or has parts
            on other hosts.

    Examples:
        >>> step = jax.jit(lambda x: x + 1, donate_argnums=0)
        >>> x = jnp.zeros(3)
        >>> taken = snapshot({"x": x}, "snapshot")
        >>> x = step(x)
        >>> taken
        {'x': Array([0., 0., 0.], dtype=float32)}
    """
    leaves, treedef = jtu.tree_flatten(tree)
    _check_all_have_values(leaves, tree, where)
    taken: list[Any] = [_own(leaf) for leaf in leaves]
    if copy:
        for places in _groups(taken):
            copies = _copies([taken[place] for place in places])
            for place, copied in zip(places, copies, strict=True):
                taken[place] = copied
        # Inside of a trace, copies are traced even if the arrays are not.
        _check_all_have_values(taken, treedef.unflatten(taken), where)
    return treedef.unflatten(taken)


def _own(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        # Each host has all of it: copying the local part needs no computation of all processes.
        return leaf.addressable_data(0)
    return np.array(cast("Any", leaf), subok=True) if isinstance(leaf, np.ndarray) else leaf


def _check_all_have_values(leaves: Sequence[Any], tree: Any, where: str) -> None:
    try:
        for leaf in leaves:
            check_has_values("", leaf, where)
    except FileError:
        # Names take time, so they are computed only for an error.
        for name, leaf in describe_tree(tree, where).leaves.items():
            check_has_values(name, leaf, where)
        raise


def _groups(leaves: Sequence[Any]) -> list[list[int]]:
    """Return the indices of the arrays that can be copied together: those on the same devices."""
    groups: dict[Any, list[int]] = {}
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, jax.Array):
            sharding = leaf.sharding
            is_large = leaf.nbytes >= _LARGE
            key = (getattr(sharding, "mesh", sharding), sharding.memory_kind, is_large)
            groups.setdefault(key, []).append(place)
    return [*groups.values()]


def _copies(arrays: list[jax.Array]) -> Any:
    """Copy arrays on the same devices, asynchronously."""
    # The checks for NaN are meant for the computations of the loop, and would wait for the copies.
    with jax.debug_nans(False), jax.debug_infs(False):
        if _can_be_copied_at_once(arrays[0]):
            return cast("Any", _copied_at_once)(arrays)
        shardings = [x.sharding for x in arrays]
        return cast("Any", jax.device_put)(arrays, shardings, may_alias=False)


@jax.jit
def _copied_at_once(arrays: list[jax.Array]) -> list[jax.Array]:
    """Copy all of them in one computation: dispatching it is ten times faster than one for each."""
    return [jnp.copy(x) for x in arrays]


def _can_be_copied_at_once(array: jax.Array) -> bool:
    """Whether a computation copies an array without moving it, and asynchronously.

    Under `jax.set_mesh` it would move arrays to that mesh, and arrays in host memory to the device.
    On the CPU, a computation of only copies runs in the calling thread.
    """
    device: Any = next(iter(cast("Any", array.sharding).device_set))
    is_usual = array.sharding.memory_kind in (None, device.default_memory().kind)
    is_waited_for = device.platform == "cpu" and array.nbytes >= _LARGE
    return is_usual and not is_waited_for and jax.sharding.get_abstract_mesh().empty
