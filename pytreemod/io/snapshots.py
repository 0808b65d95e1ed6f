"""What a tree was at one moment, whatever becomes of it.

Owns: [`snapshot`][pytreemod.io.snapshots.snapshot]. A training loop that goes on donates its arrays
to the next step, writes into arrays of NumPy, appends to lists, and uses States up; a snapshot has
its own of each. Arrays of JAX are copied where they are, on their devices, which is asked for and
not waited for: whoever takes a snapshot waits for no computation, and moves nothing to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from pytreemod.errors import FileError
from pytreemod.io.descriptions import check_has_values, describe_tree
from pytreemod.typing import jtu

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
