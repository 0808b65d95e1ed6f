"""Making a model and its State together."""

from __future__ import annotations

import functools as ft
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from pytreemod.errors import ArgumentError, describe, explain
from pytreemod.module.classes import Module
from pytreemod.state.tokens import map_tokens, tokens_of, with_fields
from pytreemod.state.values import State, named_by_path
from pytreemod.tree.predicates import is_array
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
    return map_tokens(lambda token: with_fields(token, {"init": None}), model)


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
        ArgumentError: if `make_model` is a model, or cannot be called.
        StateError: if a token's initial value is already in another State; or two tokens have the
            same path.

    Examples:
        >>> import jax
        >>> import pytreemod as pm
        >>> norm, state = pm.make_with_state(pm.nn.BatchNorm)(3, "batch")
    """
    _check_maker(make_model)

    @ft.wraps(make_model)
    def make(*args: _P.args, **kwargs: _P.kwargs) -> tuple[_M, State]:
        model = make_model(*args, **kwargs)
        if isinstance(make_model, Module) and is_array(model):
            raise ArgumentError(_no_maker(make_model))
        # First: it refuses equal names before any token gets one.
        state, names = named_by_path(model)
        # In order, and not by marker: a token at two paths becomes two.
        rest = iter(names)

        def name(token: Any) -> Any:
            return with_fields(token, {"marker": next(rest), "init": None})

        return map_tokens(name, model), state

    return make


def _check_maker(make_model: Any) -> None:
    """Refuse a model instead of a function that makes one; a Module may be such a function."""
    is_model = not isinstance(make_model, type) and bool(tokens_of(make_model))
    if callable(make_model) and not is_model:
        return
    raise ArgumentError(_no_maker(make_model))


def _no_maker(make_model: Any) -> str:
    is_module = isinstance(make_model, Module)
    got = f"a {type(make_model).__qualname__}" if is_module else describe(make_model)
    return explain(
        f"make_with_state takes a class or a function that returns a model, not {got}",
        hint="model, state = pm.make_with_state(Model)(...)",
    )
