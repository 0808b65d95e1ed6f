"""Keys for everything that a model is built of, from one key and without a tower of splits."""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from pytreemod.errors import ArgumentError, RngError, describe, explain
from pytreemod.state.streams import check_key, fold_each
from pytreemod.tree.traces import current_trace
from pytreemod.typing import Keys, Tracer

BLOCK = 32


class InitKeys:
    """Hands out keys, one after the other; made by [`init_keys`][pytreemod.init_keys].

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> keys = pm.init_keys(jax.random.key(0))
        >>> next(keys).shape, keys.take(3).shape
        ((), (3,))
    """

    __slots__ = ("_count", "_key", "_ready", "_trace")

    def __init__(self, key: PRNGKeyArray):
        self._key, self._count, self._trace = key, 0, current_trace()
        self._ready: list[PRNGKeyArray] | None = None

    def __iter__(self) -> InitKeys:
        return self

    def __next__(self) -> PRNGKeyArray:
        """A key that was not handed out before."""
        number = self._advance(1)
        if not self._ready:
            self._ready = self._prepare(number)
        return self._ready.pop()

    def take(self, n: int) -> Keys:
        """Several keys as one array, to be mapped over.

        Args:
            n: how many.

        Returns:
            An array of the next `n` keys.

        Raises:
            ArgumentError: `n` is no count.
            RngError: the keys were made outside the transform in which they are used.
        """
        if type(n) is not int or n < 0:
            raise ArgumentError(explain("init_keys(...).take(n)", "a count", describe(n)))
        self._ready = None
        return self._folded(self._advance(n), n)

    def __repr__(self) -> str:
        return f"<init_keys: {self._count} handed out>"

    def _prepare(self, number: int) -> list[PRNGKeyArray]:
        """The next keys, last one first; the same keys, however many they are."""
        key = jax.random.fold_in(self._key, np.uint32(number))
        if isinstance(key, Tracer):
            return [key]
        # Outside a trace each operation costs a call; a block of keys costs hardly more than one.
        block: Any = self._folded(number + 1, BLOCK - 1)
        return [*list(block)[::-1], key]

    def _folded(self, start: int, n: int) -> Keys:
        return fold_each(self._key, np.arange(start, start + n, dtype=np.uint32))

    def _advance(self, n: int) -> int:
        # Inside another transform, all members of a map would get the same key, and all calls of
        # a compiled function.
        if self._trace != current_trace():
            raise RngError(
                explain(
                    "init_keys",
                    "to be used in the transform that it was made in",
                    "a use inside another one",
                    cure=[
                        "pass that one a key, and make keys from it there:",
                        "jax.vmap(lambda key: Model(key=pm.init_keys(key)))(keys.take(8))",
                    ],
                )
            )
        start = self._count
        self._count += n
        return start


KeyLike: TypeAlias = PRNGKeyArray | InitKeys
"""What a layer takes for its `key`."""


def init_keys(key: KeyLike) -> InitKeys:
    """Hand out keys for building a model, all from one key, without splitting it again and again.

    Every layer takes what this gives in the place of a key, and passes it on to its parts. With
    plain keys each layer splits the key that it gets for the layers in it, and these split again:
    for a deep model that is a tower of small random programs. Here a key is one `fold_in` of a
    count, in the order in which keys are asked for, however deep the model is nested. In a Module
    of your own, begin with `keys = pm.init_keys(key)`; that is right for a key, and for what the
    Module around it passes on.

    Args:
        key: one random key; or what another call of this gave, which is given back as it is.

    Returns:
        An iterator over keys. `next(keys)` is one, `keys.take(n)` an array of several.

    Raises:
        RngError: `key` is no random key.

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> from pytreemod import nn
        >>> class Block(pm.Module):
        ...     first: nn.Linear
        ...     second: nn.Linear
        ...     def __init__(self, size, *, key):
        ...         keys = pm.init_keys(key)
        ...         self.first = nn.Linear(size, 4 * size, key=keys)
        ...         self.second = nn.Linear(4 * size, size, key=keys)
        >>> keys = pm.init_keys(jax.random.key(0))
        >>> blocks = [Block(3, key=keys) for _ in range(12)]
        >>> bool((blocks[0].first.weight == blocks[1].first.weight).any())
        False
    """
    if isinstance(key, InitKeys):
        return key
    check_key("init_keys(key)", key)
    return InitKeys(key)
