"""All keys for building a model, from one key: one split for every 32 of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import jax
from jaxtyping import Array, PRNGKeyArray

from pytreemod.errors import StateError
from pytreemod.tree.traces import current_trace
from pytreemod.typing import Tracer

BLOCK = 32


class InitKeys:
    """An iterator over new keys; made by [`init_keys`][pytreemod.init_keys].

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> keys = pm.init_keys(jax.random.key(0))
        >>> next(keys).shape, keys.take(3).shape
        ((), (3,))
    """

    def __init__(self, key: PRNGKeyArray):
        # A generator can be neither copied nor pickled: a copy would return the same keys.
        self._keys, self._trace = _split_for_ever(key), current_trace()

    def __iter__(self) -> InitKeys:
        return self

    def __next__(self) -> PRNGKeyArray:
        """Return a new key."""
        # Elsewhere all members of a map would get one key, and so would all calls of a program.
        if self._trace != current_trace():
            fact = "init_keys: these keys were made outside of the transform that takes one"
            raise StateError(fact, hint="jax.vmap(lambda key: Model(key=key))(keys.take(8))")
        return next(self._keys)

    def take(self, n: int) -> Array:
        """Return `n` keys as one array, to be mapped over: the next key, split."""
        return jax.random.split(next(self), n)


def _split_for_ever(key: Any) -> Iterator[Any]:
    while True:
        keys = jax.random.split(key, BLOCK + 1)
        # In a trace, a key that is not used must not become an operation of the program.
        block: Any = keys if isinstance(keys, Tracer) else list(keys)
        yield from (block[i] for i in range(BLOCK))
        key = block[BLOCK]


KeyLike: TypeAlias = PRNGKeyArray | InitKeys
"""The type of a layer's `key`."""


def init_keys(key: KeyLike) -> InitKeys:
    """Return an iterator over keys for building a model, all from one key.

    Every layer accepts it as its key, and passes it on to its parts. With
    plain keys, each layer splits its key for the layers in it, and these split theirs again:
    for a deep model that is a tower of small random programs. Here one split makes 32 keys. They
    depend on the order in which they are requested, and not on the depth of the model.

    In your own Modules, begin with `keys = pm.init_keys(key)`: that works for a key, and for
    the iterator that a surrounding Module passes on.

    Args:
        key: one random key; or the result of another call, which is returned unchanged.

    Returns:
        An iterator over keys. `next(keys)` is one, `keys.take(n)` an array of several.

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
    return key if isinstance(key, InitKeys) else InitKeys(key)
