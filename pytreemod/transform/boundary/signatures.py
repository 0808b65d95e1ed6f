"""The parameters of callables: their names and positions."""

from __future__ import annotations

import contextlib
import functools as ft
import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import jax
import jaxtyping
import numpy as np

from pytreemod.errors import ArgumentError, nearest
from pytreemod.module.classes import ModuleMeta
from pytreemod.transform.boundary.wrapping import Transformed, function_name
from pytreemod.typing import class_of

_F = TypeVar("_F", bound=types.FunctionType | Callable[..., Any])

_Parameters = tuple[inspect.Parameter, ...]
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_ANYTHING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_JITTED = type(jax.jit(np.shape))


def parameters_of(fn: Callable[..., Any]) -> _Parameters | None:
    """Return the parameters of a callable; None if Python does not know them.

    They are those of the code that a call runs. A wrapper's claims (`functools.wraps`,
    `__signature__`) count only if its code takes any arguments and names none.
    """
    return _claimed(fn, _own_parameters(fn))


def positional_names(fn: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the parameters that may be passed by position, in order."""
    return _names(parameters_of(fn))


def positions_of(fn: Callable[..., Any]) -> tuple[tuple[str, ...], tuple[str | None, ...]]:
    """Return the positional names of a callable, and the keyword of each position.

    A keyword of None means that the position cannot be passed by keyword. It is unknown what a
    wrapper does with `*args` and `**kwargs`, so its arguments by keyword have no position.
    """
    # Looked up once for both, because it takes 3 us for a Module.
    own = _own_parameters(fn)
    places = tuple(
        p.name if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD else None
        for p in own or ()
        if p.kind in _BY_POSITION
    )
    return _names(_claimed(fn, own)), places


def _names(parameters: _Parameters | None) -> tuple[str, ...]:
    return tuple([p.name for p in parameters or () if p.kind in _BY_POSITION])


def place_keywords(
    places: tuple[str | None, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Move arguments passed by keyword to their positions, up to the first gap.

    Args:
        places: the positions, as `positions_of` returns them.
        args: the arguments that have positions already.
        kwargs: the others.
    """
    placed = list(args)
    rest = dict(kwargs)
    for name in places[len(args) :]:
        # A gap: the arguments after it cannot be passed by position.
        if name is None or name not in rest:
            break
        placed.append(rest.pop(name))
    return tuple(placed), rest


def _claimed(fn: Callable[..., Any], own: _Parameters | None) -> _Parameters | None:
    """Return the parameters that `fn` claims, if its code names none."""
    if not _takes_anything(own):
        return own
    try:
        return tuple(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return own


def _own_parameters(fn: Any) -> _Parameters | None:
    """The parameters of the code that a call of `fn` runs; None if Python does not know them."""
    kind = class_of(fn)
    # From its code, because decorators set `__wrapped__` and `__signature__`.
    if kind is types.FunctionType:
        is_passing = fn.__code__ in _passing and hasattr(fn, "__wrapped__")
        return _own_parameters(fn.__wrapped__) if is_passing else _of_code(fn.__code__)
    if issubclass(kind, _JITTED):
        return _own_parameters(fn.__wrapped__)
    if kind is types.MethodType:
        return _without_first(_own_parameters(fn.__func__))
    if issubclass(kind, ft.partial):
        return _of_partial(fn)
    if issubclass(kind, type):
        return _of_class(fn)
    call = _call_of(kind)
    if class_of(call) not in _SLOTS and hasattr(call, "__get__"):
        own = _own_parameters(call.__get__(fn, kind))
        is_passing = issubclass(kind, Transformed) and _takes_anything(own)
        return _own_parameters(fn.__wrapped__) if is_passing else own
    try:
        return tuple(inspect.signature(fn, follow_wrapped=False).parameters.values())
    except (TypeError, ValueError):
        return None


# Callables written in C are inspected directly.
_SLOTS = (type(None), type(object.__init__))


def _call_of(kind: type) -> Any:
    """Return the function that a call of an instance runs, found without running descriptors.

    The same as `inspect.getattr_static`, in an eighth of the time.
    """
    for base in kind.__mro__:
        if "__call__" in vars(base):
            return vars(base)["__call__"]
    return None


def _takes_anything(parameters: _Parameters | None) -> bool:
    """Whether the parameters are `*args` and `**kwargs` alone, or unknown."""
    return parameters is None or tuple(p.kind for p in parameters) == _ANYTHING


def passing_on(wrapper: _F) -> _F:
    """Mark a wrapper (with `__wrapped__`) that passes on its arguments unchanged.

    The mark is on its code, which all wrappers from one decorator share. `functools.wraps` would
    copy a mark on the function to any function that wraps it.
    """
    _passing.add(wrapper.__code__)
    return wrapper


def _unchecked(fn: _F) -> _F:
    return fn


_passing: set[types.CodeType] = set()
# Known wrappers of other libraries: context managers, `jax.named_scope` and jaxtyping.
passing_on(contextlib.ContextDecorator()(_takes_anything))
passing_on(jax.named_scope("")(_takes_anything))
for _checker in (None, _unchecked):
    passing_on(cast("Any", jaxtyping).jaxtyped(_takes_anything, typechecker=_checker))


def _of_code(code: types.CodeType) -> _Parameters:
    """Return the parameters in the code of a function, whatever the function claims."""
    count, only = code.co_argcount, code.co_posonlyargcount
    names = code.co_varnames
    end = count + code.co_kwonlyargcount
    found = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_ONLY) for n in names[:only]]
    found += [
        inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names[only:count]
    ]
    if code.co_flags & inspect.CO_VARARGS:
        found.append(inspect.Parameter(names[end], inspect.Parameter.VAR_POSITIONAL))
    found += [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in names[count:end]]
    if code.co_flags & inspect.CO_VARKEYWORDS:
        last = end + bool(code.co_flags & inspect.CO_VARARGS)
        found.append(inspect.Parameter(names[last], inspect.Parameter.VAR_KEYWORD))
    return tuple(found)


