"""Declaring fields: `field`, `buffer`, and the annotations of abstract attributes.

A field is one of the `dataclasses` module; its metadata has the other options, which the class
reads when it is made (see `schema`).
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar, overload

from pytreemod.errors import FieldError, describe, warn
from pytreemod.tree.nodes import DEFAULT_ROLE

_T = TypeVar("_T")


class AbstractConstraint(ABC):
    """The type of `field(constraint=...)`: it converts a value to its stored form."""

    @abstractmethod
    def constrain(self, value: Any, where: str, old: Any = None) -> Any:
        """Return the stored form of a constrained value.

        Args:
            value: an array of floating-point numbers, or a Python float.
            where: the field, for errors.
            old: the value stored there before; its roles and its leading axes are kept.

        Raises:
            FieldError: if the value is outside the bound, or of the wrong shape.
        """


# As in the stubs of `dataclasses`: a default has the type of the field. With a converter it has the
# type of the converter's parameter, and a constraint makes an array of a number. So the first form
# has neither of them.
@overload
def field(
    *,
    default: _T,
    static: bool = ...,
    role: str = ...,
    init: bool = ...,
    repr: bool = ...,
    hash: bool | None = ...,
    compare: bool = ...,
    metadata: Mapping[Any, Any] | None = ...,
    kw_only: bool = ...,
) -> _T: ...
@overload
def field(
    *,
    converter: Callable[[Any], Any] | None = None,
    static: bool = ...,
    role: str = ...,
    constraint: AbstractConstraint | None = ...,
    **kwargs: Any,
) -> Any: ...
def field(
    *,
    converter: Callable[[Any], Any] | None = None,
    static: bool = False,
    role: str = DEFAULT_ROLE,
    constraint: AbstractConstraint | None = None,
    metadata: Mapping[Any, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Declare a field of a Module.

    Args:
        converter: called on the field's value when an instance is built, by whatever
            `__init__`; the annotation describes what it returns.
        static: the field is configuration: part of the structure, never an array.
        role: the purpose of the field, which `select.role` selects. `"param"` is trained,
            `"buffer"` is ignored by `filter_grad`, any other word is yours.
        constraint: a condition on the field's values: one of `pm.constraints`, such as
            `positive`. The constructor, `replace` and `tree_at` take the constrained value, and
            reading the field returns it. Training changes an array without bounds, under
            `"name.unconstrained"`. Applied after the converter.
        metadata: entries of other libraries.
        **kwargs: as for `dataclasses.field` (`default`, `default_factory`, `init`, `kw_only`, ...).

    Returns:
        The result of `dataclasses.field`; use it on the right of an annotated name.

    Raises:
        FieldError: if `constraint` is no constraint; if it, or a role, is given for a static field;
            or if `metadata` has one of the four names, too.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pytreemod as pm
        >>> class Scale(pm.Module):
        ...     factor: jnp.ndarray = pm.field(converter=jnp.asarray)
        ...     axis: int = pm.field(static=True, default=0)
        >>> Scale(2.0)
        Scale(factor=weak_f32[])
        >>> class Kernel(pm.Module):
        ...     length: jnp.ndarray = pm.field(constraint=pm.constraints.positive)
        >>> Kernel(2.0)
        Kernel(length=positive(unconstrained=weak_f32[]))
        >>> Kernel(2.0).length
        Array(2., dtype=float32, weak_type=True)
    """
    if constraint is not None and not isinstance(constraint, AbstractConstraint):  # pyright: ignore[reportUnnecessaryIsInstance]  (callers may be unchecked)
        raise FieldError("field(constraint)", "one of pm.constraints", describe(constraint))
    given = {
        "static": static or None,
        "converter": converter,
        "role": None if role == DEFAULT_ROLE else role,
        "constraint": constraint,
    }
    ours = {name: value for name, value in given.items() if value is not None}
    if static and len(ours.keys() & {"role", "constraint"}):
        raise FieldError(f"field: a static field is no data, and has no {[*ours][-1]}")
    clash = sorted(ours.keys() & (metadata or {}).keys())
    if clash:
        raise FieldError(f"field: Cannot use metadata with `{clash[0]}` already set")
    return dataclasses.field(metadata={**(metadata or {}), **ours}, **kwargs)


def buffer(*, converter: Callable[[Any], Any] | None = None, **kwargs: Any) -> Any:
    """Declare data that training never changes: a field with the role `"buffer"`.

    `filter_grad` does not differentiate it, and `trainable` excludes it from the optimizer.

    Args:
        converter: as for [`field`][pytreemod.field].
        **kwargs: as for `dataclasses.field`.

    Returns:
        A field declaration.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import pytreemod as pm
        >>> class Normalize(pm.Module):
        ...     scale: jax.Array
        ...     mean: jax.Array = pm.buffer()
        ...     def __call__(self, x):
        ...         return self.scale * (x - self.mean)
        >>> model = Normalize(jnp.asarray(2.0), jnp.asarray(1.0))
        >>> pm.filter_grad(lambda m, x: m(x))(model, 4.0)
        Normalize(scale=weak_f32[], mean=None)
    """
    return field(converter=converter, role="buffer", **kwargs)


def static_field(**kwargs: Any) -> Any:
    """Older spelling of `field(static=True)`.

    Args:
        **kwargs: as for [`field`][pytreemod.field].

    Returns:
        A field declaration.

    Examples:
        >>> import pytreemod as pm
        >>> class Named(pm.Module):
        ...     name: str = pm.field(static=True)
    """
    warn(DeprecationWarning, "static_field is an older spelling", hint="pm.field(static=True)")
    return field(static=True, **kwargs)


AbstractVar = Annotated[_T, "AbstractVar"]
"""Annotates an attribute that every concrete subclass must have: `x: AbstractVar[int]`.

A subclass provides it as a field, a property or a class attribute. A class that still lacks one
cannot be instantiated.
"""

AbstractClassVar = Annotated[_T, "AbstractClassVar"]
"""Annotates a class attribute that every concrete subclass must set: `n: AbstractClassVar[int]`."""
