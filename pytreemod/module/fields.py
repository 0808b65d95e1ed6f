"""Declaring fields: `field`, `buffer`, and the annotations of abstract attributes.

A field is one of the `dataclasses` module. Its metadata has the other options: static, role,
converter, constraint. These are checked where the field is declared, and read again when the
class is made (see `schema`). `AbstractVar` and `AbstractClassVar` are annotations that
`typing.get_type_hints` and type checkers see through.
"""

from __future__ import annotations

import dataclasses
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NoReturn, TypeVar, overload

from pytreemod.errors import FieldError, describe, warn
from pytreemod.tree.nodes import DECLARED_ROLES, DEFAULT_ROLE

_T = TypeVar("_T")

STATIC = "static"
CONVERTER = "converter"
ROLE = "role"
CONSTRAINT = "constraint"


class AbstractConstraint(ABC):
    """The type of `field(constraint=...)`: it converts a value to its stored form."""

    @abstractmethod
    def constrain(self, value: Any, where: str, old: Any = None) -> Any:
        """Return the stored form of a constrained value.

        Args:
            value: an array of floating-point numbers, or a Python float.
            where: the field, for errors.
            old: the value stored there before; its roles are preserved.

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
        **kwargs: as for `dataclasses.field` (`default`, `default_factory`, `init`, `kw_only`,
            `metadata`, ...).

    Returns:
        The result of `dataclasses.field`; use it on the right of an annotated name.

    Raises:
        FieldError: if `metadata` already uses one of the names `static`, `converter`, `role`,
            `constraint`; or an argument has the wrong type.

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
        >>> Kernel(2.0).length, Kernel(2.0)
        (Array(2., dtype=float32, weak_type=True), Kernel(length=positive(weak_f32[])))
    """
    metadata = dict(kwargs.pop("metadata", None) or {})
    ours = {
        STATIC: static or None,
        CONVERTER: converter,
        ROLE: None if role == DEFAULT_ROLE else role,
        CONSTRAINT: constraint,
    }
    clash = sorted(ours.keys() & metadata.keys())
    if clash:
        raise FieldError(
            "field(metadata)",
            f"metadata without {clash[0]!r}",
            f"metadata with it. Cannot use metadata with `{clash[0]}` already set",
            hint=["pass it to field itself:", f"pm.field({clash[0]}=...)"],
        )
    if converter is not None and not callable(converter):
        raise FieldError("field(converter)", "a function", describe(converter))
    if not isinstance(role, str):  # pyright: ignore[reportUnnecessaryIsInstance]  (callers may be unchecked)
        raise FieldError("field(role)", "a string", describe(role))
    if static and role != DEFAULT_ROLE:
        raise FieldError(
            "field",
            "a role for data, or static=True",
            f"both, static=True and role={role!r}",
            hint="configuration has no role: remove one of the two",
        )
    if constraint is not None:
        _check_constraint(constraint, static)
    DECLARED_ROLES.add(role)
    metadata |= {name: value for name, value in ours.items() if value is not None}
    try:
        return dataclasses.field(metadata=metadata, **kwargs)
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{name}={describe(value)}" for name, value in kwargs.items())
        hint = f"dataclasses says: {error}"
        expected = "arguments that dataclasses.field accepts"
        raise FieldError("field", expected, given, hint=hint) from error


def _check_constraint(constraint: Any, static: bool) -> None:
    if not isinstance(constraint, AbstractConstraint):
        raise FieldError(
            "field(constraint)",
            "one of pm.constraints",
            describe(constraint),
            hint=[
                "for example:",
                "pm.field(constraint=pm.constraints.positive)",
                "pm.field(constraint=pm.constraints.interval(0.0, 1.0))",
                "pm.field(constraint=pm.constraints.bijection(forward, inverse))",
            ],
        )
    if static:
        raise FieldError(
            "field",
            "a constraint for data, or static=True",
            f"both, static=True and constraint={constraint!r}",
            hint=[
                "configuration is not trained; for data that is not trained, write:",
                f"pm.buffer(constraint=pm.constraints.{constraint!r})",
            ],
        )


