"""Making the layers for 1, 2 and 3 spatial axes from the one for any number of them."""

from __future__ import annotations

import functools as ft
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from pytreemod.module.classes import RULES
from pytreemod.module.unfinished import sizes_follow

_Layer = TypeVar("_Layer")
Rest = ParamSpec("Rest")


def for_dimensions(
    init: Callable[Concatenate[_Layer, int, Rest], None], dims: int
) -> Callable[[Callable[..., None]], Callable[Concatenate[_Layer, Rest], None]]:
    """Decorates an empty `__init__`: makes it `init` with `num_spatial_dims` filled in.

    A class of its own per dimension then needs two lines, instead of a copy of the signature and
    of what `init` does.

    Args:
        init: an `__init__` whose first argument is the number of spatial axes.
        dims: that number.

    Returns:
        A decorator; what it gives has the rest of init's signature.

    Examples:
        >>> class Grid:
        ...     def __init__(self, num_spatial_dims: int, size: int):
        ...         self.shape = (size,) * num_spatial_dims
        >>> class Grid2d(Grid):
        ...     @for_dimensions(Grid.__init__, 2)
        ...     def __init__(self): ...
        >>> Grid2d(3).shape
        (3, 3)
    """

    def decorate(empty: Callable[..., None]) -> Callable[Concatenate[_Layer, Rest], None]:
        def fixed(self: _Layer, /, *args: Rest.args, **kwargs: Rest.kwargs) -> None:
            init(self, dims, *args, **kwargs)

        signature = inspect.signature(init)
        layer, _, *rest = signature.parameters.values()
        ft.update_wrapper(fixed, empty)
        # `update_wrapper` left a way back to the empty signature, which nothing should follow.
        vars(fixed).pop("__wrapped__")
        vars(fixed)["__signature__"] = signature.replace(parameters=[layer, *rest])
        marked = getattr(init, RULES, None)
        if marked is None:
            return fixed
        # Rules may ask for the number of axes, which is no argument any more.
        rules = {name: _fixed(rule, dims) for name, rule in marked.rules.items()}
        return sizes_follow(**rules)(fixed)

    return decorate


def _fixed(rule: Callable[..., Any], dims: int) -> Callable[..., Any]:
    asks = "num_spatial_dims" in inspect.signature(rule).parameters
    return ft.partial(rule, num_spatial_dims=dims) if asks else rule
