"""Keys for everything that a model is built of, from one key and without a tower of splits."""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from pytreemod.errors import ArgumentError, RngError, describe, explain
from pytreemod.state.streams import check_key, like, numbers_of
from pytreemod.tree.traces import current_trace
from pytreemod.typing import Keys, Tracer

BLOCK = 32
ROOT = np.uint32(0x6B657973)


def mixed(numbers: Any, counts: Any) -> Any:
    """The numbers of a key, for each count those of another key.

    **Law.** Two counts below 2**32 differ in each of the numbers, whatever the key.

    To each number of the key a hash of the count is added, bit by bit. A generator that counts is
    made for that: its streams are independent for any keys that differ, be they as simple as
    `1, 2, 3`. The hash is known before anything is traced, so that a key costs a program one
    operation, where to fold the count in costs it a whole block of random numbers, and the
    compiler the time for that.

    Args:
        numbers: uint32[words]
        counts: integers of any shape, of NumPy

    Returns:
        uint32[*shape, words]

    Source:
        Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; the hash is the last
        step of MurmurHash3 (Appleby 2011), which gives each 32-bit number another one.
    """
    words = np.arange(1, numbers.shape[-1] + 1, dtype=np.uint32) * np.uint32(0x9E3779B9)
    h = counts[..., None].astype(np.uint32) + words
    h = (h ^ (h >> 16)) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * np.uint32(0xC2B2AE35)
    aligned = numbers.reshape((1,) * counts.ndim + numbers.shape) if counts.ndim else numbers
    return aligned ^ (h ^ (h >> 16))


class InitKeys:
    """Hands out keys, one after the other; made by [`init_keys`][pytreemod.init_keys].

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> keys = pm.init_keys(jax.random.key(0))
        >>> next(keys).shape, keys.take(3).shape
        ((), (3,))
    """

    __slots__ = ("_count", "_key", "_numbers", "_ready", "_trace")

    def __init__(self, key: PRNGKeyArray):
        self._key, self._count, self._trace = key, 0, current_trace()
        # Hashed once, so that what is made of a key here, and what is made of one of these keys by
        # another `init_keys`, do not meet: to mix numbers in twice is the same in either order.
        self._numbers = numbers_of(jax.random.fold_in(key, ROOT))
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
        return self._made(mixed(self._numbers, np.arange(n) + self._advance(n)))

    def __repr__(self) -> str:
        return f"<init_keys: {self._count} handed out>"

    def _prepare(self, number: int) -> list[PRNGKeyArray]:
        """The next keys, last one first; the same keys, however many they are."""
        if isinstance(self._numbers, Tracer):
            return [self._made(mixed(self._numbers, np.asarray(number)))]
        # Outside a trace each operation costs a call; a block of keys costs hardly more than one.
        block: Any = self._made(mixed(self._numbers, np.arange(number, number + BLOCK)))
        return list(block)[::-1]

    def _made(self, numbers: Any) -> Any:
        return like(self._key, numbers)

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
    for a deep model that is a tower of small random programs. Here the key is hashed once, and what
    is handed out is that, mixed with a count in a single operation: in the order in which keys are
    asked for, however deep the model is nested.

    In a Module of your own, begin with `keys = pm.init_keys(key)`: that is right for a key, and for
    what the Module around it passes on.

    Args:
        key: one random key; or what another call of this gave, which is given back as it is.

    Returns:
        An iterator over keys. `next(keys)` is one, `keys.take(n)` an array of several.

    Raises:
        RngError: `key` is no random key.

    Source:
        Keys of a generator that counts may be any numbers that differ: Salmon et al. 2011,
        "Parallel random numbers: as easy as 1, 2, 3".

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