def buffer(*, converter: Callable[[Any], Any] | None = None, **kwargs: Any) -> Any:
    """Declare data that training never changes: a field with the role `"buffer"`.

    `filter_grad` does not differentiate it, and `trainable` excludes it from the optimizer.

    Args:
        converter: as for [`field`][pytreemod.field].
        **kwargs: as for `dataclasses.field`.

    Returns:
        A field declaration.

    Raises:
        FieldError: as for `field`.

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
    warn(
        DeprecationWarning,
        "static_field",
        "its newer spelling",
        "one that is deprecated",
        hint=["write:", "pm.field(static=True)"],
    )
    return field(static=True, **kwargs)


def refuse_not_called(cls: type) -> None:
    """Refuse a declaration that was not called: `x: Array = pm.buffer`.

    Raises:
        FieldError: if there is one. Its default would be a function of this library.
    """
    for name, value in vars(cls).items():
        # By identity: a default may be an array.
        if any(value is declares for declares in (field, buffer, static_field)):
            raise FieldError(
                f"{cls.__qualname__}.{name}: pm.{value.__name__} is not called",
                hint=f"{name}: ... = pm.{value.__name__}()",
            )


def refuse_mutable_default(cls: type, error: ValueError) -> None:
    """Raise the error for a default that `dataclasses` refuses because instances would share it.

    Raises:
        FieldError: if there is one.
    """
    for name, value in vars(cls).items():
        default: Any = getattr(value, "default", value)
        if name in inspect.get_annotations(cls) and type(default).__hash__ is None:
            kind = type(default).__name__
            made = kind if isinstance(default, (list, dict, set)) and not default else "lambda: ..."
            raise FieldError(
                f"{cls.__qualname__}.{name}: all instances would share the mutable default "
                f"{describe(default)}",
                hint=f"{name}: {kind} = pm.field(default_factory={made})",
            ) from error


def refuse_declaration(cls: type, name: str) -> NoReturn:
    """Raise the error for a field declaration that was assigned to an instance.

    Raises:
        FieldError: always.
    """
    raise FieldError(
        f"{cls.__qualname__}.{name}",
        "a value",
        "a field declaration, which belongs in the class body",
        hint=[
            "declare the field there, and assign its value:",
            f"class {cls.__name__}(pm.Module):",
            f"    {name}: ... = pm.field(...)",
        ],
    )


class _Abstract:
    """Marks, inside `Annotated`, an attribute that subclasses must provide."""

    def __init__(self, kind: str):
        self.kind = kind

    def __repr__(self) -> str:
        return self.kind


_INSTANCE = _Abstract("AbstractVar")
_CLASS = _Abstract("AbstractClassVar")

AbstractVar = Annotated[_T, _INSTANCE]
"""Annotates an attribute that every concrete subclass must have: `x: AbstractVar[int]`.

A subclass provides it as a field, a property or a class attribute. A class that still lacks one
cannot be instantiated.
"""

AbstractClassVar = Annotated[_T, _CLASS]
"""Annotates a class attribute that every concrete subclass must set: `n: AbstractClassVar[int]`."""


def abstract_kind(annotation: Any) -> str | None:
    """`AbstractVar` or `AbstractClassVar`, if an evaluated annotation is one; None if not."""
    marks = getattr(annotation, "__metadata__", ())
    return next((mark.kind for mark in marks if isinstance(mark, _Abstract)), None)


def declares(cls: type, name: str) -> bool:
    """Whether a class itself declares a field: annotates it, and `dataclasses` took it for one."""
    return name in vars(cls).get("__dataclass_fields__", ()) and (
        name in inspect.get_annotations(cls)
    )
