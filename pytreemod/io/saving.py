"""`save`: a tree into a file or a folder, whole or not at all; and snapshots, to be saved later.

A training loop that goes on donates its arrays to the next step, writes into arrays of NumPy,
appends to lists, and uses States up; a [`snapshot`][pytreemod.io.saving.snapshot] has its own of
each. Arrays of JAX are copied on their devices, which is asked for and not waited for: nothing
moves to the host.
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
"""The key of the file's metadata under which the tree is described."""
USERS = "pytreemod.metadata"
"""That of what the user has to say."""
VERSION = 1
"""Of the description; a file with a higher one is refused by who does not know it."""


def save(
    path: StrPath,
    tree: PyTree,
    metadata: Json = None,
    *,
    rename: NameTable | None = None,
    shard_bytes: float | None = None,
    durable: bool = False,
) -> None:
    """Write a tree into a file: arrays by name, and what the tree is.

    The file is one of safetensors, which other tools read: each array has the name of its path,
    such as `layers.2.weight`. Beside the arrays it has, as JSON, the structure, the configuration
    (functions and classes by name), and checksums. It is written beside the old one, and takes its
    place in one step: whatever happens meanwhile, one of the two is there, whole.

    Saved are arrays of JAX and NumPy of any dtype, typed random keys, Python's numbers, Modules,
    [`State`][pytreemod.State], optimizer states, and containers. Of what else is configuration,
    such as a function of one's own, the file has the name, and [`load`][pytreemod.load] takes it
    from `like`; or from [`register_for_files`][pytreemod.register_for_files].

    **Laws.** `load(path, like) == tree` for every `like` of the structure of `tree`, after
    `save(path, tree)`. A file is written whole or not at all.

    Args:
        path: of the file, which by custom ends in `.safetensors`; with `shard_bytes`, of a folder.
        tree: any tree.
        metadata: what else the file should tell: None, texts, finite numbers, lists, dicts with
            texts as keys. [`read_metadata`][pytreemod.read_metadata] gives it back.
        rename: for a file that is for other tools: from names in the tree to names in the file, in
            the language of [`load`][pytreemod.load]; None for what is not to be written. Arrays of
            which nothing is said have their own names. The file does not describe the tree, and
            `metadata` is a dict of texts. [`inverted_names`][pytreemod.inverted_names] makes such a
            table of one for `load`.
        shard_bytes: how many bytes of arrays a file has at most, for a folder in the layout of
            Hugging Face: `model-00001-of-00008.safetensors` and so on, and
            `model.safetensors.index.json`; or `model.safetensors` alone, if one file is enough. A
            larger array gets a file of its own. The folder is made if it is not there. A model that
            is in it is replaced in one step; other files are not touched.
        durable: whether to wait until the disk has everything. If not, the system may take its
            time, as with any file: one of the two is there whole if the process is killed, but
            after a failure of power the new one may be damaged, which its checksums tell.

    Raises:
        FileError: two leaves have one name; or an array's values are not here, for it is traced,
            was donated, or other hosts alone have parts of it; or the system refuses
            (`FileAccessError`).
        ArgumentError: the metadata cannot be written as JSON, `shard_bytes` is no size, or names in
            `rename` do not fit the tree.
        UnfinishedError: the model lacks sizes.

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> model = pm.nn.Linear(3, 4, key=jax.random.key(0))
        >>> pm.save("model.safetensors", model, {"step": 100})
        >>> like = pm.nn.Linear(3, 4, key=jax.random.key(1))
        >>> pm.load("model.safetensors", like) == model
        True

        For other tools, with names that they have for it:

        >>> pm.save("theirs.safetensors", model, rename={"weight": "fc.weight", "bias": None})
        >>> [*pm.load("theirs.safetensors")]
        ['fc.weight']

        With what training needs to go on:

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
    # First: JAX's own walk would fail of a tree that is too deep without saying so.
    described = describe_tree(tree, where)
    refuse_unfinished(where, tree)
    arrays = dict[str, Any]()
    for name, leaf in described.leaves.items():
        # `rename` may say of any other leaf that it is not to be written.
        if rename is None or leaf_form(leaf):
            check_has_values(name, leaf, where)
        if leaf_form(leaf):
            arrays[name] = _stored(leaf)
    sources: Mapping[str, Any] | list[ArraySource] = arrays
    if rename is None:
        told = metadata_of(described, metadata, where)
    else:
        told = texts_for_tools(metadata, where)
        sources = renamed_sources(described, arrays, rename, where)
    if shard_bytes is None:
        write_container(path, sources, told, durable=durable)
        return
    # The tree is described once; what other tools ask for is in each file.
    shared = {key: text for key, text in told.items() if key not in (DESCRIPTION, USERS)}
    write_folder(path, sources, told, shared=shared, shard_bytes=shard_bytes, durable=durable)


def _check_shard_bytes(shard_bytes: Any, path: StrPath, where: str) -> None:
    """It is a size, or there is none and no folder."""
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
    """A leaf as an array that a file can hold."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return leaf


