"""Tokens: the fields by which a layer refers to values that change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar, cast

from pytreemod.module.classes import Module
from pytreemod.module.fields import buffer, field
from pytreemod.tree.nodes import found_in
from pytreemod.typing import PyTree, jtu

_V = TypeVar("_V")


class Unnamed:
    """Identifies a token until `make_with_state` names it by its path."""

    __slots__ = ()
    # Shown by `explain_retraces` for two of these.
    __retrace_hint__ = "tokens without names are all different: name them with pm.make_with_state"

    def __repr__(self) -> str:
        return "<unnamed>"


class AbstractToken(Module, is_abstract=True):
    """The base of all tokens: a marker, which is the token's path once it is named."""

    marker: Any = field(static=True)

    __is_token__: ClassVar[bool] = True


class Nothing(Module):
    """None as an initial value; a token without an initial value has its value in a State."""


def is_token(node: Any) -> bool:
    """Whether a node of a tree is a token."""
    return isinstance(node, AbstractToken)


def tokens_of(tree: PyTree) -> list[tuple[tuple[Any, ...], Any]]:
    """Return the tokens in a tree with their paths."""
    return found_in(tree, is_token)


def map_tokens(fn: Callable[[Any], Any], tree: PyTree) -> PyTree:
    """Return a tree with `fn` applied to each token, in order."""

    def visit(node: Any) -> Any:
        return fn(node) if is_token(node) else node

    return jtu.tree_map(visit, tree, is_leaf=is_token)


def with_init(token: Any, value: Any) -> Any:
    """Return a token like this with an initial value, and in no State."""
    return token.replace(init=Nothing() if value is None else value, marker=Unnamed())


def is_moved(token: Any) -> bool:
    """Whether the initial value of a token has moved into a State."""
    # A new stream has none either: its key is set when the State is seeded.
    is_new = isinstance(token, RngStream) and isinstance(token.marker, Unnamed)
    return token.init is None and not is_new


class StateIndex(AbstractToken, Generic[_V]):
    """A token for one value in a [`State`][pytreemod.State].

    A stateful layer has one for each of its values; the values themselves are in the State that is
    passed in and returned.

    **Form.** Configuration, once [`make_with_state`][pytreemod.make_with_state] has moved the
    initial value into a State and named the token by its path in the model.

    **Make.** `StateIndex(init)` in a layer's `__init__`.

    **Use.** `state.get(index)`, `state.set(index, value)`.

    **Laws.** `state.set(i, v).get(i) == v`; for another token `j`, `state.set(i, v).get(j)` equals
    `state.get(j)`.

    **Paths.** Every path has its own token: a token in two fields, or in a layer that is used
    at two paths, becomes two tokens in `make_with_state`, as its arrays become two. To share one
    value, keep the token in one field, and call that layer twice or pass the token along.

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

    def __init__(self, init: _V):
        self.init = cast("Any", Nothing()) if init is None else init
        self.marker = Unnamed()


class RngStream(AbstractToken):
    """A stream of random keys, as a token: the State holds its key and how often it was used.

    **Form.** Configuration; the values are in a [`State`][pytreemod.State].

    **Make.** `RngStream()` in a layer's `__init__`; then `state = state.seed(key)` gives every
    stream of the model its own key. This depends only on the seed and on the stream's path:
    adding a layer does not change another layer's numbers.

    **Use.** `key, state = state.next_key(stream)`: one `fold_in` of a counter, no split.

    **Laws.** The keys of one stream are all different, as are those of two streams; the same seed
    gives the same keys.

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> class Noise(pm.Module):
        ...     stream: pm.RngStream
        ...     def __init__(self):
        ...         self.stream = pm.RngStream()
        ...     def __call__(self, x, state):
        ...         key, state = state.next_key(self.stream)
        ...         return x + jax.random.normal(key, x.shape), state
        >>> noise, state = pm.make_with_state(Noise)()
        >>> state = state.seed(jax.random.key(0))
        >>> y, state = noise(jax.numpy.zeros(3), state)

    Source:
        Keys by folding in: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """

    init: Any = buffer()

    def __init__(self) -> None:
        self.init = None
        self.marker = Unnamed()
