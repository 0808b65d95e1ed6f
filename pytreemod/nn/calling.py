"""How to call a layer: with or without State and key; and the mark for "no State"."""

from __future__ import annotations

import functools as ft
import inspect
import weakref
from collections.abc import Callable
from enum import Enum
from typing import Any, Literal, NoReturn, TypeAlias, TypeVar, cast

import jax

from pytreemod.errors import StateError, describe
from pytreemod.module.classes import Module
from pytreemod.state.tokens import is_token
from pytreemod.state.values import State
from pytreemod.typing import class_of, jtu

Call = TypeVar("Call", bound=Callable[..., Any])


class Absence(Enum):
    """The type of `ABSENT`."""

    ABSENT = "absent"

    def __repr__(self) -> str:
        return "<absent>"


ABSENT = Absence.ABSENT
"""Represents an argument that was not given, where None would be a value."""

Absent: TypeAlias = Literal[Absence.ABSENT]


class StatefulLayer(Module):
    """Base of layers that are called as `layer(x, state, *, key)` and return `(out, state)`.

    `Sequential` passes State only to these.

    Examples:
        >>> from pytreemod import nn
        >>> class Passing(nn.StatefulLayer):
        ...     def __call__(self, x, state, *, key=None):
        ...         return x, state
        >>> Passing().is_stateful()
        True
    """

    def is_stateful(self) -> bool:
        """Whether this instance needs State; a subclass may decide by its fields.

        Returns:
            True, unless overridden.
        """
        return True

    def needs_state(self) -> bool:
        """Whether this instance must be called with State; a subclass may decide.

        Returns:
            The result of `is_stateful`, unless overridden. A layer that stores nothing without
            State returns False. Without State, it is called as `layer(x, *, key)`, and returns only
            its output.
        """
        return self.is_stateful()


def needs_state(layer: Any) -> bool:
    """Whether a layer has tokens that require a State.

    Examples:
        >>> from pytreemod.state.tokens import StateIndex
        >>> needs_state([StateIndex(1.0)]), needs_state(abs)
        (True, False)
    """

    def is_end(node: Any) -> bool:
        return is_token(node) or (isinstance(node, StatefulLayer) and not node.needs_state())

    return any(is_token(node) for node in jtu.tree_leaves(layer, is_leaf=is_end))


def is_stateful(layer: Any) -> bool:
    """Whether a layer of any class is called with State."""
    return isinstance(layer, StatefulLayer) and layer.is_stateful()


def requires_state(layer: Any) -> bool:
    """Whether a layer of any class must be called with State."""
    return isinstance(layer, StatefulLayer) and layer.needs_state()


def in_scope(name: str) -> Callable[[Call], Call]:
    """Add `jax.named_scope` to a layer's call.

    Args:
        name: the name of the computation in profiles.

    Returns:
        A decorator.
    """
    scope = jax.named_scope(name)

    def decorate(call: Call) -> Call:
        @ft.wraps(call)
        def scoped(*args: Any, **kwargs: Any) -> Any:
            with scope:
                return call(*args, **kwargs)

        return cast("Call", scoped)

    return decorate


MARK = "_pytreemod_uses_key"


def uses_key_if(condition: Callable[[Any], bool]) -> Callable[[Call], Call]:
    """Mark a `__call__` with the condition for using its `key`, so that no unused key is made.

    The mark is on the function, not on the class: a subclass with its own `__call__` may use the
    key.

    Args:
        condition: from the layer to whether a call of it uses a key.

    Returns:
        A decorator.

    Examples:
        >>> class Sometimes(Module):
        ...     noisy: bool
        ...
        ...     @uses_key_if(lambda layer: layer.noisy)
        ...     def __call__(self, x, *, key=None):
        ...         return x
        >>> wants_key(Sometimes(True)), wants_key(Sometimes(False))
        (True, False)
    """

    def mark(call: Call) -> Call:
        setattr(call, MARK, condition)
        return call

    return mark


def ignores_key(call: Call) -> Call:
    """Mark a `__call__` that never uses its `key`."""
    return uses_key_if(lambda layer: False)(call)


def wants_key(layer: Any) -> bool:
    """Whether a call of a layer uses a key: the mark decides, or whether it accepts one."""
    # Read from the class, where Python looks up `__call__`.
    condition = getattr(type(layer).__call__, MARK, None)
    return accepts_key(layer) if condition is None else condition(layer)


# Cached: reading a signature takes about as long as tracing a small layer.
_accepting: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def accepts_key(layer: Any) -> bool:
    """Whether a layer can be called with `key=`.

    Examples:
        >>> class Plain(Module):
        ...     def __call__(self, x):
        ...         return x
        >>> accepts_key(Plain()), accepts_key(lambda x, key: x)
        (False, True)
    """
    if not isinstance(layer, Module):
        # Not cached: functions have one class, and different parameters.
        return takes(layer, "key")
    call = type(layer).__call__
    if call not in _accepting:
        _accepting[call] = takes(call, "key")
    return _accepting[call]


def takes(call: Any, name: str) -> bool:
    """Whether a callable accepts an argument of this name."""
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError):
        return False
    accepting = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD
        or (parameter.name == name and parameter.kind in accepting)
        for parameter in parameters.values()
    )


def refuse_no_state(where: Any, *places: str) -> NoReturn:
    """Raise the error for a layer that needs State, or has one that does, and gets none.

    Raises:
        StateError: always.
    """
    hint = (
        "Create the model with its State, and pass the State to each call:",
        "model, state = pm.make_with_state(make_model)(...)",
        "out, state = model(x, state)",
    )
    raise StateError(where, "a State", "none", at=places, hint=hint)


def call_layer(layer: Any, x: Any, state: Any, key: Any) -> tuple[Any, Any]:
    """Call a layer, with State and key if it takes them.

    Args:
        layer: any callable.
        x: its input.
        state: a State, or `ABSENT`; the layer gets it only if it is stateful.
        key: a random key or None; the layer gets it only if it accepts one.

    Returns:
        The layer's output, and the new State.

    Raises:
        StateError: if a stateful layer does not return its output and a State; or a layer that is
            not marked as stateful requires a State.

    Examples:
        >>> call_layer(abs, -1, ABSENT, None)
        (1, <absent>)
    """
    options = {"key": key} if accepts_key(layer) else {}
    if not is_stateful(layer) or (isinstance(state, Absence) and not requires_state(layer)):
        # The signature is read only after a failure: that takes as long as a small layer.
        try:
            return layer(x, **options), state
        except TypeError as error:
            if _demands_state(layer):
                _refuse_unmarked(layer, error)
            raise
    result: Any = layer(x, state, **options)
    # Not just unpacked: an array of two rows would pass for an output and a State.
    match result:
        case (out, State() as after):
            return out, after
        case _:
            pass
    where, hint = f"{type(layer).__name__}(x, state)", ("Return both:", "return out, state")
    raise StateError(where, "(out, state) as the result", describe(result), hint=hint)


def _demands_state(layer: Any) -> bool:
    """Whether a layer has a parameter `state` that must be given."""
    try:
        parameters = inspect.signature(layer).parameters
    except (TypeError, ValueError):
        return False
    return "state" in parameters and parameters["state"].default is inspect.Parameter.empty


def _refuse_unmarked(layer: Any, error: TypeError) -> NoReturn:
    name = class_of(layer).__name__
    raise StateError(
        f"{name} gets no State here: it is not a StatefulLayer",
        hint=f"class {name}(nn.StatefulLayer): ...",
    ) from error
