"""All keys for building a model, from one key, without nested splits."""

from __future__ import annotations

from threading import Lock
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import PRNGKeyArray

from pytreemod.errors import ArgumentError, describe
from pytreemod.state.streams import check_seed, like, numbers_of
from pytreemod.tree.traces import current_trace
from pytreemod.typing import Tracer

BLOCK = 32
ROOT = np.uint32(0x6B657973)


def hashes(counts: np.ndarray, words: int) -> np.ndarray:
    """Return the numbers to mix into a key for each count, so that each count gets its own key.

    **Law.** For two counts below 2**32, each of the numbers differs.

    A counter-based generator identifies streams by their keys: they are independent for any keys
    that differ, even keys as simple as `1, 2, 3`. So a key that is hashed once, and then has these
    numbers added bit by bit, is as good as one into which each count was folded. But the numbers
    are known before anything is traced. A key costs a program one operation; a `fold_in` would cost
    a block of random numbers, and the time to compile it.

    Args:
        counts: integers[n]
        words: the number of integers in a key

    Returns:
        uint32[n, words]

    Source:
        Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; the hash is the last
        step of MurmurHash3 (Appleby 2011), which maps each 32-bit number to a different one.
    """
    places = np.arange(1, words + 1, dtype=np.uint32) * np.uint32(0x9E3779B9)
    h = counts[:, None].astype(np.uint32) + places
    h = (h ^ (h >> 16)) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * np.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


class InitKeys:
    """An iterator over new keys; made by [`init_keys`][pytreemod.init_keys].

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> keys = pm.init_keys(jax.random.key(0))
        >>> next(keys).shape, keys.take(3).shape
        ((), (3,))
    """

    __slots__ = ("_count", "_is_traced", "_key", "_lock", "_numbers", "_ready", "_trace")

    def __init__(self, key: PRNGKeyArray, start: int = 0):
        self._key, self._count, self._trace = key, start, current_trace()
        # Hashed once, so that keys made from a key here differ from keys that another `init_keys`
        # makes from one of these keys: mixing numbers in twice gives the same in either order.
        self._numbers = numbers_of(jax.random.fold_in(key, ROOT))
        self._is_traced = isinstance(self._numbers, Tracer)
        self._ready: list[Any] = []
        # Two threads could count the same number, or take a block of keys twice.
        self._lock = Lock()

    def __iter__(self) -> InitKeys:
        return self

    def __next__(self) -> PRNGKeyArray:
        """Return a new key."""
        with self._lock:
            number = self._advance(1)
            if not self._ready:
                self._ready = self._prepare(number)
            key = self._ready.pop()
        return self._mixed(self._numbers, key) if self._is_traced else key

    def take(self, n: int) -> PRNGKeyArray:
        """Return several keys as one array, to be mapped over.

        Args:
            n: how many.

        Returns:
            An array of the next `n` keys.

        Raises:
            ArgumentError: if `n` is not a count.
            ArgumentError: if the keys were made outside the transform in which they are used.
        """
        if type(n) is not int or n < 0:
            raise ArgumentError("init_keys(...).take(n)", "a count", describe(n))
        with self._lock:
            number = self._advance(n)
            self._ready = []
        return self._several(self._hashes(number, n))

    def __repr__(self) -> str:
        return f"<init_keys: {self._count} handed out>"

    def taken(self) -> int:
        """Return the number of keys returned so far."""
        return self._count

    def __jax_array__(self) -> Any:
        return self.ndim

    @property
    def ndim(self) -> int:
        """JAX reads it where it needs a key: raise an error that says how to get one."""
        raise ArgumentError(
            "init_keys",
            "one key",
            "the object that returns keys",
            hint=["take the next key:", "jax.random.normal(next(keys), shape)"],
        )

    def __reduce__(self) -> Any:
        raise ArgumentError(
            "init_keys",
            "no copy",
            "a copy, which would return the same keys",
            hint=["make a second source from a new key:", "pm.init_keys(next(keys))"],
        )

    def _prepare(self, number: int) -> list[Any]:
        """Return the next keys, last one first; in a trace, the hashes that they are made with."""
        # An unused key must not become an operation of a program. Outside of a trace, where each
        # operation costs a call, a block of keys costs hardly more than one.
        block = self._hashes(number, BLOCK)
        return list(block if self._is_traced else self._several(block))[::-1]

    def _hashes(self, start: int, n: int) -> np.ndarray:
        return hashes(np.arange(start, start + n), self._numbers.shape[-1])

    def _several(self, block: np.ndarray) -> PRNGKeyArray:
        return self._mixed(jnp.broadcast_to(self._numbers, block.shape), block)

    def _mixed(self, numbers: Any, hashed: np.ndarray) -> Any:
        return like(self._key, lax.bitwise_xor(numbers, hashed))

    def _advance(self, n: int) -> int:
        # Inside another transform, all members of a map would get the same key, and so would all
        # calls of a compiled function.
        if self._trace != current_trace():
            raise ArgumentError(
                "init_keys",
                "use in the transform that created it",
                "a use inside another transform",
                hint=[
                    "pass a key to that transform, and create the source there:",
                    "jax.vmap(lambda key: Model(key=pm.init_keys(key)))(keys.take(8))",
                ],
            )
        start = self._count
        self._count += n
        return start


KeyLike: TypeAlias = PRNGKeyArray | InitKeys
"""The type of a layer's `key`."""


def init_keys(key: KeyLike) -> InitKeys:
    """Return an iterator over keys for building a model, all from one key.

    Every layer accepts it as its key, and passes it on to its parts. With
    plain keys, each layer splits its key for the layers in it, and these split theirs again:
    for a deep model that is a tower of small random programs. Here the key is hashed once, and each
    new key mixes the hash with a count in a single operation. The keys depend on the order in which
    they are requested, and not on the depth of the model.

    In your own Modules, begin with `keys = pm.init_keys(key)`: that works for a key, and for
    the iterator that a surrounding Module passes on.

    Args:
        key: one random key; or the result of another call, which is returned unchanged.

    Returns:
        An iterator over keys. `next(keys)` is one, `keys.take(n)` an array of several.

    Raises:
        ArgumentError: if `key` is not a random key.

    Source:
        A counter-based generator needs keys that differ, and nothing more: Salmon et al. 2011,
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
    check_seed("init_keys(key)", key)
    return InitKeys(key)
