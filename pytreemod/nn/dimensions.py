"""Makes layers whose first arguments are fixed, from a layer that takes them."""

from __future__ import annotations

import functools as ft
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from pytreemod.module.classes import RULES
from pytreemod.module.unfinished import sizes_follow

_Layer = TypeVar("_Layer")
_First = TypeVar("_First")
_Second = TypeVar("_Second")
Rest = ParamSpec("Rest")


@overload
def filled_in(
    init: Callable[Concatenate[_Layer, _First, Rest], None], first: _First, /
) -> Callable[[Callable[..., None]], Callable[Concatenate[_Layer, Rest], None]]: ...
@overload
def filled_in(
    init: Callable[Concatenate[_Layer, _First, _Second, Rest], None],
    first: _First,
    second: _Second,
    /,
) -> Callable[[Callable[..., None]], Callable[Concatenate[_Layer, Rest], None]]: ...
def filled_in(init: Callable[..., None], /, *values: Any) -> Any:
    """Decorate an empty `__init__`: make it `init` with its first arguments filled in.

    A class for each number of dimensions then needs two lines, without a copy of the signature or
    of the code of `init`.

    Args:
        init: an `__init__`.
        *values: of its first arguments.

    Returns:
        A decorator; its result has the remaining signature of init.

    Examples:
        >>> class Grid:
        ...     def __init__(self, num_spatial_dims: int, size: int):
        ...         self.shape = (size,) * num_spatial_dims
        >>> class Grid2d(Grid):
        ...     @filled_in(Grid.__init__, 2)
        ...     def __init__(self): ...
        >>> Grid2d(3).shape
        (3, 3)
    """

    def decorate(empty: Callable[..., None]) -> Callable[..., None]:
        def fixed(self: Any, /, *args: Any, **kwargs: Any) -> None:
            init(self, *values, *args, **kwargs)

        signature = inspect.signature(init)
        layer, *parameters = signature.parameters.values()
        rest = parameters[len(values) :]
        ft.update_wrapper(fixed, empty)
        # `update_wrapper` has added a reference to the empty signature, which would be used.
        vars(fixed).pop("__wrapped__")
        vars(fixed)["__signature__"] = signature.replace(parameters=[layer, *rest])
        marked = getattr(init, RULES, None)
        if marked is None:
            return fixed
        # Rules may use the number of axes, which is not an argument any more.
        given = dict(zip([p.name for p in parameters], values, strict=False))
        rules = {name: _fixed(rule, given) for name, rule in marked.rules.items()}
        return sizes_follow(**rules)(fixed)

    return decorate


def _fixed(rule: Callable[..., Any], given: dict[str, Any]) -> Callable[..., Any]:
    asked = given.keys() & inspect.signature(rule).parameters.keys()
    return ft.partial(rule, **{name: given[name] for name in asked})