def metadata_of(described: Description, metadata: Json, where: str) -> dict[str, str]:
    """What a file says beside its arrays."""
    about = {
        "version": VERSION,
        "pytreemod": __version__,
        "jax": jax.__version__,
        "tree": described.tree,
    }
    with depth_errors(where):
        told = {DESCRIPTION: json.dumps(about, separators=(",", ":"))}
    if metadata is not None:
        told[USERS] = _as_json(metadata, where)
    return told


def _as_json(metadata: Json, where: str) -> str:
    try:
        text = json.dumps(metadata, allow_nan=False)
        if json.loads(text) == metadata:
            return text
    except (TypeError, ValueError, RecursionError):
        pass
    raise ArgumentError(
        f"{where}, metadata",
        "what JSON can hold: None, texts, finite numbers, lists, dicts with texts as keys",
        describe(metadata),
        hint=[
            "make it so, for instance; NaN and infinity are none of its numbers:",
            "{'name': str(name), 'loss': float(loss) if jnp.isfinite(loss) else str(loss)}",
        ],
    )


_T = TypeVar("_T")

_LARGE = 1 << 18
"""Bytes; on the CPU, it takes as long to copy so many as to ask for one more copy."""


def snapshot(tree: _T, where: str, *, copy: bool = True) -> _T:
    """Take a snapshot of a tree.

    Args:
        tree: any tree.
        where: the call, for errors.
        copy: whether arrays of JAX are copied, too, for they may be donated; it takes as much
            memory on their devices as they do.

    Returns:
        A tree of the same values, which shares nothing with the first that can change.

    Raises:
        FileError: an array has no values here: it is traced, was donated, or is in parts
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
        # Inside of a trace, copies are traced even where the arrays are not.
        _check_all_have_values(taken, treedef.unflatten(taken), where)
    return treedef.unflatten(taken)


def _own(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        # It is whole on each host: to copy this one takes no computation of all processes.
        return leaf.addressable_data(0)
    return np.array(cast("Any", leaf), subok=True) if isinstance(leaf, np.ndarray) else leaf


def _check_all_have_values(leaves: Sequence[Any], tree: Any, where: str) -> None:
    try:
        for leaf in leaves:
            check_has_values("", leaf, where)
    except FileError:
        # Names take time, and are only for who has to read them.
        for name, leaf in describe_tree(tree, where).leaves.items():
            check_has_values(name, leaf, where)
        raise


def _groups(leaves: Sequence[Any]) -> list[list[int]]:
    """Where the arrays are that can be copied together: those on the same devices."""
    groups: dict[Any, list[int]] = {}
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, jax.Array):
            sharding = leaf.sharding
            is_large = leaf.nbytes >= _LARGE
            key = (getattr(sharding, "mesh", sharding), sharding.memory_kind, is_large)
            groups.setdefault(key, []).append(place)
    return [*groups.values()]


def _copies(arrays: list[jax.Array]) -> Any:
    """Copies of arrays on the same devices, which may come later."""
    # What a computation is checked for is about the loop's, and to check it would be to wait.
    with jax.debug_nans(False), jax.debug_infs(False):
        if _can_be_copied_at_once(arrays[0]):
            return cast("Any", _copied_at_once)(arrays)
        shardings = [x.sharding for x in arrays]
        return cast("Any", jax.device_put)(arrays, shardings, may_alias=False)


@jax.jit
def _copied_at_once(arrays: list[jax.Array]) -> list[jax.Array]:
    """One computation for all of them: it is asked for ten times as fast as one for each."""
    return [jnp.copy(x) for x in arrays]


def _can_be_copied_at_once(array: jax.Array) -> bool:
    """Whether a computation leaves an array where it is, and need not be waited for.

    Under `jax.set_mesh` it would take arrays to that mesh, and those in the memory of the host to
    the device. On the CPU, who asks for a computation of copies alone has to do it.
    """
    device: Any = next(iter(cast("Any", array.sharding).device_set))
    is_usual = array.sharding.memory_kind in (None, device.default_memory().kind)
    is_waited_for = device.platform == "cpu" and array.nbytes >= _LARGE
    return is_usual and not is_waited_for and jax.sharding.get_abstract_mesh().empty
