"""What callables take: the names and the positions of their parameters."""

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

from pytreemod.errors import ArgumentError, meant, nearest
from pytreemod.module.classes import ModuleMeta
from pytreemod.transform.boundary.wrapping import Transformed, function_name
from pytreemod.typing import class_of

_F = TypeVar("_F", bound=types.FunctionType | Callable[..., Any])

_Parameters = tuple[inspect.Parameter, ...]
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_ANYTHING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_JITTED = type(jax.jit(np.shape))


def parameters_of(fn: Callable[..., Any]) -> _Parameters | None:
    """The parameters of a callable; None if Python does not know them.

    They are those that a call meets. What a wrapper claims (`functools.wraps`, `__signature__`)
    counts only where it takes anything itself, and names nothing.
    """
    return _claimed(fn, _own_parameters(fn))


def positional_names(fn: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the parameters that may be given by position, in order."""
    return _names(parameters_of(fn))


def positions_of(fn: Callable[..., Any]) -> tuple[tuple[str, ...], tuple[str | None, ...]]:
    """The positional names of a callable, and its places: what each position is by keyword.

    In the places None is one that cannot be given by keyword. What a wrapper does with what
    it takes as `*args` and `**kwargs` is its own business: what it is given by keyword has no
    position.
    """
    # Looked up once for both: for a Module that takes 3 us.
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
    """Move arguments given by keyword to their positions, as far as there is no gap.

    Args:
        places: the positions, as `positions_of` gives them.
        args: the arguments that have positions already.
        kwargs: the others.
    """
    placed = list(args)
    rest = dict(kwargs)
    for name in places[len(args) :]:
        # A gap: what comes after it cannot be given by position.
        if name is None or name not in rest:
            break
        placed.append(rest.pop(name))
    return tuple(placed), rest


def _claimed(fn: Callable[..., Any], own: _Parameters | None) -> _Parameters | None:
    """What `fn` says of itself, if what a call of it meets says nothing."""
    if not _takes_anything(own):
        return own
    try:
        return tuple(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return own


def _own_parameters(fn: Any) -> _Parameters | None:
    """What a call of `fn` really meets; None if Python does not know it."""
    kind = class_of(fn)
    # By its code: `__wrapped__` and `__signature__` are what a decorator claims.
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


# What is written in C is asked itself.
_SLOTS = (type(None), type(object.__init__))


def _call_of(kind: type) -> Any:
    """What a call of an instance meets, where Python looks it up, and without running descriptors.

    As `inspect.getattr_static` finds it, in an eighth of the time.
    """
    for base in kind.__mro__:
        if "__call__" in vars(base):
            return vars(base)["__call__"]
    return None


def _takes_anything(parameters: _Parameters | None) -> bool:
    """Whether it is nothing but `*args` and `**kwargs`, or unknown."""
    return parameters is None or tuple(p.kind for p in parameters) == _ANYTHING


def passing_on(wrapper: _F) -> _F:
    """Mark a wrapper (with `__wrapped__`) that hands on its arguments as they were given.

    By its code, which all wrappers from one decorator share: `functools.wraps` would copy a mark
    on the function to whatever wraps it.
    """
    _passing.add(wrapper.__code__)
    return wrapper


def _unchecked(fn: _F) -> _F:
    return fn


_passing: set[types.CodeType] = set()
# Those of others that are known to: of context managers, `jax.named_scope` and jaxtyping.
passing_on(contextlib.ContextDecorator()(_takes_anything))
passing_on(jax.named_scope("")(_takes_anything))
for _checker in (None, _unchecked):
    passing_on(cast("Any", jaxtyping).jaxtyped(_takes_anything, typechecker=_checker))


def _of_code(code: types.CodeType) -> _Parameters:
    """The parameters that the code of a function has, whatever the function claims."""
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
    """What is left when the first ones were given by position."""
    if parameters is None:
        return None
    given = sum(p.kind in _BY_POSITION for p in parameters[:count])
    return parameters[given:]


def _of_partial(fn: ft.partial[Any]) -> _Parameters | None:
    parameters = _without_first(_own_parameters(fn.func), len(fn.args))
    found: list[inspect.Parameter] = []
    is_given = False
    for p in parameters or ():
        # What comes after one that is given by keyword can only be given by keyword.
        if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            is_given = is_given or p.name in fn.keywords
            p = p.replace(kind=inspect.Parameter.KEYWORD_ONLY) if is_given else p
        if not (is_given and p.kind is inspect.Parameter.VAR_POSITIONAL):
            found.append(p)
    return None if parameters is None else tuple(found)


def _of_class(cls: type) -> _Parameters | None:
    """The parameters of a class: of the one method that receives what it is called with."""
    # A metaclass that makes instances in its own way may take anything.
    if inspect.getattr_static(type(cls), "__call__") not in _CALLS_OF_CLASSES:
        return None
    made_by = [getattr(cls, name) for name in ("__new__", "__init__")]
    # Where there are both, each takes the arguments, and the stricter of them decides.
    own = [f for f in made_by if class_of(f) is types.FunctionType]
    return _without_first(_own_parameters(own[0])) if len(own) == 1 else None


# Both hand what they are given to `__new__` and `__init__`.
_CALLS_OF_CLASSES = (type.__call__, inspect.getattr_static(ModuleMeta, "__call__"))


def check_names(where: str, names: tuple[str, ...], fn: Any) -> None:
    """Refuse names that are not those of arguments of a function, as far as Python knows.

    Raises:
        ArgumentError: there are some.
    """
    parameters = parameters_of(fn)
    if parameters is None or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return
    known = [p.name for p in parameters]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ArgumentError(
            where,
            f"names of arguments of {function_name(fn)} ({', '.join(known)})",
            ", ".join(f"{name!r}{nearest(name, known)}" for name in unknown),
            hint=meant(unknown, known, f'{where.partition("(")[2].rstrip(")")}="{{}}"'),
        )


def check_options(
    where: str,
    options: Iterable[str],
    function: Callable[..., Any],
    own: Callable[..., Any],
    refused: Iterable[str] = (),
) -> None:
    """Refuse options that JAX's own transform does not have.

    Args:
        where: our transform.
        options: the names of what was given for JAX's.
        function: JAX's transform.
        own: ours, whose options may have been meant.
        refused: options of JAX's that ours does not take, so that no error suggests them.

    Raises:
        ArgumentError: it has no such option.
    """
    # Now: JAX itself would complain in the first call only, and of a function of ours.
    known = _options_of(function)
    unknown = [name for name in options if name not in known]
    if unknown:
        meant = (known | _options_of(own)).difference(refused)
        raise ArgumentError(
            where,
            f"its own options and those of jax.{function_name(function)}",
            ", ".join(f"{name}={nearest(name, sorted(meant))}" for name in unknown),
        )


# The signature of `jax.jit` takes 45 us.
@ft.lru_cache(maxsize=64)
def _options_of(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(parameter.name for parameter in parameters_of(function) or ())