def _without_first(parameters: _Parameters | None, count: int = 1) -> _Parameters | None:
    """Return the parameters that remain when the first ones are passed by position."""
    if parameters is None:
        return None
    given = sum(p.kind in _BY_POSITION for p in parameters[:count])
    return parameters[given:]


def _of_partial(fn: ft.partial[Any]) -> _Parameters | None:
    parameters = _without_first(_own_parameters(fn.func), len(fn.args))
    found: list[inspect.Parameter] = []
    is_given = False
    for p in parameters or ():
        # After one that is passed by keyword, the others can only be passed by keyword.
        if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            is_given = is_given or p.name in fn.keywords
            p = p.replace(kind=inspect.Parameter.KEYWORD_ONLY) if is_given else p
        if not (is_given and p.kind is inspect.Parameter.VAR_POSITIONAL):
            found.append(p)
    return None if parameters is None else tuple(found)


def _of_class(cls: type) -> _Parameters | None:
    """Return the parameters of a class: those of the one method that receives the arguments."""
    # A metaclass with its own `__call__` may take any arguments.
    if inspect.getattr_static(type(cls), "__call__") not in _CALLS_OF_CLASSES:
        return None
    made_by = [getattr(cls, name) for name in ("__new__", "__init__")]
    # If there are both, each takes the arguments, and the stricter one decides.
    own = [f for f in made_by if class_of(f) is types.FunctionType]
    return _without_first(_own_parameters(own[0])) if len(own) == 1 else None


# Both pass their arguments to `__new__` and `__init__`.
_CALLS_OF_CLASSES = (type.__call__, inspect.getattr_static(ModuleMeta, "__call__"))


def check_names(where: str, names: tuple[str, ...], fn: Any) -> None:
    """Refuse names that are not those of a function's arguments, as far as Python knows.

    Raises:
        ArgumentError: if there are some.
    """
    parameters = parameters_of(fn)
    if parameters is None or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return
    known = [p.name for p in parameters]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ArgumentError(
            f"{where}: {function_name(fn)} has no argument "
            + ", ".join(f"{name!r}{nearest(name, known)}" for name in unknown)
        )


def check_options(
    where: str,
    options: Iterable[str],
    function: Callable[..., Any],
    own: Callable[..., Any],
    refused: Iterable[str] = (),
) -> None:
    """Refuse options that JAX's transform does not have.

    Args:
        where: the name of our transform.
        options: the names of the options for JAX's transform.
        function: JAX's transform.
        own: our transform, whose options the user may have meant.
        refused: options of JAX's transform that ours does not take, so that no error suggests them.

    Raises:
        ArgumentError: if it has no such option.
    """
    # Now, because JAX would complain only in the first call, about a function of ours.
    known = _options_of(function)
    unknown = [name for name in options if name not in known]
    if unknown:
        meant = (known | _options_of(own)).difference(refused)
        raise ArgumentError(
            where,
            f"its own options and those of jax.{function_name(function)}",
            ", ".join(f"{name}={nearest(name, sorted(meant))}" for name in unknown),
        )


# Getting the signature of `jax.jit` takes 45 us.
@ft.lru_cache(maxsize=64)
def _options_of(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(parameter.name for parameter in parameters_of(function) or ())
