"""Generic containers as Modules: subscripted bases, TypeVars in fields, collections' interfaces."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp

K = TypeVar("K")
V = TypeVar("V")


class FrozenDict(eqx.Module, Mapping[K, V]):
    _items: tuple[tuple[K, V], ...]

    def __init__(self, *args, **kwargs):
        self._items = tuple(dict(*args, **kwargs).items())

    def __getitem__(self, key: K) -> V:
        return dict(self._items)[key]

    def __iter__(self) -> Iterator[K]:
        return (key for key, _ in self._items)

    def __len__(self) -> int:
        return len(self._items)


class Chain(eqx.Module, Sequence, Generic[V]):
    links: list[V]

    def __getitem__(self, index):
        found = self.links[index]
        return type(self)(found) if isinstance(index, slice) else found

    def __len__(self):
        return len(self.links)

    def __add__(self, other):
        return Chain([*self, *other])


class Pair(eqx.Module, Generic[K, V]):
    left: K
    right: V

    def swap(self) -> "Pair[V, K]":
        return Pair(self.right, self.left)


class Weighted(Pair[jax.Array, V]):
    def __call__(self):
        return jax.tree.map(lambda x: self.left * x, self.right)


def main():
    params = FrozenDict(w=jnp.ones(2), b=jnp.array(0.5), name=3)
    doubled = jax.tree.map(lambda x: x if isinstance(x, str) else x * 2, params)
    chain = Chain([jnp.array(1.0), jnp.array(2.0)]) + Chain([jnp.array(3.0)])
    total = eqx.filter_jit(lambda c: sum(c[1:]) + c[0] * len(c))(chain)
    weighted = Weighted[dict[str, Any]](jnp.array(2.0), {"x": jnp.ones(1)})
    pair = Pair[int, str](1, 2).swap()
    checks = (
        "w" in params,
        dict(**doubled)["b"],
        list(reversed(chain)),
        chain.index(chain[0]),
        params.get("z"),
    )
    return (
        doubled,
        total,
        weighted(),
        pair,
        checks,
        bool(params == FrozenDict(params)),
        type(weighted).__name__,
    )
