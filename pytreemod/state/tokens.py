"""Tokens: what a layer holds in the place of a value that changes."""

from typing import Any, Generic, TypeVar

from pytreemod.module.classes import Module
from pytreemod.module.fields import field

_V = TypeVar("_V")


class Unnamed:
    """Identifies a token until `make_with_state` names it by its path."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<unnamed>"


class StateIndex(Module, Generic[_V]):
    """The place of one value in a [`State`][pytreemod.State].

    A layer that changes holds one of these for each of its values; the values themselves travel
    in the State that goes in and comes out.

    **Form.** Configuration, once [`make_with_state`][pytreemod.make_with_state] has moved the
    initial value into a State and named the token by its path in the model.

    **Make.** `StateIndex(init)` in a layer's `__init__`.

    **Use.** `state.get(index)`, `state.set(index, value)`.

    **Laws.** `state.set(i, v).get(i) == v`; for another token `j`, `state.set(i, v).get(j)` is
    what `state.get(j)` was.

    Args:
        init: the initial value, any tree of arrays.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> class Counter(pm.Module):
        ...     count: pm.StateIndex
        ...     def __init__(self):
        ...         self.count = pm.StateIndex(jnp.asarray(0))
        ...     def __call__(self, x, state):
        ...         n = state.get(self.count)
        ...         return x + n, state.set(self.count, n + 1)
        >>> counter, state = pm.make_with_state(Counter)()
        >>> y, state = counter(10, state)
        >>> y, state = counter(10, state)
        >>> int(y)
        11
    """

    init: _V | None
    marker: Any = field(static=True)

    def __init__(self, init: _V):
        self.init = init
        self.marker = Unnamed()
