"""Making a model and its State together."""

from __future__ import annotations

import functools as ft
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from pytreemod.errors import ArgumentError, StateError
from pytreemod.state.tokens import map_tokens, tokens_of
from pytreemod.state.values import State, named_state
from pytreemod.tree.paths import path_text
from pytreemod.typing import PyTree

_P = ParamSpec("_P")
_M = TypeVar("_M")


def delete_init_state(model: PyTree) -> PyTree:
    """Copy a model without the initial values of its tokens, for use once a State has them.

    Args:
        model: any tree with tokens in it.

    Returns:
        The copy.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> pm.nn.delete_init_state(pm.StateIndex(jnp.zeros(3))).init is None
        True
    """
    return map_tokens(lambda token: token.replace(init=None), model)


def make_with_state(make_model: Callable[_P, _M]) -> Callable[_P, tuple[_M, State]]:
    """Make a model and the State with the initial values of its tokens.

    Tokens are named by their paths in the model, so that two models built alike agree, and a
    program compiled for one is valid for the other. Every path has its own layer: a layer at two
    paths, or a copy of it, has separate weights and tokens. To use one layer twice, store it in one
    field and call it twice, or tie one path to the other (`pm.tie`).

    Args:
        make_model: a Module class, or any function that builds a model.

    Returns:
        A function of the same arguments that returns `(model, state)`.

    Raises:
        ArgumentError: if `make_model` is a model.
        StateError: if a token's initial value is already in another State; or two tokens have the
            same path.

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> norm, state = pm.make_with_state(pm.nn.BatchNorm)(3, "batch")
    """
    given: Any = make_model
    if not isinstance(given, type) and tokens_of(given):
        hint = "model, state = pm.make_with_state(Model)(...)"
        fact = "make_with_state takes a function that returns a model, not a model"
        raise ArgumentError(fact, hint=hint)

    @ft.wraps(make_model)
    def make(*args: _P.args, **kwargs: _P.kwargs) -> tuple[_M, State]:
        model = make_model(*args, **kwargs)
        names = [path_text(path) for path, _ in tokens_of(model)]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise StateError("make_with_state: the paths of two tokens read the same", at=twice)
        state = named_state(model, names)
        # In order, and not by marker: a token at two paths becomes two.
        rest = iter(names)
        named = map_tokens(lambda token: token.replace(marker=next(rest), init=None), model)
        return named, state

    return make
