"""`save`: a tree into one file, whole or not at all."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp

from pytreemod.errors import ArgumentError, describe
from pytreemod.io.access import StrPath, depth_errors, shown_path
from pytreemod.io.configuration import Json
from pytreemod.io.containers import write_container
from pytreemod.io.descriptions import Description, check_has_values, describe_tree, leaf_form
from pytreemod.module.unfinished import refuse_unfinished
from pytreemod.typing import PyTree
from pytreemod.version import __version__

DESCRIPTION = "pytreemod.tree"
"""The key of the file's metadata under which the tree is described."""
USERS = "pytreemod.metadata"
"""That of what the user has to say."""
VERSION = 1
"""Of the description; a file with a higher one is refused by who does not know it."""


def save(path: StrPath, tree: PyTree, metadata: Json = None, *, durable: bool = False) -> None:
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
        path: of the file; by custom it ends in `.safetensors`.
        tree: any tree.
        metadata: what else the file should tell: None, texts, finite numbers, lists, dicts with
            texts as keys. [`read_metadata`][pytreemod.read_metadata] gives it back.
        durable: whether to wait until the disk has everything. If not, the system may take its
            time, as with any file: one of the two is there whole if the process is killed, but
            after a failure of power the new one may be damaged, which its checksums tell.

    Raises:
        FileError: two leaves have one name; or an array's values are not here, for it is traced,
            was donated, or other hosts alone have parts of it; or the system refuses
            (`FileAccessError`).
        ArgumentError: the metadata cannot be written as JSON.
        UnfinishedError: the model lacks sizes.

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> model = pm.nn.Linear(3, 4, key=jax.random.key(0))
        >>> pm.save("model.safetensors", model, {"step": 100})
        >>> like = pm.nn.Linear(3, 4, key=jax.random.key(1))
        >>> pm.load("model.safetensors", like) == model
        True

        With what training needs to go on:

        >>> import optax
        >>> opt_state = optax.adam(1e-3).init(pm.trainable(model))
        >>> pm.save("run.safetensors", {"model": model, "opt_state": opt_state})
    """
    where = f"save({shown_path(path)})"
    refuse_unfinished(where, tree)
    described = describe_tree(tree, where)
    arrays = dict[str, Any]()
    for name, leaf in described.leaves.items():
        check_has_values(name, leaf, where)
        if leaf_form(leaf):
            arrays[name] = _stored(leaf)
    write_container(path, arrays, metadata_of(described, metadata, where), durable=durable)


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
